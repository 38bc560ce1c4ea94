// The MLP's kernels against plain loops, on shapes that divide by nothing, with outputs that
// start as NaN (as the virtual GPU's memory does): what a kernel forgets to write shows.
#include "harness.h"

namespace {

// One stream on GPU 0, and buffers filled from the host.
struct Gpu {
  Stream stream;
  Blas blas{stream};
  std::vector<real> down(const Buffer<real>& b) {
    std::vector<real> host(b.size());
    b.download(host.data(), b.size(), stream);
    stream.synchronize();
    return host;
  }
  Buffer<real> up(const std::vector<real>& host) {
    Buffer<real> b(static_cast<int64_t>(host.size()));
    b.upload(host, stream);
    stream.synchronize();
    return b;
  }
};

std::vector<real> numbers(int64_t n, uint64_t seed) {
  std::vector<real> x(n);
  for (int64_t i = 0; i < n; ++i)
    x[i] = static_cast<real>(static_cast<double>(hash(seed, 0, i) >> 11) * 0x1p-52 - 1);
  return x;
}

const real eps = std::numeric_limits<real>::epsilon();

// A sum of n products of numbers in [-1, 1] in any order: each of n additions errs by at most
// eps/2 of a partial sum that is at most n, each product by eps/2.
double sum_bound(int64_t n) { return eps * double(n) * double(n + 1); }

void require_close(const std::vector<real>& got, const std::vector<double>& want, double bound) {
  REQUIRE(got.size() == want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    INFO("element " << i << ": " << got[i] << ", wanted " << want[i]);
    REQUIRE(std::abs(got[i] - want[i]) <= bound);  // false for NaN
  }
}

}  // namespace

TEST_CASE("kernels: matrix products of a layer, forward and backward") {
  Gpu gpu;
  for (const int rows : {0, 1, 3, 7})
    for (const int out : {1, 3, 5})
      for (const int in : {1, 4, 1025}) {
        const auto x = numbers(int64_t{rows} * in, 1), w = numbers(int64_t{out} * in, 2),
                   dy = numbers(int64_t{rows} * out, 3);
        const Buffer<real> X = gpu.up(x), W = gpu.up(w), dY = gpu.up(dy);
        Buffer<real> Y(int64_t{rows} * out), dX(int64_t{rows} * in), dW(int64_t{out} * in);
        forward_matmul(Y.data(), X.data(), W.data(), rows, out, in, gpu.blas);
        backward_input(dX.data(), dY.data(), W.data(), rows, out, in, gpu.blas);
        backward_weight(dW.data(), dY.data(), X.data(), rows, out, in, 0, gpu.blas);
        std::vector<double> y(rows * out, 0), dx(int64_t{rows} * in, 0), dw(int64_t{out} * in, 0);
        for (int r = 0; r < rows; ++r)
          for (int j = 0; j < out; ++j)
            for (int i = 0; i < in; ++i) {
              y[r * out + j] += double(x[r * in + i]) * w[j * in + i];
              dx[r * in + i] += double(dy[r * out + j]) * w[j * in + i];
              dw[j * in + i] += double(dy[r * out + j]) * x[r * in + i];
            }
        require_close(gpu.down(Y), y, sum_bound(in));
        require_close(gpu.down(dX), dx, sum_bound(out));
        require_close(gpu.down(dW), dw, sum_bound(rows));  // rows = 0 writes zeros over the NaN
        backward_weight(dW.data(), dY.data(), X.data(), rows, out, in, 1, gpu.blas);
        for (double& v : dw) v *= 2;  // beta = 1 adds to what is there
        require_close(gpu.down(dW), dw, 2 * sum_bound(rows) + 2 * eps * rows);
      }
}

