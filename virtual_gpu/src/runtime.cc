// Actors, streams, marks, memory and errors: what the API calls in cuda.cc stand on.
#include "runtime.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <shared_mutex>
#include <stdexcept>

namespace virtual_gpu {
namespace {

constexpr Picoseconds never = std::numeric_limits<Picoseconds>::max();

// Everything global lives for ever: threads may still end after main() has.
struct Runtime {
  std::mutex mutex;
  Actor* woken = nullptr;              // the first whose bell has yet to ring
  std::set<Actor*> actors;
  std::set<Host*> hosts;
  int running = 0;                     // counted actors that are not blocked
  int next_actor = 0;
  std::atomic<bool> failed{false};
  std::string failure;

  std::shared_mutex tables;            // Quiet; guards allocations, freed and streams
  std::map<uintptr_t, Allocation> allocations, freed;
  std::set<const Stream*> streams;

  std::vector<std::unique_ptr<Device>> devices;
  Hardware hardware;
  bool skip_math = false, strict = false;
  std::chrono::milliseconds init_timeout{20000};
  uint64_t jitter = 0;
  int64_t fail_call = 0;
  int fail_device = 0;
};

}  // namespace

void refuse_environment(const std::string& line) {
  std::fprintf(stderr, "%s\n", line.c_str());
  std::fflush(nullptr);
  std::_Exit(2);  // no destructor may run: this can be any thread, before or amid anything
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

namespace {

int64_t whole_number(const char* name, const std::string& text, int64_t least, int64_t most) {
  char* end = nullptr;
  errno = 0;
  const long long x = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end || errno || x < least || x > most)
    refuse_environment(format("%s=%s is not a whole number from %lld to %lld", name, text.c_str(),
                              static_cast<long long>(least), static_cast<long long>(most)));
  return x;
}

bool flag(const char* name) {
  const std::string text = environment(name);
  return !text.empty() && whole_number(name, text, 0, 1) == 1;
}

// As on a GPU, the list counts up to the first entry that names no device.
int listed_devices(const std::string& list, int n) {
  int listed = 0;
  for (size_t at = 0; at <= list.size(); ++listed) {
    const std::string entry = list.substr(at, list.find(',', at) - at);
    const bool digits = !entry.empty() && entry.size() < 6 &&
                        entry.find_first_not_of("0123456789") == std::string::npos;
    if (!digits || std::atoi(entry.c_str()) >= n) break;
    at += entry.size() + 1;
  }
  return listed;
}

// CUDA_VISIBLE_DEVICES limits the devices as on a GPU: an empty list leaves none.
int visible_devices() {
  const std::string count = environment("VIRTUAL_GPU_COUNT");
  int n = count.empty() ? 8 : static_cast<int>(whole_number("VIRTUAL_GPU_COUNT", count, 0, 4096));
  if (const char* list = std::getenv("CUDA_VISIBLE_DEVICES")) n = listed_devices(list, n);
  return n;
}

void read_environment(Runtime& r) {
  const std::string preset = environment("VIRTUAL_GPU");
  try {
    r.hardware = parse_hardware(preset.empty() ? "h100" : preset, environment("VIRTUAL_GPU_MEMORY"));
  } catch (const std::invalid_argument& e) {
    refuse_environment(e.what());
  }
  const std::string jitter = environment("VIRTUAL_GPU_JITTER"), fail = environment("VIRTUAL_GPU_FAIL");
  r.skip_math = flag("VIRTUAL_GPU_SKIP_MATH");
  r.strict = flag("VIRTUAL_GPU_STRICT");
  r.init_timeout = std::chrono::seconds(20);
  if (const std::string s = environment("VIRTUAL_GPU_INIT_SECONDS"); !s.empty())
    r.init_timeout = std::chrono::seconds(whole_number("VIRTUAL_GPU_INIT_SECONDS", s, 1, 3600));
  r.jitter = jitter.empty() ? 0 : whole_number("VIRTUAL_GPU_JITTER", jitter, 0, never);
  r.fail_call = 0;
  if (!fail.empty()) {
    const size_t colon = fail.find(':');
    r.fail_call = whole_number("VIRTUAL_GPU_FAIL", fail.substr(0, colon), 1, never);
    r.fail_device = colon == std::string::npos ? 0
        : static_cast<int>(whole_number("VIRTUAL_GPU_FAIL", fail.substr(colon + 1), 0, 4095));
  }
  r.devices.clear();
  for (int i = 0, n = visible_devices(); i < n; ++i) r.devices.push_back(std::make_unique<Device>());
  open_timeline_files();
}

Runtime& runtime() {
  static Runtime* r = [] {
    auto* made = new Runtime;
    read_environment(*made);
    return made;
  }();
  return *r;
}

}  // namespace

std::function<std::string()> describe_communicators = [] { return std::string(); };
std::function<void(Lock&)> forget_communicators = [](Lock&) {};
std::function<void(Host&)> thread_ends = [](Host&) {};
const Hardware& hardware() { return runtime().hardware; }
bool skip_math() { return runtime().skip_math; }
bool strict() { return runtime().strict; }
std::chrono::milliseconds init_timeout() { return runtime().init_timeout; }
int device_count() { return static_cast<int>(runtime().devices.size()); }
Device& device(int index) { return *runtime().devices[index]; }

std::string format(const char* text, ...) {
  char line[1024];
  va_list arguments;
  va_start(arguments, text);
  std::vsnprintf(line, sizeof line, text, arguments);
  va_end(arguments);
  return line;
}

// ---- blocking, and what happens when nobody can go on --------------------------------------

static void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Not a local static: its guard would be an edge from the first stream to all others.
static const int cores = static_cast<int>(std::thread::hardware_concurrency());

// Whoever has it is soon done; to sleep and be woken among thousands of threads takes longer.
void Lock::lock() {
  for (int i = 0; i < 1000; ++i, relax())
    if (runtime().mutex.try_lock()) return;
  runtime().mutex.lock();
}

void Lock::unlock() {
  Actor* woken = std::exchange(runtime().woken, nullptr);
  runtime().mutex.unlock();
  while (woken) std::exchange(woken, woken->next_woken)->bell.ring();  // then it may be gone
}

void Lock::step_aside() {
  unlock();
  std::this_thread::yield();
  lock();
}

namespace {

// What each stream waits in, by GPU; hosts only where no stream waits, since they wait for those.
std::string describe_blocked() {
  std::vector<std::tuple<bool, int, int, std::string>> lines;
  for (Actor* a : runtime().actors)
    if (a->blocked && a->waiting_for)
      lines.push_back({a->is_host, a->device, a->id, a->waiting_for()});
  std::sort(lines.begin(), lines.end());
  std::string text;
  int told = 0;
  for (const auto& [is_host, on_device, id, what] : lines) {
    if (is_host != std::get<0>(lines[0])) break;
    if (++told <= 16) text += format("; GPU %d: %s", on_device, what.c_str());
  }
  return told > 16 ? text + format("; and %d more", told - 16) : text;
}

// All counted actors are blocked. Either time passes for the host that polls and has the least
// time to wait for, or nothing will ever happen again.
void quiescent(Lock& lock) {
  Runtime& r = runtime();
  Actor* first = nullptr;
  bool stuck = false;
  for (Actor* a : r.actors) {
    if (!a->blocked) continue;
    if (a->timed) return;  // it will go on, or tell who is missing
    stuck |= static_cast<bool>(a->waiting_for);
    if (!a->polling || a->resume == never) continue;
    const auto key = [](const Actor* x) { return std::tuple(x->resume, x->device, x->id); };
    if (!first || key(a) < key(first)) first = a;
  }
  if (first) {
    first->resumed = true;
    wake(*first);
  } else if (stuck) {
    fail_run(lock, "deadlock: every rank waits for another" + describe_blocked() +
                       describe_communicators());
  }
}

}  // namespace

static void sleep(Lock& lock, Actor& actor, Deadline deadline) {
  actor.blocked = true;
  if (actor.counted && --runtime().running == 0) quiescent(lock);
  lock.unlock();
  while (!actor.bell.wait(deadline)) {
    lock.lock();
    wake(actor);
    lock.unlock();
  }
  lock.lock();
}

bool block(Lock& lock, Actor& actor, const std::function<bool()>& done,
           const std::function<std::string()>& waiting_for, Deadline deadline) {
  while (!done()) {
    actor.timed = deadline != no_deadline;
    if (run_failed() || (actor.timed && std::chrono::system_clock::now() >= deadline)) return false;
    actor.waiting_for = waiting_for;
    sleep(lock, actor, deadline);
  }
  return true;
}

void wake(Actor& actor) {
  if (!actor.blocked) return;
  actor.blocked = false;
  if (actor.counted) ++runtime().running;
  actor.next_woken = std::exchange(runtime().woken, &actor);
}

void set_counted(Lock& lock, Actor& actor, bool counted) {
  if (actor.counted == counted) return;
  actor.counted = counted;
  if (actor.blocked) return;
  runtime().running += counted ? 1 : -1;
  if (runtime().running == 0) quiescent(lock);
}

void fail_run(Lock&, const std::string& report) {
  Runtime& r = runtime();
  if (r.failed) return;
  r.failure = report;
  r.failed = true;
  for (Actor* a : r.actors) wake(*a);
}

bool run_failed() { return runtime().failed.load(std::memory_order_relaxed); }

std::string run_failure() {
  Lock lock;
  return runtime().failure;
}

// ---- marks ---------------------------------------------------------------------------------

namespace {

void add_waiter(Mark& mark, Actor& actor) {
  if (std::find(mark.waiters.begin(), mark.waiters.end(), &actor) == mark.waiters.end())
    mark.waiters.push_back(&actor);
}

void remove_waiter(Mark& mark, Actor& actor) {
  mark.waiters.erase(std::remove(mark.waiters.begin(), mark.waiters.end(), &actor),
                     mark.waiters.end());
}

bool is_done(const Mark& mark) { return mark.done.load(std::memory_order_relaxed); }

void complete(Stream& stream, Slot& slot) {
  Mark* mark = *reinterpret_cast<Mark**>(slot.closure);
  const MarkPointer owner(mark);
  mark->time = stream.now = std::max(stream.now, slot.issue);
  mark->done.store(true, std::memory_order_release);
  Lock lock;
  for (Actor* waiter : mark->waiters) wake(*waiter);
}

void wait_in_stream(Stream& stream, Slot& slot) {
  Mark* mark = *reinterpret_cast<Mark**>(slot.closure);
  const MarkPointer owner(mark);
  wait_for_mark(stream.worker, *mark, "cudaStreamWaitEvent");
  if (is_done(*mark)) stream.now = std::max({stream.now, slot.issue, mark->time});
}

}  // namespace

void wait_for_mark(Actor& actor, Mark& mark, const char* what) {
  if (!mark.done.load(std::memory_order_acquire)) {
    Lock lock;
    add_waiter(mark, actor);
    block(lock, actor, [&] { return is_done(mark); },
          [what, &mark] { return format("in %s for work of GPU %d", what, mark.device); });
    remove_waiter(mark, actor);
  }
  (void)mark.done.load(std::memory_order_acquire);  // the edge, outside Lock's Quiet
}

MarkPointer record_mark(Stream& stream) {
  MarkPointer mark(new Mark);
  mark->device = stream.device;
  mark->references.fetch_add(1, std::memory_order_relaxed);  // the queue's
  enqueue(stream, "mark", Kind::kernel, 0, 0, mark.get(), complete);
  return mark;
}

// Conservative answers on a modelled clock. A mark that is done has a time, and it is ready if
// that is not after the host's. One that is not done may still turn out to be earlier, so the
// host waits (in real time) until it is done or nothing else can go on; then, and only then,
// "not ready" is certain. Asking again means that the host has nothing else to do: its time
// moves to the first of the marks it has asked about. So a polling loop gives the same answers
// at every run, and needs no made-up cost of a poll.
bool poll(Host& h, const MarkPointer& mark) {
  const auto ready = [&] { return is_done(*mark.get()) && mark->time <= h.now; };
  const auto sees_edge = [&] { return mark->done.load(std::memory_order_acquire); };
  if (sees_edge() && mark->time <= h.now) return true;
  {
    Lock lock;
    const bool again = h.asked.count(mark.get());
    if (!again) {
      h.asked.insert(mark.get());
      h.asked_owners.push_back(mark);
    }
    const auto next = [&] {
      Picoseconds t = never;
      for (const Mark* m : h.asked)
        if (is_done(*m)) t = std::min(t, std::max(m->time, h.now));
      return t;
    };
    const auto all_known = [&] {
      return std::all_of(h.asked.begin(), h.asked.end(), [](Mark* m) { return is_done(*m); });
    };
    const auto known = [&] { return again ? all_known() : is_done(*mark.get()); };
    for (Mark* m : h.asked) add_waiter(*m, h.actor);
    h.actor.polling = true;
    h.actor.resumed = false;
    block(lock, h.actor,
          [&] {
            h.actor.resume = again ? next() : h.now;
            return h.actor.resumed || known();
          },
          [] { return std::string("polls an event or stream that will never be ready"); });
    h.actor.polling = false;
    for (Mark* m : h.asked) remove_waiter(*m, h.actor);
    if (again && !run_failed()) {
      h.now = std::max(h.now, next());
      h.asked.clear();
      h.asked_owners.clear();
    }
  }
  if (sees_edge() && ready()) return true;
  if (h.asked.insert(mark.get()).second) h.asked_owners.push_back(mark);
  return false;
}

void wait_mark_in_stream(Stream& stream, const MarkPointer& mark) {
  mark->references.fetch_add(1, std::memory_order_relaxed);
  enqueue(stream, "wait", Kind::kernel, 0, 0, mark.get(), wait_in_stream);
}

// ---- queue ---------------------------------------------------------------------------------

Queue::Queue() : head_(new Chunk), tail_(head_) {}

Queue::~Queue() {
  while (head_) delete std::exchange(head_, head_->next);
}

Slot& Queue::next() {
  const int64_t at = filled_ % chunk_slots;
  if (at == 0 && filled_ > 0) tail_ = tail_->next = new Chunk;
  return tail_->slots[at];
}

// The edge is the slot's own. The counter's would be too much: a worker that lags behind would
// learn of all that the host has learnt until its latest push.
void Queue::push() {
  publish(&tail_->slots[filled_ % chunk_slots]);
  Quiet quiet;
  published_.store(++filled_, std::memory_order_seq_cst);
}

Slot& Queue::front() {
  const int64_t at = taken_ % chunk_slots;
  if (at == 0 && taken_ > 0) {
    Quiet quiet;
    delete std::exchange(head_, head_->next);
  }
  observe(&head_->slots[at]);
  return head_->slots[at];
}

void Queue::pop() { finished_.store(++taken_, std::memory_order_seq_cst); }

// ---- streams -------------------------------------------------------------------------------

namespace {

// Sleeping and waking cost more than a short kernel; spinning helps only where the streams do
// not have to share cores.
bool spin_for_work(const Stream& s) {
  if (static_cast<int>(runtime().streams.size()) >= cores) return false;
  for (int i = 0; i < 2000; ++i) {
    if (s.queue.ready()) return true;
    relax();
  }
  return false;
}

bool wait_for_work(Stream& s) {
  if (spin_for_work(s)) return true;
  Lock lock;
  s.idle.store(true);
  const auto due = [&] { return s.queue.ready() || s.closing.load(std::memory_order_relaxed); };
  while (!due()) {  // not block(): a worker without work is no rank that waits for another
    s.worker.waiting_for = nullptr;
    sleep(lock, s.worker, no_deadline);
  }
  s.idle.store(false, std::memory_order_relaxed);
  return s.queue.ready();
}

void jitter(Stream& s, uint64_t& state) {
  if (!runtime().jitter) return;
  if (!state) state = runtime().jitter * 0x9e3779b97f4a7c15u + s.device * 64u + s.number;
  state = state * 6364136223846793005u + 1442695040888963407u;
  const unsigned choice = static_cast<unsigned>(state >> 58);
  if (choice < 8) std::this_thread::sleep_for(std::chrono::microseconds(choice * 20));
  else if (choice < 24) std::this_thread::yield();
}

void wake_producer(Stream& s) {
  if (!s.producer_waits.load()) return;
  Lock lock;
  for (Actor* producer : s.waiting_producers) wake(*producer);
}

void work(Stream& s) {
  uint64_t jitter_state = 0;
  for (int64_t count = 1;; ++count) {
    while (!s.queue.ready())
      if (!wait_for_work(s)) return;
    Slot& slot = s.queue.front();
    jitter(s, jitter_state);
    slot.run(s, slot);
    s.queue.pop();
    if (count % 64 == 0) wake_producer(s);
  }
}

void wait_for_room(Stream& s) {
  if (s.queue.pending() < Queue::limit) return;
  Lock lock;
  Actor& actor = host().actor;
  s.waiting_producers.push_back(&actor);
  s.producer_waits.store(true);
  block(lock, actor, [&] { return s.queue.pending() < Queue::limit / 2; },
        [] { return std::string("in a launch: the stream's queue is full"); });
  std::erase(s.waiting_producers, &actor);
  s.producer_waits.store(!s.waiting_producers.empty(), std::memory_order_relaxed);
}

}  // namespace

void enqueue(Stream& stream, void (*run)(Stream&, Slot&), const char* call, Kind kind,
             Picoseconds cost, int64_t bytes, const void* closure, size_t closure_size) {
  Host& h = host();
  if (!h.asked.empty()) {  // new work can change what the host polls for
    h.asked.clear();
    h.asked_owners.clear();
  }
  wait_for_room(stream);
  {
    std::unique_lock<std::mutex> guard(stream.producer, std::defer_lock);
    {
      Quiet quiet;  // several threads may give one stream work; the slots are ours to guard
      guard.lock();
      Slot& slot = stream.queue.next();
      slot.run = run;
      slot.issue = h.now;
      slot.cost = cost;
      slot.call = call;
      slot.range = h.ranges.empty() ? "" : h.ranges.back();
      slot.step = h.ranges.empty() || std::strncmp(h.ranges[0], "step ", 5) ? "" : h.ranges[0];
      slot.bytes = bytes;
      slot.kind = kind;
      std::memcpy(slot.closure, closure, closure_size);
      stream.tail_is_last = false;
    }
    stream.queue.push();
    Quiet quiet;
    guard.unlock();
  }
  if (!stream.idle.load()) return;
  Lock lock;
  wake(stream.worker);
}

void Stream::occupy(const Slot& slot, Picoseconds earliest, Picoseconds cost) {
  const Picoseconds start = std::max({now, slot.issue, earliest});
  now = start + cost;
  record(slot, slot.kind, slot.call, start, now, slot.bytes);
}

void Stream::record(const Slot& slot, Kind kind, const char* call, Picoseconds start,
                    Picoseconds end, int64_t bytes) {
  if (recording())
    operations.push_back({device, number, kind, call, slot.range, slot.issue, start, end, bytes,
                          slot.step});
}

// Its thread is at its end, or never began.
static void remove_stream(Stream* s) {
  {
    Lock lock;
    runtime().actors.erase(&s->worker);
    if (--runtime().running == 0) quiescent(lock);  // it left its loop counted
    keep_operations(std::move(s->operations));
    std::unique_lock tables(runtime().tables);
    runtime().streams.erase(s);
  }
  DeviceLock guard(device(s->device));
  device(s->device).streams.erase(s);
  ++device(s->device).counters.streams_destroyed;
  delete s;
}

// Null where the machine has no thread left for it.
Stream* create_stream(int on_device) {
  auto* s = new Stream;
  s->device = s->worker.device = on_device;
  {
    DeviceLock guard(device(on_device));
    s->number = device(on_device).streams_ever++;
    device(on_device).streams.insert(s);
    ++device(on_device).counters.streams_created;
  }
  {
    Lock lock;
    s->worker.id = runtime().next_actor++;
    s->worker.counted = true;
    ++runtime().running;
    runtime().actors.insert(&s->worker);
    Quiet quiet;
    std::unique_lock tables(runtime().tables);
    runtime().streams.insert(s);
  }
  try {
    s->thread = std::thread(work, std::ref(*s));
  } catch (const std::system_error&) {
    remove_stream(s);
    return nullptr;
  }
  return s;
}

// Waits for the stream's work: a GPU would release the stream later, but here somebody has to
// join its thread.
void destroy_stream(Stream* s) {
  const MarkPointer all = record_mark(*s);
  wait_for_mark(host().actor, *all.get(), "cudaStreamDestroy");
  {
    Lock lock;
    s->closing = true;
    wake(s->worker);
  }
  s->thread.join();
  remove_stream(s);
}

Stream& get(cudaStream_t stream) { return *reinterpret_cast<Stream*>(stream); }

std::string stream_problem(cudaStream_t stream, int on_device) {
  if (!stream)
    return "stream 0 synchronises with every blocking stream and is refused: create one with "
           "cudaStreamNonBlocking";
  Quiet quiet;
  std::shared_lock tables(runtime().tables);
  if (!runtime().streams.count(&get(stream))) return "the stream does not exist (destroyed?)";
  if (on_device >= 0 && get(stream).device != on_device)
    return format("the stream belongs to GPU %d, the call is for GPU %d", get(stream).device,
                  on_device);
  return "";
}

// ---- memory --------------------------------------------------------------------------------

namespace {

const std::pair<const uintptr_t, Allocation>* containing(
    const std::map<uintptr_t, Allocation>& table, uintptr_t p) {
  auto it = table.upper_bound(p);
  if (it == table.begin()) return nullptr;
  --it;
  return p < it->first + std::max<size_t>(it->second.size, 1) ? &*it : nullptr;
}

std::string owner(const Allocation& a) {
  return a.pinned_host ? "pinned host memory" : format("memory of GPU %d", a.device);
}

}  // namespace

std::string pointer_problem(const void* p, size_t n, int on_device, const char* parameter,
                            bool pinned_allowed) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(p);
  Quiet quiet;
  std::shared_lock tables(runtime().tables);
  if (const auto* found = containing(runtime().allocations, at)) {
    const Allocation& a = found->second;
    if (a.pinned_host ? !pinned_allowed : a.device != on_device)
      return format("%s %p is %s, memory of GPU %d is needed", parameter, p, owner(a).c_str(),
                    on_device);
    const size_t left = found->first + a.size - at;
    if (n > left)
      return format("%s %p runs past its end: %zu bytes are used, %zu of %zu are left", parameter,
                    p, n, left, a.size);
    return "";
  }
  if (const auto* found = containing(runtime().freed, at))
    return format("%s %p was freed (it was %s)", parameter, p, owner(found->second).c_str());
  return format("%s %p is a host pointer, memory of GPU %d is needed", parameter, p, on_device);
}

