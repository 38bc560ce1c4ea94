// Chapter 03: in sync mode the workers together are one GPU; in the others the server's own list
// of pushes, done again on one GPU, gives the same bits; and the clock shows who waits for whom.
#include "../03_async_ps/train.cuh"
#include "harness.h"
#include "program.h"
#include "virtual_gpu.h"

namespace {

using ch03::Mode;
using ch03::Push;
using virtual_gpu::Operation;
using virtual_gpu::Picoseconds;

constexpr const char* name = "03_async_ps";

ch03::Settings settings_of(Mode mode, int workers, std::vector<int> hidden, int classes, int batch,
                           int64_t steps) {
  auto settings = small_settings<ch03::Settings>(std::move(hidden), classes, batch, steps);
  settings.mode = mode;
  settings.lr = 0.1;
  settings.gpus = workers + 1;
  return settings;
}

template <class Trainer>  // of the workers
Result train_as(const ch03::Settings& settings, const Dataset& data, Rank& rank) {
  rank.quiet = settings.quiet;
  if (rank.rank == 0) return ch03::Server(settings, data, rank).train();
  return Trainer(settings, data, rank).train();
}

Result run(const ch03::Settings& settings, const Dataset& data) {
  return run_ranks_here(ch03::train, settings, data);
}

std::string row(const Result& result, const std::string& name) {
  for (const auto& [key, value] : result.extra)
    if (key == name) return value;
  throw Error("the report has no row '" + name + "'");
}

std::vector<Push> pushes_of(const Result& result) {
  std::vector<Push> pushes;
  std::istringstream text(row(result, "push order (rank:batch:age)"));
  char colon;
  for (Push p; text >> p.rank >> colon >> p.batch >> colon >> p.age;) pushes.push_back(p);
  return pushes;
}

bool same(const Result& a, const Result& b) {
  return a.weights == b.weights && a.losses == b.losses && !a.losses.empty() && a.extra == b.extra;
}

// A machine for one test, and afterwards as if it had not been.
struct Virtual {
  explicit Virtual(const std::string& hardware,
                   std::vector<std::pair<std::string, std::string>> variables = {})
      : variables(std::move(variables)) {
    for (const auto& [key, value] : this->variables) setenv(key.c_str(), value.c_str(), 1);
    virtual_gpu::reset();
    virtual_gpu::configure(hardware);
  }
  ~Virtual() {
    for (const auto& [key, value] : variables) unsetenv(key.c_str());
    virtual_gpu::record_timeline(false);
    virtual_gpu::reset();
  }
  std::vector<std::pair<std::string, std::string>> variables;
};

// ---- delayed SGD on one GPU ----------------------------------------------------------------

// Does a run's pushes again, one by one: update t takes the gradient of its batch at the
// parameters as they were `age` updates ago. It knows no ranks, no messages and no server.
struct Delayed {
  Delayed(const ch03::Settings& settings, const Dataset& data)
      : settings(settings), data(data), shape(network(settings, data.features)),
        plan(updates(settings, data.size())) {}

  Result train(const std::vector<Push>& pushes) {
    pixels.upload(data.pixels, stream);
    labels.upload(data.labels, stream);
    order.upload(order_on_host, stream);
    std::vector<std::vector<real>> after(1);  // the parameters after each number of updates
    initial_parameters(shape, settings.seed, after[0]);
    velocity.zero(stream);
    Result result;
    for (size_t t = 0; t < pushes.size(); ++t) {
      const auto& [rank, batch, age] = pushes[t];
      result.losses.push_back(gradient_of(plan.at(batch), after.at(t - age)));
      weights.upload(after[t], stream);
      const double divisor = settings.staleness_aware && age > 1 ? double(age) : 1;
      update_sgd(weights.data(), velocity.data(), gradient.data(), shape.parameters(),
                 plan.at(t).rate / divisor, settings.momentum, stream);
      after.emplace_back(shape.parameters());
      weights.download(after.back().data(), shape.parameters(), stream);
      stream.synchronize();
    }
    result.weights = after.back();
    return result;
  }

