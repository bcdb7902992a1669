// Where the keys and values of a paged cache lie on a CPU: [num_blocks, 2 (keys, values), KVH, block_size * dim].
//
// dim is the head size rounded up to a multiple of 16; elements beyond the head size are 0. With a step of 2 for bf16
// and of 1 for fp32 and fp16 (panel.h says why), a head of a block is
//   keys    [dim / step][block_size][step]   the right-hand side of queries x keys
//   values  [block_size / step][dim][step]   the right-hand side of probabilities x values
// block_size is a multiple of the step. ../../kv_cache.py converts from and to the plain layout.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace pagewick {
// Anonymous, so that every file has its own copy: code compiled for one instruction set must not serve another.
namespace {

constexpr int64_t kDimUnit = 16;

inline int64_t padded_dim(int64_t head_dim) { return (head_dim + kDimUnit - 1) / kDimUnit * kDimUnit; }

struct KvLayout {
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t dim;   // padded_dim(head_dim)
  int64_t step;  // 2 or 1

  KvLayout(DType dtype, int64_t kv_heads, int64_t head_dim, int64_t keys_per_block)
      : num_kv_heads(kv_heads),
        block_size(keys_per_block),
        dim(padded_dim(head_dim)),
        step(dtype == DType::kBFloat16 ? 2 : 1) {}

  int64_t head_elements() const { return block_size * dim; }

  // Return the index of the first element of a head's keys, or of its values, in a block.
  int64_t keys_of(int64_t block_id, int64_t kv_head) const {
    return (block_id * 2 * num_kv_heads + kv_head) * head_elements();
  }
  int64_t values_of(int64_t block_id, int64_t kv_head) const {
    return keys_of(block_id, kv_head) + num_kv_heads * head_elements();
  }
};

// Writes the key `row` [dim], 0 beyond the head size, as number `offset` of the `keys` of a block and head.
template <class T>
inline void put_key(const KvLayout& layout, const T* row, int64_t offset, T* keys) {
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

}  // namespace
}  // namespace pagewick
