// What <cuda_fp16.h> and <cuda_bf16.h> share: both types compute in float and round once.
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>

namespace virtual_gpu {

// A double as a float that rounds further as the double itself would: cut off, and odd where
// something was cut. (Rounding to nearest twice can land on the wrong side of a tie.)
inline float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  if (!(nearest < x || nearest > x)) return nearest;  // exact, or a NaN
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (__builtin_fabs(static_cast<double>(nearest)) > __builtin_fabs(x)) --bits;
  return std::bit_cast<float>(bits | 1);
}

template <class I>
concept ShortInteger = std::integral<I> && sizeof(I) <= 4;  // exact as a double

}  // namespace virtual_gpu

// float has more than twice the bits of either type, so float's result rounds to the right one.
#define VIRTUAL_GPU_OPERATORS(T)                                                        \
  inline T operator+(const T& a, const T& b) { return T(float(a) + float(b)); }         \
  inline T operator-(const T& a, const T& b) { return T(float(a) - float(b)); }         \
  inline T operator*(const T& a, const T& b) { return T(float(a) * float(b)); }         \
  inline T operator/(const T& a, const T& b) { return T(float(a) / float(b)); }         \
  inline T& operator+=(T& a, const T& b) { return a = a + b; }                          \
  inline T& operator-=(T& a, const T& b) { return a = a - b; }                          \
  inline T& operator*=(T& a, const T& b) { return a = a * b; }                          \
  inline T& operator/=(T& a, const T& b) { return a = a / b; }                          \
  inline T operator+(const T& a) { return a; }                                          \
  inline T operator-(const T& a) { return T(-float(a)); }                               \
  inline bool operator==(const T& a, const T& b) { return float(a) == float(b); }       \
  inline bool operator!=(const T& a, const T& b) { return float(a) != float(b); }       \
  inline bool operator<(const T& a, const T& b) { return float(a) < float(b); }         \
  inline bool operator<=(const T& a, const T& b) { return float(a) <= float(b); }       \
  inline bool operator>(const T& a, const T& b) { return float(a) > float(b); }         \
  inline bool operator>=(const T& a, const T& b) { return float(a) >= float(b); }
