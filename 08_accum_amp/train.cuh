// Chapter 08: gradient accumulation and 16-bit formats. Base: 07_hybrid
//
// Accumulation: an update's samples go through the mesh in K rounds, each a whole schedule of
// micro-batches, whose gradients add up. Activations are a round's, so 1/K of them.
//
//   round 0: F0 F1 B0 F2 B1 ..   round 1: F0 F1 B0 ..  ..  round K-1: .. B3   all-reduce, update
//
// Formats: what GPUs multiply and send is Low (16 bits); what adds up over samples, replicas or
// updates is real (32), for a small number added to a large one of 8 or 11 bits changes nothing.
//
//   masters --round--> low W ---> a[l], logits --widen--> softmax, loss     real: masters, dW, v,
//      ^                  +-----> da[l] <--round, x scale-- dlogits         loss, softmax
//      +-- / scale <-- data all-reduce <-- dW (real) <-- da, a              Low: W, a, da, messages
//
// Whether the scaled gradients overflowed is decided once an update, by all ranks together and
// before anything changes, on the GPUs: the host only issues. See common/scaling.cuh.
#pragma once

#include "../common/gpu.cuh"
#include "../common/idx.h"
#include "../common/kernels.cuh"
#include "../common/mesh.cuh"
#include "../common/scaling.cuh"
#include "../common/sgd.h"

