#include <algorithm>
#include <cmath>

#include "streams.h"
#include "testing.h"

using namespace testing;

namespace {

constexpr float kLeast = 1e-5f;

// x[token, stream, column]: the active stream comes first.
struct Streams {
  Tensor active, others;
  int64_t num_others, size, stride;

  double at(int64_t token, int64_t stream, int64_t column) const {
    if (stream == 0) return active[token * stride + column];
    return others[(token * num_others + stream - 1) * size + column];
  }
};

void test_updates(DType dtype, int64_t num_tokens, int64_t num_others, int64_t size) {
  begin_case("streams %s [%d, 1 + %d, %d]", name_of(dtype), static_cast<int>(num_tokens), static_cast<int>(num_others),
             static_cast<int>(size));
  const int64_t count = 1 + num_others, stride = size + 3;
  const Streams in = {Tensor::random(dtype, (num_tokens - 1) * stride + size, 3.0),
                      Tensor::random(dtype, num_tokens * num_others * size, 2.0), num_others, size, stride};
  const Tensor computed = Tensor::random(dtype, (num_tokens - 1) * stride + size, 3.0);
  for (const bool mixes : {true, false}) {
    const int64_t per_token = mixes ? count * count : count;
    const Tensor factors = Tensor::random(dtype, num_tokens * per_token);
    const Outputs out = on_all_threads([&] {
      Outputs outputs;
      outputs.emplace_back(dtype, num_tokens * size);
      outputs.emplace_back(dtype, num_tokens * num_others * size);
      run(mixes ? "mix_streams" : "correct_streams",
          pagewick::StreamsArgs{in.active.data(), in.others.data(), mixes ? nullptr : computed.data(), factors.data(),
                                outputs[0].data(), outputs[1].data(), num_tokens, num_others, size, stride, stride,
                                dtype});
      return outputs;
    });
    for (int64_t token = 0; token < num_tokens; ++token)
      for (int64_t stream = 0; stream < count; ++stream)
        for (int64_t column = 0; column < size; ++column) {
          double value = in.at(token, stream, column), magnitude = std::abs(value);
          const auto add = [&](double term) { value += term, magnitude += std::abs(term); };
          if (mixes) {
            for (int64_t source = 0; source < count; ++source)
              add(factors[token * per_token + stream * count + source] * in.at(token, source, column));
          } else {
            const double factor = 1 + factors[token * per_token + stream];
            add(factor * (computed[token * stride + column] - in.at(token, 0, column)));
          }
          const int64_t place = stream == 0 ? token * size : (token * num_others + stream - 1) * size;
          require_near(out[stream != 0], place + column, value, (4 + count) * kFloatUnit * (magnitude + 8), "stream");
        }
  }
}

void test_magnitudes(DType dtype, int64_t num_rows, int64_t repeat, int64_t size) {
  begin_case("match_magnitude %s [%d, %d]", name_of(dtype), static_cast<int>(num_rows), static_cast<int>(size));
  const int64_t x_stride = size + 2, target_stride = size + 1;
  Tensor x = Tensor::random(dtype, (num_rows - 1) * x_stride + size, 2.0);
  for (int64_t i = 0; i < size; ++i) x.set(i, 0.0);
  const Tensor target = Tensor::random(dtype, (num_rows / repeat - 1) * target_stride + size, 3.0);
  const Tensor out = tensor_on_all_threads([&] {
    Tensor matched(dtype, num_rows * size);
    run("match_magnitude", pagewick::MagnitudeArgs{x.data(), target.data(), matched.data(), num_rows, size, repeat,
                                                   x_stride, target_stride, kLeast, dtype});
    return matched;
  });
  for (int64_t row = 0; row < num_rows; ++row) {
    double own = 0, wanted = 0;
    for (int64_t i = 0; i < size; ++i) {
      own += x[row * x_stride + i] * x[row * x_stride + i] / size;
      wanted += target[row / repeat * target_stride + i] * target[row / repeat * target_stride + i] / size;
    }
    const double factor = std::sqrt(wanted / std::max(own, static_cast<double>(kLeast)));
    for (int64_t i = 0; i < size; ++i) {
      const double value = x[row * x_stride + i] * factor;
      require_near(out, row * size + i, value, (8 + size / 16) * kFloatUnit * std::abs(value), "matched");
    }
  }
}

}  // namespace

void test_streams() {
  for (const DType dtype : kDTypes) {
    for (const int64_t size : {1, 5, 16, 61}) {
      test_updates(dtype, 3, 3, size);
      test_magnitudes(dtype, 6, 3, size);
    }
    test_updates(dtype, 20, 1, 1001);
    test_updates(dtype, 2, pagewick::kMaxStreams - 1, 40);
    test_magnitudes(dtype, 20, 1, 1001);
  }
  test_updates(DType::kFloat32, 2, 2, 8211);
}
