#include "hardware.h"

#include <cmath>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <vector>

namespace virtual_gpu {
namespace {

// Dense peaks (vendors often print twice these, with sparsity); links in one direction.
// Sources, by row: NVIDIA's data sheets for H100 SXM, A100 SXM 80 GB, V100 SXM2, T4, L4; board
// specifications for GeForce RTX 4090 and RTX 3060 12 GB (fp16 with fp32 sums). fp64 is the
// non-tensor peak. Types that a GPU lacks (bf16 before Ampere) run at its fp32 rate. Launch: a
// round 3 microseconds. Link latency: the step of NCCL's own ring model, protocol LL
// (src/graph/tuning.cc): NVLink 0.6, PCIe 1.0, network 2.7 microseconds. InfiniBand a GPU: NDR
// 50, HDR 25 GB/s; 10 GbE 1.25 GB/s. Memory in bytes as sold (10^9).
const Hardware presets[] = {
    // `ideal`: arithmetic takes time, everything else none, so that textbook formulas come out
    // exactly; one FLOP is one picosecond.
    {"ideal", 1e12, 1e12, 1e12, 1e12, 0, 0, 0, 0, 0, 0, 0, 8, 0},
    {"h100", 34e12, 67e12, 989e12, 989e12, 3350e9, 3e-6, 63e9, 450e9, 0.6e-6, 50e9, 2.7e-6, 8,
     80'000'000'000},
    {"a100", 9.7e12, 19.5e12, 312e12, 312e12, 2039e9, 3e-6, 31e9, 300e9, 0.6e-6, 25e9, 2.7e-6, 8,
     80'000'000'000},
    {"v100", 7.8e12, 15.7e12, 125e12, 15.7e12, 900e9, 3e-6, 16e9, 150e9, 0.6e-6, 12.5e9, 2.7e-6,
     8, 16'000'000'000},
    {"t4", 0.25e12, 8.1e12, 65e12, 8.1e12, 320e9, 3e-6, 16e9, 16e9, 1.0e-6, 1.25e9, 2.7e-6, 4,
     16'000'000'000},
    {"l4", 0.47e12, 30.3e12, 121e12, 121e12, 300e9, 3e-6, 31e9, 31e9, 1.0e-6, 12.5e9, 2.7e-6, 8,
     24'000'000'000},
    {"rtx4090", 1.29e12, 82.6e12, 165e12, 165e12, 1008e9, 3e-6, 31e9, 31e9, 1.0e-6, 1.25e9,
     2.7e-6, 2, 24'000'000'000},
    {"rtx3060", 0.2e12, 12.7e12, 25.5e12, 25.5e12, 360e9, 3e-6, 31e9, 31e9, 1.0e-6, 1.25e9,
     2.7e-6, 1, 12'000'000'000},
    // Two GPUs a node and 10 GbE between nodes: where the best mesh differs from NVLink's.
    {"slownet", 9.7e12, 19.5e12, 312e12, 312e12, 2039e9, 3e-6, 31e9, 300e9, 0.6e-6, 1.25e9,
     2.7e-6, 2, 80'000'000'000},
};

[[noreturn]] void refuse(const std::string& text) { throw std::invalid_argument(text); }

double number(const std::string& field, const std::string& value) {
  char* end = nullptr;
  const double x = std::strtod(value.c_str(), &end);
  if (value.empty() || *end || !std::isfinite(x) || x < 0)
    refuse("VIRTUAL_GPU: " + field + "=" + value + " is not a number >= 0");
  return x;
}

// "64M": K, M, G are powers of 1024.
int64_t bytes(const std::string& what, const std::string& value) {
  char* end = nullptr;
  const double x = std::strtod(value.c_str(), &end);
  const std::string unit = end;
  const std::map<std::string, double> units = {
      {"", 1}, {"K", 1024.}, {"M", 1048576.}, {"G", 1073741824.}};
  const double size = units.count(unit) ? x * units.at(unit) : 0;
  if (end == value.c_str() || !(size >= 1) || size > 1e15)  // a NaN too
    refuse(what + "=" + value + " is not a size such as 800000, 64M or 16G");
  return static_cast<int64_t>(size);
}

void set_field(Hardware& h, const std::string& field, const std::string& value) {
  const std::map<std::string, double*> fields = {
      {"fp64", &h.fp64}, {"fp32", &h.fp32}, {"fp16", &h.fp16}, {"bf16", &h.bf16},
      {"memory_bandwidth", &h.memory_bandwidth}, {"launch", &h.launch},
      {"host_bandwidth", &h.host_bandwidth}, {"link_bandwidth", &h.link_bandwidth},
      {"link_latency", &h.link_latency}, {"net_bandwidth", &h.net_bandwidth},
      {"net_latency", &h.net_latency}};
  if (field == "memory") {
    h.memory = bytes("VIRTUAL_GPU: memory", value);
  } else if (field == "node_gpus") {
    const double n = number(field, value);
    if (n < 1 || n > 4096 || n != std::floor(n))
      refuse("VIRTUAL_GPU: node_gpus=" + value + " is not a whole number from 1 to 4096");
    h.node_gpus = static_cast<int>(n);
  } else if (fields.count(field)) {
    *fields.at(field) = number(field, value);
  } else {
    std::string known;
    for (const auto& [name, _] : fields) known += name + ", ";
    refuse("VIRTUAL_GPU: no field '" + field + "'; there are " + known + "node_gpus, memory");
  }
}

}  // namespace

Hardware parse_hardware(const std::string& text, const std::string& memory) {
  const std::string name = text.substr(0, text.find(','));
  Hardware found;
  std::string known;
  for (const Hardware& h : presets) {
    if (h.name == name) found = h;
    known += (known.empty() ? "" : ", ") + h.name;
  }
  if (found.name.empty()) refuse("VIRTUAL_GPU=" + name + ": no such preset; there are " + known);
  for (size_t at = name.size(); at < text.size();) {
    const size_t next = std::min(text.find(',', at + 1), text.size());
    const std::string field = text.substr(at + 1, next - at - 1);
    const size_t equals = field.find('=');
    if (equals == std::string::npos)
      refuse("VIRTUAL_GPU: '" + field + "' is not field=value");
    set_field(found, field.substr(0, equals), field.substr(equals + 1));
    at = next;
  }
  if (!memory.empty()) found.memory = bytes("VIRTUAL_GPU_MEMORY", memory);
  return found;
}

Link link(const Hardware& h, int lowest_device, int highest_device) {
  const bool one_node = lowest_device / h.node_gpus == highest_device / h.node_gpus;
  return one_node ? Link{h.link_bandwidth, h.link_latency} : Link{h.net_bandwidth, h.net_latency};
}

Picoseconds duration(double seconds) { return std::llround(seconds * 1e12); }

Picoseconds time_of(double work, double rate) { return rate > 0 ? duration(work / rate) : 0; }

}  // namespace virtual_gpu
