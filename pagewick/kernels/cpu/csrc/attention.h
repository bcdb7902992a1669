// Paged attention of a ragged batch, and storing of the keys and values that it reads.
//
// Dimensions: T tokens, B sequences, H query heads, KVH key/value heads, D head size. Caches lie as kv_layout.h says.
#pragma once

#include "kernels.h"

namespace pagewick {

struct AttentionArgs {
  const void* q;                // [T, H, D], tokens q_stride elements apart
  const void* kv_cache;
  const int32_t* block_tables;  // [B, max_blocks], rows block_table_stride elements apart
  const int32_t* context_lens;  // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
  const float* sinks;           // [H], a further logit of each head's softmax, which has no value; or null
  const int32_t* key_ends;      // [T], how many of its sequence's first keys a token sees; null: those up to its own
  void* out;                    // [T, H, D]
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;  // 1 .. kMaxHeadDim
  int64_t num_blocks;
  int64_t block_size;
  int64_t max_blocks;
  int64_t block_table_stride;
  int64_t q_stride;
  int64_t sliding_window;  // 0: none
  float softmax_scale;     // above 0
  float logit_soft_cap;    // 0: none
  DType q_dtype;           // of q and out
  DType kv_dtype;
  int32_t is_chunked;  // whether the window begins at the last multiple of its size
};

// Writes k and v [T, KVH, D], tokens k_stride and v_stride elements apart, to the slots of a cache.
struct StoreKvArgs {
  const void* k;
  const void* v;
  const int64_t* slot_mapping;  // [T], block_id * block_size + offset, or -1: not stored
  void* kv_cache;
  int64_t num_tokens;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t num_blocks;
  int64_t block_size;
  int64_t k_stride;
  int64_t v_stride;
  float k_scale;  // of a cache with scales, for all keys; 0: every key and head has its own
  float v_scale;
  DType dtype;
  DType kv_dtype;
};

// Returns the first key that a query sees. window: 0 if there is none.
inline int64_t first_seen_key(int64_t position, int64_t window, bool is_chunked) {
  if (window == 0) return 0;
  if (is_chunked) return position - position % window;
  return position < window ? 0 : position - window + 1;
}

// The numeric definition of attention: keys are reduced in tiles aligned to their absolute position,
// tiles into segments, segments in order. It is the same for every query length and thread count.
constexpr int64_t kTileKeys = 256;
constexpr int64_t kSegmentKeys = 1024;
constexpr int64_t kMaxHeadDim = 256;

// The query rows of one KV head are numbered token * (H / KVH) + (head within the group). A unit of work is at most
// this many successive rows, over all of their keys or over one segment.
constexpr int64_t kMaxRows = 128;
// A sequence with at most this many rows may have several KV heads in a unit. Then nearly all time goes into reading
// the cache, which is fastest where it is read as one piece.
constexpr int64_t kFewRows = 16;

struct AttentionUnit {
  int64_t seq;
  int64_t kv_head;  // the first
  int64_t num_kv_heads;
  int64_t first_row;
  int64_t num_rows;  // of each KV head
  int64_t segment;   // -1: all segments

  int64_t total_rows() const { return num_kv_heads * num_rows; }
};

struct AttentionKernels {
  // Returns how many floats the softmax state of num_rows rows takes: whole cache lines.
  int64_t (*state_floats)(const AttentionArgs& args, int64_t num_rows);
  // Writes the output of the unit's rows or, if it covers one segment, their state to `partial`, head by head. Returns
  // false if a block id is outside the cache.
  bool (*attend)(const AttentionArgs& args, const AttentionUnit& unit, float* partial);
  // Merges the states of num_segments segments, from unit.segment on, in order, and writes the output of the rows. The
  // states lie `stride` floats apart.
  void (*merge)(const AttentionArgs& args, const AttentionUnit& unit, float* partials, int64_t stride,
                int64_t num_segments);
  // Stores tokens [first_token, end_token) of args. Their slots are inside the cache.
  void (*store_kv)(const StoreKvArgs& args, int64_t first_token, int64_t end_token);
};

// Checks the lengths, divides the batch into units and runs them on all threads.
Status paged_attention(const Kernels& kernels, const AttentionArgs& args);
// Returns kBadBlockId, and writes nothing, if a slot lies outside the cache.
Status store_kv(const Kernels& kernels, const StoreKvArgs& args);

}  // namespace pagewick
