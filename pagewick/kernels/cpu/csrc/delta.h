// The gated delta rule (Yang et al. 2024, arXiv:2412.06464) between the projections of a linear-attention layer: a short
// convolution, the states of all value heads, and the gated norm of what queries read from them.
//
// Dimensions: T tokens, B sequences, KH key heads of DK numbers, VH value heads (a multiple of KH) of DV numbers, K
// inputs of the convolution for each of its C = 2 KH DK + VH DV channels: queries, keys, values.
#pragma once

#include "states.h"

namespace pagewick {

// A block of states is the inputs of the convolution before the next token, oldest first [K - 1, C], then S
// [VH, DK, DV].
struct DeltaArgs {
  const void* qkv;              // [T, C], rows qkv_stride elements apart
  const void* gate;             // [T, VH * DV], rows gate_stride elements apart
  const void* beta;             // [T, VH], rows beta_stride elements apart
  const void* decay;            // [T, VH], or [T, VH * DK] by channel; rows decay_stride elements apart
  const float* conv_weight;     // [C, K]
  const float* log_decay;       // [VH]
  const float* dt_bias;         // of each number in a row of decay
  const float* norm_weight;     // [DV]
  float* states;                // num_blocks, block_floats apart
  const int32_t* block_tables;  // [B, 3]: see states.h; rows block_table_stride elements apart
  const int32_t* context_lens;  // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
  void* out;                    // [T, VH * DV]
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t num_blocks;
  int64_t block_floats;
  int64_t block_table_stride;
  int64_t num_key_heads;
  int64_t num_value_heads;
  int64_t key_dim;
  int64_t value_dim;
  int64_t conv_width;  // K
  int64_t qkv_stride;
  int64_t gate_stride;
  int64_t beta_stride;
  int64_t decay_stride;
  float norm_eps;
  float strength;             // S takes in this times sigmoid(beta) of a difference
  float decay_bound;          // below 0: factors of S are exp(decay_bound * sigmoid), by channel; 0: without a bound
  int32_t has_channel_decay;  // each row of S decays by a factor of its own, and KH = VH; else each head has one
  int32_t has_sigmoid_gate;   // else the gate is a SiLU
  DType dtype;  // of qkv, gate, beta, decay and out
};

inline int64_t num_channels(const DeltaArgs& args) {
  return 2 * args.num_key_heads * args.key_dim + args.num_value_heads * args.value_dim;
}

// Tokens [begin, end) of a sequence, counted from its first new one, for columns [first_column, end_column) of the
// VH * DV value columns: all of those of one key head, or some of those of a value head. S comes from `before` (null:
// zeros) and goes to `after` (null: nowhere).
struct DeltaUnit {
  int64_t key_head;
  int64_t first_column;
  int64_t end_column;
  int64_t begin;
  int64_t end;
  const float* before;
  float* after;
};

struct DeltaKernels {
  // Takes the tokens of a unit through the rule. reads: where token `begin` reads the state, tokens VH * DV numbers
  // apart. Null: the unit has all columns of its value heads, and their outputs are computed.
  void (*advance)(const DeltaArgs& args, const StateSequence& sequence, const DeltaUnit& unit, float* reads);
  // Computes the outputs of value heads [first_head, end_head) of a token from what it has read [VH * DV].
  void (*finish)(const DeltaArgs& args, int64_t token, int64_t first_head, int64_t end_head, const float* reads);
  // Stores the inputs of the convolution for the token after the stored state, in channels [first, end).
  void (*keep_inputs)(const DeltaArgs& args, const StateSequence& sequence, int64_t first, int64_t end);
};

// Returns kBadLengths or kBadBlockId, and writes nothing, if the batch contradicts itself.
Status gated_delta_net(const Kernels& kernels, const DeltaArgs& args);

}  // namespace pagewick
