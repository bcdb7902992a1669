#include <algorithm>
#include <cmath>
#include <vector>

#include "logits.h"
#include "testing.h"

using namespace testing;

namespace {

constexpr int64_t kRows = 9;

// Rows of several kinds, `stride` apart: ties, infinities, a NaN, large numbers.
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
  Tensor values(DType::kFloat32, num_rows);
  run("argmax_rows", pagewick::ArgmaxArgs{logits.floats() + first_row * stride, ids.data(),
                                          static_cast<float*>(values.data()), num_rows, size, stride});
  for (int64_t row = 0; row < num_rows; ++row)
    require_near(values, row, logits[(first_row + row) * stride + ids[row]], 0.0, "the greatest itself");
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
  // The kernel promises a relative error of 2^-22 for e^x, and 0 below e^-88. Sums of up to 8192 numbers are computed
  // in chains of at most 512.
  require_near(outputs[1], row, std::isfinite(max) ? std::log(sum) : std::nan(""), 1e-5, "log of the sum");
}

struct Draw {
  float temperature;
  int64_t top_k;
  double top_p, uniform;
  double min_p = 0;
};

Array<int64_t> draw(const Tensor& logits, int64_t first_row, int64_t num_rows, int64_t size, int64_t stride, Draw wish,
                    const uint8_t* masks = nullptr) {
  Array<float> temperature(num_rows);
  Array<int64_t> top_k(num_rows), ids(num_rows);
  Array<double> min_p(num_rows), top_p(num_rows), uniform(num_rows);
  for (int64_t i = 0; i < num_rows; ++i) {
    temperature[i] = wish.temperature, top_k[i] = wish.top_k, top_p[i] = wish.top_p, uniform[i] = wish.uniform;
    min_p[i] = wish.min_p;
  }
  run("sample_tokens", pagewick::SampleArgs{logits.floats() + first_row * stride, temperature.data(), min_p.data(),
                                            top_k.data(), top_p.data(), uniform.data(), masks, ids.data(), num_rows,
                                            size, stride, pagewick::ceil_div(size, 8)});
  return ids;
}

// The tokens of a row without NaN, from the greatest logit on, and the first of equal ones first.
std::vector<int64_t> order_of(const Tensor& logits, int64_t begin, int64_t size) {
  std::vector<int64_t> order;
  for (int64_t i = 0; i < size; ++i) order.push_back(i);
  const float* const row = logits.floats() + begin;
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return row[a] > row[b]; });
  return order;
}

// Whether drawing this token from a row is correct. Weights are rounded to float, so near the border between two tokens
// both are correct. order: order_of the row.
bool is_drawn(const Tensor& logits, int64_t begin, std::vector<int64_t> order, Draw wish, int64_t token_id) {
  const double max = logits[begin + order[0]];
  const auto weight = [&](int64_t id) {
    return std::exp((logits[begin + id] - max) / static_cast<double>(wish.temperature));
  };
  while (weight(order.back()) < wish.min_p) order.pop_back();
  if (wish.top_k > 0 && wish.top_k < static_cast<int64_t>(order.size())) order.resize(static_cast<size_t>(wish.top_k));
  constexpr double kError = 1e-4;
  double total = 0;
  for (const int64_t id : order) total += weight(id);
  double kept = 0, passed = 0;
  for (const int64_t id : order)
    if (kept < wish.top_p * total) kept += weight(id);
  for (const int64_t id : order) {
    const double target = wish.uniform * kept, error = kError * total;
    if (id == token_id) return passed <= target + error && (target - error <= passed + weight(id) || passed > kept);
    passed += weight(id);
  }
  return false;
}

void test_draws(const Tensor& logits, int64_t size, int64_t stride) {
  // Nothing can be drawn from a row with a NaN, with infinity or with -infinity only.
  for (const int64_t row : {0, 1, 3, 7, 8}) {
    if (row == 3 && size < 2) continue;
    const std::vector<int64_t> order = order_of(logits, row * stride, size);
    for (const Draw wish : {Draw{1.0f, 0, 1.0, 0.3}, Draw{1.0f, 0, 1.0, 0.999999}, Draw{0.5f, 0, 0.9, 0.7},
                            Draw{8.0f, 7, 1.0, 0.9},
                            Draw{1.0f, 40, 0.6, 0.0}, Draw{3.0f, 0, 1.0, 0.999999999}, Draw{2.0f, 0, 0.8, 0.5, 0.01},
                            Draw{4.0f, 100, 0.9, 0.4, 0.3}, Draw{1e-30f, 0, 1.0, 0.5}, Draw{1e6f, 0, 1.0, 0.25}}) {
      pw_set_num_threads(1);
      const int64_t alone = draw(logits, row, 1, size, stride, wish)[0];
      require(is_drawn(logits, row * stride, order, wish, alone), "a token that may be drawn");
      pw_set_num_threads(3);
      if (row == 7) require(draw(logits, row, 2, size, stride, wish)[0] == alone, "a row alone draws another token");
    }
  }
  const Array<int64_t> greatest = draw(logits, 7, 2, size, stride, {0.0f, 3, 0.5, 0.9});
  for (const int64_t row : {7, 8})
    require(greatest[row - 7] == first_greatest(logits, row * stride, size), "the first of the greatest");
  draw(logits, 0, 0, size, stride, {1.0f, 0, 1.0, 0.5});
}

