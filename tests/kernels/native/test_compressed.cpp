#include <algorithm>
#include <cmath>

#include "compress.h"
#include "testing.h"
#include "window.h"

using namespace testing;

namespace {

constexpr float kScale = 0.3f, kEps = 1e-3f;

struct Case {
  std::vector<int32_t> q_lens, context_lens;
  int64_t num_heads, dim, block_size, ratio, window, top_k;  // top_k: 0: all entries are seen
};

// The tokens of sequences in blocks of which each has block_size tokens, handed out from the last to the first. The
// rows of two caches are found by it: those of tokens, and those of entries.
class Places {
 public:
  explicit Places(const Case& c)
      : c_(c), context_lens_(c.context_lens), cu_seqlens_(static_cast<int64_t>(c.q_lens.size()) + 1) {
    cu_seqlens_[0] = 0;
    for (size_t seq = 0; seq < c.q_lens.size(); ++seq) {
      cu_seqlens_[seq + 1] = cu_seqlens_[seq] + c.q_lens[seq];
      const int64_t blocks = (c.context_lens[seq] + c.block_size - 1) / c.block_size;
      num_blocks_ += blocks, max_blocks_ = std::max(max_blocks_, blocks);
    }
    tables_.emplace_back(num_seqs() * max_blocks_);
    int32_t next_block = static_cast<int32_t>(num_blocks_);
    for (int64_t seq = 0; seq < num_seqs(); ++seq)
      for (int64_t i = 0; i * c.block_size < c.context_lens[seq]; ++i) tables_[0][seq * max_blocks_ + i] = --next_block;
  }

  int64_t num_seqs() const { return static_cast<int64_t>(c_.q_lens.size()); }
  int64_t num_tokens() const { return cu_seqlens_[num_seqs()]; }
  int64_t num_slots() const { return num_blocks_ * c_.block_size; }
  int64_t position(int64_t seq, int64_t token) const {
    return c_.context_lens[seq] - c_.q_lens[seq] + token - cu_seqlens_[seq];
  }
  int64_t slot(int64_t seq, int64_t position) const {
    return tables_[0][seq * max_blocks_ + position / c_.block_size] * c_.block_size + position % c_.block_size;
  }

  // Fills what all structs of arguments have.
  template <class Args>
  void fill_blocks(Args& args) const {
    args.block_tables = tables_[0].data(), args.context_lens = context_lens_.data();
    args.cu_seqlens_q = cu_seqlens_.data(), args.num_tokens = num_tokens(), args.num_seqs = num_seqs();
    args.dim = c_.dim, args.ratio = c_.ratio, args.num_blocks = num_blocks_, args.block_size = c_.block_size;
    args.max_blocks = max_blocks_, args.block_table_stride = max_blocks_;
  }
  // The same, and what args have of entries.
  template <class Args>
  void fill(Args& args) const {
    fill_blocks(args);
    args.num_entry_blocks = num_blocks_;
    args.entry_block_size = c_.block_size / c_.ratio;
  }

  template <class Body>
  void for_tokens(const Body& body) const {
    for (int64_t seq = 0; seq < num_seqs(); ++seq)
      for (int64_t token = cu_seqlens_[seq]; token < cu_seqlens_[seq + 1]; ++token) body(seq, token);
  }

 private:
  const Case& c_;
  const Array<int32_t> context_lens_;
  const Array<int32_t> cu_seqlens_;
  int64_t num_blocks_ = 0, max_blocks_ = 1;
  std::vector<Array<int32_t>> tables_;

