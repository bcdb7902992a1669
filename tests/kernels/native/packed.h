// Where the elements of a packed cache lie, by the formulas of the documentation and not by the library's own code.
#pragma once

#include "testing.h"

struct Packed {
  testing::DType dtype;
  int64_t num_kv_heads, head_dim, block_size;

  int64_t step() const { return dtype == testing::DType::kBFloat16 ? 2 : 1; }
  int64_t dim() const { return (head_dim + 15) / 16 * 16; }
  int64_t size(int64_t num_blocks) const { return num_blocks * 2 * num_kv_heads * block_size * dim(); }

  // slot = block id * block_size + offset.
  int64_t key(int64_t slot, int64_t head, int64_t d) const {
    return start(slot, 0, head) + ((d / step()) * block_size + slot % block_size) * step() + d % step();
  }
  int64_t value(int64_t slot, int64_t head, int64_t d) const {
    const int64_t offset = slot % block_size;
    return start(slot, 1, head) + ((offset / step()) * dim() + d) * step() + offset % step();
  }

 private:
  int64_t start(int64_t slot, int64_t half, int64_t head) const {
    return ((slot / block_size * 2 + half) * num_kv_heads + head) * block_size * dim();
  }
};
