// Operations that keep a state of each sequence share this: where a state comes from and where it goes. Their
// arguments have fields of the same names for the batch and for the blocks of states.
//
// A row of block_tables has the block with the state before a sequence's new tokens, the block for the state after them,
// and after how many of them that is, 0 for all.
#pragma once

#include "kernels.h"

namespace pagewick {

// The new tokens of a sequence, and the blocks of its state. source: null for a sequence without earlier tokens.
// num_stored: the target gets the state after that many of the tokens; those behind them may be taken back.
struct StateSequence {
  int64_t first_token;
  int64_t num_tokens;
  int64_t num_stored;
  const float* source;
  float* target;
};

// Returns kBadLengths or kBadBlockId if the batch contradicts itself.
template <class Args>
Status check_sequences(const Args& args) {
  if (args.cu_seqlens_q[0] != 0 || args.cu_seqlens_q[args.num_seqs] != args.num_tokens) return kBadLengths;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    const int64_t num_new = int64_t{args.cu_seqlens_q[seq + 1]} - args.cu_seqlens_q[seq];
    if (num_new < 0 || args.context_lens[seq] < num_new) return kBadLengths;
    if (num_new == 0) continue;
    const int32_t* const blocks = args.block_tables + seq * args.block_table_stride;
    if (blocks[2] < 0 || blocks[2] > num_new) return kBadLengths;
    for (int i = args.context_lens[seq] == num_new ? 1 : 0; i < 2; ++i)
      if (blocks[i] < 0 || blocks[i] >= args.num_blocks) return kBadBlockId;
  }
  return kOk;
}

template <class Args>
StateSequence sequence_at(const Args& args, int64_t seq) {
  const int64_t first = args.cu_seqlens_q[seq], num_new = args.cu_seqlens_q[seq + 1] - first;
  const int32_t* const blocks = args.block_tables + seq * args.block_table_stride;
  const bool is_new = args.context_lens[seq] == num_new;
  return {first, num_new, blocks[2] > 0 && blocks[2] < num_new ? blocks[2] : num_new,
          is_new ? nullptr : args.states + blocks[0] * args.block_floats, args.states + blocks[1] * args.block_floats};
}

}  // namespace pagewick
