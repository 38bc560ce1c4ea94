// The virtual GPU's memory, its checks of every pointer, and how CUDA reports errors. Each test
// makes the very mistake and reads what is said about it.
#include <cmath>
#include <cstring>

#include "virtual.h"

namespace {

__global__ void touch_kernel(float* p) { *p = 1; }
cudaError_t touch(cudaStream_t stream, float* p) {
  return launch_threads(stream, 1, touch_kernel, p);
}

std::string address(const void* p) {
  char text[32];
  std::snprintf(text, sizeof text, "%p", p);
  return text;
}

// Every way to hand over a wrong device pointer that the call can see: kernel (sticky, so last),
// copy in each direction, memset.
void refused_everywhere(cudaStream_t stream, float* p, size_t bytes,
                        std::vector<std::string> said) {
  static float host[64];
  said.push_back(address(p));
  const auto with = [&](const char* call, const char* parameter) {
    std::vector<std::string> parts = said;
    parts.push_back(call);
    parts.push_back(parameter);
    return parts;
  };
  float* good = device_array<float>(64);
  fails_with(cudaMemcpyAsync(p, host, bytes, cudaMemcpyHostToDevice, stream), cudaErrorInvalidValue,
             with("cudaMemcpyAsync", "dst"));
  fails_with(cudaMemcpyAsync(host, p, bytes, cudaMemcpyDeviceToHost, stream), cudaErrorInvalidValue,
             with("cudaMemcpyAsync", "src"));
  fails_with(cudaMemcpyAsync(good, p, bytes, cudaMemcpyDeviceToDevice, stream),
             cudaErrorInvalidValue, with("cudaMemcpyAsync", "src"));
  fails_with(cudaMemcpyAsync(p, good, bytes, cudaMemcpyDeviceToDevice, stream),
             cudaErrorInvalidValue, with("cudaMemcpyAsync", "dst"));
  fails_with(cudaMemsetAsync(p, 0, bytes, stream), cudaErrorInvalidValue,
             with("cudaMemsetAsync", "devPtr"));
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);  // none of these is sticky
}

void kernel_refused(cudaStream_t stream, float* p, std::vector<std::string> said) {
  said.push_back("cudaLaunchKernelEx");
  said.push_back(address(p));
  fails_with(touch(stream, p), cudaErrorIllegalAddress, said);
}

}  // namespace

// ---- pointers ------------------------------------------------------------------------------

TEST_CASE("memory: a host pointer is refused by kernel, copy and memset") {
  Fresh fresh;
  TestStream stream;
  float on_host[4];
  const std::vector<std::string> said = {"is a host pointer, memory of GPU 0 is needed"};
  refused_everywhere(stream, on_host, sizeof on_host, said);
  kernel_refused(stream, on_host, said);
}

TEST_CASE("memory: another GPU's pointer is refused by kernel, copy and memset") {
  Fresh fresh;
  TestStream stream;
  MUST(cudaSetDevice(2));
  float* there = device_array<float>(4);
  MUST(cudaSetDevice(0));
  const std::vector<std::string> said = {"is memory of GPU 2, memory of GPU 0 is needed"};
  refused_everywhere(stream, there, 16, said);
  kernel_refused(stream, there, said);
}

TEST_CASE("memory: a freed pointer is refused by kernel, copy and memset") {
  Fresh fresh;
  TestStream stream;
  // Larger than what a test allocates later, so that its address is not used again.
  float* freed = device_array<float>(1 << 20);
  MUST(cudaFree(freed));
  const std::vector<std::string> said = {"was freed (it was memory of GPU 0)"};
  refused_everywhere(stream, freed + 1000, 16, said);
  kernel_refused(stream, freed + 1000, said);
}

TEST_CASE("memory: pinned host memory is refused where a GPU's is needed") {
  Fresh fresh;
  TestStream stream;
  float* pinned = nullptr;
  MUST(cudaMallocHost(&pinned, 64));
  refused_everywhere(stream, pinned, 64, {"is pinned host memory, memory of GPU 0 is needed"});
  MUST(cudaFreeHost(pinned));
}

