// NCCL between the virtual GPUs of one process: who waits for whom, and what moves.
// Calls record operations; a group's outermost end puts one batch a communicator into a stream;
// the stream's worker meets its peers there. The arithmetic itself is in reduce.h.
#include "nccl.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>

#include "reduce.h"
#include "runtime.h"

using namespace virtual_gpu;

namespace {

enum class Op { all_reduce, reduce, broadcast, reduce_scatter, all_gather, send, recv };
const char* const op_names[] = {"ncclAllReduce",     "ncclReduce",    "ncclBroadcast",
                                "ncclReduceScatter", "ncclAllGather", "ncclSend",
                                "ncclRecv"};

struct Request {
  Op op;
  const void* send;
  void* recv;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t reduction;
  int root;  // or peer
  Stream* stream;
  int64_t sequence = 0;  // of a collective on its communicator
  size_t bytes() const { return count * size_of(type); }
  bool transfer() const { return op == Op::send || op == Op::recv; }
  const char* name() const { return op_names[static_cast<int>(op)]; }
};

std::string describe(const Request& r) {
  std::string text = format("%s of %zu %s", r.name(), r.count, type_name(r.type));
  if (r.op == Op::send) return text + format(" to rank %d", r.root);
  if (r.op == Op::recv) return text + format(" from rank %d", r.root);
  if (r.op != Op::broadcast && r.op != Op::all_gather)
    text += std::string(", ") + reduction_name(r.reduction);
  return r.op == Op::reduce || r.op == Op::broadcast ? text + format(", root %d", r.root) : text;
}

struct Arrival {
  Request request;
  Picoseconds time = 0;
  Actor* worker = nullptr;
};

// One collective, from its first arrival to its end.
struct Collective {
  explicit Collective(int ranks) : from(ranks), tags(ranks + 1) {}
  std::vector<Arrival> from;
  std::vector<char> tags;  // addresses for publish() and observe(): a rank's each, and the end
  int arrived = 0, first = 0;  // how many have come, and who came first
  bool executing = false, done = false;
  Picoseconds start = 0, end = 0;
};

// One side of a send and receive.
struct Transfer {
  Request request;
  Picoseconds time = 0;            // when this side was ready
  size_t batch_bytes = 0;          // all that this side's batch sends (or receives)
  int device = 0;
  Actor* worker = nullptr;
  char posted = 0, finished = 0;   // addresses for publish() and observe()
  bool copying = false, done = false;
  Picoseconds start = 0, end = 0;
};

struct World;

}  // namespace

struct ncclComm {
  World* world;
  int rank, device;
  Host* thread = nullptr;          // who drives it; null once that thread has ended
  int64_t batches = 0, done = 0;   // tickets: batches run one after the other, in issue order
  int64_t collectives = 0, splits = 0;
  Picoseconds end = 0;
  std::string left;                // why it takes part no more
  bool aborted = false;
  std::vector<Actor*> waiters;     // for `done`
  char finished = 0;               // address for publish() and observe(): what the batches wrote
};

namespace {

struct Split {
  std::vector<std::pair<int, int>> color_key;  // by parent rank
  std::vector<ncclComm*> result;
  std::vector<Actor*> waiting;
  int arrived = 0;
  bool done = false;
  Picoseconds time = 0;
};

// What the ranks of one communicator share. All of it under Lock.
struct World {
  int number = 0, alive = 0;
  std::vector<std::unique_ptr<ncclComm>> ranks;
  std::map<int64_t, std::shared_ptr<Collective>> collectives;  // by sequence number, unfinished
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Transfer>>> sends, recvs;  // unmatched
  std::map<int64_t, std::shared_ptr<Split>> splits;
  std::map<std::pair<int, int>, std::pair<bool, bool>> connected;  // strict mode: who has called
  std::set<int> first_collective;
  std::vector<Actor*> connecting;
  int size() const { return static_cast<int>(ranks.size()); }
  Link slowest_link() const {
    int lowest = ranks[0]->device, highest = lowest;
    for (const auto& r : ranks) {
      lowest = std::min(lowest, r->device);
      highest = std::max(highest, r->device);
    }
    return link(hardware(), lowest, highest);
  }
};

struct Pending {  // a communicator that not all ranks have come to yet
  std::vector<Host*> hosts;
  std::vector<int> devices;
  std::vector<ncclComm*> result;
  int arrived = 0;
  bool done = false;
  std::string problem;
  Picoseconds time = 0;
};

struct Registry {
  std::set<ncclComm*> live;
  std::set<World*> worlds;
  std::map<std::string, std::shared_ptr<Pending>> pending;
  int next_world = 0, next_id = 0;
};
Registry& registry() {
  static auto* r = new Registry;
  return *r;
}

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<std::pair<ncclComm*, Request>> requests;
};
Group& group() {
  thread_local Group g;
  return g;
}

// ---- errors --------------------------------------------------------------------------------