 public:
  int64_t max_blocks() const { return max_blocks_; }
  int64_t num_blocks() const { return num_blocks_; }
  const int32_t* tables() const { return tables_[0].data(); }
};

void test_attention(const Case& c, DType dtype, DType cache_dtype) {
  begin_case("window_attention %s over %s, %d heads of %d, window of %d, %d best entries", name_of(dtype),
             name_of(cache_dtype), static_cast<int>(c.num_heads), static_cast<int>(c.dim), static_cast<int>(c.window),
             static_cast<int>(c.top_k));
  const Places places(c);
  const int64_t row = c.num_heads * c.dim, num_tokens = places.num_tokens();
  const Tensor q = Tensor::random(dtype, num_tokens * row);
  const Tensor keys = Tensor::random(cache_dtype, places.num_slots() * c.dim);
  const Tensor entries = Tensor::random(cache_dtype, places.num_slots() / c.ratio * c.dim);
  Array<float> sinks(c.num_heads);
  for (int64_t head = 0; head < c.num_heads; ++head) sinks[head] = static_cast<float>(random_number());
  Array<int32_t> slots(num_tokens * std::max<int64_t>(1, c.top_k)), counts(num_tokens);
  places.for_tokens([&](int64_t seq, int64_t token) {
    counts[token] = static_cast<int32_t>(std::min((places.position(seq, token) + 1) / c.ratio, c.top_k));
    for (int64_t i = 0; i < counts[token]; ++i)
      slots[token * c.top_k + i] = static_cast<int32_t>(places.slot(seq, i * c.ratio) / c.ratio);
  });
  pagewick::WindowAttentionArgs args = {};
  places.fill(args);
  args.q = q.data(), args.cache = keys.data(), args.entries = entries.data(), args.sinks = sinks.data();
  args.entry_tables = places.tables(), args.entry_table_stride = args.max_entry_blocks = places.max_blocks();
  args.num_heads = c.num_heads, args.window = c.window, args.top_k = c.top_k, args.softmax_scale = kScale;
  args.dtype = dtype, args.cache_dtype = cache_dtype;
  if (c.top_k > 0) args.slots = slots.data(), args.counts = counts.data();
  const Tensor out = tensor_on_all_threads([&] {
    Tensor result(dtype, num_tokens * row);
    args.out = result.data();
    run("window_attention", args);
    return result;
  });
  places.for_tokens([&](int64_t seq, int64_t token) {
    const int64_t position = places.position(seq, token), total = (position + 1) / c.ratio;
    for (int64_t head = 0; head < c.num_heads; head += 3) {
      std::vector<double> sums(c.dim), magnitudes(c.dim);
      double weights = std::exp(double{sinks[head]});
      const auto add = [&](const Tensor& cache, int64_t slot) {
        double score = 0;
        for (int64_t d = 0; d < c.dim; ++d) {
          const double number = q[token * row + head * c.dim + d];
          const bool is_rounded = cache_dtype == DType::kBFloat16;
          score += (is_rounded ? rounded(DType::kBFloat16, number) : number) * cache[slot * c.dim + d];
        }
        const double weight = std::exp(score * double{kScale});
        weights += weight;
        for (int64_t d = 0; d < c.dim; ++d) {
          sums[d] += weight * cache[slot * c.dim + d];
          magnitudes[d] += weight * std::abs(cache[slot * c.dim + d]);
        }
      };
      for (int64_t key = std::max<int64_t>(0, position + 1 - c.window); key <= position; ++key)
        add(keys, places.slot(seq, key));
      for (int64_t i = 0; i < (c.top_k > 0 ? counts[token] : total); ++i)
        add(entries, places.slot(seq, i * c.ratio) / c.ratio);
      const double relative = cache_dtype == DType::kBFloat16 ? 0x1p-8 : 1e-5;
      for (int64_t d = 0; d < c.dim; ++d)
        require_near(out, token * row + head * c.dim + d, sums[d] / weights, relative * magnitudes[d] / weights, "output");
    }
  });
  const Tensor unused(dtype, num_tokens * row);
  args.out = unused.data();
  pagewick::WindowAttentionArgs wrong = args;
  wrong.num_tokens -= 1;
  require(status_of("window_attention", wrong) == pagewick::kBadLengths, "fewer tokens than cu_seqlens_q says");
  wrong = args, wrong.num_blocks = 0;
  require(status_of("window_attention", wrong) == pagewick::kBadBlockId, "a block outside the cache");
  wrong = args, wrong.num_entry_blocks = 0;
  require(status_of("window_attention", wrong) == pagewick::kBadBlockId, "an entry outside the cache");
  wrong = args, wrong.max_entry_blocks = 0, wrong.top_k = -1;
  require(status_of("window_attention", wrong) == pagewick::kBadLengths, "more entries than there is room for");
}

// Attention of two query heads to each of two KV heads, which see blocks of their own.
void test_blocks(const Case& c, DType dtype, DType cache_dtype) {
  constexpr int64_t kKvHeads = 2, kHeads = 4;
  begin_case("block_attention %s over %s, heads of %d, %d best blocks of %d", name_of(dtype), name_of(cache_dtype),
             static_cast<int>(c.dim), static_cast<int>(c.top_k), static_cast<int>(c.ratio));
  const Places places(c);
  const int64_t row = kHeads * c.dim, num_tokens = places.num_tokens();
  const Tensor q = Tensor::random(dtype, num_tokens * row);
  const Tensor cache = Tensor::random(cache_dtype, places.num_slots() * 2 * kKvHeads * c.dim);
  Array<int32_t> slots(num_tokens * kKvHeads * c.top_k), counts(num_tokens);
  places.for_tokens([&](int64_t seq, int64_t token) {
    const int64_t complete = (places.position(seq, token) + 1) / c.ratio;
    counts[token] = static_cast<int32_t>(std::min(complete, c.top_k));
    // The first head sees the first blocks, the second one the last.
    for (int64_t i = 0; i < kKvHeads * c.top_k; ++i) slots[token * kKvHeads * c.top_k + i] = 1 << 30;
    for (int64_t i = 0; i < counts[token]; ++i) {
      slots[token * kKvHeads * c.top_k + i] = static_cast<int32_t>(i);
      slots[(token * kKvHeads + 1) * c.top_k + i] = static_cast<int32_t>(complete - counts[token] + i);
    }
  });
  pagewick::BlockAttentionArgs args = {};
  places.fill_blocks(args);
  args.q = q.data(), args.cache = cache.data(), args.slots = slots.data(), args.counts = counts.data();
  args.num_heads = kHeads, args.num_kv_heads = args.num_selections = kKvHeads, args.top_k = c.top_k;
  args.softmax_scale = kScale, args.dtype = dtype, args.cache_dtype = cache_dtype;
  const Tensor out = tensor_on_all_threads([&] {
    Tensor result(dtype, num_tokens * row);
    args.out = result.data();
    run("block_attention", args);
    return result;
  });
  const bool is_rounded = cache_dtype == DType::kBFloat16;
  places.for_tokens([&](int64_t seq, int64_t token) {
    const int64_t position = places.position(seq, token), complete = (position + 1) / c.ratio;
    for (int64_t head = 0; head < kHeads; ++head) {
      const int64_t kv_head = head / (kHeads / kKvHeads);
      std::vector<double> sums(c.dim), magnitudes(c.dim);
      double weights = 0;
      const auto add = [&](int64_t key) {
        const int64_t slot = places.slot(seq, key), block = slot / c.block_size, offset = slot % c.block_size;
        const int64_t k = ((block * 2 * kKvHeads + kv_head) * c.block_size + offset) * c.dim;
        const int64_t v = k + kKvHeads * c.block_size * c.dim;
        double score = 0;
        for (int64_t d = 0; d < c.dim; ++d) {
          const double number = q[token * row + head * c.dim + d];
          score += (is_rounded ? rounded(DType::kBFloat16, number) : number) * cache[k + d];
        }
        const double weight = std::exp(score * double{kScale});
        weights += weight;
        for (int64_t d = 0; d < c.dim; ++d) {
          sums[d] += weight * cache[v + d];
          magnitudes[d] += weight * std::abs(cache[v + d]);
        }
      };
      for (int64_t i = 0; i < counts[token]; ++i)
        for (int64_t n = 0; n < c.ratio; ++n)
          add(slots[(token * kKvHeads + kv_head) * c.top_k + i] * c.ratio + n);
      for (int64_t key = complete * c.ratio; key <= position; ++key) add(key);
      const double relative = is_rounded ? 0x1p-8 : 1e-5;
      for (int64_t d = 0; d < c.dim; ++d)
        require_near(out, token * row + head * c.dim + d, sums[d] / weights, relative * magnitudes[d] / weights, "output");
    }
  });
  const Tensor unused(dtype, num_tokens * row);
  args.out = unused.data();
  pagewick::BlockAttentionArgs wrong = args;
  wrong.num_tokens -= 1;
  require(status_of("block_attention", wrong) == pagewick::kBadLengths, "fewer tokens than cu_seqlens_q says");
  wrong = args, wrong.num_blocks = 0;
  require(status_of("block_attention", wrong) == pagewick::kBadBlockId, "a block outside the cache");
  wrong = args, wrong.top_k = -1;
  require(status_of("block_attention", wrong) == pagewick::kBadLengths, "more blocks than were selected");
}

class Compressed {
 public:
  Compressed(const Case& c, bool has_overlap, DType dtype, DType cache_dtype)
      : c_(c), places_(c), kinds_(has_overlap ? 2 : 1), row_(2 * kinds_ * c.dim),
        rows_(Tensor::random(dtype, (places_.num_tokens() - 1) * (row_ + 1) + row_, 2.0)),
        before_(Tensor::random(cache_dtype, places_.num_slots() * row_, 2.0)), norm_(Tensor::random(dtype, c.dim)),
        bias_(Tensor::random(DType::kFloat32, c.ratio * kinds_ * c.dim)),
        cos_(Tensor::random(DType::kFloat32, places_.num_tokens() * (c.dim / 2))),
        sin_(Tensor::random(DType::kFloat32, places_.num_tokens() * (c.dim / 2))), slots_(places_.num_tokens()) {
    places_.for_tokens([&](int64_t seq, int64_t token) { slots_[token] = places_.slot(seq, places_.position(seq, token)); });
    args_ = {};
    places_.fill(args_);
    args_.rows = rows_.data(), args_.slot_mapping = args_.entry_slots = slots_.data(), args_.cos = cos_.floats();
    args_.sin = sin_.floats(), args_.bias = bias_.floats(), args_.norm_weight = norm_.data(), args_.rope_dim = c.dim;
    args_.row_stride = row_ + 1, args_.angle_stride = c.dim / 2, args_.norm_eps = kEps, args_.dtype = dtype;
    args_.norm_dtype = dtype, args_.cache_dtype = args_.entry_dtype = cache_dtype, args_.has_overlap = has_overlap;
    args_.is_interleaved = 1;
  }

