// Splits a ragged batch into units of work and runs them on all threads, as attention.cpp does; here all heads share
// their keys, so that a unit is nothing but a run of query rows.
#include "mla.h"

#include <algorithm>
#include <atomic>

#include "attention.h"
#include "parallel.h"

namespace pagewick {
namespace {

// A sequence whose share is larger than 1 / kBalance of a thread's work is worth splitting.
constexpr int64_t kBalance = 4;
// Every unit brings the keys into the form for its products. With so many rows that is a third of its work, with fewer it
// is most of it: better fewer units than threads want, in order to end together, than that.
constexpr int64_t kManyRows = 32, kLeastRows = 16;
constexpr size_t kMaxPartialBytes = size_t{64} << 20;
// Elements that are worth handing to another thread in one go.
constexpr int64_t kGrain = 1 << 14;

struct SequencePlan {
  int64_t first_unit;  // units of all sequences are numbered in one row
  int64_t num_row_blocks;
  int64_t num_segments;  // 1 where the sequence is not split
};

int64_t query_len(const LatentAttentionArgs& args, int64_t seq) {
  return int64_t{args.cu_seqlens_q[seq + 1]} - args.cu_seqlens_q[seq];
}

bool lengths_are_valid(const LatentAttentionArgs& args) {
  if (args.cu_seqlens_q[0] != 0 || args.cu_seqlens_q[args.num_seqs] != args.num_tokens) return false;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    const int64_t q_len = query_len(args, seq), context_len = args.context_lens[seq];
    if (q_len < 0 || context_len < q_len || context_len > args.max_blocks * args.block_size) return false;
  }
  return true;
}

class Plan {
 public:
  Plan(const LatentAttentionArgs& args, const MlaKernels& kernels, int num_threads) : args_(args), kernels_(kernels) {
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
  int64_t num_segments(const LatentUnit& unit) const { return sequences_[unit.seq].num_segments; }

  // Within a sequence the rows with most keys come first, their segments in order.
  LatentUnit unit(int64_t index) const {
    const SequencePlan* next = std::upper_bound(
        sequences_, sequences_ + args_.num_seqs, index,
        [](int64_t unit_index, const SequencePlan& plan) { return unit_index < plan.first_unit; });
    const SequencePlan& plan = next[-1];
    const int64_t local = index - plan.first_unit;
    LatentUnit unit;
    unit.seq = next - 1 - sequences_;
    unit.first_row = (plan.num_row_blocks - 1 - local / plan.num_segments) * rows_per_unit_;
    unit.num_rows = std::min(rows_per_unit_, query_len(args_, unit.seq) * args_.num_heads - unit.first_row);
    unit.segment = plan.num_segments > 1 ? local % plan.num_segments : -1;
    return unit;
  }

 private:
  // Gives a unit as many rows as leave all threads something to do.
  void divide(int num_threads) {
    for (int64_t rows = kMaxRows; rows >= kLeastRows; rows /= 2) {
      enumerate(rows);
      if (num_threads == 1 || num_units() * kManyRows >= num_threads * rows) return;
    }
  }

  void enumerate(int64_t rows_per_unit) {
    rows_per_unit_ = rows_per_unit;
    int64_t num_units = 0;
    for (int64_t seq = 0; seq < args_.num_seqs; ++seq) {
      SequencePlan& plan = sequences_[seq];
      plan.first_unit = num_units;
      plan.num_row_blocks = ceil_div(query_len(args_, seq) * args_.num_heads, rows_per_unit);
      plan.num_segments = is_split_ ? std::max<int64_t>(1, ceil_div(args_.context_lens[seq], kSegmentKeys)) : 1;
      num_units += plan.num_row_blocks * plan.num_segments;
    }
    sequences_[args_.num_seqs].first_unit = num_units;
  }

  // Whether the longest unit is too long for the threads to finish at about the same time.
  bool is_uneven(int num_threads) const {
    int64_t longest = 0, total = 0;
    for (int64_t seq = 0; seq < args_.num_seqs; ++seq) {
      const int64_t keys = args_.context_lens[seq], rows = query_len(args_, seq) * args_.num_heads;
      if (keys > kSegmentKeys) longest = std::max(longest, keys * std::min(rows, kMaxRows));
      total += keys * rows;
    }
    return longest * num_threads * kBalance > total && num_threads > 1;
  }

  const LatentAttentionArgs& args_;
  const MlaKernels& kernels_;
  SequencePlan* sequences_;
  int64_t rows_per_unit_ = 0;
  bool is_split_;
};

}  // namespace

Status latent_attention(const Kernels& all_kernels, const LatentAttentionArgs& args) {
  const MlaKernels& kernels = *all_kernels.mla;
  if (!lengths_are_valid(args)) return kBadLengths;
  const Plan plan(args, kernels, num_threads());
  const int64_t num_units = plan.num_units();
  std::atomic<bool> has_bad_block{false};
  const int64_t stride = plan.is_split() ? plan.unit_floats() : 0;
  float* partials = static_cast<float*>(thread_scratch(Scratch::kPartials, plan.is_split() ? plan.partial_bytes() : 0));
  parallel_for(num_units, [&](int64_t index) {
    if (!kernels.attend(args, plan.unit(index), partials + index * stride)) has_bad_block = true;
  });
  if (has_bad_block) return kBadBlockId;
  if (!plan.is_split()) return kOk;
  parallel_for(num_units, [&](int64_t index) {
    const LatentUnit unit = plan.unit(index);
    if (unit.segment == 0) kernels.merge(args, unit, partials + index * stride, stride, plan.num_segments(unit));
  });
  return kOk;
}

Status store_latent(const Kernels& kernels, const StoreLatentArgs& args) {
  for (int64_t token = 0; token < args.num_tokens; ++token)
    if (args.slot_mapping[token] >= args.num_blocks * args.block_size) return kBadBlockId;
  const int64_t token_size = (args.num_heads + 1) * args.rope_dim + args.latent_dim;
  const int64_t chunk = std::max<int64_t>(1, kGrain / token_size);
  parallel_for(ceil_div(args.num_tokens, chunk), [&](int64_t index) {
    kernels.mla->store(args, index * chunk, std::min(args.num_tokens, (index + 1) * chunk));
  });
  return kOk;
}

}  // namespace pagewick
