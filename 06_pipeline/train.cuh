// Chapter 06: the pipeline, micro-batches that keep all stages busy. Base: 04_layer_parallel
//
// An update's samples are split into m micro-batches, which follow each other through the stages:
// while rank 1 works on one, rank 0 works on the next. Their gradients add up to the whole
// batch's. Who does what when is a table, drawn in common/pipeline.cuh.
//
//   rank 0: W0 W1                rank 1: W2 W3                rank 2: W4
//   pixels -> a[0] a[1] a[2] ---link---> a[2] a[3] a[4] ---link---> a[4] a[5] -> loss <- labels
//                da[1] da[2] <---link--- da[2] da[3] da[4] <---link--- da[4] da[5]
//
// a[l] has a slot for every micro-batch between its forward and its backward: all m in GPipe, at
// most p-r on rank r in 1F1B. Transfers have streams of their own and overlap with compute.
#pragma once

#include "../common/gpu.cuh"
#include "../common/idx.h"
#include "../common/kernels.cuh"
#include "../common/pipeline.cuh"
#include "../common/sgd.h"

namespace ch06 {

struct Settings : PipelineConfig {};

class Trainer {
 public:
  Trainer(const Settings& settings, const Dataset& data, Rank& rank)
      : settings(settings), rank(rank), data(data) {
    for (int l = 0; l <= L; ++l) {
      const auto [activations, gradients] = slots_for(l, here, table, m);
      a.emplace_back(activations, b * shape.width[l]);
      da.emplace_back(gradients, b * shape.width[l]);
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
      if (rank.wants_progress(t, T)) rank.progress(t, T, loss_of(t), plan[t].samples);
    }
    stop.record(compute);
    return collect();
  }

 private:
  // ---- one step ----------------------------------------------------------------------------

  void step(int64_t t) {
    Range range("step " + std::to_string(t));
    const Update& u = plan[t];
    for (const Work& work : table) {                                       // new
      Range range(work.name());
      const auto [first, last] = here.stages[work.chunk * p + r];
      const Share part = share(u.samples, work.micro, m);  // this micro-batch's rows of the batch
      if (work.forward) forward_stage(first, last, work.micro, u.first + part.first, part.size());
      else backward_stage(first, last, work.micro, u.first + part.first, part.size(), t);
    }
    update(u.rate);
    if (p > 1) send_loss(t);
  }

  void forward_stage(int first, int last, int k, int64_t sample, int rows) {
    if (first == 0) load_pixels(a[0](k), pixels, order + sample, rows, shape.width[0], compute);
    else links.activations_in->receive(a[first], k, int64_t{rows} * shape.width[first], compute);
    for (int l = first; l < last; ++l) forward(l, k, rows);
    if (last < L)
      links.activations_out->send(a[last], k, int64_t{rows} * shape.width[last], compute);
  }

  void backward_stage(int first, int last, int k, int64_t sample, int rows, int64_t t) {
    if (last == L) compute_loss(t, k, sample, rows);
    else links.gradients_in->receive(da[last], k, int64_t{rows} * shape.width[last], compute);
    if (first > 0) compute.wait(da[first].done(k));  // until what was in its slot is sent
    for (int l = last - 1; l >= first; --l) backward(l, k, rows);
    if (last < L) da[last].done(k).record(compute);  // this slot, and a[first]'s, can be filled
    if (first > 0) a[first].done(k).record(compute);
    if (first > 0)
      links.gradients_out->send(da[first], k, int64_t{rows} * shape.width[first], compute);
  }

  // Rank 0 reports, and only the last rank knows the loss. At the step's end nobody waits for it.
  void send_loss(int64_t t) {
    if (r == p - 1) rank.world.send(losses + t, 1, 0, compute);
    if (r == 0) rank.world.recv(losses + t, 1, p - 1, compute);
  }

  void forward(int l, int k, int rows) {
    const int d_in = shape.width[l], d_out = shape.width[l + 1];
    forward_matmul(a[l + 1](k), a[l](k), weight(l), rows, d_out, d_in, blas);
    forward_bias(a[l + 1](k), bias(l), rows, d_out, l < L - 1, compute);
  }

  // The mean is over the whole batch, so micro-batches of any sizes add up to it.
  void compute_loss(int64_t t, int k, int64_t sample, int rows) {
    const double scale = 1.0 / plan[t].samples;
    load_labels(label, labels, order + sample, rows, compute);
    softmax_loss(row_loss.data(), da[L](k), a[L](k), label, rows, shape.width[L], scale, compute);
    sum(losses + t, row_loss.data(), rows, scale, k > 0, compute);
  }

