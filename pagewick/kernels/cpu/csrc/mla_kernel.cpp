// Latent attention of one unit of query rows, and storing of latents. Compiled once per instruction set.
#include "mla.h"

#include "attention_keys.h"
#include "attention_softmax.h"
#include "kv_quantize.h"
#include "latent_keys.h"
#include "parallel.h"
#include "rotation.h"
#include "rows.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// Rows whose softmax is computed side by side.
constexpr int64_t kRowsTogether = 8;
// Which keys the rows of a unit see: all keys up to their own position.
struct RowSpan {
  int64_t first_position, num_heads, first_row, num_rows;

  RowSpan(const LatentAttentionArgs& args, const AttentionUnit& unit)
      : first_position(args.context_lens[unit.seq] - (args.cu_seqlens_q[unit.seq + 1] - args.cu_seqlens_q[unit.seq])),
        num_heads(args.num_heads),
        first_row(unit.first_row),
        num_rows(unit.num_rows) {}

  int64_t token(int64_t row) const { return (first_row + row) / num_heads; }
  int64_t end(int64_t row) const { return first_position + token(row) + 1; }
  // Returns the first of the rows that belong to the same token as `row`.
  int64_t token_begin(int64_t row) const { return maximum(0, token(row) * num_heads - first_row); }
  KeySpan span(int64_t row, int64_t start) const { return {0, end(row) - start}; }
};

// The index of a unit's first row in [T * H, ...] tensors; its other rows follow.
inline int64_t first_row_of(const LatentAttentionArgs& args, const AttentionUnit& unit) {
  return args.cu_seqlens_q[unit.seq] * args.num_heads + unit.first_row;
}

inline int64_t value_dim(const LatentAttentionArgs& args) { return round_up(args.latent_dim, kDimUnit); }
inline int64_t key_dim(const LatentAttentionArgs& args) { return round_up(args.latent_dim + args.rope_dim, kKeyUnit); }

inline ScoreScale scale_of(const LatentAttentionArgs& args) {
  AttentionArgs plain = {};
  plain.softmax_scale = args.softmax_scale;
  return ScoreScale(plain);
}

template <class T>
void store_outputs(const LatentAttentionArgs& args, const AttentionUnit& unit, const State& state, T* out) {
  const int64_t size = args.latent_dim;
  out += first_row_of(args, unit) * size;
  for (int64_t r = 0; r < unit.num_rows; ++r, out += size) {
    const float* const sink = args.sinks == nullptr ? nullptr : args.sinks + (unit.first_row + r) % args.num_heads;
    const float factor = normalizer(state, r, sink);
    const float* const values = state.row(r);
    int64_t d = 0;
    for (; d + kLanes <= size; d += kLanes) store_result(out + d, load(values + d) * factor);
    if (d < size) store_part(out + d, load(values + d) * factor, size - d);
  }
}

void store_outputs(const LatentAttentionArgs& args, const AttentionUnit& unit, const State& state) {
  with_type(args.dtype, [&](auto* type) { store_outputs(args, unit, state, static_cast<decltype(type)>(args.out)); });
}

// The state that all tiles of one unit share, for a cache of type C.
template <class C>
class UnitKernel {
  using T = typename WorkOf<C>::type;

 public:
  UnitKernel(const LatentAttentionArgs& args, const AttentionUnit& unit)
      : args_(args), unit_(unit), span_(args, unit), scale_(scale_of(args)), key_dim_(key_dim(args)),
        value_dim_(value_dim(args)) {
    const int64_t rows = unit.num_rows;
    const int64_t floats = 2 * state_floats() + rows * kTile;
    const int64_t elements = 2 * kPiece * key_dim_ + kTile * value_dim_;
    const int64_t left = rows * (key_dim_ + kTile);
    void* const memory = thread_scratch(
        Scratch::kKernel, static_cast<size_t>(floats * sizeof(float) + elements * sizeof(T) + left * sizeof(Left<T>)));
    // Whole cache lines come first.
    states_ = static_cast<float*>(memory);
    products_ = states_ + 2 * state_floats();
    rows_ = reinterpret_cast<T*>(products_ + rows * kTile);
    keys_ = rows_ + kPiece * key_dim_;
    values_ = keys_ + kPiece * key_dim_;
    q_ = reinterpret_cast<Left<T>*>(values_ + kTile * value_dim_);
    probs_ = q_ + rows * key_dim_;
    load_queries();
  }

