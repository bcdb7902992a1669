// Products of bf16 on the tile registers of AMX: sixteen rows at a time. Part of panel.h.
//
// Tiles 0 to 3 are accumulators, tiles 4 and 5 hold rows of A, tiles 6 and 7 hold steps of B.
#pragma once

#include "tile_registers.h"

namespace pagewick {
namespace PW_ISA {
namespace {

class TileProduct {
 public:
  static constexpr int kTileRows = 16, kTileCols = 16, kTileDepth = 32;

  // Multiplier::multiply for bf16.
  void multiply(const BFloat16* a, int64_t a_stride, int64_t rows, Pieces<BFloat16> b, int64_t b_stride, int64_t cols,
                float* c, int64_t c_stride, bool accumulate, int64_t ahead) {
    const int64_t whole = b.depth / kTileDepth * kTileDepth;
    if (whole > 0)
      add(a, a_stride, rows, {b.starts, b.count, whole}, b_stride, kTileDepth, cols, c, c_stride, accumulate,
          ahead);
    if (whole == b.depth) return;
    // A depth that is not a multiple of kTileDepth implies that there is one piece.
    const BFloat16* const rest = b.starts[0] + whole / 2 * b_stride;
    add(a + whole, a_stride, rows, {&rest, 1, b.depth - whole}, b_stride, b.depth - whole, cols, c, c_stride,
        accumulate || whole > 0, ahead);
  }

 private:
  // unit: the depth of a tile, which divides the depth of a piece.
  void add(const BFloat16* a, int64_t a_stride, int64_t rows, Pieces<BFloat16> b, int64_t b_stride, int64_t unit,
           int64_t cols, float* c, int64_t c_stride, bool accumulate, int64_t ahead) {
    TileRegisters::finish_writes();
    int64_t row = 0;
    for (; row + kTileRows < rows; row += 2 * kTileRows) {
      const int64_t second = rows - row - kTileRows < kTileRows ? rows - row - kTileRows : kTileRows;
      configure(kTileRows, second, unit);
      int64_t col = 0;
      for (; col + 2 * kTileCols <= cols; col += 2 * kTileCols)
        two_by_two(a + row * a_stride, a_stride, b, 2 * col, b_stride, unit, c + row * c_stride + col, c_stride,
                   accumulate, row == 0 && col == 0 ? unit * cols * 2 : 0, ahead);
      if (col < cols)
        two_by_one(a + row * a_stride, a_stride, b, 2 * col, b_stride, unit, c + row * c_stride + col, c_stride,
                   accumulate);
    }
    if (row >= rows) return;
    configure(rows - row, rows - row, unit);
    int64_t col = 0;
    for (; col + 4 * kTileCols <= cols; col += 4 * kTileCols)
      one_by_four(a + row * a_stride, a_stride, b, 2 * col, b_stride, unit, c + row * c_stride + col, c_stride,
                  accumulate, ahead);
    for (; col + 2 * kTileCols <= cols; col += 2 * kTileCols)
      one_by_two(a + row * a_stride, a_stride, b, 2 * col, b_stride, unit, c + row * c_stride + col, c_stride,
                 accumulate, ahead);
    if (col < cols)
      one_by_one(a + row * a_stride, a_stride, b, 2 * col, b_stride, unit, c + row * c_stride + col, c_stride,
                 accumulate, ahead);
  }

  void configure(int64_t first_rows, int64_t second_rows, int64_t unit) {
    const uint32_t wanted = static_cast<uint32_t>(first_rows | second_rows << 8 | unit << 16);
    if (wanted == config_) return;
    config_ = wanted;
    // The accumulators are one row of four, or two rows of two.
    const TileShape above = {first_rows, 64}, below = {second_rows, 64}, steps = {unit / 2, 64};
    registers_.configure({above, above, below, below, {first_rows, unit * 2}, {second_rows, unit * 2}, steps, steps});
  }

  // Calls f(tile of B, its k in the whole matrix) for the tiles at one column of B, from top to bottom.
  template <class F>
  static void for_tiles(Pieces<BFloat16> pieces, int64_t offset, int64_t b_stride, int64_t unit, const F& f) {
    for (int64_t piece = 0, k = 0; piece < pieces.count; ++piece) {
      const BFloat16* b = pieces.starts[piece] + offset;
      for (const int64_t end = k + pieces.depth; k < end; k += unit, b += unit / 2 * b_stride) f(b, k);
    }
  }

  // Gives access to tiles of B beside each other. Tile registers are loaded a column of cache lines at a time, which
  // the processor's prefetchers do not follow. Tiles that are not in a cache yet are therefore copied first.
  template <int kTiles>
  class Near {
   public:
    // ahead: while the tiles are copied, prefetch the memory this many bytes after them; 0: they need no copy.
    Near(int64_t b_stride, int64_t unit, int64_t ahead)
        : b_stride_(b_stride), num_rows_(unit / 2), ahead_(ahead), stride_(ahead == 0 ? b_stride : kTiles * kLine) {}

    // Returns the first of the tiles at `b`; each of the others lies a cache line further.
    const BFloat16* bring(const BFloat16* b) {
      if (ahead_ == 0) return b;
      for (int64_t i = 0; i < num_rows_; ++i, b += b_stride_) {
        const char* const later = reinterpret_cast<const char*>(b) + ahead_;
        __m512i lines[kTiles];
#pragma GCC unroll 4
        for (int tile = 0; tile < kTiles; ++tile) {
          __builtin_prefetch(later + tile * 64, 0, 3);
          lines[tile] = _mm512_loadu_si512(b + tile * kLine);
        }
#pragma GCC unroll 4
        for (int tile = 0; tile < kTiles; ++tile) _mm512_store_si512(copy_ + (i * kTiles + tile) * kLine, lines[tile]);
      }
      TileRegisters::finish_writes();
      return copy_;
    }

