// Products with quantized weights of int4 and fp8 formats, whose blocks have 32 columns or a few times as many. Compiled
// once per instruction set.
#include "quantized_amx_numbers.h"
#include "quantized_amx_parts.h"
#include "quantized_multiply.h"

namespace pagewick {
namespace PW_ISA {
namespace {

using F = QuantizedFormat;

// sums += products * the scales of a block. head: of a block of a panel.
template <int R, int V>
inline void add_scaled(const Vec (&products)[R][V], const uint8_t* head, int64_t col, float (*sums)[kPanelRows]) {
  for (int v = 0; v < V; ++v) {
    const Vec scale = load(reinterpret_cast<const float*>(head) + col + v * kLanes);
    for (int r = 0; r < R; ++r) {
      float* const target = sums[r] + col + v * kLanes;
      store(target, madd(products[r][v], scale, load(target)));
    }
  }
}

template <QuantizedFormat kName, Levels kLevels>
struct Int4Tile : LevelTile<4, kLevels> {
  using Shared = LevelTile<4, kLevels>;
  using L = Layout<kName>;
  using Prepared = PreparedBlock<32>;
  using D = Dot<4>;
  static_assert(D::kQuads == kUnitQuads, "a unit's products fit a sum");
  // If no zero point of a chunk is above this, as in nearly all chunks, its expanded levels are level + kShift - zero
  // point, which takes 5 bits, as in a format without zero points.
  static constexpr int32_t kShift = 16;
  static constexpr int64_t kPartQuads = kUnitQuads;
  static constexpr bool kHasMinimum = false;
  using InRegisters = InTileRegisters<PartsInRegisters<Int4Tile>>;

  static bool includes_zeros(const Chunk& chunk) {
    uint8_t above = 0;
    for (int64_t block = 0; block < chunk.num_blocks; ++block) {
      const uint8_t* const zeros = chunk.heads + block * chunk.head_stride + L::kZerosAt;
      for (int64_t row = 0; row < kPanelRows; ++row) above |= zeros[row] > kShift;
    }
    return above == 0;
  }

  static void expand(const Chunk& chunk, int64_t block, uint8_t* bytes) {
    const uint8_t* const zeros = chunk.heads + block * chunk.head_stride + L::kZerosAt;
    Shared::expand_levels(chunk, block, bytes, [&](int64_t byte) {
      if (!chunk.is_shifted) return LevelVec{};
      return kShift - zeros_of_bytes(zeros + byte / kQuad);
    });
  }

  // As in SmallTile.
  static bool is_centrable(const Chunk& chunk) { return includes_zeros(chunk); }
  static void expand_centred(const Chunk& chunk, int64_t block, uint8_t* bytes) {
    const uint8_t* const zeros = chunk.heads + block * chunk.head_stride + L::kZerosAt;
    Shared::template expand_levels<kQuadBytes, kSliceBytes>(
        chunk, block, bytes, [&](int64_t byte) { return -zeros_of_bytes(zeros + byte / kQuad); });
  }
  static const uint8_t* scales_of(const Chunk& chunk, int64_t part) {
    return chunk.heads + part / chunk.num_units * chunk.head_stride;
  }
  static Vec load_scale(const uint8_t* scales, int64_t row) {
    return load(reinterpret_cast<const float*>(scales) + row);
  }

  // The zero points of kLanes rows, one for each byte of a lane.
  static LevelVec zeros_of_bytes(const uint8_t* zeros) { return (LevelVec)((IntVec)load_widened(zeros) * 0x01010101); }

  template <int R, int V>
  struct Of {
    // Levels with their zero points, which are stored as bytes as well.
    struct ShiftingLevels {
      ExpandingLevels<4> expanding;
      LevelVec shifts[V];

      IntVec operator()(int64_t quad, int v) const {
        return expanding.stored(quad, v, (IntVec)((LevelVec)expanding.packed(quad, v) + shifts[v]));
      }
    };

    static void run(const Prepared* const* x, const Chunk& chunk, int64_t col, float (*sums)[kPanelRows]) {
      if constexpr (kLevels != Levels::kPacked)
        if (chunk.is_shifted) return run_shifted(x, chunk, col, sums);
      const bool is_reading = chunk.is_reading && col == 0;
      const auto add = [&](int64_t block, const uint8_t* head, const uint8_t* unit, Vec(&total)[R][V]) {
        if (is_reading) prefetch<L::kLevelsAt>(head);
        ShortVec zeros[V];
        Vec scales[V];
        for (int v = 0; v < V; ++v) {
          zeros[v] = load_zeros(head + L::kZerosAt + col + v * kLanes);
          scales[v] = load(reinterpret_cast<const float*>(head) + col + v * kLanes);
        }
        for (int64_t i = 0; i < chunk.num_units; ++i, unit += Shared::kStored * kWordsBytes) {
          chunk.next->prefetch_share();
          const QuadAhead<kLevels == Levels::kPacked ? Shared::kStored * kWordsBytes : 0> ahead(unit, is_reading);
          const auto levels_of = Shared::levels_of(unit, chunk, block, i, col);
          add_unit(x, block * chunk.num_units + i, levels_of, zeros, scales, ahead, total);
        }
      };
      add_blocks<R, V>(chunk, col, sums, add);
    }

