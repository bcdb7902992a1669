// Rounds keys and values to the 8-bit numbers of a cache.
#pragma once

#include "rows.h"
#include "vec_bytes.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// Returns which of T's targets the largest magnitude of a row should become: the first with the least squared error.
template <class T>
float best_target(const float* row, int64_t size, float largest) {
  constexpr int kCount = sizeof(T::kTargets) / sizeof(float);
  if constexpr (kCount == 1) {
    return T::kTargets[0];
  } else {
    // Dekker's splitting rounds to the bits of a mantissa and the one before it.
    const float splitter = power_of_two(23 - T::kMantissaBits) + 1.0f, divisor = largest > 0.0f ? largest : 1.0f;
    Vec errors[kCount] = {};
    for_vectors(0, size, [&](int64_t i, auto count) {
      const Vec part = load_count(row + i, count()) / divisor;
#pragma GCC unroll 8
      for (int n = 0; n < kCount; ++n) {
        const Vec wanted = part * T::kTargets[n], product = wanted * splitter;
        const Vec error = product - (product - wanted) - wanted;
        errors[n] = madd(error, error, errors[n]);
      }
    });
    int best = 0;
    float least = 0.0f;
    for (int n = 0; n < kCount; ++n) {
      const float error = hsum(errors[n]) / (T::kTargets[n] * T::kTargets[n]);
      if (n == 0 || error < least) best = n, least = error;
    }
    return T::kTargets[best];
  }
}

// Stores row / scale in a cache's format and returns the scale: `constant` or, if that is 0, the one by which the
// largest magnitude of the row becomes the best target. The scale of a row that is not finite is NaN.
template <class T>
float quantize_row(const float* row, int64_t size, float constant, T* target) {
  WordVec largest = {};
  for_vectors(0, size, [&](int64_t i, auto count) {
    const WordVec magnitude = (WordVec)load_count(row + i, count()) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  });
  const uint32_t bits = hmax(largest);
  float magnitude;
  memcpy(&magnitude, &bits, sizeof(magnitude));
  const bool is_finite = bits < 0x7f800000;
  float scale = constant;
  if (!is_finite) scale = __builtin_nanf("");
  else if (constant <= 0.0f) scale = magnitude / best_target<T>(row, size, magnitude);
  const Vec divisor = set1(scale > 0.0f ? scale : 1.0f);
  for_vectors(0, size, [&](int64_t i, auto count) {
    const Vec value = is_finite ? load_count(row + i, count()) / divisor : zero();
    store_bytes(target + i, narrow_byte(target, value), count());
  });
  return scale;
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
