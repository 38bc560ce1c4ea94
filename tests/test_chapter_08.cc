// Chapter 08: accumulation changes no number; a 16-bit format changes them by its rounding; and an
// overflow anywhere skips one update everywhere and touches nothing.
#include "../common/chapter.cuh"
#include "../common/scaling.cuh"

// What each rank holds after each update only its Trainer knows. Nothing in the lessons is there
// for tests, so they look in.
#define private public
#include "../08_accum_amp/train.cuh"
#undef private

#include <map>

#include "../07_hybrid/train.cuh"
#include "stages.h"

namespace {

constexpr const char* name = "08_accum_amp";
constexpr bool has_16_bits = sizeof(real) == 4;  // wider masters are refused
constexpr int classes = 9;
const std::vector<int> three_layers = {11, 6}, eight_layers = {9, 6, 8, 7, 11, 5, 10};

struct Factors {
  int dp, pp, tp;
  int ranks() const { return dp * pp * tp; }
};
std::ostream& operator<<(std::ostream& out, const Factors& f) {
  return out << f.dp << " x " << f.pp << " x " << f.tp;
}

template <class Settings = ch08::Settings>
Settings settings_of(std::vector<int> hidden, int batch, int64_t steps, Factors f, int m) {
  auto settings = small_settings<Settings>(std::move(hidden), classes, batch, steps);
  settings.lr = 0.05;
  settings.microbatches = m;
  settings.dp = f.dp, settings.pp = f.pp, settings.tp = f.tp;
  settings.gpus = f.ranks();
  return settings;
}

Result run(const ch08::Settings& settings, const Dataset& data) {
  return run_ranks_here(ch08::train, settings, data);
}

// Runs `body(trainer, rank)` on every rank, after initialise().
template <class Low, class Body>
void on_every_rank(const ch08::Settings& settings, const Dataset& data, const Body& body) {
  ncclUniqueId id = {};
  OK(ncclGetUniqueId(&id));
  std::vector<int> devices(settings.gpus);
  std::iota(devices.begin(), devices.end(), 0);
  const int status = run_threads(0, settings.gpus, devices, id, [&](Rank& rank) {
    rank.quiet = true;
    ch08::Trainer<Low> trainer(settings, data, rank);
    rank.meet();
    trainer.initialise();
    body(trainer, rank);
    rank.meet();
  });
  REQUIRE(status == 0);
}

template <class T>
std::vector<T> on_host(const Buffer<T>& buffer) {  // a virtual GPU's memory is the host's
  return {buffer.data(), buffer.data() + buffer.size()};
}

// One step after which this rank's GPU is idle. `overflow`: as if a gradient here was infinite.
template <class Trainer>
void step(Trainer& trainer, Rank& rank, int64_t t, bool overflow = false) {
  rank.wait(trainer.compute);
  if (overflow) trainer.state.data()->overflow = 1;
  trainer.step(t);
  rank.wait(trainer.compute);
}

}  // namespace

// ---- accumulation ----------------------------------------------------------------------------

TEST_CASE("08: fp32 in one round is chapter 07 to the bit") {
  const Dataset data = uneven_data(23, 5, classes);
  for (const Factors& f : {Factors{1, 1, 1}, {2, 2, 2}, {4, 2, 1}, {3, 1, 2}, {1, 3, 2}, {2, 1, 3}})
    for (const auto& hidden : {three_layers, eight_layers})
      for (const auto schedule : {Schedule::gpipe, Schedule::one_f_one_b}) {
        auto settings = settings_of(hidden, 10, 4, f, 3);
        settings.schedule = schedule, settings.warmup = 4;
        settings.lr_schedule = LrSchedule::cosine;
        auto of_07 = settings_of<ch07::Settings>(hidden, 10, 4, f, 3);
        static_cast<MeshConfig&>(of_07) = settings;
        INFO(f);
        REQUIRE(same(run(settings, data), run_ranks_here(ch07::train, of_07, data)));
      }
}

