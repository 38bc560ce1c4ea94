// Chapter 02: replicas that see a share of the batch each are one GPU that sees all of it,
// whatever the split, the buckets and the timing; and the clock shows what the overlap gains.
#include "../02_data_parallel/train.cuh"
#include "harness.h"
#include "program.h"
#include "virtual_gpu.h"

namespace {

using virtual_gpu::Kind;
using virtual_gpu::Operation;
using virtual_gpu::Picoseconds;

constexpr const char* name = "02_data_parallel";

ch02::Settings settings_of(std::vector<int> hidden, int classes, int batch, int64_t steps,
                           int gpus) {
  auto settings = small_settings<ch02::Settings>(std::move(hidden), classes, batch, steps);
  settings.lr = 0.1;
  settings.gpus = gpus;
  return settings;
}

// Every rank's result. vary(settings, rank) may give a rank settings of its own.
std::vector<Result> all_results(
    const ch02::Settings& settings, const Dataset& data,
    const std::function<void(ch02::Settings&, int)>& vary = [](ch02::Settings&, int) {}) {
  ncclUniqueId id = {};
  OK(ncclGetUniqueId(&id));
  std::vector<int> devices(settings.gpus);
  std::iota(devices.begin(), devices.end(), 0);
  std::vector<Result> results(settings.gpus);
  const int status = run_threads(0, settings.gpus, devices, id, [&](Rank& rank) {
    ch02::Settings own = settings;
    vary(own, rank.rank);
    rank.quiet = settings.quiet;
    results[rank.rank] = ch02::train(own, data, rank);
  });
  if (status) throw Error("a rank failed with status " + std::to_string(status));
  return results;
}

Result run(const ch02::Settings& settings, const Dataset& data) {
  return all_results(settings, data)[0];
}

bool same(const Result& a, const Result& b) {
  return a.weights == b.weights && a.losses == b.losses && !a.losses.empty();
}

// A variable that the virtual GPU reads, for as long as this lives.
struct Variable {
  std::string name;
  Variable(const std::string& name, const std::string& value) : name(name) {
    setenv(name.c_str(), value.c_str(), 1);
    virtual_gpu::reset();
  }
  ~Variable() {
    unsetenv(name.c_str());
    virtual_gpu::record_timeline(false);
    virtual_gpu::reset();
  }
};

// Hardware of one test, its timeline recorded.
struct Hardware : Variable {
  explicit Hardware(const std::string& hardware) : Variable("VIRTUAL_GPU", hardware) {
    virtual_gpu::record_timeline(true);
  }
};

}  // namespace

// ---- equal to chapter 01 -------------------------------------------------------------------

// The ranks' sum adds the same samples' products in another order than one GEMM does. That is a
// few eps of each sum's magnitude an update, and updates add up: chapter.cuh's `rounding`, with
// its factor 64 for the sums' length and their cancellation. In double this is under 1e-12.
TEST_CASE("02: equals chapter 01 for 1 to 8 ranks, uneven and idle ones too") {
  const Dataset data = uneven_data(67, 5, 3);  // 67 leaves a short last batch to all but 1
  for (const int batch : {64, 60, 10, 6, 2})
    for (const double momentum : {0.0, 0.9}) {
      auto settings = settings_of({7}, 3, batch, 50, 1);
      settings.momentum = momentum;
      const Result want = yardstick(settings, data);
      for (int p = 1; p <= 8; ++p) {
        settings.gpus = p;
        settings.bucket_bytes = p % 2 ? 1 : 0;
        INFO(p << " ranks, batch " << batch << ", momentum " << momentum);
        const double tolerance = rounding(settings, 50);
        if (sizeof(real) == 8) REQUIRE(tolerance < 1e-12);
        require_equal(settings, data, run(settings, data), want, p == 1 ? 0 : tolerance);
      }
    }
}

TEST_CASE("02: fewer samples than ranks, batches that leave ranks without any") {
  struct Case {
    int samples, batch, gpus;
  };
  for (const auto& [samples, batch, gpus] :
       {Case{3, 3, 7}, {6, 6, 4}, {1, 1, 2}, {10, 4, 4}, {12, 6, 4}, {12, 2, 4}, {5, 3, 5}}) {
    const Dataset data = uneven_data(samples, 5, 3);
    const auto settings = settings_of({7, 6}, 3, batch, 9, gpus);
    INFO(samples << " samples, batch " << batch << ", " << gpus << " ranks");
    const Result got = run(settings, data), want = yardstick(settings, data);
    const Shape shape = network(settings, data.features);
    const Comparison c = compare(settings, shape, got, want, rounding(settings, 9));
    REQUIRE((c.flaw.empty() || samples == 1));  // one sample's losses may stand still
    REQUIRE(c.difference <= c.tolerance);
  }
}

