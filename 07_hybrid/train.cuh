// Chapter 07: a mesh of data, pipeline and tensor parallelism. Base: 06_pipeline
//
// D x P x T ranks, rank (d P + p) T + t. Replica d has some rows of each batch, stage p some
// layers, shard t some units of every odd width. Three groups a rank, one an axis:
//
//   D = P = T = 2         stage 0, shards 0 1          stage 1, shards 0 1
//   replica 0, rows 0..3   [0 -tensor- 1]  --links-->   [2 -tensor- 3]   tensor: sums of
//               |            |         |                  |         |    activations, each layer
//               data         |         |                  |         |    links: 0->2, 1->3, each
//               |            |         |                  |         |    micro-batch
//   replica 1, rows 4..7   [4 -tensor- 5]  --links-->   [6 -tensor- 7]   data: 0+4, 1+5, 2+6, 3+7,
//                                                                        once an update
// A border between stages may cut a column-row pair: units of the odd width there stay with their
// shard, so each sends its own to the same shard of the next stage, and nobody gathers.
#pragma once

#include "../common/gpu.cuh"
#include "../common/idx.h"
#include "../common/kernels.cuh"
#include "../common/mesh.cuh"
#include "../common/sgd.h"

namespace ch07 {

struct Settings : MeshConfig {};

class Trainer {
 public:
  Trainer(const Settings& settings, const Dataset& data, Rank& rank)
      : settings(settings), rank(rank), data(data) {
    for (int l = 0; l <= L; ++l) {
      const auto [activations, gradients] = slots_for(l, here, table, m);
      a.emplace_back(activations, b * local.width[l]);
      da.emplace_back(gradients, b * local.width[l]);
    }
    if (pixels.size()) pixels.upload(data.pixels, compute);
    if (labels.size()) labels.upload(data.labels, compute);
    if (order.size()) order.upload(order_on_host, compute);
  }

  Result train() {
    rank.meet();  // a rank that still allocated could wait for a peer that waits for it
    warm_up();
    initialise();
    start.record(compute);
    for (int64_t t = 0; t < T; ++t) {
      step(t);
      if (rank.progress_is_due(t, T)) rank.progress(t, T, loss_of(t), plan[t].samples);
    }
    stop.record(compute);
    return collect();
  }

 private:
  // ---- one step ----------------------------------------------------------------------------

  void step(int64_t t) {
    Range range("step " + std::to_string(t));
    const Update u = own_rows(plan[t]);  // new: of the batch, those of this rank's replica
    for (const Work& work : table) {
      Range range(work.name());
      const auto [first, last] = here.stages[work.chunk * p + r];
      const Share part = share(u.samples, work.micro, m);  // this micro-batch's rows of them
      if (work.forward) forward_stage(first, last, work.micro, u.first + part.first, part.size());
      else backward_stage(first, last, work.micro, u.first + part.first, part.size(), t);
    }
    update(u.rate);
  }

  // By the replica alone: its stages and shards work on the same samples. May be empty.
  Update own_rows(const Update& u) const {
    const Share rows = share(u.samples, d, dp);
    return {u.first + rows.first, static_cast<int>(rows.size()), u.rate, u.epoch};
  }

  void forward_stage(int first, int last, int k, int64_t sample, int rows) {
    if (first == 0) load_pixels(a[0](k), pixels, order + sample, rows, shape.width[0], compute);
    else links.activations_in->receive(a[first], k, int64_t{rows} * local.width[first], compute);
    for (int l = first; l < last; ++l) forward(l, k, rows);
    if (last < L)
      links.activations_out->send(a[last], k, int64_t{rows} * local.width[last], compute);
  }

  void backward_stage(int first, int last, int k, int64_t sample, int rows, int64_t t) {
    if (last == L) compute_loss(t, k, sample, rows);
    else links.gradients_in->receive(da[last], k, int64_t{rows} * local.width[last], compute);
    if (first > 0) compute.wait(da[first].done(k));  // until what was in its slot is sent
    for (int l = last - 1; l >= first; --l) {
      backward(l, k, rows);
      if (k == m - 1) all_reduce_gradient(l);  // new: nothing will be added to it any more
    }
    if (last < L) da[last].done(k).record(compute);  // this slot, and a[first]'s, can be filled
    if (first > 0) a[first].done(k).record(compute);
    if (first > 0)
      links.gradients_out->send(da[first], k, int64_t{rows} * local.width[first], compute);
  }