  State state(int64_t index) const { return State(states_ + index * state_floats(), unit_.num_rows, value_dim_); }

  // Adds the keys of one segment to `state`, tile by tile. False if a block id is outside the cache.
  bool attend_segment(int64_t segment, const State& state) {
    state.reset();
    const int64_t end = minimum(span_.end(unit_.num_rows - 1), (segment + 1) * kSegmentKeys);
    for (int64_t start = segment * kSegmentKeys; start < end; start += kTile)
      if (!add_tile(start, minimum(end - start, kTile), state)) return false;
    return true;
  }

 private:
  int64_t state_floats() const { return State::num_floats(unit_.num_rows, value_dim_); }

  // Queries are rounded to bf16 where the cache is bf16, on every instruction set.
  void load_queries() {
    const int64_t latent_dim = args_.latent_dim, rope_dim = args_.rope_dim, first = first_row_of(args_, unit_);
    with_type(args_.dtype, [&](const auto* type) {
      const auto latents = static_cast<decltype(type)>(args_.q_latent) + first * latent_dim;
      const auto rotated = static_cast<decltype(type)>(args_.q_rope) + first * rope_dim;
      for (int64_t r = 0; r < unit_.num_rows; ++r) {
        Left<T>* const row = q_ + r * key_dim_;
        copy_rounded<T>(latents + r * latent_dim, latent_dim, row);
        copy_rounded<T>(rotated + r * rope_dim, rope_dim, row + latent_dim);
        for (int64_t d = latent_dim + rope_dim; d < key_dim_; ++d) row[d] = Left<T>{};
      }
    });
  }

  // Adds the first num_keys keys of the tile at `start`.
  bool add_tile(int64_t start, int64_t num_keys, const State& state) {
    const int64_t end = round_up(num_keys, kPiece);
    for (int64_t key = 0; key < end; key += kPiece) {
      if (!gather(start + key, minimum(kPiece, num_keys - key))) return false;
      pack_keys(rows_, key_dim_, keys_);
      multiplier_.multiply(q_, key_dim_, unit_.num_rows, keys_, kPiece * kStep<T>, key_dim_, kPiece, products_ + key,
                           kTile, false);
      pack_values(rows_, key_dim_, value_dim_, values_ + key * value_dim_);
    }
    // The keys that every row sees.
    const KeySpan common = span_.span(0, start);
    add_probs(start, end, common.end >= end, state);
    if (common.end >= num_keys || is_finite(values_, end * value_dim_)) multiply_values(0, unit_.num_rows, end, state);
    else multiply_values_of_tokens(start, num_keys, state);
    return true;
  }

