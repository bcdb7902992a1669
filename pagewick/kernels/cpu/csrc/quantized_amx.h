// Products of bytes on the tile registers of AMX: sixteen rows of x and sixteen of the weight at a time. Expanded levels
// lie as a tile register takes them: a quad of sixteen rows is one of its rows.
//
// Tiles multiply signed bytes of x by signed or unsigned ones. The whole numbers that they add up are those of dot
// products, and floats are scaled and added in the same order, so that bits do not depend on the number of rows.
#pragma once

#include "quantized_tiles.h"

#if defined(PW_HAS_AMX)
#include "tile_registers.h"
#endif

namespace pagewick {
namespace PW_ISA {
namespace {

#if defined(PW_HAS_AMX)

// Names the kernel for tile registers, or NoTileRegisters where there are none.
template <class Kernel>
using InTileRegisters = Kernel;

// Unsigned, since products of 16 bits may wrap around.
typedef uint16_t PairVec __attribute__((vector_size(4 * kLanes)));

using TileSums = int32_t[kRegisterRows][kLanes];

constexpr int64_t kMaxColumns = 256;  // of a chunk

// Blocks of up to sixteen rows of x, beside each other. Missing rows are zeros.
struct RowsBeside {
  static constexpr int64_t kUnits = kMaxColumns / kUnitColumns;

  alignas(64) int8_t values[kRegisterRows][kMaxColumns] = {};
  // Each unit has a scale and the sum of its values. If x has a single block, scales[0] holds its scale.
  float scales[kUnits][kRegisterRows] = {}, sums[kUnits][kRegisterRows] = {};

  RowsBeside(const PreparedBlock<32>* const* x, int64_t count, int64_t num_units) {
    for (int64_t row = 0; row < count; ++row)
      for (int64_t i = 0; i < num_units; ++i) {
        const PreparedBlock<32>& block = x[row][i];
        memcpy(values[row] + i * kUnitColumns, block.values, sizeof(block.values));
        scales[i][row] = block.scale;
        sums[i][row] = static_cast<float>(block.sums[0] + block.sums[1]);
      }
  }

  RowsBeside(const PreparedBlock<256>* const* x, int64_t count) {
    for (int64_t row = 0; row < count; ++row) {
      memcpy(values[row], x[row]->values, sizeof(x[row]->values));
      scales[0][row] = x[row]->scale;
    }
  }
};

inline IntVec load_sums(const TileSums& sums, int64_t row) { return load_words(sums[row]); }

// The number of a tile is part of the instruction, so these must be macros.
#define PW_MULTIPLY_BYTES(sums, x_tile, x, x_stride, level_tile, levels, multiply)  \
  _tile_loadd(x_tile, x, x_stride);                                                 \
  _tile_loadd(level_tile, levels, kWordsBytes);                                     \
  multiply(sums, x_tile, level_tile);
#define PW_STORE_SUMS(tile, sums) _tile_stored(tile, sums, sizeof(sums[0]));

// Products of parts of units whose scales are floats. Tile: SmallTile or Int4Tile, which says where scales are.
template <class Tile>
class PartsInRegisters {
 public:
  using Prepared = PreparedBlock<32>;
  static constexpr int64_t kBytes = kMaxColumns * kPanelRows;

  static bool takes(const Chunk& chunk, int64_t count) { return count >= kRegisterRows && Tile::is_centrable(chunk); }

  static void expand(const Chunk& chunk, uint8_t* levels) {
    for (int64_t block = 0; block < chunk.num_blocks; ++block)
      Tile::expand_centred(chunk, block, levels + block * chunk.num_units * kUnitColumns * kPanelRows);
  }

