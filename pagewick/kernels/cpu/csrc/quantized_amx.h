// The parts that all products with quantized weights on the tile registers of AMX share. A tile register takes sixteen
// rows of x, and another one sixteen rows of the weight.
//
// Rows of x and expanded levels are arranged so that a tile register finds its rows one after the other: those of x in
// steps, which are as many columns as a tile is deep, and the levels of sixteen rows of the weight behind each other.
#pragma once

#include "quantized_tiles.h"

#if defined(PW_HAS_AMX)
#include "parallel.h"
#include "tile_registers.h"
#endif

namespace pagewick {
namespace PW_ISA {
namespace {

constexpr int64_t kMaxColumns = 256;  // of a chunk
// Bytes of sixteen rows of the weight for a quad of columns, and for a chunk.
constexpr int64_t kQuadBytes = sizeof(IntVec), kSliceBytes = kMaxColumns / kQuad * kQuadBytes;

#if defined(PW_HAS_AMX)

// Names the kernel for tile registers, or NoTileRegisters where there are none.
template <class Kernel>
using InTileRegisters = Kernel;

using TileSums = int32_t[kRegisterRows][kLanes];

// A chunk of sixteen rows of x. Values of missing rows may be any, since their sums are not stored. kLeastRows: the
// fewest rows that take tiles.
template <class Prepared>
struct ArrangedRows;

template <>
struct ArrangedRows<PreparedBlock<32>> {
  static constexpr int64_t kLeastRows = kRegisterRows;
  static constexpr int64_t kColumns = kMaxColumns, kUnits = kColumns / kUnitColumns;

  int8_t values[kUnits][kRegisterRows][kUnitColumns];
  // Each unit has a scale and the sum of its values.
  float scales[kUnits][kRegisterRows], sums[kUnits][kRegisterRows];

  // Floats of a missing row must not be subnormal, which would slow down its sums.
  void clear_row(int64_t row) {
    for (int64_t i = 0; i < kUnits; ++i) scales[i][row] = sums[i][row] = 0.0f;
  }

  void copy_row(int64_t row, const PreparedBlock<32>* blocks, int64_t num_blocks) {
    for (int64_t i = 0; i < num_blocks; ++i) {
      memcpy(values[i][row], blocks[i].values, sizeof(blocks[i].values));
      scales[i][row] = blocks[i].scale;
      sums[i][row] = static_cast<float>(blocks[i].sums[0] + blocks[i].sums[1]);
    }
  }
};

template <>
struct ArrangedRows<PreparedBlock<256>> {
  static constexpr int64_t kLeastRows = kRegisterRows;
  static constexpr int64_t kColumns = kMaxColumns, kDepth = 64;

  int8_t values[kColumns / kDepth][kRegisterRows][kDepth];
  float scales[kRegisterRows];
  int16_t sums_of_16[kRegisterRows][16], sums_of_32[kRegisterRows][8];

  void clear_row(int64_t) {}

  void copy_row(int64_t row, const PreparedBlock<256>* block, int64_t) {
    for (int64_t k = 0; k < kColumns; k += kDepth) memcpy(values[k / kDepth][row], block->values + k, kDepth);
    scales[row] = block->scale;
    memcpy(sums_of_16[row], block->sums_of_16, sizeof(block->sums_of_16));
    memcpy(sums_of_32[row], block->sums_of_32, sizeof(block->sums_of_32));
  }

  // As group_sums has them.
  template <int64_t kGroups>
  const int16_t* sums_of(int64_t row) const {
    if constexpr (kGroups == 16) return sums_of_16[row];
    else return sums_of_32[row];
  }
};

template <>
struct ArrangedRows<PreparedWide> {
  static constexpr int64_t kLeastRows = 1;
  static constexpr int64_t kColumns = 128;

  Wide values[kColumns / kUnitColumns][kRegisterRows][kUnitColumns];

  void clear_row(int64_t) {}

  void copy_row(int64_t row, const PreparedWide* blocks, int64_t num_blocks) {
    for (int64_t i = 0; i < num_blocks; ++i) memcpy(values[i][row], blocks[i].values, sizeof(blocks[i].values));
  }
};

// All chunks of rows of x, sixteen rows beside each other.
template <class Prepared>
class ArrangedChunks {
 public:
  using Rows = ArrangedRows<Prepared>;

