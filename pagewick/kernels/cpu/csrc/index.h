// The choice of the tokens that sparse attention sees (DeepSeek-V3.2, arXiv:2512.02556, section 2.1): an indexer scores
// every earlier token, and the best are chosen. ../../reference_index.py has the definition.
//
// Dimensions: T tokens, B sequences, H index heads of I elements, of which the first R are rotated. A cache of index
// keys is [num_blocks, block_size, I].
#pragma once

#include "attention.h"

namespace pagewick {

struct StoreIndexArgs {
  const void* keys;             // [T, I], rows key_stride elements apart
  const float* cos;             // [T, R / 2], rows angle_stride elements apart
  const float* sin;
  const int64_t* slot_mapping;  // [T], block_id * block_size + offset, or -1: not stored
  void* cache;
  int64_t num_tokens;
  int64_t dim;
  int64_t rope_dim;  // even
  int64_t key_stride;
  int64_t angle_stride;
  int64_t num_blocks;
  int64_t block_size;
  DType dtype;  // of keys
  DType cache_dtype;
  int32_t is_interleaved;  // pairs are (2i, 2i + 1), else (i, i + R / 2)
};

struct SelectKeysArgs {
  const void* q;         // [T, H, I], tokens q_stride elements apart
  const float* weights;  // [T, H]; unused with has_blocks
  const float* cos;      // as in StoreIndexArgs
  const float* sin;
  const void* cache;
  const int32_t* block_tables;   // [B, max_blocks], rows block_table_stride elements apart
  const int32_t* target_tables;  // the same of the cache whose slots are wanted; null: slots are numbers of keys
  const int32_t* context_lens;   // [B]
  const int32_t* cu_seqlens_q;   // [B + 1]
  int32_t* slots;                // [T, top_k]; with has_blocks [T, H, top_k]
  int32_t* counts;               // [T]
  int32_t* starts;               // [T + 1]
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t num_heads;
  int64_t dim;
  int64_t rope_dim;
  int64_t q_stride;
  int64_t angle_stride;
  int64_t num_blocks;
  int64_t block_size;
  int64_t max_blocks;
  int64_t block_table_stride;
  int64_t target_table_stride;
  int64_t top_k;
  // Tokens for which there is one key, or, with has_blocks, tokens of a block: a token sees those whose last token it is,
  // or that end before it.
  int64_t ratio;
  int64_t num_local;  // with has_blocks: the last blocks that are chosen in any case, an incomplete one included
  DType dtype;  // of q
  DType cache_dtype;
  int32_t is_interleaved;
  // Each head chooses by itself, among complete blocks of keys, by the best product with a key of a block. An incomplete
  // block at the token counts among the top_k, and is not written.
  int32_t has_blocks;
};

// Successive tokens of a sequence, and some of the keys that they score.
struct IndexUnit {
  int64_t seq;
  int64_t first_token;  // in the batch
  int64_t num_tokens;
  int64_t first_key;  // with has_blocks, a multiple of ratio
  int64_t end_key;
};

struct IndexKernels {
  // Stores tokens [first_token, end_token) of args. Their slots are inside the cache.
  void (*store)(const StoreIndexArgs& args, int64_t first_token, int64_t end_token);
  // Writes the score of key i for token t of the unit to scores[t * stride + i], or that of block i for its head h to
  // scores[(t * H + h) * stride + i]. Returns false if a block id is outside the cache.
  bool (*score)(const SelectKeysArgs& args, const IndexUnit& unit, float* scores, int64_t stride);
};

// Returns kBadBlockId, and writes nothing, if a slot lies outside the cache.
Status store_index_keys(const Kernels& kernels, const StoreIndexArgs& args);
// Checks the lengths, and chooses on all threads.
Status select_keys(const Kernels& kernels, const SelectKeysArgs& args);

}  // namespace pagewick
