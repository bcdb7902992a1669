// Paged causal attention of one unit of query rows. Compiled once per instruction set.
//
// A score is one chain of multiply-adds over the head dimension in rising order, a value one chain over
// the keys of a tile. How many rows or keys a register tile takes never changes either chain, so a row's
// bits do not depend on the rows computed beside it. Keys that a row may not see are left out of its chains.
#include "kernels.h"
#include "parallel.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

constexpr int kTile = kTileKeys;
constexpr int kDimChunk = 32;  // dimensions of the transposed keys that are held at a time: 8 KiB
constexpr int kRowTile = 6;    // rows of a register tile
constexpr int kDirectRows = 4; // up to this many rows, values are widened on the fly instead of once per tile
constexpr float kInfinity = __builtin_inff();

constexpr int64_t kQFloats = kMaxRows * kMaxHeadDim, kStateFloats = kMaxRows * (kMaxHeadDim + 2);
constexpr int64_t kScratchFloats =
    kQFloats + 2 * kStateFloats + kMaxRows * kTile + kDimChunk * kTile + kTile * kMaxHeadDim;

alignas(64) const float kZeroRow[kMaxHeadDim] = {};

inline int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t maximum(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t padded_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

inline const float* zero_row(const float*) { return kZeroRow; }
inline const BFloat16* zero_row(const BFloat16*) { return reinterpret_cast<const BFloat16*>(kZeroRow); }
inline const Float16* zero_row(const Float16*) { return reinterpret_cast<const Float16*>(kZeroRow); }

// Softmax state of num_rows rows over some keys: sum of exp(score - max) * value, max, sum of exp(score - max).
struct State {
  float* values;  // [num_rows, dim], dim padded to whole vectors
  float* max;
  float* sum;

  State(float* memory, int64_t num_rows, int64_t dim)
      : values(memory), max(memory + num_rows * dim), sum(max + num_rows) {}

  void reset(int64_t num_rows, int64_t dim) {
    memset(values, 0, num_rows * dim * sizeof(float));
    for (int64_t r = 0; r < num_rows; ++r) max[r] = -kInfinity, sum[r] = 0.0f;
  }
};

// Which keys the rows of a unit see, as absolute positions.
struct RowRange {
  int64_t first_position, group, window, first_row;

  int64_t position(int64_t row) const { return first_position + (first_row + row) / group; }
  int64_t begin(int64_t row) const { return window ? maximum(0, position(row) - window + 1) : 0; }
  int64_t end(int64_t row) const { return position(row) + 1; }
};

inline RowRange row_range(const AttentionArgs& args, const AttentionUnit& unit) {
  const int64_t q_len = args.cu_seqlens_q[unit.seq + 1] - args.cu_seqlens_q[unit.seq];
  return {args.context_lens[unit.seq] - q_len, args.num_heads / args.num_kv_heads, args.sliding_window, unit.first_row};
}

// Element offset of a unit's row in a [T, H, D] tensor whose tokens are `stride` elements apart.
inline int64_t row_offset(const AttentionArgs& args, const AttentionUnit& unit, int64_t row, int64_t stride) {
  const int64_t group = args.num_heads / args.num_kv_heads, index = unit.first_row + row;
  const int64_t token = args.cu_seqlens_q[unit.seq] + index / group;
  return token * stride + (unit.kv_head * group + index % group) * args.head_dim;
}

template <class T>
void load_query(const T* source, int64_t head_dim, float scale, float* target) {
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store(target + d, load(source + d) * scale);
  if (d < head_dim) store_part(target + d, load_part(source + d, head_dim - d) * scale, head_dim - d);
}

template <class T>
void store_output(const float* values, float factor, int64_t head_dim, T* target) {
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store(target + d, load(values + d) * factor);
  if (d < head_dim) store_part(target + d, load(values + d) * factor, head_dim - d);
}

void load_queries(const AttentionArgs& args, const AttentionUnit& unit, float* q) {
  with_type(args.q_dtype, [&](const auto* type) {
    const auto source = static_cast<decltype(type)>(args.q);
    for (int64_t r = 0; r < unit.num_rows; ++r)
      load_query(source + row_offset(args, unit, r, args.q_stride), args.head_dim, args.softmax_scale,
                 q + r * args.head_dim);
  });
}

void store_outputs(const AttentionArgs& args, const AttentionUnit& unit, const State& state) {
  const int64_t stride = args.num_heads * args.head_dim, dim = padded_dim(args.head_dim);
  with_type(args.q_dtype, [&](auto* type) {
    const auto target = static_cast<decltype(type)>(args.out);
    for (int64_t r = 0; r < unit.num_rows; ++r)
      store_output(state.values + r * dim, 1.0f / state.sum[r], args.head_dim,
                   target + row_offset(args, unit, r, stride));
  });
}

// The keys [begin, end) of one tile; begin and end count from the tile's first key. May be empty.
template <class T>
struct Tile {
  const T* k[kTile];
  const T* v[kTile];
  int64_t begin, end;
};

// Looks up where the keys of a tile lie that are in [begin, end), absolute positions. The others become a row of
// zeros and are never read from the cache.
template <class T>
bool find_keys(const AttentionArgs& args, const AttentionUnit& unit, int64_t tile_start, int64_t begin, int64_t end,
               Tile<T>& tile) {
  const int64_t head_elements = args.block_size * args.head_dim;
  const int32_t* block_table = args.block_tables + unit.seq * args.block_table_stride;
  const T* cache = static_cast<const T*>(args.kv_cache);
  tile.begin = maximum(begin - tile_start, 0), tile.end = minimum(end - tile_start, kTile);
  for (int64_t i = 0; i < kTile; ++i) tile.k[i] = tile.v[i] = zero_row(static_cast<const T*>(nullptr));
  for (int64_t i = tile.begin; i < tile.end;) {
    const int64_t block_idx = (tile_start + i) / args.block_size, offset = (tile_start + i) % args.block_size;
    const int64_t block_id = block_table[block_idx];
    if (block_id < 0 || block_id >= args.num_blocks) return false;
    const T* k = cache + (block_id * 2 * args.num_kv_heads + unit.kv_head) * head_elements + offset * args.head_dim;
    const T* v = k + args.num_kv_heads * head_elements;
    const int64_t block_end = minimum(tile.end, i + args.block_size - offset);
    for (; i < block_end; ++i, k += args.head_dim, v += args.head_dim) tile.k[i] = k, tile.v[i] = v;
  }
  return true;
}

// Stores the values that a vector of 32-bit words from kLanes keys holds to rows of the transposed keys.
inline void store_words(const float*, Vec words, float* k_t) { store(k_t, words); }

inline void store_words(const BFloat16*, Vec words, float* k_t) {
  store(k_t, widen_bfloat16((WordVec)words));
  store(k_t + kTile, (Vec)((WordVec)words & 0xffff0000));
}

inline void store_words(const Float16*, Vec words, float* k_t) {
  store(k_t, widen_float16((WordVec)words & 0xffff));
  store(k_t + kTile, widen_float16((WordVec)words >> 16));
}

// k_t[d - first_dim][key] = k[key][d] for dims dimensions and the tile's visible keys, rounded out to vectors.
// The same part of the next tile is prefetched: rows a whole head apart are no stream that hardware recognises.
template <class T>
void transpose_keys(const Tile<T>& tile, const Tile<T>& next, int64_t first_dim, int64_t dims, float* k_t) {
  constexpr int kPerWord = sizeof(float) / sizeof(T);
  for (int64_t key = tile.begin / kLanes * kLanes; key < tile.end; key += kLanes) {
    for (int64_t d = 0; d < dims; d += kLanes * kPerWord) {
      const int64_t num_words = minimum(kLanes, (dims - d) / kPerWord);
      Vec words[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const T* source = tile.k[key + i] + first_dim + d;
        __builtin_prefetch(next.k[key + i] + first_dim + d);
        __builtin_prefetch(next.v[key + i] + first_dim + d);
        words[i] = zero();
        memcpy(&words[i], source, num_words == kLanes ? sizeof(Vec) : num_words * sizeof(float));
      }
      transpose(words);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        if (i < num_words) store_words(tile.k[0], words[i], k_t + (d + i * kPerWord) * kTile + key);
    }
  }
}

// Vectors beside each other in a register tile of R rows: the largest power of two that fits, at most `limit`.
constexpr int tile_vectors(int rows, int limit) {
  int vectors = 1;
  while (2 * vectors * rows <= kAccumulators && 2 * vectors <= limit) vectors *= 2;
  return vectors;
}

// scores[r][key] += q[r][d] * k_t[d][key], one chain over d for each score.
template <int R>
void add_scores(const float* q, int64_t q_stride, const float* k_t, int64_t dims, float* scores) {
  constexpr int N = tile_vectors(R, kTile / kLanes);
  for (int key = 0; key < kTile; key += N * kLanes) {
    Vec sums[R][N];
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) sums[r][n] = load(scores + r * kTile + key + n * kLanes);
    for (int64_t d = 0; d < dims; ++d) {
      Vec keys[N];
      for (int n = 0; n < N; ++n) keys[n] = load(k_t + d * kTile + key + n * kLanes);
      for (int r = 0; r < R; ++r) {
        const Vec query = set1(q[r * q_stride + d]);
        for (int n = 0; n < N; ++n) sums[r][n] = madd(query, keys[n], sums[r][n]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) store(scores + r * kTile + key + n * kLanes, sums[r][n]);
  }
}

// values[r][d] += probs[r][key] * v[key][d], one chain over the keys [begin, end) for each value.
template <int R, int N, class T>
void add_values(const float* probs, const T* const* v, int64_t begin, int64_t end, int64_t first_dim, int64_t dim,
                float* values) {
  int64_t d = first_dim;
  for (; d + N * kLanes <= dim; d += N * kLanes) {
    Vec sums[R][N];
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) sums[r][n] = load(values + r * dim + d + n * kLanes);
    for (int64_t key = begin; key < end; ++key) {
      Vec row[N];
      for (int n = 0; n < N; ++n) row[n] = load(v[key] + d + n * kLanes);
      for (int r = 0; r < R; ++r) {
        const Vec prob = set1(probs[r * kTile + key]);
        for (int n = 0; n < N; ++n) sums[r][n] = madd(prob, row[n], sums[r][n]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) store(values + r * dim + d + n * kLanes, sums[r][n]);
  }
  if constexpr (N > 1)
    if (d < dim) add_values<R, N / 2>(probs, v, begin, end, d, dim, values);
}

struct KeySpan {
  int64_t begin, end;  // keys of the tile that a row sees, counted from its first
};

// add_values for R rows whose spans may differ: the common keys together, the others row by row, in order.
template <int R, class T>
void add_values_of_spans(const float* probs, const T* const* v, const KeySpan* spans, int64_t dim, float* values) {
  int64_t begin = 0, end = kTile;
  for (int r = 0; r < R; ++r) begin = maximum(begin, spans[r].begin), end = minimum(end, spans[r].end);
  if (begin >= end) begin = end = kTile;
  const auto add_row = [&](int r, int64_t from, int64_t to) {
    constexpr int N = tile_vectors(1, 8);
    if (from < to) add_values<1, N>(probs + r * kTile, v, from, to, 0, dim, values + r * dim);
  };
  for (int r = 0; r < R; ++r) add_row(r, spans[r].begin, minimum(begin, spans[r].end));
  if (begin < end) add_values<R, tile_vectors(R, 8)>(probs, v, begin, end, 0, dim, values);
  for (int r = 0; r < R; ++r) add_row(r, maximum(end, spans[r].begin), spans[r].end);
}

// Calls f(row, constant R) for successive groups of rows, R <= kRowTile.
template <class F>
void for_row_tiles(int64_t num_rows, const F& f) {
  int64_t r = 0;
  for (; r + kRowTile <= num_rows; r += kRowTile) f(r, [] { return kRowTile; });
  switch (num_rows - r) {
    case 5: return f(r, [] { return 5; });
    case 4: return f(r, [] { return 4; });
    case 3: return f(r, [] { return 3; });
    case 2: return f(r, [] { return 2; });
    case 1: return f(r, [] { return 1; });
  }
}

// Turns one row's scores into exp(score - new max) and moves the row's state to the new maximum.
void softmax_row(float* scores, KeySpan span, float soft_cap, int64_t dim, float* values, float& max_so_far,
                 float& sum) {
  constexpr int N = kTile / kLanes;
  for (int64_t key = 0; key < span.begin; ++key) scores[key] = -kInfinity;
  for (int64_t key = span.end; key < kTile; ++key) scores[key] = -kInfinity;
  Vec s[N];
  for (int n = 0; n < N; ++n) s[n] = load(scores + n * kLanes);
  if (soft_cap != 0.0f)
    for (int n = 0; n < N; ++n) s[n] = s[n] == -kInfinity ? s[n] : tanh(s[n] / soft_cap) * soft_cap;
  Vec tile_max = s[0];
  for (int n = 1; n < N; ++n) tile_max = max(tile_max, s[n]);
  const float tile_top = hmax(tile_max), new_max = max_so_far > tile_top ? max_so_far : tile_top;
  Vec total = zero();
  for (int n = 0; n < N; ++n) {
    const Vec prob = exp(s[n] - new_max);
    store(scores + n * kLanes, prob);
    total = total + prob;
  }
  const float rescale = new_max == max_so_far ? 1.0f : exp(max_so_far - new_max);
  if (rescale != 1.0f)
    for (int64_t d = 0; d < dim; d += kLanes) store(values + d, load(values + d) * rescale);
  sum = sum * rescale + hsum(total);
  max_so_far = new_max;
}

// Adds a segment's state to the state of the segments before it. A row that saw no key has sum 0.
void merge_states(int64_t num_rows, int64_t dim, const State& segment, State& total) {
  for (int64_t r = 0; r < num_rows; ++r) {
    if (segment.sum[r] == 0.0f) continue;
    float *values = total.values + r * dim, *segment_values = segment.values + r * dim;
    if (total.sum[r] == 0.0f) {
      memcpy(values, segment_values, dim * sizeof(float));
      total.max[r] = segment.max[r], total.sum[r] = segment.sum[r];
      continue;
    }
    const float new_max = total.max[r] > segment.max[r] ? total.max[r] : segment.max[r];
    const float old_factor = exp(total.max[r] - new_max), new_factor = exp(segment.max[r] - new_max);
    for (int64_t d = 0; d < dim; d += kLanes)
      store(values + d, madd(load(segment_values + d), set1(new_factor), load(values + d) * old_factor));
    total.sum[r] = total.sum[r] * old_factor + segment.sum[r] * new_factor;
    total.max[r] = new_max;
  }
}

// Scratch memory of a unit, carved from one piece.
struct Workspace {
  float *q, *scores, *k_t, *v;
  float* states[2];

  Workspace() {
    float* memory = static_cast<float*>(thread_scratch(Scratch::kKernel, kScratchFloats * sizeof(float)));
    q = memory;
    scores = q + kQFloats;
    k_t = scores + kMaxRows * kTile;
    v = k_t + kDimChunk * kTile;
    states[0] = v + kTile * kMaxHeadDim;
    states[1] = states[0] + kStateFloats;
  }
};

template <class T>
void add_tile(const AttentionArgs& args, const AttentionUnit& unit, const Tile<T>& tile, const Tile<T>& next,
              const KeySpan* spans, const Workspace& work, State& state) {
  const int64_t head_dim = args.head_dim, dim = padded_dim(head_dim);
  memset(work.scores, 0, unit.num_rows * kTile * sizeof(float));
  for (int64_t first_dim = 0; first_dim < head_dim; first_dim += kDimChunk) {
    const int64_t dims = minimum(kDimChunk, head_dim - first_dim);
    transpose_keys(tile, next, first_dim, dims, work.k_t);
    for_row_tiles(unit.num_rows, [&](int64_t r, auto rows) {
      add_scores<rows()>(work.q + r * head_dim + first_dim, head_dim, work.k_t, dims, work.scores + r * kTile);
    });
  }
  for (int64_t r = 0; r < unit.num_rows; ++r)
    if (spans[r].begin < spans[r].end)
      softmax_row(work.scores + r * kTile, spans[r], args.logit_soft_cap, dim, state.values + r * dim, state.max[r],
                  state.sum[r]);
  const auto add_all = [&](const auto* const* v) {
    for_row_tiles(unit.num_rows, [&](int64_t r, auto rows) {
      add_values_of_spans<rows()>(work.scores + r * kTile, v, spans + r, dim, state.values + r * dim);
    });
  };
  if (head_dim == dim && (sizeof(T) == sizeof(float) || unit.num_rows <= kDirectRows)) return add_all(tile.v);
  const float* wide[kTile];
  for (int64_t key = 0; key < kTile; ++key) wide[key] = work.v + key * dim;
  for (int64_t key = tile.begin; key < tile.end; ++key) {
    memset(work.v + key * dim + head_dim, 0, (dim - head_dim) * sizeof(float));
    load_query(tile.v[key], head_dim, 1.0f, work.v + key * dim);
  }
  add_all(wide);
}

// Adds the unit's keys of one segment to `state`, tile by tile.
template <class T>
bool add_segment(const T*, const AttentionArgs& args, const AttentionUnit& unit, int64_t segment, const Workspace& work,
                 State& state) {
  const RowRange range = row_range(args, unit);
  const int64_t begin = maximum(range.begin(0), segment * kSegmentKeys);
  const int64_t end = minimum(range.end(unit.num_rows - 1), (segment + 1) * kSegmentKeys);
  Tile<T> tiles[2];
  int64_t start = begin / kTile * kTile;
  if (!find_keys(args, unit, start, begin, end, tiles[0])) return false;
  for (int current = 0; start < end; start += kTile, current = 1 - current) {
    if (!find_keys(args, unit, start + kTile, begin, end, tiles[1 - current])) return false;
    KeySpan spans[kMaxRows];
    for (int64_t r = 0; r < unit.num_rows; ++r)
      spans[r] = {maximum(range.begin(r) - start, 0), minimum(range.end(r) - start, kTile)};
    add_tile(args, unit, tiles[current], tiles[1 - current], spans, work, state);
  }
  return true;
}

bool attend_segment(const AttentionArgs& args, const AttentionUnit& unit, int64_t segment, const Workspace& work,
                    State& state) {
  state.reset(unit.num_rows, padded_dim(args.head_dim));
  return with_type(args.kv_dtype, [&](auto* type) {
    return add_segment(type, args, unit, segment, work, state);
  });
}

bool attend(const AttentionArgs& args, const AttentionUnit& unit, float* partial) {
  const int64_t dim = padded_dim(args.head_dim);
  const Workspace work;
  load_queries(args, unit, work.q);
  if (unit.segment >= 0) {
    State state(partial, unit.num_rows, dim);
    return attend_segment(args, unit, unit.segment, work, state);
  }
  const RowRange range = row_range(args, unit);
  const int64_t first = range.begin(0) / kSegmentKeys, last = (range.end(unit.num_rows - 1) - 1) / kSegmentKeys;
  State total(work.states[0], unit.num_rows, dim), next(work.states[1], unit.num_rows, dim);
  if (!attend_segment(args, unit, first, work, total)) return false;
  for (int64_t segment = first + 1; segment <= last; ++segment) {
    if (!attend_segment(args, unit, segment, work, next)) return false;
    merge_states(unit.num_rows, dim, next, total);
  }
  store_outputs(args, unit, total);
  return true;
}

void merge(const AttentionArgs& args, const AttentionUnit& unit, float* partials, int64_t stride,
           int64_t num_segments) {
  const int64_t dim = padded_dim(args.head_dim);
  State total(partials, unit.num_rows, dim);
  for (int64_t i = 1; i < num_segments; ++i) {
    const State segment(partials + i * stride, unit.num_rows, dim);
    merge_states(unit.num_rows, dim, segment, total);
  }
  store_outputs(args, unit, total);
}

}  // namespace

extern const AttentionKernels kAttention;
const AttentionKernels kAttention = {attend, merge};

}  // namespace PW_ISA
}  // namespace pagewick
