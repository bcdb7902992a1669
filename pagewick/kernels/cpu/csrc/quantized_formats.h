// Block formats as data: where the parts of a block of a row lie in files. kernels/block_formats.py defines what they
// mean. A number is scale * (level - offset) plus a minimum, with small whole scales and minima for groups of 16 or 32
// columns in the K types, whose blocks have 256 columns. In int4 formats a block has an offset of its own, its zero point.
// In fp8 formats the levels are numbers in E4M3. In formats with a codebook they are stored as codes; the scales of
// MXFP4 are powers of two.
#pragma once

#include <cstdint>

namespace pagewick {

enum class QuantizedFormat : int32_t {
  kQ4_0 = 0,
  kQ4_1 = 1,
  kQ5_0 = 2,
  kQ5_1 = 3,
  kQ8_0 = 4,
  kInt8G32 = 5,
  kQ2_K = 6,
  kQ3_K = 7,
  kQ4_K = 8,
  kQ5_K = 9,
  kQ6_K = 10,
  kInt4G32 = 11,
  kInt4G64 = 12,
  kInt4G128 = 13,
  kFp8G32 = 14,
  kFp8G128 = 15,
  kMxfp4 = 16,
  kIq4_NL = 17,
  kIq4G32 = 18,
  kIq3G32 = 19,
  kIq3sG32 = 20,
  kIq2G32 = 21,
  kIq2G16 = 22,
  kIq1G32 = 23,
  kIq1G16 = 24,
  kFp4G16 = 25
};

// Parts of `bits` bits of a run of bytes. Of each `width` bytes the lowest parts come first.
struct BitField {
  int at, num_bytes, bits, width;
};

struct BlockFormat {
  int columns, bytes;
  int offset;
  int scale_at, scale_bytes, num_scales;         // of type float16, float32 or E8M0, beside each other
  int minimum_at;                                // float16; -1: there is none
  int groups_at, num_group_words, group_columns; // the scales and minima of groups
  BitField low, high;                            // a level is low + (high << low.bits)
  int zero_at = -1;                              // a byte; -1: there is none
  bool is_fp8 = false;
  const uint8_t* codebook = nullptr;  // the levels of 16 codes

