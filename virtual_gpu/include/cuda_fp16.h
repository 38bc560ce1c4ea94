// The virtual GPU's <cuda_fp16.h>: IEEE half precision, 5 bits of exponent, 10 of fraction.
// Rounds to nearest even, keeps subnormals, goes to infinity from 65520, has one NaN (0x7fff).
#pragma once

#include "small_float.h"

struct __half_raw {
  unsigned short x;
};

struct __half {
  __half() = default;
  constexpr __half(const __half_raw& raw) : bits_(raw.x) {}
  inline __half(float x);
  inline __half(double x);
  template <virtual_gpu::ShortInteger I>
  __half(I x) : __half(static_cast<double>(x)) {}
  operator __half_raw() const { return {bits_}; }
  inline operator float() const;

 private:
  unsigned short bits_;
};
typedef __half half;

inline unsigned short __half_as_ushort(__half h) { return static_cast<__half_raw>(h).x; }
inline __half __ushort_as_half(unsigned short bits) { return __half_raw{bits}; }

// Without branches, so that loops over it vectorise, and without a subnormal float as operand,
// which many processors handle in microcode. Adding a power of two of the right size makes the
// float adder itself cut the fraction at half's last bit, rounding to nearest even.
inline __half __float2half(float x) {
  const uint32_t word = std::bit_cast<uint32_t>(x), twice = word << 1;
  const float magnitude = __builtin_fabsf(x) * 0x1p112f * 0x1p-110f;  // from 65536: infinite
  const uint32_t exponent = twice & 0xff000000u;
  const uint32_t least = exponent < 0x71000000u ? 0x71000000u : exponent;
  const float cutter = std::bit_cast<float>((least >> 1) + 0x07800000u);
  const uint32_t cut = std::bit_cast<uint32_t>(cutter + magnitude);
  const uint32_t finite = ((cut >> 13) & 0x7c00u) + (cut & 0x0fffu);
  const uint32_t bits = twice > 0xff000000u ? 0x7fffu : (word >> 16 & 0x8000u) | finite;
  return __ushort_as_half(static_cast<unsigned short>(bits));
}

inline float __half2float(__half h) {
  const uint32_t bits = __half_as_ushort(h), magnitude = bits & 0x7fffu;
  const float normal = std::bit_cast<float>((magnitude << 13) + (224u << 23)) * 0x1p-112f;
  const float subnormal = std::bit_cast<float>(magnitude | 126u << 23) - 0.5f;
  const float value = magnitude < 0x400u ? subnormal : normal;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | (bits & 0x8000u) << 16);
}

inline __half __double2half(double x) { return __float2half(virtual_gpu::round_to_odd(x)); }

inline __half::__half(float x) { *this = __float2half(x); }
inline __half::__half(double x) { *this = __double2half(x); }
inline __half::operator float() const { return __half2float(*this); }

VIRTUAL_GPU_OPERATORS(__half)
