#include <cmath>

#include "logits.h"
#include "testing.h"

using namespace testing;

namespace {

constexpr int64_t kRows = 9;

// Rows of all kinds, `stride` apart: ties, infinities, a NaN, large numbers.
Tensor make_logits(int64_t size, int64_t stride) {
  Tensor logits(DType::kFloat32, (kRows - 1) * stride + size);
  for (int64_t row = 0; row < kRows; ++row)
    for (int64_t i = 0; i < size; ++i) {
      double value = random_number() * 8;
      if (row == 1) value = std::floor(value);
      if (row == 2) value = -HUGE_VAL;
      if (row == 3 && i < size / 2) value = -HUGE_VAL;
      if (row == 4 && i == size / 3) value = HUGE_VAL;
      if ((row == 5 && i == size - 1) || (row == 6 && i >= size / 3)) value = std::nan("");
      if (row == 7) value = -3.0;
      if (row == 8) value *= 1e4;
      logits.set(row * stride + i, value);
    }
  return logits;
}

int64_t first_greatest(const Tensor& logits, int64_t begin, int64_t size) {
  int64_t best = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (std::isnan(logits[begin + i])) return i;
    if (logits[begin + i] > logits[begin + best]) best = i;
  }
  return best;
}

Array<int64_t> argmax(const Tensor& logits, int64_t first_row, int64_t num_rows, int64_t size, int64_t stride) {
  Array<int64_t> ids(num_rows);
  run("argmax_rows", pagewick::ArgmaxArgs{logits.floats() + first_row * stride, ids.data(), num_rows, size, stride});
  return ids;
}

Outputs softmax_stats(const Tensor& logits, int64_t first_row, int64_t num_rows, int64_t size, int64_t stride) {
  Outputs outputs;
  for (int i = 0; i < 2; ++i) outputs.emplace_back(DType::kFloat32, num_rows);
  run("log_softmax_stats", pagewick::LogSoftmaxArgs{logits.floats() + first_row * stride,
                                                    static_cast<float*>(outputs[0].data()),
                                                    static_cast<float*>(outputs[1].data()), num_rows, size, stride});
  return outputs;
}

void check_stats(const Tensor& logits, int64_t begin, int64_t size, const Outputs& outputs, int64_t row) {
  const double max = logits[begin + first_greatest(logits, begin, size)];
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += std::exp(logits[begin + i] - max);
  require_near(outputs[0], row, max, 0.0, "max");
  // e^x is promised to 2^-22, and to nothing below e^-88; sums of up to 8192 numbers are in chains of 512 or fewer.
  require_near(outputs[1], row, std::isfinite(max) ? std::log(sum) : std::nan(""), 1e-5, "log of the sum");
}

void test_size(int64_t size) {
  begin_case("argmax_rows, log_softmax_stats of %d", static_cast<int>(size));
  const int64_t stride = size + 3;
  const Tensor logits = make_logits(size, stride);
  for (const int32_t threads : {1, 2, 3}) {
    pw_set_num_threads(threads);
    const Array<int64_t> ids = argmax(logits, 0, kRows, size, stride);
    for (int64_t row = 0; row < kRows; ++row)
      require(ids[row] == first_greatest(logits, row * stride, size), "the first of the greatest");
  }
  const Outputs outputs = on_all_threads([&] { return softmax_stats(logits, 0, kRows, size, stride); });
  for (int64_t row = 0; row < kRows; ++row) {
    check_stats(logits, row * stride, size, outputs, row);
    const Outputs alone = softmax_stats(logits, row, 1, size, stride);
    for (int i = 0; i < 2; ++i) require(alone[i].bits(0) == outputs[i].bits(row), "a row alone has other bits");
  }
  argmax(logits, 0, 0, size, stride);
  softmax_stats(logits, 0, 0, size, stride);
}

}  // namespace

void test_logits() {
  for (const int64_t size : {1, 3, 15, 16, 17, 63, 200, 8192, 8193, 20011}) test_size(size);
}
