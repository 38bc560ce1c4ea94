// What a pipeline needs: the schedule, a table of who computes what in which order, and the
// buffers and communicators through which stages pass micro-batches to each other.
//
// The network is cut into p * v stages, and rank r of p computes stages r, p + r, 2p + r, ...: v
// chunks of layers, 1 unless interleaved. Fk is micro-batch k's forward, Bk its backward, with '
// in chunk 1. In every schedule each chunk's backward goes through the micro-batches in the order
// 0, 1, .. m-1, so gradients are added up in one order and have the same bits.
//
// gpipe: all forwards, then all backwards. Every micro-batch's activations are kept.
//   rank 0   F0  F1  F2  F3  .   .   .   .   B0  B1  B2  B3
//   rank 1   .   F0  F1  F2  F3  .   .   B0  B1  B2  B3
//   rank 2   .   .   F0  F1  F2  F3  B0  B1  B2  B3
//
// 1f1b: rank r is p-1-r forwards ahead, then one backward for each forward. As long a wait, but
// activations of at most p-r micro-batches.
//   rank 0   F0  F1  F2  .   .   B0  F3  B1  .   B2  .   B3
//   rank 1   .   F0  F1  .   B0  F2  B1  F3  B2  .   B3
//   rank 2   .   .   F0  B0  F1  B1  F2  B2  F3  B3
//
// interleaved: p micro-batches go through chunk 0, then through chunk 1, .., then the next p. The
// first and the last wait are for a chunk, not for a whole stage: v times shorter.
//   rank 0   F0  F1  F0' F1' F2  B0' F3  B1' F2' B0  F3' B1  .   B2' .   B3' B2  B3
//   rank 1   .   F0  F1  F0' B0' F1' B1' F2  B0  F3  B1  F2' B2' F3' B3' B2  B3
#pragma once

#include <memory>

#include "options.h"
#include "ranks.cuh"

// ---- schedule -----------------------------------------------------------------------------

enum class Schedule { gpipe, one_f_one_b, interleaved };

struct PipelineConfig : Config {
  int microbatches = 4;  // an update's samples are split into so many
  Schedule schedule = Schedule::one_f_one_b;
  int chunks = 0;        // of layers a rank, if interleaved; 0: 2

  int chunks_on(int ranks) const {  // one rank has no neighbour to wait for
    return schedule != Schedule::interleaved || ranks == 1 ? 1 : chunks ? chunks : 2;
  }
};

inline void pipeline_options(PipelineConfig& c, Options& o) {
  o.integer("microbatches", "M", "parts of a batch that follow each other", c.microbatches, 1,
            1 << 20);
  o.choice("schedule", {"gpipe", "1f1b", "interleaved"}, "who does what in which order",
           c.schedule);
  o.integer("chunks", "V", "of layers a rank, where interleaved (else 1)", c.chunks, 1, 1 << 20);
}

inline void refuse_pipeline(const PipelineConfig& c, const Shape& shape, int ranks) {
  if (c.microbatches > c.batch)
    throw BadInput("--microbatches: " + std::to_string(c.microbatches) + " of a batch of " +
                   std::to_string(c.batch) + " samples, at most one a sample would be right");
  if (c.chunks && c.schedule != Schedule::interleaved)
    throw BadInput("--chunks: " + std::to_string(c.chunks) +
                   " given, only --schedule interleaved has chunks");
  const int v = c.chunks_on(ranks);
  if (int64_t{ranks} * v > shape.layers())
    throw BadInput((v > 1 ? "--chunks: " + std::to_string(v) + " on each of " : "--gpus: ") +
                   std::to_string(ranks) + " ranks need a layer each, the network has " +
                   std::to_string(shape.layers()) + "; fewer or more --hidden would be right");
}

struct Work {
  bool forward;
  int chunk, micro;
  bool operator==(const Work&) const = default;
  std::string name() const {  // "F 2'"
    return (forward ? "F " : "B ") + std::to_string(micro) + std::string(chunk, '\'');
  }
};

