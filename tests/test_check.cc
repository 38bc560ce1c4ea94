// The comparison with chapter 01 can fail, and a failed rank ends the run.
#include "harness.h"
#include "program.h"

namespace {

const Shape shape{{3, 2, 4}};

Config config_of_shape() {
  Config config;
  config.hidden = {2};
  config.classes = 4;
  return config;
}

std::string self() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

// Two updates from the initial weights, every number changed.
Result trained() {
  Result result;
  initial_parameters(shape, Config().seed, result.weights);
  for (real& w : result.weights) w += real(0.25);
  result.losses = {2, 1};
  return result;
}

Comparison compared(const Result& got, const Result& want, double tolerance = 1e-3) {
  return compare(config_of_shape(), shape, got, want, tolerance);
}

// Runs one hidden test of this program in a process of its own.
Outcome run_hidden(const std::string& tag, const std::string& before = "") {
  return run_command(before + self() + " '" + tag + "'");
}

int run_four(const Body& body) {
  ncclUniqueId id = {};
  OK(ncclGetUniqueId(&id));
  return run_threads(0, 4, {0, 1, 2, 3}, id, body);
}

// Each rank all-reduces and waits, again and again; `disturb` may end one.
void reduce_for_ever(Rank& rank, const std::function<void(int step)>& disturb) {
  Stream stream;
  Buffer<real> x(1);
  x.zero(stream);
  for (int step = 0;; ++step) {
    disturb(step);
    rank.world.all_reduce(x.data(), 1, stream);
    rank.wait(stream);
  }
}

}  // namespace

TEST_CASE("equal runs pass, and a difference is found in its tensor") {
  const Result want = trained();
  CHECK(compared(want, want, 0).pass());
  Result got = want;
  got.weights[shape.weight_at(1) + 3] += real(0.1);
  const Comparison c = compared(got, want);
  CHECK_FALSE(c.pass());
  CHECK(c.worst == "layers.1.weight");
  CHECK(compared(got, want, 10).pass());
  got = want;
  got.weights[shape.bias_at(0)] = std::nextafter(got.weights[shape.bias_at(0)], real(9));
  CHECK(compared(got, want).pass());
  CHECK_FALSE(compared(got, want, 0).pass());
  CHECK(compared(got, want, 0).worst == "layers.0.bias");
}

TEST_CASE("the difference is relative to the tensor's largest magnitude") {
  Result got = trained(), want = trained();
  for (int i = 0; i < 4; ++i) want.weights[shape.bias_at(1) + i] = got.weights[shape.bias_at(1) + i] = 8;
  got.weights[shape.bias_at(1)] = 9;
  CHECK(compared(got, want).difference == 0.125);
}

TEST_CASE("losses are compared too") {
  Result got = trained();
  got.losses[1] = 1.5;
  CHECK_FALSE(compared(got, trained()).pass());
  CHECK(compared(got, trained()).worst == "losses");
}

TEST_CASE("a number that is not finite never passes, in either run") {
  for (const real bad : {real(NAN), real(INFINITY)})
    for (const bool in_both : {false, true}) {
      Result got = trained(), want = trained();
      got.weights[4] = bad;
      if (in_both) want.weights[4] = bad;
      CHECK_FALSE(compared(got, want, 1e9).pass());
      CHECK_FALSE(compared(want, got, 1e9).pass());
    }
}

TEST_CASE("runs that did not learn are equal, and fail") {
  Result still;
  initial_parameters(shape, Config().seed, still.weights);
  still.losses = {2, 1};
  CHECK(compared(still, still).flaw == "the weights did not change");
  Result constant = trained();
  constant.losses = {2, 2};
  CHECK(compared(constant, constant).flaw == "the loss did not change");
  Result shorter = trained();
  shorter.losses.pop_back();
  CHECK_FALSE(compared(shorter, trained()).pass());
  CHECK_FALSE(compared(Result(), trained()).pass());
}

TEST_CASE("in double, what rounding may do in 50 updates is below 1e-12") {
  const double eps = std::numeric_limits<real>::epsilon();
  CHECK(rounding(Config(), 50) == 50 * 64 * eps);
  if (sizeof(real) == 8) CHECK(rounding(Config(), 50) <= 1e-12);
  CHECK(rounding(Config(), 0) > 0);
}