  void forward(int l, int k, int rows) {
    const int d_in = local.width[l], d_out = local.width[l + 1];
    forward_matmul(a[l + 1](k), a[l](k), weight(l), rows, d_out, d_in, blas);
    if (is_row(l)) sum_parts(a[l + 1](k), l, int64_t{rows} * d_out);
    forward_bias(a[l + 1](k), bias(l), rows, d_out, l < L - 1, compute);
  }

  // The mean is over the whole batch, so micro-batches and replicas of any sizes add up to it.
  void compute_loss(int64_t t, int k, int64_t sample, int rows) {
    const double scale = 1.0 / plan[t].samples;
    load_labels(label, labels, order + sample, rows, compute);
    if (split_classes) compute_split_loss(k, rows, scale);
    else softmax_loss(row_loss.data(), da[L](k), a[L](k), label, rows, shape.width[L], scale,
                      compute);
    if (split_classes || s == 0)  // of whole logits all shards know the loss, and it counts once
      sum(losses + t, row_loss.data(), rows, scale, k > 0, compute);
  }

  // The logits stay where they are: the shards need the maximum and the sum of a row, no more.
  void compute_split_loss(int k, int rows, double scale) {
    const Share u = units(shape, L, s, tp);
    softmax_largest(largest.data(), a[L](k), rows, u.size(), compute);
    tensor.all_reduce(largest.data(), rows, compute, ncclMax);
    softmax_total(total.data(), da[L](k), a[L](k), largest.data(), rows, u.size(), compute);
    tensor.all_reduce(total.data(), rows, compute);
    softmax_loss_part(row_loss.data(), da[L](k), a[L](k), largest.data(), total.data(), label, rows,
                      u.size(), u.first, scale, compute);
  }

  // Gradients: the first micro-batch overwrites what the last update left, the others add.
  void backward(int l, int k, int rows) {
    const int d_in = local.width[l], d_out = local.width[l + 1];
    if (l < L - 1) backward_relu(da[l + 1](k), a[l + 1](k), int64_t{rows} * d_out, compute);
    backward_weight(dweight(l), da[l + 1](k), a[l](k), rows, d_out, d_in, k > 0, blas);
    backward_bias(dbias(l), da[l + 1](k), rows, d_out, k > 0, compute);
    if (l > 0) backward_input(da[l](k), da[l + 1](k), weight(l), rows, d_out, d_in, blas);
    if (l > 0 && is_column(l)) sum_parts(da[l](k), l, int64_t{rows} * d_in);
  }

  // Over the shards, in the compute stream, whose next kernel needs the sum.
  void sum_parts(real* x, int l, int64_t n) {
    Range range("sum " + std::to_string(l));
    tensor.all_reduce(x, n, compute);
  }

  // New. Over the replicas of this stage and shard, and nobody else: others have other parameters.
  // Once an update and parameter, in a stream of its own, while backward goes on below.
  void all_reduce_gradient(int l) {
    Range range("all-reduce " + std::to_string(l));
    complete.record(compute);
    communication.wait(complete);
    replicas.all_reduce(dweight(l), here.local(l + 1) - here.local(l), communication);
    reduced.record(communication);
  }

  // `compute` waits for the last layer's sum, and so for all.
  void update(double rate) {
    Range range("update");
    compute.wait(reduced);
    update_sgd(parameters.data(), velocity.data(), gradient.data(), parameters.size(), rate,
               settings.momentum, compute);
  }

  // ---- before and after the loop -----------------------------------------------------------

  void initialise() {
    initial_shard(shape, settings.seed, s, tp, parameters_on_host);
    here.upload(parameters, parameters_on_host, compute);
    replicas.broadcast(parameters.data(), parameters.size(), 0, compute);  // to be sure
    velocity.zero(compute);
    losses.zero(compute);  // where no loss is worked out, it adds nothing to the sum
    rank.wait(compute);
    links.forget_traffic();  // the warm-up's messages do not count
    replicas.traffic = tensor.traffic = {};
  }

  // The first use of a kernel, a matrix shape or a pair of ranks loads code and allocates. One
  // step before the clock starts gets that over with; initialise() then undoes what it did. A
  // short last batch gets one too, for a replica may have rows of it and none of the others.
  void warm_up() {
    Range range("warm-up");  // its steps are none of the timeline's
    initialise();
    for (int64_t t = 0; t < T && plan[t].epoch == 0; ++t)
      if (t == 0 || plan[t].samples < plan[0].samples) step(t);
    rank.wait(compute);
  }

  // Adds up the parts of the losses since the last call: of all replicas, of split classes.
  void sum_losses(int64_t end) {
    rank.world.all_reduce(losses + summed, end - summed, compute);
    summed = end;
  }

