// Products of bytes on tile registers, for formats whose scales are floats that belong to at most 32 columns of x.
//
// Tiles multiply signed bytes. The whole numbers that they add up are those of dot products, and floats are scaled and
// added in the same order, so that bits do not depend on the number of rows.
#pragma once

#include "quantized_amx.h"

#if defined(PW_HAS_AMX)

namespace pagewick {
namespace PW_ISA {
namespace {

// Products of parts of units. Tile: SmallTile or Int4Tile, which says where scales are.
template <class Tile>
class PartsInRegisters : public RowsInRegisters<PreparedBlock<32>> {
  static constexpr int64_t kPartQuads = Tile::kPartQuads, kPartColumns = kPartQuads * kQuad;
  static constexpr int64_t kMaxParts = kMaxColumns / kPartColumns;
  // Behind the levels of a chunk: the scales of its parts, then the minima of its units.
  static constexpr int64_t kScalesAt = kPanelRows / kLanes * kSliceBytes;
  static constexpr int64_t kMinimaAt = kScalesAt + kMaxParts * kWordsBytes;
  static constexpr int64_t kTiles = 4;

 public:
  static constexpr int64_t kBytes = kMinimaAt + (Tile::kHasMinimum ? kMaxColumns / kUnitColumns * kWordsBytes : 0);

  static bool takes(const Chunk& chunk, int64_t count) { return takes_rows(count) && Tile::is_centrable(chunk); }

  // How often multiply prefetches a share of the next chunk.
  static int64_t num_shares(int64_t count) { return kPanelRows / kLanes * count / kRegisterRows; }

  static void expand(const Chunk& chunk, uint8_t* bytes) {
    for (int64_t block = 0; block < chunk.num_blocks; ++block) {
      Tile::expand_centred(chunk, block, bytes + block * chunk.num_units * kUnitQuads * kQuadBytes);
      if constexpr (Tile::kHasMinimum)
        for (int64_t col = 0; col < kPanelRows; col += kLanes)
          store(floats(bytes + kMinimaAt) + block * kPanelRows + col,
                load(reinterpret_cast<const Float16*>(Tile::minima_of(chunk, block)) + col));
    }
    for (int64_t part = 0; part < num_parts(chunk); ++part)
      for (int64_t col = 0; col < kPanelRows; col += kLanes)
        store(floats(bytes + kScalesAt) + part * kPanelRows + col, Tile::load_scale(Tile::scales_of(chunk, part), col));
  }

  // Adds the products of `count` rows with a chunk to sums. bytes: those that expand wrote.
  void multiply(int64_t count, int64_t chunk_index, const Chunk& chunk, const uint8_t* bytes,
                float (*sums)[kPanelRows]) {
    if (!registers_.is_configured()) configure();
    TileRegisters::finish_writes();
    for (int64_t row = 0; row < count; row += kRegisterRows) {
      for (int64_t col = 0; col < kPanelRows; col += kLanes) {
        chunk.next->prefetch_share();
        multiply_tile(rows_.at(row, chunk_index), minimum(kRegisterRows, count - row), num_parts(chunk), bytes, col,
                      sums + row);
      }
    }
  }

 private:
  static float* floats(uint8_t* bytes) { return reinterpret_cast<float*>(bytes); }
  static int64_t num_parts(const Chunk& chunk) { return chunk.num_blocks * chunk.num_units * kUnitQuads / kPartQuads; }

  void configure() {
    const TileShape sums = {kRegisterRows, 64}, x = {kRegisterRows, kPartColumns}, levels = {kPartQuads, 64};
    registers_.configure({sums, sums, sums, sums, x, x, levels, levels});
  }

  static void multiply_tile(const Rows& rows, int64_t count, int64_t num_parts, const uint8_t* bytes, int64_t col,
                            float (*sums)[kPanelRows]) {
    const uint8_t* const levels = bytes + col / kLanes * kSliceBytes;
    Vec total[kRegisterRows];
#pragma GCC unroll 16
    for (int64_t row = 0; row < kRegisterRows; ++row) total[row] = row < count ? load(sums[row] + col) : zero();
    int64_t part = 0;
    for (; part + kTiles <= num_parts; part += kTiles) {
      alignas(64) TileSums products[kTiles];
      multiply_parts(rows, part, levels, products);
#pragma GCC unroll 1
      for (int64_t i = 0; i < kTiles; ++i) add_part(rows, part + i, bytes, col, products[i], total);
    }
    for (; part < num_parts; ++part) {
      alignas(64) TileSums products;
      multiply_part(rows, part, levels, products);
      add_part(rows, part, bytes, col, products, total);
    }
#pragma GCC unroll 16
    for (int64_t row = 0; row < kRegisterRows; ++row)
      if (row < count) store(sums[row] + col, total[row]);
  }

  static const int8_t* values_of(const Rows& rows, int64_t part) {
    constexpr int64_t kParts = kUnitQuads / kPartQuads;
    return rows.values[part / kParts][0] + part % kParts * kPartColumns;
  }

#define PW_MULTIPLY_PART(sums, x_tile, level_tile, i)                              \
  _tile_zero(sums);                                                                \
  _tile_loadd(x_tile, values_of(rows, part + i), kUnitColumns);                       \
  _tile_loadd(level_tile, levels + (part + i) * kPartQuads * kQuadBytes, kQuadBytes); \
  _tile_dpbssd(sums, x_tile, level_tile);

  static void multiply_part(const Rows& rows, int64_t part, const uint8_t* levels, TileSums& products) {
    PW_MULTIPLY_PART(0, 4, 6, 0)
    PW_STORE_SUMS(0, products)
  }

  // As multiply_part, for kTiles parts.
  static void multiply_parts(const Rows& rows, int64_t part, const uint8_t* levels, TileSums (&products)[kTiles]) {
    PW_MULTIPLY_PART(0, 4, 6, 0)
    PW_MULTIPLY_PART(1, 5, 7, 1)
    PW_MULTIPLY_PART(2, 4, 6, 2)
    PW_MULTIPLY_PART(3, 5, 7, 3)
    PW_STORE_SUMS(0, products[0])
    PW_STORE_SUMS(1, products[1])
    PW_STORE_SUMS(2, products[2])
    PW_STORE_SUMS(3, products[3])
  }

#undef PW_MULTIPLY_PART

  static void add_part(const Rows& rows, int64_t part, const uint8_t* bytes, int64_t col, const TileSums& products,
                       Vec (&total)[kRegisterRows]) {
    const int64_t unit = part * kPartQuads / kUnitQuads;
    const float* const scales = reinterpret_cast<const float*>(bytes + kScalesAt);
    const Vec scale = load(scales + part * kPanelRows + col);
#pragma GCC unroll 16
    for (int64_t row = 0; row < kRegisterRows; ++row)
      total[row] = madd(__builtin_convertvector(load_sums(products, row), Vec), scale * set1(rows.scales[unit][row]),
                        total[row]);
    if constexpr (Tile::kHasMinimum) {
      const float* const minima = reinterpret_cast<const float*>(bytes + kMinimaAt);
      const Vec minimum = load(minima + unit * kPanelRows + col);
#pragma GCC unroll 16
      for (int64_t row = 0; row < kRegisterRows; ++row)
        total[row] = madd(set1(rows.sums[unit][row]), minimum * set1(rows.scales[unit][row]), total[row]);
    }
  }
};

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick

#endif