// Every third token is excluded; a copy of the logits has -inf there.
void test_masks(const Tensor& logits, int64_t size, int64_t stride) {
  const int64_t mask_bytes = pagewick::ceil_div(size, 8);
  Array<uint8_t> masks(kRows * mask_bytes);
  Tensor expected(DType::kFloat32, (kRows - 1) * stride + size);
  for (int64_t i = 0; i < kRows * mask_bytes; ++i) masks[i] = 0;
  for (int64_t row = 0; row < kRows; ++row)
    for (int64_t i = 0; i < size; ++i) {
      if (i % 3 != 0) masks[row * mask_bytes + i / 8] |= static_cast<uint8_t>(1 << i % 8);
      expected.set(row * stride + i, i % 3 != 0 ? logits[row * stride + i] : -HUGE_VAL);
    }
  for (const int32_t threads : {1, 3}) {
    pw_set_num_threads(threads);
    Array<int64_t> ids(kRows);
    Tensor values(DType::kFloat32, kRows), highest(DType::kFloat32, kRows);
    run("argmax_allowed", pagewick::AllowedArgs{logits.floats(), masks.data(), ids.data(),
                                                static_cast<float*>(values.data()),
                                                static_cast<float*>(highest.data()), kRows, size, stride, mask_bytes});
    for (int64_t row = 0; row < kRows; ++row) {
      const int64_t begin = row * stride, found = first_greatest(expected, begin, size);
      require(ids[row] == found, "the first of the greatest that are allowed");
      require_near(values, row, expected[begin + found], 0.0, "the greatest that is allowed");
      require_near(highest, row, logits[begin + first_greatest(logits, begin, size)], 0.0, "the greatest of all");
    }
    for (const int64_t row : {0, 1, 7, 8}) {
      if (size < 2) continue;
      const Draw wish = {1.0f, 0, 0.9, 0.6};
      const int64_t drawn = draw(logits, row, 1, size, stride, wish, masks.data() + row * mask_bytes)[0];
      require(drawn == draw(expected, row, 1, size, stride, wish)[0], "a mask acts as -inf does");
    }
  }
}

constexpr double kTemperature = 2.0;

// One row of logits, and what filters compute from it.
struct Weighed {
  const Tensor& logits;
  int64_t begin, size;
  double max = -HUGE_VAL, mass = 0, distances = 0;

  Weighed(const Tensor& all, int64_t begin, int64_t size) : logits(all), begin(begin), size(size) {
    for (int64_t i = 0; i < size; ++i) max = std::max(max, logits[begin + i]);
    for (int64_t i = 0; i < size; ++i) {
      mass += weight(i);
      if (weight(i) > 0) distances += distance(i) * weight(i);
    }
  }
  double distance(int64_t i) const { return (max - logits[begin + i]) / kTemperature; }
  double weight(int64_t i) const { return std::exp(-distance(i)); }
};

// The tokens up to one have at least this share of the mass, and those before it have less; an order is a function that
// gives numbers, the least one first. Borders are rounded.
template <class Order>
void check_prefix(const Weighed& row, const Tensor& masked, double share, const Order& order) {
  double kept = 0, last = -HUGE_VAL, weight_of_last = 0, first_dropped = HUGE_VAL;
  for (int64_t i = 0; i < row.size; ++i) {
    if (std::isfinite(masked[i])) {
      kept += row.weight(i);
      if (order(i) >= last) last = order(i), weight_of_last = row.weight(i);
    } else if (row.weight(i) > 1e-15) {
      first_dropped = std::min(first_dropped, order(i));
    }
  }
  require(last <= first_dropped + 1e-5, "the first tokens are kept");
  require(kept >= (share - 1e-5) * row.mass, "enough tokens are kept");
  require(kept - weight_of_last <= (share + 1e-5) * row.mass, "no more tokens are kept");
}

// Tokens from a distance on are dropped, or those before it; within a rounding error, both are right.
void check_border(const Weighed& row, const Tensor& masked, double border) {
  for (int64_t i = 0; i < row.size; ++i)
    if (std::abs(row.distance(i) - border) > 1e-5 * (1 + std::abs(border)))
      require(std::isfinite(masked[i]) == (row.distance(i) < border), "tokens up to a border are kept");
}

Tensor truncated(const Tensor& logits, int64_t row, int64_t size, int64_t stride, pagewick::Truncation filter,
                 double limit, int64_t top_k = 0) {
  Array<double> temperature(1), limits(1);
  Array<int64_t> top_ks(1);
  temperature[0] = kTemperature, limits[0] = limit, top_ks[0] = top_k;
  Tensor masked(DType::kFloat32, size);
  run("truncate_rows", pagewick::TruncateArgs{logits.floats() + row * stride, temperature.data(), limits.data(),
                                              top_ks.data(), static_cast<float*>(masked.data()), 1, size, stride,
                                              filter});
  for (int64_t i = 0; i < size; ++i)
    require(masked[i] == logits[row * stride + i] || masked[i] == -HUGE_VAL, "a logit or -inf");
  return masked;
}