 private:
  double gradient_of(const Update& u, const std::vector<real>& at) {
    const int L = shape.layers(), rows = u.samples;
    weights.upload(at, stream);
    load_pixels(a[0].data(), pixels, order + u.first, rows, shape.width[0], stream);
    load_labels(label, labels, order + u.first, rows, stream);
    for (int l = 0; l < L; ++l) {
      forward_matmul(a[l + 1].data(), a[l].data(), weights + shape.weight_at(l), rows,
                     shape.width[l + 1], shape.width[l], blas);
      forward_bias(a[l + 1].data(), weights + shape.bias_at(l), rows, shape.width[l + 1],
                   l < L - 1, stream);
    }
    softmax_loss(row_loss.data(), da[L].data(), a[L].data(), label, rows, shape.width[L],
                 1.0 / rows, stream);
    sum(loss.data(), row_loss.data(), rows, 1.0 / rows, 0, stream);
    for (int l = L - 1; l >= 0; --l) {
      const int d_out = shape.width[l + 1], d_in = shape.width[l];
      if (l < L - 1) backward_relu(da[l + 1].data(), a[l + 1].data(), int64_t{rows} * d_out, stream);
      backward_weight(gradient + shape.weight_at(l), da[l + 1].data(), a[l].data(), rows, d_out,
                      d_in, 0, blas);
      backward_bias(gradient + shape.bias_at(l), da[l + 1].data(), rows, d_out, 0, stream);
      if (l > 0)
        backward_input(da[l].data(), da[l + 1].data(), weights + shape.weight_at(l), rows, d_out,
                       d_in, blas);
    }
    real value = 0;
    loss.download(&value, 1, stream);
    stream.synchronize();
    return value;
  }

  std::vector<Buffer<real>> layers() const {
    std::vector<Buffer<real>> made;
    for (int width : shape.width) made.emplace_back(int64_t{settings.batch} * width);
    return made;
  }

  const ch03::Settings& settings;
  const Dataset& data;
  const Shape shape;
  const std::vector<Update> plan;
  const std::vector<int32_t> order_on_host = sample_order(settings, data.size());
  Stream stream;
  Blas blas{stream};
  Buffer<uint8_t> pixels{data.size() * data.features};
  Buffer<int32_t> labels{data.size()}, order{(int64_t)order_on_host.size()};
  Buffer<real> weights{shape.parameters()}, gradient{shape.parameters()},
      velocity{shape.parameters()}, loss{1};
  std::vector<Buffer<real>> a = layers(), da = layers();
  Buffer<int32_t> label{settings.batch};
  Buffer<real> row_loss{settings.batch};
};

// What must hold of the list of pushes in async and ssp, whatever the timing.
void require_sound(const ch03::Settings& settings, const Dataset& data, const Result& result) {
  const auto pushes = pushes_of(result);
  const size_t T = updates(settings, data.size()).size();
  REQUIRE(pushes.size() == T);
  REQUIRE(row(result, "pushes") == std::to_string(T));
  std::vector<int64_t> batches, last(settings.gpus, 0), clock(settings.gpus, 0);
  const int64_t S = std::max<int64_t>(1, settings.staleness < 0 ? 2 : settings.staleness);
  for (size_t t = 0; t < T; ++t) {
    const auto& [rank, batch, age] = pushes[t];
    batches.push_back(batch);
    REQUIRE(rank >= 1);
    REQUIRE(rank < settings.gpus);
    // Async: a worker pulls as soon as its push is applied. Ssp: then or later.
    const int64_t since = static_cast<int64_t>(t) - last[rank];
    REQUIRE(age >= 0);
    REQUIRE((settings.mode == Mode::ssp ? age <= since : age == since));
    last[rank] = static_cast<int64_t>(t) + 1;
    ++clock[rank];
    if (settings.mode == Mode::ssp && static_cast<int>(T) >= settings.gpus - 1)
      REQUIRE(clock[rank] - *std::min_element(clock.begin() + 1, clock.end()) <= S);
  }
  std::sort(batches.begin(), batches.end());
  for (size_t t = 0; t < T; ++t) REQUIRE(batches[t] == static_cast<int64_t>(t));  // each once
}

void require_replay(const ch03::Settings& settings, const Dataset& data, const Result& got) {
  require_sound(settings, data, got);
  const Result want = Delayed(settings, data).train(pushes_of(got));
  require_equal(settings, data, got, want, 0);
}

// A gradient of a batch with so many rows, in picoseconds of `ideal`.
Picoseconds gradient_time(const Shape& shape, int64_t rows) {
  Picoseconds time = 0;
  for (int l = 0; l < shape.layers(); ++l)
    time += 2 * rows * shape.weight_size(l) * (l > 0 ? 3 : 2);
  return time;
}

}  // namespace

// ---- equal to chapter 01 -------------------------------------------------------------------

