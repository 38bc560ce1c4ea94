// What the virtual GPU can tell beyond CUDA's own calls: exact times, counters, the timeline.
// For tests and tools; a chapter never includes it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace virtual_gpu {

using Picoseconds = int64_t;  // integers, so that sums of durations are exact

enum class Kind { kernel, gemm, copy, collective, transfer };  // transfer: send and receive

// One operation on the modelled clock.
struct Operation {
  int device, stream;      // stream: its number on that device, in the order of creation
  Kind kind;
  const char* call;        // "gemm", "kernel", "ncclAllReduce", ...
  const char* range;       // the innermost NVTX range at the call, "" outside any
  Picoseconds issue, start, end;
  int64_t bytes;           // moved by a copy, or sent by this rank; 0 for arithmetic
  const char* step;        // the outermost NVTX range if it is a "step N", else ""
};

// Every finished operation since the last reset, by device, stream and start. Recorded only
// after record_timeline(true), or where VIRTUAL_GPU_TRACE, _SVG or _TEXT names a file for it.
void record_timeline(bool on);
std::vector<Operation> timeline();

struct Counters {
  int64_t api_calls = 0, launches = 0, gemms = 0, copies = 0;
  int64_t allocations = 0, frees = 0, host_allocations = 0, host_frees = 0;
  int64_t streams_created = 0, streams_destroyed = 0, events_created = 0, events_destroyed = 0;
  int64_t handles_created = 0, handles_destroyed = 0;
  int64_t communicators_created = 0, communicators_destroyed = 0;
  int64_t collectives = 0, sends = 0, receives = 0;
  int64_t collective_bytes_sent = 0, bytes_sent = 0;  // by the table of costs; send calls' own
  int64_t memory_used = 0, memory_peak = 0;
};
Counters counters(int device);

// This host thread's time on the modelled clock.
Picoseconds host_time();

// What VIRTUAL_GPU and its companions would set, for the runs that follow: a preset's name,
// then any fields, "ideal,link_bandwidth=100e9,memory=64M". Call only when nothing is running.
void configure(const std::string& hardware);

// Forgets errors, counters, the timeline and every thread's time, and reads the environment
// again. Call only when no stream and no communicator is left.
void reset();

}  // namespace virtual_gpu
