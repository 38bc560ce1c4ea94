// RAII over CUDA: every resource is freed where its owner ends, every status is looked at.
// Nothing here knows about networks or SGD.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <nccl.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// ---- errors -------------------------------------------------------------------------------

// Told of this thread's errors where they are thrown. On their way out destructors give memory and
// communicators back, which can wait for peers, and these would wait for ever without a word.
inline std::function<void(const std::exception&)>& on_error() {
  thread_local std::function<void(const std::exception&)> listener;
  return listener;
}

struct Error : std::runtime_error {
  explicit Error(const std::string& what) : std::runtime_error(what) {
    if (on_error()) on_error()(*this);
  }
};

inline bool failed(cudaError_t e) { return e != cudaSuccess; }
inline bool failed(cublasStatus_t e) { return e != CUBLAS_STATUS_SUCCESS; }
inline bool failed(ncclResult_t e) { return e != ncclSuccess; }
inline std::string describe(cudaError_t e) {
  return std::string(cudaGetErrorName(e)) + ": " + cudaGetErrorString(e);
}
inline std::string describe(cublasStatus_t e) { return cublasGetStatusString(e); }
inline std::string describe(ncclResult_t e) {
  return std::string(ncclGetErrorString(e)) + ": " + ncclGetLastError(nullptr);
}

// "train.cuh:88: cudaMalloc(...): out of memory"
template <class Status>
std::string complaint(const char* file, int line, const char* call, Status status) {
  const std::string path = file;
  return path.substr(path.rfind('/') + 1) + ":" + std::to_string(line) + ": " + call + ": " +
         describe(status);
}

template <class Status>
void check(Status status, const char* file, int line, const char* call) {
  if (failed(status)) throw Error(complaint(file, line, call, status));
}

// A destructor must not throw, yet a status that nobody sees may hide a wrong result: it is
// printed, and the program's exit status will be 1.
inline std::atomic<bool>& teardown_failed() {
  static std::atomic<bool> flag{false};
  return flag;
}
template <class Status>
void check_teardown(Status status, const char* file, int line, const char* call) {
  if (!failed(status)) return;
  teardown_failed() = true;
  // While an exception is on its way, its own message is the cause and this one an echo.
  if (!std::uncaught_exceptions())
    std::fprintf(stderr, "%s\n", complaint(file, line, call, status).c_str());
}

#define CHECK(call) check((call), __FILE__, __LINE__, #call)
#define CHECK_TEARDOWN(call) check_teardown((call), __FILE__, __LINE__, #call)

// ---- owners -------------------------------------------------------------------------------

// Owns one handle of CUDA's. Moves, never copies; a moved-from owner holds nothing.
template <class Handle>
class Owner {
 public:
  Owner() = default;
  Owner(Owner&& other) noexcept : handle_(std::exchange(other.handle_, Handle{})) {}
  Owner& operator=(Owner&&) = delete;
  operator Handle() const { return handle_; }

 protected:
  Handle handle_{};
};

// Non-blocking: the default stream's implicit synchronisation would hide every missing event.
class Stream : public Owner<cudaStream_t> {
 public:
  Stream() { CHECK(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking)); }
  Stream(Stream&&) noexcept = default;
  ~Stream() {
    if (handle_) CHECK_TEARDOWN(cudaStreamDestroy(handle_));
  }
  void synchronize() const { CHECK(cudaStreamSynchronize(handle_)); }
  // Work issued to this stream from now on starts after `event`'s latest record.
  void wait(cudaEvent_t event) const { CHECK(cudaStreamWaitEvent(handle_, event, 0)); }
};

class Event : public Owner<cudaEvent_t> {
 public:
  Event() { CHECK(cudaEventCreate(&handle_)); }
  Event(Event&&) noexcept = default;
  ~Event() {
    if (handle_) CHECK_TEARDOWN(cudaEventDestroy(handle_));
  }
  void record(cudaStream_t stream) const { CHECK(cudaEventRecord(handle_, stream)); }
};