// The parts' sum adds the same samples' products in another order than one GEMM does: a few eps
// of each sum's magnitude an update, and updates add up; that is chapter.cuh's `rounding`.
TEST_CASE("03: sync equals chapter 01 for 1 to 8 ranks, uneven and idle ones too") {
  const Dataset data = uneven_data(67, 5, 3);  // leaves a short last batch
  for (const int batch : {64, 60, 10, 6, 2})
    for (const double momentum : {0.0, 0.9}) {
      auto settings = settings_of(Mode::sync, 1, {7}, 3, batch, 50);
      settings.momentum = momentum;
      const Result want = yardstick(settings, data);
      for (int workers = 1; workers <= 7; ++workers) {
        settings.gpus = workers + 1;
        settings.slow_worker = workers == 3 ? 2 : 0;
        INFO(workers << " workers, batch " << batch << ", momentum " << momentum);
        const double tolerance = workers == 1 ? 0 : rounding(settings, 50);
        if (sizeof(real) == 8) REQUIRE(tolerance < 1e-12);
        const Result got = run(settings, data);
        require_equal(settings, data, got, want, tolerance);
        const auto pushes = pushes_of(got);
        REQUIRE(pushes.size() == size_t(50 * workers));
        for (size_t i = 0; i < pushes.size(); ++i) {
          REQUIRE(pushes[i].rank == int(i) % workers + 1);
          REQUIRE(pushes[i].batch == int64_t(i) / workers);
          REQUIRE(pushes[i].age == 0);
        }
      }
    }
}

TEST_CASE("03: one worker is chapter 01 bit for bit in every mode") {
  const Dataset data = uneven_data(21, 5, 3);
  auto settings = settings_of(Mode::sync, 1, {7, 6}, 3, 8, 20);
  settings.warmup = 5;
  settings.lr_schedule = LrSchedule::cosine;
  const Result want = yardstick(settings, data);
  for (const Mode mode : {Mode::sync, Mode::ssp, Mode::async})
    for (const int64_t staleness : {-1, 0, 3})
      for (const bool aware : {false, true}) {
        settings.mode = mode;
        settings.staleness = staleness;
        settings.staleness_aware = aware;
        settings.slow_worker = aware ? 1 : 0;
        require_equal(settings, data, run(settings, data), want, 0);
      }
}

// ---- equal to delayed SGD ------------------------------------------------------------------

TEST_CASE("03: async and ssp are delayed SGD by the list of pushes, bit for bit") {
  const Dataset data = uneven_data(67, 5, 3);
  for (const char* hardware : {"ideal", "h100", "slownet"})
    for (const int workers : {2, 3, 4, 7})
      for (const Mode mode : {Mode::ssp, Mode::async}) {
        Virtual machine(hardware);
        auto settings = settings_of(mode, workers, {7, 6}, 3, 8, 60);
        settings.lr = 0.02;
        settings.momentum = workers == 3 ? 0 : 0.5;
        settings.staleness = mode == Mode::ssp ? workers - 2 : -1;  // 0, 1, 2, 5
        settings.slow_worker = workers % 2 ? 1 : 0;
        settings.slowdown = workers;
        settings.staleness_aware = workers == 4;
        settings.warmup = 7;
        INFO(hardware << ", " << workers << " workers, mode " << int(mode));
        require_replay(settings, data, run(settings, data));
      }
}

TEST_CASE("03: a rate divided by the age is another rate") {
  const Dataset data = uneven_data(64, 5, 3);
  auto settings = settings_of(Mode::async, 4, {7}, 3, 8, 40);
  Virtual machine("ideal");
  const Result plain = run(settings, data);
  settings.staleness_aware = true;
  const Result aware = run(settings, data);
  require_replay(settings, data, aware);
  REQUIRE(plain.extra == aware.extra);  // the same pushes
  REQUIRE(plain.weights != aware.weights);
}

TEST_CASE("03: on the virtual GPU the order is the same at every run, whatever the delays",
          "[order]") {
  const Dataset data = uneven_data(67, 5, 3);
  for (const Mode mode : {Mode::sync, Mode::ssp, Mode::async})
    for (const char* hardware : {"ideal", "h100"}) {
      auto settings = settings_of(mode, 3, {7, 6}, 3, 8, 60);
      settings.slow_worker = 2;
      Result want;
      {
        Virtual machine(hardware);
        want = run(settings, data);
      }
      for (const char* jitter : {"1", "2", "3"}) {
        Virtual machine(hardware, {{"VIRTUAL_GPU_JITTER", jitter}});
        const Result got = run(settings, data);
        REQUIRE(same(got, want));
        REQUIRE(got.step_seconds == want.step_seconds);
      }
    }
}

