// The CUDA runtime's calls, on top of runtime.cc.
#include <algorithm>
#include <cstring>

#include "nvtx3/nvToolsExt.h"
#include "runtime.h"

using namespace virtual_gpu;

struct VirtualEvent {
  int device;
  bool timing;
  MarkPointer mark;  // of the latest record; none before the first
};

namespace {

VirtualEvent& get(cudaEvent_t event) { return *reinterpret_cast<VirtualEvent*>(event); }

// On a GPU a memory call may wait for the device, and for every peer: a rank that makes one
// while its collective waits for others can hang them all. Here that is an error, decided on
// the modelled clock, so at every run alike.
std::string hazard(Host& h) {
  std::vector<Stream*> streams;
  {
    DeviceLock guard(device(h.device));
    streams.assign(device(h.device).streams.begin(), device(h.device).streams.end());
  }
  for (Stream* s : streams) {
    const auto unfinished = [s] { return s->nccl_done != s->nccl_issued; };
    {
      Lock lock;
      if (!unfinished() && s->nccl_end <= h.now) continue;
    }
    if (poll(h, record_mark(*s))) continue;
    return format("stream %d of GPU %d has NCCL work that this thread has not waited for; on a "
                  "GPU this call can deadlock all ranks", s->number, s->device);
  }
  return "";
}

// Everything this device's streams have been given is done, as before a free on a GPU.
void drain(Host& h, int index) {
  std::vector<Stream*> streams;
  {
    DeviceLock guard(device(index));
    streams.assign(device(index).streams.begin(), device(index).streams.end());
  }
  for (Stream* s : streams) {
    const MarkPointer mark = record_mark(*s);
    wait_for_mark(h.actor, *mark.get(), "a wait for the device");
    if (mark->done) h.now = std::max(h.now, mark->time);
  }
}

cudaError_t after_waiting(Call& call) {
  if (!run_failed()) return cudaSuccess;
  call.host.detail = run_failure();
  call.host.detail_code = call.host.last_error = cudaErrorLaunchFailure;
  return cudaErrorLaunchFailure;
}

cudaError_t synchronize(Call& call, const MarkPointer& mark) {
  wait_for_mark(call.host.actor, *mark.get(), call.name);
  if (run_failed()) return after_waiting(call);
  call.host.now = std::max(call.host.now, mark->time);
  call.host.asked.clear();
  call.host.asked_owners.clear();
  return cudaSuccess;
}

cudaError_t query(Call& call, const MarkPointer& mark) {
  if (poll(call.host, mark)) return cudaSuccess;
  if (run_failed()) return after_waiting(call);
  return call.host.last_error = cudaErrorNotReady;
}

}  // namespace

// ---- devices -------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  Call call("cudaGetDeviceCount");
  *count = device_count();
  return call.error;
}

cudaError_t cudaGetDevice(int* index) {
  Call call("cudaGetDevice");
  if (!call.ok()) return call.error;
  *index = call.host.device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int index) {
  const bool valid = index >= 0 && index < device_count();
  if (valid) host().device = host().actor.device = index;
  Call call("cudaSetDevice");
  if (!valid)
    return fail(call, cudaErrorInvalidDevice,
                format("there is no GPU %d, there are %d", index, device_count()));
  return call.error;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int index) {
  Call call("cudaGetDeviceProperties");
  if (!call.ok()) return call.error;
  if (index < 0 || index >= device_count())
    return fail(call, cudaErrorInvalidDevice,
                format("there is no GPU %d, there are %d", index, device_count()));
  *prop = {};
  std::strncpy(prop->name, ("virtual " + hardware().name).c_str(), sizeof prop->name - 1);
  prop->totalGlobalMem = static_cast<size_t>(hardware().memory);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  Call call("cudaDeviceSynchronize");
  if (!call.ok()) return call.error;
  drain(call.host, call.host.device);
  return after_waiting(call);
}

// ---- errors --------------------------------------------------------------------------------

