// The virtual cuBLAS: every type, transpose and leading dimension against plain loops, what it
// refuses, and what it costs.
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <virtual_gpu.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "catch.h"

namespace {

const float zero = 0, one = 1;
float on_host[4];

struct Gpu {  // a stream and a handle on GPU 0, in a runtime that has forgotten all before
  cudaStream_t stream = nullptr;
  cublasHandle_t handle = nullptr;
  Gpu() {
    virtual_gpu::reset();
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    REQUIRE(cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS);
    REQUIRE(cublasSetStream(handle, stream) == CUBLAS_STATUS_SUCCESS);
  }
  ~Gpu() {
    cublasDestroy(handle);
    cudaStreamDestroy(stream);
    virtual_gpu::reset();
  }
};

template <class T>
T* device_array(size_t n) {
  T* p = nullptr;
  REQUIRE(cudaMalloc(&p, n * sizeof(T)) == cudaSuccess);
  return p;
}

double uniform(uint64_t& state) {  // small numbers with few bits
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<double>(state >> 52) / 2048 - 1;
}

template <class T>
constexpr cudaDataType type_of = std::is_same_v<T, float>    ? CUDA_R_32F
                                 : std::is_same_v<T, double> ? CUDA_R_64F
                                 : std::is_same_v<T, __half> ? CUDA_R_16F
                                                             : CUDA_R_16BF;

double widen(double x) { return x; }
double widen(float x) { return x; }
double widen(__half x) { return __half2float(x); }
double widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
struct Matrix {  // rows x columns as stored, with `ld`
  int rows, columns, ld;
  T* data;
  Matrix(int r, int c, int pad, uint64_t& state)
      : rows(r), columns(c), ld(r + pad), data(device_array<T>(size_t(ld) * c)) {
    for (int i = 0; i < ld * c; ++i) data[i] = T(uniform(state));
  }
  double at(int i, int j, bool transposed) const {
    return transposed ? widen(data[size_t(i) * ld + j]) : widen(data[size_t(j) * ld + i]);
  }
};

// The largest error in units of what a sum in float, rounded once to C's type, may be off; and
// nothing between C's columns may have changed.
template <class In, class Out, class Scalar>
void compare(Gpu& gpu, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, int pad,
             double beta, cublasComputeType_t compute) {
  uint64_t state = m * 1000 + n * 100 + k;
  const bool a_turned = ta != CUBLAS_OP_N, b_turned = tb != CUBLAS_OP_N;
  const Matrix<In> a(a_turned ? k : m, a_turned ? m : k, pad, state);
  const Matrix<In> b(b_turned ? n : k, b_turned ? k : n, 2 * pad, state);
  Matrix<Out> c(m, n, 3 * pad, state);
  if (beta == 0)
    for (int j = 0; j < n; ++j)
      for (int i = 0; i < m; ++i) c.data[j * c.ld + i] = Out(std::nan(""));
  const std::vector<Out> before(c.data, c.data + size_t(c.ld) * n);
  const Scalar alpha = 0.75, scale = static_cast<Scalar>(beta);
  REQUIRE(cublasGemmEx(gpu.handle, ta, tb, m, n, k, &alpha, a.data, type_of<In>, a.ld, b.data,
                       type_of<In>, b.ld, &scale, c.data, type_of<Out>, c.ld, compute,
                       CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
  REQUIRE(cudaStreamSynchronize(gpu.stream) == cudaSuccess);
  const double sum_eps = std::is_same_v<Out, double> ? 2.3e-16 : 1.2e-7;
  const double last_eps = std::is_same_v<Out, __half>          ? std::ldexp(1, -11)
                          : std::is_same_v<Out, __nv_bfloat16> ? std::ldexp(1, -8)
                                                               : 0;
  int wrong = 0;
  for (int j = 0; j < n; ++j)
    for (int i = 0; i < c.ld; ++i) {
      const size_t at = size_t(j) * c.ld + i;
      if (i >= m) {
        wrong += widen(c.data[at]) != widen(before[at]);
        continue;
      }
      double sum = beta == 0 ? 0 : beta * widen(before[at]), magnitude = std::abs(sum);
      for (int l = 0; l < k; ++l) {
        const double product = 0.75 * a.at(i, l, a_turned) * b.at(l, j, b_turned);
        sum += product;
        magnitude += std::abs(product);
      }
      const double allowed = (k + 2) * sum_eps * magnitude + last_eps * std::abs(sum) * 1.01;
      wrong += !(std::abs(widen(c.data[at]) - sum) <= allowed);
    }
  INFO(m << "x" << n << "x" << k << " pad " << pad << " beta " << beta << " ops " << ta << tb);
  CHECK(wrong == 0);
  for (void* p : {static_cast<void*>(a.data), static_cast<void*>(b.data),
                  static_cast<void*>(c.data)})
    REQUIRE(cudaFree(p) == cudaSuccess);
}

template <class In, class Out, class Scalar = float>
void compare_all(cublasComputeType_t compute = CUBLAS_COMPUTE_32F) {
  Gpu gpu;
  const int shapes[][3] = {{1, 1, 1}, {3, 1, 5}, {1, 7, 3}, {17, 5, 33}, {64, 65, 3}};
  for (const auto& [m, n, k] : shapes)
    for (const cublasOperation_t ta : {CUBLAS_OP_N, CUBLAS_OP_T})
      for (const cublasOperation_t tb : {CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_OP_C})
        for (const int pad : {0, 2})
          for (const double beta : {0.0, 0.5})
            compare<In, Out, Scalar>(gpu, ta, tb, m, n, k, pad, beta, compute);
}

// A GEMM of 2x2x2 floats in which one thing can be made wrong.
struct Arguments {
  cublasHandle_t handle;
  float *a, *b, *c;
  cublasOperation_t ta = CUBLAS_OP_N, tb = CUBLAS_OP_N;
  int m = 2, n = 2, k = 2, lda = 2, ldb = 2, ldc = 2;
  cudaDataType a_type = CUDA_R_32F, b_type = CUDA_R_32F, c_type = CUDA_R_32F;
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  const void *alpha = &one, *beta = &zero;

  explicit Arguments(cublasHandle_t h)
      : handle(h),
        a(device_array<float>(4)),
        b(device_array<float>(4)),
        c(device_array<float>(4)) {}
  cublasStatus_t run() const {
    return cublasGemmEx(handle, ta, tb, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c,
                        c_type, ldc, compute, CUBLAS_GEMM_DEFAULT);
  }
};

template <class Change>
void refused(cublasStatus_t status, const std::string& words, Change change) {
  Gpu gpu;
  Arguments arguments(gpu.handle);
  change(arguments);
  const cublasStatus_t result = arguments.run();
  const std::string text = cublasGetStatusString(result);
  CAPTURE(text, words);
  CHECK(result == status);
  CHECK(text.find(words) != std::string::npos);
  CHECK(virtual_gpu::counters(0).gemms == 0);
  cudaSetDevice(0);
}

void spin(std::uintptr_t flag) {  // not a pointer argument: the flag is the host's
  while (!reinterpret_cast<std::atomic<bool>*>(flag)->load()) {
  }
}

}  // namespace

TEST_CASE("gemm: every type, transpose and stride equals plain loops") {
  SECTION("float") { compare_all<float, float>(); }
  SECTION("double") { compare_all<double, double, double>(CUBLAS_COMPUTE_64F); }
  SECTION("half") { compare_all<__half, __half>(); }
  SECTION("half to float") { compare_all<__half, float>(); }
  SECTION("bfloat16") { compare_all<__nv_bfloat16, __nv_bfloat16>(); }
  SECTION("bfloat16 to float") { compare_all<__nv_bfloat16, float>(); }
}

TEST_CASE("gemm of halves sums in float and rounds once") {
  // 2048 + 1 - 2048: a sum in half would lose the one.
  Gpu gpu;
  __half *a = device_array<__half>(3), *b = device_array<__half>(3), *c = device_array<__half>(1);
  const float values[] = {2048, 1, -2048};
  for (int i = 0; i < 3; ++i) a[i] = __half(values[i]), b[i] = __half(1.0f);
  REQUIRE(cublasGemmEx(gpu.handle, CUBLAS_OP_T, CUBLAS_OP_N, 1, 1, 3, &one, a, CUDA_R_16F, 3, b,
                       CUDA_R_16F, 3, &zero, c, CUDA_R_16F, 1, CUBLAS_COMPUTE_32F,
                       CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
  REQUIRE(cudaStreamSynchronize(gpu.stream) == cudaSuccess);
  CHECK(__half2float(*c) == 1);
}

TEST_CASE("gemm returns before it runs, and has read its scalars") {
  Gpu gpu;
  Arguments g(gpu.handle);
  for (int i = 0; i < 4; ++i) g.a[i] = g.b[i] = 1, g.c[i] = 5;
  float alpha = 2, beta = 1;
  g.alpha = &alpha, g.beta = &beta;
  std::atomic<bool> go{false};
  const cudaLaunchConfig_t launch{1, 1, 0, gpu.stream, nullptr, 0};
  REQUIRE(cudaLaunchKernelEx(&launch, spin, reinterpret_cast<std::uintptr_t>(&go)) == cudaSuccess);
  REQUIRE(g.run() == CUBLAS_STATUS_SUCCESS);
  alpha = beta = 100;
  go = true;
  REQUIRE(cudaStreamSynchronize(gpu.stream) == cudaSuccess);
  CHECK(g.c[3] == 9);
}

TEST_CASE("gemm refuses what cuBLAS refuses, and says what is wrong") {
  const auto value = CUBLAS_STATUS_INVALID_VALUE;
  refused(value, "m -1", [](auto& g) { g.m = -1; });
  refused(value, "n -2", [](auto& g) { g.n = -2; });
  refused(value, "k -3", [](auto& g) { g.k = -3; });
  refused(value, "k 0", [](auto& g) { g.k = 0; });
  refused(value, "lda is 1, but the matrix has 2 rows", [](auto& g) { g.lda = 1; });
  refused(value, "ldb is 1, but the matrix has 2 rows", [](auto& g) { g.ldb = 1; });
  refused(value, "ldc is 1, but the matrix has 2 rows", [](auto& g) { g.ldc = 1; });
  refused(value, "lda is 2, but the matrix has 3 rows", [](auto& g) {
    g.ta = CUBLAS_OP_T;
    g.k = 3;
  });
  refused(value, "ldc is 0", [](auto& g) { g.m = g.ldc = 0; });
  refused(value, "alpha is null", [](auto& g) { g.alpha = nullptr; });
  refused(value, "beta is null", [](auto& g) { g.beta = nullptr; });
  refused(value, "alpha", [](auto& g) { g.alpha = g.a; });  // device memory: pointer mode is host
  refused(value, "operation 3", [](auto& g) { g.tb = static_cast<cublasOperation_t>(3); });
  refused(value, "operation 3", [](auto& g) { g.ta = static_cast<cublasOperation_t>(3); });
}

TEST_CASE("gemm takes six combinations of types, and no other") {
  const auto types = [](cudaDataType a, cudaDataType b, cudaDataType c,
                        cublasComputeType_t compute) {
    refused(CUBLAS_STATUS_NOT_SUPPORTED, "types A", [=](auto& g) {
      g.a_type = a, g.b_type = b, g.c_type = c, g.compute = compute;
    });
  };
  types(CUDA_R_32F, CUDA_R_32F, CUDA_R_64F, CUBLAS_COMPUTE_32F);
  types(CUDA_R_32F, CUDA_R_32F, CUDA_R_16F, CUBLAS_COMPUTE_32F);
  types(CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_64F);
  types(CUDA_R_64F, CUDA_R_64F, CUDA_R_64F, CUBLAS_COMPUTE_32F);
  types(CUDA_R_64F, CUDA_R_64F, CUDA_R_32F, CUBLAS_COMPUTE_64F);
  types(CUDA_R_16F, CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F);
  types(CUDA_R_16F, CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F);
  types(CUDA_R_16F, CUDA_R_16F, CUDA_R_16BF, CUBLAS_COMPUTE_32F);
  types(CUDA_R_16BF, CUDA_R_16BF, CUDA_R_16F, CUBLAS_COMPUTE_32F);
  types(CUDA_R_16F, CUDA_R_16F, CUDA_R_16F, static_cast<cublasComputeType_t>(64));
  types(static_cast<cudaDataType>(3), static_cast<cudaDataType>(3), CUDA_R_32F, CUBLAS_COMPUTE_32F);
}

TEST_CASE("gemm refuses memory that its GPU has not, by extent") {
  const auto execution = CUBLAS_STATUS_EXECUTION_FAILED;
  refused(execution, "A 0x", [](auto& g) { g.a = on_host; });
  refused(execution, "B 0x", [](auto& g) { g.b = on_host; });
  refused(execution, "C 0x", [](auto& g) { g.c = on_host; });
  refused(execution, "was freed", [](auto& g) { cudaFree(g.b); });
  refused(execution, "is memory of GPU 1", [](auto& g) {
    cudaSetDevice(1);
    g.c = device_array<float>(4);
    cudaSetDevice(0);
  });
  refused(execution, "A 0x", [](auto& g) { g.k = g.ldb = 3; });
  refused(execution, "runs past its end: 24 bytes are used, 16 of 16 are left",
          [](auto& g) { g.ldc = 4; });
  refused(execution, "runs past its end: 16 bytes are used, 12 of 16 are left",
          [](auto& g) { ++g.b; });
}

TEST_CASE("a gemm on wrong memory ends its GPU, as an illegal access does") {
  Gpu gpu;
  Arguments g(gpu.handle);
  g.a = on_host;
  REQUIRE(g.run() == CUBLAS_STATUS_EXECUTION_FAILED);
  CHECK(cudaDeviceSynchronize() == cudaErrorIllegalAddress);
  CHECK(cublasSetStream(gpu.handle, gpu.stream) == CUBLAS_STATUS_INTERNAL_ERROR);
}

TEST_CASE("handles belong to a GPU and a stream of it") {
  refused(CUBLAS_STATUS_NOT_INITIALIZED, "handle is null", [](auto& g) { g.handle = nullptr; });
  refused(CUBLAS_STATUS_EXECUTION_FAILED, "the handle is of GPU 0, the current one is 1",
          [](auto&) { cudaSetDevice(1); });
  Gpu gpu;
  cublasHandle_t other;
  REQUIRE(cublasCreate(&other) == CUBLAS_STATUS_SUCCESS);
  Arguments g(other);
  CHECK(g.run() == CUBLAS_STATUS_EXECUTION_FAILED);  // no stream was set
  CHECK(std::string(cublasGetStatusString(CUBLAS_STATUS_EXECUTION_FAILED)).find("stream 0") !=
        std::string::npos);
  CHECK(cublasSetStream(other, nullptr) == CUBLAS_STATUS_INVALID_VALUE);
  cudaStream_t elsewhere, stream;
  cudaSetDevice(1);
  REQUIRE(cudaStreamCreateWithFlags(&elsewhere, cudaStreamNonBlocking) == cudaSuccess);
  cudaSetDevice(0);
  CHECK(cublasSetStream(other, elsewhere) == CUBLAS_STATUS_INVALID_VALUE);
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  REQUIRE(cublasSetStream(other, stream) == CUBLAS_STATUS_SUCCESS);
  cudaStream_t got = nullptr;
  CHECK(cublasGetStream(other, &got) == CUBLAS_STATUS_SUCCESS);
  CHECK(got == stream);
  CHECK(cublasGetStream(other, nullptr) == CUBLAS_STATUS_INVALID_VALUE);
  cudaStreamDestroy(stream);
  cudaStreamDestroy(elsewhere);
  CHECK(g.run() == CUBLAS_STATUS_EXECUTION_FAILED);  // its stream is gone
  CHECK(cublasDestroy(other) == CUBLAS_STATUS_SUCCESS);
  CHECK(cublasDestroy(other) == CUBLAS_STATUS_NOT_INITIALIZED);
  CHECK(g.run() == CUBLAS_STATUS_NOT_INITIALIZED);
  CHECK(cublasCreate(nullptr) == CUBLAS_STATUS_INVALID_VALUE);
  CHECK(virtual_gpu::counters(0).handles_created == 2);
  CHECK(virtual_gpu::counters(0).handles_destroyed == 1);
}

TEST_CASE("gemm with no rows or no columns writes nothing and is not launched") {
  Gpu gpu;
  Arguments g(gpu.handle);
  g.m = 0;
  CHECK(g.run() == CUBLAS_STATUS_SUCCESS);
  g.m = 2, g.n = 0;
  CHECK(g.run() == CUBLAS_STATUS_SUCCESS);
  CHECK(virtual_gpu::counters(0).gemms == 0);
}

TEST_CASE("gemm takes what the table of costs says") {
  Gpu gpu;
  using virtual_gpu::Picoseconds;
  float* x = device_array<float>(4096);
  const auto time = [&](const char* hardware, cudaDataType in, cudaDataType out) -> Picoseconds {
    virtual_gpu::configure(hardware);
    virtual_gpu::record_timeline(true);
    const double wide = 1;  // as a float its bits are 0: only the time matters
    const auto compute = in == CUDA_R_64F ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F;
    cudaStream_t stream;
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    REQUIRE(cublasSetStream(gpu.handle, stream) == CUBLAS_STATUS_SUCCESS);
    REQUIRE(cublasGemmEx(gpu.handle, CUBLAS_OP_N, CUBLAS_OP_N, 10, 20, 30, &wide, x, in, 10, x, in,
                         30, &wide, x, out, 10, compute, CUBLAS_GEMM_DEFAULT) ==
            CUBLAS_STATUS_SUCCESS);
    cudaStreamDestroy(stream);
    const virtual_gpu::Operation last = virtual_gpu::timeline().back();
    CHECK(last.kind == virtual_gpu::Kind::gemm);
    CHECK(std::string(last.call) == "gemm");
    return last.end - last.start;
  };
  // 2 * 10 * 20 * 30 = 12,000 FLOP; A, B and C have 300 + 600 + 200 elements.
  CHECK(time("ideal", CUDA_R_32F, CUDA_R_32F) == 12'000);
  CHECK(time("ideal,fp64=5e11", CUDA_R_64F, CUDA_R_64F) == 24'000);
  CHECK(time("ideal,fp16=4e12", CUDA_R_16F, CUDA_R_32F) == 3'000);
  CHECK(time("ideal,bf16=2e12", CUDA_R_16BF, CUDA_R_16BF) == 6'000);
  CHECK(time("ideal,launch=1e-6", CUDA_R_32F, CUDA_R_32F) == 1'012'000);
  CHECK(time("ideal,launch=1e-6,memory_bandwidth=1e11", CUDA_R_32F, CUDA_R_32F) == 1'044'000);
  CHECK(time("ideal,memory_bandwidth=1e11", CUDA_R_64F, CUDA_R_64F) == 88'000);
  CHECK(time("ideal,memory_bandwidth=1e11", CUDA_R_16F, CUDA_R_16F) == 22'000);
  CHECK(time("ideal,memory_bandwidth=1e11", CUDA_R_16BF, CUDA_R_32F) == 26'000);
  CHECK(virtual_gpu::counters(0).gemms == 9);
  virtual_gpu::record_timeline(false);
}

TEST_CASE("cuBLAS calls fail where they are told to, and know that it was cuBLAS") {
  setenv("VIRTUAL_GPU_FAIL", "3:0", 1);  // after cudaSetDevice and cudaStreamCreateWithFlags
  virtual_gpu::reset();
  unsetenv("VIRTUAL_GPU_FAIL");
  cudaSetDevice(0);
  cudaStream_t stream;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  cublasHandle_t handle = nullptr;
  CHECK(cublasCreate(&handle) == CUBLAS_STATUS_INTERNAL_ERROR);
  const std::string text = cublasGetStatusString(CUBLAS_STATUS_INTERNAL_ERROR);
  CHECK(text == "an internal operation failed: cublasCreate: GPU 0's call 3 was told to fail by "
                "VIRTUAL_GPU_FAIL");
  CHECK(handle == nullptr);
  CHECK(cublasGetStatusString(CUBLAS_STATUS_SUCCESS) == std::string("success"));
  CHECK(cublasGetStatusString(CUBLAS_STATUS_NOT_SUPPORTED) ==
        std::string("the functionality is not supported"));
  CHECK(cudaGetErrorString(static_cast<cudaError_t>(CUBLAS_STATUS_INTERNAL_ERROR)) !=
        std::string(text));
  cudaStreamDestroy(stream);
  virtual_gpu::reset();
}

TEST_CASE("without arithmetic a gemm takes its time and leaves C alone") {
  setenv("VIRTUAL_GPU_SKIP_MATH", "1", 1);
  {
    Gpu gpu;
    unsetenv("VIRTUAL_GPU_SKIP_MATH");
    Arguments g(gpu.handle);
    for (int i = 0; i < 4; ++i) g.a[i] = g.b[i] = 1, g.c[i] = 5;
    REQUIRE(g.run() == CUBLAS_STATUS_SUCCESS);
    REQUIRE(cudaStreamSynchronize(gpu.stream) == cudaSuccess);
    CHECK(g.c[0] == 5);
    CHECK(virtual_gpu::host_time() > 0);
  }
}
