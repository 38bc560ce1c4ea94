// Chapter 07: a mesh of replicas, stages and shards is one GPU with the whole network and the
// whole batch, whatever its factors; along one axis alone it is that axis's chapter to the bit.
#include "../common/chapter.cuh"
#include "../common/mesh.cuh"

// What each rank holds after each update only its Trainer knows. Nothing in the lessons is there
// for tests, so they look in.
#define private public
#include "../07_hybrid/train.cuh"
#undef private

#include "../02_data_parallel/train.cuh"
#include "../05_tensor_parallel/train.cuh"
#include "../06_pipeline/train.cuh"
#include <map>

#include "stages.h"

namespace {

constexpr const char* name = "07_hybrid";

struct Factors {
  int dp, pp, tp;
  int ranks() const { return dp * pp * tp; }
};
std::ostream& operator<<(std::ostream& out, const Factors& f) {
  return out << f.dp << " x " << f.pp << " x " << f.tp;
}

std::vector<Factors> factorisations(int ranks) {
  std::vector<Factors> all;
  for (int d = 1; d <= ranks; ++d)
    for (int p = 1; p <= ranks / d; ++p)
      if (ranks % (d * p) == 0) all.push_back({d, p, ranks / (d * p)});
  return all;
}

// Every odd width has 8 units or more and none divides evenly; the last layer is a row layer in
// one network and a column layer, whose classes are split, in the other.
const std::vector<int> eight_layers = {9, 6, 8, 7, 11, 5, 10}, three_layers = {11, 6};
constexpr int classes = 9;

template <class Settings = ch07::Settings>
Settings settings_of(std::vector<int> hidden, int batch, int64_t steps, Factors f, int m) {
  auto settings = small_settings<Settings>(std::move(hidden), classes, batch, steps);
  settings.lr = 0.05;
  if constexpr (std::is_base_of_v<PipelineConfig, Settings>) settings.microbatches = m;
  if constexpr (std::is_base_of_v<MeshConfig, Settings>)
    settings.dp = f.dp, settings.pp = f.pp, settings.tp = f.tp;
  settings.gpus = f.ranks();
  return settings;
}

Result run(const ch07::Settings& settings, const Dataset& data) {
  return run_ranks_here(ch07::train, settings, data);
}

bool allowed(const Factors& f, size_t layers) { return f.pp <= static_cast<int>(layers); }

// Runs `body(trainer, rank)` on every rank, after initialise().
void on_every_rank(const ch07::Settings& settings, const Dataset& data,
                   const std::function<void(ch07::Trainer&, Rank&)>& body,
                   const std::function<void(ch07::Settings&, int)>& vary = [](auto&, int) {}) {
  ncclUniqueId id = {};
  OK(ncclGetUniqueId(&id));
  std::vector<int> devices(settings.gpus);
  std::iota(devices.begin(), devices.end(), 0);
  const int status = run_threads(0, settings.gpus, devices, id, [&](Rank& rank) {
    ch07::Settings own = settings;
    vary(own, rank.rank);
    rank.quiet = true;
    ch07::Trainer trainer(own, data, rank);
    rank.meet();
    trainer.initialise();
    body(trainer, rank);
    rank.meet();
  });
  REQUIRE(status == 0);
}

Picoseconds begin_of_step(int t, int device) {
  Picoseconds begin = -1;
  for (const Operation& o : virtual_gpu::timeline())
    if (o.device == device && o.kind == Kind::gemm && o.step == "step " + std::to_string(t))
      begin = begin < 0 ? o.start : std::min(begin, o.start);
  REQUIRE(begin >= 0);
  return begin;
}

}  // namespace

// ---- equal to chapter 01 -------------------------------------------------------------------