TEST_CASE("03: nothing hangs where the first send or receive of a pair waits for the peer") {
  const Dataset data = uneven_data(21, 5, 3);
  for (const Mode mode : {Mode::sync, Mode::ssp, Mode::async})
    for (const int64_t steps : {0, 1, 2, 12}) {
      auto settings = settings_of(mode, 3, {7}, 3, 8, steps);
      Virtual machine("h100", {{"VIRTUAL_GPU_STRICT", "1"}});
      const Result got = run(settings, data);
      REQUIRE(got.losses.size() == size_t(steps));
      REQUIRE(pushes_of(got).size() == size_t(mode == Mode::sync ? 3 * steps : steps));
    }
}

// ---- ages ----------------------------------------------------------------------------------

TEST_CASE("03: P equal workers settle at age P - 1") {
  const Dataset data = uneven_data(64, 5, 3);
  for (const int workers : {1, 2, 3, 4, 7}) {
    Virtual machine("ideal");
    const auto pushes = pushes_of(run(settings_of(Mode::async, workers, {7}, 3, 8, 80), data));
    for (size_t t = 0; t < pushes.size(); ++t) {
      REQUIRE(pushes[t].age == std::min<int64_t>(t, workers - 1));
      REQUIRE(pushes[t].rank == int(t) % workers + 1);
    }
  }
}

TEST_CASE("03: of 4 workers the one that takes 4 times as long settles at age 12") {
  const Dataset data = uneven_data(64, 5, 3);
  for (const int slow : {1, 2, 4}) {
    Virtual machine("ideal");
    auto settings = settings_of(Mode::async, 4, {7}, 3, 8, 130);
    settings.slow_worker = slow;
    const Result result = run(settings, data);
    std::vector<int64_t> ages;
    for (const Push& push : pushes_of(result)) {
      if (push.rank == slow) ages.push_back(push.age);
      else REQUIRE(push.age <= 3);
    }
    REQUIRE(ages.size() == 10);  // late, not starved: a 13th of the pushes
    for (size_t i = 1; i < ages.size(); ++i) REQUIRE(ages[i] == 12);
    REQUIRE(row(result, "pushes of rank " + std::to_string(slow)).find("9 of age 12") !=
            std::string::npos);
  }
}

TEST_CASE("03: ssp keeps workers within S batches and ages within (S+1)(P-1)") {
  const Dataset data = uneven_data(67, 5, 3);
  for (const char* hardware : {"ideal", "h100"})
    for (const int workers : {2, 4})
      for (const int64_t S : {0, 1, 2, 5})
        for (const int slow : {0, 1, 2}) {
          Virtual machine(hardware);
          auto settings = settings_of(Mode::ssp, workers, {7}, 3, 8, 60);
          settings.staleness = S;
          settings.slow_worker = slow;
          settings.slowdown = 10;
          INFO(workers << " workers, S " << S << ", slow " << slow);
          const Result result = run(settings, data);
          require_sound(settings, data, result);  // with the gap
          int64_t widest = 0;
          std::vector<int64_t> clock(workers + 1, 0);
          for (const Push& push : pushes_of(result)) {
            REQUIRE(push.age <= (S + 1) * (workers - 1));
            ++clock[push.rank];
            widest = std::max(widest, *std::max_element(clock.begin() + 1, clock.end()) -
                                          *std::min_element(clock.begin() + 1, clock.end()));
          }
          if (slow) REQUIRE(widest == std::max<int64_t>(1, S));  // the bound is used in full
        }
}

TEST_CASE("03: ssp with a bound that nobody reaches is async") {
  const Dataset data = uneven_data(67, 5, 3);
  Virtual machine("h100");
  auto settings = settings_of(Mode::async, 3, {7}, 3, 8, 60);
  settings.slow_worker = 3;
  const Result want = run(settings, data);
  settings.mode = Mode::ssp;
  settings.staleness = 60;
  REQUIRE(same(run(settings, data), want));
  settings.staleness = 1;
  REQUIRE(!same(run(settings, data), want));
}

TEST_CASE("03: delayed descent on w*w/2 turns where theory says") {
  const double limits[] = {2.0, 1.0, 0.618, 0.445};
  for (int d = 0; d < 4; ++d) {
    REQUIRE(2 * std::sin(std::acos(-1.0) / (2 * (2 * d + 1))) == Approx(limits[d]).epsilon(1e-3));
    for (const double factor : {0.99, 1.01}) {
      std::vector<double> w(d + 1, 1.0);
      for (int t = 0; t < 5000; ++t) w.push_back(w.back() - factor * limits[d] * w[w.size() - 1 - d]);
      double end = 0;
      for (int i = 1; i <= 20; ++i) end = std::max(end, std::abs(w[w.size() - i]));
      INFO("delay " << d << ", factor " << factor << ", at the end " << end);
      if (factor < 1) REQUIRE(end < 1e-3);
      else REQUIRE(end > 1e3);
    }
  }
}

