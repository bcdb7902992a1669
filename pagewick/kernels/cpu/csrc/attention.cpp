// Splits a ragged batch into units of work and runs them on all threads.
//
// A unit is a block of query rows of one sequence and KV head, or the few rows of several KV heads. When a few long
// sequences would keep threads waiting (a long decode), every segment of keys becomes a unit of its own and their
// states are merged afterwards. Merging in order is also what a unit does by itself, so the split changes no bit.
#include "attention.h"

#include <algorithm>
#include <atomic>

#include "parallel.h"

namespace pagewick {
namespace {

// A sequence whose share is larger than 1 / kBalance of a thread's work is worth splitting.
constexpr int64_t kBalance = 4;
constexpr size_t kMaxPartialBytes = size_t{64} << 20;
// Keys and values of so few tokens are not worth waking another thread for.
constexpr int64_t kTokensPerPiece = 16;

struct SequencePlan {
  int64_t first_unit;     // units of all sequences are numbered in one row
  int64_t first_segment;  // of any query
  int64_t num_segments;   // 1 where the sequence is not split
  int64_t num_row_blocks;
  int64_t heads_per_unit;
};

int64_t query_len(const AttentionArgs& args, int64_t seq) {
  return int64_t{args.cu_seqlens_q[seq + 1]} - args.cu_seqlens_q[seq];
}

bool lengths_are_valid(const AttentionArgs& args) {
  if (args.cu_seqlens_q[0] != 0 || args.cu_seqlens_q[args.num_seqs] != args.num_tokens) return false;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    const int64_t q_len = query_len(args, seq), context_len = args.context_lens[seq];
    if (q_len < 0 || context_len < q_len || context_len > args.max_blocks * args.block_size) return false;
  }
  return true;
}

class Plan {
 public:
  Plan(const AttentionArgs& args, const AttentionKernels& kernels, int num_threads) : args_(args), kernels_(kernels) {
    group_ = args.num_heads / args.num_kv_heads;
    sequences_ = static_cast<SequencePlan*>(
        thread_scratch(Scratch::kPlan, static_cast<size_t>(args.num_seqs + 1) * sizeof(SequencePlan)));
    is_split_ = is_uneven(num_threads);
    divide(num_threads);
    if (is_split_ && partial_bytes() > kMaxPartialBytes) {
      is_split_ = false;
      divide(num_threads);
    }
  }

  bool is_split() const { return is_split_; }

  int64_t num_units() const { return sequences_[args_.num_seqs].first_unit; }
  size_t partial_bytes() const { return static_cast<size_t>(num_units() * unit_floats()) * sizeof(float); }
  int64_t unit_floats() const { return kernels_.state_floats(args_, rows_per_unit_); }  // of a unit's state
  const SequencePlan& sequence_of(const AttentionUnit& unit) const { return sequences_[unit.seq]; }

  // Within a sequence: KV head by KV head, the row blocks with most keys first, their segments in order.
  AttentionUnit unit(int64_t index) const {
    const SequencePlan* next = std::upper_bound(
        sequences_, sequences_ + args_.num_seqs, index,
        [](int64_t unit_index, const SequencePlan& plan) { return unit_index < plan.first_unit; });
    const SequencePlan& plan = next[-1];
    const int64_t local = index - plan.first_unit, segment = local % plan.num_segments;
    const int64_t row_block = plan.num_row_blocks - 1 - local / plan.num_segments % plan.num_row_blocks;
    AttentionUnit unit;
    unit.seq = next - 1 - sequences_;
    unit.kv_head = local / plan.num_segments / plan.num_row_blocks * plan.heads_per_unit;
    unit.num_kv_heads = plan.heads_per_unit;
    unit.first_row = row_block * kMaxRows;
    unit.num_rows = std::min(kMaxRows, query_len(args_, unit.seq) * group_ - unit.first_row);
    unit.segment = plan.num_segments > 1 ? plan.first_segment + segment : -1;
    return unit;
  }

