// Operations on the heads of single tokens. Compiled once per instruction set.
#include "rope.h"

#include "kv_layout.h"
#include "kv_quantize.h"
#include "parallel.h"
#include "rotation.h"
#include "rows.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

template <class Source, class Target>
void convert(const Source* source, Target* target, int64_t size) {
  for_vectors(0, size, [&](int64_t i, auto count) {
    store_count(target + i, load_count(source + i, count()), count());
  });
}

void scale_row(float* row, int64_t size, float factor) {
  for_vectors(0, size, [&](int64_t i, auto count) {
    store_count(row + i, load_count(row + i, count()) * factor, count());
  });
}

// row = a head, in fp32 and normalised; it is number `index` of the heads that `norm`, with weights of type T, is for.
// row may be the head itself.
template <class T, class S>
void normalise_head(const HeadNormArgs& norm, const S* head, int64_t index, int64_t size, float* row) {
  const T* const weight = static_cast<const T*>(norm.weight) + index * norm.stride;
  const T* const bias = norm.bias == nullptr ? nullptr : static_cast<const T*>(norm.bias) + index * norm.stride;
  const float mean = norm.is_layer_norm ? mean_of(head, size) : 0.0f;
  const float squares = norm.is_layer_norm ? sum_of_squares_about(head, size, mean) : sum_of_squares(head, size);
  const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(size) + norm.eps);
  for_vectors(0, size, [&](int64_t i, auto count) {
    const Vec normed = (load_count(head + i, count()) - mean) * scale * (load_count(weight + i, count()) + norm.offset);
    store_count(row + i, bias == nullptr ? normed : normed + load_count(bias + i, count()), count());
  });
}

void rotate_row(const RopeStoreArgs& args, int64_t token, float* row) {
  const int64_t angles = token * args.angle_stride;
  const auto rotate = args.is_interleaved ? rotate_neighbours : rotate_halves;
  rotate(row, args.cos + angles, args.sin + angles, args.rotary_dim / 2);
}

// row = a head of a token, in fp32, normalised if there is a weight, rotated if there are angles.
template <class T>
void turn_head(
    const RopeStoreArgs& args, int64_t token, const T* head, const HeadNormArgs& norm, int64_t index, float* row) {
  const bool has_norm = norm.weight != nullptr;
  if (has_norm && !norm.is_after_rotation) normalise_head<T>(norm, head, index, args.head_dim, row);
  else convert(head, row, args.head_dim);
  if (args.rotary_dim != 0) rotate_row(args, token, row);
  if (has_norm && norm.is_after_rotation) normalise_head<T>(norm, row, index, args.head_dim, row);
}

// Whether the next `count` tokens have successive slots in the same block.
bool is_run(const RopeStoreArgs& args, int64_t token, int64_t end_token, int64_t count) {
  const int64_t slot = args.slot_mapping[token];
  if (slot < 0 || token + count > end_token || slot % args.block_size + count > args.block_size) return false;
  for (int64_t i = 1; i < count; ++i)
    if (args.slot_mapping[token + i] != slot + i) return false;
  return true;
}

// Does the work of put_key for kLanes keys of 32-bit words: rows [kLanes][dim], readable for a vector beyond their end.
template <class C>
void put_keys(const KvLayout& layout, const C* rows, int64_t offset, C* keys) {
  const int64_t words = layout.dim / layout.step;
  for (int64_t word = 0; word < words; word += kLanes) {
    Vec square[kLanes];
    for (int row = 0; row < kLanes; ++row)
      memcpy(&square[row], rows + row * layout.dim + word * layout.step, sizeof(Vec));
    transpose(square);
    for (int64_t i = 0; i < minimum(kLanes, words - word); ++i)
      memcpy(keys + ((word + i) * layout.block_size + offset) * layout.step, &square[i], sizeof(Vec));
  }
}

