// Chapter 04: layer parallelism, the layers on different GPUs. Base: 01_single_gpu
//
// The network is cut between layers into p stages, one a GPU. A rank holds weights, gradients,
// momentum and activations of its own layers only, so p GPUs hold a model p times as large.
//
//   rank 0: W0 W1                rank 1: W2 W3                rank 2: W4
//   pixels -> a[0] a[1] a[2] ---send---> a[2] a[3] a[4] ---send---> a[4] a[5] -> loss <- labels
//                da[1] da[2] <---send--- da[2] da[3] da[4] <---send--- da[4] da[5]
//
//   rank 0  F . . . . B    F forward, B backward, . idle: each stage waits for the one before,
//   rank 1  . F . . B .    so only one GPU works at a time. Chapter 06 fills the gaps.
//   rank 2  . . F B . .
#pragma once

#include "../common/gpu.cuh"
#include "../common/idx.h"
#include "../common/kernels.cuh"
#include "../common/ranks.cuh"
#include "../common/sgd.h"

namespace ch04 {

struct Settings : Config {};

class Trainer {
 public:
  Trainer(const Settings& settings, const Dataset& data, Rank& rank)
      : settings(settings), rank(rank), data(data) {
    for (int l = 0; l <= L; ++l) {
      const int64_t own = l >= first && l <= last ? int64_t{B} * shape.width[l] : 0;
      a.emplace_back(own);
      da.emplace_back(l == 0 ? 0 : own);  // the data needs no gradient
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
    load(u);
    if (r > 0) receive(a[first], first, u.samples, r - 1);                  // new
    for (int l = first; l < last; ++l) forward(l, u.samples);
    if (r < p - 1) send(a[last], last, u.samples, r + 1);                   // new
    if (r == p - 1) compute_loss(t, u.samples);
    if (r < p - 1) receive(da[last], last, u.samples, r + 1);               // new
    for (int l = last - 1; l >= first; --l) backward(l, u.samples);
    if (r > 0) send(da[first], first, u.samples, r - 1);                    // new
    update(u.rate);
    if (p > 1) send_loss(t);                                                // new
  }

  void load(const Update& u) {
    Range range("load");
    if (r == 0)
      load_pixels(a[0].data(), pixels, order + u.first, u.samples, shape.width[0], compute);
    if (r == p - 1) load_labels(label, labels, order + u.first, u.samples, compute);
  }

  // In the stream, between the kernels that write x and those that read it: so without an event.
  void receive(const Buffer<real>& x, int l, int rows, int peer) {
    rank.world.recv(x.data(), int64_t{rows} * shape.width[l], peer, compute);
  }
  void send(const Buffer<real>& x, int l, int rows, int peer) {
    rank.world.send(x.data(), int64_t{rows} * shape.width[l], peer, compute);
  }

  // Rank 0 reports, and only the last rank knows the loss. At the step's end nobody waits for it.
  void send_loss(int64_t t) {
    if (r == p - 1) rank.world.send(losses + t, 1, 0, compute);
    if (r == 0) rank.world.recv(losses + t, 1, p - 1, compute);
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
    update_sgd(parameters.data(), velocity.data(), gradient.data(), parameters.size(), rate,
               settings.momentum, compute);
  }

  // ---- before and after the loop -----------------------------------------------------------

  void initialise() {
    initial_parameters(shape, settings.seed, parameters_on_host);
    parameters.upload(parameters_on_host.data() + begin(r), parameters.size(), compute);
    velocity.zero(compute);
    rank.wait(compute);
    rank.world.traffic = {};  // the warm-up's messages do not count
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
    result.bytes_sent_per_step = T ? rank.world.traffic.bytes / T : 0;
    for (int s = 0; s < p; ++s)  // through rank 0's gradient buffer, which is free now
      bring_to_rank_0(&parameters_on_host[begin(s)], parameters.data(), begin(s + 1) - begin(s), s,
                      gradient.data(), begin(1), rank, compute);
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

  // Where stage s's parameters begin among all; where layer l's lie in this rank's.
  int64_t begin(int s) const { return shape.weight_at(s < p ? stages[s].first : L); }
  real* weight(int l) { return parameters + (shape.weight_at(l) - begin(r)); }   // [d_l+1, d_l]
  real* bias(int l) { return parameters + (shape.bias_at(l) - begin(r)); }       // [d_l+1]
  real* dweight(int l) { return gradient + (shape.weight_at(l) - begin(r)); }    // [d_l+1, d_l]
  real* dbias(int l) { return gradient + (shape.bias_at(l) - begin(r)); }        // [d_l+1]

  const Settings& settings;
  Rank& rank;
  const Dataset& data;
  const Shape shape = network(settings, data.features);
  const int L = shape.layers(), B = largest_batch(settings, data.size());
  const int r = rank.rank, p = rank.size;
  const std::vector<Share> stages = stage_layers(shape, p);
  const int first = stages[r].first, last = stages[r].last;         // this rank's layers
  const std::vector<Update> plan = updates(settings, data.size());  // what each step reads
  const int64_t T = static_cast<int64_t>(plan.size());
  const std::vector<int32_t> order_on_host = sample_order(settings, data.size());
  // What is copied to the host outlives the streams: a wait that fails leaves the copy under way.
  std::vector<real> parameters_on_host, losses_on_host = std::vector<real>(T);
  Stream compute;
  Blas blas{compute};
  Event start, stop;
  Buffer<uint8_t> pixels{r == 0 ? data.size() * data.features : 0};  // [N, d_0] on rank 0
  Buffer<int32_t> labels{r == p - 1 ? data.size() : 0};       // [N] on the last rank
  Buffer<int32_t> order{r == 0 || r == p - 1 ? (int64_t)order_on_host.size() : 0};  // [samples]
  Buffer<real> parameters{begin(r + 1) - begin(r)};           // [P_r], layer by layer: W, b
  Buffer<real> gradient{parameters.size()};                   // [P_r]
  Buffer<real> velocity{parameters.size()};                   // [P_r], the momentum
  std::vector<Buffer<real>> a, da;                            // a[l], da[l]: [B, d_l] if own
  Buffer<int32_t> label{r == p - 1 ? B : 0};                  // [B] on the last rank
  Buffer<real> row_loss{r == p - 1 ? B : 0};                  // [B] on the last rank
  Buffer<real> losses{r == 0 || r == p - 1 ? T : 0};          // [T], mean loss of each update
};

inline Result train(const Settings& settings, const Dataset& data, Rank& rank) {
  return Trainer(settings, data, rank).train();
}

}  // namespace ch04
