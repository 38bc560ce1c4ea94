// Chapter 05: layers whose matrices are divided over ranks are chapter 01's layers, array by
// array; and each pair of layers costs one sum forward and one backward, no more.
#include "../common/chapter.cuh"
#include "../common/shard.h"

// Some claims are about what only a Trainer sees (activations, their gradients) or start from
// biases that no training gives. Nothing in the lessons is there for tests, so they look in.
#define private public
#include "../05_tensor_parallel/train.cuh"
#undef private

#include "harness.h"
#include "program.h"
#include "virtual_gpu.h"

namespace {

using virtual_gpu::Kind;
using virtual_gpu::Operation;
using virtual_gpu::Picoseconds;

constexpr const char* name = "05_tensor_parallel";

// ---- networks in which nothing divides -----------------------------------------------------

// One to five layers, so that the last is of either kind and pairs repeat.
const std::vector<std::vector<int>> networks = {{}, {7}, {7, 6}, {9, 6, 8}, {7, 5, 9, 6}};

ch05::Settings settings_of(std::vector<int> hidden, int classes, int batch, int64_t steps, int p) {
  auto settings = small_settings<ch05::Settings>(std::move(hidden), classes, batch, steps);
  settings.lr = 0.1;
  settings.gpus = p;
  return settings;
}

Result run(const ch05::Settings& settings, const Dataset& data) {
  return run_ranks_here(ch05::train, settings, data);
}

// The result, or what `take` makes of a Trainer that has done some updates, of every rank.
std::vector<Result> all_results(const ch05::Settings& settings, const Dataset& data) {
  ncclUniqueId id = {};
  OK(ncclGetUniqueId(&id));
  std::vector<int> devices(settings.gpus);
  std::iota(devices.begin(), devices.end(), 0);
  std::vector<Result> results(settings.gpus);
  const int status = run_threads(0, settings.gpus, devices, id, [&](Rank& rank) {
    rank.quiet = settings.quiet;
    results[rank.rank] = ch05::train(settings, data, rank);
  });
  if (status) throw Error("a rank failed with status " + std::to_string(status));
  return results;
}

// Hardware, jitter and the timeline of one test, and afterwards as if it had not been.
struct Virtual {
  explicit Virtual(const std::string& hardware, const char* jitter = nullptr) {
    if (jitter) setenv("VIRTUAL_GPU_JITTER", jitter, 1);
    virtual_gpu::reset();
    virtual_gpu::configure(hardware);
    virtual_gpu::record_timeline(true);
  }
  ~Virtual() {
    unsetenv("VIRTUAL_GPU_JITTER");
    virtual_gpu::record_timeline(false);
    virtual_gpu::reset();
  }
};

// ---- every array of a step -----------------------------------------------------------------

// The whole network after some updates, put together from the ranks; see whole_network().
struct Arrays {
  std::vector<std::vector<double>> a, da, gradient, parameters;  // by activation; by layer
  std::vector<std::vector<int32_t>> labels;                      // by rank
};

// Trains for `steps` updates from biases of 1, 2, 3, 1, ... times `bias` and puts the arrays
// together, after checking that copies of one thing on several ranks are the same to the bit.
// All buffers hold NaN before the first update.
Arrays whole_network(const ch05::Settings& settings, const Dataset& data, double bias, int steps) {
  const Shape shape = network(settings, data.features);
  const int L = shape.layers(), p = settings.gpus;
  Arrays w;
  for (int l = 0; l <= L; ++l) w.a.emplace_back(), w.da.emplace_back();
  w.gradient.resize(L), w.parameters.resize(L), w.labels.resize(p);
  for (int l = 0; l < L; ++l) {
    w.gradient[l].assign(shape.weight_size(l) + shape.width[l + 1], NAN);
    w.parameters[l] = w.gradient[l];
  }
  std::mutex mutex;
  std::string disagreement;
  const auto put = [&](double& to, double value, const char* what) {
    if (!std::isnan(to) && to != value) disagreement = what;
    to = value;
  };
  ncclUniqueId id = {};
  OK(ncclGetUniqueId(&id));
  std::vector<int> devices(p);
  std::iota(devices.begin(), devices.end(), 0);
  const int status = run_threads(0, p, devices, id, [&](Rank& rank) {
    ch05::Trainer trainer(settings, data, rank);
    trainer.initialise();
    const auto poison = [](const Buffer<real>& b) { std::fill_n(b.data(), b.size(), real(NAN)); };
    for (const auto& b : trainer.a) poison(b);
    for (const auto& b : trainer.da) poison(b);
    for (const auto* b : {&trainer.gradient, &trainer.row_loss, &trainer.largest, &trainer.total})
      poison(*b);
    const int r = rank.rank;
    for (int l = 0; l < L; ++l) {
      const Share out = units(shape, l + 1, r, p);
      for (int64_t j = out.first; j < out.last; ++j)
        trainer.bias(l)[j - out.first] = static_cast<real>(bias * double(1 + j % 3));
    }
    for (int t = 0; t < steps; ++t) trainer.step(t);
    rank.wait(trainer.compute);

    std::lock_guard lock(mutex);
    const int rows = trainer.plan[steps - 1].samples;
    w.labels[r].assign(trainer.label.data(), trainer.label.data() + rows);
    for (int l = 0; l <= L; ++l) {
      const Share u = units(shape, l, r, p);
      w.a[l].resize(rows * shape.width[l], NAN);
      w.da[l].resize(l ? w.a[l].size() : 0, NAN);
      for (int i = 0; i < rows; ++i)
        for (int64_t j = u.first; j < u.last; ++j) {
          const int64_t mine = i * u.size() + j - u.first, at = i * shape.width[l] + j;
          put(w.a[l][at], trainer.a[l].data()[mine], "activation");
          if (l) put(w.da[l][at], trainer.da[l].data()[mine], "its gradient");
        }
    }
    visit_shard(shape, r, p, [&](int64_t at, int l, int64_t i, int64_t n) {
      for (int64_t j = 0; j < n; ++j) {
        put(w.gradient[l][i + j], trainer.gradient.data()[at + j], "gradient");
        put(w.parameters[l][i + j], trainer.parameters.data()[at + j], "parameter");
      }
    });
  });
  REQUIRE(status == 0);
  INFO("ranks disagree about a " << disagreement);
  REQUIRE(disagreement.empty());
  for (int r = 1; r < p; ++r) REQUIRE(w.labels[r] == w.labels[0]);
  return w;
}

void require_close(const std::vector<double>& got, const std::vector<double>& want,
                   double tolerance, const std::string& what) {
  REQUIRE(got.size() == want.size());
  double magnitude = 0;
  for (const double x : want) magnitude = std::max(magnitude, std::abs(x));
  const double difference = largest_difference(got.data(), want.data(), got.size());
  INFO(what << " differs by " << difference << ", allowed " << tolerance);
  REQUIRE((magnitude > 0 || want.empty()));
  REQUIRE(difference <= tolerance);
}

// ---- what the textbook says ----------------------------------------------------------------

// The numbers of each sum of one step, in order, and the range that it stands in.
struct Message {
  std::string range;
  int64_t count;
};
std::vector<Message> messages_of_step(const Shape& shape, int rows) {
  std::vector<Message> all;
  const int L = shape.layers();
  for (int l = 1; l < L; l += 2)
    all.push_back({"all-reduce " + std::to_string(l), int64_t{rows} * shape.width[l + 1]});
  if (L % 2) all.push_back({"loss", rows}), all.push_back({"loss", rows});
  for (int l = L - 1; l > 0; --l)
    if (l % 2 == 0) all.push_back({"all-reduce " + std::to_string(l), int64_t{rows} * shape.width[l]});
  return all;
}

double bytes_of_step(const Shape& shape, int rows, int p) {
  double numbers = 0;
  for (const Message& m : messages_of_step(shape, rows)) numbers += double(m.count);
  return 2.0 * (p - 1) / p * numbers * sizeof(real);
}

}  // namespace