// K rounds only take the sums over samples in other parts; see chapter 07's test.
TEST_CASE("08: any number of rounds is chapter 01, rounds without samples too") {
  const Dataset data = uneven_data(23, 5, classes);
  for (const int batch : {7, 10}) {
    const Result want = yardstick(settings_of(three_layers, batch, 50, {1, 1, 1}, 1), data);
    for (const int K : {1, 2, 3, 5, 12})
      for (const Factors& f : {Factors{1, 1, 1}, {2, 2, 2}, {3, 1, 1}, {1, 3, 2}}) {
        auto settings = settings_of(three_layers, batch, 50, f, std::min(batch, 1 + K % 3));
        settings.accumulate = K;
        if (sizeof(real) == 8) REQUIRE(rounding(settings, 50) < 1e-12);
        INFO(f << ", batch " << batch << ", " << K << " rounds");
        require_equal(settings, data, run(settings, data), want, rounding(settings, 50));
      }
  }
}

TEST_CASE("08: interleaved stages, rounds, and a warm-up that counts updates and not rounds") {
  const Dataset data = uneven_data(23, 5, classes);
  auto settings = settings_of(eight_layers, 10, 20, {2, 2, 1}, 3);
  settings.schedule = Schedule::interleaved, settings.accumulate = 16, settings.warmup = 16;
  settings.lr_schedule = LrSchedule::cosine;
  require_equal(settings, data, run(settings, data), yardstick(settings, data),
                rounding(settings, 20));
}

// GPipe in K rounds of m micro-batches adds up the same products in the same order as in one
// round of K m, where those are as large.
TEST_CASE("08: K rounds of m are one round of K m micro-batches to the bit") {
  const Dataset data = uneven_data(24, 5, classes);
  for (const Factors& f : {Factors{1, 1, 1}, {2, 2, 1}, {2, 1, 2}}) {
    const auto one = settings_of(three_layers, 24, 8, f, 6);
    auto rounds = settings_of(three_layers, 24, 8, f, 2);
    rounds.accumulate = 3;
    REQUIRE(same(run(one, data), run(rounds, data)));
  }
}

TEST_CASE("08: gradients are summed over the replicas once an update, however many rounds") {
  const Dataset data = uneven_data(20, 5, classes);
  const Hardware ideal("ideal");
  auto settings = settings_of(three_layers, 10, 3, {2, 3, 1}, 2);
  settings.accumulate = 4;
  run(settings, data);
  std::map<std::pair<int, std::string>, int> sums;
  for (const Operation& o : virtual_gpu::timeline())
    if (o.kind == Kind::collective && o.step == std::string("step 1")) ++sums[{o.device, o.range}];
  for (const auto& [what, count] : sums)
    if (what.second.starts_with("all-reduce")) REQUIRE(count == 1);
  for (int rank = 0; rank < 6; ++rank)
    REQUIRE(sums.count({rank, "all-reduce " + std::to_string(rank % 3)}) == 1);
}

// ---- memory and time -------------------------------------------------------------------------

int64_t memory_of(const ch08::Settings& s, const Shape& shape, int rank, int64_t samples,
                  int64_t order, int64_t low) {
  const int t = rank % s.tp, p = rank / s.tp % s.pp, L = shape.layers();
  const Shape local = shard(shape, t, s.tp);
  const auto [first, last] = stage_layers(shape, s.pp)[p];
  const int64_t parts = int64_t{s.dp} * s.accumulate * s.microbatches, m = s.microbatches;
  const int64_t b = (s.batch + parts - 1) / parts, wide = sizeof(real);
  const int64_t P = local.weight_at(last) - local.weight_at(first);
  int64_t bytes = 3 * wide * P + (low < wide ? low * P : 0);  // masters, gradient, momentum; copy
  for (int64_t l = first; l <= last; ++l) {  // GPipe keeps all m micro-batches of a round
    const bool border = (l == first && l > 0) || (l == last && l < L);
    bytes += low * b * local.width[l] * (m + (l == 0 ? 0 : border ? std::min<int64_t>(2, m) : 1));
  }
  if (p == s.pp - 1) bytes += wide * b * (3 + 2 * local.width[L]) + 4 * (samples + b);
  if (p == 0) bytes += samples * shape.width[0];
  if (p == 0 || p == s.pp - 1) bytes += 4 * order;
  return bytes + 3 * wide * s.steps + static_cast<int64_t>(sizeof(ScaleState));
}

