// Products with a matrix that is stored in the order in which it is read: a packed weight, a block of keys or of
// values.
//
// A right-hand matrix B [K, N] of type T is stored [K / kStep][N][kStep]: kStep consecutive rows of K are interleaved,
// so that a vector of B has the form that a dot-product instruction takes. Steps lie b_stride elements apart.
//
// An output is one chain of multiply-adds in fp32 over rising k. The number of rows or columns that are computed beside
// it never changes the chain, and the sum may be stored and continued later at any multiple of kDepthUnit. The bits of
// an output therefore depend only on its row of A, its column of B and the instruction set.
#pragma once

#include "vec_bytes.h"

namespace pagewick {
namespace PW_ISA {
namespace {

template <class T>
constexpr int kStep = 1;
template <>
constexpr int kStep<BFloat16> = 2;
template <>
constexpr int kStep<Int8> = 2;
template <>
constexpr int kStep<Fp8E4m3> = 2;
template <>
constexpr int kStep<Fp8E5m2> = 2;
template <>
constexpr int kStep<Int4> = 2;

// The elements that kStep rows of a column take.
template <class T>
constexpr int kStepElements = kStep<T> / kNumbersOf<T>;

// The type of the rows of A for a B of type T: bf16 where there is a dot-product instruction for it, else float. Bytes
// of B become numbers of this type in registers.
template <class T>
struct LeftOf {
  using type = float;
};
#if defined(PW_HAS_BF16_DOT)
template <>
struct LeftOf<BFloat16> {
  using type = BFloat16;
};
template <>
struct LeftOf<Int8> : LeftOf<BFloat16> {};
template <>
struct LeftOf<Fp8E4m3> : LeftOf<BFloat16> {};
template <>
struct LeftOf<Fp8E5m2> : LeftOf<BFloat16> {};
template <>
struct LeftOf<Int4> : LeftOf<BFloat16> {};
#endif
template <class T>
using Left = typename LeftOf<T>::type;

// The type that bytes of a cache are widened to where many rows are multiplied with them. Other numbers stay as they are.
template <class C>
struct WideOf {
  using type = C;
};
template <>
struct WideOf<Int8> : LeftOf<Int8> {};
template <>
struct WideOf<Fp8E4m3> : LeftOf<Fp8E4m3> {};
template <>
struct WideOf<Fp8E5m2> : LeftOf<Fp8E5m2> {};
template <>
struct WideOf<Int4> : LeftOf<Int4> {};
template <class C>
using Wide = typename WideOf<C>::type;

// Prefetches memory while B is read: the processor's own prefetchers keep too few requests in flight, and none while B
// is read again for further rows. Prefetches the memory that lies `distance` bytes after the current step (0: none),
// and the memory from `next` to `end`, `lines` cache lines with each step.
struct ReadAhead {
  int64_t distance = 0;
  const char* next = nullptr;
  const char* end = nullptr;
  int lines = 0;

