// Products with quantized weights: compared with loops in double precision over the numbers that the library looks up,
// which tests in Python compare with the gguf package.
#include <cmath>
#include <vector>

#include "blocks.h"

using namespace testing;

namespace {

using pagewick::QuantizedFormat;

constexpr int64_t kRows = 70, kColumns = 512;

// Whole numbers that 8 bits hold exactly: the greatest of every 32 is 127.
Tensor exact_rows(DType dtype, int64_t num_rows, int64_t stride) {
  Tensor x(dtype, (num_rows - 1) * stride + kColumns);
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t k = 0; k < kColumns; ++k)
      x.set(row * stride + k, k % 32 == 0 ? 127.0 : static_cast<double>(random_below(255) - 127));
  return x;
}

class Weight {
 public:
  explicit Weight(QuantizedFormat format)
      : format_(format), packed_(packed_bytes(format, kRows, kColumns)), numbers_(DType::kFloat32, kRows * kColumns) {
    pack_random_blocks(format, kRows, kColumns, packed_.data());
    Array<int64_t> ids(kRows);
    for (int64_t row = 0; row < kRows; ++row) ids[row] = row;
    run("gather_quantized_rows", gather(ids, numbers_));
    for (int64_t i = 0; i < numbers_.size(); ++i) values_.push_back(numbers_[i]);
    for (const int64_t bad : {int64_t{-1}, kRows}) {
      ids[kRows - 1] = bad;
      const Tensor out(DType::kFloat32, kRows * kColumns);
      require(status_of("gather_quantized_rows", gather(ids, out)) == pagewick::kBadRow, "a row that is not there");
    }
  }

  void test(DType dtype, int64_t num_rows) const {
    begin_case("quantized %s, format %d, %d rows", name_of(dtype), static_cast<int>(format_), static_cast<int>(num_rows));
    const int64_t stride = kColumns + 3, out_stride = kRows + 5;
    const Tensor x = exact_rows(dtype, num_rows, stride), bias = Tensor::random(dtype, kRows);
    const Tensor out = tensor_on_all_threads([&] {
      Tensor found(dtype, (num_rows - 1) * out_stride + kRows);
      run("quantized_linear",
          pagewick::QuantizedLinearArgs{x.data(), packed_.data(), bias.data(), found.data(), num_rows, kRows, kColumns,
                                        stride, out_stride, format_, dtype, dtype});
      return found;
    });
    for (int64_t row = 0; row < num_rows; ++row) {
      double inputs[kColumns];
      for (int64_t k = 0; k < kColumns; ++k) inputs[k] = x[row * stride + k];
      for (int64_t n = 0; n < kRows; ++n) {
        double sum = bias[n], magnitude = std::abs(sum);
        const double* const values = values_.data() + n * kColumns;
        for (int64_t k = 0; k < kColumns; ++k) {
          const double product = inputs[k] * values[k];
          sum += product, magnitude += std::abs(product);
        }
        require_near(out, row * out_stride + n, sum, 1e-6 * magnitude, "product");
      }
    }
    for (int64_t i = kRows; i < out.size(); ++i)
      require(i % out_stride < kRows || out.is_untouched(i), "memory between rows");
  }

 private:
  pagewick::GatherQuantizedArgs gather(const Array<int64_t>& ids, const Tensor& out) const {
    return {packed_.data(), ids.data(), out.data(), kRows, kRows, kColumns, format_, out.dtype()};
  }

  QuantizedFormat format_;
  Array<char> packed_;
  Tensor numbers_;
  std::vector<double> values_;  // the same
};

}  // namespace

void test_quantized() {
  for (int number = 0; number <= static_cast<int>(QuantizedFormat::kFp4G16); ++number) {
    const Weight weight(static_cast<QuantizedFormat>(number));
    // Tiles of 1, of 3 and 2, and of 6 rows with one left.
    weight.test(DType::kFloat32, 1);
    weight.test(DType::kBFloat16, 5);
    weight.test(DType::kFloat16, 7);
    // Tiles of sixteen rows, the last of which is not full.
    weight.test(DType::kFloat32, 45);
  }
}
