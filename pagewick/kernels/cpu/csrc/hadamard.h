// Rotation of rows by Hadamard matrices, as caches of numbers of 4 bits need it: ../../reference_kv.py defines it.
#pragma once

#include "rows.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// Returns the size of the matrices for rows of `dim` numbers: the largest power of two that divides it.
inline int64_t rotation_size(int64_t dim) { return dim & -dim; }

// Multiplies row[0 .. size) with the matrix, whose numbers are 1 and -1. size: a power of two from 2 * kLanes to 256.
inline void add_and_subtract(float* row, int64_t size) {
  constexpr int64_t kMost = 256 / kLanes;
  Vec here[kMost], next[kMost];
  const int64_t count = size / kLanes, half = count / 2;
  for (int64_t i = 0; i < count; ++i) here[i] = load(row + i * kLanes);
  // Numbers half of the row apart become neighbours, so that every pass finds its pairs in the same places.
  for (int64_t left = size; left > 1; left /= 2) {
    for (int64_t i = 0; i < half; ++i) {
      const Vec sum = here[i] + here[i + half], difference = here[i] - here[i + half];
      next[2 * i] = interleave_low(sum, difference);
      next[2 * i + 1] = interleave_high(sum, difference);
    }
    for (int64_t i = 0; i < count; ++i) here[i] = next[i];
  }
  for (int64_t i = 0; i < count; ++i) store(row + i * kLanes, here[i]);
}

// As above, for any size.
inline void add_and_subtract_slowly(float* row, int64_t size) {
  for (int64_t distance = size / 2; distance > 0; distance /= 2)
    for (int64_t first = 0; first < size; first += 2 * distance)
      for (int64_t i = first; i < first + distance; ++i) {
        const float sum = row[i] + row[i + distance], difference = row[i] - row[i + distance];
        row[i] = sum, row[i + distance] = difference;
      }
}

// Rotates a row of head_dim numbers in place. A second rotation undoes the first.
inline void rotate_by_hadamard(float* row, int64_t head_dim) {
  const int64_t size = rotation_size(head_dim);
  for (int64_t first = 0; first < head_dim; first += size)
    size >= 2 * kLanes ? add_and_subtract(row + first, size) : add_and_subtract_slowly(row + first, size);
  const float factor = static_cast<float>(__builtin_sqrt(1.0 / static_cast<double>(size)));
  for_vectors(0, head_dim, [&](int64_t i, auto count) {
    store_count(row + i, load_count(row + i, count()) * factor, count());
  });
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
