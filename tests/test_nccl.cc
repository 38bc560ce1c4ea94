// The virtual NCCL: every collective against plain loops, what it refuses, who waits for whom,
// and that what would hang on a GPU ends with a report of who waits in what.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "virtual.h"

namespace {

// ---- plain loops ---------------------------------------------------------------------------

template <class T>
constexpr ncclDataType_t type_of = ncclFloat;
template <>
constexpr ncclDataType_t type_of<int8_t> = ncclInt8;
template <>
constexpr ncclDataType_t type_of<uint8_t> = ncclUint8;
template <>
constexpr ncclDataType_t type_of<int32_t> = ncclInt32;
template <>
constexpr ncclDataType_t type_of<uint32_t> = ncclUint32;
template <>
constexpr ncclDataType_t type_of<int64_t> = ncclInt64;
template <>
constexpr ncclDataType_t type_of<uint64_t> = ncclUint64;
template <>
constexpr ncclDataType_t type_of<double> = ncclDouble;
template <>
constexpr ncclDataType_t type_of<__half> = ncclHalf;
template <>
constexpr ncclDataType_t type_of<__nv_bfloat16> = ncclBfloat16;

template <class T>
T wide(T x) {
  return x;
}
float wide(__half x) { return __half2float(x); }
float wide(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T, class Wide>
T narrow(Wide x) {
  if constexpr (std::is_same_v<T, __half>)
    return __float2half(x);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16(x);
  else
    return static_cast<T>(x);
}

// Element i of a rank's input: no two ranks' are alike, and sums of the floats must round.
template <class T>
T value(int rank, size_t i) {
  const int64_t k = static_cast<int64_t>((rank * 37 + i * 11) % 23);
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(std::is_signed_v<T> ? k - 5 : k + 1);
  else
    return narrow<T>(static_cast<float>(k) / 7 - 1.3f);
}

template <class T>
T combine(T a, T b, ncclRedOp_t op) {
  const auto x = wide(a), y = wide(b);
  if (op == ncclProd) return narrow<T>(x * y);
  if (op == ncclMax) return x < y ? b : a;
  if (op == ncclMin) return y < x ? b : a;
  return narrow<T>(x + y);
}

// Rank 0 op rank 1 op ..., each step rounded to T; floating averages multiply by 1/p first.
template <class T>
T expected(int p, size_t i, ncclRedOp_t op) {
  constexpr bool integer = std::is_integral_v<T>;
  const auto input = [&](int rank) {
    const T x = value<T>(rank, i);
    if (op != ncclAvg || integer) return x;
    using Wide = decltype(wide(x));
    return narrow<T>(wide(x) * wide(narrow<T>(Wide(1) / Wide(p))));
  };
  T sum = input(0);
  for (int r = 1; r < p; ++r) sum = combine(sum, input(r), op);
  if constexpr (integer)
    if (op == ncclAvg) sum = static_cast<T>(sum / static_cast<T>(p));
  return sum;
}

template <class T>
bool same_bits(T a, T b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

// ---- one collective, on every rank ---------------------------------------------------------

template <class T>
struct Check {
  const TestRank& r;
  size_t n;
  ncclDataType_t type = type_of<T>;

  // This rank's input, in a new array or at `at`.
  T* input(T* at = nullptr) const {
    T* p = at ? at : device_array<T>(n);
    for (size_t i = 0; i < n; ++i) p[i] = value<T>(r.rank, i);
    return p;
  }
  template <class Wanted>
  void equal(const T* got, size_t count, Wanted wanted, const char* what) const {
    r.synchronize();
    for (size_t i = 0; i < count; ++i)
      if (!same_bits(got[i], wanted(i)))
        verify(false, std::string(what) + ": element " + std::to_string(i) + " of " +
                          std::to_string(count) + ", type " + std::to_string(type));
  }

  void all_reduce(ncclRedOp_t op) const {
    const auto wanted = [&](size_t i) { return expected<T>(r.size, i, op); };
    T *in = input(), *out = device_array<T>(n);
    MUST(ncclAllReduce(in, out, n, type, op, r.comm, r.stream));
    equal(out, n, wanted, "all-reduce");
    equal(
        in, n, [&](size_t i) { return value<T>(r.rank, i); }, "all-reduce's input");
    MUST(ncclAllReduce(in, in, n, type, op, r.comm, r.stream));
    equal(in, n, wanted, "all-reduce in place");
  }

  void reduce(int root, ncclRedOp_t op) const {
    const auto wanted = [&](size_t i) { return expected<T>(r.size, i, op); };
    T *in = input(), *out = r.rank == root ? device_array<T>(n) : nullptr;  // ignored elsewhere
    MUST(ncclReduce(in, out, n, type, op, root, r.comm, r.stream));
    if (r.rank == root) equal(out, n, wanted, "reduce");
    MUST(ncclReduce(in, in, n, type, op, root, r.comm, r.stream));
    equal(
        in, n, [&](size_t i) { return r.rank == root ? wanted(i) : value<T>(r.rank, i); },
        "reduce in place");
  }

  void broadcast(int root) const {
    const auto wanted = [&](size_t i) { return value<T>(root, i); };
    T *in = r.rank == root ? input() : nullptr, *out = device_array<T>(n);  // ignored elsewhere
    MUST(ncclBroadcast(in, out, n, type, root, r.comm, r.stream));
    equal(out, n, wanted, "broadcast");
    T* both = input();
    MUST(ncclBroadcast(both, both, n, type, root, r.comm, r.stream));
    equal(both, n, wanted, "broadcast in place");
  }

  void all_gather() const {
    const auto wanted = [&](size_t i) { return value<T>(static_cast<int>(i / n), i % n); };
    T *in = input(), *out = device_array<T>(n * r.size);
    MUST(ncclAllGather(in, out, n, type, r.comm, r.stream));
    equal(out, n * r.size, wanted, "all-gather");
    T* all = device_array<T>(n * r.size);
    input(all + r.rank * n);
    MUST(ncclAllGather(all + r.rank * n, all, n, type, r.comm, r.stream));
    equal(all, n * r.size, wanted, "all-gather in place");
  }

  void reduce_scatter(ncclRedOp_t op) const {
    const auto wanted = [&](size_t i) { return expected<T>(r.size, r.rank * n + i, op); };
    const auto fill = [&] {
      T* all = device_array<T>(n * r.size);
      for (size_t i = 0; i < n * r.size; ++i) all[i] = value<T>(r.rank, i);
      return all;
    };
    T *in = fill(), *out = device_array<T>(n);
    MUST(ncclReduceScatter(in, out, n, type, op, r.comm, r.stream));
    equal(out, n, wanted, "reduce-scatter");
    MUST(ncclReduceScatter(in, in + r.rank * n, n, type, op, r.comm, r.stream));
    equal(in + r.rank * n, n, wanted, "reduce-scatter in place");
  }

  // Around a ring, grouped, since all send at once.
  void ring() const {
    const int next = (r.rank + 1) % r.size, before = (r.rank + r.size - 1) % r.size;
    T *in = input(), *out = device_array<T>(n);
    MUST(ncclGroupStart());
    MUST(ncclSend(in, n, type, next, r.comm, r.stream));
    MUST(ncclRecv(out, n, type, before, r.comm, r.stream));
    MUST(ncclGroupEnd());
    equal(
        out, n, [&](size_t i) { return value<T>(before, i); }, "send and receive");
  }

  void reductions() const {
    for (const auto op : {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg}) {
      all_reduce(op);
      reduce(op % r.size, op);
      reduce_scatter(op);
    }
    for (int root = 0; root < r.size; ++root) reduce(root, ncclSum);
  }
  void moves() const {
    for (int root = 0; root < r.size; ++root) broadcast(root);
    all_gather();
    ring();
  }
};

// The last spans several of the blocks that sums are made in.
const std::vector<size_t> odd_counts = {1, 3, 4099};

template <class T>
void check_type(bool reduces) {
  for (const int p : {1, 2, 3, 4, 8}) {
    Fresh fresh{{"VIRTUAL_GPU_JITTER", p == 3 ? "1" : ""}};
    on_ranks(p, [&](TestRank& r) {
      for (const size_t n : odd_counts) {
        const Check<T> check{r, n};
        if (reduces) check.reductions();
        check.moves();
      }
    });
  }
}

// One all-reduce over p ranks, each with its own single value.
template <class T>
T sum_of(std::vector<T> values, ncclRedOp_t op = ncclSum) {
  Fresh fresh;
  T result{};
  on_ranks(static_cast<int>(values.size()), [&](TestRank& r) {
    T* x = device_array<T>(1);
    *x = values[r.rank];
    MUST(ncclAllReduce(x, x, 1, type_of<T>, op, r.comm, r.stream));
    r.synchronize();
    if (r.rank == 0) result = *x;
  });
  return result;
}

void all_reduce(TestRank& r, size_t n) {
  float* x = r.filled<float>(n);
  MUST(ncclAllReduce(x, x, n, ncclFloat, ncclSum, r.comm, r.stream));
}

}  // namespace

TEST_CASE("nccl: collectives of float") {
  check_type<float>(true);
}
TEST_CASE("nccl: collectives of double") {
  check_type<double>(true);
}
TEST_CASE("nccl: collectives of half") {
  check_type<__half>(true);
}
TEST_CASE("nccl: collectives of bfloat16") {
  check_type<__nv_bfloat16>(true);
}
TEST_CASE("nccl: collectives of int32") {
  check_type<int32_t>(true);
}
TEST_CASE("nccl: collectives of int64") {
  check_type<int64_t>(true);
}
TEST_CASE("nccl: collectives of uint64") {
  check_type<uint64_t>(true);
}
TEST_CASE("nccl: int8, uint8 and uint32 are moved, and not reduced") {
  check_type<int8_t>(false);
  check_type<uint8_t>(false);
  check_type<uint32_t>(false);
  Fresh fresh;
  on_ranks(2, [](TestRank& r) {
    uint8_t* x = r.filled<uint8_t>(4);
    for (const auto type : {ncclInt8, ncclUint8, ncclUint32}) {
      VERIFY(ncclAllReduce(x, x, 1, type, ncclSum, r.comm, r.stream) == ncclInvalidArgument);
      VERIFY(contains(ncclGetLastError(r.comm), "is not supported"));
    }
  });
}

// ---- arithmetic ----------------------------------------------------------------------------

TEST_CASE("nccl: sums are in rank order") {
  REQUIRE(sum_of<float>({1e8f, 1, -1e8f}) == 0);  // the small one is lost in rank 0's
  REQUIRE(sum_of<float>({1e8f, -1e8f, 1}) == 1);
  REQUIRE(sum_of<double>({1e17, 1, -1e17, 1}) == 1);
}

TEST_CASE("nccl: half types round at every addition") {
  // In float the sums would be 2050 and 258, which both types can hold.
  const auto half = [](float x) { return __float2half(x); };
  const auto bf16 = [](float x) { return __float2bfloat16(x); };
  REQUIRE(__half2float(sum_of<__half>({half(2048), half(1), half(1)})) == 2048);
  REQUIRE(__half2float(sum_of<__half>({half(1), half(1), half(2048)})) == 2050);
  REQUIRE(__bfloat162float(sum_of<__nv_bfloat16>({bf16(256), bf16(1), bf16(1)})) == 256);
  REQUIRE(__bfloat162float(sum_of<__nv_bfloat16>({bf16(1), bf16(1), bf16(256)})) == 258);
  REQUIRE(std::isinf(__half2float(sum_of<__half>({half(60000), half(60000)}))));
}

TEST_CASE("nccl: the average multiplies by 1/n in the element type first; integers divide last") {
  const float third = 1.0f / 3;
  REQUIRE(sum_of<float>({5, 5, 5}, ncclAvg) == 5 * third + 5 * third + 5 * third);
  REQUIRE(sum_of<int32_t>({1, 2, 5}, ncclAvg) == 2);
  REQUIRE(sum_of<int32_t>({-1, -2, -5}, ncclAvg) == -2);
  REQUIRE(sum_of<int64_t>({10, 1}, ncclAvg) == 5);
  // 60000 + 60000 overflows half; 30000 + 30000 does not.
  REQUIRE(__half2float(sum_of<__half>({__float2half(60000), __float2half(60000)}, ncclAvg)) ==
          60000);
  // 6e-8 is half's smallest number: a half of it rounds to nothing.
  const __half tiny = __float2half(6e-8f);
  REQUIRE(__half2float(sum_of<__half>({tiny, tiny}, ncclAvg)) == 0);
}

TEST_CASE("nccl: integers wrap; a number wins over a NaN in maximum and minimum, on any rank") {
  REQUIRE(sum_of<int32_t>({INT32_MAX, 1}) == INT32_MIN);
  REQUIRE(sum_of<int64_t>({INT64_MAX, 1}) == INT64_MIN);
  REQUIRE(sum_of<int32_t>({1 << 20, 1 << 20}, ncclProd) == 0);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto op : {ncclMax, ncclMin}) {
    REQUIRE(sum_of<float>({nan, 3}, op) == 3);
    REQUIRE(sum_of<float>({3, nan}, op) == 3);
    REQUIRE(std::isnan(sum_of<float>({nan, nan}, op)));
  }
  REQUIRE(std::isnan(sum_of<float>({nan, 3})));
}

// ---- what one rank's call alone shows to be wrong -------------------------------------------

namespace {

// The call is refused with `code`, the text has the parts; nothing was launched, and the
// communicator works on.
void refused(TestRank& r, ncclResult_t status, ncclResult_t code, std::vector<std::string> parts) {
  const std::string text = ncclGetLastError(r.comm);
  verify(status == code, "status " + std::to_string(status) + ", wanted " + std::to_string(code));
  for (const std::string& part : parts) verify(contains(text, part), text + " has: " + part);
  VERIFY(virtual_gpu::counters(r.rank).collectives + virtual_gpu::counters(r.rank).sends == 0);
}

void refused(TestRank& r, ncclResult_t status, std::vector<std::string> parts) {
  refused(r, status, ncclInvalidArgument, std::move(parts));
}

void ends_well(TestRank& r) {
  all_reduce(r, 5);
  r.synchronize();
}

}  // namespace

TEST_CASE("nccl: a buffer of the host, of another GPU, or freed is refused") {
  Fresh fresh;
  float* of_gpu_3 = nullptr;
  MUST(cudaSetDevice(3));
  MUST(cudaMalloc(&of_gpu_3, 64));
  MUST(cudaSetDevice(0));
  on_ranks(2, [&](TestRank& r) {
    float host[4], *good = r.filled<float>(4), *freed = device_array<float>(1 << 20);
    MUST(cudaFree(freed));
    const std::string me = "rank " + std::to_string(r.rank) + " of 2";
    refused(r, ncclAllReduce(host, good, 4, ncclFloat, ncclSum, r.comm, r.stream),
            {"ncclAllReduce", me, "sendbuff", "is a host pointer"});
    refused(r, ncclAllReduce(good, of_gpu_3, 4, ncclFloat, ncclSum, r.comm, r.stream),
            {"ncclAllReduce", me, "recvbuff", "is memory of GPU 3"});
    refused(r, ncclBroadcast(freed, freed, 4, ncclFloat, 0, r.comm, r.stream),
            {"ncclBroadcast", me, "was freed"});
    refused(r, ncclSend(host, 4, ncclFloat, 1, r.comm, r.stream), {"ncclSend", "sendbuff"});
    refused(r, ncclRecv(host, 4, ncclFloat, 1, r.comm, r.stream), {"ncclRecv", "recvbuff"});
    refused(r, ncclReduce(nullptr, good, 4, ncclFloat, ncclSum, 0, r.comm, r.stream),
            {"ncclReduce", "sendbuff"});
    ends_well(r);
  });
}

TEST_CASE("nccl: extents are count, or nranks * count where a kind gathers or scatters") {
  Fresh fresh;
  on_ranks(3, [](TestRank& r) {
    float *four = r.filled<float>(4), *eleven = r.filled<float>(11), *twelve = r.filled<float>(12);
    refused(r, ncclAllReduce(four, twelve, 5, ncclFloat, ncclSum, r.comm, r.stream),
            {"sendbuff", "runs past its end: 20 bytes are used, 16 of 16 are left"});
    refused(r, ncclAllReduce(four + 1, twelve, 4, ncclFloat, ncclSum, r.comm, r.stream),
            {"sendbuff", "12 of 16 are left"});
    refused(r, ncclAllGather(four, eleven, 4, ncclFloat, r.comm, r.stream),
            {"recvbuff", "48 bytes are used, 44 of 44 are left"});
    refused(r, ncclReduceScatter(eleven, four, 4, ncclFloat, ncclSum, r.comm, r.stream),
            {"sendbuff", "48 bytes are used, 44 of 44 are left"});
    refused(r, ncclSend(four, 3, ncclDouble, 0, r.comm, r.stream), {"24 bytes are used"});
    refused(r, ncclRecv(four, SIZE_MAX, ncclFloat, 0, r.comm, r.stream), {"overflows"});
    MUST(ncclAllGather(four, twelve, 4, ncclFloat, r.comm, r.stream));
    MUST(ncclReduceScatter(twelve, four, 4, ncclFloat, ncclSum, r.comm, r.stream));
    r.synchronize();
  });
}

TEST_CASE("nccl: an overlap other than in place is refused") {
  Fresh fresh;
  on_ranks(3, [](TestRank& r) {
    float* x = r.filled<float>(30);
    const std::vector<std::string> said = {"overlap other than in place",
                                           "rank " + std::to_string(r.rank) + " of 3"};
    refused(r, ncclAllReduce(x, x + 1, 8, ncclFloat, ncclSum, r.comm, r.stream), said);
    refused(r, ncclAllReduce(x + 7, x, 8, ncclFloat, ncclSum, r.comm, r.stream), said);
    // The exact offset, rank * count; any other block is wrong, the neighbour's too.
    const int other = (r.rank + 1) % 3;
    refused(r, ncclAllGather(x + 4 * other, x, 4, ncclFloat, r.comm, r.stream), said);
    refused(r, ncclAllGather(x + 4 * r.rank + 1, x, 4, ncclFloat, r.comm, r.stream), said);
    refused(r, ncclReduceScatter(x, x + 4 * other, 4, ncclFloat, ncclSum, r.comm, r.stream), said);
    if (r.rank == 1) {
      refused(r, ncclReduce(x, x + 1, 4, ncclFloat, ncclSum, 1, r.comm, r.stream), said);
      refused(r, ncclBroadcast(x, x + 1, 4, ncclFloat, 1, r.comm, r.stream), said);
    }
    MUST(ncclAllReduce(x, x + 8, 8, ncclFloat, ncclSum, r.comm, r.stream));  // side by side
    r.synchronize();
  });
}

TEST_CASE("nccl: communicator, stream, type, operation, root and peer are checked") {
  Fresh fresh;
  MUST(cudaSetDevice(3));
  TestStream of_gpu_3;
  MUST(cudaSetDevice(0));
  on_ranks(2, [&](TestRank& r) {
    float* x = r.filled<float>(8);
    const auto reduce = [&](ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t s) {
      return ncclAllReduce(x, x, 1, type, op, comm, s);
    };
    refused(r, reduce(ncclFloat, ncclSum, nullptr, r.stream), {"comm is NULL"});
    refused(r, reduce(ncclFloat, ncclSum, reinterpret_cast<ncclComm_t>(x), r.stream),
            {"no live communicator"});
    refused(r, reduce(ncclFloat, ncclSum, r.comm, nullptr), {"stream 0"});
    refused(r, reduce(ncclFloat, ncclSum, r.comm, of_gpu_3),
            {"the stream belongs to GPU 3", "GPU " + std::to_string(r.rank)});
    refused(r, reduce(ncclDataType_t(10), ncclSum, r.comm, r.stream), {"datatype 10"});
    refused(r, reduce(ncclDataType_t(-1), ncclSum, r.comm, r.stream), {"datatype -1"});
    refused(r, reduce(ncclFloat, ncclRedOp_t(5), r.comm, r.stream), {"op 5"});
    for (const int root : {-1, 2}) {
      const std::string text = std::to_string(root) + " is not a rank from 0 to 1";
      refused(r, ncclBroadcast(x, x, 1, ncclFloat, root, r.comm, r.stream), {"root " + text});
      refused(r, ncclReduce(x, x, 1, ncclFloat, ncclSum, root, r.comm, r.stream), {"root " + text});
      refused(r, ncclSend(x, 1, ncclFloat, root, r.comm, r.stream), {"peer " + text});
      refused(r, ncclRecv(x, 1, ncclFloat, root, r.comm, r.stream), {"peer " + text});
    }
    ends_well(r);
  });
}

TEST_CASE("nccl: a call uses its communicator's device, whatever is current") {
  Fresh fresh;
  on_ranks(2, [](TestRank& r) {
    float* x = r.filled<float>(1);
    MUST(cudaSetDevice(5));
    MUST(ncclAllReduce(x, x, 1, ncclFloat, ncclSum, r.comm, r.stream));
    r.synchronize();
    int device = -1, count = -1, rank = -1;
    MUST(ncclCommCuDevice(r.comm, &device));
    MUST(ncclCommCount(r.comm, &count));
    MUST(ncclCommUserRank(r.comm, &rank));
    VERIFY(*x == 3);
    VERIFY(device == r.rank && count == 2 && rank == r.rank);
    MUST(cudaGetDevice(&device));
    VERIFY(device == 5);
  });
}

TEST_CASE("nccl: calls return before the work is done") {
  Fresh fresh;
  Gate gate;
  std::atomic<int> returned{0};
  on_ranks(2, [&](TestRank& r) {
    float* x = r.filled<float>(1);
    gate.hold(r.stream);
    MUST(ncclAllReduce(x, x, 1, ncclFloat, ncclSum, r.comm, r.stream));
    if (++returned == 2) gate.open = true;  // only once both calls have come back
    r.synchronize();
    VERIFY(*x == 3);
  });
}

// ---- ranks that disagree -------------------------------------------------------------------

namespace {

// Rank 0 does one thing and rank 1 another: all ranks hear of it, some by these parts.
void disagree(const std::function<void(TestRank&, float*)>& zero,
              const std::function<void(TestRank&, float*)>& one, std::vector<std::string> parts) {
  Fresh fresh;
  const auto texts = texts_of_ranks(2, [&](TestRank& r) {
    float* x = r.filled<float>(32);
    (r.rank == 0 ? zero : one)(r, x);
    r.synchronize();
  });
  for (const std::string& text : texts) REQUIRE(text != "");
  some_rank_says(texts, std::move(parts));
}

using Step = std::function<void(TestRank&, float*)>;
Step reduce_all(size_t n, ncclDataType_t type, ncclRedOp_t op) {
  return [=](TestRank& r, float* x) { MUST(ncclAllReduce(x, x, n, type, op, r.comm, r.stream)); };
}
Step broadcast_from(int root) {
  return [=](TestRank& r, float* x) {
    MUST(ncclBroadcast(x, x, 4, ncclFloat, root, r.comm, r.stream));
  };
}
Step send(size_t n, ncclDataType_t type, int peer) {
  return [=](TestRank& r, float* x) { MUST(ncclSend(x, n, type, peer, r.comm, r.stream)); };
}
Step receive(size_t n, ncclDataType_t type, int peer) {
  return [=](TestRank& r, float* x) { MUST(ncclRecv(x, n, type, peer, r.comm, r.stream)); };
}
Step then(Step a, Step b) {
  return [=](TestRank& r, float* x) { a(r, x), b(r, x + 16); };
}

// Rank 0 does it, and rank 1 goes.
void unanswered(const Step& step, std::vector<std::string> parts) {
  Fresh fresh;
  const auto texts = texts_of_ranks(2, [&](TestRank& r) {
    float* x = r.filled<float>(32);
    if (r.rank == 0) step(r, x);
    r.synchronize();
  });
  parts.push_back("rank 1 of 2 has left (ncclCommDestroy)");
  some_rank_says(texts, std::move(parts));
}

}  // namespace

TEST_CASE("nccl: other counts, types, operations, roots and kinds are named, with both ranks") {
  disagree(reduce_all(8, ncclFloat, ncclSum), reduce_all(6, ncclFloat, ncclSum),
           {"communicator 0, collective 0", "rank 0 calls ncclAllReduce of 8 float, sum",
            "rank 1 calls ncclAllReduce of 6 float, sum"});
  disagree(reduce_all(8, ncclFloat, ncclSum), reduce_all(8, ncclHalf, ncclSum),
           {"rank 0 calls ncclAllReduce of 8 float", "rank 1 calls ncclAllReduce of 8 half"});
  disagree(reduce_all(8, ncclFloat, ncclSum), reduce_all(8, ncclFloat, ncclMax),
           {"8 float, sum", "8 float, maximum"});
  disagree(broadcast_from(0), broadcast_from(1), {"4 float, root 0", "4 float, root 1"});
  disagree(reduce_all(4, ncclFloat, ncclSum), broadcast_from(0),
           {"rank 0 calls ncclAllReduce of 4 float", "rank 1 calls ncclBroadcast of 4 float"});
  disagree(then(broadcast_from(0), reduce_all(4, ncclFloat, ncclSum)),
           then(broadcast_from(0), broadcast_from(0)), {"communicator 0, collective 1"});
}

TEST_CASE("nccl: other roots of a reduce, and all-gather against reduce-scatter, are named") {
  const auto reduce_to = [](int root) -> Step {
    return [=](TestRank& r, float* x) {
      MUST(ncclReduce(x, x, 4, ncclFloat, ncclSum, root, r.comm, r.stream));
    };
  };
  disagree(reduce_to(0), reduce_to(1), {"sum, root 0", "sum, root 1"});
  disagree([](TestRank& r, float* x) { MUST(ncclAllGather(x, x, 4, ncclFloat, r.comm, r.stream)); },
           [](TestRank& r, float* x) {
             MUST(ncclReduceScatter(x, x + 4, 4, ncclFloat, ncclSum, r.comm, r.stream));
           },
           {"ncclAllGather of 4 float", "ncclReduceScatter of 4 float"});
}

TEST_CASE("nccl: every rank of three hears of one that disagrees, and can ask") {
  Fresh fresh;
  const auto texts = texts_of_ranks(3, [](TestRank& r) {
    float* x = r.filled<float>(8);
    MUST(ncclAllReduce(x, x, r.rank == 2 ? 7 : 8, ncclFloat, ncclSum, r.comm, r.stream));
    const cudaError_t status = cudaStreamSynchronize(r.stream);
    ncclResult_t error = ncclSuccess;
    VERIFY(status == cudaErrorLaunchFailure);
    MUST(ncclCommGetAsyncError(r.comm, &error));
    VERIFY(error == ncclRemoteError);
    VERIFY(ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclRemoteError);
    VERIFY(cudaMemsetAsync(x, 0, 4, r.stream) == cudaErrorLaunchFailure);
    MUST(status);
  });
  for (const std::string& text : texts) REQUIRE(contains(text, "rank 2 calls ncclAllReduce of 7"));
}

TEST_CASE("nccl: a rank that does not join is reported, not waited for") {
  Fresh fresh;
  const auto texts = texts_of_ranks(4, [](TestRank& r) {
    if (r.rank == 2) return;
    all_reduce(r, 4);
    r.synchronize();
  });
  some_rank_says(texts, {"deadlock: every rank waits for another",
                         "GPU 0: rank 0 of 4 of communicator 0 in ncclAllReduce of 4 float, sum",
                         "GPU 1: rank 1 of 4", "GPU 3: rank 3 of 4",
                         "rank 2 of 4 has left (ncclCommDestroy)"});
  REQUIRE(texts[2] == "");
}

TEST_CASE("nccl: a rank that waits for something else is reported with what it waits in") {
  Fresh fresh;
  const auto texts = texts_of_ranks(2, [](TestRank& r) {
    float* x = r.filled<float>(4);
    if (r.rank == 0)
      MUST(ncclAllReduce(x, x, 4, ncclFloat, ncclSum, r.comm, r.stream));
    else
      MUST(ncclRecv(x, 4, ncclFloat, 0, r.comm, r.stream));
    while (cudaStreamQuery(r.stream) == cudaErrorNotReady) {  // a program may poll as well
    }
    MUST(cudaStreamQuery(r.stream));
  });
  some_rank_says(texts, {"rank 0 of 2 of communicator 0 in ncclAllReduce of 4 float, sum",
                         "rank 1 of 2 of communicator 0 in ncclRecv of 4 float from rank 0"});
}

TEST_CASE("nccl: a thread that ends with its communicator is reported") {
  Fresh fresh;
  const auto texts = texts_of_ranks(2, [](TestRank& r) {
    if (r.rank == 1) {
      r.comm = nullptr;  // forgotten, never destroyed
      return;
    }
    all_reduce(r, 4);
    r.synchronize();
  });
  some_rank_says(texts, {"rank 0 of 2 of communicator 0 in ncclAllReduce of 4 float",
                         "the thread of rank 1 of 2 has ended"});
}

// ---- send and receive ----------------------------------------------------------------------

TEST_CASE("nccl: messages of a pair keep their order, whatever comes between") {
  Fresh fresh{{"VIRTUAL_GPU_JITTER", "3"}};
  on_ranks(3, [](TestRank& r) {
    int32_t* x = device_array<int32_t>(100);
    for (int i = 0; i < 100; ++i) x[i] = r.rank == 0 ? i : -1;
    for (int i = 0; i < 100; ++i) {
      if (r.rank == 0)
        MUST(ncclSend(x + i, 1, ncclInt32, 1 + i % 2, r.comm, r.stream));
      else if (i % 2 == r.rank - 1)
        MUST(ncclRecv(x + i, 1, ncclInt32, 0, r.comm, r.stream));
    }
    r.synchronize();
    for (int i = 0; i < 100; ++i) VERIFY(x[i] == (r.rank == 0 || i % 2 == r.rank - 1 ? i : -1));
  });
}

TEST_CASE("nccl: a send without its receive is reported, also if it is small; and the reverse") {
  unanswered(send(1, ncclFloat, 1),
             {"rank 0 of 2 of communicator 0 in ncclSend of 1 float to rank 1"});
  unanswered(receive(4, ncclFloat, 1),
             {"rank 0 of 2 of communicator 0 in ncclRecv of 4 float from"});
}

TEST_CASE("nccl: opposite sends deadlock, and do not in a group") {
  disagree(then(send(4, ncclFloat, 1), receive(4, ncclFloat, 1)),
           then(send(4, ncclFloat, 0), receive(4, ncclFloat, 0)),
           {"rank 0 of 2 of communicator 0 in ncclSend of 4 float to rank 1",
            "rank 1 of 2 of communicator 0 in ncclSend of 4 float to rank 0"});
  Fresh fresh;
  on_ranks(2, [](TestRank& r) {
    float* x = r.filled<float>(8);
    MUST(ncclGroupStart());
    MUST(ncclSend(x, 4, ncclFloat, 1 - r.rank, r.comm, r.stream));
    MUST(ncclRecv(x + 4, 4, ncclFloat, 1 - r.rank, r.comm, r.stream));
    MUST(ncclGroupEnd());
    r.synchronize();
    VERIFY(x[4] == 2 - r.rank);
  });
}

TEST_CASE("nccl: a receive of another count or type than its send is named") {
  disagree(send(8, ncclFloat, 1), receive(6, ncclFloat, 0),
           {"rank 0 calls ncclSend of 8 float to rank 1",
            "rank 1 calls ncclRecv of 6 float from rank 0"});
  disagree(send(8, ncclFloat, 1), receive(8, ncclInt32, 0), {"8 float to rank 1", "8 int32 from"});
  disagree(send(8, ncclFloat, 1), receive(0, ncclFloat, 0), {"ncclRecv of 0 float"});
}

TEST_CASE("nccl: a collective and a send of one communicator serialise, and so can deadlock") {
  disagree(then(reduce_all(4, ncclFloat, ncclSum), send(4, ncclFloat, 1)),
           then(receive(4, ncclFloat, 0), reduce_all(4, ncclFloat, ncclSum)),
           {"in ncclAllReduce of 4 float", "in ncclRecv of 4 float from rank 0"});
}

// ---- zero counts ---------------------------------------------------------------------------

TEST_CASE("nccl: a collective of no elements is success, without launch or peers") {
  Fresh fresh;
  on_ranks(2, [](TestRank& r) {
    if (r.rank == 0) {  // rank 1 does not join, and need not
      MUST(ncclAllReduce(nullptr, nullptr, 0, ncclFloat, ncclSum, r.comm, r.stream));
      MUST(ncclBroadcast(nullptr, nullptr, 0, ncclFloat, 0, r.comm, r.stream));
      MUST(ncclAllGather(nullptr, nullptr, 0, ncclFloat, r.comm, r.stream));
      MUST(ncclReduceScatter(nullptr, nullptr, 0, ncclFloat, ncclSum, r.comm, r.stream));
      MUST(ncclReduce(nullptr, nullptr, 0, ncclFloat, ncclSum, 0, r.comm, r.stream));
      VERIFY(ncclReduce(nullptr, nullptr, 0, ncclFloat, ncclSum, 9, r.comm, r.stream) ==
             ncclInvalidArgument);  // the arguments are checked all the same
      r.synchronize();
      VERIFY(virtual_gpu::counters(0).collectives == 0);
    }
    ends_well(r);
  });
}

TEST_CASE("nccl: a send and receive of no elements still pair") {
  {
    Fresh fresh;
    on_ranks(2, [](TestRank& r) {
      if (r.rank == 0)
        MUST(ncclSend(nullptr, 0, ncclFloat, 1, r.comm, r.stream));
      else
        MUST(ncclRecv(nullptr, 0, ncclFloat, 0, r.comm, r.stream));
      r.synchronize();
      VERIFY(virtual_gpu::counters(r.rank).sends + virtual_gpu::counters(r.rank).receives == 1);
    });
  }
  unanswered(send(0, ncclFloat, 1), {"ncclSend of 0 float to rank 1"});
}

// ---- groups --------------------------------------------------------------------------------

TEST_CASE("nccl: groups nest; only the outermost end launches") {
  Fresh fresh;
  on_ranks(2, [](TestRank& r) {
    float* x = r.filled<float>(8);
    const auto launched = [&] {
      return virtual_gpu::counters(r.rank).sends + virtual_gpu::counters(r.rank).receives;
    };
    MUST(ncclGroupStart());
    MUST(ncclGroupStart());
    MUST(ncclSend(x, 4, ncclFloat, 1 - r.rank, r.comm, r.stream));
    MUST(ncclGroupEnd());
    VERIFY(launched() == 0);
    MUST(ncclRecv(x + 4, 4, ncclFloat, 1 - r.rank, r.comm, r.stream));
    VERIFY(launched() == 0);
    MUST(ncclGroupEnd());
    VERIFY(launched() == 2);
    r.synchronize();
    VERIFY(x[4] == 2 - r.rank);
    MUST(ncclGroupStart());  // an empty group is fine
    MUST(ncclGroupEnd());
  });
}

TEST_CASE("nccl: an end without a start is invalid usage, also after a whole group") {
  Fresh fresh;
  REQUIRE(ncclGroupEnd() == ncclInvalidUsage);
  REQUIRE(contains(ncclGetLastError(nullptr), "ncclGroupEnd: there was no ncclGroupStart"));
  REQUIRE(ncclGroupStart() == ncclSuccess);
  REQUIRE(ncclGroupEnd() == ncclSuccess);
  REQUIRE(ncclGroupEnd() == ncclInvalidUsage);
}

TEST_CASE("nccl: a bad call of a group also fails its end, and drops the whole group") {
  Fresh fresh;
  on_ranks(2, [](TestRank& r) {
    float* x = r.filled<float>(8);
    MUST(ncclGroupStart());
    MUST(ncclGroupStart());
    MUST(ncclAllReduce(x, x, 4, ncclFloat, ncclSum, r.comm, r.stream));
    refused(r, ncclSend(x, 4, ncclFloat, 7, r.comm, r.stream), {"peer 7"});
    refused(r, ncclGroupEnd(), ncclInvalidArgument, {"peer 7"});
    refused(r, ncclGroupEnd(), ncclInvalidArgument, {"peer 7"});
    r.synchronize();
    VERIFY(x[0] == r.rank + 1);  // the good call was dropped too
    MUST(ncclGroupStart());      // and the next group knows nothing of it
    MUST(ncclAllReduce(x, x, 4, ncclFloat, ncclSum, r.comm, r.stream));
    MUST(ncclGroupEnd());
    r.synchronize();
    VERIFY(x[0] == 3);
  });
}

TEST_CASE("nccl: a group has no order, so its operations may not share what one writes") {
  Fresh fresh;
  on_ranks(2, [](TestRank& r) {
    float *x = r.filled<float>(8), *y = r.filled<float>(8);
    const auto group_of = [&](float* first, float* from, float* to) {
      MUST(ncclGroupStart());
      MUST(ncclAllReduce(first, first, 4, ncclFloat, ncclSum, r.comm, r.stream));
      MUST(ncclAllReduce(from, to, 4, ncclFloat, ncclSum, r.comm, r.stream));
      return ncclGroupEnd();
    };
    // Reduce, then use the result; and two that write the same.
    refused(r, group_of(x, x, y), ncclInvalidUsage,
            {"ncclGroupEnd", "ncclAllReduce of 4 float, sum writes what", "a group has no order"});
    refused(r, group_of(x, y, x + 3), ncclInvalidUsage, {"a group has no order"});
    MUST(group_of(x, x + 4, y));
    // Both may read one buffer.
    MUST(ncclGroupStart());
    MUST(ncclAllReduce(x, y, 4, ncclFloat, ncclSum, r.comm, r.stream));
    MUST(ncclAllReduce(x, y + 4, 4, ncclFloat, ncclMax, r.comm, r.stream));
    MUST(ncclGroupEnd());
    r.synchronize();
    VERIFY(y[0] == 6 && y[4] == 3);
  });
}

TEST_CASE("nccl: a send to oneself needs its receive in the same group") {
  Fresh fresh;
  on_ranks(2, [](TestRank& r) {
    float* x = r.filled<float>(8);
    const std::vector<std::string> said = {"a send to oneself needs its receive"};
    refused(r, ncclSend(x, 4, ncclFloat, r.rank, r.comm, r.stream), ncclInvalidUsage, said);
    refused(r, ncclRecv(x, 4, ncclFloat, r.rank, r.comm, r.stream), ncclInvalidUsage, said);
    MUST(ncclGroupStart());
    MUST(ncclSend(x, 4, ncclFloat, r.rank, r.comm, r.stream));
    MUST(ncclSend(x + 4, 4, ncclFloat, r.rank, r.comm, r.stream));
    refused(r, ncclGroupEnd(), ncclInvalidUsage, said);
    MUST(ncclGroupStart());
    MUST(ncclRecv(x + 4, 3, ncclFloat, r.rank, r.comm, r.stream));
    MUST(ncclSend(x, 3, ncclFloat, r.rank, r.comm, r.stream));
    MUST(ncclGroupEnd());
    r.synchronize();
    VERIFY(x[4] == x[0] && x[6] == x[2] && x[7] != x[3]);
  });
}

TEST_CASE("nccl: many messages in one group, all pairs at once") {
  Fresh fresh{{"VIRTUAL_GPU_JITTER", "9"}};
  on_ranks(8, [](TestRank& r) {
    float *out = device_array<float>(8), *in = device_array<float>(8);
    for (int q = 0; q < 8; ++q) out[q] = static_cast<float>(10 * r.rank + q);
    for (int round = 0; round < 20; ++round) {
      MUST(ncclGroupStart());
      for (int q = 0; q < 8; ++q) {
        MUST(ncclSend(out + q, 1, ncclFloat, q, r.comm, r.stream));
        MUST(ncclRecv(in + q, 1, ncclFloat, q, r.comm, r.stream));
      }
      MUST(ncclGroupEnd());
    }
    r.synchronize();
    for (int q = 0; q < 8; ++q) VERIFY(in[q] == static_cast<float>(10 * q + r.rank));
  });
}

// ---- streams and communicators -------------------------------------------------------------

TEST_CASE("nccl: a group of several streams starts after all of them, and all wait for its end") {
  Fresh fresh{{"VIRTUAL_GPU", countable}};
  on_ranks(2, [](TestRank& r) {
    TestStream second;
    float* x = r.filled<float>(2000);
    busy(r.stream, x, 100);
    busy(second, x, 700);
    MUST(ncclGroupStart());
    MUST(ncclAllReduce(x, x, 1000, ncclFloat, ncclSum, r.comm, r.stream));
    MUST(ncclAllReduce(x + 1000, x + 1000, 1000, ncclFloat, ncclSum, r.comm, second));
    MUST(ncclGroupEnd());
    r.synchronize();  // the other stream's collective counts as well
    VERIFY(x[1000] == 3 + 2 * (1000 % 7));
    VERIFY(virtual_gpu::host_time() == 700 + 2 * 4000);
    MUST(cudaStreamSynchronize(second));
    VERIFY(virtual_gpu::host_time() == 700 + 2 * 4000);
  });
}

TEST_CASE("nccl: one communicator on two streams runs in the order of its calls") {
  Fresh fresh{{"VIRTUAL_GPU_JITTER", "4"}};
  on_ranks(4, [](TestRank& r) {
    TestStream second;
    float *x = r.filled<float>(1), *y = r.filled<float>(1);
    for (int i = 0; i < 200; ++i) {
      MUST(ncclAllReduce(x, x, 1, ncclFloat, ncclMax, r.comm, r.stream));
      MUST(ncclBroadcast(y, y, 1, ncclFloat, i % 4, r.comm, second));
    }
    MUST(cudaDeviceSynchronize());
    VERIFY(*x == 4 && *y == 1);
  });
}

TEST_CASE("nccl: split sorts by key, then by the parent's rank; no colour gives NULL") {
  Fresh fresh;
  on_ranks(8, [](TestRank& r) {
    ncclComm_t part = r.comm;
    // Ranks 0 2 4 | 1 3 5 | none: 6 7. Keys reverse the first, and tie in the second.
    const int color = r.rank >= 6 ? NCCL_SPLIT_NOCOLOR : r.rank % 2;
    MUST(ncclCommSplit(r.comm, color, color == 0 ? -r.rank : 7, &part, nullptr));
    VERIFY((part == nullptr) == (r.rank >= 6));
    if (!part) return;
    int rank = -1, size = -1, device = -1;
    MUST(ncclCommUserRank(part, &rank));
    MUST(ncclCommCount(part, &size));
    MUST(ncclCommCuDevice(part, &device));
    VERIFY(size == 3 && device == r.rank);
    VERIFY(rank == (color == 0 ? 2 - r.rank / 2 : r.rank / 2));
    float* x = r.filled<float>(1);
    MUST(ncclAllReduce(x, x, 1, ncclFloat, ncclSum, part, r.stream));
    r.synchronize();
    VERIFY(*x == (color == 0 ? 1 + 3 + 5 : 2 + 4 + 6));
    MUST(ncclCommDestroy(part));
  });
}

TEST_CASE("nccl: rows and columns of a mesh, on two streams, one all-reduce after the other") {
  Fresh fresh{{"VIRTUAL_GPU_JITTER", "2"}};
  on_ranks(6, [](TestRank& r) {
    ncclComm_t row = nullptr, column = nullptr;
    MUST(ncclCommSplit(r.comm, r.rank / 3, 0, &row, nullptr));
    MUST(ncclCommSplit(r.comm, r.rank % 3, 0, &column, nullptr));
    TestStream second;
    TestEvent done;
    float* x = r.filled<float>(1);
    for (int i = 0; i < 50; ++i) {
      *x = static_cast<float>(r.rank + 1);
      MUST(ncclAllReduce(x, x, 1, ncclFloat, ncclSum, row, r.stream));
      MUST(cudaEventRecord(done, r.stream));
      MUST(cudaStreamWaitEvent(second, done));
      MUST(ncclAllReduce(x, x, 1, ncclFloat, ncclSum, column, second));
      MUST(cudaStreamSynchronize(second));
      VERIFY(*x == 21);
    }
    MUST(ncclCommDestroy(row));
    MUST(ncclCommDestroy(column));
  });
  for (int d = 0; d < 6; ++d) {
    REQUIRE(virtual_gpu::counters(d).communicators_created == 3);
    REQUIRE(virtual_gpu::counters(d).communicators_destroyed == 3);
  }
}

TEST_CASE("nccl: split refuses a negative colour and a configuration") {
  Fresh fresh;
  on_ranks(2, [](TestRank& r) {
    ncclComm_t part = nullptr;
    refused(r, ncclCommSplit(r.comm, -2, 0, &part, nullptr), {"color -2 is negative"});
    refused(r, ncclCommSplit(r.comm, 0, 0, &part, reinterpret_cast<ncclConfig_t*>(&part)),
            {"config must be NULL"});
    refused(r, ncclCommSplit(nullptr, 0, 0, &part, nullptr), {"no live communicator"});
    refused(r, ncclCommSplit(r.comm, 0, 0, nullptr, nullptr), {"newcomm is NULL"});
  });
}

TEST_CASE("nccl: a rank that does not join a split is reported") {
  Fresh fresh;
  const auto texts = texts_of_ranks(3, [](TestRank& r) {
    ncclComm_t part = nullptr;
    if (r.rank != 1) MUST(ncclCommSplit(r.comm, 0, 0, &part, nullptr));
  });
  some_rank_says(texts, {"rank 0 of 3 in ncclCommSplit", "rank 1 of 3 has left"});
}

// ---- coming and going ----------------------------------------------------------------------

TEST_CASE("nccl: destroy waits for the communicator's work; twice is an error, NULL is none") {
  Fresh fresh;
  on_ranks(2, [](TestRank& r) {
    float* x = r.filled<float>(1);
    for (int i = 0; i < 100; ++i)
      MUST(ncclAllReduce(x, x, 1, ncclFloat, ncclMax, r.comm, r.stream));
    MUST(ncclCommDestroy(r.comm));
    VERIFY(*x == 2);
    VERIFY(ncclCommDestroy(r.comm) == ncclInvalidArgument);
    VERIFY(contains(ncclGetLastError(nullptr), "destroyed twice?"));
    VERIFY(ncclAllReduce(x, x, 1, ncclFloat, ncclSum, r.comm, r.stream) == ncclInvalidArgument);
    VERIFY(ncclCommAbort(r.comm) == ncclInvalidArgument);
    int n = 0;
    VERIFY(ncclCommCount(r.comm, &n) == ncclInvalidArgument);
    VERIFY(ncclCommDestroy(nullptr) == ncclSuccess);
    VERIFY(ncclCommAbort(nullptr) == ncclSuccess);
    r.comm = nullptr;
  });
}

TEST_CASE("nccl: abort ends this rank's waits, and tells the others nothing") {
  Fresh fresh;
  std::atomic<bool> aborted{false};
  const auto texts = texts_of_ranks(3, [&](TestRank& r) {
    float* x = r.filled<float>(4);
    if (r.rank == 2) {  // comes when rank 0 has already gone
      while (!aborted) std::this_thread::yield();
    }
    all_reduce(r, 4);
    if (r.rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      MUST(ncclSend(x, 4, ncclFloat, 1, r.comm, r.stream));  // behind it: ends as well
      MUST(ncclCommAbort(r.comm));
      r.comm = nullptr;
      MUST(cudaStreamSynchronize(r.stream));
      VERIFY(x[0] == 1);
      aborted = true;
      return;
    }
    r.synchronize();
  });
  REQUIRE(texts[0] == "");
  some_rank_says(texts, {"deadlock", "rank 1 of 3 of communicator 0 in ncclAllReduce of 4 float",
                         "rank 0 of 3 has left (ncclCommAbort)"});
}

TEST_CASE("nccl: abort ends a send and a receive that nobody answers") {
  Fresh fresh;
  std::atomic<int> gone{0};
  on_ranks(2, [&](TestRank& r) {
    float* x = r.filled<float>(4);
    if (r.rank == 0)
      MUST(ncclSend(x, 4, ncclFloat, 1, r.comm, r.stream));
    else
      MUST(ncclSend(x, 4, ncclFloat, 0, r.comm, r.stream));
    MUST(ncclCommAbort(r.comm));
    r.comm = nullptr;
    MUST(cudaStreamSynchronize(r.stream));
    for (++gone; gone < 2;) std::this_thread::yield();
  });
}

namespace {

// What ncclCommInitRank says to each thread, given each one's device, rank and nranks.
struct Comer {
  int device, rank, size;
};
std::vector<std::string> init_texts(const std::vector<Comer>& comers) {
  ncclUniqueId id;
  MUST(ncclGetUniqueId(&id));
  std::vector<std::string> texts(comers.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < comers.size(); ++i)
    threads.emplace_back([&, i] {
      ncclComm_t comm = nullptr;
      cudaSetDevice(comers[i].device);
      const ncclResult_t status = ncclCommInitRank(&comm, comers[i].size, id, comers[i].rank);
      if (status) texts[i] = std::to_string(status) + " " + ncclGetLastError(nullptr);
      ncclCommDestroy(comm);
    });
  for (std::thread& t : threads) t.join();
  return texts;
}

}  // namespace

TEST_CASE("nccl: init refuses a GPU twice, a rank twice, and two sizes") {
  Fresh fresh;
  for (const std::string& text : init_texts({{0, 0, 3}, {1, 1, 3}, {0, 2, 3}}))
    REQUIRE(contains(
        text, "5 ncclCommInitRank: Duplicate GPU detected: rank 0 and rank 2 both on GPU 0"));
  for (const std::string& text : init_texts({{0, 0, 2}, {1, 0, 2}}))
    REQUIRE(contains(text, "rank 0 comes twice"));
  for (const std::string& text : init_texts({{0, 0, 2}, {1, 1, 3}})) {
    REQUIRE(contains(text, "one rank says"));
    REQUIRE(contains(text, "2"));
    REQUIRE(contains(text, "3"));
  }
}

TEST_CASE("nccl: init tells how many came, when one never does") {
  Fresh fresh{{"VIRTUAL_GPU_INIT_SECONDS", "1"}};
  const auto before = std::chrono::steady_clock::now();
  const auto texts = init_texts({{0, 0, 3}, {1, 1, 3}});
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - before;
  some_rank_says(texts, {"5 ncclCommInitRank: 2 of 3 ranks came within 1 s"});
  REQUIRE(texts[0] != "");
  REQUIRE(texts[1] != "");
  REQUIRE(took.count() > 0.9);
  REQUIRE(took.count() < 10);
}

TEST_CASE("nccl: init refuses bad ranks, a group, and an id from elsewhere") {
  Fresh fresh;
  ncclUniqueId id;
  ncclComm_t comm = nullptr;
  MUST(ncclGetUniqueId(&id));
  for (const auto& [size, rank] : {std::pair(0, 0), {2, 2}, {2, -1}, {-1, 0}})
    fails_with(ncclCommInitRank(&comm, size, id, rank), ncclInvalidArgument,
               {"ncclCommInitRank: rank"});
  MUST(ncclGroupStart());
  fails_with(ncclCommInitRank(&comm, 1, id, 0), ncclInvalidUsage, {"not in a group"});
  REQUIRE(ncclGroupEnd() == ncclInvalidUsage);
  ncclUniqueId zero = {}, foreign = {};
  fails_with(ncclCommInitRank(&comm, 1, zero, 0), ncclInvalidUsage,
             {"not come from ncclGetUniqueId"});
  std::snprintf(foreign.internal, sizeof foreign.internal, "virtual-nccl %d 0", getpid() + 1);
  fails_with(ncclCommInitRank(&comm, 1, foreign, 0), ncclInvalidUsage, {"another process"});
  REQUIRE(ncclGetUniqueId(nullptr) == ncclInvalidArgument);
  int version = 0;
  MUST(ncclGetVersion(&version));
  REQUIRE(version == NCCL_VERSION_CODE);
}

TEST_CASE("nccl: a rank that comes late to an init is no deadlock") {
  Fresh fresh;
  ncclUniqueId wider;
  MUST(ncclGetUniqueId(&wider));
  const auto join = [&](int rank) {
    ncclComm_t comm = nullptr;
    MUST(ncclCommInitRank(&comm, 3, wider, rank));
    MUST(ncclCommDestroy(comm));
  };
  std::string trouble;
  std::thread late([&] {
    try {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      MUST(cudaSetDevice(2));
      join(2);
    } catch (const std::exception& e) {
      trouble = e.what();
    }
  });
  const auto texts = texts_of_ranks(2, [&](TestRank& r) { join(r.rank); });
  late.join();
  REQUIRE(trouble == "");
  REQUIRE((texts[0] == "" && texts[1] == ""));
}

TEST_CASE("nccl: init waits for all ranks, also on the clock") {
  Fresh fresh{{"VIRTUAL_GPU", countable}};
  ncclUniqueId id;
  MUST(ncclGetUniqueId(&id));
  std::vector<virtual_gpu::Picoseconds> times(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      cudaSetDevice(r);
      TestStream stream;
      if (r == 1) busy(stream, device_array<float>(1), 900);
      cudaStreamSynchronize(stream);
      ncclComm_t comm = nullptr;
      ncclCommInitRank(&comm, 2, id, r);
      times[r] = virtual_gpu::host_time();
      ncclCommDestroy(comm);
    });
  for (std::thread& t : threads) t.join();
  REQUIRE((times[0] == 900 && times[1] == 900));
}

