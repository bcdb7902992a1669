// Rotates the pairs of a row by angles. Part of rope_kernel.cpp and mla_kernel.cpp.
#pragma once

#include "rows.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// Pairs are (i, i + half).
inline void rotate_halves(float* row, const float* cos, const float* sin, int64_t half) {
  float* const second = row + half;
  for_vectors(0, half, [&](int64_t i, auto count) {
    const Vec a = load_count(row + i, count()), b = load_count(second + i, count());
    const Vec c = load_count(cos + i, count()), s = load_count(sin + i, count());
    store_count(row + i, a * c - b * s, count());
    store_count(second + i, b * c + a * s, count());
  });
}

// Pairs are (2i, 2i + 1).
inline void rotate_neighbours(float* row, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = row[2 * i], b = row[2 * i + 1];
    row[2 * i] = a * cos[i] - b * sin[i];
    row[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