  // Fills rows_ [kPiece][key_dim] with `count` keys from position `first` on, and with zeros. False if a block id is
  // outside the cache.
  bool gather(int64_t first, int64_t count) {
    const LatentLayout layout(args_.cache_dtype, args_.block_size, args_.latent_dim + args_.rope_dim);
    const C* const cache = static_cast<const C*>(args_.cache);
    const int32_t* const block_table = args_.block_tables + unit_.seq * args_.block_table_stride;
    memset(rows_ + count * key_dim_, 0, (kPiece - count) * key_dim_ * sizeof(T));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t block_id = block_table[(first + i) / args_.block_size];
      if (block_id < 0 || block_id >= args_.num_blocks) return false;
      const int64_t offset = (first + i) % args_.block_size;
      T* const row = rows_ + i * key_dim_;
      const C* const stored = cache + layout.row_of(block_id, offset);
      if constexpr (kIsByte<C>) multiply_key(stored, cache + layout.scales_of(block_id, offset), row);
      else copy_key(stored, layout.row_size, row);
      for (int64_t d = layout.row_size; d < key_dim_; ++d) row[d] = T{};
    }
    return true;
  }

  // row = the latent and the rotated key of a token, each multiplied with its scale.
  void multiply_key(const C* source, const C* scales, T* row) const {
    float factors[2];
    memcpy(factors, scales, sizeof(factors));
    const int64_t end = args_.latent_dim + args_.rope_dim;
    multiply_bytes(source, 0, args_.latent_dim, factors[0], row);
    multiply_bytes(source, args_.latent_dim, end, factors[1], row);
  }

  static void multiply_bytes(const C* source, int64_t begin, int64_t end, float factor, T* row) {
    for_vectors(begin, end, [&](int64_t i, auto count) {
      C bytes[kLanes] = {};
      memcpy(bytes, source + i, count());
      const Vec product = load_bytes(bytes) * factor;
      if (count() == kLanes) store_result(row + i, product);
      else store_part(row + i, product, count());
    });
  }

  static void copy_key(const T* source, int64_t size, T* row) { memcpy(row, source, size * sizeof(T)); }
  static void copy_key(const Float16* source, int64_t size, float* row) { copy_rounded<float>(source, size, row); }

  void add_probs(int64_t start, int64_t end, bool is_all_visible, const State& state) {
    const T* type = nullptr;
    // A few rows at a time, so that the latencies of one row are hidden behind the work on the others.
    for (int64_t row = 0; row < unit_.num_rows; row += kRowsTogether) {
      const int64_t count = minimum(kRowsTogether, unit_.num_rows - row);
      float maxima[kRowsTogether];
      for (int64_t i = 0; i < count; ++i) {
        const KeySpan span = span_.span(row + i, start);
        maxima[i] = raise_maximum(products_ + (row + i) * kTile, 0, end, nullptr, is_all_visible ? nullptr : &span,
                                  scale_, state, row + i);
      }
      for (int64_t i = 0; i < count; ++i)
        store_row_probs(type, products_ + (row + i) * kTile, 0, end, scale_, maxima[i], nullptr,
                        state.row(row + i) + state.dim, probs_ + (row + i) * kTile);
    }
  }

  // Adds probabilities x values of the first num_keys keys, whole pieces, to the rows [row, end_row).
  void multiply_values(int64_t row, int64_t end_row, int64_t num_keys, const State& state) {
    multiplier_.multiply(probs_ + row * kTile, kTile, end_row - row, values_, value_dim_ * kStep<T>, num_keys,
                         value_dim_, state.row(row), state.stride(), true);
  }

  // As multiply_values, but without the values that a token must not see: where one of them is not finite, even its
  // product with probability 0 would be NaN. Goes from the last token to the first, and clears values on the way.
  void multiply_values_of_tokens(int64_t start, int64_t num_keys, const State& state) {
    constexpr int64_t step = kStep<T>;
    int64_t kept = num_keys;
    for (int64_t end_row = unit_.num_rows; end_row > 0;) {
      const int64_t row = span_.token_begin(end_row - 1);
      for (const int64_t seen = maximum(0, span_.end(row) - start); kept > seen; --kept) {
        T* const value = values_ + (kept - 1) / step * value_dim_ * step + (kept - 1) % step;
        for (int64_t d = 0; d < value_dim_; ++d) value[d * step] = T{};
      }
      multiply_values(row, end_row, round_up(num_keys, kPiece), state);
      end_row = row;
    }
  }

  const LatentAttentionArgs& args_;
  const AttentionUnit& unit_;
  const RowSpan span_;
  const ScoreScale scale_;
  const int64_t key_dim_, value_dim_;
  Multiplier multiplier_;
  float *states_, *products_;
  T *rows_, *keys_, *values_;
  Left<T>*q_, *probs_;
};

int64_t state_floats(const LatentAttentionArgs& args, int64_t num_rows) {
  return State::num_floats(num_rows, value_dim(args));
}

// Merges the state of a segment into that of the segments before it. Rows that see no key of the segment are left out.
void merge_segment(const RowSpan& span, int64_t segment, const State& added, const State& total) {
  for (int64_t r = 0; r < total.num_rows; ++r)
    if (span.end(r) > segment * kSegmentKeys) merge_row(added, total, r);
}

bool attend(const LatentAttentionArgs& args, const AttentionUnit& unit, float* partial) {
  return with_cache_type(args.cache_dtype, [&](auto* type) {
    UnitKernel<Element<decltype(type)>> kernel(args, unit);
    if (unit.segment >= 0)
      return kernel.attend_segment(unit.segment, State(partial, unit.num_rows, value_dim(args)));
    const RowSpan span(args, unit);
    const int64_t last = (span.end(unit.num_rows - 1) - 1) / kSegmentKeys;
    const State total = kernel.state(0), next = kernel.state(1);
    if (!kernel.attend_segment(0, total)) return false;
    for (int64_t segment = 1; segment <= last; ++segment) {
      if (!kernel.attend_segment(segment, next)) return false;
      merge_segment(span, segment, next, total);
    }
    store_outputs(args, unit, total);
    return true;
  });
}