// Sums over samples, micro-batches and units are taken in parts: a few eps of the sum's magnitude
// an update, and updates add up; `rounding` allows 64 eps. In double that is under 1e-12.
TEST_CASE("07: equals chapter 01 for every factorisation of 1, 2, 3, 4, 6 and 8 ranks") {
  const Dataset data = uneven_data(23, 5, classes);  // a short last batch of 3, or of 9
  int runs = 0;
  for (const auto& [hidden, batch, m] :
       {std::tuple{eight_layers, 10, 3}, std::tuple{three_layers, 7, 2}}) {
    const auto alone = settings_of(hidden, batch, 50, {1, 1, 1}, 1);
    const Result want = yardstick(alone, data);
    const double tolerance = rounding(alone, 50);
    if (sizeof(real) == 8) REQUIRE(tolerance < 1e-12);
    for (const int ranks : {1, 2, 3, 4, 6, 8})
      for (const Factors& f : factorisations(ranks)) {
        if (!allowed(f, hidden.size() + 1)) continue;
        auto settings = settings_of(hidden, batch, 50, f, m);
        settings.schedule = runs++ % 2 ? Schedule::gpipe : Schedule::one_f_one_b;
        INFO(f << ", " << hidden.size() + 1 << " layers");
        require_equal(settings, data, run(settings, data), want, tolerance);
      }
  }
  REQUIRE(runs > 50);
}

TEST_CASE("07: any number of micro-batches, any schedule, and replicas without a sample") {
  const Dataset data = uneven_data(21, 5, classes);
  for (const int batch : {1, 2, 6, 10, 64}) {
    const Result want = yardstick(settings_of(three_layers, batch, 12, {1, 1, 1}, 1), data);
    for (const int m : {1, 2, 3, 4, 5, 12}) {
      if (m > batch) continue;
      for (const Factors& f : {Factors{4, 2, 1}, {2, 3, 1}, {2, 1, 2}, {3, 2, 1}}) {
        auto settings = settings_of(three_layers, batch, 12, f, m);
        settings.schedule = (m + f.dp) % 2 ? Schedule::gpipe : Schedule::one_f_one_b;
        INFO(f << ", batch " << batch << ", " << m << " micro-batches");
        require_equal(settings, data, run(settings, data), want, rounding(settings, 12));
      }
    }
  }
}

TEST_CASE("07: interleaved chunks on a mesh") {
  const Dataset data = uneven_data(21, 5, classes);
  for (const Factors& f : {Factors{2, 2, 2}, {2, 4, 1}, {1, 2, 3}}) {
    auto settings = settings_of(eight_layers, 10, 20, f, 3);
    settings.schedule = Schedule::interleaved;
    INFO(f);
    require_equal(settings, data, run(settings, data), yardstick(settings, data),
                  rounding(settings, 20));
  }
}

// ---- along one axis: that axis's chapter, to the bit -----------------------------------------

// The same shapes, the same order of sums, and on hardware without launch times the same time.
TEST_CASE("07: replicas alone are chapter 02 with one bucket, and as fast as one bucket a layer") {
  const Hardware ideal("ideal,link_bandwidth=10e9,link_latency=2e-9");
  const Dataset data = uneven_data(23, 5, classes);
  for (const int p : {1, 2, 3, 4}) {
    const Factors f = {p, 1, 1};
    const Result got = run(settings_of(three_layers, 10, 9, f, 1), data);
    auto of_02 = settings_of<ch02::Settings>(three_layers, 10, 9, f, 1);
    of_02.bucket_bytes = 0;
    REQUIRE(same(got, run_ranks_here(ch02::train, of_02, data)));
    of_02.bucket_bytes = 1;
    const Result layers = run_ranks_here(ch02::train, of_02, data);
    REQUIRE(same(got, layers));
    REQUIRE(got.step_seconds == layers.step_seconds);
    REQUIRE(got.bytes_sent_per_step == Approx(layers.bytes_sent_per_step).epsilon(1e-14));
  }
}