    // A single loop over units: with another one inside, compilers run out of registers for the addresses of six rows.
    static void run_shifted(const Prepared* const* x, const Chunk& chunk, int64_t col, float (*sums)[kPanelRows]) {
      Vec total[R][V];
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) total[r][v] = load(sums[r] + col + v * kLanes);
      const uint8_t* head = chunk.heads;
      const uint8_t* unit = chunk.levels + col * kQuad;
      const int64_t num_units = chunk.num_blocks * chunk.num_units;
      int64_t left = chunk.num_units;
      for (int64_t i = 0; i < num_units; ++i, unit += Shared::kStored * kWordsBytes) {
        chunk.next->prefetch_share();
        const float* const scales = reinterpret_cast<const float*>(head) + col;
        if constexpr (kLevels == Levels::kExpanding) {
          ShiftingLevels levels{{{unit}, Shared::expanded_unit(chunk, 0, i) + col * kQuad}, {}};
          for (int v = 0; v < V; ++v)
            levels.shifts[v] = kShift - zeros_of_bytes(head + L::kZerosAt + col + v * kLanes);
          add_shifted_unit(x, i, levels, scales, total);
        } else {
          add_shifted_unit(x, i, StoredLevels<Shared::kStored>{unit}, scales, total);
        }
        if (--left == 0) {
          left = chunk.num_units;
          head += chunk.head_stride;
          unit += chunk.level_stride - chunk.num_units * Shared::kStored * kWordsBytes;
        }
      }
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(sums[r] + col + v * kLanes, total[r][v]);
    }

    template <class LevelsOf>
    static void add_shifted_unit(const Prepared* const* x, int64_t index, const LevelsOf& levels_of,
                                 const float* scales, Vec (&total)[R][V]) {
      using Shifted = Dot<5>;
      const int8_t* values[R];
      IntVec products[R][V];
      for (int r = 0; r < R; ++r) {
        values[r] = x[r][index].values;
        const int32_t start = -kShift * (x[r][index].sums[0] + x[r][index].sums[1]);
        for (int v = 0; v < V; ++v) products[r][v] = IntVec{} + start;
      }
#pragma GCC unroll 2
      for (int64_t quad = 0; quad < kUnitQuads; quad += Shifted::kQuads) {
        typename Shifted::Sum run[R][V];
        for (int r = 0; r < R; ++r)
          for (int v = 0; v < V; ++v) run[r][v] = Shifted::begin(products[r][v]);
        add_products<5, Shifted::kQuads, R, V>(levels_of, quad, values, QuadAhead<0>(nullptr, false), run);
        for (int r = 0; r < R; ++r)
          for (int v = 0; v < V; ++v) products[r][v] = Shifted::end(products[r][v], run[r][v]);
      }
      for (int v = 0; v < V; ++v) {
        const Vec scale = load(scales + v * kLanes);
        for (int r = 0; r < R; ++r)
          total[r][v] =
              madd(__builtin_convertvector(products[r][v], Vec), scale * set1(x[r][index].scale), total[r][v]);
      }
    }

    // The zero points of kLanes rows with their signs turned, two for each lane.
    static ShortVec load_zeros(const uint8_t* source) {
      const WordVec zeros = load_widened(source);
      return -(ShortVec)(zeros | zeros << 16);
    }

    template <class LevelsOf, class Ahead>
    static void add_unit(const Prepared* const* x, int64_t index, const LevelsOf& levels_of, const ShortVec (&zeros)[V],
                         const Vec (&scales)[V], const Ahead& ahead, Vec (&total)[R][V]) {
      const int8_t* values[R];
      IntVec starts[R][V];
      typename D::Sum sums[R][V];
      for (int r = 0; r < R; ++r) {
        values[r] = x[r][index].values;
        const ShortVec of_halves = (ShortVec)broadcast(x[r][index].sums);
        for (int v = 0; v < V; ++v) {
          starts[r][v] = dot_pairs(zeros[v], of_halves);
          sums[r][v] = D::begin(starts[r][v]);
        }
      }
      add_products<4, kUnitQuads, R, V>(levels_of, 0, values, ahead, sums);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v)
          total[r][v] = madd(__builtin_convertvector(D::end(starts[r][v], sums[r][v]), Vec),
                             scales[v] * set1(x[r][index].scale), total[r][v]);
    }
  };
};

// Expanded numbers in E4M3 are of type Wide.
template <QuantizedFormat kName, Levels kLevels>
struct Fp8Tile {
  using Prepared = PreparedWide;
  static constexpr int kExpandedBits = 8 * sizeof(Wide), kRegisters = 1;
  static constexpr int kStored = kLevels == Levels::kExpanded ? kExpandedBits : 8;
  static constexpr bool kExpandsAll = true, kExpandsInTile = false;
  using InRegisters = InTileRegisters<NumbersInRegisters<Fp8Tile>>;
  static constexpr int64_t kChunkColumns = 128, kMaxRows = 256, kExtraBytes = 0;
  // On tile registers, expanding prefetches for itself.
  static constexpr int64_t kLeastShared = kIsSame<InRegisters, NoTileRegisters> ? 5 : kMaxRows + 1;
  static constexpr int64_t kPairBytes = 2 * kPanelRows * kStored / 8;  // of two columns of a panel