TEST_CASE("08: memory by formula for each format, and activations fall as 1/K") {
  const Dataset data = uneven_data(24, 5, classes);
  const auto network_of = [&](const Config& c) { return network(c, data.features); };
  for (const Factors& f : {Factors{1, 1, 1}, {2, 2, 2}, {1, 3, 1}})
    for (const int K : {1, 2, 3, 4})
      for (const auto precision : {Precision::fp32, Precision::fp16, Precision::bf16}) {
        if (precision != Precision::fp32 && !has_16_bits) continue;
        auto s = settings_of(three_layers, 24, 4, f, 2);
        s.accumulate = K, s.precision = precision, s.schedule = Schedule::gpipe;
        const int64_t low = precision == Precision::fp32 ? sizeof(real) : 2;
        const auto results = all_results(ch08::train, s, data);
        for (int rank = 0; rank < f.ranks(); ++rank) {
          INFO(f << ", " << K << " rounds, rank " << rank);
          REQUIRE(results[rank].peak_memory ==
                  memory_of(s, network_of(s), rank, 24, 24 * 4, low));
        }
      }
  // What is left when all that K does not change is taken away: a 1/K of it.
  const auto activations = [&](int K) {
    auto s = settings_of(three_layers, 24, 4, {1, 1, 1}, 2);
    s.accumulate = K;
    Result got = run(s, data);
    s.accumulate = 24, s.microbatches = 1;  // one row
    const Shape shape = network_of(s);
    int64_t rest = 3 * sizeof(real) * (shape.parameters() + 4) + sizeof(ScaleState) + 24 * 5;
    return got.peak_memory - rest - 4 * (24 + 24 * 4);
  };
  const int64_t all = activations(1);
  for (const int K : {2, 3, 4, 6, 12}) REQUIRE(activations(K) * K == all);
}

TEST_CASE("08: the clock knows faster products in 16 bits, and messages half as long") {
  const int n = 8, m = 4;
  const Dataset data = uneven_data(24, n, n);
  const Hardware ideal("ideal,fp16=4e12,bf16=2e12");
  auto s = small_settings<ch08::Settings>({n}, n, m, 6);
  s.gpus = s.dp = s.pp = 1, s.microbatches = m;
  const Picoseconds fp32 = 5 * m * 2 * n * n;  // y and dW twice, dx once
  REQUIRE(std::llround(run(s, data).step_seconds * 1e12) == fp32);
  if (!has_16_bits) return;
  s.precision = Precision::fp16;
  REQUIRE(std::llround(run(s, data).step_seconds * 1e12) == fp32 / 4);
  s.precision = Precision::bf16;
  REQUIRE(std::llround(run(s, data).step_seconds * 1e12) == fp32 / 2);

  auto mesh = settings_of(eight_layers, 8, 6, {2, 2, 2}, 2);
  const Result wide = run(mesh, data);
  mesh.precision = Precision::bf16;
  const Result low = run(mesh, data);
  REQUIRE(low.bytes_by_kind[0] == wide.bytes_by_kind[0]);  // gradients stay as wide
  REQUIRE(low.bytes_by_kind[1].second == Approx(wide.bytes_by_kind[1].second / 2));
  REQUIRE(low.bytes_by_kind[2].second == Approx(wide.bytes_by_kind[2].second / 2));
  REQUIRE(low.bytes_by_kind[3].second == Approx(2.0 * 7 / 8 * 4));  // one flag over all ranks
}

// ---- the formats -----------------------------------------------------------------------------

TEST_CASE("08: a power of two as loss scale changes no bit") {
  if (!has_16_bits) return;
  const Dataset data = uneven_data(23, 5, classes);
  for (const Factors& f : {Factors{1, 1, 1}, {2, 2, 2}}) {
    auto settings = settings_of(three_layers, 7, 20, f, 2);
    settings.precision = Precision::fp16;
    const Result want = run(settings, data);
    for (const double scale : {8192.0, 16384.0, 32768.0, 131072.0}) {
      settings.loss_scale = scale;
      INFO(f << ", scale " << scale);
      REQUIRE(same(run(settings, data), want));
    }
    settings.loss_scale = 0;  // and if it changes on the way
    settings.first_scale = 16384, settings.scale_window = 7;
    REQUIRE(same(run(settings, data), want));
    settings.loss_scale = 0x1p-12;  // here small gradients are lost
    REQUIRE(!same(run(settings, data), want));
  }
}

