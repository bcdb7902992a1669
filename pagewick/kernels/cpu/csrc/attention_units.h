// Divides the attention of a ragged batch into units of work and runs them on all threads. Paged attention and latent
// attention share this.
//
// A few long sequences can leave threads without work (a long decode). In that case every segment of keys becomes a
// unit of its own, and the states of the segments are merged afterwards. A unit that covers all segments merges them in
// the same order, so the split changes no bit.
#pragma once

#include <algorithm>
#include <atomic>

#include "attention.h"
#include "parallel.h"

namespace pagewick {

// A sequence is split if its share is larger than 1 / kBalance of the work of one thread.
constexpr int64_t kBalance = 4;
constexpr size_t kMaxPartialBytes = size_t{64} << 20;

// The lengths of a batch and the heads that attend to it.
struct RaggedBatch {
  const int32_t* context_lens;  // [num_seqs]
  const int32_t* cu_seqlens_q;  // [num_seqs + 1]
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t max_context_len;  // the number of keys that a row of the block table has room for
  int64_t num_kv_heads;
  int64_t group;           // query heads of one KV head
  int64_t sliding_window;  // 0: none
  bool is_chunked;         // as in AttentionArgs

  int64_t query_len(int64_t seq) const { return int64_t{cu_seqlens_q[seq + 1]} - cu_seqlens_q[seq]; }
  // Query rows of one KV head.
  int64_t num_rows(int64_t seq) const { return query_len(seq) * group; }
  // The first key that any query of the sequence sees.
  int64_t first_key(int64_t seq) const {
    return first_seen_key(context_lens[seq] - query_len(seq), sliding_window, is_chunked);
  }

  bool has_valid_lengths() const {
    if (cu_seqlens_q[0] != 0 || cu_seqlens_q[num_seqs] != num_tokens) return false;
    for (int64_t seq = 0; seq < num_seqs; ++seq)
      if (query_len(seq) < 0 || context_lens[seq] < query_len(seq) || context_lens[seq] > max_context_len) return false;
    return true;
  }
};

// The units of a batch, numbered from 0.
class UnitPlan {
 public:
  UnitPlan(const RaggedBatch& batch, int num_threads)
      : batch_(batch),
        num_threads_(num_threads),
        sequences_(static_cast<SequencePlan*>(
            thread_scratch(Scratch::kPlan, static_cast<size_t>(batch.num_seqs + 1) * sizeof(SequencePlan)))),
        is_split_(is_uneven()) {}

  int num_threads() const { return num_threads_; }
  bool is_split() const { return is_split_; }
  void do_not_split() { is_split_ = false; }
  int64_t num_units() const { return sequences_[batch_.num_seqs].first_unit; }
  // The most rows that a unit has, over all of its heads.
  int64_t max_total_rows() const { return max_total_rows_; }

  // Numbers the units. A unit has up to rows_per_unit rows of one KV head, or the rows of heads_of_few_rows KV heads
  // where a sequence has at most kFewRows of them.
  void enumerate(int64_t heads_of_few_rows, int64_t rows_per_unit) {
    rows_per_unit_ = rows_per_unit;
    max_total_rows_ = 0;
    int64_t num_units = 0;
    for (int64_t seq = 0; seq < batch_.num_seqs; ++seq) {
      const int64_t rows = batch_.num_rows(seq);
      SequencePlan& plan = sequences_[seq];
      plan.first_unit = num_units;
      plan.num_row_blocks = ceil_div(rows, rows_per_unit);
      plan.first_segment = batch_.first_key(seq) / kSegmentKeys;
      plan.num_segments =
          is_split_ ? std::max<int64_t>(1, ceil_div(batch_.context_lens[seq], kSegmentKeys) - plan.first_segment) : 1;
      plan.heads_per_unit = rows <= kFewRows ? heads_of_few_rows : 1;
      num_units += batch_.num_kv_heads / plan.heads_per_unit * plan.num_row_blocks * plan.num_segments;
      max_total_rows_ = std::max(max_total_rows_, std::min(rows, rows_per_unit) * plan.heads_per_unit);
    }
    sequences_[batch_.num_seqs].first_unit = num_units;
  }