// Does the work of put_value for two values, the first at an even offset, where the layout interleaves them.
template <class C>
void put_value_pair(const KvLayout& layout, const C* rows, int64_t offset, C* values) {
  C* const target = values + offset * layout.dim;
  for (int64_t d = 0; d < layout.dim; d += kLanes) {
    const WordVec words = load_halves(rows + d) | load_halves(rows + layout.dim + d) << 16;
    memcpy(target + 2 * d, &words, sizeof(words));
  }
}

// Stores keys and values of heads of type T in a cache of type C.
template <class T, class C>
struct Storing {
  const RopeStoreArgs& args;
  const KvLayout layout;
  float* row;  // [dim]
  C* rows;     // [kLanes][dim], 0 beyond the head size, and a vector more

  static constexpr bool kHasWords = sizeof(C) == 4 || kIsSame<C, BFloat16>;
  static constexpr int64_t kScaleBytes = sizeof(float);

  // store_keys and store_values return how many tokens they have stored, from `token` on. head: the head of `token`.
  int64_t store_keys(const T* head, int64_t kv_head, int64_t token, int64_t end_token) const {
    const int64_t count = kHasWords && !layout.is_plain && is_run(args, token, end_token, kLanes) ? kLanes : 1;
    const int64_t slot = args.slot_mapping[token], offset = slot % args.block_size;
    if (slot < 0) return 1;
    for (int64_t n = 0; n < count; ++n) {
      turn_head(args, token + n, head + n * args.qkv_stride, args.k_norm, kv_head, row);
      round_row(head);
      put_row(n, args.k_scale, layout.key_scales_of(slot / args.block_size, kv_head) + offset * kScaleBytes);
    }
    C* const target = static_cast<C*>(args.cache) + layout.keys_of(slot / args.block_size, kv_head);
    if constexpr (kHasWords)
      if (count > 1) return put_keys(layout, rows, offset, target), count;
    return put_key(layout, rows, offset, target), 1;
  }

  int64_t store_values(const T* head, int64_t kv_head, int64_t token, int64_t end_token) const {
    const int64_t slot = args.slot_mapping[token], offset = slot % args.block_size;
    if (slot < 0) return 1;
    const bool is_pair =
        kIsSame<C, BFloat16> && !layout.is_plain && offset % 2 == 0 && is_run(args, token, end_token, 2);
    C* const target = static_cast<C*>(args.cache) + layout.values_of(slot / args.block_size, kv_head);
    const int64_t scales = layout.value_scales_of(slot / args.block_size, kv_head) + offset * kScaleBytes;
    for (int64_t n = 0; n < 1 + is_pair; ++n) {
      value_row(head + n * args.qkv_stride, kv_head);
      put_row(n, args.v_scale, scales + n * kScaleBytes);
    }
    if constexpr (kIsSame<C, BFloat16>)
      if (is_pair) return put_value_pair(layout, rows, offset, target), 2;
    return put_value(layout, rows, offset, target), 1;
  }

  // row = a value, in fp32, normalised if there is a weight.
  void value_row(const T* head, int64_t kv_head) const {
    if (args.v_norm.weight == nullptr) return convert(head, row, args.head_dim);
    normalise_head<T>(args.v_norm, head, kv_head, args.head_dim, row);
    round_row(head);
  }

  // Rounds `row` to the type of `head`.
  void round_row(const T* head) const {
    for_vectors(0, args.head_dim, [&](int64_t i, auto size) {
      store_count(row + i, round_to(head, load_count(row + i, size())), size());
    });
  }

  // Stores `row` as row n of `rows`, and its scale, if it has one, at a byte of the cache.
  void put_row(int64_t n, float constant, int64_t scale_byte) const {
    C* const target = rows + n * layout.dim;
    if constexpr (kIsSame<C, Int4>) rotate_by_hadamard(row, args.head_dim);
    if constexpr (kIsByte<C>) {
      const float scale = quantize_row(row, args.head_dim, constant, target);
      memcpy(static_cast<C*>(args.cache) + scale_byte, &scale, sizeof(scale));
    } else {
      convert(row, target, args.head_dim);
    }
  }
};

