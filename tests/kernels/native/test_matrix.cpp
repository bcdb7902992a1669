#include <algorithm>
#include <cmath>

#include "matrix.h"
#include "testing.h"

using namespace testing;

namespace {

// The index of element [row, k] in a packed weight with `depth` columns, and the size of one with num_rows rows.
int64_t packed_index(DType dtype, int64_t depth, int64_t row, int64_t k) {
  const int64_t step = dtype == DType::kBFloat16 ? 2 : 1, steps = (depth + step - 1) / step;
  return (row / 64 * steps + k / step) * 64 * step + row % 64 * step + k % step;
}

int64_t packed_size(DType dtype, int64_t num_rows, int64_t depth) {
  return packed_index(dtype, depth, (num_rows + 63) / 64 * 64, 0);
}

Tensor zeros(DType dtype, int64_t size) {
  Tensor tensor(dtype, size);
  for (int64_t i = 0; i < size; ++i) tensor.set_bits(i, 0);
  return tensor;
}

// A weight [num_rows, depth], rows `stride` apart, packed in two calls that share a panel.
Tensor pack(const Tensor& weight, int64_t num_rows, int64_t depth, int64_t stride) {
  Tensor packed = zeros(weight.dtype(), packed_size(weight.dtype(), num_rows, depth));
  const int64_t first = num_rows / 3;
  for (const auto &[begin, end] : {std::pair{int64_t{0}, first}, std::pair{first, num_rows}}) {
    const char* const rows = static_cast<char*>(weight.data()) + begin * stride * element_size(weight.dtype());
    run("pack_rows", pagewick::PackArgs{rows, packed.data(), begin, end - begin, depth, stride, weight.dtype()});
  }
  return packed;
}

void test_packing(DType dtype, int64_t num_rows, int64_t depth) {
  begin_case("pack_rows, gather_rows %s [%d, %d]", name_of(dtype), static_cast<int>(num_rows), static_cast<int>(depth));
  const int64_t stride = depth + 3;
  const Tensor weight = Tensor::random(dtype, (num_rows - 1) * stride + depth);
  const Tensor packed = tensor_on_all_threads([&] { return pack(weight, num_rows, depth, stride); });
  Tensor expected = zeros(dtype, packed.size());
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t k = 0; k < depth; ++k)
      expected.set_bits(packed_index(dtype, depth, row, k), weight.bits(row * stride + k));
  require(packed == expected, "packed weight");

  const Array<int64_t> ids = {num_rows - 1, 0, num_rows / 2, 0};
  for (const bool is_packed : {false, true}) {
    Tensor plain(dtype, num_rows * depth);
    for (int64_t i = 0; i < plain.size(); ++i) plain.set_bits(i, weight.bits(i / depth * stride + i % depth));
    const Tensor& source = is_packed ? packed : plain;
    const auto gather = [&](const Array<int64_t>& wanted, Tensor& out) {
      return status_of("gather_rows", pagewick::GatherArgs{source.data(), wanted.data(), out.data(), wanted.size(),
                                                           num_rows, depth, dtype, is_packed});
    };
    Tensor out(dtype, ids.size() * depth);
    require(gather(ids, out) == pagewick::kOk, "status");
    for (int64_t i = 0; i < out.size(); ++i)
      require(out.bits(i) == weight.bits(ids[i / depth] * stride + i % depth), "a gathered row");
    for (const int64_t bad : {int64_t{-1}, num_rows, int64_t{1} << 40})
      require(gather({0, bad, 0}, out) == pagewick::kBadRow, "a row that is not there");
    require(gather(Array<int64_t>(int64_t{0}), out) == pagewick::kOk, "no rows");
  }
}

struct Case {
  DType dtype, out_dtype;
  int64_t num_rows, out_features, in_features;
  bool has_bias;
};

class Product {
 public:
  explicit Product(const Case& c)
      : c_(c),
        x_stride_(c.in_features + c.num_rows % 4),
        out_stride_(c.out_features + 3),
        x_(Tensor::random(c.dtype, (c.num_rows - 1) * x_stride_ + c.in_features)),
        weight_(Tensor::random(c.dtype, c.out_features * c.in_features)),
        bias_(Tensor::random(c.dtype, c.out_features)),
        packed_(pack(weight_, c.out_features, c.in_features, c.in_features)) {}