ncclResult_t refuse(Call& call, ncclResult_t code, const std::string& detail) {
  call.host.detail = std::string(call.name) + ": " + detail;
  call.host.detail_code = -1;  // a text for ncclGetLastError alone
  if (group().depth > 0 && group().error == ncclSuccess) group().error = code;
  return code;
}

ncclResult_t failed_before(Call& call) {
  const ncclResult_t code = run_failed()                        ? ncclRemoteError
                            : call.error == cudaErrorUnknown ? ncclSystemError
                                                                : ncclUnhandledCudaError;
  if (group().depth > 0) group().error = code;
  return code;
}

void use_registry_hooks();

bool known(ncclComm* comm) {
  Lock lock;
  return registry().live.count(comm);
}

std::string who(const ncclComm& c) {
  return format("rank %d of %d", c.rank, c.world->size());
}

// ---- creation and destruction --------------------------------------------------------------

// The thread that uses a communicator is the one that its peers wait for.
void adopt(Lock& lock, ncclComm& comm, Host& h) {
  if (comm.thread == &h) return;
  if (comm.thread && --comm.thread->communicators == 0)
    set_counted(lock, comm.thread->actor, false);
  comm.thread = &h;
  if (++h.communicators == 1) set_counted(lock, h.actor, true);
}

std::vector<ncclComm*> make_world(Lock& lock, const std::vector<int>& devices,
                                  const std::vector<Host*>& hosts) {
  use_registry_hooks();
  auto* world = new World;
  world->number = registry().next_world++;
  world->alive = static_cast<int>(devices.size());
  std::vector<ncclComm*> made;
  for (size_t r = 0; r < devices.size(); ++r) {
    world->ranks.push_back(std::make_unique<ncclComm>());
    ncclComm& c = *world->ranks.back();
    c.world = world;
    c.rank = static_cast<int>(r);
    c.device = devices[r];
    registry().live.insert(&c);
    made.push_back(&c);
    DeviceLock guard(device(c.device));
    ++device(c.device).counters.communicators_created;
  }
  registry().worlds.insert(world);
  for (size_t r = 0; r < made.size(); ++r) adopt(lock, *made[r], *hosts[r]);
  return made;
}

std::string duplicate_gpu(const std::vector<int>& devices) {
  for (size_t r = 0; r < devices.size(); ++r)
    for (size_t q = 0; q < r; ++q)
      if (devices[q] == devices[r])
        return format("Duplicate GPU detected: rank %zu and rank %zu both on GPU %d", q, r,
                      devices[r]);
  return "";
}

// Takes the rank out; the last one takes the world along.
void leave(Lock& lock, ncclComm* comm, const char* why) {
  World* world = comm->world;
  comm->left = why;
  registry().live.erase(comm);
  {
    DeviceLock guard(device(comm->device));
    ++device(comm->device).counters.communicators_destroyed;
  }
  if (comm->thread && --comm->thread->communicators == 0)
    set_counted(lock, comm->thread->actor, false);
  comm->thread = nullptr;
  if (--world->alive > 0) return;
  registry().worlds.erase(world);
  delete world;
}

// The host may read what they wrote: that edge too must be seen outside Lock's Quiet.
void wait_for_batches(Host& h, ncclComm& comm, const char* call) {
  {
    Lock lock;
    comm.waiters.push_back(&h.actor);
    const auto finished = [&] { return comm.done == comm.batches; };
    const auto text = [&] { return format("in %s of %s", call, who(comm).c_str()); };
    // A failed run's batches end by themselves; until then their memory must stay.
    while (!block(lock, h.actor, finished, text)) lock.step_aside();
    comm.waiters.erase(std::find(comm.waiters.begin(), comm.waiters.end(), &h.actor));
  }
  observe(&comm.finished);
}

// Lines for a deadlock's report: who is missing, and why.
std::string describe_missing() {
  std::string text;
  for (const World* w : registry().worlds)
    for (const auto& c : w->ranks) {
      if (!c->left.empty())
        text += format("; communicator %d: %s %s", w->number, who(*c).c_str(), c->left.c_str());
      else if (!c->thread)
        text += format("; communicator %d: the thread of %s has ended", w->number,
                       who(*c).c_str());
    }
  return text;
}

void forget_thread(Host& h) {
  for (ncclComm* c : registry().live)
    if (c->thread == &h) c->thread = nullptr;
}

// What ranks that failed have left behind.
void forget_all(Lock& lock) {
  Registry& r = registry();
  for (ncclComm* c : r.live)
    if (c->thread && --c->thread->communicators == 0) set_counted(lock, c->thread->actor, false);
  for (World* w : r.worlds) delete w;
  r = {};
}

void use_registry_hooks() {
  forget_communicators = forget_all;
  describe_communicators = describe_missing;
  thread_ends = forget_thread;
}

// ---- meeting -------------------------------------------------------------------------------

struct Batch {
  ncclComm* comm;
  int64_t ticket;
  std::vector<Request> requests;
};

