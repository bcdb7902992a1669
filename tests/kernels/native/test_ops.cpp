// Runs the C ABI under the address and undefined-behaviour sanitizers. Every tensor lies in memory of exactly its
// size, so that reading one element too far is an error; results are compared with plain loops in double.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels.h"

using namespace pagewick;

extern "C" {
const char* pw_isa();
int32_t pw_select_isa(const char* name);
void pw_set_num_threads(int32_t count);
void pw_rms_norm(const RmsNormArgs* args);
int32_t pw_paged_attention(const AttentionArgs* args);
}

namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::printf("failed with %s: %s\n", pw_isa(), what);
  std::exit(1);
}

uint32_t random_state = 1;

float random_float() {
  random_state = random_state * 1664525u + 1013904223u;
  return static_cast<float>(random_state >> 8) * 0x1p-23f - 1.0f;
}

std::vector<float> random_floats(int64_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = random_float();
  return values;
}

// bfloat16 bits, and the floats that they stand for.
std::vector<uint16_t> to_bfloat16(std::vector<float>& values) {
  std::vector<uint16_t> halves(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &values[i], sizeof(bits));
    halves[i] = static_cast<uint16_t>(bits >> 16);
    bits &= 0xffff0000;
    std::memcpy(&values[i], &bits, sizeof(bits));
  }
  return halves;
}

void test_rms_norm(int64_t num_rows, int64_t size) {
  const std::vector<float> x = random_floats(num_rows * size), weight = random_floats(size);
  std::vector<float> out(num_rows * size), sum(num_rows * size);
  for (const bool has_residual : {false, true}) {
    const RmsNormArgs args = {x.data(),  has_residual ? x.data() : nullptr,   weight.data(),
                              out.data(), has_residual ? sum.data() : nullptr, num_rows,
                              size,      size,                                size,
                              1e-5f,     DType::kFloat32};
    pw_rms_norm(&args);
    for (int64_t row = 0; row < num_rows; ++row) {
      double squares = 0;
      const double factor = has_residual ? 2 : 1;
      for (int64_t i = 0; i < size; ++i) squares += std::pow(factor * x[row * size + i], 2);
      for (int64_t i = 0; i < size; ++i) {
        const double expected = factor * x[row * size + i] / std::sqrt(squares / size + 1e-5) * weight[i];
        require(std::abs(out[row * size + i] - expected) < 1e-5, "rms_norm");
      }
    }
  }
}

struct Case {
  std::vector<int32_t> q_lens, context_lens;
  int64_t num_heads, num_kv_heads, head_dim, block_size, window;
};

// The double result for one query row over keys and values that lie block by block.
std::vector<double> expected_row(const Case& c, const std::vector<float>& kv, const float* q, const int32_t* block_table,
                                 int64_t kv_head, int64_t position) {
  const int64_t first = c.window ? std::max<int64_t>(0, position - c.window + 1) : 0;
  std::vector<double> out(c.head_dim, 0.0);
  double total = 0;
  for (int64_t key = first; key <= position; ++key) {
    const int64_t block_id = block_table[key / c.block_size], offset = key % c.block_size;
    const float* k = &kv[((block_id * 2 * c.num_kv_heads + kv_head) * c.block_size + offset) * c.head_dim];
    const float* v = k + c.num_kv_heads * c.block_size * c.head_dim;
    double score = 0;
    for (int64_t d = 0; d < c.head_dim; ++d) score += double{q[d]} * k[d];
    const double weight = std::exp(score * 0.3);
    total += weight;
    for (int64_t d = 0; d < c.head_dim; ++d) out[d] += weight * v[d];
  }
  for (double& value : out) value /= total;
  return out;
}

std::vector<float> run_attention(const Case& c, const std::vector<float>& q, const void* kv, DType kv_dtype,
                                 int64_t num_blocks, const std::vector<int32_t>& tables, int64_t max_blocks) {
  std::vector<int32_t> cu_seqlens_q = {0};
  for (const int32_t q_len : c.q_lens) cu_seqlens_q.push_back(cu_seqlens_q.back() + q_len);
  std::vector<float> out(q.size(), std::nanf(""));
  AttentionArgs args = {};
  args.q = q.data(), args.kv_cache = kv, args.out = out.data();
  args.block_tables = tables.data(), args.context_lens = c.context_lens.data();
  args.cu_seqlens_q = cu_seqlens_q.data();
  args.num_tokens = cu_seqlens_q.back(), args.num_seqs = static_cast<int64_t>(c.q_lens.size());
  args.num_heads = c.num_heads, args.num_kv_heads = c.num_kv_heads, args.head_dim = c.head_dim;
  args.num_blocks = num_blocks, args.block_size = c.block_size;
  args.max_blocks = max_blocks, args.block_table_stride = max_blocks;
  args.q_stride = c.num_heads * c.head_dim, args.sliding_window = c.window;
  args.softmax_scale = 0.3f, args.q_dtype = DType::kFloat32, args.kv_dtype = kv_dtype;
  require(pw_paged_attention(&args) == kOk, "status");
  args.num_blocks = 1;
  require(num_blocks < 3 || pw_paged_attention(&args) == kBadBlockId, "a block outside the cache");
  args.num_tokens += 1;
  require(pw_paged_attention(&args) == kBadLengths, "tokens without a sequence");
  args.num_tokens -= 1, args.num_blocks = num_blocks;
  require(pw_paged_attention(&args) == kOk, "status");
  return out;
}