// Without ReLU a gradient is off by about the format's unit roundoff u, in random directions: so
// a few u, in bf16 eight times what it is in fp16, and not more after many updates.
TEST_CASE("08: fp16 and bf16 follow fp32 within their rounding, which does not add up") {
  if (!has_16_bits) return;
  const Dataset data = uneven_data(64, 20, classes);
  double worst[2] = {};
  for (const int64_t steps : {10, 100, 1000})
    for (int i = 0; i < 2; ++i) {
      auto settings = settings_of({}, 16, steps, {2, 1, 2}, 2);
      const Shape shape = network(settings, data.features);
      const Result want = yardstick(settings, data);
      settings.precision = i == 0 ? Precision::fp16 : Precision::bf16;
      const double u = i == 0 ? 0x1p-11 : 0x1p-8;
      const Comparison c = compare(settings, shape, run(settings, data), want, 4 * u);
      INFO(steps << " updates, format " << i << ", " << c.worst << " " << c.difference / u << " u");
      REQUIRE(c.flaw.empty());
      REQUIRE(c.pass());
      REQUIRE(c.difference > 0);
      worst[i] = std::max(worst[i], c.difference);
    }
  REQUIRE(worst[1] > 3 * worst[0]);
  REQUIRE(worst[1] < 24 * worst[0]);
}

TEST_CASE("08: on the digits all formats are right equally often, within a point") {
  if (!has_16_bits) return;
  auto settings = small_settings<ch08::Settings>({128, 128}, 10, 64, -1);
  settings.epochs = 10, settings.accumulate = 2, settings.microbatches = 2;
  settings.gpus = settings.dp = settings.pp = 2, settings.dp = 1;
  const Data digits = load(settings.data, 10);
  const Shape shape = network(settings, digits.train.features);
  std::vector<double> right;
  for (const auto precision : {Precision::fp32, Precision::fp16, Precision::bf16}) {
    settings.precision = precision;
    const auto weights = run(settings, digits.train).weights;
    right.push_back(100.0 * double(count_correct(shape, weights, digits.test)) /
                    double(digits.test.size()));
  }
  REQUIRE(right[0] > 94);
  REQUIRE(std::abs(right[1] - right[0]) <= 1);
  REQUIRE(std::abs(right[2] - right[0]) <= 1);
}

template <class Low>
void require_copies(const Dataset& data) {
  auto settings = settings_of(eight_layers, 7, 10, {2, 2, 2}, 2);
  settings.precision = std::is_same_v<Low, __half> ? Precision::fp16 : Precision::bf16;
  std::mutex mutex;
  std::map<int, std::vector<std::vector<real>>> masters;  // by place, of both replicas
  on_every_rank<Low>(settings, data, [&](auto& trainer, Rank& rank) {
    bool rounded = true;
    std::vector<real> all;
    for (int t = 0; t <= 10; ++t) {
      if (t > 0) step(trainer, rank, t - 1);
      for (int64_t i = 0; i < trainer.parameters.size(); ++i) {
        const real w = trainer.parameters[i];
        all.push_back(w);
        rounded = rounded && float(trainer.low[i]) == float(static_cast<Low>(w));
      }
    }
    std::lock_guard lock(mutex);
    if (!rounded) throw Error("a copy is not its master's rounding");
    masters[rank.rank % 4].push_back(all);
  });
  for (const auto& [place, copies] : masters) REQUIRE(copies[0] == copies[1]);
  REQUIRE(masters.size() == 4);
}

TEST_CASE("08: low weights are their masters' rounding after every update, replicas all alike") {
  if (!has_16_bits) return;
  const Dataset data = uneven_data(23, 5, classes);
  require_copies<__half>(data);
  require_copies<__nv_bfloat16>(data);
}

