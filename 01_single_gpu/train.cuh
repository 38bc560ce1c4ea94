// Chapter 01: mini-batch SGD on a single GPU. Base: none
//
// One GPU holds everything. A step reads a batch of B samples and walks the network twice:
//
//   pixels --load--> a[0] --W0,b0,ReLU--> a[1] --W1,b1,ReLU--> ... --> a[L] = logits
//                     [B,d_0]             [B,d_1]                      [B,d_L]     |
//                                                                          softmax, loss
//   dW0,db0 <-------------- da[1] <---------------- da[2] <---- ... <-- da[L]      |
//
// then moves every parameter against its gradient: v = mu v + g, w = w - lr v.
// The host only issues work to one stream and never waits inside a step.
#pragma once

#include "../common/gpu.cuh"
#include "../common/idx.h"
#include "../common/kernels.cuh"
#include "../common/ranks.cuh"
#include "../common/sgd.h"

namespace ch01 {

struct Settings : Config {};

class Trainer {
 public:
  Trainer(const Settings& settings, const Dataset& data, Rank& rank)
      : settings(settings), rank(rank), data(data) {
    for (int l = 0; l <= L; ++l) {
      a.emplace_back(int64_t{B} * shape.width[l]);
      da.emplace_back(l == 0 ? 0 : int64_t{B} * shape.width[l]);  // the data needs no gradient
    }
    pixels.upload(data.pixels, compute);
    labels.upload(data.labels, compute);
    order.upload(order_on_host, compute);
  }

  Result train() {
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
    const int d_in = shape.width[l], d_out = shape.width[l + 1];
    forward_matmul(a[l + 1].data(), a[l].data(), weight(l), rows, d_out, d_in, blas);
    forward_bias(a[l + 1].data(), bias(l), rows, d_out, l < L - 1, compute);
  }

  void compute_loss(int64_t t, int rows) {
    Range range("loss");
    softmax_loss(row_loss.data(), da[L].data(), a[L].data(), label, rows, shape.width[L],
                 1.0 / rows, compute);
    sum(losses + t, row_loss.data(), rows, 1.0 / rows, 0, compute);
  }

  void backward(int l, int rows) {
    Range range("backward " + std::to_string(l));
    const int d_in = shape.width[l], d_out = shape.width[l + 1];
    if (l < L - 1) backward_relu(da[l + 1].data(), a[l + 1].data(), int64_t{rows} * d_out, compute);
    backward_weight(dweight(l), da[l + 1].data(), a[l].data(), rows, d_out, d_in, 0, blas);
    backward_bias(dbias(l), da[l + 1].data(), rows, d_out, 0, compute);
    if (l > 0) backward_input(da[l].data(), da[l + 1].data(), weight(l), rows, d_out, d_in, blas);
  }

  void update(double rate) {
    Range range("update");
    update_sgd(parameters.data(), velocity.data(), gradient.data(), shape.parameters(), rate,
               settings.momentum, compute);
  }

  // ---- before and after the loop -----------------------------------------------------------

  void initialise() {
    initial_parameters(shape, settings.seed, parameters_on_host);
    parameters.upload(parameters_on_host, compute);
    velocity.zero(compute);
    rank.wait(compute);
  }

  // The first use of a kernel or a matrix shape loads code and allocates. One step before the
  // clock starts gets that over with; initialise() then undoes what it did.
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
    parameters.download(parameters_on_host.data(), shape.parameters(), compute);
    losses.download(losses_on_host.data(), T, compute);
    rank.wait(compute);
    result.weights = parameters_on_host;
    result.losses.assign(losses_on_host.begin(), losses_on_host.end());
    result.step_seconds = T ? seconds_between(start, stop) / T : 0;
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
  const int L = shape.layers(), B = largest_batch(settings, data.size());
  const std::vector<Update> plan = updates(settings, data.size());  // what each step reads
  const int64_t T = static_cast<int64_t>(plan.size());
  const std::vector<int32_t> order_on_host = sample_order(settings, data.size());
  // What is copied to the host outlives the streams: a wait that fails leaves the copy under way.
  std::vector<real> parameters_on_host, losses_on_host = std::vector<real>(T);

  Stream compute;
  Blas blas{compute};
  Event start, stop;
  Buffer<uint8_t> pixels{data.size() * data.features};        // [N, d_0]
  Buffer<int32_t> labels{data.size()};                        // [N]
  Buffer<int32_t> order{(int64_t)order_on_host.size()};       // [samples of all updates]
  Buffer<real> parameters{shape.parameters()};                // [P], layer by layer: W, b
  Buffer<real> gradient{shape.parameters()};                  // [P]
  Buffer<real> velocity{shape.parameters()};                  // [P], the momentum
  std::vector<Buffer<real>> a, da;                            // a[l], da[l]: [B, d_l]
  Buffer<int32_t> label{B};                                   // [B]
  Buffer<real> row_loss{B};                                   // [B]
  Buffer<real> losses{T};                                     // [T], mean loss of each update
};

inline Result train(const Settings& settings, const Dataset& data, Rank& rank) {
  return Trainer(settings, data, rank).train();
}

}  // namespace ch01