// ---- one thread for several GPUs -----------------------------------------------------------

namespace {

struct OneThread {  // drives two GPUs
  ncclComm_t comms[2] = {};
  cudaStream_t streams[2] = {};
  float* x[2] = {};
  OneThread() {
    MUST(ncclCommInitAll(comms, 2, nullptr));
    for (int d = 0; d < 2; ++d) {
      MUST(cudaSetDevice(d));
      MUST(cudaStreamCreateWithFlags(&streams[d], cudaStreamNonBlocking));
      x[d] = device_array<float>(1);
      *x[d] = static_cast<float>(d + 1);
    }
  }
  ~OneThread() {
    for (ncclComm_t comm : comms) ncclCommDestroy(comm);
    for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
  }
  ncclResult_t all_reduce(int d) {
    return ncclAllReduce(x[d], x[d], 1, ncclFloat, ncclSum, comms[d], streams[d]);
  }
};

}  // namespace

TEST_CASE("nccl: one thread drives two GPUs with a group, also in strict mode") {
  for (const char* strict : {"0", "1"}) {
    Fresh fresh{{"VIRTUAL_GPU_STRICT", strict}};
    OneThread t;
    MUST(ncclGroupStart());
    for (int d = 0; d < 2; ++d) MUST(t.all_reduce(d));
    MUST(ncclGroupEnd());
    for (int d = 0; d < 2; ++d) MUST(cudaStreamSynchronize(t.streams[d]));
    REQUIRE((*t.x[0] == 3 && *t.x[1] == 3));
  }
}

