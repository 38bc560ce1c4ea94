// What every chapter does alike, in plain C++: the settings, the network's shape, the order of
// the samples, the initial weights and the learning rate. All of it is a pure function of the
// settings, so any rank can work out its own part without asking another.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using real = REAL;  // float, or double by make REAL=double, where no wrong factor hides in rounding

// Something is wrong with what the user gave us: one line, and exit status 2.
struct BadInput : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class LrScale { none, sqrt, linear };     // how the rate grows with the batch
enum class LrSchedule { constant, cosine };    // what it does after the warm-up

// A chapter's own settings derive from this.
struct Config {
  std::string data = "data/digits";
  std::vector<int> hidden = {128, 128};
  int classes = 10;
  int batch = 64;        // samples of one update, over all GPUs together
  int64_t steps = -1;    // updates; -1: as many as the epochs hold
  int64_t epochs = 20;
  double lr = 0.05;
  double momentum = 0.9;
  uint64_t seed = 1;
  bool shuffle = true;
  int base_batch = 64;   // the batch that --lr is meant for
  LrScale lr_scale = LrScale::none;
  int64_t warmup = 0;    // updates during which the rate rises
  LrSchedule lr_schedule = LrSchedule::constant;
  int gpus = 1;
  bool share_gpu = false;
  bool check = false, quiet = false;
  std::string save, report;
};

// ---- shape --------------------------------------------------------------------------------

// Layer l maps width[l] inputs to width[l+1] outputs. Parameters lie in one flat buffer, layer
// by layer, weight [width[l+1], width[l]] then bias [width[l+1]].
struct Shape {
  std::vector<int> width;  // d_0 .. d_L

  int layers() const { return static_cast<int>(width.size()) - 1; }
  int64_t weight_size(int l) const { return int64_t{width[l]} * width[l + 1]; }
  int64_t weight_at(int l) const {
    int64_t at = 0;
    for (int i = 0; i < l; ++i) at += weight_size(i) + width[i + 1];
    return at;
  }
  int64_t bias_at(int l) const { return weight_at(l) + weight_size(l); }
  int64_t parameters() const { return weight_at(layers()); }
};

inline Shape network(const Config& config, int features) {
  Shape shape{{features}};
  shape.width.insert(shape.width.end(), config.hidden.begin(), config.hidden.end());
  shape.width.push_back(config.classes);
  return shape;
}

// What rank r of p owns of n things: [first, last) = [rn/p, (r+1)n/p). Sizes differ by at most
// one, everything is owned exactly once, and a rank may own nothing.
struct Share {
  int64_t first, last;
  int64_t size() const { return last - first; }
};
inline Share share(int64_t n, int r, int p) { return {r * n / p, (r + 1) * n / p}; }

// Contiguous layers for each of p stages: stage s owns layers [first, last). Every layer is owned
// once, and no stage is empty. The slowest stage sets the pace, so the largest work of any is as
// small as it can be, and the rest even. Work is counted in matrix products: forward, weight
// gradient, and input gradient, which layer 0 does not compute.
inline std::vector<Share> stage_layers(const Shape& shape, int p) {
  const int L = shape.layers();
  if (p > L)
    throw BadInput("--gpus: " + std::to_string(p) + " stages need a layer each, the network has " +
                   std::to_string(L) + "; fewer stages or more --hidden would be right");
  struct Cut {  // of layers 0 .. last-1 into s stages: the best, and where its last stage begins
    double largest = INFINITY, squares = INFINITY;
    int first = 0;
  };
  std::vector<std::vector<Cut>> best(p + 1, std::vector<Cut>(L + 1));
  best[0][0] = {0, 0, 0};
  for (int s = 1; s <= p; ++s)
    for (int last = s; last <= L; ++last) {
      double work = 0;
      for (int first = last - 1; first >= s - 1; --first) {
        work += double(shape.weight_size(first)) * (first == 0 ? 2 : 3);
        const Cut& rest = best[s - 1][first];
        const Cut cut = {std::max(rest.largest, work), rest.squares + work * work, first};
        Cut& so_far = best[s][last];
        if (std::pair(cut.largest, cut.squares) < std::pair(so_far.largest, so_far.squares))
          so_far = cut;
      }
    }
  std::vector<Share> stages(p);
  for (int s = p, last = L; s > 0; last = best[s--][last].first)
    stages[s - 1] = {best[s][last].first, last};
  return stages;
}

// ---- random numbers -----------------------------------------------------------------------

