// Chapter 04: layers on different GPUs compute bit for bit what one GPU computes, each GPU holds
// its own layers and no more, and only one of them works at a time.
#include "../04_layer_parallel/train.cuh"
#include "stages.h"

namespace {

constexpr const char* name = "04_layer_parallel";

ch04::Settings settings_of(std::vector<int> hidden, int classes, int batch, int64_t steps,
                           int gpus) {
  auto settings = small_settings<ch04::Settings>(std::move(hidden), classes, batch, steps);
  settings.lr = 0.05;
  settings.gpus = gpus;
  return settings;
}

Result run(const ch04::Settings& settings, const Dataset& data) {
  return run_ranks_here(ch04::train, settings, data);
}

double work_of(const Shape& shape, int l) { return double(shape.weight_size(l)) * (l ? 3 : 2); }

double largest_work(const Shape& shape, const std::vector<Share>& stages) {
  double largest = 0;
  for (const Share& s : stages) {
    double work = 0;
    for (int64_t l = s.first; l < s.last; ++l) work += work_of(shape, l);
    largest = std::max(largest, work);
  }
  return largest;
}

// By trying every place for every cut.
double least_largest_work(const Shape& shape, int first, int stages) {
  double least = INFINITY, work = 0;
  for (int last = first + 1; last <= shape.layers(); ++last) {
    work += work_of(shape, last - 1);
    if (stages == 1 && last < shape.layers()) continue;
    const double rest = stages == 1 ? 0 : least_largest_work(shape, last, stages - 1);
    least = std::min(least, std::max(work, rest));
  }
  return least;
}

}  // namespace

// ---- who owns what -------------------------------------------------------------------------

TEST_CASE("04: every layer is owned once, in order, and the largest stage is as small as can be") {
  std::vector<Shape> shapes;
  for (const int layers : {1, 2, 3, 5, 7, 8, 10})
    for (const uint64_t seed : {0, 1, 2}) {
      Shape shape;
      for (int l = 0; l <= layers; ++l)
        shape.width.push_back(seed ? static_cast<int>(1 + hash(seed, layers, l) % 60) : 8);
      shapes.push_back(shape);
    }
  for (const Shape& shape : shapes)
    for (int p = 1; p <= std::min(8, shape.layers()); ++p) {
      INFO(shape.layers() << " layers on " << p << " ranks");
      const auto stages = stage_layers(shape, p);
      REQUIRE(static_cast<int>(stages.size()) == p);
      int64_t next = 0;
      for (const Share& stage : stages) {
        REQUIRE(stage.first == next);
        REQUIRE(stage.size() >= 1);
        next = stage.last;
      }
      REQUIRE(next == shape.layers());
      REQUIRE(largest_work(shape, stages) == least_largest_work(shape, 0, p));
    }
}

TEST_CASE("04: equal layers are dealt out evenly") {
  struct Case {
    int layers;
    std::vector<int> sizes;
  };
  for (const auto& [layers, sizes] :
       {Case{10, {4, 3, 3}}, {10, {3, 3, 2, 2}}, {5, {3, 2}}, {7, {1, 1, 1, 1, 1, 1, 1}}}) {
    const Shape shape{std::vector<int>(layers + 1, 8)};
    const auto stages = stage_layers(shape, static_cast<int>(sizes.size()));
    for (size_t s = 0; s < sizes.size(); ++s) REQUIRE(stages[s].size() == sizes[s]);
  }
}

// ---- equal to chapter 01 -------------------------------------------------------------------

TEST_CASE("04: is chapter 01 bit for bit on 1 to 8 ranks") {
  const Dataset data = uneven_data(21, 5, 3);  // 21 leaves a short last batch
  for (const int batch : {4, 6, 10, 64})
    for (const double momentum : {0.0, 0.9}) {
      auto settings = settings_of({7, 9, 6, 8, 5, 7, 9}, 3, batch, 14, 1);
      settings.momentum = momentum;
      const Result want = yardstick(settings, data);
      for (int p = 1; p <= 8; ++p) {
        settings.gpus = p;
        INFO(p << " ranks, batch " << batch << ", momentum " << momentum);
        require_equal(settings, data, run(settings, data), want, 0);
      }
    }
}

