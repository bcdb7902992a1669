// The loops of a product with a quantized weight, for all formats: over panels, over chunks of up to 256 columns, and
// over tiles of rows.
//
// With few rows, levels are taken apart in registers while they are read. With more, the levels of a chunk of a panel
// are first expanded to a byte each, which all rows then share. The same whole numbers are multiplied and the same float
// sums are made either way.
#pragma once

#include "matrix.h"
#include "quantized.h"
#include "sums.h"
#include "vec_int8.h"

namespace pagewick {
namespace PW_ISA {
namespace {

constexpr int64_t kQuad = 4;  // columns whose bytes lie beside each other
constexpr int64_t kUnitColumns = 32;
constexpr int64_t kUnitQuads = kUnitColumns / kQuad;
constexpr int64_t kChunkColumns = 256;
constexpr int64_t kChunkUnits = kChunkColumns / kUnitColumns;
constexpr int64_t kWordsBytes = kPanelRows * 4;  // of a word of each row of a panel
// Bytes ahead of the current ones that are prefetched while a panel is read for the first rows.
constexpr int64_t kAhead = 4608;
constexpr int kTileRows = 6;
// Rows that share a chunk of expanded levels.
constexpr int64_t kMaxRows = 96;

template <QuantizedFormat kFormat>
struct Layout {
  static constexpr BlockFormat kBlock = block_format(kFormat);
  static constexpr int kBits = kBlock.bits();
  static constexpr int64_t kBlockBytes = kBlock.bytes * kPanelRows;
  static constexpr int64_t kUnits = kBlock.columns / kUnitColumns;
  static constexpr int64_t kMinimaAt = kBlock.num_scales * kBlock.scale_bytes * kPanelRows;
  static constexpr int64_t kGroupsAt = kMinimaAt + (kBlock.has_minimum() ? 2 * kPanelRows : 0);
  static constexpr int64_t kLevelsAt = kGroupsAt + kBlock.num_group_words * kWordsBytes;
  static_assert(kLevelsAt + kUnits * kBits * kWordsBytes == kBlockBytes, "a panel takes the bytes of its rows");
  using Prepared = PreparedBlock<kBlock.columns>;
};

// A chunk of a panel. levels: those of its first 32 columns.
struct Chunk {
  const uint8_t* heads;
  const uint8_t* levels;
  int64_t head_stride, level_stride;  // from a block to the next
  int64_t num_blocks;
  bool is_reading;  // from memory
};

// kWidth bits of each level of a quad, shifted. words: those of a unit's plane.
template <int kWidth, int kShift>
inline IntVec plane_bits(const uint8_t* words, int64_t quad) {
  constexpr int kPerWord = 8 / kWidth;
  const IntVec word = load_words(words + quad / kPerWord * kWordsBytes);
  if constexpr (kWidth == 8) {
    return word;
  } else {
    constexpr uint32_t kMask = ((1u << kWidth) - 1) * 0x01010101u << kShift;
    const int shift = static_cast<int>(quad % kPerWord) * kWidth - kShift;
    return (shift < 0 ? word << -shift : word >> shift) & static_cast<int32_t>(kMask);
  }
}

// The levels of a quad, stored with kBits bits each. unit: the words of 32 columns.
template <int kBits>
inline IntVec quad_levels(const uint8_t* unit, int64_t quad) {
  constexpr int kLow = kBits == 8 ? 8 : kBits >= 4 ? 4 : 2;
  const IntVec low = plane_bits<kLow, 0>(unit, quad);
  if constexpr (kBits == kLow) return low;
  else return low | plane_bits<kBits - kLow, kLow>(unit + kLow * kWordsBytes, quad);
}

// sums[r][v] += the products of kQuads quads from `first` on. values: those of R rows of x for the unit.
template <int kBits, int kStored, int kQuads, int R, int V>
inline void add_products(const uint8_t* unit, int64_t first, const int8_t* const (&values)[R],
                         typename Dot<kBits>::Sum (&sums)[R][V]) {
#pragma GCC unroll 8
  for (int64_t quad = first; quad < first + kQuads; ++quad) {
    IntVec levels[V];
    for (int v = 0; v < V; ++v) levels[v] = quad_levels<kStored>(unit + v * sizeof(IntVec), quad);
    for (int r = 0; r < R; ++r) {
      const IntVec x = broadcast(values[r] + quad * kQuad);
      for (int v = 0; v < V; ++v) sums[r][v] = Dot<kBits>::add(sums[r][v], levels[v], x);
    }
  }
}

// Prefetches what the tile will read of this unit's counterpart further on.
template <int kStored, int V>
inline void prefetch_unit(const uint8_t* unit) {
  for (int word = 0; word < kStored; ++word)
    for (int64_t byte = 0; byte < V * int64_t{sizeof(IntVec)}; byte += 64)
      __builtin_prefetch(unit + word * kWordsBytes + byte + kAhead, 0, 3);
}

// The number of vectors beside each other for R rows. Each takes two registers.
template <int R>
constexpr int tile_vectors() {
  int vectors = 1;
  while (4 * vectors * R <= kAccumulators && 2 * vectors * kLanes <= kPanelRows) vectors *= 2;
  return vectors;
}

// Adds the products of R rows with a chunk, for all of the panel's rows, to sums. Tile::Of<R, V> does V vectors of them.
template <class Tile, int R>
void multiply_tile(const typename Tile::Prepared* const* x, const Chunk& chunk, float (*sums)[kPanelRows]) {
  constexpr int kVectors = tile_vectors<R>();
  for (int64_t col = 0; col < kPanelRows; col += kVectors * kLanes)
    Tile::template Of<R, kVectors>::run(x, chunk, col, sums);
}

// Expands the levels of a block of a panel to bytes.
template <QuantizedFormat kFormat>
void expand(const uint8_t* levels, bool is_reading, uint8_t* bytes) {
  using L = Layout<kFormat>;
  constexpr int kVectors = kPanelRows / kLanes;
  for (int64_t i = 0; i < L::kUnits; ++i, levels += L::kBits * kWordsBytes, bytes += kUnitQuads * kWordsBytes) {
    if (is_reading) prefetch_unit<L::kBits, kVectors>(levels);
    for (int64_t byte = 0; byte < kWordsBytes; byte += sizeof(IntVec))
#pragma GCC unroll 8
      for (int64_t quad = 0; quad < kUnitQuads; ++quad) {
        const IntVec found = quad_levels<L::kBits>(levels + byte, quad);
        memcpy(bytes + quad * kWordsBytes + byte, &found, sizeof(found));
      }
  }
}

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

// A tile for each number of rows that Product takes. Tile<kName, kStored>::template Of<R, V> does V vectors for R rows,
// with levels that are stored with kStored bits each: those of kTiles as they are packed, those of kExpandedTile as
// `expand` writes them.
template <template <QuantizedFormat, int> class Tile, QuantizedFormat kName>
struct Tiles {
  using Packed = Tile<kName, Layout<kName>::kBits>;
  using Function = void (*)(const typename Packed::Prepared* const*, const Chunk&, float (*)[kPanelRows]);
  static constexpr Function kExpandedTile = multiply_tile<Tile<kName, 8>, kTileRows>;
  // Tiles of kTileRows rows take expanded levels, which 8 bits are.
  static constexpr Function kTiles[kTileRows + 1] = {nullptr,
                                                     multiply_tile<Packed, 1>,
                                                     multiply_tile<Packed, 2>,
                                                     multiply_tile<Packed, 3>,
                                                     multiply_tile<Packed, 4>,
                                                     nullptr,
                                                     kExpandedTile};
};

// The product of a format with the tiles of its kind.
template <template <QuantizedFormat, int> class Tile, QuantizedFormat kName>
class Product {
  using L = Layout<kName>;
  using Kernel = Tiles<Tile, kName>;
  using Prepared = typename L::Prepared;
  static constexpr int64_t kChunkBlocks = kChunkColumns / L::kBlock.columns;
  static constexpr int64_t kExpandedBytes = L::kBlock.columns * kPanelRows;