  // The caches of rows and of entries.
  int32_t compute(Outputs& outputs) const {
    outputs.emplace_back(before_.dtype(), before_.size());
    std::memcpy(outputs[0].data(), before_.data(), before_.size() * element_size(before_.dtype()));
    outputs.emplace_back(before_.dtype(), places_.num_slots() / c_.ratio * c_.dim);
    pagewick::CompressRowsArgs args = args_;
    args.cache = outputs[0].data(), args.entries = outputs[1].data();
    return status_of("compress_rows", args);
  }

  void check(const Outputs& outputs) const {
    std::vector<bool> is_written(outputs[1].size());
    places_.for_tokens([&](int64_t seq, int64_t token) {
      for (int64_t i = 0; i < row_; ++i)
        require_near(outputs[0], slots_[token] * row_ + i, rows_[token * (row_ + 1) + i], 0.0, "row");
      const int64_t end = places_.position(seq, token) + 1;
      if (end % c_.ratio != 0) return;
      const std::vector<double> expected = entry(outputs[0], seq, token, end);
      for (int64_t d = 0; d < c_.dim; ++d) {
        const int64_t i = slots_[token] / c_.ratio * c_.dim + d;
        is_written[i] = true;
        require_near(outputs[1], i, expected[d], 3e-5, "entry");
      }
    });
    for (int64_t i = 0; i < outputs[1].size(); ++i)
      require(is_written[i] || outputs[1].is_untouched(i), "an entry of nobody was written to");
  }