TEST_CASE("04: is chapter 01 bit for bit for any number of layers and of ranks") {
  const Dataset data = uneven_data(10, 5, 3);
  for (const int layers : {1, 2, 3, 5, 7, 10}) {
    std::vector<int> hidden;
    for (int l = 1; l < layers; ++l) hidden.push_back(l % 2 ? 7 : 4);
    for (int p = 1; p <= std::min(8, layers); ++p) {
      const auto settings = settings_of(hidden, 3, 6, 50, p);
      INFO(layers << " layers on " << p << " ranks");
      require_equal(settings, data, run(settings, data), yardstick(settings, data), 0);
    }
  }
}

// Delays in real time of every stream, the GPU's other settings as they are.
TEST_CASE("04: a hundred runs with random delays are the same to the bit, and to the picosecond") {
  const Dataset data = uneven_data(10, 5, 3);
  const auto settings = settings_of({7, 6, 8}, 3, 4, 6, 3);
  const Result want = yardstick(settings, data), first = run(settings, data);
  REQUIRE(first.step_seconds > 0);
  for (int seed = 1; seed <= 100; ++seed) {
    const Variable delays("VIRTUAL_GPU_JITTER", std::to_string(seed));
    const Result got = run(settings, data);
    REQUIRE(same(got, want));
    REQUIRE(got.step_seconds == first.step_seconds);
  }
}

TEST_CASE("04: sends that hold up the host until they are received cannot block each other") {
  const Variable strict("VIRTUAL_GPU_STRICT", "1");
  const Dataset data = uneven_data(10, 5, 3);
  for (const int p : {2, 3, 4}) {
    const auto settings = settings_of({7, 6, 8}, 3, 4, 6, p);
    require_equal(settings, data, run(settings, data), yardstick(settings, data), 0);
  }
}

TEST_CASE("04: no update at all brings the initial weights") {
  const Dataset data = uneven_data(10, 5, 3);
  const auto settings = settings_of({7, 6, 8}, 3, 4, 0, 3);
  std::vector<real> start;
  initial_parameters(network(settings, 5), settings.seed, start);
  REQUIRE(run(settings, data).weights == start);
}

// ---- memory --------------------------------------------------------------------------------

TEST_CASE("04: a GPU holds its own layers and no more") {
  const Dataset data = uneven_data(21, 5, 3);
  for (int p = 1; p <= 4; ++p) {
    const Hardware machine("ideal");
    auto settings = settings_of({70, 90, 60}, 3, 8, 7, p);
    const Shape shape = network(settings, 5);
    const auto stages = stage_layers(shape, p);
    const int64_t N = 21, B = 8, T = 7, samples = updates(settings, N).back().first + 8;
    const auto results = all_results(ch04::train, settings, data);
    for (int r = 0; r < p; ++r) {
      INFO("rank " << r << " of " << p);
      const auto [first, last] = stages[r];
      int64_t numbers = 3 * (shape.weight_at(last) - shape.weight_at(first));  // w, g, v
      for (int64_t l = first; l <= last; ++l) numbers += (l ? 2 : 1) * B * shape.width[l];
      int64_t bytes = 0;
      if (r == 0) bytes += N * 5;
      if (r == p - 1) bytes += 4 * N + 4 * B, numbers += B;   // labels, row losses
      if (r == 0 || r == p - 1) bytes += 4 * samples, numbers += T;
      bytes += numbers * static_cast<int64_t>(sizeof(real));
      REQUIRE(updates(settings, N).back().samples == 8);
      REQUIRE(results[r].peak_memory == bytes);
      // The GPU's own account agrees, but for the grain of its allocator.
      const int64_t peak = virtual_gpu::counters(r).memory_peak;
      REQUIRE(peak >= bytes);
      REQUIRE(peak <= bytes + 64 * 512);
    }
  }
}