 public:
  static void multiply(const QuantizedLinearArgs& args, const PreparedRows& x, int64_t first_panel, int64_t end_panel,
                       int64_t first_row, int64_t end_row) {
    const int64_t num_blocks = args.in_features / L::kBlock.columns;
    alignas(64) float sums[kMaxRows][kPanelRows];
    const Prepared* rows[kMaxRows];
    for (int64_t panel = first_panel; panel < end_panel; ++panel)
      for (int64_t first = first_row; first < end_row; first += kMaxRows) {
        const int64_t count = minimum(kMaxRows, end_row - first);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t id = x.ids == nullptr ? first + i : x.ids[first + i];
          rows[i] = static_cast<const Prepared*>(x.rows) + id * num_blocks;
        }
        memset(sums, 0, static_cast<size_t>(count) * sizeof(sums[0]));
        const uint8_t* const weight = static_cast<const uint8_t*>(args.weight) + panel * num_blocks * L::kBlockBytes;
        multiply_panel(weight, num_blocks, rows, count, first == first_row, sums);
        store_panel(args, sums, first, count, panel);
      }
  }

 private:
  static void multiply_panel(const uint8_t* weight, int64_t num_blocks, const Prepared** rows, int64_t count,
                             bool is_reading, float (*sums)[kPanelRows]) {
    for (int64_t block = 0; block < num_blocks; block += kChunkBlocks) {
      Chunk chunk = {};
      chunk.heads = weight + block * L::kBlockBytes;
      chunk.levels = chunk.heads + L::kLevelsAt;
      chunk.head_stride = chunk.level_stride = L::kBlockBytes;
      chunk.num_blocks = minimum(kChunkBlocks, num_blocks - block);
      chunk.is_reading = is_reading;
      int64_t i = 0;
      if (L::kBits < 8 && count >= kTileRows) i = multiply_expanded(chunk, rows, count, sums);
      for (int64_t tile = 0; i < count; i += tile, chunk.is_reading = false) {
        tile = tile_rows(count - i);
        Kernel::kTiles[tile](rows + i, chunk, sums + i);
      }
      for (i = 0; i < count; ++i) rows[i] += chunk.num_blocks;
    }
  }

