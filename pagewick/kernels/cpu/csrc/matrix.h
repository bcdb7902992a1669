// Products with packed weights.
//
// A weight [N, K] is packed into panels of 64 rows: [ceil(N / 64)][ceil(K / step)][64][step], where step is 2 for bf16
// and 1 for fp32 and fp16 (panel.h says why). Elements beyond N and K are 0.
#pragma once

#include "kernels.h"

namespace pagewick {

// Rows of the weight in a panel. They are the columns of a product's right-hand side: a weight is multiplied
// transposed.
constexpr int64_t kPanelRows = 64;

inline int64_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
inline int64_t depth_step(DType dtype) { return dtype == DType::kBFloat16 ? 2 : 1; }

// Returns how many elements a panel of a weight with `depth` columns has.
inline int64_t panel_elements(DType dtype, int64_t depth) {
  const int64_t step = depth_step(dtype);
  return ceil_div(depth, step) * step * kPanelRows;
}

// out[m][n] = sum over k of x[m][k] * weight[n][k], plus bias[n]; in fp32, rounded once to out_dtype.
struct LinearArgs {
  const void* x;       // [M, K], rows x_stride elements apart
  const void* weight;  // packed [N, K]
  const void* bias;    // [N], or null
  void* out;           // [M, N], rows out_stride elements apart
  int64_t num_rows;    // M
  int64_t out_features;
  int64_t in_features;
  int64_t x_stride;
  int64_t out_stride;
  DType dtype;  // of x, weight and bias
  DType out_dtype;
};

// Packs rows [first_row, first_row + num_rows) of a weight.
struct PackArgs {
  const void* rows;  // [num_rows, K], row_stride elements apart
  void* weight;      // packed; 0 where nothing was packed yet
  int64_t first_row;
  int64_t num_rows;
  int64_t in_features;
  int64_t row_stride;
  DType dtype;
};

// out[i] = row row_ids[i] of a weight.
struct GatherArgs {
  const void* weight;      // [N, K], packed unless is_packed is 0
  const int64_t* row_ids;  // [num_rows]
  void* out;               // [num_rows, K], contiguous
  int64_t num_rows;
  int64_t out_features;  // N
  int64_t in_features;   // K
  DType dtype;
  int32_t is_packed;
};

struct MatrixKernels {
  // `multiply` takes rows of x as they are if prepared_bytes returns 0. Else `prepare` must copy them first into the
  // form that it takes, with prepared_bytes bytes a row.
  int64_t (*prepared_bytes)(const LinearArgs& args);
  void (*prepare)(const LinearArgs& args, int64_t first_row, int64_t end_row, void* prepared);
  // Computes the outputs of panels [first_panel, end_panel) for rows [first_row, end_row).
  void (*multiply)(const LinearArgs& args, const void* prepared, int64_t first_panel, int64_t end_panel,
                   int64_t first_row, int64_t end_row);
  // Transposes pack_rows rows of 32-bit words, row_bytes apart, into columns of words kPanelRows words apart. Returns
  // how many words at the beginning of each row it has transposed.
  int64_t (*pack)(const char* rows, int64_t row_bytes, int64_t num_words, uint32_t* columns);
  int64_t pack_rows;
};

// How the panels and rows of a product are divided into pieces of work.
struct Division {
  int64_t panels, rows, num_panel_chunks, num_row_blocks;
};

// matrix.cpp
// panel_work: multiplications of a panel with one row. panel_bytes: the bytes that reading it costs.
Division divide_product(int64_t num_rows, int64_t out_features, int64_t panel_work, int64_t panel_bytes);
Status linear(const Kernels& kernels, const LinearArgs& args);
// Tells the threads that this product runs soon.
void expect_linear(const LinearArgs& args);
Status pack_rows(const Kernels& kernels, const PackArgs& args);
Status gather_rows(const Kernels& kernels, const GatherArgs& args);

}  // namespace pagewick