TEST_CASE("04: trains a network that is too large for one GPU", "[program]") {
  const std::string network = " --hidden 300,300,300,300,300 --steps 3 --quiet";
  const std::string small = "VIRTUAL_GPU_MEMORY=4M ";
  const Outcome one = run_command(small + program("01_single_gpu") + network);
  INFO(one.err);
  REQUIRE(one.status == 1);
  REQUIRE(one.err.find("out of memory") != std::string::npos);
  const TemporaryFolder folder;
  const Outcome four = run_command(small + program(name) + network +
                                   " --gpus 4 --save " + folder.path("four"));
  INFO(four.err);
  REQUIRE(four.status == 0);
  const Outcome large = run_chapter("01_single_gpu", network + " --save " + folder.path("one"));
  REQUIRE(large.status == 0);
  REQUIRE(contents(folder.path("four")) == contents(folder.path("one")));
}

TEST_CASE("04: nothing is allocated in a step") {
  const Dataset data = uneven_data(21, 5, 3);
  int64_t allocations[2][3];
  for (const int more : {0, 1}) {
    const Hardware machine("ideal");
    run(settings_of({7, 6, 8}, 3, 8, more ? 9 : 2, 3), data);
    for (int r = 0; r < 3; ++r) allocations[more][r] = virtual_gpu::counters(r).allocations;
  }
  for (int r = 0; r < 3; ++r) REQUIRE(allocations[0][r] == allocations[1][r]);
}

TEST_CASE("04: every resource is given back, each on its own GPU, and a second run is the first") {
  virtual_gpu::reset();
  const Dataset data = uneven_data(21, 5, 3);
  const auto settings = settings_of({7, 6, 8}, 3, 8, 12, 3);
  REQUIRE(same(run(settings, data), run(settings, data)));
  require_all_given_back(3);
}

// ---- the clock -----------------------------------------------------------------------------

// Layers that cost the same: each of 3 products of 8 x 8 a sample, and the first, which needs no
// input gradient, of 2 products of 12 x 8.
TEST_CASE("04: one GPU works at a time, so that each of p works 1/p of the time") {
  const Dataset data = uneven_data(20, 12, 8);
  for (const int p : {1, 2, 4, 8}) {
    const Hardware machine("ideal");
    const auto settings = settings_of(std::vector<int>(7, 8), 8, 10, 6, p);
    run(settings, data);
    const Picoseconds work = int64_t{8} * 3 * 2 * 10 * 8 * 8;  // of an update, on all GPUs
    std::vector<Operation> all;
    for (int r = 0; r < p; ++r) {
      const auto own = operations(r, Kind::gemm);
      REQUIRE(total(own) == 7 * work / p);  // six updates and the warm-up's
      all.insert(all.end(), own.begin(), own.end());
    }
    std::sort(all.begin(), all.end(),
              [](const auto& a, const auto& b) { return a.start < b.start; });
    for (size_t i = 1; i < all.size(); ++i) REQUIRE(all[i].start >= all[i - 1].end);
    // Six updates take six times the work of one, so a GPU is busy 1/p of them.
    REQUIRE(all.back().end - all[all.size() / 7].start == 6 * work);
  }
}

// What chapter 01's step takes, and two messages over each of p-1 borders, one after the other.
TEST_CASE("04: a step takes chapter 01's time and that of 2(p-1) messages") {
  const Dataset data = uneven_data(20, 12, 8);
  for (const int p : {1, 2, 4, 8}) {
    const Hardware machine("ideal,link_latency=50e-9,link_bandwidth=200e9");
    const auto settings = settings_of(std::vector<int>(7, 8), 8, 10, 6, p);
    run(settings, data);
    const int64_t bytes = 10 * 8 * sizeof(real);
    const Picoseconds message = 50'000 + bytes * 5;
    const auto gemms = operations(0, Kind::gemm);
    const Picoseconds step = int64_t{8} * 3 * 2 * 10 * 8 * 8 + 2 * (p - 1) * message;
    // Between updates rank 0 also takes the loss, one number, which the last rank sent before.
    const Picoseconds loss = p > 1 ? 50'000 + static_cast<int64_t>(sizeof(real)) * 5 : 0;
    const size_t each = gemms.size() / 7;
    for (size_t t = 2; t < 7; ++t)
      REQUIRE(gemms[t * each].start - gemms[(t - 1) * each].start == step + loss);
  }
}

