// Finds the keys of one tile in a paged cache, and brings them into the form of right-hand sides of products. Part of
// attention_kernel.cpp and mla_kernel.cpp.
#pragma once

#include "attention.h"
#include "attention_softmax.h"
#include "kv_layout.h"
#include "panel.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// Successive keys of a piece within one block. Keys and values of the unit's further heads lie head_elements() apart,
// their scales block_size.
template <class T>
struct Run {
  const T* keys;  // those of the unit's first head, from the run's first key on
  const T* values;
  int64_t first;  // number within the tile
  int64_t count;
  const float* key_scales;  // null where the cache has no scales
  const float* value_scales;
};

// The scales of one head's keys and values in a tile.
struct Scales {
  float keys[kTile], values[kTile];
};

// The keys [begin, end) of a tile, counted from its first key. Other keys of the tile may never have been written. Runs
// begin with a whole step and reach to the end of the piece or of the block.
template <class T>
struct Tile {
  Run<T> runs[kTile];
  int64_t num_runs = 0, begin = 0, end = 0;

  // The range of keys extended to whole pieces.
  int64_t first_key() const { return begin / kPiece * kPiece; }
  int64_t end_key() const { return (end + kPiece - 1) / kPiece * kPiece; }

  // Whether each of its pieces lies in one block. Of the last, there may be keys beyond `end`.
  bool is_in_place() const {
    return begin == first_key() && num_runs * kPiece == end_key() - begin && runs[num_runs - 1].count == kPiece;
  }
};

// kPiece keys of one head: keys [dim / step][keys_per_row][step] and values [kPiece / step][dim][step].
template <class T>
struct Piece {
  const T* keys;
  const T* values;
  int64_t keys_per_row;
};

// Finds the keys of a unit, a tile at a time.
template <class T>
class KeyFinder {
 public:
  KeyFinder(const AttentionArgs& args, const AttentionUnit& unit)
      : layout(args.kv_dtype, args.num_kv_heads, args.head_dim, args.block_size),
        cache_(static_cast<const T*>(args.kv_cache)),
        block_table_(args.block_tables + unit.seq * args.block_table_stride),
        num_blocks_(args.num_blocks),
        kv_head_(unit.kv_head) {}

  // Finds the keys of the tile at `start` whose absolute positions are in [begin, end). Returns false if a block id is
  // outside the cache.
  bool find(int64_t start, int64_t begin, int64_t end, Tile<T>& tile) const {
    constexpr int64_t step = kStep<T>;
    tile.num_runs = 0, tile.begin = maximum(begin - start, 0), tile.end = minimum(end - start, kTile);
    for (int64_t i = tile.begin / step * step; i < tile.end;) {
      const int64_t block_id = block_table_[(start + i) / layout.block_size];
      const int64_t offset = (start + i) % layout.block_size;
      if (block_id < 0 || block_id >= num_blocks_) return false;
      const int64_t count = minimum(layout.block_size - offset, kPiece - i % kPiece);
      tile.runs[tile.num_runs++] = {cache_ + layout.keys_of(block_id, kv_head_) + offset * kStepElements<T>,
                                    cache_ + layout.values_of(block_id, kv_head_) + offset * layout.row_elements, i, count,
                                    scales_at(layout.key_scales_of(block_id, kv_head_), offset),
                                    scales_at(layout.value_scales_of(block_id, kv_head_), offset)};
      i += count;
    }
    return true;
  }

  const KvLayout layout;

 private:
  const float* scales_at(int64_t byte, int64_t offset) const {
    return kIsByte<T> ? reinterpret_cast<const float*>(cache_ + byte) + offset : nullptr;
  }

  const T* cache_;
  const int32_t* block_table_;
  int64_t num_blocks_, kv_head_;
};

inline void prefetch(const void* memory, int64_t num_bytes) {
  for (int64_t byte = 0; byte < num_bytes; byte += 64)
    __builtin_prefetch(static_cast<const char*>(memory) + byte, 0, 2);
}

// Prefetches keys into the second-level cache: a whole tile would not fit beside the others into the first.
template <class T>
void prefetch_keys(const KvLayout& layout, const Tile<T>& tile, int64_t head, int64_t piece) {
  for (int64_t i = 0; i < tile.num_runs; ++i) {
    const Run<T>& run = tile.runs[i];
    if (run.first / kPiece != piece) continue;
    const T* const keys = run.keys + head * layout.head_elements();
    const int64_t row = layout.block_size * kStepElements<T>;
    if (run.count == layout.block_size) {
      prefetch(keys, layout.head_elements() * sizeof(T));
    } else {
      for (int64_t d = 0; d < layout.dim / kStep<T>; ++d) prefetch(keys + d * row, run.count * kStepElements<T> * sizeof(T));
    }
  }
}

// Prefetches the scales of the unit's heads.
template <class T>
void prefetch_scales(const KvLayout& layout, const Tile<T>& tile, int64_t num_heads) {
  for (int64_t i = 0; i < tile.num_runs; ++i)
    for (int64_t head = 0; head < num_heads; ++head) {
      prefetch(tile.runs[i].key_scales + head * layout.block_size, tile.runs[i].count * sizeof(float));
      prefetch(tile.runs[i].value_scales + head * layout.block_size, tile.runs[i].count * sizeof(float));
    }
}

// Keys that are in no run keep old scales, which are not used.
template <class T>
void gather_scales(const KvLayout& layout, const Tile<T>& tile, int64_t head, Scales& scales) {
  for (int64_t i = 0; i < tile.num_runs; ++i) {
    const Run<T>& run = tile.runs[i];
    const int64_t num_bytes = run.count * sizeof(float);
    memcpy(scales.keys + run.first, run.key_scales + head * layout.block_size, num_bytes);
    memcpy(scales.values + run.first, run.value_scales + head * layout.block_size, num_bytes);
  }
}