TEST_CASE("02: one update is as long as chapter 01's on any number of ranks") {
  const Dataset data = uneven_data(8, 5, 3);
  for (const int p : {1, 2, 4, 8}) {
    const auto settings = settings_of({7}, 3, 8, 1, p);
    const Result got = run(settings, data), want = yardstick(settings, data);
    std::vector<real> start;
    initial_parameters(network(settings, 5), settings.seed, start);
    double moved = 0, should = 0;
    for (size_t i = 0; i < start.size(); ++i) {
      moved += std::abs(double(got.weights[i]) - start[i]);
      should += std::abs(double(want.weights[i]) - start[i]);
    }
    REQUIRE(should > 0.01);
    REQUIRE(moved / should == Approx(1.0).epsilon(1e-5));
  }
}

TEST_CASE("02: ten samples on four ranks count alike, where local means would not") {
  Config config = settings_of({}, 3, 10, 1, 4);
  config.shuffle = false;
  config.momentum = 0;
  const Dataset data = uneven_data(10, 5, 3);
  auto settings = settings_of({}, 3, 10, 1, 4);
  static_cast<Config&>(settings) = config;
  const Result got = run(settings, data), want = yardstick(config, data);
  require_equal(config, data, got, want, rounding(config, 1));
  // The mean of the ranks' own means, each from chapter 01 on that rank's rows alone.
  std::vector<double> means(want.weights.size(), 0);
  double loss = 0;
  for (int r = 0; r < 4; ++r) {
    const Share rows = share(10, r, 4);
    Dataset part;
    part.features = 5;
    part.labels.assign(&data.labels[rows.first], &data.labels[rows.last - 1] + 1);
    part.pixels.assign(&data.pixels[5 * rows.first], &data.pixels[5 * rows.last - 1] + 1);
    Config own = config;
    own.batch = static_cast<int>(rows.size());
    const Result alone = yardstick(own, part);
    for (size_t i = 0; i < means.size(); ++i) means[i] += alone.weights[i] / 4.0;
    loss += alone.losses[0] / 4;
  }
  double off = 0;
  for (size_t i = 0; i < means.size(); ++i)
    off = std::max(off, std::abs(means[i] - want.weights[i]));
  REQUIRE(off > 1e-4);                                  // these data can tell the two apart
  REQUIRE(std::abs(loss - want.losses[0]) > 1e-4);      // and so can the printed loss
}

TEST_CASE("02: as many test samples are right on any number of ranks") {
  const Dataset data = uneven_data(64, 5, 3), test = uneven_data(21, 5, 3, 8);
  auto settings = settings_of({7}, 3, 16, 40, 1);
  const Shape shape = network(settings, 5);
  const int64_t correct = count_correct(shape, yardstick(settings, data).weights, test);
  for (const int p : {1, 2, 4}) {
    settings.gpus = p;
    REQUIRE(count_correct(shape, run(settings, data).weights, test) == correct);
  }
}

// ---- replicas ------------------------------------------------------------------------------

TEST_CASE("02: all replicas are bitwise equal after every update") {
  const Dataset data = uneven_data(21, 5, 3);
  for (const int p : {2, 4})
    for (const auto allreduce : {ch02::AllReduce::nccl, ch02::AllReduce::star})
      for (int64_t steps = 0; steps <= 10; ++steps) {
        auto settings = settings_of({7, 6}, 3, 8, steps, p);
        settings.allreduce = allreduce;
        const std::vector<Result> results = all_results(settings, data);
        REQUIRE(!results[0].weights.empty());
        for (const Result& result : results) {
          REQUIRE(result.weights == results[0].weights);
          REQUIRE(result.losses == results[0].losses);
        }
      }
}

