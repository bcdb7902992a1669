// Products of bytes on tile registers, for K types.
//
// A level times the scale of its group does not fit a byte, except with Q2_K and Q3_K. The product is taken apart into
// its low byte, which has no sign, and its high one. A tile adds up the products of x with each of them over all groups
// of a block; the whole sum is that of low bytes plus 256 times that of high ones, which is exact.
//
// Levels of Q3_K are stored as 4 - level, since the products of -4 to 3 with scales from -32 to 31 just fit a byte if
// their signs are turned.
#pragma once

#include "quantized_amx.h"

#if defined(PW_HAS_AMX)

namespace pagewick {
namespace PW_ISA {
namespace {

// Unsigned, since products of 16 bits may wrap around.
typedef uint16_t PairVec __attribute__((vector_size(4 * kLanes)));

template <QuantizedFormat kName>
class BlocksInRegisters : public RowsInRegisters<PreparedBlock<256>> {
  using L = Layout<kName>;
  static constexpr bool kIsOneByte = kName == QuantizedFormat::kQ2_K || kName == QuantizedFormat::kQ3_K;
  static constexpr bool kIsTurned = kName == QuantizedFormat::kQ3_K;
  static constexpr int kPlanes = kIsOneByte ? 1 : 2;
  static constexpr int64_t kGroups = kMaxColumns / L::kBlock.group_columns, kWords = kGroups / 4;
  static constexpr int64_t kGroupQuads = L::kBlock.group_columns / kQuad, kUnits = kMaxColumns / kUnitColumns;
  static_assert(kUnitQuads % kGroupQuads == 0, "groups do not cross units");
  // Each slice of the weight has a plane of low bytes and one of high ones. Scales and minima of the block lie behind
  // them, then minima of groups as weigh_groups takes them.
  static constexpr int64_t kScalesAt = kPanelRows / kLanes * kPlanes * kSliceBytes;
  static constexpr int64_t kMinimaAt = kScalesAt + kWordsBytes, kPairsAt = kMinimaAt + kWordsBytes;

 public:
  static constexpr int64_t kBytes = L::kBlock.has_minimum() ? kPairsAt + 2 * kWords * kWordsBytes : kMinimaAt;

  static bool takes(const Chunk&, int64_t count) { return takes_rows(count); }

  // How often multiply prefetches a share of the next chunk.
  static int64_t num_shares(int64_t count) { return kPanelRows / (2 * kLanes) * count / kRegisterRows; }

  static void expand(const Chunk& chunk, uint8_t* bytes) {
    for (int64_t col = 0; col < kPanelRows; col += kLanes) {
      IntVec scales[kWords], minima[kWords];
      read_groups(chunk, col, scales, minima);
      store_floats(chunk.heads, bytes + kScalesAt, col);
      if constexpr (L::kBlock.has_minimum()) {
        store_floats(chunk.heads + L::kMinimaAt, bytes + kMinimaAt, col);
        for (int64_t i = 0; i < kWords; ++i) {
          const ShortVec pairs[] = {even_bytes(minima[i]), odd_bytes(minima[i])};
          for (int64_t k = 0; k < 2; ++k)
            memcpy(bytes + kPairsAt + (2 * i + k) * kWordsBytes + col * kQuad, pairs + k, sizeof(pairs[k]));
        }
      }
      expand_slice(chunk.levels + col * kQuad, scales, bytes + col / kLanes * kPlanes * kSliceBytes);
    }
  }

  // Adds the products of `count` rows with a chunk, which is a block, to sums. bytes: those that expand wrote.
  void multiply(int64_t count, int64_t chunk_index, const Chunk& chunk, const uint8_t* bytes,
                float (*sums)[kPanelRows]) {
    if (!registers_.is_configured()) configure();
    TileRegisters::finish_writes();
    // Two slices, which stay in the nearest cache, at a time.
    for (int64_t col = 0; col < kPanelRows; col += 2 * kLanes)
      for (int64_t row = 0; row < count; row += kRegisterRows) {
        chunk.next->prefetch_share();
        alignas(64) TileSums products[2][kPlanes];
        const Rows& rows = rows_.at(row, chunk_index);
        multiply_slices(rows, bytes + col / kLanes * kPlanes * kSliceBytes, products);
        const int64_t rows_left = minimum(kRegisterRows, count - row);
        for (int64_t i = 0; i < 2; ++i)
          add_products(rows, rows_left, bytes, col + i * kLanes, products[i], sums + row);
      }
  }

 private:
  void configure() {
    constexpr TileShape kTile = {kRegisterRows, 64};
    registers_.configure({kTile, kTile, kTile, kTile, kTile, kTile, kTile, kTile});
  }

  static void store_floats(const uint8_t* halves, uint8_t* floats, int64_t col) {
    store(reinterpret_cast<float*>(floats) + col, load(reinterpret_cast<const Float16*>(halves) + col));
  }

  // Reads the scales and minima of groups of kLanes rows, from `col` on.
  static void read_groups(const Chunk& chunk, int64_t col, IntVec (&scales)[kWords], IntVec (&minima)[kWords]) {
    IntVec packed[4];
    for (int i = 0; i < L::kBlock.num_group_words; ++i)
      packed[i] = load_words(chunk.heads + L::kGroupsAt + i * kWordsBytes + col * kQuad);
    split_groups<kName>(packed, scales, minima);
  }

