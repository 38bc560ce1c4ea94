// What the virtual GPU costs: chapter 01's step against a plain loop that does the same
// arithmetic with direct CBLAS calls, in one process, in turns. Prints the ratio of the medians.
#include <cblas.h>

#include <cstring>

#include "../common/chapter.cuh"

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// C [m, n] = op(A) op(B), row-major
template <class T>
void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, const T* a, int lda,
          const T* b, int ldb, T* c, int ldc) {
  if constexpr (std::is_same_v<T, float>)
    cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, 1, a, lda, b, ldb, 0, c, ldc);
  else
    cblas_dgemm(CblasRowMajor, ta, tb, m, n, k, 1, a, lda, b, ldb, 0, c, ldc);
}

// Chapter 01 without a GPU: the same loops over the same data, one after the other.
class PlainLoop {
 public:
  PlainLoop(const Config& c, const Dataset& d)
      : config(c), data(d), shape(network(c, d.features)), plan(updates(c, d.size())),
        order(sample_order(c, d.size())), g(shape.parameters()), v(shape.parameters()),
        label(c.batch) {
    initial_parameters(shape, c.seed, w);
    for (int width : shape.width) {
      a.emplace_back(int64_t{c.batch} * width);
      da.emplace_back(int64_t{c.batch} * width);
    }
  }

  void train() {
    for (const Update& u : plan) step(u);
  }
  real loss = 0;

 private:
  void step(const Update& u) {
    const int B = u.samples, L = shape.layers(), d0 = shape.width[0];
    for (int i = 0; i < B; ++i) {
      for (int j = 0; j < d0; ++j)
        a[0][int64_t{i} * d0 + j] = data.pixels[int64_t{order[u.first + i]} * d0 + j] / real{255};
      label[i] = data.labels[order[u.first + i]];
    }
    for (int l = 0; l < L; ++l) {
      const int in = shape.width[l], out = shape.width[l + 1];
      gemm(CblasNoTrans, CblasTrans, B, out, in, a[l].data(), in, &w[shape.weight_at(l)], in,
           a[l + 1].data(), out);
      const real* b = &w[shape.bias_at(l)];
      for (int i = 0; i < B; ++i)
        for (int j = 0; j < out; ++j) {
          real& y = a[l + 1][int64_t{i} * out + j];
          y += b[j];
          if (l < L - 1 && !(y > 0)) y = 0;
        }
    }
    softmax(B, shape.width[L]);
    for (int l = L - 1; l >= 0; --l) {
      const int in = shape.width[l], out = shape.width[l + 1];
      real* d = da[l + 1].data();
      if (l < L - 1)
        for (int64_t i = 0; i < int64_t{B} * out; ++i) d[i] = a[l + 1][i] > 0 ? d[i] : 0;
      gemm(CblasTrans, CblasNoTrans, out, in, B, d, out, a[l].data(), in, &g[shape.weight_at(l)], in);
      real* db = &g[shape.bias_at(l)];
      std::fill(db, db + out, 0);
      for (int i = 0; i < B; ++i)
        for (int j = 0; j < out; ++j) db[j] += d[int64_t{i} * out + j];
      if (l > 0)
        gemm(CblasNoTrans, CblasNoTrans, B, in, out, d, out, &w[shape.weight_at(l)], in,
             da[l].data(), in);
    }
    const real rate = static_cast<real>(u.rate), mu = static_cast<real>(config.momentum);
    for (size_t i = 0; i < w.size(); ++i) {
      v[i] = mu * v[i] + g[i];
      w[i] -= rate * v[i];
    }
  }

  void softmax(int B, int C) {
    const int L = shape.layers();
    loss = 0;
    for (int i = 0; i < B; ++i) {
      const real* z = &a[L][int64_t{i} * C];
      real* d = &da[L][int64_t{i} * C];
      const real largest = *std::max_element(z, z + C);
      real total = 0;
      for (int j = 0; j < C; ++j) total += d[j] = std::exp(z[j] - largest);
      loss += std::log(total) + largest - z[label[i]];
      for (int j = 0; j < C; ++j) d[j] = (d[j] / total - (j == label[i])) / B;
    }
    loss /= B;
  }

  const Config& config;
  const Dataset& data;
  const Shape shape;
  const std::vector<Update> plan;
  const std::vector<int32_t> order;
  std::vector<real> w, g, v;
  std::vector<int32_t> label;
  std::vector<std::vector<real>> a, da;
};

Dataset random_data(int64_t n, int features, int classes) {
  Dataset d;
  d.features = features;
  for (int64_t i = 0; i < n * features; ++i) d.pixels.push_back(static_cast<uint8_t>(mix(i)));
  for (int64_t i = 0; i < n; ++i) d.labels.push_back(static_cast<int32_t>(mix(i) % classes));
  return d;
}

// Wall time of a step of chapter 01: a long run less a short one, so that setting up cancels.
double chapter_seconds(Config c, const Dataset& data, int64_t steps) {
  double seconds[2];
  for (int i = 0; i < 2; ++i) {
    c.steps = i ? steps : 1;
    Result result;
    const double start = now();
    if (train_yardstick(c, data, 0, result)) std::exit(1);
    seconds[i] = now() - start;
  }
  return (seconds[1] - seconds[0]) / double(steps - 1);
}

double plain_seconds(Config c, const Dataset& data, int64_t steps) {
  c.steps = 1;
  PlainLoop(c, data).train();  // as chapter 01's warm-up
  c.steps = steps;
  PlainLoop loop(c, data);
  const double start = now();
  loop.train();
  return (now() - start) / double(steps);
}

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

void compare_step(const char* name, int features, std::vector<int> hidden, int batch,
                  int64_t steps, double allowed) {
  Config c;
  c.hidden = std::move(hidden);
  c.batch = batch;
  c.quiet = true;
  const Dataset data = random_data(2 * batch, features, 10);
  std::vector<double> chapter, plain;
  for (int i = 0; i < 7; ++i) {
    plain.push_back(plain_seconds(c, data, steps));
    chapter.push_back(chapter_seconds(c, data, steps));
  }
  std::printf("%-28s batch %-4d %10.1f us %10.1f us   %.3f (at most %.2f)\n", name, batch,
              1e6 * median(chapter), 1e6 * median(plain), median(chapter) / median(plain), allowed);
  std::fflush(stdout);
}

}  // namespace

int main() {
  std::printf("%-39s %13s %13s   ratio\n", "a step of", "chapter 01", "plain loop");
  compare_step("64-128-128-10", 64, {128, 128}, 64, 2000, 1.12);
  compare_step("784-256-256-10", 784, {256, 256}, 128, 300, 1.04);
  compare_step("1024-1024-1024-1024-10", 1024, {1024, 1024, 1024}, 256, 20, 1.02);
}