TEST_CASE("traffic is counted by the textbook's formulas") {
  CHECK(run_four([](Rank& rank) {
          Stream stream;
          Buffer<real> x(8), z(8);
          x.zero(stream);
          const double n = 8 * sizeof(real);
          Comm pair = rank.world.split(rank.rank / 2, -rank.rank);
          const auto sends = [&](double bytes) {
            const double before = std::exchange(rank.world.traffic.bytes, 0);
            if (before != bytes) throw Error("sent " + shortest(before));
          };
          if (pair.size() != 2 || pair.rank() != 1 - rank.rank % 2) throw Error("wrong split");
          rank.world.all_reduce(x.data(), 8, stream), sends(1.5 * n);
          rank.world.broadcast(x.data(), 8, 1, stream), sends(0.75 * n);
          {
            Group group;
            pair.send(x.data(), 8, 1 - pair.rank(), stream);
            pair.recv(z.data(), 8, 1 - pair.rank(), stream);
            pair.send(x.data(), 0, 1 - pair.rank(), stream);
            pair.recv(z.data(), 0, 1 - pair.rank(), stream);
          }
          rank.wait(stream);
          if (pair.traffic.bytes != n || pair.traffic.messages != 2) throw Error("pair's traffic");
          if (rank.world.traffic.collectives != 2) throw Error("collectives");
        }) == 0);
}

TEST_CASE("hidden: rank 2 throws", "[.throws]") {
  std::_Exit(run_four([](Rank& rank) {
    reduce_for_ever(rank, [&](int step) {
      if (rank.rank == 2 && step == 3) throw std::runtime_error("broken on purpose");
    });
  }));
}
TEST_CASE("hidden: wrong input is found inside", "[.badinput]") {
  std::_Exit(run_four([](Rank& rank) {
    reduce_for_ever(rank, [&](int) {
      if (rank.rank == 1) throw BadInput("not like this");
    });
  }));
}
TEST_CASE("hidden: a rank never comes back", "[.stuck]") {
  std::_Exit(run_four([](Rank& rank) {
    if (rank.rank == 0) throw std::runtime_error("broken on purpose");
    for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
  }));
}

TEST_CASE("hidden: ranks that poll look after their peers", "[.polls]") {
  std::_Exit(run_four([](Rank& rank) {
    if (rank.rank == 3) throw std::runtime_error("broken on purpose");
    for (;;) rank.look_after_peers();
  }));
}

TEST_CASE("the first failure ends all ranks in bounded time, and is the one that is told") {
  const struct {
    const char* tag;
    int status;
    const char* line;
    double seconds;
  } cases[] = {{"[.throws]", 1, "rank 2: broken on purpose\n", 8},
               {"[.badinput]", 2, "rank 1: not like this\n", 8},
               {"[.polls]", 1, "rank 3: broken on purpose\n", 4},
               {"[.stuck]", 1, "rank 0: broken on purpose\n", 8}};
  for (const auto& c : cases) {
    const auto begin = Clock::now();
    const Outcome o = run_hidden(c.tag);
    INFO(c.tag << "\n" << o.err);
    CHECK(o.status == c.status);
    CHECK(o.err.find(c.line) == 0);
    CHECK(o.err.find("rank", 5) == std::string::npos);  // once
    CHECK(-seconds_until(begin) < c.seconds);
  }
}

// Processes started by start_processes(): each says who it is; rank 1 fails where it is told to.
TEST_CASE("hidden: start three processes", "[.start]") {
  std::string name = self(), tag = "[.started]";
  char* argv[] = {name.data(), tag.data(), nullptr};
  std::_Exit(start_processes(3, argv));
}
TEST_CASE("hidden: one of three processes", "[.started]") {
  die_with_starter();
  const Place place = place_from_environment();
  int64_t from_zero = place.rank == 0 ? 42 : 0;
  exchange(place, &from_zero, sizeof from_zero);
  std::printf("rank %d of %d got %d\n", place.rank, place.size, int(from_zero));
  std::fflush(stdout);
  if (place.rank == 1 && std::getenv("RANK_1_FAILS")) std::_Exit(7);
  if (std::getenv("RANK_1_FAILS") || std::getenv("STAY"))
    std::this_thread::sleep_for(std::chrono::seconds(60));
  std::_Exit(0);
}

TEST_CASE("started as processes, every rank knows its place; the first failure ends the rest") {
  const Outcome o = run_hidden("[.start]");
  CHECK(o.status == 0);
  for (const char* line : {"rank 0 of 3 got 42\n", "rank 1 of 3 got 42\n", "rank 2 of 3 got 42\n"})
    CHECK(o.out.find(line) != std::string::npos);
  const auto begin = Clock::now();
  CHECK(run_hidden("[.start]", "RANK_1_FAILS=1 ").status == 7);
  CHECK(-seconds_until(begin) < 10);
}

TEST_CASE("a starter that is killed takes its ranks along", "[program]") {
  const auto begin = Clock::now();
  // Its output is a pipe, which stays open for as long as any of the ranks lives.
  const Outcome o =
      run_command("(STAY=1 timeout --foreground -s KILL 2 " + self() + " '[.start]'; true) | cat");
  CHECK(o.out.find("rank 2 of 3 got 42") != std::string::npos);
  CHECK(-seconds_until(begin) < 10);
}