TEST_CASE("07: shards alone are chapter 05") {
  const Dataset data = uneven_data(23, 5, classes);
  for (const auto& hidden : {three_layers, eight_layers})
    for (const int p : {1, 2, 3, 5}) {
      const Factors f = {1, 1, p};
      Result results[2];
      Picoseconds periods[2];  // from one step's begin to the next's on the last rank
      for (int i = 0; i < 2; ++i) {
        const Hardware ideal("ideal,link_bandwidth=10e9,link_latency=2e-9");
        results[i] = i == 0
            ? run(settings_of(hidden, 10, 9, f, 1), data)
            : run_ranks_here(ch05::train, settings_of<ch05::Settings>(hidden, 10, 9, f, 1), data);
        periods[i] = begin_of_step(7, p - 1) - begin_of_step(6, p - 1);
      }
      INFO(f << ", " << hidden.size() + 1 << " layers");
      REQUIRE(same(results[0], results[1]));
      REQUIRE(periods[0] == periods[1]);
      REQUIRE(results[0].bytes_sent_per_step ==
              Approx(results[1].bytes_sent_per_step).epsilon(1e-14));
    }
}

TEST_CASE("07: stages alone are chapter 06") {
  const Hardware ideal("ideal,link_bandwidth=10e9,link_latency=2e-9");
  const Dataset data = uneven_data(23, 5, classes);
  for (const int p : {1, 2, 4})
    for (const auto schedule : {Schedule::gpipe, Schedule::one_f_one_b, Schedule::interleaved}) {
      auto settings = settings_of(eight_layers, 10, 9, {1, p, 1}, 4);
      settings.schedule = schedule;
      const Result got = run(settings, data);
      auto of_06 = settings_of<ch06::Settings>(eight_layers, 10, 9, {1, p, 1}, 4);
      of_06.schedule = schedule;
      const Result want = run_ranks_here(ch06::train, of_06, data);
      REQUIRE(same(got, want));
      // Chapter 06 also sends the loss to rank 0 in every step.
      REQUIRE(got.step_seconds <= want.step_seconds);
    }
}

// ---- who holds what --------------------------------------------------------------------------

TEST_CASE("07: each parameter has as many owners as there are replicas, all the same to the bit") {
  const Dataset data = uneven_data(23, 5, classes);
  for (const Factors& f : {Factors{2, 2, 2}, {3, 1, 2}, {2, 4, 1}, {1, 2, 4}, {2, 1, 3}}) {
    const auto settings = settings_of(eight_layers, 6, 8, f, 2);
    const Shape shape = network(settings, data.features);
    INFO(f);
    std::mutex mutex;
    std::vector<std::vector<std::vector<real>>> copies(9);  // after n updates, of each parameter
    for (auto& at : copies) at.resize(shape.parameters());
    on_every_rank(settings, data, [&](ch07::Trainer& trainer, Rank& rank) {
      const int t = rank.rank % f.tp, p = rank.rank / f.tp % f.pp;
      const auto stage = stage_layers(shape, f.pp)[p];
      for (int n = 0; n <= 8; ++n) {
        if (n > 0) trainer.step(n - 1);
        rank.wait(trainer.compute);
        std::lock_guard lock(mutex);
        int64_t begin = -1;
        visit_shard(shape, t, f.tp, [&](int64_t at, int l, int64_t i, int64_t count) {
          if (l < stage.first || l >= stage.last) return;
          if (begin < 0) begin = at;
          for (int64_t j = 0; j < count; ++j)
            copies[n][shape.weight_at(l) + i + j].push_back(trainer.parameters[at - begin + j]);
        });
      }
    });
    std::vector<real> initial;
    initial_parameters(shape, settings.seed, initial);
    for (int n = 0; n <= 8; ++n)
      for (int l = 0; l < shape.layers(); ++l)
        for (int64_t i = 0; i < shape.weight_size(l) + shape.width[l + 1]; ++i) {
          const auto& all = copies[n][shape.weight_at(l) + i];
          const bool on_all_shards = is_row(l) && i >= shape.weight_size(l);
          REQUIRE(static_cast<int>(all.size()) == f.dp * (on_all_shards ? f.tp : 1));
          for (const real w : all) REQUIRE(w == all[0]);
          if (n == 0) REQUIRE(all[0] == initial[shape.weight_at(l) + i]);
        }
  }
}