// ---- who owns what -------------------------------------------------------------------------

TEST_CASE("05: shards put together are chapter 01's initial weights, to the bit") {
  const Dataset data = uneven_data(10, 5, 3);
  for (const auto& hidden : networks)
    for (int p = 1; p <= 5; ++p) {
      const auto settings = settings_of(hidden, 5, 4, 0, p);
      const Shape shape = network(settings, 5);
      std::vector<real> whole, initial;
      initial_parameters(shape, settings.seed, initial);
      std::vector<int> owners(initial.size(), 0);
      for (int r = 0; r < p; ++r) {
        std::vector<real> part;
        initial_shard(shape, settings.seed, r, p, part);
        REQUIRE(static_cast<int64_t>(part.size()) == shard(shape, r, p).parameters());
        place_shard(whole, part, shape, r, p);
        visit_shard(shape, r, p, [&](int64_t, int l, int64_t i, int64_t n) {
          for (int64_t j = i; j < i + n; ++j) ++owners[shape.weight_at(l) + j];
        });
      }
      REQUIRE(whole == initial);
      // Each weight has one owner; so has a bias, but for those of row layers, which all have.
      for (int l = 0; l < shape.layers(); ++l)
        for (int64_t i = 0; i < shape.weight_size(l) + shape.width[l + 1]; ++i)
          REQUIRE(owners[shape.weight_at(l) + i] == (l % 2 && i >= shape.weight_size(l) ? p : 1));
      REQUIRE(run(settings, data).weights == initial);  // and the program does it so
    }
}