  // Adds the products of up to 16 rows with a chunk to sums. levels: those that expand wrote.
  void multiply(const Prepared* const* x, int64_t count, const Chunk& chunk, const uint8_t* levels,
                float (*sums)[kPanelRows]) {
    configure();
    const int64_t num_units = chunk.num_blocks * chunk.num_units, num_parts = num_units * kUnitQuads / kPartQuads;
    const RowsBeside rows(x, count, num_units);
    TileRegisters::finish_writes();
    for (int64_t col = 0; col < kPanelRows; col += kLanes) {
      Vec total[kRegisterRows];
#pragma GCC unroll 16
      for (int64_t row = 0; row < kRegisterRows; ++row) total[row] = row < count ? load(sums[row] + col) : zero();
      int64_t part = 0;
      for (; part + kTiles <= num_parts; part += kTiles) {
        alignas(64) TileSums products[kTiles];
        multiply_parts(rows, part, levels + col * kQuad, products);
#pragma GCC unroll 1
        for (int64_t i = 0; i < kTiles; ++i) add_part(rows, chunk, part + i, col, products[i], total);
      }
      for (; part < num_parts; ++part) {
        alignas(64) TileSums products;
        multiply_part(rows, part, levels + col * kQuad, products);
        add_part(rows, chunk, part, col, products, total);
      }
#pragma GCC unroll 16
      for (int64_t row = 0; row < kRegisterRows; ++row)
        if (row < count) store(sums[row] + col, total[row]);
    }
  }

 private:
  static constexpr int64_t kTiles = 4, kPartQuads = Tile::kPartQuads, kPartColumns = kPartQuads * kQuad;

  void configure() {
    if (registers_.is_configured()) return;
    const TileShape sums = {kRegisterRows, 64}, x = {kRegisterRows, kPartColumns}, levels = {kPartQuads, 64};
    registers_.configure({sums, sums, sums, sums, x, x, levels, levels});
  }

  static void multiply_part(const RowsBeside& rows, int64_t part, const uint8_t* levels, TileSums& products) {
    _tile_zero(0);
    PW_MULTIPLY_BYTES(0, 4, rows.values[0] + part * kPartColumns, kMaxColumns, 6,
                      levels + part * kPartQuads * kWordsBytes, _tile_dpbssd)
    PW_STORE_SUMS(0, products)
  }

  // As multiply_part, for kTiles parts.
  static void multiply_parts(const RowsBeside& rows, int64_t part, const uint8_t* levels,
                             TileSums (&products)[kTiles]) {
    const int8_t* const x = rows.values[0] + part * kPartColumns;
    constexpr int64_t kStep = kPartQuads * kWordsBytes;
    levels += part * kStep;
    _tile_zero(0);
    PW_MULTIPLY_BYTES(0, 4, x, kMaxColumns, 6, levels, _tile_dpbssd)
    _tile_zero(1);
    PW_MULTIPLY_BYTES(1, 5, x + kPartColumns, kMaxColumns, 7, levels + kStep, _tile_dpbssd)
    _tile_zero(2);
    PW_MULTIPLY_BYTES(2, 4, x + 2 * kPartColumns, kMaxColumns, 6, levels + 2 * kStep, _tile_dpbssd)
    _tile_zero(3);
    PW_MULTIPLY_BYTES(3, 5, x + 3 * kPartColumns, kMaxColumns, 7, levels + 3 * kStep, _tile_dpbssd)
    PW_STORE_SUMS(0, products[0])
    PW_STORE_SUMS(1, products[1])
    PW_STORE_SUMS(2, products[2])
    PW_STORE_SUMS(3, products[3])
  }

  static void add_part(const RowsBeside& rows, const Chunk& chunk, int64_t part, int64_t col, const TileSums& products,
                       Vec (&total)[kRegisterRows]) {
    const int64_t unit = part * kPartQuads / kUnitQuads;
    const Vec scale = Tile::load_scale(Tile::scales_of(chunk, part), col);
#pragma GCC unroll 16
    for (int64_t row = 0; row < kRegisterRows; ++row)
      total[row] = madd(__builtin_convertvector(load_sums(products, row), Vec), scale * set1(rows.scales[unit][row]),
                        total[row]);
    if constexpr (Tile::kHasMinimum) {
      const Vec minimum = load(reinterpret_cast<const Float16*>(Tile::minima_of(chunk, part)) + col);
#pragma GCC unroll 16
      for (int64_t row = 0; row < kRegisterRows; ++row)
        total[row] = madd(set1(rows.sums[unit][row]), minimum * set1(rows.scales[unit][row]), total[row]);
    }
  }

