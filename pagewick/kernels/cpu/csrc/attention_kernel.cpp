// Paged causal attention of one unit of query rows. Compiled once per instruction set.
#include "attention.h"
#include "attention_tile.h"
#include "parallel.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

alignas(64) const uint8_t kZeroRow[kMaxHeadDim * sizeof(float)] = {};

// Softmax state of num_rows rows: sum of exp(score - max) * value, maximum, sum of exp(score - max).
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

// Scratch memory of a unit, carved from one piece.
struct Workspace {
  static constexpr int64_t kRowFloats = kMaxRows * kMaxHeadDim, kStateFloats = kMaxRows * (kMaxHeadDim + 2);
  static constexpr int64_t kTileFloats = kMaxRows * kTile + kDimChunk * kTile + kTile * kMaxHeadDim;

  float *q, *scores, *k_t, *v;
  float* states[2];

  Workspace() {
    const size_t num_bytes = (kRowFloats + kTileFloats + 2 * kStateFloats) * sizeof(float);
    q = static_cast<float*>(thread_scratch(Scratch::kKernel, num_bytes));
    scores = q + kRowFloats;
    k_t = scores + kMaxRows * kTile;
    v = k_t + kDimChunk * kTile;
    states[0] = v + kTile * kMaxHeadDim;
    states[1] = states[0] + kStateFloats;
  }
};

// Which keys the rows of a unit see, as absolute positions [begin, end).
struct RowRange {
  int64_t first_position, group, window, first_row;

  int64_t position(int64_t row) const { return first_position + (first_row + row) / group; }
  int64_t begin(int64_t row) const { return window ? maximum(0, position(row) - window + 1) : 0; }
  int64_t end(int64_t row) const { return position(row) + 1; }
};

RowRange row_range(const AttentionArgs& args, const AttentionUnit& unit) {
  const int64_t q_len = args.cu_seqlens_q[unit.seq + 1] - args.cu_seqlens_q[unit.seq];
  const int64_t first_position = args.context_lens[unit.seq] - q_len;
  return {first_position, args.num_heads / args.num_kv_heads, args.sliding_window, unit.first_row};
}

// Element offset of a unit's row in a [T, H, D] tensor whose tokens are `stride` elements apart.
int64_t row_offset(const AttentionArgs& args, const AttentionUnit& unit, int64_t row, int64_t stride) {
  const int64_t group = args.num_heads / args.num_kv_heads, index = unit.first_row + row;
  const int64_t token = args.cu_seqlens_q[unit.seq] + index / group;
  return token * stride + (unit.kv_head * group + index % group) * args.head_dim;
}

// target = source * factor, in float32.
template <class T>
void widen_row(const T* source, int64_t head_dim, float factor, float* target) {
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store(target + d, load(source + d) * factor);
  if (d < head_dim) store_part(target + d, load_part(source + d, head_dim - d) * factor, head_dim - d);
}

// target = source * factor, rounded to T.
template <class T>
void narrow_row(const float* source, int64_t head_dim, float factor, T* target) {
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store(target + d, load(source + d) * factor);
  if (d < head_dim) store_part(target + d, load_part(source + d, head_dim - d) * factor, head_dim - d);
}

void load_queries(const AttentionArgs& args, const AttentionUnit& unit, float* q) {
  with_type(args.q_dtype, [&](const auto* type) {
    const auto source = static_cast<decltype(type)>(args.q);
    for (int64_t r = 0; r < unit.num_rows; ++r) {
      const int64_t offset = row_offset(args, unit, r, args.q_stride);
      widen_row(source + offset, args.head_dim, args.softmax_scale, q + r * args.head_dim);
    }
  });
}

void store_outputs(const AttentionArgs& args, const AttentionUnit& unit, const State& state) {
  const int64_t stride = args.num_heads * args.head_dim, dim = padded_dim(args.head_dim);
  with_type(args.q_dtype, [&](auto* type) {
    const auto target = static_cast<decltype(type)>(args.out);
    for (int64_t r = 0; r < unit.num_rows; ++r) {
      const int64_t offset = row_offset(args, unit, r, stride);
      narrow_row(state.values + r * dim, args.head_dim, 1.0f / state.sum[r], target + offset);
    }
  });
}