TEST_CASE("07: replicas that made other parameters get replica 0's") {
  const Dataset data = uneven_data(23, 5, classes);
  const Factors f = {2, 2, 2};
  const auto settings = settings_of(eight_layers, 6, 8, f, 2);
  const Result want = run(settings, data);
  std::vector<std::vector<real>> own(8);
  const auto other_seed = [](ch07::Settings& s, int rank) { s.seed = rank < 4 ? 1 : 77; };
  on_every_rank(settings, data, [&](ch07::Trainer& trainer, Rank& rank) {
    own[rank.rank].assign(trainer.parameters.data(),
                          trainer.parameters.data() + trainer.parameters.size());
  }, other_seed);
  for (int r = 0; r < 4; ++r) REQUIRE(own[r] == own[r + 4]);
  REQUIRE(!want.weights.empty());
}

// Pixel 0 says which sample it is. With one micro-batch a stage's buffers hold the whole share.
TEST_CASE("07: ranks that differ in stage or shard see the same samples, replicas share them out") {
  Dataset data = uneven_data(23, 5, classes);
  for (int i = 0; i < 23; ++i) data.pixels[i * 5] = i, data.labels[i] = i % classes;
  for (const Factors& f : {Factors{1, 2, 2}, {2, 2, 2}, {3, 2, 1}, {4, 1, 2}, {4, 2, 1}})
    for (const int batch : {3, 6, 10}) {
      const auto settings = settings_of(eight_layers, batch, 9, f, 1);
      const std::vector<Update> plan = updates(settings, 23);
      const std::vector<int32_t> order = sample_order(settings, 23);
      std::mutex mutex;
      std::vector<std::vector<int>> seen(9);  // by replica 0's shard 0, then 1's, ..
      bool right = true;
      on_every_rank(settings, data, [&](ch07::Trainer& trainer, Rank& rank) {
        const int d = rank.rank / (f.pp * f.tp), p = rank.rank / f.tp % f.pp;
        for (int t = 0; t < 9; ++t) {
          trainer.step(t);
          rank.wait(trainer.compute);
          const Share rows = share(plan[t].samples, d, f.dp);
          std::lock_guard lock(mutex);
          for (int i = 0; i < rows.size(); ++i) {
            const int sample = order[plan[t].first + rows.first + i];
            if (p == 0) {
              const real pixel = trainer.a[0](0)[i * 5];
              right = right && pixel == real(sample) / real(255);
              if (rank.rank % f.tp == 0)
                seen[t].push_back(static_cast<int>(std::lround(pixel * 255)));
            }
            if (p == f.pp - 1) right = right && trainer.label[i] == sample % classes;
          }
        }
      });
      INFO(f << ", batch " << batch);
      REQUIRE(right);
      const int an_epoch = (23 + batch - 1) / batch;
      std::vector<int> epoch;
      for (int t = 0; t < 9; ++t) {
        REQUIRE(static_cast<int>(seen[t].size()) == plan[t].samples);
        epoch.insert(epoch.end(), seen[t].begin(), seen[t].end());
        if ((t + 1) % an_epoch) continue;
        std::sort(epoch.begin(), epoch.end());  // an epoch: every sample once
        for (int i = 0; i < 23; ++i) REQUIRE(epoch[i] == i);
        REQUIRE(epoch.size() == 23);
        epoch.clear();
      }
    }
}

