#include <algorithm>
#include <cmath>

#include "packed.h"
#include "testing.h"
#include "rope.h"

using namespace testing;

namespace {

constexpr float kEps = 1e-5f;

enum class Norm { kNone, kRms, kRmsWithOffset, kLayer, kLayerPerHead };

struct Case {
  DType dtype, cache_dtype;
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, block_size;
  bool is_interleaved;
  Norm norm;
};

struct Number {
  double value, error;
};

// The norm of `heads` heads of a case: its arguments, and its definition in double precision.
class HeadNorm {
 public:
  HeadNorm(const Case& c, int64_t heads)
      : norm_(c.norm),
        head_dim_(c.head_dim),
        weight_(Tensor::random(c.dtype, (is_per_head() ? heads : 1) * c.head_dim)),
        bias_(Tensor::random(c.dtype, weight_.size())) {}

  pagewick::HeadNormArgs args() const {
    if (norm_ == Norm::kNone) return {};
    return {weight_.data(), norm_ == Norm::kLayer ? bias_.data() : nullptr, is_per_head() ? head_dim_ : 0,
            kEps, offset(), norm_ >= Norm::kLayer, false};
  }

  // Returns the normalised element d of the head that begins at x[first]; it is number `head` of those that this norm
  // is for.
  Number normed(const Tensor& x, int64_t first, int64_t head, int64_t d) const {
    if (norm_ == Norm::kNone) return {x[first + d], 0.0};
    double mean = 0, magnitude = 0, squares = 0;
    if (norm_ >= Norm::kLayer)
      for (int64_t i = 0; i < head_dim_; ++i)
        mean += x[first + i] / head_dim_, magnitude += std::abs(x[first + i]) / head_dim_;
    for (int64_t i = 0; i < head_dim_; ++i) squares += (x[first + i] - mean) * (x[first + i] - mean);
    const double scale = 1.0 / std::sqrt(squares / head_dim_ + static_cast<double>(kEps));
    const int64_t place = (is_per_head() ? head * head_dim_ : 0) + d;
    const double weight = weight_[place] + offset(), bias = norm_ == Norm::kLayer ? bias_[place] : 0.0;
    const double normed = (x[first + d] - mean) * scale, value = normed * weight + bias;
    const double error = (8 + head_dim_ / 4) * kFloatUnit * (std::abs(normed) + magnitude * scale) * std::abs(weight);
    return {value, error + kFloatUnit * std::abs(value)};
  }

 private:
  bool is_per_head() const { return norm_ == Norm::kLayerPerHead; }
  float offset() const { return norm_ == Norm::kRmsWithOffset ? 1.0f : 0.0f; }

  Norm norm_;
  int64_t head_dim_;
  Tensor weight_, bias_;
};

class RopeStore {
 public:
  explicit RopeStore(const Case& c)
      : c_(c),
        packed_{c.cache_dtype, c.num_kv_heads, c.head_dim, c.block_size},
        num_blocks_((c.num_tokens + c.block_size) / c.block_size + 1),
        qkv_stride_((c.num_heads + 2 * c.num_kv_heads) * c.head_dim + 3),
        angle_stride_(c.rotary_dim / 2 + 1),
        qkv_(Tensor::random(c.dtype, c.num_tokens * qkv_stride_ - 3, 2.0)),
        cos_(Tensor::random(DType::kFloat32, c.num_tokens * angle_stride_ - 1)),
        sin_(Tensor::random(DType::kFloat32, c.num_tokens * angle_stride_ - 1)),
        q_norm_(c, c.num_heads),
        k_norm_(c, c.num_kv_heads),
        slots_(c.num_tokens) {
    // From the last slot down; every fifth token is not stored.
    for (int64_t token = 0; token < c.num_tokens; ++token)
      slots_[token] = token % 5 == 3 ? -1 : num_blocks_ * c.block_size - 1 - token;
  }

