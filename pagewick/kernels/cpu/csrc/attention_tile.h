// One tile of keys: scores, softmax and weighted values of a few query rows. Part of attention_kernel.cpp.
//
// A score is one chain of multiply-adds over the head dimension in rising order, a value one chain over the
// keys of the tile. How many rows or keys a register tile takes never changes either chain, so a row's bits
// do not depend on the rows computed beside it. Keys that a row may not see are left out of its chains.
#pragma once

#include "attention.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

constexpr int kTile = kTileKeys;
constexpr int kDimChunk = 32;  // dimensions of transposed keys that are held at a time: 8 KiB
constexpr int kRowTile = 6;    // most rows of a register tile
constexpr float kInfinity = __builtin_inff();

inline int64_t padded_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

// The keys [begin, end) of one tile, counted from its first; may be empty. Rows outside point to zeros.
template <class T>
struct Tile {
  const T* k[kTile];
  const T* v[kTile];
  int64_t begin, end;
};

// The keys of a tile that one query row sees.
struct KeySpan {
  int64_t begin, end;
};

// Asks for the rows [begin, end) to be brought into the second-level cache: a head's rows lie in pieces of
// one block, too short for the hardware to recognise a stream. (A whole tile would not fit beside the others
// in the first level, which also has too few requests in flight: half the speed from memory.)
template <class T>
void prefetch_rows(const T* const* rows, int64_t begin, int64_t end, int64_t head_dim) {
  for (int64_t row = begin; row < end; ++row)
    for (int64_t d = 0; d < head_dim; d += 64 / sizeof(T)) __builtin_prefetch(rows[row] + d, 0, 2);
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

// k_t[d][i] = rows[i][d] for kLanes rows and num_words words of each; kWords is num_words if known, else 0.
template <int kWords, class T>
void transpose_words(const T* const* rows, int64_t first_dim, int64_t num_words, float* k_t) {
  Vec words[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    words[i] = zero();
    memcpy(&words[i], rows[i] + first_dim, kWords ? kWords * sizeof(float) : num_words * sizeof(float));
  }
  transpose(words);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if (kWords || i < num_words) store_words(rows[0], words[i], k_t + i * kTile * (sizeof(float) / sizeof(T)));
}

// k_t[d][key] = k[key][first_dim + d] for d < dims and the tile's keys, rounded out to whole vectors.
// Prefetches the corresponding share of the next tile's keys.
template <class T>
void transpose_keys(const Tile<T>& tile, const Tile<T>& next, int64_t head_dim, int64_t first_dim, int64_t dims,
                    float* k_t) {
  constexpr int kPerWord = sizeof(float) / sizeof(T), kDims = kLanes * kPerWord;
  for (int64_t key = tile.begin / kLanes * kLanes; key < tile.end; key += kLanes) {
    prefetch_rows(next.k, (kTile * first_dim + key * dims) / head_dim,
                  (kTile * first_dim + (key + kLanes) * dims) / head_dim, head_dim);
    int64_t d = 0;
    for (; d + kDims <= dims; d += kDims)
      transpose_words<kLanes>(tile.k + key, first_dim + d, kLanes, k_t + d * kTile + key);
    if (d < dims) transpose_words<0>(tile.k + key, first_dim + d, (dims - d) / kPerWord, k_t + d * kTile + key);
  }
}

// Vectors beside each other in a register tile of `rows` rows: the largest power of two that fits, up to `limit`.
constexpr int tile_vectors(int rows, int limit) {
  int vectors = 1;
  while (2 * vectors * rows <= kAccumulators && 2 * vectors <= limit) vectors *= 2;
  return vectors;
}

// scores[r][key] += q[r][d] * k_t[d][key] for all keys of the tile, d rising.
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

// values[r][d] += probs[r][key] * v[key][d], keys rising through [span.begin, span.end). Prefetches the rows
// `next_v` unless that is null.
template <int R, int N, class T>
void add_values(const float* probs, const T* const* v, const T* const* next_v, KeySpan span, int64_t first_dim,
                int64_t dim, float* values) {
  int64_t d = first_dim;
  for (; d + N * kLanes <= dim; d += N * kLanes) {
    Vec sums[R][N];
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) sums[r][n] = load(values + r * dim + d + n * kLanes);
    for (int64_t key = span.begin; key < span.end; ++key) {
      if (next_v != nullptr)
        for (int n = 0; n < N * kLanes; n += 64 / sizeof(T)) __builtin_prefetch(next_v[key] + d + n, 0, 2);
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
    if (d < dim) add_values<R, N / 2>(probs, v, next_v, span, d, dim, values);
}

// add_values for R rows whose spans may differ: the common keys together, the others row by row, in order.
template <int R, class T>
void add_values_of_spans(const float* probs, const T* const* v, const T* const* next_v, const KeySpan* spans,
                         int64_t dim, float* values) {
  KeySpan common = {0, kTile};
  for (int r = 0; r < R; ++r) {
    common.begin = maximum(common.begin, spans[r].begin);
    common.end = minimum(common.end, spans[r].end);
  }
  if (common.begin >= common.end) common = {kTile, kTile};
  const auto add_row = [&](int r, int64_t begin, int64_t end) {
    constexpr int N = tile_vectors(1, 8);
    const T* const* no_prefetch = nullptr;
    if (begin < end)
      add_values<1, N>(probs + r * kTile, v, no_prefetch, {begin, end}, 0, dim, values + r * dim);
  };
  for (int r = 0; r < R; ++r) add_row(r, spans[r].begin, minimum(common.begin, spans[r].end));
  if (common.begin < kTile) add_values<R, tile_vectors(R, 8)>(probs, v, next_v, common, 0, dim, values);
  for (int r = 0; r < R; ++r) add_row(r, maximum(common.end, spans[r].begin), spans[r].end);
}

// Calls f(row, r) for successive groups of rows, where r() is the constant number of rows, at most kRowTile.
template <class F>
void for_row_tiles(int64_t num_rows, const F& f) {
  int64_t row = 0;
  for (; row + kRowTile <= num_rows; row += kRowTile) f(row, [] { return kRowTile; });
  switch (num_rows - row) {
    case 5: return f(row, [] { return 5; });
    case 4: return f(row, [] { return 4; });
    case 3: return f(row, [] { return 3; });
    case 2: return f(row, [] { return 2; });
    case 1: return f(row, [] { return 1; });
  }
}

// Turns one row's scores into exp(score - new maximum), 0 outside the span, and moves the row's softmax state
// (weighted values, maximum, sum) to the new maximum.
void softmax_row(float* scores, KeySpan span, float soft_cap, int64_t dim, float* values, float& row_max,
                 float& row_sum) {
  constexpr int N = kTile / kLanes;
  for (int64_t key = 0; key < span.begin; ++key) scores[key] = -kInfinity;
  for (int64_t key = span.end; key < kTile; ++key) scores[key] = -kInfinity;
  Vec s[N];
  for (int n = 0; n < N; ++n) s[n] = load(scores + n * kLanes);
  if (soft_cap != 0.0f)
    for (int n = 0; n < N; ++n) s[n] = s[n] == -kInfinity ? s[n] : tanh(s[n] / soft_cap) * soft_cap;
  Vec tile_max = s[0];
  for (int n = 1; n < N; ++n) tile_max = max(tile_max, s[n]);
  const float highest = hmax(tile_max), new_max = row_max > highest ? row_max : highest;
  Vec tile_sum = zero();
  for (int n = 0; n < N; ++n) {
    const Vec prob = exp(s[n] - new_max);
    store(scores + n * kLanes, prob);
    tile_sum = tile_sum + prob;
  }
  const float rescale = new_max == row_max ? 1.0f : exp(row_max - new_max);
  if (rescale != 1.0f)
    for (int64_t d = 0; d < dim; d += kLanes) store(values + d, load(values + d) * rescale);
  row_sum = row_sum * rescale + hsum(tile_sum);
  row_max = new_max;
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
