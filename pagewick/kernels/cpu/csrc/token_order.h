// The tokens of a row in the order in which sampling passes them, without sorting all of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "logits.h"
#include "parallel.h"

namespace pagewick {

// Returns the least float that is not below `bound`.
inline float round_up(double bound) {
  const float rounded = static_cast<float>(bound);
  return rounded < bound ? std::nextafter(rounded, std::numeric_limits<float>::infinity()) : rounded;
}

// The greatest logit of each group of a row, by which few tokens are found. There are no NaNs. The memory is scratch
// memory of this thread.
class RowGroups {
 public:
  RowGroups(const LogitsKernels& kernels, const float* logits, int64_t size)
      : logits_(logits), size_(size), count_(ceil_div(size, kGroup)) {
    const size_t num_bytes = static_cast<size_t>(2 * count_ + 2 * size_) * sizeof(float);
    greatest_ = static_cast<float*>(thread_scratch(Scratch::kPartials, num_bytes));
    ordered_ = greatest_ + count_;
    chosen_ = ordered_ + count_;
    token_ids_ = reinterpret_cast<int32_t*>(chosen_ + size_);
    kernels.find_group_greatest(logits, size, greatest_);
  }

  // Returns a lower bound of the k greatest logits: each of the k greatest groups has one from there on. It is -inf if k
  // is above the number of groups.
  float least_of(int64_t k) const {
    if (k > count_) return -std::numeric_limits<float>::infinity();
    std::copy(greatest_, greatest_ + count_, ordered_);
    std::nth_element(ordered_, ordered_ + k - 1, ordered_ + count_, std::greater<float>());
    return ordered_[k - 1];
  }

  // Chooses the tokens whose logit is at least `least`, by rising id, and returns their number.
  int64_t choose(float least) {
    int64_t count = 0;
    for (int64_t group = 0; group < count_; ++group) {
      if (greatest_[group] < least) continue;
      const int64_t end = std::min((group + 1) * kGroup, size_);
      for (int64_t i = group * kGroup; i < end; ++i) {
        chosen_[count] = logits_[i];
        token_ids_[count] = static_cast<int32_t>(i);
        count += logits_[i] >= least;
      }
    }
    return count;
  }

  // The logits and ids of the chosen tokens.
  const float* logits() const { return chosen_; }
  int32_t* token_ids() { return token_ids_; }

 private:
  const float* logits_;
  int64_t size_, count_;
  float *greatest_, *ordered_, *chosen_;
  int32_t* token_ids_;
};

// A point in a walk over the tokens in their order.
struct Place {
  int64_t token_id = 0;
  int64_t count = 0;  // number of tokens passed, this one included
  double mass = 0;    // the sum of their weights
};

// The order by falling logit or, with a center, by the difference of a token's distance from it; equal ones by id. The
// distance of a token is (max - logit) / temperature, and its weight exp(-distance). Tokens are counted and weighed in
// buckets; only the buckets in which something is looked for are sorted. Tokens without weight are left out: they would
// come last. The memory is scratch memory of this thread.
class TokenOrder {
 public:
  TokenOrder(const LogitsKernels& kernels, const float* logits, int64_t size, float max, float temperature,
             double center = 0)
      : logits_(logits), size_(size), max_(max), temperature_(temperature), center_(center) {
    const int64_t padded = ceil_div(size, 16) * 16;
    const int64_t num_bytes = padded * 12 + kNumBuckets * 16;
    char* const memory = static_cast<char*>(thread_scratch(Scratch::kKernel, static_cast<size_t>(num_bytes)));
    masses_ = reinterpret_cast<double*>(memory);
    counts_ = reinterpret_cast<int64_t*>(masses_ + kNumBuckets);
    weights_ = reinterpret_cast<float*>(counts_ + kNumBuckets);
    buckets_ = reinterpret_cast<int32_t*>(weights_ + padded);
    members_ = buckets_ + padded;
    std::memset(memory, 0, kNumBuckets * 16);
    kernels.weigh(logits, size, max, temperature, static_cast<float>(center), weights_, buckets_);
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

  // Writes the logits of the tokens up to one that `find` found, and -inf for all others.
  void write_through(int64_t last, float* out) const {
    for (int64_t i = 0; i < size_; ++i) {
      const bool is_kept = buckets_[i] != buckets_[last] ? buckets_[i] < buckets_[last] : !is_before(last, i);
      out[i] = is_kept && weights_[i] != 0.0f ? logits_[i] : -std::numeric_limits<float>::infinity();
    }
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
    std::sort(members_, members_ + count, [this](int32_t a, int32_t b) { return is_before(a, b); });
    return count;
  }

  bool is_before(int64_t a, int64_t b) const {
    if (logits_[a] == logits_[b]) return a < b;
    if (center_ == 0) return logits_[a] > logits_[b];
    const double first = from_center(a), second = from_center(b);
    return first != second ? first < second : a < b;
  }

  double from_center(int64_t i) const {
    return std::abs((static_cast<double>(max_) - logits_[i]) / temperature_ - center_);
  }

  const float* logits_;
  int64_t size_;
  float max_, temperature_;
  double center_;
  double* masses_;
  int64_t* counts_;
  float* weights_;
  int32_t *buckets_, *members_;
  Place all_;
};

}  // namespace pagewick
