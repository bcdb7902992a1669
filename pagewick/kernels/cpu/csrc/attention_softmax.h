// The running softmax of query rows over tiles of keys. Part of attention_kernel.cpp and mla_kernel.cpp.
//
// Scores are kept in base 2: exp(score) = 2^(factor * s), where s is the product or, with a soft cap, its hyperbolic
// tangent. The sums of a row depend on its own scores alone, tile after tile.
#pragma once

#include "attention.h"
#include "panel.h"
#include "vec_math.h"

namespace pagewick {
namespace PW_ISA {
namespace {

constexpr int kTile = kTileKeys;
constexpr int kPiece = kPieceCols;  // number of keys that are multiplied, and turned into probabilities, together
constexpr int kPieceVectors = kPiece / kLanes;
constexpr int kSumFloats = 16;  // beside the values of a row: the sum of its probabilities, by lanes
constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 0x1.715476p0f;

// The softmax state of num_rows rows: sums of probability * value and sums of probabilities, in units of 2^-maximum.
struct State {
  float* values;  // [num_rows, stride]: dim values, kSumFloats sums
  float* max;     // [num_rows], base 2
  int64_t num_rows, dim;

  State(float* memory, int64_t rows, int64_t padded)
      : values(memory), max(memory + rows * (padded + kSumFloats)), num_rows(rows), dim(padded) {}

  static int64_t num_floats(int64_t rows, int64_t padded) {
    return rows * (padded + kSumFloats) + (rows + kSumFloats - 1) / kSumFloats * kSumFloats;
  }
  int64_t stride() const { return dim + kSumFloats; }
  float* row(int64_t r) const { return values + r * stride(); }
  float sum(int64_t r) const { return hsum(load(row(r) + dim)); }

  void reset() const {
    memset(values, 0, num_rows * stride() * sizeof(float));
    for (int64_t r = 0; r < num_rows; ++r) max[r] = -kInfinity;
  }

  void rescale(int64_t r, float factor) const {
    float* const sums = row(r);
    for (int64_t i = 0; i < dim + kLanes; i += kLanes) store(sums + i, load(sums + i) * factor);
  }
};

// How products are turned into exponents of 2.
struct ScoreScale {
  float factor;   // positive
  float capping;  // multiplies a product before the hyperbolic tangent; 0: there is no cap