TEST_CASE("02: every rank makes the same parameters, and rank 0's are broadcast all the same") {
  const Dataset data = uneven_data(21, 5, 3);
  auto settings = settings_of({7}, 3, 8, 0, 4);
  std::vector<real> start;
  initial_parameters(network(settings, 5), settings.seed, start);
  for (const Result& result : all_results(settings, data)) REQUIRE(result.weights == start);
  // With a seed of its own (which without shuffling decides only the initial parameters) a rank
  // still trains what rank 0 made.
  settings.steps = 10;
  settings.shuffle = false;
  const Result want = run(settings, data);
  const auto results = all_results(settings, data, [](ch02::Settings& s, int r) { s.seed += r; });
  for (const Result& result : results) REQUIRE(same(result, want));
  require_equal(settings, data, want, yardstick(settings, data), rounding(settings, 10));
}

// ---- buckets -------------------------------------------------------------------------------

TEST_CASE("02: the buckets hold every parameter once, last layer first") {
  const Shape shape{{5, 7, 6, 3}};
  const int64_t layer[] = {42 * sizeof(real), 48 * sizeof(real), 21 * sizeof(real)};
  struct Case {
    int64_t bytes;
    std::vector<int> closing;
  };
  // The table that the chapter's header draws: which layers close a bucket of at least N bytes.
  const Case table[] = {{0, {0}},
                        {1, {2, 1, 0}},
                        {layer[2], {2, 1, 0}},
                        {layer[2] + 1, {1, 0}},
                        {layer[2] + layer[1], {1, 0}},
                        {layer[2] + layer[1] + 1, {0}},
                        {int64_t{1} << 40, {0}}};
  for (const auto& [bytes, closing] : table) {
    const auto buckets = ch02::plan_buckets(shape, bytes);
    INFO("at least " << bytes << " bytes");
    REQUIRE(buckets.size() == closing.size());
    int64_t end = shape.parameters();
    for (size_t i = 0; i < buckets.size(); ++i) {
      REQUIRE(buckets[i].layer == closing[i]);
      REQUIRE(buckets[i].at == shape.weight_at(closing[i]));
      REQUIRE(buckets[i].at + buckets[i].n == end);
      end = buckets[i].at;
    }
    REQUIRE(end == 0);
  }
}

TEST_CASE("02: any bucket size, NCCL's all-reduce or the star, and any timing: the same bits") {
  const Dataset data = uneven_data(21, 5, 3);
  for (const int p : {2, 3}) {
    auto settings = settings_of({7, 6, 5}, 3, 8, 12, p);
    settings.bucket_bytes = 0;
    const Result want = run(settings, data);
    for (const int64_t bytes : {1, 84, 85, 100, 200, 1 << 20})
      for (const auto allreduce : {ch02::AllReduce::nccl, ch02::AllReduce::star}) {
        settings.bucket_bytes = bytes;
        settings.allreduce = allreduce;
        REQUIRE(same(run(settings, data), want));
      }
  }
}

TEST_CASE("02: random delays change neither a bit nor a time", "[order]") {
  const Dataset data = uneven_data(21, 5, 3);
  auto settings = settings_of({7, 6}, 3, 8, 200, 3);
  settings.bucket_bytes = 0;
  const Result plain = run(settings, data);
  settings.bucket_bytes = 1;
  double seconds = 0;
  for (const char* jitter : {"1", "2", "3", "4", "5", "6"}) {
    const Hardware machine("h100");
    const Variable delays("VIRTUAL_GPU_JITTER", jitter);
    settings.allreduce = jitter[0] % 2 ? ch02::AllReduce::nccl : ch02::AllReduce::star;
    const Result got = run(settings, data);
    REQUIRE(same(got, plain));
    if (jitter[0] == '1') seconds = got.step_seconds;
    if (jitter[0] % 2) REQUIRE(got.step_seconds == seconds);
  }
}

// ---- the clock -----------------------------------------------------------------------------

namespace {

// What the hardware model says that one bucket's sum takes.
struct Cost {
  int p;
  double latency, bandwidth;
  ch02::AllReduce allreduce;
  Picoseconds of(int64_t n) const {
    const auto ps = [](double seconds) { return std::llround(seconds * 1e12); };
    const double bytes = double(n) * sizeof(real);
    if (allreduce == ch02::AllReduce::star)  // in, then out, all through rank 0's link
      return 2 * (ps(latency) + ps((p - 1) * bytes / bandwidth));
    return ps(2 * (p - 1) * latency) + ps(2.0 * (p - 1) / p * bytes / bandwidth);
  }
};

// The operations of `device` under the range, in the order of their start.
std::vector<Operation> operations(int device, const std::string& range) {
  std::vector<Operation> found;
  for (const Operation& o : virtual_gpu::timeline())
    if (o.device == device && range == o.range) found.push_back(o);
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.start < b.start; });
  return found;
}

}  // namespace

