// cuBLAS on a CBLAS: half types are converted to float, sums are float, the result rounds once.
#include "cublas_v2.h"

#include <cblas.h>

#include <algorithm>
#include <deque>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "runtime.h"

using namespace virtual_gpu;

// A rank is a thread already: a BLAS that starts its own would only fight over the cores.
extern "C" {
void openblas_set_num_threads(int) __attribute__((weak));
void MKL_Set_Num_Threads(int) __attribute__((weak));
void bli_thread_set_num_threads(long) __attribute__((weak));
}

struct cublasContext {
  int device;
  bool alive;
  cudaStream_t stream;
};

namespace {

constexpr int family = 1000;  // in Host::detail_code: CUDA's own codes are below it

cublasStatus_t refuse(Call& call, cublasStatus_t status, const std::string& detail) {
  call.host.detail = std::string(call.name) + ": " + detail;
  call.host.detail_code = family + status;
  return status;
}

// What every call begins with: the run, the device or VIRTUAL_GPU_FAIL's turn, then the handle.
cublasStatus_t begin(Call& call, const cublasContext* handle) {
  if (!call.ok()) {
    call.host.detail = call.problem;  // names its call itself
    call.host.detail_code = family + CUBLAS_STATUS_INTERNAL_ERROR;
    return CUBLAS_STATUS_INTERNAL_ERROR;
  }
  if (handle && handle->alive) return CUBLAS_STATUS_SUCCESS;
  return refuse(call, CUBLAS_STATUS_NOT_INITIALIZED,
                handle ? "the handle was destroyed" : "handle is null");
}

}  // namespace

cublasStatus_t cublasCreate(cublasHandle_t* handle) {
  Call call("cublasCreate");
  if (device_count() == 0) return refuse(call, CUBLAS_STATUS_NOT_INITIALIZED, "there is no GPU");
  const cublasContext made{call.host.device, true, nullptr};
  if (const cublasStatus_t s = begin(call, &made)) return s;
  if (!handle) return refuse(call, CUBLAS_STATUS_INVALID_VALUE, "handle is null");
  {
    static auto* all = new std::deque<cublasContext>;  // for ever, so that late use can be told
    Lock lock;
    if (openblas_set_num_threads) openblas_set_num_threads(1);
    if (MKL_Set_Num_Threads) MKL_Set_Num_Threads(1);
    if (bli_thread_set_num_threads) bli_thread_set_num_threads(1);
    *handle = &all->emplace_back(made);
  }
  DeviceLock guard(device(made.device));
  ++device(made.device).counters.handles_created;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  Call call("cublasDestroy");
  const cublasStatus_t status = begin(call, handle);
  if (!handle || !handle->alive) return status;
  handle->alive = false;  // also after a failure
  DeviceLock guard(device(handle->device));
  ++device(handle->device).counters.handles_destroyed;
  return status;
}

cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  Call call("cublasSetStream");
  if (const cublasStatus_t s = begin(call, handle)) return s;
  if (const std::string problem = stream_problem(stream, handle->device); !problem.empty())
    return refuse(call, CUBLAS_STATUS_INVALID_VALUE, problem);
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  Call call("cublasSetMathMode");
  if (const cublasStatus_t s = begin(call, handle)) return s;
  if (mode != CUBLAS_DEFAULT_MATH && mode != CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)
    return refuse(call, CUBLAS_STATUS_INVALID_VALUE, format("mode %d is not modelled", mode));
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetStream(cublasHandle_t handle, cudaStream_t* stream) {
  Call call("cublasGetStream");
  if (const cublasStatus_t s = begin(call, handle)) return s;
  if (!stream) return refuse(call, CUBLAS_STATUS_INVALID_VALUE, "streamId is null");
  *stream = handle->stream;
  return CUBLAS_STATUS_SUCCESS;
}

const char* cublasGetStatusString(cublasStatus_t status) {
  Host& h = host();
  switch (status) {
    case CUBLAS_STATUS_SUCCESS: h.text = "success"; break;
    case CUBLAS_STATUS_NOT_INITIALIZED: h.text = "the library was not initialized"; break;
    case CUBLAS_STATUS_INVALID_VALUE: h.text = "an unsupported value was passed"; break;
    case CUBLAS_STATUS_EXECUTION_FAILED: h.text = "the function failed to launch on the GPU"; break;
    case CUBLAS_STATUS_INTERNAL_ERROR: h.text = "an internal operation failed"; break;
    case CUBLAS_STATUS_NOT_SUPPORTED: h.text = "the functionality is not supported"; break;
    default: h.text = format("cuBLAS status %d", status);
  }
  if (h.detail_code == family + status && !h.detail.empty()) h.text += ": " + h.detail;
  return h.text.c_str();
}

