// Attention to keys that lie anywhere in a cache: to a window and to compressed entries, which are their own values, in
// one softmax (DeepSeek V4; ../../reference_compressed.py has the definition), and to selected blocks of tokens
// (../../reference_blocks.py).
//
// Dimensions: T tokens, B sequences, H query heads, KVH key/value heads, D elements of a key.
#pragma once

#include "kernels.h"

namespace pagewick {

struct WindowAttentionArgs {
  const void* q;                 // [T, H, D]
  const void* cache;             // keys [num_blocks, block_size, D]
  const void* entries;           // [num_entry_blocks, entry_block_size, D]; null: there are none
  const int32_t* block_tables;   // [B, max_blocks], rows block_table_stride elements apart
  const int32_t* context_lens;   // [B]
  const int32_t* cu_seqlens_q;   // [B + 1]
  const int32_t* entry_tables;   // [B, max_entry_blocks], rows entry_table_stride elements apart; unused with slots
  const int32_t* slots;          // [T, top_k], the entries that a token sees; null: one for every `ratio` tokens
  const int32_t* counts;         // [T], how many of its slots a token sees
  const float* sinks;            // [H], a further logit of each head's softmax, which has no value
  void* out;                     // [T, H, D]
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t num_heads;
  int64_t dim;
  int64_t window;
  int64_t ratio;
  int64_t top_k;
  int64_t num_blocks;
  int64_t block_size;
  int64_t max_blocks;
  int64_t block_table_stride;
  int64_t num_entry_blocks;
  int64_t entry_block_size;
  int64_t max_entry_blocks;
  int64_t entry_table_stride;
  float softmax_scale;  // above 0
  DType dtype;          // of q and out
  DType cache_dtype;    // of keys and entries
};

struct BlockAttentionArgs {
  const void* q;                // [T, H, D]
  const void* cache;            // [num_blocks, 2 (keys, values), KVH, block_size, D]
  const int32_t* block_tables;  // [B, max_blocks], rows block_table_stride elements apart
  const int32_t* context_lens;  // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
  const int32_t* slots;         // [T, num_selections, top_k], numbers of blocks of `ratio` tokens in the sequence
  const int32_t* counts;        // [T], how many of its blocks a token sees
  void* out;                    // [T, H, D]
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t num_selections;  // one for all KV heads, or one for each
  int64_t dim;
  int64_t ratio;
  int64_t top_k;
  int64_t num_blocks;
  int64_t block_size;
  int64_t max_blocks;
  int64_t block_table_stride;
  float softmax_scale;  // above 0
  DType dtype;          // of q and out
  DType cache_dtype;
};

// Some heads of a token. Attention to blocks: all of them read one KV head.
struct WindowUnit {
  int64_t seq;
  int64_t token;     // in the batch
  int64_t position;  // in its sequence
  int64_t first_head;
  int64_t num_heads;
};

struct WindowKernels {
  // Writes the output of a unit. Returns false if a block id or a slot is outside its cache.
  bool (*attend)(const WindowAttentionArgs& args, const WindowUnit& unit);
  // The same. Returns false, too, for a block that ends behind the token.
  bool (*attend_blocks)(const BlockAttentionArgs& args, const WindowUnit& unit);
};

// Checks the lengths, divides the batch into units and runs them on all threads.
Status window_attention(const Kernels& kernels, const WindowAttentionArgs& args);
Status block_attention(const Kernels& kernels, const BlockAttentionArgs& args);

}  // namespace pagewick