  // Outputs of rows [first_row, first_row + num_rows).
  Tensor multiply(int64_t first_row, int64_t num_rows) const {
    Tensor out(c_.out_dtype, (num_rows - 1) * out_stride_ + c_.out_features);
    pagewick::LinearArgs args = {};
    args.x = static_cast<char*>(x_.data()) + first_row * x_stride_ * element_size(c_.dtype);
    args.weight = packed_.data(), args.bias = c_.has_bias ? bias_.data() : nullptr, args.out = out.data();
    args.num_rows = num_rows, args.out_features = c_.out_features, args.in_features = c_.in_features;
    args.x_stride = x_stride_, args.out_stride = out_stride_, args.dtype = c_.dtype, args.out_dtype = c_.out_dtype;
    run("linear", args);
    return out;
  }

  void check(const Tensor& out) const {
    for (int64_t row = 0; row < c_.num_rows; row += row < 40 ? 1 : 9)
      for (int64_t n = 0; n < out_stride_; ++n) {
        const int64_t index = row * out_stride_ + n;
        if (n < c_.out_features) check_output(out, index, row, n);
        else require(index >= out.size() || out.is_untouched(index), "memory between rows was written to");
      }
  }

  void check_alone(const Tensor& out, int64_t first_row, int64_t num_rows) const {
    const Tensor alone = multiply(first_row, num_rows);
    for (int64_t i = 0; i < alone.size(); ++i)
      require(alone.bits(i) == out.bits(first_row * out_stride_ + i), "fewer rows have other bits");
  }

 private:
  void check_output(const Tensor& out, int64_t index, int64_t row, int64_t n) const {
    double sum = c_.has_bias ? bias_[n] : 0.0, magnitude = std::abs(sum);
    for (int64_t k = 0; k < c_.in_features; ++k) {
      const double product = x_[row * x_stride_ + k] * weight_[n * c_.in_features + k];
      sum += product, magnitude += std::abs(product);
    }
    // Every addition, and every product, may be off by one unit in the last place.
    require_near(out, index, sum, (c_.in_features + 2) * 2 * kFloatUnit * magnitude, "output");
  }

  Case c_;
  int64_t x_stride_, out_stride_;
  Tensor x_, weight_, bias_, packed_;
};

void test_linear(const Case& c) {
  begin_case("linear %s to %s, %d rows, %d x %d, bias %d", name_of(c.dtype), name_of(c.out_dtype),
             static_cast<int>(c.num_rows), static_cast<int>(c.out_features), static_cast<int>(c.in_features),
             c.has_bias);
  const Product product(c);
  const Tensor out = tensor_on_all_threads([&] { return product.multiply(0, c.num_rows); });
  product.check(out);
  product.check_alone(out, c.num_rows - 1, 1);
  if (c.num_rows > 3) product.check_alone(out, 1, c.num_rows / 2);
}

// A NaN or an infinity in a row of x affects that row of outputs alone.
void test_nan(DType dtype) {
  begin_case("linear %s with a row of NaN", name_of(dtype));
  constexpr int64_t kRows = 18, kSize = 70;
  Tensor x = Tensor::random(dtype, kRows * kSize);
  for (int64_t k = 0; k < kSize; ++k) x.set(5 * kSize + k, std::nan(""));
  const Tensor packed = pack(Tensor::random(dtype, kSize * kSize), kSize, kSize, kSize);
  Tensor out(DType::kFloat32, kRows * kSize);
  run("linear", pagewick::LinearArgs{x.data(), packed.data(), nullptr, out.data(), kRows, kSize, kSize, kSize, kSize,
                                     dtype, DType::kFloat32});
  for (int64_t i = 0; i < out.size(); ++i) require(std::isnan(out[i]) == (i / kSize == 5), "NaN");
}

}  // namespace

void test_matrix() {
  for (const DType dtype : kDTypes) {
    for (const int64_t num_rows : {1, 63, 64, 65, 193})
      for (const int64_t depth : {1, 2, 31, 32, 67}) test_packing(dtype, num_rows, depth);
    for (const int64_t num_rows : {1, 2, 6, 7, 13, 16, 17, 33})
      for (const int64_t depth : {1, 2, 31, 32, 35, 64, 131})
        test_linear({dtype, DType::kFloat32, num_rows, 66, depth, depth % 2 == 1});
    // More columns than a panel has, and more rows and a greater depth than a block has.
    for (const DType out_dtype : kDTypes) test_linear({dtype, out_dtype, 3, 133, 96, true});
    test_linear({dtype, dtype, 19, 1, 600, false});
    test_linear({dtype, dtype, 259, 5, 34, true});
    test_linear({dtype, dtype, 20, 70, 517, false});
    test_nan(dtype);
  }
}