// ---- GEMM ----------------------------------------------------------------------------------

namespace {

struct Matrix {  // as it is stored: column-major, `ld` elements from column to column
  void* data;
  cudaDataType type;
  int rows, columns, ld;

  size_t size() const { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }
  size_t extent() const { return (size_t(ld) * (columns - 1) + rows) * size(); }
  // note(p, n) of exactly what is touched: what lies between the columns may be another's.
  template <class Note>
  void touch(Note note) const {
    const bool dense = ld == rows;
    for (int j = 0; j < (dense ? 1 : columns); ++j)
      note(static_cast<char*>(data) + size_t(j) * ld * size(), dense ? extent() : rows * size());
  }
};

struct Gemm {
  Matrix a, b, c;
  int k;
  CBLAS_TRANSPOSE transpose_a, transpose_b;
  double alpha, beta;
};

template <class To, class From>
void convert(const Matrix& to, const Matrix& from) {
  for (int j = 0; j < to.columns; ++j) {
    To* out = static_cast<To*>(to.data) + size_t(j) * to.ld;
    const From* in = static_cast<From*>(from.data) + size_t(j) * from.ld;
    for (int i = 0; i < to.rows; ++i) out[i] = To(float(in[i]));
  }
}

// The matrix as floats: itself, or where it is of a half type a copy in `scratch`.
Matrix as_float(const Matrix& m, std::vector<float>& scratch, bool read) {
  if (m.size() != 2) return m;
  scratch.resize(std::max(scratch.size(), size_t(m.rows) * m.columns));
  const Matrix copy{scratch.data(), CUDA_R_32F, m.rows, m.columns, m.rows};
  const auto widen = m.type == CUDA_R_16F ? convert<float, __half> : convert<float, __nv_bfloat16>;
  if (read) widen(copy, m);
  return copy;
}

void multiply(const Gemm& g) {
  thread_local std::vector<float> scratch[3];  // a thread is a stream
  const Matrix a = as_float(g.a, scratch[0], true), b = as_float(g.b, scratch[1], true);
  const Matrix c = as_float(g.c, scratch[2], g.beta != 0);
  const auto call = [&](auto gemm, auto real) {
    using Real = decltype(real);
    Quiet quiet;  // a BLAS's own locks order nothing
    gemm(CblasColMajor, g.transpose_a, g.transpose_b, c.rows, c.columns, g.k, Real(g.alpha),
         static_cast<Real*>(a.data), a.ld, static_cast<Real*>(b.data), b.ld, Real(g.beta),
         static_cast<Real*>(c.data), c.ld);
  };
  if (c.type == CUDA_R_64F) call(cblas_dgemm, double());
  else call(cblas_sgemm, float());
  if (g.c.type == CUDA_R_16F) convert<__half, float>(g.c, c);
  if (g.c.type == CUDA_R_16BF) convert<__nv_bfloat16, float>(g.c, c);
}

void run_gemm(Stream& stream, Slot& slot) {
  const auto& g = *reinterpret_cast<const Gemm*>(slot.closure);
  if (!run_failed() && !skip_math()) {
    g.a.touch(note_read);
    g.b.touch(note_read);
    if (g.beta != 0) g.c.touch(note_read);
    g.c.touch(note_write);
    multiply(g);
  }
  stream.occupy(slot, 0, slot.cost);
}

bool supported(cudaDataType a, cudaDataType b, cudaDataType c, cublasComputeType_t compute) {
  if (a != b) return false;
  if (a == CUDA_R_64F) return c == CUDA_R_64F && compute == CUBLAS_COMPUTE_64F;
  const bool known = a == CUDA_R_32F || a == CUDA_R_16F || a == CUDA_R_16BF;
  return known && (c == CUDA_R_32F || c == a) && compute == CUBLAS_COMPUTE_32F;
}

// cuBLAS does not say what k == 0 does, and versions differ: C scaled, or not written.
std::string value_problem(const Gemm& g, cublasOperation_t transa, cublasOperation_t transb) {
  for (const cublasOperation_t op : {transa, transb})
    if (op != CUBLAS_OP_N && op != CUBLAS_OP_T && op != CUBLAS_OP_C)
      return format("operation %d is none of N, T, C", op);
  if (g.c.rows < 0 || g.c.columns < 0 || g.k <= 0)
    return format("m %d, n %d, k %d: k must be > 0, m and n >= 0", g.c.rows, g.c.columns, g.k);
  for (const auto& [name, m] : {std::pair("lda", &g.a), {"ldb", &g.b}, {"ldc", &g.c}})
    if (m->ld < std::max(1, m->rows))
      return format("%s is %d, but the matrix has %d rows", name, m->ld, m->rows);
  return "";
}

Picoseconds gemm_cost(const Gemm& g) {
  const Hardware& h = hardware();
  const double rate = g.a.type == CUDA_R_64F ? h.fp64 : g.a.type == CUDA_R_32F ? h.fp32
                      : g.a.type == CUDA_R_16F ? h.fp16 : h.bf16;
  double bytes = 0;
  for (const Matrix& m : {g.a, g.b, g.c}) bytes += double(m.rows) * m.columns * m.size();
  return duration(h.launch) + std::max(time_of(2.0 * g.c.rows * g.c.columns * g.k, rate),
                                       time_of(bytes, h.memory_bandwidth));
}

std::string handle_problem(const cublasContext& handle, int on_device) {
  if (handle.device == on_device) return stream_problem(handle.stream, on_device);
  return format("the handle is of GPU %d, the current one is %d", handle.device, on_device);
}

std::string memory_problem(const Gemm& g, int on_device) {
  std::string problem;
  for (const auto& [name, m] : {std::pair("A", &g.a), {"B", &g.b}, {"C", &g.c}})
    if (problem.empty()) problem = pointer_problem(m->data, m->extent(), on_device, name);
  return problem;
}

}  // namespace

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa,
                            cublasOperation_t transb, int m, int n, int k, const void* alpha,
                            const void* A, cudaDataType Atype, int lda, const void* B,
                            cudaDataType Btype, int ldb, const void* beta, void* C,
                            cudaDataType Ctype, int ldc, cublasComputeType_t compute,
                            cublasGemmAlgo_t) {
  Call call("cublasGemmEx");
  if (const cublasStatus_t s = begin(call, handle)) return s;
  if (!supported(Atype, Btype, Ctype, compute))
    return refuse(call, CUBLAS_STATUS_NOT_SUPPORTED,
                  format("types A %d, B %d, C %d, compute %d", Atype, Btype, Ctype, compute));
  for (const auto& [name, p] : {std::pair("alpha", alpha), {"beta", beta}})
    if (const std::string problem = host_pointer_problem(p, name); !problem.empty())
      return refuse(call, CUBLAS_STATUS_INVALID_VALUE, problem);
  const auto scalar = [&](const void* p) {  // read now: the caller may change it after this call
    return Ctype == CUDA_R_64F ? *static_cast<const double*>(p) : *static_cast<const float*>(p);
  };
  const bool ta = transa != CUBLAS_OP_N, tb = transb != CUBLAS_OP_N;
  const Gemm g{{const_cast<void*>(A), Atype, ta ? k : m, ta ? m : k, lda},
               {const_cast<void*>(B), Btype, tb ? n : k, tb ? k : n, ldb},
               {C, Ctype, m, n, ldc}, k, ta ? CblasTrans : CblasNoTrans,
               tb ? CblasTrans : CblasNoTrans, scalar(alpha), scalar(beta)};
  if (const std::string problem = value_problem(g, transa, transb); !problem.empty())
    return refuse(call, CUBLAS_STATUS_INVALID_VALUE, problem);
  if (m == 0 || n == 0) return CUBLAS_STATUS_SUCCESS;  // as BLAS: there is nothing to write
  const int on_device = call.host.device;
  if (const std::string problem = handle_problem(*handle, on_device); !problem.empty())
    return refuse(call, CUBLAS_STATUS_EXECUTION_FAILED, problem);
  if (const std::string problem = memory_problem(g, on_device); !problem.empty()) {
    fail(call, cudaErrorIllegalAddress, problem);  // on a GPU the GEMM ends the context
    return refuse(call, CUBLAS_STATUS_EXECUTION_FAILED, problem);
  }
  enqueue(get(handle->stream), "gemm", Kind::gemm, gemm_cost(g), 0, g, run_gemm);
  DeviceLock guard(device(on_device));
  ++device(on_device).counters.gemms;
  return CUBLAS_STATUS_SUCCESS;
}