// What rank r of p does in an update of m micro-batches, in order.
inline std::vector<Work> schedule_table(Schedule schedule, int r, int p, int m, int v) {
  // Where p does not divide m, the last group is filled up with micro-batches that do not exist,
  // and these are left out of the finished table: to drop them first would make ranks wait in a
  // circle.
  const int groups = v > 1 ? (m + p - 1) / p : 1, in_group = v > 1 ? p : m;
  std::vector<Work> forwards, backwards, table;
  for (int g = 0; g < groups; ++g)
    for (int c = 0; c < v; ++c)
      for (int k = 0; k < in_group; ++k) {
        forwards.push_back({true, c, g * in_group + k});
        backwards.push_back({false, v - 1 - c, g * in_group + k});
      }
  const int n = static_cast<int>(forwards.size());
  const int ahead = schedule == Schedule::gpipe ? n
                    : v == 1                    ? std::min(n, p - 1 - r)
                                                : std::min(n, 2 * (p - 1 - r) + (v - 1) * p);
  for (int i = 0; i < n + ahead; ++i) {
    if (i < n && forwards[i].micro < m) table.push_back(forwards[i]);
    if (i >= ahead && backwards[i - ahead].micro < m) table.push_back(backwards[i - ahead]);
  }
  return table;
}

// Of how many micro-batches at once a chunk keeps the activations: those gone forward that have
// not come back.
inline int most_in_flight(const std::vector<Work>& table, int chunk) {
  int now = 0, most = 0;
  for (const Work& work : table)
    if (work.chunk == chunk) most = std::max(most, now += work.forward ? 1 : -1);
  return most;
}

// ---- layers -------------------------------------------------------------------------------

// Which parts of the network rank r has: its stages' layers, one after another.
struct Placement {
  Placement(const Shape& shape, int r, int p, int v)
      : Placement(shape, stage_layers(shape, p * v), r, p) {}
  // Of a part of each layer, as wide as `shape` says: the cuts must not depend on which part.
  Placement(const Shape& shape, std::vector<Share> stages, int r, int p)
      : shape(shape), stages(std::move(stages)), r(r), p(p) {}
  int count() const { return static_cast<int>(stages.size()); }
  // Stage s's parameters: where they begin among all, and how many they are.
  int64_t begin(int s) const { return shape.weight_at(stages[s].first); }
  int64_t size(int s) const { return shape.weight_at(stages[s].last) - begin(s); }
  // Where layer l's lie in this rank's buffer; for l = L, the buffer's size.
  int64_t local(int l) const {
    int64_t n = 0;
    for (int s = r; s < count(); s += p)
      n += shape.weight_at(std::min<int>(l, stages[s].last)) -
           shape.weight_at(std::min<int>(l, stages[s].first));
    return n;
  }
  void upload(const Buffer<real>& own, const std::vector<real>& all, cudaStream_t stream) const {
    for (int s = r; s < count(); s += p)
      CHECK(cudaMemcpyAsync(own + local(stages[s].first), &all[begin(s)], size(s) * sizeof(real),
                            cudaMemcpyHostToDevice, stream));
  }
  void bring_to_rank_0(std::vector<real>& all, const Buffer<real>& own,
                       const Buffer<real>& mailbox, Rank& rank, cudaStream_t stream) const {
    for (int s = 0; s < count(); ++s)
      ::bring_to_rank_0(&all[begin(s)], own + local(stages[s].first), size(s), s % p,
                        mailbox.data(), size(0), rank, stream);
  }

  const Shape shape;
  const std::vector<Share> stages;
  const int r, p;
};

// ---- buffers ------------------------------------------------------------------------------

// One layer's activations, or their gradients, of the micro-batches in flight: micro-batch k is in
// slot k mod slots. A chunk finishes its micro-batches in the order in which it began them, so a
// slot is free again when its turn comes.
template <class T>
struct RingOf {
  RingOf(int slots, int64_t numbers) : numbers(numbers), data(slots * numbers), events(slots) {}
  T* operator()(int k) const { return data + k % events.size() * numbers; }
  const Event& done(int k) const { return events[k % events.size()]; }

