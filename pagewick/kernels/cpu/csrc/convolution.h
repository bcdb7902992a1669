// The gated short convolutions of LFM2 (arXiv:2511.23404) between the projections of a layer: c * convolution(b * x). Also
// those of Mamba-1 (arXiv:2312.00752), without gates: silu(convolution(x)).
//
// Dimensions: T tokens, B sequences, D channels, K inputs of the convolution for each.
#pragma once

#include "states.h"

namespace pagewick {

// A block of states begins with the products b * x, or with x, before the next token, oldest first [K - 1, D].
struct ConvolutionArgs {
  const void* bcx;              // [T, 3 * D], or [T, D] without gates; rows bcx_stride elements apart
  const float* weight;          // [D, K]
  const float* bias;            // [D], or null
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
  int64_t conv_width;    // K
  int64_t bcx_stride;
  int32_t has_gates;
  DType dtype;  // of bcx and out
};

// Channels [first_channel, end_channel) of tokens [begin, end) of a sequence, counted from its first new one.
struct ConvolutionUnit {
  int64_t first_channel;
  int64_t end_channel;
  int64_t begin;
  int64_t end;
};

struct ConvolutionKernels {
  // Writes weights of channels [first, end) tap by tap to `taps`, rows `stride` apart: a multiple of kTapsUnit.
  void (*turn)(const ConvolutionArgs& args, int64_t first, int64_t end, float* taps, int64_t stride);
  // Computes outputs with the turned weights of all channels.
  void (*advance)(const ConvolutionArgs& args, const StateSequence& sequence, const ConvolutionUnit& unit,
                  const float* taps, int64_t stride);
  // Stores the products for the token after the stored state, in channels [first, end).
  void (*keep_inputs)(const ConvolutionArgs& args, const StateSequence& sequence, int64_t first, int64_t end);
};

// Whole vectors of every instruction set have that many numbers together.
constexpr int64_t kTapsUnit = 16;

// Returns kBadLengths or kBadBlockId, and writes nothing, if the batch contradicts itself.
Status short_convolution(const Kernels& kernels, const ConvolutionArgs& args);

}  // namespace pagewick
