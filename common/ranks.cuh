// Who am I, who else is there: a rank drives one GPU. Ranks are threads of this process, or
// processes; a chapter cannot tell. What they say to each other goes through communicators.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <condition_variable>
#include <functional>
#include <mutex>

#include "gpu.cuh"
#include "launch.h"

// ---- communicators ------------------------------------------------------------------------

inline ncclDataType_t nccl_type(const float*) { return ncclFloat; }
inline ncclDataType_t nccl_type(const double*) { return ncclDouble; }
inline ncclDataType_t nccl_type(const int32_t*) { return ncclInt32; }
inline ncclDataType_t nccl_type(const uint8_t*) { return ncclUint8; }
inline ncclDataType_t nccl_type(const __half*) { return ncclHalf; }
inline ncclDataType_t nccl_type(const __nv_bfloat16*) { return ncclBfloat16; }

// What one rank has sent, by the textbook's formula for a ring of p ranks and a message of n
// bytes: all-reduce 2(p-1)/p n; reduce-scatter and all-gather (p-1)/p of the whole; broadcast
// and reduce (p-1)/p n, for all ranks but one pass the message on; send n.
struct Traffic {
  double bytes = 0;
  int64_t collectives = 0, messages = 0;
};

// This thread's live communicators: whoever waits looks after all of them.
inline std::vector<ncclComm_t>& live_comms() {
  thread_local std::vector<ncclComm_t> comms;
  return comms;
}

// Calls are as NCCL's: they return once the work is in the stream. Buffers must stay until it is
// done, and all ranks must make the same calls in the same order.
class Comm : public Owner<ncclComm_t> {
 public:
  Comm(const ncclUniqueId& id, int size, int rank) : size_(size), rank_(rank) {
    CHECK(ncclCommInitRank(&handle_, size, id, rank));
    live_comms().push_back(handle_);
  }
  Comm(Comm&&) noexcept = default;
  ~Comm() {
    if (!handle_) return;
    std::erase(live_comms(), handle_);
    // While an exception is on its way, peers may never come to what destroy would wait for.
    CHECK_TEARDOWN(std::uncaught_exceptions() ? ncclCommAbort(handle_) : ncclCommDestroy(handle_));
  }

  // One communicator a colour, its ranks in the order of their keys. All ranks must call.
  Comm split(int color, int key) const {
    Comm part;
    CHECK(ncclCommSplit(handle_, color, key, &part.handle_, nullptr));
    if (!part.handle_) return part;  // NCCL_SPLIT_NOCOLOR: this rank is in no part
    live_comms().push_back(part.handle_);
    CHECK(ncclCommCount(part.handle_, &part.size_));
    CHECK(ncclCommUserRank(part.handle_, &part.rank_));
    return part;
  }

  int size() const { return size_; }
  int rank() const { return rank_; }

  template <class T>
  void all_reduce(T* data, int64_t n, cudaStream_t stream, ncclRedOp_t op = ncclSum) {
    CHECK(ncclAllReduce(data, data, n, nccl_type(data), op, handle_, stream));
    collective(2, n * sizeof(T));
  }
  template <class T>
  void broadcast(T* data, int64_t n, int root, cudaStream_t stream) {
    CHECK(ncclBroadcast(data, data, n, nccl_type(data), root, handle_, stream));
    collective(1, n * sizeof(T));
  }
  template <class T>
  void send(const T* data, int64_t n, int peer, cudaStream_t stream) {
    CHECK(ncclSend(data, n, nccl_type(data), peer, handle_, stream));
    traffic.bytes += n * sizeof(T);
    ++traffic.messages;
  }
  template <class T>
  void recv(T* data, int64_t n, int peer, cudaStream_t stream) {
    CHECK(ncclRecv(data, n, nccl_type(data), peer, handle_, stream));
  }

  Traffic traffic;

 private:
  Comm() = default;
  void collective(double trips, double bytes) {
    traffic.bytes += trips * (size_ - 1) * bytes / size_;
    ++traffic.collectives;
  }
  int size_ = 0, rank_ = 0;
};

// The calls between its construction and its end are one: they have no order among themselves,
// and opposite sends cannot wait for each other.
class Group {
 public:
  Group() { CHECK(ncclGroupStart()); }
  Group(const Group&) = delete;
  ~Group() noexcept(false) {
    // With an exception on its way that is the cause, and another would end the program.
    if (std::uncaught_exceptions()) ncclGroupEnd();
    else CHECK(ncclGroupEnd());
  }
};