// ---- equal to chapter 01 -------------------------------------------------------------------

// Sums over units are taken in p parts, then the parts in rank order: a few eps of the sum's
// magnitude an update, and updates add up. That is chapter.cuh's `rounding`, with its factor 64
// for the sums' length and their cancellation. In double this is under 1e-12.
TEST_CASE("05: equals chapter 01 on 1 to 5 ranks, the last layer of either kind") {
  const Dataset data = uneven_data(21, 5, 3);  // 21: every batch size leaves a short last one
  for (const auto& hidden : networks)
    for (const int batch : {4, 6, 10}) {
      auto settings = settings_of(hidden, 5, batch, 50, 1);
      const Result want = yardstick(settings, data);
      for (int p = 1; p <= 5; ++p) {
        settings.gpus = p;
        INFO(p << " ranks, " << hidden.size() + 1 << " layers, batch " << batch);
        const double tolerance = rounding(settings, 50);
        if (sizeof(real) == 8) REQUIRE(tolerance < 1e-12);
        // One rank multiplies chapter 01's matrices and sums nothing.
        require_equal(settings, data, run(settings, data), want, p == 1 ? 0 : tolerance);
      }
    }
}

TEST_CASE("05: ten classes, and hidden layers of ten, over 4 and 8 ranks") {
  const Dataset data = uneven_data(30, 5, 10);
  for (const auto& hidden : std::vector<std::vector<int>>{{}, {10}, {10, 6}})
    for (const int p : {4, 8}) {
      const auto settings = settings_of(hidden, 10, 8, 50, p);
      INFO(p << " ranks, " << hidden.size() + 1 << " layers");
      require_equal(settings, data, run(settings, data), yardstick(settings, data),
                    rounding(settings, 50));
    }
}

