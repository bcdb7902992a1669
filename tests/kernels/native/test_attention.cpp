#include "attention.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "packed.h"
#include "testing.h"

using namespace testing;

namespace {

struct Case {
  std::vector<int32_t> q_lens, context_lens;
  int64_t num_heads, num_kv_heads, head_dim, block_size, window;
  float soft_cap;
  bool has_sinks;
  int32_t image = 0;  // images of this many tokens follow each other, and their tokens see each other; 0: none do
  bool is_chunked = false;
};

constexpr float kScale = 0.3f;

// A batch whose blocks are handed out from the last to the first. The cache is NaN where there is no key, and the
// unused part of a sequence's block table is -1.
class Batch {
 public:
  Batch(const Case& c, DType q_dtype, DType kv_dtype)
      : c_(c),
        packed_{kv_dtype, c.num_kv_heads, c.head_dim, c.block_size},
        q_stride_(c.num_heads * c.head_dim + 5),
        cu_seqlens_(static_cast<int64_t>(c.q_lens.size()) + 1),
        context_lens_(c.context_lens),
        sinks_(Tensor::random(DType::kFloat32, c.num_heads)),
        num_blocks_(0),
        max_blocks_(1),
        key_ends_(c.image == 0 ? 0 : std::accumulate(c.q_lens.begin(), c.q_lens.end(), int64_t{0})) {
    cu_seqlens_[0] = 0;
    for (size_t seq = 0; seq < c.q_lens.size(); ++seq) {
      cu_seqlens_[seq + 1] = cu_seqlens_[seq] + c.q_lens[seq];
      num_blocks_ += blocks_of(seq), max_blocks_ = std::max(max_blocks_, blocks_of(seq));
      for (int32_t i = 0; i < c.q_lens[seq] && c.image > 0; ++i)
        key_ends_[cu_seqlens_[seq] + i] = static_cast<int32_t>(end_of(seq, i));
    }
    // 2 elements between rows.
    table_stride_ = max_blocks_ + 2;
    tables_.emplace_back((num_seqs() - 1) * table_stride_ + max_blocks_);
    int32_t next_block = static_cast<int32_t>(num_blocks_);
    for (int64_t seq = 0; seq < num_seqs(); ++seq)
      for (int64_t i = 0; i < blocks_of(seq); ++i) tables_[0][seq * table_stride_ + i] = --next_block;
    tensors_.push_back(Tensor::random(q_dtype, num_tokens() * q_stride_ - 5));
    tensors_.emplace_back(kv_dtype, packed_.size(num_blocks_));
    fill_cache();
  }

  int64_t num_seqs() const { return static_cast<int64_t>(c_.q_lens.size()); }
  int64_t num_tokens() const { return cu_seqlens_[num_seqs()]; }

  pagewick::AttentionArgs args(const Tensor& out) const {
    pagewick::AttentionArgs args = {};
    args.q = tensors_[0].data(), args.kv_cache = tensors_[1].data(), args.out = out.data();
    args.block_tables = tables_[0].data(), args.context_lens = context_lens_.data();
    args.cu_seqlens_q = cu_seqlens_.data(), args.sinks = c_.has_sinks ? sinks_.floats() : nullptr;
    args.key_ends = c_.image == 0 ? nullptr : key_ends_.data();
    args.num_tokens = num_tokens(), args.num_seqs = num_seqs(), args.num_heads = c_.num_heads;
    args.num_kv_heads = c_.num_kv_heads, args.head_dim = c_.head_dim, args.num_blocks = num_blocks_;
    args.block_size = c_.block_size, args.max_blocks = max_blocks_, args.block_table_stride = table_stride_;
    args.q_stride = q_stride_, args.sliding_window = c_.window, args.is_chunked = c_.is_chunked, args.softmax_scale = kScale;
    args.logit_soft_cap = c_.soft_cap, args.q_dtype = tensors_[0].dtype(), args.kv_dtype = tensors_[1].dtype();
    return args;
  }

  Tensor attend() const {
    Tensor out(tensors_[0].dtype(), num_tokens() * row_size());
    run("paged_attention", args(out));
    return out;
  }