Picoseconds collective_time(const Request& r, const World& world) {
  const int p = world.size();
  if (p == 1) return 0;
  const Link slowest = world.slowest_link();
  const double share = double(p - 1) / p, s = static_cast<double>(r.bytes());
  double steps = p - 1, bytes = s;                                // broadcast, reduce
  if (r.op == Op::all_reduce) steps = 2 * (p - 1), bytes = 2 * share * s;
  if (r.op == Op::reduce_scatter || r.op == Op::all_gather) bytes = share * s * p;
  return duration(steps * slowest.latency) + time_of(bytes, slowest.bandwidth);
}

// What one rank sends, of what collective_time() counts.
int64_t bytes_sent(const Request& r, int p) {
  const double share = double(p - 1) / p, s = static_cast<double>(r.bytes());
  if (r.op == Op::all_reduce) return std::llround(2 * share * s);
  if (r.op == Op::reduce_scatter || r.op == Op::all_gather) return std::llround(share * s * p);
  return r.transfer() || p > 1 ? static_cast<int64_t>(s) : 0;
}

bool agree(const Request& a, const Request& b) {
  const bool reduces = a.op != Op::broadcast && a.op != Op::all_gather;
  const bool rooted = a.op == Op::reduce || a.op == Op::broadcast;
  return a.op == b.op && a.count == b.count && a.type == b.type &&
         (!reduces || a.reduction == b.reduction) && (!rooted || a.root == b.root);
}

void move_data(const Collective& c) {
  const Request& r = c.from[0].request;
  std::vector<const void*> in;
  std::vector<void*> out;
  for (const Arrival& a : c.from) {
    in.push_back(a.request.send);
    out.push_back(a.request.recv);
  }
  switch (r.op) {
    case Op::all_reduce: return reduce_ranks(in, 0, out, r.count, r.type, r.reduction);
    case Op::reduce: return reduce_ranks(in, 0, {out[r.root]}, r.count, r.type, r.reduction);
    case Op::reduce_scatter:
      for (size_t q = 0; q < out.size(); ++q)
        reduce_ranks(in, q * r.count, {out[q]}, r.count, r.type, r.reduction);
      return;
    case Op::broadcast:
      for (void* to : out)
        if (to != in[r.root]) std::memcpy(to, in[r.root], r.bytes());
      return;
    case Op::all_gather:
      for (void* to : out)
        for (size_t q = 0; q < in.size(); ++q) {
          char* part = static_cast<char*>(to) + q * r.bytes();
          if (part != in[q]) std::memcpy(part, in[q], r.bytes());
        }
      return;
    default: return;
  }
}

// Returns when the collective ends on the modelled clock.
Picoseconds meet(Stream& stream, const Slot& slot, Batch& batch, const Request& r,
                 Picoseconds ready) {
  ncclComm& comm = *batch.comm;
  World& world = *comm.world;
  std::shared_ptr<Collective> c;
  {
    Lock lock;
    auto& entry = world.collectives[r.sequence];
    if (!entry) entry = std::make_shared<Collective>(world.size());
    c = entry;
  }
  publish(&c->tags[comm.rank]);
  bool last;
  {
    Lock lock;
    if (c->arrived == 0) c->first = comm.rank;
    const Request& other = c->from[c->first].request;
    if (c->arrived > 0 && !agree(other, r))
      fail_run(lock, format("communicator %d, collective %lld: rank %d calls %s, rank %d calls %s",
                            world.number, static_cast<long long>(r.sequence), c->first,
                            describe(other).c_str(), comm.rank, describe(r).c_str()));
    if (run_failed() || comm.aborted) return ready;
    c->from[comm.rank] = {r, ready, &stream.worker};
    last = ++c->arrived == world.size();
    if (last) {
      c->executing = true;
      world.collectives.erase(r.sequence);
    }
  }
  if (last) {
    for (int q = 0; q < world.size(); ++q) observe(&c->tags[q]);
    if (!skip_math()) move_data(*c);
    publish(&c->tags.back());
    Lock lock;
    for (const Arrival& a : c->from) c->start = std::max(c->start, a.time);
    c->end = c->start + collective_time(r, world);
    c->done = true;
    for (const Arrival& a : c->from) wake(*a.worker);
  } else {
    Lock lock;
    const auto text = [&] {
      return format("%s of communicator %d in %s%s%s%s", who(comm).c_str(), world.number,
                    describe(r).c_str(), *slot.range ? " (" : "", slot.range,
                    *slot.range ? ")" : "");
    };
    block(lock, stream.worker, [&] { return c->done || (comm.aborted && !c->executing); }, text);
    while (c->executing && !c->done) lock.step_aside();  // a failed run: buffers are in use till then
    if (!c->done) {  // this rank takes back what it brought
      c->from[comm.rank] = {};
      --c->arrived;
      for (int q = 0; c->first == comm.rank && q < world.size(); ++q)
        if (c->from[q].worker) c->first = q;
      return ready;
    }
  }
  observe(&c->tags.back());
  stream.record(slot, Kind::collective, r.name(), c->start, c->end, bytes_sent(r, world.size()));
  return c->end;
}

// ---- send and receive ----------------------------------------------------------------------

