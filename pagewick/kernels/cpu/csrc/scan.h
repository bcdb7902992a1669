// The selective scan of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) between the projections of a layer: a short
// convolution, the states of all heads, and the gated norm of what queries read from them.
//
// Dimensions: T tokens, B sequences, H heads of P numbers, G groups (a divisor of H) with keys and queries of N
// numbers, K inputs of the convolution for each of its C = H P + 2 G N channels: values, keys, queries.
#pragma once

#include "states.h"

namespace pagewick {

// A block of states is the inputs of the convolution before the next token, oldest first [K - 1, C], then S [H, N, P].
struct ScanArgs {
  const void* xbc;              // [T, C], rows xbc_stride elements apart
  const void* gate;             // [T, H * P], rows gate_stride elements apart
  const void* dt;               // [T, H], rows dt_stride elements apart
  const float* conv_weight;     // [C, K]
  const float* conv_bias;       // [C]
  const float* log_decay;       // [H]
  const float* skip;            // [H]
  const float* dt_bias;         // [H]
  const float* norm_weight;     // [H * P]; null: there is no norm
  float* states;                // num_blocks, block_floats apart
  const int32_t* block_tables;  // [B, 3]: see states.h; rows block_table_stride elements apart
  const int32_t* context_lens;  // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
  void* out;                    // [T, H * P]
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t num_blocks;
  int64_t block_floats;
  int64_t block_table_stride;
  int64_t num_heads;
  int64_t num_groups;
  int64_t head_dim;         // P
  int64_t state_dim;        // N
  int64_t conv_width;       // K
  int64_t num_norm_groups;  // a divisor of H * P
  int64_t xbc_stride;
  int64_t gate_stride;
  int64_t dt_stride;
  float norm_eps;
  float gate_scale;
  float dt_scale;
  int32_t is_norm_first;  // else the gate comes before the norm
  DType dtype;            // of xbc, gate, dt and out
};

inline int64_t num_channels(const ScanArgs& args) {
  return args.num_heads * args.head_dim + 2 * args.num_groups * args.state_dim;
}

// Tokens [begin, end) of a sequence, counted from its first new one. S comes from `before` (null: zeros) and goes to
// `after` (null: nowhere). row: that of the first of them in a ScanSlice.
struct ScanPiece {
  StateSequence sequence;
  int64_t begin;
  int64_t end;
  int64_t row;
  const float* before;
  float* after;
};

// Holds what later stages need of successive tokens of the batch, a row for each.
struct ScanSlice {
  float* keys;     // keys, then queries of all groups, after the convolution; rows key_stride apart
  float* factors;  // steps of all heads, then from head_stride on the factors of S; rows 2 * head_stride apart
  float* reads;    // [rows, H * P], what queries have read
  int64_t key_stride;
  int64_t head_stride;
};

// Rows of a slice may be longer than their numbers, by less than this many numbers.
constexpr int64_t kScanRowUnit = 16;

struct ScanKernels {
  // Computes keys and queries in columns [first, end) of a slice.
  void (*convolve_keys)(const ScanArgs& args, const ScanPiece& piece, const ScanSlice& slice, int64_t first,
                        int64_t end);
  void (*set_factors)(const ScanArgs& args, const ScanPiece& piece, const ScanSlice& slice);
  // Takes the piece through columns [first, end) of a head's S.
  void (*advance)(const ScanArgs& args, const ScanPiece& piece, const ScanSlice& slice, int64_t head, int64_t first,
                  int64_t end);
  // Computes the output of a token from what it has read [H * P], which is overwritten.
  void (*finish)(const ScanArgs& args, int64_t token, float* reads);
  // Stores the inputs of the convolution for the token after the stored state, in channels [first, end).
  void (*keep_inputs)(const ScanArgs& args, const StateSequence& sequence, int64_t first, int64_t end);
};

// Returns kBadLengths or kBadBlockId, and writes nothing, if the batch contradicts itself.
Status selective_scan(const Kernels& kernels, const ScanArgs& args);

}  // namespace pagewick
