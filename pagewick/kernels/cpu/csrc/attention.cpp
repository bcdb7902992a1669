// Divides paged attention, and the storing of keys and values, among the threads.
#include "attention.h"

#include "attention_units.h"

namespace pagewick {
namespace {

// Fewer tokens than this are not worth waking another thread for.
constexpr int64_t kTokensPerPiece = 16;

// Whether every token sees itself, no key that does not exist, and no fewer keys than the token before it.
bool key_ends_are_valid(const AttentionArgs& args) {
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    int64_t position = int64_t{args.context_lens[seq]} - (args.cu_seqlens_q[seq + 1] - args.cu_seqlens_q[seq]), end = 0;
    for (int64_t token = args.cu_seqlens_q[seq]; token < args.cu_seqlens_q[seq + 1]; ++token, ++position) {
      if (args.key_ends[token] < std::max(end, position + 1) || args.key_ends[token] > args.context_lens[seq]) return false;
      end = args.key_ends[token];
    }
  }
  return true;
}

}  // namespace

Status paged_attention(const Kernels& kernels, const AttentionArgs& args) {
  const RaggedBatch batch = {args.context_lens, args.cu_seqlens_q, args.num_tokens,
                             args.num_seqs, args.max_blocks * args.block_size, args.num_kv_heads,
                             args.num_heads / args.num_kv_heads, args.sliding_window,
                             args.is_chunked != 0};
  if (!batch.has_valid_lengths() || (args.key_ends != nullptr && !key_ends_are_valid(args))) return kBadLengths;
  // A unit gets as many KV heads as leave all threads something to do; those of a single sequence take equally long.
  return attend_in_units(args, *kernels.attention, batch, [&](UnitPlan& plan) {
    for (int64_t heads = args.num_kv_heads; heads > 0; --heads) {
      if (args.num_kv_heads % heads != 0) continue;
      plan.enumerate(heads, kMaxRows);
      const bool is_even = args.num_seqs == 1 && !plan.is_split() && plan.num_units() % plan.num_threads() == 0;
      if (plan.num_threads() == 1 || is_even || plan.num_units() >= kBalance * plan.num_threads()) return;
    }
  });
}

Status store_kv(const Kernels& kernels, const StoreKvArgs& args) {
  if (!slots_are_valid(args.slot_mapping, args.num_tokens, args.num_blocks * args.block_size)) return kBadBlockId;
  parallel_ranges(args.num_tokens, kTokensPerPiece, [&](int64_t begin, int64_t end) {
    kernels.attention->store_kv(args, begin, end);
  });
  return kOk;
}

}  // namespace pagewick
