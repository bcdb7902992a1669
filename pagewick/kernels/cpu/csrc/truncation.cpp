// Filters that decide which tokens of a row may be drawn.
#include "token_order.h"

namespace pagewick {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// The greatest distance of a token whose probability is above 0 in double precision.
constexpr double kLastDistance = 745.13;

// One row of an operation and its most likely token.
struct Row {
  const LogitsKernels& kernels;
  const float* logits;
  int64_t size;
  double temperature;
  Greatest greatest;

  float max() const { return greatest.value; }
  WeightSums sums() const {
    return kernels.sum_weights(logits, size, max(), static_cast<float>(temperature), kInfinity);
  }
  TokenOrder order(double center = 0) const {
    return TokenOrder(kernels, logits, size, max(), static_cast<float>(temperature), center);
  }
  // The least logit of tokens with at least a weight.
  float least_with(double weight) const { return round_up(max() + temperature * std::log(weight)); }
  float least_possible() const { return round_up(max() - kLastDistance * temperature); }
};

template <class Args>
Row row_of(const Kernels& kernels, const Args& args, int64_t i) {
  const float* const logits = args.logits + i * args.stride;
  return {*kernels.logits, logits, args.vocab_size, args.temperature[i],
          kernels.logits->find_greatest(logits, args.vocab_size)};
}

void write_from(const Row& row, float least, float* out) {
  for (int64_t i = 0; i < row.size; ++i) out[i] = row.logits[i] >= least ? row.logits[i] : -kInfinity;
}

void mask_top_n_sigma(const Row& row, double num_sigmas, float* out) {
  const Moments first = row.kernels.sum_moments(row.logits, row.size, row.max(), 0);
  const double count = static_cast<double>(first.count);
  const Moments second = row.kernels.sum_moments(row.logits, row.size, row.max(), first.sum / count);
  write_from(row, round_up(row.max() - num_sigmas * std::sqrt(second.squares / count)), out);
}

// The surprise of a token is its distance plus the logarithm of the sum of weights; the entropy is the mean surprise.
void mask_typical_p(const Row& row, double typical_p, float* out) {
  const WeightSums sums = row.sums();
  // 0 would be the order by logit; that is the same one, because 0 is the least distance.
  TokenOrder order = row.order(sums.distances / sums.mass);
  const Place all = order.all();
  order.write_through(order.find([&](const Place& place) {
    return place.mass >= typical_p * all.mass || place.count >= all.count;
  }).token_id, out);
}

void mask_top_k_top_p(const Row& row, int64_t top_k, double top_p, float* out) {
  if ((top_k <= 0 || top_k >= row.size) && top_p >= 1) return write_from(row, row.least_possible(), out);
  TokenOrder order = row.order();
  Place kept = order.all();
  const int64_t most = top_k > 0 && top_k < kept.count ? top_k : kept.count;
  kept = order.find([&](const Place& place) { return place.count >= most; });
  if (top_p < 1)
    kept = order.find([&](const Place& place) { return place.mass >= top_p * kept.mass || place.count >= most; });
  order.write_through(kept.token_id, out);
}

void mask_xtc(const Row& row, double threshold, float* out) {
  const float least = threshold > 0 ? row.least_with(threshold * row.sums().mass) : row.least_possible();
  int64_t last = -1;
  for (int64_t i = 0; i < row.size; ++i)
    if (row.logits[i] >= least && (last < 0 || row.logits[i] <= row.logits[last])) last = i;
  for (int64_t i = 0; i < row.size; ++i)
    out[i] = row.logits[i] >= least && i != last ? -kInfinity : row.logits[i];
}

void mask_surprise(const Row& row, double mu, float* out) {
  write_from(row, row.least_with(std::exp2(-mu) * row.sums().mass), out);
  out[row.greatest.index] = row.max();
}

}  // namespace

Status truncate_rows(const Kernels& kernels, const TruncateArgs& args) {
  parallel_for(args.num_rows, [&](int64_t i) {
    const Row row = row_of(kernels, args, i);
    const double limit = args.limits[i];
    float* const out = args.masked + i * args.vocab_size;
    switch (args.filter) {
      case Truncation::kMinP: return write_from(row, row.least_with(limit), out);
      case Truncation::kSigmas: return mask_top_n_sigma(row, limit, out);
      case Truncation::kTypicalP: return mask_typical_p(row, limit, out);
      case Truncation::kTopP: return mask_top_k_top_p(row, args.top_k[i], limit, out);
      case Truncation::kXtc: return mask_xtc(row, limit, out);
      case Truncation::kSurprise: return mask_surprise(row, limit, out);
    }
  });
  return kOk;
}

Status surprise(const Kernels& kernels, const SurpriseArgs& args) {
  for (int64_t i = 0; i < args.num_rows; ++i)
    if (args.token_ids[i] < 0 || args.token_ids[i] >= args.vocab_size) return kBadRow;
  parallel_for(args.num_rows, [&](int64_t i) {
    const Row row = row_of(kernels, args, i);
    const double distance = (static_cast<double>(row.max()) - row.logits[args.token_ids[i]]) / row.temperature;
    args.bits[i] = (distance + std::log(row.sums().mass)) / std::log(2.0);
  });
  return kOk;
}

}  // namespace pagewick
