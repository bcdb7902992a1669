#include "rope.h"

#include <algorithm>
#include <cmath>

#include "parallel.h"

namespace pagewick {
namespace {

// Elements, and angles, that are worth handing to another thread in one go. Where there are many tokens, a thread takes
// at least kTokenChunk of them, so that it writes a block of keys as a whole.
constexpr int64_t kGrain = 1 << 14;
constexpr int64_t kManyTokens = 256, kTokenChunk = 32;
constexpr int64_t kAngleGrain = 1 << 10;

template <class Body>
void for_tokens(int64_t num_tokens, int64_t angles_per_token, const Body& body) {
  parallel_ranges(num_tokens, kAngleGrain / std::max<int64_t>(1, angles_per_token), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) body(token);
  });
}

void turn(float angle, float& cos, float& sin) {
  cos = static_cast<float>(std::cos(static_cast<double>(angle)));
  sin = static_cast<float>(std::sin(static_cast<double>(angle)));
}

float power(float base, float exponent) {
  return static_cast<float>(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
}

// theta for a sequence of `length` tokens.
float dynamic_base(const DynamicAnglesArgs& args, int64_t length) {
  const float theta = static_cast<float>(args.theta);
  if (length <= args.original_length) return theta;
  const float stretched = static_cast<float>(args.factor) * static_cast<float>(length);
  const float growth = stretched / static_cast<float>(args.original_length) - static_cast<float>(args.factor - 1.0);
  const double size = static_cast<double>(args.rotary_dim);
  return theta * power(growth, static_cast<float>(size / (size - 2.0)));
}

}  // namespace

Status rope_and_store(const Kernels& kernels, const RopeStoreArgs& args) {
  if (!slots_are_valid(args.slot_mapping, args.num_tokens, args.num_blocks * args.block_size)) return kBadBlockId;
  const int64_t token_size = std::max<int64_t>(1, (args.num_heads + 2 * args.num_kv_heads) * args.head_dim);
  const int64_t least = args.num_tokens < kManyTokens ? 1 : kTokenChunk;
  parallel_ranges(args.num_tokens, std::max(least, kGrain / token_size), [&](int64_t begin, int64_t end) {
    kernels.rope->rope_and_store(args, begin, end);
  });
  return kOk;
}

Status rotate_heads(const Kernels& kernels, const RotateHeadsArgs& args) {
  const int64_t token_size = std::max<int64_t>(1, args.num_heads * args.head_dim);
  parallel_ranges(args.num_tokens, kGrain / token_size, [&](int64_t begin, int64_t end) {
    kernels.rope->rotate_heads(args, begin, end);
  });
  return kOk;
}

Status rotary_angles(const Kernels&, const RotaryAnglesArgs& args) {
  for_tokens(args.num_tokens, args.num_frequencies, [&](int64_t token) {
    const float position = static_cast<float>(std::max<int64_t>(args.positions[token] + args.shift, 0));
    for (int64_t i = 0; i < args.num_frequencies; ++i) {
      const int64_t target = token * args.num_frequencies + i;
      turn(position * args.frequencies[i], args.cos[target], args.sin[target]);
      args.cos[target] *= args.scale, args.sin[target] *= args.scale;
    }
  });
  return kOk;
}

Status dynamic_rotary_angles(const Kernels&, const DynamicAnglesArgs& args) {
  const int64_t half = args.rotary_dim / 2;
  const float size = static_cast<float>(args.rotary_dim);
  for_tokens(args.num_tokens, half, [&](int64_t token) {
    const float base = dynamic_base(args, args.positions[token] + 1);
    const float position = static_cast<float>(args.positions[token]);
    for (int64_t i = 0; i < half; ++i) {
      const float frequency = 1.0f / power(base, static_cast<float>(2 * i) / size);
      turn(position * frequency, args.cos[token * half + i], args.sin[token * half + i]);
    }
  });
  return kOk;
}

}  // namespace pagewick
