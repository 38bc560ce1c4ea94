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
#include "pushes.h"

namespace ch03 {

enum class Mode { sync, ssp, async };

struct Settings : Config {
  Settings() { gpus = 4; }
  Mode mode = Mode::sync;
  int64_t staleness = -1;                  // ssp's S; -1: 2
  int slow_worker = 0, slowdown = 0;       // that rank computes a gradient so many times; 0: 4
  bool staleness_aware = false;            // rate / max(1, age)
};

class Trainer {
 public:
  Trainer(const Settings& settings, const Dataset& data, Rank& rank)
      : settings(settings), rank(rank), data(data) {
    for (int w = 0; w < W; ++w)  // a communicator's work is done in order; so one for each worker
      line.push_back(rank.world.split(server || w == me ? 0 : NCCL_SPLIT_NOCOLOR, rank.rank));
    for (int l = 0; l <= L; ++l) {
      a.emplace_back(int64_t{b} * shape.width[l]);
      da.emplace_back(l == 0 ? 0 : int64_t{b} * shape.width[l]);  // the data needs no gradient
    }
    std::iota(number_on_host.begin(), number_on_host.end(), 0);
    number.upload(number_on_host, compute);
    pixels.upload(data.pixels.data(), pixels.size(), compute);
    labels.upload(data.labels.data(), labels.size(), compute);
    order.upload(order_on_host.data(), order.size(), compute);
  }

  Result train() {
    rank.meet();  // a rank that still allocated could wait for a peer that waits for it
    warm_up();
    initialise();
    start.record(compute);
    if (server) hand_out(0);
    for (int64_t t = 0; (t = server ? t : pull()) < T; ++t) {
      server ? serve(t) : step(t);
      if (rank.wants_progress(t, T)) rank.progress(t, T, loss_of(t), plan[t].samples);
    }
    stop.record(compute);
    for (const Worker& w : workers) rank.wait(w.stream);
    rank.meet();  // likewise: to free memory early could stop the others' kernels
    return collect();
  }

 protected:
  // ---- one step of a worker ----------------------------------------------------------------

  void step(int64_t t) {
    Range range("step " + std::to_string(t));
    for (int i = 0; i < times; ++i) compute_gradient(t);
    push();  // new: the next batch comes with the next pull, on the same stream
  }

  virtual void compute_gradient(int64_t t) {  // virtual: a test pushes gradients that it knows
    const Update& u = plan[t];
    const Share own = sync ? share(u.samples, me, W) : Share{0, u.samples};
    const int rows = static_cast<int>(own.size());
    load(u.first + own.first, rows);
    for (int l = 0; l < L; ++l) forward(l, rows);
    compute_loss(rows, u.samples);
    for (int l = L - 1; l >= 0; --l) backward(l, rows);
  }

  void load(int64_t first, int rows) {
    Range range("load");
    load_pixels(a[0].data(), pixels, order + first, rows, shape.width[0], compute);
    load_labels(label, labels, order + first, rows, compute);
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
    int32_t batch = 0;
    number.download(&batch, 1, compute);
    rank.wait(compute);
    return batch;
  }

  // ---- one step of the server --------------------------------------------------------------

  void serve(int64_t t) {
    Range range("step " + std::to_string(t));
    if (!sync) update(t, first_arrival(), true, true);
    for (int w = 0; sync && w < W; ++w) update(t, w, w == 0, w == W - 1);
    hand_out(t + 1);
  }

  // Asks all in turn, beginning after the one served last: if it always began with worker 0, a
  // busy server would never come to the others.
  int first_arrival() {
    for (;; rank.look_after_peers())
      for (int i = 0; i < W; ++i) {
        last = (last + 1) % W;
        if (workers[last].busy && rank.is_done(workers[last].arrived)) return last;
      }
  }

