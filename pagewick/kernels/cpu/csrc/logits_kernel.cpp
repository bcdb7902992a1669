// One piece of a row of logits. Compiled once per instruction set.
#include "logits.h"

#include "vec_math.h"

namespace pagewick {
namespace PW_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

constexpr int kChains = 4;
// The number of elements whose greatest is found before the place of that is looked for.
constexpr int64_t kBlock = 512;
static_assert(kBlock % (kChains * kLanes) == 0, "a block has whole vectors for every chain");

struct BlockGreatest {
  float value;  // of the elements that are numbers
  bool has_nan;
};

// at(i): the vector of elements i to i + kLanes.
template <class At>
BlockGreatest greatest_of_block(int64_t begin, const At& at) {
  Vec highest[kChains];
  IntVec is_nan[kChains] = {};
  for (Vec& value : highest) value = set1(-kInfinity);
  for (int64_t i = 0; i < kBlock; i += kChains * kLanes)
    for (int chain = 0; chain < kChains; ++chain) {
      const Vec values = at(begin + i + chain * kLanes);
      highest[chain] = max(values, highest[chain]);
      is_nan[chain] |= values != values;
    }
  BlockGreatest found = {hmax(max(max(highest[0], highest[1]), max(highest[2], highest[3]))), false};
  const IntVec any_nan = is_nan[0] | is_nan[1] | is_nan[2] | is_nan[3];
  for (int lane = 0; lane < kLanes; ++lane) found.has_nan |= any_nan[lane] != 0;
  return found;
}

// A NaN is greater than everything except a NaN.
bool is_greater(float a, float b) { return a > b || (a != a && b == b); }

// Finds the first of the greatest of `size` elements. at: as above; element(i): one of them; is_empty(begin): whether a
// block is known to have nothing but -inf.
template <class At, class Element, class IsEmpty>
Greatest first_greatest(int64_t size, const At& at, const Element& element, const IsEmpty& is_empty) {
  Greatest best = {element(0), 0};
  int64_t begin = 0;  // of the block that has it, while its index is not known
  int64_t i = 0;
  for (; i + kBlock <= size && best.value == best.value; i += kBlock) {
    if (is_empty(i)) continue;
    const BlockGreatest found = greatest_of_block(i, at);
    if (found.has_nan) {
      best.value = __builtin_nanf("");
      begin = i;
    } else if (found.value > best.value) {
      best.value = found.value;
      begin = i;
    }
  }
  int64_t rest = -1;
  for (; i < size; ++i)
    if (is_greater(element(i), best.value)) best.value = element(i), rest = i;
  if (rest >= 0) return {best.value, rest};
  const bool is_nan = best.value != best.value;
  for (i = begin; is_nan ? element(i) == element(i) : element(i) != best.value;) ++i;
  return {element(i), i};
}

Greatest find_greatest(const float* x, int64_t size) {
  return first_greatest(
      size, [x](int64_t i) { return load(x + i); }, [x](int64_t i) { return x[i]; }, [](int64_t) { return false; });
}

float highest_of(const float* x, int64_t size) {
  float highest = -kInfinity;
  int64_t i = 0;
  for (; i + kBlock <= size; i += kBlock) {
    const BlockGreatest found = greatest_of_block(i, [x](int64_t at) { return load(x + at); });
    if (found.has_nan) return __builtin_nanf("");
    highest = found.value > highest ? found.value : highest;
  }
  for (; i < size; ++i)
    if (is_greater(x[i], highest)) highest = x[i];
  return highest;
}

int64_t count_above(const float* x, int64_t size, float limit) {
  IntVec counts[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kLanes <= size; i += kChains * kLanes)
    for (int chain = 0; chain < kChains; ++chain) counts[chain] -= load(x + i + chain * kLanes) > limit;
  const IntVec count = (counts[0] + counts[1]) + (counts[2] + counts[3]);
  int64_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += count[lane];
  for (; i < size; ++i) total += x[i] > limit;
  return total;
}

void find_group_greatest(const float* x, int64_t size, float* greatest) {
  static_assert(kGroup % (kChains * kLanes) == 0, "a group has whole vectors for every chain");
  int64_t i = 0;
  for (; i + kGroup <= size; i += kGroup) {
    Vec highest[kChains];
    for (int chain = 0; chain < kChains; ++chain) highest[chain] = load(x + i + chain * kLanes);
    for (int64_t at = kChains * kLanes; at < kGroup; at += kChains * kLanes)
      for (int chain = 0; chain < kChains; ++chain)
        highest[chain] = max(load(x + i + at + chain * kLanes), highest[chain]);
    greatest[i / kGroup] = hmax(max(max(highest[0], highest[1]), max(highest[2], highest[3])));
  }
  if (i == size) return;
  float rest = x[i];
  for (int64_t at = i + 1; at < size; ++at) rest = x[at] > rest ? x[at] : rest;
  greatest[i / kGroup] = rest;
}

// The bits of a mask for the elements of a vector, and those after it.
int32_t bits_at(const uint8_t* bits, int64_t element) {
  const int32_t low = bits[element / 8] >> element % 8;
  return kLanes > 8 ? low | bits[element / 8 + 1] << 8 : low;
}

bool is_allowed(const uint8_t* bits, int64_t element) { return bits[element / 8] >> element % 8 & 1; }

// Elements without their bit become -inf.
class Masked {
 public:
  explicit Masked(const uint8_t* bits) : bits_(bits) {
    for (int lane = 0; lane < kLanes; ++lane) bit_of_lane_[lane] = 1 << lane;
  }