    int64_t row_bytes() const { return stride_ * 2; }

   private:
    static constexpr int64_t kLine = 32;

    const int64_t b_stride_, num_rows_, ahead_, stride_;
    alignas(64) BFloat16 copy_[kTileDepth / 2 * kTiles * kLine];
  };

#define PW_OPEN_TILE(i, source)                                                         \
  if (accumulate) _tile_loadd(i, source, c_stride * static_cast<int64_t>(sizeof(float))); \
  else _tile_zero(i);
#define PW_CLOSE_TILE(i, target) _tile_stored(i, target, c_stride * static_cast<int64_t>(sizeof(float)));

  void two_by_two(const BFloat16* a, int64_t a_stride, Pieces<BFloat16> pieces, int64_t offset, int64_t b_stride,
                  int64_t unit, float* c, int64_t c_stride, bool accumulate, int64_t num_bytes, int64_t ahead) {
    float* const below = c + kTileRows * c_stride;
    const BFloat16* const a_below = a + kTileRows * a_stride;
    PW_OPEN_TILE(0, c) PW_OPEN_TILE(1, c + kTileCols) PW_OPEN_TILE(2, below) PW_OPEN_TILE(3, below + kTileCols)
    for_tiles(pieces, offset, b_stride, unit, [&](const BFloat16* b, int64_t k) {
      for (const char *line = reinterpret_cast<const char*>(b) + ahead, *end = line + num_bytes; line < end; line += 64)
        __builtin_prefetch(line, 0, 3);
      _tile_loadd(6, b, b_stride * 2);
      _tile_loadd(4, a + k, a_stride * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + 2 * kTileCols, b_stride * 2);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a_below + k, a_stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    });
    PW_CLOSE_TILE(0, c) PW_CLOSE_TILE(1, c + kTileCols) PW_CLOSE_TILE(2, below) PW_CLOSE_TILE(3, below + kTileCols)
  }

  void two_by_one(const BFloat16* a, int64_t a_stride, Pieces<BFloat16> pieces, int64_t offset, int64_t b_stride,
                  int64_t unit, float* c, int64_t c_stride, bool accumulate) {
    float* const below = c + kTileRows * c_stride;
    PW_OPEN_TILE(0, c) PW_OPEN_TILE(2, below)
    for_tiles(pieces, offset, b_stride, unit, [&](const BFloat16* b, int64_t k) {
      _tile_loadd(6, b, b_stride * 2);
      _tile_loadd(4, a + k, a_stride * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, a + kTileRows * a_stride + k, a_stride * 2);
      _tile_dpbf16ps(2, 5, 6);
    });
    PW_CLOSE_TILE(0, c) PW_CLOSE_TILE(2, below)
  }

  void one_by_four(const BFloat16* a, int64_t a_stride, Pieces<BFloat16> pieces, int64_t offset, int64_t b_stride,
                   int64_t unit, float* c, int64_t c_stride, bool accumulate, int64_t ahead) {
    Near<4> tiles(b_stride, unit, ahead);
    PW_OPEN_TILE(0, c) PW_OPEN_TILE(1, c + 16) PW_OPEN_TILE(2, c + 32) PW_OPEN_TILE(3, c + 48)
    for_tiles(pieces, offset, b_stride, unit, [&](const BFloat16* b, int64_t k) {
      b = tiles.bring(b);
      _tile_loadd(4, a + k, a_stride * 2);
      _tile_loadd(6, b, tiles.row_bytes());
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + 32, tiles.row_bytes());
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, b + 64, tiles.row_bytes());
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, b + 96, tiles.row_bytes());
      _tile_dpbf16ps(3, 4, 7);
    });
    PW_CLOSE_TILE(0, c) PW_CLOSE_TILE(1, c + 16) PW_CLOSE_TILE(2, c + 32) PW_CLOSE_TILE(3, c + 48)
  }

  void one_by_two(const BFloat16* a, int64_t a_stride, Pieces<BFloat16> pieces, int64_t offset, int64_t b_stride,
                  int64_t unit, float* c, int64_t c_stride, bool accumulate, int64_t ahead) {
    Near<2> tiles(b_stride, unit, ahead);
    PW_OPEN_TILE(0, c) PW_OPEN_TILE(1, c + 16)
    for_tiles(pieces, offset, b_stride, unit, [&](const BFloat16* b, int64_t k) {
      b = tiles.bring(b);
      _tile_loadd(4, a + k, a_stride * 2);
      _tile_loadd(6, b, tiles.row_bytes());
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + 32, tiles.row_bytes());
      _tile_dpbf16ps(1, 4, 7);
    });
    PW_CLOSE_TILE(0, c) PW_CLOSE_TILE(1, c + 16)
  }

  void one_by_one(const BFloat16* a, int64_t a_stride, Pieces<BFloat16> pieces, int64_t offset, int64_t b_stride,
                  int64_t unit, float* c, int64_t c_stride, bool accumulate, int64_t ahead) {
    Near<1> tiles(b_stride, unit, ahead);
    PW_OPEN_TILE(0, c)
    for_tiles(pieces, offset, b_stride, unit, [&](const BFloat16* b, int64_t k) {
      b = tiles.bring(b);
      _tile_loadd(4, a + k, a_stride * 2);
      _tile_loadd(6, b, tiles.row_bytes());
      _tile_dpbf16ps(0, 4, 6);
    });
    PW_CLOSE_TILE(0, c)
  }

#undef PW_OPEN_TILE
#undef PW_CLOSE_TILE

  TileRegisters registers_;
  uint32_t config_ = 0;  // 0: none is loaded
};

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
