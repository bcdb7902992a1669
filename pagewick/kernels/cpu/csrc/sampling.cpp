// Draws tokens without sorting the vocabulary: tokens are counted and their weights summed in buckets of similar
// weight. Only the buckets in which top_k, top_p or the drawn token falls are sorted. Where few tokens decide the draw,
// only these are counted.
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

// Draws from one row: from the tokens that min_p leaves or from at least the first top_k; without these parameters,
// from the likely ones, as long as they decide it.
int64_t draw_token(const LogitsKernels& kernels, const SampleArgs& args, int64_t row, const float* logits, float max) {
  const float temperature = args.temperature[row];
  const double min_p = args.min_p[row], top_p = args.top_p[row], uniform = args.uniform[row];
  const int64_t top_k = args.top_k[row];
  const bool has_few = top_k > 0 && top_k <= ceil_div(args.vocab_size, kGroup);
  if (has_few || min_p > 0 || top_k == 0) {
    RowGroups groups(kernels, logits, args.vocab_size);
    const auto order_from = [&](float least) {
      return TokenOrder(kernels, groups.logits(), groups.choose(least), max, temperature);
    };
    if (has_few || min_p > 0) {
      const float by_top_k = has_few ? groups.least_of(top_k) : -std::numeric_limits<float>::infinity();
      const float least = min_p > 0 ? std::max(by_top_k, round_up(max + temperature * std::log(min_p))) : by_top_k;
      return groups.token_ids()[draw(order_from(least), top_k, top_p, uniform)];
    }
    const float least = round_up(max - kFar * temperature);
    const double rest = kernels.sum_weights(logits, args.vocab_size, max, temperature, least).mass;
    const int64_t place = draw_before(order_from(least), rest, top_p, uniform);
    if (place >= 0) return groups.token_ids()[place];
  }
  return draw(TokenOrder(kernels, logits, args.vocab_size, max, temperature), top_k, top_p, uniform);
}

}  // namespace

Status sample_tokens(const Kernels& kernels, const SampleArgs& args) {
  find_most_likely(kernels, args);
  parallel_for(args.num_rows, [&](int64_t i) {
    if (args.temperature[i] <= 0.0f) return;
    const float* const row = allowed_logits(*kernels.logits, args, i);
    const float max = row[args.token_ids[i]];
    if (!std::isfinite(max)) return;  // there is nothing to draw from
    args.token_ids[i] = draw_token(*kernels.logits, args, i, row, max);
  });
  return kOk;
}

}  // namespace pagewick