// Both sides are there. A side's link carries its whole batch, so one rank that receives from
// many takes as long as all of them together.
void copy_pair(Lock& lock, Transfer& send, Transfer& recv) {
  send.copying = recv.copying = true;
  lock.unlock();
  {
    Aloud aloud;  // the lock is open, but its Quiet goes on
    observe(&send.posted);
    observe(&recv.posted);
    const size_t bytes = skip_math() ? 0 : send.request.bytes();
    if (bytes) std::memmove(recv.request.recv, send.request.send, bytes);
    publish(&send.finished);
    publish(&recv.finished);
  }
  lock.lock();
  const Link between = link(hardware(), std::min(send.device, recv.device),
                            std::max(send.device, recv.device));
  const double bytes = static_cast<double>(std::max(send.batch_bytes, recv.batch_bytes));
  send.start = recv.start = std::max(send.time, recv.time);
  send.end = recv.end = send.start + (send.device == recv.device
                                          ? time_of(bytes, hardware().memory_bandwidth)
                                          : duration(between.latency) +
                                                time_of(bytes, between.bandwidth));
  send.done = recv.done = true;
  wake(*send.worker);
  wake(*recv.worker);
}

// Finds the partner of `mine`, or leaves it to be found.
void post(Lock& lock, ncclComm& comm, const std::shared_ptr<Transfer>& mine) {
  World& world = *comm.world;
  const bool sends = mine->request.op == Op::send;
  const std::pair<int, int> pair = sends ? std::pair(comm.rank, mine->request.root)
                                         : std::pair(mine->request.root, comm.rank);
  auto& partners = (sends ? world.recvs : world.sends)[pair];
  if (partners.empty()) {
    (sends ? world.sends : world.recvs)[pair].push_back(mine);
    return;
  }
  const std::shared_ptr<Transfer> partner = partners.front();
  const Request &a = mine->request, &b = partner->request;
  if (a.count != b.count || a.type != b.type) {
    fail_run(lock, format("communicator %d: rank %d calls %s, rank %d calls %s", world.number,
                          comm.rank, describe(a).c_str(), mine->request.root,
                          describe(b).c_str()));
    return;
  }
  partners.pop_front();
  copy_pair(lock, sends ? *mine : *partner, sends ? *partner : *mine);
}

void withdraw(World& world, const std::shared_ptr<Transfer>& mine) {
  for (auto* table : {&world.sends, &world.recvs})
    for (auto& [pair, queue] : *table)
      queue.erase(std::remove(queue.begin(), queue.end(), mine), queue.end());
}

Picoseconds exchange(Stream& stream, const Slot& slot, Batch& batch, Picoseconds ready) {
  ncclComm& comm = *batch.comm;
  size_t bytes_out = 0, bytes_in = 0;
  for (const Request& r : batch.requests)
    (r.op == Op::send ? bytes_out : bytes_in) += r.transfer() ? r.bytes() : 0;
  std::vector<std::shared_ptr<Transfer>> mine;
  for (const Request& r : batch.requests) {
    if (!r.transfer()) continue;
    mine.push_back(std::make_shared<Transfer>());
    Transfer& t = *mine.back();
    t.request = r;
    t.time = ready;
    t.batch_bytes = r.op == Op::send ? bytes_out : bytes_in;
    t.device = comm.device;
    t.worker = &stream.worker;
    publish(&t.posted);
  }
  Picoseconds end = ready;
  {
    Lock lock;
    for (const auto& t : mine)
      if (!run_failed() && !comm.aborted) post(lock, comm, t);
    for (const auto& t : mine) {
      const auto text = [&] {
        return format("%s of communicator %d in %s%s%s%s", who(comm).c_str(), comm.world->number,
                      describe(t->request).c_str(), *slot.range ? " (" : "", slot.range,
                      *slot.range ? ")" : "");
      };
      block(lock, stream.worker, [&] { return t->done || (comm.aborted && !t->copying); }, text);
      while (t->copying && !t->done) lock.step_aside();
      if (!t->done) withdraw(*comm.world, t);
    }
  }
  for (const auto& t : mine) {
    if (!t->done) continue;
    observe(&t->finished);
    end = std::max(end, t->end);
    stream.record(slot, Kind::transfer, t->request.name(), t->start, t->end,
                  t->request.op == Op::send ? static_cast<int64_t>(t->request.bytes()) : 0);
  }
  return end;
}

void run_batch(Stream& stream, Slot& slot) {
  std::unique_ptr<Batch> batch(*reinterpret_cast<Batch**>(slot.closure));
  ncclComm& comm = *batch->comm;
  Picoseconds end = std::max(stream.now, slot.issue);
  {
    Lock lock;
    comm.waiters.push_back(&stream.worker);
    const auto text = [&] { return who(comm) + " behind its communicator's earlier work"; };
    const auto turn = [&] { return comm.done == batch->ticket; };
    while (!block(lock, stream.worker, turn, text)) lock.step_aside();  // in order, failed or not
    comm.waiters.erase(std::find(comm.waiters.begin(), comm.waiters.end(), &stream.worker));
    end = std::max(end, comm.end);
  }
  for (const Request& r : batch->requests)
    if (!r.transfer() && !run_failed()) end = meet(stream, slot, *batch, r, end);
  end = exchange(stream, slot, *batch, end);
  stream.now = end;
  publish(&comm.finished);
  Lock lock;
  comm.end = end;
  ++stream.nccl_done;
  stream.nccl_end = end;
  ++comm.done;  // from here on the communicator may be gone
  for (Actor* waiter : comm.waiters) wake(*waiter);
}

