// Draws tokens without sorting the vocabulary: tokens are counted and their weights summed in buckets of similar
// weight. Only the buckets in which top_k, top_p or the drawn token falls are sorted.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "logits.h"
#include "parallel.h"

namespace pagewick {
namespace {

// A point in a walk over the tokens by falling logit.
struct Place {
  int64_t token_id = 0;
  int64_t count = 0;  // number of tokens passed, this one included
  double mass = 0;    // the sum of their weights
};

// The weights of one row, in scratch memory of this thread. Tokens without weight are left out: they would come last.
class Row {
 public:
  Row(const LogitsKernels& kernels, const float* logits, int64_t size, float max, float temperature)
      : logits_(logits), size_(size) {
    const int64_t padded = ceil_div(size, 16) * 16;
    const int64_t num_bytes = padded * 12 + kNumBuckets * 16;
    char* const memory = static_cast<char*>(thread_scratch(Scratch::kKernel, static_cast<size_t>(num_bytes)));
    masses_ = reinterpret_cast<double*>(memory);
    counts_ = reinterpret_cast<int64_t*>(masses_ + kNumBuckets);
    weights_ = reinterpret_cast<float*>(counts_ + kNumBuckets);
    buckets_ = reinterpret_cast<int32_t*>(weights_ + padded);
    members_ = buckets_ + padded;
    std::memset(memory, 0, kNumBuckets * 16);
    kernels.weigh(logits, size, max, temperature, weights_, buckets_);
    for (int64_t i = 0; i < size; ++i) {
      if (weights_[i] == 0.0f) continue;
      masses_[buckets_[i]] += weights_[i];
      counts_[buckets_[i]] += 1;
    }
    for (int64_t bucket = 0; bucket < kNumBuckets; ++bucket) all_ = after(bucket, all_);
  }

  // The end of the walk, which belongs to no token.
  Place all() const { return all_; }

  // Returns the first place for which is_there(place) holds. It must also hold for all later places.
  template <class F>
  Place find(const F& is_there) {
    Place place;
    for (int64_t bucket = 0; bucket < kNumBuckets; ++bucket) {
      if (counts_[bucket] > 0 && is_there(after(bucket, place))) return find_in(bucket, place, is_there);
      place = after(bucket, place);
    }
    return place;
  }

 private:
  Place after(int64_t bucket, const Place& before) const {
    return {0, before.count + counts_[bucket], before.mass + masses_[bucket]};
  }

  template <class F>
  Place find_in(int64_t bucket, Place place, const F& is_there) {
    const int64_t count = sort_members(bucket);
    for (int64_t i = 0; i < count; ++i) {
      place = {members_[i], place.count + 1, place.mass + weights_[members_[i]]};
      if (is_there(place)) break;
    }
    return place;
  }

  int64_t sort_members(int64_t bucket) {
    int64_t count = 0;
    for (int64_t i = 0; i < size_; ++i) {
      members_[count] = static_cast<int32_t>(i);
      count += buckets_[i] == bucket && weights_[i] != 0.0f;
    }
    std::sort(members_, members_ + count, [this](int32_t a, int32_t b) {
      return logits_[a] != logits_[b] ? logits_[a] > logits_[b] : a < b;
    });
    return count;
  }

  const float* logits_;
  int64_t size_;
  double* masses_;
  int64_t* counts_;
  float* weights_;
  int32_t *buckets_, *members_;
  Place all_;
};

int64_t draw(Row row, int64_t top_k, double top_p, double uniform) {
  Place kept = row.all();
  if (top_k > 0 && top_k < kept.count) kept = row.find([&](const Place& place) { return place.count >= top_k; });
  if (top_p < 1) {
    const Place most = kept;
    kept = row.find([&](const Place& place) { return place.mass >= top_p * most.mass || place.count >= most.count; });
  }
  const double passed = uniform * kept.mass;
  return row.find([&](const Place& place) { return place.mass > passed || place.count >= kept.count; }).token_id;
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

}  // namespace

Status sample_tokens(const Kernels& kernels, const SampleArgs& args) {
  find_most_likely(kernels, args);
  parallel_for(args.num_rows, [&](int64_t i) {
    if (args.temperature[i] <= 0.0f) return;
    const float* const row = allowed_logits(*kernels.logits, args, i);
    const float max = row[args.token_ids[i]];
    if (!std::isfinite(max)) return;  // there is nothing to draw from
    args.token_ids[i] = draw(Row(*kernels.logits, row, args.vocab_size, max, args.temperature[i]), args.top_k[i],
                             args.top_p[i], args.uniform[i]);
  });
  return kOk;
}

}  // namespace pagewick
