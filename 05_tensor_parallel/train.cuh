// Chapter 05: one layer's matrix split over GPUs. Base: 01_single_gpu
//
// All ranks see all samples; each has some units u of every odd width, and so a part of each W:
//
//           column layer (even): W[u, :], b[u]     row layer (odd): W[:, u], all of b
//   a[0] --all--> x W^T + b, ReLU --only u--> x W^T --a part--> all-reduce, + b, ReLU --all--> ...
//   <--all-- all-reduce <--a part-- dy W <--only u-- dy W <--all-- ...
// A unit's ReLU needs no other unit, so a column layer makes just what its row layer reads: the
// pair has one sum forward and one backward, which layer 0 is spared: da[0] is not wanted.
#pragma once

#include "../common/gpu.cuh"
#include "../common/idx.h"
#include "../common/kernels.cuh"
#include "../common/ranks.cuh"
#include "../common/shard.h"

namespace ch05 {

struct Settings : Config {};

class Trainer {
 public:
  Trainer(const Settings& settings, const Dataset& data, Rank& rank)
      : settings(settings), rank(rank), data(data) {
    for (int l = 0; l <= L; ++l) {
      a.emplace_back(int64_t{B} * local.width[l]);
      da.emplace_back(l == 0 ? 0 : int64_t{B} * local.width[l]);  // the data needs no gradient
    }
    pixels.upload(data.pixels, compute);
    labels.upload(data.labels, compute);
    order.upload(order_on_host, compute);
  }

  Result train() {
    rank.meet();  // a rank that still allocated could wait for a peer that waits for it
    warm_up();
    initialise();
    tensor.traffic = {};  // from here on: what the steps send
    start.record(compute);
    for (int64_t t = 0; t < T; ++t) {
      step(t);
      if (rank.progress_is_due(t, T)) rank.progress(t, T, losses_from(t, 1)[0], plan[t].samples);
    }
    stop.record(compute);
    return collect();
  }

 private:
  // ---- one step ----------------------------------------------------------------------------

  void step(int64_t t) {
    Range range("step " + std::to_string(t));
    const Update& u = plan[t];
    load(u);
    for (int l = 0; l < L; ++l) forward(l, u.samples);
    compute_loss(t, u.samples);
    for (int l = L - 1; l >= 0; --l) backward(l, u.samples);
    update(u.rate);
  }

  void load(const Update& u) {
    Range range("load");
    load_pixels(a[0].data(), pixels, order + u.first, u.samples, shape.width[0], compute);
    load_labels(label, labels, order + u.first, u.samples, compute);
  }

  void forward(int l, int rows) {
    Range range("forward " + std::to_string(l));
    const int d_in = local.width[l], d_out = local.width[l + 1];
    forward_matmul(a[l + 1].data(), a[l].data(), weight(l), rows, d_out, d_in, blas);
    if (is_row(l)) sum_parts(a[l + 1].data(), l, int64_t{rows} * d_out);  // new: before the bias
    forward_bias(a[l + 1].data(), bias(l), rows, d_out, l < L - 1, compute);
  }

  void compute_loss(int64_t t, int rows) {
    Range range("loss");
    if (is_column(L - 1)) compute_split_loss(rows);
    else softmax_loss(row_loss.data(), da[L].data(), a[L].data(), label, rows, shape.width[L],
                      1.0 / rows, compute);
    sum(losses + t, row_loss.data(), rows, 1.0 / rows, 0, compute);
  }

  // New. The logits stay where they are: the ranks need the maximum and the sum of a row, no more.
  void compute_split_loss(int rows) {
    const Share u = units(shape, L, rank.rank, rank.size);
    softmax_largest(largest.data(), a[L].data(), rows, u.size(), compute);
    tensor.all_reduce(largest.data(), rows, compute, ncclMax);
    softmax_total(total.data(), da[L].data(), a[L].data(), largest.data(), rows, u.size(), compute);
    tensor.all_reduce(total.data(), rows, compute);
    softmax_loss_part(row_loss.data(), da[L].data(), a[L].data(), largest.data(), total.data(),
                      label, rows, u.size(), u.first, 1.0 / rows, compute);
  }

  void backward(int l, int rows) {
    Range range("backward " + std::to_string(l));
    const int d_in = local.width[l], d_out = local.width[l + 1];
    if (l < L - 1) backward_relu(da[l + 1].data(), a[l + 1].data(), int64_t{rows} * d_out, compute);
    backward_weight(dweight(l), da[l + 1].data(), a[l].data(), rows, d_out, d_in, 0, blas);
    backward_bias(dbias(l), da[l + 1].data(), rows, d_out, 0, compute);
    if (l > 0) backward_input(da[l].data(), da[l + 1].data(), weight(l), rows, d_out, d_in, blas);
    if (l > 0 && is_column(l)) sum_parts(da[l].data(), l, int64_t{rows} * d_in);  // new
  }