// Only products and links take time here, so the whole step is a formula: with f and g_l what
// forward and backward of layer l take, bucket i is ready at f + g_(L-1) + ... + g_l, ends at
// c_i = max(ready_i, c_(i-1)) + latency + bytes / bandwidth, and the step at the last c_i.
TEST_CASE("02: on ideal hardware a step takes exactly what the formula says") {
  const Dataset data = uneven_data(64, 40, 10);
  const double latency = 50e-9, bandwidth = 200e9;
  for (const int p : {1, 2, 4, 8})
    for (const auto allreduce : {ch02::AllReduce::nccl, ch02::AllReduce::star})
      for (const int64_t bytes : {0, 1, 9000}) {
        const Hardware machine("ideal,link_latency=50e-9,link_bandwidth=200e9");
        auto settings = settings_of({64, 48}, 10, 64, 5, p);
        settings.bucket_bytes = bytes;
        settings.allreduce = allreduce;
        const Result result = run(settings, data);
        const Shape shape = network(settings, 40);
        const Cost cost{p, latency, bandwidth, allreduce};
        const int64_t rows = 64 / p;
        Picoseconds now = 0, end = 0;  // of the compute and of the communication stream
        for (int l = 0; l < 3; ++l) now += 2 * rows * shape.weight_size(l);
        size_t next = 0;
        const auto buckets = ch02::plan_buckets(shape, bytes);
        for (int l = 2; l >= 0; --l) {
          now += 2 * rows * shape.weight_size(l) * (l > 0 ? 2 : 1);
          if (buckets[next].layer != l) continue;
          end = std::max(now, end) + (p > 1 ? cost.of(buckets[next++].n) : 0);
        }
        INFO(p << " ranks, buckets of " << bytes << ", star " << int(allreduce));
        const Picoseconds step = std::max(now, end);
        const auto first = operations(0, "forward 0"), last = operations(0, "update 0");
        REQUIRE(last.size() == 6);  // warm-up and five updates
        REQUIRE(last[5].start - last[0].end >= 5 * step);
        REQUIRE(last[5].start - last[4].start == step);
        REQUIRE(last[2].start - last[1].start == step);
        // cudaEventElapsedTime's milliseconds are a float.
        REQUIRE(result.step_seconds == Approx(step * 1e-12).epsilon(1e-6));
      }
}

TEST_CASE("02: on an H100 each sum starts when its bucket and the one before it are done") {
  const Dataset data = uneven_data(64, 64, 10);
  for (const auto allreduce : {ch02::AllReduce::nccl, ch02::AllReduce::star}) {
    const int p = 4;
    const Hardware machine("h100");
    auto settings = settings_of({128, 96}, 10, 64, 5, p);
    settings.bucket_bytes = 1;
    settings.allreduce = allreduce;
    run(settings, data);
    const Shape shape = network(settings, 64);
    const bool star = allreduce == ch02::AllReduce::star;
    const Cost cost{p, 0.6e-6, 450e9, allreduce};
    Picoseconds before = 0;
    for (int l = 2; l >= 0; --l) {
      const auto sums = operations(0, "all-reduce " + std::to_string(l));
      const auto backward = operations(0, "backward " + std::to_string(l));
      const auto updates = operations(0, "update " + std::to_string(l));
      const int64_t n = shape.weight_size(l) + shape.width[l + 1];
      const size_t each = star ? 2 * (p - 1) + 1 : 1;  // p-1 receives, the addition, p-1 sends
      REQUIRE(sums.size() == 6 * each);
      const Picoseconds start = sums[sums.size() - each].start;
      Picoseconds end = 0;
      for (const Operation& o : sums) end = std::max(end, o.end);
      INFO("layer " << l << ", star " << star);
      REQUIRE(start == std::max(backward.back().end, before));
      // Between receives and sends the star adds: a launch, and three accesses a thread of 256.
      const Picoseconds adds = std::llround(3.0 * ((n + 255) / 256 * 256) * sizeof(real) / 3.35);
      REQUIRE(end - start >= cost.of(n) + (star ? adds : 0));
      REQUIRE(end - start <= cost.of(n) + (star ? adds + 3'000'000 : 0));
      REQUIRE(updates.back().start >= end);
      before = end;
    }
  }
}