// ---- issuing -------------------------------------------------------------------------------

struct Extent {
  const char* begin;
  size_t bytes;
  bool overlaps(const Extent& o) const {
    return bytes && o.bytes && begin < o.begin + o.bytes && o.begin < begin + bytes;
  }
};

// What this rank's buffers must hold: a gathering kind's larger side is nranks * count.
Extent read_of(const Request& r, int p, int rank) {
  const bool none = r.op == Op::recv || (r.op == Op::broadcast && rank != r.root);
  return {static_cast<const char*>(r.send),
          none ? 0 : r.bytes() * (r.op == Op::reduce_scatter ? p : 1)};
}
Extent write_of(const Request& r, int p, int rank) {
  const bool none = r.op == Op::send || (r.op == Op::reduce && rank != r.root);
  return {static_cast<const char*>(r.recv),
          none ? 0 : r.bytes() * (r.op == Op::all_gather ? p : 1)};
}

std::string buffer_problem(const Request& r, const ncclComm& comm) {
  const int p = comm.world->size();
  const Extent in = read_of(r, p, comm.rank), out = write_of(r, p, comm.rank);
  std::string problem;
  if (in.bytes) problem = pointer_problem(in.begin, in.bytes, comm.device, "sendbuff");
  if (problem.empty() && out.bytes)
    problem = pointer_problem(out.begin, out.bytes, comm.device, "recvbuff");
  if (!problem.empty() || r.transfer() || !in.overlaps(out)) return problem;
  const size_t offset = r.bytes() * comm.rank;
  const bool in_place = r.op == Op::all_gather       ? in.begin == out.begin + offset
                        : r.op == Op::reduce_scatter ? out.begin == in.begin + offset
                                                     : in.begin == out.begin;
  return in_place ? "" : "sendbuff and recvbuff overlap other than in place";
}

// A group's operations have no order among themselves.
std::string group_problem(const std::vector<std::pair<ncclComm*, Request>>& requests) {
  std::map<std::pair<ncclComm*, int>, int> to_self;
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto& [comm, r] = requests[i];
    const int p = comm->world->size();
    if (r.transfer() && r.root == comm->rank)
      to_self[{comm, 0}] += r.op == Op::send ? 1 : -1;
    for (size_t j = 0; j < requests.size(); ++j) {
      const auto& [other_comm, o] = requests[j];
      if (i == j) continue;
      const Extent out = write_of(r, p, comm->rank);
      const int q = other_comm->world->size();
      if (out.overlaps(read_of(o, q, other_comm->rank)) ||
          out.overlaps(write_of(o, q, other_comm->rank)))
        return format("%s writes what %s of the same group uses, and a group has no order",
                      describe(r).c_str(), describe(o).c_str());
    }
  }
  for (const auto& [key, balance] : to_self)
    if (balance != 0) return "a send to oneself needs its receive in the same group";
  return "";
}

// VIRTUAL_GPU_STRICT=1: the first use of a pair, or of a communicator, makes the host wait for
// the peers' calls, as NCCL may.
void connect(Host& h, const std::vector<std::pair<ncclComm*, Request>>& requests) {
  Lock lock;
  const auto call = [](const auto& entry) -> std::pair<bool, bool>& {
    const auto& [comm, r] = entry;
    const bool sends = r.op == Op::send;
    return comm->world->connected[sends ? std::pair(comm->rank, r.root)
                                        : std::pair(r.root, comm->rank)];
  };
  for (const auto& entry : requests) {
    const auto& [comm, r] = entry;
    if (r.transfer()) (r.op == Op::send ? call(entry).first : call(entry).second) = true;
    else comm->world->first_collective.insert(comm->rank);
    for (Actor* a : comm->world->connecting) wake(*a);
  }
  for (const auto& entry : requests) {
    const auto& [comm, r] = entry;
    World& w = *comm->world;
    w.connecting.push_back(&h.actor);
    const Request& request = r;
    const ncclComm& c = *comm;
    block(lock, h.actor,
          [&] {
            return request.transfer() ? call(entry).first && call(entry).second
                                      : static_cast<int>(w.first_collective.size()) == w.size();
          },
          [&] { return who(c) + " in the first " + describe(request) + " (strict: the host waits)"; });
    w.connecting.erase(std::find(w.connecting.begin(), w.connecting.end(), &h.actor));
  }
}