  explicit ScoreScale(const AttentionArgs& args)
      : factor((args.logit_soft_cap != 0.0f ? args.logit_soft_cap : args.softmax_scale) * kLog2E),
        capping(args.logit_soft_cap != 0.0f ? args.softmax_scale / args.logit_soft_cap : 0.0f) {}
};

// The keys of a tile that a row sees, counted from its first key. The span may be empty or reach beyond the tile.
struct KeySpan {
  int64_t begin, end;
};

// Sets the products with keys [first, end) that a row does not see to -infinity.
inline void hide_keys(KeySpan span, int64_t first, int64_t end, float* products) {
  const int64_t seen = minimum(maximum(span.begin, first), end), unseen = maximum(seen, minimum(span.end, end));
  for (int64_t key = first; key < seen; ++key) products[key] = -kInfinity;
  for (int64_t key = unseen; key < end; ++key) products[key] = -kInfinity;
}

// Stores the probabilities 2^exponents of a piece for the product with values of type T, rounded to bf16 where the
// values are bf16. Returns `sum` plus, by lanes, the stored probabilities. Values with scales: the probabilities are
// multiplied by them before they are rounded, and the sum is of the exact ones.
template <class T>
inline Vec store_probs(const T* type, const Vec (&exponents)[kPieceVectors], Vec sum, float* target) {
  for (int n = 0; n < kPieceVectors; ++n) {
    const Vec exact = exp2(exponents[n]), prob = kIsSame<T, BFloat16> ? round_to(type, exact) : exact;
    store(target + n * kLanes, prob);
    sum = sum + prob;
  }
  return sum;
}

#if defined(PW_HAS_BF16_DOT)
// Numbers below 2^-126 count as 0, as they do in the product itself.
inline Vec store_probs(const BFloat16*, const Vec (&exponents)[kPieceVectors], Vec sum, BFloat16* target) {
  for (int n = 0; n < kPieceVectors; n += 2)
    sum = store_and_add(target + n * kLanes, rough_exp2(exponents[n]), rough_exp2(exponents[n + 1]), sum);
  return sum;
}
#endif

template <class L>
inline Vec store_scaled_probs(const Vec (&exponents)[kPieceVectors], const float* value_scales, Vec sum, L* target) {
  for (int n = 0; n < kPieceVectors; ++n) {
    const Vec prob = exp2(exponents[n]);
    // The scale of a value that the row does not see may be anything.
    store_result(target + n * kLanes, prob == 0.0f ? prob : prob * load(value_scales + n * kLanes));
    sum = sum + prob;
  }
  return sum;
}

// Multiplies a row's products with the keys [first, end) of a tile (whole pieces) by the scales of the keys (null: there
// are none), applies the soft cap, hides the keys outside `span` (null: the row sees all of them), and rescales the
// row's state to the new maximum, which it returns.
inline float raise_maximum(float* products, int64_t first, int64_t end, const float* key_scales, const KeySpan* span,
                           ScoreScale scale, const State& state, int64_t r) {
  if (key_scales != nullptr)
    for (int64_t i = first; i < end; i += kLanes) store(products + i, load(products + i) * load(key_scales + i));
  if (scale.capping != 0.0f)
    for (int64_t i = first; i < end; i += kLanes) store(products + i, tanh(load(products + i) * scale.capping));
  if (span != nullptr) hide_keys(*span, first, end, products);
  Vec highest[2] = {set1(-kInfinity), set1(-kInfinity)};
  for (int64_t i = first; i < end; i += 2 * kLanes) {
    highest[0] = max(highest[0], load(products + i));
    highest[1] = max(highest[1], load(products + i + kLanes));
  }
  const float tile_max = hmax(max(highest[0], highest[1])) * scale.factor, old_max = state.max[r];
  const float new_max = old_max > tile_max ? old_max : tile_max;
  if (new_max != old_max) {
    if (old_max != -kInfinity) state.rescale(r, exp2(old_max - new_max));
    state.max[r] = new_max;
  }
  return new_max;
}

// Turns a row's products into probabilities, in units of 2^-maximum, and adds these to the row's sums. value_scales: of
// the tile's values; null: there are none.
template <class T>
inline void store_row_probs(const T* type, const float* products, int64_t first, int64_t end, ScoreScale scale,
                            float maximum, const float* value_scales, float* sums, Left<T>* probs) {
  // If the row has seen no key yet, -infinity - (-infinity) must not become NaN.
  const Vec base = set1(maximum == -kInfinity ? 0.0f : -maximum), factor = set1(scale.factor);
  Vec sum = zero();
  for (int64_t i = first; i < end; i += kPiece) {
    Vec exponents[kPieceVectors];
    for (int n = 0; n < kPieceVectors; ++n) exponents[n] = madd(load(products + i + n * kLanes), factor, base);
    sum = value_scales == nullptr ? store_probs(type, exponents, sum, probs + i)
                                  : store_scaled_probs(exponents, value_scales + i, sum, probs + i);
  }
  store(sums, load(sums) + sum);
}

// Adds the state of a row in a segment to its state in the segments before.
inline void merge_row(const State& segment, const State& total, int64_t r) {
  const float new_max = total.max[r] > segment.max[r] ? total.max[r] : segment.max[r];
  const float base = new_max == -kInfinity ? 0.0f : new_max;
  const float old_factor = exp2(total.max[r] - base), new_factor = exp2(segment.max[r] - base);
  float *const sums = total.row(r), *const added = segment.row(r);
  for (int64_t i = 0; i < total.dim + kLanes; i += kLanes)
    store(sums + i, madd(load(added + i), set1(new_factor), load(sums + i) * old_factor));
  total.max[r] = new_max;
}

inline void copy_row(const State& segment, const State& total, int64_t r) {
  memcpy(total.row(r), segment.row(r), total.stride() * sizeof(float));
  total.max[r] = segment.max[r];
}

// Returns the factor that turns a row's weighted sum of values into its result.
inline float normalizer(const State& state, int64_t r, const float* sink) {
  if (sink == nullptr) return 1.0f / state.sum(r);
  const float logit = *sink * kLog2E, new_max = state.max[r] > logit ? state.max[r] : logit;
  const float factor = exp2(state.max[r] - new_max);
  return factor / (state.sum(r) * factor + exp2(logit - new_max));
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