  void check(const Tensor& out) const {
    for (int64_t seq = 0; seq < num_seqs(); ++seq)
      for (int64_t i = 0; i < c_.q_lens[seq]; i += i < 4 ? 1 : 13)
        for (int64_t head = 0; head < c_.num_heads; ++head) check_row(out, seq, i, head);
  }

  // The last query of a sequence, computed alone.
  void check_alone(const Tensor& out, int64_t seq) const {
    const int64_t token = cu_seqlens_[seq + 1] - 1;
    Tensor alone(out.dtype(), row_size());
    const Array<int32_t> cu_seqlens = {0, 1};
    const Array<int32_t> context_lens = {context_lens_[seq]};
    pagewick::AttentionArgs single = args(alone);
    single.q = static_cast<char*>(tensors_[0].data()) + token * q_stride_ * element_size(out.dtype());
    single.block_tables += seq * table_stride_, single.context_lens = context_lens.data();
    single.cu_seqlens_q = cu_seqlens.data(), single.num_tokens = 1, single.num_seqs = 1;
    if (single.key_ends != nullptr) single.key_ends += token;
    run("paged_attention", single);
    for (int64_t i = 0; i < row_size(); ++i)
      require(alone.bits(i) == out.bits(token * row_size() + i), "a query alone has other bits");
  }

  void check_bad_arguments() const {
    const Tensor out(tensors_[0].dtype(), (num_tokens() + 1) * row_size());
    pagewick::AttentionArgs wrong = args(out);
    wrong.num_tokens += 1;
    require(status_of("paged_attention", wrong) == pagewick::kBadLengths, "tokens without a sequence");
    wrong = args(out), wrong.max_blocks = (context_lens_[0] - 1) / c_.block_size;
    require(status_of("paged_attention", wrong) == pagewick::kBadLengths, "a context longer than its block table");
    Array<int32_t> lens(c_.context_lens);
    lens[0] = c_.q_lens[0] - 1;
    wrong = args(out), wrong.context_lens = lens.data();
    require(status_of("paged_attention", wrong) == pagewick::kBadLengths, "a context shorter than its queries");
    for (const int32_t bad : {0, c_.context_lens[0] + 1}) {
      Array<int32_t> ends(std::vector<int32_t>(static_cast<size_t>(num_tokens()), bad));
      wrong = args(out), wrong.key_ends = ends.data();
      require(status_of("paged_attention", wrong) == pagewick::kBadLengths, "tokens that see too few or too many keys");
    }
    // The last key of the first sequence is seen by its last query, whatever the window.
    int32_t& block_id = tables_[0][blocks_of(0) - 1];
    const int32_t right = block_id;
    for (const int32_t bad : {-1, static_cast<int32_t>(num_blocks_), 1 << 30}) {
      block_id = bad;
      require(status_of("paged_attention", args(out)) == pagewick::kBadBlockId, "a block outside the cache");
    }
    block_id = right;
  }

 private:
  int64_t row_size() const { return c_.num_heads * c_.head_dim; }
  int64_t blocks_of(int64_t seq) const { return (c_.context_lens[seq] + c_.block_size - 1) / c_.block_size; }
  // The number of the first keys of its sequence that a query sees.
  int64_t end_of(int64_t seq, int64_t query) const {
    const int64_t position = c_.context_lens[seq] - c_.q_lens[seq] + query;
    if (c_.image == 0) return position + 1;
    return std::min<int64_t>(c_.context_lens[seq], (position / c_.image + 1) * c_.image);
  }
  int64_t slot(int64_t seq, int64_t key) const {
    return tables_[0][seq * table_stride_ + key / c_.block_size] * c_.block_size + key % c_.block_size;
  }

  void fill_cache() {
    for (int64_t seq = 0; seq < num_seqs(); ++seq)
      for (int64_t key = 0; key < c_.context_lens[seq]; ++key)
        for (int64_t head = 0; head < c_.num_kv_heads; ++head)
          for (int64_t d = 0; d < packed_.dim(); ++d) {
            const bool is_padding = d >= c_.head_dim;
            tensors_[1].set(packed_.key(slot(seq, key), head, d), is_padding ? 0 : random_number());
            tensors_[1].set(packed_.value(slot(seq, key), head, d), is_padding ? 0 : random_number());
          }
  }

