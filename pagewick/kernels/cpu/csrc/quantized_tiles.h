// The parts that all tiles of products with quantized weights share: they describe a chunk of a packed weight, take its
// levels apart, and multiply them by rows of x.
#pragma once

#include "matrix.h"
#include "processor.h"
#include "quantized.h"
#include "sums.h"
#include "vec_bytes.h"
#include "vec_int8.h"

namespace pagewick {
namespace PW_ISA {
namespace {

constexpr int64_t kQuad = 4;  // columns whose bytes lie beside each other
constexpr int64_t kUnitColumns = 32;
constexpr int64_t kUnitQuads = kUnitColumns / kQuad;
constexpr int64_t kWordsBytes = kPanelRows * 4;  // of a word of each row of a panel
// Bytes ahead of the current ones that are prefetched while a panel is read for the first rows.
constexpr int64_t kAhead = 9216;
// Prefetches a cache line of a weight, which a step reads once. Among processors with bf16 products and no tile
// registers, AMD's are the usual ones: a hint keeps the line out of the caches in which keys, values and the host's own
// data may stay. A Zen 4 reads too few lines at a time that way.
#if defined(PW_HAS_BF16_DOT) && !defined(PW_HAS_AMX)
const bool kIsZen4 = is_zen4_if_avx512();
inline void prefetch_line(const uint8_t* line) {
  if (kIsZen4) __builtin_prefetch(line, 0, 2);
  else __builtin_prefetch(line, 0, 0);
}
#else
inline void prefetch_line(const uint8_t* line) { __builtin_prefetch(line, 0, 3); }
#endif
constexpr int kTileRows = 6;
constexpr int64_t kRegisterRows = 16;  // of a tile register

template <QuantizedFormat kFormat>
struct Layout {
  static constexpr BlockFormat kBlock = block_format(kFormat);
  static constexpr int kBits = kBlock.bits(), kLevelBits = kBlock.level_bits();
  static constexpr int64_t kMinimaAt = kBlock.num_scales * kBlock.scale_bytes * kPanelRows;
  static constexpr int64_t kZerosAt = kMinimaAt + (kBlock.has_minimum() ? 2 * kPanelRows : 0);
  static constexpr int64_t kGroupsAt = kZerosAt + (kBlock.has_zero() ? kPanelRows : 0);
  static constexpr int64_t kLevelsAt = kGroupsAt + kBlock.num_group_words * kWordsBytes;
  static_assert(kLevelsAt + kBlock.columns / kUnitColumns * kBits * kWordsBytes == kBlock.bytes * kPanelRows,
                "a panel takes the bytes of its rows");
};

// Activations are rounded to bf16 for fp8 formats; a float holds the result where there is no dot product of bf16.
#if defined(PW_HAS_BF16_DOT)
using Wide = BFloat16;
#else
using Wide = float;
#endif
struct PreparedWide {
  static constexpr int kColumns = 32;
  Wide values[kColumns];
};

// Prefetches the next chunk, a share with every 32 columns of each tile, so that memory is read while many rows are
// multiplied. Larger shares would fill the buffers for outstanding reads, and multiplying would wait.
class NextChunk {
 public:
  NextChunk(const uint8_t* begin, int64_t num_bytes, int64_t num_shares)
      : line_(begin), end_(begin + num_bytes), lines_((num_bytes / 64 + num_shares - 1) / num_shares) {}

  void prefetch_share() {
    for (int64_t i = 0; i < lines_ && line_ < end_; ++i, line_ += 64) __builtin_prefetch(line_, 0, 2);
  }

 private:
  const uint8_t *line_, *end_;
  int64_t lines_;
};

// A chunk of a panel. levels: those of its first 32 columns.
struct Chunk {
  const uint8_t* heads;
  const uint8_t* levels;
  int64_t head_stride, level_stride;  // from a block to the next
  int64_t num_blocks;
  int64_t num_units;  // of a block: 32 columns each
  const uint8_t* codebook;  // of the format, or null
  bool is_reading;    // from memory
  bool is_shifted;    // expanded levels include the zero points of their blocks
  uint8_t* expanded;  // where tiles that expand levels store them
  NextChunk* next;
};

// Stands for products in tile registers where there are none.
struct NoTileRegisters {
  template <class Prepared>
  void take_rows(const PreparedRows&, const Prepared* const*, int64_t, int64_t, int64_t) {}
  static bool takes(const Chunk&, int64_t) { return false; }
  static int64_t num_shares(int64_t) { return 1; }
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

// The same, or the levels of the codes that are stored if kHasCodes.
template <int kBits, bool kHasCodes>
inline IntVec decoded_levels(const uint8_t* unit, int64_t quad, const uint8_t* codebook) {
  const IntVec levels = quad_levels<kBits>(unit, quad);
  if constexpr (kHasCodes) return levels_of_codes(codebook, levels);
  else return levels;
}

// How a tile gets its levels: as the weight has them, from bytes, or as the weight has them while it stores them as bytes
// for the tiles of other rows.
enum class Levels { kPacked, kExpanded, kExpanding };

// The levels of 32 columns, stored with kBits bits each: a vector of a quad. unit: their words.
template <int kBits, bool kHasCodes = false>
struct StoredLevels {
  const uint8_t *unit, *codebook;