namespace ch08 {

struct Settings : MixedConfig {};

template <class Low>  // real: then nothing is rounded, and the masters are the only weights
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
    for (const Update& u : plan) rates_on_host.push_back(static_cast<real>(u.rate));
    rates.upload(rates_on_host, compute);
  }

  Result train() {
    rank.meet();  // a rank that still allocated could wait for a peer that waits for it
    warm_up();
    initialise();
    start.record(compute);
    for (int64_t t = 0; t < T; ++t) {
      step(t);
      if (mixed && (t + 1) % patience == 0) look_at_scale(t + 1);
      if (rank.progress_is_due(t, T)) rank.progress(t, T, loss_of(t), plan[t].samples);
    }
    stop.record(compute);
    return collect();
  }

 private:
  // ---- one step ----------------------------------------------------------------------------

  void step(int64_t t) {
    Range range("step " + std::to_string(t));
    const Update u = own_rows(plan[t]);  // of the batch, those of this rank's replica
    for (round = 0; round < K; ++round) {  // new; a round may be empty
      const Share rows = share(u.samples, round, K);
      for (const Work& work : table) {
        Range range(work.name());
        const auto [first, last] = here.stages[work.chunk * p + r];
        const Share part = share(rows.size(), work.micro, m);  // this micro-batch's rows of them
        const int64_t sample = u.first + rows.first + part.first;
        if (work.forward) forward_stage(first, last, work.micro, sample, part.size());
        else backward_stage(first, last, work.micro, sample, part.size(), t);
      }
    }
    compute.wait(reduced);           // for the last layer's sum, and so for all
    if (mixed) agree_on_overflow();  // new
    update(t);
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
      if (round == K - 1 && k == m - 1) all_reduce_gradient(l);  // nothing more will be added
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
    widen(logits.data(), a[L](k), int64_t{rows} * local.width[L], compute);
    if (split_classes) compute_split_loss(rows, scale);
    else softmax_loss(row_loss.data(), dlogits.data(), logits.data(), label, rows, shape.width[L],
                      scale, compute);
    narrow(da[L](k), dlogits.data(), int64_t{rows} * local.width[L], &state.data()->scale, compute);
    if (split_classes || s == 0)  // of whole logits all shards know the loss, and it counts once
      sum(losses + t, row_loss.data(), rows, scale, adds_up(k), compute);
  }

  // The logits stay where they are: the shards need the maximum and the sum of a row, no more.
  void compute_split_loss(int rows, double scale) {
    const Share u = units(shape, L, s, tp);
    softmax_largest(largest.data(), logits.data(), rows, u.size(), compute);
    tensor.all_reduce(largest.data(), rows, compute, ncclMax);
    softmax_total(total.data(), dlogits.data(), logits.data(), largest.data(), rows, u.size(),
                  compute);
    tensor.all_reduce(total.data(), rows, compute);
    softmax_loss_part(row_loss.data(), dlogits.data(), logits.data(), largest.data(), total.data(),
                      label, rows, u.size(), u.first, scale, compute);
  }

  // Gradients: an update's first micro-batch overwrites what the last one left, the others add.
  bool adds_up(int k) const { return round > 0 || k > 0; }
  void backward(int l, int k, int rows) {
    const int d_in = local.width[l], d_out = local.width[l + 1];
    if (l < L - 1) backward_relu(da[l + 1](k), a[l + 1](k), int64_t{rows} * d_out, compute);
    backward_weight(dweight(l), da[l + 1](k), a[l](k), rows, d_out, d_in, adds_up(k), blas);
    backward_bias(dbias(l), da[l + 1](k), rows, d_out, adds_up(k), compute);
    if (l > 0) backward_input(da[l](k), da[l + 1](k), weight(l), rows, d_out, d_in, blas);
    if (l > 0 && is_column(l)) sum_parts(da[l](k), l, int64_t{rows} * d_in);
  }

  // Over the shards, in the compute stream, whose next kernel needs the sum.
  void sum_parts(Low* x, int l, int64_t n) {
    Range range("sum " + std::to_string(l));
    tensor.all_reduce(x, n, compute);
  }

  // Over the replicas of this stage and shard, and nobody else: others have other parameters.
  // Once an update and parameter, in a stream of its own, while backward goes on below.
  void all_reduce_gradient(int l) {
    Range range("all-reduce " + std::to_string(l));
    complete.record(compute);
    communication.wait(complete);
    replicas.all_reduce(dweight(l), here.local(l + 1) - here.local(l), communication);
    reduced.record(communication);
  }

  // One rank's gradient may be too large where all others are fine. If each decided by itself,
  // replicas would drift apart, and stages would train at different times.
  void agree_on_overflow() {
    Range range("overflow");
    find_overflow(&state.data()->overflow, gradient, gradient.size(), compute);
    everyone.all_reduce(&state.data()->overflow, 1, compute, ncclMax);
  }

  // The rate goes by the updates applied so far, which only the GPUs know.
  void update(int64_t t) {
    Range range("update");
    update_scaled(parameters.data(), velocity.data(), weights(), gradient, parameters.size(),
                  rates.data(), settings.momentum, state, compute);
    next_scale(state.data(), scales + t, settings.dynamic_scale(), settings.scale_window, compute);
  }

  // ---- before and after the loop -----------------------------------------------------------

  void initialise() {
    initial_shard(shape, settings.seed, s, tp, parameters_on_host);
    here.upload(parameters, parameters_on_host, compute);
    replicas.broadcast(parameters.data(), parameters.size(), 0, compute);  // to be sure
    if (mixed) narrow(weights(), parameters, parameters.size(), nullptr, compute);
    state_on_host = {real(settings.initial_scale()), 0, 0, 0, 0, 0};
    state.upload(&state_on_host, 1, compute);
    scale_told = state_on_host.scale, told = 0;
    velocity.zero(compute);
    losses.zero(compute);  // where no loss is worked out, it adds nothing to the sum
    rank.wait(compute);
    links.forget_traffic();  // the warm-up's messages do not count
    replicas.traffic = tensor.traffic = everyone.traffic = {};
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

  // Tells what the scale did since the last time, and gives up if it does not help.
  void look_at_scale(int64_t end) {
    scales_on_host.resize(end - told);
    const size_t bytes = scales_on_host.size() * sizeof(real);
    CHECK(cudaMemcpyAsync(scales_on_host.data(), scales + told, bytes, cudaMemcpyDeviceToHost,
                          compute));
    state.download(&state_on_host, 1, compute);
    rank.wait(compute);
    const std::string story = scale_story(scales_on_host, told, scale_told);
    if (rank.rank == 0 && !rank.quiet) std::printf("%s", story.c_str());
    told = end;
    if (state_on_host.in_a_row >= patience)
      throw Error("the gradients of " + std::to_string(patience) + " updates in a row were not " +
                  "finite; " + std::to_string(state_on_host.applied) + " updates applied, loss " +
                  "scale " + shortest(scale_told) + "; a lower --lr or --precision fp32 may help");
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
    if (mixed) {
      look_at_scale(T);
      result.extra = {{"loss scale", shortest(scale_told)},
                      {"updates applied", std::to_string(state_on_host.applied)},
                      {"updates skipped", std::to_string(state_on_host.skipped)}};
    }
    links.wait(rank);
    result.bytes_by_kind = {{"data", replicas.traffic.bytes / std::max<int64_t>(T, 1)},
                            {"pipeline", links.bytes_sent() / std::max<int64_t>(T, 1)},
                            {"tensor", tensor.traffic.bytes / std::max<int64_t>(T, 1)},
                            {"overflow", everyone.traffic.bytes / std::max<int64_t>(T, 1)}};
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

  static constexpr bool mixed = !std::is_same_v<Low, real>;
  Low* weights() {  // rounded; [P_rs]
    if constexpr (mixed) return low;
    else return parameters;
  }
  Low* weight(int l) { return weights() + here.local(l); }          // [e_l+1, e_l]
  Low* bias(int l) { return weight(l) + local.weight_size(l); }     // [e_l+1]
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
  const int K = settings.accumulate;
  const int64_t parts = int64_t{dp} * K * m;                        // of a batch
  const int64_t b = (largest_batch(settings, data.size()) - 1) / parts + 1;
  const Placement here{local, stage_layers(shape, p * v), r, p};    // stages r, p + r, ..
  const std::vector<Work> table = schedule_table(settings.schedule, r, p, m, v);
  const std::vector<Update> plan = updates(settings, data.size());  // what each step reads
  const int64_t T = static_cast<int64_t>(plan.size());
  const std::vector<int32_t> order_on_host = sample_order(settings, data.size());
  // What is copied to the host outlives the streams: a wait that fails leaves the copy under way.
  std::vector<real> parameters_on_host, losses_on_host = std::vector<real>(T);
  std::vector<real> rates_on_host, scales_on_host;
  ScaleState state_on_host;
  real scale_told = 0;
  int64_t told = 0;    // of how many updates the scale was told
  int64_t summed = 0;  // of how many updates `losses` holds the global batch's
  int round = 0;       // of the update whose work is being issued
  Stream compute, communication;
  Blas blas{compute};
  // The three axes, each a group of the ranks that differ in that one place alone. Split from
  // the world in one order on all ranks.
  Comm replicas = rank.world.split(r * tp + s, d);
  Comm stages = rank.world.split(d * tp + s, r);
  Comm tensor = rank.world.split(d * p + r, s);
  Comm everyone = rank.world.split(0, rank.rank);
  Links links{stages, v > 1};
  Event start, stop, complete, reduced;
  Buffer<uint8_t> pixels{r == 0 ? data.size() * data.features : 0};  // [N, d_0] on stage 0
  Buffer<int32_t> labels{r == p - 1 ? data.size() : 0};       // [N] on the last stage
  Buffer<int32_t> order{r == 0 || r == p - 1 ? (int64_t)order_on_host.size() : 0};  // [samples]
  Buffer<real> parameters{here.local(L)};                     // [P_rs], the masters: W, b by layer
  Buffer<Low> low{mixed ? parameters.size() : 0};             // [P_rs], their rounding
  Buffer<real> gradient{parameters.size()};                   // [P_rs]
  Buffer<real> velocity{parameters.size()};                   // [P_rs], the momentum
  std::vector<RingOf<Low>> a, da;                             // a[l], da[l]: slots of [b, e_l]
  Buffer<int32_t> label{r == p - 1 ? b : 0};                  // [b] on the last stage
  Buffer<real> row_loss{label.size()}, largest{label.size()}, total{label.size()};  // [b] each
  Buffer<real> logits{label.size() * local.width[L]}, dlogits{logits.size()};  // [b, e_L] each
  Buffer<ScaleState> state{1};
  Buffer<real> rates{T}, scales{T};                           // [T]: by updates applied; by update
  Buffer<real> losses{T};                                    // [T], mean loss of each update
};

inline Result train(const Settings& settings, const Dataset& data, Rank& rank) {
  if constexpr (sizeof(real) == sizeof(float)) {  // wider masters have no 16-bit products
    if (settings.precision == Precision::fp16)
      return Trainer<__half>(settings, data, rank).train();
    if (settings.precision == Precision::bf16)
      return Trainer<__nv_bfloat16>(settings, data, rank).train();
  }
  return Trainer<real>(settings, data, rank).train();
}

}  // namespace ch08