TEST_CASE("memory: a range past the allocation's end is refused with its extent") {
  Fresh fresh;
  TestStream stream;
  float* p = device_array<float>(10);
  refused_everywhere(stream, p, 41, {"runs past its end: 41 bytes are used, 40 of 40 are left"});
  refused_everywhere(stream, p + 7, 16,
                     {"runs past its end: 16 bytes are used, 12 of 40 are left"});
  REQUIRE(cudaMemsetAsync(p, 0, 40, stream) == cudaSuccess);
  REQUIRE(cudaMemsetAsync(p + 7, 0, 12, stream) == cudaSuccess);
  REQUIRE(touch(stream, p + 9) == cudaSuccess);
  kernel_refused(stream, p + 10, {"is a host pointer"});  // belongs to nobody
}

TEST_CASE("memory: a device pointer is refused where host memory is needed") {
  Fresh fresh;
  TestStream stream;
  float* p = device_array<float>(4);
  fails_with(cudaMemcpyAsync(p, p, 16, cudaMemcpyHostToDevice, stream), cudaErrorInvalidValue,
             {"cudaMemcpyAsync", "src", "is memory of GPU 0, host memory is needed"});
  fails_with(cudaMemcpyAsync(p, p, 16, cudaMemcpyDeviceToHost, stream), cudaErrorInvalidValue,
             {"cudaMemcpyAsync", "dst", "is memory of GPU 0, host memory is needed"});
  fails_with(cudaMemcpyAsync(p, nullptr, 16, cudaMemcpyHostToDevice, stream), cudaErrorInvalidValue,
             {"src is null"});
}

TEST_CASE("memory: only the three device copies have a direction") {
  Fresh fresh;
  TestStream stream;
  float* p = device_array<float>(4);
  float host[4] = {};
  for (const auto kind : {cudaMemcpyHostToHost, cudaMemcpyDefault, cudaMemcpyKind(7)})
    fails_with(cudaMemcpyAsync(p, host, 16, kind, stream), cudaErrorInvalidMemcpyDirection,
               {"kind " + std::to_string(kind)});
}

TEST_CASE("memory: a null kernel argument is passed on") {
  Fresh fresh;
  TestStream stream;
  float* p = device_array<float>(1);
  const auto kernel = +[](float* out, const float* optional) { *out = optional ? 1 : 2; };
  MUST(launch_threads(stream, 1, kernel, p, static_cast<const float*>(nullptr)));
  MUST(cudaStreamSynchronize(stream));
  REQUIRE(*p == 2);
}

// ---- allocation ----------------------------------------------------------------------------

TEST_CASE("memory: cudaMalloc(0) is success and NULL, cudaFree(0) is success") {
  Fresh fresh;
  void* p = &fresh;
  REQUIRE(cudaMalloc(&p, 0) == cudaSuccess);
  REQUIRE(p == nullptr);
  REQUIRE(cudaFree(nullptr) == cudaSuccess);
  REQUIRE(cudaFreeHost(nullptr) == cudaSuccess);
  REQUIRE(virtual_gpu::counters(0).allocations == 0);
}

TEST_CASE("memory: freeing twice, inside, or what is no allocation is an error") {
  Fresh fresh;
  float on_host = 0;
  float *p = device_array<float>(1000), *pinned = nullptr;
  MUST(cudaMallocHost(&pinned, 64));
  fails_with(cudaFree(p + 10), cudaErrorInvalidValue,
             {"cudaFree", address(p + 10), "is not the start of an allocation"});
  fails_with(cudaFree(&on_host), cudaErrorInvalidValue, {"is a host pointer"});
  fails_with(cudaFree(pinned), cudaErrorInvalidValue, {"is pinned host memory"});
  fails_with(cudaFreeHost(p), cudaErrorInvalidValue, {"is not live pinned memory"});
  MUST(cudaFree(p));
  fails_with(cudaFree(p), cudaErrorInvalidValue, {address(p), "was freed"});
  MUST(cudaFreeHost(pinned));
  fails_with(cudaFreeHost(pinned), cudaErrorInvalidValue, {"is not live pinned memory"});
  REQUIRE(virtual_gpu::counters(0).memory_used == 0);
}