  IntVec operator()(int64_t quad, int v) const {
    return decoded_levels<kBits, kHasCodes>(unit + v * sizeof(IntVec), quad, codebook);
  }
};

// The same, which are also stored as bytes.
template <int kBits, bool kHasCodes = false>
struct ExpandingLevels {
  StoredLevels<kBits, kHasCodes> packed;
  uint8_t* bytes;

  IntVec operator()(int64_t quad, int v) const { return stored(quad, v, packed(quad, v)); }
  IntVec stored(int64_t quad, int v, IntVec levels) const {
    memcpy(bytes + quad * kWordsBytes + v * sizeof(IntVec), &levels, sizeof(levels));
    return levels;
  }
};

// Prefetches kBytes bytes further on. A line that is left out would stall everything after it: processors read a stream
// in hardware only some lines ahead.
template <int64_t kBytes>
inline void prefetch(const uint8_t* from) {
#pragma GCC unroll 4
  for (int64_t byte = 0; byte < kBytes; byte += 64) prefetch_line(from + byte + kAhead);
}

// Prefetches kBytes bytes further on (0: nothing), a share with each quad of a unit. If all were requested at once,
// reading and multiplying would hardly overlap (docs/decisions/0025-quantized-kernels.md).
template <int64_t kBytes>
class QuadAhead {
 public:
  QuadAhead(const uint8_t* from, bool is_reading) : from_(is_reading ? from + kAhead : nullptr) {}

  void share(int64_t quad) const {
    if (kBytes == 0 || from_ == nullptr) return;
    constexpr int64_t kLines = (kBytes + 63) / 64;
    asm volatile("");  // compilers would move all shares to the first
#pragma GCC unroll 8
    for (int64_t line = quad * kLines / kUnitQuads; line < (quad + 1) * kLines / kUnitQuads; ++line)
      prefetch_line(from_ + line * 64);
  }

