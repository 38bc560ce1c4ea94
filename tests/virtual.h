// For tests of the virtual GPU itself: a runtime that has forgotten all before, ranks as
// threads, kernels of known length, and the text of what failed.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>
#include <unistd.h>
#include <virtual_gpu.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool sanitized = true;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
constexpr bool sanitized = true;
#else
constexpr bool sanitized = false;
#endif
#else
constexpr bool sanitized = false;
#endif

// ---- a fresh runtime -----------------------------------------------------------------------

// One FLOP, one byte of a copy and one element of a kernel over floats take one picosecond each;
// links of 1 byte a picosecond. So durations are read off the sizes.
constexpr const char* countable =
    "ideal,memory_bandwidth=12e12,host_bandwidth=1e12,link_bandwidth=1e12,net_bandwidth=1e12";

class Fresh {
 public:
  using Variable = std::pair<std::string, std::string>;
  Fresh(std::initializer_list<Variable> variables = {}) : variables_(variables) {
    alarm(sanitized ? 600 : 60);  // a hang that is not reported ends the tests
    for (const auto& [name, value] : variables_) setenv(name.c_str(), value.c_str(), 1);
    virtual_gpu::reset();
  }
  Fresh(const Fresh&) = delete;
  ~Fresh() {
    for (const auto& [name, value] : variables_) unsetenv(name.c_str());
    virtual_gpu::record_timeline(false);
    virtual_gpu::reset();
  }

 private:
  std::vector<Variable> variables_;
};

// ---- statuses, also on threads where Catch2's macros may not be used ------------------------

struct Failed : std::runtime_error {
  Failed(const std::string& call, int status, const std::string& text)
      : std::runtime_error(call + " = " + std::to_string(status) + ": " + text), code(status) {}
  int code;
};

inline std::string text_of(cudaError_t e) { return cudaGetErrorString(e); }
inline std::string text_of(ncclResult_t) { return ncclGetLastError(nullptr); }

template <class Status>
void must(Status status, const char* call) {
  if (status) throw Failed(call, status, text_of(status));
}
#define MUST(call) must((call), #call)

inline void verify(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("not so: " + what);
}
#define VERIFY(condition) verify((condition), #condition)

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
// The call failed with that code, and its text has all these parts.
template <class Status>
void fails_with(Status status, Status wanted, std::vector<std::string> parts) {
  const std::string text = text_of(status);
  INFO(text);
  REQUIRE(static_cast<int>(status) == static_cast<int>(wanted));
  for (const std::string& part : parts) {
    INFO(part);
    REQUIRE(contains(text, part));
  }
}

// ---- streams, memory, kernels --------------------------------------------------------------

struct TestStream {
  cudaStream_t stream = nullptr;
  TestStream() { MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  TestStream(const TestStream&) = delete;
  ~TestStream() { cudaStreamDestroy(stream); }
  operator cudaStream_t() const { return stream; }
};

struct TestEvent {
  cudaEvent_t event = nullptr;
  explicit TestEvent(unsigned flags = cudaEventDefault) {
    MUST(cudaEventCreateWithFlags(&event, flags));
  }
  TestEvent(const TestEvent&) = delete;
  ~TestEvent() { cudaEventDestroy(event); }
  operator cudaEvent_t() const { return event; }
};

// Forgotten at the next reset. A virtual GPU's memory is the host's: tests fill and read it.
template <class T>
T* device_array(size_t n) {
  T* p = nullptr;
  MUST(cudaMalloc(&p, n * sizeof(T)));
  return p;
}

template <class... Parameters, class... Arguments>
cudaError_t launch_threads(cudaStream_t stream, unsigned threads, void (*kernel)(Parameters...),
                           Arguments... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(threads);
  config.blockDim = dim3(1);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

__global__ inline void busy_kernel(const float*) {}
// Work of `picoseconds` under `countable`. `any` is memory of the current device.
inline void busy(cudaStream_t stream, const float* any, unsigned picoseconds) {
  MUST(launch_threads(stream, picoseconds, busy_kernel, any));
}

// Holds a stream up, in real time, until opened.
struct Gate {
  std::atomic<bool> open{false};
  void hold(cudaStream_t stream) {
    // As a number: a pointer would be checked, and this one is the host's.
    MUST(launch_threads(
        stream, 1,
        +[](uintptr_t gate) {
          while (!reinterpret_cast<Gate*>(gate)->open.load()) std::this_thread::yield();
        },
        reinterpret_cast<uintptr_t>(this)));
  }
};

// ---- ranks as threads ----------------------------------------------------------------------

struct TestRank {
  int rank, size;
  ncclComm_t comm;
  cudaStream_t stream;
  void synchronize() const { MUST(cudaStreamSynchronize(stream)); }
  // No two ranks' and no two elements' values are equal; small, with few bits.
  template <class T>
  T* filled(size_t n, double scale = 1) const {
    T* p = device_array<T>(n);
    for (size_t i = 0; i < n; ++i) p[i] = T(static_cast<float>(scale * double((rank + 1) + i % 7)));
    return p;
  }
};

// Runs body once a rank; the text of what each threw, "" for none.
inline std::vector<std::string> texts_of_ranks(int p, const std::function<void(TestRank&)>& body) {
  std::vector<std::string> texts(p);
  ncclUniqueId id;
  MUST(ncclGetUniqueId(&id));
  std::vector<std::thread> threads;
  for (int r = 0; r < p; ++r)
    threads.emplace_back([&, r] {
      try {
        MUST(cudaSetDevice(r));
        ncclComm_t comm = nullptr;
        MUST(ncclCommInitRank(&comm, p, id, r));
        {
          TestStream stream;
          TestRank rank{r, p, comm, stream};
          try {
            body(rank);
          } catch (const std::exception& e) {
            texts[r] = e.what();
          }
          comm = rank.comm;
          ncclCommDestroy(comm);
        }
      } catch (const std::exception& e) {
        texts[r] = e.what();
      }
    });
  for (std::thread& t : threads) t.join();
  return texts;
}

inline void on_ranks(int p, const std::function<void(TestRank&)>& body) {
  const auto texts = texts_of_ranks(p, body);
  for (int r = 0; r < p; ++r) {
    INFO("rank " << r << " of " << p);
    REQUIRE(texts[r] == "");
  }
}

// Some rank's text has all these parts; all ranks ended.
inline void some_rank_says(const std::vector<std::string>& texts, std::vector<std::string> parts) {
  std::string all;
  for (const std::string& text : texts) all += text + "\n";
  INFO(all);
  bool found = false;
  for (const std::string& text : texts) {
    bool has = !text.empty();
    for (const std::string& part : parts) has = has && contains(text, part);
    found = found || has;
  }
  REQUIRE(found);
}
