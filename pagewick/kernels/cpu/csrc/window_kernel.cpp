// Attention of some heads of a token to keys that lie anywhere. Compiled once per instruction set.
#include "window.h"

#include "attention_softmax.h"
#include "latent_keys.h"
#include "parallel.h"
#include "rows.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// Heads whose softmax is computed side by side.
constexpr int64_t kHeadsTogether = 8;

// The keys that a token sees in its window and among entries, for caches of type C.
template <class C>
class WindowKeys {
 public:
  static constexpr bool kAreValues = true;

  WindowKeys(const WindowAttentionArgs& args, const WindowUnit& unit)
      : args_(args), unit_(unit), num_seen_(minimum(unit.position + 1, args.window)) {}

  int64_t size() const { return num_seen_ + num_entries(); }

  // Returns key number `index`, or null if it lies outside of its cache: those of the window come first, then entries.
  const C* key(int64_t index) const {
    if (index < num_seen_) {
      const int64_t position = unit_.position + 1 - num_seen_ + index;
      const int64_t block_id =
          args_.block_tables[unit_.seq * args_.block_table_stride + position / args_.block_size];
      if (block_id < 0 || block_id >= args_.num_blocks) return nullptr;
      const int64_t slot = block_id * args_.block_size + position % args_.block_size;
      return static_cast<const C*>(args_.cache) + slot * args_.dim;
    }
    index -= num_seen_;
    int64_t slot;
    if (args_.slots != nullptr) {
      slot = args_.slots[unit_.token * args_.top_k + index];
    } else {
      const int64_t block_id =
          args_.entry_tables[unit_.seq * args_.entry_table_stride + index / args_.entry_block_size];
      slot = block_id < 0 ? -1 : block_id * args_.entry_block_size + index % args_.entry_block_size;
    }
    if (slot < 0 || slot >= args_.num_entry_blocks * args_.entry_block_size) return nullptr;
    return static_cast<const C*>(args_.entries) + slot * args_.dim;
  }

 private:
  int64_t num_entries() const {
    if (args_.entries == nullptr) return 0;
    return args_.slots != nullptr ? args_.counts[unit_.token] : (unit_.position + 1) / args_.ratio;
  }

  const WindowAttentionArgs& args_;
  const WindowUnit& unit_;
  const int64_t num_seen_;
};

// The keys that a token sees in selected blocks, and behind the last block that ends with it or before it.
template <class C>
class BlockKeys {
 public:
  static constexpr bool kAreValues = false;

  BlockKeys(const BlockAttentionArgs& args, const WindowUnit& unit)
      : args_(args),
        kv_head_(unit.first_head / (args.num_heads / args.num_kv_heads)),
        num_complete_((unit.position + 1) / args.ratio),
        num_selected_(args.counts[unit.token] * args.ratio),
        size_(num_selected_ + unit.position + 1 - num_complete_ * args.ratio),
        table_(args.block_tables + unit.seq * args.block_table_stride),
        numbers_(args.slots +
                 (unit.token * args.num_selections + (args.num_selections == 1 ? 0 : kv_head_)) * args.top_k) {}

  int64_t size() const { return size_; }

  // Returns key number `index`, or null if it lies outside of the cache, or in a block that ends behind the token.
  const C* key(int64_t index) const {
    int64_t position = num_complete_ * args_.ratio + index - num_selected_;
    if (index < num_selected_) {
      const int64_t number = numbers_[index / args_.ratio];
      if (number < 0 || number >= num_complete_) return nullptr;
      position = number * args_.ratio + index % args_.ratio;
    }
    const int64_t block_id = table_[position / args_.block_size];
    if (block_id < 0 || block_id >= args_.num_blocks) return nullptr;
    const int64_t row = (block_id * 2 * args_.num_kv_heads + kv_head_) * args_.block_size + position % args_.block_size;
    return static_cast<const C*>(args_.cache) + row * args_.dim;
  }

