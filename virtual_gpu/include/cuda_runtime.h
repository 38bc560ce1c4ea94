// The virtual GPU's <cuda_runtime.h>: the part of the CUDA runtime that the course uses, with
// the real names, parameter orders and values. What is not declared here does not compile:
// nothing is a stub that returns success. Semantics: docs/virtual_gpu.md.
#pragma once

#include <math.h>  // kernels call exp and log as on a GPU, without std::

#include <cstddef>
#include <cstdint>
#include <new>
#include <tuple>
#include <type_traits>

#include "library_types.h"

// ---- kernels are ordinary functions --------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned vx = 1, unsigned vy = 1, unsigned vz = 1) : x(vx), y(vy), z(vz) {}
};

// A kernel runs as one thread in a grid of one: its grid-stride loop becomes a plain loop with
// constant bounds, which the host compiler vectorises.
static constexpr uint3 threadIdx{0, 0, 0}, blockIdx{0, 0, 0};
static constexpr dim3 blockDim{1, 1, 1}, gridDim{1, 1, 1};

// ---- types ---------------------------------------------------------------------------------

typedef enum cudaError {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidMemcpyDirection = 21,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotPermitted = 800,
  cudaErrorUnknown = 999
} cudaError_t;

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;

typedef enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4
} cudaMemcpyKind;

#define cudaStreamNonBlocking 0x01
#define cudaEventDefault 0x00
#define cudaEventDisableTiming 0x02

typedef struct cudaLaunchAttribute_st cudaLaunchAttribute;  // none is supported
typedef struct cudaLaunchConfig_st {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned int numAttrs;
} cudaLaunchConfig_t;

typedef struct cudaDeviceProp {
  char name[256];
  size_t totalGlobalMem;
} cudaDeviceProp;

// ---- calls ---------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device);
cudaError_t cudaDeviceSynchronize();

cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
// Where this thread's last failure has that code, the text goes on to say what was wrong.
const char* cudaGetErrorString(cudaError_t error);
const char* cudaGetErrorName(cudaError_t error);

cudaError_t cudaMalloc(void** devPtr, size_t size);
cudaError_t cudaFree(void* devPtr);
cudaError_t cudaMallocHost(void** ptr, size_t size);
cudaError_t cudaFreeHost(void* ptr);
cudaError_t cudaMemGetInfo(size_t* free, size_t* total);
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t count, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemsetAsync(void* devPtr, int value, size_t count, cudaStream_t stream = nullptr);

template <class T>
cudaError_t cudaMalloc(T** devPtr, size_t size) {
  return cudaMalloc(reinterpret_cast<void**>(devPtr), size);
}
template <class T>
cudaError_t cudaMallocHost(T** ptr, size_t size) {
  return cudaMallocHost(reinterpret_cast<void**>(ptr), size);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* pStream, unsigned int flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags = 0);

cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end);

// ---- launch --------------------------------------------------------------------------------

namespace virtual_gpu {

struct KernelCall {
  const void* const* pointers;  // the arguments that are pointers, to be checked
  int pointer_count;
  size_t element_size;          // of what the first of them points to, for the clock
  const void* closure;          // function and arguments, copied into the stream's queue
  size_t closure_size;
  void (*run)(const void* closure);
};
cudaError_t launch_kernel(const cudaLaunchConfig_t& config, const KernelCall& call);

template <class T>
void note_pointer(T, const void**, int&, size_t&) {}
template <class T>
void note_pointer(T* p, const void** pointers, int& count, size_t& element_size) {
  if (count == 0) element_size = sizeof(T);
  pointers[count++] = p;
}

}  // namespace virtual_gpu

template <typename... ExpTypes, typename... ActTypes>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(ExpTypes...),
                               ActTypes&&... args) {
  using Closure = std::tuple<void (*)(ExpTypes...), ExpTypes...>;
  static_assert((std::is_trivially_copyable_v<ExpTypes> && ...), "kernel arguments are bytes");
  static_assert(alignof(Closure) <= 16);
  const Closure closure(kernel, static_cast<ExpTypes>(args)...);
  const void* pointers[sizeof...(ExpTypes) + 1];
  virtual_gpu::KernelCall call{pointers, 0, 1, &closure, sizeof closure, [](const void* bytes) {
    std::apply([](auto function, auto... values) { function(values...); },
               *static_cast<const Closure*>(bytes));
  }};
  std::apply(
      [&](auto, auto... values) {
        (virtual_gpu::note_pointer(values, pointers, call.pointer_count, call.element_size), ...);
      },
      closure);
  return virtual_gpu::launch_kernel(*config, call);
}