  // Queries and cache after tokens [first, first + count).
  int32_t compute(int64_t first, int64_t count, Outputs& outputs) const {
    outputs.emplace_back(c_.dtype, count * c_.num_heads * c_.head_dim);
    outputs.emplace_back(c_.cache_dtype, packed_.size(num_blocks_));
    pagewick::RopeStoreArgs args = {};
    args.qkv = static_cast<char*>(qkv_.data()) + first * qkv_stride_ * element_size(c_.dtype);
    if (c_.rotary_dim > 0)
      args.cos = cos_.floats() + first * angle_stride_, args.sin = sin_.floats() + first * angle_stride_;
    args.q_norm = q_norm_.args(), args.k_norm = k_norm_.args();
    args.slot_mapping = slots_.data() + first, args.q = outputs[0].data(), args.cache = outputs[1].data();
    args.num_tokens = count, args.num_heads = c_.num_heads, args.num_kv_heads = c_.num_kv_heads;
    args.head_dim = c_.head_dim, args.rotary_dim = c_.rotary_dim, args.qkv_stride = qkv_stride_;
    args.angle_stride = angle_stride_, args.num_blocks = num_blocks_, args.block_size = c_.block_size;
    args.dtype = c_.dtype, args.cache_dtype = c_.cache_dtype;
    args.is_interleaved = c_.is_interleaved;
    return status_of("rope_and_store", args);
  }

  void check(const Outputs& outputs) const {
    std::vector<bool> is_stored(outputs[1].size());
    for (int64_t token = 0; token < c_.num_tokens; ++token) {
      for (int64_t head = 0; head < c_.num_heads; ++head)
        for (int64_t d = 0; d < c_.head_dim; ++d) {
          const Number number = turned(token, 0, head, d, q_norm_);
          require_near(outputs[0], (token * c_.num_heads + head) * c_.head_dim + d, number.value, number.error, "query");
        }
      if (slots_[token] < 0) continue;
      for (int64_t head = 0; head < c_.num_kv_heads; ++head)
        for (int64_t d = 0; d < packed_.dim(); ++d) check_stored(outputs[1], token, head, d, is_stored);
    }
    for (int64_t i = 0; i < outputs[1].size(); ++i)
      require(is_stored[i] || outputs[1].is_untouched(i), "a slot of nobody was written to");
  }

  void check_bad_slot() const {
    const int64_t slot = slots_[0];
    slots_[0] = num_blocks_ * c_.block_size;
    Outputs outputs;
    require(compute(0, c_.num_tokens, outputs) == pagewick::kBadBlockId, "a slot outside the cache");
    for (int64_t i = 0; i < outputs[1].size(); ++i) require(outputs[1].is_untouched(i), "written in spite of it");
    slots_[0] = slot;
  }

 private:
  double input(int64_t token, int64_t head, int64_t d) const {
    return qkv_[token * qkv_stride_ + head * c_.head_dim + d];
  }

  // first_head: the first of the heads that `norm` is for.
  Number normed(int64_t token, int64_t first_head, int64_t head, int64_t d, const HeadNorm& norm) const {
    return norm.normed(qkv_, token * qkv_stride_ + (first_head + head) * c_.head_dim, head, d);
  }

  Number turned(int64_t token, int64_t first_head, int64_t head, int64_t d, const HeadNorm& norm) const {
    const Number number = normed(token, first_head, head, d, norm);
    if (d >= c_.rotary_dim) return number;
    const int64_t half = c_.rotary_dim / 2;
    const bool is_second = c_.is_interleaved ? d % 2 == 1 : d >= half;
    const int64_t pair = c_.is_interleaved ? d / 2 : d % half;
    const int64_t other = c_.is_interleaved ? d ^ 1 : is_second ? d - half : d + half;
    const double cos = cos_[token * angle_stride_ + pair], sin = sin_[token * angle_stride_ + pair];
    const Number opposite = normed(token, first_head, head, other, norm);
    const double straight = number.value * cos, across = opposite.value * sin;
    return {is_second ? straight + across : straight - across,
            3 * kFloatUnit * (std::abs(straight) + std::abs(across)) + number.error * std::abs(cos) +
                opposite.error * std::abs(sin)};
  }

