// Chapter 01: its gradient against central finite differences of an independent loss in plain
// loops, and the whole run against an independent plain-loop trainer.
#include "harness.h"

namespace {

// The same network and update in plain loops and double, written from the formulas alone.
struct Reference {
  Shape shape;
  const Dataset& data;
  std::vector<double> w, v;

  Reference(const Config& config, const Dataset& d) : shape(network(config, d.features)), data(d) {
    std::vector<real> start;
    initial_parameters(shape, config.seed, start);
    w.assign(start.begin(), start.end());
    v.assign(w.size(), 0);
  }

  // Mean loss over samples; adds its gradient to *g where g is given.
  double loss(const std::vector<double>& p, const int32_t* samples, int n,
              std::vector<double>* g) const {
    double total = 0;
    const int L = shape.layers();
    for (int s = 0; s < n; ++s) {
      std::vector<std::vector<double>> a(L + 1);
      for (int j = 0; j < data.features; ++j)
        a[0].push_back(static_cast<double>(real(data.pixels[int64_t{samples[s]} * data.features + j] / real{255})));
      for (int l = 0; l < L; ++l)
        for (int j = 0; j < shape.width[l + 1]; ++j) {
          double z = p[shape.bias_at(l) + j];
          for (int i = 0; i < shape.width[l]; ++i)
            z += p[shape.weight_at(l) + int64_t{j} * shape.width[l] + i] * a[l][i];
          a[l + 1].push_back(l < L - 1 && z <= 0 ? 0 : z);
        }
      double sum = 0;
      for (double z : a[L]) sum += std::exp(z);
      const int label = data.labels[samples[s]];
      total += std::log(sum) - a[L][label];
      if (!g) continue;
      std::vector<double> d;
      for (int j = 0; j < shape.width[L]; ++j)
        d.push_back((std::exp(a[L][j]) / sum - (j == label)) / n);
      for (int l = L - 1; l >= 0; --l) {
        std::vector<double> below(shape.width[l], 0);
        for (int j = 0; j < shape.width[l + 1]; ++j) {
          (*g)[shape.bias_at(l) + j] += d[j];
          for (int i = 0; i < shape.width[l]; ++i) {
            const int64_t at = shape.weight_at(l) + int64_t{j} * shape.width[l] + i;
            (*g)[at] += d[j] * a[l][i];
            below[i] += d[j] * p[at];
          }
        }
        for (int i = 0; i < shape.width[l]; ++i) below[i] = l > 0 && a[l][i] > 0 ? below[i] : 0;
        d = below;
      }
    }
    return total / n;
  }

  std::vector<double> train(const Config& config) {
    std::vector<double> losses;
    const auto order = sample_order(config, data.size());
    for (const Update& u : updates(config, data.size())) {
      std::vector<double> g(w.size(), 0);
      losses.push_back(loss(w, &order[u.first], u.samples, &g));
      for (size_t i = 0; i < w.size(); ++i) {
        v[i] = config.momentum * v[i] + g[i];
        w[i] -= u.rate * v[i];
      }
    }
    return losses;
  }
};

}  // namespace

TEST_CASE("01: the reference's gradient is that of its loss (central differences)") {
  const Dataset data = uneven_data(10, 5, 3);
  const auto settings = small_settings<ch01::Settings>({7}, 3, 6, 1);
  Reference r(settings, data);
  const std::vector<int32_t> samples = {3, 1, 4, 1, 5, 9};
  std::vector<double> g(r.w.size(), 0);
  r.loss(r.w, samples.data(), 6, &g);
  const double h = 1e-6;
  // Central differences err by h^2 |f'''| / 6 + eps |f| / h, both under 1e-9 here.
  for (size_t i = 0; i < r.w.size(); ++i) {
    std::vector<double> up = r.w, down = r.w;
    up[i] += h;
    down[i] -= h;
    const double slope = (r.loss(up, samples.data(), 6, nullptr) -
                          r.loss(down, samples.data(), 6, nullptr)) / (2 * h);
    REQUIRE(std::abs(slope - g[i]) < 1e-8);
  }
}

TEST_CASE("01: many updates equal those of plain loops") {
  const Dataset data = uneven_data(10, 5, 3);
  for (const int batch : {4, 6, 10, 64})
    for (const double momentum : {0.0, 0.9}) {
      auto settings = small_settings<ch01::Settings>({7, 6}, 3, batch, 50);
      settings.momentum = momentum;
      settings.lr = 0.1;
      const Result got = run_ranks_here(ch01::train, settings, data);
      Reference r(settings, data);
      const std::vector<double> losses = r.train(settings);
      Result want;
      want.weights.assign(r.w.begin(), r.w.end());
      want.losses = losses;
      // A few eps an update, which add up: chapter.cuh's rule.
      require_equal(settings, data, got, want, rounding(settings, 50));
    }
}

TEST_CASE("01: two trainings in one process are the same to the bit, and free what they took") {
  const Dataset data = uneven_data(21, 5, 3);
  const auto settings = small_settings<ch01::Settings>({7}, 3, 4, 12);
  const Result first = run_ranks_here(ch01::train, settings, data);
  const Result second = run_ranks_here(ch01::train, settings, data);
  require_equal(settings, data, first, second, 0);
}