  void check_bad_arguments() {
    Outputs outputs;
    args_.num_entry_blocks = 0;
    require(compute(outputs) == pagewick::kBadBlockId, "an entry outside the cache");
    require(outputs[0] == before_, "written in spite of it");
    args_.num_entry_blocks = places_.num_blocks(), args_.max_blocks = 0;
    require(compute(outputs) == pagewick::kBadLengths, "no room for the context");
  }

 private:
  std::vector<double> entry(const Tensor& rows, int64_t seq, int64_t token, int64_t end) const {
    const int64_t num_earlier = kinds_ == 2 && end > c_.ratio ? c_.ratio : 0, first = end - c_.ratio - num_earlier;
    std::vector<double> found(c_.dim);
    double squares = 0;
    for (int64_t d = 0; d < c_.dim; ++d) {
      double weights = 0;
      for (int64_t i = 0; i < num_earlier + c_.ratio; ++i) {
        const int64_t kind = i < num_earlier ? 0 : kinds_ - 1, place = (i < num_earlier ? i : i - num_earlier);
        const int64_t row = places_.slot(seq, first + i) * row_ + kind * c_.dim + d;
        const double bias = bias_[(place * kinds_ + kind) * c_.dim + d];
        const double weight = std::exp(rows[row + kinds_ * c_.dim] + bias);
        weights += weight, found[d] += weight * rows[row];
      }
      found[d] /= weights, squares += found[d] * found[d];
    }
    for (int64_t d = 0; d < c_.dim; ++d)
      found[d] *= norm_[d] / std::sqrt(squares / static_cast<double>(c_.dim) + double{kEps});
    for (int64_t d = 0; d < c_.dim; d += 2) {
      const double a = found[d], b = found[d + 1];
      const double c = cos_[token * (c_.dim / 2) + d / 2], s = sin_[token * (c_.dim / 2) + d / 2];
      found[d] = a * c - b * s, found[d + 1] = b * c + a * s;
    }
    return found;
  }

