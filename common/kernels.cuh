// The MLP's kernels and nothing else. Matrices are row-major; a layer maps x [rows, d_in] to
// y = x W^T + b [rows, d_out] with W [d_out, d_in], PyTorch's convention.
// Outputs come first, then inputs, sizes, and the stream (or the BLAS handle on that stream).
// Every kernel strides over elements by the grid, or over rows by blocks and over columns by
// threads, so that no element costs a division; none uses shared memory. Right for any launch shape.
// rows = 0 is allowed everywhere: a rank without samples contributes zeros.
// T may be a 16-bit format for what a layer reads and makes; sums are taken in Wide<T>.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "gpu.cuh"
#include "sgd.h"

inline __device__ int64_t first_index() {
  return int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
inline __device__ int64_t grid_stride() { return int64_t{gridDim.x} * blockDim.x; }

template <class T>
using Wide = std::conditional_t<std::is_floating_point_v<T>, T, float>;

// ---- matrix products ----------------------------------------------------------------------

inline cudaDataType_t cuda_type(const float*) { return CUDA_R_32F; }
inline cudaDataType_t cuda_type(const double*) { return CUDA_R_64F; }
inline cudaDataType_t cuda_type(const __half*) { return CUDA_R_16F; }
inline cudaDataType_t cuda_type(const __nv_bfloat16*) { return CUDA_R_16BF; }
inline cublasComputeType_t compute_type(const float*) { return CUBLAS_COMPUTE_32F; }
inline cublasComputeType_t compute_type(const double*) { return CUBLAS_COMPUTE_64F; }

// C [m, n] = op(A) op(B) + beta C, row-major; op(A) is [m, k], op(B) is [k, n].
// cuBLAS is column-major, and a row-major matrix is its transpose there, so this asks for
// C^T = op(B)^T op(A)^T: the operands swap places and nothing is copied.
template <class C, class T>
void matmul(C* c, const T* a, bool transpose_a, const T* b, bool transpose_b, int m, int n,
            int k, double beta, const Blas& blas) {
  if (m == 0 || n == 0) return;
  if (k == 0) {  // an empty sum; what cuBLAS does with k = 0 is not promised
    if (beta == 0) CHECK(cudaMemsetAsync(c, 0, int64_t{m} * n * sizeof(C), blas.stream()));
    return;
  }
  const Wide<C> one = 1, beta_c = static_cast<Wide<C>>(beta);
  CHECK(cublasGemmEx(blas, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                     transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k, &one, b, cuda_type(b),
                     transpose_b ? k : n, a, cuda_type(a), transpose_a ? m : k, &beta_c, c,
                     cuda_type(c), n, compute_type(&one), CUBLAS_GEMM_DEFAULT));
}

// y [rows, d_out] = x [rows, d_in] W^T
template <class T>
void forward_matmul(T* y, const T* x, const T* weight, int rows, int d_out, int d_in,
                    const Blas& blas) {
  matmul(y, x, false, weight, true, rows, d_out, d_in, 0, blas);
}

// dW [d_out, d_in] = dy^T x + beta dW; beta = 1 adds to what earlier micro-batches left.
template <class G, class T>
void backward_weight(G* dweight, const T* dy, const T* x, int rows, int d_out, int d_in,
                     double beta, const Blas& blas) {
  matmul(dweight, dy, true, x, false, d_out, d_in, rows, beta, blas);
}

// dx [rows, d_in] = dy W
template <class T>
void backward_input(T* dx, const T* dy, const T* weight, int rows, int d_out, int d_in,
                    const Blas& blas) {
  matmul(dx, dy, false, weight, false, rows, d_in, d_out, 0, blas);
}

// ---- samples ------------------------------------------------------------------------------

// x[i, :] = pixels[order[i], :] / 255
template <class T>
__global__ void load_pixels_kernel(T* x, const uint8_t* pixels, const int32_t* order,
                                   int64_t rows, int64_t d) {
  for (int64_t i = blockIdx.x; i < rows; i += gridDim.x) {
    const uint8_t* sample = pixels + order[i] * d;
    for (int64_t j = threadIdx.x; j < d; j += blockDim.x)
      x[i * d + j] = static_cast<T>(sample[j] / real{255});
  }
}
template <class T>
void load_pixels(T* x, const uint8_t* pixels, const int32_t* order, int rows, int d,
                 cudaStream_t stream) {
  launch(stream, int64_t{rows} * d, load_pixels_kernel<T>, x, pixels, order, int64_t{rows},
         int64_t{d});
}

// label[i] = labels[order[i]]
template <class T>
__global__ void load_labels_kernel(T* label, const T* labels, const int32_t* order,
                                   int64_t rows) {
  for (int64_t i = first_index(); i < rows; i += grid_stride()) label[i] = labels[order[i]];
}
inline void load_labels(int32_t* label, const int32_t* labels, const int32_t* order, int rows,
                        cudaStream_t stream) {
  launch(stream, rows, load_labels_kernel<int32_t>, label, labels, order, int64_t{rows});
}

// ---- layers -------------------------------------------------------------------------------

// y[i, j] += bias[j], in place, then ReLU where the layer is hidden
template <class T>
__global__ void bias_kernel(T* y, const T* bias, int64_t rows, int64_t d, bool relu) {
  for (int64_t i = blockIdx.x; i < rows; i += gridDim.x)
    for (int64_t j = threadIdx.x; j < d; j += blockDim.x) {
      const Wide<T> z = static_cast<Wide<T>>(y[i * d + j]) + static_cast<Wide<T>>(bias[j]);
      y[i * d + j] = static_cast<T>(relu && !(z > Wide<T>{0}) ? Wide<T>{0} : z);
    }
}
template <class T>
void forward_bias(T* y, const T* bias, int rows, int d, bool relu, cudaStream_t stream) {
  launch(stream, int64_t{rows} * d, bias_kernel<T>, y, bias, int64_t{rows}, int64_t{d}, relu);
}

// dy *= (y > 0), in place. ReLU's output tells the sign of its input, which is not kept; the
// derivative at 0 is 0.
template <class T>
__global__ void backward_relu_kernel(T* dy, const T* y, int64_t n) {
  for (int64_t i = first_index(); i < n; i += grid_stride())
    dy[i] = static_cast<Wide<T>>(y[i]) > Wide<T>{0} ? dy[i] : static_cast<T>(Wide<T>{0});
}
template <class T>
void backward_relu(T* dy, const T* y, int64_t n, cudaStream_t stream) {
  launch(stream, n, backward_relu_kernel<T>, dy, y, n);
}

// db [d] = column sums of dy [rows, d] + beta db. One thread a column and the rows in order:
// the sum has one order, so its bits repeat.
template <class G, class T>
__global__ void backward_bias_kernel(G* dbias, const T* dy, int64_t rows, int64_t d, G beta) {
  for (int64_t j = first_index(); j < d; j += grid_stride()) {
    G sum = beta == G{0} ? G{0} : beta * dbias[j];
    for (int64_t i = 0; i < rows; ++i) sum += static_cast<G>(dy[i * d + j]);
    dbias[j] = sum;
  }
}
template <class G, class T>
void backward_bias(G* dbias, const T* dy, int rows, int d, double beta, cudaStream_t stream) {
  launch(stream, d, backward_bias_kernel<G, T>, dbias, dy, int64_t{rows}, int64_t{d},
         static_cast<G>(beta));
}

// ---- loss ---------------------------------------------------------------------------------

// Softmax with cross-entropy. For each row: loss[i] = log(sum_j exp(z_j)) - z_label, and
// dlogits = (softmax - one-hot) * scale, where scale = 1/B and B is the size of the *global*
// batch: shards of any size then add up to the mean's gradient, with no other divisor anywhere.
// The row's maximum is subtracted first, so that exp cannot overflow.
template <class T>
__global__ void softmax_loss_kernel(T* loss, T* dlogits, const T* logits, const int32_t* label,
                                    int64_t rows, int64_t classes, T scale) {
  for (int64_t i = first_index(); i < rows; i += grid_stride()) {
    const T* z = logits + i * classes;
    T* dz = dlogits + i * classes;
    T largest = z[0];
    for (int64_t j = 1; j < classes; ++j) largest = z[j] > largest ? z[j] : largest;
    T sum = 0;
    for (int64_t j = 0; j < classes; ++j) {
      dz[j] = exp(z[j] - largest);
      sum += dz[j];
    }
    loss[i] = log(sum) + largest - z[label[i]];
    for (int64_t j = 0; j < classes; ++j)
      dz[j] = (dz[j] / sum - (j == label[i] ? T{1} : T{0})) * scale;
  }
}
template <class T>
void softmax_loss(T* loss, T* dlogits, const T* logits, const int32_t* label, int rows,
                  int classes, double scale, cudaStream_t stream) {
  launch(stream, rows, softmax_loss_kernel<T>, loss, dlogits, logits, label, int64_t{rows},
         int64_t{classes}, static_cast<T>(scale));
}

// The same loss where each rank has only some of the classes: logits [rows, classes] are columns
// first .. first + classes - 1 of the whole. Three steps; between them the ranks take the maximum
// of `largest` and the sum of `total`, one number a row each, so no rank sees all logits.
template <class T>
__global__ void softmax_largest_kernel(T* largest, const T* logits, int64_t rows,
                                       int64_t classes) {
  for (int64_t i = first_index(); i < rows; i += grid_stride()) {
    const T* z = logits + i * classes;
    largest[i] = z[0];
    for (int64_t j = 1; j < classes; ++j) largest[i] = z[j] > largest[i] ? z[j] : largest[i];
  }
}
template <class T>
void softmax_largest(T* largest, const T* logits, int rows, int classes, cudaStream_t stream) {
  launch(stream, rows, softmax_largest_kernel<T>, largest, logits, int64_t{rows},
         int64_t{classes});
}

// dlogits = exp(z - largest) for now, total[i] = their sum
template <class T>
__global__ void softmax_total_kernel(T* total, T* dlogits, const T* logits, const T* largest,
                                     int64_t rows, int64_t classes) {
  for (int64_t i = first_index(); i < rows; i += grid_stride()) {
    const T* z = logits + i * classes;
    T* dz = dlogits + i * classes;
    T sum = 0;
    for (int64_t j = 0; j < classes; ++j) {
      dz[j] = exp(z[j] - largest[i]);
      sum += dz[j];
    }
    total[i] = sum;
  }
}
template <class T>
void softmax_total(T* total, T* dlogits, const T* logits, const T* largest, int rows, int classes,
                   cudaStream_t stream) {
  launch(stream, rows, softmax_total_kernel<T>, total, dlogits, logits, largest, int64_t{rows},
         int64_t{classes});
}

// dlogits becomes the gradient. The one rank that has row i's label gives its loss, the others 0.
template <class T>
__global__ void softmax_loss_part_kernel(T* loss, T* dlogits, const T* logits, const T* largest,
                                         const T* total, const int32_t* label, int64_t rows,
                                         int64_t classes, int64_t first, T scale) {
  for (int64_t i = first_index(); i < rows; i += grid_stride()) {
    T* dz = dlogits + i * classes;
    const int64_t mine = label[i] - first;
    const bool have = mine >= 0 && mine < classes;
    loss[i] = have ? log(total[i]) + largest[i] - logits[i * classes + mine] : T{0};
    for (int64_t j = 0; j < classes; ++j)
      dz[j] = (dz[j] / total[i] - (j == mine ? T{1} : T{0})) * scale;
  }
}
template <class T>
void softmax_loss_part(T* loss, T* dlogits, const T* logits, const T* largest, const T* total,
                       const int32_t* label, int rows, int classes, int64_t first, double scale,
                       cudaStream_t stream) {
  launch(stream, rows, softmax_loss_part_kernel<T>, loss, dlogits, logits, largest, total, label,
         int64_t{rows}, int64_t{classes}, first, static_cast<T>(scale));
}

// *total = scale * sum of x [n] + beta * *total, by one thread in order: a batch is small, and
// the bits repeat.
template <class T>
__global__ void sum_kernel(T* total, const T* x, int64_t n, T scale, T beta) {
  if (first_index() != 0) return;
  T sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  *total = scale * sum + (beta == T{0} ? T{0} : beta * *total);
}
template <class T>
void sum(T* total, const T* x, int64_t n, double scale, double beta, cudaStream_t stream) {
  launch(stream, 1, sum_kernel<T>, total, x, n, static_cast<T>(scale), static_cast<T>(beta));
}

// ---- update -------------------------------------------------------------------------------

// v = mu v + g; w = w - lr v
template <class T>
__global__ void update_kernel(T* weight, T* velocity, const T* gradient, int64_t n, T rate,
                              T momentum) {
  for (int64_t i = first_index(); i < n; i += grid_stride()) {
    velocity[i] = momentum * velocity[i] + gradient[i];
    weight[i] -= rate * velocity[i];
  }
}
template <class T>
void update_sgd(T* weight, T* velocity, const T* gradient, int64_t n, double rate,
                double momentum, cudaStream_t stream) {
  launch(stream, n, update_kernel<T>, weight, velocity, gradient, n, static_cast<T>(rate),
         static_cast<T>(momentum));
}