  // To be called for a step that reads num_bytes at `memory`.
  void step(const void* memory, int64_t num_bytes) {
    if (distance != 0)
      for (int64_t byte = 0; byte < num_bytes; byte += 64)
        __builtin_prefetch(static_cast<const char*>(memory) + distance + byte, 0, 3);
    if (next < end)
      for (int line = 0; line < lines; ++line, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

// The distance where B lies in one piece.
constexpr int64_t kAhead = 1024;

// A right-hand matrix in pieces of `depth` rows each, which lie below each other or beside each other.
template <class T>
struct Pieces {
  const T* const* starts;
  int64_t count;
  int64_t depth;
};

constexpr int kRowTile = 6;    // most rows of a register tile
constexpr int kPanelCols = 64; // columns of a panel of a packed weight
constexpr int kPieceCols = 32; // columns of each of several pieces that lie beside each other
constexpr int kTileCols = 128; // most columns of a register tile

// The number of vectors beside each other in a register tile of `rows` rows: the largest power of two that fits, up to
// `limit`.
constexpr int tile_vectors(int rows, int limit) {
  int vectors = 1;
  while (2 * vectors * rows <= kAccumulators && 2 * vectors <= limit) vectors *= 2;
  return vectors;
}

inline void load_pairs(const BFloat16* source, Vec& even, Vec& odd) {
  WordVec words;
  memcpy(&words, source, sizeof(words));
  even = (Vec)(words << 16), odd = (Vec)(words & 0xffff0000);
}

// sums[r][v] += a[r][0 .. kStep) * (the step's vector v of B).
template <int R, int V, class T>
inline void add_step(const float* a, int64_t a_stride, const T* b, Vec (&sums)[R][V]) {
  if constexpr (kStep<T> == 2) {
    for (int v = 0; v < V; ++v) {
      Vec even, odd;
      load_pairs(b + kStepElements<T> * v * kLanes, even, odd);
      for (int r = 0; r < R; ++r) {
        sums[r][v] = madd(set1(a[r * a_stride]), even, sums[r][v]);
        sums[r][v] = madd(set1(a[r * a_stride + 1]), odd, sums[r][v]);
      }
    }
  } else {
    Vec row[V];
    for (int v = 0; v < V; ++v) row[v] = load(b + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const Vec left = set1(a[r * a_stride]);
      for (int v = 0; v < V; ++v) sums[r][v] = madd(left, row[v], sums[r][v]);
    }
  }
}

#if defined(PW_HAS_BF16_DOT)
inline __m512i load_as_bfloat16(const BFloat16* source) { return _mm512_loadu_si512(source); }

template <int R, int V, class T>
inline void add_step(const BFloat16* a, int64_t a_stride, const T* b, Vec (&sums)[R][V]) {
  __m512i row[V];
  for (int v = 0; v < V; ++v) row[v] = load_as_bfloat16(b + kStepElements<T> * v * kLanes);
  for (int r = 0; r < R; ++r) {
    int32_t pair;
    memcpy(&pair, a + r * a_stride, sizeof(pair));
    const __m512i left = _mm512_set1_epi32(pair);
    for (int v = 0; v < V; ++v)
      sums[r][v] = (Vec)_mm512_dpbf16_ps((__m512)sums[r][v], (__m512bh)left, (__m512bh)row[v]);
  }
}
#endif

// c[r][0 .. V * kLanes) (+)= a[r][0 .. depth) * B. Without `accumulate`, sums start at 0. `offset` is the offset of the
// first column within a step of B.
template <int R, int V, class T>
void multiply_tile(const Left<T>* a, int64_t a_stride, Pieces<T> b, int64_t offset, int64_t b_stride, float* c,
                   int64_t c_stride, bool accumulate, ReadAhead& ahead) {
  Vec sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[r][v] = accumulate ? load(c + r * c_stride + v * kLanes) : zero();
  ReadAhead here = ahead;
  for (int64_t piece = 0; piece < b.count; ++piece, a += b.depth) {
    const T* row = b.starts[piece] + offset;
    for (int64_t k = 0; k < b.depth; k += kStep<T>, row += b_stride) {
      here.step(row, V * kLanes * kStepElements<T> * sizeof(T));
      add_step(a + k, a_stride, row, sums);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + r * c_stride + v * kLanes, sums[r][v]);
  ahead = here;
}

template <int R, int V, class T>
void multiply_columns(const Left<T>* a, int64_t a_stride, Pieces<T> b, int64_t first_col, int64_t b_stride,
                      int64_t cols, float* c, int64_t c_stride, bool accumulate, ReadAhead& ahead) {
  int64_t col = first_col;
  for (; col + V * kLanes <= cols; col += V * kLanes)
    multiply_tile<R, V>(a, a_stride, b, col * kStepElements<T>, b_stride, c + col, c_stride, accumulate,
                        ahead);
  if constexpr (V > 1)
    if (col < cols) multiply_columns<R, V / 2>(a, a_stride, b, col, b_stride, cols, c, c_stride, accumulate, ahead);
}

// As multiply_tile, for G pieces of V vectors beside each other, whose sums start at 0. With few rows, a single piece
// has too few independent sums to hide the latency of an addition.
template <int R, int V, int G, class T>
void multiply_pieces(const Left<T>* a, int64_t a_stride, Pieces<T> b, int64_t b_stride, float* c, int64_t c_stride,
                     const int64_t* ahead) {
  Vec sums[G][R][V] = {};
  ReadAhead read_ahead[G];
  const T* rows[G];
  for (int g = 0; g < G; ++g) rows[g] = b.starts[g], read_ahead[g].distance = ahead == nullptr ? 0 : ahead[g];
  for (int64_t k = 0; k < b.depth; k += kStep<T>)
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      read_ahead[g].step(rows[g], V * kLanes * kStepElements<T> * sizeof(T));
      add_step(a + k, a_stride, rows[g], sums[g]);
      rows[g] += b_stride;
    }
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g)
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) store(c + r * c_stride + (g * V + v) * kLanes, sums[g][r][v]);
}

template <int R, int V, int G, class T>
void multiply_all_pieces(const Left<T>* a, int64_t a_stride, Pieces<T> b, int64_t b_stride, float* c, int64_t c_stride,
                         const int64_t* ahead) {
  for (; b.count >= G; b.starts += G, b.count -= G, c += G * V * kLanes) {
    multiply_pieces<R, V, G>(a, a_stride, b, b_stride, c, c_stride, ahead);
    if (ahead != nullptr) ahead += G;
  }
  if constexpr (G > 1) multiply_all_pieces<R, V, G / 2>(a, a_stride, b, b_stride, c, c_stride, ahead);
}

template <int R>
struct Count {
  static constexpr int value = R;
};

// Calls f with a Count of `rows`, 1 to kRowTile.
template <class F>
void with_count(int64_t rows, const F& f) {
  switch (rows) {
    case 1: return f(Count<1>());
    case 2: return f(Count<2>());
    case 3: return f(Count<3>());
    case 4: return f(Count<4>());
    case 5: return f(Count<5>());
    case 6: return f(Count<6>());
  }
}

inline int64_t num_row_tiles(int64_t rows) { return (rows + kRowTile - 1) / kRowTile; }

// Calls f(count, first row, tile) for tiles of about equal height. A tile of a single row would have too few
// independent sums to hide the latency of an addition.
template <class F>
void for_row_tiles(int64_t rows, const F& f) {
  const int64_t num_tiles = num_row_tiles(rows);
  if (num_tiles == 0) return;
  const int64_t height = rows / num_tiles, num_higher = rows % num_tiles;
  for (int64_t tile = 0, row = 0; tile < num_tiles; ++tile) {
    const int64_t count = tile < num_higher ? height + 1 : height;
    with_count(count, [&](auto constant) { f(constant, row, tile); });
    row += count;
  }
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick

#if defined(PW_HAS_AMX)
#include "panel_amx.h"
#endif

namespace pagewick {
namespace PW_ISA {
namespace {

// A sum may be interrupted at multiples of this depth, for every instruction set.
constexpr int64_t kDepthUnit = 32;

// Multiplies on one thread: one object per piece of work, on the thread's stack.
class Multiplier {
 public:
  // c[r][n] (+)= sum over k < depth of a[r][k] * B[k][n], for r < rows and n < cols; without `accumulate`, c is
  // only written. Strides are in elements. cols: a multiple of 16. depth: a multiple of kStep and, where the sum is
  // continued afterwards, of kDepthUnit. ahead: prefetch the memory that lies this many bytes after B or, if B is read
  // several times, the memory that follows it; 0: none.
  template <class T>
  void multiply(const Left<T>* a, int64_t a_stride, int64_t rows, const T* b, int64_t b_stride, int64_t depth,
                int64_t cols, float* c, int64_t c_stride, bool accumulate, int64_t ahead = 0) {
    multiply(a, a_stride, rows, Pieces<T>{&b, 1, depth}, b_stride, cols, c, c_stride, accumulate, ahead);
  }

  // As above, for a B in pieces. Their depth is a multiple of kDepthUnit if there are several.
  template <class T>
  void multiply(const Left<T>* a, int64_t a_stride, int64_t rows, Pieces<T> b, int64_t b_stride, int64_t cols,
                float* c, int64_t c_stride, bool accumulate, int64_t ahead = 0) {
#if defined(PW_HAS_AMX)
    if constexpr (kIsSame<T, BFloat16>)
      return tiles_.multiply(a, a_stride, rows, b, b_stride, cols, c, c_stride, accumulate, ahead);
#endif
    const Shares<T> shares(b, b_stride, ahead, num_row_tiles(rows));
    for_row_tiles(rows, [&](auto count, int64_t row, int64_t tile) {
      constexpr int R = decltype(count)::value, V = tile_vectors(R, kTileCols / kLanes);
      ReadAhead part = shares.of(tile);
      multiply_columns<R, V>(a + row * a_stride, a_stride, b, 0, b_stride, cols, c + row * c_stride, c_stride,
                             accumulate, part);
    });
  }

  // Multiplies pieces of kPieceCols columns beside each other: c[r][i * kPieceCols + n] = sum over k of a[r][k] *
  // B_i[k][n]. ahead: for each piece, the bytes from it to the memory to prefetch; null: none.
  template <class T>
  void multiply_beside(const Left<T>* a, int64_t a_stride, int64_t rows, Pieces<T> b, int64_t b_stride, float* c,
                       int64_t c_stride, const int64_t* ahead) {
#if defined(PW_HAS_AMX)
    if constexpr (kIsSame<T, BFloat16>) {
      for (int64_t i = 0; i < b.count; ++i)
        tiles_.multiply(a, a_stride, rows, {b.starts + i, 1, b.depth}, b_stride, kPieceCols, c + i * kPieceCols,
                        c_stride, false, ahead == nullptr ? 0 : ahead[i]);
      return;
    }
#endif
    for_row_tiles(rows, [&](auto count, int64_t row, int64_t tile) {
      constexpr int R = decltype(count)::value, V = tile_vectors(R, kPieceCols / kLanes);
      if constexpr (V == kPieceCols / kLanes) {
        constexpr int G = tile_vectors(R * V, 8);
        multiply_all_pieces<R, V, G>(a + row * a_stride, a_stride, b, b_stride, c + row * c_stride, c_stride,
                                     tile == 0 ? ahead : nullptr);
      } else {
        for (int64_t i = 0; i < b.count; ++i) {
          ReadAhead part{tile == 0 && ahead != nullptr ? ahead[i] : 0};
          multiply_columns<R, V>(a + row * a_stride, a_stride, Pieces<T>{b.starts + i, 1, b.depth}, 0, b_stride,
                                 kPieceCols, c + row * c_stride + i * kPieceCols, c_stride, false, part);
        }
      }
    });
  }

 private:
#if defined(PW_HAS_AMX)
  TileProduct tiles_;
#endif

  // Divides prefetching among the tiles of rows, which read B one after the other: each prefetches an equal share of
  // the memory that follows B. A single tile prefetches what it will read next itself.
  template <class T>
  class Shares {
   public:
    Shares(Pieces<T> b, int64_t b_stride, int64_t ahead, int64_t num_tiles) {
      if (ahead == 0 || num_tiles <= 1 || b.count > 1) {
        distance_ = ahead;
        return;
      }
      const int64_t steps = b.depth / kStep<T>, lines = steps * b_stride * int64_t{sizeof(T)} / 64;
      next_ = reinterpret_cast<const char*>(b.starts[0]) + 64 * lines;
      lines_ = (lines + num_tiles - 1) / num_tiles;
      lines_per_step_ = static_cast<int>((lines_ + steps - 1) / steps);
    }

    ReadAhead of(int64_t tile) const {
      const char* const next = next_ + tile * lines_ * 64;
      return {tile == 0 ? distance_ : 0, next, next + lines_ * 64, lines_per_step_};
    }

   private:
    int64_t distance_ = 0, lines_ = 0;
    const char* next_ = nullptr;
    int lines_per_step_ = 0;
  };
};

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