  const Case& c_;
  const Places places_;
  const int64_t kinds_, row_;
  const Tensor rows_, before_, norm_, bias_, cos_, sin_;
  Array<int64_t> slots_;
  pagewick::CompressRowsArgs args_;
};

void test_compress(const Case& c, bool has_overlap, DType dtype, DType cache_dtype) {
  begin_case("compress_rows %s to %s, %d elements, one for %d, overlap %d", name_of(dtype), name_of(cache_dtype),
             static_cast<int>(c.dim), static_cast<int>(c.ratio), has_overlap);
  Compressed compressed(c, has_overlap, dtype, cache_dtype);
  compressed.check(on_all_threads([&] {
    Outputs outputs;
    require(compressed.compute(outputs) == pagewick::kOk, "status");
    return outputs;
  }));
  compressed.check_bad_arguments();
}

}  // namespace

void test_window() {
  const Case cases[] = {
      {{1}, {2}, 1, 2, 2, 2, 1, 0},
      {{1, 0, 3}, {9, 0, 65}, 2, 18, 8, 4, 7, 5},
      {{5, 1}, {30, 300}, 3, 34, 6, 2, 270, 0},
      {{1}, {1200}, 40, 72, 16, 4, 20, 250},
  };
  for (const Case& c : cases)
    for (const DType cache_dtype : kDTypes)
      for (const DType dtype : kDTypes)
        if (dtype == cache_dtype || c.num_heads == 2) test_attention(c, dtype, cache_dtype);
  // The first case has a sequence without new tokens, the second one blocks that end inside of those of the cache.
  const Case selections[] = {
      {{1, 0, 3}, {9, 0, 65}, 4, 18, 8, 4, 1, 5},
      {{5, 1}, {30, 301}, 4, 34, 6, 5, 1, 3},
      {{1}, {1200}, 4, 72, 32, 64, 1, 9},
  };
  for (const Case& c : selections)
    for (const DType cache_dtype : kDTypes)
      for (const DType dtype : kDTypes)
        if (dtype == cache_dtype || c.ratio == 4) test_blocks(c, dtype, cache_dtype);
}

void test_compressed() {
  const Case cases[] = {
      {{4}, {4}, 1, 2, 4, 4, 1, 0},
      {{3, 0, 13}, {8, 0, 33}, 1, 22, 8, 4, 1, 0},
      {{1, 140}, {128, 260}, 1, 80, 64, 64, 1, 0},
  };
  for (const Case& c : cases)
    for (const DType cache_dtype : kDTypes)
      for (const DType dtype : kDTypes)
        for (const bool has_overlap : {true, false}) test_compress(c, has_overlap, dtype, cache_dtype);
}