namespace {

// Pushes what it has pulled: the gradient of w*w/2 for every parameter. The products before it
// only take time.
struct Quadratic : ch03::Trainer {
  using Trainer::Trainer;
  void compute_gradient(int64_t t) override {
    Trainer::compute_gradient(t);
    OK(cudaMemcpyAsync(gradient.data(), parameters.data(), P * sizeof(real),
                       cudaMemcpyDeviceToDevice, compute));
  }
};

// Notes which parameters it computes each batch at.
struct Watched : ch03::Trainer {
  using Trainer::Trainer;
  static inline std::vector<std::map<int64_t, std::vector<real>>> seen;  // by rank, by batch
  void compute_gradient(int64_t t) override {
    std::vector<real>& now = seen[rank.rank][t];
    now.resize(P);
    parameters.download(now.data(), P, compute);
    rank.wait(compute);
    Trainer::compute_gradient(t);
  }
};

// Pushes -1 for every parameter, so that each push can be counted in each of them.
struct Constant : ch03::Trainer {
  using Trainer::Trainer;
  void compute_gradient(int64_t) override {
    minus_one.resize(P + 1, -1);
    gradient.upload(minus_one, compute);
  }
  std::vector<real> minus_one;
};

}  // namespace

TEST_CASE("03: in sync mode all workers compute at the same bits, those of chapter 01's step") {
  const Dataset data = uneven_data(21, 5, 3);
  auto settings = settings_of(Mode::sync, 3, {7}, 3, 8, 12);
  Watched::seen.assign(4, {});
  run_ranks_here(train_as<Watched>, settings, data);
  for (int64_t t = 0; t < 12; ++t) {
    REQUIRE(Watched::seen[1][t] == Watched::seen[2][t]);
    REQUIRE(Watched::seen[1][t] == Watched::seen[3][t]);
    settings.steps = t;
    const Result want = yardstick(settings, data);
    const double off = largest_difference(Watched::seen[1][t].data(), want.weights.data(),
                                          static_cast<int64_t>(want.weights.size()));
    REQUIRE(off <= rounding(settings, t));
    if (t > 0) REQUIRE(Watched::seen[1][t] != Watched::seen[1][t - 1]);
  }
}

TEST_CASE("03: d + 1 workers turn where delay d does") {
  const Dataset data = uneven_data(8, 5, 3);
  const double limits[] = {2.0, 1.0, 0.618, 0.445};
  for (int d = 0; d < 4; ++d)
    for (const double factor : {0.9, 1.1}) {
      Virtual machine("ideal");
      auto settings = settings_of(Mode::async, d + 1, {7}, 3, 8, 300);
      settings.momentum = 0;
      settings.lr = factor * limits[d];
      const Result result = run_ranks_here(train_as<Quadratic>, settings, data);
      std::vector<real> start;
      initial_parameters(network(settings, 5), settings.seed, start);
      double before = 0, after = 0;
      for (const real w : start) before = std::max(before, std::abs(double(w)));
      for (const real w : result.weights) after = std::max(after, std::abs(double(w)));
      INFO("delay " << d << ", factor " << factor << ": " << before << " -> " << after);
      if (factor < 1) REQUIRE(after < 0.1 * before);
      else REQUIRE(after > 10 * before);
    }
}

TEST_CASE("03: 8 workers' 8000 pushes are each applied once, to every parameter", "[order]") {
  const Dataset data = uneven_data(8, 99, 100);  // 99 * 100 + 100 parameters
  for (const Mode mode : {Mode::async, Mode::ssp}) {
    Virtual machine("h100", {{"VIRTUAL_GPU_COUNT", "9"}, {"VIRTUAL_GPU_JITTER", "5"}});
    auto settings = settings_of(mode, 8, {}, 100, 8, mode == Mode::async ? 8000 : 800);
    settings.momentum = 0;
    settings.lr = 1;
    const Result result = run_ranks_here(train_as<Constant>, settings, data);
    REQUIRE(pushes_of(result).size() == size_t(settings.steps));
    std::vector<real> want;
    initial_parameters(network(settings, 99), settings.seed, want);
    REQUIRE(want.size() == 10000);
    for (int64_t t = 0; t < settings.steps; ++t)
      for (real& w : want) w += 1;
    REQUIRE(want.back() == real(settings.steps));  // biases start at 0
    REQUIRE(result.weights == want);
  }
}

