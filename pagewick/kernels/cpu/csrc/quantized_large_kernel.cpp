// Products with quantized weights of K types, whose blocks have 256 columns. Compiled once per instruction set.
#include "quantized_amx.h"
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

  template <int R, int V>
  struct Of {
    // weighted[r][v]: the sums of groups of x, times the minima of groups, or times their scales if there are none; 0 if
    // sums of groups have starts.
    static void run(const Prepared* const* x, const Chunk& chunk, int64_t col, float (*sums)[kPanelRows]) {
      typename D::Factor factors[kGroups][V];
      IntVec weighted[R][V], products[R][V];
      read_groups(x, chunk.heads + L::kGroupsAt + col * kQuad, factors, weighted);
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
        const Vec scale = load(reinterpret_cast<const Float16*>(chunk.heads) + col + v * kLanes);
        for (int r = 0; r < R; ++r) {
          float* const target = sums[r] + col + v * kLanes;
          store(target, madd(__builtin_convertvector(products[r][v], Vec), scale * set1(x[r]->scale), load(target)));
        }
      }
      if constexpr (L::kBlock.has_minimum())
        for (int v = 0; v < V; ++v) {
          const Vec minimum = load(reinterpret_cast<const Float16*>(chunk.heads + L::kMinimaAt) + col + v * kLanes);
          for (int r = 0; r < R; ++r) {
            float* const target = sums[r] + col + v * kLanes;
            const Vec sum = __builtin_convertvector(-weighted[r][v], Vec);
            store(target, madd(sum, minimum * set1(x[r]->scale), load(target)));
          }
        }
    }

    static void read_groups(const Prepared* const* x, const uint8_t* groups, typename D::Factor (&factors)[kGroups][V],
                            IntVec (&weighted)[R][V]) {
      constexpr int kWords = kGroups / 4;
      for (int v = 0; v < V; ++v) {
        IntVec packed[4], scales[kWords], minima[kWords];
        for (int i = 0; i < L::kBlock.num_group_words; ++i)
          packed[i] = load_words(groups + i * kWordsBytes + v * sizeof(IntVec));
        split_groups<kName>(packed, scales, minima);
        const IntVec* const weights = L::kBlock.has_minimum() ? minima : scales;
        for (int r = 0; r < R; ++r) weighted[r][v] = IntVec{};
#pragma GCC unroll 4
        for (int i = 0; i < kWords; ++i) {
          const ShortVec even = even_bytes(weights[i]), odd = odd_bytes(weights[i]);
          if constexpr (kIsWeighted)
            for (int r = 0; r < R; ++r)
              weighted[r][v] += weigh_groups(even, odd, group_sums<kGroups>(*x[r]) + 4 * i);
#pragma GCC unroll 4
          for (int byte = 0; byte < 4; ++byte) factors[4 * i + byte][v] = D::factor(scales[i], byte);
        }
      }
    }

    // For each lane, minus the offset times the sum of a group of x.
    static IntVec start(const int32_t* of_group) {
      static_assert(L::kBlock.offset == kStartOffset || L::kBlock.offset == kStartOffset / 8);
      return broadcast(of_group) >> (L::kBlock.offset == kStartOffset ? 0 : 3);
    }

    template <class LevelsOf, class Ahead>
    static void add_unit(const Prepared* const* x, const LevelsOf& levels_of, int64_t index,
                         const typename D::Factor (&factors)[kGroups][V], const Ahead& ahead, IntVec (&products)[R][V]) {
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
        const auto& factor = factors[(index * kUnitQuads + quad) / kGroupQuads];
        for (int r = 0; r < R; ++r)
          for (int v = 0; v < V; ++v) products[r][v] = D::add_scaled(products[r][v], run[r][v], factor[v]);
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
