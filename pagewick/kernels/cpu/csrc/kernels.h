// What the C ABI (ops.cpp) hands to the kernels, and what each instruction set offers in return.
//
// Dimensions: T tokens, B sequences, H query heads, KVH key/value heads, D head size.
// The two argument structs are mirrored field by field in ../__init__.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagewick {

// Raised by one whenever an argument struct or an entry point changes; ../__init__.py checks it.
constexpr int kAbiVersion = 1;

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

enum Status : int32_t { kOk = 0, kBadLengths = 1, kBadBlockId = 2 };

// Tensors are contiguous in their last dimension; x_stride, residual_stride are in elements.
struct RmsNormArgs {
  const void* x;         // [num_rows, hidden_size]
  const void* residual;  // [num_rows, hidden_size], or null
  const void* weight;    // [hidden_size]
  void* out;             // [num_rows, hidden_size]
  void* new_residual;    // [num_rows, hidden_size], null exactly when residual is
  int64_t num_rows;
  int64_t hidden_size;
  int64_t x_stride;
  int64_t residual_stride;
  float eps;
  DType dtype;  // of every tensor
};

struct AttentionArgs {
  const void* q;                // [T, H, D], tokens q_stride elements apart
  const void* kv_cache;         // [num_blocks, 2, KVH, block_size, D]
  const int32_t* block_tables;  // [B, max_blocks], rows block_table_stride elements apart
  const int32_t* context_lens;  // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
  void* out;                    // [T, H, D]
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;  // a multiple of 8 in 16 .. kMaxHeadDim
  int64_t num_blocks;
  int64_t block_size;
  int64_t max_blocks;
  int64_t block_table_stride;
  int64_t q_stride;
  int64_t sliding_window;  // 0: none
  float softmax_scale;
  float logit_soft_cap;  // 0: none
  DType q_dtype;         // of q and out
  DType kv_dtype;
};

// The numeric definition of attention: keys are reduced in tiles aligned to their absolute position,
// tiles into segments, segments in order. It is the same for every query length and thread count.
constexpr int64_t kTileKeys = 64;
constexpr int64_t kSegmentKeys = 1024;
constexpr int64_t kMaxHeadDim = 256;

// The query rows of one KV head are numbered token * (H / KVH) + (head within the group); a unit of
// work is at most this many rows in succession, over all of their keys or over one segment.
constexpr int64_t kMaxRows = 64;

struct AttentionUnit {
  int64_t seq;
  int64_t kv_head;
  int64_t first_row;
  int64_t num_rows;
  int64_t segment;  // -1: all of them
};

// Floats that the softmax state of one row takes: its weighted sum of values, maximum and sum.
inline int64_t state_floats(int64_t head_dim) { return (head_dim + 15) / 16 * 16 + 2; }

// Computes rows [first_row, end_row) of args.
using RmsNormKernel = void (*)(const RmsNormArgs& args, int64_t first_row, int64_t end_row);

struct AttentionKernels {
  // Writes the output of the unit's rows or, for one segment, their state to `partial`
  // (num_rows * state_floats). False if a block id is outside the cache.
  bool (*attend)(const AttentionArgs& args, const AttentionUnit& unit, float* partial);
  // Joins num_segments states that lie `stride` floats apart, in order, and writes the rows' output.
  void (*merge)(const AttentionArgs& args, const AttentionUnit& unit, float* partials, int64_t stride,
                int64_t num_segments);
};

// attention.cpp: checks the lengths, splits the batch into units and runs them on all threads.
Status paged_attention(const AttentionKernels& kernels, const AttentionArgs& args);

}  // namespace pagewick