namespace {

// A hundred updates of `change` from a weight of 1.
template <class Low>
std::pair<real, float> after_hundred(double change) {
  virtual_gpu::reset();
  OK(cudaSetDevice(0));
  Stream stream;
  Buffer<real> weight(1), velocity(1), gradient(1), rates(1);
  Buffer<Low> low(1);
  Buffer<ScaleState> state(1);
  *weight.data() = 1, *velocity.data() = 0, *rates.data() = 1;
  *gradient.data() = static_cast<real>(change * 1024);
  *state.data() = {1024, 0, 0, 0, 0, 0};
  for (int i = 0; i < 100; ++i)
    update_scaled(weight.data(), velocity.data(), low.data(), gradient, 1, rates.data(), 0, state,
                  stream);
  stream.synchronize();
  return {weight[0], float(low[0])};
}

}  // namespace

TEST_CASE("08: updates too small for the format add up in the masters") {
  const auto [bf16, bf16_copy] = after_hundred<__nv_bfloat16>(6e-4);
  REQUIRE(bf16 == Approx(0.94).epsilon(1e-5));
  REQUIRE(bf16_copy == Approx(0.94).margin(0.94 * 0x1p-8));
  REQUIRE(float(__nv_bfloat16(1 - 6e-4f)) == 1);  // what would be left of them without
  const auto [fp16, fp16_copy] = after_hundred<__half>(2e-4);
  REQUIRE(fp16 == Approx(0.98).epsilon(1e-5));
  REQUIRE(fp16_copy == Approx(0.98).margin(0.98 * 0x1p-11));
  REQUIRE(float(__half(1 - 2e-4f)) == 1);
}

TEST_CASE("08: sums, softmax and loss are 32 bits wide") {
  virtual_gpu::reset();
  OK(cudaSetDevice(0));
  Stream stream;
  const int rows = 70000;
  Buffer<__half> ones(rows), logits(9);
  Buffer<real> total(1), wide(9), dwide(9), loss(3);
  Buffer<int32_t> label(3);
  for (int i = 0; i < rows; ++i) ones.data()[i] = __half(1.0f);
  for (int i = 0; i < 9; ++i) logits.data()[i] = __half(float(1000 - i % 3 * 1000));
  for (int i = 0; i < 3; ++i) label.data()[i] = i;
  backward_bias(total.data(), ones.data(), rows, 1, 0, stream);
  widen(wide.data(), logits.data(), 9, stream);
  softmax_loss(loss.data(), dwide.data(), wide.data(), label, 3, 3, 1, stream);
  stream.synchronize();
  REQUIRE(total[0] == 70000);
  for (int i = 0; i < 3; ++i) REQUIRE(loss[i] == 1000 * i);
}

// ---- the scale -------------------------------------------------------------------------------

namespace {

// The scale and the skips after each of some updates, of which some overflow.
struct Told {
  std::vector<real> scales;
  ScaleState state;
};
Told scale_after(const std::vector<int>& overflows, real first, int64_t window, bool dynamic) {
  virtual_gpu::reset();
  OK(cudaSetDevice(0));
  Stream stream;
  const auto n = static_cast<int64_t>(overflows.size());
  Buffer<ScaleState> state(1);
  Buffer<real> told(n);
  *state.data() = {first, 0, 0, 0, 0, 0};
  for (int64_t i = 0; i < n; ++i) {
    state.data()->overflow = overflows[i];
    next_scale(state.data(), told + i, dynamic, window, stream);
    stream.synchronize();
  }
  return {on_host(told), state[0]};
}

}  // namespace

TEST_CASE("08: the scale halves at an overflow and doubles after a clean window") {
  Told a = scale_after({0, 1, 0, 0}, 8, 2, true);
  REQUIRE(a.scales == std::vector<real>{8, -4, 4, 8});
  REQUIRE(a.state.applied == 3);
  REQUIRE(a.state.skipped == 1);
  a = scale_after({0, 1, 0, 0}, 8, 2, false);
  REQUIRE(a.scales == std::vector<real>{8, -8, 8, 8});
  a = scale_after(std::vector<int>(2000, 0), 65536, 1, true);
  REQUIRE(a.state.scale == largest_scale);
  REQUIRE(a.state.applied == 2000);
  std::vector<int> all(31, 1);
  a = scale_after(all, 65536, 1, true);
  REQUIRE(a.state.scale == least_scale);
  REQUIRE(a.state.in_a_row == 31);
  all.insert(all.end(), {1, 0, 0});  // too many: nothing is applied any more
  a = scale_after(all, 65536, 1, true);
  REQUIRE(a.state.in_a_row == patience);
  REQUIRE(a.state.applied == 0);
  REQUIRE(a.state.skipped == patience);
}

