// The loops of a product with a quantized weight, for all formats: over panels, over chunks of up to 256 columns, and
// over tiles of rows.
//
// With few rows, levels are taken apart in registers while they are read. With more, the levels of a chunk of a panel
// are first expanded to a byte each (or copied, if they are bytes), which all rows then share, and those of fp8
// formats to bf16 or float. The same numbers are multiplied and the same float sums are made either way.
#pragma once

#include "quantized_tiles.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// Rounds and stores the sums of `count` rows of a panel.
inline void store_panel(const QuantizedLinearArgs& args, const float (*sums)[kPanelRows], int64_t first_row,
                        int64_t count, int64_t panel) {
  const int64_t col = panel * kPanelRows, cols = minimum(kPanelRows, args.out_features - col);
  with_type(args.dtype, [&](auto* type) {
    using T = Element<decltype(type)>;
    const T* const bias = args.bias == nullptr ? nullptr : static_cast<const T*>(args.bias) + col;
    with_type(args.out_dtype, [&](auto* out_type) {
      using Out = Element<decltype(out_type)>;
      for (int64_t i = 0; i < count; ++i)
        store_sums(sums[i], bias, cols, static_cast<Out*>(args.out) + (first_row + i) * args.out_stride + col);
    });
  });
}

// A tile for each number of rows that Product takes. Tile<kName, kLevels>::template Of<R, V> does V vectors for R rows.
template <template <QuantizedFormat, Levels> class Tile, QuantizedFormat kName>
struct Tiles {
  using Packed = Tile<kName, Levels::kPacked>;
  // Levels of a byte are the same either way.
  using Expanded = Tile<kName, Packed::kStored == Packed::kExpandedBits ? Levels::kPacked : Levels::kExpanded>;
  using Function = void (*)(const typename Packed::Prepared* const*, const Chunk&, float (*)[kPanelRows]);
  static constexpr Function kExpandedTile = multiply_tile<Expanded, kTileRows>;
  // Tiles of kTileRows rows take expanded levels, which those of 8 bits are.
  template <class Each>
  static constexpr Function kSmallTiles[5] = {nullptr, multiply_tile<Each, 1>, multiply_tile<Each, 2>,
                                              multiply_tile<Each, 3>, multiply_tile<Each, 4>};
  static Function tile(int64_t rows) { return rows == kTileRows ? kExpandedTile : kSmallTiles<Packed>[rows]; }
  static Function expanded_tile(int64_t rows) {
    if constexpr (Packed::kExpandsAll)
      if (rows < kTileRows) return kSmallTiles<Expanded>[rows];
    return kExpandedTile;
  }
};

// The product of a format, and of others that differ in the columns of a block only, with the tiles of its kind.
template <template <QuantizedFormat, Levels> class Tile, QuantizedFormat kName>
class Product {
  using L = Layout<kName>;
  using Kernel = Tiles<Tile, kName>;
  using Packed = typename Kernel::Packed;
  using Prepared = typename Packed::Prepared;
  using InRegisters = typename Packed::InRegisters;
  static constexpr int64_t kMaxRows = Packed::kMaxRows;
  // Vectors of a tile of kTileRows rows beside each other are in this number of groups.
  static constexpr int64_t kTileGroups = kPanelRows / (kLanes * tile_vectors<kTileRows>(Packed::kRegisters));
  static constexpr int64_t kExpandedColumnBytes = kPanelRows * Packed::kExpandedBits / 8;
  // The fewest rows that are worth expanding levels for. Those of a byte are only copied, to the first-level cache.
  static_assert(kTileRows >= Packed::kLeastShared || !kIsSame<InRegisters, NoTileRegisters>,
                "nothing prefetches for itself while levels are expanded");
  static constexpr int64_t kLeastExpanded = L::kBits < Packed::kExpandedBits ? kTileRows : 3 * kTileRows;

