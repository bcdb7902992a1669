// Products of bf16 on tile registers, for fp8 formats, whatever the number of rows: tiles add in another order than dot
// products of bf16.
#pragma once

#include "quantized_amx.h"

#if defined(PW_HAS_AMX)

namespace pagewick {
namespace PW_ISA {
namespace {

// Tile: Fp8Tile.
template <class Tile>
class NumbersInRegisters : public RowsInRegisters<PreparedWide> {
  static constexpr int64_t kPairBytes = sizeof(IntVec), kUnitBytes = kUnitColumns / 2 * kPairBytes;
  // Bytes of sixteen rows of the weight for a chunk.
  static constexpr int64_t kNumbersBytes = Rows::kColumns / 2 * kPairBytes;

 public:
  static constexpr int64_t kBytes = kPanelRows / kLanes * kNumbersBytes;

  static bool takes(const Chunk&, int64_t) { return true; }

  static int64_t num_shares(int64_t) { return 1; }

  static void expand(const Chunk& chunk, uint8_t* bytes) {
    for (int64_t block = 0; block < chunk.num_blocks; ++block) {
      if (chunk.is_reading) Tile::prefetch_head(chunk, block);
      const uint8_t* pair = chunk.levels + block * chunk.level_stride;
      uint8_t* target = bytes + block * chunk.num_units * kUnitBytes;
      for (int64_t i = 0; i < chunk.num_units * kUnitColumns / 2; ++i, pair += 2 * kPanelRows, target += kPairBytes) {
        if (chunk.is_reading) Tile::prefetch_pair(pair);
        for (int64_t col = 0; col < kPanelRows; col += kLanes)
          _mm512_store_si512(target + col / kLanes * kNumbersBytes,
                             load_as_bfloat16(reinterpret_cast<const Fp8E4m3*>(pair) + 2 * col));
      }
    }
  }

  // Adds the products of `count` rows with a chunk to sums. bytes: those that expand wrote.
  void multiply(int64_t count, int64_t chunk_index, const Chunk& chunk, const uint8_t* bytes,
                float (*sums)[kPanelRows]) {
    configure(minimum(count, kRegisterRows));
    TileRegisters::finish_writes();
    for (int64_t row = 0; row < count; row += kRegisterRows) {
      const Rows& rows = rows_.at(row, chunk_index);
      for (int64_t block = 0; block < chunk.num_blocks; ++block) {
        alignas(64) float products[kPanelRows / kLanes][kRegisterRows][kLanes];
        multiply_block(rows, block * chunk.num_units, chunk.num_units, bytes, products);
        const float* const scales = reinterpret_cast<const float*>(chunk.heads + block * chunk.head_stride);
        for (int64_t i = 0; i < minimum(kRegisterRows, count - row); ++i)
          for (int64_t col = 0; col < kPanelRows; col += kLanes) {
            float* const target = sums[row + i] + col;
            store(target, madd(load(products[col / kLanes][i]), load(scales + col), load(target)));
          }
      }
    }
  }

 private:
  void configure(int64_t num_rows) {
    if (num_rows == num_rows_) return;
    num_rows_ = num_rows;
    const TileShape sums = {num_rows, 64}, numbers = {kUnitColumns / 2, 64};
    registers_.configure({sums, sums, sums, sums, sums, sums, numbers, numbers});
  }

  static void multiply_block(const Rows& rows, int64_t unit, int64_t num_units, const uint8_t* bytes,
                             float (&products)[kPanelRows / kLanes][kRegisterRows][kLanes]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (const int64_t end = unit + num_units; unit < end; ++unit) {
      const uint8_t* const numbers = bytes + unit * kUnitBytes;
      _tile_loadd(4, rows.values[unit], 2 * kUnitColumns);
      _tile_loadd(6, numbers, kPairBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, numbers + kNumbersBytes, kPairBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, numbers + 2 * kNumbersBytes, kPairBytes);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, numbers + 3 * kNumbersBytes, kPairBytes);
      _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, products[0], kPairBytes);
    _tile_stored(1, products[1], kPairBytes);
    _tile_stored(2, products[2], kPairBytes);
    _tile_stored(3, products[3], kPairBytes);
  }

  int64_t num_rows_ = 0;
};

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick

#endif