  double score(int64_t token, int64_t head, int64_t key_slot) const {
    const bool is_bfloat16 = tensors_[1].dtype() == DType::kBFloat16;
    double sum = 0;
    for (int64_t d = 0; d < c_.head_dim; ++d) {
      const double q = tensors_[0][token * q_stride_ + head * c_.head_dim + d];
      sum += (is_bfloat16 ? rounded(DType::kBFloat16, q) : q) *
             tensors_[1][packed_.key(key_slot, head / (c_.num_heads / c_.num_kv_heads), d)];
    }
    sum *= static_cast<double>(kScale);
    return c_.soft_cap == 0.0f ? sum : std::tanh(sum / c_.soft_cap) * c_.soft_cap;
  }

  void check_row(const Tensor& out, int64_t seq, int64_t query, int64_t head) const {
    const int64_t position = c_.context_lens[seq] - c_.q_lens[seq] + query, token = cu_seqlens_[seq] + query;
    int64_t first = c_.window ? std::max<int64_t>(0, position - c_.window + 1) : 0;
    if (c_.is_chunked) first = position / c_.window * c_.window;
    std::vector<double> sums(c_.head_dim), magnitudes(c_.head_dim);
    double total = c_.has_sinks ? std::exp(sinks_[head]) : 0.0;
    for (int64_t key = first; key < end_of(seq, query); ++key) {
      const double weight = std::exp(score(token, head, slot(seq, key)));
      total += weight;
      for (int64_t d = 0; d < c_.head_dim; ++d) {
        const double value = tensors_[1][packed_.value(slot(seq, key), head / (c_.num_heads / c_.num_kv_heads), d)];
        sums[d] += weight * value, magnitudes[d] += weight * std::abs(value);
      }
    }
    // With bf16 values, probabilities are rounded to bf16, also in their sum; else everything is float32.
    const double relative = tensors_[1].dtype() == DType::kBFloat16 ? 0x1p-8 : 1e-5;
    for (int64_t d = 0; d < c_.head_dim; ++d)
      require_near(out, token * row_size() + head * c_.head_dim + d, sums[d] / total,
                   relative * magnitudes[d] / total, "output");
  }

