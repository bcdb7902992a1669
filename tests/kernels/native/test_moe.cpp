// A mixture of experts. Its parts are compared with loops in double precision and with single products, the whole is
// compared with its parts.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "blocks.h"
#include "matrix.h"
#include "moe.h"
#include "testing.h"

using namespace testing;

namespace {

using pagewick::GroupScore;
using pagewick::QuantizedFormat;
using pagewick::Scoring;

struct Routing {
  int64_t num_tokens, num_experts, top_k, num_groups, top_k_groups;
  Scoring scoring;
  GroupScore group_score;
  bool has_bias, renormalize;
};

constexpr float kScaling = 2.5f;
constexpr float kEpsilon = 0.25f;
// No two logits are exactly so far from each other.
constexpr float kMargin = 0.33f;

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

// The weight of each choice among the experts that are left and near it.
std::vector<double> near_weights(const Routing& r, const Tensor& logits, int64_t begin, const std::vector<int64_t>& ids) {
  std::vector<double> weights;
  std::vector<bool> is_left(r.num_experts, true);
  for (const int64_t chosen : ids) {
    const double greatest = logits[begin + chosen];
    double sum = 0;
    for (int64_t i = 0; i < r.num_experts; ++i) {
      const double logit = logits[begin + i];
      const bool is_far = (greatest - logit) / std::max(std::abs(logit), greatest) > kMargin;
      if (is_left[i] && !is_far) sum += std::exp(logit - greatest);
    }
    weights.push_back(1.0 / sum);
    is_left[chosen] = false;
  }
  return weights;
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
    run("route", pagewick::RouteArgs{logits.floats(), r.has_bias ? bias.floats() : nullptr, nullptr, ids.data(),
                                     static_cast<float*>(out.data()), r.num_tokens, r.num_experts, r.top_k, stride,
                                     r.num_groups, r.top_k_groups, kScaling, kEpsilon, kMargin, r.scoring,
                                     r.group_score, r.renormalize});
    return out;
  });
  for (int64_t token = 0; token < r.num_tokens; ++token) {
    const std::vector<double> scores = scores_of(r, logits, token * stride);
    std::vector<double> keys = scores;
    for (int64_t i = 0; i < r.num_experts && r.has_bias; ++i) keys[i] += bias[i];
    const std::vector<int64_t> expected = choose(r, keys);
    std::vector<double> chosen_weights;
    for (const int64_t id : expected) chosen_weights.push_back(scores[id]);
    if (r.scoring == Scoring::kNear) chosen_weights = near_weights(r, logits, token * stride, expected);
    const double sum = std::accumulate(chosen_weights.begin(), chosen_weights.end(), 0.0);
    for (int64_t i = 0; i < r.top_k; ++i) {
      require(ids[token * r.top_k + i] == expected[i], "chosen experts");
      const double weight = chosen_weights[i] / (r.renormalize ? sum + kEpsilon : 1.0) * kScaling;
      require_near(weights, token * r.top_k + i, weight, 4e-6 * weight, "weight");
    }
  }
}

// A weight [num_rows, depth] of each expert. format: null for numbers.
struct Experts {
  Experts(DType dtype, const QuantizedFormat* format, int64_t num_experts, int64_t num_rows, int64_t depth)
      : format(format),
        num_rows(num_rows),
        depth(depth),
        bytes_each(format != nullptr ? packed_bytes(*format, num_rows, depth)
                                     : (num_rows + 63) / 64 * pagewick::panel_elements(dtype, depth) * element_size(dtype)),
        bias(Tensor::random(dtype, num_experts * num_rows)),
        packed(num_experts * bytes_each) {
    std::memset(packed.data(), 0, static_cast<size_t>(packed.size()));
    for (int64_t expert = 0; expert < num_experts; ++expert) {
      if (format != nullptr) {
        pack_random_blocks(*format, num_rows, depth, weight(expert));
        continue;
      }
      const Tensor rows = Tensor::random(dtype, num_rows * depth, 0.3);
      run("pack_rows", pagewick::PackArgs{rows.data(), weight(expert), 0, num_rows, depth, depth, dtype});
    }
  }