 public:
  static void multiply(const QuantizedLinearArgs& args, const PreparedRows& x, int64_t first_panel, int64_t end_panel,
                       int64_t first_row, int64_t end_row) {
    const BlockFormat& format = block_format(args.format);
    const int64_t num_blocks = args.in_features / format.columns;
    alignas(64) float sums[kMaxRows][kPanelRows];
    const Prepared* rows[kMaxRows];
    InRegisters registers;
    for (int64_t panel = first_panel; panel < end_panel; ++panel)
      for (int64_t first = first_row; first < end_row; first += kMaxRows) {
        const int64_t count = minimum(kMaxRows, end_row - first);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t id = x.ids == nullptr ? first + i : x.ids[first + i];
          rows[i] = static_cast<const Prepared*>(x.rows) + id * (args.in_features / Prepared::kColumns);
        }
        memset(sums, 0, static_cast<size_t>(count) * sizeof(sums[0]));
        const uint8_t* const weight =
            static_cast<const uint8_t*>(args.weight) + panel * num_blocks * format.bytes * kPanelRows;
        if (panel == first_panel || end_row - first_row > kMaxRows)
          registers.take_rows(x, rows, first, count, args.in_features);
        multiply_panel(weight, format, num_blocks, rows, count, first == first_row, registers, sums);
        store_panel(args, sums, first, count, panel);
      }
  }

 private:
  static void multiply_panel(const uint8_t* weight, const BlockFormat& format, int64_t num_blocks,
                             const Prepared** rows, int64_t count, bool is_reading, InRegisters& registers,
                             float (*sums)[kPanelRows]) {
    const int64_t chunk_blocks = Packed::kChunkColumns / format.columns;
    for (int64_t block = 0; block < num_blocks; block += chunk_blocks) {
      Chunk chunk = {};
      chunk.head_stride = chunk.level_stride = format.bytes * kPanelRows;
      chunk.heads = weight + block * chunk.head_stride;
      chunk.levels = chunk.heads + L::kLevelsAt;
      chunk.num_blocks = minimum(chunk_blocks, num_blocks - block);
      chunk.num_units = format.columns / kUnitColumns;
      chunk.codebook = format.codebook;
      const bool is_shared = is_reading && count >= Packed::kLeastShared;
      chunk.is_reading = is_reading && !is_shared;
      const int64_t num_bytes = chunk.num_blocks * chunk.head_stride;
      const bool is_in_registers = InRegisters::takes(chunk, count);
      const int64_t num_shares = is_in_registers ? InRegisters::num_shares(count)
                                                 : count * kTileGroups * chunk.num_blocks * chunk.num_units / kTileRows;
      NextChunk next(chunk.heads + num_bytes, is_shared ? num_bytes : 0, maximum(1, num_shares));
      chunk.next = &next;
      int64_t i = 0;
      if (is_in_registers) i = multiply_in_registers(chunk, block / chunk_blocks, count, registers, sums);
      else if (count >= kLeastExpanded) i = multiply_expanded(chunk, rows, count, sums);
      for (int64_t tile = 0; i < count; i += tile, chunk.is_reading = false) {
        tile = tile_rows(count - i);
        Kernel::tile(tile)(rows + i, chunk, sums + i);
      }
      for (i = 0; i < count; ++i) rows[i] += chunk.num_blocks * (format.columns / Prepared::kColumns);
    }
  }

  // Multiplies as many rows as fill tiles of kTileRows, or all, and returns their number.
  static int64_t multiply_expanded(Chunk& chunk, const Prepared** rows, int64_t count, float (*sums)[kPanelRows]) {
    alignas(64) uint8_t expanded[Packed::kChunkColumns * kExpandedColumnBytes + Packed::kExtraBytes];
    chunk.is_shifted = Packed::includes_zeros(chunk);
    Chunk wide = chunk;
    wide.levels = expanded;
    wide.level_stride = chunk.num_units * kUnitColumns * kExpandedColumnBytes;
    int64_t done = 0;
    if constexpr (Packed::kExpandsInTile) {
      chunk.expanded = expanded;
      multiply_tile<Tile<kName, Levels::kExpanding>, kTileRows>(rows, chunk, sums);
      done = kTileRows;
    } else {
      for (int64_t i = 0; i < chunk.num_blocks; ++i) Packed::expand(chunk, i, expanded + i * wide.level_stride);
    }
    const int64_t end = Packed::kExpandsAll ? count : count / kTileRows * kTileRows;
    for (int64_t i = done, tile = 0; i < end; i += tile) {
      tile = tile_rows(end - i);
      Kernel::expanded_tile(tile)(rows + i, wide, sums + i);
    }
    return end;
  }

  // Multiplies rows in tile registers, and returns their number.
  static int64_t multiply_in_registers(const Chunk& chunk, int64_t chunk_index, int64_t count, InRegisters& registers,
                                       float (*sums)[kPanelRows]) {
    if constexpr (kIsSame<InRegisters, NoTileRegisters>) {
      return 0;
    } else {
      alignas(64) uint8_t bytes[InRegisters::kBytes];
      InRegisters::expand(chunk, bytes);
      const int64_t num_taken = InRegisters::num_taken(count);
      registers.multiply(num_taken, chunk_index, chunk, bytes, sums);
      return num_taken;
    }
  }

  // The number of rows of the next tile, if `left` rows remain.
  static int64_t tile_rows(int64_t left) { return left >= kTileRows ? kTileRows : left > 4 ? 3 : left; }
};

using Multiply = void (*)(const QuantizedLinearArgs&, const PreparedRows&, int64_t, int64_t, int64_t, int64_t);

template <template <QuantizedFormat, Levels> class Tile, QuantizedFormat kName>
constexpr Multiply kProduct = Product<Tile, kName>::multiply;

}  // namespace

// By format: those with blocks of 32 columns, the K types, and formats with codes.
extern const Multiply kSmallProducts[];
extern const Multiply kLargeProducts[];
extern const Multiply kCodesProducts[];
// For all int4 formats, and for all fp8 formats.
extern const Multiply kInt4Product;
extern const Multiply kFp8Product;

}  // namespace PW_ISA
}  // namespace pagewick
