#include "index.h"

#include <algorithm>
#include <cmath>

#include "testing.h"

using namespace testing;

namespace {

struct Case {
  std::vector<int32_t> q_lens, context_lens;
  int64_t num_heads, dim, rope_dim, block_size, top_k;
  bool is_interleaved;
};

// Rotates the first elements of `row` by the angle of position 7 * token + pair, which cos and sin have.
void rotate(std::vector<double>& row, int64_t rope_dim, bool is_interleaved, const Array<float>& cos,
            const Array<float>& sin, int64_t token) {
  const int64_t half = rope_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    double &a = row[is_interleaved ? 2 * i : i], &b = row[is_interleaved ? 2 * i + 1 : i + half];
    const double c = cos[token * half + i], s = sin[token * half + i], first = a;
    a = a * c - b * s, b = b * c + first * s;
  }
}

void fill_angles(Array<float>& cos, Array<float>& sin, int64_t half) {
  for (int64_t i = 0; i < cos.size(); ++i) {
    const double angle = static_cast<double>(7 * (i / half) + i % half) * 0.37;
    cos[i] = static_cast<float>(std::cos(angle)), sin[i] = static_cast<float>(std::sin(angle));
  }
}

void test_store(const Case& c, DType dtype, DType cache_dtype) {
  constexpr int64_t kTokens = 11, kBlocks = 12;
  begin_case("store_index_keys %s to %s, %d of %d rotated", name_of(dtype), name_of(cache_dtype),
             static_cast<int>(c.rope_dim), static_cast<int>(c.dim));
  const int64_t stride = c.dim + 3, half = c.rope_dim / 2, num_slots = kBlocks * c.block_size;
  const Tensor keys = Tensor::random(dtype, (kTokens - 1) * stride + c.dim, 2.0);
  Array<float> cos(kTokens * half), sin(kTokens * half);
  fill_angles(cos, sin, half);
  std::vector<int64_t> slots;
  for (int64_t token = 0; token < kTokens; ++token) slots.push_back(token == 4 ? -1 : (token * 7 + 2) % num_slots);
  const Array<int64_t> slot_mapping(slots);
  const Array<int64_t> bad_slots(std::vector<int64_t>(kTokens, num_slots));
  const Tensor cache(cache_dtype, num_slots * c.dim);
  pagewick::StoreIndexArgs args = {
      keys.data(), cos.data(), sin.data(), slot_mapping.data(), cache.data(),  kTokens,     c.dim, c.rope_dim,
      stride,      half,       kBlocks,    c.block_size,        dtype,         cache_dtype, c.is_interleaved};
  args.slot_mapping = bad_slots.data();
  require(status_of("store_index_keys", args) == pagewick::kBadBlockId, "a slot outside the cache");
  for (int64_t i = 0; i < cache.size(); ++i) require(cache.is_untouched(i), "nothing is written after an error");
  args.slot_mapping = slot_mapping.data();
  run("store_index_keys", args);
  for (int64_t token = 0; token < kTokens; ++token) {
    if (slots[token] < 0) continue;
    std::vector<double> row(c.dim);
    for (int64_t d = 0; d < c.dim; ++d) row[d] = keys[token * stride + d];
    rotate(row, c.rope_dim, c.is_interleaved, cos, sin, token);
    for (int64_t d = 0; d < c.dim; ++d)
      require_near(cache, slots[token] * c.dim + d, row[d], 8 * kFloatUnit, "key");
  }
}

class Batch {
 public:
  Batch(const Case& c, DType dtype, DType cache_dtype)
      : c_(c),
        num_tokens_(total(c.q_lens)),
        q_(Tensor::random(dtype, (num_tokens_ - 1) * q_stride() + c.num_heads * c.dim)),
        cache_(Tensor::random(cache_dtype, num_blocks() * c.block_size * c.dim)),
        weights_(num_tokens_ * c.num_heads),
        cos_(num_tokens_ * c.rope_dim / 2),
        sin_(num_tokens_ * c.rope_dim / 2),
        tables_(num_seqs() * max_blocks()),
        targets_(num_seqs() * max_blocks()),
        context_lens_(c.context_lens),
        cu_seqlens_(num_seqs() + 1) {
    fill_angles(cos_, sin_, c.rope_dim / 2);
    for (int64_t i = 0; i < weights_.size(); ++i) weights_[i] = static_cast<float>(random_number());
    cu_seqlens_[0] = 0;
    int32_t next_block = static_cast<int32_t>(num_blocks());
    for (int64_t seq = 0; seq < num_seqs(); ++seq) {
      cu_seqlens_[seq + 1] = cu_seqlens_[seq] + c.q_lens[seq];
      for (int64_t i = 0; i < blocks_of(seq); ++i) {
        tables_[seq * max_blocks() + i] = --next_block;
        targets_[seq * max_blocks() + i] = 2 * next_block + 1;
      }
    }
  }

