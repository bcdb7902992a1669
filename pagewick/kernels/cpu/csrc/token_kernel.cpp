// Operations on the heads of single tokens. Compiled once per instruction set.
#include "token.h"

#include "kv_layout.h"
#include "parallel.h"
#include "rows.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

template <class Source, class Target>
void convert(const Source* source, Target* target, int64_t size) {
  for_vectors(0, size, [&](int64_t i, auto count) { store_count(target + i, load_count(source + i, count()), count()); });
}

void rotate_halves(float* row, const float* cos, const float* sin, int64_t half) {
  float* const second = row + half;
  for_vectors(0, half, [&](int64_t i, auto count) {
    const Vec a = load_count(row + i, count()), b = load_count(second + i, count());
    const Vec c = load_count(cos + i, count()), s = load_count(sin + i, count());
    store_count(row + i, a * c - b * s, count());
    store_count(second + i, b * c + a * s, count());
  });
}

void rotate_neighbours(float* row, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = row[2 * i], b = row[2 * i + 1];
    row[2 * i] = a * cos[i] - b * sin[i];
    row[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

// row = a head of a token in fp32, normalised if there is a weight, rotated if there are angles.
template <class T>
void turn_head(const RopeStoreArgs& args, int64_t token, const T* head, const void* norm_weight, float* row) {
  const int64_t size = args.head_dim;
  if (norm_weight == nullptr) {
    convert(head, row, size);
  } else {
    const T* const weight = static_cast<const T*>(norm_weight);
    const float scale = 1.0f / __builtin_sqrtf(sum_of_squares(head, size) / static_cast<float>(size) + args.norm_eps);
    for_vectors(0, size, [&](int64_t i, auto count) {
      store_count(row + i, load_count(head + i, count()) * scale * load_count(weight + i, count()), count());
    });
  }
  if (args.rotary_dim == 0) return;
  const int64_t angles = token * args.angle_stride;
  const auto rotate = args.is_interleaved ? rotate_neighbours : rotate_halves;
  rotate(row, args.cos + angles, args.sin + angles, args.rotary_dim / 2);
}

// One head of all tokens after the other: its part of a block stays in the first-level cache.
template <class T, class C>
void turn_and_store(const RopeStoreArgs& args, int64_t first_token, int64_t end_token) {
  const KvLayout layout(args.cache_dtype, args.num_kv_heads, args.head_dim, args.block_size);
  float* const row = static_cast<float*>(thread_scratch(Scratch::kKernel, 2 * layout.dim * sizeof(float)));
  C* const rounded = reinterpret_cast<C*>(row + layout.dim);
  memset(rounded, 0, layout.dim * sizeof(C));
  const auto put = [&](int64_t kv_head, bool is_value, int64_t token, const T* head) {
    const int64_t slot = args.slot_mapping[token];
    if (slot < 0) return;
    const int64_t block_id = slot / args.block_size, offset = slot % args.block_size;
    C* const cache = static_cast<C*>(args.cache);
    if (is_value) {
      convert(head, rounded, args.head_dim);
      return put_value(layout, rounded, offset, cache + layout.values_of(block_id, kv_head));
    }
    turn_head(args, token, head, args.k_norm, row);
    for_vectors(0, args.head_dim, [&](int64_t i, auto count) {
      store_count(rounded + i, round_to(head, load_count(row + i, count())), count());
    });
    put_key(layout, rounded, offset, cache + layout.keys_of(block_id, kv_head));
  };
  const int64_t first_value = args.num_heads + args.num_kv_heads;
  for (int64_t head = 0; head < first_value + args.num_kv_heads; ++head)
    for (int64_t token = first_token; token < end_token; ++token) {
      const T* const source = static_cast<const T*>(args.qkv) + token * args.qkv_stride + head * args.head_dim;
      if (head >= first_value) {
        put(head - first_value, true, token, source);
      } else if (head >= args.num_heads) {
        put(head - args.num_heads, false, token, source);
      } else {
        turn_head(args, token, source, args.q_norm, row);
        convert(row, static_cast<T*>(args.q) + (token * args.num_heads + head) * args.head_dim, args.head_dim);
      }
    }
}

void rope_and_store(const RopeStoreArgs& args, int64_t first_token, int64_t end_token) {
  with_type(args.dtype, [&](auto* type) {
    with_type(args.cache_dtype, [&](auto* cache_type) {
      turn_and_store<Element<decltype(type)>, Element<decltype(cache_type)>>(args, first_token, end_token);
    });
  });
}

}  // namespace

extern const TokenKernels kToken;
const TokenKernels kToken = {rope_and_store};

}  // namespace PW_ISA
}  // namespace pagewick