TEST_CASE("nccl: one thread that drives two GPUs without a group is reported in strict mode") {
  Fresh fresh{{"VIRTUAL_GPU_STRICT", "1"}};
  OneThread t;
  ncclResult_t status = t.all_reduce(0);  // waits for rank 1, whose call comes after it
  if (status == ncclSuccess) status = t.all_reduce(1);
  REQUIRE(status == ncclRemoteError);
  const cudaError_t error = cudaStreamSynchronize(t.streams[0]);
  fails_with(error, cudaErrorLaunchFailure,
             {"deadlock", "rank 0 of 2 in the first ncclAllReduce", "strict: the host waits"});
}

TEST_CASE("nccl: init-all refuses a GPU twice and one that is not there") {
  Fresh fresh;
  ncclComm_t comms[3] = {};
  const int twice[] = {1, 2, 1}, missing[] = {0, 8, 1};
  fails_with(ncclCommInitAll(comms, 3, twice), ncclInvalidUsage, {"both on GPU 1"});
  fails_with(ncclCommInitAll(comms, 3, missing), ncclInvalidArgument, {"there is no GPU 8"});
  fails_with(ncclCommInitAll(comms, 0, nullptr), ncclInvalidArgument, {"0 devices"});
}

// ---- strict mode ---------------------------------------------------------------------------

