// Loops over the vectors of rows of any length.
#pragma once

#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// Calls f(offset, count) for whole vectors and once more for the rest. count() is a constant for whole vectors.
template <class F>
inline void for_vectors(int64_t begin, int64_t size, const F& f) {
  int64_t i = begin;
  for (; i + kLanes <= size; i += kLanes) f(i, [] { return int64_t{kLanes}; });
  if (i < size) f(i, [left = size - i] { return left; });
}

template <class T>
inline Vec load_count(const T* source, int64_t count) {
  return count == kLanes ? load(source) : load_part(source, count);
}

template <class T>
inline void store_count(T* target, Vec value, int64_t count) {
  count == kLanes ? store(target, value) : store_part(target, value, count);
}

// Returns the sum of a row, in an order that depends on its size alone. f(sum, offset, count) adds a vector to `sum`,
// with 0 in the lanes from count() on.
template <class F>
inline float sum_vectors(int64_t size, const F& f) {
  constexpr int kChains = 4;  // independent sums, to hide the latency of an addition
  Vec sums[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kLanes <= size; i += kChains * kLanes)
    for (int n = 0; n < kChains; ++n) f(sums[n], i + n * kLanes, [] { return int64_t{kLanes}; });
  for_vectors(i, size, [&](int64_t offset, auto count) { f(sums[0], offset, count); });
  return hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T>
inline float sum_of_squares(const T* x, int64_t size) {
  return sum_vectors(size, [x](Vec& sum, int64_t i, auto count) {
    const Vec value = load_count(x + i, count());
    sum = madd(value, value, sum);
  });
}

// Returns `value` with the lanes from `count` on set to 0.
inline Vec keep(Vec value, int64_t count) {
  for (int64_t i = count; i < kLanes; ++i) value[i] = 0.0f;
  return value;
}

template <class T>
inline float mean_of(const T* x, int64_t size) {
  const float sum = sum_vectors(size, [x](Vec& partial, int64_t i, auto count) {
    partial = partial + load_count(x + i, count());
  });
  return sum / static_cast<float>(size);
}

// Returns the sum of (x - centre)^2.
template <class T>
inline float sum_of_squares_about(const T* x, int64_t size, float centre) {
  return sum_vectors(size, [x, centre](Vec& sum, int64_t i, auto count) {
    const Vec centred = keep(load_count(x + i, count()) - centre, count());
    sum = madd(centred, centred, sum);
  });
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
