#include "hyper.h"

#include <algorithm>
#include <cmath>

#include "moe.h"
#include "testing.h"

using namespace testing;

namespace {

constexpr double kEps = 1e-3, kNormEps = 1e-2, kMagnitude = 1.7;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

Array<float> random_floats(int64_t size, double scale) {
  Array<float> numbers(size);
  for (int64_t i = 0; i < size; ++i) numbers[i] = static_cast<float>(scale * random_number());
  return numbers;
}

// A matrix whose columns, then rows, are divided by their sums in turn.
std::vector<double> mixed(std::vector<double> matrix, int64_t size, int64_t num_iterations) {
  for (int64_t row = 0; row < size; ++row) {
    double sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += std::exp(matrix[row * size + i]);
    for (int64_t i = 0; i < size; ++i) matrix[row * size + i] = std::exp(matrix[row * size + i]) / sum + kEps;
  }
  for (int64_t step = 0; step < 2 * num_iterations - 1; ++step) {
    const bool is_column = step % 2 == 0;
    for (int64_t line = 0; line < size; ++line) {
      double sum = kEps;
      const auto at = [&](int64_t i) -> double& { return matrix[is_column ? i * size + line : line * size + i]; };
      for (int64_t i = 0; i < size; ++i) sum += at(i);
      for (int64_t i = 0; i < size; ++i) at(i) /= sum;
    }
  }
  return matrix;
}

void test_weights(DType dtype, int64_t num_tokens, int64_t num_streams, int64_t size, int64_t num_iterations) {
  begin_case("stream_weights %s [%d, %d, %d]", name_of(dtype), static_cast<int>(num_tokens),
             static_cast<int>(num_streams), static_cast<int>(size));
  const Tensor streams = Tensor::random(dtype, num_tokens * num_streams * size, 2.0);
  for (const int64_t kinds : {1, 2, 3}) {
    const int64_t sizes[] = {num_streams, 2 * num_streams, (2 + num_streams) * num_streams};
    const int64_t count = sizes[kinds - 1], stride = count + 1;
    const Array<float> products = random_floats((num_tokens - 1) * stride + count, 3.0);
    const Array<float> biases = random_floats(count, 1.0), scales = random_floats(kinds, 1.0);
    const Outputs out = on_all_threads([&] {
      Outputs outputs;
      for (const int64_t each : {num_streams, num_streams, num_streams * num_streams})
        outputs.emplace_back(DType::kFloat32, num_tokens * each);
      const auto floats = [&](int64_t i) { return static_cast<float*>(outputs[i].data()); };
      run("stream_weights",
          pagewick::StreamWeightsArgs{products.data(), streams.data(), biases.data(), scales.data(), floats(0),
                                      kinds < 2 ? nullptr : floats(1), kinds < 3 ? nullptr : floats(2), num_tokens,
                                      num_streams, size, stride, num_iterations, kEps, kNormEps, kMagnitude, dtype});
      return outputs;
    });
    for (int64_t token = 0; token < num_tokens; ++token) {
      double squares = 0;
      for (int64_t i = 0; i < num_streams * size; ++i)
        squares += std::pow(streams[token * num_streams * size + i], 2) / static_cast<double>(num_streams * size);
      const auto whole = [&](int64_t i, int64_t kind) {
        return scales[kind] * products[token * stride + i] / std::sqrt(squares + kNormEps) + biases[i];
      };
      for (int64_t i = 0; i < num_streams; ++i)
        require_near(out[0], token * num_streams + i, sigmoid(whole(i, 0)) + kEps, 1e-6, "before");
      if (kinds == 1) continue;
      std::vector<double> matrix(num_streams * num_streams);
      for (int64_t i = 0; i < num_streams; ++i)
        require_near(out[1], token * num_streams + i,
                     kMagnitude * sigmoid(whole(num_streams + i, 1)) + (kinds == 2 ? kEps : 0), 1e-6, "after");
      if (kinds == 2) continue;
      for (size_t i = 0; i < matrix.size(); ++i) matrix[i] = whole(2 * num_streams + static_cast<int64_t>(i), 2);
      matrix = mixed(matrix, num_streams, num_iterations);
      for (int64_t i = 0; i < num_streams * num_streams; ++i)
        require_near(out[2], token * num_streams * num_streams + i, matrix[i], 1e-6, "mixing");
    }
  }
}

void test_sums(DType dtype, int64_t num_tokens, int64_t num_streams, int64_t size) {
  begin_case("collapse and expand %s [%d, %d, %d]", name_of(dtype), static_cast<int>(num_tokens),
             static_cast<int>(num_streams), static_cast<int>(size));
  const int64_t stride = size + 3;
  const Tensor streams = Tensor::random(dtype, num_tokens * num_streams * size, 2.0);
  const Tensor output = Tensor::random(dtype, (num_tokens - 1) * stride + size, 2.0);
  const Array<float> weights = random_floats(num_tokens * num_streams, 1.0);
  const Array<float> mixing = random_floats(num_tokens * num_streams * num_streams, 1.0);
  const Outputs out = on_all_threads([&] {
    Outputs outputs;
    outputs.emplace_back(dtype, num_tokens * size);
    for (int i = 0; i < 2; ++i) outputs.emplace_back(dtype, num_tokens * num_streams * size);
    run("collapse_streams", pagewick::CollapseStreamsArgs{streams.data(), weights.data(), outputs[0].data(),
                                                          num_tokens, num_streams, size, dtype});
    for (const bool is_mixed : {true, false})
      run("expand_streams",
          pagewick::ExpandStreamsArgs{streams.data(), output.data(), weights.data(), is_mixed ? mixing.data() : nullptr,
                                      outputs[is_mixed ? 1 : 2].data(), num_tokens, num_streams, size, stride, dtype});
    return outputs;
  });
  for (int64_t token = 0; token < num_tokens; ++token)
    for (int64_t column = 0; column < size; ++column) {
      const auto stream = [&](int64_t i) { return streams[(token * num_streams + i) * size + column]; };
      const double error = 8 * static_cast<double>(2 + num_streams) * kFloatUnit;
      double total = 0;
      for (int64_t i = 0; i < num_streams; ++i) total += weights[token * num_streams + i] * stream(i);
      require_near(out[0], token * size + column, total, error, "sum");
      for (int64_t target = 0; target < num_streams; ++target) {
        const int64_t place = (token * num_streams + target) * size + column;
        double sum = weights[token * num_streams + target] * output[token * stride + column];
        require_near(out[2], place, sum + stream(target), error, "stream that is not mixed");
        for (int64_t i = 0; i < num_streams; ++i)
          sum += mixing[(token * num_streams + i) * num_streams + target] * stream(i);
        require_near(out[1], place, sum, error, "stream");
      }
    }
}

// The experts with the greatest sqrt(softplus(logit)) + bias, or those of a list.
void test_root_logits(int64_t num_tokens, int64_t num_experts, int64_t top_k, bool has_ids) {
  begin_case("root_logits [%d, %d], %d best, list %d", static_cast<int>(num_tokens), static_cast<int>(num_experts),
             static_cast<int>(top_k), has_ids);
  const int64_t stride = num_experts + 2;
  const Array<float> logits = random_floats((num_tokens - 1) * stride + num_experts, 60.0);
  const Array<float> bias = random_floats(num_experts, 1.0);
  Array<int64_t> ids(num_tokens * top_k);
  // The first two of a list may be the same.
  for (int64_t i = 0; i < ids.size(); ++i) ids[i] = i % top_k == 1 ? ids[i - 1] : (i * 3) % num_experts;
  const Tensor out = tensor_on_all_threads([&] {
    Tensor result(DType::kFloat32, num_tokens * num_experts);
    run("root_logits", pagewick::RootLogitsArgs{logits.data(), bias.data(), has_ids ? ids.data() : nullptr,
                                                static_cast<float*>(result.data()), num_tokens, num_experts, top_k,
                                                stride});
    return result;
  });
  for (int64_t token = 0; token < num_tokens; ++token) {
    const auto softplus = [&](int64_t id) {
      const double x = logits[token * stride + id];
      return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
    };
    std::vector<int64_t> chosen(num_experts);
    for (int64_t id = 0; id < num_experts; ++id) chosen[id] = id;
    std::sort(chosen.begin(), chosen.end(), [&](int64_t a, int64_t b) {
      return std::sqrt(softplus(a)) + bias[a] > std::sqrt(softplus(b)) + bias[b];
    });
    chosen.resize(top_k);
    if (has_ids) std::copy(&ids[token * top_k], &ids[token * top_k] + top_k, chosen.begin());
    for (int64_t id = 0; id < num_experts; ++id) {
      const auto count = static_cast<double>(std::count(chosen.begin(), chosen.end(), id));
      const double expected = count == 0 ? -HUGE_VAL : 0.5 * std::log(softplus(id)) + std::log(count);
      if (count == 0) require(out[token * num_experts + id] == expected, "an expert that was not chosen");
      else require_near(out, token * num_experts + id, expected, 1e-6 * std::abs(expected) + 1e-6, "logit");
    }
  }
  ids[0] = num_experts;
  const Tensor unused(DType::kFloat32, num_tokens * num_experts);
  require(!has_ids || status_of("root_logits", pagewick::RootLogitsArgs{
                          logits.data(), nullptr, ids.data(), static_cast<float*>(unused.data()), num_tokens,
                          num_experts, top_k, stride}) == pagewick::kBadRow, "an expert that does not exist");
}

}  // namespace

void test_hyper() {
  for (const DType dtype : kDTypes) {
    for (const int64_t size : {1, 5, 16, 61}) {
      test_weights(dtype, 3, 3, size, 3);
      test_sums(dtype, 3, 3, size);
    }
    test_weights(dtype, 1, 4, 1001, 20);
    test_weights(dtype, 2, 1, 40, 1);
    test_sums(dtype, 20, 4, 1001);
  }
  test_sums(DType::kFloat32, 2, 2, 8211);
  for (const bool has_ids : {false, true}) {
    test_root_logits(1, 2, 2, has_ids);
    test_root_logits(9, 37, 5, has_ids);
  }
}
