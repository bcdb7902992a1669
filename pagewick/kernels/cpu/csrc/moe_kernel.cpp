// The choice of experts and the sum of their results. Compiled once per instruction set.
#include "moe.h"
#include "parallel.h"
#include "rows.h"
#include "vec_math.h"

namespace pagewick {
namespace PW_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

// The memory of a thread for a row of num_experts logits. Each array has room for whole vectors.
struct RowMemory {
  float* scores;
  float* keys;        // the choice is made by these
  float* group_keys;   // [num_groups]
  int32_t* group_ids;  // [top_k_groups]
  int32_t* is_open;    // [num_groups]
};

RowMemory row_memory(int64_t num_experts) {
  const int64_t size = (num_experts + kLanes - 1) / kLanes * kLanes;
  static_assert(sizeof(float) == sizeof(int32_t), "one array is divided among both");
  const size_t num_bytes = static_cast<size_t>(5 * size) * sizeof(float);
  char* const memory = static_cast<char*>(thread_scratch(Scratch::kKernel, num_bytes));
  const auto part = [&](int64_t i) { return memory + i * size * static_cast<int64_t>(sizeof(float)); };
  return {reinterpret_cast<float*>(part(0)), reinterpret_cast<float*>(part(1)), reinterpret_cast<float*>(part(2)),
          reinterpret_cast<int32_t*>(part(3)), reinterpret_cast<int32_t*>(part(4))};
}

// 1 / (1 + e^-x), computed with a power that cannot overflow.
Vec sigmoid(Vec x) {
  const Vec power = exp(x > 0.0f ? -x : x);
  return (x > 0.0f ? set1(1.0f) : power) / (power + 1.0f);
}

// scores: the logits, `size` of them, and room for the rest of a vector.
void softmax(float* scores, int64_t size) {
  const int64_t padded = (size + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = size; i < padded; ++i) scores[i] = -kInfinity;
  Vec greatest = set1(-kInfinity);
  for (int64_t i = 0; i < padded; i += kLanes) greatest = max(load(scores + i), greatest);
  const float shift = hmax(greatest);
  Vec sums = zero();
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Vec power = exp(load(scores + i) - shift);
    sums = sums + power;
    store(scores + i, power);
  }
  const float sum = hsum(sums);
  for (int64_t i = 0; i < padded; i += kLanes) store(scores + i, load(scores + i) / sum);
}

void score(const RouteArgs& args, const float* logits, float* scores) {
  memcpy(scores, logits, static_cast<size_t>(args.num_experts) * sizeof(float));
  if (args.scoring == Scoring::kSoftmax) return softmax(scores, args.num_experts);
  for (int64_t i = 0; i < args.num_experts; i += kLanes) store(scores + i, sigmoid(load(scores + i)));
}

// A NaN is greater than everything except a NaN.
bool is_greater(float a, float b) { return a > b || (a != a && b == b); }

// Keeps the ids of the `limit` greatest values that it was offered, the greatest first. Ids are offered in rising
// order.
class Greatest {
 public:
  Greatest(const float* values, int32_t* ids, int64_t limit) : values_(values), ids_(ids), limit_(limit) {}

  void offer(int64_t id) {
    int64_t i = count_ < limit_ ? count_ : limit_ - 1;
    if (count_ < limit_) ++count_;
    else if (!is_greater(values_[id], values_[ids_[i]])) return;
    for (; i > 0 && is_greater(values_[id], values_[ids_[i - 1]]); --i) ids_[i] = ids_[i - 1];
    ids_[i] = static_cast<int32_t>(id);
  }

 private:
  const float* const values_;
  int32_t* const ids_;
  const int64_t limit_;
  int64_t count_ = 0;
};

float group_key(const float* keys, int64_t size, GroupScore kind) {
  float first = keys[0], second = -kInfinity;
  for (int64_t i = 1; i < size; ++i) {
    if (is_greater(keys[i], first)) {
      second = first;
      first = keys[i];
    } else if (is_greater(keys[i], second)) {
      second = keys[i];
    }
  }
  return kind == GroupScore::kMax ? first : first + second;
}

void choose(const RouteArgs& args, const float* keys, const RowMemory& memory, int32_t* expert_ids) {
  Greatest experts(keys, expert_ids, args.top_k);
  const int64_t size = args.num_experts / args.num_groups;
  if (args.top_k_groups < args.num_groups) {
    Greatest groups(memory.group_keys, memory.group_ids, args.top_k_groups);
    for (int64_t group = 0; group < args.num_groups; ++group) {
      memory.is_open[group] = 0;
      memory.group_keys[group] = group_key(keys + group * size, size, args.group_score);
      groups.offer(group);
    }
    for (int64_t i = 0; i < args.top_k_groups; ++i) memory.is_open[memory.group_ids[i]] = 1;
  }
  for (int64_t group = 0; group < args.num_groups; ++group) {
    if (args.top_k_groups < args.num_groups && memory.is_open[group] == 0) continue;
    for (int64_t id = group * size; id < (group + 1) * size; ++id) experts.offer(id);
  }
}

