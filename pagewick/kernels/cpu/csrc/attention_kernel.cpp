// Paged causal attention of one unit of query rows. Compiled once per instruction set.
#include "attention.h"
#include "attention_keys.h"
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

// Which keys the rows of one KV head of a unit see, as absolute positions [begin, end).
struct RowRange {
  int64_t first_position, group, window, first_row, num_rows;

  RowRange(const AttentionArgs& args, const AttentionUnit& unit)
      : first_position(args.context_lens[unit.seq] - (args.cu_seqlens_q[unit.seq + 1] - args.cu_seqlens_q[unit.seq])),
        group(args.num_heads / args.num_kv_heads),
        window(args.sliding_window),
        first_row(unit.first_row),
        num_rows(unit.num_rows) {}

  int64_t token(int64_t row) const { return (first_row + row) / group; }
  int64_t begin(int64_t row) const {
    return window ? maximum(0, first_position + token(row) - window + 1) : 0;
  }
  int64_t end(int64_t row) const { return first_position + token(row) + 1; }
  // Returns the end of the rows that belong to the same token as `row`.
  int64_t token_end(int64_t row) const { return minimum(num_rows, (token(row) + 1) * group - first_row); }
  KeySpan span(int64_t row, int64_t start) const { return {begin(row) - start, end(row) - start}; }
  bool sees_segment(int64_t row, int64_t segment) const {
    return begin(row) < (segment + 1) * kSegmentKeys && end(row) > segment * kSegmentKeys;
  }
};

// Goes through the rows of a unit, head by head, and gives their places in [T, H, D] tensors.
class RowCursor {
 public:
  RowCursor(const AttentionArgs& args, const AttentionUnit& unit)
      : head_dim_(args.head_dim), group_(args.num_heads / args.num_kv_heads), num_rows_(unit.num_rows),
        first_token_(args.cu_seqlens_q[unit.seq] + unit.first_row / group_), first_member_(unit.first_row % group_),
        first_head_(unit.kv_head * group_), token_(first_token_), member_(first_member_) {}

  void next() {
    if (++row_ == num_rows_) {
      row_ = 0, first_head_ += group_, token_ = first_token_, member_ = first_member_;
    } else if (++member_ == group_) {
      member_ = 0, ++token_;
    }
  }

  int64_t head() const { return first_head_ + member_; }
  // Returns the index of the row's first element, where tokens lie `stride` elements apart.
  int64_t offset(int64_t stride) const { return token_ * stride + head() * head_dim_; }

 private:
  const int64_t head_dim_, group_, num_rows_, first_token_, first_member_;
  int64_t first_head_, token_, member_, row_ = 0;
};

template <class Rounded, class Source, class L>
void copy_query(const Source* source, int64_t head_dim, int64_t dim, L* target) {
  const Rounded* type = nullptr;
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store(target + d, round_to(type, load(source + d)));
  if (d < head_dim) store_part(target + d, round_to(type, load_part(source + d, head_dim - d)), head_dim - d);
  for (d = head_dim; d < dim; ++d) target[d] = L{};
}

