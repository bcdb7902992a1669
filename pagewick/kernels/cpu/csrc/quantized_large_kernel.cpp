// Products with quantized weights of K types, whose blocks have 256 columns. Compiled once per instruction set.
#include "quantized_amx_blocks.h"
#include "quantized_multiply.h"

namespace pagewick {
namespace PW_ISA {
namespace {

using F = QuantizedFormat;

template <QuantizedFormat kName, Levels kLevels>
struct LargeTile : LevelTile<Layout<kName>::kBits, kLevels> {
  using Shared = LevelTile<Layout<kName>::kBits, kLevels>;
  using L = Layout<kName>;
  using Prepared = PreparedBlock<256>;
  using D = Dot<L::kBits>;
  static constexpr int64_t kGroupQuads = L::kBlock.group_columns / kQuad;
  static constexpr int64_t kGroups = L::kBlock.columns / L::kBlock.group_columns;
  // Bytes of a panel's block that each of its 8 units prefetches, in whole cache lines.
  static constexpr int64_t kPartBytes = (L::kBlock.bytes + 7) / 8 * kPanelRows;
  static constexpr int64_t kRun = D::kQuads < kGroupQuads ? D::kQuads : kGroupQuads;

  // Whether sums of groups begin with what makes their levels signed, which takes sums of 32 bits. Otherwise it is added
  // to the products of a block, as minima are.
  static constexpr bool kHasStarts = L::kBlock.offset != 0 && kIsSame<typename D::Sum, IntVec>;
  static constexpr bool kIsWeighted = L::kBlock.has_minimum() || (L::kBlock.offset != 0 && !kHasStarts);

  using InRegisters = InTileRegisters<BlocksInRegisters<kName>>;

  static constexpr int kWords = kGroups / 4;
  // Behind expanded levels: [kGroups][64] scales as factors, then [kWords][2][64] pairs of what sums of groups of x are
  // weighted with, for even and for odd bytes of a word.
  static constexpr int64_t kFactorsAt = L::kBlock.columns * kPanelRows, kPairsAt = kFactorsAt + kGroups * kWordsBytes;
  static constexpr int64_t kExtraBytes = kPairsAt - kFactorsAt + (kIsWeighted ? kGroups / 2 * kWordsBytes : 0);

  static void expand(const Chunk& chunk, int64_t block, uint8_t* bytes) {
    Shared::expand(chunk, block, bytes);
    for (int64_t row = 0; row < kPanelRows; row += kLanes) {
      IntVec scales[kWords], minima[kWords];
      const IntVec* const weights = unpack_groups(chunk, row, scales, minima);
      for (int i = 0; i < kWords; ++i) store_groups(bytes, row, i, scales[i], weights[i]);
    }
  }

  // Unpacks the scales and minima of kLanes rows of a panel, from `row` on; returns those that weight sums of groups.
  static const IntVec* unpack_groups(const Chunk& chunk, int64_t row, IntVec (&scales)[kWords],
                                     IntVec (&minima)[kWords]) {
    IntVec packed[4];
    for (int i = 0; i < L::kBlock.num_group_words; ++i)
      packed[i] = load_words(chunk.heads + L::kGroupsAt + i * kWordsBytes + row * kQuad);
    split_groups<kName>(packed, scales, minima);
    return L::kBlock.has_minimum() ? minima : scales;
  }

  // Stores a word for each of kLanes rows, from `row` on.
  template <class Words>
  static void store_words(uint8_t* words_of_panel, int64_t row, Words words) {
    memcpy(words_of_panel + row * kQuad, &words, sizeof(words));
  }

  // Stores the factors of four groups, and a word of pairs.
  static void store_groups(uint8_t* bytes, int64_t row, int word, IntVec scales, IntVec weights) {
#pragma GCC unroll 4
    for (int byte = 0; byte < 4; ++byte)
      store_words(bytes + kFactorsAt + (4 * word + byte) * kWordsBytes, row, D::factor(scales, byte));
    if constexpr (kIsWeighted) {
      store_words(bytes + kPairsAt + 2 * word * kWordsBytes, row, even_bytes(weights));
      store_words(bytes + kPairsAt + (2 * word + 1) * kWordsBytes, row, odd_bytes(weights));
    }
  }

  template <int V>
  struct UnpackedFactors {
    typename D::Factor factors[kGroups][V];

    typename D::Factor operator()(int64_t group, int v) const { return factors[group][v]; }
  };
  struct StoredFactors {
    const uint8_t* at;

    typename D::Factor operator()(int64_t group, int v) const {
      return (typename D::Factor)load_words(at + group * kWordsBytes + v * sizeof(IntVec));
    }
  };

  template <int R, int V>
  struct Of {
    static void run(const Prepared* const* x, const Chunk& chunk, int64_t col, float (*sums)[kPanelRows]) {
      // The sums of groups of x, times the minima of groups, or times their scales if there are none; 0 if sums of
      // groups have starts.
      IntVec weighted[R][V] = {};
      if constexpr (kLevels == Levels::kExpanded) {
        if constexpr (kIsWeighted) weigh(x, chunk.levels + kPairsAt + col * kQuad, weighted);
        multiply(x, chunk, col, StoredFactors{chunk.levels + kFactorsAt + col * kQuad}, weighted, sums);
      } else {
        UnpackedFactors<V> factors;
        unpack(x, chunk, col, factors, weighted);
        multiply(x, chunk, col, factors, weighted, sums);
      }
    }