TEST_CASE("kernels: bias, ReLU and their gradients") {
  Gpu gpu;
  for (const int rows : {0, 1, 3, 70})
    for (const int d : {1, 3, 1025}) {
      const auto z = numbers(int64_t{rows} * d, 4), b = numbers(d, 5);
      for (const bool relu : {false, true}) {
        const Buffer<real> Y = gpu.up(z), B = gpu.up(b);
        forward_bias(Y.data(), B.data(), rows, d, relu, gpu.stream);
        std::vector<double> want;
        for (int64_t i = 0; i < int64_t{rows} * d; ++i) {
          const real sum = z[i] + b[i % d];
          want.push_back(relu && sum < 0 ? 0 : sum);
        }
        require_close(gpu.down(Y), want, 0);
      }
      std::vector<real> y = z;
      for (size_t i = 0; i < y.size(); i += 3) y[i] = 0;  // the derivative at 0 is 0
      const auto dy = numbers(int64_t{rows} * d, 6);
      const Buffer<real> Y = gpu.up(y), dY = gpu.up(dy);
      backward_relu(dY.data(), Y.data(), int64_t{rows} * d, gpu.stream);
      std::vector<double> masked, columns(d, 0);
      for (int64_t i = 0; i < int64_t{rows} * d; ++i) {
        masked.push_back(y[i] > 0 ? dy[i] : 0);
        columns[i % d] += masked.back();
      }
      require_close(gpu.down(dY), masked, 0);
      Buffer<real> dB(d);
      backward_bias(dB.data(), dY.data(), rows, d, 0, gpu.stream);
      require_close(gpu.down(dB), columns, sum_bound(rows));
      backward_bias(dB.data(), dY.data(), rows, d, 1, gpu.stream);
      for (double& c : columns) c *= 2;
      require_close(gpu.down(dB), columns, 2 * sum_bound(rows) + 2 * eps * rows);
    }
}

namespace {

struct Loss {
  std::vector<real> loss, dlogits;
};
Loss softmax_on_gpu(Gpu& gpu, const std::vector<real>& logits, const std::vector<int32_t>& label,
                    int classes, double scale) {
  const int rows = static_cast<int>(label.size());
  const Buffer<real> Z = gpu.up(logits);
  Buffer<int32_t> labels(rows);
  labels.upload(label, gpu.stream);
  Buffer<real> loss(rows), dZ(int64_t{rows} * classes);
  softmax_loss(loss.data(), dZ.data(), Z.data(), labels.data(), rows, classes, scale, gpu.stream);
  return {gpu.down(loss), gpu.down(dZ)};
}

}  // namespace

TEST_CASE("kernels: softmax and loss at logits 1000, 0, -1000, equal logits, one class (B82)") {
  Gpu gpu;
  const std::vector<real> z = {1000, 0, -1000, 1000, 0, -1000, 1000, 0, -1000};
  const Loss far = softmax_on_gpu(gpu, z, {0, 1, 2}, 3, 1);
  require_close(far.loss, {0, 1000, 2000}, 0);
  require_close(far.dlogits, {0, 0, 0, 1, -1, 0, 1, 0, -1}, 0);
  const Loss equal = softmax_on_gpu(gpu, std::vector<real>(5, real{3}), {2}, 5, 0.5);
  require_close(equal.loss, {std::log(5.0)}, 4 * eps * 3);  // of 3 + log 5 - 3
  require_close(equal.dlogits, {0.1, 0.1, -0.4, 0.1, 0.1}, eps);
  const Loss one = softmax_on_gpu(gpu, {17, -3}, {0, 0}, 1, 1);
  require_close(one.loss, {0, 0}, 0);
  require_close(one.dlogits, {0, 0}, 0);
}