  char* weight(int64_t expert) const { return packed.data() + expert * bytes_each; }

  const QuantizedFormat* format;
  int64_t num_rows, depth, bytes_each;
  Tensor bias;
  Array<char> packed;
};

// Widths of a layer, and the formats of its two weights.
struct Kind {
  int64_t hidden, inner;
  const QuantizedFormat *gate_up, *down;
};

// All arguments of a layer of experts, for a step of a few tokens.
class Layer {
 public:
  Layer(const Kind& kind, DType dtype, int64_t num_tokens, bool has_bias)
      : hidden_(kind.hidden),
        inner_(kind.inner),
        dtype_(dtype),
        num_tokens_(num_tokens),
        has_bias_(has_bias),
        x_(Tensor::random(dtype, num_tokens * kind.hidden)),
        logits_(Tensor::random(DType::kFloat32, num_tokens * kExperts, 4.0)),
        shared_(Tensor::random(dtype, num_tokens * kind.hidden)),
        shared_gate_(Tensor::random(DType::kFloat32, num_tokens)),
        gate_up_(dtype, kind.gate_up, kExperts, 2 * kind.inner, kind.hidden),
        down_(dtype, kind.down, kExperts, kind.hidden, kind.inner) {}

  void test() const {
    const auto number = [](const Experts& experts) {
      return experts.format == nullptr ? -1 : static_cast<int>(*experts.format);
    };
    begin_case("experts %s, %d tokens, bias %d, formats %d and %d", name_of(dtype_), static_cast<int>(num_tokens_),
               has_bias_, number(gate_up_), number(down_));
    const Tensor fused = tensor_on_all_threads([&] { return run_fused(); });
    Array<int32_t> ids(num_choices());
    Tensor weights(DType::kFloat32, num_choices());
    run("route", route(ids, weights, num_tokens_));
    const Tensor inner = run_grouped(gate_up_, x_, ids);
    check_grouped(gate_up_, inner, x_, ids);
    const Tensor activated(dtype_, num_choices() * inner_);
    run("activation", pagewick::ActivationArgs{inner.data(), activated.data(), num_choices(), inner_, 2 * inner_, dtype_,
                                               pagewick::Activation::kSilu, 1});
    const Tensor results = run_grouped(down_, activated, ids);
    check_grouped(down_, results, activated, ids);
    const Tensor out(dtype_, num_tokens_ * hidden_);
    run("combine", combine(results, weights, out));
    check_combined(out, results, weights);
    require(out == fused, "all at once gives other bits than the parts");
    check_identities(ids, results, weights);
    check_bad_id(ids);
  }

 private:
  static constexpr int64_t kExperts = 7, kTopK = 3, kChunk = 5;

  int64_t num_choices() const { return num_tokens_ * kTopK; }

  pagewick::RouteArgs route(const Array<int32_t>& ids, const Tensor& weights, int64_t num_tokens) const {
    return {logits_.floats(), nullptr, nullptr, ids.data(), static_cast<float*>(weights.data()), num_tokens, kExperts,
            kTopK, kExperts, 1, 1, 1.0f, kEpsilon, kMargin, Scoring::kSoftmax, GroupScore::kMax,
            1};
  }

  // `extra`: elements between the rows of `out`.
  pagewick::GroupedLinearArgs grouped(const Experts& experts, const Tensor& x, const int32_t* ids,
                                      const Tensor& by_expert, void* out, int64_t extra = 0) const {
    return {x.data(), experts.packed.data(), has_bias_ ? experts.bias.data() : nullptr, ids, by_expert.data(), out,
            num_tokens_, kTopK, kExperts, experts.num_rows, experts.depth, experts.depth, experts.num_rows + extra, dtype_,
            experts.format == nullptr ? QuantizedFormat{} : *experts.format, experts.format != nullptr,
            &experts == &down_};
  }

