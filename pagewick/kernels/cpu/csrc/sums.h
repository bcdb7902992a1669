// The end of a product: float sums become results.
#pragma once

#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// out = sums + bias, rounded. bias: null for none.
template <class T, class Out>
void store_sums(const float* sums, const T* bias, int64_t cols, Out* out) {
  const auto result = [&](int64_t i, int64_t count) {
    if (bias == nullptr) return load(sums + i);
    return load(sums + i) + (count == kLanes ? load(bias + i) : load_part(bias + i, count));
  };
  int64_t i = 0;
  for (; i + kLanes <= cols; i += kLanes) store_result(out + i, result(i, kLanes));
  if (i < cols) store_part(out + i, result(i, cols - i), cols - i);
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