TEST_CASE("memory: too much is cudaErrorMemoryAllocation, and not sticky") {
  Fresh fresh{{"VIRTUAL_GPU_MEMORY", "64K"}};
  char *a = device_array<char>(60000), *b = a;
  fails_with(cudaMalloc(&b, 5537), cudaErrorMemoryAllocation,
             {"cudaMalloc", "out of memory", "5537 bytes wanted on GPU 0, 5536 of 65536 are free"});
  REQUIRE(b == nullptr);
  REQUIRE(cudaMalloc(&b, 5536) == cudaSuccess);
  size_t free = 1, total = 0;
  MUST(cudaMemGetInfo(&free, &total));
  REQUIRE((free == 0 && total == 65536));
  cudaDeviceProp prop;
  MUST(cudaGetDeviceProperties(&prop, 0));
  REQUIRE(prop.totalGlobalMem == 65536);
  MUST(cudaFree(a));
  REQUIRE(cudaMalloc(&a, 60000) == cudaSuccess);
  MUST(cudaSetDevice(1));  // each GPU has its own
  REQUIRE(cudaMalloc(&a, 65536) == cudaSuccess);
  fails_with(cudaMalloc(&a, SIZE_MAX), cudaErrorMemoryAllocation, {"GPU 1"});
}

TEST_CASE("memory: the preset's size counts where VIRTUAL_GPU_MEMORY is not set") {
  Fresh fresh{{"VIRTUAL_GPU", "t4"}};
  size_t free = 0, total = 0;
  MUST(cudaMemGetInfo(&free, &total));
  REQUIRE((free == 16'000'000'000 && total == 16'000'000'000));
  void* p = nullptr;
  fails_with(cudaMalloc(&p, 16'000'000'001), cudaErrorMemoryAllocation, {"16000000000 are free"});
}

TEST_CASE("memory: counters tell what is used, the peak, and every call") {
  Fresh fresh;
  char *a = device_array<char>(1000), *b = device_array<char>(500), *pinned = nullptr;
  MUST(cudaFree(a));
  a = device_array<char>(200);
  MUST(cudaMallocHost(&pinned, 10));
  const virtual_gpu::Counters n = virtual_gpu::counters(0);
  REQUIRE((n.memory_used == 700 && n.memory_peak == 1500));
  REQUIRE((n.allocations == 3 && n.frees == 1 && n.host_allocations == 1 && n.host_frees == 0));
  REQUIRE(n.api_calls == 5);
  REQUIRE(virtual_gpu::counters(1).memory_used == 0);
  MUST(cudaFree(b));
  MUST(cudaFreeHost(pinned));
  REQUIRE(virtual_gpu::counters(0).memory_peak == 1500);
  REQUIRE(virtual_gpu::counters(0).host_frees == 1);
}

TEST_CASE("memory: new memory is NaN, pinned memory too") {
  Fresh fresh;
  float *p = device_array<float>(1001), *pinned = nullptr;
  MUST(cudaMallocHost(&pinned, 4004));
  for (int i = 0; i < 1001; ++i) REQUIRE((std::isnan(p[i]) && std::isnan(pinned[i])));
  // Also memory that was used before.
  MUST(cudaMemsetAsync(p, 0, 4004, TestStream()));
  MUST(cudaFree(p));
  p = device_array<float>(1001);
  for (int i = 0; i < 1001; ++i) REQUIRE(std::isnan(p[i]));
}

TEST_CASE("memory: cudaFree waits for the work that uses the memory") {
  Fresh fresh{{"VIRTUAL_GPU", countable}};
  TestStream stream;
  float* p = device_array<float>(1);
  busy(stream, p, 500);
  MUST(touch(stream, p));
  MUST(cudaFree(p));
  REQUIRE(virtual_gpu::host_time() == 501);
}

TEST_CASE("memory: a copy or memset of no bytes is nothing") {
  Fresh fresh;
  TestStream stream;
  REQUIRE(cudaMemcpyAsync(nullptr, nullptr, 0, cudaMemcpyHostToDevice, stream) == cudaSuccess);
  REQUIRE(cudaMemsetAsync(nullptr, 0, 0, stream) == cudaSuccess);
  REQUIRE(virtual_gpu::counters(0).copies == 0);
}

// ---- streams and launches that are refused -------------------------------------------------

TEST_CASE("memory: stream 0 is refused by every call that takes a stream") {
  Fresh fresh;
  TestEvent event;
  float *p = device_array<float>(1), host = 0;
  const std::vector<std::string> said = {"stream 0", "cudaStreamNonBlocking"};
  fails_with(touch(nullptr, p), cudaErrorInvalidResourceHandle, said);
  fails_with(cudaMemcpyAsync(p, &host, 4, cudaMemcpyHostToDevice), cudaErrorInvalidResourceHandle,
             said);
  fails_with(cudaMemsetAsync(p, 0, 4), cudaErrorInvalidResourceHandle, said);
  fails_with(cudaStreamSynchronize(nullptr), cudaErrorInvalidResourceHandle, said);
  fails_with(cudaStreamQuery(nullptr), cudaErrorInvalidResourceHandle, said);
  fails_with(cudaStreamWaitEvent(nullptr, event), cudaErrorInvalidResourceHandle, said);
  fails_with(cudaEventRecord(event), cudaErrorInvalidResourceHandle, said);
  fails_with(cudaStreamDestroy(nullptr), cudaErrorInvalidResourceHandle, said);
}

TEST_CASE("launch: a kernel on another device's stream is 400 and names both") {
  Fresh fresh;
  TestStream stream;
  MUST(cudaSetDevice(3));
  fails_with(touch(stream, device_array<float>(1)), cudaErrorInvalidResourceHandle,
             {"cudaLaunchKernelEx", "the stream belongs to GPU 0", "for GPU 3"});
}

TEST_CASE("launch: an empty or too large grid or block is 9, and not sticky") {
  Fresh fresh;
  TestStream stream;
  float* p = device_array<float>(1);
  const auto launch_shape = [&](dim3 grid, dim3 block) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, touch_kernel, p);
  };
  const std::pair<dim3, dim3> refused[] = {{0, 1},
                                           {1, 0},
                                           {dim3(1, 0), 1},
                                           {dim3(1, 1, 0), 1},
                                           {1, dim3(1, 0, 1)},
                                           {1, 1025},
                                           {1, dim3(32, 33)},
                                           {1, dim3(1, 1, 65)},
                                           {dim3(1, 65536), 1},
                                           {dim3(1, 1, 65536), 1},
                                           {0x80000000u, 1}};
  for (const auto& [grid, block] : refused)
    fails_with(launch_shape(grid, block), cudaErrorInvalidConfiguration,
               {"cudaLaunchKernelEx", "invalid configuration"});
  REQUIRE(launch_shape(0x7fffffffu, 1024) == cudaSuccess);
  REQUIRE(launch_shape(dim3(1, 65535, 1), dim3(1, 16, 64)) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
  REQUIRE(virtual_gpu::counters(0).launches == 2);
}

TEST_CASE("launch: shared memory, attributes and too many arguments are refused") {
  Fresh fresh;
  TestStream stream;
  float* p = device_array<float>(1);
  cudaLaunchConfig_t config = {};
  config.stream = stream;
  config.dynamicSmemBytes = 4;
  fails_with(cudaLaunchKernelEx(&config, touch_kernel, p), cudaErrorInvalidConfiguration,
             {"shared memory and attributes are not modelled"});
  config.dynamicSmemBytes = 0;
  config.numAttrs = 1;
  fails_with(cudaLaunchKernelEx(&config, touch_kernel, p), cudaErrorInvalidConfiguration, {});
  struct Many {
    char bytes[300];
  };
  fails_with(launch_threads(
                 stream, 1, +[](Many) {}, Many{}),
             cudaErrorInvalidValue, {"bytes of arguments do not fit"});
}

// ---- errors --------------------------------------------------------------------------------

TEST_CASE("errors: an illegal address is sticky for its device, and for no other") {
  Fresh fresh;
  TestStream stream;
  float host = 0, *p = device_array<float>(1);
  fails_with(touch(stream, &host), cudaErrorIllegalAddress, {"argument", "is a host pointer"});
  REQUIRE(cudaGetLastError() == cudaErrorIllegalAddress);
  void* q = nullptr;
  int d = -1;
  const std::vector<std::string> said = {"an illegal memory access", "cudaLaunchKernelEx"};
  fails_with(cudaMalloc(&q, 4), cudaErrorIllegalAddress, said);
  fails_with(cudaStreamSynchronize(stream), cudaErrorIllegalAddress, said);
  fails_with(touch(stream, p), cudaErrorIllegalAddress, said);
  fails_with(cudaGetDevice(&d), cudaErrorIllegalAddress, said);
  fails_with(cudaFree(p), cudaErrorIllegalAddress, said);
  cudaError_t on_thread = cudaSuccess;
  std::thread([&] { on_thread = cudaMalloc(&q, 4); }).join();
  REQUIRE(on_thread == cudaErrorIllegalAddress);
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  REQUIRE(cudaMalloc(&q, 4) == cudaSuccess);
  REQUIRE(cudaSetDevice(0) == cudaErrorIllegalAddress);
}

TEST_CASE("errors: the last error is the thread's own; Get clears it, Peek does not") {
  Fresh fresh;
  REQUIRE(cudaSetDevice(99) == cudaErrorInvalidDevice);
  REQUIRE(cudaPeekAtLastError() == cudaErrorInvalidDevice);
  cudaError_t there = cudaErrorUnknown;
  std::thread([&] { there = cudaGetLastError(); }).join();
  REQUIRE(there == cudaSuccess);
  int d = -1;
  REQUIRE(cudaGetDevice(&d) == cudaSuccess);  // a success does not clear it
  REQUIRE(d == 0);
  REQUIRE(cudaPeekAtLastError() == cudaErrorInvalidDevice);
  REQUIRE(cudaGetLastError() == cudaErrorInvalidDevice);
  REQUIRE(cudaGetLastError() == cudaSuccess);
  REQUIRE(cudaPeekAtLastError() == cudaSuccess);
}

TEST_CASE("errors: names are CUDA's; the text goes on only for the failure it belongs to") {
  Fresh fresh;
  REQUIRE(std::string(cudaGetErrorName(cudaErrorMemoryAllocation)) == "cudaErrorMemoryAllocation");
  REQUIRE(std::string(cudaGetErrorName(cudaErrorIllegalAddress)) == "cudaErrorIllegalAddress");
  REQUIRE(std::string(cudaGetErrorName(cudaError_t(12345))) == "unrecognized error code");
  fails_with(cudaSetDevice(-1), cudaErrorInvalidDevice, {"there is no GPU -1, there are 8"});
  REQUIRE(std::string(cudaGetErrorString(cudaErrorMemoryAllocation)) == "out of memory");
  REQUIRE(std::string(cudaGetErrorString(cudaSuccess)) == "no error");
}

TEST_CASE("errors: without a device every call says so") {
  for (const auto& [name, value] :
       {std::pair("VIRTUAL_GPU_COUNT", "0"), std::pair("CUDA_VISIBLE_DEVICES", ""),
        std::pair("CUDA_VISIBLE_DEVICES", "-1")}) {
    Fresh fresh{{name, value}};
    int count = -1;
    REQUIRE(cudaGetDeviceCount(&count) == cudaErrorNoDevice);
    REQUIRE(count == 0);
    void* p = nullptr;
    cudaStream_t stream = nullptr;
    cudaDeviceProp prop;
    fails_with(cudaMalloc(&p, 4), cudaErrorNoDevice, {"no virtual GPU"});
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaErrorNoDevice);
    REQUIRE(cudaSetDevice(0) != cudaSuccess);
    REQUIRE(cudaDeviceSynchronize() == cudaErrorNoDevice);
    REQUIRE(cudaGetDeviceProperties(&prop, 0) == cudaErrorNoDevice);
    REQUIRE(cudaEventCreate(nullptr) == cudaErrorNoDevice);
    REQUIRE(cudaMallocHost(&p, 4) == cudaErrorNoDevice);
  }
}