// ---- the end -------------------------------------------------------------------------------

TEST_CASE("03: workers that are slow, or find nothing left, hold up nobody's end") {
  struct Case {
    int samples, batch, workers, slowdown;
    int64_t epochs;
  };
  for (const Mode mode : {Mode::ssp, Mode::async})
    for (const auto& [samples, batch, workers, slowdown, epochs] :
         {Case{10, 1, 3, 100, 1}, {10, 5, 3, 4, 1}, {3, 3, 7, 4, 1}, {10, 4, 3, 100, 2},
          {12, 6, 4, 4, 3}, {1, 1, 2, 4, 3}}) {
      const Dataset data = uneven_data(samples, 5, 3);
      auto settings = settings_of(mode, workers, {7}, 3, batch, -1);
      settings.epochs = epochs;
      settings.slow_worker = 1;
      settings.slowdown = slowdown;
      INFO(samples << " samples, batch " << batch << ", " << workers << " workers");
      const Result result = run(settings, data);
      const int64_t T = (samples + batch - 1) / batch * epochs;
      REQUIRE(int64_t(pushes_of(result).size()) == T);
      require_sound(settings, data, result);
      const Result want = Delayed(settings, data).train(pushes_of(result));
      REQUIRE(result.weights == want.weights);
      REQUIRE(result.losses == want.losses);
      for (int r = static_cast<int>(T) + 1; r <= workers; ++r)
        REQUIRE(row(result, "pushes of rank " + std::to_string(r)) == "none");
    }
}

// ---- the clock -----------------------------------------------------------------------------

TEST_CASE("03: on ideal hardware a slow worker costs async its own share, sync everything") {
  const Dataset data = uneven_data(64, 40, 10);
  const Shape shape{{40, 64, 48, 10}};
  Virtual machine("ideal");
  auto settings = settings_of(Mode::async, 4, {64, 48}, 10, 64, 130);
  settings.slow_worker = 3;
  const Picoseconds C = gradient_time(shape, 64);
  // In 4 C three workers push 4 times and one once: 13 updates.
  REQUIRE(run(settings, data).step_seconds == Approx(4 * C * 1e-12 / 13).epsilon(1e-6));
  // A quarter of the batch, 4 times.
  settings.mode = Mode::sync;
  REQUIRE(run(settings, data).step_seconds == Approx(C * 1e-12).epsilon(1e-6));
  // S = 1: all wait for the slow one's batch, then have their own: 4 updates in 4 C.
  settings.mode = Mode::ssp;
  settings.staleness = 1;
  settings.steps = 128;
  REQUIRE(run(settings, data).step_seconds == Approx(C * 1e-12).epsilon(1e-6));
  settings.slow_worker = 0;
  for (const Mode mode : {Mode::async, Mode::sync}) {  // with equal workers both are as fast
    settings.mode = mode;
    settings.staleness = -1;
    REQUIRE(run(settings, data).step_seconds == Approx(C * 1e-12 / 4).epsilon(1e-6));
  }
}

TEST_CASE("03: a round is gradient, push and pull, by the formula") {
  const Dataset data = uneven_data(64, 40, 10);
  const Shape shape{{40, 64, 48, 10}};
  const double s = sizeof(real), P = double(shape.parameters()), bandwidth = 200e9;
  const auto link = [&](double bytes) { return 50000 + std::llround(bytes / bandwidth * 1e12); };
  const Picoseconds push = link((P + 1) * s), pull = link(P * s + 4);
  for (const int workers : {1, 2, 4, 7})
    for (const Mode mode : {Mode::sync, Mode::async}) {
      Virtual machine("ideal,link_latency=50e-9,link_bandwidth=200e9");
      auto settings = settings_of(mode, workers, {64, 48}, 10, 64, 6 * workers);
      const bool sync = mode == Mode::sync;
      const Result result = run(settings, data);
      INFO(workers << " workers, sync " << sync);
      // Workers are as long as their largest share; in async each round gives an update each.
      const Picoseconds C = gradient_time(shape, sync ? (64 + workers - 1) / workers : 64);
      const double step = double(C + push + pull) / (sync ? 1 : workers);
      REQUIRE(result.step_seconds == Approx(step * 1e-12).epsilon(1e-6));
      REQUIRE(row(result, "updates a second") ==
              std::to_string(std::llround(1 / result.step_seconds)));
    }
}

