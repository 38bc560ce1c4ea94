// The virtual GPU's streams and events: what is ordered, what is not, and when the host knows.
#include <chrono>

#include "virtual.h"

namespace {

using virtual_gpu::host_time;

__global__ void set_kernel(int* x, int value) { *x = value; }
__global__ void append_kernel(int* x, int digit) { *x = *x * 10 + digit; }

cudaError_t set(cudaStream_t stream, int* x, int value) {
  return launch_threads(stream, 1, set_kernel, x, value);
}

// The streams' own time, without waiting longer than needed.
virtual_gpu::Picoseconds end_of(cudaStream_t stream) {
  MUST(cudaStreamSynchronize(stream));
  return host_time();
}

}  // namespace

TEST_CASE("streams: launch, copy and memset return before the work is done") {
  Fresh fresh;
  Gate gate;
  TestStream stream;
  int* x = device_array<int>(3);
  x[0] = x[1] = x[2] = 7;
  int from = 1, to = 0;
  gate.hold(stream);
  MUST(set(stream, x, 5));
  MUST(cudaMemcpyAsync(x + 1, &from, sizeof from, cudaMemcpyHostToDevice, stream));
  MUST(cudaMemsetAsync(x + 2, 0, sizeof *x, stream));
  MUST(cudaMemcpyAsync(&to, x, sizeof to, cudaMemcpyDeviceToHost, stream));
  TestEvent event;
  MUST(cudaEventRecord(event, stream));
  // The gate is shut, so nothing of the above can have run: each call came back before.
  REQUIRE((x[0] == 7 && x[1] == 7 && x[2] == 7 && to == 0));
  gate.open = true;
  MUST(cudaEventSynchronize(event));
  REQUIRE((x[0] == 5 && x[1] == 1 && x[2] == 0 && to == 5));
}

TEST_CASE("streams: work of one stream runs in the order of its calls") {
  Fresh fresh{{"VIRTUAL_GPU_JITTER", "5"}};
  TestStream stream;
  int* x = device_array<int>(2);
  int first = 0, second = 0;
  MUST(cudaMemsetAsync(x, 0, 2 * sizeof(int), stream));
  for (int digit = 1; digit <= 4; ++digit) MUST(launch_threads(stream, 1, append_kernel, x, digit));
  MUST(cudaMemcpyAsync(&first, x, sizeof first, cudaMemcpyDeviceToHost, stream));
  MUST(cudaMemcpyAsync(x + 1, x, sizeof *x, cudaMemcpyDeviceToDevice, stream));
  MUST(launch_threads(stream, 1, append_kernel, x + 1, 5));
  MUST(cudaMemcpyAsync(&second, x + 1, sizeof second, cudaMemcpyDeviceToHost, stream));
  MUST(cudaStreamSynchronize(stream));
  REQUIRE(first == 1234);
  REQUIRE(second == 12345);
}

TEST_CASE("streams: two streams have no order, and overlap on the clock") {
  Fresh fresh{{"VIRTUAL_GPU", countable}};
  Gate gate;
  TestStream a, b;
  float* any = device_array<float>(1);
  gate.hold(a);
  busy(a, any, 1000);
  busy(b, any, 1000);
  REQUIRE(end_of(b) == 1000);  // while a is held up
  gate.open = true;
  REQUIRE(end_of(a) == 1000);
}

TEST_CASE("streams: cudaStreamDestroy waits for the stream's work") {
  Fresh fresh;
  int* x = device_array<int>(1);
  {
    TestStream stream;
    for (int i = 0; i <= 300; ++i) MUST(set(stream, x, i));
  }
  REQUIRE(*x == 300);
  REQUIRE(virtual_gpu::counters(0).streams_created == 1);
  REQUIRE(virtual_gpu::counters(0).streams_destroyed == 1);
}

TEST_CASE("streams: cudaDeviceSynchronize waits for all streams of its device") {
  Fresh fresh{{"VIRTUAL_GPU", countable}};
  TestStream a, b;
  float* any = device_array<float>(1);
  busy(a, any, 300);
  busy(b, any, 500);
  MUST(cudaDeviceSynchronize());
  REQUIRE(host_time() == 500);
}

