// Brings keys that lie one after the other, as latents and index keys do, into the form of right-hand sides of products.
// Part of mla_kernel.cpp, index_kernel.cpp, compress_kernel.cpp and window_kernel.cpp.
#pragma once

#include "attention_softmax.h"
#include "kv_layout.h"
#include "panel.h"
#include "rows.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// Elements that a row of keys is padded to: whole vectors of words of every type.
constexpr int64_t kKeyUnit = 32;

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// The type in which the keys of a cache of type C are multiplied. fp16 has no dot-product instruction, so it becomes
// float.
template <class C>
struct WorkOf : WideOf<C> {};
template <>
struct WorkOf<Float16> {
  using type = float;
};

// target = source, with each number rounded as if it were stored as a Rounded.
template <class Rounded, class Source, class Target>
void copy_rounded(const Source* source, int64_t size, Target* target) {
  const Rounded* type = nullptr;
  for_vectors(0, size, [&](int64_t i, auto count) {
    store_count(target + i, round_to(type, load_count(source + i, count())), count());
  });
}

// Packs rows [kPiece][dim] as the right-hand side of queries x keys: keys [dim / step][kPiece][step].
template <class T>
void pack_keys(const T* rows, int64_t dim, T* keys) {
  constexpr int64_t step = kStep<T>;
  const int64_t words = dim / step;
  for (int64_t key = 0; key < kPiece; key += kLanes) {
    for (int64_t word = 0; word < words; word += kLanes) {
      Vec square[kLanes];
      for (int i = 0; i < kLanes; ++i) memcpy(&square[i], rows + (key + i) * dim + word * step, sizeof(Vec));
      transpose(square);
      for (int i = 0; i < kLanes; ++i)
        memcpy(keys + ((word + i) * kPiece + key) * step, &square[i], sizeof(Vec));
    }
  }
}

// Packs the first `size` elements of rows [kPiece][dim] as the right-hand side of probabilities x values:
// values [kPiece / step][size][step].
inline void pack_values(const float* rows, int64_t dim, int64_t size, float* values) {
  for (int64_t key = 0; key < kPiece; ++key) memcpy(values + key * size, rows + key * dim, size * sizeof(float));
}

inline void pack_values(const BFloat16* rows, int64_t dim, int64_t size, BFloat16* values) {
  for (int64_t key = 0; key < kPiece; key += 2) {
    const BFloat16 *const even = rows + key * dim, *const odd = even + dim;
    for (int64_t d = 0; d < size; d += kLanes) {
      const WordVec words = load_halves(even + d) | load_halves(odd + d) << 16;
      memcpy(values + key * size + 2 * d, &words, sizeof(words));
    }
  }
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
