// The keys of one tile in a paged cache: where they lie, and how they become right-hand sides of products. Part of
// attention_kernel.cpp.
#pragma once

#include "attention.h"
#include "attention_softmax.h"
#include "kv_layout.h"
#include "panel.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// Successive keys of a tile within one block. The keys and values of a unit's further heads lie head_elements() apart.
template <class T>
struct Run {
  const T* keys;  // of the block and the unit's first head, from the run's first key on
  const T* values;
  int64_t first;  // of the tile
  int64_t count;
};

// The keys [begin, end) of a tile, counted from its first; nobody need have written the others. Runs are rounded out
// to whole steps.
template <class T>
struct Tile {
  Run<T> runs[kTile];
  int64_t num_runs = 0, begin = 0, end = 0;

  bool is_whole() const { return begin == 0 && end == kTile; }
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

  // The keys of the tile at `start` that are in [begin, end), absolute positions. False if a block id is outside
  // the cache.
  bool find(int64_t start, int64_t begin, int64_t end, Tile<T>& tile) const {
    constexpr int64_t step = kStep<T>;
    tile.num_runs = 0, tile.begin = maximum(begin - start, 0), tile.end = minimum(end - start, kTile);
    const int64_t last = (tile.end + step - 1) / step * step;
    for (int64_t i = tile.begin / step * step; i < last;) {
      const int64_t block_id = block_table_[(start + i) / layout.block_size];
      const int64_t offset = (start + i) % layout.block_size;
      if (block_id < 0 || block_id >= num_blocks_) return false;
      const int64_t count = minimum(last - i, layout.block_size - offset);
      tile.runs[tile.num_runs++] = {cache_ + layout.keys_of(block_id, kv_head_) + offset * step,
                                    cache_ + layout.values_of(block_id, kv_head_) + offset * layout.dim, i, count};
      i += count;
    }
    return true;
  }

  const KvLayout layout;

 private:
  const T* cache_;
  const int32_t* block_table_;
  int64_t num_blocks_, kv_head_;
};

inline void prefetch(const void* memory, int64_t num_bytes) {
  for (int64_t byte = 0; byte < num_bytes; byte += 64)
    __builtin_prefetch(static_cast<const char*>(memory) + byte, 0, 2);
}

// Into the second-level cache: a whole tile would not fit beside the others in the first.
template <class T>
void prefetch_keys(const KvLayout& layout, const Tile<T>& tile, int64_t head) {
  const int64_t offset = head * layout.head_elements();
  for (int64_t i = 0; i < tile.num_runs; ++i) {
    const Run<T>& run = tile.runs[i];
    const int64_t row = layout.block_size * kStep<T>;
    if (run.count == layout.block_size) {
      prefetch(run.keys + offset, layout.head_elements() * sizeof(T));
    } else {
      for (int64_t d = 0; d < layout.dim / kStep<T>; ++d)
        prefetch(run.keys + offset + d * row, run.count * kStep<T> * sizeof(T));
    }
  }
}

template <class T>
void prefetch_values(const KvLayout& layout, const Tile<T>& tile, int64_t head) {
  for (int64_t i = 0; i < tile.num_runs; ++i)
    prefetch(tile.runs[i].values + head * layout.head_elements(), tile.runs[i].count * layout.dim * sizeof(T));
}

inline void copy_bytes(const void* source, int64_t num_bytes, void* target) {
  if (num_bytes % 64 != 0) {
    memcpy(target, source, num_bytes);
    return;
  }
  for (int64_t byte = 0; byte < num_bytes; byte += 64)
    memcpy(static_cast<char*>(target) + byte, static_cast<const char*>(source) + byte, 64);
}

// Copies a tile's keys to [dim / step][kTile][step]. Columns of keys that are not in the tile keep what was there:
// nobody looks at products with them.
template <class T>
void gather_keys(const KvLayout& layout, const Tile<T>& tile, int64_t head, T* keys) {
  for (int64_t i = 0; i < tile.num_runs; ++i) {
    const Run<T>& run = tile.runs[i];
    const int64_t row = layout.block_size * kStep<T>, num_bytes = run.count * kStep<T> * sizeof(T);
    T* const target = keys + run.first * kStep<T>;
    for (int64_t d = 0; d < layout.dim / kStep<T>; ++d)
      copy_bytes(run.keys + head * layout.head_elements() + d * row, num_bytes, target + d * kTile * kStep<T>);
  }
}

// Copies the values of the keys [begin, end) of a tile to [kTile / step][dim][step], with 0 for all others: they are
// multiplied with probability 0.
template <class T>
void gather_values(const KvLayout& layout, const Tile<T>& tile, int64_t head, KeySpan span, T* values) {
  constexpr int64_t step = kStep<T>;
  for (int64_t i = 0; i < tile.num_runs; ++i)
    copy_bytes(tile.runs[i].values + head * layout.head_elements(), tile.runs[i].count * layout.dim * sizeof(T),
               values + tile.runs[i].first * layout.dim);
  const auto clear = [&](int64_t key) {
    T* const row = values + key / step * layout.dim * step + key % step;
    for (int64_t d = 0; d < layout.dim; ++d) row[d * step] = T{};
  };
  for (int64_t key = 0; key < minimum(span.begin, kTile); ++key) clear(key);
  for (int64_t key = maximum(span.end, 0); key < kTile; ++key) clear(key);
}

template <class T>
bool is_finite(const T* elements, int64_t count) {
  Vec sum = zero();
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec value = load(elements + i);
    sum = sum + (value - value);
  }
  return hsum(sum) == 0.0f;
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
