// A mixture of experts. Its parts are compared with loops in double precision and with single products, the whole is
// compared with its parts.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "matrix.h"
#include "moe.h"
#include "testing.h"

using namespace testing;

namespace {

using pagewick::GroupScore;
using pagewick::Scoring;

struct Routing {
  int64_t num_tokens, num_experts, top_k, num_groups, top_k_groups;
  Scoring scoring;
  GroupScore group_score;
  bool has_bias, renormalize;
};

constexpr float kScaling = 2.5f;

// Logits that are whole multiples of 1 / 8, each once in a row, and biases below 1 / 64, so no two keys are close.
Tensor make_logits(const Routing& r, int64_t stride) {
  Tensor logits(DType::kFloat32, (r.num_tokens - 1) * stride + r.num_experts);
  for (int64_t token = 0; token < r.num_tokens; ++token) {
    std::vector<int64_t> ranks(r.num_experts);
    std::iota(ranks.begin(), ranks.end(), 0);
    for (int64_t i = r.num_experts - 1; i > 0; --i) std::swap(ranks[i], ranks[random_below(i + 1)]);
    for (int64_t i = 0; i < r.num_experts; ++i)
      logits.set(token * stride + i, (ranks[i] - r.num_experts / 2) * 0.125);
  }
  return logits;
}

std::vector<double> scores_of(const Routing& r, const Tensor& logits, int64_t begin) {
  std::vector<double> scores(r.num_experts);
  double sum = 0;
  for (int64_t i = 0; i < r.num_experts; ++i) sum += scores[i] = std::exp(logits[begin + i]);
  for (double& score : scores) score /= r.scoring == Scoring::kSoftmax ? sum : 1.0 + score;
  return scores;
}

// The ids of experts by falling key, of the best groups alone.
std::vector<int64_t> choose(const Routing& r, const std::vector<double>& keys) {
  const int64_t size = r.num_experts / r.num_groups;
  std::vector<std::pair<double, int64_t>> groups;
  for (int64_t group = 0; group < r.num_groups; ++group) {
    std::vector<double> sorted(keys.begin() + group * size, keys.begin() + (group + 1) * size);
    std::sort(sorted.begin(), sorted.end(), std::greater<double>());
    groups.emplace_back(-sorted[0] - (r.group_score == GroupScore::kSumOfTwo ? sorted[1] : 0.0), group);
  }
  std::sort(groups.begin(), groups.end());
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < r.top_k_groups; ++i)
    for (int64_t id = 0; id < size; ++id) ids.push_back(groups[i].second * size + id);
  std::sort(ids.begin(), ids.end(), [&](int64_t a, int64_t b) { return keys[a] > keys[b]; });
  ids.resize(r.top_k);
  return ids;
}

void test_route(const Routing& r) {
  begin_case("route: %d tokens, %d of %d experts, %d of %d groups, scoring %d, group score %d, bias %d, renormalize %d",
             static_cast<int>(r.num_tokens), static_cast<int>(r.top_k), static_cast<int>(r.num_experts),
             static_cast<int>(r.top_k_groups), static_cast<int>(r.num_groups), static_cast<int>(r.scoring),
             static_cast<int>(r.group_score), r.has_bias, r.renormalize);
  const int64_t stride = r.num_experts + 3;
  const Tensor logits = make_logits(r, stride), bias = Tensor::random(DType::kFloat32, r.num_experts, 0x1p-6);
  Array<int32_t> ids(r.num_tokens * r.top_k);
  const Tensor weights = tensor_on_all_threads([&] {
    Tensor out(DType::kFloat32, r.num_tokens * r.top_k);
    std::fill_n(ids.data(), ids.size(), -1);
    run("route", pagewick::RouteArgs{logits.floats(), r.has_bias ? bias.floats() : nullptr, ids.data(),
                                     static_cast<float*>(out.data()), r.num_tokens, r.num_experts, r.top_k, stride,
                                     r.num_groups, r.top_k_groups, kScaling, r.scoring, r.group_score, r.renormalize});
    return out;
  });
  for (int64_t token = 0; token < r.num_tokens; ++token) {
    const std::vector<double> scores = scores_of(r, logits, token * stride);
    std::vector<double> keys = scores;
    for (int64_t i = 0; i < r.num_experts && r.has_bias; ++i) keys[i] += bias[i];
    const std::vector<int64_t> expected = choose(r, keys);
    double sum = 0;
    for (const int64_t id : expected) sum += scores[id];
    for (int64_t i = 0; i < r.top_k; ++i) {
      require(ids[token * r.top_k + i] == expected[i], "chosen experts");
      const double weight = scores[expected[i]] / (r.renormalize ? sum : 1.0) * kScaling;
      require_near(weights, token * r.top_k + i, weight, 4e-6 * weight, "weight");
    }
  }
}