// The weight of choice i: its softmax among the experts that are left and near it.
float near_weight(const RouteArgs& args, const float* logits, const int32_t* expert_ids, int64_t i) {
  const float greatest = logits[expert_ids[i]];
  float sum = 0.0f;
  for (int64_t id = 0; id < args.num_experts; ++id) {
    bool is_left = true;
    for (int64_t earlier = 0; earlier < i; ++earlier) is_left = is_left && expert_ids[earlier] != id;
    const float size = __builtin_fabsf(logits[id]), scale = size > greatest ? size : greatest;
    const bool is_far = (greatest - logits[id]) / scale > args.margin;
    if (is_left && !is_far) sum += exp(logits[id] - greatest);
  }
  return 1.0f / sum;
}

// values: the logits with kNear, else the scores.
void weigh(const RouteArgs& args, const float* values, const int32_t* expert_ids, float* weights) {
  float sum = 0.0f;
  for (int64_t i = 0; i < args.top_k; ++i) {
    weights[i] = args.scoring == Scoring::kNear ? near_weight(args, values, expert_ids, i) : values[expert_ids[i]];
    sum += weights[i];
  }
  const float divisor = args.renormalize ? sum + args.epsilon : 1.0f;
  for (int64_t i = 0; i < args.top_k; ++i) {
    weights[i] = weights[i] / divisor * args.scaling;
    if (args.scales != nullptr) weights[i] *= args.scales[expert_ids[i]];
  }
}

void route(const RouteArgs& args, int64_t first, int64_t end) {
  const RowMemory memory = row_memory(args.num_experts);
  // Scores rise with logits, but logits that differ may have equal scores.
  const bool is_by_logits = args.bias == nullptr && args.group_score == GroupScore::kMax;
  for (int64_t token = first; token < end; ++token) {
    const float* const logits = args.logits + token * args.logits_stride;
    int32_t* const expert_ids = args.expert_ids + token * args.top_k;
    const bool is_near = args.scoring == Scoring::kNear;
    if (!is_near) score(args, logits, memory.scores);
    for (int64_t i = 0; i < args.num_experts && !is_by_logits; ++i)
      memory.keys[i] = memory.scores[i] + (args.bias == nullptr ? 0.0f : args.bias[i]);
    choose(args, is_by_logits ? logits : memory.keys, memory, expert_ids);
    weigh(args, is_near ? logits : memory.scores, expert_ids, args.weights + token * args.top_k);
  }
}

template <class T>
void combine_token(const CombineArgs& args, int64_t token) {
  const float* const weights = args.weights + token * args.top_k;
  const T* const shared =
      args.shared == nullptr ? nullptr : static_cast<const T*>(args.shared) + token * args.shared_stride;
  const Vec gate = args.shared_gate == nullptr ? set1(1.0f) : sigmoid(set1(args.shared_gate[token]));
  const T* const identity =
      args.identity == nullptr ? nullptr : static_cast<const T*>(args.identity) + token * args.identity_stride;
  T* const out = static_cast<T*>(args.out) + token * args.hidden_size;
  for_vectors(0, args.hidden_size, [&](int64_t i, auto count) {
    Vec sum = zero();
    for (int64_t choice = token * args.top_k; choice < (token + 1) * args.top_k; ++choice) {
      const int64_t row = args.places == nullptr ? choice : args.places[choice];
      const bool is_product = row < args.num_products;
      if (!is_product && identity == nullptr) continue;
      const T* const y = is_product ? static_cast<const T*>(args.y) + row * args.hidden_size : identity;
      sum = madd(set1(weights[choice - token * args.top_k]), load_count(y + i, count()), sum);
    }
    if (shared != nullptr) sum = madd(gate, load_count(shared + i, count()), sum);
    store_count(out + i, sum, count());
  });
}

void combine(const CombineArgs& args, int64_t first, int64_t end) {
  with_type(args.dtype, [&](auto* type) {
    for (int64_t token = first; token < end; ++token) combine_token<Element<decltype(type)>>(args, token);
  });
}

}  // namespace

extern const MoeKernels kMoe;
const MoeKernels kMoe = {route, combine};

}  // namespace PW_ISA
}  // namespace pagewick