void test_truncations(const Tensor& logits, int64_t size, int64_t stride) {
  using pagewick::Truncation;
  for (const int64_t at : {0, 1, 3, 7}) {
    if (at == 3 && size < 2) continue;
    const Weighed row(logits, at * stride, size);
    const auto filtered = [&](Truncation filter, double limit, int64_t top_k = 0) {
      return truncated(logits, at, size, stride, filter, limit, top_k);
    };
    check_border(row, filtered(Truncation::kMinP, 0.03), -std::log(0.03));
    check_border(row, filtered(Truncation::kSurprise, 20.0), 20.0 * std::log(2.0) - std::log(row.mass));
    double count = 0, sum = 0, squares = 0;
    for (int64_t i = 0; i < size; ++i)
      if (std::isfinite(logits[row.begin + i])) count += 1, sum += row.distance(i);
    for (int64_t i = 0; i < size; ++i)
      if (std::isfinite(logits[row.begin + i])) squares += std::pow(row.distance(i) - sum / count, 2);
    check_border(row, filtered(Truncation::kSigmas, 1.1), std::max(1e-3, 1.1 * std::sqrt(squares / count)));
    check_prefix(row, filtered(Truncation::kTopP, 0.7), 0.7, [&](int64_t i) { return row.distance(i); });
    check_prefix(row, filtered(Truncation::kTypicalP, 0.6), 0.6,
                 [&](int64_t i) { return std::abs(row.distance(i) - row.distances / row.mass); });
    const Tensor few = filtered(Truncation::kTopP, 1.0, 3), others = filtered(Truncation::kXtc, 0.02);
    int64_t num_few = 0, num_likely = 0, num_kept = 0;
    for (int64_t i = 0; i < size; ++i) {
      const bool is_likely = row.weight(i) >= 0.02 * row.mass;
      num_few += std::isfinite(few[i]), num_likely += is_likely, num_kept += is_likely && std::isfinite(others[i]);
      require(is_likely || others[i] == logits[row.begin + i], "unlikely tokens stay");
    }
    require(num_few == std::min<int64_t>(3, static_cast<int64_t>(count)), "three tokens");
    require(num_kept == std::min<int64_t>(1, num_likely), "one likely token");
    Array<double> temperature(1), bits(1);
    Array<int64_t> token_ids(1);
    temperature[0] = kTemperature, token_ids[0] = size - 1;
    run("surprise", pagewick::SurpriseArgs{logits.floats() + row.begin, temperature.data(), token_ids.data(),
                                           bits.data(), 1, size, stride});
    const double expected = (row.distance(size - 1) + std::log(row.mass)) / std::log(2.0);
    require(bits[0] == expected || std::abs(bits[0] - expected) < 1e-5 * (1 + expected), "the surprise");
  }
}

void test_ranks(const Tensor& logits, int64_t size, int64_t stride) {
  constexpr int64_t kRanked[] = {0, 1, 2, 3, 4, 7, 8};
  std::vector<int64_t> orders[kRows];
  for (const int64_t row : kRanked) orders[row] = order_of(logits, row * stride, size);
  for (const int64_t num_top : {int64_t{0}, int64_t{1}, int64_t{5}, int64_t{100}}) {
    if (num_top > size) continue;
    Array<int64_t> token_ids(kRows), ranks(kRows), top_ids(kRows * num_top);
    Tensor top(DType::kFloat32, kRows * num_top);
    for (int64_t row = 0; row < kRows; ++row) token_ids[row] = row * 7 % size;
    run("rank_tokens", pagewick::RankArgs{logits.floats(), token_ids.data(), ranks.data(), top_ids.data(),
                                          static_cast<float*>(top.data()), kRows, size, stride, num_top});
    for (const int64_t row : kRanked) {
      const auto at = [&](int64_t i) { return logits[row * stride + i]; };
      const std::vector<int64_t>& order = orders[row];
      int64_t rank = 1;
      for (int64_t i = 0; i < size; ++i) rank += at(i) > at(token_ids[row]);
      require(ranks[row] == rank, "the rank of a token");
      for (int64_t i = 0; i < num_top; ++i) {
        require(top_ids[row * num_top + i] == order[static_cast<size_t>(i)], "the most likely tokens in their order");
        require(top[row * num_top + i] == at(order[static_cast<size_t>(i)]), "their logits");
      }
    }
  }
}

void test_size(int64_t size) {
  begin_case("argmax_rows, log_softmax_stats, rank_tokens, sample_tokens, surprise, truncate_rows of %d",
             static_cast<int>(size));
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
  test_draws(logits, size, stride);
  test_masks(logits, size, stride);
  test_truncations(logits, size, stride);
  test_ranks(logits, size, stride);
  argmax(logits, 0, 0, size, stride);
  softmax_stats(logits, 0, 0, size, stride);
}

}  // namespace

void test_logits() {
  for (const int64_t size : {1, 3, 15, 16, 17, 63, 200, 8192, 8193, 20011}) test_size(size);
}
