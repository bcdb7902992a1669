// Products with quantized weights whose blocks have 32 columns. Compiled once per instruction set.
#include "quantized_amx_parts.h"
#include "quantized_multiply.h"

namespace pagewick {
namespace PW_ISA {
namespace {

using F = QuantizedFormat;

// Halves of powers of two in E8M0.
inline Vec load_half_powers(const uint8_t* source) {
  const WordVec exponents = load_widened(source);
  const WordVec subnormal = (WordVec{} + 0x200000) << (exponents & 1);
  return (Vec)(exponents < 2 ? subnormal : (exponents - 1) << 23);
}

template <QuantizedFormat kFormat>
inline Vec load_scales(const uint8_t* source, int64_t row) {
  if constexpr (block_format(kFormat).scale_bytes == 1) return load_half_powers(source + row);
  else if constexpr (block_format(kFormat).scale_bytes == 4) return load(reinterpret_cast<const float*>(source) + row);
  else return load(reinterpret_cast<const Float16*>(source) + row);
}

template <QuantizedFormat kName, Levels kLevels>
struct SmallTile : LevelTile<Layout<kName>::kBits, kLevels, Layout<kName>::kBlock.has_codes()> {
  using Shared = LevelTile<Layout<kName>::kBits, kLevels, Layout<kName>::kBlock.has_codes()>;
  using L = Layout<kName>;
  using Prepared = PreparedBlock<32>;
  using D = Dot<L::kLevelBits>;
  static constexpr int kParts = L::kBlock.num_scales;
  static constexpr int64_t kPartQuads = kUnitQuads / kParts;
  static constexpr int64_t kRun = D::kQuads < kPartQuads ? D::kQuads : kPartQuads;
  static constexpr bool kHasMinimum = L::kBlock.has_minimum();
  using InRegisters = InTileRegisters<PartsInRegisters<SmallTile>>;

  static bool is_centrable(const Chunk&) { return true; }

  // Expands the levels of a block to signed bytes.
  static void expand_centred(const Chunk& chunk, int64_t block, uint8_t* bytes) {
    Shared::template expand_levels<kQuadBytes, kSliceBytes>(
        chunk, block, bytes, [](int64_t) { return LevelVec{} - static_cast<uint8_t>(L::kBlock.offset); });
  }

  // The scales of a part of a chunk for a panel's rows, and the minima of its block.
  static const uint8_t* scales_of(const Chunk& chunk, int64_t part) {
    return chunk.heads + part / kParts * chunk.head_stride + part % kParts * L::kBlock.scale_bytes * kPanelRows;
  }
  static const uint8_t* minima_of(const Chunk& chunk, int64_t part) {
    return chunk.heads + part * chunk.head_stride + L::kMinimaAt;
  }
  static Vec load_scale(const uint8_t* scales, int64_t row) { return load_scales<kName>(scales, row); }

  // The sum that products begin with, so that levels count as signed numbers in the end.
  static int32_t start(const Prepared& x, int part) {
    if (L::kBlock.offset == 0 || D::kIsCentred) return 0;
    return -L::kBlock.offset * (kParts == 2 ? x.sums[part] : x.sums[0] + x.sums[1]);
  }

  template <int R, int V>
  struct Of {
    static void run(const Prepared* const* x, const Chunk& chunk, int64_t col, float (*sums)[kPanelRows]) {
      const bool is_reading = chunk.is_reading && col == 0;
      const auto add = [&](int64_t block, const uint8_t* head, const uint8_t* unit, Vec(&total)[R][V]) {
        chunk.next->prefetch_share();
        const QuadAhead<kLevels == Levels::kPacked ? L::kBlock.bytes * kPanelRows : 0> ahead(head, is_reading);
        const auto levels_of = Shared::levels_of(unit, chunk, block, 0, col);
        for (int part = 0; part < kParts; ++part) add_part(x, block, head, levels_of, col, part, ahead, total);
        if constexpr (kHasMinimum) add_minima(x, block, head + L::kMinimaAt, col, total);
      };
      add_blocks<R, V>(chunk, col, sums, add);
    }

    template <class LevelsOf, class Ahead>
    static void add_part(const Prepared* const* x, int64_t block, const uint8_t* head, const LevelsOf& levels_of,
                         int64_t col, int part, const Ahead& ahead, Vec (&total)[R][V]) {
      const int8_t* values[R];
      IntVec products[R][V];
      for (int r = 0; r < R; ++r) {
        values[r] = x[r][block].values;
        for (int v = 0; v < V; ++v) products[r][v] = IntVec{} + start(x[r][block], part);
      }
#pragma GCC unroll 4
      for (int64_t quad = part * kPartQuads; quad < (part + 1) * kPartQuads; quad += kRun) {
        typename D::Sum run[R][V];
        for (int r = 0; r < R; ++r)
          for (int v = 0; v < V; ++v) run[r][v] = D::begin(products[r][v]);
        add_products<L::kLevelBits, kRun, R, V>(levels_of, quad, values, ahead, run);
        for (int r = 0; r < R; ++r)
          for (int v = 0; v < V; ++v) products[r][v] = D::end(products[r][v], run[r][v]);
      }
      for (int v = 0; v < V; ++v) {
        const Vec scale = load_scales<kName>(head, part * kPanelRows + col + v * kLanes);
        for (int r = 0; r < R; ++r)
          total[r][v] =
              madd(__builtin_convertvector(products[r][v], Vec), scale * set1(x[r][block].scale), total[r][v]);
      }
    }

    static void add_minima(const Prepared* const* x, int64_t block, const uint8_t* minima, int64_t col,
                           Vec (&total)[R][V]) {
      for (int v = 0; v < V; ++v) {
        const Vec minimum = load(reinterpret_cast<const Float16*>(minima) + col + v * kLanes);
        for (int r = 0; r < R; ++r) {
          const float sum = static_cast<float>(x[r][block].sums[0] + x[r][block].sums[1]);
          total[r][v] = madd(set1(sum), minimum * set1(x[r][block].scale), total[r][v]);
        }
      }
    }
  };
};

}  // namespace

const Multiply kSmallProducts[] = {
    kProduct<SmallTile, F::kQ4_0>,    kProduct<SmallTile, F::kQ4_1>, kProduct<SmallTile, F::kQ5_0>,
    kProduct<SmallTile, F::kQ5_1>,    kProduct<SmallTile, F::kQ8_0>, kProduct<SmallTile, F::kInt8G32>,
};
// Codebooks are data, so that one product serves all formats that differ in them alone.
constexpr Multiply kCodesOf32 = kProduct<SmallTile, F::kIq4G32>, kCodesOf16 = kProduct<SmallTile, F::kFp4G16>;
const Multiply kCodesProducts[] = {
    kProduct<SmallTile, F::kMxfp4>, kProduct<SmallTile, F::kIq4_NL>, kCodesOf32, kCodesOf32, kCodesOf32,
    kCodesOf32, kCodesOf16, kCodesOf32, kCodesOf16, kCodesOf16,
};

}  // namespace PW_ISA
}  // namespace pagewick