namespace {

// Right stream by stream: each message has its own communicator and stream. But the hosts call
// in opposite orders, and NCCL's first call of a pair may wait for the peer's host.
std::vector<std::string> crossed(const char* strict, bool warmed_up) {
  Fresh fresh{{"VIRTUAL_GPU_STRICT", strict}};
  return texts_of_ranks(2, [&](TestRank& r) {
    ncclComm_t a = nullptr, b = nullptr;
    MUST(ncclCommSplit(r.comm, 0, 0, &a, nullptr));
    MUST(ncclCommSplit(r.comm, 0, 0, &b, nullptr));
    TestStream second;
    float* x = r.filled<float>(2);
    const auto on_a = [&] {
      MUST(r.rank == 0 ? ncclSend(x, 1, ncclFloat, 1, a, r.stream)
                       : ncclRecv(x, 1, ncclFloat, 0, a, r.stream));
    };
    const auto on_b = [&] {
      MUST(r.rank == 1 ? ncclSend(x + 1, 1, ncclFloat, 0, b, second)
                       : ncclRecv(x + 1, 1, ncclFloat, 1, b, second));
    };
    if (warmed_up) on_a(), on_b();
    if (r.rank == 0)
      on_a(), on_b();
    else
      on_b(), on_a();
    r.synchronize();
    MUST(cudaStreamSynchronize(second));
    MUST(ncclCommDestroy(a));
    MUST(ncclCommDestroy(b));
  });
}

}  // namespace

