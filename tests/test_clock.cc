// The modelled clock: every row of the hardware model's table to the last picosecond, who waits
// for whom, and that thread timing changes nothing.
#include <cublas_v2.h>

#include <cmath>
#include <tuple>

#include "virtual.h"

namespace {

using virtual_gpu::host_time;
using virtual_gpu::Picoseconds;

// The host's time once `issue` is done, on one GPU.
Picoseconds time_of_one(const std::string& hardware,
                        const std::function<void(cudaStream_t)>& issue) {
  Fresh fresh{{"VIRTUAL_GPU", hardware}};
  TestStream stream;
  issue(stream);
  MUST(cudaStreamSynchronize(stream));
  return host_time();
}

// The same on p ranks, each rank's.
std::vector<Picoseconds> times(const std::string& hardware, int p,
                               const std::function<void(TestRank&)>& issue) {
  Fresh fresh{{"VIRTUAL_GPU", hardware}};
  std::vector<Picoseconds> ends(p);
  on_ranks(p, [&](TestRank& r) {
    issue(r);
    MUST(cudaDeviceSynchronize());
    ends[r.rank] = host_time();
  });
  return ends;
}

Picoseconds ps(double seconds) { return std::llround(seconds * 1e12); }

// The table, from its text alone: a latency's share and the bytes' share, each to the picosecond.
struct Link {
  double latency, bandwidth;
  Picoseconds all_reduce(int p, double bytes) const {
    return ps(2 * (p - 1) * latency) + ps(2.0 * (double(p - 1) / p) * bytes / bandwidth);
  }
  Picoseconds scatter_or_gather(int p, double whole) const {
    return ps((p - 1) * latency) + ps(double(p - 1) / p * whole / bandwidth);
  }
  Picoseconds rooted(int p, double bytes) const {
    return ps((p - 1) * latency) + ps(bytes / bandwidth);
  }
  Picoseconds message(double bytes) const { return ps(latency) + ps(bytes / bandwidth); }
};

struct Machine {
  const char* hardware;
  double launch, memory, host;
  Link link, net;
};
// Round figures; and h100's, again by hand: NVLink 450 GB/s one way, 50 GB/s of InfiniBand.
const Machine machines[] = {
    {"ideal,launch=5e-9,memory_bandwidth=4e12,host_bandwidth=1e12,link_bandwidth=2e12,"
     "link_latency=7e-9,net_bandwidth=1e12,net_latency=11e-9",
     5e-9,
     4e12,
     1e12,
     {7e-9, 2e12},
     {11e-9, 1e12}},
    {"h100", 3e-6, 3350e9, 63e9, {0.6e-6, 450e9}, {2.7e-6, 50e9}}};

void all_reduce(TestRank& r, size_t n) {
  float* x = r.filled<float>(n);
  MUST(ncclAllReduce(x, x, n, ncclFloat, ncclSum, r.comm, r.stream));
}

void require_all(const std::vector<Picoseconds>& got, Picoseconds wanted) {
  for (const Picoseconds t : got) REQUIRE(t == wanted);
}

}  // namespace

// ---- the table -----------------------------------------------------------------------------

TEST_CASE("clock: a kernel is launch + 3 * threads * element size / memory bandwidth") {
  for (const Machine& m : machines) {
    for (const unsigned n : {1u, 1000u, 100'000'000u}) {
      REQUIRE(time_of_one(m.hardware, [&](cudaStream_t s) {
                busy(s, device_array<float>(1), n);
              }) == ps(m.launch) + ps(3.0 * n * 4 / m.memory));
      REQUIRE(
          time_of_one(m.hardware, [&](cudaStream_t s) {
            MUST(launch_threads(
                s, n, +[](double*, float*) {}, device_array<double>(1), device_array<float>(1)));
          }) == ps(m.launch) + ps(3.0 * n * 8 / m.memory));
    }
  }
}