TEST_CASE("07: the report's memory is what each rank's place needs") {
  const Dataset data = uneven_data(23, 5, classes);
  for (const Factors& f : {Factors{1, 1, 1}, {2, 1, 1}, {1, 1, 3}, {2, 2, 2}, {4, 1, 2}}) {
    auto settings = settings_of(three_layers, 10, 9, f, 2);
    settings.schedule = Schedule::gpipe;
    const Shape shape = network(settings, data.features);
    const auto results = all_results(ch07::train, settings, data);
    const int64_t b = (10 + f.dp * 2 - 1) / (f.dp * 2), samples = 23 * 3;
    for (int rank = 0; rank < f.ranks(); ++rank) {
      const int t = rank % f.tp, p = rank / f.tp % f.pp;
      const Shape local = shard(shape, t, f.tp);
      const auto [first, last] = stage_layers(shape, f.pp)[p];
      int64_t numbers = 9 + 3 * (local.weight_at(last) - local.weight_at(first));
      for (int64_t l = first; l <= last; ++l) {
        const bool border = (l == first && l > 0) || (l == last && l < 3);
        numbers += b * local.width[l] * (2 + (l == 0 ? 0 : border ? 2 : 1));
      }
      if (p == f.pp - 1) numbers += 3 * b;
      int64_t bytes = numbers * static_cast<int64_t>(sizeof(real));
      if (p == 0) bytes += 23 * 5;
      if (p == f.pp - 1) bytes += 4 * (23 + b);
      if (p == 0 || p == f.pp - 1) bytes += 4 * samples;
      INFO(f << ", rank " << rank);
      REQUIRE(results[rank].peak_memory == bytes);
    }
  }
}

// ---- messages and time -----------------------------------------------------------------------

TEST_CASE("07: gradients go over the replicas once a parameter and update, and nowhere else") {
  const Dataset data = uneven_data(20, 5, classes);
  for (const Factors& f : {Factors{2, 2, 2}, {4, 2, 1}, {2, 4, 1}, {2, 1, 3}}) {
    const Hardware ideal("ideal");
    const int m = 4, steps = 3;
    const auto settings = settings_of(eight_layers, 10, steps, f, m);
    const Shape shape = network(settings, data.features);
    const auto results = all_results(ch07::train, settings, data);
    const auto timeline = virtual_gpu::timeline();
    for (int rank = 0; rank < f.ranks(); ++rank) {
      const int t = rank % f.tp, p = rank / f.tp % f.pp;
      const Shape local = shard(shape, t, f.tp);
      const auto [first, last] = stage_layers(shape, f.pp)[p];
      INFO(f << ", rank " << rank);
      std::map<std::string, int> data_sums, tensor_sums;  // of step 1
      double data_bytes = 0, tensor_bytes = 0;
      for (const Operation& o : timeline)
        if (o.device == rank && o.kind == Kind::collective && o.step == std::string("step 1")) {
          const std::string range = o.range;
          if (range.starts_with("all-reduce ")) ++data_sums[range], data_bytes += double(o.bytes);
          else ++tensor_sums[range], tensor_bytes += double(o.bytes);
        }
      double gradient = 0;
      int pairs_forward = 0, pairs_backward = 0;
      for (int64_t l = first; l < last; ++l) {
        REQUIRE(data_sums["all-reduce " + std::to_string(l)] == 1);
        gradient += double(local.weight_size(l) + local.width[l + 1]) * sizeof(real);
        pairs_forward += is_row(l), pairs_backward += l > 0 && is_column(l);
        if (f.tp > 1 && (is_row(l) || l > 0))
          REQUIRE(tensor_sums["sum " + std::to_string(l)] == m);
      }
      REQUIRE(static_cast<int64_t>(data_sums.size()) == last - first);
      const double to_send = 2.0 * (f.dp - 1) / f.dp * gradient;
      REQUIRE(data_bytes == Approx(to_send).margin(double(last - first)));
      REQUIRE(results[rank].bytes_by_kind[0].second == Approx(to_send).epsilon(1e-12));
      // 10 samples in all 4 micro-batches and replicas, whatever their sizes.
      const double rows = double(share(10, rank / (f.pp * f.tp), f.dp).size());
      double sums = 0, border = 0;
      for (int64_t l = first; l < last; ++l) {
        if (is_row(l)) sums += rows * local.width[l + 1];
        if (l > 0 && is_column(l)) sums += rows * local.width[l];
      }
      if (first > 0) border += rows * local.width[first];
      if (last < shape.layers()) border += rows * local.width[last];
      REQUIRE(results[rank].bytes_by_kind[1].second == Approx(border * sizeof(real)));
      REQUIRE(results[rank].bytes_by_kind[2].second ==
              Approx(2.0 * (f.tp - 1) / f.tp * sums * sizeof(real)).margin(1e-9));
    }
  }
}

