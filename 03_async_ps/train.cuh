// Chapter 03: the parameter server. Base: 02_data_parallel
//
// Rank 0, the server, holds the parameters and their momentum. Ranks 1 .. p-1, the workers, hold
// a copy of the parameters, a gradient and the data set. One round of worker r:
//
//   worker r   pull | forward, backward at what it pulled | push | . . wait . . . . | pull | ...
//               ^ parameters, batch number                   v gradient, loss        ^
//   server   send r | . . . . . . . . . . . . . . . . receive r | update | snapshot | send r | ...
//
// sync: an update needs a share of one batch from every worker. async: a whole batch from whoever
// is first, so nobody waits for a slow one, but a gradient is that of older parameters: its *age*
// is the number of updates between its pull and its own. ssp: async, but no worker may get more
// than S batches ("clocks") ahead of the slowest.
#pragma once

#include "../common/gpu.cuh"
#include "../common/idx.h"
#include "../common/kernels.cuh"
#include "../common/ranks.cuh"
#include "../common/sgd.h"
#include "server.cuh"

namespace ch03 {

class Trainer {  // a worker; the server is in server.cuh
 public:
  Trainer(const Settings& settings, const Dataset& data, Rank& rank)
      : settings(settings), rank(rank), data(data) {
    for (int l = 0; l <= L; ++l) {
      a.emplace_back(int64_t{b} * shape.width[l]);
      da.emplace_back(l == 0 ? 0 : int64_t{b} * shape.width[l]);  // the data needs no gradient
    }
    pixels.upload(data.pixels, compute);
    labels.upload(data.labels, compute);
    order.upload(order_on_host, compute);
  }

  Result train() {
    rank.meet();  // a rank that still allocated could wait for a peer that waits for it
    warm_up();
    for (int64_t t; (t = pull()) < T;) step(t);
    rank.meet();  // likewise: who has no more work must not free memory yet
    return collect();
  }

 protected:
  // ---- one step ----------------------------------------------------------------------------

  void step(int64_t t) {
    Range range("step " + std::to_string(t));
    for (int i = 0; i < repeats; ++i) compute_gradient(t);
    push();  // new: the next batch comes with the next pull, on the same stream
  }

  virtual void compute_gradient(int64_t t) {  // virtual: a test pushes gradients that it knows
    const Update u = own_rows(plan[t]);
    load(u);
    for (int l = 0; l < L; ++l) forward(l, u.samples);
    compute_loss(u.samples, plan[t].samples);
    for (int l = L - 1; l >= 0; --l) backward(l, u.samples);
  }

  // This rank's part of a batch. In sync mode it may be empty: the rank then pushes zeros.
  Update own_rows(const Update& u) const {
    const Share rows = sync ? share(u.samples, me, W) : Share{0, u.samples};
    return {u.first + rows.first, static_cast<int>(rows.size()), u.rate, u.epoch};
  }

  void load(const Update& u) {
    Range range("load");
    load_pixels(a[0].data(), pixels, order + u.first, u.samples, shape.width[0], compute);
    load_labels(label, labels, order + u.first, u.samples, compute);
  }

  void forward(int l, int rows) {
    Range range("forward " + std::to_string(l));
    const int d_in = shape.width[l], d_out = shape.width[l + 1];
    forward_matmul(a[l + 1].data(), a[l].data(), weight(l), rows, d_out, d_in, blas);
    forward_bias(a[l + 1].data(), bias(l), rows, d_out, l < L - 1, compute);
  }

  // Divided by the whole batch, not by this rank's rows: then the workers' sum is the mean.
  void compute_loss(int rows, int samples) {
    Range range("loss");
    softmax_loss(row_loss.data(), da[L].data(), a[L].data(), label, rows, shape.width[L],
                 1.0 / samples, compute);
    sum(gradient + P, row_loss.data(), rows, 1.0 / samples, 0, compute);
  }