  int64_t num_seqs() const { return static_cast<int64_t>(c_.q_lens.size()); }
  int64_t num_tokens() const { return num_tokens_; }

  // slots, counts and starts, whose 32 bits are integers.
  Outputs select() const {
    Outputs out;
    for (const int64_t size : {num_tokens_ * c_.top_k, num_tokens_, num_tokens_ + 1})
      out.emplace_back(DType::kFloat32, size);
    run("select_keys", args(out));
    return out;
  }

  void check(const Outputs& out) const {
    for (int64_t token = 0; token <= num_tokens_; ++token) require(out[2].bits(token) == token, "starts");
    for (int64_t seq = 0; seq < num_seqs(); ++seq)
      for (int64_t i = 0; i < c_.q_lens[seq]; ++i) check_token(out, seq, i);
  }

  void check_bad_arguments() const {
    Outputs out = select();
    pagewick::SelectKeysArgs wrong = args(out);
    wrong.num_tokens -= 1;
    require(status_of("select_keys", wrong) == pagewick::kBadLengths, "fewer tokens than cu_seqlens_q says");
    wrong = args(out), wrong.max_blocks = 0;
    require(status_of("select_keys", wrong) == pagewick::kBadLengths, "no room for the context");
    const Array<int32_t> tables(std::vector<int32_t>(tables_.size(), static_cast<int32_t>(num_blocks())));
    wrong = args(out), wrong.block_tables = tables.data();
    require(status_of("select_keys", wrong) == pagewick::kBadBlockId, "a block outside the cache");
  }

 private:
  static int64_t total(const std::vector<int32_t>& lens) {
    int64_t sum = 0;
    for (const int32_t len : lens) sum += len;
    return sum;
  }

  int64_t q_stride() const { return c_.num_heads * c_.dim + 2; }
  int64_t blocks_of(int64_t seq) const { return (c_.context_lens[seq] + c_.block_size - 1) / c_.block_size; }
  int64_t num_blocks() const {
    int64_t sum = 0;
    for (int64_t seq = 0; seq < num_seqs(); ++seq) sum += blocks_of(seq);
    return sum;
  }
  int64_t max_blocks() const {
    int64_t most = 0;
    for (int64_t seq = 0; seq < num_seqs(); ++seq) most = std::max(most, blocks_of(seq));
    return most;
  }

  pagewick::SelectKeysArgs args(const Outputs& out) const {
    return {q_.data(),
            weights_.data(),
            cos_.data(),
            sin_.data(),
            cache_.data(),
            tables_.data(),
            targets_.data(),
            context_lens_.data(),
            cu_seqlens_.data(),
            static_cast<int32_t*>(out[0].data()),
            static_cast<int32_t*>(out[1].data()),
            static_cast<int32_t*>(out[2].data()),
            num_tokens_,
            num_seqs(),
            c_.num_heads,
            c_.dim,
            c_.rope_dim,
            q_stride(),
            c_.rope_dim / 2,
            num_blocks(),
            c_.block_size,
            max_blocks(),
            max_blocks(),
            max_blocks(),
            c_.top_k,
            1,
            0,
            q_.dtype(),
            cache_.dtype(),
            c_.is_interleaved,
            0};
  }

  // The score of each key that a token sees, and the sum of the magnitudes of its terms.
  std::vector<std::pair<double, double>> scores(int64_t seq, int64_t token, int64_t num_keys) const {
    std::vector<std::pair<double, double>> found(num_keys, {0.0, 0.0});
    for (int64_t head = 0; head < c_.num_heads; ++head) {
      std::vector<double> query(c_.dim);
      for (int64_t d = 0; d < c_.dim; ++d) query[d] = q_[token * q_stride() + head * c_.dim + d];
      rotate(query, c_.rope_dim, c_.is_interleaved, cos_, sin_, token);
      for (int64_t d = 0; d < c_.dim; ++d) query[d] = rounded(cache_.dtype(), query[d]);
      const double weight = weights_[token * c_.num_heads + head];
      for (int64_t key = 0; key < num_keys; ++key) {
        const int64_t block = tables_[seq * max_blocks() + key / c_.block_size];
        const int64_t row = (block * c_.block_size + key % c_.block_size) * c_.dim;
        double product = 0, magnitude = 0;
        for (int64_t d = 0; d < c_.dim; ++d) {
          const double term = query[d] * cache_[row + d];
          product += term, magnitude += std::abs(term);
        }
        found[key].first += weight * std::max(0.0, product);
        found[key].second += std::abs(weight) * magnitude;
      }
    }
    return found;
  }