void count(const ncclComm& comm, const Request& r) {
  DeviceLock guard(device(comm.device));
  Counters& n = device(comm.device).counters;
  (r.op == Op::send ? n.sends : r.op == Op::recv ? n.receives : n.collectives)++;
  if (r.op == Op::send) n.bytes_sent += static_cast<int64_t>(r.bytes());
  if (!r.transfer()) n.collective_bytes_sent += bytes_sent(r, comm.world->size());
}

// One batch: in the first request's stream, with the other streams joined before and after.
void launch_batch(Host& h, ncclComm& comm, std::vector<Request>&& requests) {
  Stream& first = *requests[0].stream;
  std::set<Stream*> others;
  for (const Request& r : requests)
    if (r.stream != &first) others.insert(r.stream);
  for (Stream* s : others) wait_mark_in_stream(first, record_mark(*s));
  auto* batch = new Batch{&comm, 0, std::move(requests)};
  const char* name = batch->requests[0].name();
  {
    Lock lock;
    adopt(lock, comm, h);
    batch->ticket = comm.batches++;
    for (Request& r : batch->requests)
      if (!r.transfer()) r.sequence = comm.collectives++;
    ++first.nccl_issued;
  }
  for (const Request& r : batch->requests) count(comm, r);
  enqueue(first, name, Kind::collective, 0, 0, batch, run_batch);
  for (Stream* s : others) wait_mark_in_stream(*s, record_mark(first));
}

ncclResult_t launch(Call& call, std::vector<std::pair<ncclComm*, Request>>&& requests) {
  if (const std::string problem = group_problem(requests); !problem.empty())
    return refuse(call, ncclInvalidUsage, problem);
  if (strict()) connect(call.host, requests);
  std::vector<ncclComm*> order;
  for (const auto& [comm, _] : requests)
    if (std::find(order.begin(), order.end(), comm) == order.end()) order.push_back(comm);
  for (ncclComm* comm : order) {
    std::vector<Request> own;
    for (const auto& [c, r] : requests)
      if (c == comm) own.push_back(r);
    launch_batch(call.host, *comm, std::move(own));
  }
  return ncclSuccess;
}

// Checks as NCCL does, and what it does not; records or launches.
ncclResult_t issue(ncclComm* comm, Request r, cudaStream_t stream) {
  Call call(r.name());
  if (!call.ok()) return failed_before(call);
  if (!known(comm))
    return refuse(call, ncclInvalidArgument, "comm is NULL or no live communicator");
  if (const std::string p = stream_problem(stream, comm->device); !p.empty())
    return refuse(call, ncclInvalidArgument, p);
  r.stream = &get(stream);
  if (!size_of(r.type))
    return refuse(call, ncclInvalidArgument, format("datatype %d is not supported", r.type));
  const bool reduces = r.op == Op::all_reduce || r.op == Op::reduce || r.op == Op::reduce_scatter;
  if (reduces && (r.reduction < ncclSum || r.reduction > ncclAvg || !can_reduce(r.type)))
    return refuse(call, ncclInvalidArgument,
                  format("op %d on datatype %d is not supported", r.reduction, r.type));
  if (r.root < 0 || r.root >= comm->world->size())
    return refuse(call, ncclInvalidArgument,
                  format("%s %d is not a rank from 0 to %d", r.transfer() ? "peer" : "root",
                         r.root, comm->world->size() - 1));
  if (r.count > (size_t{1} << 60) / size_of(r.type) / comm->world->size())
    return refuse(call, ncclInvalidArgument, format("count %zu overflows", r.count));
  if (const std::string p = buffer_problem(r, *comm); !p.empty())
    return refuse(call, ncclInvalidArgument, who(*comm) + ": " + p);
  if (r.count == 0 && !r.transfer()) return ncclSuccess;  // as NCCL: no launch, no meeting
  if (group().depth > 0) {
    group().requests.push_back({comm, r});
    return ncclSuccess;
  }
  return launch(call, {{comm, r}});
}

// "" or why this id cannot bring ranks together here.
std::string id_problem(const ncclUniqueId& id) {
  int pid = 0, number = 0;
  if (std::sscanf(id.internal, "virtual-nccl %d %d", &pid, &number) != 2)
    return "the unique id does not come from ncclGetUniqueId";
  if (pid != getpid())
    return "the unique id comes from another process; virtual GPUs are threads of one process";
  return "";
}

// The last rank to come makes the communicator for all of them.
void arrive(Lock& lock, Pending& p, const std::string& id) {
  p.problem = p.problem.empty() ? duplicate_gpu(p.devices) : p.problem;
  if (p.problem.empty()) p.result = make_world(lock, p.devices, p.hosts);
  p.done = true;
  registry().pending.erase(id);
  for (Host* h : p.hosts)
    if (h) wake(h->actor);
}

}  // namespace

