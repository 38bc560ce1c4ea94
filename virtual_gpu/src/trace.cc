// The timeline: what every stream did and when, on the modelled clock.
#include <algorithm>
#include <atomic>
#include <tuple>

#include "runtime.h"

namespace virtual_gpu {
namespace {

std::atomic<bool> record{false};

std::vector<Operation>& finished() {  // under Lock; lives for ever, as the runtime does
  static auto* all = new std::vector<Operation>;
  return *all;
}

}  // namespace

bool recording() { return record.load(std::memory_order_relaxed); }
void record_timeline(bool on) { record.store(on, std::memory_order_relaxed); }

void keep_operations(std::vector<Operation>&& more) {
  finished().insert(finished().end(), more.begin(), more.end());
}

void forget_operations() { finished().clear(); }

std::vector<Operation> timeline() {
  std::vector<Operation> all;
  {
    Lock lock;
    all = finished();
  }
  std::stable_sort(all.begin(), all.end(), [](const Operation& a, const Operation& b) {
    return std::tie(a.device, a.stream, a.start) < std::tie(b.device, b.stream, b.start);
  });
  return all;
}

void open_timeline_files() {}

}  // namespace virtual_gpu