template <class T>
void prefetch_values(const KvLayout& layout, const Tile<T>& tile, int64_t head, int64_t piece) {
  for (int64_t i = 0; i < tile.num_runs; ++i) {
    const Run<T>& run = tile.runs[i];
    if (run.first / kPiece == piece)
      prefetch(run.values + head * layout.head_elements(), run.count * layout.row_elements * sizeof(T));
  }
}

inline void copy_bytes(const void* source, int64_t num_bytes, void* target) {
  if (num_bytes % 64 != 0) {
    memcpy(target, source, num_bytes);
    return;
  }
  for (int64_t byte = 0; byte < num_bytes; byte += 64)
    memcpy(static_cast<char*>(target) + byte, static_cast<const char*>(source) + byte, 64);
}

// Copies the keys of a run to a piece. Columns of keys that are in no run keep their old contents: products with them
// are not used.
template <class T>
void gather_keys(const KvLayout& layout, const Run<T>& run, int64_t head, T* keys) {
  constexpr int64_t step = kStepElements<T>;
  const int64_t row = layout.block_size * step, num_bytes = run.count * step * sizeof(T);
  T* const target = keys + run.first % kPiece * step;
  for (int64_t d = 0; d < layout.dim / kStep<T>; ++d)
    copy_bytes(run.keys + head * layout.head_elements() + d * row, num_bytes, target + d * kPiece * step);
}

template <class T>
void gather_values(const KvLayout& layout, const Run<T>& run, int64_t head, T* values) {
  copy_bytes(run.values + head * layout.head_elements(), run.count * layout.row_elements * sizeof(T),
             values + run.first % kPiece * layout.row_elements);
}

// Sets the values of a piece, whose first key is number `first` of the tile, to 0 for keys outside `span`.
template <class T>
void clear_values(const KvLayout& layout, int64_t first, KeySpan span, T* values) {
  constexpr int64_t step = kStep<T>;
  if (kIsByte<T>) return;  // every number is finite
  for (int64_t key = 0; key < kPiece; ++key) {
    if (first + key >= span.begin && first + key < span.end) continue;
    T* const row = values + key / step * layout.dim * step + key % step;
    for (int64_t d = 0; d < layout.dim; ++d) row[d * step] = T{};
  }
}

template <class T>
bool is_finite(const T* elements, int64_t count) {
  Vec sum = zero();
  if constexpr (!kIsByte<T>)
    for (int64_t i = 0; i < count; i += kLanes) {
      const Vec value = load(elements + i);
      sum = sum + (value - value);
    }
  return hsum(sum) == 0.0f;
}

// count: a multiple of 32.
inline bool is_finite(const BFloat16* elements, int64_t count) {
  constexpr int kCount = 2 * kLanes;
  typedef uint16_t Halves __attribute__((vector_size(2 * kCount)));
  Halves highest = {};
  for (int64_t i = 0; i < count; i += kCount) {
    Halves exponents;
    memcpy(&exponents, elements + i, sizeof(exponents));
    exponents &= 0x7f80;
    highest = exponents > highest ? exponents : highest;
  }
  for (int i = 0; i < kCount; ++i)
    if (highest[i] == 0x7f80) return false;
  return true;
}

// Widens `count` pairs of bytes: to pairs of bf16, or to one row of fp32 with the first of all pairs and one with the
// second.
template <class T>
void widen_pairs(const T* pairs, int64_t count, float* rows) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Vec even, odd;
    load_pairs(pairs + kStepElements<T> * i, even, odd);
    store(rows + i, even);
    store(rows + count + i, odd);
  }
}

#if defined(PW_HAS_BF16_DOT)
template <class T>
void widen_pairs(const T* pairs, int64_t count, BFloat16* wide) {
  for (int64_t i = 0; i < 2 * count; i += 2 * kLanes)
    _mm512_storeu_si512(wide + i, load_as_bfloat16(pairs + i / kNumbersOf<T>));
}
#endif

// Returns one head of a piece of the tile: in place if all of it lies in one block, else a copy in `keys` and `values`.
// Values outside `span` are multiplied by probability 0, so those that are not finite are set to 0, in a copy.
template <class T>
Piece<T> find_piece(const KvLayout& layout, const Tile<T>& tile, int64_t head, int64_t first, KeySpan span, T* keys,
                    T* values) {
  const bool is_whole = first >= span.begin && first + kPiece <= span.end;
  for (int64_t i = 0; i < tile.num_runs; ++i) {
    const Run<T>& run = tile.runs[i];
    if (run.first / kPiece != first / kPiece) continue;
    const int64_t offset = head * layout.head_elements();
    if (run.count == kPiece && (is_whole || is_finite(run.values + offset, kPiece * layout.row_elements)))
      return {run.keys + offset, run.values + offset, layout.block_size};
    gather_keys(layout, run, head, keys);
    gather_values(layout, run, head, values);
  }
  clear_values(layout, first, span, values);
  return {keys, values, kPiece};
}

// Brings a head of a piece of bytes into the form of right-hand sides of numbers W, bf16 or fp32.
template <class W, class T>
Piece<W> widen_piece(const KvLayout& layout, Piece<T> piece, W* keys, W* values) {
  for (int64_t d = 0; d < layout.dim; d += 2)
    widen_pairs(piece.keys + d / kNumbersOf<T> * piece.keys_per_row, kPiece, keys + d * kPiece);
  for (int64_t key = 0; key < kPiece; key += 2)
    widen_pairs(piece.values + key * layout.row_elements, layout.dim, values + key * layout.dim);
  return {keys, values, kPiece};
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
