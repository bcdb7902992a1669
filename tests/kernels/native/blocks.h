// Weights in block formats with random contents.
#pragma once

#include "matrix.h"
#include "quantized.h"
#include "testing.h"

// Rows of blocks with random levels. Scales and minima are about 2e-4, so that no result overflows.
inline testing::Array<uint8_t> random_blocks(pagewick::QuantizedFormat name, int64_t num_rows, int64_t num_columns) {
  const pagewick::BlockFormat& format = pagewick::block_format(name);
  const int64_t num_blocks = num_rows * (num_columns / format.columns);
  testing::Array<uint8_t> blocks(num_blocks * format.bytes);
  for (int64_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<uint8_t>(testing::random_below(256));
  for (uint8_t* block = blocks.data(); block != blocks.data() + blocks.size(); block += format.bytes) {
    // The byte with the sign and the upper bits of the exponent, or the whole exponent of E8M0.
    const uint8_t top = format.scale_bytes == 1 ? 0x73 : format.scale_bytes == 2 ? 0x0b : 0x39;
    for (int i = 1; i <= format.num_scales; ++i) block[format.scale_at + i * format.scale_bytes - 1] = top;
    if (format.has_minimum()) block[format.minimum_at + 1] = 0x0b;
  }
  return blocks;
}

// Bytes of a packed weight.
inline int64_t packed_bytes(pagewick::QuantizedFormat name, int64_t num_rows, int64_t num_columns) {
  const pagewick::BlockFormat& format = pagewick::block_format(name);
  return (num_rows + 63) / 64 * 64 * (num_columns / format.columns) * format.bytes;
}

// Packs a weight of random blocks into zeros.
inline void pack_random_blocks(pagewick::QuantizedFormat name, int64_t num_rows, int64_t num_columns, char* target) {
  const testing::Array<uint8_t> rows = random_blocks(name, num_rows, num_columns);
  const int64_t num_blocks = num_columns / pagewick::block_format(name).columns;
  std::memset(target, 0, static_cast<size_t>(packed_bytes(name, num_rows, num_columns)));
  testing::run("pack_quantized_rows", pagewick::PackQuantizedArgs{rows.data(), target, 0, num_rows, num_blocks,
                                                                  rows.size() / num_rows, name});
}
