// Rounds keys and values to the numbers of 8 or 4 bits of a cache.
#pragma once

#include "hadamard.h"
#include "kv_layout.h"
#include "rows.h"
#include "vec_bytes.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// Rounds to the nearest number of a format; of fp8, as if there were no smallest exponent.
template <class T>
inline Vec nearest(Vec wanted) {
  if constexpr (kIsSame<T, Int4>) {
    const Vec bounded = min(max(wanted, set1(-kLargest<T>)), set1(kLargest<T>));
    return (bounded + 0x1.8p23f) - 0x1.8p23f;
  } else {
    // Dekker's splitting rounds to the bits of a mantissa and the one before it.
    const Vec product = wanted * (power_of_two(23 - T::kMantissaBits) + 1.0f);
    return product - (product - wanted);
  }
}

// Returns which of T's targets the largest magnitude of a row should become: the first with the least squared error.
template <class T>
float best_target(const float* row, int64_t size, float largest) {
  constexpr int kCount = sizeof(T::kTargets) / sizeof(float);
  if constexpr (kCount == 1) {
    return T::kTargets[0];
  } else {
    const float divisor = largest > 0.0f ? largest : 1.0f;
    Vec errors[kCount] = {};
    for_vectors(0, size, [&](int64_t i, auto count) {
      const Vec part = load_count(row + i, count()) / divisor;
#pragma GCC unroll 8
      for (int n = 0; n < kCount; ++n) {
        const Vec wanted = part * T::kTargets[n];
        const Vec error = nearest<T>(wanted) - wanted;
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
// largest magnitude of the row becomes the best target. The scale of a row that is not finite is NaN. `target` gets a
// number in each byte.
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

// Writes a row of numbers of 4 bits [dim], one in each byte, as number `offset` of the keys of a block and head.
inline void put_key(const KvLayout& layout, const Int4* row, int64_t offset, Int4* keys) {
  for (int64_t d = 0; d < layout.dim; d += 2)
    keys[d / 2 * layout.block_size + offset].bits = static_cast<uint8_t>(row[d].bits | row[d + 1].bits << 4);
}

// The same for values. Bytes are shared by two of them, and the other one's bits stay.
inline void put_value(const KvLayout& layout, const Int4* row, int64_t offset, Int4* values) {
  const int shift = offset % 2 * 4;
  Int4* const target = values + offset / 2 * layout.dim;
  for (int64_t d = 0; d < layout.dim; ++d)
    target[d].bits = static_cast<uint8_t>((target[d].bits & 0xf0 >> shift) | row[d].bits << shift);
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
