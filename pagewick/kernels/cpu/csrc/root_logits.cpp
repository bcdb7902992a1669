// Logits whose softmax gives the weights of experts with scores sqrt(softplus(logit)), in double precision.
#include <algorithm>
#include <cmath>
#include <limits>

#include "moe.h"
#include "parallel.h"

namespace pagewick {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// From here on softplus(x) is x.
constexpr double kLarge = 20.0;
// Up to here it is e^x.
constexpr double kSmall = -30.0;

double softplus(double x) { return x > kLarge ? x : std::log1p(std::exp(x)); }

double log_score(double logit) { return 0.5 * (logit < kSmall ? logit : std::log(softplus(logit))); }

struct Key {
  float value;
  int64_t id;

  // Whether this one is chosen first. A NaN is greater than every number.
  bool operator<(const Key& other) const {
    const bool is_nan = value != value, other_is_nan = other.value != other.value;
    if (is_nan != other_is_nan) return is_nan;
    if (!is_nan && value != other.value) return value > other.value;
    return id < other.id;
  }
};

// Writes the ids of a token's experts to `ids`.
void choose(const RootLogitsArgs& args, const float* logits, int64_t* ids) {
  Key* const keys =
      static_cast<Key*>(thread_scratch(Scratch::kKernel, static_cast<size_t>(args.num_experts) * sizeof(Key)));
  for (int64_t id = 0; id < args.num_experts; ++id)
    keys[id] = {static_cast<float>(std::sqrt(softplus(double{logits[id]}))) + args.bias[id], id};
  std::partial_sort(keys, keys + args.top_k, keys + args.num_experts);
  for (int64_t i = 0; i < args.top_k; ++i) ids[i] = keys[i].id;
}

void weigh(const RootLogitsArgs& args, const float* logits, const int64_t* ids, float* out) {
  // No number minus infinity is left of what is not one.
  for (int64_t id = 0; id < args.num_experts; ++id)
    out[id] = static_cast<float>(double{logits[id]} < kInfinity ? -kInfinity : std::nan(""));
  for (int64_t i = 0; i < args.top_k; ++i) {
    const auto count = static_cast<double>(std::count(ids, ids + args.top_k, ids[i]));
    out[ids[i]] = static_cast<float>(log_score(double{logits[ids[i]]}) + std::log(count));
  }
}

}  // namespace

Status root_logits(const Kernels&, const RootLogitsArgs& args) {
  const auto is_inside = [&args](int64_t id) { return id >= 0 && id < args.num_experts; };
  if (args.ids != nullptr && !std::all_of(args.ids, args.ids + args.num_tokens * args.top_k, is_inside)) return kBadRow;
  parallel_for(args.num_tokens, [&](int64_t token) {
    const float* const logits = args.logits + token * args.logits_stride;
    float* const out = args.out + token * args.num_experts;
    const int64_t* ids = args.ids + token * args.top_k;
    if (args.ids == nullptr) {
      int64_t* const chosen = static_cast<int64_t*>(
          thread_scratch(Scratch::kPrepared, static_cast<size_t>(args.top_k) * sizeof(int64_t)));
      choose(args, logits, chosen);
      ids = chosen;
    }
    weigh(args, logits, ids, out);
  });
  return kOk;
}

}  // namespace pagewick