TEST_CASE("clock: copies are launch + bytes / the path's bandwidth") {
  static char host[100001];
  for (const Machine& m : machines)
    for (const size_t n : {size_t{1}, sizeof host}) {
      const auto copy = [&](cudaMemcpyKind kind) {
        return time_of_one(m.hardware, [&](cudaStream_t s) {
          char *a = device_array<char>(n), *b = device_array<char>(n);
          MUST(cudaMemcpyAsync(kind == cudaMemcpyDeviceToHost ? host : a,
                               kind == cudaMemcpyHostToDevice ? host : b, n, kind, s));
        });
      };
      const auto bytes = static_cast<double>(n);
      REQUIRE(copy(cudaMemcpyHostToDevice) == ps(m.launch) + ps(bytes / m.host));
      REQUIRE(copy(cudaMemcpyDeviceToHost) == ps(m.launch) + ps(bytes / m.host));
      REQUIRE(copy(cudaMemcpyDeviceToDevice) == ps(m.launch) + ps(bytes / m.memory));
      REQUIRE(time_of_one(m.hardware, [&](cudaStream_t s) {
                MUST(cudaMemsetAsync(device_array<char>(n), 0, n, s));
              }) == ps(m.launch) + ps(bytes / m.memory));
    }
}

TEST_CASE("clock: a GEMM is launch + the longer of arithmetic and memory") {
  const auto gemm = [](const std::string& hardware, int m, int n, int k) {
    return time_of_one(hardware, [=](cudaStream_t s) {
      cublasHandle_t handle = nullptr;
      REQUIRE(cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS);
      REQUIRE(cublasSetStream(handle, s) == CUBLAS_STATUS_SUCCESS);
      const float one = 1, zero = 0;
      float *a = device_array<float>(m * k), *b = device_array<float>(k * n),
            *c = device_array<float>(m * n);
      REQUIRE(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, m, n, k, &one, a, CUDA_R_32F, m, b,
                           CUDA_R_32F, k, &zero, c, CUDA_R_32F, m, CUBLAS_COMPUTE_32F,
                           CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
      REQUIRE(cublasDestroy(handle) == CUBLAS_STATUS_SUCCESS);
    });
  };
  REQUIRE(gemm("ideal", 3, 5, 7) == 2 * 3 * 5 * 7);
  REQUIRE(gemm("ideal,launch=1e-9", 3, 5, 7) == 1000 + 2 * 3 * 5 * 7);
  // 4 (21 + 35 + 15) = 284 bytes at one byte a picosecond are more than 210 FLOP.
  REQUIRE(gemm("ideal,memory_bandwidth=1e12", 3, 5, 7) == 284);
  REQUIRE(gemm("h100", 100, 100, 1) == ps(3e-6) + ps(4.0 * (100 + 100 + 10000) / 3350e9));
  REQUIRE(gemm("h100", 200, 200, 200) == ps(3e-6) + ps(2.0 * 200 * 200 * 200 / 67e12));
}

TEST_CASE("clock: all-reduce is 2(p-1) latencies + 2(p-1)/p of the bytes") {
  for (const Machine& m : machines)
    for (const int p : {1, 2, 3, 4, 8})
      for (const size_t n : {1, 1001})
        require_all(times(m.hardware, p, [&](TestRank& r) { all_reduce(r, n); }),
                    p == 1 ? 0 : m.link.all_reduce(p, 4.0 * static_cast<double>(n)));
}

TEST_CASE("clock: reduce-scatter and all-gather are p-1 latencies + (p-1)/p of the whole") {
  for (const Machine& m : machines)
    for (const int p : {2, 3, 8}) {
      const size_t n = 501;
      const Picoseconds wanted = m.link.scatter_or_gather(p, 4.0 * n * p);
      require_all(
          times(m.hardware, p,
                [&](TestRank& r) {
                  float *whole = r.filled<float>(n * p), *part = device_array<float>(n);
                  MUST(ncclReduceScatter(whole, part, n, ncclFloat, ncclSum, r.comm, r.stream));
                }),
          wanted);
      require_all(times(m.hardware, p,
                        [&](TestRank& r) {
                          float *whole = device_array<float>(n * p), *part = r.filled<float>(n);
                          MUST(ncclAllGather(part, whole, n, ncclFloat, r.comm, r.stream));
                        }),
                  wanted);
    }
}

TEST_CASE("clock: broadcast and reduce are p-1 latencies + the bytes") {
  for (const Machine& m : machines)
    for (const int p : {2, 3, 8}) {
      const size_t n = 333;
      const Picoseconds wanted = m.link.rooted(p, 8.0 * n);
      require_all(times(m.hardware, p,
                        [&](TestRank& r) {
                          double* x = r.filled<double>(n);
                          MUST(ncclBroadcast(x, x, n, ncclDouble, p - 1, r.comm, r.stream));
                        }),
                  wanted);
      require_all(times(m.hardware, p,
                        [&](TestRank& r) {
                          double* x = r.filled<double>(n);
                          MUST(ncclReduce(x, x, n, ncclDouble, ncclSum, 1, r.comm, r.stream));
                        }),
                  wanted);
    }
}

namespace {

void message(TestRank& r, size_t n, int from, int to) {
  float* x = r.filled<float>(n);
  if (r.rank == from) MUST(ncclSend(x, n, ncclFloat, to, r.comm, r.stream));
  if (r.rank == to) MUST(ncclRecv(x, n, ncclFloat, from, r.comm, r.stream));
}

}  // namespace

TEST_CASE("clock: a message is latency + bytes, from the later of the two") {
  for (const Machine& m : machines)
    for (const unsigned late : {0u, 1u, 2u}) {  // nobody, the sender, the receiver
      const auto got = times(m.hardware, 2, [&](TestRank& r) {
        if (late == static_cast<unsigned>(r.rank) + 1)
          busy(r.stream, r.filled<float>(1), 1'000'000);
        message(r, 777, 0, 1);
      });
      const Picoseconds before = late ? ps(m.launch) + ps(3.0 * 4e6 / m.memory) : 0;
      require_all(got, before + m.link.message(777 * 4));
    }
}

TEST_CASE("clock: a message to oneself moves at the memory's bandwidth") {
  require_all(times(machines[0].hardware, 1,
                    [](TestRank& r) {
                      float* x = r.filled<float>(2000);
                      MUST(ncclGroupStart());
                      MUST(ncclSend(x, 1000, ncclFloat, 0, r.comm, r.stream));
                      MUST(ncclRecv(x + 1000, 1000, ncclFloat, 0, r.comm, r.stream));
                      MUST(ncclGroupEnd());
                    }),
              1000);
}

TEST_CASE("clock: what crosses nodes goes at the network's rate") {
  for (const Machine& m : machines) {
    const std::string two_a_node = std::string(m.hardware) + ",node_gpus=2";
    require_all(times(two_a_node, 4, [](TestRank& r) { all_reduce(r, 64); }),
                m.net.all_reduce(4, 256));
    require_all(times(two_a_node, 2, [](TestRank& r) { all_reduce(r, 64); }),
                m.link.all_reduce(2, 256));
    const auto inside = times(two_a_node, 4, [](TestRank& r) { message(r, 64, 2, 3); });
    REQUIRE(inside == std::vector<Picoseconds>({0, 0, m.link.message(256), m.link.message(256)}));
    const auto across = times(two_a_node, 4, [](TestRank& r) { message(r, 64, 1, 2); });
    REQUIRE(across == std::vector<Picoseconds>({0, m.net.message(256), m.net.message(256), 0}));
  }
}

TEST_CASE("clock: a part of a split has the link of its own GPUs") {
  const Machine& m = machines[0];
  const auto split_all_reduce = [&](int (*color)(int)) {
    return times(std::string(m.hardware) + ",node_gpus=2", 4, [=](TestRank& r) {
      ncclComm_t part = nullptr;
      MUST(ncclCommSplit(r.comm, color(r.rank), 0, &part, nullptr));
      float* x = r.filled<float>(64);
      MUST(ncclAllReduce(x, x, 64, ncclFloat, ncclSum, part, r.stream));
      MUST(ncclCommDestroy(part));
    });
  };
  require_all(split_all_reduce([](int rank) { return rank / 2; }), m.link.all_reduce(2, 256));
  require_all(split_all_reduce([](int rank) { return rank % 2; }), m.net.all_reduce(2, 256));
}

// ---- who waits for whom --------------------------------------------------------------------

TEST_CASE("clock: a collective starts at the last of its ranks") {
  const auto got = times(countable, 3, [](TestRank& r) {
    busy(r.stream, r.filled<float>(1), 1000 * (r.rank + 1));
    all_reduce(r, 300);
  });
  require_all(got, 3000 + 2 * 2 * 1200 / 3);
}

TEST_CASE("clock: work starts no earlier than its call, its stream, and its events") {
  Fresh fresh{{"VIRTUAL_GPU", countable}};
  TestStream a, b;
  TestEvent event;
  float* any = device_array<float>(1);
  const auto end_of = [](cudaStream_t s) {
    MUST(cudaStreamSynchronize(s));
    return host_time();
  };
  busy(a, any, 100);
  busy(a, any, 50);
  REQUIRE(end_of(a) == 150);
  busy(b, any, 10);  // b was free all the time, but the call comes at 150
  REQUIRE(end_of(b) == 160);
  busy(a, any, 1000);
  MUST(cudaEventRecord(event, a));
  busy(a, any, 1000);
  MUST(cudaStreamWaitEvent(b, event));
  busy(b, any, 1);
  REQUIRE(end_of(b) == 1161);
  REQUIRE(end_of(a) == 2160);
}

TEST_CASE("clock: launches cost their stream's time, each") {
  REQUIRE(time_of_one("ideal,launch=3e-6", [](cudaStream_t s) {
            for (int i = 0; i < 5; ++i) busy(s, device_array<float>(1), 1);
          }) == 15'000'000);
}

TEST_CASE("clock: one communicator does one thing after the other, two overlap") {
  const auto two_streams = [](bool two_communicators) {
    return times(countable, 2, [=](TestRank& r) {
      TestStream second;
      ncclComm_t other = r.comm;
      if (two_communicators) MUST(ncclCommSplit(r.comm, 0, r.rank, &other, nullptr));
      float *x = r.filled<float>(250), *y = r.filled<float>(250);
      MUST(ncclAllReduce(x, x, 250, ncclFloat, ncclSum, r.comm, r.stream));
      MUST(ncclAllReduce(y, y, 250, ncclFloat, ncclSum, other, second));
      MUST(cudaDeviceSynchronize());
      if (two_communicators) MUST(ncclCommDestroy(other));
    });
  };
  require_all(two_streams(false), 2000);
  require_all(two_streams(true), 1000);
}

TEST_CASE("clock: communication overlaps the compute stream's work") {
  require_all(times(countable, 2,
                    [](TestRank& r) {
                      TestStream compute;
                      float* x = r.filled<float>(250);
                      MUST(ncclAllReduce(x, x, 250, ncclFloat, ncclSum, r.comm, r.stream));
                      busy(compute, x, 900);
                      MUST(cudaDeviceSynchronize());
                    }),
              1000);
}

TEST_CASE("clock: messages of one group share the link of the rank that they go to or come from") {
  const auto to_or_from_zero = [](bool gathers, bool grouped) {
    return times(countable, 4, [=](TestRank& r) {
      float* x = r.filled<float>(400);
      if (grouped) MUST(ncclGroupStart());
      for (int q = 1; q < 4; ++q) {
        const bool sends = gathers != (r.rank == 0);
        if (r.rank != 0 && r.rank != q) continue;
        const int peer = r.rank == 0 ? q : 0;
        if (sends)
          MUST(ncclSend(x + 100 * q, 100, ncclFloat, peer, r.comm, r.stream));
        else
          MUST(ncclRecv(x + 100 * q, 100, ncclFloat, peer, r.comm, r.stream));
      }
      if (grouped) MUST(ncclGroupEnd());
    });
  };
  // 400 bytes each: three at once take 1200, for everyone.
  require_all(to_or_from_zero(true, true), 1200);
  require_all(to_or_from_zero(false, true), 1200);
  // One after the other, the first is done sooner.
  const auto in_turn = to_or_from_zero(true, false);
  REQUIRE(in_turn == std::vector<Picoseconds>({1200, 400, 800, 1200}));
}

TEST_CASE("clock: both directions of a link are independent") {
  require_all(times(countable, 2,
                    [](TestRank& r) {
                      float* x = r.filled<float>(200);
                      MUST(ncclGroupStart());
                      MUST(ncclSend(x, 100, ncclFloat, 1 - r.rank, r.comm, r.stream));
                      MUST(ncclRecv(x + 100, 100, ncclFloat, 1 - r.rank, r.comm, r.stream));
                      MUST(ncclGroupEnd());
                    }),
              400);
}

TEST_CASE("clock: in `ideal` everything but arithmetic is free") {
  require_all(times("ideal", 4,
                    [](TestRank& r) {
                      busy(r.stream, r.filled<float>(1), 1'000'000);
                      all_reduce(r, 100000);
                      message(r, 1000, 0, 3);
                    }),
              0);
}

// ---- the same at every run -----------------------------------------------------------------

namespace {

// A few steps of a made-up trainer with two streams, a split, messages and polling.
std::vector<virtual_gpu::Operation> story(const std::string& jitter) {
  Fresh fresh{{"VIRTUAL_GPU", "h100"}, {"VIRTUAL_GPU_JITTER", jitter}};
  virtual_gpu::record_timeline(true);
  on_ranks(4, [](TestRank& r) {
    ncclComm_t pair = nullptr;
    MUST(ncclCommSplit(r.comm, r.rank / 2, 0, &pair, nullptr));
    float* x = r.filled<float>(5000);
    {
      TestStream compute;
      TestEvent ready, reduced;
      for (int step = 0; step < 4; ++step) {
        busy(compute, x, 10000 * (1 + (r.rank + step) % 3));
        MUST(cudaEventRecord(ready, compute));
        MUST(cudaStreamWaitEvent(r.stream, ready));
        MUST(ncclAllReduce(x, x, 2000, ncclFloat, ncclSum, r.comm, r.stream));
        MUST(cudaEventRecord(reduced, r.stream));
        busy(compute, x, 7000);
        MUST(ncclAllReduce(x + 2000, x + 2000, 100, ncclFloat, ncclSum, pair, compute));
        MUST(cudaStreamWaitEvent(compute, reduced));
        MUST(ncclGroupStart());
        MUST(ncclSend(x, 700, ncclFloat, (r.rank + 1) % 4, r.comm, compute));
        MUST(ncclRecv(x + 4000, 700, ncclFloat, (r.rank + 3) % 4, r.comm, compute));
        MUST(ncclGroupEnd());
        MUST(cudaEventRecord(ready, compute));
        while (cudaEventQuery(step % 2 ? ready : reduced) == cudaErrorNotReady) {
        }
      }
      MUST(cudaDeviceSynchronize());
    }
    MUST(ncclCommDestroy(pair));
  });
  return virtual_gpu::timeline();
}

}  // namespace

TEST_CASE("clock: the timeline is the same at every run, whatever the threads' timing") {
  const auto wanted = story("");
  REQUIRE(wanted.size() == 4 * 4 * (2 + 2 + 2));
  for (const char* jitter : {"", "1", "2", "3", "12345678901234"}) {
    const auto got = story(jitter);
    REQUIRE(got.size() == wanted.size());
    for (size_t i = 0; i < got.size(); ++i) {
      const auto key = [](const virtual_gpu::Operation& o) {
        return std::make_tuple(o.device, o.stream, std::string(o.call), o.issue, o.start, o.end,
                               o.bytes);
      };
      REQUIRE(key(got[i]) == key(wanted[i]));
    }
  }
}

TEST_CASE("clock: the timeline knows call, kind, bytes and times of each operation") {
  Fresh fresh{{"VIRTUAL_GPU", countable}};
  virtual_gpu::record_timeline(true);
  on_ranks(2, [](TestRank& r) {
    float* x = r.filled<float>(250);
    busy(r.stream, x, 30);
    MUST(ncclAllReduce(x, x, 250, ncclFloat, ncclSum, r.comm, r.stream));
    MUST(cudaMemsetAsync(x, 0, 120, r.stream));
    if (r.rank == 0)
      MUST(ncclSend(x, 25, ncclFloat, 1, r.comm, r.stream));
    else
      MUST(ncclRecv(x, 25, ncclFloat, 0, r.comm, r.stream));
  });
  const auto all = virtual_gpu::timeline();
  REQUIRE(all.size() == 8);
  using virtual_gpu::Kind;
  const auto is = [&](int i, Kind kind, const char* call, Picoseconds start, Picoseconds end,
                      int64_t bytes) {
    INFO(i);
    REQUIRE(all[i].device == i / 4);
    REQUIRE(all[i].kind == kind);
    REQUIRE(std::string(all[i].call) == call);
    REQUIRE((all[i].issue == 0 && all[i].start == start && all[i].end == end));
    REQUIRE(all[i].bytes == bytes);
  };
  for (int d = 0; d < 2; ++d) {
    is(4 * d, Kind::kernel, "kernel", 0, 30, 0);
    is(4 * d + 1, Kind::collective, "ncclAllReduce", 30, 1030, 1000);
    is(4 * d + 2, Kind::copy, "memset", 1030, 1040, 120);
  }
  is(3, Kind::transfer, "ncclSend", 1040, 1140, 100);
  is(7, Kind::transfer, "ncclRecv", 1040, 1140, 0);
}

TEST_CASE("clock: without the arithmetic the times are the same, and nothing is written") {
  Picoseconds end[2];
  for (const int skip : {0, 1}) {
    Fresh fresh{{"VIRTUAL_GPU", "h100"}, {"VIRTUAL_GPU_SKIP_MATH", std::to_string(skip)}};
    std::atomic<Picoseconds> last{0};
    on_ranks(2, [&](TestRank& r) {
      float* x = r.filled<float>(100);
      MUST(launch_threads(
          r.stream, 100, +[](float* p) { p[0] = 9; }, x + 50));
      MUST(ncclAllReduce(x, x, 50, ncclFloat, ncclSum, r.comm, r.stream));
      MUST(cudaMemsetAsync(x + 60, 0, 4, r.stream));
      r.synchronize();
      VERIFY((x[50] == 9) == !skip && (x[0] == 3) == !skip && (x[60] == 0) == !skip);
      last = host_time();
    });
    end[skip] = last;
  }
  REQUIRE(end[0] == end[1]);
  REQUIRE(end[0] > 0);
}

TEST_CASE("clock: bytes sent are the table's") {
  Fresh fresh;
  on_ranks(4, [](TestRank& r) {
    float* x = r.filled<float>(400);
    const auto sent = [&] { return virtual_gpu::counters(r.rank).collective_bytes_sent; };
    MUST(ncclAllReduce(x, x, 100, ncclFloat, ncclSum, r.comm, r.stream));
    VERIFY(sent() == 600);
    MUST(ncclAllGather(x + 100 * r.rank, x, 100, ncclFloat, r.comm, r.stream));
    VERIFY(sent() == 600 + 1200);
    MUST(ncclReduceScatter(x, x + 100 * r.rank, 100, ncclFloat, ncclSum, r.comm, r.stream));
    VERIFY(sent() == 600 + 1200 + 1200);
    MUST(ncclBroadcast(x, x, 100, ncclFloat, 0, r.comm, r.stream));
    VERIFY(sent() == 600 + 1200 + 1200 + 400);
    if (r.rank == 0) MUST(ncclSend(x, 10, ncclFloat, 1, r.comm, r.stream));
    if (r.rank == 1) MUST(ncclRecv(x, 10, ncclFloat, 0, r.comm, r.stream));
    const virtual_gpu::Counters n = virtual_gpu::counters(r.rank);
    VERIFY(n.collectives == 4);
    VERIFY(n.sends == (r.rank == 0) && n.receives == (r.rank == 1));
    VERIFY(n.bytes_sent == (r.rank == 0 ? 40 : 0));
    r.synchronize();
  });
}

// ---- the presets ---------------------------------------------------------------------------

TEST_CASE("hardware: every preset is there, and a field changes it alone") {
  for (const char* name :
       {"ideal", "h100", "a100", "v100", "t4", "l4", "rtx4090", "rtx3060", "slownet"}) {
    Fresh fresh{{"VIRTUAL_GPU", name}};
    cudaDeviceProp prop;
    MUST(cudaGetDeviceProperties(&prop, 0));
    REQUIRE(std::string(prop.name) == std::string("virtual ") + name);
  }
  const auto empty_kernel = [](cudaStream_t s) { busy(s, device_array<float>(1), 1); };
  REQUIRE(time_of_one("", empty_kernel) == time_of_one("h100", empty_kernel));  // the default
  REQUIRE(time_of_one("t4,launch=1e-3,memory_bandwidth=0", empty_kernel) == 1'000'000'000);
}

TEST_CASE("hardware: configure() changes what follows") {
  Fresh fresh;
  virtual_gpu::configure("ideal,launch=2e-12,memory=1K");
  TestStream stream;
  busy(stream, device_array<float>(1), 1);
  MUST(cudaStreamSynchronize(stream));
  REQUIRE(host_time() == 2);
  void* p = nullptr;
  REQUIRE(cudaMalloc(&p, 1021) == cudaErrorMemoryAllocation);
  REQUIRE_THROWS_AS(virtual_gpu::configure("nothing"), std::invalid_argument);
}