TEST_CASE("04: messages are a border's activation, its gradient, and the loss") {
  const Dataset data = uneven_data(24, 5, 3);
  for (int p = 1; p <= 4; ++p) {
    const Hardware machine("ideal");
    const auto settings = settings_of({7, 6, 8}, 3, 8, 6, p);
    const Shape shape = network(settings, 5);
    const auto stages = stage_layers(shape, p);
    const auto results = all_results(ch04::train, settings, data);
    for (int r = 0; r < p; ++r) {
      int64_t numbers = 0, messages = 0;
      if (r < p - 1) numbers += 8 * shape.width[stages[r].last], ++messages;
      if (r > 0) numbers += 8 * shape.width[stages[r].first], ++messages;
      if (p > 1 && r == p - 1) ++numbers, ++messages;
      REQUIRE(results[r].bytes_sent_per_step == double(numbers * sizeof(real)));
      int64_t sends = 0;
      for (const Operation& o : operations(r, Kind::transfer))
        if (std::string(o.call) == "ncclSend") ++sends;
      REQUIRE(sends >= 7 * messages);  // six updates and the warm-up's; then weights follow
      REQUIRE(virtual_gpu::counters(r).collectives == 0);
    }
  }
}

// ---- failure and wrong input ---------------------------------------------------------------

TEST_CASE("04: whichever call fails on one rank, the run ends and says so") {
  if (sizeof(real) == 8) return;  // the same calls as in float
  const Dataset data = uneven_data(10, 5, 3);
  require_no_wrong_result(ch04::train, settings_of({7, 6, 8}, 3, 6, 3, 3), data, 1, 300, 5);
}

TEST_CASE("04: a rank that leaves or throws ends the run within seconds") {
  const Dataset data = uneven_data(10, 5, 3);
  const auto settings = settings_of({7, 6, 8}, 3, 6, 50, 3);
  for (const bool throws : {false, true}) {
    const Hardware machine("ideal");
    const auto start = std::chrono::steady_clock::now();
    ncclUniqueId id = {};
    OK(ncclGetUniqueId(&id));
    const int status = run_threads(0, 3, {0, 1, 2}, id, [&](Rank& rank) {
      if (rank.rank == 1 && throws) throw Error("gave up");
      if (rank.rank != 1) ch04::train(settings, data, rank);
    });
    REQUIRE(status == 1);
    REQUIRE(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
  }
}

TEST_CASE("04: a failing rank ends the program with its number and the cause", "[program]") {
  const auto start = std::chrono::steady_clock::now();
  const Outcome out = run_command("VIRTUAL_GPU_FAIL=300:2 " + program(name) +
                                  " --gpus 3 --steps 200 --quiet");
  INFO(out.err);
  REQUIRE(out.status == 1);
  REQUIRE(out.err.substr(0, 8) == "rank 2: ");
  REQUIRE(std::chrono::steady_clock::now() - start < std::chrono::seconds(15));
}

TEST_CASE("04: more ranks than layers are refused with both numbers", "[program]") {
  require_refused(name, "--gpus 4", {"--gpus: 4 ", "the network has 3"});
  require_refused(name, "--gpus 2 --hidden none", {"--gpus: 2 ", "the network has 1"});
  require_refused(name, "--gpus 9 --hidden 8,8,8,8,8,8,8,8", {"9 ranks need 9 GPUs, 8 visible"});
  require_refused(name, "--gpus 0", {"--gpus: \"0\" given"});
  require_refused(name, "--microbatches 2", {"--microbatches: no such option"});
}

TEST_CASE("04: the program compares itself with chapter 01, learns and reports", "[program]") {
  const Outcome out = run_chapter(name, "--gpus 3 --batch 50 --epochs 15 --check");
  INFO(out.out << out.err);
  REQUIRE(out.status == 0);
  REQUIRE(out.out.find("none, allowed none: pass") != std::string::npos);
  const size_t at = out.out.find("test accuracy");
  REQUIRE(at != std::string::npos);
  REQUIRE(std::stod(out.out.substr(at + 13)) > 95);
}
