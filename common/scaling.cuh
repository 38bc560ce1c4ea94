// What training in a 16-bit format needs: rounding to it and back, the loss scale, and an update
// of the 32-bit masters that skips what has overflowed. All decisions are taken on the GPU: the
// host has issued the next step long before it could know how this one went.
//
// A gradient below the format's least number would round to 0, so the loss is multiplied by a
// scale, and with it every gradient. If one becomes infinite, the whole update is skipped, on all
// ranks, and the scale halved: that is how a good scale is found, and nothing is wrong. After a
// window of clean updates it is doubled. bfloat16 has float's range and needs no scale.
#pragma once

#include "kernels.cuh"
#include "mesh.cuh"

constexpr double largest_scale = 1 << 24, least_scale = 1;

enum class Precision { fp32, fp16, bf16 };  // fp32 stands for `real`

struct MixedConfig : MeshConfig {
  int accumulate = 1;            // K: an update's samples go through the pipeline in K rounds
  Precision precision = Precision::fp32;
  double loss_scale = 0;         // 0: dynamic
  int64_t scale_window = 2000;   // clean updates before a dynamic scale is doubled
  double first_scale = 65536;    // what a dynamic scale begins with
  bool dynamic_scale() const { return precision == Precision::fp16 && loss_scale == 0; }
  double initial_scale() const {
    return precision != Precision::fp16 ? 1 : loss_scale ? loss_scale : first_scale;
  }
};

inline void mixed_options(MixedConfig& c, Options& o) {
  o.integer("accumulate", "K", "rounds of micro-batches before an update", c.accumulate, 1,
            1 << 20);
  o.choice("precision", {"fp32", "fp16", "bf16"}, "of weights, activations and messages",
           c.precision);
  o.number_or("dynamic", "loss-scale", "N", "fp16 only: what the loss is multiplied by",
              c.loss_scale);
  o.integer("scale-window", "W", "clean updates until a dynamic scale is doubled",
            c.scale_window, int64_t{1}, int64_t{1} << 31);
  mesh_options(c, o);
}

inline void refuse_mixed(const MixedConfig& c, const Shape& shape) {
  refuse_mesh(c, shape);
  const std::string word = c.precision == Precision::fp16 ? "fp16" : "bf16";
  if (c.precision != Precision::fp32 && sizeof(real) != sizeof(float))
    throw BadInput("--precision: " + word + " needs 32-bit masters, this is a build with " +
                   "REAL=double; fp32, or a build with REAL=float would be right");
  if (c.loss_scale && c.precision != Precision::fp16)
    throw BadInput("--loss-scale: " + shortest(c.loss_scale) +
                   " given, only --precision fp16 has a loss scale");
  if (c.scale_window != MixedConfig{}.scale_window &&
      (c.precision != Precision::fp16 || c.loss_scale))
    throw BadInput("--scale-window: " + std::to_string(c.scale_window) +
                   " given, only a dynamic loss scale of --precision fp16 has a window");
  // It and its inverse must be ordinary floats, with room for what they multiply.
  if (c.loss_scale && (c.loss_scale < 0x1p-100 || c.loss_scale > 0x1p100))
    throw BadInput("--loss-scale: " + shortest(c.loss_scale) +
                   " given, dynamic or a number from 2^-100 to 2^100 would be right");
}

constexpr int patience = 32;  // after so many skips in a row no scale will help

// On every rank's GPU, the same everywhere.
struct ScaleState {
  real scale;           // of the loss, and so of all gradients; constant inside an update
  int32_t overflow;     // in this update: 1 if a gradient is not finite, on any rank
  int32_t in_a_row;     // skipped updates; from `patience` on nothing changes any more
  int32_t skipped;      // in all
  int64_t clean;        // updates since the scale changed
  int64_t applied;      // updates, and so the index of the next one's rate
};

// low = wide * scale, rounded to nearest; without a scale: as it is
template <class Low>
__global__ void narrow_kernel(Low* low, const real* wide, int64_t n, const real* scale) {
  for (int64_t i = first_index(); i < n; i += grid_stride())
    low[i] = static_cast<Low>(scale ? wide[i] * *scale : wide[i]);
}
template <class Low>
void narrow(Low* low, const real* wide, int64_t n, const real* scale, cudaStream_t stream) {
  launch(stream, n, narrow_kernel<Low>, low, wide, n, scale);
}