  void check_token(const Outputs& out, int64_t seq, int64_t i) const {
    const int64_t token = cu_seqlens_[seq] + i, num_keys = c_.context_lens[seq] - c_.q_lens[seq] + i + 1;
    const int64_t count = std::min(num_keys, c_.top_k);
    require(out[1].bits(token) == count, "count");
    std::vector<bool> is_chosen(num_keys);
    int64_t last = -1;
    for (int64_t n = 0; n < c_.top_k; ++n) {
      const int64_t slot = out[0].bits(token * c_.top_k + n);
      if (n >= count) {
        require(slot == 0, "what follows the chosen tokens");
        continue;
      }
      int64_t key = last + 1;
      while (key < num_keys && targets_[seq * max_blocks() + key / c_.block_size] * c_.block_size +
                                       key % c_.block_size != slot) ++key;
      require(key < num_keys, "a slot of a token that is not visible, or that does not come later");
      is_chosen[key] = true, last = key;
    }
    if (count == num_keys) return;
    const auto found = scores(seq, token, num_keys);
    // Rounding to the type of the cache may change the last bit of a query.
    const double unit = cache_.dtype() == DType::kFloat32 ? kFloatUnit * (16 + c_.dim)
                        : cache_.dtype() == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
    double worst = INFINITY, best = -INFINITY;
    for (int64_t key = 0; key < num_keys; ++key) {
      const double error = unit * found[key].second;
      if (is_chosen[key]) worst = std::min(worst, found[key].first + error);
      else best = std::max(best, found[key].first - error);
    }
    require(worst >= best, "a key that was not chosen is better than one that was");
  }

  const Case& c_;
  const int64_t num_tokens_;
  const Tensor q_, cache_;
  Array<float> weights_, cos_, sin_;
  Array<int32_t> tables_, targets_;
  const Array<int32_t> context_lens_;
  Array<int32_t> cu_seqlens_;
};

// Among equal scores, those of earlier tokens are better; NaN is the worst.
void test_order() {
  begin_case("select_keys: equal scores and NaN");
  constexpr int64_t kKeys = 9, kTopK = 4;
  Tensor cache(DType::kFloat32, kKeys * 2);
  const double keys[kKeys] = {1, 2, NAN, 2, -1, 2, 1, 2, 0};
  for (int64_t i = 0; i < kKeys; ++i) cache.set(2 * i, keys[i]), cache.set(2 * i + 1, 0.0);
  const Array<float> q = {1.0f, 0.0f}, weights = {1.0f}, cos = {1.0f}, sin = {0.0f};
  const Array<int32_t> table = {0, 1, 2, 3, 4, 5, 6, 7, 8}, lens = {kKeys}, ends = {0, 1};
  const Array<int32_t> slots(kTopK), counts(1), starts(2);
  run("select_keys", pagewick::SelectKeysArgs{
                         q.data(), weights.data(), cos.data(), sin.data(), cache.data(), table.data(), table.data(),
                         lens.data(), ends.data(), slots.data(), counts.data(), starts.data(), 1, 1, 1, 2, 2, 2, 1,
                         kKeys, 1, kKeys, kKeys, kKeys, kTopK, 1, 0, DType::kFloat32, DType::kFloat32, 0, 0});
  for (int64_t i = 0; i < kTopK; ++i) require(slots[i] == 2 * i + 1, "the four 2s");
  cache.set(2 * 7, 1.0);
  run("select_keys", pagewick::SelectKeysArgs{
                         q.data(), weights.data(), cos.data(), sin.data(), cache.data(), table.data(), table.data(),
                         lens.data(), ends.data(), slots.data(), counts.data(), starts.data(), 1, 1, 1, 2, 2, 2, 1,
                         kKeys, 1, kKeys, kKeys, kKeys, kTopK, 1, 0, DType::kFloat32, DType::kFloat32, 0, 0});
  require(slots[0] == 0 && slots[1] == 1 && slots[2] == 3 && slots[3] == 5, "the first 1, and the three 2s");
}

}  // namespace

void test_index() {
  const Case cases[] = {
      {{1}, {1}, 1, 2, 2, 1, 1, false},
      {{3, 1, 5}, {3, 40, 33}, 3, 18, 8, 4, 7, false},
      {{40, 1, 1}, {61, 700, 20}, 5, 40, 16, 16, 20, true},
      {{1}, {1300}, 64, 128, 64, 32, 100, false},
  };
  for (const Case& c : cases)
    for (const DType dtype : kDTypes)
      for (const DType cache_dtype : kDTypes) {
        test_store(c, dtype, cache_dtype);
        if (dtype != cache_dtype && c.num_heads == 64) continue;
        begin_case("select_keys %s over %s, %d heads of %d, %d best", name_of(dtype), name_of(cache_dtype),
                   static_cast<int>(c.num_heads), static_cast<int>(c.dim), static_cast<int>(c.top_k));
        const Batch batch(c, dtype, cache_dtype);
        batch.check(on_all_threads([&] { return batch.select(); }));
        if (c.num_heads == 3) batch.check_bad_arguments();
      }
  test_order();
}