 private:
  // Gives a unit as many KV heads as leave all threads something to do.
  void divide(int num_threads) {
    for (int64_t heads = args_.num_kv_heads; heads > 0; --heads) {
      if (args_.num_kv_heads % heads != 0) continue;
      enumerate(heads);
      if (num_threads == 1 || num_units() >= kBalance * num_threads) return;
    }
  }

  void enumerate(int64_t heads_of_few_rows) {
    int64_t num_units = 0;
    rows_per_unit_ = 0;
    for (int64_t seq = 0; seq < args_.num_seqs; ++seq) {
      const int64_t rows = query_len(args_, seq) * group_, context_len = args_.context_lens[seq];
      SequencePlan& plan = sequences_[seq];
      plan.first_unit = num_units;
      plan.num_row_blocks = ceil_div(rows, kMaxRows);
      plan.first_segment = first_key(seq) / kSegmentKeys;
      plan.num_segments =
          is_split_ ? std::max<int64_t>(1, ceil_div(context_len, kSegmentKeys) - plan.first_segment) : 1;
      plan.heads_per_unit = rows <= kFewRows ? heads_of_few_rows : 1;
      num_units += args_.num_kv_heads / plan.heads_per_unit * plan.num_row_blocks * plan.num_segments;
      rows_per_unit_ = std::max(rows_per_unit_, std::min(rows, kMaxRows) * plan.heads_per_unit);
    }
    sequences_[args_.num_seqs].first_unit = num_units;
  }

  // Whether the longest unit is too long for the threads to finish at about the same time.
  bool is_uneven(int num_threads) const {
    int64_t longest = 0, total = 0;
    for (int64_t seq = 0; seq < args_.num_seqs; ++seq) {
      const int64_t keys = args_.context_lens[seq] - first_key(seq), rows = query_len(args_, seq) * group_;
      if (keys > kSegmentKeys) longest = std::max(longest, keys * std::min(rows, kMaxRows));
      total += keys * rows * args_.num_kv_heads;
    }
    return longest * num_threads * kBalance > total && num_threads > 1;
  }

  int64_t first_key(int64_t seq) const {
    if (args_.sliding_window == 0) return 0;
    return std::max<int64_t>(0, args_.context_lens[seq] - query_len(args_, seq) + 1 - args_.sliding_window);
  }

  const AttentionArgs& args_;
  const AttentionKernels& kernels_;
  SequencePlan* sequences_;
  int64_t group_;
  int64_t rows_per_unit_ = 0;
  bool is_split_;
};

}  // namespace

Status paged_attention(const Kernels& all_kernels, const AttentionArgs& args) {
  const AttentionKernels& kernels = *all_kernels.attention;
  if (!lengths_are_valid(args)) return kBadLengths;
  const Plan plan(args, kernels, num_threads());
  const int64_t num_units = plan.num_units();
  std::atomic<bool> has_bad_block{false};
  const int64_t stride = plan.is_split() ? plan.unit_floats() : 0;
  float* partials = static_cast<float*>(thread_scratch(Scratch::kPartials, plan.is_split() ? plan.partial_bytes() : 0));
  parallel_for(num_units, [&](int64_t index) {
    const AttentionUnit unit = plan.unit(index);
    if (!kernels.attend(args, unit, partials + index * stride)) has_bad_block = true;
  });
  if (has_bad_block) return kBadBlockId;
  if (!plan.is_split()) return kOk;
  parallel_for(num_units, [&](int64_t index) {
    const AttentionUnit unit = plan.unit(index);
    const SequencePlan& sequence = plan.sequence_of(unit);
    if (unit.segment == sequence.first_segment)
      kernels.merge(args, unit, partials + index * stride, stride, sequence.num_segments);
  });
  return kOk;
}

Status store_kv(const Kernels& kernels, const StoreKvArgs& args) {
  for (int64_t token = 0; token < args.num_tokens; ++token)
    if (args.slot_mapping[token] >= args.num_blocks * args.block_size) return kBadBlockId;
  parallel_for(ceil_div(args.num_tokens, kTokensPerPiece), [&](int64_t index) {
    kernels.attention->store_kv(args, index * kTokensPerPiece,
                                std::min(args.num_tokens, (index + 1) * kTokensPerPiece));
  });
  return kOk;
}

}  // namespace pagewick
