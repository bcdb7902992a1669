// Where the keys and values of a paged cache lie on a CPU: [num_blocks, 2 (keys, values), KVH, block_size * dim].
//
// dim is the head size rounded up to a multiple of 16; elements beyond the head size are 0. With a step of 2 for bf16
// and for numbers of 8 or 4 bits, and of 1 for fp32 and fp16 (panel.h says why), a head of a block is
//   keys    [dim / step][block_size][step]   the right-hand side of queries x keys
//   values  [block_size / step][dim][step]   the right-hand side of probabilities x values
// A plain cache is [num_blocks, 2, KVH, block_size, head size]: keys and values in rows, without padding.
// block_size is a multiple of the step. Two numbers of 4 bits, those of a step, are one element of the cache, a byte.
// A block of numbers of 8 or 4 bits ends with their scales, fp32 [2, KVH, block_size], and is a multiple of 16 bytes. In the same way a block of latents ends with fp32 [block_size, 2]: the scale of each
// latent, and that of the rotated key.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace pagewick {
// Anonymous, so that every file has its own copy: code compiled for one instruction set must not serve another.
namespace {

constexpr int64_t kDimUnit = 16;

inline int64_t padded_dim(int64_t head_dim) { return (head_dim + kDimUnit - 1) / kDimUnit * kDimUnit; }

inline bool has_scales(DType dtype) {
  return dtype == DType::kInt8 || dtype == DType::kFp8E4m3 || dtype == DType::kFp8E5m2 || dtype == DType::kInt4;
}

// Returns the bytes of a block of 8-bit numbers, num_bytes of them, with their scales.
inline int64_t scaled_block_bytes(int64_t num_bytes, int64_t num_scales) {
  constexpr int64_t kUnit = 16;
  return (num_bytes + num_scales * int64_t{sizeof(float)} + kUnit - 1) / kUnit * kUnit;
}

struct KvLayout {
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t dim;   // padded_dim(head_dim); of a plain cache, head_dim
  int64_t step;  // 2 or 1
  int64_t row_elements;  // of a key or a value
  int64_t block_elements;
  bool is_plain;

  KvLayout(DType dtype, int64_t kv_heads, int64_t head_dim, int64_t keys_per_block, bool plain = false)
      : num_kv_heads(kv_heads),
        block_size(keys_per_block),
        dim(plain ? head_dim : padded_dim(head_dim)),
        step(!plain && (dtype == DType::kBFloat16 || has_scales(dtype)) ? 2 : 1),
        row_elements(dtype == DType::kInt4 ? dim / 2 : dim),
        block_elements(2 * kv_heads * head_elements()),
        is_plain(plain) {
    if (has_scales(dtype)) block_elements = scaled_block_bytes(block_elements, 2 * kv_heads * block_size);
  }

  int64_t head_elements() const { return block_size * row_elements; }

  // Return the index of the first element of a head's keys, or of its values, in a block.
  int64_t keys_of(int64_t block_id, int64_t kv_head) const {
    return block_id * block_elements + kv_head * head_elements();
  }
  int64_t values_of(int64_t block_id, int64_t kv_head) const {
    return keys_of(block_id, kv_head) + num_kv_heads * head_elements();
  }
  // Return the byte of a block at which the scales of a head's keys, or of its values, begin.
  int64_t key_scales_of(int64_t block_id, int64_t kv_head) const {
    return block_id * block_elements + 2 * num_kv_heads * head_elements() + kv_head * scale_bytes();
  }
  int64_t value_scales_of(int64_t block_id, int64_t kv_head) const {
    return key_scales_of(block_id, kv_head) + num_kv_heads * scale_bytes();
  }
  // The bytes of the scales of one head's keys.
  int64_t scale_bytes() const { return block_size * int64_t{sizeof(float)}; }
};

// The latents of a cache: num_blocks times [block_size, row_size], without padding, then scales.
struct LatentLayout {
  int64_t block_size;
  int64_t row_size;
  int64_t block_elements;
  int64_t first_scale;  // the byte of a block at which its scales begin

  LatentLayout(DType dtype, int64_t tokens_per_block, int64_t elements_per_token)
      : block_size(tokens_per_block),
        row_size(elements_per_token),
        block_elements(tokens_per_block * row_size),
        first_scale((block_elements + 3) / 4 * 4) {
    if (has_scales(dtype)) block_elements = scaled_block_bytes(first_scale, 2 * block_size);
  }

  // Returns the index of the first element of a token.
  int64_t row_of(int64_t block_id, int64_t offset) const { return block_id * block_elements + offset * row_size; }
  // Returns the byte at which the two scales of a token begin.
  int64_t scales_of(int64_t block_id, int64_t offset) const {
    return block_id * block_elements + first_scale + 2 * offset * int64_t{sizeof(float)};
  }
};

// Writes the key `row` [dim], 0 beyond the head size, as number `offset` of the `keys` of a block and head.
template <class T>
inline void put_key(const KvLayout& layout, const T* row, int64_t offset, T* keys) {
  if (layout.is_plain) {
    std::memcpy(keys + offset * layout.dim, row, layout.dim * sizeof(T));
    return;
  }
  if (layout.step == 1) {
    for (int64_t d = 0; d < layout.dim; ++d) keys[d * layout.block_size + offset] = row[d];
    return;
  }
  for (int64_t d = 0; d < layout.dim; d += 2)
    std::memcpy(keys + d * layout.block_size + offset * 2, row + d, 2 * sizeof(T));
}

// Writes the value `row` [dim], 0 beyond the head size, as number `offset` of the `values` of a block and head.
template <class T>
inline void put_value(const KvLayout& layout, const T* row, int64_t offset, T* values) {
  if (layout.step == 1) {
    std::memcpy(values + offset * layout.dim, row, layout.dim * sizeof(T));
    return;
  }
  T* const target = values + offset / 2 * layout.dim * 2 + offset % 2;
  for (int64_t d = 0; d < layout.dim; ++d) target[d * 2] = row[d];
}

// Whether the value of a token shares bytes, of numbers of 4 bits, with that of the token before it, which the same
// thread must store.
inline bool shares_bytes(const int64_t* slots, int64_t token) {
  return token > 0 && slots[token] > 0 && slots[token] % 2 == 1 && slots[token - 1] == slots[token] - 1;
}

}  // namespace
}  // namespace pagewick
