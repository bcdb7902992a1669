// RMS and layer normalisation, with an optional residual added first.
#pragma once

#include "kernels.h"

namespace pagewick {

// Tensors are contiguous in their last dimension; x_stride, residual_stride, out_stride are in elements. out may be x.
struct NormArgs {
  const void* x;         // [num_rows, hidden_size]
  const void* residual;  // [num_rows, hidden_size], or null
  const void* weight;    // [hidden_size]
  const void* bias;      // [hidden_size], or null; layer_norm only
  void* out;             // [num_rows, hidden_size]
  void* new_residual;    // [num_rows, hidden_size], null exactly when residual is
  int64_t num_rows;
  int64_t hidden_size;
  int64_t x_stride;
  int64_t residual_stride;
  int64_t out_stride;
  float eps;
  float weight_offset;  // added to the weight; rms_norm only
  int32_t has_wide_residual;  // residual and new_residual are fp32, and the sum is rounded before it is normalised
  DType dtype;                // of every other tensor
};

struct NormKernels {
  // Both compute rows [first_row, end_row) of args.
  void (*rms_norm)(const NormArgs& args, int64_t first_row, int64_t end_row);
  void (*layer_norm)(const NormArgs& args, int64_t first_row, int64_t end_row);
};

Status rms_norm(const Kernels& kernels, const NormArgs& args);

Status layer_norm(const Kernels& kernels, const NormArgs& args);

}  // namespace pagewick
