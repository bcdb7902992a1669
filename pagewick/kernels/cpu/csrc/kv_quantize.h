// Rounds keys and values to the 8-bit numbers of a cache.
#pragma once

#include "rows.h"
#include "vec_bytes.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// Stores row / scale in a cache's format and returns the scale: `constant` or, if that is 0, the one by which the
// largest magnitude of the row becomes the format's largest number. The scale of a row that is not finite is NaN.
template <class T>
float quantize_row(const float* row, int64_t size, float constant, T* target) {
  WordVec largest = {};
  for_vectors(0, size, [&](int64_t i, auto count) {
    const WordVec magnitude = (WordVec)load_count(row + i, count()) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  });
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits = largest[i] > bits ? largest[i] : bits;
  float magnitude;
  memcpy(&magnitude, &bits, sizeof(magnitude));
  const bool is_finite = bits < 0x7f800000;
  float scale = constant > 0.0f ? constant : magnitude / kLargest<T>;
  if (!is_finite) scale = __builtin_nanf("");
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
