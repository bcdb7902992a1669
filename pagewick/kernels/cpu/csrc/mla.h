// Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) in its absorbed form: queries are brought into
// the space of the latents, which are keys and values of all heads at once.
//
// Dimensions: T tokens, B sequences, H query heads, L elements of a latent, R of the rotated key that all heads share.
// A cache is [num_blocks, block_size, L + R]: nothing is padded, and no other layout is known on any device.
#pragma once

#include "kernels.h"

namespace pagewick {

struct LatentAttentionArgs {
  const void* q_latent;         // [T, H, L]
  const void* q_rope;           // [T, H, R]
  const void* cache;
  const int32_t* block_tables;  // [B, max_blocks], rows block_table_stride elements apart
  const int32_t* context_lens;  // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
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

// A row of `latents` is a latent, which is normalised, and a key, which is rotated; both are stored. Of each query head
// the last R elements are rotated.
struct StoreLatentArgs {
  const void* q;                // [T, H, nope_dim + R], tokens q_stride elements apart
  const void* latents;          // [T, L + R], rows latent_stride elements apart
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
};

// Tiles and segments of keys are those of attention.h. The query rows of a sequence are numbered token * H + head; a unit
// of work is some of them in succession, over all of their keys or over one segment.
struct LatentUnit {
  int64_t seq;
  int64_t first_row;
  int64_t num_rows;
  int64_t segment;  // -1: all of them
};

struct MlaKernels {
  // Floats that the softmax state of so many rows takes: whole cache lines.
  int64_t (*state_floats)(const LatentAttentionArgs& args, int64_t num_rows);
  // Writes the output of the unit's rows or, for one segment, their state to `partial`. False if a block id is outside
  // the cache.
  bool (*attend)(const LatentAttentionArgs& args, const LatentUnit& unit, float* partial);
  // Joins the states of num_segments segments from the first on, which lie `stride` floats apart, in order, and writes
  // the rows' output.
  void (*merge)(const LatentAttentionArgs& args, const LatentUnit& unit, float* partials, int64_t stride,
                int64_t num_segments);
  // Tokens [first_token, end_token) of args, whose slots are inside the cache.
  void (*store)(const StoreLatentArgs& args, int64_t first_token, int64_t end_token);
};

// Checks the lengths, splits the batch into units and runs them on all threads.
Status latent_attention(const Kernels& kernels, const LatentAttentionArgs& args);
// kBadBlockId if a slot lies outside the cache; nothing is written then.
Status store_latent(const Kernels& kernels, const StoreLatentArgs& args);

}  // namespace pagewick