TEST_CASE("08: one number that is not finite is an overflow") {
  virtual_gpu::reset();
  OK(cudaSetDevice(0));
  Stream stream;
  Buffer<real> g(5);
  Buffer<int32_t> flag(1);
  const auto found = [&](real x, int at) {
    for (int i = 0; i < 5; ++i) g.data()[i] = i % 2 ? -1e30f : 1e-30f;
    g.data()[at] = x;
    *flag.data() = 0;
    find_overflow(flag.data(), g, 5, stream);
    stream.synchronize();
    return flag[0];
  };
  const real large = std::numeric_limits<real>::max();
  for (int at = 0; at < 5; ++at) {
    REQUIRE(found(INFINITY, at) == 1);
    REQUIRE(found(-INFINITY, at) == 1);
    REQUIRE(found(NAN, at) == 1);
    REQUIRE(found(large, at) == 0);
    REQUIRE(found(0, at) == 0);
  }
}

// Each rank in turn is the only one whose gradient overflows, in the second of four updates.
TEST_CASE("08: an overflow on one rank skips the update on all, and changes nothing else") {
  if (!has_16_bits) return;
  const Dataset data = uneven_data(23, 5, classes);
  for (const Factors& f : {Factors{2, 1, 1}, {2, 2, 1}, {1, 2, 2}, {2, 2, 2}})
    for (int where = 0; where < f.ranks(); ++where) {
      auto settings = settings_of(three_layers, 7, 4, f, 2);
      settings.precision = Precision::fp16, settings.first_scale = 8, settings.scale_window = 2;
      settings.lr_schedule = LrSchedule::cosine, settings.momentum = 0.5;
      INFO(f << ", overflow on rank " << where);
      std::mutex mutex;
      int wrong = 0;
      std::map<int, std::vector<std::vector<real>>> copies;
      on_every_rank<__half>(settings, data, [&](auto& trainer, Rank& rank) {
        const auto expect = [&](bool good) {
          std::lock_guard lock(mutex);
          wrong += !good;
        };
        const real scales[] = {8, 4, 4, 8};
        for (int t = 0; t < 4; ++t) {
          const auto weights = on_host(trainer.parameters), momentum = on_host(trainer.velocity);
          const int64_t applied = trainer.state.data()->applied;
          const real unscale = 1 / trainer.state.data()->scale;
          step(trainer, rank, t, t == 1 && rank.rank == where);
          const ScaleState& state = *trainer.state.data();
          expect(state.scale == scales[t] && state.skipped == (t > 0));
          expect(state.applied == (t == 0 ? 1 : t) && applied + (t != 1) == state.applied);
          const real rate = static_cast<real>(learning_rate(settings, applied, 4));
          bool moved = false;
          for (int64_t i = 0; i < trainer.parameters.size(); ++i) {
            // The rate is that of the number of updates applied; a skip leaves all as it was.
            const real v = real(0.5) * momentum[i] + trainer.gradient[i] * unscale;
            const real w = t == 1 ? weights[i] : weights[i] - rate * v;
            expect(trainer.parameters[i] == w && trainer.velocity[i] == (t == 1 ? momentum[i] : v));
            expect(float(trainer.low[i]) == float(__half(w)));
            moved = moved || w != weights[i];
          }
          expect(moved == (t != 1));
        }
        std::lock_guard lock(mutex);
        copies[rank.rank % (f.pp * f.tp)].push_back(on_host(trainer.parameters));
      });
      REQUIRE(wrong == 0);
      for (const auto& [place, all] : copies)
        for (const auto& one : all) REQUIRE(one == all[0]);
    }
}

// In bf16 nothing is scaled: a gradient that is not finite is skipped and told.
TEST_CASE("08: bf16 has scale 1 and counts what it skips") {
  if (!has_16_bits) return;
  const Dataset data = uneven_data(23, 5, classes);
  auto settings = settings_of(three_layers, 7, 3, {2, 2, 1}, 2);
  settings.precision = Precision::bf16, settings.scale_window = 1;
  std::atomic<int> wrong = 0;
  on_every_rank<__nv_bfloat16>(settings, data, [&](auto& trainer, Rank& rank) {
    for (int t = 0; t < 3; ++t) step(trainer, rank, t, t == 1 && rank.rank == 2);
    const ScaleState& state = *trainer.state.data();
    wrong += state.scale != 1 || state.skipped != 1 || state.applied != 2;
    wrong += on_host(trainer.scales) != std::vector<real>{1, -1, 1};
  });
  REQUIRE(wrong == 0);
  real before = 1;
  REQUIRE(scale_story({1, -1, 1}, 0, before) ==
          "update 2: a gradient is not finite, so it is skipped\n");
}