  Case c_;
  Packed packed_;
  int64_t q_stride_;
  Array<int32_t> cu_seqlens_, context_lens_;
  Tensor sinks_;
  int64_t num_blocks_, max_blocks_, table_stride_ = 0;
  Array<int32_t> key_ends_;
  std::vector<Array<int32_t>> tables_;
  std::vector<Tensor> tensors_;  // q, cache
};

void test_case(const Case& c, DType q_dtype, DType kv_dtype) {
  begin_case("paged_attention %s, cache %s, %d sequences from %d of %d on, heads %d and %d of %d, blocks of %d, window %d",
             name_of(q_dtype), name_of(kv_dtype), static_cast<int>(c.q_lens.size()), c.q_lens[0], c.context_lens[0],
             static_cast<int>(c.num_heads), static_cast<int>(c.num_kv_heads), static_cast<int>(c.head_dim),
             static_cast<int>(c.block_size), static_cast<int>(c.window));
  const Batch batch(c, q_dtype, kv_dtype);
  const Tensor out = tensor_on_all_threads([&] { return batch.attend(); });
  batch.check(out);
  for (int64_t seq = 0; seq < batch.num_seqs(); ++seq)
    if (c.q_lens[seq] > 0) batch.check_alone(out, seq);
  batch.check_bad_arguments();
}

void test_store(DType dtype, DType kv_dtype, int64_t num_tokens, int64_t num_heads, int64_t head_dim, int64_t block_size) {
  begin_case("store_kv %s, cache %s, %d tokens, %d heads of %d, blocks of %d", name_of(dtype), name_of(kv_dtype),
             static_cast<int>(num_tokens), static_cast<int>(num_heads), static_cast<int>(head_dim),
             static_cast<int>(block_size));
  const Packed packed = {kv_dtype, num_heads, head_dim, block_size};
  const int64_t num_blocks = (num_tokens + block_size) / block_size + 1, size = num_heads * head_dim;
  const int64_t k_stride = size + 3, v_stride = size + 4;
  const Tensor k = Tensor::random(dtype, num_tokens * k_stride - 3), v = Tensor::random(dtype, num_tokens * v_stride - 4);
  Array<int64_t> slots(num_tokens);
  for (int64_t i = 0; i < num_tokens; ++i) slots[i] = i % 4 == 1 ? -1 : num_blocks * block_size - 1 - i;
  int32_t status = 0;
  const auto compute = [&] {
    Tensor cache(kv_dtype, packed.size(num_blocks));
    status = status_of("store_kv", pagewick::StoreKvArgs{k.data(), v.data(), slots.data(), cache.data(), num_tokens,
                                                         num_heads, head_dim, num_blocks, block_size, k_stride,
                                                         v_stride, 0.0f, 0.0f, dtype, kv_dtype});
    return cache;
  };
  const Tensor cache = tensor_on_all_threads(compute);
  require(status == pagewick::kOk, "status");
  Tensor expected(kv_dtype, cache.size());
  for (int64_t token = 0; token < num_tokens; ++token)
    for (int64_t head = 0; head < num_heads && slots[token] >= 0; ++head)
      for (int64_t d = 0; d < packed.dim(); ++d) {
        const bool is_padding = d >= head_dim;
        const int64_t i = head * head_dim + d;
        expected.set(packed.key(slots[token], head, d), is_padding ? 0.0 : k[token * k_stride + i]);
        expected.set(packed.value(slots[token], head, d), is_padding ? 0.0 : v[token * v_stride + i]);
      }
  require(cache == expected, "stored keys and values");
  slots[num_tokens - 1] = num_blocks * block_size;
  const Tensor untouched = compute();
  require(status == pagewick::kBadBlockId, "a slot outside the cache");
  for (int64_t i = 0; i < untouched.size(); ++i) require(untouched.is_untouched(i), "written in spite of it");
}

// Fills the scratch memory of attention with NaN.
void poison_scratch() {
  begin_case("paged_attention of NaN");
  const Case c = {{64}, {64}, 1, 1, 256, 64, 0, 0.0f, false};
  const Batch batch(c, DType::kFloat32, DType::kFloat32);
  const Tensor nan(DType::kFloat32, 64 * 256 + 5 * 64);
  Tensor out(DType::kFloat32, 64 * 256);
  pagewick::AttentionArgs args = batch.args(out);
  args.q = nan.data();
  run("paged_attention", args);
  for (int64_t i = 0; i < out.size(); ++i) require(std::isnan(out[i]), "NaN");
}

}  // namespace

void test_attention() {
  poison_scratch();
  for (const DType kv_dtype : kDTypes) {
    for (const DType dtype : kDTypes) {
      test_store(dtype, kv_dtype, 1, 1, 8, 2);
      test_store(dtype, kv_dtype, 19, 3, 24, 16);
      test_store(dtype, kv_dtype, 37, 2, 130, 6);
      test_case({{1, 0, 3}, {1, 0, 65}, 2, 1, 16, 32, 0, 0.0f, false}, dtype, kv_dtype);
    }
    const DType dtype = kv_dtype;
    test_case({{70, 1}, {70, 1100}, 3, 1, 24, 6, 0, 0.0f, true}, dtype, kv_dtype);
    test_case({{5, 2}, {1030, 64}, 2, 2, 40, 64, 33, 0.0f, false}, dtype, kv_dtype);
    test_case({{1}, {3100}, 2, 1, 16, 16, 0, 5.0f, false}, dtype, kv_dtype);
    test_case({{23, 1}, {90, 2060}, 4, 2, 64, 32, 1030, 3.0f, true}, dtype, kv_dtype);
    test_case({{40}, {41}, 8, 2, 100, 16, 0, 0.0f, false}, dtype, kv_dtype);
    test_case({{2, 1}, {66, 65}, 1, 1, 256, 48, 1, 0.0f, false}, dtype, kv_dtype);
    test_case({{70, 9}, {75, 1100}, 3, 1, 24, 6, 0, 0.0f, true, 25}, dtype, kv_dtype);
    test_case({{90, 40}, {95, 1060}, 4, 2, 64, 32, 30, 3.0f, false, 130}, dtype, kv_dtype);
    test_case({{70, 2, 1}, {75, 1101, 1025}, 3, 1, 24, 6, 50, 0.0f, true, 0, true}, dtype, kv_dtype);
  }
}