TEST_CASE("03: on an H100 each transfer takes latency and bytes, and snapshots follow updates") {
  const Dataset data = uneven_data(64, 64, 10);
  Virtual machine("h100");
  virtual_gpu::record_timeline(true);
  auto settings = settings_of(Mode::async, 3, {128, 96}, 10, 64, 12);
  settings.slow_worker = 2;
  run(settings, data);
  const double s = sizeof(real), P = double(network(settings, 64).parameters());
  const auto link = [&](double bytes) { return 600000 + std::llround(bytes / 450e9 * 1e12); };
  size_t pushed = 0, pulled = 0;
  Picoseconds update_end = 0;
  std::vector<Operation> server;
  for (const Operation& o : virtual_gpu::timeline()) {
    const std::string call = o.call, range = o.range;
    if (call == "ncclSend" && range == "push") {
      ++pushed;
      REQUIRE(o.end - o.start == link((P + 1) * s));
    }
    if (call == "ncclRecv" && range == "pull") {
      ++pulled;
      REQUIRE(o.end - o.start == link(P * s + 4));
    }
    if (o.device == 0) server.push_back(o);
  }
  REQUIRE(pushed == 12 + 3);         // the warm-up's too
  REQUIRE(pulled == 2 * (15 + 3));   // two messages each; the last 3 say that there is no more
  // On the server's compute stream each snapshot lies between two updates.
  for (const Operation& o : server) {
    if (o.stream != 0) continue;
    REQUIRE(o.start >= update_end);
    if (std::string(o.range) == "update") update_end = o.end;
  }
}

TEST_CASE("03: the server sends W snapshots more than there are pushes, a worker its gradients") {
  const Dataset data = uneven_data(67, 5, 3);
  for (const Mode mode : {Mode::sync, Mode::ssp, Mode::async}) {
    const int W = 3;
    const int64_t T = 20;
    const auto settings = settings_of(mode, W, {7, 6}, 3, 8, T);
    const double P = double(network(settings, 5).parameters()), s = sizeof(real);
    ncclUniqueId id = {};
    OK(ncclGetUniqueId(&id));
    std::vector<Result> results(W + 1);
    REQUIRE(run_threads(0, W + 1, {0, 1, 2, 3}, id, [&](Rank& rank) {
              rank.quiet = true;
              results[rank.rank] = ch03::train(settings, data, rank);
            }) == 0);
    std::vector<int64_t> count(W + 1, 0);
    for (const Push& push : pushes_of(results[0])) ++count[push.rank];
    REQUIRE(results[0].bytes_sent_per_step ==
            Approx((count[1] + count[2] + count[3] + W) * (P * s + 4) / T).epsilon(1e-12));
    for (int r = 1; r <= W; ++r)
      REQUIRE(results[r].bytes_sent_per_step == Approx(count[r] * (P + 1) * s / T).epsilon(1e-12));
    // The server: parameters, momentum, an inbox a worker, losses, numbers.
    REQUIRE(results[0].peak_memory ==
            int64_t((2 * P + W * (P + 1) + T) * s) + (T + 1) * 4);
  }
}

// ---- lifetimes, failure, wrong input -------------------------------------------------------

TEST_CASE("03: progress lines change no loss of sync mode") {
  const Dataset data = uneven_data(21, 5, 3);
  auto settings = settings_of(Mode::sync, 2, {7}, 3, 8, 25);
  const Result quiet = run_ranks_here(train_as<ch03::Trainer>, settings, data);
  settings.quiet = false;
  const Result told = run_ranks_here(train_as<ch03::Trainer>, settings, data);
  REQUIRE(told.weights == quiet.weights);
  REQUIRE(told.losses == quiet.losses);
}

TEST_CASE("03: every resource is given back, each on its own GPU, and a second run is the first") {
  virtual_gpu::reset();
  const Dataset data = uneven_data(21, 5, 3);
  for (const Mode mode : {Mode::sync, Mode::ssp, Mode::async}) {
    const auto settings = settings_of(mode, 3, {7}, 3, 8, 12);
    REQUIRE(same(run(settings, data), run(settings, data)));
  }
  for (int device = 0; device < 8; ++device) {
    const virtual_gpu::Counters c = virtual_gpu::counters(device);
    REQUIRE((c.launches > 0) == (device < 4));
    REQUIRE(c.allocations == c.frees);
    REQUIRE(c.memory_used == 0);
    REQUIRE(c.streams_created == c.streams_destroyed);
    REQUIRE(c.events_created == c.events_destroyed);
    REQUIRE(c.handles_created == c.handles_destroyed);
    REQUIRE(c.communicators_created == c.communicators_destroyed);
    REQUIRE(c.communicators_created == (device == 0 ? 6 * 4 : device < 4 ? 6 * 2 : 0));
    REQUIRE(c.collectives == 0);  // send and receive only
  }
}

