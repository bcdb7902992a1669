// Divides the gated delta rule among the threads. Whoever computes a column of a state, its sums have one order.
#include "delta.h"

#include <algorithm>

#include "parallel.h"

namespace pagewick {
namespace {

// Columns that a unit has when there are more threads than key heads: a whole number of vectors, and enough to hide the
// latency of additions.
constexpr int64_t kColumns = 64;
// New tokens of a sequence between two norms then, which bounds the memory for what they read. Those behind the stored
// state belong to the last slice, since S is nowhere between them.
constexpr int64_t kSlice = 64;
// Channels of the convolution that are worth handing to another thread in one go.
constexpr int64_t kGrain = 1 << 11;

// Takes the tokens of a unit through the rule, and stores S where it is to be stored. Its `after` is not used.
void advance_parts(const DeltaKernels& delta, const DeltaArgs& args, const StateSequence& sequence, DeltaUnit unit,
                   float* reads) {
  const int64_t begin = unit.begin, end = unit.end, middle = std::min(end, sequence.num_stored);
  unit.end = middle, unit.after = sequence.target;
  delta.advance(args, sequence, unit, reads);
  if (middle == end) return;
  unit.begin = middle, unit.end = end, unit.before = sequence.target, unit.after = nullptr;
  if (reads != nullptr) reads += (middle - begin) * args.num_value_heads * args.value_dim;
  delta.advance(args, sequence, unit, reads);
}

// A unit has a key head, with all channels that belong to it, so that nothing is computed twice and no unit writes what
// another one reads.
void advance_key_heads(const DeltaKernels& delta, const DeltaArgs& args) {
  const int64_t keys = args.num_key_heads * args.key_dim;
  const int64_t columns = args.num_value_heads / args.num_key_heads * args.value_dim;
  parallel_for(args.num_seqs * args.num_key_heads, [&](int64_t index) {
    const StateSequence sequence = sequence_at(args, index / args.num_key_heads);
    const int64_t head = index % args.num_key_heads;
    if (sequence.num_tokens == 0) return;
    const int64_t first = head * columns, end = first + columns;
    const DeltaUnit unit = {head, first, end, 0, sequence.num_tokens, sequence.source, nullptr};
    advance_parts(delta, args, sequence, unit, nullptr);
    delta.keep_inputs(args, sequence, head * args.key_dim, (head + 1) * args.key_dim);
    delta.keep_inputs(args, sequence, keys + head * args.key_dim, keys + (head + 1) * args.key_dim);
    delta.keep_inputs(args, sequence, 2 * keys + unit.first_column, 2 * keys + unit.end_column);
  });
}

// A unit has some columns of a value head. Its outputs wait for those of the other columns; the inputs of the
// convolution in a source wait for all units, as it may be the target, too.
void advance_columns(const DeltaKernels& delta, const DeltaArgs& args) {
  const int64_t parts = ceil_div(args.value_dim, kColumns), num_units = args.num_value_heads * parts;
  const int64_t row = args.num_value_heads * args.value_dim, group = args.num_value_heads / args.num_key_heads;
  int64_t longest = 0, longest_rest = 0;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    const StateSequence sequence = sequence_at(args, seq);
    longest = std::max(longest, sequence.num_stored);
    longest_rest = std::max(longest_rest, sequence.num_tokens - sequence.num_stored);
  }
  const int64_t slice = std::min(longest, kSlice), most = slice + longest_rest;
  const auto end_of = [slice](const StateSequence& sequence, int64_t begin) {
    return begin + slice < sequence.num_stored ? begin + slice : sequence.num_tokens;
  };
  const size_t num_bytes = static_cast<size_t>(args.num_seqs * most * row) * sizeof(float);
  float* const reads = static_cast<float*>(thread_scratch(Scratch::kPartials, num_bytes));
  for (int64_t begin = 0; begin < longest; begin += slice) {
    parallel_for(args.num_seqs * num_units, [&](int64_t index) {
      const int64_t seq = index / num_units, head = index % num_units / parts, part = index % parts;
      const StateSequence sequence = sequence_at(args, seq);
      if (begin >= sequence.num_stored) return;
      const int64_t first = head * args.value_dim + part * kColumns;
      const int64_t end = std::min((head + 1) * args.value_dim, first + kColumns);
      const float* const before = begin == 0 ? sequence.source : sequence.target;
      const DeltaUnit unit = {head / group, first, end, begin, end_of(sequence, begin), before, nullptr};
      advance_parts(delta, args, sequence, unit, reads + seq * most * row);
    });
    parallel_for(args.num_seqs * most, [&](int64_t index) {
      const StateSequence sequence = sequence_at(args, index / most);
      const int64_t token = begin + index % most;
      if (begin < sequence.num_stored && token < end_of(sequence, begin))
        delta.finish(args, sequence.first_token + token, 0, args.num_value_heads, reads + index * row);
    });
  }
  parallel_elements(args.num_seqs, num_channels(args), kGrain, [&](int64_t seq, int64_t first, int64_t end) {
    const StateSequence sequence = sequence_at(args, seq);
    if (sequence.num_tokens > 0) delta.keep_inputs(args, sequence, first, end);
  });
}

}  // namespace

Status gated_delta_net(const Kernels& kernels, const DeltaArgs& args) {
  if (const Status status = check_sequences(args); status != kOk) return status;
  const int64_t num_units = args.num_seqs * args.num_key_heads, threads = num_threads();
  if (num_units >= 2 * threads || num_units % threads == 0) {
    advance_key_heads(*kernels.delta, args);
  } else {
    advance_columns(*kernels.delta, args);
  }
  return kOk;
}

}  // namespace pagewick