  // Within a sequence, units are ordered by KV head. The row blocks of a head with most keys come first, and the
  // segments of a block follow each other.
  AttentionUnit unit(int64_t index) const {
    const SequencePlan* next = std::upper_bound(
        sequences_, sequences_ + batch_.num_seqs, index,
        [](int64_t unit_index, const SequencePlan& plan) { return unit_index < plan.first_unit; });
    const SequencePlan& plan = next[-1];
    const int64_t local = index - plan.first_unit, segment = local % plan.num_segments;
    const int64_t row_block = plan.num_row_blocks - 1 - local / plan.num_segments % plan.num_row_blocks;
    AttentionUnit unit;
    unit.seq = next - 1 - sequences_;
    unit.kv_head = local / plan.num_segments / plan.num_row_blocks * plan.heads_per_unit;
    unit.num_kv_heads = plan.heads_per_unit;
    unit.first_row = row_block * rows_per_unit_;
    unit.num_rows = std::min(rows_per_unit_, batch_.num_rows(unit.seq) - unit.first_row);
    unit.segment = plan.num_segments > 1 ? plan.first_segment + segment : -1;
    return unit;
  }

  // The number of units, from this one on, whose states are to be merged; 0 if this is not the first of them.
  int64_t num_segments_from(const AttentionUnit& unit) const {
    const SequencePlan& plan = sequences_[unit.seq];
    return unit.segment == plan.first_segment ? plan.num_segments : 0;
  }

 private:
  struct SequencePlan {
    int64_t first_unit;  // in the numbering of the whole batch
    int64_t first_segment;
    int64_t num_segments;  // 1 where the sequence is not split
    int64_t num_row_blocks;
    int64_t heads_per_unit;
  };

  // Whether each thread can take the same number of heads of the only sequence, which has few segments to divide.
  bool is_even_by_heads() const {
    return batch_.num_seqs == 1 && batch_.num_rows(0) <= kFewRows && batch_.num_kv_heads % num_threads_ == 0 &&
           batch_.context_lens[0] - batch_.first_key(0) <= 2 * num_threads_ * kSegmentKeys;
  }

  // Whether the longest unit is too long for the threads to finish at about the same time. A unit of few rows should
  // have all heads: the heads of a block are adjacent, and reading them together is up to 1.6 times as fast as reading
  // one of them in every block.
  bool is_uneven() const {
    int64_t longest = 0, total = 0;
    for (int64_t seq = 0; seq < batch_.num_seqs; ++seq) {
      const int64_t keys = batch_.context_lens[seq] - batch_.first_key(seq), rows = batch_.num_rows(seq);
      const int64_t rows_of_unit = rows <= kFewRows ? rows * batch_.num_kv_heads : std::min(rows, kMaxRows);
      if (keys > kSegmentKeys) longest = std::max(longest, keys * rows_of_unit);
      total += keys * rows * batch_.num_kv_heads;
    }
    return longest * num_threads_ * kBalance > total && num_threads_ > 1 && !is_even_by_heads();
  }

  const RaggedBatch& batch_;
  const int num_threads_;
  SequencePlan* sequences_;
  int64_t rows_per_unit_ = 0, max_total_rows_ = 0;
  bool is_split_;
};

// Computes attention with `kernels` (AttentionKernels or MlaKernels). divide(plan) calls plan.enumerate() with a number
// of heads and rows that gives all threads something to do.
template <class Args, class Kernels, class Divide>
Status attend_in_units(const Args& args, const Kernels& kernels, const RaggedBatch& batch, const Divide& divide) {
  if (!batch.has_valid_lengths()) return kBadLengths;
  UnitPlan plan(batch, num_threads());
  // The states of split sequences are kept until they are merged.
  int64_t stride = 0;
  size_t partial_bytes = 0;
  const auto divide_anew = [&] {
    divide(plan);
    stride = plan.is_split() ? kernels.state_floats(args, plan.max_total_rows()) : 0;
    partial_bytes = static_cast<size_t>(plan.num_units() * stride) * sizeof(float);
  };
  divide_anew();
  if (partial_bytes > kMaxPartialBytes) {
    plan.do_not_split();
    divide_anew();
  }
  float* const partials = static_cast<float*>(thread_scratch(Scratch::kPartials, partial_bytes));
  std::atomic<bool> has_bad_block{false};
  parallel_for(plan.num_units(), [&](int64_t index) {
    if (!kernels.attend(args, plan.unit(index), partials + index * stride)) has_bad_block = true;
  });
  if (has_bad_block) return kBadBlockId;
  if (!plan.is_split()) return kOk;
  parallel_for(plan.num_units(), [&](int64_t index) {
    const AttentionUnit unit = plan.unit(index);
    if (const int64_t num_segments = plan.num_segments_from(unit); num_segments > 0)
      kernels.merge(args, unit, partials + index * stride, stride, num_segments);
  });
  return kOk;
}

}  // namespace pagewick