// Two replicas of one stage of two equal layers W [n, n], m micro-batches of one row each. All
// sums but layer 0's own hide behind the rest of the last backward, if they are short enough.
TEST_CASE("07: the last micro-batch's backward hides the gradient's all-reduce") {
  const int n = 8, m = 4;
  Dataset data = uneven_data(24, n, n);
  for (const double bandwidth : {1e15, 2e12}) {
    const Hardware ideal("ideal,link_bandwidth=" + std::to_string(bandwidth));
    auto settings = small_settings<ch07::Settings>({n}, n, 2 * m, 6);
    settings.gpus = settings.dp = 2, settings.pp = 1, settings.microbatches = m;
    const Result result = run(settings, data);
    const Picoseconds product = 2 * n * n;  // FLOPs, and so picoseconds
    const Picoseconds sum = std::llround((n * n + n) * sizeof(real) / bandwidth * 1e12);
    // Layer 1: y, dW, dx; layer 0: y, dW. Layer 1's sum runs beside layer 0's dW.
    const Picoseconds want = 5 * m * product + std::max(Picoseconds{0}, sum - product) + sum;
    REQUIRE((sum > product) == (bandwidth == 2e12));
    REQUIRE(std::llround(result.step_seconds * 1e12) == want);
  }
}

TEST_CASE("07: delays of any thread change no bit and no time", "[order]") {
  const Dataset data = uneven_data(23, 5, classes);
  const auto settings = settings_of(eight_layers, 6, 6, {2, 2, 2}, 3);
  const Hardware h100("h100");
  const Result want = run(settings, data);
  for (const char* seed : {"1", "2", "3", "4", "5"}) {
    const Variable delays("VIRTUAL_GPU_JITTER", seed);
    const Result got = run(settings, data);
    REQUIRE(same(got, want));
    REQUIRE(got.step_seconds == want.step_seconds);
  }
}

TEST_CASE("07: without the arithmetic every operation has the same time") {
  const Dataset data = uneven_data(23, 5, classes);
  const auto settings = settings_of(eight_layers, 6, 6, {2, 2, 2}, 3);
  const auto run_with = [&](const char* skip) {
    const Variable arithmetic("VIRTUAL_GPU_SKIP_MATH", skip);
    virtual_gpu::record_timeline(true);
    run(settings, data);
    return timetable();
  };
  const auto want = run_with("0");
  REQUIRE(want.size() > 8 * 6 * 20);
  REQUIRE((run_with("1") == want));
}

TEST_CASE("07: sends that hold up the host until they are received cannot block each other") {
  const Variable strict("VIRTUAL_GPU_STRICT", "1");
  const Dataset data = uneven_data(23, 5, classes);
  for (const Factors& f : {Factors{2, 2, 2}, {1, 4, 2}, {2, 3, 1}}) {
    const auto settings = settings_of(eight_layers, 6, 6, f, 3);
    require_equal(settings, data, run(settings, data), yardstick(settings, data),
                  rounding(settings, 6));
  }
}

// ---- failure, and what is left ---------------------------------------------------------------

TEST_CASE("07: a second run is the first, and every resource is given back") {
  virtual_gpu::reset();
  const Dataset data = uneven_data(23, 5, classes);
  const auto settings = settings_of(three_layers, 6, 5, {2, 2, 2}, 2);
  const Result first = run(settings, data);
  REQUIRE(same(run(settings, data), first));
  require_all_given_back(8);
}

