// Small programs that are right, and each without the one call that makes it so: what
// ThreadSanitizer must report, and what it must not. Usage: two_streams CASE [broken]
#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int n = 64;

void must(int status, const char* call) {
  if (status == 0) return;
  std::printf("%s = %d\n", call, status);
  std::exit(3);
}
#define MUST(call) must(static_cast<int>(call), #call)

__global__ void write_kernel(float* x, float value) {
  for (int i = 0; i < n; ++i) x[i] = value;
}
__global__ void copy_kernel(float* to, const float* from) {
  for (int i = 0; i < n; ++i) to[i] = from[i];
}
template <class... Parameters, class... Arguments>
void launch(cudaStream_t stream, void (*kernel)(Parameters...), Arguments... args) {
  cudaLaunchConfig_t config = {};
  config.stream = stream;
  MUST(cudaLaunchKernelEx(&config, kernel, args...));
}

struct Gpu {
  cudaStream_t compute = nullptr, other = nullptr;
  cudaEvent_t event = nullptr;
  float *x = nullptr, *y = nullptr;
  Gpu() {
    MUST(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking));
    MUST(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    MUST(cudaEventCreate(&event));
    MUST(cudaMalloc(&x, n * sizeof(float)));
    MUST(cudaMalloc(&y, n * sizeof(float)));
  }
  // What `to` gets from now on waits for what `from` has got so far.
  void order(cudaStream_t from, cudaStream_t to) {
    MUST(cudaEventRecord(event, from));
    MUST(cudaStreamWaitEvent(to, event));
  }
  ~Gpu() {
    MUST(cudaDeviceSynchronize());
    MUST(cudaStreamDestroy(compute));
    MUST(cudaStreamDestroy(other));
    MUST(cudaEventDestroy(event));
  }
};

void two_kernels(bool broken) {
  Gpu gpu;
  launch(gpu.compute, write_kernel, gpu.x, 1.0f);
  if (!broken) gpu.order(gpu.compute, gpu.other);
  launch(gpu.other, copy_kernel, gpu.y, gpu.x);
}

void host_buffer(bool broken) {
  Gpu gpu;
  std::vector<float> buffer(n, 1.0f);
  MUST(cudaMemcpyAsync(gpu.x, buffer.data(), n * sizeof(float), cudaMemcpyHostToDevice, gpu.other));
  if (!broken) MUST(cudaStreamSynchronize(gpu.other));
  buffer.assign(n, 2.0f);  // the next batch
  MUST(cudaDeviceSynchronize());
}

void gemm(bool broken) {
  Gpu gpu;
  cublasHandle_t handle = nullptr;
  const float one = 1, zero = 0;
  MUST(cublasCreate(&handle));
  MUST(cublasSetStream(handle, gpu.other));
  launch(gpu.compute, write_kernel, gpu.x, 1.0f);
  if (!broken) gpu.order(gpu.compute, gpu.other);
  MUST(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, 8, 8, 8, &one, gpu.x, CUDA_R_32F, 8, gpu.x,
                    CUDA_R_32F, 8, &zero, gpu.y, CUDA_R_32F, 8, CUBLAS_COMPUTE_32F,
                    CUBLAS_GEMM_DEFAULT));
  MUST(cudaDeviceSynchronize());
  MUST(cublasDestroy(handle));
}

// body(rank, its GPU, the communicator) on two ranks
template <class Body>
void two_ranks(Body body) {
  ncclUniqueId id;
  MUST(ncclGetUniqueId(&id));
  std::vector<std::thread> ranks;
  for (int r = 0; r < 2; ++r)
    ranks.emplace_back([=] {
      MUST(cudaSetDevice(r));
      ncclComm_t comm = nullptr;
      MUST(ncclCommInitRank(&comm, 2, id, r));
      {
        Gpu gpu;
        body(r, gpu, comm);
        MUST(cudaDeviceSynchronize());
      }
      MUST(ncclCommDestroy(comm));
    });
  for (std::thread& rank : ranks) rank.join();
}

void all_reduce(bool broken) {
  two_ranks([=](int, Gpu& gpu, ncclComm_t comm) {
    launch(gpu.compute, write_kernel, gpu.x, 1.0f);  // the gradient
    if (!broken) gpu.order(gpu.compute, gpu.other);
    MUST(ncclAllReduce(gpu.x, gpu.x, n, ncclFloat, ncclSum, comm, gpu.other));
    gpu.order(gpu.other, gpu.compute);
    launch(gpu.compute, copy_kernel, gpu.y, gpu.x);  // the update
  });
}

// A stage's message to the next, which needs three waits: until it is made, until it is sent
// before its buffer is used again, and until it is there.
enum class Wait { before_send, after_send, after_receive };
void message(Wait left_out, bool broken) {
  two_ranks([=](int rank, Gpu& gpu, ncclComm_t comm) {
    const auto order = [&](Wait wait, cudaStream_t from, cudaStream_t to) {
      if (!broken || wait != left_out) gpu.order(from, to);
    };
    if (rank == 0) {
      launch(gpu.compute, write_kernel, gpu.x, 1.0f);
      order(Wait::before_send, gpu.compute, gpu.other);
      MUST(ncclSend(gpu.x, n, ncclFloat, 1, comm, gpu.other));
      order(Wait::after_send, gpu.other, gpu.compute);
      launch(gpu.compute, write_kernel, gpu.x, 2.0f);
    } else {
      MUST(ncclRecv(gpu.x, n, ncclFloat, 0, comm, gpu.other));
      order(Wait::after_receive, gpu.other, gpu.compute);
      launch(gpu.compute, copy_kernel, gpu.y, gpu.x);
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  const bool broken = argc > 2 && std::string(argv[2]) == "broken";
  if (name == "two_kernels")
    two_kernels(broken);
  else if (name == "host_buffer")
    host_buffer(broken);
  else if (name == "gemm")
    gemm(broken);
  else if (name == "all_reduce")
    all_reduce(broken);
  else if (name == "before_send")
    message(Wait::before_send, broken);
  else if (name == "after_send")
    message(Wait::after_send, broken);
  else if (name == "after_receive")
    message(Wait::after_receive, broken);
  else
    return 2;
  std::printf("done\n");
}
