// Paged causal attention of one unit of query rows. Compiled once per instruction set.
#include "attention.h"
#include "attention_keys.h"
#include "attention_rows.h"
#include "attention_softmax.h"
#include "kv_layout.h"
#include "kv_quantize.h"
#include "panel.h"
#include "parallel.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// Rows whose softmax is computed side by side.
constexpr int64_t kRowsTogether = 8;

// Up to this many rows are multiplied with bytes as they lie in the cache. For more it is faster to widen a tile once.
// Tile registers (AMX) take nothing but bf16, and plain C++ is not worth the time to compile it.
#if defined(PW_HAS_AMX) || defined(PW_ISA_GENERIC)
constexpr int64_t kMaxRowsOfBytes = 0;
#else
constexpr int64_t kMaxRowsOfBytes = kRowTile;
#endif

// The blocks whose keys are multiplied side by side, head by head. Fewer have too few independent sums.
constexpr int64_t kPiecesTogether = 4;

// The state that all tiles of one unit share. The cache has elements of type C.
template <class C>
class UnitKernel {
  using T = Wide<C>;

 public:
  UnitKernel(const AttentionArgs& args, const AttentionUnit& unit)
      : unit_(unit), range_(args, unit), finder_(args, unit), scale_(args) {
    const int64_t rows = unit.total_rows(), dim = finder_.layout.dim;
    const int64_t left_bytes = rows * (dim + kTile) * sizeof(Left<T>);
    const int64_t tile_bytes = 2 * kTile * dim * (sizeof(T) + (kIsByte<C> ? sizeof(C) : 0));
    const int64_t scales_bytes = kIsByte<C> ? unit.num_kv_heads * sizeof(Scales) : 0;
    const int64_t float_bytes = (rows * kTile + 2 * state_floats()) * sizeof(float) + scales_bytes;
    void* const memory = thread_scratch(Scratch::kKernel, static_cast<size_t>(left_bytes + tile_bytes + float_bytes));
    // Whole cache lines come first.
    states_ = static_cast<float*>(memory);
    products_ = states_ + 2 * state_floats();
    scales_ = reinterpret_cast<Scales*>(products_ + rows * kTile);
    wide_keys_ = reinterpret_cast<T*>(reinterpret_cast<char*>(scales_) + scales_bytes);
    wide_values_ = wide_keys_ + kTile * dim;
    keys_ = kIsByte<C> ? reinterpret_cast<C*>(wide_values_ + kTile * dim) : reinterpret_cast<C*>(wide_keys_);
    values_ = keys_ + kTile * dim;
    probs_ = reinterpret_cast<Left<T>*>(values_ + kTile * dim);
    q_ = probs_ + rows * kTile;
    load_queries<T, C>(args, unit, dim, q_);
    if (unit.segment < 0) prefetch_rows<1>(args, unit, args.out, args.num_heads * args.head_dim);
  }

  State state(int64_t index) const {
    return State(states_ + index * state_floats(), unit_.total_rows(), finder_.layout.dim);
  }

  // Adds the keys of one segment to `state`, tile by tile. False if a block id is outside the cache.
  bool attend_segment(int64_t segment, const State& state) {
    state.reset();
    const int64_t begin = maximum(range_.begin(0), segment * kSegmentKeys);
    const int64_t end = minimum(range_.end(unit_.num_rows - 1), (segment + 1) * kSegmentKeys);
    Tile<C> tiles[2];
    int64_t start = begin / kTile * kTile;
    if (!finder_.find(start, begin, end, tiles[0])) return false;
    for (int current = 0; start < end; start += kTile, current = 1 - current) {
      if (!finder_.find(start + kTile, begin, end, tiles[1 - current])) return false;
      const Tile<C>&tile = tiles[current], &next = tiles[1 - current];
      if (unit_.num_kv_heads > 1 && multiplies_cache() && is_seen_by_all(start, tile) && can_stay_in_place(tile)) {
        add_tile_of_all_heads(start, tile, next, state);
        continue;
      }
      for (int64_t head = 0; head < unit_.num_kv_heads; ++head) {
        const bool is_last = head == unit_.num_kv_heads - 1;
        const Tile<C>& following = is_last ? next : tile;
        const int64_t following_head = is_last ? 0 : head + 1;
        if constexpr (kIsByte<C> && kMaxRowsOfBytes > 0)
          if (multiplies_cache()) {
            add_tile<C>(start, tile, head, following, following_head, state);
            continue;
          }
        add_tile<T>(start, tile, head, following, following_head, state);
      }
    }
    return true;
  }