  void check_stored(const Tensor& cache, int64_t token, int64_t head, int64_t d, std::vector<bool>& is_stored) const {
    const int64_t key = packed_.key(slots_[token], head, d), value = packed_.value(slots_[token], head, d);
    is_stored[key] = is_stored[value] = true;
    if (d >= c_.head_dim) {
      require(cache.bits(key) == 0 && cache.bits(value) == 0, "a padding dimension that is not 0");
      return;
    }
    const int64_t first_value = c_.num_heads + c_.num_kv_heads;
    const Number number = turned(token, c_.num_heads, head, d, k_norm_);
    // The result is rounded to the type of the queries first.
    const double low = rounded(c_.dtype, number.value - number.error), high = rounded(c_.dtype, number.value + number.error);
    require_near(cache, key, (low + high) / 2, (high - low) / 2, "key");
    require_near(cache, value, input(token, first_value + head, d), 0.0, "value");
  }

  Case c_;
  Packed packed_;
  int64_t num_blocks_, qkv_stride_, angle_stride_;
  Tensor qkv_, cos_, sin_;
  HeadNorm q_norm_, k_norm_;
  Array<int64_t> slots_;
};

void test_rope(const Case& c) {
  begin_case("rope_and_store %s, cache %s, %d tokens, heads %d and %d of %d, %d turn, blocks of %d, interleaved %d, norm %d",
             name_of(c.dtype), name_of(c.cache_dtype), static_cast<int>(c.num_tokens), static_cast<int>(c.num_heads),
             static_cast<int>(c.num_kv_heads), static_cast<int>(c.head_dim), static_cast<int>(c.rotary_dim),
             static_cast<int>(c.block_size), c.is_interleaved, static_cast<int>(c.norm));
  const RopeStore rope(c);
  const Outputs outputs = on_all_threads([&] {
    Outputs computed;
    require(rope.compute(0, c.num_tokens, computed) == pagewick::kOk, "status");
    return computed;
  });
  rope.check(outputs);
  rope.check_bad_slot();
  Outputs alone;
  const int64_t last = c.num_tokens - 1, size = c.num_heads * c.head_dim;
  require(rope.compute(last, 1, alone) == pagewick::kOk, "status");
  for (int64_t i = 0; i < size; ++i)
    require(alone[0].bits(i) == outputs[0].bits(last * size + i), "a token alone has other bits");
  for (int64_t i = 0; i < alone[1].size(); ++i)
    require(alone[1].is_untouched(i) || alone[1].bits(i) == outputs[1].bits(i), "a key alone has other bits");
}

void test_angles(int64_t num_tokens, int64_t num_frequencies) {
  begin_case("rotary_angles [%d, %d]", static_cast<int>(num_tokens), static_cast<int>(num_frequencies));
  constexpr float kScale = 1.25f;
  constexpr int64_t kShift = -3;
  Array<int64_t> positions(num_tokens);
  for (int64_t i = 0; i < num_tokens; ++i) positions[i] = i == 0 ? 1 : random_below(i % 2 ? 1 << 24 : 5000);
  Tensor frequencies(DType::kFloat32, num_frequencies);
  for (int64_t i = 0; i < num_frequencies; ++i) frequencies.set(i, std::pow(10000.0, -1.0 * i / num_frequencies));
  const Outputs outputs = on_all_threads([&] {
    Outputs computed;
    for (int i = 0; i < 2; ++i) computed.emplace_back(DType::kFloat32, num_tokens * num_frequencies);
    run("rotary_angles", pagewick::RotaryAnglesArgs{positions.data(), frequencies.floats(),
                                                    static_cast<float*>(computed[0].data()),
                                                    static_cast<float*>(computed[1].data()), num_tokens,
                                                    num_frequencies, kShift, kScale});
    return computed;
  });
  for (int64_t i = 0; i < num_tokens * num_frequencies; ++i) {
    const auto position = static_cast<double>(std::max<int64_t>(0, positions[i / num_frequencies] + kShift));
    const double angle = rounded(DType::kFloat32, position * frequencies[i % num_frequencies]);
    require_near(outputs[0], i, rounded(DType::kFloat32, std::cos(angle)) * kScale, 0.0, "cos");
    require_near(outputs[1], i, rounded(DType::kFloat32, std::sin(angle)) * kScale, 0.0, "sin");
  }
}

double power(double base, double exponent) {
  return rounded(DType::kFloat32, std::pow(base, rounded(DType::kFloat32, exponent)));
}

// The base of the frequencies at a position, rounded to float32 after every step.
double dynamic_base(int64_t position, int64_t rotary_dim, int64_t original_length, double theta, double factor) {
  const auto round = [](double value) { return rounded(DType::kFloat32, value); };
  if (position < original_length) return round(theta);
  const double stretched = round(round(round(factor) * (position + 1)) / original_length);
  const double growth = round(stretched - round(factor - 1));
  return round(round(theta) * power(growth, rotary_dim / (rotary_dim - 2.0)));
}

void test_dynamic_angles(int64_t num_tokens, int64_t rotary_dim, double factor) {
  begin_case("dynamic_rotary_angles [%d, %d], factor %g", static_cast<int>(num_tokens), static_cast<int>(rotary_dim),
             factor);
  constexpr int64_t kOriginalLength = 48;
  constexpr double kTheta = 10000.1;
  const int64_t half = rotary_dim / 2;
  Array<int64_t> positions(num_tokens);
  for (int64_t i = 0; i < num_tokens; ++i) positions[i] = i % 3 == 2 ? random_below(1 << 20) : kOriginalLength / 2 + i;
  const Outputs outputs = on_all_threads([&] {
    Outputs computed;
    for (int i = 0; i < 2; ++i) computed.emplace_back(DType::kFloat32, num_tokens * half);
    run("dynamic_rotary_angles",
        pagewick::DynamicAnglesArgs{positions.data(), static_cast<float*>(computed[0].data()),
                                    static_cast<float*>(computed[1].data()), num_tokens, rotary_dim, kOriginalLength,
                                    kTheta, factor});
    return computed;
  });
  for (int64_t i = 0; i < num_tokens * half; ++i) {
    const int64_t position = positions[i / half];
    const double base = dynamic_base(position, rotary_dim, kOriginalLength, kTheta, factor);
    const double frequency = rounded(DType::kFloat32, 1.0 / power(base, 2.0 * (i % half) / rotary_dim));
    const double angle = rounded(DType::kFloat32, position * frequency);
    require_near(outputs[0], i, std::cos(angle), 0.0, "cos");
    require_near(outputs[1], i, std::sin(angle), 0.0, "sin");
  }
}

}  // namespace