TEST_CASE("errors: CUDA_VISIBLE_DEVICES counts up to the first entry that is no device") {
  const std::pair<const char*, int> lists[] = {
      {"0", 1}, {"0,1", 2}, {"5,3,1", 3}, {"0,-1,1", 1}, {"0,8,1", 1}, {"0,x", 1}, {"0,", 1}};
  for (const auto& [list, wanted] : lists) {
    Fresh fresh{{"CUDA_VISIBLE_DEVICES", list}};
    int count = -1;
    INFO(list);
    MUST(cudaGetDeviceCount(&count));
    REQUIRE(count == wanted);
  }
}

// ---- memory calls while NCCL waits ---------------------------------------------------------

namespace {

// Runs `call` on rank 0 of 2 while its all-reduce is in the stream and not waited for.
std::vector<std::string> beside_nccl(const std::function<void()>& call) {
  return texts_of_ranks(2, [&](TestRank& r) {
    float* p = r.filled<float>(1000);
    MUST(ncclAllReduce(p, p, 1000, ncclFloat, ncclSum, r.comm, r.stream));
    if (r.rank == 0) call();
    r.synchronize();
  });
}

}  // namespace

TEST_CASE("memory: calls while NCCL work is outstanding are a hazard, and refused") {
  const std::string said = "stream 0 of GPU 0 has NCCL work that this thread has not waited for";
  const std::pair<const char*, std::function<void()>> calls[] = {
      {"cudaMalloc", [] { device_array<char>(8); }}, {"cudaMallocHost", [] {
                                                        void* p = nullptr;
                                                        MUST(cudaMallocHost(&p, 8));
                                                      }}};
  for (const auto& [name, call] : calls) {
    Fresh fresh;
    const auto texts = beside_nccl(call);
    INFO(name);
    some_rank_says(texts, {said, "can deadlock all ranks"});
    REQUIRE(texts[1] == "");
  }
}