template <class Low>
__global__ void widen_kernel(real* wide, const Low* low, int64_t n) {
  for (int64_t i = first_index(); i < n; i += grid_stride()) wide[i] = static_cast<real>(low[i]);
}
template <class Low>
void widen(real* wide, const Low* low, int64_t n, cudaStream_t stream) {
  launch(stream, n, widen_kernel<Low>, wide, low, n);
}

// *overflow = 1 if a number of g [n] is infinite or none: then g - g is not 0. Threads that find
// one write the same.
template <class T>
__global__ void find_overflow_kernel(int32_t* overflow, const T* g, int64_t n) {
  for (int64_t i = first_index(); i < n; i += grid_stride())
    if (!(g[i] - g[i] == T{0})) *overflow = 1;
}
inline void find_overflow(int32_t* overflow, const real* g, int64_t n, cudaStream_t stream) {
  launch(stream, n, find_overflow_kernel<real>, overflow, g, n);
}

// g = gradient / scale; v = mu v + g; w = w - lr v; low = w rounded. Or nothing, if the update is
// skipped. w and v are 32 bits wide: an update too small for the format is not lost, but adds up.
template <class Low>
__global__ void update_scaled_kernel(real* weight, real* velocity, Low* low, const real* gradient,
                                     int64_t n, const real* rates, real momentum,
                                     const ScaleState* state) {
  if (state->overflow || state->in_a_row >= patience) return;
  const real unscale = 1 / state->scale, rate = rates[state->applied];
  for (int64_t i = first_index(); i < n; i += grid_stride()) {
    velocity[i] = momentum * velocity[i] + gradient[i] * unscale;
    weight[i] -= rate * velocity[i];
    low[i] = static_cast<Low>(weight[i]);
  }
}
template <class Low>
void update_scaled(real* weight, real* velocity, Low* low, const real* gradient, int64_t n,
                   const real* rates, double momentum, const ScaleState* state,
                   cudaStream_t stream) {
  launch(stream, n, update_scaled_kernel<Low>, weight, velocity, low, gradient, n, rates,
         static_cast<real>(momentum), state);
}

// After each update, by one thread. *now: the scale for the next one, negative if this one was
// skipped; the host reads it at leisure.
template <class T>
__global__ void next_scale_kernel(ScaleState* state, T* now, bool dynamic, int64_t window) {
  if (first_index() != 0) return;
  ScaleState s = *state;
  const bool skip = s.overflow || s.in_a_row >= patience;
  if (skip) {
    s.skipped += s.in_a_row < patience;
    s.in_a_row += s.in_a_row < patience;
    s.clean = 0;
    if (dynamic && s.scale > T(least_scale))
      s.scale = s.scale / 2 > T(least_scale) ? s.scale / 2 : T(least_scale);
  } else {
    ++s.applied;
    s.in_a_row = 0;
    if (dynamic && ++s.clean == window) {
      s.clean = 0;
      if (s.scale < T(largest_scale))
        s.scale = s.scale * 2 < T(largest_scale) ? s.scale * 2 : T(largest_scale);
    }
  }
  s.overflow = 0;
  *state = s;
  *now = skip ? -s.scale : s.scale;
}
inline void next_scale(ScaleState* state, real* now, bool dynamic, int64_t window,
                       cudaStream_t stream) {
  launch(stream, 1, next_scale_kernel<real>, state, now, dynamic, window);
}

// What happened to the scale in updates first .. first + now.size() - 1, in words; `before` is
// the scale before them, and then after them.
inline std::string scale_story(const std::vector<real>& now, int64_t first, real& before) {
  std::string story;
  for (size_t i = 0; i < now.size(); before = std::abs(now[i++])) {
    const real after = std::abs(now[i]);
    if (now[i] > 0 && after == before) continue;
    story += "update " + std::to_string(first + 1 + static_cast<int64_t>(i)) +
             (now[i] < 0 ? ": a gradient is not finite, so it is skipped" : "");
    if (after == before) story += "\n";
    else
      story += (now[i] < 0 ? "; loss scale " : ": loss scale ") + shortest(before) + " -> " +
               shortest(after) + (now[i] < 0 ? " (a skip now and then is normal)\n" : "\n");
  }
  return story;
}
