// The modelled hardware: what an operation takes on the virtual clock.
#pragma once

#include <cstdint>
#include <string>

#include "virtual_gpu.h"

namespace virtual_gpu {

// Rates are per second, one direction for links; latencies in seconds; a rate of 0 is unlimited.
struct Hardware {
  std::string name;
  double fp64 = 0, fp32 = 0, fp16 = 0, bf16 = 0;  // FLOP/s of a GEMM in that type
  double memory_bandwidth = 0;                    // bytes/s
  double launch = 0;                              // seconds from issue to start
  double host_bandwidth = 0;                      // PCIe, bytes/s
  double link_bandwidth = 0, link_latency = 0;    // between GPUs of a node
  double net_bandwidth = 0, net_latency = 0;      // between nodes
  int node_gpus = 8;
  int64_t memory = 0;                             // bytes a GPU; 0 is unlimited
};

// Reads "preset[,field=value]..." over VIRTUAL_GPU_MEMORY's size; throws std::invalid_argument
// with one line that names what was given and what would be right.
Hardware parse_hardware(const std::string& text, const std::string& memory);

// A link between a set of GPUs is the slowest that a ring over them crosses.
struct Link {
  double bandwidth, latency;
};
Link link(const Hardware&, int lowest_device, int highest_device);

Picoseconds duration(double seconds);
// work / rate in picoseconds; unlimited rates take no time.
Picoseconds time_of(double work, double rate);

}  // namespace virtual_gpu
