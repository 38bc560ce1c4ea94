// Inside of the virtual GPU. Three kinds of actor move data: host threads, which issue work;
// streams, one worker thread each, which do it in order; and nobody else.
//
// Happens-before, as ThreadSanitizer sees it, has CUDA's edges and no others:
//   host -> stream    publish() and observe() of the operation's slot in the queue
//   stream -> waiter  a Mark's release store and acquire load (events, synchronize, query)
//   peer <-> peer     publish() and observe() around a collective or a matched transfer
// All else that keeps this runtime itself consistent (one mutex, condition variables, counters)
// is hidden from the sanitizer by Quiet, since its edges would hide a course program's mistake.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_runtime.h"
#include "hardware.h"
#include "virtual_gpu.h"

#if defined(__SANITIZE_THREAD__)
#define VIRTUAL_GPU_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define VIRTUAL_GPU_TSAN 1
#endif
#endif

#ifdef VIRTUAL_GPU_TSAN
extern "C" {
void AnnotateIgnoreSyncBegin(const char*, int);
void AnnotateIgnoreSyncEnd(const char*, int);
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
void __tsan_acquire(void*);
void __tsan_release(void*);
void __tsan_read_range(void*, unsigned long);
void __tsan_write_range(void*, unsigned long);
}
#endif

