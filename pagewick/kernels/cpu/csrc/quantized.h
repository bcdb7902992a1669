// Products with weights in block formats.
//
// A weight [N, K] is packed into panels of 64 rows: [ceil(N / 64)][K / columns of a block] blocks of a panel, which take
// as many bytes as the 64 blocks in files. Rows beyond N are 0. A block of a panel consists of
//   - [64] scales each, as files have them; where 16 columns share one, the first halves' before the second halves'
//   - [64] minima, as files have them, if the format has any
//   - [64] zero points, a byte each (int4 formats)
//   - [words][64][4 bytes]: scales and minima of groups, as files have them (K types)
//   - for every 32 columns the levels: [bits of a level][64][4 bytes]. A quad is four columns, whose bytes lie beside
//     each other, as a dot-product instruction takes them. The lower 2, 4 or 8 bits of the levels of eight quads come
//     first, those of as many quads in a word as fit, the first in its lowest bits; then the upper bits likewise.
//
// Activations are quantized to signed bytes in blocks as well, of 256 columns for K types and of 32 for others, each row
// by itself, with a scale in fp32. All sums of whole numbers are exact. The float sums of an output are one chain of
// multiply-adds over rising blocks, whatever the number of rows: kernels/reference_quantized.py defines them.
//
// In fp8 formats, the numbers of a block lie as [columns / 2][64][2 bytes]. Activations are rounded to bf16, and a sum of
// a block is a chain of multiply-adds over rising columns.
//
// A product has two steps, which a product of experts can take by itself: `prepare` quantizes rows of x, once for all
// weights whose blocks have as many columns; `multiply` computes panels of a weight for a range of rows, or for any list
// of prepared rows.
#pragma once

#include "kernels.h"
#include "quantized_formats.h"

namespace pagewick {

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
  QuantizedFormat format;
  DType dtype;  // of x and bias
  DType out_dtype;
};

// Packs rows [first_row, first_row + num_rows) of a weight.
struct PackQuantizedArgs {
  const void* rows;  // [num_rows][num_blocks] blocks as files have them, rows row_stride bytes apart
  void* weight;      // packed
  int64_t first_row;
  int64_t num_rows;
  int64_t num_blocks;
  int64_t row_stride;
  QuantizedFormat format;
};

// out[i] = row row_ids[i] of a packed weight, as numbers.
struct GatherQuantizedArgs {
  const void* weight;      // packed [N, K]
  const int64_t* row_ids;  // [num_rows]
  void* out;               // [num_rows, K], contiguous
  int64_t num_rows;
  int64_t out_features;  // N
  int64_t in_features;   // K
  QuantizedFormat format;
  DType dtype;  // of out
};

// The offset of Q6_K, 8 times that of Q3_K.
constexpr int32_t kStartOffset = 32;

// A block of a quantized row of x.
template <int kColumns>
struct PreparedBlock;

template <>
struct PreparedBlock<32> {
  static constexpr int kColumns = 32;
  int8_t values[32];
  float scale;
  int16_t sums[2];  // of the values of each half
};

// sums of values: of 16 columns each, and of 32; of every four, the first and third come before the second and fourth.
// starts: the sums of 16 columns times -kStartOffset, in order.
template <>
struct PreparedBlock<256> {
  static constexpr int kColumns = 256;
  int8_t values[256];
  float scale;
  int16_t sums_of_16[16];
  int16_t sums_of_32[8];
  int32_t starts[16];
};

// Row i of a product is row ids[i] of `rows`, or row i if ids is null.
struct PreparedRows {
  const void* rows;  // QuantizedKernels::row_bytes each
  const int32_t* ids;
  void* arranged;  // all rows once more, as `arrange` writes them, or null
};

struct QuantizedKernels {
  // Returns the size of a row of in_features columns that `prepare` has made for weights in a format.
  int64_t (*row_bytes)(QuantizedFormat format, int64_t in_features);
  // Quantizes rows [first_row, end_row) of x; the first row of x becomes the first of `prepared`.
  void (*prepare)(const QuantizedLinearArgs& args, int64_t first_row, int64_t end_row, void* prepared);
  // Returns the size of the form of all rows that `arrange` writes, or 0 if a product does not profit from one.
  int64_t (*arranged_bytes)(const QuantizedLinearArgs& args);
  // Writes prepared rows [first_row, end_row) in the form for tile registers.
  void (*arrange)(const QuantizedLinearArgs& args, const void* prepared, int64_t first_row, int64_t end_row,
                  void* arranged);
  // Computes the outputs of panels [first_panel, end_panel) for rows [first_row, end_row).
  void (*multiply)(const QuantizedLinearArgs& args, const PreparedRows& x, int64_t first_panel, int64_t end_panel,
                   int64_t first_row, int64_t end_row);
  // Stores `size` numbers, a multiple of 16, as dtype.
  void (*convert)(const float* numbers, int64_t size, DType dtype, void* out);
};

// quantized.cpp
Status quantized_linear(const Kernels& kernels, const QuantizedLinearArgs& args);
void expect_quantized_linear(const QuantizedLinearArgs& args);

// quantized_rows.cpp
Status pack_quantized_rows(const Kernels& kernels, const PackQuantizedArgs& args);
Status gather_quantized_rows(const Kernels& kernels, const GatherQuantizedArgs& args);

}  // namespace pagewick
