// The search for scales and minima, as ../../reference_quantizers.py defines it.
//
// A lane of a vector is a group (or, when scales are rounded, a block), so that a sum over a group adds its numbers in
// order. Nothing uses a fused multiply-add.
#pragma once

#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

constexpr float kTiny = 0x1p-60f, kLargest = 0x1p28f;
constexpr int kStarts = 9, kRounds = 4;
constexpr float kFirstOffset = -1.25f, kOffsetStep = 0.3125f;

inline Vec magnitude(Vec x) { return x < 0.0f ? -x : x; }

inline Vec inverse(Vec x, float numerator = 1.0f) { return magnitude(x) > kTiny ? numerator / x : zero(); }

inline float inverse(float x) { return (x < 0.0f ? -x : x) > kTiny ? 1.0f / x : 0.0f; }

// The nearest whole number from low to top, the even one of two.
inline Vec nearest(Vec x, Vec low, Vec top) { return min(max(x, low), top) + 0x1.8p23f - 0x1.8p23f; }

struct Fit {
  Vec scale, weight, minimum;
};

// The number with the largest magnitude of each column of x [Size][stride], the first of several.
template <int Size>
Vec peak(const float* x, int64_t stride) {
  Vec best = load(x);
  for (int k = 1; k < Size; ++k) {
    const Vec value = load(x + k * stride);
    best = magnitude(value) > magnitude(best) ? value : best;
  }
  return best;
}

// refine_scale of the reference for columns of x and weights [Size][stride].
struct Refined {
  Vec scale, weight, gain;
};

template <int Size>
Refined refine_scale(const float* x, const float* weights, int64_t stride, Vec factor, Vec lowest, Vec highest) {
  Vec products = zero(), squares = zero();
  for (int round = 0; round < kRounds; ++round) {
    products = squares = zero();
    for (int k = 0; k < Size; ++k) {
      const Vec value = load(x + k * stride), level = nearest(value * factor, lowest, highest);
      const Vec weighted = load(weights + k * stride) * level;
      products += weighted * value;
      squares += weighted * level;
    }
    factor = squares * inverse(products);
  }
  const Vec scale = products * inverse(squares);
  return {scale, squares, scale * products};
}

// fit_scale of the reference for columns of x and weights [Size][stride].
template <int Size>
Fit fit_scale(const float* x, const float* weights, int64_t stride, int low, int top) {
  const Vec largest = peak<Size>(x, stride), lowest = set1(low), highest = set1(top);
  const float outermost = low != 0 ? low : top;
  if (weights == nullptr)
    return {low == -top ? magnitude(largest) / highest : largest / set1(outermost), zero(), zero()};
  Vec scale = zero(), scale_weight = zero(), best = zero();
  for (int start = 0; start < kStarts; ++start) {
    const Vec factor = inverse(largest, outermost + (kFirstOffset + start * kOffsetStep));
    const Refined found = refine_scale<Size>(x, weights, stride, factor, lowest, highest);
    scale = found.gain > best ? found.scale : scale;
    scale_weight = found.gain > best ? found.weight : scale_weight;
    best = found.gain > best ? found.gain : best;
  }
  return {scale, scale_weight, zero()};
}

// fit_scale_and_minimum of the reference, for groups from x and weights on; null weights: no search.
template <class S>
Fit fit_scale_and_minimum(const float* x, const float* weights) {
  constexpr int64_t kStride = S::kNumGroups;
  const Vec top = set1(S::kTop);
  Vec low = load(x), high = low;
  for (int k = 1; k < S::kGroup; ++k) low = min(low, load(x + k * kStride)), high = max(high, load(x + k * kStride));
  if (S::kScaleTop != 0) low = min(low, zero());
  low += 0.0f;
  const Vec span = high - low;
  Fit found = {span / top, zero(), low};
  if (weights == nullptr) return found;
  Vec sum_w = zero(), sum_x = zero(), best = zero();
  const Vec first = inverse(span, S::kTop);
  for (int k = 0; k < S::kGroup; ++k) {
    const Vec value = load(x + k * kStride), weight = load(weights + k * kStride);
    const Vec level = nearest((value - low) * first, zero(), top), difference = level * found.scale + low - value;
    sum_w += weight;
    sum_x += weight * value;
    found.weight += weight * level * level;
    best += weight * difference * difference;
  }
  for (int start = 0; start < kStarts; ++start) {
    Vec next_factor = inverse(span, S::kTop + (kFirstOffset + start * kOffsetStep)), next = low;
    Vec factor, shift, a = zero(), b = zero(), sum_ll = zero();
    for (int round = 0; round < kRounds; ++round) {
      factor = next_factor, shift = next;
      Vec sum_l = zero(), sum_lx = zero();
      sum_ll = zero();
      for (int k = 0; k < S::kGroup; ++k) {
        const Vec value = load(x + k * kStride), level = nearest((value - shift) * factor, zero(), top);
        const Vec weighted = load(weights + k * kStride) * level;
        sum_l += weighted;
        sum_ll += weighted * level;
        sum_lx += weighted * value;
      }
      const Vec per_determinant = inverse(sum_w * sum_ll - sum_l * sum_l);
      a = (sum_w * sum_lx - sum_x * sum_l) * per_determinant;
      b = (sum_ll * sum_x - sum_l * sum_lx) * per_determinant;
      if (S::kScaleTop != 0) {
        a = b > 0.0f ? sum_lx * inverse(sum_ll) : a;
        b = min(b, zero());
      }
      next_factor = inverse(a), next = b;
    }
    Vec error = zero();
    for (int k = 0; k < S::kGroup; ++k) {
      const Vec value = load(x + k * kStride), level = nearest((value - shift) * factor, zero(), top);
      const Vec difference = level * a + b - value;
      error += load(weights + k * kStride) * difference * difference;
    }
    const auto is_better = error < best;
    found.scale = is_better ? a : found.scale;
    found.minimum = is_better ? b : found.minimum;
    found.weight = is_better ? sum_ll : found.weight;
    best = is_better ? error : best;
  }
  return found;
}

// fit_scale_and_zero of the reference; the zero point is the minimum of the result.
template <class S>
Fit fit_scale_and_zero(const float* x, const float* weights) {
  constexpr int64_t kStride = S::kNumGroups;
  const Vec top = set1(S::kTop);
  Vec low = zero(), high = zero();
  for (int k = 0; k < S::kGroup; ++k) low = min(load(x + k * kStride), low), high = max(load(x + k * kStride), high);
  low += 0.0f;
  const Vec span = high - low;
  if (weights == nullptr) return {span / top, zero(), nearest(-low * inverse(span, S::kTop), zero(), top)};
  Vec scale = zero(), zeros = zero(), best = zero();
  for (int start = 0; start < kStarts; ++start) {
    const Vec factor = inverse(span, S::kTop + (kFirstOffset + start * kOffsetStep));
    const Vec shift = nearest(-low * factor, zero(), top);
    const Refined found = refine_scale<S::kGroup>(x, weights, kStride, factor, -shift, top - shift);
    scale = found.gain > best ? found.scale : scale;
    zeros = found.gain > best ? shift : zeros;
    best = found.gain > best ? found.gain : best;
  }
  return {scale, zero(), zeros};
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
