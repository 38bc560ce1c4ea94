#include "../common/chapter.cuh"
#include "train.cuh"

// Rounding to a format of unit roundoff u changes each gradient by about u, in random directions.
// But a ReLU whose input is nearer to 0 than that is on in one run and off in the other, which
// adds or leaves out a whole sample: of n such inputs n u are that near, and they add up to a
// change that goes with the root of u. Without hidden layers the bound is the sharp one.
static double tolerance(const ch08::Settings& settings, int64_t updates) {
  const double u = settings.precision == Precision::fp16 ? 0x1p-11 : 0x1p-8;
  if (settings.precision == Precision::fp32) return rounding(settings, updates);
  return settings.hidden.empty() ? 4 * u : 12 * std::sqrt(u);
}

int main(int argc, char** argv) {
  return chapter_main<ch08::Settings>(
      argc, argv,
      {.name = "08_accum_amp",
       .title = "gradient accumulation and 16-bit formats",
       .train = ch08::train,
       .tolerance = tolerance,
       .options = [](auto& settings, Options& options) { mixed_options(settings, options); },
       .refuse = [](const auto& settings, const auto& shape) { refuse_mixed(settings, shape); }});
}