TEST_CASE("07: whichever call fails on one rank, the run ends and says so") {
  const Dataset data = uneven_data(23, 5, classes);
  const auto settings = settings_of(three_layers, 6, 4, {2, 2, 2}, 2);
  require_no_wrong_result(ch07::train, settings, data, 5, 600, 29);
}

TEST_CASE("07: no update at all brings the initial weights") {
  const Dataset data = uneven_data(23, 5, classes);
  const auto settings = settings_of(eight_layers, 6, 0, {2, 2, 2}, 2);
  std::vector<real> start;
  initial_parameters(network(settings, 5), settings.seed, start);
  REQUIRE(run(settings, data).weights == start);
}

// ---- the program -----------------------------------------------------------------------------

TEST_CASE("07: the program's default is four replicas of two stages, and it compares itself",
          "[program]") {
  const Outcome out = run_chapter(name, "--steps 6 --check");
  INFO(out.out << out.err);
  REQUIRE(out.status == 0);
  REQUIRE(out.out.find("6 updates of 64 samples on 8 GPUs") != std::string::npos);
  REQUIRE(out.out.find(": pass") != std::string::npos);
  const Outcome same = run_chapter(name, "--steps 6 --check --dp 4 --pp 2 --tp 1");
  const auto number = [](const std::string& text) { return text.substr(text.find("  loss of")); };
  REQUIRE(number(same.out) == number(out.out));
  for (const char* options : {"--gpus 4", "--gpus 4 --pp 1 --tp 2", "--gpus 3 --dp 1 --pp 3",
                              "--gpus 6 --pp 1 --tp 3", "--gpus 1 --pp 1"})
    REQUIRE(run_chapter(name, std::string("--quiet --steps 3 --check ") + options).status == 0);
}

TEST_CASE("07: progress lines change nothing", "[program]") {
  const TemporaryFolder folder;
  const std::string options = "--steps 6 --gpus 4 --tp 2 --pp 2 --save " + folder.path("w");
  const Outcome loud = run_chapter(name, options + "1");
  REQUIRE(run_chapter(name, "--quiet " + options + "2").status == 0);
  REQUIRE(loud.out.find("step 6/6") != std::string::npos);
  REQUIRE(contents(folder.path("w1")) == contents(folder.path("w2")));
}

TEST_CASE("07: products and factors that do not fit are refused with both numbers", "[program]") {
  require_refused(name, "--gpus 6 --dp 2 --pp 2 --tp 2", {"--gpus", "6 ranks given", "make 8"});
  require_refused(name, "--gpus 8 --dp 3 --pp 1 --tp 2", {"--gpus", "8 ranks given", "make 6"});
  require_refused(name, "--dp 2 --pp 2", {"8 ranks given", "make 4"});
  require_refused(name, "--gpus 7", {"--gpus", "7 ranks given", "multiple of 2"});
  require_refused(name, "--gpus 2 --pp 2 --tp 2", {"2 ranks given", "multiple of 4"});
  require_refused(name, "--dp 1000000 --pp 1000000 --tp 1000000", {"8 ranks given"});
  require_refused(name, "--pp 4", {"--pp", "4 stages", "network has 3"});
  require_refused(name, "--schedule interleaved", {"--pp", "2 stages of 2 --chunks", "has 3"});
  require_refused(name, "--pp 1 --tp 4 --hidden 3",
                  {"--tp", "4 shards", "3 output units", "layer 0"});
  require_refused(name, "--gpus 11 --pp 1 --tp 11",
                  {"--tp", "11 shards", "10 output", "--classes"});
  require_refused(name, "--microbatches 65", {"--microbatches", "65", "64 samples"});
  for (const char* zero : {"--dp", "--pp", "--tp", "--microbatches"})
    for (const char* value : {" 0", " -1", " two"})
      require_refused(name, std::string(zero) + value, {zero, "whole number from 1"});
}

