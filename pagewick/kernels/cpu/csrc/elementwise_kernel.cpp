// Sums, gates, products, soft caps and limits in fp32. Compiled once per instruction set.
#include "elementwise.h"
#include "rows.h"
#include "vec_math.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// tanh with a relative error below 2^-20.5, also near 0, where 1 - 2 / (e^2x + 1) would cancel: a soft cap must leave
// small logits as they are.
Vec precise_tanh(Vec x) {
  const Vec square = x * x;
  // (tanh(x) / x - 1) / x^2, a minimax fit for |x| <= 1 / 2.
  Vec p = set1(0x1.1abcb4p-6f);
  p = madd(p, square, set1(-0x1.b29c02p-5f));
  p = madd(p, square, set1(0x1.10ea8cp-3f));
  p = madd(p, square, set1(-0x1.5554dap-2f));
  const Vec magnitude = x < 0.0f ? -x : x;
  return magnitude < 0.5f ? x * madd(p, square, set1(1.0f)) : tanh(x);
}

// The offset of the row of other that belongs to a row of x.
int64_t other_row(const ElementwiseArgs& args, int64_t row) {
  return (args.other_repeat == 1 ? row : row / args.other_repeat) * args.other_stride;
}

template <class T>
struct Row {
  const T* x;
  const T* other;
  T* out;

  Row(const ElementwiseArgs& args, int64_t row)
      : x(static_cast<const T*>(args.x) + row * args.x_stride),
        other(args.other == nullptr ? nullptr : static_cast<const T*>(args.other) + other_row(args, row)),
        out(static_cast<T*>(args.out) + row * args.size) {}
};

template <class T>
void compute(const ElementwiseArgs& args, int64_t index, int64_t first_col, int64_t end_col) {
  const Row<T> row(args, index);
  const Vec factor = set1(args.factor);
  // out[i] = function(x[i], i). Each kind has its own loop.
  const auto each = [&](const auto& function) {
    for_vectors(first_col, end_col, [&](int64_t i, auto count) {
      store_count(row.out + i, function(load_count(row.x + i, count()), i, count), count());
    });
  };
  switch (args.kind) {
    case Elementwise::kAdd:
      return each([&](Vec x, int64_t i, auto count) { return x + load_count(row.other + i, count()); });
    case Elementwise::kScale:
      return each([&](Vec x, int64_t, auto) { return x * factor; });
    case Elementwise::kSoftCap:
      return each([&](Vec x, int64_t, auto) { return factor * precise_tanh(x / factor); });
    case Elementwise::kSigmoidGate:
      return each([&](Vec x, int64_t i, auto count) {
        return times_sigmoid(x, load_count(row.other + i, count()));
      });
    case Elementwise::kMultiply:
      return each([&](Vec x, int64_t i, auto count) { return x * load_count(row.other + i, count()); });
    case Elementwise::kLimit:
      return each([&](Vec x, int64_t, auto) {
        const Vec below = x > factor ? factor : x;
        return below < -factor ? -factor : below;
      });
  }
}

void elementwise(const ElementwiseArgs& args, int64_t row, int64_t first_col, int64_t end_col) {
  with_type(args.dtype, [&](auto* type) { compute<Element<decltype(type)>>(args, row, first_col, end_col); });
}

template <class T>
void compute_xielu(const XieluArgs& args, int64_t row, int64_t first_col, int64_t end_col) {
  const T* const x = static_cast<const T*>(args.x) + row * args.x_stride;
  T* const out = static_cast<T*>(args.out) + row * args.size;
  for_vectors(first_col, end_col, [&](int64_t i, auto count) {
    const Vec value = load_count(x + i, count()), below = min(value, set1(args.eps));
    const Vec curved = value > 0.0f ? value * value * args.positive : (expm1(below) - value) * args.negative;
    store_count(out + i, madd(value, set1(args.beta), curved), count());
  });
}

void xielu(const XieluArgs& args, int64_t row, int64_t first_col, int64_t end_col) {
  with_type(args.dtype, [&](auto* type) { compute_xielu<Element<decltype(type)>>(args, row, first_col, end_col); });
}

void widen_any(const WidenArgs& args, int64_t row, int64_t first_col, int64_t end_col) {
  with_type(args.dtype, [&](auto* type) {
    const auto* const x = static_cast<const Element<decltype(type)>*>(args.x) + row * args.x_stride;
    float* const out = args.out + row * args.size;
    for_vectors(first_col, end_col, [&](int64_t i, auto count) {
      store_count(out + i, load_count(x + i, count()), count());
    });
  });
}

}  // namespace

extern const ElementwiseKernels kElementwise;
const ElementwiseKernels kElementwise = {elementwise, xielu, widen_any};

}  // namespace PW_ISA
}  // namespace pagewick
