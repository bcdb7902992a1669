// Sums, gates, products with a number, soft caps and limits of each number by itself, and the gathering of columns.
#pragma once

#include "kernels.h"

namespace pagewick {

enum class Elementwise : int32_t {
  kAdd = 0,
  kScale = 1,
  kSoftCap = 2,
  kSigmoidGate = 3,
  kMultiply = 4,
  kLimit = 5
};

// out = x + other, x * factor, factor * tanh(x / factor), x / (1 + exp(-other)), x * other, or x within -factor and
// factor. Rows of x and other lie x_stride and other_stride elements apart; rows of out are adjacent. Each row of other
// serves other_repeat successive rows of x. out may be x or other if its rows lie as theirs do.
struct ElementwiseArgs {
  const void* x;      // [num_rows, size]
  const void* other;  // [num_rows / other_repeat, size], or null where kind has one operand
  void* out;          // [num_rows, size]
  int64_t num_rows;
  int64_t size;
  int64_t x_stride;
  int64_t other_stride;
  int64_t other_repeat;
  float factor;
  DType dtype;  // of every tensor
  Elementwise kind;
};

// out = positive * x^2 + beta * x where x > 0, else (e^min(x, eps) - 1 - x) * negative + beta * x: xIELU
// (arXiv:2411.13010). eps is below 0. Rows of x lie x_stride elements apart; rows of out are adjacent.
struct XieluArgs {
  const void* x;  // [num_rows, size]
  void* out;      // [num_rows, size]
  int64_t num_rows;
  int64_t size;
  int64_t x_stride;
  float positive;
  float negative;
  float beta;
  float eps;
  DType dtype;  // of x and out
};

// out = x in float32.
struct WidenArgs {
  const void* x;  // [num_rows, size], rows x_stride elements apart
  float* out;     // [num_rows, size]
  int64_t num_rows;
  int64_t size;
  int64_t x_stride;
  DType dtype;  // of x
};

// out[m][i] = x[m][columns[i]].
struct GatherColumnsArgs {
  const void* x;           // [num_rows, num_columns], rows x_stride elements apart
  const int64_t* columns;  // [size]
  void* out;               // [num_rows, size], contiguous
  int64_t num_rows;
  int64_t num_columns;
  int64_t size;
  int64_t x_stride;
  DType dtype;
};

struct ElementwiseKernels {
  // Each computes columns [first_col, end_col) of one row of out.
  void (*elementwise)(const ElementwiseArgs& args, int64_t row, int64_t first_col, int64_t end_col);
  void (*xielu)(const XieluArgs& args, int64_t row, int64_t first_col, int64_t end_col);
  void (*widen)(const WidenArgs& args, int64_t row, int64_t first_col, int64_t end_col);
};

Status elementwise(const Kernels& kernels, const ElementwiseArgs& args);
Status xielu(const Kernels& kernels, const XieluArgs& args);
Status widen(const Kernels& kernels, const WidenArgs& args);
// Returns kBadRow if a column is outside x.
Status gather_columns(const Kernels& kernels, const GatherColumnsArgs& args);

}  // namespace pagewick
