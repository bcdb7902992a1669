// Compressed entries (DeepSeek V4): the weighted sum of the rows of a window of r tokens, and, with has_overlap, of
// those of the window before. ../../reference_compressed.py has the definition.
//
// Dimensions: T tokens, B sequences, D elements of an entry; a row has C = 2 * D elements, or 4 * D with has_overlap.
#pragma once

#include "kernels.h"

namespace pagewick {

struct CompressRowsArgs {
  const void* rows;              // [T, C], row_stride elements apart
  const int64_t* slot_mapping;   // [T], block_id * block_size + offset, or -1: not stored
  const int64_t* entry_slots;    // [T], the same in the cache of entries, whose blocks have ratio times as many tokens
  const int32_t* block_tables;   // [B, max_blocks], rows block_table_stride elements apart
  const int32_t* context_lens;   // [B]
  const int32_t* cu_seqlens_q;   // [B + 1]
  const float* cos;              // [T, rope_dim / 2], rows angle_stride elements apart
  const float* sin;
  const float* bias;             // [ratio, C / 2], of gates
  const void* norm_weight;       // [D]
  void* cache;                   // [num_blocks, block_size, C]
  void* entries;                 // [num_entry_blocks, entry_block_size, D]
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t dim;  // D
  int64_t rope_dim;
  int64_t ratio;  // r
  int64_t row_stride;
  int64_t angle_stride;
  int64_t num_blocks;
  int64_t block_size;
  int64_t max_blocks;
  int64_t block_table_stride;
  int64_t num_entry_blocks;
  int64_t entry_block_size;
  float norm_eps;
  DType dtype;  // of rows
  DType norm_dtype;
  DType cache_dtype;
  DType entry_dtype;
  int32_t has_overlap;
  int32_t is_interleaved;  // pairs are (2i, 2i + 1), else (i, i + rope_dim / 2)
};

// A window that ends among the new tokens.
struct EndedWindow {
  int64_t seq;
  int64_t token;  // the last, in the batch
  int64_t end;    // the number of tokens up to it
};

struct CompressKernels {
  // Stores tokens [first_token, end_token) of args. Their slots are inside the cache.
  void (*store)(const CompressRowsArgs& args, int64_t first_token, int64_t end_token);
  // Stores the entry of a window. Returns false if a block id is outside the cache.
  bool (*compress)(const CompressRowsArgs& args, const EndedWindow& window);
};

// Returns kBadBlockId, and writes nothing, if a slot lies outside its cache.
Status compress_rows(const Kernels& kernels, const CompressRowsArgs& args);

}  // namespace pagewick