  TileRegisters registers_;
};

// Products of K types. A level times the scale of its group does not fit a byte, so scales are taken apart into digits,
// 8 being the base: a level times a digit fits, and a tile adds up such products over all groups of a block. Each digit
// has a tile; the whole sum is theirs, times powers of 8.
//
// Digits are 0 to 7 where levels are unsigned. Levels of a format with an offset are stored as offset - level. Digits of
// q6_k are -4 to 3, since 32 * -4 = -128 just fits a signed byte; q3_k's scales, from -32 to 31, are single digits, since
// 4 * -32 = -128.
template <QuantizedFormat kName>
class BlocksInRegisters {
  using L = Layout<kName>;

 public:
  using Prepared = PreparedBlock<256>;
  static constexpr int kDigits = kName == QuantizedFormat::kQ2_K || kName == QuantizedFormat::kQ3_K ? 1
                                 : kName == QuantizedFormat::kQ6_K                                  ? 3
                                                                                                    : 2;
  static constexpr int64_t kBytes = kDigits * kMaxColumns * kPanelRows;

  // Levels must be expanded for each digit, which pays from two tiles on.
  static bool takes(const Chunk&, int64_t count) { return count >= 2 * kRegisterRows; }

  static void expand(const Chunk& chunk, uint8_t* bytes) {
    for (int64_t byte = 0; byte < kWordsBytes; byte += sizeof(IntVec)) {
      IntVec scales[kWords], minima[kWords];
      read_groups(chunk, byte, scales, minima);
      for (int64_t unit = 0; unit < kUnits; ++unit) {
        const uint8_t* const levels = chunk.levels + unit * L::kBits * kWordsBytes;
#pragma GCC unroll 2
        for (int64_t quad = 0; quad < kUnitQuads; quad += kGroupQuads) {
          PairVec digits[kDigits];
          split_digits(scales, (unit * kUnitQuads + quad) / kGroupQuads, digits);
#pragma GCC unroll 8
          for (int64_t k = quad; k < quad + kGroupQuads; ++k)
            expand_quad(quad_levels<L::kBits>(levels + byte, k), digits,
                        bytes + (unit * kUnitQuads + k) * kWordsBytes + byte);
        }
      }
    }
  }

  // As PartsInRegisters::multiply. A chunk is a block.
  void multiply(const Prepared* const* x, int64_t count, const Chunk& chunk, const uint8_t* levels,
                float (*sums)[kPanelRows]) {
    configure();
    const RowsBeside rows(x, count);
    TileRegisters::finish_writes();
    for (int64_t col = 0; col < kPanelRows; col += kLanes) {
      alignas(64) TileSums products[kDigits];
      multiply_digits(rows, levels + col * kQuad, products);
      const Vec scale = load(reinterpret_cast<const Float16*>(chunk.heads) + col);
      for (int64_t row = 0; row < count; ++row) {
        IntVec sum = load_sums(products[0], row);
        for (int digit = 1; digit < kDigits; ++digit) sum += load_sums(products[digit], row) << 3 * digit;
        const Vec whole = __builtin_convertvector(kIsSigned ? -sum : sum, Vec);
        float* const target = sums[row] + col;
        store(target, madd(whole, scale * set1(rows.scales[0][row]), load(target)));
      }
      if constexpr (L::kBlock.has_minimum()) add_minima(x, count, chunk, col, sums);
    }
  }

 private:
  static constexpr bool kIsSigned = L::kBlock.offset != 0;
  static constexpr int64_t kGroups = kMaxColumns / L::kBlock.group_columns, kWords = kGroups / 4;
  static constexpr int64_t kGroupQuads = L::kBlock.group_columns / kQuad, kUnits = kMaxColumns / kUnitColumns;
  static_assert(kUnitQuads % kGroupQuads == 0, "groups do not cross units");
  static constexpr int64_t kDigitBytes = kMaxColumns * kPanelRows;

  void configure() {
    if (registers_.is_configured()) return;
    constexpr TileShape kTile = {kRegisterRows, 64};
    registers_.configure({kTile, kTile, kTile, kTile, kTile, kTile, kTile, kTile});
  }

  // Reads the words of kLanes rows, which begin at this byte of a word of the panel.
  static void read_groups(const Chunk& chunk, int64_t byte, IntVec (&scales)[kWords], IntVec (&minima)[kWords]) {
    IntVec packed[4];
    for (int i = 0; i < L::kBlock.num_group_words; ++i)
      packed[i] = load_words(chunk.heads + L::kGroupsAt + i * kWordsBytes + byte);
    split_groups<kName>(packed, scales, minima);
  }