// An exponent of size M is off by a few eps M, which softmax turns into that relative error.
TEST_CASE("05: every activation and gradient equals one rank's, whatever the biases") {
  const Dataset data = uneven_data(23, 5, 3);
  for (const auto& hidden : networks)
    for (const double bias : {0.0, 0.5, 100.0})
      for (const int steps : {1, 2, 6}) {  // 6: the short last batch of 23 by 4
        if (bias > 1 && steps > 1) continue;  // softmax gives 0 and 1, and gradients vanish
        auto settings = settings_of(hidden, 5, 4, 50, 1);
        settings.lr = 0.01;
        const Arrays want = whole_network(settings, data, bias, steps);
        double largest = 1;
        for (const double z : want.a.back()) largest = std::max(largest, std::abs(z));
        const double tolerance = largest * rounding(settings, steps);
        for (const int p : {2, 3, 4, 5}) {
          settings.gpus = p;
          const Arrays got = whole_network(settings, data, bias, steps);
          INFO(p << " ranks, " << hidden.size() + 1 << " layers, biases x " << bias << ", "
                 << steps << " updates");
          for (size_t l = 0; l < want.a.size(); ++l) {
            require_close(got.a[l], want.a[l], tolerance, "a " + std::to_string(l));
            require_close(got.da[l], want.da[l], tolerance, "da " + std::to_string(l));
          }
          for (size_t l = 0; l < want.gradient.size(); ++l) {
            const std::string layer = " of layer " + std::to_string(l);
            require_close(got.gradient[l], want.gradient[l], tolerance, "gradient" + layer);
            require_close(got.parameters[l], want.parameters[l], tolerance, "parameters" + layer);
          }
        }
      }
}

// Chapter 01's softmax on whole rows against the three steps on 2 + 1 columns of each.
TEST_CASE("05: the split softmax stands logits of any size") {
  const std::vector<real> logits = {1000, 0, -1000, 1000, 0,     -1000, 1000, 0, -1000,
                                    5,    5, 5,     -900, -1000, -950,  0,    1, 2};
  const std::vector<int32_t> labels = {0, 1, 2, 1, 2, 0};
  const int rows = 6, classes = 3;
  virtual_gpu::reset();
  {
    OK(cudaSetDevice(0));
    Stream stream;
    Buffer<int32_t> label(rows);
    label.upload(labels, stream);
    const auto uploaded = [&](const std::vector<real>& x) {
      Buffer<real> b(static_cast<int64_t>(x.size()));
      b.upload(x, stream);
      stream.synchronize();
      return b;
    };
    const Buffer<real> z = uploaded(logits);
    Buffer<real> want_loss(rows), want(rows * classes);
    softmax_loss(want_loss.data(), want.data(), z.data(), label, rows, classes, 0.25, stream);
    std::vector<Buffer<real>> part, gradient, loss, largest, total;
    const Share shares[] = {{0, 2}, {2, 3}};
    for (const Share& u : shares) {
      std::vector<real> columns;
      for (int i = 0; i < rows; ++i)
        for (int64_t j = u.first; j < u.last; ++j) columns.push_back(logits[i * classes + j]);
      part.push_back(uploaded(columns));
      gradient.emplace_back(rows * u.size());
      loss.emplace_back(rows), largest.emplace_back(rows), total.emplace_back(rows);
      softmax_largest(largest.back().data(), part.back().data(), rows, u.size(), stream);
    }
    stream.synchronize();
    for (int i = 0; i < rows; ++i)  // a virtual GPU's memory is the host's
      largest[0].data()[i] = largest[1].data()[i] =
          std::max(largest[0].data()[i], largest[1].data()[i]);
    for (int r = 0; r < 2; ++r)
      softmax_total(total[r].data(), gradient[r].data(), part[r].data(), largest[r].data(), rows,
                    shares[r].size(), stream);
    stream.synchronize();
    for (int i = 0; i < rows; ++i)
      total[0].data()[i] = total[1].data()[i] = total[0].data()[i] + total[1].data()[i];
    for (int r = 0; r < 2; ++r)
      softmax_loss_part(loss[r].data(), gradient[r].data(), part[r].data(), largest[r].data(),
                        total[r].data(), label, rows, shares[r].size(), shares[r].first, 0.25,
                        stream);
    stream.synchronize();
    // With one class on the second rank the sums have chapter 01's order, and so its bits.
    for (int i = 0; i < rows; ++i) {
      REQUIRE(loss[0].data()[i] + loss[1].data()[i] == want_loss.data()[i]);
      for (int j = 0; j < classes; ++j)
        REQUIRE((j < 2 ? gradient[0].data()[i * 2 + j] : gradient[1].data()[i]) ==
                want.data()[i * classes + j]);
    }
    REQUIRE(want_loss.data()[1] == 1000);
    REQUIRE(want_loss.data()[2] == 2000);
  }
}