  pagewick::CombineArgs combine(const Tensor& results, const Tensor& weights, const Tensor& out) const {
    return {results.data(), nullptr, weights.floats(), shared_.data(), shared_gate_.floats(), nullptr, out.data(),
            num_tokens_, kTopK, hidden_, hidden_, hidden_, num_choices(), dtype_};
  }

  Tensor run_grouped(const Experts& experts, const Tensor& x, const Array<int32_t>& ids) const {
    const int64_t num_rows = experts.num_rows, extra = 3;
    const Tensor apart = tensor_on_all_threads([&] {
      const Tensor by_expert(dtype_, num_choices() * num_rows);
      Tensor out(dtype_, num_choices() * (num_rows + extra) - extra);
      run("grouped_linear", grouped(experts, x, ids.data(), by_expert, out.data(), extra));
      return out;
    });
    Tensor rows(dtype_, num_choices() * num_rows);
    for (int64_t i = 0; i < apart.size(); ++i) {
      const int64_t row = i / (num_rows + extra), col = i % (num_rows + extra);
      if (col < num_rows) rows.set_bits(row * num_rows + col, apart.bits(i));
      else require(apart.is_untouched(i), "memory between rows");
    }
    return rows;
  }

  // Computes each choice as a separate product.
  void check_grouped(const Experts& experts, const Tensor& out, const Tensor& x, const Array<int32_t>& ids) const {
    const int64_t num_rows = experts.num_rows;
    for (int64_t choice = 0; choice < num_choices(); ++choice) {
      const Tensor alone(dtype_, num_rows);
      const int64_t row = &experts == &down_ ? choice : choice / kTopK;
      if (experts.format == nullptr) {
        run("linear", product<pagewick::LinearArgs>(experts, x, row, ids[choice], alone));
      } else {
        auto args = product<pagewick::QuantizedLinearArgs>(experts, x, row, ids[choice], alone);
        args.format = *experts.format;
        run("quantized_linear", args);
      }
      for (int64_t i = 0; i < num_rows; ++i)
        require(alone.bits(i) == out.bits(choice * num_rows + i), "a choice has other bits than a product alone");
    }
  }

  template <class Args>
  Args product(const Experts& experts, const Tensor& x, int64_t row, int64_t expert, const Tensor& out) const {
    const int64_t bytes = element_size(dtype_);
    Args args = {};
    args.x = static_cast<char*>(x.data()) + row * experts.depth * bytes;
    args.weight = experts.weight(expert);
    if (has_bias_) args.bias = static_cast<char*>(experts.bias.data()) + expert * experts.num_rows * bytes;
    args.out = out.data(), args.num_rows = 1, args.out_features = args.out_stride = experts.num_rows;
    args.in_features = args.x_stride = experts.depth, args.dtype = args.out_dtype = dtype_;
    return args;
  }

  void check_combined(const Tensor& out, const Tensor& results, const Tensor& weights) const {
    for (int64_t token = 0; token < num_tokens_; ++token)
      for (int64_t i = 0; i < hidden_; ++i) {
        double sum = shared_[token * hidden_ + i] / (1.0 + std::exp(-shared_gate_[token])), magnitude = std::abs(sum);
        for (int64_t choice = token * kTopK; choice < (token + 1) * kTopK; ++choice) {
          const double product = weights[choice] * results[choice * hidden_ + i];
          sum += product, magnitude += std::abs(product);
        }
        require_near(out, token * hidden_ + i, sum, 1e-6 * magnitude, "sum of the experts");
      }
  }

  // The last two experts return their input.
  void check_identities(const Array<int32_t>& ids, const Tensor& results, const Tensor& weights) const {
    const Tensor fused = tensor_on_all_threads([&] { return run_fused(2); });
    Tensor rows(dtype_, num_choices() * hidden_);
    for (int64_t choice = 0; choice < num_choices(); ++choice)
      for (int64_t i = 0; i < hidden_; ++i)
        rows.set_bits(choice * hidden_ + i, ids[choice] < kExperts - 2 ? results.bits(choice * hidden_ + i)
                                                                       : x_.bits(choice / kTopK * hidden_ + i));
    const Tensor out(dtype_, num_tokens_ * hidden_);
    run("combine", combine(rows, weights, out));
    require(out == fused, "experts that return their input give other bits");
  }

