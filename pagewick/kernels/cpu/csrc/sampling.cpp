// Draws tokens without sorting the vocabulary: tokens are counted and their weights summed in buckets of similar
// weight. Only the buckets in which top_k, top_p or the drawn token falls are sorted. Where few tokens decide the draw,
// only these are counted.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "logits.h"
#include "token_order.h"

namespace pagewick {
namespace {

// Returns the index of the drawn token.
int64_t draw(TokenOrder order, int64_t top_k, double top_p, double uniform) {
  Place kept = order.all();
  if (top_k > 0 && top_k < kept.count) kept = order.find([&](const Place& place) { return place.count >= top_k; });
  if (top_p < 1) {
    const Place most = kept;
    kept = order.find([&](const Place& place) { return place.mass >= top_p * most.mass || place.count >= most.count; });
  }
  const double passed = uniform * kept.mass;
  return order.find([&](const Place& place) { return place.mass > passed || place.count >= kept.count; }).token_id;
}

// Returns the index of the drawn token where others with the mass `rest` follow the tokens of a row; -1 if these decide
// which one is drawn.
int64_t draw_before(TokenOrder order, double rest, double top_p, double uniform) {
  const double known = order.all().mass;
  double kept = known + rest;
  if (top_p < 1) {
    const double share = top_p * kept;
    if (known < share) return -1;
    kept = order.find([&](const Place& place) { return place.mass >= share; }).mass;
  }
  const double passed = uniform * kept;
  return known > passed ? order.find([&](const Place& place) { return place.mass > passed; }).token_id : -1;
}

void find_most_likely(const Kernels& kernels, const SampleArgs& args) {
  if (args.masks == nullptr) {
    argmax_rows(kernels, {args.logits, args.token_ids, nullptr, args.num_rows, args.vocab_size, args.stride});
    return;
  }
  const size_t num_bytes = static_cast<size_t>(args.num_rows) * 2 * sizeof(float);
  float* const values = static_cast<float*>(thread_scratch(Scratch::kPlan, num_bytes));
  argmax_allowed(kernels, {args.logits, args.masks, args.token_ids, values, values + args.num_rows, args.num_rows,
                           args.vocab_size, args.stride, args.mask_bytes});
}

// Returns a row of logits; with a mask, a copy in scratch memory of this thread.
const float* allowed_logits(const LogitsKernels& kernels, const SampleArgs& args, int64_t row) {
  const float* const logits = args.logits + row * args.stride;
  if (args.masks == nullptr) return logits;
  const size_t num_bytes = static_cast<size_t>(args.vocab_size) * sizeof(float);
  float* const allowed = static_cast<float*>(thread_scratch(Scratch::kPrepared, num_bytes));
  kernels.mask(logits, args.masks + row * args.mask_bytes, args.vocab_size, allowed);
  return allowed;
}

// A token this many temperatures below the most likely one has less than 6e-6 of its weight.
constexpr double kFar = 12.0;

// The draw from one row: from the tokens that min_p leaves or from at least the first top_k; without these parameters,
// from the likely ones, as long as they decide it.
class RowDraw {
 public:
  RowDraw(const LogitsKernels& kernels, const SampleArgs& args, int64_t row, const float* logits, float max)
      : kernels_(kernels), logits_(logits), size_(args.vocab_size), num_groups_(ceil_div(size_, kGroup)), max_(max),
        temperature_(args.temperature[row]), min_p_(args.min_p[row]), top_k_(args.top_k[row]), top_p_(args.top_p[row]),
        uniform_(args.uniform[row]) {
    const size_t num_bytes = static_cast<size_t>(2 * num_groups_ + 2 * size_) * sizeof(float);
    greatest_ = static_cast<float*>(thread_scratch(Scratch::kPartials, num_bytes));
    ordered_ = greatest_ + num_groups_;
    chosen_ = ordered_ + num_groups_;
    token_ids_ = reinterpret_cast<int32_t*>(chosen_ + size_);
  }

  int64_t token_id() {
    const bool has_few = top_k_ > 0 && top_k_ <= num_groups_;
    if (has_few || min_p_ > 0) {
      kernels_.find_group_greatest(logits_, size_, greatest_);
      const float least = std::max(min_p_ > 0 ? least_by_min_p() : -kInfinity, has_few ? least_by_top_k() : -kInfinity);
      return token_ids_[draw(order_of_chosen(least), top_k_, top_p_, uniform_)];
    }
    if (top_k_ == 0) {
      kernels_.find_group_greatest(logits_, size_, greatest_);
      const float least = round_up(max_ - kFar * temperature_);
      const double rest = kernels_.sum_weights(logits_, size_, max_, temperature_, least).mass;
      const int64_t place = draw_before(order_of_chosen(least), rest, top_p_, uniform_);
      if (place >= 0) return token_ids_[place];
    }
    return draw(TokenOrder(kernels_, logits_, size_, max_, temperature_), top_k_, top_p_, uniform_);
  }

 private:
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

  float least_by_min_p() const { return round_up(max_ + temperature_ * std::log(min_p_)); }

  // Each of the top_k greatest groups has a logit that is as great as the last one's, so there are top_k of these.
  float least_by_top_k() const {
    std::copy(greatest_, greatest_ + num_groups_, ordered_);
    std::nth_element(ordered_, ordered_ + top_k_ - 1, ordered_ + num_groups_, std::greater<float>());
    return ordered_[top_k_ - 1];
  }

  // Chooses the tokens whose logit is at least `least`; the indices in their order are places in token_ids_.
  TokenOrder order_of_chosen(float least) {
    int64_t count = 0;
    for (int64_t group = 0; group < num_groups_; ++group) {
      if (greatest_[group] < least) continue;
      const int64_t end = std::min((group + 1) * kGroup, size_);
      for (int64_t i = group * kGroup; i < end; ++i) {
        chosen_[count] = logits_[i];
        token_ids_[count] = static_cast<int32_t>(i);
        count += logits_[i] >= least;
      }
    }
    return TokenOrder(kernels_, chosen_, count, max_, temperature_);
  }

  const LogitsKernels& kernels_;
  const float* logits_;
  int64_t size_, num_groups_;
  float max_, temperature_;
  double min_p_;
  int64_t top_k_;
  double top_p_, uniform_;
  float *greatest_, *ordered_, *chosen_;  // of each group, the same in another order, the logits of chosen tokens
  int32_t* token_ids_;                    // of chosen tokens
};

}  // namespace

Status sample_tokens(const Kernels& kernels, const SampleArgs& args) {
  find_most_likely(kernels, args);
  parallel_for(args.num_rows, [&](int64_t i) {
    if (args.temperature[i] <= 0.0f) return;
    const float* const row = allowed_logits(*kernels.logits, args, i);
    const float max = row[args.token_ids[i]];
    if (!std::isfinite(max)) return;  // there is nothing to draw from
    args.token_ids[i] = RowDraw(*kernels.logits, args, i, row, max).token_id();
  });
  return kOk;
}

}  // namespace pagewick