TEST_CASE("05: two trainings in one process give the same bits, and all that was made is freed") {
  virtual_gpu::reset();
  const Dataset data = uneven_data(21, 5, 3);
  const auto settings = settings_of({7, 6}, 3, 4, 12, 3);
  const Result first = run(settings, data), second = run(settings, data);
  require_equal(settings, data, first, second, 0);
  for (int device = 0; device < 3; ++device) {
    const virtual_gpu::Counters c = virtual_gpu::counters(device);
    REQUIRE(c.communicators_created == 4);  // the world, and the one of the steps, twice
    REQUIRE(c.communicators_destroyed == c.communicators_created);
    REQUIRE(c.streams_destroyed == c.streams_created);
    REQUIRE(c.events_destroyed == c.events_created);
    REQUIRE(c.handles_destroyed == c.handles_created);
    REQUIRE(c.frees == c.allocations);
    REQUIRE(c.memory_used == 0);
  }
}

TEST_CASE("05: the progress line shows the same losses, and changes no number") {
  const Dataset data = uneven_data(21, 5, 3);
  for (const auto& hidden : networks) {
    auto settings = settings_of(hidden, 5, 4, 5, 3);
    settings.quiet = false;
    // The printing itself is the program's test; here the sums that it takes part in.
    std::fflush(stdout);
    const int keep = dup(STDOUT_FILENO);
    REQUIRE(std::freopen("/dev/null", "w", stdout));
    const std::vector<Result> loud = all_results(settings, data);
    std::fflush(stdout);
    dup2(keep, STDOUT_FILENO);
    close(keep);
    settings.quiet = true;
    const std::vector<Result> quiet = all_results(settings, data);
    REQUIRE(loud[0].weights == quiet[0].weights);
    REQUIRE(loud[0].losses == quiet[0].losses);
    REQUIRE(loud[0].bytes_sent_per_step == quiet[0].bytes_sent_per_step);
  }
}

// ---- messages, time, memory ----------------------------------------------------------------

TEST_CASE("05: a step's sums are these and no others, with these sizes") {
  const Dataset data = uneven_data(18, 6, 3);
  for (const auto& hidden : networks)
    for (const int p : {2, 4}) {
      Virtual machine("ideal");
      const auto settings = settings_of(hidden, 5, 8, 5, p);  // 8, 8, 2, 8, 8 samples
      const Shape shape = network(settings, data.features);
      INFO(p << " ranks, " << hidden.size() + 1 << " layers");
      const std::vector<Result> results = all_results(settings, data);
      const std::vector<Operation> timeline = virtual_gpu::timeline();
      double all_steps = 0;
      const std::vector<Update> plan = updates(settings, data.size());
      for (int t = 0; t < 5; ++t) {
        all_steps += bytes_of_step(shape, plan[t].samples, p);
        const std::vector<Message> want = messages_of_step(shape, plan[t].samples);
        // One for each pair and direction; the first layer's input gradient is never made.
        const size_t L = hidden.size() + 1;
        REQUIRE(want.size() == L / 2 + (L + 1) / 2 - 1 + (L % 2 ? 2 : 0));
        for (int r = 0; r < p; ++r) {
          std::vector<Operation> sums;
          for (const Operation& o : timeline)
            if (o.device == r && o.step == "step " + std::to_string(t) &&
                (o.kind == Kind::collective || o.kind == Kind::transfer))
              sums.push_back(o);
          REQUIRE(sums.size() == want.size());
          for (size_t i = 0; i < sums.size(); ++i) {
            const Message& m = want[i];
            REQUIRE(std::string(sums[i].call) == "ncclAllReduce");
            REQUIRE(sums[i].range == m.range);
            REQUIRE(sums[i].bytes ==
                    std::llround(2.0 * (p - 1) / p * double(m.count * sizeof(real))));
          }
        }
      }
      for (const Result& result : results)
        REQUIRE(result.bytes_sent_per_step == Approx(all_steps / 5).epsilon(1e-14));
      // GEMMs: y, dW and dx of each layer, but no dx of the first.
      int gemms = 0;
      for (const Operation& o : timeline)
        gemms += o.device == 0 && o.kind == Kind::gemm && o.step == std::string("step 1");
      REQUIRE(gemms == 3 * static_cast<int>(hidden.size() + 1) - 1);
    }
}