  // Gradients: the first micro-batch overwrites what the last update left, the others add.
  void backward(int l, int k, int rows) {
    const int d_in = shape.width[l], d_out = shape.width[l + 1];
    if (l < L - 1) backward_relu(da[l + 1](k), a[l + 1](k), int64_t{rows} * d_out, compute);
    backward_weight(dweight(l), da[l + 1](k), a[l](k), rows, d_out, d_in, k > 0, blas);
    backward_bias(dbias(l), da[l + 1](k), rows, d_out, k > 0, compute);
    if (l > 0) backward_input(da[l](k), da[l + 1](k), weight(l), rows, d_out, d_in, blas);
  }

  void update(double rate) {
    Range range("update");
    update_sgd(parameters.data(), velocity.data(), gradient.data(), parameters.size(), rate,
               settings.momentum, compute);
  }

  // ---- before and after the loop -----------------------------------------------------------

  void initialise() {
    initial_parameters(shape, settings.seed, parameters_on_host);
    here.upload(parameters, parameters_on_host, compute);
    velocity.zero(compute);
    rank.wait(compute);
    links.forget_traffic();  // the warm-up's messages do not count
  }

  // The first use of a kernel, a matrix shape or a pair of ranks loads code and allocates. One
  // step before the clock starts gets that over with; initialise() then undoes what it did.
  void warm_up() {
    Range range("warm-up");  // its steps are none of the timeline's
    initialise();
    if (T > 0) step(0);
    rank.wait(compute);
  }

  double loss_of(int64_t t) {
    real& value = losses_on_host[t];
    rank.wait(compute);  // a copy to the host may wait too, but asks after no peer
    CHECK(cudaMemcpyAsync(&value, losses + t, sizeof value, cudaMemcpyDeviceToHost, compute));
    rank.wait(compute);
    return value;
  }

  Result collect() {
    Result result;
    links.wait(rank);
    result.bytes_sent_per_step = T ? links.bytes_sent() / T : 0;
    here.bring_to_rank_0(parameters_on_host, parameters, gradient, rank, compute);  // via gradient
    losses.download(losses_on_host.data(), losses.size(), compute);
    rank.wait(compute);
    if (r == 0) result.weights = parameters_on_host;
    result.losses.assign(losses_on_host.begin(), losses_on_host.end());
    result.step_seconds = T ? seconds_between(start, stop) / T : 0;
    result.peak_memory = memory_use().peak;
    rank.meet();  // likewise: to free memory early could stop the others' kernels
    return result;
  }

  // ---- state -------------------------------------------------------------------------------

  real* weight(int l) { return parameters + here.local(l); }        // [d_l+1, d_l]
  real* bias(int l) { return weight(l) + shape.weight_size(l); }    // [d_l+1]
  real* dweight(int l) { return gradient + here.local(l); }         // [d_l+1, d_l]
  real* dbias(int l) { return dweight(l) + shape.weight_size(l); }  // [d_l+1]
  const Settings& settings;
  Rank& rank;
  const Dataset& data;
  const Shape shape = network(settings, data.features);
  const int L = shape.layers(), r = rank.rank, p = rank.size;
  const int m = settings.microbatches, v = settings.chunks_on(p);
  const int64_t b = (largest_batch(settings, data.size()) - 1) / m + 1;  // the largest micro-batch
  const Placement here{shape, r, p, v};                             // stages r, p + r, ..
  const std::vector<Work> table = schedule_table(settings.schedule, r, p, m, v);
  const std::vector<Update> plan = updates(settings, data.size());  // what each step reads
  const int64_t T = static_cast<int64_t>(plan.size());
  const std::vector<int32_t> order_on_host = sample_order(settings, data.size());
  // What is copied to the host outlives the streams: a wait that fails leaves the copy under way.
  std::vector<real> parameters_on_host, losses_on_host = std::vector<real>(T);
  Stream compute;
  Blas blas{compute};
  Links links{rank.world, v > 1};
  Event start, stop;
  Buffer<uint8_t> pixels{r == 0 ? data.size() * data.features : 0};  // [N, d_0] on rank 0
  Buffer<int32_t> labels{r == p - 1 ? data.size() : 0};       // [N] on the last rank
  Buffer<int32_t> order{r == 0 || r == p - 1 ? (int64_t)order_on_host.size() : 0};  // [samples]
  Buffer<real> parameters{here.local(L)};                     // [P_r], layer by layer: W, b
  Buffer<real> gradient{parameters.size()};                   // [P_r]
  Buffer<real> velocity{parameters.size()};                   // [P_r], the momentum
  std::vector<Ring> a, da;                                    // a[l], da[l]: slots of [b, d_l]
  Buffer<int32_t> label{r == p - 1 ? b : 0};                  // [b] on the last rank
  Buffer<real> row_loss{r == p - 1 ? b : 0};                  // [b] on the last rank
  Buffer<real> losses{r == 0 || r == p - 1 ? T : 0};          // [T], mean loss of each update
};

inline Result train(const Settings& settings, const Dataset& data, Rank& rank) {
  return Trainer(settings, data, rank).train();
}

}  // namespace ch06
