// Products with weights that are quantized in blocks of 32 columns: signed bytes with a scale (ggml's Q8_0).
//
// A weight [N, K] is packed into panels of 64 rows: [ceil(N / 64)][K / 32] blocks, each with the 64 scales in fp16, then
// [8][64][4] bytes: four columns of each row beside each other, as a dot-product instruction takes them. A byte is the
// value + 128. Rows beyond N are 0.
//
// Activations are quantized to signed bytes in blocks of 32 as well, each row by itself, with a scale in fp32. The sum
// of a block's products is exact. The float sums of an output are one chain of multiply-adds over rising blocks, whatever
// the number of rows: kernels/reference_quantized.py defines them.
#pragma once

#include "kernels.h"

namespace pagewick {

constexpr int64_t kBlockColumns = 32;
constexpr int64_t kBlockRowBytes = 34;  // of one row in a block, with its scale

// out[m][n] = sum over blocks of (block's sum of x * weight) * scales, plus bias[n]; rounded once to out_dtype.
struct QuantizedLinearArgs {
  const void* x;       // [M, K], rows x_stride elements apart
  const void* weight;  // packed [N, K]
  const void* bias;    // [N], or null
  void* out;           // [M, N], rows out_stride elements apart
  int64_t num_rows;    // M
  int64_t out_features;
  int64_t in_features;
  int64_t x_stride;
  int64_t out_stride;
  DType dtype;  // of x and bias
  DType out_dtype;
};

// Packs rows [first_row, first_row + num_rows) of a weight.
struct PackQuantizedArgs {
  const void* rows;  // [num_rows][num_blocks] of a scale in fp16 and 32 signed bytes, rows row_stride bytes apart
  void* weight;      // packed
  int64_t first_row;
  int64_t num_rows;
  int64_t num_blocks;
  int64_t row_stride;
};

// out[i] = row row_ids[i] of a packed weight, as numbers.
struct GatherQuantizedArgs {
  const void* weight;      // packed [N, K]
  const int64_t* row_ids;  // [num_rows]
  void* out;               // [num_rows, K], contiguous
  int64_t num_rows;
  int64_t out_features;  // N
  int64_t in_features;   // K
  DType dtype;           // of out
};

struct QuantizedKernels {
  // Quantizes rows [first_row, end_row) of x, each into prepared_row_bytes(K) bytes.
  void (*prepare)(const QuantizedLinearArgs& args, int64_t first_row, int64_t end_row, void* prepared);
  // Computes the outputs of panels [first_panel, end_panel) for rows [first_row, end_row).
  void (*multiply)(const QuantizedLinearArgs& args, const void* prepared, int64_t first_panel, int64_t end_panel,
                   int64_t first_row, int64_t end_row);
  // Writes a row of a packed weight as numbers.
  void (*unpack)(const GatherQuantizedArgs& args, int64_t row_id, void* out);
};

// A quantized row of x: K bytes, then a scale for each block, then 128 times the negated sum of each block's bytes.
inline int64_t prepared_row_bytes(int64_t in_features) { return in_features + in_features / kBlockColumns * 8; }

// quantized.cpp
Status quantized_linear(const Kernels& kernels, const QuantizedLinearArgs& args);
void expect_quantized_linear(const QuantizedLinearArgs& args);
Status pack_quantized_rows(const Kernels& kernels, const PackQuantizedArgs& args);
Status gather_quantized_rows(const Kernels& kernels, const GatherQuantizedArgs& args);

}  // namespace pagewick