  // In sync mode the parts of a batch's gradient come one by one, in the order of ranks:
  // v = mu v + part 0; v = v + part 1; ...; and only with the last one w = w - rate v.
  void update(int64_t t, int w, bool first_part, bool last_part) {
    Range range("update");
    Worker& from = workers[w];
    rank.wait(from.arrived);
    const int64_t age = t - from.pulled_at;
    const double rate = plan[t].rate / (settings.staleness_aware ? std::max<int64_t>(1, age) : 1);
    update_sgd(parameters.data(), velocity.data(), inbox_of(w), P, last_part ? rate : 0,
               first_part ? settings.momentum : 1, compute);
    sum(losses + t, inbox_of(w) + P, 1, 1, first_part ? 0 : 1, compute);
    pushes.push_back({w + 1, from.batch, age});
    from.busy = false;
    ++from.clock;
  }

  // Answers all who wait and may go on: in sync mode with the same batch, else each with the next
  // that nobody has. Batch T is none, and the end for who gets it.
  void hand_out(int64_t updates_done) {
    for (int w = 0; w < W; ++w)
      if (workers[w].batch < T && !workers[w].busy && may_start(w))
        answer(w, std::min(T, sync ? updates_done : next++), updates_done);
  }

  // Whoever starts at a gap of S is S + 1 ahead when it is through. The slowest may always start.
  bool may_start(int w) const {
    int64_t slowest = workers[w].clock;  // of all: while there are batches, all are active
    for (const Worker& other : workers) slowest = std::min(slowest, other.clock);
    const int64_t gap = workers[w].clock - slowest;
    return settings.mode != Mode::ssp || next >= T || gap == 0 || gap < S;
  }

  // Sends a snapshot, made where w's gradient was: `compute` has used that one up, and need not
  // hold the next update back until the parameters themselves have left.
  void answer(int w, int64_t batch, int64_t updates_done) {
    Range range("answer " + std::to_string(w + 1));
    Worker& to = workers[w];
    to.batch = batch, to.pulled_at = updates_done, to.busy = batch < T;
    CHECK(cudaMemcpyAsync(inbox_of(w), parameters.data(), P * sizeof(real),
                          cudaMemcpyDeviceToDevice, compute));
    to.snapshot.record(compute);
    to.stream.wait(to.snapshot);
    {
      Group both;
      line[w].send(inbox_of(w), P, 1, to.stream);
      line[w].send(number + batch, 1, 1, to.stream);
    }
    if (to.busy) line[w].recv(inbox_of(w), P + 1, 1, to.stream);
    to.arrived.record(to.stream);
  }

  // ---- before and after the loop -----------------------------------------------------------

  void initialise() {
    initial_parameters(shape, settings.seed, parameters_on_host);
    parameters.upload(parameters_on_host, compute);  // the workers' are overwritten by a pull
    velocity.zero(compute);
    rank.wait(compute);
    for (Worker& w : workers) w.batch = -1, w.clock = 0, w.busy = false;
    for (Comm& comm : line) comm.traffic = {};  // the report is of the steps
    pushes.clear();
    next = 0, last = W - 1;
  }

  // The first use of a kernel, a matrix shape or a connection loads code and allocates. One round
  // before the clock starts gets that over with; initialise() undoes what it did.
  void warm_up() {
    initialise();
    if (server) hand_out(0);
    for (int w = 0; server && w < W; ++w) {
      rank.wait(workers[w].stream);
      if (workers[w].busy) update(0, w, true, true);
    }
    if (!server && pull() < T) {
      for (int64_t t = 0; t < T; ++t)  // both sizes of a batch: whole, and an epoch's last
        if (t == 0 || plan[t].samples != plan[t - 1].samples) compute_gradient(t);
      push();
    }
    rank.wait(compute);
  }

  double loss_of(int64_t t) {
    real value = 0;
    CHECK(cudaMemcpyAsync(&value, losses + t, sizeof value, cudaMemcpyDeviceToHost, compute));
    rank.wait(compute);
    return value;
  }