// Looks up where the keys of a tile lie that are in [begin, end), absolute positions. The others become rows of
// zeros and are never read from the cache. False if a block id is outside the cache.
template <class T>
bool find_keys(const AttentionArgs& args, const AttentionUnit& unit, int64_t tile_start, int64_t begin, int64_t end,
               Tile<T>& tile) {
  const int64_t block_size = args.block_size, head_dim = args.head_dim, head_elements = block_size * head_dim;
  const int32_t* block_table = args.block_tables + unit.seq * args.block_table_stride;
  const T* cache = static_cast<const T*>(args.kv_cache);
  tile.begin = maximum(begin - tile_start, 0), tile.end = minimum(end - tile_start, kTile);
  for (int64_t i = 0; i < kTile; ++i) tile.k[i] = tile.v[i] = reinterpret_cast<const T*>(kZeroRow);
  for (int64_t i = tile.begin; i < tile.end;) {
    const int64_t block_id = block_table[(tile_start + i) / block_size], offset = (tile_start + i) % block_size;
    if (block_id < 0 || block_id >= args.num_blocks) return false;
    const T* k = cache + (block_id * 2 * args.num_kv_heads + unit.kv_head) * head_elements + offset * head_dim;
    const T* v = k + args.num_kv_heads * head_elements;
    const int64_t block_end = minimum(tile.end, i + block_size - offset);
    for (; i < block_end; ++i, k += head_dim, v += head_dim) tile.k[i] = k, tile.v[i] = v;
  }
  return true;
}

template <class T>
void compute_probs(const AttentionArgs& args, const AttentionUnit& unit, const Tile<T>& tile, const Tile<T>& next,
                   const KeySpan* spans, const Workspace& work, State& state) {
  const int64_t head_dim = args.head_dim, dim = padded_dim(head_dim);
  memset(work.scores, 0, unit.num_rows * kTile * sizeof(float));
  for (int64_t first_dim = 0; first_dim < head_dim; first_dim += kDimChunk) {
    const int64_t dims = minimum(kDimChunk, head_dim - first_dim);
    transpose_keys(tile, next, head_dim, first_dim, dims, work.k_t);
    for_row_tiles(unit.num_rows, [&](int64_t row, auto rows) {
      const float* q = work.q + row * head_dim + first_dim;
      add_scores<rows()>(q, head_dim, work.k_t, dims, work.scores + row * kTile);
    });
  }
  for (int64_t r = 0; r < unit.num_rows; ++r)
    if (spans[r].begin < spans[r].end)
      softmax_row(work.scores + r * kTile, spans[r], args.logit_soft_cap, dim, state.values + r * dim,
                  state.max[r], state.sum[r]);
}

template <class T>
void add_tile(const AttentionArgs& args, const AttentionUnit& unit, const Tile<T>& tile, const Tile<T>& next,
              const KeySpan* spans, const Workspace& work, State& state) {
  const int64_t head_dim = args.head_dim, dim = padded_dim(head_dim);
  compute_probs(args, unit, tile, next, spans, work, state);
  const auto add_all = [&](const auto* const* v, const auto* const* next_v) {
    for_row_tiles(unit.num_rows, [&](int64_t row, auto rows) {
      add_values_of_spans<rows()>(work.scores + row * kTile, v, row == 0 ? next_v : nullptr, spans + row, dim,
                                  state.values + row * dim);
    });
  };
  // Rows that fill several register tiles share one widened copy of the values.
  const bool is_direct = sizeof(T) == sizeof(float) || unit.num_rows <= kRowTile;
  if (head_dim == dim && is_direct) return add_all(tile.v, next.v);
  const float* wide[kTile];
  for (int64_t key = 0; key < kTile; ++key) wide[key] = work.v + key * dim;
  for (int64_t key = tile.begin; key < tile.end; ++key) {
    prefetch_rows(next.v, key, key + 1, head_dim);
    widen_row(tile.v[key], head_dim, 1.0f, work.v + key * dim);
    memset(work.v + key * dim + head_dim, 0, (dim - head_dim) * sizeof(float));
  }
  add_all(wide, static_cast<const float* const*>(nullptr));
}

// Adds the unit's keys of one segment to `state`, tile by tile.
template <class T>
bool add_segment(const T*, const AttentionArgs& args, const AttentionUnit& unit, int64_t segment,
                 const Workspace& work, State& state) {
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
  return with_type(args.kv_dtype,
                   [&](auto* type) { return add_segment(type, args, unit, segment, work, state); });
}

// Adds a segment's state to the state of the segments before it. A row that has seen no key yet has sum 0.
void merge_states(int64_t num_rows, int64_t dim, const State& segment, State& total) {
  for (int64_t r = 0; r < num_rows; ++r) {
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
  for (int64_t i = 1; i < num_segments; ++i)
    merge_states(unit.num_rows, dim, State(partials + i * stride, unit.num_rows, dim), total);
  store_outputs(args, unit, total);
}

}  // namespace

extern const AttentionKernels kAttention;
const AttentionKernels kAttention = {attend, merge};

}  // namespace PW_ISA
}  // namespace pagewick
