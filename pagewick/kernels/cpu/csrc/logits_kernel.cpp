// One piece of a row of logits. Compiled once per instruction set.
#include "logits.h"

#include "vec_math.h"

namespace pagewick {
namespace PW_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

// A NaN is greater than everything except a NaN.
bool is_greater(float a, float b) { return a > b || (a != a && b == b); }

IntVec lane_numbers() {
  IntVec found;
  for (int lane = 0; lane < kLanes; ++lane) found[lane] = lane;
  return found;
}

// The greatest element of each lane so far, and its position.
struct LaneGreatest {
  Vec values = set1(-kInfinity);
  IntVec indices = {};

  // Elements at `position` take the place of lesser ones.
  void take(Vec candidates, IntVec position) {
    const IntVec is_better = (candidates > values) | ((candidates != candidates) & (values == values));
    values = is_better ? candidates : values;
    indices = is_better ? position : indices;
  }

  Greatest first() const {
    Greatest best = {values[0], indices[0]};
    for (int lane = 1; lane < kLanes; ++lane)
      if (is_greater(values[lane], best.value) ||
          (!is_greater(best.value, values[lane]) && indices[lane] < best.index))
        best = {values[lane], indices[lane]};
    return best;
  }
};

Greatest find_greatest(const float* x, int64_t size) {
  Greatest best = {x[0], 0};
  int64_t i = 0;
  if (size >= kLanes) {
    IntVec position = lane_numbers();
    LaneGreatest lanes = {load(x), position};
    for (i = kLanes; i + kLanes <= size; i += kLanes) {
      position += kLanes;
      lanes.take(load(x + i), position);
    }
    best = lanes.first();
  }
  for (; i < size; ++i)
    if (is_greater(x[i], best.value)) best = {x[i], i};
  return best;
}

// The number of elements whose bits of a mask are read at once.
constexpr int kBits = 16;
static_assert(kBits % kLanes == 0, "two bytes have the bits of whole vectors");

int32_t bits_of(const uint8_t* bits, int64_t element) { return bits[element / 8] | bits[element / 8 + 1] << 8; }

IntVec bit_of_lane() {
  IntVec found;
  for (int lane = 0; lane < kLanes; ++lane) found[lane] = 1 << lane;
  return found;
}

// Calls f(vector) for a piece, whose last vector is filled up with -inf; kChains vectors at a time have a chain each.
constexpr int kChains = 4;

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

void weigh(const float* x, int64_t size, float max, float temperature, float* weights, int32_t* buckets) {
  // Weights below 2^-61, which is the end of the last bucket, count as 0.
  constexpr float kBucketsPerUnit = 48.0f;
  const auto weigh_vector = [&](Vec logits, float* weight, int32_t* bucket) {
    const Vec distance = (max - logits) / temperature;
    const Vec place = distance * kBucketsPerUnit, end = set1(kNumBuckets);
    store(weight, place < end ? exp(-distance) : zero());
    const IntVec number = __builtin_convertvector(place < end ? place : zero(), IntVec);
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
  const IntVec lane_bits = bit_of_lane();
  const Vec excluded = set1(-kInfinity);
  int64_t i = 0;
  for (; i + kBits <= size; i += kBits) {
    const int32_t word = bits_of(bits, i);
    for (int part = 0; part < kBits; part += kLanes)
      store(out + i + part, (lane_bits & word >> part) != 0 ? load(x + i + part) : excluded);
  }
  for (; i < size; ++i) out[i] = bits[i / 8] >> i % 8 & 1 ? x[i] : -kInfinity;
}

Allowed find_allowed(const float* x, const uint8_t* bits, int64_t size) {
  const IntVec lane_bits = bit_of_lane();
  const Vec excluded = set1(-kInfinity);
  const IntVec lanes = lane_numbers();
  IntVec is_nan = {};
  LaneGreatest allowed;
  Vec highest = excluded;
  int64_t i = 0;
  for (; i + kBits <= size; i += kBits) {
    const int32_t word = bits_of(bits, i);
    for (int part = 0; part < kBits; part += kLanes) {
      const Vec values = load(x + i + part);
      highest = max(values, highest);
      is_nan |= values != values;
      // Most grammars allow few tokens, in few words.
      if (word != 0)
        allowed.take((lane_bits & word >> part) != 0 ? values : excluded, lanes + static_cast<int32_t>(i + part));
    }
  }
  Allowed found = {allowed.first(), hmax(highest)};
  for (int lane = 0; lane < kLanes; ++lane)
    if (is_nan[lane]) found.highest = __builtin_nanf("");
  for (; i < size; ++i) {
    if (is_greater(x[i], found.highest)) found.highest = x[i];
    if ((bits[i / 8] >> i % 8 & 1) && is_greater(x[i], found.greatest.value)) found.greatest = {x[i], i};
  }
  return found;
}

}  // namespace

extern const LogitsKernels kLogits;
const LogitsKernels kLogits = {find_greatest, sum_exp, weigh, mask, find_allowed};

}  // namespace PW_ISA
}  // namespace pagewick
