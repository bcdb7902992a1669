// Divides attention to keys that lie anywhere among the threads. A unit has heads of one token: it sees keys of its own,
// the sums over which do not depend on the other tokens.
#include "window.h"

#include <algorithm>
#include <atomic>

#include "attention_units.h"

namespace pagewick {
namespace {

// Every unit brings the keys into the form for its products, which takes as long as the products of some heads.
constexpr int64_t kLeastHeads = 16;

template <class Args>
bool counts_are_valid(const Args& args) {
  return std::all_of(args.counts, args.counts + args.num_tokens,
                     [&args](int32_t count) { return count >= 0 && count <= args.top_k; });
}

// Whether the block tables have room for the entries of all sequences.
bool has_entry_blocks(const WindowAttentionArgs& args) {
  const int64_t room = args.max_entry_blocks * args.entry_block_size;
  return std::all_of(args.context_lens, args.context_lens + args.num_seqs,
                     [&args, room](int32_t length) { return length / args.ratio <= room; });
}

// Runs attend(unit) for the heads of all tokens, num_heads of them, `heads` in a unit.
template <class Args, class Attend>
Status attend_tokens(const Args& args, int64_t heads, const Attend& attend) {
  const int64_t parts = ceil_div(args.num_heads, heads);
  std::atomic<bool> has_bad_block{false};
  parallel_for(args.num_tokens * parts, [&](int64_t index) {
    const int64_t token = index / parts, first_head = index % parts * heads;
    const int32_t* const ends = args.cu_seqlens_q + 1;
    const int64_t seq = std::upper_bound(ends, ends + args.num_seqs, token) - ends;
    const int64_t position = args.context_lens[seq] - (args.cu_seqlens_q[seq + 1] - token);
    const WindowUnit unit = {seq, token, position, first_head, std::min(heads, args.num_heads - first_head)};
    if (!attend(args, unit)) has_bad_block = true;
  });
  return has_bad_block ? kBadBlockId : kOk;
}

}  // namespace

Status window_attention(const Kernels& kernels, const WindowAttentionArgs& args) {
  const RaggedBatch batch = {args.context_lens, args.cu_seqlens_q, args.num_tokens, args.num_seqs,
                             args.max_blocks * args.block_size, 1, args.num_heads, args.window, false};
  if (!batch.has_valid_lengths()) return kBadLengths;
  if (args.slots != nullptr && !counts_are_valid(args)) return kBadLengths;
  if (args.entries != nullptr && args.slots == nullptr && !has_entry_blocks(args)) return kBadLengths;
  // A unit gets as many heads as leave all threads something to do.
  int64_t heads = args.num_heads;
  while (heads > kLeastHeads && args.num_tokens * ceil_div(args.num_heads, heads) < num_threads()) heads = ceil_div(heads, 2);
  return attend_tokens(args, heads, kernels.window->attend);
}

Status block_attention(const Kernels& kernels, const BlockAttentionArgs& args) {
  const RaggedBatch batch = {args.context_lens, args.cu_seqlens_q, args.num_tokens, args.num_seqs,
                             args.max_blocks * args.block_size, 1, args.num_heads, 0, false};
  if (!batch.has_valid_lengths() || !counts_are_valid(args)) return kBadLengths;
  // Keys are brought into the form for their products once for all heads that read them.
  return attend_tokens(args, args.num_heads / args.num_kv_heads, kernels.window->attend_blocks);
}

}  // namespace pagewick