TEST_CASE("07: a model too large for one GPU trains on a mesh", "[program]") {
  const std::string options = " --hidden 512,512 --batch 16 --steps 2 --quiet";
  const std::string memory = "VIRTUAL_GPU_MEMORY=" + std::to_string(sizeof(real) / 2) + "M ";
  const Outcome alone = run_command(memory + program(name) + options + " --gpus 1 --pp 1");
  REQUIRE(alone.status == 1);
  REQUIRE(alone.err.find("out of memory") != std::string::npos);
  REQUIRE(run_command(memory + program(name) + options + " --gpus 8 --pp 2 --tp 2").status == 0);
}

TEST_CASE("07: a rank that fails in a step ends the program with its cause, on all ranks",
          "[program]") {
  const Outcome o = run_command("VIRTUAL_GPU_FAIL=700:6 " + program(name) + " --quiet --tp 2");
  INFO(o.err);
  REQUIRE(o.status == 1);
  REQUIRE(o.err.find("rank 6: ") == 0);
  REQUIRE(o.err.find("told to fail") != std::string::npos);
}

TEST_CASE("07: the README points at the lines that it names") {
  const std::string readme = contents("07_hybrid/README.md");
  std::vector<std::string> lines = {""};
  std::istringstream source(contents("07_hybrid/train.cuh"));
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
  REQUIRE(found == 2);
}

// Rank 0 of this mesh holds the fewest numbers and sends the fewest bytes.
TEST_CASE("07: without arithmetic the report is the same but for losses and weights", "[program]") {
  std::string figures[2];
  for (const int skip : {0, 1}) {
    const TemporaryFolder folder;
    const Outcome o = run_command("VIRTUAL_GPU_SKIP_MATH=" + std::to_string(skip) + " " +
                                  program(name) + " --gpus 8 --dp 1 --pp 4 --tp 2 --hidden " +
                                  "512,512,512 --steps 3 --report " + folder.path("report"));
    const std::string report = contents(folder.path("report"));
    const size_t first = report.find("\"step_seconds\""), last = report.find("\"check\"", first);
    REQUIRE(last != std::string::npos);
    figures[skip] = report.substr(first, last - first);
  }
  REQUIRE(figures[0] == figures[1]);
}

TEST_CASE("07: make mesh tries all meshes, and another network has another best one", "[program]") {
  const std::string mesh = "tools/mesh.sh " + program(name) + " 4 --batch 64 ";
  const std::string wide = mesh + "--hidden 128,128,128";
  const Outcome node = run_command("VIRTUAL_GPU=h100 " + wide);
  INFO(node.out << node.err);
  REQUIRE(node.status == 0);
  REQUIRE(std::count(node.out.begin(), node.out.end(), '\n') == 2 + 6 + 1);
  REQUIRE(node.out.find("best: --dp 4 --pp 1 --tp 1") != std::string::npos);
  const Outcome slow = run_command("VIRTUAL_GPU=slownet " + wide);
  REQUIRE(slow.out.find("best: --dp 2 --pp 1 --tp 2") != std::string::npos);
  REQUIRE(slow.out.find("waits for data sums") != std::string::npos);
  const Outcome small = run_command(std::string("VIRTUAL_GPU_MEMORY=") +
                                    (sizeof(real) == 4 ? "118" : "130") +
                                    "K VIRTUAL_GPU=h100 " + mesh + "--hidden 30,20 --batch 8");
  INFO(small.out << small.err);
  REQUIRE(small.out.find("best: --dp 1 --pp 1 --tp 4") != std::string::npos);
  REQUIRE(small.out.find("does not fit") != std::string::npos);
  REQUIRE(small.out.find("4 stages need a layer each, the network has 3") != std::string::npos);
  for (const char* gpus : {"0", "-1", "many", ""}) {
    const Outcome wrong = run_command("tools/mesh.sh " + program(name) + " '" + gpus + "'");
    REQUIRE(wrong.status == 2);
    REQUIRE(wrong.err.find(std::string("\"") + gpus + "\" GPUs") != std::string::npos);
  }
}
