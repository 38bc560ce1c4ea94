// For the tests of chapters whose ranks hold different layers: every rank's result, hardware for
// the length of a test, and questions to its timeline.
#pragma once

#include <chrono>

#include "harness.h"
#include "program.h"
#include "virtual_gpu.h"

using virtual_gpu::Kind;
using virtual_gpu::Operation;
using virtual_gpu::Picoseconds;

template <class Settings>
std::vector<Result> all_results(Result (*train)(const Settings&, const Dataset&, Rank&),
                                const Settings& settings, const Dataset& data) {
  ncclUniqueId id = {};
  OK(ncclGetUniqueId(&id));
  std::vector<int> devices(settings.gpus);
  std::iota(devices.begin(), devices.end(), 0);
  std::vector<Result> results(settings.gpus);
  const int status = run_threads(0, settings.gpus, devices, id, [&](Rank& rank) {
    rank.quiet = true;
    results[rank.rank] = train(settings, data, rank);
  });
  if (status) throw Error("a rank failed with status " + std::to_string(status));
  return results;
}

inline bool same(const Result& a, const Result& b) {
  return a.weights == b.weights && a.losses == b.losses && !a.losses.empty();
}

// A variable that the virtual GPU reads, for as long as this lives.
struct Variable {
  std::string name;
  Variable(const std::string& name, const std::string& value) : name(name) {
    setenv(name.c_str(), value.c_str(), 1);
    virtual_gpu::reset();
  }
  Variable(const Variable&) = delete;
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

// A device's operations of one kind, in the order of their start.
inline std::vector<Operation> operations(int device, Kind kind) {
  std::vector<Operation> found;
  for (const Operation& o : virtual_gpu::timeline())
    if (o.device == device && o.kind == kind) found.push_back(o);
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.start < b.start; });
  return found;
}

inline Picoseconds total(const std::vector<Operation>& operations) {
  Picoseconds sum = 0;
  for (const Operation& o : operations) sum += o.end - o.start;
  return sum;
}

// Every device that ran is back to nothing, and only `ranks` devices did.
inline void require_all_given_back(int ranks) {
  for (int device = 0; device < 8; ++device) {
    const virtual_gpu::Counters c = virtual_gpu::counters(device);
    INFO("device " << device);
    REQUIRE((c.launches > 0) == (device < ranks));
    REQUIRE(c.allocations == c.frees);
    REQUIRE(c.memory_used == 0);
    REQUIRE(c.streams_created == c.streams_destroyed);
    REQUIRE(c.events_created == c.events_destroyed);
    REQUIRE(c.handles_created == c.handles_destroyed);
    REQUIRE(c.communicators_created == c.communicators_destroyed);
  }
}

// For every n-th call of `device` that fails, the run either fails too or needs fewer calls and
// is right; there are runs of both kinds.
template <class Settings>
void require_no_wrong_result(Result (*train)(const Settings&, const Dataset&, Rank&),
                             const Settings& settings, const Dataset& data, int device, int most,
                             int stride) {
  const Result want = run_ranks_here(train, settings, data);
  int failed = 0, finished = 0;
  for (int n = 3; n < most; n += stride) {  // after 1 and 2 there is no peer yet to be told
    const Variable fail("VIRTUAL_GPU_FAIL", std::to_string(n) + ":" + std::to_string(device));
    Result got;
    try {
      got = run_ranks_here(train, settings, data);
    } catch (const Error&) {
      ++failed;
      continue;
    }
    REQUIRE(same(got, want));
    ++finished;
  }
  REQUIRE(failed > 10);
  REQUIRE(finished > 0);
  REQUIRE(same(run_ranks_here(train, settings, data), want));
}

// The program ends soon, with that status, one line on stderr, and these words in it.
inline void require_refused(const std::string& chapter, const std::string& options,
                            const std::vector<std::string>& words) {
  const Outcome out = run_chapter(chapter, "--quiet " + options);
  INFO(options << ": " << out.err);
  REQUIRE(out.status == 2);
  REQUIRE(std::count(out.err.begin(), out.err.end(), '\n') == 1);
  for (const std::string& word : words) REQUIRE(out.err.find(word) != std::string::npos);
}
