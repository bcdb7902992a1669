#include "compress.h"

#include <atomic>

#include "attention_units.h"
#include "parallel.h"

namespace pagewick {
namespace {

// Elements that are worth handing to another thread in one go.
constexpr int64_t kGrain = 1 << 14;

// Writes the windows that end among the new tokens, and have a slot, to `windows` [T]; returns how many there are.
int64_t find_windows(const CompressRowsArgs& args, EndedWindow* windows) {
  int64_t count = 0;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    const int64_t last = args.cu_seqlens_q[seq + 1] - 1, length = args.context_lens[seq];
    const int64_t first = length - (args.cu_seqlens_q[seq + 1] - args.cu_seqlens_q[seq]);
    for (int64_t end = (first / args.ratio + 1) * args.ratio; end <= length; end += args.ratio) {
      const int64_t token = last - (length - end);
      if (args.entry_slots[token] >= 0) windows[count++] = {seq, token, end};
    }
  }
  return count;
}

}  // namespace

Status compress_rows(const Kernels& kernels, const CompressRowsArgs& args) {
  const RaggedBatch batch = {args.context_lens, args.cu_seqlens_q, args.num_tokens, args.num_seqs,
                             args.max_blocks * args.block_size, 1, 1, 0, false};
  if (!batch.has_valid_lengths()) return kBadLengths;
  if (!slots_are_valid(args.slot_mapping, args.num_tokens, args.num_blocks * args.block_size)) return kBadBlockId;
  const int64_t num_entry_slots = args.num_entry_blocks * args.entry_block_size * args.ratio;
  if (!slots_are_valid(args.entry_slots, args.num_tokens, num_entry_slots)) return kBadBlockId;
  EndedWindow* const windows = static_cast<EndedWindow*>(
      thread_scratch(Scratch::kPlan, static_cast<size_t>(args.num_tokens) * sizeof(EndedWindow)));
  const int64_t num_windows = find_windows(args, windows);
  const int64_t row_size = (args.has_overlap ? 4 : 2) * args.dim;
  parallel_ranges(args.num_tokens, kGrain / row_size,
                  [&](int64_t begin, int64_t end) { kernels.compress->store(args, begin, end); });
  std::atomic<bool> has_bad_block{false};
  parallel_for(num_windows, [&](int64_t index) {
    if (!kernels.compress->compress(args, windows[index])) has_bad_block = true;
  });
  return has_bad_block ? kBadBlockId : kOk;
}

}  // namespace pagewick