// Seconds on the GPU's clock; both events must be complete.
inline double seconds_between(cudaEvent_t start, cudaEvent_t stop) {
  float milliseconds = 0;
  CHECK(cudaEventElapsedTime(&milliseconds, start, stop));
  return milliseconds * 1e-3;
}

// Bytes of device memory that this thread's buffers hold now, and held at most. Each rank's
// thread drives one GPU, so these are that GPU's figures.
struct MemoryUse {
  int64_t now = 0, peak = 0;
};
inline MemoryUse& memory_use() {
  thread_local MemoryUse use;
  return use;
}

// n elements of device memory. Like cudaMalloc's, its contents are undefined until written.
// Allocate before the training loop: memory calls can wait for the GPU and its peers.
template <class T>
class Buffer : public Owner<T*> {
 public:
  Buffer() = default;
  explicit Buffer(int64_t n) : size_(n) {
    if (n < 0) throw Error("Buffer: negative size " + std::to_string(n));
    CHECK(cudaMalloc(&this->handle_, n * sizeof(T)));
    memory_use().now += n * sizeof(T);
    memory_use().peak = std::max(memory_use().peak, memory_use().now);
  }
  Buffer(Buffer&& other) noexcept
      : Owner<T*>(std::move(other)), size_(std::exchange(other.size_, 0)) {}
  ~Buffer() {
    if (!this->handle_) return;
    CHECK_TEARDOWN(cudaFree(this->handle_));
    memory_use().now -= size_ * sizeof(T);
  }
  T* data() const { return this->handle_; }
  int64_t size() const { return size_; }
  void zero(cudaStream_t stream) const {
    if (size_) CHECK(cudaMemsetAsync(data(), 0, size_ * sizeof(T), stream));
  }
  // The host range must stay as it is until `stream` has done the copy.
  void upload(const T* from, int64_t n, cudaStream_t stream) const {
    if (n) CHECK(cudaMemcpyAsync(data(), from, n * sizeof(T), cudaMemcpyHostToDevice, stream));
  }
  void upload(const std::vector<T>& from, cudaStream_t stream) const {
    upload(from.data(), static_cast<int64_t>(from.size()), stream);
  }
  void copy(const T* from, int64_t n, cudaStream_t stream) const {  // from this GPU's memory
    if (n) CHECK(cudaMemcpyAsync(data(), from, n * sizeof(T), cudaMemcpyDeviceToDevice, stream));
  }
  void download(T* to, int64_t n, cudaStream_t stream) const {
    if (n) CHECK(cudaMemcpyAsync(to, data(), n * sizeof(T), cudaMemcpyDeviceToHost, stream));
  }

 private:
  int64_t size_ = 0;
};

// One handle a stream: a handle shared by two streams would share its workspace, and its bits
// would depend on timing.
class Blas : public Owner<cublasHandle_t> {
 public:
  explicit Blas(cudaStream_t stream) : stream_(stream) {
    CHECK(cublasCreate(&this->handle_));
    CHECK(cublasSetStream(handle_, stream));
    // Of 16-bit products too the partial sums are added in 32 bits.
    CHECK(cublasSetMathMode(this->handle_, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
  }
  Blas(Blas&&) noexcept = default;
  ~Blas() {
    if (handle_) CHECK_TEARDOWN(cublasDestroy(handle_));
  }
  cudaStream_t stream() const { return stream_; }

 private:
  cudaStream_t stream_;
};

// Names a phase of the step in the profiler's and the virtual GPU's timeline.
class Range {
 public:
  explicit Range(const std::string& name) { nvtxRangePushA(name.c_str()); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
  ~Range() { nvtxRangePop(); }
};

// ---- launch -------------------------------------------------------------------------------

// Runs a striding kernel with one thread for each of n elements. An empty grid is an error
// in CUDA, and no work here, so n = 0 launches nothing.
template <class... Parameters, class... Arguments>
void launch(cudaStream_t stream, int64_t n, void (*kernel)(Parameters...), Arguments&&... args) {
  if (n == 0) return;
  constexpr int64_t block = 256, most = (int64_t{1} << 31) - 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min((n + block - 1) / block, most)));
  config.blockDim = dim3(static_cast<unsigned>(block));
  config.stream = stream;
  CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(args)...));
}
