// The selective scan of Mamba-1 (Gu and Dao 2023, arXiv:2312.00752) behind a layer's convolution: a state for each
// channel and the gate of what queries read from it.
//
// Dimensions: T tokens, B sequences, D channels with states of N numbers.
#pragma once

#include "states.h"

namespace pagewick {

// A block of states has S [N, D] behind its first state_offset numbers.
struct ChannelScanArgs {
  const void* x;                // [T, D], rows x_stride elements apart
  const void* gate;             // [T, D], rows gate_stride elements apart
  const void* dt;               // [T, D], rows dt_stride elements apart
  const void* keys;             // [T, N], rows key_stride elements apart
  const void* queries;          // [T, N], rows query_stride elements apart
  const float* log_decay;       // [N, D]
  const float* skip;            // [D]
  const float* dt_bias;         // [D]
  float* states;                // num_blocks, block_floats apart
  const int32_t* block_tables;  // [B, 3]: see states.h; rows block_table_stride elements apart
  const int32_t* context_lens;  // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
  void* out;                    // [T, D]
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t num_blocks;
  int64_t block_floats;
  int64_t block_table_stride;
  int64_t num_channels;  // D
  int64_t state_dim;     // N
  int64_t state_offset;
  int64_t x_stride;
  int64_t gate_stride;
  int64_t dt_stride;
  int64_t key_stride;
  int64_t query_stride;
  DType dtype;  // of x, gate, dt, keys, queries and out
};

struct ChannelScanKernels {
  // Takes channels [first, end) through the new tokens of a sequence.
  void (*advance)(const ChannelScanArgs& args, const StateSequence& sequence, int64_t first, int64_t end);
};

// Returns kBadLengths or kBadBlockId, and writes nothing, if the batch contradicts itself.
Status channel_scan(const Kernels& kernels, const ChannelScanArgs& args);

}  // namespace pagewick