void test_attention(const Case& c) {
  int64_t num_blocks = 0, num_tokens = 0, max_blocks = 1;
  for (const int32_t context_len : c.context_lens) {
    num_blocks += (context_len + c.block_size - 1) / c.block_size;
    max_blocks = std::max<int64_t>(max_blocks, (context_len + c.block_size - 1) / c.block_size);
  }
  for (const int32_t q_len : c.q_lens) num_tokens += q_len;
  // Blocks are handed out from the last to the first, so that the last key of all ends the cache.
  std::vector<int32_t> tables(c.q_lens.size() * max_blocks, -1);
  int32_t next_block = static_cast<int32_t>(num_blocks);
  for (size_t seq = 0; seq < c.q_lens.size(); ++seq)
    for (int64_t i = 0; i * c.block_size < c.context_lens[seq]; ++i) tables[seq * max_blocks + i] = --next_block;
  std::vector<float> kv = random_floats(num_blocks * 2 * c.num_kv_heads * c.block_size * c.head_dim);
  const std::vector<float> q = random_floats(num_tokens * c.num_heads * c.head_dim);
  const std::vector<uint16_t> halves = to_bfloat16(kv);
  std::vector<float> out = run_attention(c, q, kv.data(), DType::kFloat32, num_blocks, tables, max_blocks);
  require(out == run_attention(c, q, halves.data(), DType::kBFloat16, num_blocks, tables, max_blocks),
          "a bfloat16 cache gives other bits than the same values in float32");
  pw_set_num_threads(1);
  require(out == run_attention(c, q, kv.data(), DType::kFloat32, num_blocks, tables, max_blocks),
          "one thread gives other bits than several");
  pw_set_num_threads(3);
  for (int64_t seq = 0, token = 0; seq < static_cast<int64_t>(c.q_lens.size()); ++seq)
    for (int64_t i = 0; i < c.q_lens[seq]; ++i, ++token)
      for (int64_t head = 0; head < c.num_heads; ++head) {
        const int64_t row = (token * c.num_heads + head) * c.head_dim;
        const std::vector<double> expected =
            expected_row(c, kv, &q[row], &tables[seq * max_blocks], head / (c.num_heads / c.num_kv_heads),
                         c.context_lens[seq] - c.q_lens[seq] + i);
        for (int64_t d = 0; d < c.head_dim; ++d)
          require(std::abs(out[row + d] - expected[d]) < 1e-5, "paged_attention");
      }
}

// Several threads use the pool at the same time; who finds it taken works alone.
void test_concurrent_callers() {
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i)
    callers.emplace_back([] {
      const std::vector<float> x(200 * 1000, 2.0f), weight(1000, 1.0f);
      for (int repeat = 0; repeat < 20; ++repeat) {
        std::vector<float> out(x.size());
        const RmsNormArgs args = {x.data(), nullptr, weight.data(), out.data(), nullptr, 200,
                                  1000,     1000,    0,             0.0f,       DType::kFloat32};
        pw_rms_norm(&args);
        for (const float value : out) require(std::abs(value - 1.0f) < 1e-6f, "concurrent callers");
      }
    });
  for (std::thread& caller : callers) caller.join();
}

}  // namespace

int main() {
  for (const char* isa : {"generic", "avx2", "avx512", "neon"}) {
    if (pw_select_isa(isa) != 0) continue;
    pw_set_num_threads(3);
    for (const int64_t size : {1, 3, 16, 37, 100}) test_rms_norm(3, size);
    test_rms_norm(70, 1000);
    test_attention({{1, 0, 3}, {1, 0, 65}, 2, 1, 16, 32, 0});
    test_attention({{70, 1}, {70, 1100}, 3, 1, 24, 7, 0});
    test_attention({{5, 2}, {1030, 64}, 2, 2, 40, 64, 33});
    test_attention({{1}, {3100}, 2, 1, 16, 16, 0});
    test_concurrent_callers();
    std::printf("%s passed\n", isa);
  }
  std::printf("all tests passed\n");
}
