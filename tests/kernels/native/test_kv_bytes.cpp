// Caches of numbers of 8 and of 4 bits: store_kv and paged_attention over what it stored. Numbers are read by the
// formulas of the formats and not by the library's own code.
#include <algorithm>
#include <cmath>
#include <limits>

#include "attention.h"
#include "testing.h"

using namespace testing;

namespace {

constexpr float kScale = 0.3f;

struct Format {
  DType dtype;
  int mantissa_bits, bias;
  double largest;
};

constexpr Format kFormats[] = {
    {DType::kInt8, 0, 0, 127.0}, {DType::kFp8E4m3, 3, 7, 448.0}, {DType::kFp8E5m2, 2, 15, 57344.0},
    {DType::kInt4, 0, 0, 7.0}};

// byte: of a number of 4 bits, its half.
double number(const Format& format, uint8_t byte) {
  if (format.dtype == DType::kInt8) return static_cast<int8_t>(byte);
  if (format.dtype == DType::kInt4) return byte < 8 ? byte : byte - 16;
  const int units = 1 << format.mantissa_bits, exponent = (byte & 0x7f) / units, mantissa = byte % units;
  const double size = exponent == 0 ? std::ldexp(mantissa, 1 - format.bias - format.mantissa_bits)
                                    : std::ldexp(units + mantissa, exponent - format.bias - format.mantissa_bits);
  return byte & 0x80 ? -size : size;
}

// Half the distance from a number to its neighbours.
double half_step(const Format& format, double value) {
  if (format.dtype == DType::kInt8 || format.dtype == DType::kInt4) return 0.5;
  const double least = std::ldexp(1.0, 1 - format.bias);
  return std::ldexp(1.0, std::ilogb(std::max(std::abs(value), least)) - format.mantissa_bits - 1);
}

// Rotates heads of `dim` numbers by the definition: each number of a block of the largest power of two that divides dim
// becomes a sum of all, with signs by the parity of the bits that both places have. Heads of 1 stay as they are.
Tensor rotated(const Tensor& heads, int64_t dim) {
  const int64_t size = dim & -dim;
  Tensor result(DType::kFloat32, heads.size());
  for (int64_t i = 0; i < heads.size(); ++i) {
    const int64_t place = i % dim % size;
    const float* const block = heads.floats() + i - place;
    double sum = 0;
    for (int64_t j = 0; j < size; ++j) sum += __builtin_parityll(place & j) ? -block[j] : block[j];
    result.set(i, sum / std::sqrt(static_cast<double>(size)));
  }
  return result;
}

struct Case {
  int32_t q_len, context_len;
  int64_t num_heads, num_kv_heads, head_dim, block_size, window;
};

// One sequence, whose blocks are handed out from the last to the first.
class Sequence {
 public:
  Sequence(const Case& c, const Format& format)
      : c_(c),
        format_(format),
        dim_((c.head_dim + 15) / 16 * 16),
        num_blocks_((c.context_len + c.block_size - 1) / c.block_size),
        row_bytes_(format.dtype == DType::kInt4 ? dim_ / 2 : dim_),
        block_bytes_((2 * c.num_kv_heads * c.block_size * (row_bytes_ + 4) + 15) / 16 * 16),
        table_(num_blocks_),
        slots_(c.context_len),
        cache_(num_blocks_ * block_bytes_),
        q_(Tensor::random(DType::kFloat32, c.q_len * c.num_heads * c.head_dim)),
        k_(Tensor::random(DType::kFloat32, c.context_len * c.num_kv_heads * c.head_dim, 5.0)),
        v_(Tensor::random(DType::kFloat32, c.context_len * c.num_kv_heads * c.head_dim)) {
    for (int64_t i = 0; i < num_blocks_; ++i) table_[i] = static_cast<int32_t>(num_blocks_ - 1 - i);
    for (int64_t i = 0; i < c.context_len; ++i) slots_[i] = table_[i / c.block_size] * c.block_size + i % c.block_size;
    // Exact in bf16, with which some processors multiply bytes.
    for (int64_t i = 0; i < q_.size(); ++i) q_.set(i, rounded(DType::kBFloat16, q_[i]));
    const Tensor turned = as_stored(q_);
    for (int64_t i = 0; i < q_.size(); ++i) q_.set(i, turned[i]);
    for (int byte = 0; byte < 256; ++byte) numbers_[byte] = number(format, static_cast<uint8_t>(byte));
    store();
  }