// "" if [p, p+n) is host memory: anything that no GPU owns.
std::string host_pointer_problem(const void* p, const char* parameter) {
  Quiet quiet;
  std::shared_lock tables(runtime().tables);
  const auto* found = containing(runtime().allocations, reinterpret_cast<uintptr_t>(p));
  if (!p) return format("%s is null", parameter);
  if (found && !found->second.pinned_host)
    return format("%s %p is %s, host memory is needed", parameter, p, owner(found->second).c_str());
  return "";
}

void* allocate(size_t size, int on_device, bool pinned_host) {
  void* p = nullptr;
  if (posix_memalign(&p, 256, size)) return nullptr;
  // Not cleared on a GPU either. All bits set is a NaN in every type: reading it shows.
  if (!skip_math()) std::memset(p, 0xff, size);
  Quiet quiet;
  std::unique_lock tables(runtime().tables);
  const uintptr_t at = reinterpret_cast<uintptr_t>(p);
  auto& freed = runtime().freed;
  for (auto it = freed.lower_bound(at); it != freed.end() && it->first < at + size;)
    it = freed.erase(it);
  if (const auto* before = containing(freed, at)) freed.erase(before->first);
  runtime().allocations[at] = {size, on_device, pinned_host};
  return p;
}

// Forgets and frees it; false if it is no live allocation of that kind.
bool release(void* p, bool pinned_host, Allocation* was) {
  {
    Quiet quiet;
    std::unique_lock tables(runtime().tables);
    const auto it = runtime().allocations.find(reinterpret_cast<uintptr_t>(p));
    if (it == runtime().allocations.end() || it->second.pinned_host != pinned_host) return false;
    *was = it->second;
    runtime().freed.insert(*it);
    runtime().allocations.erase(it);
  }
  std::free(p);
  return true;
}