  static void prefetch_pair(const uint8_t* pair) {
    for (int64_t byte = 0; byte < 2 * kPanelRows; byte += 64) __builtin_prefetch(pair + byte + kAhead, 0, 3);
  }

  static void prefetch_head(const Chunk& chunk, int64_t block) {
    prefetch<kWordsBytes>(chunk.heads + block * chunk.head_stride);
  }

  static bool includes_zeros(const Chunk&) { return false; }

  // Widens the numbers of a block of a panel; two columns are interleaved in bf16, and lie after each other in float.
  static void expand(const Chunk& chunk, int64_t block, uint8_t* out) {
    const uint8_t* pair = chunk.levels + block * chunk.level_stride;
    const uint8_t* const end = pair + chunk.num_units * kUnitColumns * kPanelRows;
    for (; pair < end; pair += 2 * kPanelRows, out += 2 * kPanelRows * sizeof(Wide)) {
      for (int64_t col = 0; col < kPanelRows; col += kLanes) {
        const Fp8E4m3* const source = reinterpret_cast<const Fp8E4m3*>(pair) + 2 * col;
#if defined(PW_HAS_BF16_DOT)
        _mm512_storeu_si512(out + 4 * col, load_as_bfloat16(source));
#else
        Vec even, odd;
        load_pairs(source, even, odd);
        store(reinterpret_cast<float*>(out) + col, even);
        store(reinterpret_cast<float*>(out) + kPanelRows + col, odd);
#endif
      }
    }
  }

  template <int R, int V>
  struct Of {
    static void run(const Prepared* const* x, const Chunk& chunk, int64_t col, float (*sums)[kPanelRows]) {
      const bool is_reading = chunk.is_reading && col == 0;
      for (int64_t block = 0; block < chunk.num_blocks; ++block) {
        const uint8_t* pair = chunk.levels + block * chunk.level_stride;
        if (is_reading) prefetch_head(chunk, block);
        Vec products[R][V] = {};
        for (int64_t i = 0; i < chunk.num_units; ++i) {
          chunk.next->prefetch_share();
          const Wide* values[R];
          for (int r = 0; r < R; ++r) values[r] = x[r][block * chunk.num_units + i].values;
          for (int64_t k = 0; k < kUnitColumns; k += 2, pair += kPairBytes) {
            if (is_reading) prefetch_pair(pair);
            add_pair(values, k, pair, col, products);
          }
        }
        add_scaled(products, chunk.heads + block * chunk.head_stride, col, sums);
      }
    }

#if defined(PW_HAS_BF16_DOT)
    static void add_pair(const Wide* const (&values)[R], int64_t k, const uint8_t* pair, int64_t col,
                         Vec (&products)[R][V]) {
      __m512i numbers[V];
      for (int v = 0; v < V; ++v) {
        const uint8_t* const source = pair + (col + v * kLanes) * (2 * kStored / 8);
        if constexpr (kStored == 8) numbers[v] = load_as_bfloat16(reinterpret_cast<const Fp8E4m3*>(source));
        else numbers[v] = _mm512_loadu_si512(source);
      }
      for (int r = 0; r < R; ++r) {
        const __m512bh left = (__m512bh)broadcast(values[r] + k);
        for (int v = 0; v < V; ++v)
          products[r][v] = (Vec)_mm512_dpbf16_ps((__m512)products[r][v], left, (__m512bh)numbers[v]);
      }
    }
#else
    static void add_pair(const Wide* const (&values)[R], int64_t k, const uint8_t* pair, int64_t col,
                         Vec (&products)[R][V]) {
      for (int v = 0; v < V; ++v) {
        Vec even, odd;
        const int64_t first = col + v * kLanes;
        if constexpr (kStored == 8) {
          load_pairs(reinterpret_cast<const Fp8E4m3*>(pair) + 2 * first, even, odd);
        } else {
          even = load(reinterpret_cast<const float*>(pair) + first);
          odd = load(reinterpret_cast<const float*>(pair) + kPanelRows + first);
        }
        for (int r = 0; r < R; ++r) {
          products[r][v] = madd(set1(values[r][k]), even, products[r][v]);
          products[r][v] = madd(set1(values[r][k + 1]), odd, products[r][v]);
        }
      }
    }
#endif
  };
};

}  // namespace

const Multiply kInt4Product = kProduct<Int4Tile, F::kInt4G128>;
const Multiply kFp8Product = kProduct<Fp8Tile, F::kFp8G128>;

}  // namespace PW_ISA
}  // namespace pagewick