TEST_CASE("kernels: loss and its gradient against plain loops") {
  Gpu gpu;
  for (const int rows : {0, 1, 5, 300})
    for (const int classes : {1, 3, 10, 1025}) {
      const auto z = numbers(int64_t{rows} * classes, 8);
      std::vector<int32_t> label;
      for (int i = 0; i < rows; ++i) label.push_back(static_cast<int32_t>(mix(i) % classes));
      const Loss got = softmax_on_gpu(gpu, z, label, classes, 0.25);
      std::vector<double> loss, dz;
      for (int i = 0; i < rows; ++i) {
        double total = 0;
        for (int j = 0; j < classes; ++j) total += std::exp(double(z[i * classes + j]));
        loss.push_back(std::log(total) - z[i * classes + label[i]]);
        for (int j = 0; j < classes; ++j)
          dz.push_back(0.25 * (std::exp(double(z[i * classes + j])) / total - (j == label[i])));
      }
      // exp and the sum of `classes` positive terms: (classes + 4) eps, relative; log makes it
      // absolute; then two additions of numbers below 10.
      require_close(got.loss, loss, eps * (classes + 24));
      require_close(got.dlogits, dz, 0.25 * eps * (classes + 8));
    }
}

TEST_CASE("kernels: loading, sums and the update") {
  Gpu gpu;
  const std::vector<uint8_t> pixels = {0, 255, 51, 102, 1, 254};  // 3 samples of 2
  const std::vector<int32_t> labels = {7, 8, 9}, order = {2, 0, 2, 1};
  Buffer<uint8_t> P(6);
  Buffer<int32_t> L(3), O(4), label(4);
  P.upload(pixels, gpu.stream);
  L.upload(labels, gpu.stream);
  O.upload(order, gpu.stream);
  Buffer<real> X(8);
  load_pixels(X.data(), P.data(), O.data(), 4, 2, gpu.stream);
  load_labels(label.data(), L.data(), O.data(), 4, gpu.stream);
  std::vector<double> want;
  for (const int v : {1, 254, 0, 255, 1, 254, 51, 102}) want.push_back(real(v) / real{255});
  require_close(gpu.down(X), want, 0);
  std::vector<int32_t> got(4);
  label.download(got.data(), 4, gpu.stream);
  gpu.stream.synchronize();
  REQUIRE(got == std::vector<int32_t>{9, 7, 9, 8});

  const Buffer<real> values = gpu.up({1, 2, 3.5});
  Buffer<real> total(1);
  sum(total.data(), values.data(), 3, 0.5, 0, gpu.stream);
  require_close(gpu.down(total), {3.25}, 0);
  sum(total.data(), values.data(), 0, 0.5, 1, gpu.stream);  // no samples: adds nothing
  require_close(gpu.down(total), {3.25}, 0);

  const Buffer<real> w = gpu.up({1, -1}), v = gpu.up({real(0.5), 2}), g = gpu.up({4, real(-0.5)});
  update_sgd(w.data(), v.data(), g.data(), 2, 0.25, 0.5, gpu.stream);
  require_close(gpu.down(v), {4.25, 0.5}, 0);
  require_close(gpu.down(w), {1 - 0.25 * 4.25, -1 - 0.25 * 0.5}, 0);
}

TEST_CASE("kernels: a batch of 70,000 and widths of 1, 1025 and 4097 (B45)") {
  Gpu gpu;
  const int rows = 70000;
  const Buffer<real> ones = gpu.up(std::vector<real>(rows, 1));
  Buffer<real> total(1), dB(1), Y(rows);
  sum(total.data(), ones.data(), rows, 1, 0, gpu.stream);
  require_close(gpu.down(total), {70000}, 0);
  backward_bias(dB.data(), ones.data(), rows, 1, 0, gpu.stream);
  require_close(gpu.down(dB), {70000}, 0);
  const Buffer<real> w = gpu.up({3});
  forward_matmul(Y.data(), ones.data(), w.data(), rows, 1, 1, gpu.blas);
  require_close(gpu.down(Y), std::vector<double>(rows, 3), 0);
  for (const int width : {1, 1025, 4097}) {
    const Dataset data = uneven_data(9, 3, 2);
    const auto settings = small_settings<ch01::Settings>({width}, 2, 4, 3);
    const Result r = run_ranks_here(ch01::train, settings, data);
    REQUIRE(not_finite(r).empty());
    REQUIRE(r.weights.size() == static_cast<size_t>(width) * (3 + 1 + 2) + 2);
  }
}