 private:
  int64_t state_floats() const { return State::num_floats(unit_.total_rows(), finder_.layout.dim); }

  // The rows of one KV head: the first of them in the unit, and their products, probabilities and scales.
  struct HeadRows {
    int64_t base;
    float* products;
    Left<T>* probs;
    Scales* scales;
  };

  // place: of the products, probabilities and scales, where several heads have theirs at a time.
  HeadRows rows_of(int64_t head, int64_t place) const {
    const int64_t offset = place * unit_.num_rows * kTile;
    return {head * unit_.num_rows, products_ + offset, probs_ + offset, scales_ + place};
  }

  // Whether products read the numbers of the cache itself.
  bool multiplies_cache() const { return !kIsByte<C> || unit_.num_rows <= kMaxRowsOfBytes; }

  // The keys of a tile that every row sees.
  KeySpan common_keys(int64_t start) const {
    return {range_.span(unit_.num_rows - 1, start).begin, range_.span(0, start).end};
  }

  bool is_seen_by_all(int64_t start, const Tile<C>& tile) const {
    const KeySpan common = common_keys(start);
    return common.begin <= tile.begin && common.end >= tile.end;
  }

  // Whether the pieces of a tile can be multiplied where they lie. The last may have keys that no row sees: their
  // products are hidden, and their values, multiplied by 0, must be finite.
  bool can_stay_in_place(const Tile<C>& tile) const {
    if (!tile.is_in_place()) return false;
    if (tile.end == tile.end_key()) return true;
    const C* const values = tile.runs[tile.num_runs - 1].values;
    return is_finite(values, unit_.num_kv_heads * finder_.layout.head_elements());
  }

  // Adds a tile that all rows see and whose pieces can be multiplied where they lie: first the keys of all heads, a few
  // blocks at a time, then their values. So memory is read in the order of its addresses within a block, and what is
  // read next is always prefetched.
  void add_tile_of_all_heads(int64_t start, const Tile<C>& tile, const Tile<C>& next, const State& state) {
    const KvLayout& layout = finder_.layout;
    const int64_t heads = unit_.num_kv_heads, head_bytes = layout.head_elements() * sizeof(C);
    const KeySpan common = common_keys(start);
    const C* starts[kPiecesTogether];
    if constexpr (kIsByte<C>) prefetch_scales(layout, next, heads);
    for (int64_t run = 0; run < tile.num_runs; run += kPiecesTogether) {
      const int64_t count = minimum(kPiecesTogether, tile.num_runs - run), following = run + count;
      for (int64_t head = 0; head < heads; ++head) {
        int64_t ahead[kPiecesTogether];
        for (int64_t i = 0; i < count; ++i) {
          starts[i] = tile.runs[run + i].keys + head * layout.head_elements();
          ahead[i] = head < heads - 1 ? head_bytes : distance(starts[i], after_keys(tile, following, i));
        }
        multiply_keys(rows_of(head, head), Pieces<C>{starts, count, layout.dim}, layout.block_size,
                      tile.runs[run].first, ahead);
      }
    }
    for (int64_t head = 0; head < heads; ++head) {
      const HeadRows rows = rows_of(head, head);
      if constexpr (kIsByte<C>) gather_scales(layout, tile, head, *rows.scales);
      add_probs(start, tile.begin, tile.end_key(), common, state, rows);
    }
    for (int64_t run = 0; run < tile.num_runs; ++run) {
      const C* const later = run + 1 < tile.num_runs ? tile.runs[run + 1].values
                             : next.num_runs > 0     ? next.runs[0].keys
                                                     : nullptr;
      for (int64_t head = 0; head < heads; ++head) {
        starts[0] = tile.runs[run].values + head * layout.head_elements();
        const int64_t key = tile.runs[run].first;
        multiply_values(starts, key, key + kPiece, 0, unit_.num_rows, state, rows_of(head, head),
                        head < heads - 1 ? head_bytes : distance(starts[0], later));
      }
    }
  }

