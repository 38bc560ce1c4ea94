// The virtual GPU's <cuda_bf16.h>: bfloat16, the upper half of a float. Rounds to nearest even,
// keeps subnormals, has one NaN (0x7fff).
#pragma once

#include "small_float.h"

struct __nv_bfloat16_raw {
  unsigned short x;
};

struct __nv_bfloat16 {
  __nv_bfloat16() = default;
  constexpr __nv_bfloat16(const __nv_bfloat16_raw& raw) : bits_(raw.x) {}
  inline __nv_bfloat16(float x);
  inline __nv_bfloat16(double x);
  template <virtual_gpu::ShortInteger I>
  __nv_bfloat16(I x) : __nv_bfloat16(static_cast<double>(x)) {}
  operator __nv_bfloat16_raw() const { return {bits_}; }
  inline operator float() const;

 private:
  unsigned short bits_;
};
typedef __nv_bfloat16 nv_bfloat16;

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) {
  return static_cast<__nv_bfloat16_raw>(h).x;
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return __nv_bfloat16_raw{bits}; }

inline __nv_bfloat16 __float2bfloat16(float x) {
  const uint32_t word = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (word + 0x7fffu + (word >> 16 & 1)) >> 16;  // a tie goes to even
  const uint32_t bits = word << 1 > 0xff000000u ? 0x7fffu : rounded;
  return __ushort_as_bfloat16(static_cast<unsigned short>(bits));
}

inline float __bfloat162float(__nv_bfloat16 h) {
  return std::bit_cast<float>(uint32_t{__bfloat16_as_ushort(h)} << 16);
}

inline __nv_bfloat16 __double2bfloat16(double x) {
  return __float2bfloat16(virtual_gpu::round_to_odd(x));
}

inline __nv_bfloat16::__nv_bfloat16(float x) { *this = __float2bfloat16(x); }
inline __nv_bfloat16::__nv_bfloat16(double x) { *this = __double2bfloat16(x); }
inline __nv_bfloat16::operator float() const { return __bfloat162float(*this); }

VIRTUAL_GPU_OPERATORS(__nv_bfloat16)