  ArrangedChunks() = default;
  ArrangedChunks(void* memory, int64_t num_columns)
      : chunks_(static_cast<Rows*>(memory)), num_chunks_(num_chunks(num_columns)), num_columns_(num_columns) {}

  // The size of the memory for this number of rows.
  static int64_t num_bytes(int64_t count, int64_t num_columns) {
    return (count + kRegisterRows - 1) / kRegisterRows * num_chunks(num_columns) * static_cast<int64_t>(sizeof(Rows));
  }

  void copy_row(int64_t row, const Prepared* blocks) {
    constexpr int64_t kBlocks = Rows::kColumns / Prepared::kColumns;
    const int64_t num_blocks = num_columns_ / Prepared::kColumns;
    Rows* const group = chunks_ + row / kRegisterRows * num_chunks_;
    for (int64_t i = 0; i < num_chunks_; ++i)
      group[i].copy_row(row % kRegisterRows, blocks + i * kBlocks, minimum(kBlocks, num_blocks - i * kBlocks));
  }

  // Prepares the rows that are missing to a multiple of sixteen.
  void clear_rows_from(int64_t row) {
    for (; row % kRegisterRows != 0; ++row)
      for (int64_t i = 0; i < num_chunks_; ++i)
        chunks_[row / kRegisterRows * num_chunks_ + i].clear_row(row % kRegisterRows);
  }

  // Those from `row` on, a multiple of sixteen.
  ArrangedChunks from(int64_t row) const {
    ArrangedChunks rest = *this;
    rest.chunks_ += row / kRegisterRows * num_chunks_;
    return rest;
  }

  // Sixteen rows from `row` on, a multiple of sixteen.
  const Rows& at(int64_t row, int64_t chunk) const { return chunks_[row / kRegisterRows * num_chunks_ + chunk]; }

 private:
  static int64_t num_chunks(int64_t num_columns) { return (num_columns + Rows::kColumns - 1) / Rows::kColumns; }

  Rows* chunks_ = nullptr;
  int64_t num_chunks_ = 0, num_columns_ = 0;
};

// The part that all products in tile registers share: the registers, and the rows of x.
template <class PreparedRow>
class RowsInRegisters {
 public:
  using Prepared = PreparedRow;
  using Rows = ArrangedRows<Prepared>;

  static bool takes_rows(int64_t count) { return count >= Rows::kLeastRows; }

  // One to three rows that would need a tile of their own do without, unless all rows take tiles.
  static int64_t num_taken(int64_t count) {
    return Rows::kLeastRows > 1 && count % kRegisterRows < 4 ? count - count % kRegisterRows : count;
  }

  // Takes the rows of x that are multiplied together, from row `first` of all rows on. They are arranged here unless
  // they have been for all panels.
  void take_rows(const PreparedRows& x, const Prepared* const* rows, int64_t first, int64_t count,
                 int64_t num_columns) {
    using Chunks = ArrangedChunks<Prepared>;
    if (!takes_rows(count)) return;
    if (x.arranged != nullptr) {
      rows_ = Chunks(x.arranged, num_columns).from(first);
      return;
    }
    const size_t num_bytes = static_cast<size_t>(Chunks::num_bytes(count, num_columns));
    rows_ = Chunks(thread_scratch(Scratch::kKernel, num_bytes), num_columns);
    for (int64_t row = 0; row < count; ++row) rows_.copy_row(row, rows[row]);
    rows_.clear_rows_from(count);
  }

 protected:
  TileRegisters registers_;
  ArrangedChunks<Prepared> rows_;
};

inline IntVec load_sums(const TileSums& sums, int64_t row) { return load_words(sums[row]); }

// The number of a tile is part of the instruction, so these must be macros.
#define PW_STORE_SUMS(tile, sums) _tile_stored(tile, sums, sizeof(sums[0]));

#else

template <class Kernel>
using InTileRegisters = NoTileRegisters;

template <class Tile>
class PartsInRegisters;
template <QuantizedFormat kName>
class BlocksInRegisters;
template <class Tile>
class NumbersInRegisters;

#endif

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