  Tensor run_fused(int64_t num_identities = 0) const {
    const int64_t chunk = std::min(kChunk, num_tokens_), choices = chunk * kTopK;
    const Array<int32_t> ids(choices);
    const Tensor weights(DType::kFloat32, choices), activated(dtype_, choices * inner_);
    const Tensor inner(dtype_, choices * 2 * inner_), results(dtype_, choices * hidden_);
    Tensor out(dtype_, num_tokens_ * hidden_);
    pagewick::FusedMoeArgs args{route(ids, weights, num_tokens_),
                                grouped(gate_up_, x_, ids.data(), inner, nullptr),
                                grouped(down_, activated, ids.data(), results, nullptr),
                                combine(results, weights, out), activated.data(), nullptr, num_tokens_, chunk,
                                pagewick::Activation::kSilu, 1};
    args.gate_up.num_experts -= num_identities, args.down.num_experts -= num_identities;
    if (num_identities > 0) args.combine.identity = x_.data();
    run("fused_moe", args);
    return out;
  }

  void check_bad_id(const Array<int32_t>& ids) const {
    const Tensor by_expert(dtype_, num_choices() * hidden_), out(dtype_, num_choices() * hidden_);
    const Tensor rows(dtype_, num_choices() * inner_);
    for (const int32_t bad : {-1, static_cast<int32_t>(kExperts)}) {
      ids[num_choices() - 1] = bad;
      require(status_of("grouped_linear", grouped(down_, rows, ids.data(), by_expert, out.data())) == pagewick::kBadRow,
              "an expert that is not there");
    }
  }

  int64_t hidden_, inner_;
  DType dtype_;
  int64_t num_tokens_;
  bool has_bias_;
  Tensor x_, logits_, shared_, shared_gate_;
  Experts gate_up_, down_;
};

}  // namespace

void test_moe() {
  for (const bool renormalize : {false, true}) {
    test_route({3, 1, 1, 1, 1, Scoring::kSoftmax, GroupScore::kMax, false, renormalize});
    test_route({5, 13, 4, 1, 1, Scoring::kSoftmax, GroupScore::kMax, false, renormalize});
    test_route({40, 64, 6, 8, 3, Scoring::kSoftmax, GroupScore::kMax, false, renormalize});
    test_route({3, 30, 5, 5, 2, Scoring::kSigmoid, GroupScore::kSumOfTwo, true, renormalize});
    test_route({40, 13, 3, 1, 1, Scoring::kNear, GroupScore::kMax, false, renormalize});
  }
  for (const DType dtype : kDTypes)
    for (const bool has_bias : {false, true})
      for (const int64_t num_tokens : {1, 4, 13}) Layer({70, 33, nullptr, nullptr}, dtype, num_tokens, has_bias).test();
  // Blocks of 32 and of 256 columns, on both sides, beside each other and beside numbers.
  constexpr QuantizedFormat kQ8_0 = QuantizedFormat::kQ8_0, kQ5_1 = QuantizedFormat::kQ5_1;
  constexpr QuantizedFormat kQ4_K = QuantizedFormat::kQ4_K, kQ6_K = QuantizedFormat::kQ6_K;
  Layer({32, 64, &kQ8_0, &kQ5_1}, DType::kFloat32, 13, false).test();
  Layer({256, 32, &kQ4_K, &kQ8_0}, DType::kBFloat16, 4, true).test();
  Layer({64, 256, &kQ5_1, &kQ6_K}, DType::kFloat16, 1, false).test();
  Layer({256, 33, &kQ6_K, nullptr}, DType::kFloat32, 4, true).test();
}
