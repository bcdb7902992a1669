// Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) in its absorbed form: queries are projected
// into the space of the latents, and a latent is key and value for all heads at once.
//
// Dimensions: T tokens, B sequences, H query heads, L elements of a latent, R of the rotated key that all heads share.
// A cache is [num_blocks, block_size, L + R], without padding, then scales (kv_layout.h); this is the only layout on any
// device.
#pragma once

#include "attention.h"

namespace pagewick {

struct LatentAttentionArgs {
  const void* q_latent;         // [T, H, L]
  const void* q_rope;           // [T, H, R]
  const void* cache;
  const int32_t* block_tables;  // [B, max_blocks], rows block_table_stride elements apart
  const int32_t* context_lens;  // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
  const float* sinks;           // [H], a further logit of each head's softmax, without a value; null: there are none
  void* out;                    // [T, H, L]
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t num_heads;
  int64_t latent_dim;
  int64_t rope_dim;
  int64_t num_blocks;
  int64_t block_size;
  int64_t max_blocks;
  int64_t block_table_stride;
  float softmax_scale;  // above 0
  DType dtype;          // of queries and out
  DType cache_dtype;
};

// A row of `latents` is a latent, which is normalised, and a key, which is rotated; both are stored. The last R
// elements of each query head are rotated. Without has_key a row is a latent alone, and its key is stored as 0.
struct StoreLatentArgs {
  const void* q;                // [T, H, nope_dim + R], tokens q_stride elements apart
  const void* latents;          // [T, L + R] or [T, L], rows latent_stride elements apart; null: none is stored
  const void* norm;             // [L]
  const float* cos;             // [T, R / 2], rows angle_stride elements apart
  const float* sin;
  const int64_t* slot_mapping;  // [T], block_id * block_size + offset, or -1: not stored
  void* q_rope;                 // [T, H, R]
  void* cache;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t nope_dim;
  int64_t latent_dim;
  int64_t rope_dim;  // even
  int64_t q_stride;
  int64_t latent_stride;
  int64_t angle_stride;
  int64_t num_blocks;
  int64_t block_size;
  float norm_eps;
  DType dtype;  // of q, latents, norm and q_rope
  DType cache_dtype;
  int32_t is_interleaved;  // pairs are (2i, 2i + 1), else (i, i + R / 2)
  int32_t has_key;
};

// As AttentionKernels. All heads share one KV head, so the query rows of a sequence are numbered token * H + head.
struct MlaKernels {
  int64_t (*state_floats)(const LatentAttentionArgs& args, int64_t num_rows);
  bool (*attend)(const LatentAttentionArgs& args, const AttentionUnit& unit, float* partial);
  void (*merge)(const LatentAttentionArgs& args, const AttentionUnit& unit, float* partials, int64_t stride,
                int64_t num_segments);
  // Stores tokens [first_token, end_token) of args. Their slots are inside the cache.
  void (*store)(const StoreLatentArgs& args, int64_t first_token, int64_t end_token);
};

// Checks the lengths, divides the batch into units and runs them on all threads.
Status latent_attention(const Kernels& kernels, const LatentAttentionArgs& args);
// Returns kBadBlockId, and writes nothing, if a slot lies outside the cache.
Status store_latent(const Kernels& kernels, const StoreLatentArgs& args);

}  // namespace pagewick