// All arguments of a layer of experts, for a step of a few tokens.
class Layer {
 public:
  Layer(DType dtype, int64_t num_tokens, bool has_bias)
      : dtype_(dtype),
        num_tokens_(num_tokens),
        has_bias_(has_bias),
        x_(Tensor::random(dtype, num_tokens * kHidden)),
        logits_(Tensor::random(DType::kFloat32, num_tokens * kExperts, 4.0)),
        shared_(Tensor::random(dtype, num_tokens * kHidden)),
        shared_gate_(Tensor::random(DType::kFloat32, num_tokens)),
        gate_up_bias_(Tensor::random(dtype, kExperts * 2 * kInner)),
        down_bias_(Tensor::random(dtype, kExperts * kHidden)),
        gate_up_(pack(2 * kInner, kHidden)),
        down_(pack(kHidden, kInner)) {}

  void test() const {
    begin_case("experts %s, %d tokens, bias %d", name_of(dtype_), static_cast<int>(num_tokens_), has_bias_);
    const Tensor fused = tensor_on_all_threads([&] { return run_fused(); });
    Array<int32_t> ids(num_choices());
    Tensor weights(DType::kFloat32, num_choices());
    run("route", route(ids, weights, num_tokens_));
    const Tensor inner = run_grouped(x_, ids, 2 * kInner, kHidden, false);
    check_grouped(inner, x_, ids, 2 * kInner, kHidden, false);
    const Tensor activated(dtype_, num_choices() * kInner);
    run("activation", pagewick::ActivationArgs{inner.data(), activated.data(), num_choices(), kInner, 2 * kInner, dtype_,
                                               pagewick::Activation::kSilu, 1});
    const Tensor results = run_grouped(activated, ids, kHidden, kInner, true);
    check_grouped(results, activated, ids, kHidden, kInner, true);
    const Tensor out(dtype_, num_tokens_ * kHidden);
    run("combine", combine(results, weights, out));
    check_combined(out, results, weights);
    require(out == fused, "all at once gives other bits than the parts");
    check_bad_id(ids);
  }

 private:
  static constexpr int64_t kExperts = 7, kTopK = 3, kHidden = 70, kInner = 33, kChunk = 5;

  int64_t num_choices() const { return num_tokens_ * kTopK; }

  Tensor pack(int64_t num_rows, int64_t depth) const {
    const int64_t elements = (num_rows + 63) / 64 * pagewick::panel_elements(dtype_, depth);
    Tensor packed(dtype_, kExperts * elements);
    for (int64_t i = 0; i < packed.size(); ++i) packed.set(i, 0);
    for (int64_t expert = 0; expert < kExperts; ++expert) {
      const Tensor weight = Tensor::random(dtype_, num_rows * depth, 0.3);
      char* const target = static_cast<char*>(packed.data()) + expert * elements * element_size(dtype_);
      run("pack_rows", pagewick::PackArgs{weight.data(), target, 0, num_rows, depth, depth, dtype_});
    }
    return packed;
  }

  pagewick::RouteArgs route(const Array<int32_t>& ids, const Tensor& weights, int64_t num_tokens) const {
    return {logits_.floats(), nullptr, ids.data(), static_cast<float*>(weights.data()), num_tokens, kExperts, kTopK,
            kExperts, 1, 1, 1.0f, Scoring::kSoftmax, GroupScore::kMax, 1};
  }

  pagewick::GroupedLinearArgs grouped(const Tensor& x, const int32_t* ids, const Tensor& by_expert, void* out,
                                      int64_t out_features, int64_t in_features, bool is_down) const {
    const Tensor& bias = is_down ? down_bias_ : gate_up_bias_;
    return {x.data(), is_down ? down_.data() : gate_up_.data(), has_bias_ ? bias.data() : nullptr, ids,
            by_expert.data(), out, num_tokens_, kTopK, kExperts, out_features, in_features, in_features, dtype_,
            pagewick::QuantizedFormat{}, false, is_down};
  }

  pagewick::CombineArgs combine(const Tensor& results, const Tensor& weights, const Tensor& out) const {
    return {results.data(), nullptr, weights.floats(), shared_.data(), shared_gate_.floats(), out.data(), num_tokens_,
            kTopK, kHidden, kHidden, dtype_};
  }

  Tensor run_grouped(const Tensor& x, const Array<int32_t>& ids, int64_t out_features, int64_t in_features,
                     bool is_down) const {
    return tensor_on_all_threads([&] {
      const Tensor by_expert(dtype_, num_choices() * out_features);
      Tensor out(dtype_, num_choices() * out_features);
      run("grouped_linear", grouped(x, ids.data(), by_expert, out.data(), out_features, in_features, is_down));
      return out;
    });
  }