  void check_stored() const {
    const Tensor k = as_stored(k_), v = as_stored(v_);
    for (int64_t token = 0; token < c_.context_len; ++token)
      for (int64_t head = 0; head < c_.num_kv_heads; ++head)
        for (const bool is_value : {false, true})
          for (int64_t d = 0; d < c_.head_dim; ++d) {
            const double x = (is_value ? v : k)[(token * c_.num_kv_heads + head) * c_.head_dim + d];
            const double scale = scale_of(is_value, token, head), found = stored(is_value, token, head, d);
            const double wanted = std::min(std::max(x / scale, -format_.largest), format_.largest);
            require(std::abs(found - wanted) <= half_step(format_, wanted) * (1 + 1e-4), "the nearest number");
          }
  }

  Tensor attend(int32_t first_query = 0) const {
    const int32_t q_len = c_.q_len - first_query;
    Tensor out(DType::kFloat32, q_len * row_size());
    const Array<int32_t> cu_seqlens = {0, q_len}, context_lens = {c_.context_len};
    pagewick::AttentionArgs args = {};
    args.q = q_.floats() + first_query * row_size(), args.kv_cache = cache_.data(), args.out = out.data();
    args.block_tables = table_.data(), args.context_lens = context_lens.data(), args.cu_seqlens_q = cu_seqlens.data();
    args.num_tokens = q_len, args.num_seqs = 1, args.num_heads = c_.num_heads, args.num_kv_heads = c_.num_kv_heads;
    args.head_dim = c_.head_dim, args.num_blocks = args.max_blocks = args.block_table_stride = num_blocks_;
    args.block_size = c_.block_size, args.q_stride = row_size(), args.sliding_window = c_.window;
    args.softmax_scale = kScale, args.q_dtype = DType::kFloat32, args.kv_dtype = format_.dtype;
    run("paged_attention", args);
    return out;
  }

  void check(const Tensor& out) const {
    // Numbers are rotated, and so are the queries that are compared with them.
    const Tensor q = as_stored(q_), found = as_stored(out);
    for (int64_t query = 0; query < c_.q_len; query += query < 4 ? 1 : 13)
      for (int64_t head = 0; head < c_.num_heads; ++head) check_row(q, found, query, head);
    const Tensor alone = attend(c_.q_len - 1);
    for (int64_t i = 0; i < row_size(); ++i)
      require(alone.bits(i) == out.bits(out.size() - row_size() + i), "a query alone has other bits");
  }

 private:
  int64_t row_size() const { return c_.num_heads * c_.head_dim; }
  bool is_rotated() const { return format_.dtype == DType::kInt4; }
  Tensor as_stored(const Tensor& heads) const { return rotated(heads, is_rotated() ? c_.head_dim : 1); }

  void store() {
    pagewick::StoreKvArgs args = {};
    args.k = k_.data(), args.v = v_.data(), args.slot_mapping = slots_.data(), args.kv_cache = cache_.data();
    args.num_tokens = c_.context_len, args.num_kv_heads = c_.num_kv_heads, args.head_dim = c_.head_dim;
    args.num_blocks = num_blocks_, args.block_size = c_.block_size;
    args.k_stride = args.v_stride = c_.num_kv_heads * c_.head_dim;
    args.dtype = DType::kFloat32, args.kv_dtype = format_.dtype;
    run("store_kv", args);
  }

