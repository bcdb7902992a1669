// Divides latent attention, and the storing of latents, among the threads. All heads share their keys, so the rows of a
// unit are those of all heads, as if there were one KV head.
#include "mla.h"

#include "attention_units.h"

namespace pagewick {
namespace {

// Every unit brings the keys into the form for its products. With kManyRows rows that is a third of its work; with
// fewer it is most of it. Then it is better to have fewer units than all threads need to finish at the same time.
constexpr int64_t kManyRows = 32, kLeastRows = 16;
// Elements that are worth handing to another thread in one go.
constexpr int64_t kGrain = 1 << 14;

}  // namespace

Status latent_attention(const Kernels& kernels, const LatentAttentionArgs& args) {
  const RaggedBatch batch = {args.context_lens, args.cu_seqlens_q, args.num_tokens, args.num_seqs,
                             args.max_blocks * args.block_size, 1, args.num_heads, 0, false};
  // A unit gets as many rows as leave all threads something to do.
  return attend_in_units(args, *kernels.mla, batch, [](UnitPlan& plan) {
    for (int64_t rows = kMaxRows; rows >= kLeastRows; rows /= 2) {
      plan.enumerate(1, rows);
      if (plan.num_threads() == 1 || plan.num_units() * kManyRows >= plan.num_threads() * rows) return;
    }
  });
}

Status store_latent(const Kernels& kernels, const StoreLatentArgs& args) {
  if (!slots_are_valid(args.slot_mapping, args.num_tokens, args.num_blocks * args.block_size)) return kBadBlockId;
  const int64_t token_size = (args.num_heads + 1) * args.rope_dim + args.latent_dim;
  parallel_ranges(args.num_tokens, kGrain / token_size, [&](int64_t begin, int64_t end) {
    kernels.mla->store(args, begin, end);
  });
  return kOk;
}

}  // namespace pagewick