cudaError_t cudaGetLastError() { return std::exchange(host().last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return host().last_error; }

namespace {
struct Named {
  cudaError_t error;
  const char *name, *text;
};
#define NAMED(error, text) {error, #error, text}
const Named error_names[] = {
    NAMED(cudaSuccess, "no error"),
    NAMED(cudaErrorInvalidValue, "invalid argument"),
    NAMED(cudaErrorMemoryAllocation, "out of memory"),
    NAMED(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    NAMED(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    NAMED(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version"),
    NAMED(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    NAMED(cudaErrorInvalidDevice, "invalid device ordinal"),
    NAMED(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    NAMED(cudaErrorNotReady, "device not ready"),
    NAMED(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    NAMED(cudaErrorLaunchFailure, "unspecified launch failure"),
    NAMED(cudaErrorNotPermitted, "operation not permitted"),
    NAMED(cudaErrorUnknown, "unknown error"),
};
#undef NAMED
const Named& named(cudaError_t error) {
  static const Named unknown = {cudaErrorUnknown, "unrecognized error code", "unrecognized error code"};
  for (const Named& n : error_names)
    if (n.error == error) return n;
  return unknown;
}
}  // namespace

const char* cudaGetErrorName(cudaError_t error) { return named(error).name; }

const char* cudaGetErrorString(cudaError_t error) {
  Host& h = host();
  if (error == cudaSuccess || h.detail_code != error || h.detail.empty()) return named(error).text;
  h.text = std::string(named(error).text) + ": " + h.detail;
  return h.text.c_str();
}

// ---- memory --------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** p, size_t size) {
  Call call("cudaMalloc");
  if (!call.ok()) return call.error;
  if (!p) return fail(call, cudaErrorInvalidValue, "devPtr is null");
  *p = nullptr;
  if (size == 0) return cudaSuccess;
  if (const std::string problem = hazard(call.host); !problem.empty())
    return fail(call, cudaErrorNotPermitted, problem);
  Device& d = device(call.host.device);
  const int64_t total = hardware().memory;
  {
    DeviceLock guard(d);
    const int64_t left = total ? total - d.counters.memory_used : INT64_MAX;
    if (size > static_cast<uint64_t>(left))
      return fail(call, cudaErrorMemoryAllocation,
                  format("%zu bytes wanted on GPU %d, %lld of %lld are free", size,
                         call.host.device, static_cast<long long>(left),
                         static_cast<long long>(total)));
    d.counters.memory_used += size;
    d.counters.memory_peak = std::max(d.counters.memory_peak, d.counters.memory_used);
    ++d.counters.allocations;
  }
  if ((*p = allocate(size, call.host.device, false))) return cudaSuccess;
  DeviceLock guard(d);
  d.counters.memory_used -= size;
  --d.counters.allocations;
  return fail(call, cudaErrorMemoryAllocation,
              format("this machine has not %zu bytes for GPU %d", size, call.host.device));
}

cudaError_t cudaFree(void* p) {
  Call call("cudaFree");
  if (!call.ok()) return call.error;
  if (!p) return cudaSuccess;
  Allocation what;
  if (!is_allocation(p, false, &what)) {
    const std::string problem = pointer_problem(p, 0, call.host.device, "devPtr");
    return fail(call, cudaErrorInvalidValue,
                problem.empty() ? format("devPtr %p is not the start of an allocation", p) : problem);
  }
  if (const std::string problem = hazard(call.host); !problem.empty())
    return fail(call, cudaErrorNotPermitted, problem);
  drain(call.host, what.device);
  if (run_failed()) return after_waiting(call);
  release(p, false, &what);
  DeviceLock guard(device(what.device));
  device(what.device).counters.memory_used -= what.size;
  ++device(what.device).counters.frees;
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** p, size_t size) {
  Call call("cudaMallocHost");
  if (!call.ok()) return call.error;
  if (!p) return fail(call, cudaErrorInvalidValue, "ptr is null");
  *p = nullptr;
  if (size == 0) return cudaSuccess;
  if (const std::string problem = hazard(call.host); !problem.empty())
    return fail(call, cudaErrorNotPermitted, problem);
  if (!(*p = allocate(size, call.host.device, true)))
    return fail(call, cudaErrorMemoryAllocation, format("this machine has not %zu bytes", size));
  DeviceLock guard(device(call.host.device));
  ++device(call.host.device).counters.host_allocations;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* p) {
  Call call("cudaFreeHost");
  if (!call.ok()) return call.error;
  if (!p) return cudaSuccess;
  if (const std::string problem = hazard(call.host); !problem.empty())
    return fail(call, cudaErrorNotPermitted, problem);
  drain(call.host, call.host.device);
  Allocation was;
  if (!release(p, true, &was))
    return fail(call, cudaErrorInvalidValue, format("ptr %p is not live pinned memory", p));
  DeviceLock guard(device(call.host.device));
  ++device(call.host.device).counters.host_frees;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Call call("cudaMemGetInfo");
  if (!call.ok()) return call.error;
  const int64_t used = counters(call.host.device).memory_used, all = hardware().memory;
  *total = all ? static_cast<size_t>(all) : SIZE_MAX;
  *free = *total - static_cast<size_t>(used);
  return cudaSuccess;
}

namespace {

struct CopyClosure {
  void* to;
  const void* from;
  size_t bytes;
  int value;  // of a memset, where from is null
};

void run_copy(Stream& stream, Slot& slot) {
  const auto& c = *reinterpret_cast<const CopyClosure*>(slot.closure);
  if (!run_failed() && !skip_math()) {
    if (c.from) std::memcpy(c.to, c.from, c.bytes);
    else std::memset(c.to, c.value, c.bytes);
  }
  stream.occupy(slot, 0, slot.cost);
}

std::string copy_problem(void* dst, const void* src, size_t n, cudaMemcpyKind kind, int on_device) {
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  const std::string problem = to_device ? pointer_problem(dst, n, on_device, "dst")
                                        : host_pointer_problem(dst, "dst");
  if (!problem.empty()) return problem;
  return from_device ? pointer_problem(src, n, on_device, "src") : host_pointer_problem(src, "src");
}

}  // namespace

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t n, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  Call call("cudaMemcpyAsync");
  if (!call.ok()) return call.error;
  if (kind != cudaMemcpyHostToDevice && kind != cudaMemcpyDeviceToHost &&
      kind != cudaMemcpyDeviceToDevice)
    return fail(call, cudaErrorInvalidMemcpyDirection,
                format("kind %d is none of HostToDevice, DeviceToHost, DeviceToDevice", kind));
  if (const std::string problem = stream_problem(stream, -1); !problem.empty())
    return fail(call, cudaErrorInvalidResourceHandle, problem);
  if (n == 0) return cudaSuccess;
  Stream& s = get(stream);
  if (const std::string problem = copy_problem(dst, src, n, kind, s.device); !problem.empty())
    return fail(call, cudaErrorInvalidValue, problem);
  const Hardware& h = hardware();
  const double rate = kind == cudaMemcpyDeviceToDevice ? h.memory_bandwidth : h.host_bandwidth;
  const char* name = kind == cudaMemcpyHostToDevice   ? "copy host to device"
                     : kind == cudaMemcpyDeviceToHost ? "copy device to host"
                                                      : "copy on device";
  enqueue(s, name, Kind::copy, duration(h.launch) + time_of(static_cast<double>(n), rate),
          static_cast<int64_t>(n), CopyClosure{dst, src, n, 0}, run_copy);
  DeviceLock guard(device(s.device));
  ++device(s.device).counters.copies;
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t stream) {
  Call call("cudaMemsetAsync");
  if (!call.ok()) return call.error;
  if (const std::string problem = stream_problem(stream, -1); !problem.empty())
    return fail(call, cudaErrorInvalidResourceHandle, problem);
  if (n == 0) return cudaSuccess;
  Stream& s = get(stream);
  if (const std::string problem = pointer_problem(p, n, s.device, "devPtr"); !problem.empty())
    return fail(call, cudaErrorInvalidValue, problem);
  const Hardware& h = hardware();
  enqueue(s, "memset", Kind::copy,
          duration(h.launch) + time_of(static_cast<double>(n), h.memory_bandwidth),
          static_cast<int64_t>(n), CopyClosure{p, nullptr, n, value}, run_copy);
  DeviceLock guard(device(s.device));
  ++device(s.device).counters.copies;
  return cudaSuccess;
}

// ---- streams -------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  Call call("cudaStreamCreateWithFlags");
  if (!call.ok()) return call.error;
  if (!stream) return fail(call, cudaErrorInvalidValue, "pStream is null");
  if (flags != cudaStreamNonBlocking)
    return fail(call, cudaErrorInvalidValue,
                format("flags %u: only cudaStreamNonBlocking is modelled", flags));
  *stream = reinterpret_cast<cudaStream_t>(create_stream(call.host.device));
  if (!*stream) return fail(call, cudaErrorMemoryAllocation, "this machine starts no more threads");
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Call call("cudaStreamDestroy");
  if (const std::string problem = stream_problem(stream, -1); !problem.empty())
    return fail(call, cudaErrorInvalidResourceHandle, problem);
  destroy_stream(&get(stream));  // also after a failure: its thread must end
  return call.error;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Call call("cudaStreamSynchronize");
  if (!call.ok()) return call.error;
  if (const std::string problem = stream_problem(stream, -1); !problem.empty())
    return fail(call, cudaErrorInvalidResourceHandle, problem);
  return synchronize(call, record_mark(get(stream)));
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Call call("cudaStreamQuery");
  if (!call.ok()) return call.error;
  if (const std::string problem = stream_problem(stream, -1); !problem.empty())
    return fail(call, cudaErrorInvalidResourceHandle, problem);
  Stream& s = get(stream);
  if (!s.tail_is_last) {  // the same question again asks about the same mark
    s.tail = record_mark(s);
    s.tail_is_last = true;
  }
  return query(call, s.tail);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  Call call("cudaStreamWaitEvent");
  if (!call.ok()) return call.error;
  if (const std::string problem = stream_problem(stream, -1); !problem.empty())
    return fail(call, cudaErrorInvalidResourceHandle, problem);
  if (!event) return fail(call, cudaErrorInvalidResourceHandle, "event is null");
  if (flags) return fail(call, cudaErrorInvalidValue, "flags must be 0");
  if (get(event).mark) wait_mark_in_stream(get(stream), get(event).mark);
  return cudaSuccess;
}

// ---- events --------------------------------------------------------------------------------

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  Call call("cudaEventCreate");
  if (!call.ok()) return call.error;
  if (!event) return fail(call, cudaErrorInvalidValue, "event is null");
  if (flags & ~static_cast<unsigned>(cudaEventDisableTiming))
    return fail(call, cudaErrorInvalidValue, format("flags %u are not modelled", flags));
  auto* made = new VirtualEvent{call.host.device, !(flags & cudaEventDisableTiming), {}};
  *event = reinterpret_cast<cudaEvent_t>(made);
  DeviceLock guard(device(call.host.device));
  ++device(call.host.device).counters.events_created;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Call call("cudaEventDestroy");
  if (!event) return fail(call, cudaErrorInvalidResourceHandle, "event is null");
  {
    DeviceLock guard(device(get(event).device));
    ++device(get(event).device).counters.events_destroyed;
  }
  delete &get(event);  // what waits for its mark keeps the mark
  return call.error;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Call call("cudaEventRecord");
  if (!call.ok()) return call.error;
  if (!event) return fail(call, cudaErrorInvalidResourceHandle, "event is null");
  if (const std::string problem = stream_problem(stream, get(event).device); !problem.empty())
    return fail(call, cudaErrorInvalidResourceHandle, problem);
  get(event).mark = record_mark(get(stream));
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  Call call("cudaEventQuery");
  if (!call.ok()) return call.error;
  if (!event) return fail(call, cudaErrorInvalidResourceHandle, "event is null");
  return get(event).mark ? query(call, get(event).mark) : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Call call("cudaEventSynchronize");
  if (!call.ok()) return call.error;
  if (!event) return fail(call, cudaErrorInvalidResourceHandle, "event is null");
  return get(event).mark ? synchronize(call, get(event).mark) : cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  Call call("cudaEventElapsedTime");
  if (!call.ok()) return call.error;
  if (!ms) return fail(call, cudaErrorInvalidValue, "ms is null");
  for (cudaEvent_t event : {start, end}) {
    if (!event || !get(event).mark || !get(event).timing)
      return fail(call, cudaErrorInvalidResourceHandle, "an event was never recorded, or has no timing");
    if (!poll(call.host, get(event).mark))
      return run_failed() ? after_waiting(call)
                          : fail(call, cudaErrorNotReady, "an event is not complete");
  }
  if (get(start).device != get(end).device)
    return fail(call, cudaErrorInvalidResourceHandle, "the events belong to two devices");
  *ms = static_cast<float>(static_cast<double>(get(end).mark->time - get(start).mark->time) * 1e-9);
  return cudaSuccess;
}

// ---- launch --------------------------------------------------------------------------------

namespace {

struct KernelHeader {
  void (*run)(const void*);
  void* padding;  // the closure that follows is aligned to 16
};

void run_kernel(Stream& stream, Slot& slot) {
  const auto& header = *reinterpret_cast<const KernelHeader*>(slot.closure);
  if (!run_failed() && !skip_math()) header.run(slot.closure + sizeof(KernelHeader));
  stream.occupy(slot, 0, slot.cost);
}

std::string configuration_problem(const cudaLaunchConfig_t& c) {
  const auto shape = [](const dim3& d) { return format("(%u, %u, %u)", d.x, d.y, d.z); };
  const auto empty = [](const dim3& d) { return !d.x || !d.y || !d.z; };
  if (empty(c.gridDim) || empty(c.blockDim))
    return "grid " + shape(c.gridDim) + ", block " + shape(c.blockDim) + ": a dimension is zero";
  const uint64_t threads = uint64_t{c.blockDim.x} * c.blockDim.y * c.blockDim.z;
  if (threads > 1024 || c.blockDim.z > 64)
    return "block " + shape(c.blockDim) + " has more than 1024 threads, or more than 64 in z";
  if (c.gridDim.x > 0x7fffffffu || c.gridDim.y > 65535 || c.gridDim.z > 65535)
    return "grid " + shape(c.gridDim) + " exceeds (2^31-1, 65535, 65535)";
  if (c.dynamicSmemBytes || c.numAttrs) return "shared memory and attributes are not modelled";
  return "";
}

}  // namespace

cudaError_t virtual_gpu::launch_kernel(const cudaLaunchConfig_t& config, const KernelCall& kernel) {
  Call call("cudaLaunchKernelEx");
  if (!call.ok()) return call.error;
  const int on_device = call.host.device;
  if (const std::string problem = configuration_problem(config); !problem.empty())
    return fail(call, cudaErrorInvalidConfiguration, problem);
  if (const std::string problem = stream_problem(config.stream, on_device); !problem.empty())
    return fail(call, cudaErrorInvalidResourceHandle, problem);
  for (int i = 0; i < kernel.pointer_count; ++i) {
    if (!kernel.pointers[i]) continue;  // an optional argument; reading it would crash here too
    const std::string problem = pointer_problem(kernel.pointers[i], 0, on_device, "argument");
    if (!problem.empty()) return fail(call, cudaErrorIllegalAddress, problem);
  }
  alignas(16) unsigned char closure[Slot::capacity];
  if (sizeof(KernelHeader) + kernel.closure_size > sizeof closure)
    return fail(call, cudaErrorInvalidValue,
                format("%zu bytes of arguments do not fit a launch slot", kernel.closure_size));
  const KernelHeader header{kernel.run, nullptr};
  std::memcpy(closure, &header, sizeof header);
  std::memcpy(closure + sizeof header, kernel.closure, kernel.closure_size);
  const double threads = double{1} * config.gridDim.x * config.gridDim.y * config.gridDim.z *
                         config.blockDim.x * config.blockDim.y * config.blockDim.z;
  // Three memory accesses a thread: what an elementwise kernel does.
  const Picoseconds cost =
      duration(hardware().launch) +
      time_of(3 * threads * static_cast<double>(kernel.element_size), hardware().memory_bandwidth);
  enqueue(get(config.stream), run_kernel, "kernel", Kind::kernel, cost, 0, closure,
          sizeof header + kernel.closure_size);
  DeviceLock guard(device(on_device));
  ++device(on_device).counters.launches;
  return cudaSuccess;
}

// ---- NVTX ----------------------------------------------------------------------------------

namespace {

// Names live for ever, since queued work and the timeline point to them; a thread looks in its
// own table first.
const char* intern(const std::string& name) {
  thread_local std::map<std::string, const char*> mine;
  const auto found = mine.find(name);
  if (found != mine.end()) return found->second;
  static auto* all = new std::set<std::string>;
  Lock lock;
  return mine[name] = all->insert(name).first->c_str();
}

}  // namespace

int nvtxRangePushA(const char* message) {
  auto& ranges = host().ranges;
  ranges.push_back(intern(message));
  return static_cast<int>(ranges.size()) - 1;
}

int nvtxRangePop() {
  auto& ranges = host().ranges;
  if (ranges.empty()) return -1;
  ranges.pop_back();
  return static_cast<int>(ranges.size());
}
