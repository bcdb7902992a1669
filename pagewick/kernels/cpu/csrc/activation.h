// Activation functions, alone or as the gate of a product.
#pragma once

#include "kernels.h"

namespace pagewick {

enum class Activation : int32_t {
  kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kQuickGelu = 4, kRelu2 = 5, kClampedSwish = 6
};

// out = act(x), or act(gate) * up, where a row of x is gate followed by up; kClampedSwish multiplies by the clamped up
// plus 1. Rows of x lie x_stride elements apart; rows of out are adjacent.
struct ActivationArgs {
  const void* x;  // [num_rows, size] or [num_rows, 2 * size]
  void* out;      // [num_rows, size]
  int64_t num_rows;
  int64_t size;
  int64_t x_stride;
  DType dtype;  // of x and out
  Activation kind;
  int32_t is_gated;
};

struct ActivationKernels {
  // Computes columns [first_col, end_col) of one row of out.
  void (*activation)(const ActivationArgs& args, int64_t row, int64_t first_col, int64_t end_col);
};

Status activation(const Kernels& kernels, const ActivationArgs& args);

}  // namespace pagewick