// Rows lie too far apart for the processor's own prefetchers, which would fetch one after the other.
template <int kForWriting>
void prefetch_rows(const AttentionArgs& args, const AttentionUnit& unit, const void* tensor, int64_t stride) {
  const int64_t element = with_type(args.q_dtype, [](auto* type) { return int64_t{sizeof(*type)}; });
  const int64_t row_bytes = args.head_dim * element;
  RowCursor cursor(args, unit);
  for (int64_t r = 0; r < unit.total_rows(); ++r, cursor.next()) {
    const char* const row = static_cast<const char*>(tensor) + cursor.offset(stride) * element;
    for (int64_t byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(row + byte, kForWriting, 2);
  }
}

// Queries are rounded to bf16 where they are multiplied with bf16: over a bf16 cache on every instruction set.
template <class T>
void load_queries(const AttentionArgs& args, const AttentionUnit& unit, int64_t dim, Left<T>* q) {
  prefetch_rows<0>(args, unit, args.q, args.q_stride);
  with_type(args.q_dtype, [&](const auto* type) {
    const auto source = static_cast<decltype(type)>(args.q);
    RowCursor cursor(args, unit);
    for (int64_t r = 0; r < unit.total_rows(); ++r, cursor.next()) {
      const auto* const row = source + cursor.offset(args.q_stride);
      if constexpr (kIsSame<T, BFloat16>) copy_query<BFloat16>(row, args.head_dim, dim, q + r * dim);
      else copy_query<float>(row, args.head_dim, dim, q + r * dim);
    }
  });
}

void store_outputs(const AttentionArgs& args, const AttentionUnit& unit, const State& state) {
  with_type(args.q_dtype, [&](auto* type) {
    const auto target = static_cast<decltype(type)>(args.out);
    RowCursor cursor(args, unit);
    for (int64_t r = 0; r < unit.total_rows(); ++r, cursor.next()) {
      const float* const sink = args.sinks == nullptr ? nullptr : args.sinks + cursor.head();
      const float factor = normalizer(state, r, sink);
      const float* const values = state.row(r);
      auto* const out = target + cursor.offset(args.num_heads * args.head_dim);
      int64_t d = 0;
      for (; d + kLanes <= args.head_dim; d += kLanes) store_result(out + d, load(values + d) * factor);
      if (d < args.head_dim) store_part(out + d, load(values + d) * factor, args.head_dim - d);
    }
  });
}

// Up to this many rows are multiplied with bytes as they lie in the cache. For more it is faster to widen a tile once.
// Tile registers (AMX) take nothing but bf16, and plain C++ is not worth the time to compile it.
#if defined(PW_HAS_AMX) || defined(PW_ISA_GENERIC)
constexpr int64_t kMaxRowsOfBytes = 0;
#else
constexpr int64_t kMaxRowsOfBytes = kRowTile;
#endif

// The state that all tiles of one unit share. The cache has elements of type C.
template <class C>
class UnitKernel {
  using T = Wide<C>;

 public:
  UnitKernel(const AttentionArgs& args, const AttentionUnit& unit)
      : unit_(unit), range_(args, unit), finder_(args, unit), scale_(args) {
    const int64_t rows = unit.num_rows, dim = finder_.layout.dim;
    const int64_t left_bytes = (unit.total_rows() * dim + rows * kTile) * sizeof(Left<T>);
    const int64_t tile_bytes = 2 * kTile * dim * (sizeof(T) + (kIsByte<C> ? sizeof(C) : 0));
    const int64_t float_bytes = (rows * kTile + 2 * state_floats()) * sizeof(float) + sizeof(Scales);
    void* const memory = thread_scratch(Scratch::kKernel, static_cast<size_t>(left_bytes + tile_bytes + float_bytes));
    // Whole cache lines come first.
    states_ = static_cast<float*>(memory);
    products_ = states_ + 2 * state_floats();
    scales_ = reinterpret_cast<Scales*>(products_ + rows * kTile);
    wide_keys_ = reinterpret_cast<T*>(scales_ + 1);
    wide_values_ = wide_keys_ + kTile * dim;
    keys_ = kIsByte<C> ? reinterpret_cast<C*>(wide_values_ + kTile * dim) : reinterpret_cast<C*>(wide_keys_);
    values_ = keys_ + kTile * dim;
    probs_ = reinterpret_cast<Left<T>*>(values_ + kTile * dim);
    q_ = probs_ + rows * kTile;
    load_queries<T>(args, unit, dim, q_);
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
      for (int64_t head = 0; head < unit_.num_kv_heads; ++head) {
        const bool is_last = head == unit_.num_kv_heads - 1;
        const Tile<C>& following = is_last ? next : tile;
        const int64_t following_head = is_last ? 0 : head + 1;
        if constexpr (kIsByte<C> && kMaxRowsOfBytes > 0)
          if (unit_.num_rows <= kMaxRowsOfBytes) {
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

  // Adds the keys of one head of a tile, as elements of type E. Prefetches the next head, or the first head of the next
  // tile, meanwhile.
  template <class E>
  void add_tile(int64_t start, const Tile<C>& tile, int64_t head, const Tile<C>& next, int64_t next_head,
                const State& state) {
    const KvLayout& layout = finder_.layout;
    const int64_t base = head * unit_.num_rows, first = tile.first_key(), end = tile.end_key();
    // The keys that every row sees.
    const KeySpan common = {range_.span(unit_.num_rows - 1, start).begin, range_.span(0, start).end};
    const E *keys[kTile / kPiece], *values[kTile / kPiece];
    // The distance to the next head, which follows in each block, where the cache itself is multiplied.
    const bool is_read_ahead = kIsSame<E, C> && next_head > 0 && unit_.num_rows <= kFewRows;
    const int64_t ahead = is_read_ahead ? layout.head_elements() * sizeof(C) : 0;
    if constexpr (kIsByte<C>) gather_scales(layout, tile, head, *scales_);
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
      multiply_keys(base, pieces, keys_per_row, begin, ahead);
    }
    add_probs(start, first, end, common, state, base);
    if constexpr (!kIsByte<C>)
      if (!is_harmless(values, tile, common)) return add_values_of_tokens(start, tile, head, state);
    for (int64_t key = first; key < end && ahead == 0; key += kPiece)
      prefetch_values(layout, next, next_head, key / kPiece);
    multiply_values(values, first, end, 0, unit_.num_rows, state, base, ahead);
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
    const int64_t base = head * unit_.num_rows;
    for (int64_t row = 0; row < unit_.num_rows; row = range_.token_end(row)) {
      KeySpan span = range_.span(row, start);
      span = {maximum(span.begin, tile.begin), minimum(span.end, tile.end)};
      const C* values[kTile / kPiece];
      for (int64_t key = tile.first_key(); key < tile.end_key(); key += kPiece)
        values[key / kPiece] = find<C>(tile, head, key, span).values;
      multiply_values(values, tile.first_key(), tile.end_key(), row, range_.token_end(row), state, base, 0);
    }
  }

  // products[:, first_key .. ) = q x the keys of pieces beside each other, for the head whose first row is `base`.
  template <class E>
  void multiply_keys(int64_t base, Pieces<E> pieces, int64_t keys_per_row, int64_t first_key, int64_t ahead) {
    const int64_t dim = finder_.layout.dim;
    multiplier_.multiply_beside(q_ + base * dim, dim, unit_.num_rows, pieces, keys_per_row * kStep<E>,
                                products_ + first_key, kTile, ahead);
  }

  void add_probs(int64_t start, int64_t first, int64_t end, KeySpan common, const State& state, int64_t base) {
    const T* type = nullptr;
    const float* const key_scales = kIsByte<C> ? scales_->keys : nullptr;
    const float* const value_scales = kIsByte<C> ? scales_->values : nullptr;
    const bool is_all_visible = common.begin <= first && common.end >= end;
    // A few rows at a time, so that the latencies of one row are hidden behind the work on the others.
    for (int64_t row = 0; row < unit_.num_rows; row += kRowsTogether) {
      const int64_t count = minimum(kRowsTogether, unit_.num_rows - row);
      float maxima[kRowsTogether];
      for (int64_t i = 0; i < count; ++i) {
        const KeySpan span = is_all_visible ? common : range_.span(row + i, start);
        maxima[i] = raise_maximum(products_ + (row + i) * kTile, first, end, key_scales,
                                  is_all_visible ? nullptr : &span, scale_, state, base + row + i);
      }
      for (int64_t i = 0; i < count; ++i)
        store_row_probs(type, products_ + (row + i) * kTile, first, end, scale_, maxima[i], value_scales,
                        state.row(base + row + i) + state.dim, probs_ + (row + i) * kTile);
    }
  }

  // Adds probabilities x values of the pieces [first_key, end_key) to the rows [row, end_row).
  template <class E>
  void multiply_values(const E* const* values, int64_t first_key, int64_t end_key, int64_t row, int64_t end_row,
                       const State& state, int64_t base, int64_t ahead) {
    const int64_t dim = finder_.layout.dim;
    const Pieces<E> pieces = {values + first_key / kPiece, (end_key - first_key) / kPiece, kPiece};
    multiplier_.multiply(probs_ + row * kTile + first_key, kTile, end_row - row, pieces, dim * kStep<E>, dim,
                         state.row(base + row), state.stride(), true, ahead);
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
  return with_cache_type(args.kv_dtype, [&](auto* type) {
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
    with_cache_type(args.kv_dtype, [&](auto* type) {
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