template <class T, class C>
void turn_and_store(const RopeStoreArgs& args, int64_t first_token, int64_t end_token) {
  const KvLayout layout(args.cache_dtype, args.num_kv_heads, args.head_dim, args.block_size, args.is_plain);
  const int64_t row_bytes = padded_dim(args.head_dim) * static_cast<int64_t>(sizeof(float)), rows_bytes = kLanes * row_bytes;
  char* const scratch = static_cast<char*>(thread_scratch(Scratch::kKernel, row_bytes + rows_bytes + sizeof(Vec)));
  float* const row = reinterpret_cast<float*>(scratch);
  C* const rows = reinterpret_cast<C*>(scratch + row_bytes);
  memset(rows, 0, kLanes * layout.dim * sizeof(C));
  const T* const qkv = static_cast<const T*>(args.qkv);
  for (int64_t token = first_token; token < end_token; ++token)
    for (int64_t head = 0; head < args.num_heads; ++head) {
      turn_head(args, token, qkv + token * args.qkv_stride + head * args.head_dim, args.q_norm, head, row);
      if (args.q_scales != nullptr) scale_row(row, args.head_dim, args.q_scales[token]);
      convert(row, static_cast<T*>(args.q) + (token * args.num_heads + head) * args.head_dim, args.head_dim);
    }
  const Storing<T, C> storing = {args, layout, row, rows};
  if (kNumbersOf<C> > 1) {
    while (first_token < end_token && shares_bytes(args.slot_mapping, first_token)) ++first_token;
    while (end_token < args.num_tokens && shares_bytes(args.slot_mapping, end_token)) ++end_token;
  }
  const T* const keys = qkv + args.num_heads * args.head_dim;
  const T* const values = keys + args.num_kv_heads * args.head_dim;
  // All tokens of one head before the next head, so that its part of a block stays in the first-level cache.
  for (int64_t head = 0; head < args.num_kv_heads; ++head) {
    const int64_t first = head * args.head_dim;
    for (int64_t token = first_token; token < end_token;)
      token += storing.store_keys(keys + token * args.qkv_stride + first, head, token, end_token);
    for (int64_t token = first_token; token < end_token;)
      token += storing.store_values(values + token * args.qkv_stride + first, head, token, end_token);
  }
}

void rope_and_store(const RopeStoreArgs& args, int64_t first_token, int64_t end_token) {
  with_type(args.dtype, [&](auto* type) {
    with_heads_type(args.cache_dtype, [&](auto* cache_type) {
      turn_and_store<Element<decltype(type)>, Element<decltype(cache_type)>>(args, first_token, end_token);
    });
  });
}

// Leaves out the first pairs as long as they stand still, as most of a head may.
void rotate_heads(const RotateHeadsArgs& args, int64_t first_token, int64_t end_token) {
  const auto rotate = args.is_interleaved ? rotate_neighbours : rotate_halves;
  const int64_t half = args.rotary_dim / 2, size = args.head_dim;
  float* const row = static_cast<float*>(thread_scratch(Scratch::kKernel, static_cast<size_t>(size) * sizeof(float)));
  with_type(args.dtype, [&](auto* type) {
    using T = Element<decltype(type)>;
    for (int64_t token = first_token; token < end_token; ++token) {
      const float *const cos = args.cos + token * args.angle_stride, *const sin = args.sin + token * args.angle_stride;
      int64_t still = 0;
      if (args.is_interleaved)
        while (still < half && cos[still] == 1.0f && sin[still] == 0.0f) ++still;
      for (int64_t head = 0; head < args.num_heads; ++head) {
        convert(static_cast<const T*>(args.x) + token * args.x_stride + head * size, row, size);
        rotate(row + 2 * still, cos + still, sin + still, half - still);
        convert(row, static_cast<T*>(args.out) + (token * args.num_heads + head) * size, size);
      }
    }
  });
}

}  // namespace

extern const RopeKernels kRope;
const RopeKernels kRope = {rope_and_store, rotate_heads};

}  // namespace PW_ISA
}  // namespace pagewick