  Result collect() {
    Result result;
    result.weights.resize(P);
    parameters.download(result.weights.data(), P, compute);
    std::vector<real> loss(losses.size());
    losses.download(loss.data(), losses.size(), compute);
    rank.wait(compute);
    result.losses.assign(loss.begin(), loss.end());
    result.step_seconds = T ? seconds_between(start, stop) / T : 0;
    for (const Comm& comm : line) result.bytes_sent_per_step += T ? comm.traffic.bytes / T : 0;
    result.peak_memory = memory_use().peak;
    if (server) result.extra = push_rows(pushes, W, result.step_seconds);
    return result;
  }

  // ---- state -------------------------------------------------------------------------------

  struct Worker {             // what the server knows of one
    Stream stream;            // has inbox_of(w) from `snapshot` to `arrived`, `compute` has it else
    Event snapshot, arrived;
    int64_t batch, pulled_at; // what it computes, at the parameters after so many updates
    int64_t clock;            // its pushes so far
    bool busy;                // from its pull to the update with its push
  };

  real* inbox_of(int w) { return inbox + w * (P + 1); }             // [P + 1]
  real* weight(int l) { return parameters + shape.weight_at(l); }   // [d_l+1, d_l]
  real* bias(int l) { return parameters + shape.bias_at(l); }       // [d_l+1]
  real* dweight(int l) { return gradient + shape.weight_at(l); }    // [d_l+1, d_l]
  real* dbias(int l) { return gradient + shape.bias_at(l); }        // [d_l+1]

  const Settings& settings;
  Rank& rank;
  const Dataset& data;
  const Shape shape = network(settings, data.features);
  const int64_t P = shape.parameters();
  const int L = shape.layers(), B = settings.batch, W = rank.size - 1, me = rank.rank - 1;
  const bool server = me < 0, sync = settings.mode == Mode::sync;
  const int b = server ? 0 : sync ? (B - 1) / W + 1 : B;      // a rank's rows of a batch, at most
  const int64_t S = settings.staleness < 0 ? 2 : settings.staleness;
  const int slowdown = settings.slowdown ? settings.slowdown : 4;
  const int times = rank.rank == settings.slow_worker ? slowdown : 1;  // a gradient is computed
  const std::vector<Update> plan = updates(settings, data.size());  // what each step reads
  const int64_t T = static_cast<int64_t>(plan.size());
  const std::vector<int32_t> order_on_host = sample_order(settings, data.size());
  std::vector<real> parameters_on_host;
  std::vector<int32_t> number_on_host = std::vector<int32_t>(server ? T + 1 : 1);
  std::vector<Push> pushes;  // in the order in which they were applied
  int64_t next;              // the first batch that nobody has
  int last;                  // the worker served last

  std::vector<Comm> line;  // each worker's to the server, which is rank 0 of it
  Stream compute;
  Blas blas{compute};
  Event start, stop;
  std::vector<Worker> workers = std::vector<Worker>(server ? W : 0);
  const int64_t N = server ? 0 : data.size();
  Buffer<uint8_t> pixels{N * data.features};                  // [N, d_0]
  Buffer<int32_t> labels{N};                                  // [N]
  Buffer<int32_t> order{server ? 0 : (int64_t)order_on_host.size()};  // [samples of all updates]
  Buffer<real> parameters{P};                                 // [P], layer by layer: W, b
  Buffer<real> gradient{server ? 0 : P + 1};                  // [P + 1], the last is the loss
  Buffer<real> velocity{server ? P : 0};                      // [P], the momentum
  Buffer<real> inbox{server ? W * (P + 1) : 0};               // [W, P + 1]
  Buffer<int32_t> number{(int64_t)number_on_host.size()};     // server: [T + 1]; worker: its batch
  std::vector<Buffer<real>> a, da;                            // a[l], da[l]: [b, d_l]
  Buffer<int32_t> label{b};                                   // [b]
  Buffer<real> row_loss{b};                                   // [b]
  Buffer<real> losses{server ? T : 0};                        // [T], mean loss of each update
};

inline Result train(const Settings& settings, const Dataset& data, Rank& rank) {
  return Trainer(settings, data, rank).train();
}

}  // namespace ch03