  // Returns what a thread reads after the keys of block i of a group of blocks for its last head: the keys of a block
  // of the next group, which begins with block `following`, or the values of block i. Null: nothing.
  static const C* after_keys(const Tile<C>& tile, int64_t following, int64_t i) {
    if (following == tile.num_runs) return tile.runs[i].values;
    return following + i < tile.num_runs ? tile.runs[following + i].keys : nullptr;
  }

  // Bytes from one address to another; 0 if that is null.
  static int64_t distance(const C* from, const C* to) {
    return to == nullptr ? 0 : reinterpret_cast<const char*>(to) - reinterpret_cast<const char*>(from);
  }

  // Adds the keys of one head of a tile, as elements of type E. Prefetches the next head, or the first head of the next
  // tile, meanwhile.
  template <class E>
  void add_tile(int64_t start, const Tile<C>& tile, int64_t head, const Tile<C>& next, int64_t next_head,
                const State& state) {
    const KvLayout& layout = finder_.layout;
    const int64_t first = tile.first_key(), end = tile.end_key();
    const HeadRows rows = rows_of(head, 0);
    const KeySpan common = common_keys(start);
    const E *keys[kTile / kPiece], *values[kTile / kPiece];
    int64_t distances[kTile / kPiece];
    // The distance to the next head, which follows in each block, where the cache itself is multiplied.
    const bool is_read_ahead = kIsSame<E, C> && next_head > 0 && unit_.num_rows <= kFewRows;
    const int64_t ahead = is_read_ahead ? layout.head_elements() * sizeof(C) : 0;
    for (int64_t& bytes : distances) bytes = ahead;
    if constexpr (kIsByte<C>) gather_scales(layout, tile, head, *rows.scales);
    if (kIsByte<C> && next_head == 0) prefetch_scales(layout, next, unit_.num_kv_heads);
    int64_t key = first;
    while (key < end) {
      // Pieces whose keys have the same layout are multiplied together.
      const int64_t begin = key;
      int64_t keys_per_row = 0;
      for (; key < end; key += kPiece) {
        const Piece<E> piece = find<E>(tile, head, key, {tile.begin, tile.end});
        if (key > begin && piece.keys_per_row != keys_per_row) break;
        if (ahead == 0) prefetch_keys(layout, next, next_head, key / kPiece);
        keys_per_row = piece.keys_per_row;
        keys[key / kPiece] = piece.keys;
        values[key / kPiece] = piece.values;
      }
      const Pieces<E> pieces = {keys + begin / kPiece, (key - begin) / kPiece, layout.dim};
      multiply_keys(rows, pieces, keys_per_row, begin, ahead == 0 ? nullptr : distances);
    }
    add_probs(start, first, end, common, state, rows);
    if constexpr (!kIsByte<C>)
      if (!is_harmless(values, tile, common)) return add_values_of_tokens(start, tile, head, state);
    for (int64_t key = first; key < end && ahead == 0; key += kPiece)
      prefetch_values(layout, next, next_head, key / kPiece);
    multiply_values(values + first / kPiece, first, end, 0, unit_.num_rows, state, rows, ahead);
  }

  // Returns one head of a piece. The keys outside `span` are those that no row sees.
  template <class E>
  Piece<E> find(const Tile<C>& tile, int64_t head, int64_t key, KeySpan span) {
    const int64_t place = key * finder_.layout.dim;
    const Piece<C> piece = find_piece(finder_.layout, tile, head, key, span, keys_ + place, values_ + place);
    if constexpr (kIsSame<E, C>) return piece;
    else return widen_piece(finder_.layout, piece, wide_keys_ + place, wide_values_ + place);
  }

  // Whether all values that some row must not see are finite, so that their product with probability 0 is 0.
  bool is_harmless(const C* const* values, const Tile<C>& tile, KeySpan common) const {
    const int64_t piece_elements = kPiece * finder_.layout.dim;
    for (int64_t key = tile.first_key(); key < tile.end_key(); key += kPiece) {
      const bool is_seen_by_all = maximum(key, tile.begin) >= common.begin &&
                                  minimum(key + kPiece, tile.end) <= common.end;
      if (!is_seen_by_all && !is_finite(values[key / kPiece], piece_elements)) return false;
    }
    return true;
  }