// Everybody waits at every sum for the last rank, whose share is never smaller than another's: a
// step is that rank's arithmetic plus all messages.
TEST_CASE("05: a step takes the largest share's FLOPs and the messages' time, exactly") {
  const double latency = 2e-9, bandwidth = 10e9;
  const Dataset data = uneven_data(16, 6, 3);
  for (const auto& hidden : std::vector<std::vector<int>>{{}, {8}, {8, 6}, {9, 6, 7}, {16, 8, 16, 4}})
    for (const int p : {1, 2, 4}) {
      Virtual machine("ideal,link_bandwidth=10e9,link_latency=2e-9");
      const int rows = 8;
      const auto settings = settings_of(hidden, 5, rows, 4, p);
      const Shape shape = network(settings, data.features), local = shard(shape, p - 1, p);
      all_results(settings, data);
      Picoseconds want = 0;
      for (int l = 0; l < shape.layers(); ++l)
        want += (l ? 3 : 2) * 2 * rows * local.weight_size(l);
      if (p > 1)
        for (const Message& m : messages_of_step(shape, rows)) {
          const double bytes = 2.0 * (p - 1) / p * double(m.count * sizeof(real));
          want += std::llround(2 * (p - 1) * latency * 1e12) + std::llround(bytes / bandwidth * 1e12);
        }
      Picoseconds start[2] = {-1, -1};  // of steps 2 and 3 on the last rank: a whole period
      for (const Operation& o : virtual_gpu::timeline())
        for (int t : {2, 3})
          if (o.device == p - 1 && o.step == "step " + std::to_string(t) && start[t - 2] < 0)
            start[t - 2] = o.start;
      INFO(p << " ranks, " << hidden.size() + 1 << " layers");
      REQUIRE(start[1] - start[0] == want);
    }
}

TEST_CASE("05: each rank allocates its share and no more") {
  const Dataset data = uneven_data(21, 5, 3);
  for (const auto& hidden : networks)
    for (const int p : {1, 2, 3, 5}) {
      const auto settings = settings_of(hidden, 5, 4, 12, p);
      const Shape shape = network(settings, data.features);
      const std::vector<Result> results = all_results(settings, data);
      const int64_t N = data.size(), B = 4, T = 12, order = 2 * 21 /* two epochs of 6 updates */;
      for (int r = 0; r < p; ++r) {
        const Shape local = shard(shape, r, p);
        int64_t units_of_all = -local.width[0];  // a and da of each activation, but no da[0]
        for (const int width : local.width) units_of_all += 2 * width;
        const int64_t want =
            N * 5 + 4 * (N + order + B) +
            static_cast<int64_t>(sizeof(real)) *
                (2 * local.parameters() + shard(shape, p - 1, p).parameters() +
                 B * units_of_all + 3 * B + 2 * T);
        REQUIRE(results[r].peak_memory == want);
      }
    }
}

TEST_CASE("05: delays of any thread change no bit and no time") {
  const Dataset data = uneven_data(21, 5, 3);
  const auto settings = settings_of({9, 6}, 3, 4, 6, 3);
  std::vector<Picoseconds> times[2];
  Result results[2];
  const char* const jitter[] = {nullptr, "5"};
  for (int i = 0; i < 2; ++i) {
    Virtual machine("a100", jitter[i]);
    results[i] = run(settings, data);
    for (const Operation& o : virtual_gpu::timeline())
      if (*o.step) times[i].push_back(o.start), times[i].push_back(o.end);
  }
  REQUIRE(results[0].weights == results[1].weights);
  REQUIRE(results[0].losses == results[1].losses);
  REQUIRE(results[0].step_seconds == results[1].step_seconds);
  REQUIRE(!times[0].empty());
  REQUIRE(times[0] == times[1]);
}