    template <class Factors>
    static void multiply(const Prepared* const* x, const Chunk& chunk, int64_t col, const Factors& factors,
                         const IntVec (&weighted)[R][V], float (*sums)[kPanelRows]) {
      IntVec products[R][V];
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) products[r][v] = -L::kBlock.offset * weighted[r][v];
      const bool is_reading = chunk.is_reading && col == 0;
      const uint8_t* unit = chunk.levels + col * kQuad;
      for (int64_t i = 0; i < L::kBlock.columns / kUnitColumns; ++i, unit += Shared::kStored * kWordsBytes) {
        chunk.next->prefetch_share();
        const QuadAhead<kLevels == Levels::kPacked ? kPartBytes : 0> ahead(chunk.heads + i * kPartBytes, is_reading);
        add_unit(x, Shared::levels_of(unit, chunk, 0, i, col), i, factors, ahead, products);
      }
      for (int v = 0; v < V; ++v) {
        const int64_t row = col + v * kLanes;
        const Vec scale = load(reinterpret_cast<const Float16*>(chunk.heads) + row);
        Vec minimum = {};
        if constexpr (L::kBlock.has_minimum())
          minimum = load(reinterpret_cast<const Float16*>(chunk.heads + L::kMinimaAt) + row);
        for (int r = 0; r < R; ++r) {
          float* const target = sums[r] + row;
          const Vec x_scale = set1(x[r]->scale);
          Vec sum = madd(__builtin_convertvector(products[r][v], Vec), scale * x_scale, load(target));
          if constexpr (L::kBlock.has_minimum())
            sum = madd(__builtin_convertvector(-weighted[r][v], Vec), minimum * x_scale, sum);
          store(target, sum);
        }
      }
    }

    static void unpack(const Prepared* const* x, const Chunk& chunk, int64_t col, UnpackedFactors<V>& unpacked,
                       IntVec (&weighted)[R][V]) {
      for (int v = 0; v < V; ++v) {
        IntVec scales[kWords], minima[kWords];
        const IntVec* const weights = unpack_groups(chunk, col + v * kLanes, scales, minima);
#pragma GCC unroll 4
        for (int i = 0; i < kWords; ++i) {
          const ShortVec even = even_bytes(weights[i]), odd = odd_bytes(weights[i]);
          if constexpr (kIsWeighted)
            for (int r = 0; r < R; ++r)
              weighted[r][v] = weigh_groups(even, odd, group_sums<kGroups>(*x[r]) + 4 * i, weighted[r][v]);
#pragma GCC unroll 4
          for (int byte = 0; byte < 4; ++byte) unpacked.factors[4 * i + byte][v] = D::factor(scales[i], byte);
          if constexpr (kLevels == Levels::kExpanding)
            store_groups(chunk.expanded, col + v * kLanes, i, scales[i], weights[i]);
        }
      }
    }

    static void weigh(const Prepared* const* x, const uint8_t* pairs, IntVec (&weighted)[R][V]) {
#pragma GCC unroll 4
      for (int i = 0; i < kWords; ++i)
        for (int v = 0; v < V; ++v) {
          const uint8_t* const words = pairs + 2 * i * kWordsBytes + v * sizeof(IntVec);
          const ShortVec even = (ShortVec)load_words(words), odd = (ShortVec)load_words(words + kWordsBytes);
          for (int r = 0; r < R; ++r)
            weighted[r][v] = weigh_groups(even, odd, group_sums<kGroups>(*x[r]) + 4 * i, weighted[r][v]);
        }
    }

    // For each lane, minus the offset times the sum of a group of x.
    static IntVec start(const int32_t* of_group) {
      static_assert(L::kBlock.offset == kStartOffset || L::kBlock.offset == kStartOffset / 8);
      return broadcast(of_group) >> (L::kBlock.offset == kStartOffset ? 0 : 3);
    }

    template <class LevelsOf, class Factors, class Ahead>
    static void add_unit(const Prepared* const* x, const LevelsOf& levels_of, int64_t index, const Factors& factors,
                         const Ahead& ahead, IntVec (&products)[R][V]) {
      const int8_t* values[R];
      for (int r = 0; r < R; ++r) values[r] = x[r]->values + index * kUnitColumns;
#pragma GCC unroll 4
      for (int64_t quad = 0; quad < kUnitQuads; quad += kRun) {
        typename D::Sum run[R][V] = {};
        if constexpr (kHasStarts)
          for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v)
              run[r][v] = start(x[r]->starts + (index * kUnitQuads + quad) / kGroupQuads);
        add_products<L::kBits, kRun, R, V>(levels_of, quad, values, ahead, run);
        const int64_t group = (index * kUnitQuads + quad) / kGroupQuads;
        for (int v = 0; v < V; ++v) {
          const typename D::Factor factor = factors(group, v);
          for (int r = 0; r < R; ++r) products[r][v] = D::add_scaled(products[r][v], run[r][v], factor);
        }
      }
    }
  };
};

}  // namespace

const Multiply kLargeProducts[] = {
    kProduct<LargeTile, F::kQ2_K>, kProduct<LargeTile, F::kQ3_K>, kProduct<LargeTile, F::kQ4_K>,
    kProduct<LargeTile, F::kQ5_K>, kProduct<LargeTile, F::kQ6_K>,
};

}  // namespace PW_ISA
}  // namespace pagewick
