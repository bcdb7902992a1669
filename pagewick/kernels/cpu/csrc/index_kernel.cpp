// Scores keys for a few tokens, and stores index keys. Compiled once per instruction set.
#include "index.h"

#include "latent_keys.h"
#include "parallel.h"
#include "rotation.h"

namespace pagewick {
namespace PW_ISA {
namespace {

template <class Args>
void rotate(const Args& args, int64_t token, float* row) {
  const int64_t angles = token * args.angle_stride;
  const auto turn = args.is_interleaved ? rotate_neighbours : rotate_halves;
  turn(row, args.cos + angles, args.sin + angles, args.rope_dim / 2);
}

// The memory and the queries of one unit, for a cache of type C.
template <class C>
class UnitKernel {
  using T = typename WorkOf<C>::type;

 public:
  UnitKernel(const SelectKeysArgs& args, const IndexUnit& unit)
      : args_(args),
        unit_(unit),
        key_dim_(round_up(args.dim, kKeyUnit)),
        num_rows_(unit.num_tokens * args.num_heads) {
    const int64_t floats = num_rows_ * kPiece + key_dim_, elements = 2 * kPiece * key_dim_;
    void* const memory = thread_scratch(
        Scratch::kKernel,
        static_cast<size_t>(floats * sizeof(float) + elements * sizeof(T) + num_rows_ * key_dim_ * sizeof(Left<T>)));
    // Whole cache lines come first.
    products_ = static_cast<float*>(memory);
    rows_ = reinterpret_cast<T*>(products_ + num_rows_ * kPiece + key_dim_);
    keys_ = rows_ + kPiece * key_dim_;
    q_ = reinterpret_cast<Left<T>*>(keys_ + kPiece * key_dim_);
    load_queries(products_ + num_rows_ * kPiece);
  }

  // False if a block id is outside the cache.
  bool score(float* scores, int64_t stride) {
    if (args_.has_blocks)
      for (int64_t row = 0; row < num_rows_; ++row)
        for (int64_t block = unit_.first_key / args_.ratio; block < unit_.end_key / args_.ratio; ++block)
          scores[row * stride + block] = -kInfinity;
    for (int64_t key = unit_.first_key; key < unit_.end_key; key += kPiece) {
      const int64_t count = minimum(kPiece, unit_.end_key - key);
      if (!gather(key, count)) return false;
      pack_keys(rows_, key_dim_, keys_);
      multiplier_.multiply(q_, key_dim_, num_rows_, keys_, kPiece * kStep<T>, key_dim_, kPiece, products_, kPiece,
                           false);
      if (args_.has_blocks)
        for (int64_t row = 0; row < num_rows_; ++row) raise_blocks(row, key, count, scores + row * stride);
      else
        for (int64_t token = 0; token < unit_.num_tokens; ++token)
          add_heads(token, count, scores + token * stride + key);
    }
    return true;
  }

 private:
  // row: memory for one head. Queries are rounded to the type of the cache after their rotation.
  void load_queries(float* row) {
    with_type(args_.dtype, [&](const auto* type) {
      const auto q = static_cast<decltype(type)>(args_.q);
      for (int64_t r = 0; r < num_rows_; ++r) {
        const int64_t token = unit_.first_token + r / args_.num_heads;
        copy_rounded<float>(q + token * args_.q_stride + r % args_.num_heads * args_.dim, args_.dim, row);
        rotate(args_, token, row);
        Left<T>* const target = q_ + r * key_dim_;
        copy_rounded<C>(row, args_.dim, target);
        for (int64_t d = args_.dim; d < key_dim_; ++d) target[d] = Left<T>{};
      }
    });
  }

  // Fills rows_ [kPiece][key_dim] with `count` keys from position `first` on, and with zeros.
  bool gather(int64_t first, int64_t count) {
    const C* const cache = static_cast<const C*>(args_.cache);
    const int32_t* const block_table = args_.block_tables + unit_.seq * args_.block_table_stride;
    memset(rows_ + count * key_dim_, 0, (kPiece - count) * key_dim_ * sizeof(T));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t block_id = block_table[(first + i) / args_.block_size];
      if (block_id < 0 || block_id >= args_.num_blocks) return false;
      T* const row = rows_ + i * key_dim_;
      copy_key(cache + (block_id * args_.block_size + (first + i) % args_.block_size) * args_.dim, args_.dim, row);
      for (int64_t d = args_.dim; d < key_dim_; ++d) row[d] = T{};
    }
    return true;
  }

  static void copy_key(const T* source, int64_t size, T* row) { memcpy(row, source, size * sizeof(T)); }
  static void copy_key(const Float16* source, int64_t size, float* row) { copy_rounded<float>(source, size, row); }

  // scores = the weighted sum of the products of all heads that are above 0.
  void add_heads(int64_t token, int64_t count, float* scores) const {
    const float* const weights = args_.weights + (unit_.first_token + token) * args_.num_heads;
    const float* const products = products_ + token * args_.num_heads * kPiece;
    for_vectors(0, count, [&](int64_t i, auto number) {
      Vec sum = zero();
      for (int64_t head = 0; head < args_.num_heads; ++head)
        // In this order a NaN stays one.
        sum = madd(set1(weights[head]), max(zero(), load(products + head * kPiece + i)), sum);
      store_count(scores + i, sum, number());
    });
  }

  // Raises the scores of blocks to the products of a row with `count` keys from `first` on. NaN counts as the least.
  void raise_blocks(int64_t row, int64_t first, int64_t count, float* scores) const {
    const float* const products = products_ + row * kPiece;
    for (int64_t begin = 0, end; begin < count; begin = end) {
      const int64_t block = (first + begin) / args_.ratio;
      end = minimum(count, (block + 1) * args_.ratio - first);
      Vec highest = set1(scores[block]);
      int64_t i = begin;
      for (; i + kLanes <= end; i += kLanes) highest = max(load(products + i), highest);
      float score = hmax(highest);
      for (; i < end; ++i) score = products[i] > score ? products[i] : score;
      scores[block] = score;
    }
  }

  const SelectKeysArgs& args_;
  const IndexUnit& unit_;
  const int64_t key_dim_, num_rows_;
  Multiplier multiplier_;
  float* products_;
  T *rows_, *keys_;
  Left<T>* q_;
};

bool score(const SelectKeysArgs& args, const IndexUnit& unit, float* scores, int64_t stride) {
  return with_type(args.cache_dtype, [&](auto* type) {
    return UnitKernel<Element<decltype(type)>>(args, unit).score(scores, stride);
  });
}

void store(const StoreIndexArgs& args, int64_t first_token, int64_t end_token) {
  float* const row =
      static_cast<float*>(thread_scratch(Scratch::kKernel, static_cast<size_t>(args.dim) * sizeof(float)));
  for (int64_t token = first_token; token < end_token; ++token) {
    const int64_t slot = args.slot_mapping[token];
    if (slot < 0) continue;
    with_type(args.dtype, [&](const auto* type) {
      copy_rounded<float>(static_cast<decltype(type)>(args.keys) + token * args.key_stride, args.dim, row);
    });
    rotate(args, token, row);
    with_type(args.cache_dtype, [&](auto* type) {
      copy_rounded<Element<decltype(type)>>(row, args.dim, static_cast<decltype(type)>(args.cache) + slot * args.dim);
    });
  }
}

}  // namespace

extern const IndexKernels kIndex;
const IndexKernels kIndex = {store, score};

}  // namespace PW_ISA
}  // namespace pagewick