  const C* value_of(const C* key) const { return key + args_.num_kv_heads * args_.block_size * args_.dim; }

 private:
  const BlockAttentionArgs& args_;
  const int64_t kv_head_, num_complete_, num_selected_, size_;
  const int32_t *const table_, *const numbers_;
};

// The memory and the queries of one unit, for caches of type C. Keys: a class as the two above.
template <class C, template <class> class Keys, class Args>
class UnitKernel {
  using T = typename WorkOf<C>::type;

 public:
  UnitKernel(const Args& args, const WindowUnit& unit)
      : args_(args), unit_(unit), seen_(args, unit), scale_(scale_of(args)), key_dim_(round_up(args.dim, kKeyUnit)),
        value_dim_(round_up(args.dim, kDimUnit)) {
    const int64_t heads = unit.num_heads, state_floats = State::num_floats(heads, value_dim_);
    const int64_t floats = state_floats + heads * kTile, elements = 2 * kPiece * key_dim_ + kTile * value_dim_;
    const int64_t left = heads * (key_dim_ + kTile);
    void* const memory = thread_scratch(
        Scratch::kKernel, static_cast<size_t>(floats * sizeof(float) + elements * sizeof(T) + left * sizeof(Left<T>)));
    // Whole cache lines come first.
    state_ = static_cast<float*>(memory);
    products_ = state_ + state_floats;
    rows_ = reinterpret_cast<T*>(products_ + heads * kTile);
    keys_ = rows_ + kPiece * key_dim_;
    values_ = keys_ + kPiece * key_dim_;
    q_ = reinterpret_cast<Left<T>*>(values_ + kTile * value_dim_);
    probs_ = q_ + heads * key_dim_;
    load_queries();
  }

  // False if a block id or a slot is outside its cache.
  bool attend() {
    const State state(state_, unit_.num_heads, value_dim_);
    state.reset();
    const int64_t size = seen_.size();
    for (int64_t start = 0; start < size; start += kTile)
      if (!add_tile(start, minimum(size - start, kTile), state)) return false;
    store_outputs(state);
    return true;
  }

 private:
  static ScoreScale scale_of(const Args& args) {
    AttentionArgs plain = {};
    plain.softmax_scale = args.softmax_scale;
    return ScoreScale(plain);
  }

  int64_t first_row() const { return unit_.token * args_.num_heads + unit_.first_head; }

  // Queries are rounded to bf16 where the cache is bf16, on every instruction set.
  void load_queries() {
    with_type(args_.dtype, [&](const auto* type) {
      const auto q = static_cast<decltype(type)>(args_.q) + first_row() * args_.dim;
      for (int64_t head = 0; head < unit_.num_heads; ++head) {
        Left<T>* const row = q_ + head * key_dim_;
        copy_rounded<T>(q + head * args_.dim, args_.dim, row);
        for (int64_t d = args_.dim; d < key_dim_; ++d) row[d] = Left<T>{};
      }
    });
  }

  // Adds num_keys keys from number `start` on.
  bool add_tile(int64_t start, int64_t num_keys, const State& state) {
    const int64_t end = round_up(num_keys, kPiece);
    for (int64_t key = 0; key < end; key += kPiece) {
      const int64_t count = minimum(kPiece, num_keys - key);
      if (!gather(start + key, count)) return false;
      pack_keys(rows_, key_dim_, keys_);
      multiplier_.multiply(q_, key_dim_, unit_.num_heads, keys_, kPiece * kStep<T>, key_dim_, kPiece, products_ + key,
                           kTile, false);
      if constexpr (!Keys<C>::kAreValues)
        for (int64_t i = 0; i < count; ++i) copy_key(seen_.value_of(sources_[i]), args_.dim, rows_ + i * key_dim_);
      pack_values(rows_, key_dim_, value_dim_, values_ + key * value_dim_);
    }
    add_probs(num_keys, end, state);
    multiplier_.multiply(probs_, kTile, unit_.num_heads, values_, value_dim_ * kStep<T>, end, value_dim_, state.row(0),
                         state.stride(), true);
    return true;
  }

