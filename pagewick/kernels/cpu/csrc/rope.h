// Operations on the heads of single tokens: normalisation, rotation, storing of keys and values.
#pragma once

#include "kernels.h"

namespace pagewick {

// Normalises a head x: x / rms(x) * (weight + offset) + bias or, for is_layer_norm, the same with x brought to mean 0
// and variance 1 in place of x / rms(x). All in fp32.
struct HeadNormArgs {
  const void* weight;  // [head_dim], or [heads, head_dim], in the dtype of qkv; null: no norm
  const void* bias;    // as weight, or null
  int64_t stride;      // elements from one head's weight and bias to the next one's; 0: one for all heads
  float eps;
  float offset;
  int32_t is_layer_norm;
  int32_t is_after_rotation;  // queries and keys are rotated first
};

// A row of qkv holds num_heads query heads, num_kv_heads key heads and as many value heads, head_dim elements each.
// Without key heads nothing is stored.
struct RopeStoreArgs {
  const void* qkv;              // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], rows qkv_stride apart
  const float* cos;             // [num_tokens, rotary_dim / 2], rows angle_stride apart; unused where rotary_dim is 0
  const float* sin;
  const float* q_scales;        // [num_tokens], factors of the turned queries; null: none
  const int64_t* slot_mapping;  // [num_tokens], -1: not stored
  void* q;                      // [num_tokens, num_heads, head_dim]
  void* cache;                  // num_blocks blocks as kv_layout.h says
  HeadNormArgs q_norm;
  HeadNormArgs k_norm;
  HeadNormArgs v_norm;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t rotary_dim;
  int64_t qkv_stride;
  int64_t angle_stride;
  int64_t num_blocks;
  int64_t block_size;
  float k_scale;  // as in StoreKvArgs
  float v_scale;
  DType dtype;
  DType cache_dtype;
  int32_t is_interleaved;  // pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2)
  int32_t is_plain;        // the cache is; it has no scales
};

// cos and sin of the float32 product of position and frequency, rounded to float32, then multiplied by `scale`.
struct RotaryAnglesArgs {
  const int64_t* positions;  // [num_tokens]
  const float* frequencies;  // [num_frequencies]
  float* cos;                // [num_tokens, num_frequencies]
  float* sin;
  int64_t num_tokens;
  int64_t num_frequencies;
  int64_t shift;  // is added to positions, which are then at least 0
  float scale;
};

// As RotaryAnglesArgs, with frequencies of each token's own ("dynamic NTK"): 1 / base^(2i / rotary_dim), where base is
// theta up to the original length and, for a sequence of L = position + 1 > original_length tokens, theta * (factor * L
// / original_length - (factor - 1))^(rotary_dim / (rotary_dim - 2)). Powers are rounded from double precision, every
// other step is one of float32.
struct DynamicAnglesArgs {
  const int64_t* positions;  // [num_tokens]
  float* cos;                // [num_tokens, rotary_dim / 2]
  float* sin;
  int64_t num_tokens;
  int64_t rotary_dim;  // even, at least 4
  int64_t original_length;
  double theta;
  double factor;  // at least 1
};

// Rotates the first rotary_dim elements of each head.
struct RotateHeadsArgs {
  const void* x;     // [num_tokens, num_heads, head_dim], tokens x_stride elements apart
  const float* cos;  // [num_tokens, rotary_dim / 2], rows angle_stride apart
  const float* sin;
  void* out;         // [num_tokens, num_heads, head_dim]
  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_dim;
  int64_t rotary_dim;
  int64_t x_stride;
  int64_t angle_stride;
  DType dtype;
  int32_t is_interleaved;  // pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2)
};

struct RopeKernels {
  // Both handle tokens [first_token, end_token) of args.
  void (*rope_and_store)(const RopeStoreArgs& args, int64_t first_token, int64_t end_token);
  void (*rotate_heads)(const RotateHeadsArgs& args, int64_t first_token, int64_t end_token);
};

// Returns kBadBlockId, and writes nothing, if a slot lies outside the cache.
Status rope_and_store(const Kernels& kernels, const RopeStoreArgs& args);

Status rotate_heads(const Kernels& kernels, const RotateHeadsArgs& args);

Status rotary_angles(const Kernels& kernels, const RotaryAnglesArgs& args);

Status dynamic_rotary_angles(const Kernels& kernels, const DynamicAnglesArgs& args);

}  // namespace pagewick