// Far too large a scale at first: every gradient overflows by itself, until the scale is found.
// From there on it is the run that skipped as many updates for another reason.
TEST_CASE("08: a scale that is too large is halved until it fits, and the run goes on") {
  if (!has_16_bits) return;
  const Dataset data = uneven_data(23, 5, classes);
  auto settings = settings_of(three_layers, 7, 40, {2, 2, 2}, 2);
  settings.precision = Precision::fp16;
  settings.first_scale = 0x1p40;
  std::vector<real> found, forced, scales;
  on_every_rank<__half>(settings, data, [&](auto& trainer, Rank& rank) {
    for (int t = 0; t < 40; ++t) step(trainer, rank, t);
    if (rank.rank == 0)
      found = on_host(trainer.parameters), scales = on_host(trainer.scales);
  });
  const auto skips = std::count_if(scales.begin(), scales.end(), [](real s) { return s < 0; });
  REQUIRE(skips > 15);
  REQUIRE(skips < patience);
  REQUIRE(scales[14] < 0);
  REQUIRE(scales[39] >= 32768);
  settings.loss_scale = 32768;
  on_every_rank<__half>(settings, data, [&](auto& trainer, Rank& rank) {
    for (int t = 0; t < 40; ++t) step(trainer, rank, t, scales[t] < 0 && rank.rank == 7);
    if (rank.rank == 0) forced = on_host(trainer.parameters);
  });
  REQUIRE(found == forced);
}

TEST_CASE("08: the story of the scale names the update, the skip and the scale, in plain words") {
  real before = 65536;
  REQUIRE(scale_story({65536, -32768, 32768, 65536}, 10, before) ==
          "update 12: a gradient is not finite, so it is skipped; loss scale 65536 -> 32768 "
          "(a skip now and then is normal)\n"
          "update 14: loss scale 32768 -> 65536\n");
  REQUIRE(before == 65536);
  REQUIRE(scale_story({}, 14, before).empty());
}

// ---- timing, failure, and what is left -------------------------------------------------------

TEST_CASE("08: delays of any thread change no bit and no time", "[order]") {
  const Dataset data = uneven_data(23, 5, classes);
  auto settings = settings_of(eight_layers, 7, 6, {2, 2, 2}, 2);
  settings.accumulate = 2;
  if (has_16_bits) settings.precision = Precision::fp16;
  const Hardware h100("h100");
  const Result want = run(settings, data);
  for (const char* seed : {"1", "2", "3", "4", "5"}) {
    const Variable delays("VIRTUAL_GPU_JITTER", seed);
    const Result got = run(settings, data);
    REQUIRE(same(got, want));
    REQUIRE(got.step_seconds == want.step_seconds);
  }
}

TEST_CASE("08: a second run is the first, and every resource is given back") {
  virtual_gpu::reset();
  const Dataset data = uneven_data(23, 5, classes);
  auto settings = settings_of(three_layers, 6, 5, {2, 2, 2}, 2);
  if (has_16_bits) settings.precision = Precision::bf16;
  const Result first = run(settings, data);
  REQUIRE(same(run(settings, data), first));
  require_all_given_back(8);
}

TEST_CASE("08: whichever call fails on one rank, the run ends and says so") {
  const Dataset data = uneven_data(23, 5, classes);
  auto settings = settings_of(three_layers, 6, 4, {2, 2, 1}, 2);
  if (has_16_bits) settings.precision = Precision::fp16;
  require_no_wrong_result(ch08::train, settings, data, 2, 800, 37);
}

TEST_CASE("08: no update at all brings the initial weights") {
  const Dataset data = uneven_data(23, 5, classes);
  auto settings = settings_of(eight_layers, 6, 0, {2, 2, 2}, 2);
  if (has_16_bits) settings.precision = Precision::fp16;
  std::vector<real> start;
  initial_parameters(network(settings, 5), settings.seed, start);
  REQUIRE(run(settings, data).weights == start);
}

