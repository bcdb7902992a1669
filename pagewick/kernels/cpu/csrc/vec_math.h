// The vector layer's transcendental functions.
#pragma once

#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// e^r - 1 for |r| <= ln 2 / 2.
inline Vec small_expm1(Vec r) {
  // (e^r - 1 - r) / r^2, a Chebyshev fit.
  Vec p = set1(0x1.687b46p-10f);
  p = madd(p, r, set1(0x1.123bdcp-7f));
  p = madd(p, r, set1(0x1.555b5cp-5f));
  p = madd(p, r, set1(0x1.55548ep-3f));
  p = madd(p, r, set1(0x1.fffff8p-2f));
  return madd(p, r * r, r);
}

// e^x for x <= 88, relative error below 2^-22; below -88 exactly 0. NaN stays NaN.
inline Vec exp(Vec x) {
  x = max(set1(-88.0f), x);
  // Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits of the mantissa.
  const Vec shifted = madd(x, set1(0x1.715476p0f), set1(0x1.8p23f));
  const Vec n = shifted - 0x1.8p23f;
  // ln 2 in two parts, the first short enough for n * part to be exact.
  const Vec r = madd(n, set1(2.12194440e-4f), madd(n, set1(-0.693359375f), x));
  return (small_expm1(r) + 1.0f) * (Vec)(((IntVec)shifted + 127) << 23);
}

// e^x - 1 for x <= 0, relative error below 2^-20, also near 0.
inline Vec expm1(Vec x) { return x > -0.34f ? small_expm1(x) : exp(x) - 1.0f; }

inline float exp(float x) { return exp(set1(x))[0]; }

// 2^x for x <= 126, relative error below 2^-22; below -126.5 exactly 0. NaN stays NaN.
inline Vec exp2(Vec x) {
  x = max(set1(-127.0f), x);
  // As in exp, with the exponent's bias added on the way.
  constexpr float kShift = 0x1.8p23f + 127.0f;
  const Vec shifted = x + kShift;
  const Vec r = x - (shifted - kShift);
  // (2^r - 1) / r, a minimax fit for |r| <= 1 / 2.
  Vec p = set1(0x1.5bba14p-10f);
  p = madd(p, r, set1(0x1.3cea88p-7f));
  p = madd(p, r, set1(0x1.c6b752p-5f));
  p = madd(p, r, set1(0x1.ebf9bcp-3f));
  p = madd(p, r, set1(0x1.62e42ap-1f));
  p = madd(p, r, set1(1.0f));
  return p * (Vec)((IntVec)shifted << 23);
}

inline float exp2(float x) { return exp2(set1(x))[0]; }

#if defined(PW_HAS_BF16_DOT)
// 2^x for results that are rounded to bf16 next, relative error below 2^-13.7; below -126 exactly 0. NaN stays NaN.
inline Vec rough_exp2(Vec x) {
  const Vec r = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
  // A minimax fit for 0 <= r < 1.
  Vec p = set1(0x1.3f96a4p-4f);
  p = madd(p, r, set1(0x1.cefc4cp-3f));
  p = madd(p, r, set1(0x1.64444cp-1f));
  p = madd(p, r, set1(0x1.fff632p-1f));
  const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(is_normal, (__m512)p, (__m512)x);  // p * 2^floor(x)
}
#endif

// x / (1 + e^-s), computed with powers that cannot overflow.
inline Vec times_sigmoid(Vec x, Vec s) {
  const Vec power = exp(s > 0.0f ? -s : s);
  return x * ((s > 0.0f ? set1(1.0f) : power) / (power + 1.0f));
}

inline Vec silu(Vec x) { return times_sigmoid(x, x); }

// log(1 + e^x), relative error below 2^-21.
inline Vec softplus(Vec x) {
  // max(x, 0) + log(1 + t) with t = e^-|x|, and log(1 + t) = 2 atanh(s) with s = t / (2 + t), which is at most 1 / 3.
  const Vec t = exp(x > 0.0f ? -x : x), s = t / (t + 2.0f), square = s * s;
  Vec p = set1(1.0f / 15);
  p = madd(p, square, set1(1.0f / 13));
  p = madd(p, square, set1(1.0f / 11));
  p = madd(p, square, set1(1.0f / 9));
  p = madd(p, square, set1(1.0f / 7));
  p = madd(p, square, set1(1.0f / 5));
  p = madd(p, square, set1(1.0f / 3));
  return madd(s + s, madd(p, square, set1(1.0f)), max(zero(), x));
}

inline Vec tanh(Vec x) {
  const Vec bounded = max(set1(-20.0f), x);
  const Vec argument = bounded > 20.0f ? set1(20.0f) : bounded;
  return 1.0f - 2.0f / (exp(argument + argument) + 1.0f);
}

// The complementary error function of x >= 0, absolute error below 3e-7, relative error below 1e-5 up to 9.3; 0 from
// 9.4 on. NaN stays NaN. erfc(x) = t e^(-x^2) P(t) with t = 1 / (1 + x / 2), as in Numerical Recipes (Press et al.); P
// is a Chebyshev fit of our own for 0 <= x <= 9.5.
inline Vec erfc(Vec x) {
  const Vec t = 1.0f / madd(x, set1(0.5f), set1(1.0f));
  Vec p = set1(-0x1.eb0a6cp-5f);
  p = madd(p, t, set1(0x1.279338p-2f));
  p = madd(p, t, set1(-0x1.fb1996p-2f));
  p = madd(p, t, set1(0x1.2598cap-2f));
  p = madd(p, t, set1(-0x1.07bd5ap-5f));
  p = madd(p, t, set1(0x1.a39132p-3f));
  p = madd(p, t, set1(0x1.f0d83ep-3f));
  p = madd(p, t, set1(0x1.213764p-2f));
  p = madd(p, t, set1(0x1.20da6ep-2f));
  return p * t * exp(-x * x);
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