  constexpr int bits() const { return low.bits + high.bits; }  // of a level as it is stored
  constexpr int level_bits() const { return !has_codes() ? bits() : offset < 16 ? 5 : 8; }
  constexpr bool has_codes() const { return codebook != nullptr; }
  constexpr bool is_k() const { return columns == 256; }
  constexpr bool has_minimum() const { return minimum_at >= 0; }
  constexpr bool has_zero() const { return zero_at >= 0; }
};

// Levels by code, as kernels/block_formats.py has them (CODEBOOKS), plus the offset of the format: 12 for MXFP4, else 128.
constexpr uint8_t kMxfp4Levels[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr uint8_t kFp4Levels[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};
constexpr uint8_t kIq4Levels[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kIq3Levels[16] = {132, 140, 148, 156, 164, 172, 180, 190, 124, 116, 108, 100, 92, 84, 76, 66};
constexpr uint8_t kIq3sLevels[16] = {129, 131, 133, 135, 137, 139, 141, 143, 127, 125, 123, 121, 119, 117, 115, 113};
constexpr uint8_t kIq2Levels[16] = {136, 153, 171, 128, 128, 128, 128, 128, 120, 103, 85, 128, 128, 128, 128, 128};
constexpr uint8_t kIq1Levels[16] = {121, 129, 137, 128, 128, 128, 128, 128, 119, 127, 135, 128, 128, 128, 128, 128};

// A format with codes and a scale in float32 for each 32 columns, or one for each 16.
constexpr BitField kNoField = {0, 0, 0, 1};
constexpr BlockFormat codes_of_32(const uint8_t* codebook) {
  return {32, 20, 128, 0, 4, 1, -1, 0, 0, 32, {4, 16, 4, 16}, kNoField, -1, false, codebook};
}
constexpr BlockFormat codes_of_16(const uint8_t* codebook) {
  return {32, 24, 128, 0, 4, 2, -1, 0, 0, 16, {8, 16, 4, 16}, kNoField, -1, false, codebook};
}

constexpr BlockFormat kFormats[] = {
    {32, 18, 8, 0, 2, 1, -1, 0, 0, 32, {2, 16, 4, 16}, kNoField},
    {32, 20, 0, 0, 2, 1, 2, 0, 0, 32, {4, 16, 4, 16}, kNoField},
    {32, 22, 16, 0, 2, 1, -1, 0, 0, 32, {6, 16, 4, 16}, {2, 4, 1, 1}},
    {32, 24, 0, 0, 2, 1, 2, 0, 0, 32, {8, 16, 4, 16}, {4, 4, 1, 1}},
    {32, 34, 128, 0, 2, 1, -1, 0, 0, 32, {2, 32, 8, 32}, kNoField},
    {32, 36, 128, 0, 4, 1, -1, 0, 0, 32, {4, 32, 8, 32}, kNoField},
    {256, 84, 0, 80, 2, 1, 82, 0, 4, 16, {16, 64, 2, 32}, kNoField},
    {256, 110, 4, 108, 2, 1, -1, 96, 3, 16, {32, 64, 2, 32}, {0, 32, 1, 32}},
    {256, 144, 0, 0, 2, 1, 2, 4, 3, 32, {16, 128, 4, 32}, kNoField},
    {256, 176, 0, 0, 2, 1, 2, 4, 3, 32, {48, 128, 4, 32}, {16, 32, 1, 32}},
    {256, 210, 32, 208, 2, 1, -1, 192, 4, 16, {0, 128, 4, 64}, {128, 64, 2, 32}},
    {32, 21, 0, 0, 4, 1, -1, 0, 0, 32, {5, 16, 4, 16}, kNoField, 4},
    {64, 37, 0, 0, 4, 1, -1, 0, 0, 64, {5, 32, 4, 16}, kNoField, 4},
    {128, 69, 0, 0, 4, 1, -1, 0, 0, 128, {5, 64, 4, 16}, kNoField, 4},
    {32, 36, 0, 0, 4, 1, -1, 0, 0, 32, {4, 32, 8, 32}, kNoField, -1, true},
    {128, 132, 0, 0, 4, 1, -1, 0, 0, 128, {4, 128, 8, 128}, kNoField, -1, true},
    {32, 17, 12, 0, 1, 1, -1, 0, 0, 32, {1, 16, 4, 16}, kNoField, -1, false, kMxfp4Levels},
    {32, 18, 128, 0, 2, 1, -1, 0, 0, 32, {2, 16, 4, 16}, kNoField, -1, false, kIq4Levels},
    codes_of_32(kIq4Levels),
    codes_of_32(kIq3Levels),
    codes_of_32(kIq3sLevels),
    codes_of_32(kIq2Levels),
    codes_of_16(kIq2Levels),
    codes_of_32(kIq1Levels),
    codes_of_16(kIq1Levels),
    codes_of_16(kFp4Levels),
};
constexpr const BlockFormat& block_format(QuantizedFormat format) { return kFormats[static_cast<int>(format)]; }

// Splits the words that hold the scales and minima of a K type's groups into words of four bytes each, signed scales
// included. Word: int32_t, or a vector of them. Always inlined, so that instruction sets share no code.
template <QuantizedFormat kFormat, class Word>
__attribute__((always_inline)) inline void split_groups(const Word* packed, Word* scales, Word* minima) {
  if constexpr (kFormat == QuantizedFormat::kQ2_K) {
    for (int i = 0; i < 4; ++i) {
      scales[i] = packed[i] & 0x0f0f0f0f;
      minima[i] = (packed[i] >> 4) & 0x0f0f0f0f;
    }
  } else if constexpr (kFormat == QuantizedFormat::kQ3_K) {
    for (int i = 0; i < 4; ++i) {
      const Word low = (packed[i % 2] >> (i / 2 * 4)) & 0x0f0f0f0f, high = (packed[2] >> (2 * i)) & 0x03030303;
      // Each byte minus 32: the upper three bits are set where bit 5 is not, without arithmetic that could overflow.
      const Word bytes = low | high << 4, below = ~bytes & 0x20202020;
      scales[i] = (bytes & 0x1f1f1f1f) | below | below << 1 | below << 2;
    }
  } else if constexpr (kFormat == QuantizedFormat::kQ6_K) {
    for (int i = 0; i < 4; ++i) scales[i] = packed[i];
  } else {
    scales[0] = packed[0] & 0x3f3f3f3f;
    minima[0] = packed[1] & 0x3f3f3f3f;
    scales[1] = (packed[2] & 0x0f0f0f0f) | ((packed[0] >> 2) & 0x30303030);
    minima[1] = ((packed[2] >> 4) & 0x0f0f0f0f) | ((packed[1] >> 2) & 0x30303030);
  }
}

}  // namespace pagewick
