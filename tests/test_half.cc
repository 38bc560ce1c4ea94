// The half types against what their formats say, value by value: all 65536 patterns, and for
// every two neighbours what lies in the middle and just beside it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "catch.h"

namespace {

struct Half {
  using type = __half;
  static constexpr int fraction = 10, largest_exponent = 15;
  static unsigned bits(type x) { return __half_as_ushort(x); }
  static type of(unsigned bits) { return __ushort_as_half(static_cast<unsigned short>(bits)); }
  static type round(float x) { return __float2half(x); }
  static type round(double x) { return __double2half(x); }
  static float widen(type x) { return __half2float(x); }
};

struct Bfloat {
  using type = __nv_bfloat16;
  static constexpr int fraction = 7, largest_exponent = 127;
  static unsigned bits(type x) { return __bfloat16_as_ushort(x); }
  static type of(unsigned bits) { return __ushort_as_bfloat16(static_cast<unsigned short>(bits)); }
  static type round(float x) { return __float2bfloat16(x); }
  static type round(double x) { return __double2bfloat16(x); }
  static float widen(type x) { return __bfloat162float(x); }
};

template <class F>
constexpr unsigned infinity = (2u * F::largest_exponent + 1) << F::fraction;

// What the bits say, by the definition of a binary format. The pattern of infinity gives the
// power of two at which it would go on.
template <class F>
double meaning(unsigned bits) {
  const int exponent = static_cast<int>((bits & 0x7fff) >> F::fraction);
  const int fraction = static_cast<int>(bits & ((1u << F::fraction) - 1));
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, 1 - F::largest_exponent - F::fraction)
                    : std::ldexp(fraction + (1 << F::fraction),
                                 exponent - F::largest_exponent - F::fraction);
  return bits & 0x8000 ? -magnitude : magnitude;
}

// Counted, not asserted one by one: there are half a million.
template <class F, class Float>
int wrong_roundings() {
  int wrong = 0;
  const Float outwards = std::numeric_limits<Float>::infinity();
  for (unsigned low = 0; low < infinity<F>; ++low) {
    const double middle = (meaning<F>(low) + meaning<F>(low + 1)) / 2;
    const auto tie = static_cast<Float>(middle);
    for (const unsigned sign : {0u, 0x8000u}) {
      const Float s = sign ? Float(-1) : Float(1);
      const unsigned even = low % 2 ? low + 1 : low;
      wrong += F::bits(F::round(s * tie)) != (sign | even);
      wrong += F::bits(F::round(s * std::nextafter(tie, outwards))) != (sign | (low + 1));
      wrong += F::bits(F::round(s * std::nextafter(tie, Float(0)))) != (sign | low);
    }
  }
  return wrong;
}

template <class F>
void check_format() {
  int wrong = 0;
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const unsigned magnitude = bits & 0x7fff;
    const float value = F::widen(F::of(bits));
    if (magnitude > infinity<F>) {
      wrong += !std::isnan(value) || (F::bits(F::round(value)) & 0x7fff) <= infinity<F>;
    } else if (magnitude == infinity<F>) {
      wrong += !std::isinf(value) || std::signbit(value) != (bits > 0x7fff);
      wrong += F::bits(F::round(value)) != bits || F::bits(F::round(double(value))) != bits;
    } else {
      wrong += value != meaning<F>(bits) || std::signbit(value) != (bits > 0x7fff);
      wrong += F::bits(F::round(value)) != bits || F::bits(F::round(double(value))) != bits;
    }
  }
  CHECK(wrong == 0);
  CHECK(wrong_roundings<F, float>() == 0);
  CHECK(wrong_roundings<F, double>() == 0);
}

template <class F>
void check_extremes() {
  const float inf = std::numeric_limits<float>::infinity();
  for (const double large : {1e39, 1e300, double(inf)}) {
    CHECK(F::bits(F::round(large)) == infinity<F>);
    CHECK(std::signbit(F::widen(F::round(-large))));
  }
  for (const double tiny : {1e-45, 1e-320}) {
    CHECK(F::bits(F::round(tiny)) == 0);
    CHECK(F::bits(F::round(-tiny)) == 0x8000);
    CHECK(F::bits(F::round(static_cast<float>(-tiny))) == 0x8000);
  }
  for (const uint32_t bits : {0x7f800001u, 0x7fc00000u, 0xffffffffu, 0x7f802000u, 0xff810000u}) {
    float nan;
    std::memcpy(&nan, &bits, sizeof nan);
    CHECK(std::isnan(F::widen(F::round(nan))));
    CHECK(std::isnan(F::widen(F::round(static_cast<double>(nan)))));
  }
}

template <class F>
void check_arithmetic() {
  using T = typename F::type;
  int wrong = 0;
  uint64_t state = 1;
  const auto same = [](T a, T b) {
    return F::bits(a) == F::bits(b) || (std::isnan(F::widen(a)) && std::isnan(F::widen(b)));
  };
  for (int i = 0; i < 100'000; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const T a = F::of(state >> 48), b = F::of(state >> 32 & 0xffff);
    const double x = F::widen(a), y = F::widen(b);
    wrong += !same(a + b, F::round(x + y)) || !same(a - b, F::round(x - y));
    wrong += !same(a * b, F::round(x * y)) || !same(a / b, F::round(x / y));
    wrong += (a < b) != (x < y) || (a <= b) != (x <= y) || (a > b) != (x > y);
    wrong += (a >= b) != (x >= y) || (a == b) != (x == y) || (a != b) != (x != y);
    T c = a;
    c += b, c -= b, c *= b, c /= b;
    wrong += !same(c, (a + b - b) * b / b) || !same(-a, F::round(-x)) || !same(+a, a);
  }
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("half: every pattern, every rounding boundary") { check_format<Half>(); }
TEST_CASE("bfloat16: every pattern, every rounding boundary") { check_format<Bfloat>(); }

TEST_CASE("half types: infinities, zeros, NaN") {
  check_extremes<Half>();
  check_extremes<Bfloat>();
  CHECK(Half::bits(Half::round(65519.99f)) == 0x7bff);
  CHECK(Half::bits(Half::round(65520.0f)) == 0x7c00);
  for (int e = 16; e < 128; ++e) CHECK(Half::bits(Half::round(std::ldexp(1.7f, e))) == 0x7c00);
  CHECK(Half::bits(Half::round(std::ldexp(1.0f, -24))) == 1);
  CHECK(Half::bits(Half::round(std::ldexp(1.0f, -25))) == 0);
}

TEST_CASE("half types: arithmetic rounds once") {
  check_arithmetic<Half>();
  check_arithmetic<Bfloat>();
}

TEST_CASE("half types convert as their names promise") {
  CHECK(std::is_trivially_copyable_v<half>);
  CHECK(std::is_trivially_copyable_v<nv_bfloat16>);
  CHECK(sizeof(half) == 2);
  CHECK(sizeof(nv_bfloat16) == 2);
  CHECK(float(half(1.5f)) == 1.5f);
  CHECK(float(half(3)) == 3.0f);
  CHECK(float(nv_bfloat16(0.1)) == 0.10009765625f);
  CHECK(float(nv_bfloat16(257)) == 256.0f);
  CHECK(static_cast<__half_raw>(half(1.0f)).x == 0x3c00);
  CHECK(static_cast<__nv_bfloat16_raw>(nv_bfloat16(1.0f)).x == 0x3f80);
}
