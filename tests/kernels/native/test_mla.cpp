#include "mla.h"

#include <algorithm>
#include <cmath>

#include "testing.h"

using namespace testing;

namespace {

constexpr float kScale = 0.3f, kEps = 1e-3f;

struct Case {
  std::vector<int32_t> q_lens, context_lens;
  int64_t num_heads, latent_dim, rope_dim, block_size;
};

// A batch whose blocks are handed out from the last to the first. The cache is NaN where there is no token, and the
// unused part of a sequence's block table is -1.
class Batch {
 public:
  Batch(const Case& c, DType dtype, DType cache_dtype)
      : c_(c), cu_seqlens_(static_cast<int64_t>(c.q_lens.size()) + 1), context_lens_(c.context_lens) {
    cu_seqlens_[0] = 0;
    for (size_t seq = 0; seq < c.q_lens.size(); ++seq) {
      cu_seqlens_[seq + 1] = cu_seqlens_[seq] + c.q_lens[seq];
      num_blocks_ += blocks_of(seq), max_blocks_ = std::max(max_blocks_, blocks_of(seq));
    }
    // 2 elements between rows.
    table_stride_ = max_blocks_ + 2;
    tables_.emplace_back((num_seqs() - 1) * table_stride_ + max_blocks_);
    int32_t next_block = static_cast<int32_t>(num_blocks_);
    for (int64_t seq = 0; seq < num_seqs(); ++seq)
      for (int64_t i = 0; i < blocks_of(seq); ++i) tables_[0][seq * table_stride_ + i] = --next_block;
    tensors_.push_back(Tensor::random(dtype, num_tokens() * c.num_heads * c.latent_dim));
    tensors_.push_back(Tensor::random(dtype, num_tokens() * c.num_heads * c.rope_dim));
    tensors_.emplace_back(cache_dtype, num_blocks_ * c.block_size * size());
    for (int64_t seq = 0; seq < num_seqs(); ++seq)
      for (int64_t key = 0; key < c.context_lens[seq]; ++key)
        for (int64_t d = 0; d < size(); ++d) tensors_[2].set(slot(seq, key) * size() + d, random_number());
  }

  int64_t num_seqs() const { return static_cast<int64_t>(c_.q_lens.size()); }
  int64_t num_tokens() const { return cu_seqlens_[num_seqs()]; }

  pagewick::LatentAttentionArgs args(const Tensor& out) const {
    pagewick::LatentAttentionArgs args = {};
    args.q_latent = tensors_[0].data(), args.q_rope = tensors_[1].data(), args.cache = tensors_[2].data();
    args.out = out.data(), args.block_tables = tables_[0].data(), args.context_lens = context_lens_.data();
    args.cu_seqlens_q = cu_seqlens_.data(), args.num_tokens = num_tokens(), args.num_seqs = num_seqs();
    args.num_heads = c_.num_heads, args.latent_dim = c_.latent_dim, args.rope_dim = c_.rope_dim;
    args.num_blocks = num_blocks_, args.block_size = c_.block_size, args.max_blocks = max_blocks_;
    args.block_table_stride = table_stride_, args.softmax_scale = kScale, args.dtype = tensors_[0].dtype();
    args.cache_dtype = tensors_[2].dtype();
    return args;
  }

  Tensor attend() const {
    Tensor out(tensors_[0].dtype(), num_tokens() * row_size());
    run("latent_attention", args(out));
    return out;
  }

  void check(const Tensor& out) const {
    for (int64_t seq = 0; seq < num_seqs(); ++seq)
      for (int64_t i = 0; i < c_.q_lens[seq]; i += i < 4 ? 1 : 13)
        for (int64_t head = 0; head < c_.num_heads; ++head) check_row(out, seq, i, head);
  }

  // The last query of a sequence, computed alone.
  void check_alone(const Tensor& out, int64_t seq) const {
    const int64_t token = cu_seqlens_[seq + 1] - 1, element = element_size(out.dtype());
    Tensor alone(out.dtype(), row_size());
    const Array<int32_t> cu_seqlens = {0, 1};
    const Array<int32_t> context_lens = {context_lens_[seq]};
    pagewick::LatentAttentionArgs single = args(alone);
    single.q_latent = static_cast<char*>(tensors_[0].data()) + token * row_size() * element;
    single.q_rope = static_cast<char*>(tensors_[1].data()) + token * c_.num_heads * c_.rope_dim * element;
    single.block_tables += seq * table_stride_, single.context_lens = context_lens.data();
    single.cu_seqlens_q = cu_seqlens.data(), single.num_tokens = 1, single.num_seqs = 1;
    run("latent_attention", single);
    for (int64_t i = 0; i < row_size(); ++i)
      require(alone.bits(i) == out.bits(token * row_size() + i), "a query alone has other bits");
  }