bool is_allocation(void* p, bool pinned_host, Allocation* what) {
  Quiet quiet;
  std::shared_lock tables(runtime().tables);
  const auto it = runtime().allocations.find(reinterpret_cast<uintptr_t>(p));
  if (it == runtime().allocations.end() || it->second.pinned_host != pinned_host) return false;
  *what = it->second;
  return true;
}

// ---- host threads and calls ----------------------------------------------------------------

Host& host() {
  thread_local Host h;
  return h;
}

Host::Host() {
  Lock lock;
  actor.is_host = true;
  actor.id = runtime().next_actor++;
  runtime().actors.insert(&actor);
  runtime().hosts.insert(this);
}

Host::~Host() {
  Lock lock;
  thread_ends(*this);
  set_counted(lock, actor, false);  // peers that wait for this thread now wait for ever
  runtime().actors.erase(&actor);
  runtime().hosts.erase(this);
}

Call::Call(const char* name) : name(name), host(virtual_gpu::host()) {
  if (device_count() == 0) {
    host.last_error = error = cudaErrorNoDevice;
    host.detail_code = error;
    host.detail = problem = std::string(name) + ": there is no virtual GPU";
    return;
  }
  Device& d = device(host.device);
  int64_t number;
  {
    DeviceLock guard(d);
    number = ++d.counters.api_calls;
    error = d.sticky;
    problem = d.sticky == cudaSuccess ? "" : d.sticky_detail;
  }
  if (run_failed()) {
    error = cudaErrorLaunchFailure;
    problem = run_failure();
  } else if (number == runtime().fail_call && host.device == runtime().fail_device) {
    error = cudaErrorUnknown;
    problem = format("%s: GPU %d's call %lld was told to fail by VIRTUAL_GPU_FAIL", name,
                     host.device, static_cast<long long>(number));
  }
  if (ok()) return;
  host.last_error = error;
  host.detail_code = error;
  host.detail = problem;
}

