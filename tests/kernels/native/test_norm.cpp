#include <cmath>

#include "norm.h"
#include "testing.h"

using namespace testing;

namespace {

constexpr float kEps = 1e-5f;

struct Case {
  bool is_layer_norm, has_residual, has_bias;
  float weight_offset;
  DType dtype;
  int64_t num_rows, size;
};

struct Inputs {
  Tensor x, residual, weight, bias;
  int64_t x_stride, residual_stride;
};

Inputs make_inputs(const Case& c) {
  const int64_t x_stride = c.size + 5, residual_stride = c.size + 2;
  return {Tensor::random(c.dtype, (c.num_rows - 1) * x_stride + c.size, 3.0),
          Tensor::random(c.dtype, (c.num_rows - 1) * residual_stride + c.size),
          Tensor::random(c.dtype, c.size),
          Tensor::random(c.dtype, c.size),
          x_stride,
          residual_stride};
}

Outputs normalise(const Case& c, const Inputs& in, int64_t first_row, int64_t num_rows) {
  Outputs outputs;
  outputs.emplace_back(c.dtype, num_rows * c.size);
  outputs.emplace_back(c.dtype, c.has_residual ? num_rows * c.size : 0);
  const int64_t bytes = element_size(c.dtype);
  pagewick::NormArgs args = {};
  args.x = static_cast<char*>(in.x.data()) + first_row * in.x_stride * bytes;
  if (c.has_residual) {
    args.residual = static_cast<char*>(in.residual.data()) + first_row * in.residual_stride * bytes;
    args.new_residual = outputs[1].data();
  }
  args.weight = in.weight.data(), args.bias = c.has_bias ? in.bias.data() : nullptr, args.out = outputs[0].data();
  args.num_rows = num_rows, args.hidden_size = c.size;
  args.x_stride = in.x_stride, args.residual_stride = in.residual_stride, args.out_stride = c.size;
  args.eps = kEps, args.weight_offset = c.weight_offset, args.dtype = c.dtype;
  run(c.is_layer_norm ? "layer_norm" : "rms_norm", args);
  return outputs;
}

void check_row(const Case& c, const Inputs& in, const Outputs& outputs, int64_t row) {
  std::vector<double> x(c.size);
  double mean = 0, magnitude = 0, squares = 0;
  for (int64_t i = 0; i < c.size; ++i) {
    x[i] = in.x[row * in.x_stride + i];
    if (c.has_residual) {
      x[i] = rounded(c.dtype, x[i] + in.residual[row * in.residual_stride + i]);
      require_near(outputs[1], row * c.size + i, x[i], 0.0, "new residual");
    }
    mean += x[i] / c.size, magnitude += std::abs(x[i]) / c.size;
  }
  if (!c.is_layer_norm) mean = magnitude = 0;
  for (const double value : x) squares += (value - mean) * (value - mean);
  const double scale = 1.0 / std::sqrt(squares / c.size + static_cast<double>(kEps));
  const bool is_rounded_twice = !c.is_layer_norm && c.weight_offset == 0.0f;
  for (int64_t i = 0; i < c.size; ++i) {
    const double normed = (x[i] - mean) * scale, weight = in.weight[i] + c.weight_offset;
    // A sum of n numbers in float32 is off by at most n units; here by far less, since it is computed in several
    // chains.
    double error = (8 + c.size / 16) * kFloatUnit * (std::abs(normed) + magnitude * scale) * std::abs(weight);
    if (is_rounded_twice && c.dtype != DType::kFloat32)
      error += std::abs(normed * weight) * (c.dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11) + 0x1p-25;
    const double bias = c.has_bias ? in.bias[i] : 0.0;
    require_near(outputs[0], row * c.size + i, normed * weight + bias, error + kFloatUnit * std::abs(bias), "output");
  }
}

void test_case(const Case& c) {
  begin_case("%s %s [%d, %d] residual %d bias %d offset %g", c.is_layer_norm ? "layer_norm" : "rms_norm",
             name_of(c.dtype), static_cast<int>(c.num_rows), static_cast<int>(c.size), c.has_residual, c.has_bias,
             static_cast<double>(c.weight_offset));
  const Inputs in = make_inputs(c);
  const Outputs outputs = on_all_threads([&] { return normalise(c, in, 0, c.num_rows); });
  for (int64_t row = 0; row < c.num_rows; row += row < 3 ? 1 : 7) {
    check_row(c, in, outputs, row);
    const Outputs alone = normalise(c, in, row, 1);
    for (int64_t i = 0; i < c.size; ++i)
      require(alone[0].bits(i) == outputs[0].bits(row * c.size + i), "a row alone has other bits");
  }
}

}  // namespace

void test_norm() {
  for (const DType dtype : kDTypes)
    for (const bool has_residual : {false, true}) {
      for (const int64_t size : {1, 3, 16, 37, 64, 65, 257}) {
        for (const float offset : {0.0f, 1.0f}) test_case({false, has_residual, false, offset, dtype, 3, size});
        for (const bool has_bias : {false, true}) test_case({true, has_residual, has_bias, 0.0f, dtype, 2, size});
      }
      test_case({false, has_residual, false, 0.0f, dtype, 70, 1000});
      test_case({true, has_residual, true, 0.0f, dtype, 70, 1000});
    }
  begin_case("no rows");
  test_case({false, true, false, 0.0f, DType::kFloat32, 1, 4099});
  const Case none = {false, false, false, 0.0f, DType::kFloat32, 1, 8};
  normalise(none, make_inputs(none), 0, 0);
}