  void check_bad_arguments() const {
    const Tensor out(tensors_[0].dtype(), (num_tokens() + 1) * row_size());
    pagewick::LatentAttentionArgs wrong = args(out);
    wrong.num_tokens += 1;
    require(status_of("latent_attention", wrong) == pagewick::kBadLengths, "tokens without a sequence");
    wrong = args(out), wrong.max_blocks = (context_lens_[0] - 1) / c_.block_size;
    require(status_of("latent_attention", wrong) == pagewick::kBadLengths, "a context longer than its block table");
    Array<int32_t> lens(c_.context_lens);
    lens[0] = c_.q_lens[0] - 1;
    wrong = args(out), wrong.context_lens = lens.data();
    require(status_of("latent_attention", wrong) == pagewick::kBadLengths, "a context shorter than its queries");
    int32_t& block_id = tables_[0][blocks_of(0) - 1];
    const int32_t right = block_id;
    for (const int32_t bad : {-1, static_cast<int32_t>(num_blocks_), 1 << 30}) {
      block_id = bad;
      require(status_of("latent_attention", args(out)) == pagewick::kBadBlockId, "a block outside the cache");
    }
    block_id = right;
  }

 private:
  int64_t size() const { return c_.latent_dim + c_.rope_dim; }
  int64_t row_size() const { return c_.num_heads * c_.latent_dim; }
  int64_t blocks_of(int64_t seq) const { return (c_.context_lens[seq] + c_.block_size - 1) / c_.block_size; }
  int64_t slot(int64_t seq, int64_t key) const {
    return tables_[0][seq * table_stride_ + key / c_.block_size] * c_.block_size + key % c_.block_size;
  }

  // Queries are rounded to bf16 if the cache is bf16.
  double query(int64_t row, int64_t d) const {
    const double q = d < c_.latent_dim ? tensors_[0][row * c_.latent_dim + d]
                                       : tensors_[1][row * c_.rope_dim + d - c_.latent_dim];
    return tensors_[2].dtype() == DType::kBFloat16 ? rounded(DType::kBFloat16, q) : q;
  }

  void check_row(const Tensor& out, int64_t seq, int64_t index, int64_t head) const {
    const int64_t position = c_.context_lens[seq] - c_.q_lens[seq] + index;
    const int64_t row = (cu_seqlens_[seq] + index) * c_.num_heads + head;
    std::vector<double> sums(c_.latent_dim), magnitudes(c_.latent_dim);
    double total = 0;
    for (int64_t key = 0; key <= position; ++key) {
      const int64_t first = slot(seq, key) * size();
      double score = 0;
      for (int64_t d = 0; d < size(); ++d) score += query(row, d) * tensors_[2][first + d];
      const double weight = std::exp(score * static_cast<double>(kScale));
      total += weight;
      for (int64_t d = 0; d < c_.latent_dim; ++d) {
        const double value = tensors_[2][first + d];
        sums[d] += weight * value, magnitudes[d] += weight * std::abs(value);
      }
    }
    // With bf16 latents, probabilities are rounded to bf16, also in their sum; else everything is float32.
    const double relative = tensors_[2].dtype() == DType::kBFloat16 ? 0x1p-8 : 1e-5;
    for (int64_t d = 0; d < c_.latent_dim; ++d)
      require_near(out, row * c_.latent_dim + d, sums[d] / total, relative * magnitudes[d] / total, "output");
  }