  // Computes each choice as a separate product.
  void check_grouped(const Tensor& out, const Tensor& x, const Array<int32_t>& ids, int64_t out_features,
                     int64_t in_features, bool is_down) const {
    const int64_t bytes = element_size(dtype_);
    const int64_t elements = (out_features + 63) / 64 * pagewick::panel_elements(dtype_, in_features);
    for (int64_t choice = 0; choice < num_choices(); ++choice) {
      const Tensor alone(dtype_, out_features);
      const int64_t row = is_down ? choice : choice / kTopK;
      pagewick::LinearArgs args = {};
      args.x = static_cast<char*>(x.data()) + row * in_features * bytes;
      args.weight = static_cast<char*>((is_down ? down_ : gate_up_).data()) + ids[choice] * elements * bytes;
      if (has_bias_)
        args.bias = static_cast<char*>((is_down ? down_bias_ : gate_up_bias_).data()) + ids[choice] * out_features * bytes;
      args.out = alone.data(), args.num_rows = 1, args.out_features = out_features, args.in_features = in_features;
      args.x_stride = in_features, args.out_stride = out_features, args.dtype = args.out_dtype = dtype_;
      run("linear", args);
      for (int64_t i = 0; i < out_features; ++i)
        require(alone.bits(i) == out.bits(choice * out_features + i), "a choice has other bits than a product alone");
    }
  }

  void check_combined(const Tensor& out, const Tensor& results, const Tensor& weights) const {
    for (int64_t token = 0; token < num_tokens_; ++token)
      for (int64_t i = 0; i < kHidden; ++i) {
        double sum = shared_[token * kHidden + i] / (1.0 + std::exp(-shared_gate_[token])), magnitude = std::abs(sum);
        for (int64_t choice = token * kTopK; choice < (token + 1) * kTopK; ++choice) {
          const double product = weights[choice] * results[choice * kHidden + i];
          sum += product, magnitude += std::abs(product);
        }
        require_near(out, token * kHidden + i, sum, 1e-6 * magnitude, "sum of the experts");
      }
  }

  Tensor run_fused() const {
    const int64_t chunk = std::min(kChunk, num_tokens_), choices = chunk * kTopK;
    const Array<int32_t> ids(choices);
    const Tensor weights(DType::kFloat32, choices), activated(dtype_, choices * kInner);
    const Tensor inner(dtype_, choices * 2 * kInner), results(dtype_, choices * kHidden);
    Tensor out(dtype_, num_tokens_ * kHidden);
    run("fused_moe", pagewick::FusedMoeArgs{route(ids, weights, num_tokens_),
                                            grouped(x_, ids.data(), inner, nullptr, 2 * kInner, kHidden, false),
                                            grouped(activated, ids.data(), results, nullptr, kHidden, kInner, true),
                                            combine(results, weights, out), activated.data(), num_tokens_, chunk,
                                            pagewick::Activation::kSilu, 1});
    return out;
  }

  void check_bad_id(const Array<int32_t>& ids) const {
    const Tensor by_expert(dtype_, num_choices() * kHidden), out(dtype_, num_choices() * kHidden);
    const Tensor rows(dtype_, num_choices() * kInner);
    for (const int32_t bad : {-1, static_cast<int32_t>(kExperts)}) {
      ids[num_choices() - 1] = bad;
      require(status_of("grouped_linear", grouped(rows, ids.data(), by_expert, out.data(), kHidden, kInner, true)) ==
                  pagewick::kBadRow,
              "an expert that is not there");
    }
  }

  DType dtype_;
  int64_t num_tokens_;
  bool has_bias_;
  Tensor x_, logits_, shared_, shared_gate_, gate_up_bias_, down_bias_, gate_up_, down_;
};

}  // namespace

void test_moe() {
  for (const bool renormalize : {false, true}) {
    test_route({3, 1, 1, 1, 1, Scoring::kSoftmax, GroupScore::kMax, false, renormalize});
    test_route({5, 13, 4, 1, 1, Scoring::kSoftmax, GroupScore::kMax, false, renormalize});
    test_route({40, 64, 6, 8, 3, Scoring::kSoftmax, GroupScore::kMax, false, renormalize});
    test_route({3, 30, 5, 5, 2, Scoring::kSigmoid, GroupScore::kSumOfTwo, true, renormalize});
  }
  for (const DType dtype : kDTypes)
    for (const bool has_bias : {false, true})
      for (const int64_t num_tokens : {1, 4, 13}) Layer(dtype, num_tokens, has_bias).test();
}
