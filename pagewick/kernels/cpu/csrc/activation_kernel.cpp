// Activation functions in fp32, rounded once. Compiled once per instruction set.
#include "activation.h"
#include "rows.h"
#include "vec_math.h"

namespace pagewick {
namespace PW_ISA {
namespace {

Vec relu(Vec x) { return max(zero(), x); }
Vec relu2(Vec x) { return relu(x) * relu(x); }
Vec quick_gelu(Vec x) { return times_sigmoid(x, x * 1.702f); }

// x times the probability that a normally distributed number is below x.
Vec gelu(Vec x) {
  const Vec tail = 0.5f * erfc((x < 0.0f ? -x : x) * 0x1.6a09e6p-1f);
  return x * (x > 0.0f ? 1.0f - tail : tail);
}

// 0.5 (1 + tanh u), computed without cancellation as the sigmoid of 2 u; u = sqrt(2 / pi) (x + 0.044715 x^3).
Vec gelu_tanh(Vec x) {
  const Vec cube = x * x * x;
  return times_sigmoid(x, madd(cube, set1(0.044715f), x) * 0x1.988454p0f);
}

Vec at_most(float bound, Vec x) { return min(set1(bound), x); }

// The bound of what an activation multiplies by if it is the gate of `up`, on both sides; 0: there is none.
float factor_bound(Activation kind) {
  switch (kind) {
    case Activation::kSiluWithin4: return 4.0f;
    case Activation::kSiluWithin5: return 5.0f;
    case Activation::kClampedSwish:
    case Activation::kSiluWithin7: return 7.0f;
    case Activation::kClampedSilu10: return 10.0f;
    case Activation::kSiluWithin16: return 16.0f;
    default: return 0.0f;
  }
}

template <class T, class F>
void apply(const ActivationArgs& args, int64_t row, int64_t first_col, int64_t end_col, const F& function) {
  const float bound = factor_bound(args.kind), offset = args.kind == Activation::kClampedSwish ? 1.0f : 0.0f;
  const T* const x = static_cast<const T*>(args.x) + row * args.x_stride;
  const T* const up = args.is_gated ? x + args.size : nullptr;
  T* const out = static_cast<T*>(args.out) + row * args.size;
  for_vectors(first_col, end_col, [&](int64_t i, auto count) {
    Vec value = function(load_count(x + i, count()));
    if (up != nullptr) {
      const Vec factor = load_count(up + i, count());
      value = value * (bound > 0.0f ? at_most(bound, max(set1(-bound), factor)) + offset : factor);
    }
    store_count(out + i, value, count());
  });
}

template <class F>
void apply(const ActivationArgs& args, int64_t row, int64_t first_col, int64_t end_col, const F& function) {
  with_type(args.dtype, [&](auto* type) { apply<Element<decltype(type)>>(args, row, first_col, end_col, function); });
}

void activation(const ActivationArgs& args, int64_t row, int64_t first_col, int64_t end_col) {
  // A lambda for each kind, so that the compiler inlines the function into each loop.
  switch (args.kind) {
    case Activation::kSilu: return apply(args, row, first_col, end_col, [](Vec x) { return silu(x); });
    case Activation::kGelu: return apply(args, row, first_col, end_col, [](Vec x) { return gelu(x); });
    case Activation::kGeluTanh: return apply(args, row, first_col, end_col, [](Vec x) { return gelu_tanh(x); });
    case Activation::kRelu: return apply(args, row, first_col, end_col, [](Vec x) { return relu(x); });
    case Activation::kQuickGelu: return apply(args, row, first_col, end_col, [](Vec x) { return quick_gelu(x); });
    case Activation::kRelu2: return apply(args, row, first_col, end_col, [](Vec x) { return relu2(x); });
    case Activation::kClampedSwish:
      return apply(args, row, first_col, end_col, [](Vec x) { return quick_gelu(at_most(7.0f, x)); });
    case Activation::kClampedSilu10:
      return apply(args, row, first_col, end_col, [](Vec x) { return silu(at_most(10.0f, x)); });
    case Activation::kSoftplus: return apply(args, row, first_col, end_col, [](Vec x) { return softplus(x); });
    case Activation::kSiluWithin4:
      return apply(args, row, first_col, end_col, [](Vec x) { return at_most(4.0f, silu(x)); });
    case Activation::kSiluWithin5:
      return apply(args, row, first_col, end_col, [](Vec x) { return at_most(5.0f, silu(x)); });
    case Activation::kSiluWithin7:
      return apply(args, row, first_col, end_col, [](Vec x) { return at_most(7.0f, silu(x)); });
    case Activation::kSiluWithin16:
      return apply(args, row, first_col, end_col, [](Vec x) { return at_most(16.0f, silu(x)); });
  }
}

template <class T>
void top_rows(const GaussianTopKArgs& args, int64_t first_row, int64_t end_row) {
  const int64_t size = args.size;
  for (int64_t row = first_row; row < end_row; ++row) {
    const T* const x = static_cast<const T*>(args.x) + row * args.x_stride;
    T* const out = static_cast<T*>(args.out) + row * size;
    const float mean = mean_of(x, size), squares = sum_of_squares_about(x, size, mean);
    const float cutoff = mean + args.factor * __builtin_sqrtf(squares / static_cast<float>(size));
    for_vectors(0, size, [&](int64_t i, auto count) {
      store_count(out + i, relu(load_count(x + i, count()) - cutoff), count());
    });
  }
}

void gaussian_top_k(const GaussianTopKArgs& args, int64_t first_row, int64_t end_row) {
  with_type(args.dtype, [&](auto* type) { top_rows<Element<decltype(type)>>(args, first_row, end_row); });
}

}  // namespace

extern const ActivationKernels kActivation;
const ActivationKernels kActivation = {activation, gaussian_top_k};

}  // namespace PW_ISA
}  // namespace pagewick
