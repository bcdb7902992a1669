#include <cmath>

#include "elementwise.h"
#include "testing.h"

using namespace testing;

namespace {

using pagewick::Elementwise;

constexpr float kFactor = 0.37f;

struct Case {
  Elementwise kind;
  DType dtype;
  int64_t num_rows, size;
  int64_t repeat = 1;  // rows of x that share a row of the other operand
};

bool takes_two(Elementwise kind) {
  return kind != Elementwise::kScale && kind != Elementwise::kSoftCap && kind != Elementwise::kLimit;
}

double defined(const Case& c, double x, double other) {
  const double factor = static_cast<double>(kFactor);
  switch (c.kind) {
    case Elementwise::kAdd: return x + other;
    case Elementwise::kScale: return x * factor;
    case Elementwise::kSoftCap: return factor * std::tanh(x / factor);
    case Elementwise::kSigmoidGate: return x / (1.0 + std::exp(-other));
    case Elementwise::kMultiply: return x * other;
    case Elementwise::kLimit: return x > factor ? factor : x < -factor ? -factor : x;
  }
  return std::nan("");
}

void test_case(const Case& c) {
  begin_case("elementwise %d %s [%d, %d]", static_cast<int>(c.kind), name_of(c.dtype), static_cast<int>(c.num_rows),
             static_cast<int>(c.size));
  const int64_t stride = c.size + 3, other_stride = c.size + 1;
  const double telling[] = {0.0, -0.0, 1e-30, -1e-7, 0.184, 0.186, -9.0, 4e4, HUGE_VAL, -HUGE_VAL, std::nan(""), 0.5};
  Tensor x(c.dtype, (c.num_rows - 1) * stride + c.size);
  for (int64_t i = 0; i < x.size(); ++i) x.set(i, i % 2 ? telling[i / 2 % 12] : random_number() * 2);
  const Tensor other = Tensor::random(c.dtype, (c.num_rows / c.repeat - 1) * other_stride + c.size, 4.0);
  const Tensor out = tensor_on_all_threads([&] {
    Tensor computed(c.dtype, c.num_rows * c.size);
    run("elementwise",
        pagewick::ElementwiseArgs{x.data(), takes_two(c.kind) ? other.data() : nullptr, computed.data(), c.num_rows,
                                  c.size, stride, takes_two(c.kind) ? other_stride : 0, c.repeat, kFactor, c.dtype,
                                  c.kind});
    return computed;
  });
  for (int64_t i = 0; i < out.size(); ++i) {
    const int64_t row = i / c.size, col = i % c.size;
    // The factor is rounded to float32 first. The kernel promises a relative error of 2^-20 for soft caps and gates.
    const double second = other[row / c.repeat * other_stride + col];
    const double value = rounded(DType::kFloat32, defined(c, x[row * stride + col], second));
    const bool is_exact = c.kind != Elementwise::kSoftCap && c.kind != Elementwise::kSigmoidGate;
    const double error = is_exact || !std::isfinite(value) ? 0.0 : 0x1p-20 * std::abs(value);
    require_near(out, i, value, error, "output");
  }
}

void test_gathering(DType dtype, int64_t num_rows, int64_t num_columns, int64_t size) {
  begin_case("gather_columns %s [%d, %d]", name_of(dtype), static_cast<int>(num_rows), static_cast<int>(size));
  const int64_t stride = num_columns + 3;
  const Tensor x = Tensor::random(dtype, (num_rows - 1) * stride + num_columns);
  Array<int64_t> columns(size);
  for (int64_t i = 0; i < size; ++i) columns[i] = testing::random_below(num_columns);
  const auto gather = [&](const Array<int64_t>& wanted, Tensor& out) {
    return status_of("gather_columns", pagewick::GatherColumnsArgs{x.data(), wanted.data(), out.data(), num_rows,
                                                                   num_columns, wanted.size(), stride, dtype});
  };
  const Tensor out = tensor_on_all_threads([&] {
    Tensor computed(dtype, num_rows * size);
    require(gather(columns, computed) == pagewick::kOk, "status");
    return computed;
  });
  for (int64_t i = 0; i < out.size(); ++i)
    require(out.bits(i) == x.bits(i / size * stride + columns[i % size]), "a gathered column");
  Tensor three(dtype, num_rows * 3);
  for (const int64_t bad : {int64_t{-1}, num_columns, int64_t{1} << 40})
    require(gather({0, bad, 0}, three) == pagewick::kBadRow, "a column that is not there");
}

}  // namespace

void test_elementwise() {
  for (const DType dtype : kDTypes) {
    test_gathering(dtype, 3, 5, 11);
    test_gathering(dtype, 2, 700, 40000);
  }
  for (const DType dtype : kDTypes)
    for (const Elementwise kind : {Elementwise::kAdd, Elementwise::kScale, Elementwise::kSoftCap,
                                   Elementwise::kSigmoidGate, Elementwise::kMultiply, Elementwise::kLimit}) {
      for (const int64_t size : {1, 5, 16, 61}) test_case({kind, dtype, 3, size});
      test_case({kind, dtype, 40, 1001});
    }
  for (const int64_t repeat : {2, 3, 6}) test_case({Elementwise::kMultiply, DType::kBFloat16, 6, 61, repeat});
  test_case({Elementwise::kSoftCap, DType::kFloat32, 2, 32779});
  test_case({Elementwise::kAdd, DType::kBFloat16, 2, 32779});
}