  // The next kernel needs the sum, so nothing hides this. A bias counts once: it comes after it.
  void sum_parts(real* x, int l, int64_t n) {
    Range range("all-reduce " + std::to_string(l));
    tensor.all_reduce(x, n, compute);
  }

  // No sums: a rank has the whole gradient of what it owns, copies of a bias the same bits of it.
  void update(double rate) {
    Range range("update");
    update_sgd(parameters.data(), velocity.data(), gradient.data(), local.parameters(), rate,
               settings.momentum, compute);
  }

  // ---- before and after the loop -----------------------------------------------------------

  void initialise() {
    initial_shard(shape, settings.seed, rank.rank, rank.size, parameters_on_host);
    parameters.upload(parameters_on_host, compute);
    velocity.zero(compute);
    rank.wait(compute);
  }

  // The first use of a kernel or a matrix shape loads code and allocates. One step before the
  // clock starts gets that over with; initialise() then undoes what it did.
  void warm_up() {
    Range range("warm-up");  // its steps are none of the timeline's
    initialise();
    if (T > 0) step(0), losses_from(0, 1);
    rank.wait(compute);
  }

  // Of split classes each rank has the loss of its own labels' rows, so all ranks call this.
  const std::vector<real>& losses_from(int64_t t, int64_t n) {
    losses_on_host.resize(n);
    shown.copy(losses + t, n, compute);
    if (is_column(L - 1)) rank.world.all_reduce(shown.data(), n, compute);
    rank.wait(compute);  // a copy to the host may wait too, but asks after no peer
    shown.download(losses_on_host.data(), n, compute);
    rank.wait(compute);
    return losses_on_host;
  }

  // Rank 0's host puts the shards together, one by one: no GPU ever holds the whole network.
  Result collect() {
    Result result;
    for (const real loss : losses_from(0, T)) result.losses.push_back(loss);
    if (rank.rank > 0) rank.world.send(parameters.data(), local.parameters(), 0, compute);
    for (int r = 0; rank.rank == 0 && r < rank.size; ++r) {
      parameters_on_host.resize(shard(shape, r, rank.size).parameters());
      if (r > 0) rank.world.recv(parameters.data(), parameters_on_host.size(), r, compute);
      parameters.download(parameters_on_host.data(), parameters_on_host.size(), compute);
      rank.wait(compute);
      place_shard(result.weights, parameters_on_host, shape, r, rank.size);
    }
    rank.wait(compute);
    result.step_seconds = T ? seconds_between(start, stop) / T : 0;
    result.bytes_sent_per_step = T ? tensor.traffic.bytes / T : 0;
    result.peak_memory = memory_use().peak;
    rank.meet();  // likewise: to free memory early could stop the others' kernels
    return result;
  }

  // ---- state -------------------------------------------------------------------------------

  real* weight(int l) { return parameters + local.weight_at(l); }   // [e_l+1, e_l]
  real* bias(int l) { return parameters + local.bias_at(l); }       // [e_l+1]
  real* dweight(int l) { return gradient + local.weight_at(l); }    // [e_l+1, e_l]
  real* dbias(int l) { return gradient + local.bias_at(l); }        // [e_l+1]

  const Settings& settings;
  Rank& rank;
  const Dataset& data;
  const Shape shape = network(settings, data.features), local = shard(shape, rank.rank, rank.size);
  const int L = shape.layers(), B = largest_batch(settings, data.size());
  const std::vector<Update> plan = updates(settings, data.size());  // what each step reads
  const int64_t T = static_cast<int64_t>(plan.size());
  const std::vector<int32_t> order_on_host = sample_order(settings, data.size());
  // What is copied to the host outlives the streams: a wait that fails leaves the copy under way.
  std::vector<real> parameters_on_host, losses_on_host;

  Stream compute;
  Blas blas{compute};
  Event start, stop;
  Comm tensor = rank.world.split(0, rank.rank);               // all ranks, only for the steps
  Buffer<uint8_t> pixels{data.size() * data.features};        // [N, d_0]
  Buffer<int32_t> labels{data.size()};                        // [N]
  Buffer<int32_t> order{(int64_t)order_on_host.size()};       // [samples of all updates]
  Buffer<real> parameters{shard(shape, rank.size - 1, rank.size).parameters()};  // [largest P]
  Buffer<real> gradient{local.parameters()};                  // [local P], about P/p
  Buffer<real> velocity{local.parameters()};                  // [local P], the momentum
  std::vector<Buffer<real>> a, da;                            // [B, e_l]; e_l: local width l
  Buffer<int32_t> label{B};                                   // [B]
  Buffer<real> row_loss{B}, largest{B}, total{B};             // [B] each
  Buffer<real> losses{T}, shown{T};                           // [T], mean loss of each update
};

inline Result train(const Settings& settings, const Dataset& data, Rank& rank) {
  return Trainer(settings, data, rank).train();
}

}  // namespace ch05