// ---- the program ---------------------------------------------------------------------------

TEST_CASE("05: the program compares, saves and ends on 1 to 4 ranks", "[program]") {
  const TemporaryFolder folder;
  for (int p = 1; p <= 4; ++p) {
    const Outcome o = run_chapter(name, "--epochs 1 --check --save " + folder.path("w") +
                                            " --gpus " + std::to_string(p));
    INFO(o.out << o.err);
    REQUIRE(o.status == 0);
    REQUIRE(o.err.empty());
    REQUIRE(o.out.find(": pass") != std::string::npos);
  }
}

TEST_CASE("05: a width below the ranks is refused by layer, size and rank count", "[program]") {
  struct Case {
    std::string arguments, says;
  };
  for (const auto& [arguments, says] :
       {Case{"--hidden 3 --gpus 4", "4 ranks cannot share the 3 output units of layer 0"},
        {"--hidden 1 --gpus 2", "2 ranks cannot share the 1 output units of layer 0"},
        {"--hidden 16,16,3 --gpus 4", "4 ranks cannot share the 3 output units of layer 2"},
        {"--hidden 16,1 --gpus 11", "11 ranks cannot share the 10 output units of layer 2"},
        {"--hidden none --gpus 11", "11 ranks cannot share the 10 output units of layer 0"}}) {
    const Outcome o = run_chapter(name, arguments);
    INFO(o.err);
    REQUIRE(o.status == 2);
    REQUIRE(o.out.empty());
    REQUIRE(std::count(o.err.begin(), o.err.end(), '\n') == 1);
    REQUIRE(o.err.find(says) != std::string::npos);
    REQUIRE(o.err.find(arguments.find("none") < 20 || arguments.find(",1 ") < 20 ? "--classes"
                                                                                : "--hidden") !=
            std::string::npos);
  }
  // Whole widths have no such limit: here 1 unit and 4 ranks.
  REQUIRE(run_chapter(name, "--hidden 8,1 --gpus 4 --steps 3 --check --quiet").status == 0);
}

TEST_CASE("05: a network too large for one GPU trains on four", "[program]") {
  const std::string arguments = " --hidden 512,512 --batch 16 --steps 2 --quiet";
  const std::string memory = "VIRTUAL_GPU_MEMORY=3M ";
  const Outcome alone = run_command(memory + program("01_single_gpu") + arguments);
  REQUIRE(alone.status == 1);
  REQUIRE(alone.err.find("out of memory") != std::string::npos);
  const Outcome four = run_command(memory + program(name) + arguments + " --gpus 4");
  INFO(four.err);
  REQUIRE(four.status == 0);
}

TEST_CASE("05: a call that fails on one rank ends all with the rank and the cause", "[program]") {
  const std::string arguments = " --steps 3 --hidden 8,8 --gpus 3 --quiet";
  const Outcome whole = run_command(program(name) + arguments);
  REQUIRE(whole.status == 0);
  // From set-up over warm-up and steps to the collecting of the weights.
  for (const int n : {4, 9, 10, 12, 20, 30, 45, 60, 80, 100, 120, 140, 160, 170}) {
    const auto begin = Clock::now();
    const Outcome o = run_command("VIRTUAL_GPU_FAIL=" + std::to_string(n) + ":1 " +
                                  program(name) + arguments);
    INFO("call " << n << ": " << o.err);
    REQUIRE(std::chrono::duration<double>(Clock::now() - begin).count() < 20);
    REQUIRE(o.status == 1);
    REQUIRE(o.err.find("rank 1: ") == 0);
    REQUIRE(o.err.find("told to fail") != std::string::npos);
  }
}
