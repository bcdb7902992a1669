// Activation functions, alone or as the gate of a product, and what makes their inputs sparse.
#pragma once

#include "kernels.h"

namespace pagewick {

enum class Activation : int32_t {
  kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kQuickGelu = 4, kRelu2 = 5, kClampedSwish = 6, kSoftplus = 7,
  kSiluWithin7 = 8, kSiluWithin16 = 9, kSiluWithin4 = 10, kSiluWithin5 = 11, kClampedSilu10 = 12
};

// out = act(x), or act(gate) * up, where a row of x is gate followed by up; kClampedSwish multiplies by the clamped up
// plus 1, kSiluWithin4 and the like, and kClampedSilu10, by the clamped up. Rows of x lie x_stride elements apart; rows
// of out are adjacent.
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

// out = max(0, x - (mean + factor * deviation)), with the mean and the standard deviation of x's row: of normally
// distributed numbers, a share that depends on factor stays above 0. Rows of out are adjacent.
struct GaussianTopKArgs {
  const void* x;  // [num_rows, size], rows x_stride elements apart
  void* out;      // [num_rows, size]
  int64_t num_rows;
  int64_t size;
  int64_t x_stride;
  float factor;
  DType dtype;  // of x and out
};

struct ActivationKernels {
  // Computes columns [first_col, end_col) of one row of out.
  void (*activation)(const ActivationArgs& args, int64_t row, int64_t first_col, int64_t end_col);
  // Computes rows [first_row, end_row).
  void (*gaussian_top_k)(const GaussianTopKArgs& args, int64_t first_row, int64_t end_row);
};

Status activation(const Kernels& kernels, const ActivationArgs& args);
Status gaussian_top_k(const Kernels& kernels, const GaussianTopKArgs& args);

}  // namespace pagewick
