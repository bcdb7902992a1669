#include <algorithm>
#include <cmath>

#include "activation.h"
#include "testing.h"

using namespace testing;

namespace {

using pagewick::Activation;

// kClampedSwish bounds the gate from above, and what it multiplies by from both sides.
double gate_of(Activation kind, double x) {
  if (kind == Activation::kClampedSilu10 && x > 10.0) return 10.0;
  return kind == Activation::kClampedSwish && x > 7.0 ? 7.0 : x;
}

// kSiluWithin4 and the like bound the result of the gate from above, and what it multiplies by from both sides.
double bound_of(Activation kind) {
  if (kind == Activation::kClampedSwish || kind == Activation::kSiluWithin7) return 7.0;
  if (kind == Activation::kSiluWithin4) return 4.0;
  if (kind == Activation::kSiluWithin5) return 5.0;
  if (kind == Activation::kClampedSilu10) return 10.0;
  return kind == Activation::kSiluWithin16 ? 16.0 : INFINITY;
}

double factor_of(Activation kind, double up) {
  if (std::isnan(up)) return up;
  const double bounded = std::fmin(std::fmax(up, -bound_of(kind)), bound_of(kind));
  return kind == Activation::kClampedSwish ? bounded + 1.0 : bounded;
}

// Returns the s of an activation x / (1 + e^-s).
double exponent(Activation kind, double x) {
  if (kind == Activation::kQuickGelu || kind == Activation::kClampedSwish) return 1.702 * x;
  return kind == Activation::kGeluTanh ? 2 * std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x) : x;
}

double defined(Activation kind, double x) {
  const double positive = std::isnan(x) ? x : std::fmax(x, 0.0);
  switch (kind) {
    case Activation::kRelu: return positive;
    case Activation::kRelu2: return positive * positive;
    case Activation::kGelu: return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
    case Activation::kSoftplus: return positive + std::log1p(std::exp(-std::abs(x)));
    case Activation::kSiluWithin4:
    case Activation::kSiluWithin5:
    case Activation::kSiluWithin7:
    case Activation::kSiluWithin16:
      return std::isnan(x) ? x : std::fmin(x / (1.0 + std::exp(-x)), bound_of(kind));
    default: return x / (1.0 + std::exp(-exponent(kind, x)));
  }
}

// The kernels promise a relative error of 2^-22 for e^s, and 0 below e^-88; an error of one unit in the last place of s
// is one of s units in e^s. For the tail of gelu they promise an error of 3e-7.
double promised_error(Activation kind, double x, double value) {
  if (kind == Activation::kRelu || kind == Activation::kRelu2) return kFloatUnit * std::abs(value);
  if (kind == Activation::kGelu) return 3e-7 * std::abs(x) + 1e-36;
  if (kind == Activation::kSoftplus) return 0x1p-20 * std::abs(value) + 1e-36;
  const double s = exponent(kind, x), power = std::exp(-std::abs(s));
  return 0x1p-21 * std::abs(value) + 0x1p-21 * std::abs(x * s) * power / (1 + power) + 1e-36 * std::abs(x);
}

void test_case(Activation kind, DType dtype, bool is_gated, int64_t num_rows, int64_t size) {
  begin_case("activation %d %s [%d, %d] gated %d", static_cast<int>(kind), name_of(dtype), static_cast<int>(num_rows),
             static_cast<int>(size), is_gated);
  const int64_t width = is_gated ? 2 * size : size, stride = width + 3;
  Tensor x(dtype, (num_rows - 1) * stride + width);
  const double telling[] = {0.0, -0.0, 1e-30, -1e-30, 9.4, -9.4, 13.5, -13.5, 87.5, -87.5, 1e4, -1e4, std::nan(""), 0.5};
  for (int64_t i = 0; i < x.size(); ++i) x.set(i, i % 2 ? telling[i / 2 % 14] : random_number() * 12);
  const Tensor out = tensor_on_all_threads([&] {
    Tensor computed(dtype, num_rows * size);
    run("activation",
        pagewick::ActivationArgs{x.data(), computed.data(), num_rows, size, stride, dtype, kind, is_gated});
    return computed;
  });
  for (int64_t i = 0; i < out.size(); ++i) {
    const int64_t source = i / size * stride + i % size;
    const double gate = gate_of(kind, x[source]), value = defined(kind, gate);
    const double up = is_gated ? factor_of(kind, x[source + size]) : 1.0;
    const double error = (promised_error(kind, gate, value) + 2 * kFloatUnit * std::abs(value)) * std::abs(up);
    require_near(out, i, value * up, std::isnan(error) ? 0.0 : error, "output");
  }
}

void test_sparse_gates(DType dtype, int64_t num_rows, int64_t size, float factor) {
  begin_case("gaussian_top_k %s [%d, %d]", name_of(dtype), static_cast<int>(num_rows), static_cast<int>(size));
  const int64_t stride = size + 3;
  const Tensor x = Tensor::random(dtype, (num_rows - 1) * stride + size, 3.0);
  const Tensor out = tensor_on_all_threads([&] {
    Tensor top(dtype, num_rows * size);
    run("gaussian_top_k", pagewick::GaussianTopKArgs{x.data(), top.data(), num_rows, size, stride, factor, dtype});
    return top;
  });
  for (int64_t row = 0; row < num_rows; ++row) {
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < size; ++i) mean += x[row * stride + i] / size;
    for (int64_t i = 0; i < size; ++i) squares += std::pow(x[row * stride + i] - mean, 2) / size;
    const double cutoff = mean + static_cast<double>(factor) * std::sqrt(squares);
    for (int64_t i = 0; i < size; ++i) {
      const double value = std::max(0.0, x[row * stride + i] - cutoff);
      require_near(out, row * size + i, value, (16 + size / 16) * kFloatUnit * 6, "gate");
    }
  }
}

}  // namespace

void test_activation() {
  for (const DType dtype : kDTypes) {
    for (const int64_t size : {1, 5, 16, 61}) test_sparse_gates(dtype, 3, size, 1.3f);
    test_sparse_gates(dtype, 30, 1001, -0.4f);
  }
  for (const DType dtype : kDTypes)
    for (const Activation kind : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu,
                                  Activation::kQuickGelu, Activation::kRelu2, Activation::kClampedSwish,
                                  Activation::kSoftplus, Activation::kSiluWithin4, Activation::kSiluWithin5,
                                  Activation::kSiluWithin7, Activation::kSiluWithin16,
                                  Activation::kClampedSilu10})
      for (const bool is_gated : {false, true}) {
        for (const int64_t size : {1, 5, 16, 61}) test_case(kind, dtype, is_gated, 3, size);
        test_case(kind, dtype, is_gated, 30, 1001);
      }
  test_case(Activation::kSilu, DType::kFloat32, true, 2, 16411);
}