TEST_CASE("memory: cudaFree and cudaFreeHost beside outstanding NCCL work are refused") {
  Fresh fresh;
  on_ranks(2, [](TestRank& r) {
    float *p = r.filled<float>(1000), *other = device_array<float>(1), *pinned = nullptr;
    MUST(cudaMallocHost(&pinned, 4));
    MUST(ncclAllReduce(p, p, 1000, ncclFloat, ncclSum, r.comm, r.stream));
    VERIFY(cudaFree(other) == cudaErrorNotPermitted);
    VERIFY(contains(cudaGetErrorString(cudaErrorNotPermitted), "cudaFree: stream"));
    VERIFY(cudaFreeHost(pinned) == cudaErrorNotPermitted);
    r.synchronize();
    VERIFY(cudaFree(other) == cudaSuccess);
    VERIFY(cudaFreeHost(pinned) == cudaSuccess);
  });
}

TEST_CASE("memory: work that this thread knows to be done is no hazard, however it knows") {
  Fresh fresh;
  on_ranks(2, [](TestRank& r) {
    float* p = r.filled<float>(1000);
    TestEvent event;
    for (int way = 0; way < 3; ++way) {
      MUST(ncclAllReduce(p, p, 1000, ncclFloat, ncclSum, r.comm, r.stream));
      MUST(cudaEventRecord(event, r.stream));
      if (way == 0) MUST(cudaEventSynchronize(event));
      if (way == 1) MUST(cudaDeviceSynchronize());
      while (way == 2 && cudaEventQuery(event) == cudaErrorNotReady) {
      }
      MUST(cudaFree(device_array<float>(1)));
    }
  });
}