// ---- calls ---------------------------------------------------------------------------------

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  Call call("ncclGetUniqueId");
  if (!call.ok()) return failed_before(call);
  if (!id) return refuse(call, ncclInvalidArgument, "uniqueId is NULL");
  Lock lock;
  *id = {};
  std::snprintf(id->internal, sizeof id->internal, "virtual-nccl %d %d", getpid(),
                registry().next_id++);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  Call call("ncclCommInitRank");
  if (!call.ok()) return failed_before(call);
  if (!comm) return refuse(call, ncclInvalidArgument, "comm is NULL");
  *comm = nullptr;
  if (nranks < 1 || rank < 0 || rank >= nranks)
    return refuse(call, ncclInvalidArgument, format("rank %d of %d", rank, nranks));
  if (const std::string p = id_problem(id); !p.empty())
    return refuse(call, ncclInvalidUsage, p);
  if (group().depth > 0)
    return refuse(call, ncclInvalidUsage, "not in a group: one thread a rank, or ncclCommInitAll");
  Host& h = call.host;
  std::string problem;
  {
    Lock lock;
    auto& entry = registry().pending[id.internal];
    if (!entry) {
      entry = std::make_shared<Pending>();
      entry->hosts.resize(nranks);
      entry->devices.resize(nranks);
    }
    const std::shared_ptr<Pending> p = entry;
    if (static_cast<int>(p->hosts.size()) != nranks) {
      p->problem = format("one rank says %zu ranks, another %d", p->hosts.size(), nranks);
      arrive(lock, *p, id.internal);
    } else if (p->hosts[rank]) {
      p->problem = format("rank %d comes twice", rank);
      arrive(lock, *p, id.internal);
    } else {
      p->hosts[rank] = &h;
      p->devices[rank] = h.device;
      p->time = std::max(p->time, h.now);
      if (++p->arrived == nranks) arrive(lock, *p, id.internal);
      const auto text = [&] { return format("rank %d of %d in ncclCommInitRank", rank, nranks); };
      block(lock, h.actor, [&] { return p->done; }, text,
            std::chrono::system_clock::now() + init_timeout());
    }
    problem = p->problem;
    if (!p->done) {
      problem = run_failed() ? "the run has failed"
                             : format("%d of %d ranks came within %lld s", p->arrived, nranks,
                                      static_cast<long long>(init_timeout().count() / 1000));
      p->hosts[rank] = nullptr;
      --p->arrived;
    }
    if (problem.empty()) {
      *comm = p->result[rank];
      h.now = std::max(h.now, p->time);
    }
  }
  return *comm ? ncclSuccess : refuse(call, ncclInvalidUsage, problem);
}

ncclResult_t ncclCommInitAll(ncclComm_t* comms, int ndev, const int* devlist) {
  Call call("ncclCommInitAll");
  if (!call.ok()) return failed_before(call);
  if (!comms || ndev < 1) return refuse(call, ncclInvalidArgument, format("%d devices", ndev));
  std::vector<int> devices(ndev);
  for (int i = 0; i < ndev; ++i) {
    devices[i] = devlist ? devlist[i] : i;
    if (devices[i] < 0 || devices[i] >= device_count())
      return refuse(call, ncclInvalidArgument,
                    format("there is no GPU %d, there are %d", devices[i], device_count()));
  }
  if (const std::string p = duplicate_gpu(devices); !p.empty())
    return refuse(call, ncclInvalidUsage, p);
  Lock lock;
  const auto made = make_world(lock, devices, std::vector<Host*>(ndev, &call.host));
  std::copy(made.begin(), made.end(), comms);
  return ncclSuccess;
}

namespace {

// Colours become communicators, ranks sorted by key, ties by the parent's rank.
void split_now(Lock& lock, World& world, Split& s) {
  std::map<int, std::vector<std::pair<int, int>>> members;
  for (int r = 0; r < world.size(); ++r)
    if (s.color_key[r].first >= 0) members[s.color_key[r].first].push_back({s.color_key[r].second, r});
  for (auto& [color, list] : members) {
    std::sort(list.begin(), list.end());
    std::vector<int> devices;
    std::vector<Host*> hosts;
    for (const auto& [key, r] : list) {
      devices.push_back(world.ranks[r]->device);
      hosts.push_back(world.ranks[r]->thread);
    }
    const auto made = make_world(lock, devices, hosts);
    for (size_t i = 0; i < list.size(); ++i) s.result[list[i].second] = made[i];
  }
  s.done = true;
  for (Actor* a : s.waiting) wake(*a);
}

}  // namespace

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
                           ncclConfig_t* config) {
  Call call("ncclCommSplit");
  if (!call.ok()) return failed_before(call);
  if (!known(comm) || !newcomm)
    return refuse(call, ncclInvalidArgument, "comm is no live communicator, or newcomm is NULL");
  *newcomm = nullptr;
  if (color < 0 && color != NCCL_SPLIT_NOCOLOR)
    return refuse(call, ncclInvalidArgument, format("color %d is negative", color));
  if (config) return refuse(call, ncclInvalidArgument, "config must be NULL");
  if (group().depth > 0) return refuse(call, ncclInvalidUsage, "not in a group");
  {
    Lock lock;
    adopt(lock, *comm, call.host);
    World& world = *comm->world;
    auto& entry = world.splits[comm->splits++];
    if (!entry) {
      entry = std::make_shared<Split>();
      entry->color_key.resize(world.size());
      entry->result.resize(world.size());
    }
    const std::shared_ptr<Split> s = entry;
    s->color_key[comm->rank] = {color, key};
    s->waiting.push_back(&call.host.actor);
    s->time = std::max(s->time, call.host.now);
    if (++s->arrived == world.size()) {
      world.splits.erase(comm->splits - 1);
      split_now(lock, world, *s);
    }
    const auto text = [&] { return who(*comm) + " in ncclCommSplit"; };
    if (block(lock, call.host.actor, [&] { return s->done; }, text)) {
      *newcomm = s->result[comm->rank];
      call.host.now = std::max(call.host.now, s->time);
      return ncclSuccess;
    }
  }
  return refuse(call, ncclRemoteError, run_failure());
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  Call call("ncclCommDestroy");  // also after a failure: what it owns must end
  if (!comm) return ncclSuccess;
  if (!known(comm))
    return refuse(call, ncclInvalidArgument, "comm is no live communicator (destroyed twice?)");
  wait_for_batches(call.host, *comm, "ncclCommDestroy");
  Lock lock;
  leave(lock, comm, "has left (ncclCommDestroy)");
  return call.ok() || run_failed() ? ncclSuccess : ncclSystemError;
}