TEST_CASE("02: overlap hides the sums behind backward, and changes nothing else") {
  const Dataset data = uneven_data(64, 64, 10);
  const Hardware machine("ideal,link_bandwidth=100e9");
  auto settings = settings_of({128, 128}, 10, 64, 5, 4);
  settings.bucket_bytes = 0;
  const Result plain = run(settings, data);
  settings.bucket_bytes = 16384;
  const Result overlapped = run(settings, data);
  REQUIRE(same(plain, overlapped));
  REQUIRE(plain.bytes_sent_per_step == overlapped.bytes_sent_per_step);
  REQUIRE(overlapped.step_seconds < 0.99 * plain.step_seconds);
}

TEST_CASE("02: a rank sends 2(p-1)/p of the gradient a step, the star's rank 0 p-1 of them") {
  const Dataset data = uneven_data(21, 5, 3);
  for (const int p : {1, 2, 3, 8}) {
    auto settings = settings_of({7, 6}, 3, 8, 7, p);
    const double gradient = network(settings, 5).parameters() * sizeof(real);
    for (const int64_t bytes : {0, 1}) {
      settings.bucket_bytes = bytes;
      settings.allreduce = ch02::AllReduce::nccl;
      for (const Result& result : all_results(settings, data))
        REQUIRE(result.bytes_sent_per_step == Approx(2 * (p - 1) * gradient / p).epsilon(1e-12));
      settings.allreduce = ch02::AllReduce::star;
      const auto star = all_results(settings, data);
      for (int r = 0; r < p; ++r)
        REQUIRE(star[r].bytes_sent_per_step == (r ? 1 : p - 1) * gradient);
    }
  }
}

// ---- rates, progress, lifetimes ------------------------------------------------------------

TEST_CASE("02: the rate follows the global batch and the updates, not the ranks") {
  auto settings = settings_of({7}, 3, 32, 4, 1);
  settings.base_batch = 32;
  settings.lr_scale = LrScale::linear;
  for (const int p : {1, 2, 4}) {
    settings.gpus = p;
    settings.batch = 32;
    REQUIRE(updates(settings, 200)[3].rate == settings.lr);
    settings.batch = 32 * p;
    REQUIRE(updates(settings, 200)[3].rate == Approx(p * settings.lr));
  }
  const Dataset data = uneven_data(21, 5, 3);
  for (const int64_t warmup : {0, 10, 12}) {
    settings = settings_of({7}, 3, 8, 10, 3);
    settings.warmup = warmup;
    settings.lr_schedule = LrSchedule::cosine;
    require_equal(settings, data, run(settings, data), yardstick(settings, data),
                  rounding(settings, 10));
  }
}

TEST_CASE("02: the losses are the same with progress lines and without") {
  const Dataset data = uneven_data(21, 5, 3);
  auto settings = settings_of({7}, 3, 8, 25, 3);
  const Result quiet = run(settings, data);
  settings.quiet = false;
  const Result told = run(settings, data);
  REQUIRE(same(quiet, told));
  REQUIRE(told.bytes_sent_per_step == quiet.bytes_sent_per_step);
}

TEST_CASE("02: every resource is given back, each on its own GPU, and a second run is the first") {
  virtual_gpu::reset();
  const Dataset data = uneven_data(21, 5, 3);
  for (const auto allreduce : {ch02::AllReduce::nccl, ch02::AllReduce::star}) {
    auto settings = settings_of({7}, 3, 8, 12, 3);
    settings.allreduce = allreduce;
    REQUIRE(same(run(settings, data), run(settings, data)));
  }
  for (int device = 0; device < 8; ++device) {
    const virtual_gpu::Counters c = virtual_gpu::counters(device);
    REQUIRE((c.launches > 0) == (device < 3));
    REQUIRE(c.allocations == c.frees);
    REQUIRE(c.memory_used == 0);
    REQUIRE(c.streams_created == c.streams_destroyed);
    REQUIRE(c.events_created == c.events_destroyed);
    REQUIRE(c.handles_created == c.handles_destroyed);
    REQUIRE(c.communicators_created == c.communicators_destroyed);
    REQUIRE(c.communicators_created == (device < 3 ? 4 : 0));
  }
}

