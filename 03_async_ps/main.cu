#include "../common/chapter.cuh"
#include "train.cuh"

namespace {

using ch03::Mode;
using ch03::Settings;

void refuse(const Settings& s, const Shape&) {
  const auto given = [](const char* option, int64_t n) {
    return option + std::to_string(n) + ": ";
  };
  if (s.gpus < 2)
    throw BadInput(given("--gpus ", s.gpus) + "a server needs a worker, 2 or more would be right");
  if (s.staleness >= 0 && s.mode != Mode::ssp)
    throw BadInput(given("--staleness ", s.staleness) + "only --mode ssp has a bound");
  if (s.slow_worker >= s.gpus)
    throw BadInput(given("--slow-worker ", s.slow_worker) + "the workers are ranks 1 to " +
                   std::to_string(s.gpus - 1));
  if (s.slowdown > 0 && s.slow_worker == 0)
    throw BadInput(given("--slowdown ", s.slowdown) + "needs --slow-worker R");
  if (s.staleness_aware && s.mode == Mode::sync)
    throw BadInput("--staleness-aware: every age is 0 in --mode sync, ssp or async would be right");
  if (s.check && s.mode != Mode::sync && s.gpus > 2)
    throw BadInput("--check: chapter 01 uses no old gradients; --mode sync or --gpus 2 would " +
                   std::string("be right"));
}

// With one worker every age is 0, and each product and sum is chapter 01's.
double tolerance(const Settings& s, int64_t updates) {
  return s.gpus == 2 ? 0 : rounding(s, updates);
}

void options(Settings& s, Options& o) {
  o.choice("mode", {"sync", "ssp", "async"},
           "wait for all workers, for those far behind, or for none", s.mode);
  o.integer("staleness", "S", "ssp: at most so many batches ahead of the slowest (2 if not given)",
            s.staleness, int64_t{0}, int64_t{1} << 31);
  o.integer("slow-worker", "R", "this rank computes each gradient several times", s.slow_worker, 1,
            1 << 20);
  o.integer("slowdown", "K", "so many times (4 if not given)", s.slowdown, 1, 1 << 20);
  o.flag("staleness-aware", "divide the rate of a push by its age", s.staleness_aware);
}

}  // namespace

int main(int argc, char** argv) {
  return chapter_main<Settings>(argc, argv,
                                {.name = "03_async_ps",
                                 .title = "a parameter server: sync, bounded staleness, async",
                                 .train = ch03::train,
                                 .tolerance = tolerance,
                                 .options = options,
                                 .refuse = refuse});
}