  Case c_;
  Array<int32_t> cu_seqlens_, context_lens_;
  int64_t num_blocks_ = 0, max_blocks_ = 1, table_stride_ = 0;
  std::vector<Array<int32_t>> tables_;
  std::vector<Tensor> tensors_;  // the two parts of the queries, cache
};

void test_case(const Case& c, DType dtype, DType cache_dtype) {
  begin_case("latent_attention %s, cache %s, %d sequences from %d of %d on, %d heads, %d + %d elements, blocks of %d",
             name_of(dtype), name_of(cache_dtype), static_cast<int>(c.q_lens.size()), c.q_lens[0], c.context_lens[0],
             static_cast<int>(c.num_heads), static_cast<int>(c.latent_dim), static_cast<int>(c.rope_dim),
             static_cast<int>(c.block_size));
  const Batch batch(c, dtype, cache_dtype);
  const Tensor out = tensor_on_all_threads([&] { return batch.attend(); });
  batch.check(out);
  for (int64_t seq = 0; seq < batch.num_seqs(); ++seq)
    if (c.q_lens[seq] > 0) batch.check_alone(out, seq);
  batch.check_bad_arguments();
}

struct StoreCase {
  int64_t num_tokens, num_heads, nope_dim, latent_dim, rope_dim, block_size;
  bool is_interleaved;
};

class Store {
 public:
  Store(const StoreCase& c, DType dtype, DType cache_dtype)
      : c_(c),
        dtype_(dtype),
        cache_dtype_(cache_dtype),
        num_blocks_((c.num_tokens + c.block_size) / c.block_size + 1),
        q_stride_(c.num_heads * (c.nope_dim + c.rope_dim) + 3),
        latent_stride_(size() + 1),
        angle_stride_(c.rope_dim / 2 + 2),
        q_(Tensor::random(dtype, c.num_tokens * q_stride_ - 3)),
        latents_(Tensor::random(dtype, c.num_tokens * latent_stride_ - 1, 2.0)),
        norm_(Tensor::random(dtype, c.latent_dim)),
        cos_(Tensor::random(DType::kFloat32, c.num_tokens * angle_stride_ - 2)),
        sin_(Tensor::random(DType::kFloat32, c.num_tokens * angle_stride_ - 2)),
        slots_(c.num_tokens) {
    // From the last slot down; every fourth token is not stored.
    for (int64_t token = 0; token < c.num_tokens; ++token)
      slots_[token] = token % 4 == 1 ? -1 : num_blocks_ * c.block_size - 1 - token;
  }

  // The rotated queries and the cache.
  int32_t compute(Outputs& outputs) const {
    outputs.emplace_back(dtype_, c_.num_tokens * c_.num_heads * c_.rope_dim);
    outputs.emplace_back(cache_dtype_, num_blocks_ * c_.block_size * size());
    return status_of("store_latent", pagewick::StoreLatentArgs{
        q_.data(), latents_.data(), norm_.data(), cos_.floats(), sin_.floats(), slots_.data(), outputs[0].data(),
        outputs[1].data(), c_.num_tokens, c_.num_heads, c_.nope_dim, c_.latent_dim, c_.rope_dim, q_stride_,
        latent_stride_, angle_stride_, num_blocks_, c_.block_size, kEps, dtype_, cache_dtype_, c_.is_interleaved, 1});
  }

  void check(const Outputs& outputs) const {
    std::vector<bool> is_stored(outputs[1].size());
    for (int64_t token = 0; token < c_.num_tokens; ++token) {
      for (int64_t head = 0; head < c_.num_heads; ++head)
        for (int64_t d = 0; d < c_.rope_dim; ++d) {
          const int64_t first = token * q_stride_ + head * (c_.nope_dim + c_.rope_dim) + c_.nope_dim;
          const Number number = turned(q_, first, token, d);
          require_near(outputs[0], (token * c_.num_heads + head) * c_.rope_dim + d, number.value, number.error, "query");
        }
      if (slots_[token] < 0) continue;
      for (int64_t d = 0; d < size(); ++d) {
        const int64_t i = slots_[token] * size() + d, first = token * latent_stride_;
        is_stored[i] = true;
        const Number number = d < c_.latent_dim ? normed(token, d)
                                                : turned(latents_, first + c_.latent_dim, token, d - c_.latent_dim);
        // The result is rounded to the type of the latents first.
        const double low = rounded(dtype_, number.value - number.error), high = rounded(dtype_, number.value + number.error);
        require_near(outputs[1], i, (low + high) / 2, (high - low) / 2, "latent");
      }
    }
    for (int64_t i = 0; i < outputs[1].size(); ++i)
      require(is_stored[i] || outputs[1].is_untouched(i), "a slot of nobody was written to");
  }