  Vec apply(Vec values, int64_t element) const {
    return (bit_of_lane_ & bits_at(bits_, element)) != 0 ? values : set1(-kInfinity);
  }

  bool is_block_empty(int64_t begin) const {
    uint64_t words[kBlock / 64], any = 0;
    memcpy(words, bits_ + begin / 8, sizeof(words));
    for (const uint64_t word : words) any |= word;
    return any == 0;
  }

 private:
  const uint8_t* bits_;
  IntVec bit_of_lane_;
};

// Calls f(vector) for a piece, whose last vector is filled up with -inf; kChains vectors at a time have a chain each.
template <class F>
void for_chains(const float* x, int64_t size, const F& f) {
  int64_t i = 0;
  for (; i + kChains * kLanes <= size; i += kChains * kLanes)
    for (int chain = 0; chain < kChains; ++chain) f(chain, load(x + i + chain * kLanes));
  for (; i + kLanes <= size; i += kLanes) f(0, load(x + i));
  if (i == size) return;
  float rest[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) rest[lane] = i + lane < size ? x[i + lane] : -kInfinity;
  f(0, load(rest));
}

ExpSum sum_exp(const float* x, int64_t size) {
  Vec highest[kChains], sums[kChains] = {};
  IntVec is_nan[kChains] = {};
  for (Vec& value : highest) value = set1(-kInfinity);
  for_chains(x, size, [&](int chain, Vec value) {
    highest[chain] = max(value, highest[chain]);
    is_nan[chain] |= value != value;
  });
  const float found = hmax(max(max(highest[0], highest[1]), max(highest[2], highest[3])));
  const IntVec any_nan = is_nan[0] | is_nan[1] | is_nan[2] | is_nan[3];
  for (int lane = 0; lane < kLanes; ++lane)
    if (any_nan[lane]) return {__builtin_nanf(""), __builtin_nanf("")};
  if (found == -kInfinity) return {found, 0.0f};
  for_chains(x, size, [&](int chain, Vec value) { sums[chain] = sums[chain] + exp(value - found); });
  return {found, hsum((sums[0] + sums[1]) + (sums[2] + sums[3]))};
}

WeightSums sum_weights(const float* x, int64_t size, float max, float temperature, float end) {
  // Sums of this many elements are added in double precision.
  constexpr int64_t kPart = 2048;
  const float inverse = 1.0f / temperature;
  WeightSums sums = {0, 0};
  for (int64_t begin = 0; begin < size; begin += kPart) {
    Vec mass[kChains] = {}, distances[kChains] = {};
    for_chains(x + begin, size - begin < kPart ? size - begin : kPart, [&](int chain, Vec value) {
      // A greater distance has no weight; that of -inf must not become NaN.
      const Vec distance = min((max - value) * inverse, set1(1e3f));
      const Vec weight = value < end ? exp(-distance) : zero();
      mass[chain] = mass[chain] + weight;
      distances[chain] = madd(distance, weight, distances[chain]);
    });
    sums.mass += hsum((mass[0] + mass[1]) + (mass[2] + mass[3]));
    sums.distances += hsum((distances[0] + distances[1]) + (distances[2] + distances[3]));
  }
  return sums;
}

Moments sum_moments(const float* x, int64_t size, float max, double mean) {
  // The compiler does not reorder a sum, but adds these independent ones as vectors.
  constexpr int kSums = 16;
  double sums[kSums] = {}, squares[kSums] = {};
  int64_t counts[kSums] = {};
  int64_t i = 0;
  const auto add = [&](int64_t element, int at) {
    const bool is_number = x[element] > -kInfinity;
    const double value = is_number ? static_cast<double>(x[element]) - max : 0.0;
    const double distance = is_number ? value - mean : 0.0;
    counts[at] += is_number;
    sums[at] += value;
    squares[at] += distance * distance;
  };
  for (; i + kSums <= size; i += kSums)
    for (int at = 0; at < kSums; ++at) add(i + at, at);
  for (; i < size; ++i) add(i, 0);
  Moments found = {0, 0, 0};
  for (int at = 0; at < kSums; ++at) {
    found.count += counts[at];
    found.sum += sums[at];
    found.squares += squares[at];
  }
  return found;
}

void weigh(const float* x, int64_t size, float max, float temperature, float center, float* weights,
           int32_t* buckets) {
  // Weights below 2^-61, which is the end of the last bucket, count as 0.
  constexpr float kBucketsPerUnit = 48.0f;
  const auto weigh_vector = [&](Vec logits, float* weight, int32_t* bucket) {
    const Vec distance = (max - logits) / temperature;
    const Vec end = set1(kNumBuckets), difference = distance - center;
    const auto has_weight = distance * kBucketsPerUnit < end;
    store(weight, has_weight ? exp(-distance) : zero());
    const Vec place = (difference < zero() ? -difference : difference) * kBucketsPerUnit;
    const IntVec number = __builtin_convertvector(has_weight ? min(place, end - 1.0f) : zero(), IntVec);
    memcpy(bucket, &number, sizeof(number));
  };
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) weigh_vector(load(x + i), weights + i, buckets + i);
  if (i == size) return;
  float rest_weights[kLanes];
  int32_t rest_buckets[kLanes];
  weigh_vector(load_part(x + i, size - i), rest_weights, rest_buckets);
  memcpy(weights + i, rest_weights, (size - i) * sizeof(float));
  memcpy(buckets + i, rest_buckets, (size - i) * sizeof(int32_t));
}

void mask(const float* x, const uint8_t* bits, int64_t size, float* out) {
  const Masked masked(bits);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(out + i, masked.apply(load(x + i), i));
  for (; i < size; ++i) out[i] = is_allowed(bits, i) ? x[i] : -kInfinity;
}

Allowed find_allowed(const float* x, const uint8_t* bits, int64_t size) {
  const Masked masked(bits);
  const Greatest greatest = first_greatest(
      size, [&](int64_t i) { return masked.apply(load(x + i), i); },
      [&](int64_t i) { return is_allowed(bits, i) ? x[i] : -kInfinity; },
      [&](int64_t begin) { return masked.is_block_empty(begin); });
  return {greatest, highest_of(x, size)};
}

}  // namespace

extern const LogitsKernels kLogits;
const LogitsKernels kLogits = {find_greatest, count_above, find_group_greatest, sum_exp,     weigh,
                               sum_weights,   sum_moments, mask,                find_allowed};

}  // namespace PW_ISA
}  // namespace pagewick