TEST_CASE("streams: a full queue makes the host wait, and goes on") {
  Fresh fresh;
  Gate gate;
  TestStream stream;
  int* x = device_array<int>(1);
  *x = 0;
  std::atomic<int> issued{0};
  constexpr int total = 5000;
  gate.hold(stream);
  std::string trouble;
  std::thread host([&] {
    try {
      for (int i = 0; i < total; ++i, ++issued)
        MUST(launch_threads(
            stream, 1, +[](int* p) { ++*p; }, x));
    } catch (const std::exception& e) {
      trouble = e.what();
    }
  });
  for (int before = -1; before != issued;) {  // until nothing has been issued for a while
    before = issued;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  const int at_most = issued;
  gate.open = true;
  host.join();
  MUST(cudaStreamSynchronize(stream));
  REQUIRE(trouble == "");
  REQUIRE(at_most > 100);
  REQUIRE(at_most <= 1024);
  REQUIRE(*x == total);
}

TEST_CASE("streams: the queue gives and takes work from many host threads") {
  Fresh fresh;
  TestStream stream;
  int* x = device_array<int>(1);
  *x = 0;
  std::vector<std::thread> hosts;
  std::atomic<int> errors{0};
  for (int t = 0; t < 4; ++t)
    hosts.emplace_back([&] {
      for (int i = 0; i < 2000; ++i)
        errors += launch_threads(
                      stream, 1, +[](int* p) { ++*p; }, x) != cudaSuccess;
    });
  for (std::thread& host : hosts) host.join();
  MUST(cudaStreamSynchronize(stream));
  REQUIRE(errors == 0);
  REQUIRE(*x == 8000);
}

TEST_CASE("streams: only cudaStreamNonBlocking streams can be made") {
  Fresh fresh;
  cudaStream_t stream = nullptr;
  fails_with(cudaStreamCreateWithFlags(&stream, 0), cudaErrorInvalidValue,
             {"cudaStreamCreateWithFlags", "cudaStreamNonBlocking"});
  fails_with(cudaStreamCreateWithFlags(nullptr, cudaStreamNonBlocking), cudaErrorInvalidValue, {});
}

TEST_CASE("streams: a destroyed stream is refused by every call") {
  Fresh fresh;
  cudaStream_t stream = nullptr;
  TestEvent event;
  float* x = device_array<float>(1);
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  MUST(cudaStreamDestroy(stream));
  const std::vector<std::string> said = {"the stream does not exist"};
  fails_with(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle, said);
  fails_with(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle, said);
  fails_with(cudaStreamQuery(stream), cudaErrorInvalidResourceHandle, said);
  fails_with(cudaStreamWaitEvent(stream, event), cudaErrorInvalidResourceHandle, said);
  fails_with(cudaEventRecord(event, stream), cudaErrorInvalidResourceHandle, said);
  fails_with(cudaMemsetAsync(x, 0, 4, stream), cudaErrorInvalidResourceHandle, said);
  fails_with(launch_threads(stream, 1, busy_kernel, x), cudaErrorInvalidResourceHandle, said);
}

// ---- events --------------------------------------------------------------------------------

TEST_CASE("events: a wait binds to the latest record at the time of the call") {
  Fresh fresh{{"VIRTUAL_GPU", countable}};
  TestStream a, b;
  TestEvent event;
  float* any = device_array<float>(1);
  busy(a, any, 100);
  MUST(cudaEventRecord(event, a));
  busy(a, any, 100);
  MUST(cudaEventRecord(event, a));  // overwrites: 200
  MUST(cudaStreamWaitEvent(b, event));
  Gate gate;
  gate.hold(a);
  busy(a, any, 10000);
  MUST(cudaEventRecord(event, a));  // after the wait call: does not matter to b
  busy(b, any, 10);
  REQUIRE(end_of(b) == 210);  // while a is still held up
  gate.open = true;
  REQUIRE(end_of(a) == 10200);
}

TEST_CASE("events: what follows a wait sees what preceded the record") {
  for (int repeat = 0; repeat < 50; ++repeat) {
    Fresh fresh{{"VIRTUAL_GPU_JITTER", std::to_string(repeat + 1)}};
    TestStream a, b;
    TestEvent event;
    int* x = device_array<int>(2);
    MUST(set(a, x, repeat));
    MUST(cudaEventRecord(event, a));
    MUST(cudaStreamWaitEvent(b, event));
    MUST(launch_threads(
        b, 1, +[](int* p) { p[1] = p[0]; }, x));
    MUST(cudaStreamSynchronize(b));
    REQUIRE(x[1] == repeat);
  }
}

TEST_CASE("events: one that was never recorded is complete, and has no time") {
  Fresh fresh;
  TestStream stream;
  TestEvent never, recorded;
  REQUIRE(cudaEventQuery(never) == cudaSuccess);
  REQUIRE(cudaEventSynchronize(never) == cudaSuccess);
  REQUIRE(cudaStreamWaitEvent(stream, never) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
  MUST(cudaEventRecord(recorded, stream));
  MUST(cudaEventSynchronize(recorded));
  float ms = -1;
  for (auto [from, to] : {std::pair(&never, &recorded), std::pair(&recorded, &never)})
    fails_with(cudaEventElapsedTime(&ms, *from, *to), cudaErrorInvalidResourceHandle,
               {"cudaEventElapsedTime", "never recorded"});
  REQUIRE(ms == -1);
}

TEST_CASE("events: elapsed time is 400 without timing, 600 while unfinished, then exact") {
  Fresh fresh{{"VIRTUAL_GPU", countable}};
  TestStream stream;
  TestEvent start, end, no_timing(cudaEventDisableTiming);
  float* any = device_array<float>(1);
  float ms = -1;
  MUST(cudaEventRecord(start, stream));
  busy(stream, any, 2'000'000'000);
  MUST(cudaEventRecord(end, stream));
  MUST(cudaEventRecord(no_timing, stream));
  // In real time this has long been done; the host's time is still 0.
  fails_with(cudaEventElapsedTime(&ms, start, end), cudaErrorNotReady, {"not complete"});
  MUST(cudaEventSynchronize(end));
  fails_with(cudaEventElapsedTime(&ms, start, no_timing), cudaErrorInvalidResourceHandle,
             {"no timing"});
  MUST(cudaEventElapsedTime(&ms, start, end));
  REQUIRE(ms == 2.0f);
  MUST(cudaEventElapsedTime(&ms, end, start));
  REQUIRE(ms == -2.0f);
}

TEST_CASE("events: record on another device's stream is 400; wait, query, synchronize work") {
  Fresh fresh{{"VIRTUAL_GPU", countable}};
  TestStream here;
  TestEvent event, second;
  float* any = device_array<float>(1);
  MUST(cudaSetDevice(1));
  TestStream there;
  TestEvent other;
  fails_with(cudaEventRecord(event, there), cudaErrorInvalidResourceHandle,
             {"cudaEventRecord", "the stream belongs to GPU 1", "GPU 0"});
  MUST(cudaSetDevice(0));
  busy(here, any, 700);
  MUST(cudaEventRecord(event, here));
  MUST(cudaSetDevice(1));
  REQUIRE(cudaStreamWaitEvent(there, event) == cudaSuccess);
  MUST(cudaEventRecord(other, there));
  REQUIRE(cudaEventQuery(event) == cudaErrorNotReady);
  REQUIRE(cudaEventSynchronize(event) == cudaSuccess);
  REQUIRE(end_of(there) == 700);
  float ms = 0;
  fails_with(cudaEventElapsedTime(&ms, event, other), cudaErrorInvalidResourceHandle,
             {"two devices"});
  fails_with(launch_threads(here, 1, busy_kernel, any), cudaErrorInvalidResourceHandle,
             {"cudaLaunchKernelEx", "the stream belongs to GPU 0", "GPU 1"});
  REQUIRE(cudaMemsetAsync(any, 0, sizeof *any, here) == cudaSuccess);  // as on a GPU
  MUST(cudaStreamSynchronize(here));
}

TEST_CASE("events: destroyed while a stream waits for it, it still counts") {
  Fresh fresh{{"VIRTUAL_GPU", countable}};
  TestStream a, b;
  float* any = device_array<float>(1);
  Gate gate;
  {
    TestEvent event;
    gate.hold(a);
    busy(a, any, 99);
    MUST(cudaEventRecord(event, a));
    MUST(cudaStreamWaitEvent(b, event));
  }
  gate.open = true;
  REQUIRE(end_of(b) == 99);
  fails_with(cudaEventDestroy(nullptr), cudaErrorInvalidResourceHandle, {"null"});
}

// ---- asking --------------------------------------------------------------------------------

TEST_CASE("query: answers in virtual time, and leaves \"not ready\" as the last error") {
  Fresh fresh{{"VIRTUAL_GPU", countable}};
  TestStream stream;
  float* any = device_array<float>(1);
  REQUIRE(cudaStreamQuery(stream) == cudaSuccess);
  busy(stream, any, 100);
  REQUIRE(cudaStreamQuery(stream) == cudaErrorNotReady);
  REQUIRE(host_time() == 0);
  REQUIRE(cudaPeekAtLastError() == cudaErrorNotReady);
  REQUIRE(cudaGetLastError() == cudaErrorNotReady);
  REQUIRE(cudaGetLastError() == cudaSuccess);
  REQUIRE(cudaStreamQuery(stream) == cudaSuccess);  // asked again: time has passed
  REQUIRE(host_time() == 100);
}

TEST_CASE("query: work that is done by the host's time is ready at the first question") {
  Fresh fresh{{"VIRTUAL_GPU", countable}};
  TestStream a, b;
  TestEvent event;
  float* any = device_array<float>(1);
  busy(a, any, 50);
  MUST(cudaEventRecord(event, a));
  busy(b, any, 60);
  MUST(cudaStreamSynchronize(b));
  REQUIRE(cudaEventQuery(event) == cudaSuccess);
  REQUIRE(host_time() == 60);
}

TEST_CASE("query: a polling loop gives the same answers at every run") {
  std::vector<std::string> stories;
  for (int seed = 1; seed <= 20; ++seed) {
    Fresh fresh{{"VIRTUAL_GPU", countable}, {"VIRTUAL_GPU_JITTER", std::to_string(seed)}};
    TestStream a, b;
    TestEvent of_a, of_b;
    float* any = device_array<float>(1);
    std::string story;
    // The host does more for whichever stream is free, as a parameter server does.
    int left_a = 3, left_b = 5;
    const auto more = [&](cudaStream_t s, cudaEvent_t e, unsigned time) {
      busy(s, any, time);
      MUST(cudaEventRecord(e, s));
    };
    more(a, of_a, 100);
    more(b, of_b, 70);
    while (left_a > 0 || left_b > 0) {
      for (int i = 0; i < 2; ++i) {
        int& left = i ? left_b : left_a;
        if (left == 0) continue;
        const cudaError_t status = cudaEventQuery(i ? of_b : of_a);
        story += (i ? "b" : "a") + std::to_string(status) + "@" + std::to_string(host_time()) + " ";
        if (status != cudaSuccess || --left == 0) continue;
        more(i ? b : a, i ? of_b : of_a, i ? 70 : 100);
      }
    }
    stories.push_back(story);
  }
  for (const std::string& story : stories) REQUIRE(story == stories[0]);
  REQUIRE(contains(stories[0], "b0@70 "));
  REQUIRE(contains(stories[0], "a0@100 "));
  REQUIRE(contains(stories[0], "b0@350 "));
}

TEST_CASE("query: waiting by polling ends when waiting by synchronize would") {
  Fresh fresh{{"VIRTUAL_GPU", countable}};
  TestStream a;
  float* any = device_array<float>(1);
  int asked = 1;
  for (unsigned i = 1; i <= 10; ++i) busy(a, any, i);
  while (cudaStreamQuery(a) == cudaErrorNotReady) ++asked;
  REQUIRE(host_time() == 55);
  REQUIRE(asked == 2);
}
