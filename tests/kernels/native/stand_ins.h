// Stands in for instructions that the processor lacks, so that the code for them runs everywhere. Included before all
// sources of the library, which are compiled with PW_STAND_INS (../native_programs.py):
//   - AMX's tile registers are memory here, and its products are loops.
//   - AVX-VNNI's dot products are those of AVX-512 VNNI: the compiler encodes the same operation in another way.
#pragma once

#if defined(PW_ISA_AVX_VNNI)
#include <immintrin.h>

#define _mm256_dpbusd_avx_epi32 _mm256_dpbusd_epi32
#define _mm256_dpwssd_avx_epi32 _mm256_dpwssd_epi32
#endif

#if defined(__AMX_TILE__)
#include <immintrin.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

// The number of products of tiles so far.
extern "C" {
__attribute__((visibility("default"), used)) inline std::atomic<int64_t> pw_num_tile_products{0};
}

namespace stand_ins {

struct Tile {
  int rows, row_bytes;
  uint8_t bytes[16][64];
};

// Fails loudly where a processor would raise an exception.
inline void require(bool is_true) {
  if (!is_true) std::abort();
}

struct Tiles {
  bool is_configured = false;
  Tile tiles[8];

  Tile& at(int index) {
    require(is_configured);
    return tiles[index];
  }
};

inline Tiles& of_thread() {
  static thread_local Tiles tiles;
  return tiles;
}

inline void load_config(const void* source) {
  uint8_t config[64];
  std::memcpy(config, source, sizeof(config));
  require(config[0] == 1);
  for (int i = 1; i < 64; ++i) require((i >= 16 && i < 32) || (i >= 48 && i < 56) || config[i] == 0);
  Tiles& tiles = of_thread();
  for (int i = 0; i < 8; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, config + 16 + 2 * i, sizeof(row_bytes));
    require(config[48 + i] <= 16 && row_bytes <= 64);
    tiles.tiles[i] = Tile{config[48 + i], row_bytes, {}};
  }
  tiles.is_configured = true;
}

inline void release() { of_thread().is_configured = false; }

inline void zero(int index) {
  Tile& tile = of_thread().at(index);
  std::memset(tile.bytes, 0, sizeof(tile.bytes));
}

inline void load(int index, const void* source, int64_t stride) {
  Tile& tile = of_thread().at(index);
  std::memset(tile.bytes, 0, sizeof(tile.bytes));
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(tile.bytes[row], static_cast<const char*>(source) + row * stride, tile.row_bytes);
}

inline void store(int index, void* target, int64_t stride) {
  const Tile& tile = of_thread().at(index);
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(static_cast<char*>(target) + row * stride, tile.bytes[row], tile.row_bytes);
}

// sums[m][n] = add(sums[m][n], rows of b, words of row m of a, words of b from word n of its first row on).
template <class Sum, class Add>
void multiply(int sums_index, int a_index, int b_index, const Add& add) {
  require(sums_index != a_index && sums_index != b_index && a_index != b_index);
  ++pw_num_tile_products;
  Tile& sums = of_thread().at(sums_index);
  const Tile &a = of_thread().at(a_index), &b = of_thread().at(b_index);
  require(sums.rows == a.rows && sums.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows);
  for (int m = 0; m < sums.rows; ++m)
    for (int n = 0; n < sums.row_bytes / 4; ++n) {
      Sum sum;
      std::memcpy(&sum, sums.bytes[m] + 4 * n, sizeof(sum));
      sum = add(sum, b.rows, a.bytes[m], b.bytes[0] + 4 * n);
      std::memcpy(sums.bytes[m] + 4 * n, &sum, sizeof(sum));
    }
}

template <class Right>
void multiply_bytes(int sums, int a, int b) {
  multiply<int32_t>(sums, a, b, [](int32_t sum, int depth, const uint8_t* left, const uint8_t* right) {
    for (int k = 0; k < depth; ++k)
      for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(left[4 * k + i]) * static_cast<Right>(right[64 * k + i]);
    return sum;
  });
}

// Numbers below 2^-126 count as 0, as in the processor.
inline float flushed(float value) { return std::fabs(value) < 0x1p-126f ? 0.0f : value; }

inline float widened(const uint8_t* source) {
  uint16_t half;
  std::memcpy(&half, source, sizeof(half));
  const uint32_t word = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return flushed(value);
}

// The even and the odd columns have a sum each, and both are added to that of the tile (TDPBF16PS in volume 2 of the
// Software Developer's Manual).
inline void multiply_bfloat16(int sums, int a, int b) {
  multiply<float>(sums, a, b, [](float sum, int depth, const uint8_t* left, const uint8_t* right) {
    float parts[2] = {};
    for (int k = 0; k < depth; ++k)
      for (int i = 0; i < 2; ++i)
        parts[i] = flushed(std::fma(widened(left + 4 * k + 2 * i), widened(right + 64 * k + 2 * i), parts[i]));
    return flushed(sum + flushed(parts[0] + parts[1]));
  });
}

}  // namespace stand_ins

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig(source) stand_ins::load_config(source)
#define _tile_release() stand_ins::release()
#define _tile_zero(tile) stand_ins::zero(tile)
#define _tile_loadd(tile, source, stride) stand_ins::load(tile, source, static_cast<int64_t>(stride))
#define _tile_stored(tile, target, stride) stand_ins::store(tile, target, static_cast<int64_t>(stride))
#define _tile_dpbssd(sums, a, b) stand_ins::multiply_bytes<int8_t>(sums, a, b)
#define _tile_dpbsud(sums, a, b) stand_ins::multiply_bytes<uint8_t>(sums, a, b)
#define _tile_dpbf16ps(sums, a, b) stand_ins::multiply_bfloat16(sums, a, b)
#endif
