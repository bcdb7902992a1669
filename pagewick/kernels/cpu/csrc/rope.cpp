#include "rope.h"

#include <algorithm>
#include <cmath>

#include "parallel.h"

namespace pagewick {
namespace {

// Elements, and angles, that are worth handing to another thread in one go. Of many tokens, so many in one go that a
// block of keys is written as a whole.
constexpr int64_t kGrain = 1 << 14;
constexpr int64_t kManyTokens = 256, kTokenChunk = 32;
constexpr int64_t kAngleGrain = 1 << 10;

}  // namespace

Status rope_and_store(const Kernels& kernels, const RopeStoreArgs& args) {
  const int64_t num_slots = args.num_blocks * args.block_size;
  for (int64_t token = 0; token < args.num_tokens; ++token)
    if (args.slot_mapping[token] >= num_slots) return kBadBlockId;
  const int64_t token_size = std::max<int64_t>(1, (args.num_heads + 2 * args.num_kv_heads) * args.head_dim);
  const int64_t least = args.num_tokens < kManyTokens ? 1 : kTokenChunk;
  const int64_t chunk = std::max(least, kGrain / token_size);
  parallel_for(ceil_div(args.num_tokens, chunk), [&](int64_t index) {
    kernels.rope->rope_and_store(args, index * chunk, std::min(args.num_tokens, (index + 1) * chunk));
  });
  return kOk;
}

Status rotary_angles(const Kernels&, const RotaryAnglesArgs& args) {
  const int64_t chunk = std::max<int64_t>(1, kAngleGrain / std::max<int64_t>(1, args.num_frequencies));
  parallel_for(ceil_div(args.num_tokens, chunk), [&](int64_t index) {
    for (int64_t token = index * chunk; token < std::min(args.num_tokens, (index + 1) * chunk); ++token) {
      const float position = static_cast<float>(args.positions[token]);
      for (int64_t i = 0; i < args.num_frequencies; ++i) {
        const float angle = position * args.frequencies[i];
        const int64_t target = token * args.num_frequencies + i;
        args.cos[target] = static_cast<float>(std::cos(static_cast<double>(angle))) * args.scale;
        args.sin[target] = static_cast<float>(std::sin(static_cast<double>(angle))) * args.scale;
      }
    }
  });
  return kOk;
}

}  // namespace pagewick