  void check_bad_slot() const {
    const int64_t slot = slots_[0];
    slots_[0] = num_blocks_ * c_.block_size;
    Outputs outputs;
    require(compute(outputs) == pagewick::kBadBlockId, "a slot outside the cache");
    for (int64_t i = 0; i < outputs[1].size(); ++i) require(outputs[1].is_untouched(i), "written in spite of it");
    slots_[0] = slot;
  }

 private:
  struct Number {
    double value, error;
  };

  int64_t size() const { return c_.latent_dim + c_.rope_dim; }

  Number normed(int64_t token, int64_t d) const {
    double squares = 0;
    for (int64_t i = 0; i < c_.latent_dim; ++i) {
      const double x = latents_[token * latent_stride_ + i];
      squares += x * x;
    }
    const double scale = 1.0 / std::sqrt(squares / c_.latent_dim + static_cast<double>(kEps));
    const double value = latents_[token * latent_stride_ + d] * scale * norm_[d];
    return {value, (8 + c_.latent_dim / 4) * kFloatUnit * std::abs(value)};
  }

  // Element d of the row that begins at element `first` of a tensor.
  Number turned(const Tensor& tensor, int64_t first, int64_t token, int64_t d) const {
    const int64_t half = c_.rope_dim / 2;
    const bool is_second = c_.is_interleaved ? d % 2 == 1 : d >= half;
    const int64_t pair = c_.is_interleaved ? d / 2 : d % half;
    const int64_t other = c_.is_interleaved ? d ^ 1 : is_second ? d - half : d + half;
    const double straight = tensor[first + d] * cos_[token * angle_stride_ + pair];
    const double across = tensor[first + other] * sin_[token * angle_stride_ + pair];
    return {is_second ? straight + across : straight - across,
            3 * kFloatUnit * (std::abs(straight) + std::abs(across))};
  }

  StoreCase c_;
  DType dtype_, cache_dtype_;
  int64_t num_blocks_, q_stride_, latent_stride_, angle_stride_;
  Tensor q_, latents_, norm_, cos_, sin_;
  Array<int64_t> slots_;
};

void test_store(const StoreCase& c, DType dtype, DType cache_dtype) {
  begin_case("store_latent %s, cache %s, %d tokens, %d heads of %d, %d + %d elements, blocks of %d, interleaved %d",
             name_of(dtype), name_of(cache_dtype), static_cast<int>(c.num_tokens), static_cast<int>(c.num_heads),
             static_cast<int>(c.nope_dim), static_cast<int>(c.latent_dim), static_cast<int>(c.rope_dim),
             static_cast<int>(c.block_size), c.is_interleaved);
  const Store store(c, dtype, cache_dtype);
  const Outputs outputs = on_all_threads([&] {
    Outputs computed;
    require(store.compute(computed) == pagewick::kOk, "status");
    return computed;
  });
  store.check(outputs);
  store.check_bad_slot();
}

// Fills the scratch memory of attention with NaN.
void poison_scratch() {
  begin_case("latent_attention of NaN");
  const Batch batch({{64}, {64}, 2, 256, 64, 64}, DType::kFloat32, DType::kFloat32);
  const Tensor nan(DType::kFloat32, 128 * 256);
  const Tensor out(DType::kFloat32, 128 * 256);
  pagewick::LatentAttentionArgs args = batch.args(out);
  args.q_latent = nan.data();
  run("latent_attention", args);
  for (int64_t i = 0; i < out.size(); ++i) require(std::isnan(out[i]), "NaN");
}

}  // namespace

void test_mla() {
  poison_scratch();
  for (const DType cache_dtype : kDTypes) {
    for (const DType dtype : kDTypes) {
      test_store({1, 1, 1, 1, 2, 1, true}, dtype, cache_dtype);
      test_store({19, 3, 5, 21, 6, 16, false}, dtype, cache_dtype);
      test_store({37, 2, 16, 130, 34, 6, true}, dtype, cache_dtype);
      test_case({{1, 0, 3}, {1, 0, 65}, 2, 16, 8, 32}, dtype, cache_dtype);
    }
    const DType dtype = cache_dtype;
    test_case({{1}, {1}, 1, 1, 1, 1}, dtype, cache_dtype);
    test_case({{50, 1}, {70, 1100}, 3, 17, 6, 5}, dtype, cache_dtype);
    test_case({{2, 1}, {1025, 256}, 20, 33, 2, 64}, dtype, cache_dtype);
    test_case({{23, 1}, {90, 2060}, 2, 24, 8, 32}, dtype, cache_dtype);
  }
}