  void backward(int l, int rows) {
    Range range("backward " + std::to_string(l));
    const int d_in = shape.width[l], d_out = shape.width[l + 1];
    if (l < L - 1) backward_relu(da[l + 1].data(), a[l + 1].data(), int64_t{rows} * d_out, compute);
    backward_weight(dweight(l), da[l + 1].data(), a[l].data(), rows, d_out, d_in, 0, blas);
    backward_bias(dbias(l), da[l + 1].data(), rows, d_out, 0, compute);
    if (l > 0) backward_input(da[l].data(), da[l + 1].data(), weight(l), rows, d_out, d_in, blas);
  }

  void push() {
    Range range("push");
    line[me].send(gradient.data(), P + 1, 0, compute);
  }

  // The batch to compute, T for none. Only the server knows who is free, so the host waits for
  // its word: the one wait inside a step.
  int64_t pull() {
    Range range("pull");
    {
      Group both;
      line[me].recv(parameters.data(), P, 0, compute);
      line[me].recv(number.data(), 1, 0, compute);
    }
    rank.wait(compute);  // a copy to the host may wait too, but asks after no peer
    number.download(&number_on_host, 1, compute);
    rank.wait(compute);
    return number_on_host;
  }

  // ---- before and after the loop -----------------------------------------------------------

  // The first use of a kernel, a matrix shape or a connection loads code and allocates. One round
  // before the clock starts gets that over with; the server forgets it.
  void warm_up() {
    Range range("warm-up");  // its steps are none of the timeline's
    if (pull() < T) {
      for (int64_t t = 0; t < T && plan[t].epoch == 0; ++t)  // a whole batch and a short last one
        if (t == 0 || plan[t].samples < plan[0].samples) compute_gradient(t);
      push();
    }
    rank.wait(compute);
    line[me].traffic = {};  // the report is of the steps
  }

  Result collect() {
    Result result;
    result.bytes_sent_per_step = T ? line[me].traffic.bytes / T : 0;
    result.peak_memory = memory_use().peak;
    return result;
  }

  // ---- state -------------------------------------------------------------------------------

  real* weight(int l) { return parameters + shape.weight_at(l); }   // [d_l+1, d_l]
  real* bias(int l) { return parameters + shape.bias_at(l); }       // [d_l+1]
  real* dweight(int l) { return gradient + shape.weight_at(l); }    // [d_l+1, d_l]
  real* dbias(int l) { return gradient + shape.bias_at(l); }        // [d_l+1]

  const Settings& settings;
  Rank& rank;
  const Dataset& data;
  const Shape shape = network(settings, data.features);
  const int64_t P = shape.parameters();
  const int L = shape.layers(), B = largest_batch(settings, data.size());
  const int W = rank.size - 1, me = rank.rank - 1;
  const bool sync = settings.mode == Mode::sync;
  const int b = sync ? (B - 1) / W + 1 : B;                   // a rank's rows of a batch, at most
  const int slowdown = settings.slowdown ? settings.slowdown : 4;
  const int repeats = rank.rank == settings.slow_worker ? slowdown : 1;
  const std::vector<Update> plan = updates(settings, data.size());  // what each batch reads
  const int64_t T = static_cast<int64_t>(plan.size());
  const std::vector<int32_t> order_on_host = sample_order(settings, data.size());
  int32_t number_on_host = 0;  // a member: a wait that fails leaves the copy into it under way

  std::vector<Comm> line = lines(rank);
  Stream compute;
  Blas blas{compute};
  Buffer<uint8_t> pixels{data.size() * data.features};        // [N, d_0]
  Buffer<int32_t> labels{data.size()};                        // [N]
  Buffer<int32_t> order{(int64_t)order_on_host.size()};       // [samples of all updates]
  Buffer<real> parameters{P};                                 // [P], layer by layer: W, b; pulled
  Buffer<real> gradient{P + 1};                               // [P + 1], the last is the loss
  Buffer<int32_t> number{1};                                  // of the batch to compute
  std::vector<Buffer<real>> a, da;                            // a[l], da[l]: [b, d_l]
  Buffer<int32_t> label{b};                                   // [b]
  Buffer<real> row_loss{b};                                   // [b]
};

inline Result train(const Settings& settings, const Dataset& data, Rank& rank) {
  if (rank.rank == 0) return Server(settings, data, rank).train();
  return Trainer(settings, data, rank).train();
}

}  // namespace ch03