// Ends this rank's waits and no others': a peer learns of it only by waiting in vain.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  Call call("ncclCommAbort");
  if (!comm) return ncclSuccess;
  if (!known(comm)) return refuse(call, ncclInvalidArgument, "comm is no live communicator");
  {
    Lock lock;
    comm->aborted = true;
    for (const auto& [_, c] : comm->world->collectives)
      if (c->from[comm->rank].worker) wake(*c->from[comm->rank].worker);
    for (auto* table : {&comm->world->sends, &comm->world->recvs})
      for (const auto& [_, queue] : *table)
        for (const auto& t : queue)
          if (t->device == comm->device) wake(*t->worker);
  }
  wait_for_batches(call.host, *comm, "ncclCommAbort");
  Lock lock;
  leave(lock, comm, "has left (ncclCommAbort)");
  return call.ok() || run_failed() ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError) {
  Call call("ncclCommGetAsyncError");
  if (!comm || !asyncError) return refuse(call, ncclInvalidArgument, "an argument is NULL");
  *asyncError = run_failed() ? ncclRemoteError : ncclSuccess;
  return call.ok() || run_failed() ? ncclSuccess : failed_before(call);
}

template <class Value>
static ncclResult_t tell(const char* name, ncclComm_t comm, int* answer, Value value) {
  Call call(name);
  if (!call.ok()) return failed_before(call);
  if (!known(comm)) return refuse(call, ncclInvalidArgument, "comm is no live communicator");
  *answer = value();
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return tell("ncclCommCount", comm, count, [&] { return comm->world->size(); });
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* index) {
  return tell("ncclCommCuDevice", comm, index, [&] { return comm->device; });
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return tell("ncclCommUserRank", comm, rank, [&] { return comm->rank; });
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError: return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
  }
  return "unknown result code";
}

const char* ncclGetLastError(ncclComm_t) { return host().detail.c_str(); }

ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  return issue(comm, {Op::all_reduce, sendbuff, recvbuff, count, datatype, op, 0, nullptr}, stream);
}

ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count,
                        ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm,
                        cudaStream_t stream) {
  return issue(comm, {Op::reduce, sendbuff, recvbuff, count, datatype, op, root, nullptr}, stream);
}

ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count,
                           ncclDataType_t datatype, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return issue(comm, {Op::broadcast, sendbuff, recvbuff, count, datatype, ncclSum, root, nullptr},
               stream);
}

ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  return issue(comm, {Op::reduce_scatter, sendbuff, recvbuff, recvcount, datatype, op, 0, nullptr},
               stream);
}

ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount,
                           ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, {Op::all_gather, sendbuff, recvbuff, sendcount, datatype, ncclSum, 0, nullptr},
               stream);
}

ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, {Op::send, sendbuff, nullptr, count, datatype, ncclSum, peer, nullptr}, stream);
}

ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, {Op::recv, nullptr, recvbuff, count, datatype, ncclSum, peer, nullptr}, stream);
}

ncclResult_t ncclGroupStart() {
  Call call("ncclGroupStart");
  if (!call.ok()) return failed_before(call);
  ++group().depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  Call call("ncclGroupEnd");
  Group& g = group();
  if (g.depth == 0)
    return refuse(call, ncclInvalidUsage, "there was no ncclGroupStart on this thread");
  if (!call.ok()) failed_before(call);  // into g.error
  if (--g.depth > 0) return g.error;
  const ncclResult_t error = std::exchange(g.error, ncclSuccess);
  const auto requests = std::exchange(g.requests, {});
  if (error != ncclSuccess) return error;  // one bad call drops the whole group
  return requests.empty() ? ncclSuccess
                          : launch(call, std::vector<std::pair<ncclComm*, Request>>(requests));
}