 private:
  const uint8_t* from_;
};

#if defined(PW_HAS_BYTE_MATRIX_DOT)
// add_products for an even number of rows and of quads.
template <int kQuads, int R, int V, class LevelsOf, class Ahead>
inline void add_products_in_pairs(const LevelsOf& levels_of, int64_t first, const int8_t* const (&values)[R], const Ahead& ahead,
                      IntVec (&sums)[R][V]) {
  PairDot pairs[R / 2][V];
#pragma GCC unroll 4
  for (int64_t quad = first; quad < first + kQuads; quad += 2) {
    ahead.share(quad);
    ahead.share(quad + 1);
    IntVec low[V], high[V];
    for (int v = 0; v < V; ++v) {
      low[v] = levels_of(quad, v);
      high[v] = levels_of(quad + 1, v);
    }
    for (int r = 0; r < R; r += 2) {
      const int8_t *const x = values[r] + quad * kQuad, *const next = values[r + 1] + quad * kQuad;
      const int8x16_t both = vcombine_s8(vld1_s8(x), vld1_s8(next));
      for (int v = 0; v < V; ++v) pairs[r / 2][v].add(low[v], high[v], both);
    }
  }
  for (int r = 0; r < R; r += 2)
    for (int v = 0; v < V; ++v) {
      sums[r][v] += pairs[r / 2][v].of_first_row();
      sums[r + 1][v] += pairs[r / 2][v].of_second_row();
    }
}
#endif

// sums[r][v] += the products of kQuads quads from `first` on. values: those of R rows of x for the unit. Each quad
// prefetches its share.
template <int kBits, int kQuads, int R, int V, class LevelsOf, class Ahead>
inline void add_products(const LevelsOf& levels_of, int64_t first, const int8_t* const (&values)[R],
                         const Ahead& ahead, typename Dot<kBits>::Sum (&sums)[R][V]) {
#if defined(PW_HAS_BYTE_MATRIX_DOT)
  if constexpr (R % 2 == 0 && kQuads % 2 == 0) return add_products_in_pairs<kQuads>(levels_of, first, values, ahead, sums);
#endif
#pragma GCC unroll 8
  for (int64_t quad = first; quad < first + kQuads; ++quad) {
    ahead.share(quad);
    IntVec levels[V];
    for (int v = 0; v < V; ++v) levels[v] = levels_of(quad, v);
    for (int r = 0; r < R; ++r) {
      const IntVec x = broadcast(values[r] + quad * kQuad);
      for (int v = 0; v < V; ++v) sums[r][v] = Dot<kBits>::add(sums[r][v], levels[v], x);
    }
  }
}

// The sums of groups of x, in the order in which weigh_groups takes them.
template <int64_t kGroups>
inline const int16_t* group_sums(const PreparedBlock<256>& x) {
  if constexpr (kGroups == 16) return x.sums_of_16;
  else return x.sums_of_32;
}

// Adds four sums of groups times the weights of kLanes rows to `total`. even, odd: the bytes of a word of four weights.
inline IntVec weigh_groups(ShortVec even, ShortVec odd, const int16_t* sums, IntVec total) {
  return add_pairs(add_pairs(total, even, (ShortVec)broadcast(sums)), odd, (ShortVec)broadcast(sums + 2));
}

// The number of vectors beside each other for R rows, if each takes that many registers for a row.
template <int R>
constexpr int tile_vectors(int num_registers) {
  int vectors = 1;
  while (2 * num_registers * vectors * R <= kAccumulators && 2 * vectors * kLanes <= kPanelRows) vectors *= 2;
  return vectors;
}

// Adds the products of R rows with a chunk, for all of the panel's rows, to sums. Tile::Of<R, V> does V vectors of them.
template <class Tile, int R>
void multiply_tile(const typename Tile::Prepared* const* x, const Chunk& chunk, float (*sums)[kPanelRows]) {
  constexpr int kVectors = tile_vectors<R>(Tile::kRegisters);
  for (int64_t col = 0; col < kPanelRows; col += kVectors * kLanes)
    Tile::template Of<R, kVectors>::run(x, chunk, col, sums);
}

// Calls add(block, head, unit, total) for every block of a chunk, and adds the totals, V vectors for R rows, to sums.
template <int R, int V, class Add>
inline void add_blocks(const Chunk& chunk, int64_t col, float (*sums)[kPanelRows], const Add& add) {
  Vec total[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) total[r][v] = load(sums[r] + col + v * kLanes);
  for (int64_t block = 0; block < chunk.num_blocks; ++block) {
    const uint8_t* const head = chunk.heads + block * chunk.head_stride;
    add(block, head, chunk.levels + block * chunk.level_stride + col * kQuad, total);
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(sums[r] + col + v * kLanes, total[r][v]);
}

// The parts that tiles of whole numbers of kBits bits share. kHasCodes: these are codes.
template <int kBits, Levels kLevels, bool kHasCodes = false>
struct LevelTile {
  static constexpr int kExpandedBits = 8, kRegisters = 2;
  static constexpr int kStored = kLevels == Levels::kExpanded ? kExpandedBits : kBits;
  // Whether rows that fill no tile of kTileRows take expanded levels as well, if there are any, and whether levels are
  // expanded while the first tile of kTileRows is multiplied: 16 registers are too few for that.
  static constexpr bool kExpandsAll = false, kExpandsInTile = kAccumulators >= 24;
  // Columns that are expanded at a time, and rows that share them.
  static constexpr int64_t kChunkColumns = 256, kMaxRows = 256;
  // The fewest rows whose tiles prefetch the next chunk. Fewer prefetch what lies a fixed number of bytes ahead.
  static constexpr int64_t kLeastShared = kLanes < 16 ? 1 : 3;

  // Bytes that a format stores behind the expanded levels of a chunk.
  static constexpr int64_t kExtraBytes = 0;

  // Whether expanded levels of a chunk include zero points.
  static bool includes_zeros(const Chunk&) { return false; }

  // Expands the levels of a block of a panel to bytes.
  static void expand(const Chunk& chunk, int64_t block, uint8_t* bytes) {
    expand_levels(chunk, block, bytes, [](int64_t) { return LevelVec{}; });
  }

  // The levels of a unit of a block, from column `col` of the panel on. words: where they are stored.
  static auto levels_of(const uint8_t* words, const Chunk& chunk, int64_t block, int64_t unit, int64_t col) {
    if constexpr (kLevels == Levels::kExpanding)
      return ExpandingLevels<kBits, kHasCodes>{{words, chunk.codebook}, expanded_unit(chunk, block, unit) + col * kQuad};
    else return StoredLevels<kStored, kHasCodes && kStored == kBits>{words, chunk.codebook};
  }
  static uint8_t* expanded_unit(const Chunk& chunk, int64_t block, int64_t unit) {
    return chunk.expanded + (block * chunk.num_units + unit) * kUnitQuads * kWordsBytes;
  }

  // shift(byte): what is added to the levels of kLanes rows, whose words begin at a byte of a panel's. The words of a
  // quad of columns, and those of a quad of the next kLanes rows, lie kQuadStride and kVectorStride bytes apart.
  template <int64_t kQuadStride = kWordsBytes, int64_t kVectorStride = sizeof(IntVec), class Shift>
  static void expand_levels(const Chunk& chunk, int64_t block, uint8_t* bytes, const Shift& shift) {
    const uint8_t* levels = chunk.levels + block * chunk.level_stride;
    for (int64_t i = 0; i < chunk.num_units; ++i, levels += kBits * kWordsBytes, bytes += kUnitQuads * kQuadStride) {
      uint8_t* target = bytes;
      for (int64_t byte = 0; byte < kWordsBytes; byte += sizeof(IntVec), target += kVectorStride) {
        const LevelVec added = shift(byte);
#pragma GCC unroll 8
        for (int64_t quad = 0; quad < kUnitQuads; ++quad) {
          const LevelVec found = (LevelVec)decoded_levels<kBits, kHasCodes>(levels + byte, quad, chunk.codebook) + added;
          memcpy(target + quad * kQuadStride, &found, sizeof(found));
        }
      }
    }
  }
};

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