namespace virtual_gpu {

// ---- what the sanitizer sees ---------------------------------------------------------------

#ifdef VIRTUAL_GPU_TSAN
struct Quiet {
  Quiet() {
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;
  ~Quiet() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
  }
};
// Inside a Quiet, for the course's own data: the sanitizer sees this again.
struct Aloud {
  Aloud() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
  }
  Aloud(const Aloud&) = delete;
  ~Aloud() {
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
};
inline void publish(void* tag) { __tsan_release(tag); }
inline void observe(void* tag) { __tsan_acquire(tag); }
inline void note_read(const void* p, size_t n) { __tsan_read_range(const_cast<void*>(p), n); }
inline void note_write(void* p, size_t n) { __tsan_write_range(p, n); }
#else
struct Quiet {
  Quiet() {}
  ~Quiet() {}
};
struct Aloud {
  Aloud() {}
  ~Aloud() {}
};
inline void publish(void*) {}
inline void observe(void*) {}
inline void note_read(const void*, size_t) {}
inline void note_write(void*, size_t) {}
#endif

// The runtime's one lock. Whoever holds it is quiet. Whom its holder wakes is told once it is
// free: told earlier, a thousand ranks would all run into it and go back to sleep.
class Lock : Quiet {
 public:
  Lock() { lock(); }
  ~Lock() { unlock(); }
  void lock();
  void unlock();
  void step_aside();  // lets others have it for a moment
};

// ---- actors and blocking -------------------------------------------------------------------

using Deadline = std::chrono::system_clock::time_point;  // of real time
constexpr Deadline no_deadline = Deadline::max();

// What one thread sleeps on: somebody rings once for each time that it does.
class Bell {
 public:
  void ring() {
    std::lock_guard guard(mutex_);
    rung_.store(true, std::memory_order_relaxed);
    changed_.notify_one();
  }
  bool wait(Deadline deadline) {  // false if it did not ring in time
    // Mostly it is about to ring, and to let the others run costs less than to sleep and be woken.
    for (int i = 0; i < 4 && !rung_.load(std::memory_order_relaxed); ++i)
      std::this_thread::yield();
    std::unique_lock guard(mutex_);
    const auto rung = [&] { return rung_.exchange(false, std::memory_order_relaxed); };
    if (deadline != no_deadline) return changed_.wait_until(guard, deadline, rung);
    changed_.wait(guard, rung);
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> rung_ = false;
};

// A host thread or a stream's worker. `counted` actors are those that others may wait for: when
// all of them are blocked, nothing can happen any more that is not already decided.
struct Actor {
  bool is_host = false, counted = false, blocked = false;
  Bell bell;
  Actor* next_woken = nullptr;               // of those whose bell has yet to ring
  std::function<std::string()> waiting_for;  // for the report
  // A host that polls is blocked too, until time `resume` (see poll()).
  bool polling = false, resumed = false;
  bool timed = false;                        // its wait ends by itself
  Picoseconds resume = 0;
  int device = 0, id = 0;
};

// Blocks until `done()`; false if the run fails or the deadline passes first.
bool block(Lock&, Actor&, const std::function<bool()>& done,
           const std::function<std::string()>& waiting_for, Deadline = no_deadline);
void wake(Actor&);                     // under Lock
void set_counted(Lock&, Actor&, bool counted);

// The first failure that no call can return to its caller alone (a deadlock, ranks that
// disagree) ends everything: every wait returns, every later call fails with this text.
void fail_run(Lock&, const std::string& report);
bool run_failed();
std::string run_failure();
// More lines for a deadlock report: the NCCL side knows who is missing.
extern std::function<std::string()> describe_communicators;
extern std::function<void(Lock&)> forget_communicators;
struct Host;
extern std::function<void(Host&)> thread_ends;  // under Lock

// ---- completion ----------------------------------------------------------------------------

// One point in a stream's work, such as an event's record.
struct Mark {
  std::atomic<int> references{1};
  std::atomic<bool> done{false};
  Picoseconds time = 0;         // valid once done
  int device = 0;
  std::vector<Actor*> waiters;  // under Lock
};

class MarkPointer {  // shared, without heap traffic beyond the Mark itself
 public:
  MarkPointer() = default;
  explicit MarkPointer(Mark* mark) : mark_(mark) {}
  MarkPointer(const MarkPointer& other) : mark_(other.mark_) {
    if (mark_) mark_->references.fetch_add(1, std::memory_order_relaxed);
  }
  MarkPointer(MarkPointer&& other) noexcept : mark_(std::exchange(other.mark_, nullptr)) {}
  MarkPointer& operator=(MarkPointer other) {
    std::swap(mark_, other.mark_);
    return *this;
  }
  ~MarkPointer() {
    if (!mark_) return;
    Quiet quiet;
    if (mark_->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete mark_;
  }
  Mark* operator->() const { return mark_; }
  explicit operator bool() const { return mark_; }
  Mark* get() const { return mark_; }

 private:
  Mark* mark_ = nullptr;
};

void wait_for_mark(Actor&, Mark&, const char* what);  // real time only; sees the edge

// ---- streams -------------------------------------------------------------------------------

struct Stream;

// What waits in a stream's queue. The closure lies in place: no heap node an operation.
struct Slot {
  static constexpr size_t capacity = 208;
  void (*run)(Stream&, Slot&);
  Picoseconds issue, cost;
  const char* call;
  const char* range;
  const char* step;
  int64_t bytes;
  Kind kind;
  alignas(16) unsigned char closure[capacity];
};

// One producer at a time (a lock that is Quiet sees to that), one consumer. Slots are never
// reused: a reused slot would need an edge from the worker back to the host, which CUDA has
// not. Chunks come from and return to the heap, whose order the sanitizer does not see.
class Queue {
 public:
  static constexpr int64_t limit = 1024;  // pending operations; then the host waits
  Queue();
  ~Queue();
  Slot& next();                           // producer: the slot to fill
  void push();                            // producer: publishes it
  // Sequentially consistent with the `idle` flag: either the worker sees the new operation, or
  // the producer sees that the worker sleeps.
  bool ready() const {
    Quiet quiet;
    return taken_ != published_.load();
  }
  Slot& front();                          // consumer, when ready()
  void pop();                             // consumer, after the operation has run
  int64_t pending() const {
    return published_.load(std::memory_order_relaxed) - finished_.load(std::memory_order_relaxed);
  }

 private:
  static constexpr int chunk_slots = 64;
  struct Chunk {
    Slot slots[chunk_slots];
    Chunk* next = nullptr;
  };
  Chunk* head_;                           // consumer's
  Chunk* tail_;                           // producer's
  int64_t filled_ = 0;                    // producer's count
  int64_t taken_ = 0;                     // consumer's count
  alignas(64) std::atomic<int64_t> published_{0};
  alignas(64) std::atomic<int64_t> finished_{0};
};

struct Stream {
  int device, number;
  Queue queue;
  std::mutex producer;                    // Quiet
  Actor worker;
  std::thread thread;
  std::atomic<bool> idle{false}, producer_waits{false}, closing{false};
  std::vector<Actor*> waiting_producers;  // under Lock
  Picoseconds now = 0;                    // worker's
  std::vector<Operation> operations;      // worker's; collected when the stream ends
  MarkPointer tail;                       // producer's: completion of everything issued so far
  bool tail_is_last = false;
  // NCCL work, under Lock: a memory call must not be made while any is unfinished.
  int64_t nccl_issued = 0, nccl_done = 0;
  Picoseconds nccl_end = 0;