TEST_CASE("03: whichever call fails on the server or a worker, the run ends") {
  if (sizeof(real) == 8) return;  // the same calls as in float
  const Dataset data = uneven_data(10, 5, 3);
  const auto settings = settings_of(Mode::async, 3, {7}, 3, 6, 3);
  const Result want = run(settings, data);
  int failed = 0;
  for (const char* who : {":0", ":2"})
    for (int n = 4; n < 330; n += 13) {
      Virtual machine("h100", {{"VIRTUAL_GPU_FAIL", std::to_string(n) + who}});
      try {
        const Result got = run(settings, data);
        REQUIRE(same(got, want));  // fewer calls than n
      } catch (const Error&) {
        ++failed;
      }
    }
  REQUIRE(failed > 20);
  REQUIRE(same(run(settings, data), want));
}

TEST_CASE("03: a server or a worker that fails in a step ends the program with its cause",
          "[program]") {
  for (const char* mode : {"sync", "ssp", "async"})
    for (const char* who : {"0", "2"}) {
      const auto start = std::chrono::steady_clock::now();
      const Outcome out = run_command(std::string("VIRTUAL_GPU_FAIL=700:") + who + " " +
                                      program(name) + " --steps 200 --quiet --mode " + mode);
      INFO(mode << " " << who << ": " << out.err);
      REQUIRE(out.status == 1);
      REQUIRE(out.err.find(std::string("rank ") + who + ": ") == 0);
      REQUIRE(std::chrono::steady_clock::now() - start < std::chrono::seconds(15));
    }
}

TEST_CASE("03: wrong options are refused with what would be right", "[program]") {
  struct Case {
    const char *given, *said;
  };
  for (const auto& [given, said] :
       {Case{"--gpus 1", "--gpus 1: a server needs a worker, 2 or more would be right"},
        {"--gpus 9", "9 ranks need 9 GPUs, 8 visible"},
        {"--staleness 2", "--staleness 2: only --mode ssp has a bound"},
        {"--staleness 2 --mode async", "--staleness 2: only --mode ssp has a bound"},
        {"--staleness -1 --mode ssp", "--staleness: \"-1\" given"},
        {"--slow-worker 0", "--slow-worker: \"0\" given"},
        {"--slow-worker 4", "--slow-worker 4: the workers are ranks 1 to 3"},
        {"--slowdown 2", "--slowdown 2: needs --slow-worker R"},
        {"--slow-worker 1 --slowdown 0", "--slowdown: \"0\" given"},
        {"--staleness-aware", "--staleness-aware: every age is 0 in --mode sync"},
        {"--mode asink", "--mode: \"asink\" given, sync|ssp|async would be right"},
        {"--mode async --check", "--check: chapter 01 uses no old gradients"}}) {
    const Outcome out = run_chapter(name, std::string("--quiet ") + given);
    INFO(given << ": " << out.err);
    REQUIRE(out.status == 2);
    REQUIRE(out.err.find(said) != std::string::npos);
    REQUIRE(std::count(out.err.begin(), out.err.end(), '\n') == 1);
  }
  const Outcome help = run_chapter(name, "--help");
  REQUIRE(help.status == 0);
  for (const char* option : {"--mode", "--staleness", "--slow-worker", "--slowdown",
                             "--staleness-aware"})
    REQUIRE(help.out.find(option) != std::string::npos);
}

TEST_CASE("03: the program compares itself with chapter 01, learns and reports", "[program]") {
  for (const char* given : {"--batch 50 --epochs 12 --check",
                            "--gpus 2 --mode async --steps 30 --check",
                            "--mode ssp --staleness 1 --slow-worker 1 --epochs 15"}) {
    const TemporaryFolder folder;
    const Outcome out = run_chapter(name, std::string(given) + " --report " + folder.path("r.json"));
    INFO(given << "\n" << out.out << out.err);
    REQUIRE(out.status == 0);
    const bool checks = std::string(given).find("--check") != std::string::npos;
    REQUIRE((out.out.find(": pass") != std::string::npos) == checks);
    const size_t at = out.out.find("test accuracy");
    REQUIRE(at != std::string::npos);
    if (std::string(given).find("--epochs") != std::string::npos)
      REQUIRE(std::stod(out.out.substr(at + 13)) > 95);
    const std::string report = contents(folder.path("r.json"));
    for (const char* entry : {"\"pushes\": ", "\"updates a second\": ", "\"pushes of rank 1\": ",
                              "\"push order (rank:batch:age)\": \""})
      REQUIRE(report.find(entry) != std::string::npos);
  }
}