  // Multiplies as many rows as fill tiles of kTileRows, and returns their number.
  static int64_t multiply_expanded(Chunk& chunk, const Prepared** rows, int64_t count, float (*sums)[kPanelRows]) {
    alignas(64) uint8_t expanded[kChunkColumns * kPanelRows];
    for (int64_t i = 0; i < chunk.num_blocks; ++i)
      expand<kName>(chunk.levels + i * L::kBlockBytes, chunk.is_reading, expanded + i * kExpandedBytes);
    chunk.is_reading = false;
    Chunk bytes = chunk;
    bytes.levels = expanded;
    bytes.level_stride = kExpandedBytes;
    int64_t i = 0;
    for (; i + kTileRows <= count; i += kTileRows) Kernel::kExpandedTile(rows + i, bytes, sums + i);
    return i;
  }

  // The number of rows of the next tile, if `left` rows remain.
  static int64_t tile_rows(int64_t left) { return left >= kTileRows ? kTileRows : left > 4 ? 3 : left; }
};

using Multiply = void (*)(const QuantizedLinearArgs&, const PreparedRows&, int64_t, int64_t, int64_t, int64_t);

template <template <QuantizedFormat, int> class Tile, QuantizedFormat kName>
constexpr Multiply kProduct = Product<Tile, kName>::multiply;

}  // namespace

// By format: those with blocks of 32 columns, and the K types.
extern const Multiply kSmallProducts[];
extern const Multiply kLargeProducts[];

}  // namespace PW_ISA
}  // namespace pagewick