// ---- failure and wrong input ---------------------------------------------------------------

TEST_CASE("02: whichever call fails on one rank, the run ends and says so") {
  if (sizeof(real) == 8) return;  // the same calls as in float
  const Dataset data = uneven_data(10, 5, 3);
  const auto settings = settings_of({7}, 3, 6, 3, 3);
  const Result want = run(settings, data);
  int failed = 0, finished = 0;
  for (int n = 3; n < 400; n += 13) {  // after 1 and 2 there is no peer yet to be told
    const Variable fail("VIRTUAL_GPU_FAIL", std::to_string(n) + ":1");
    Result got;
    try {
      got = run(settings, data);
    } catch (const Error&) {
      ++failed;
      continue;
    }
    REQUIRE(same(got, want));  // it makes fewer calls than n
    ++finished;
  }
  REQUIRE(failed > 10);
  REQUIRE(finished > 0);
  REQUIRE(same(run(settings, data), want));
}

TEST_CASE("02: a rank that fails in a step ends the program with its cause", "[program]") {
  const auto start = std::chrono::steady_clock::now();
  const Outcome out = run_command("VIRTUAL_GPU_FAIL=400:2 " + program(name) +
                                  " --gpus 4 --steps 200 --quiet");
  INFO(out.err);
  REQUIRE(out.status == 1);
  REQUIRE(out.err.substr(0, 8) == "rank 2: ");
  REQUIRE(std::chrono::steady_clock::now() - start < std::chrono::seconds(15));
}

TEST_CASE("02: wrong options are refused with what would be right", "[program]") {
  struct Case {
    const char *given, *said;
  };
  for (const auto& [given, said] :
       {Case{"--bucket-bytes -1", "--bucket-bytes: \"-1\" given"},
        {"--bucket-bytes 1e3", "--bucket-bytes: \"1e3\" given"},
        {"--bucket-bytes", "--bucket-bytes: needs a value"},
        {"--allreduce ring", "--allreduce: \"ring\" given, nccl|star would be right"},
        {"--gpus 9", "9 ranks need 9 GPUs, 8 visible"},
        {"--gpus 0", "--gpus: \"0\" given"}}) {
    const Outcome out = run_chapter(name, std::string("--quiet ") + given);
    INFO(given << ": " << out.err);
    REQUIRE(out.status == 2);
    REQUIRE(out.err.find(said) != std::string::npos);
    REQUIRE(std::count(out.err.begin(), out.err.end(), '\n') == 1);
  }
  const Outcome help = run_chapter(name, "--help");
  REQUIRE(help.status == 0);
  REQUIRE(help.out.find("--bucket-bytes") != std::string::npos);
  REQUIRE(help.out.find("--allreduce") != std::string::npos);
}

TEST_CASE("02: the program compares itself with chapter 01, learns and reports", "[program]") {
  const Outcome out = run_chapter(name, "--gpus 3 --batch 50 --epochs 15 --check");
  INFO(out.out << out.err);
  REQUIRE(out.status == 0);
  REQUIRE(out.out.find(": pass") != std::string::npos);
  const size_t at = out.out.find("test accuracy");
  REQUIRE(at != std::string::npos);
  REQUIRE(std::stod(out.out.substr(at + 13)) > 95);
}