void test_rope() {
  for (const DType dtype : kDTypes)
    for (const DType cache_dtype : {dtype, DType::kBFloat16, DType::kFloat32}) {
      test_rope({dtype, cache_dtype, 1, 1, 1, 16, 16, 2, false, Norm::kNone});
      test_rope({dtype, cache_dtype, 6, 4, 2, 24, 24, 16, false, Norm::kRms});
      test_rope({dtype, cache_dtype, 7, 3, 1, 40, 18, 6, false, Norm::kRmsWithOffset});
      test_rope({dtype, cache_dtype, 5, 2, 2, 34, 14, 4, true, Norm::kLayer});
      test_rope({dtype, cache_dtype, 21, 4, 2, 48, 20, 20, false, Norm::kLayerPerHead});
      test_rope({dtype, cache_dtype, 9, 1, 1, 7, 2, 8, true, Norm::kLayerPerHead});
      test_rope({dtype, cache_dtype, 5, 2, 1, 64, 0, 32, false, Norm::kRms});
      test_rope({dtype, cache_dtype, 150, 5, 1, 128, 128, 32, false, Norm::kNone});
    }
  test_angles(1, 1);
  test_angles(5, 12);
  test_angles(70, 64);
  test_dynamic_angles(1, 4, 1.0);
  test_dynamic_angles(5, 6, 4.0);
  test_dynamic_angles(90, 128, 2.5);
}