  // The digits of the scales of a group, two for each lane.
  static void split_digits(const IntVec (&scales)[kWords], int64_t group, PairVec (&digits)[kDigits]) {
    const int shift = static_cast<int>(24 - group % 4 * 8);
    IntVec scale = scales[group / 4] << shift >> 24;
#pragma GCC unroll 3
    for (int i = 0; i < kDigits; ++i) {
      constexpr int kLeast = kIsSigned ? -4 : 0;
      const IntVec digit = i == kDigits - 1 ? scale : ((scale - kLeast) & 7) + kLeast;
      scale = (scale - digit) >> 3;
      digits[i] = (PairVec)((digit & 0xffff) | digit << 16);
    }
  }

  static void expand_quad(IntVec levels, const PairVec (&digits)[kDigits], uint8_t* bytes) {
    if constexpr (kIsSigned) levels = (IntVec)(static_cast<uint8_t>(L::kBlock.offset) - (LevelVec)levels);
#pragma GCC unroll 3
    for (int i = 0; i < kDigits; ++i) {
      // Products of two neighbours in 16 bits. A negative lower product would borrow from the upper one.
      PairVec products = (PairVec)levels * digits[i];
      if constexpr (kIsSigned) {
        const PairVec upper = ((PairVec)levels & static_cast<uint16_t>(0xff00)) * digits[i];
        products = (products & static_cast<uint16_t>(0xff)) | upper;
      }
      memcpy(bytes + i * kDigitBytes, &products, sizeof(products));
    }
  }

#define PW_MULTIPLY_DIGIT(tile, level_tile)                                                   \
  {                                                                                           \
    const uint8_t* const found = step + tile * kDigitBytes;                                   \
    _tile_loadd(level_tile, found, kWordsBytes);                                              \
    if constexpr (kIsSigned) { _tile_dpbssd(tile, 3, level_tile); }                           \
    else { _tile_dpbsud(tile, 3, level_tile); }                                               \
  }

  static void multiply_digits(const RowsBeside& rows, const uint8_t* levels, TileSums (&products)[kDigits]) {
    constexpr int64_t kDepth = 64;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    for (int64_t k = 0; k < kMaxColumns; k += kDepth) {
      const uint8_t* const step = levels + k / kQuad * kWordsBytes;
      _tile_loadd(3, rows.values[0] + k, kMaxColumns);
      PW_MULTIPLY_DIGIT(0, 4)
      if constexpr (kDigits > 1) PW_MULTIPLY_DIGIT(1, 5)
      if constexpr (kDigits > 2) PW_MULTIPLY_DIGIT(2, 6)
    }
    PW_STORE_SUMS(0, products[0])
    if constexpr (kDigits > 1) PW_STORE_SUMS(1, products[1])
    if constexpr (kDigits > 2) PW_STORE_SUMS(2, products[2])
  }

  static void add_minima(const Prepared* const* x, int64_t count, const Chunk& chunk, int64_t col,
                         float (*sums)[kPanelRows]) {
    IntVec scales[kWords], minima[kWords];
    read_groups(chunk, col * kQuad, scales, minima);
    const Vec minimum = load(reinterpret_cast<const Float16*>(chunk.heads + L::kMinimaAt) + col);
    for (int64_t row = 0; row < count; ++row) {
      IntVec weighted = {};
#pragma GCC unroll 4
      for (int i = 0; i < kWords; ++i)
        weighted =
            weigh_groups(even_bytes(minima[i]), odd_bytes(minima[i]), group_sums<kGroups>(*x[row]) + 4 * i, weighted);
      float* const target = sums[row] + col;
      store(target, madd(__builtin_convertvector(-weighted, Vec), minimum * set1(x[row]->scale), load(target)));
    }
  }

  TileRegisters registers_;
};

#undef PW_MULTIPLY_DIGIT
#undef PW_MULTIPLY_BYTES
#undef PW_STORE_SUMS

#else

template <class Kernel>
using InTileRegisters = NoTileRegisters;

template <class Tile>
class PartsInRegisters;
template <QuantizedFormat kName>
class BlocksInRegisters;

#endif

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
