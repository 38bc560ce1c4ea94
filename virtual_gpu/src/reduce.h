// The arithmetic of the virtual NCCL: element types and sums over ranks, in rank order, so that
// a sum never depends on thread timing. Half types are rounded at every addition, as a ring's
// hops do; Avg multiplies by 1/n in the element type first, as NCCL does.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "nccl.h"

namespace virtual_gpu {

inline size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
  }
  return 0;
}

inline const char* type_name(ncclDataType_t type) {
  static const char* const names[] = {"int8",   "uint8", "int32", "uint32", "int64",
                                      "uint64", "half",  "float", "double", "bfloat16"};
  return size_of(type) ? names[type] : "unknown type";
}

inline const char* reduction_name(ncclRedOp_t op) {
  static const char* const names[] = {"sum", "product", "maximum", "minimum", "average"};
  return op >= ncclSum && op <= ncclAvg ? names[op] : "unknown operation";
}

template <class T>
struct Element {  // how T computes: in itself
  using Wide = T;
  static T widen(T x) { return x; }
  static T narrow(T x) { return x; }
};
template <>
struct Element<__half> {
  using Wide = float;
  static float widen(__half x) { return __half2float(x); }
  static __half narrow(float x) { return __float2half(x); }
};
template <>
struct Element<__nv_bfloat16> {
  using Wide = float;
  static float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __nv_bfloat16 narrow(float x) { return __float2bfloat16(x); }
};

template <class T>
struct Reduction {
  using E = Element<T>;
  using Wide = typename E::Wide;
  static constexpr bool integer = std::is_integral_v<T>;

  // Integers wrap, as on a GPU; in the signed type that would be undefined.
  static Wide plus(Wide a, Wide b) {
    if constexpr (integer) return static_cast<Wide>(uint64_t(a) + uint64_t(b));
    else return a + b;
  }
  static Wide times(Wide a, Wide b) {
    if constexpr (integer) return static_cast<Wide>(uint64_t(a) * uint64_t(b));
    else return a * b;
  }
  // As fmaxf and fminf, which NCCL uses: a number wins over a NaN, on whichever rank it is.
  static Wide most(Wide a, Wide b) { return a < b || a != a ? b : a; }
  static Wide least(Wide a, Wide b) { return b < a || a != a ? b : a; }

  static void add_block(T* sum, const T* x, size_t n, ncclRedOp_t op) {
    const auto each = [&](auto combine) {
      for (size_t i = 0; i < n; ++i) sum[i] = E::narrow(combine(E::widen(sum[i]), E::widen(x[i])));
    };
    switch (op) {
      case ncclProd: return each([](Wide a, Wide b) { return times(a, b); });
      case ncclMax: return each([](Wide a, Wide b) { return most(a, b); });
      case ncclMin: return each([](Wide a, Wide b) { return least(a, b); });
      default: return each([](Wide a, Wide b) { return plus(a, b); });
    }
  }

  static void scale_block(T* x, size_t n, Wide factor) {
    for (size_t i = 0; i < n; ++i) x[i] = E::narrow(E::widen(x[i]) * factor);
  }

  // out[*][0..count) = in[0][offset..) op in[1][offset..) op ...; block by block, so that a
  // result may take the place of an input.
  static void run(const std::vector<const void*>& in, size_t offset, const std::vector<void*>& out,
                  size_t count, ncclRedOp_t op) {
    constexpr size_t block = 4096 / sizeof(T);
    T sum[block], scaled[block];
    const bool premultiply = op == ncclAvg && !integer;
    const Wide factor = premultiply ? E::widen(E::narrow(Wide(1) / Wide(in.size()))) : Wide(1);
    for (size_t at = 0; at < count; at += block) {
      const size_t n = std::min(block, count - at);
      for (size_t r = 0; r < in.size(); ++r) {
        const T* x = static_cast<const T*>(in[r]) + offset + at;
        T* to = r == 0 ? sum : scaled;
        if (r == 0 || premultiply) std::memcpy(to, x, n * sizeof(T));
        if (premultiply) scale_block(to, n, factor);
        if (r > 0) add_block(sum, premultiply ? scaled : x, n, op);
      }
      if (op == ncclAvg && integer)
        for (size_t i = 0; i < n; ++i)
          sum[i] = E::narrow(E::widen(sum[i]) / static_cast<Wide>(in.size()));
      for (void* to : out) std::memcpy(static_cast<T*>(to) + at, sum, n * sizeof(T));
    }
  }
};

inline bool can_reduce(ncclDataType_t type) {
  return type == ncclInt32 || type == ncclInt64 || type == ncclUint64 || type == ncclFloat32 ||
         type == ncclFloat64 || type == ncclFloat16 || type == ncclBfloat16;
}

inline void reduce_ranks(const std::vector<const void*>& in, size_t offset,
                         const std::vector<void*>& out, size_t count, ncclDataType_t type,
                         ncclRedOp_t op) {
  switch (type) {
    case ncclInt32: return Reduction<int32_t>::run(in, offset, out, count, op);
    case ncclInt64: return Reduction<int64_t>::run(in, offset, out, count, op);
    case ncclUint64: return Reduction<uint64_t>::run(in, offset, out, count, op);
    case ncclFloat32: return Reduction<float>::run(in, offset, out, count, op);
    case ncclFloat64: return Reduction<double>::run(in, offset, out, count, op);
    case ncclFloat16: return Reduction<__half>::run(in, offset, out, count, op);
    case ncclBfloat16: return Reduction<__nv_bfloat16>::run(in, offset, out, count, op);
    default: return;
  }
}

}  // namespace virtual_gpu