cudaError_t fail(Call& call, cudaError_t error, const std::string& detail) {
  call.host.last_error = error;
  call.host.detail_code = error;
  call.host.detail = std::string(call.name) + ": " + detail;
  if (error == cudaErrorIllegalAddress) {  // sticky: on a GPU the context is gone
    DeviceLock guard(device(call.host.device));
    device(call.host.device).sticky = error;
    device(call.host.device).sticky_detail = call.host.detail;
  }
  return error;
}

// ---- virtual_gpu.h -------------------------------------------------------------------------

Counters counters(int index) {
  DeviceLock guard(device(index));
  return device(index).counters;
}

Picoseconds host_time() { return host().now; }

void configure(const std::string& text) { runtime().hardware = parse_hardware(text, ""); }

static void forget(Host& h) {
  h.now = 0;
  h.device = h.actor.device = 0;
  h.last_error = cudaSuccess;
  h.detail_code = 0;
  h.detail.clear();
  h.asked.clear();
  h.asked_owners.clear();
}

void reset() {
  Runtime& r = runtime();
  host();  // also of this thread, if it has made no call yet
  {
    Lock lock;
    std::unique_lock tables(r.tables);
    if (!r.streams.empty()) {
      std::fprintf(stderr, "virtual_gpu::reset: %zu streams are still there\n", r.streams.size());
      std::abort();
    }
    for (const auto& [at, _] : r.allocations) std::free(reinterpret_cast<void*>(at));
    r.allocations.clear();
    r.freed.clear();
    r.failed = false;
    r.failure.clear();
    forget_communicators(lock);
    forget_operations();
    for (Host* h : r.hosts) forget(*h);
  }
  read_environment(r);
}

}  // namespace virtual_gpu