// ---- the program -----------------------------------------------------------------------------

TEST_CASE("08: the program compares itself in every format", "[program]") {
  for (const char* options : {"", "--accumulate 3", "--gpus 1 --pp 1 --accumulate 200",
                              "--gpus 4 --pp 2 --tp 2 --accumulate 2"})
    REQUIRE(run_chapter(name, std::string("--quiet --steps 10 --check ") + options).status == 0);
  if (!has_16_bits) return;
  for (const char* options : {"fp16", "bf16", "fp16 --hidden none --pp 1 --loss-scale 1024"})
    REQUIRE(run_chapter(name, std::string("--quiet --steps 10 --check --precision ") + options)
                .status == 0);
}

TEST_CASE("08: the program tells what the scale does, and that a skip is normal", "[program]") {
  if (!has_16_bits) return;
  const Outcome o = run_chapter(name, "--steps 40 --gpus 2 --precision fp16 --scale-window 1");
  INFO(o.out);
  REQUIRE(o.status == 0);
  REQUIRE(o.out.find("update 1: loss scale 65536 -> 131072\n") != std::string::npos);
  REQUIRE(o.out.find(": a gradient is not finite, so it is skipped; loss scale 8388608 -> 4194304 "
                     "(a skip now and then is normal)\n") != std::string::npos);
  REQUIRE(o.out.find("updates skipped") != std::string::npos);
}

TEST_CASE("08: gradients that always overflow end the run after 32 updates", "[program]") {
  if (!has_16_bits) return;
  const Outcome o = run_chapter(name, "--steps 100 --quiet --precision fp16 --loss-scale 1e30");
  INFO(o.err);
  REQUIRE(o.status == 1);
  REQUIRE(o.err.find("gradients of 32 updates in a row") != std::string::npos);
  REQUIRE(o.err.find("0 updates applied") != std::string::npos);
}

TEST_CASE("08: wrong options are refused with what would be right", "[program]") {
  for (const char* value : {"0", "-1", "1.5", "two"})
    require_refused(name, std::string("--accumulate ") + value,
                    {"--accumulate", value, "whole number from 1"});
  require_refused(name, "--precision fp8", {"--precision", "fp8", "fp32|fp16|bf16"});
  for (const char* value : {"0", "-8", "inf", "nan", "often"})
    require_refused(name, std::string("--precision fp16 --loss-scale ") + value,
                    {"--loss-scale", value, "dynamic or a number above 0"});
  require_refused(name, "--scale-window 0", {"--scale-window", "whole number from 1"});
  require_refused(name, "--loss-scale 8", {"--loss-scale", "8", "--precision fp16"});
  for (const char* fixed : {"", "--precision bf16", "--precision fp16 --loss-scale 8"})
    require_refused(name, std::string("--scale-window 5 ") + fixed,
                    {"--scale-window", "5", "dynamic loss scale"});
  CHECK(run_chapter(name, "--help").out.find("interleaved\n" + std::string(34, ' ') + "who") !=
        std::string::npos);
  require_refused(name, "--gpus 6 --dp 2 --pp 2 --tp 2", {"6 ranks given", "make 8"});
  if (!has_16_bits)
    require_refused(name, "--precision bf16", {"--precision", "bf16", "REAL=float"});
}

TEST_CASE("08: the README points at the lines that it names") {
  const std::string readme = contents("08_accum_amp/README.md");
  std::vector<std::string> lines = {""};
  std::istringstream source(contents("08_accum_amp/train.cuh"));
  for (std::string line; std::getline(source, line);) lines.push_back(line);
  int found = 0;
  const std::string sign = "()` at line ";
  for (size_t at = 0; (at = readme.find(sign, at)) != std::string::npos; ++at, ++found) {
    const size_t begin = readme.rfind('`', at) + 1;
    const std::string function = readme.substr(begin, at - begin);
    INFO(function);
    REQUIRE(lines.at(std::stoul(readme.substr(at + sign.size()))).find(function + "(") !=
            std::string::npos);
  }
  REQUIRE(found == 4);
}
