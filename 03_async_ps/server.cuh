// Chapter 03's server: rank 0. It holds the parameters and their momentum, and for each worker an
// inbox that takes a gradient in and a snapshot of the parameters out:
//
//   stream w   | receive into inbox w |  . . . . . . . . . . .  | send inbox w | receive ...
//   compute    ..| update w' |        | update w | copy to inbox w | update w'' | ...
//
// The host asks the workers' events in turn, and gives `compute` what has arrived.
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
  int64_t staleness = -1;                  // ssp's S; -1: 2. With 0 and 1 all go in step
  int slow_worker = 0, slowdown = 0;       // rank, and how often it computes a gradient; 0: 4
  bool staleness_aware = false;            // rate / max(1, age)
};

// One communicator from the server to each worker (of ranks 0 and 1): the work of one communicator
// is done in the order of its calls, so in a common one the workers would wait for each other.
inline std::vector<Comm> lines(const Rank& rank) {
  std::vector<Comm> line;
  for (int r = 1; r < rank.size; ++r)  // all ranks make all splits, in one order
    line.push_back(rank.world.split(
        rank.rank == 0 || rank.rank == r ? 0 : NCCL_SPLIT_NOCOLOR, rank.rank));
  return line;
}

class Server {
 public:
  Server(const Settings& settings, const Dataset& data, Rank& rank)
      : settings(settings), rank(rank), data(data) {
    std::iota(number_on_host.begin(), number_on_host.end(), 0);
    number.upload(number_on_host, compute);
  }

  Result train() {
    rank.meet();  // a rank that still allocated could wait for a peer that waits for it
    warm_up();
    initialise();
    start.record(compute);
    hand_out(0);
    for (int64_t t = 0; t < T; ++t) {
      serve(t);
      if (rank.wants_progress(t, T)) rank.progress(t, T, loss_of(t), plan[t].samples);
    }
    stop.record(compute);
    for (const Worker& w : workers) rank.wait(w.stream);
    rank.meet();  // likewise for who frees its memory
    return collect();
  }

 private:
  // ---- one step ----------------------------------------------------------------------------

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
    parameters.upload(parameters_on_host, compute);
    velocity.zero(compute);
    rank.wait(compute);
    for (Worker& w : workers) w.batch = -1, w.clock = 0, w.busy = false;
    for (Comm& comm : line) comm.traffic = {};  // the report is of the steps
    pushes.clear();
    next = 0, last = W - 1;
  }

  // Every worker's first round, but for its update; initialise() undoes what it did.
  void warm_up() {
    Range range("warm-up");  // its steps are none of the timeline's
    initialise();
    hand_out(0);
    for (int w = 0; w < W; ++w) {
      rank.wait(workers[w].stream);
      if (workers[w].busy) update(0, w, true, true);
    }
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
    parameters.download(parameters_on_host.data(), P, compute);
    losses.download(losses_on_host.data(), T, compute);
    rank.wait(compute);
    result.weights = parameters_on_host;
    result.losses.assign(losses_on_host.begin(), losses_on_host.end());
    result.step_seconds = T ? seconds_between(start, stop) / T : 0;
    for (const Comm& comm : line) result.bytes_sent_per_step += T ? comm.traffic.bytes / T : 0;
    result.peak_memory = memory_use().peak;
    result.extra = push_rows(pushes, W, result.step_seconds);
    return result;
  }

  // ---- state -------------------------------------------------------------------------------

  struct Worker {             // what the server knows of one
    Stream stream;            // has inbox_of(w) from `snapshot` to `arrived`, `compute` has it else
    Event snapshot, arrived;
    int64_t batch;            // what it computes; T: it has been told that there is no more
    int64_t pulled_at;        // after so many updates
    int64_t clock;            // its pushes so far
    bool busy;                // from its pull to the update with its push
  };

  real* inbox_of(int w) { return inbox + w * (P + 1); }             // [P + 1]

  const Settings& settings;
  Rank& rank;
  const Dataset& data;
  const Shape shape = network(settings, data.features);
  const int64_t P = shape.parameters();
  const int W = rank.size - 1;
  const bool sync = settings.mode == Mode::sync;
  const int64_t S = settings.staleness < 0 ? 2 : settings.staleness;
  const std::vector<Update> plan = updates(settings, data.size());
  const int64_t T = static_cast<int64_t>(plan.size());
  // What is copied to the host outlives the streams: a wait that fails leaves the copy under way.
  std::vector<real> parameters_on_host, losses_on_host = std::vector<real>(T);
  std::vector<int32_t> number_on_host = std::vector<int32_t>(T + 1);
  std::vector<Push> pushes;  // in the order of their updates
  int64_t next;              // the first batch that nobody has
  int last;                  // the worker served last

  std::vector<Comm> line = lines(rank);
  Stream compute;
  Event start, stop;
  std::vector<Worker> workers = std::vector<Worker>(W);
  Buffer<real> parameters{P};                                 // [P], layer by layer: W, b
  Buffer<real> velocity{P};                                   // [P], the momentum
  Buffer<real> inbox{W * (P + 1)};                            // [W, P + 1]
  Buffer<int32_t> number{T + 1};                              // [T + 1] = 0, 1, .. T
  Buffer<real> losses{T};                                     // [T], mean loss of each update
};

}  // namespace ch03