  int64_t numbers;
  Buffer<T> data;             // [slots, numbers]
  std::vector<Event> events;  // of a slot that is sent: was sent; of one received: was read
};
using Ring = RingOf<real>;

// How many slots rank r needs for a[l] and for da[l]; 0 where it has no part in them.
struct Slots {
  int activations = 0, gradients = 0;
};
inline Slots slots_for(int l, const Placement& here, const std::vector<Work>& table, int m) {
  for (int s = here.r; s < here.count(); s += here.p) {
    const auto [first, last] = here.stages[s];
    if (l < first || l > last) continue;
    const int kept = most_in_flight(table, s / here.p);
    const bool comes_in = l == first && l > 0, goes_on = l == last && l < here.shape.layers();
    // One slot more where micro-batches come in, so that the next can be on its way; and two for
    // the gradients of what comes in or goes on.
    return {comes_in ? std::min(kept + 1, m) : kept,
            l == 0 ? 0 : comes_in || goes_on ? std::min(2, m) : 1};
  }
  return {};
}

// ---- transfers ----------------------------------------------------------------------------

// One direction between two ranks, with a communicator and a stream of its own. Nothing but its
// own messages can hold up a message, in the order of both ranks' tables; opposite transfers
// cannot wait for each other, and an activation cannot be taken for a gradient.
struct Link {
  explicit Link(Comm&& pair) : pair(std::move(pair)) {}

  // Takes in micro-batch k as soon as its slot is free, while `compute` is still busy with others;
  // only what `compute` gets from now on waits for it.
  template <class T>
  void receive(const RingOf<T>& ring, int k, int64_t n, const Stream& compute) {
    stream.wait(ring.done(k));
    pair.recv(ring(k), n, 0, stream);
    moved.record(stream);
    compute.wait(moved);
  }
  // Sends it once `compute` has done what it got so far. Before `compute` writes to the slot again
  // it must wait for ring.done(k), unless it has what the receiver made of it: an activation's
  // gradient comes back only after the activation has left.
  template <class T>
  void send(const RingOf<T>& ring, int k, int64_t n, const Stream& compute) {
    moved.record(compute);
    stream.wait(moved);
    pair.send(ring(k), n, 1, stream);
    ring.done(k).record(stream);
  }

  Comm pair;  // rank 0 sends, rank 1 receives
  Stream stream;
  Event moved;
};

// A stage's links to those before and after it; null where there is none. All ranks of `stages`
// call, and split it in the same order. `ring`: the last rank's chunk goes on on the first rank.
struct Links {
  Links(Comm& stages, bool ring) : stages(stages) {
    const int p = stages.size();
    for (int r = 0; r < (p == 1 ? 0 : ring ? p : p - 1); ++r) {
      connect(r, (r + 1) % p, activations_out, activations_in);
      connect((r + 1) % p, r, gradients_out, gradients_in);
    }
  }
  void connect(int from, int to, std::unique_ptr<Link>& out, std::unique_ptr<Link>& in) {
    const bool is_from = stages.rank() == from, is_to = stages.rank() == to;
    Comm pair = stages.split(is_from || is_to ? 0 : NCCL_SPLIT_NOCOLOR, is_to ? 1 : 0);
    if (is_from) out = std::make_unique<Link>(std::move(pair));
    if (is_to) in = std::make_unique<Link>(std::move(pair));
  }
  std::vector<Link*> all() const {
    std::vector<Link*> links;
    for (const auto* link : {&activations_in, &activations_out, &gradients_in, &gradients_out})
      if (*link) links.push_back(link->get());
    return links;
  }
  void wait(const Rank& rank) const {
    for (const Link* link : all()) rank.wait(link->stream);
  }
  // By this rank, over the links and to the whole pipeline.
  double bytes_sent() const {
    double bytes = stages.traffic.bytes;
    for (const Link* link : all()) bytes += link->pair.traffic.bytes;
    return bytes;
  }
  void forget_traffic() const {
    stages.traffic = {};
    for (Link* link : all()) link->pair.traffic = {};
  }

  Comm& stages;
  std::unique_ptr<Link> activations_in, activations_out, gradients_in, gradients_out;
};
