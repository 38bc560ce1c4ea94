// For tests of chapters: small hard data, a run on p ranks in this process, and a comparison by
// tensor that first makes sure there is something to compare.
#pragma once

#include <tuple>

#include "../common/chapter.cuh"
#include "virtual_gpu.h"

#undef CHECK  // the course's is used up by its own headers; from here on it is Catch2's
#include "catch.h"

#define OK(call) check((call), __FILE__, __LINE__, #call)  // a CUDA, cuBLAS or NCCL status

// Strongly uneven inputs, every class present; the sizes are the caller's, odd ones find more.
inline Dataset uneven_data(int64_t samples, int features, int classes, uint64_t seed = 7) {
  Dataset data;
  data.features = features;
  for (int64_t i = 0; i < samples; ++i) {
    data.labels.push_back(static_cast<int32_t>(hash(seed, 1, i) % classes));
    for (int j = 0; j < features; ++j) {
      const uint64_t h = hash(seed, 2 + i, j);
      data.pixels.push_back(static_cast<uint8_t>(h % 4 ? h % 29 : h % 256));
    }
  }
  return data;
}

template <class Settings>
Settings small_settings(std::vector<int> hidden, int classes, int batch, int64_t steps) {
  Settings settings;
  settings.hidden = std::move(hidden);
  settings.classes = classes;
  settings.batch = batch;
  settings.steps = steps;
  settings.quiet = true;
  return settings;
}

// Trains on settings.gpus ranks as threads; rank 0's result. Throws if any rank fails (its cause
// is on stderr).
template <class Settings>
Result run_ranks_here(Result (*train)(const Settings&, const Dataset&, Rank&),
                      const Settings& settings, const Dataset& data) {
  ncclUniqueId id = {};
  OK(ncclGetUniqueId(&id));
  std::vector<int> devices(settings.gpus);
  std::iota(devices.begin(), devices.end(), 0);
  Result result;
  const int status = run_threads(0, settings.gpus, devices, id, [&](Rank& rank) {
    rank.quiet = true;
    Result own = train(settings, data, rank);
    if (rank.rank == 0) result = std::move(own);
  });
  if (status) throw Error("a rank failed with status " + std::to_string(status));
  return result;
}

inline Result yardstick(const Config& config, const Dataset& data) {
  ch01::Settings settings{config};
  settings.gpus = 1;
  return run_ranks_here(ch01::train, settings, data);
}

// Every tensor and the losses: the largest difference over the tensor's largest magnitude is at
// most `tolerance`; 0 means the same bits. The run must have moved weights and loss.
inline void require_equal(const Config& config, const Dataset& data, const Result& got,
                          const Result& want, double tolerance) {
  const Shape shape = network(config, data.features);
  const Comparison c = compare(config, shape, got, want, tolerance);
  INFO("worst tensor " << c.worst << ", difference " << c.difference << ", flaw '" << c.flaw << "'");
  REQUIRE(c.flaw.empty());
  REQUIRE(c.difference <= tolerance);
}

// Every operation since the last reset, by GPU, stream and start: what must be the same at every
// run, with and without arithmetic.
inline auto timetable() {
  using Text = std::string;
  std::vector<std::tuple<int, int, Text, Text, int64_t, int64_t, int64_t, int64_t>> all;
  for (const virtual_gpu::Operation& o : virtual_gpu::timeline())
    all.push_back({o.device, o.stream, o.call, o.range, o.issue, o.start, o.end, o.bytes});
  return all;
}
