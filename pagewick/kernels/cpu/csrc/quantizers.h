// Quantizers: rows of numbers become rows of blocks, with the bits of ../../reference_quantizers.py on every
// instruction set and for any number of threads.
#pragma once

#include "kernels.h"
#include "quantized_formats.h"

namespace pagewick {

struct QuantizeWeightArgs {
  const void* x;            // [num_rows, num_columns], rows x_stride elements apart
  const float* importance;  // [num_columns], or null
  uint8_t* rows;            // [num_rows][num_columns / numbers of a block] blocks
  int64_t num_rows;
  int64_t num_columns;
  int64_t x_stride;
  DType dtype;  // of x
  QuantizedFormat format;
  int32_t search;  // 0: the largest number of a group determines its scale
};

// How many numbers are quantized at once: whole blocks whose groups fill a vector.
constexpr int64_t kChunkNumbers = 4096;

struct QuantizerKernels {
  // Quantizes the blocks of chunk `index` of all blocks in a row. Returns whether they can store the numbers.
  bool (*quantize)(const QuantizeWeightArgs& args, int64_t index);
};

// quantizers.cpp. Returns kBadRow for numbers that the format cannot store.
Status quantize_weight(const Kernels& kernels, const QuantizeWeightArgs& args);

}  // namespace pagewick