TEST_CASE("nccl: strict mode reports hosts that wait for each other's first calls") {
  for (const std::string& text : crossed("0", false)) REQUIRE(text == "");
  for (const std::string& text : crossed("1", true)) REQUIRE(text == "");
  some_rank_says(crossed("1", false),
                 {"deadlock", "rank 0 of 2 in the first ncclSend of 1 float to rank 1",
                  "rank 1 of 2 in the first ncclSend of 1 float to rank 0"});
}

TEST_CASE("nccl: strict mode lets right programs through") {
  Fresh fresh{{"VIRTUAL_GPU_STRICT", "1"}};
  on_ranks(4, [](TestRank& r) {
    const Check<float> check{r, 33};
    check.reductions();
    check.moves();
  });
}

// ---- many ----------------------------------------------------------------------------------

namespace {

// More threads than cores. Every element's sum is looked at.
void many_small(int p, int n, const char* jitter) {
  Fresh fresh{{"VIRTUAL_GPU_JITTER", jitter}};
  on_ranks(p, [&](TestRank& r) {
    int32_t *in = device_array<int32_t>(n), *out = device_array<int32_t>(n);
    for (int i = 0; i < n; ++i) in[i] = (r.rank + 1) * (i % 1000);
    for (int i = 0; i < n; ++i)
      MUST(ncclAllReduce(in + i, out + i, 1, ncclInt32, ncclSum, r.comm, r.stream));
    r.synchronize();
    for (int i = 0; i < n; ++i)
      if (out[i] != p * (p + 1) / 2 * (i % 1000)) verify(false, "sum " + std::to_string(i));
  });
}

}  // namespace

TEST_CASE("nccl: 100,000 all-reduces of one element over 8 ranks") {
  many_small(8, sanitized ? 3000 : 100000, "");
}

TEST_CASE("nccl: small all-reduces over 4 and 16 ranks, at random times") {
  many_small(4, sanitized ? 1000 : 5000, "1");
  Fresh fresh{{"VIRTUAL_GPU_COUNT", "16"}};
  many_small(16, sanitized ? 200 : 1000, "2");
}