  // The scale of a group, twice in each lane.
  static PairVec scale_of(const IntVec (&scales)[kWords], int64_t group) {
    const IntVec scale = scales[group / 4] << (24 - group % 4 * 8) >> 24;
    return (PairVec)((scale & 0xffff) | scale << 16);
  }

  static void expand_slice(const uint8_t* levels, const IntVec (&scales)[kWords], uint8_t* bytes) {
    for (int64_t unit = 0; unit < kUnits; ++unit, levels += L::kBits * kWordsBytes) {
#pragma GCC unroll 2
      for (int64_t quad = 0; quad < kUnitQuads; quad += kGroupQuads) {
        const PairVec scale = scale_of(scales, (unit * kUnitQuads + quad) / kGroupQuads);
#pragma GCC unroll 8
        for (int64_t k = quad; k < quad + kGroupQuads; ++k)
          expand_quad(quad_levels<L::kBits>(levels, k), scale, bytes + (unit * kUnitQuads + k) * kQuadBytes);
      }
    }
  }

  static void expand_quad(IntVec stored, PairVec scale, uint8_t* bytes) {
    constexpr uint8_t kOffset = static_cast<uint8_t>(L::kBlock.offset);
    LevelVec levels = (LevelVec)stored;
    if constexpr (kIsTurned) levels = kOffset - levels;
    else if constexpr (kOffset != 0) levels = levels - kOffset;
    constexpr uint16_t kLow = 0xff, kHigh = 0xff00;
    if constexpr (kIsOneByte) {
      const PairVec products = (((PairVec)levels & kLow) * scale & kLow) | ((PairVec)levels & kHigh) * scale;
      memcpy(bytes, &products, sizeof(products));
    } else {
      const PairVec even = (PairVec)even_bytes((IntVec)levels) * scale;
      const PairVec odd = (PairVec)odd_bytes((IntVec)levels) * scale;
      const PairVec low = (even & kLow) | odd << 8, high = even >> 8 | (odd & kHigh);
      memcpy(bytes, &low, sizeof(low));
      memcpy(bytes + kSliceBytes, &high, sizeof(high));
    }
  }

  // Tiles 0 to 3 hold the sums of two slices, and of their planes.
  static void multiply_slices(const Rows& rows, const uint8_t* bytes,
                              TileSums (&products)[2][kPlanes]) {
    constexpr int64_t kDepth = Rows::kDepth, kStepBytes = kDepth / kQuad * kQuadBytes;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
#pragma GCC unroll 4
    for (int64_t step = 0; step < kMaxColumns / kDepth; ++step, bytes += kStepBytes) {
      _tile_loadd(4, rows.values[step], kDepth);
      _tile_loadd(6, bytes, kQuadBytes);
      if constexpr (kIsOneByte) {
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, bytes + kSliceBytes, kQuadBytes);
        _tile_dpbssd(1, 4, 7);
      } else {
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(7, bytes + kSliceBytes, kQuadBytes);
        _tile_dpbssd(1, 4, 7);
        _tile_loadd(6, bytes + 2 * kSliceBytes, kQuadBytes);
        _tile_dpbsud(2, 4, 6);
        _tile_loadd(7, bytes + 3 * kSliceBytes, kQuadBytes);
        _tile_dpbssd(3, 4, 7);
      }
    }
    PW_STORE_SUMS(0, products[0][0])
    if constexpr (kIsOneByte) {
      PW_STORE_SUMS(1, products[1][0])
    } else {
      PW_STORE_SUMS(1, products[0][1])
      PW_STORE_SUMS(2, products[1][0])
      PW_STORE_SUMS(3, products[1][1])
    }
  }

  static void add_products(const Rows& rows, int64_t count, const uint8_t* bytes, int64_t col,
                           const TileSums (&products)[kPlanes], float (*sums)[kPanelRows]) {
    const Vec scale = load(reinterpret_cast<const float*>(bytes + kScalesAt) + col);
    for (int64_t row = 0; row < count; ++row) {
      IntVec whole = load_sums(products[0], row);
      if constexpr (!kIsOneByte) whole += load_sums(products[1], row) << 8;
      if constexpr (kIsTurned) whole = -whole;
      const Vec x_scale = set1(rows.scales[row]);
      Vec sum = madd(__builtin_convertvector(whole, Vec), scale * x_scale, load(sums[row] + col));
      if constexpr (L::kBlock.has_minimum()) {
        const Vec minimum = load(reinterpret_cast<const float*>(bytes + kMinimaAt) + col);
        const IntVec weighted = weigh(rows.template sums_of<kGroups>(row), bytes + kPairsAt + col * kQuad);
        sum = madd(__builtin_convertvector(-weighted, Vec), minimum * x_scale, sum);
      }
      store(sums[row] + col, sum);
    }
  }

  // The sums of groups of a row of x, weighted with their minima.
  static IntVec weigh(const int16_t* x_sums, const uint8_t* pairs) {
    IntVec weighted = {};
#pragma GCC unroll 4
    for (int64_t i = 0; i < kWords; ++i) {
      const uint8_t* const words = pairs + 2 * i * kWordsBytes;
      weighted = weigh_groups((ShortVec)load_words(words), (ShortVec)load_words(words + kWordsBytes),
                              x_sums + 4 * i, weighted);
    }
    return weighted;
  }
};

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick

#endif