  double loss_of(int64_t t) {
    sum_losses(t + 1);
    real& value = losses_on_host[t];
    rank.wait(compute);  // a copy to the host may wait too, but asks after no peer
    CHECK(cudaMemcpyAsync(&value, losses + t, sizeof value, cudaMemcpyDeviceToHost, compute));
    rank.wait(compute);
    return value;
  }

  Result collect() {
    sum_losses(T);
    Result result;
    links.wait(rank);
    result.bytes_by_kind = {{"data", replicas.traffic.bytes / std::max<int64_t>(T, 1)},
                            {"pipeline", links.bytes_sent() / std::max<int64_t>(T, 1)},
                            {"tensor", tensor.traffic.bytes / std::max<int64_t>(T, 1)}};
    for (const auto& [kind, bytes] : result.bytes_by_kind) result.bytes_sent_per_step += bytes;
    bring_mesh_to_rank_0(result.weights, parameters_on_host, parameters, gradient, shape, here, tp,
                         rank, compute);
    losses.download(losses_on_host.data(), T, compute);
    rank.wait(compute);
    result.losses.assign(losses_on_host.begin(), losses_on_host.end());
    result.step_seconds = T ? seconds_between(start, stop) / T : 0;
    result.peak_memory = memory_use().peak;
    rank.meet();  // likewise: to free memory early could stop the others' kernels
    return result;
  }

  // ---- state -------------------------------------------------------------------------------

  real* weight(int l) { return parameters + here.local(l); }        // [e_l+1, e_l]
  real* bias(int l) { return weight(l) + local.weight_size(l); }    // [e_l+1]
  real* dweight(int l) { return gradient + here.local(l); }         // [e_l+1, e_l]
  real* dbias(int l) { return dweight(l) + local.weight_size(l); }  // [e_l+1]

  const Settings& settings;
  Rank& rank;
  const Dataset& data;
  const Shape shape = network(settings, data.features);
  const int dp = settings.replicas(), p = settings.pp, tp = settings.tp;
  const int d = rank.rank / tp / p, r = rank.rank / tp % p, s = rank.rank % tp;  // its place
  const Shape local = shard(shape, s, tp);  // e_l: d_l, or a part if l is odd
  const int L = shape.layers();
  const bool split_classes = tp > 1 && is_column(L - 1);
  const int m = settings.microbatches, v = settings.chunks_on(p);
  const int64_t b = (largest_batch(settings, data.size()) - 1) / (int64_t{dp} * m) + 1;
  const Placement here{local, stage_layers(shape, p * v), r, p};    // stages r, p + r, ..
  const std::vector<Work> table = schedule_table(settings.schedule, r, p, m, v);
  const std::vector<Update> plan = updates(settings, data.size());  // what each step reads
  const int64_t T = static_cast<int64_t>(plan.size());
  const std::vector<int32_t> order_on_host = sample_order(settings, data.size());
  // What is copied to the host outlives the streams: a wait that fails leaves the copy under way.
  std::vector<real> parameters_on_host, losses_on_host = std::vector<real>(T);
  int64_t summed = 0;  // of how many updates `losses` holds the global batch's
  Stream compute, communication;
  Blas blas{compute};
  // New: the three axes, each a group of the ranks that differ in that one place alone. Split from
  // the world in one order on all ranks.
  Comm replicas = rank.world.split(r * tp + s, d);
  Comm stages = rank.world.split(d * tp + s, r);
  Comm tensor = rank.world.split(d * p + r, s);
  Links links{stages, v > 1};
  Event start, stop, complete, reduced;
  Buffer<uint8_t> pixels{r == 0 ? data.size() * data.features : 0};  // [N, d_0] on stage 0
  Buffer<int32_t> labels{r == p - 1 ? data.size() : 0};       // [N] on the last stage
  Buffer<int32_t> order{r == 0 || r == p - 1 ? (int64_t)order_on_host.size() : 0};  // [samples]
  Buffer<real> parameters{here.local(L)};                     // [P_rs], layer by layer: W, b
  Buffer<real> gradient{parameters.size()};                   // [P_rs]
  Buffer<real> velocity{parameters.size()};                   // [P_rs], the momentum
  std::vector<Ring> a, da;                                    // a[l], da[l]: slots of [b, e_l]
  Buffer<int32_t> label{r == p - 1 ? b : 0};                  // [b] on the last stage
  Buffer<real> row_loss{label.size()}, largest{label.size()}, total{label.size()};  // [b] each
  Buffer<real> losses{T};                                    // [T], mean loss of each update
};

inline Result train(const Settings& settings, const Dataset& data, Rank& rank) {
  return Trainer(settings, data, rank).train();
}

}  // namespace ch07