// ---- failure ------------------------------------------------------------------------------

// The first failure of any rank in this process ends all of them: it is printed once, and the
// others stop where they next wait.
class Failure {
 public:
  void record(int rank, const std::exception& cause) {
    std::lock_guard lock(mutex_);
    if (status_) return;
    status_ = dynamic_cast<const BadInput*>(&cause) ? 2 : 1;
    std::fprintf(stderr, "rank %d: %s\n", rank, cause.what());
  }
  int status() const { return status_; }

 private:
  std::mutex mutex_;
  std::atomic<int> status_{0};  // of the process, once it ends
};

struct PeerFailed : Error {
  PeerFailed() : Error("another rank failed") {}
};

// ---- ranks --------------------------------------------------------------------------------

class Rank {
 public:
  Rank(int rank, int size, int device, const ncclUniqueId& id, const Failure& failure)
      : rank(rank), size(size), device(device), world(id, size, rank), failure_(failure) {}

  const int rank, size, device;
  Comm world;          // every other communicator is split from it, in one order on all ranks
  bool quiet = false;

  // Returns once the stream's work (or the event) is done. A dead peer shows only to who asks,
  // and a failed one would be waited for in vain: so this polls instead of synchronising.
  void wait(cudaStream_t stream) const {
    poll([stream] { return cudaStreamQuery(stream); });
  }
  void wait(cudaEvent_t event) const {
    poll([event] { return cudaEventQuery(event); });
  }

  // Asks once. For loops that poll by themselves, with look_after_peers().
  bool is_done(cudaEvent_t event) const { return is_success(cudaEventQuery(event)); }

  // Returns once every rank has come here, on the host, without a kernel. Between the last
  // allocation and the first NCCL kernel: cudaMalloc and cudaFree can wait for a peer's GPU,
  // whose kernel may wait for this rank.
  void meet() const {
    if (size > 1) world.split(NCCL_SPLIT_NOCOLOR, rank);
  }

  // Throws if another rank failed. For loops that poll by themselves.
  void look_after_peers() const {
    if (failure_.status()) throw PeerFailed();
    for (ncclComm_t comm : live_comms()) {
      ncclResult_t error = ncclSuccess;
      CHECK(ncclCommGetAsyncError(comm, &error));
      CHECK(error);
    }
  }

  // About ten lines a run. Which steps depends on nothing else: to read a loss drains the
  // stream, and the timeline must be the same at every run.
  bool wants_progress(int64_t step, int64_t total) const {
    return rank == 0 && progress_is_due(step, total);
  }
  // The same on every rank, for chapters whose ranks must work out the loss together.
  bool progress_is_due(int64_t step, int64_t total) const {
    return !quiet && (step + 1 == total || (step + 1) % ((total + 9) / 10) == 0);
  }
  void progress(int64_t step, int64_t total, double loss, int samples) {
    if (rank != 0) return;
    const auto now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - std::exchange(last_, now)).count();
    const int64_t steps = step - std::exchange(last_step_, step);
    const bool terminal = isatty(STDOUT_FILENO);
    std::printf("%sstep %*lld/%lld  loss %-9.4g %.0f samples/s%s", terminal ? "\r" : "",
                static_cast<int>(std::to_string(total).size()), step + 1LL, total + 0LL, loss,
                steps * samples / seconds, terminal && step + 1 < total ? "\033[K" : "\n");
    std::fflush(stdout);
  }

 private:
  template <class Query>
  void poll(Query query) const {
    while (!is_success(query())) {
      look_after_peers();
      std::this_thread::yield();
    }
  }
  static bool is_success(cudaError_t status) {
    if (status == cudaSuccess) return true;
    if (status != cudaErrorNotReady) CHECK(status);
    cudaGetLastError();  // "not ready" is no failure, but CUDA remembers it as one
    return false;
  }
  const Failure& failure_;
  Clock::time_point last_ = Clock::now();
  int64_t last_step_ = -1;
};

// Brings n numbers from the owner's GPU to rank 0's host; all ranks call. Rank 0's GPU may be too
// small for everybody's, so they pass through `mailbox` there, in pieces of at most `most`.
template <class T>
void bring_to_rank_0(T* host, const T* from, int64_t n, int owner, T* mailbox, int64_t most,
                     Rank& rank, cudaStream_t stream) {
  for (int64_t at = 0, piece; at < n; at += piece) {
    piece = std::min(most, n - at);
    if (owner != 0 && rank.rank == owner) rank.world.send(from + at, piece, 0, stream);
    if (owner != 0 && rank.rank == 0) rank.world.recv(mailbox, piece, owner, stream);
    rank.wait(stream);  // a copy to the host may wait too, but asks after no peer
    if (rank.rank == 0)
      CHECK(cudaMemcpyAsync(host + at, owner ? mailbox : from + at, piece * sizeof(T),
                            cudaMemcpyDeviceToHost, stream));
  }
}

