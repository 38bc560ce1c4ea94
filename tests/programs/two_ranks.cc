// Two ranks that use what a chapter uses; the result is known. For VIRTUAL_GPU_FAIL.
#include <numeric>

#include "../../common/ranks.cuh"

namespace {

constexpr int n = 5;

__global__ void twice_kernel(float* x, int count) {
  for (int i = 0; i < count; ++i) x[i] *= 2;
}

// 2 * (1 + 2) on both, then rank 0's to rank 1 and back, then the pair's maximum.
double run(Rank& rank) {
  // Above the streams, so that also after an exception all copies are done before these go.
  const std::vector<float> start(n, static_cast<float>(rank.rank + 1));
  std::vector<float> result(n);
  Stream stream, second;
  Event done;
  Buffer<float> x(n), y(n);
  x.upload(start, stream);
  y.zero(second);
  launch(stream, n, twice_kernel, x.data(), n);
  rank.world.all_reduce(x.data(), n, stream);
  done.record(stream);
  second.wait(done);
  {
    Group group;
    rank.world.send(x.data(), n, 1 - rank.rank, second);
    rank.world.recv(y.data(), n, 1 - rank.rank, second);
  }
  Comm pair = rank.world.split(0, -rank.rank);
  pair.broadcast(y.data(), n, 0, second);
  pair.all_reduce(y.data(), n, second, ncclMax);
  y.download(result.data(), n, second);
  rank.wait(second);
  return std::accumulate(result.begin(), result.end(), 0.0);
}

}  // namespace

int main(int, char** argv) {
  try {
    double results[2] = {};
    const int status =
        run_ranks({}, 2, false, argv, [&](Rank& rank) { results[rank.rank] = run(rank); });
    if (status) return status;
    std::printf("%g %g\n", results[0], results[1]);
    return teardown_failed() ? 1 : 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