  // Fills rows_ [kPiece][key_dim] with `count` keys from number `first` on, and with zeros.
  bool gather(int64_t first, int64_t count) {
    memset(rows_ + count * key_dim_, 0, (kPiece - count) * key_dim_ * sizeof(T));
    for (int64_t i = 0; i < count; ++i) {
      sources_[i] = seen_.key(first + i);
      if (sources_[i] == nullptr) return false;
      T* const row = rows_ + i * key_dim_;
      copy_key(sources_[i], args_.dim, row);
      for (int64_t d = args_.dim; d < key_dim_; ++d) row[d] = T{};
    }
    return true;
  }

  static void copy_key(const T* source, int64_t size, T* row) { memcpy(row, source, size * sizeof(T)); }
  static void copy_key(const Float16* source, int64_t size, float* row) { copy_rounded<float>(source, size, row); }

  // Turns the products with the first num_keys keys of `end` into probabilities.
  void add_probs(int64_t num_keys, int64_t end, const State& state) {
    const T* type = nullptr;
    const KeySpan span = {0, num_keys};
    // A few heads at a time, so that the latencies of one are hidden behind the work on the others.
    for (int64_t head = 0; head < unit_.num_heads; head += kHeadsTogether) {
      const int64_t count = minimum(kHeadsTogether, unit_.num_heads - head);
      float maxima[kHeadsTogether];
      for (int64_t i = 0; i < count; ++i)
        maxima[i] = raise_maximum(products_ + (head + i) * kTile, 0, end, nullptr, num_keys == end ? nullptr : &span,
                                  scale_, state, head + i);
      for (int64_t i = 0; i < count; ++i)
        store_row_probs(type, products_ + (head + i) * kTile, 0, end, scale_, maxima[i], nullptr,
                        state.row(head + i) + state.dim, probs_ + (head + i) * kTile);
    }
  }

  void store_outputs(const State& state) const {
    with_type(args_.dtype, [&](auto* type) {
      auto* out = static_cast<decltype(type)>(args_.out) + first_row() * args_.dim;
      for (int64_t head = 0; head < unit_.num_heads; ++head, out += args_.dim) {
        const float* sink = nullptr;
        if constexpr (Keys<C>::kAreValues) sink = args_.sinks + unit_.first_head + head;
        const float factor = normalizer(state, head, sink);
        const float* const values = state.row(head);
        int64_t d = 0;
        for (; d + kLanes <= args_.dim; d += kLanes) store_result(out + d, load(values + d) * factor);
        if (d < args_.dim) store_part(out + d, load(values + d) * factor, args_.dim - d);
      }
    });
  }

  const Args& args_;
  const WindowUnit& unit_;
  const Keys<C> seen_;
  const ScoreScale scale_;
  const int64_t key_dim_, value_dim_;
  const C* sources_[kPiece];
  Multiplier multiplier_;
  float *state_, *products_;
  T *rows_, *keys_, *values_;
  Left<T>*q_, *probs_;
};

bool attend(const WindowAttentionArgs& args, const WindowUnit& unit) {
  return with_type(args.cache_dtype, [&](auto* type) {
    return UnitKernel<Element<decltype(type)>, WindowKeys, WindowAttentionArgs>(args, unit).attend();
  });
}

bool attend_blocks(const BlockAttentionArgs& args, const WindowUnit& unit) {
  return with_type(args.cache_dtype, [&](auto* type) {
    return UnitKernel<Element<decltype(type)>, BlockKeys, BlockAttentionArgs>(args, unit).attend();
  });
}

}  // namespace

extern const WindowKernels kWindow;
const WindowKernels kWindow = {attend, attend_blocks};

}  // namespace PW_ISA
}  // namespace pagewick