  double stored(bool is_value, int64_t token, int64_t head, int64_t d) const {
    const int64_t offset = slots_[token] % c_.block_size;
    const int64_t start = slots_[token] / c_.block_size * block_bytes_ +
                          (is_value * c_.num_kv_heads + head) * c_.block_size * row_bytes_;
    const int64_t place = is_value ? (offset / 2 * dim_ + d) * 2 + offset % 2
                                   : (d / 2 * c_.block_size + offset) * 2 + d % 2;
    if (format_.dtype != DType::kInt4) return numbers_[cache_[start + place]];
    return numbers_[cache_[start + place / 2] >> place % 2 * 4 & 15];
  }

  double scale_of(bool is_value, int64_t token, int64_t head) const {
    const int64_t first = slots_[token] / c_.block_size * block_bytes_ + 2 * c_.num_kv_heads * c_.block_size * row_bytes_;
    const int64_t place = (is_value * c_.num_kv_heads + head) * c_.block_size + slots_[token] % c_.block_size;
    float scale;
    std::memcpy(&scale, cache_.data() + first + 4 * place, sizeof(scale));
    return static_cast<double>(scale);
  }

  void check_row(const Tensor& q, const Tensor& out, int64_t query, int64_t head) const {
    const int64_t position = c_.context_len - c_.q_len + query, kv_head = head / (c_.num_heads / c_.num_kv_heads);
    const int64_t first = c_.window ? std::max<int64_t>(0, position - c_.window + 1) : 0;
    std::vector<double> scores, sums(c_.head_dim), sizes(c_.head_dim);
    for (int64_t key = first; key <= position; ++key) {
      double score = 0;
      for (int64_t d = 0; d < c_.head_dim; ++d)
        score += q[query * row_size() + head * c_.head_dim + d] * stored(false, key, kv_head, d);
      scores.push_back(score * scale_of(false, key, kv_head) * static_cast<double>(kScale));
    }
    const double most = *std::max_element(scores.begin(), scores.end());
    double total = 0;
    for (int64_t key = first; key <= position; ++key) {
      const double weight = std::exp(scores[static_cast<size_t>(key - first)] - most);
      total += weight;
      for (int64_t d = 0; d < c_.head_dim; ++d) {
        const double value = stored(true, key, kv_head, d) * scale_of(true, key, kv_head);
        sums[d] += weight * value, sizes[d] += weight * std::abs(value);
      }
    }
    // Some processors round the products of probabilities and scales to bf16. Rotations in fp32 round sums of a row.
    const double noise = is_rotated() ? 0x1p-20 * *std::max_element(sizes.begin(), sizes.end()) : 0;
    for (int64_t d = 0; d < c_.head_dim; ++d)
      require_near(out, query * row_size() + head * c_.head_dim + d, sums[d] / total,
                   (0x1p-8 * sizes[d] + noise) / total, "output");
  }

  Case c_;
  Format format_;
  int64_t dim_, num_blocks_, row_bytes_, block_bytes_;
  Array<int32_t> table_;
  Array<int64_t> slots_;
  Array<uint8_t> cache_;
  Tensor q_, k_, v_;
  double numbers_[256];  // by byte
};

}  // namespace

void test_kv_bytes() {
  for (const Format& format : kFormats)
    for (const Case& c : {Case{1, 65, 2, 1, 16, 32, 0}, Case{70, 70, 3, 1, 24, 6, 0}, Case{5, 1030, 2, 2, 40, 64, 33},
                          Case{1, 2060, 4, 2, 64, 32, 1030}, Case{40, 41, 8, 2, 100, 16, 0},
                          Case{6, 270, 4, 2, 40, 32, 0}}) {
      begin_case("cache of bytes %d, %d queries of %d, heads %d and %d of %d, blocks of %d", static_cast<int>(format.dtype),
                 c.q_len, c.context_len, static_cast<int>(c.num_heads), static_cast<int>(c.num_kv_heads),
                 static_cast<int>(c.head_dim), static_cast<int>(c.block_size));
      const Sequence sequence(c, format);
      sequence.check_stored();
      sequence.check(tensor_on_all_threads([&] { return sequence.attend(); }));
    }
}