  // Starts at the latest of this stream's time and `earliest`; takes `cost`; records it.
  void occupy(const Slot& slot, Picoseconds earliest, Picoseconds cost);
  void record(const Slot& slot, Kind, const char* call, Picoseconds start, Picoseconds end,
              int64_t bytes);
};

// Puts one operation into the stream. `fill` writes the closure.
void enqueue(Stream&, void (*run)(Stream&, Slot&), const char* call, Kind kind,
             Picoseconds cost, int64_t bytes, const void* closure, size_t closure_size);
template <class Closure>
void enqueue(Stream& stream, const char* call, Kind kind, Picoseconds cost, int64_t bytes,
             Closure closure, void (*run)(Stream&, Slot&)) {
  static_assert(std::is_trivially_copyable_v<Closure>);
  static_assert(sizeof(Closure) <= Slot::capacity);
  enqueue(stream, run, call, kind, cost, bytes, &closure, sizeof closure);
}
MarkPointer record_mark(Stream&);
void wait_mark_in_stream(Stream&, const MarkPointer&);

// ---- devices and host threads --------------------------------------------------------------

struct Allocation {
  size_t size;
  int device;
  bool pinned_host;
};

struct Device {
  std::mutex mutex;                                // Quiet; guards what follows
  Counters counters;
  cudaError_t sticky = cudaSuccess;
  std::string sticky_detail;
  std::set<Stream*> streams;
  int streams_ever = 0;
};

struct Host {
  Actor actor;
  int device = 0;
  Picoseconds now = 0;
  cudaError_t last_error = cudaSuccess;
  int detail_code = 0;                             // of whichever family failed last
  std::string detail, text;
  std::set<Mark*> asked;                           // polls answered "not ready" at this time
  std::vector<MarkPointer> asked_owners;
  std::vector<const char*> ranges;
  int communicators = 0;
  Host();
  ~Host();
};

Host& host();                                      // of the calling thread
int device_count();
Device& device(int index);
const Hardware& hardware();
bool skip_math();
bool strict();
std::chrono::milliseconds init_timeout();

// Guards a device's tables.
class DeviceLock : Quiet {
 public:
  explicit DeviceLock(Device& d) : guard_(d.mutex) {}

 private:
  std::lock_guard<std::mutex> guard_;
};

// Every API call begins with this: it counts the call, makes VIRTUAL_GPU_FAIL's one fail, and
// knows whether the device or the whole run has failed before. `error` is then what to return.
struct Call {
  explicit Call(const char* name);
  bool ok() const { return problem.empty(); }
  const char* name;
  Host& host;
  std::string problem;  // "" when the call may go on
  cudaError_t error = cudaSuccess;
};
cudaError_t fail(Call&, cudaError_t, const std::string& detail);

// Empty if [p, p+n) lies in one live allocation of `device`'s; else what is wrong with it.
std::string pointer_problem(const void* p, size_t n, int device, const char* parameter,
                            bool pinned_allowed = false);
// Empty if the stream exists, is not stream 0, and belongs to `device`.
std::string stream_problem(cudaStream_t, int device);
std::string host_pointer_problem(const void* p, const char* parameter);
void* allocate(size_t size, int device, bool pinned_host);
bool is_allocation(void* p, bool pinned_host, Allocation* what);
bool release(void* p, bool pinned_host, Allocation* was);

Stream& get(cudaStream_t);
Stream* create_stream(int device);
void destroy_stream(Stream*);

std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));
std::string environment(const char* name);         // "" where it is not set
[[noreturn]] void refuse_environment(const std::string& line);

// Where the timeline of finished streams is kept (trace.cc).
void keep_operations(std::vector<Operation>&&);   // under Lock
bool recording();
void open_timeline_files();                        // refuses a path that cannot be written
void forget_operations();

// Fills the host side of poll(): true if the mark is done at the host's time. See runtime.cc.
bool poll(Host&, const MarkPointer&);

}  // namespace virtual_gpu