  // Adds the values of a tile token by token, without those that the token must not see.
  void add_values_of_tokens(int64_t start, const Tile<C>& tile, int64_t head, const State& state) {
    for (int64_t row = 0; row < unit_.num_rows; row = range_.token_end(row)) {
      KeySpan span = range_.span(row, start);
      span = {maximum(span.begin, tile.begin), minimum(span.end, tile.end)};
      const C* values[kTile / kPiece];
      for (int64_t key = tile.first_key(); key < tile.end_key(); key += kPiece)
        values[key / kPiece] = find<C>(tile, head, key, span).values;
      multiply_values(values + tile.first_key() / kPiece, tile.first_key(), tile.end_key(), row, range_.token_end(row), state, rows_of(head, 0),
                      0);
    }
  }

  // products[:, first_key .. ) = q x the keys of pieces beside each other.
  template <class E>
  void multiply_keys(const HeadRows& rows, Pieces<E> pieces, int64_t keys_per_row, int64_t first_key,
                     const int64_t* ahead) {
    const int64_t dim = finder_.layout.dim;
    multiplier_.multiply_beside(q_ + rows.base * dim, dim, unit_.num_rows, pieces, keys_per_row * kStepElements<E>,
                                rows.products + first_key, kTile, ahead);
  }

  void add_probs(int64_t start, int64_t first, int64_t end, KeySpan common, const State& state, const HeadRows& rows) {
    const T* type = nullptr;
    const float* const key_scales = kIsByte<C> ? rows.scales->keys : nullptr;
    const float* const value_scales = kIsByte<C> ? rows.scales->values : nullptr;
    const bool is_all_visible = common.begin <= first && common.end >= end;
    // A few rows at a time, so that the latencies of one row are hidden behind the work on the others.
    for (int64_t row = 0; row < unit_.num_rows; row += kRowsTogether) {
      const int64_t count = minimum(kRowsTogether, unit_.num_rows - row);
      float maxima[kRowsTogether];
      for (int64_t i = 0; i < count; ++i) {
        const KeySpan span = is_all_visible ? common : range_.span(row + i, start);
        maxima[i] = raise_maximum(rows.products + (row + i) * kTile, first, end, key_scales,
                                  is_all_visible ? nullptr : &span, scale_, state, rows.base + row + i);
      }
      for (int64_t i = 0; i < count; ++i)
        store_row_probs(type, rows.products + (row + i) * kTile, first, end, scale_, maxima[i], value_scales,
                        state.row(rows.base + row + i) + state.dim, rows.probs + (row + i) * kTile);
    }
  }

  // Adds probabilities x values of pieces, the keys [first_key, end_key), to the rows [row, end_row) of a head.
  template <class E>
  void multiply_values(const E* const* values, int64_t first_key, int64_t end_key, int64_t row, int64_t end_row,
                       const State& state, const HeadRows& rows, int64_t ahead) {
    const int64_t dim = finder_.layout.dim;
    const Pieces<E> pieces = {values, (end_key - first_key) / kPiece, kPiece};
    multiplier_.multiply(rows.probs + row * kTile + first_key, kTile, end_row - row, pieces, dim * kStepElements<E>, dim,
                         state.row(rows.base + row), state.stride(), true, ahead);
  }

  const AttentionUnit& unit_;
  const RowRange range_;
  const KeyFinder<C> finder_;
  const ScoreScale scale_;
  Multiplier multiplier_;
  T *wide_keys_, *wide_values_;
  C *keys_, *values_;
  Scales* scales_;
  Left<T>*q_, *probs_;
  float *products_, *states_;
};

int64_t state_floats(const AttentionArgs& args, int64_t num_rows) {
  return State::num_floats(num_rows, padded_dim(args.head_dim));
}

// Merges the state of a segment into that of the segments before it, row by row. Rows that see no key of the segment
// are left out.
void merge_segment(const RowRange& range, int64_t segment, const State& added, const State& total) {
  for (int64_t r = 0; r < total.num_rows; ++r) {
    const int64_t row = r % range.num_rows;
    if (!range.sees_segment(row, segment)) continue;
    if (range.begin(row) / kSegmentKeys == segment) copy_row(added, total, r);
    else merge_row(added, total, r);
  }
}