TEST_CASE("02: the README points at the lines that it names") {
  const std::string readme = contents("02_data_parallel/README.md");
  std::vector<std::string> lines = {""};
  std::istringstream source(contents("02_data_parallel/train.cuh"));
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

// ---- a thousand GPUs -----------------------------------------------------------------------

TEST_CASE("02: without the arithmetic every operation has the same time") {
  const Dataset data = uneven_data(23, 5, 3);
  const auto settings = settings_of({7, 6}, 3, 10, 4, 4);
  const auto run_with = [&](const char* skip) {
    const Variable arithmetic("VIRTUAL_GPU_SKIP_MATH", skip);
    virtual_gpu::record_timeline(true);
    run(settings, data);
    return timetable();
  };
  const auto want = run_with("0");
  REQUIRE(want.size() > 4 * 4 * 20);
  REQUIRE((run_with("1") == want));
}

// Nothing but the links takes time here, and every layer is a bucket: a step is its three sums,
// one after the other, each 2(p-1) latencies and 2(p-1)/p of its bytes.
TEST_CASE("02: on 1,024 GPUs a step takes the ring's time to the picosecond, whatever is delayed") {
  if (sizeof(real) > 4) return;  // no number is computed
  const int p = 1024;
  const Dataset data = uneven_data(2 * p, 5, 3);
  auto settings = settings_of({7, 6}, 3, 2 * p, 2, p);
  settings.bucket_bytes = 1;
  const Variable gpus("VIRTUAL_GPU_COUNT", std::to_string(p)), skip("VIRTUAL_GPU_SKIP_MATH", "1");
  const Variable links("VIRTUAL_GPU", "ideal,fp32=0,fp64=0,net_bandwidth=50e9,net_latency=2e-6");
  const Shape shape = network(settings, data.features);
  Picoseconds want = 0;
  for (int l = 0; l < shape.layers(); ++l)
    want += Cost{p, 2e-6, 50e9, settings.allreduce}.of(shape.weight_size(l) + shape.width[l + 1]);
  const auto run_with = [&](const char* seed) {
    const Variable delays("VIRTUAL_GPU_JITTER", seed);
    virtual_gpu::record_timeline(true);
    for (const Result& result : all_results(settings, data)) {
      REQUIRE(result.step_seconds == Approx(want * 1e-12));
      REQUIRE(result.bytes_sent_per_step == 2.0 * (p - 1) / p * shape.parameters() * sizeof(real));
    }
    return virtual_gpu::timeline();
  };
  std::vector<std::vector<Picoseconds>> ends[2];  // of each GPU's sums in steps 0 and 1
  for (const int delayed : {0, 1}) {
    ends[delayed].resize(p);
    for (const Operation& o : run_with(delayed ? "7" : "0"))
      if (o.kind == Kind::collective && *o.step) ends[delayed][o.device].push_back(o.end);
  }
  REQUIRE((ends[0] == ends[1]));
  for (const auto& sums : ends[0]) {
    REQUIRE(sums.size() == 2 * 3);
    REQUIRE(sums[5] - sums[2] == want);
  }
}

TEST_CASE("02: the scaling table has a row for each number of GPUs, with and without overlap",
          "[program]") {
  const Outcome out = run_command("tools/scaling.sh " + program(name) + " 8 --hidden 32 --steps 2");
  INFO(out.out << out.err);
  REQUIRE(out.status == 0);
  REQUIRE(std::count(out.out.begin(), out.out.end(), '\n') == 2 * (2 + 8));
  std::istringstream text(out.out);
  int rows = 0;
  for (std::string line; std::getline(text, line);) {
    std::istringstream cells(line);
    int gpus = 0, batch = 0;
    double step = 0, speedup = 0, efficiency = 0, sent = -1;
    std::string overlap, us, percent;
    if (!(cells >> gpus)) continue;
    REQUIRE((cells >> batch >> overlap >> step >> us >> speedup >> efficiency >> percent >> sent));
    REQUIRE(batch == (rows < 8 ? 256 : 32 * gpus));
    REQUIRE(efficiency == Approx(100 * speedup / gpus).margin(0.6));
    REQUIRE(step > 0);
    const double bytes = (64 * 32 + 32 + 32 * 10 + 10) * sizeof(real);
    REQUIRE(sent == Approx(2.0 * (gpus - 1) / gpus * bytes).margin(0.6));
    ++rows;
  }
  REQUIRE(rows == 16);
  // A number of GPUs that a chapter or the machine refuses is a row that says why.
  const Outcome refused = run_command("tools/scaling.sh " + program("01_single_gpu") +
                                      " 8 --hidden 32 --steps 2");
  REQUIRE(refused.status == 0);
  REQUIRE(refused.out.find("   8    256        -  01_single_gpu: --gpus") != std::string::npos);
  REQUIRE(run_command("tools/scaling.sh no_such_program 8").status == 2);
  REQUIRE(run_command("tools/scaling.sh " + program(name) + " 0").status == 2);
  // More samples than the digits have; the last row is what was asked for.
  const Outcome large = run_command("tools/scaling.sh " + program(name) + " 50 --hidden 32");
  REQUIRE(large.status == 0);
  REQUIRE(large.out.find("\n  50   1600      yes") != std::string::npos);
}