// Splitmix64. A hash instead of a generator: the i-th number needs none of those before it.
inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}
inline uint64_t hash(uint64_t a, uint64_t b, uint64_t c) { return mix(mix(mix(a) + b) + c); }

// Element i (flat index) of layer l's weight: uniform, with variance 2 / d_in, which keeps the
// size of the activations from layer to layer under ReLU. A rank can make just its own shard.
inline double initial_weight(uint64_t seed, int l, int64_t i, int d_in) {
  const double u = static_cast<double>(hash(seed, l, i) >> 11) * 0x1p-53;
  return (2 * u - 1) * std::sqrt(6.0 / d_in);
}

inline void initial_parameters(const Shape& shape, uint64_t seed, std::vector<real>& flat) {
  flat.assign(shape.parameters(), 0);  // biases stay 0
  for (int l = 0; l < shape.layers(); ++l)
    for (int64_t i = 0; i < shape.weight_size(l); ++i)
      flat[shape.weight_at(l) + i] =
          static_cast<real>(initial_weight(seed, l, i, shape.width[l]));
}

// ---- updates ------------------------------------------------------------------------------

// The rate of update t of `total`.
inline double learning_rate(const Config& config, int64_t t, int64_t total) {
  const double exponent[] = {0, 0.5, 1};
  const double lr = config.lr * std::pow(double(config.batch) / config.base_batch,
                                         exponent[static_cast<int>(config.lr_scale)]);
  if (t < config.warmup) return lr * (t + 1) / config.warmup;
  if (config.lr_schedule == LrSchedule::constant) return lr;
  const double pi = std::acos(-1.0);
  const double span = std::max(int64_t{1}, total - config.warmup);
  return lr * (1 + std::cos(pi * (t - config.warmup) / span)) / 2;
}

// Update t uses samples order[first .. first + samples) of sample_order() below.
struct Update {
  int64_t first;
  int samples;  // the last batch of an epoch may be short; no batch crosses an epoch's end
  double rate;
  int64_t epoch;
};

inline std::vector<Update> updates(const Config& config, int64_t n_samples) {
  const int64_t an_epoch = (n_samples + config.batch - 1) / config.batch;
  const int64_t total = config.steps >= 0 ? config.steps : config.epochs * an_epoch;
  std::vector<Update> plan(total);
  for (int64_t t = 0; t < total; ++t) {
    const int64_t epoch = t / an_epoch, begin = t % an_epoch * config.batch;
    const int samples = static_cast<int>(std::min<int64_t>(config.batch, n_samples - begin));
    plan[t] = {epoch * n_samples + begin, samples, learning_rate(config, t, total), epoch};
  }
  return plan;
}

// The most samples that an update has: what buffers must hold.
inline int largest_batch(const Config& config, int64_t n_samples) {
  return static_cast<int>(std::min<int64_t>(config.batch, n_samples));
}

// The samples of all updates, one after another. Every epoch has its own order: all samples,
// sorted by their hash.
inline std::vector<int32_t> sample_order(const Config& config, int64_t n_samples) {
  const std::vector<Update> plan = updates(config, n_samples);
  const int64_t length = plan.empty() ? 0 : plan.back().first + plan.back().samples;
  std::vector<int32_t> order;
  std::vector<std::pair<uint64_t, int32_t>> epoch(n_samples);
  for (uint64_t e = 0; static_cast<int64_t>(order.size()) < length; ++e) {
    for (int32_t i = 0; i < n_samples; ++i)
      epoch[i] = {config.shuffle ? hash(config.seed, (uint64_t{1} << 32) + e, i) : 0, i};
    if (config.shuffle) std::sort(epoch.begin(), epoch.end());
    for (const auto& [key, sample] : epoch) order.push_back(sample);
  }
  order.resize(length);
  return order;
}

// ---- result -------------------------------------------------------------------------------

struct Result {
  std::vector<real> weights;   // all parameters, in Shape's order; on rank 0
  std::vector<double> losses;  // of each update: the mean over its global batch; on rank 0
  double step_seconds = 0;     // by the GPU's clock
  double bytes_sent_per_step = 0;  // by this rank; the report takes the largest
  std::vector<std::pair<std::string, double>> bytes_by_kind;  // what for; likewise the largest
  int64_t peak_memory = 0;         // of this rank's GPU; the report takes the largest
  std::vector<std::pair<std::string, std::string>> extra;  // a chapter's own rows of the report
};