bool attend(const AttentionArgs& args, const AttentionUnit& unit, float* partial) {
  return with_heads_type(args.kv_dtype, [&](auto* type) {
    UnitKernel<Element<decltype(type)>> kernel(args, unit);
    if (unit.segment >= 0)
      return kernel.attend_segment(unit.segment, State(partial, unit.total_rows(), padded_dim(args.head_dim)));
    const RowRange range(args, unit);
    const int64_t first = range.begin(0) / kSegmentKeys, last = (range.end(unit.num_rows - 1) - 1) / kSegmentKeys;
    const State total = kernel.state(0), next = kernel.state(1);
    if (!kernel.attend_segment(first, total)) return false;
    for (int64_t segment = first + 1; segment <= last; ++segment) {
      if (!kernel.attend_segment(segment, next)) return false;
      merge_segment(range, segment, next, total);
    }
    store_outputs(args, unit, total);
    return true;
  });
}

void merge(const AttentionArgs& args, const AttentionUnit& unit, float* partials, int64_t stride,
           int64_t num_segments) {
  const int64_t dim = padded_dim(args.head_dim);
  const State total(partials, unit.total_rows(), dim);
  for (int64_t i = 1; i < num_segments; ++i)
    merge_segment(RowRange(args, unit), unit.segment + i, State(partials + i * stride, unit.total_rows(), dim), total);
  store_outputs(args, unit, total);
}

// Stores heads of a token in a cache: those of its keys, or of its values.
template <class Source, class T>
void store_token(const StoreKvArgs& args, const KvLayout& layout, const Source* k, const Source* v, int64_t slot,
                 T* cache) {
  alignas(64) float row[kMaxHeadDim];
  alignas(64) T stored[kMaxHeadDim];
  const int64_t block_id = slot / args.block_size, offset = slot % args.block_size;
  const auto convert = [&](const Source* source, float constant, int64_t scales) {
    copy_query<float>(source, args.head_dim, layout.dim, row);
    if constexpr (kIsSame<T, Int4>) rotate_by_hadamard(row, args.head_dim);
    if constexpr (kIsByte<T>) {
      const float scale = quantize_row(row, layout.dim, constant, stored);
      memcpy(cache + scales + offset * sizeof(float), &scale, sizeof(scale));
    } else {
      copy_query<float>(row, layout.dim, layout.dim, stored);
    }
  };
  for (int64_t head = 0; head < args.num_kv_heads; ++head) {
    convert(k + head * args.head_dim, args.k_scale, layout.key_scales_of(block_id, head));
    put_key(layout, stored, offset, cache + layout.keys_of(block_id, head));
    convert(v + head * args.head_dim, args.v_scale, layout.value_scales_of(block_id, head));
    put_value(layout, stored, offset, cache + layout.values_of(block_id, head));
  }
}

void store_kv(const StoreKvArgs& args, int64_t first_token, int64_t end_token) {
  const KvLayout layout(args.kv_dtype, args.num_kv_heads, args.head_dim, args.block_size);
  with_type(args.dtype, [&](const auto* source_type) {
    const auto k = static_cast<decltype(source_type)>(args.k), v = static_cast<decltype(source_type)>(args.v);
    with_heads_type(args.kv_dtype, [&](auto* type) {
      if (kNumbersOf<Element<decltype(type)>> > 1) {
        while (first_token < end_token && shares_bytes(args.slot_mapping, first_token)) ++first_token;
        while (end_token < args.num_tokens && shares_bytes(args.slot_mapping, end_token)) ++end_token;
      }
      for (int64_t token = first_token; token < end_token; ++token)
        if (args.slot_mapping[token] >= 0)
          store_token(args, layout, k + token * args.k_stride, v + token * args.v_stride, args.slot_mapping[token],
                      static_cast<decltype(type)>(args.kv_cache));
    });
  });
}

}  // namespace

extern const AttentionKernels kAttention;
const AttentionKernels kAttention = {state_floats, attend, merge, store_kv};

}  // namespace PW_ISA
}  // namespace pagewick
