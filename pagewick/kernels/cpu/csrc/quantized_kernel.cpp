// Quantizes activations, and chooses the product of a format. Compiled once per instruction set.
#include "quantized_amx.h"
#include "quantized_multiply.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// The low bytes of kLanes words.
inline void store_low_bytes(int8_t* target, IntVec words) {
#if defined(PW_ISA_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm512_cvtepi32_epi8((__m512i)words));
#elif defined(PW_ISA_AVX2)
  const __m256i low = (__m256i)(words & 0xff);
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(target), _mm_packus_epi16(halves, halves));
#else
  for (int i = 0; i < kLanes; ++i) target[i] = static_cast<int8_t>(words[i]);
#endif
}

// Quantizes kColumns numbers: whole numbers and their scale. A NaN makes the scale NaN: magnitudes are compared as
// integers, in whose order NaNs come last.
template <int kColumns, class T>
void quantize(const T* x, int8_t* out, float& scale) {
  constexpr int kParts = kColumns / kLanes;
  Vec values[kParts];
  WordVec largest = {};
#pragma GCC unroll 16
  for (int i = 0; i < kParts; ++i) {
    values[i] = load(x + i * kLanes);
    const WordVec magnitude = (WordVec)values[i] & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  const uint32_t bits = hmax(largest);
  float amax;
  memcpy(&amax, &bits, sizeof(amax));
  const float factor = amax > 0.0f ? 127.0f / amax : 0.0f;
#pragma GCC unroll 16
  for (int i = 0; i < kParts; ++i) {
    // Adding 1.5 * 2^23 rounds to the nearest whole number, the even one of two.
    const Vec rounded = values[i] * factor + 0x1.8p23f;
    store_low_bytes(out + i * kLanes, (IntVec)rounded - 0x4b400000);
  }
  scale = amax / 127.0f;
}

inline int16_t sum_of_16(const int8_t* values) {
#if defined(__SSE2__)
  // The sum of bytes without a sign, each of which is too large by 128.
  const __m128i bytes = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)), _mm_set1_epi8(-128));
  const __m128i sums = _mm_sad_epu8(bytes, _mm_setzero_si128());
  return static_cast<int16_t>(_mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128);
#else
  int16_t sum = 0;
  for (int k = 0; k < 16; ++k) sum = static_cast<int16_t>(sum + values[k]);
  return sum;
#endif
}

template <class T>
void prepare_block(const T* x, PreparedBlock<32>& block) {
  quantize<32>(x, block.values, block.scale);
  for (int i = 0; i < 2; ++i) block.sums[i] = sum_of_16(block.values + 16 * i);
}

template <class T>
void prepare_block(const T* x, PreparedBlock<256>& block) {
  // The place of a group's sum: of every four, the first and the third are neighbours.
  const auto place = [](int i) { return i / 4 * 4 + i % 2 * 2 + i / 2 % 2; };
  quantize<256>(x, block.values, block.scale);
  int16_t sums[16];
  for (int i = 0; i < 16; ++i) {
    block.sums_of_16[place(i)] = sums[i] = sum_of_16(block.values + 16 * i);
    block.starts[i] = -kStartOffset * sums[i];
  }
  for (int i = 0; i < 8; ++i) block.sums_of_32[place(i)] = static_cast<int16_t>(sums[2 * i] + sums[2 * i + 1]);
}

template <class T>
void prepare_block(const T* x, PreparedWide& block) {
  for (int64_t k = 0; k < PreparedWide::kColumns; k += kLanes)
    store(block.values + k, round_to(static_cast<const BFloat16*>(nullptr), load(x + k)));
}

template <class Block, class T>
void prepare_row(const T* x, int64_t size, void* target) {
  Block* block = static_cast<Block*>(target);
  for (int64_t k = 0; k < size; k += Block::kColumns) prepare_block(x + k, *block++);
}

// Calls f with a null pointer of the type of the blocks of x for a format.
template <class F>
auto with_block(QuantizedFormat name, const F& f) {
  const BlockFormat& format = block_format(name);
  if (format.is_fp8) return f(static_cast<PreparedWide*>(nullptr));
  if (format.is_k()) return f(static_cast<PreparedBlock<256>*>(nullptr));
  return f(static_cast<PreparedBlock<32>*>(nullptr));
}

int64_t row_bytes(QuantizedFormat format, int64_t in_features) {
  return with_block(format, [&](auto* block) {
    using Block = Element<decltype(block)>;
    return in_features / Block::kColumns * static_cast<int64_t>(sizeof(Block));
  });
}

void prepare(const QuantizedLinearArgs& args, int64_t first_row, int64_t end_row, void* prepared) {
  const int64_t target_stride = row_bytes(args.format, args.in_features);
  with_type(args.dtype, [&](auto* type) {
    with_block(args.format, [&](auto* block) {
      using T = Element<decltype(type)>;
      for (int64_t row = first_row; row < end_row; ++row)
        prepare_row<Element<decltype(block)>>(static_cast<const T*>(args.x) + row * args.x_stride, args.in_features,
                                              static_cast<char*>(prepared) + row * target_stride);
    });
  });
}

#if defined(PW_HAS_AMX)
int64_t arranged_bytes(const QuantizedLinearArgs& args) {
  return with_block(args.format, [&](auto* block) {
    using Block = Element<decltype(block)>;
    if (args.num_rows < ArrangedRows<Block>::kLeastRows) return int64_t{0};
    return ArrangedChunks<Block>::num_bytes(args.num_rows, args.in_features);
  });
}

void arrange(const QuantizedLinearArgs& args, const void* prepared, int64_t first_row, int64_t end_row,
             void* arranged) {
  with_block(args.format, [&](auto* block) {
    using Block = Element<decltype(block)>;
    ArrangedChunks<Block> chunks(arranged, args.in_features);
    for (int64_t row = first_row; row < end_row; ++row)
      chunks.copy_row(row, static_cast<const Block*>(prepared) + row * (args.in_features / Block::kColumns));
    if (end_row == args.num_rows) chunks.clear_rows_from(end_row);
  });
}
#else
int64_t arranged_bytes(const QuantizedLinearArgs&) { return 0; }

void arrange(const QuantizedLinearArgs&, const void*, int64_t, int64_t, void*) {}
#endif

void multiply(const QuantizedLinearArgs& args, const PreparedRows& x, int64_t first_panel, int64_t end_panel,
              int64_t first_row, int64_t end_row) {
  constexpr int kFirstLarge = static_cast<int>(QuantizedFormat::kQ2_K);
  const BlockFormat& format = block_format(args.format);
  const int number = static_cast<int>(args.format);
  constexpr int kFirstWithCodes = static_cast<int>(QuantizedFormat::kMxfp4);
  const Multiply product = format.is_fp8       ? kFp8Product
                           : format.has_codes() ? kCodesProducts[number - kFirstWithCodes]
                           : format.has_zero() ? kInt4Product
                           : format.is_k()     ? kLargeProducts[number - kFirstLarge]
                                               : kSmallProducts[number];
  product(args, x, first_panel, end_panel, first_row, end_row);
}

void convert(const float* numbers, int64_t size, DType dtype, void* out) {
  with_type(dtype, [&](auto* type) {
    using T = Element<decltype(type)>;
    for (int64_t k = 0; k < size; k += kLanes) store(static_cast<T*>(out) + k, load(numbers + k));
  });
}

}  // namespace

extern const QuantizedKernels kQuantized;
const QuantizedKernels kQuantized = {row_bytes, prepare, arranged_bytes, arrange, multiply, convert};

}  // namespace PW_ISA
}  // namespace pagewick