using Body = std::function<void(Rank&)>;

// Runs ranks first .. first + count - 1 of `size` as threads, rank r on device[r - first].
inline int run_threads(int first, int size, const std::vector<int>& devices,
                       const ncclUniqueId& id, const Body& body) {
  Failure failure;
  std::mutex mutex;
  std::condition_variable changed;
  size_t finished = 0;
  std::vector<std::thread> threads;
  const auto run_rank = [&](size_t i) {
    const int rank_number = first + static_cast<int>(i);
    on_error() = [&](const std::exception& e) { failure.record(rank_number, e); };
    try {
      CHECK(cudaSetDevice(devices[i]));  // before any other CUDA call of this thread
      Rank rank(rank_number, size, devices[i], id, failure);
      try {
        body(rank);
      } catch (const std::exception& e) {
        failure.record(rank_number, e);  // before ~Rank leaves peers waiting, their own cause
        throw;
      }
    } catch (const std::exception& e) {
      failure.record(rank_number, e);
    }
    std::lock_guard lock(mutex);
    ++finished;
    changed.notify_all();
  };
  try {
    for (size_t i = 0; i < devices.size(); ++i) threads.emplace_back(run_rank, i);
  } catch (const std::system_error&) {  // those that run wait for the others, while patience lasts
    failure.record(first + static_cast<int>(threads.size()),
                   Error("this machine starts no more threads; fewer --gpus, or higher limits "
                         "(ulimit -u, ulimit -v) would be right"));
  }
  // A rank inside a call that waits for the one that failed never comes back: after 2 s the
  // process ends without it.
  std::unique_lock lock(mutex);
  for (auto patience_until = Clock::time_point::max(); finished < threads.size();) {
    changed.wait_for(lock, std::chrono::milliseconds(100));
    if (!failure.status()) continue;
    patience_until = std::min(patience_until, Clock::now() + std::chrono::seconds(2));
    if (Clock::now() > patience_until) std::_Exit(failure.status());
  }
  lock.unlock();
  for (std::thread& thread : threads) thread.join();
  return failure.status();
}

inline int visible_gpus() {
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);  // a kernel loaded while others spin can deadlock
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);  // so can two streams that share a queue
  int gpus = 0;
  const cudaError_t status = cudaGetDeviceCount(&gpus);
  if (status != cudaSuccess && status != cudaErrorNoDevice && status != cudaErrorInsufficientDriver)
    CHECK(status);
  if (status != cudaSuccess || gpus == 0)
    throw BadInput("no usable GPU (" + describe(status) +
                   "); build for the virtual GPU with make BACKEND=virtual");
  return gpus;
}

// Runs the body once a rank; the exit status of this process.
inline int run_ranks(const Place& place, int p, bool share_gpu, char** argv, const Body& body) {
  const int gpus = visible_gpus();
  ncclUniqueId id = {};
  if (place.launched) {
    // Some launchers show each process its own GPU only.
    const int device = share_gpu || gpus == 1 ? place.local % gpus : place.local;
    if (device >= gpus)
      throw BadInput("local rank " + std::to_string(place.local) + " needs GPU " +
                     std::to_string(device) + ", " + std::to_string(gpus) + " visible");
    if (place.rank == 0) CHECK(ncclGetUniqueId(&id));
    exchange(place, &id, sizeof id);  // last: once all have it, nobody may stay away
    return run_threads(place.rank, p, {device}, id, body);
  }
  if (p > gpus && share_gpu) return start_processes(p, argv);
  if (p > gpus)
    throw BadInput("--gpus: " + std::to_string(p) + " ranks need " + std::to_string(p) +
                   " GPUs, " + std::to_string(gpus) + " visible; --share-gpu lets ranks share " +
                   "one, and make BACKEND=virtual has as many as VIRTUAL_GPU_COUNT says");
  CHECK(ncclGetUniqueId(&id));
  std::vector<int> devices(p);
  std::iota(devices.begin(), devices.end(), 0);
  return run_threads(0, p, devices, id, body);
}