void merge(const LatentAttentionArgs& args, const AttentionUnit& unit, float* partials, int64_t stride,
           int64_t num_segments) {
  const int64_t dim = value_dim(args);
  const State total(partials, unit.num_rows, dim);
  for (int64_t segment = 1; segment < num_segments; ++segment)
    merge_segment(RowSpan(args, unit), segment, State(partials + segment * stride, unit.num_rows, dim), total);
  store_outputs(args, unit, total);
}

void rotate(const StoreLatentArgs& args, int64_t token, float* row) {
  const int64_t angles = token * args.angle_stride;
  const auto turn = args.is_interleaved ? rotate_neighbours : rotate_halves;
  turn(row, args.cos + angles, args.sin + angles, args.rope_dim / 2);
}

// row = the normalised latent of a token and its rotated key, or zeros in its place, in fp32.
template <class T>
void turn_latent(const StoreLatentArgs& args, int64_t token, const T* latent, const T* weight, float* row) {
  const int64_t size = args.latent_dim;
  const float scale = 1.0f / __builtin_sqrtf(sum_of_squares(latent, size) / static_cast<float>(size) + args.norm_eps);
  for_vectors(0, size, [&](int64_t i, auto count) {
    store_count(row + i, load_count(latent + i, count()) * scale * load_count(weight + i, count()), count());
  });
  if (!args.has_key) {
    memset(row + size, 0, args.rope_dim * sizeof(float));
    return;
  }
  copy_rounded<float>(latent + size, args.rope_dim, row + size);
  rotate(args, token, row + size);
}

// Results are rounded to the type T of the latents before they are stored in that of the cache.
template <class T, class C>
void store_latent(const StoreLatentArgs& args, const LatentLayout& layout, int64_t slot, float* row, C* cache) {
  const int64_t block_id = slot / layout.block_size, offset = slot % layout.block_size;
  C* const target = cache + layout.row_of(block_id, offset);
  if constexpr (kIsByte<C>) {
    copy_rounded<T>(row, layout.row_size, row);
    const float scales[2] = {quantize_row(row, args.latent_dim, 0.0f, target),
                             quantize_row(row + args.latent_dim, args.rope_dim, 0.0f, target + args.latent_dim)};
    memcpy(cache + layout.scales_of(block_id, offset), scales, sizeof(scales));
  } else {
    copy_rounded<T>(row, layout.row_size, target);
  }
}

void store(const StoreLatentArgs& args, int64_t first_token, int64_t end_token) {
  const int64_t size = args.latent_dim + args.rope_dim, head_dim = args.nope_dim + args.rope_dim;
  const LatentLayout layout(args.cache_dtype, args.block_size, size);
  float* const row = static_cast<float*>(thread_scratch(Scratch::kKernel, static_cast<size_t>(size) * sizeof(float)));
  with_type(args.dtype, [&](auto* type) {
    using T = Element<decltype(type)>;
    const T *const q = static_cast<const T*>(args.q), *const latents = static_cast<const T*>(args.latents);
    T* const q_rope = static_cast<T*>(args.q_rope);
    for (int64_t token = first_token; token < end_token; ++token) {
      for (int64_t head = 0; head < args.num_heads; ++head) {
        copy_rounded<float>(q + token * args.q_stride + head * head_dim + args.nope_dim, args.rope_dim, row);
        rotate(args, token, row);
        copy_rounded<float>(row, args.rope_dim, q_rope + (token * args.num_heads + head) * args.rope_dim);
      }
      const int64_t slot = args.slot_mapping[token];
      if (args.latents == nullptr || slot < 0) continue;
      turn_latent(args, token, latents + token * args.latent_stride, static_cast<const T*>(args.norm), row);
      with_cache_type(args.cache_dtype, [&](auto* cache_type) {
        store_latent<T>(args, layout, slot, row, static_cast<decltype(cache_type)>(args.cache));
      });
    }
  });
}

}  // namespace

extern const MlaKernels kMla;
const MlaKernels kMla = {state_floats, attend, merge, store};

}  // namespace PW_ISA
}  // namespace pagewick
