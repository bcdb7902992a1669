// The vector layer's products of bytes. All sums are exact.
#pragma once

#include "vec.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace pagewick {
namespace PW_ISA {
namespace {

typedef int16_t ShortVec __attribute__((vector_size(4 * kLanes)));
typedef uint8_t LevelVec __attribute__((vector_size(4 * kLanes)));

inline IntVec load_words(const void* source) {
  IntVec words;
  memcpy(&words, source, sizeof(words));
  return words;
}

// A byte for each lane.
inline WordVec load_widened(const uint8_t* source) {
#if defined(PW_ISA_AVX512)
  return (WordVec)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
#elif defined(PW_ISA_AVX2)
  return (WordVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source)));
#else
  typedef uint8_t ByteVec __attribute__((vector_size(kLanes)));
  ByteVec bytes;
  memcpy(&bytes, source, sizeof(bytes));
  return __builtin_convertvector(bytes, WordVec);
#endif
}

// The levels that stand for codes below 16, a byte each. codebook: all sixteen.
inline IntVec levels_of_codes(const uint8_t* codebook, IntVec codes) {
#if defined(PW_ISA_AVX512)
  const __m512i levels = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codebook)));
  return (IntVec)_mm512_shuffle_epi8(levels, (__m512i)codes);
#elif defined(PW_ISA_AVX2)
  const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codebook)));
  return (IntVec)_mm256_shuffle_epi8(levels, (__m256i)codes);
#elif defined(PW_ISA_NEON)
  return (IntVec)vqtbl1q_u8(vld1q_u8(codebook), (uint8x16_t)codes);
#else
  LevelVec levels = (LevelVec)codes;
  for (size_t i = 0; i < sizeof(levels); ++i) levels[i] = codebook[levels[i]];
  return (IntVec)levels;
#endif
}

// Four bytes for each lane.
inline IntVec broadcast(const void* source) {
  int32_t word;
  memcpy(&word, source, sizeof(word));
  return IntVec{} + word;
}

// The even and the odd bytes of each lane, signed, as pairs of 16 bits.
inline ShortVec even_bytes(IntVec bytes) { return (ShortVec)bytes << 8 >> 8; }
inline ShortVec odd_bytes(IntVec bytes) { return (ShortVec)bytes >> 8; }

// The sum of the two products of each lane's pairs.
inline IntVec dot_pairs(ShortVec a, ShortVec b) {
#if defined(PW_ISA_AVX512)
  return (IntVec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(PW_ISA_AVX2)
  return (IntVec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (IntVec)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return ((IntVec)a << 16 >> 16) * ((IntVec)b << 16 >> 16) + ((IntVec)a >> 16) * ((IntVec)b >> 16);
#endif
}

// The same, added to `total`.
inline IntVec add_pairs(IntVec total, ShortVec a, ShortVec b) {
#if defined(PW_HAS_BYTE_DOT) && defined(PW_ISA_AVX512)
  return (IntVec)_mm512_dpwssd_epi32((__m512i)total, (__m512i)a, (__m512i)b);
#elif defined(PW_HAS_BYTE_DOT) && defined(PW_ISA_AVX2)
  return (IntVec)_mm256_dpwssd_avx_epi32((__m256i)total, (__m256i)a, (__m256i)b);
#else
  return total + dot_pairs(a, b);
#endif
}

// Sums of products of levels, unsigned bytes below 2^kBits, with signed bytes of x from -127 on. A Sum takes the
// products of kQuads quads: four columns, whose bytes lie beside each other in a lane. A sum goes on from `total` and
// becomes one again at its end. Where kIsCentred, levels count as 128 less.
#if defined(PW_HAS_BYTE_DOT)
template <int kBits>
struct Dot {
  using Sum = IntVec;
  using Factor = IntVec;
  static constexpr int kQuads = 8;
#if defined(PW_ISA_NEON) && !defined(PW_HAS_BYTE_MATRIX_DOT)
  static constexpr bool kIsCentred = kBits == 8;
#else
  static constexpr bool kIsCentred = false;
#endif

  static Sum begin(IntVec total) { return total; }
  static Sum add(Sum sum, IntVec levels, IntVec x) {
#if defined(PW_ISA_AVX512)
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)levels, (__m512i)x);
#elif defined(PW_ISA_AVX2)
    return (IntVec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)levels, (__m256i)x);
#elif defined(PW_HAS_BYTE_MATRIX_DOT)
    return (IntVec)vusdotq_s32((int32x4_t)sum, (uint8x16_t)levels, (int8x16_t)x);
#else
    // Both factors are signed here.
    const IntVec bytes = kIsCentred ? levels ^ (int32_t)0x80808080 : levels;
    return (IntVec)vdotq_s32((int32x4_t)sum, (int8x16_t)bytes, (int8x16_t)x);
#endif
  }
  static IntVec end(IntVec, Sum sum) { return sum; }
  // The signed byte of each lane with this number, as add_scaled wants it.
  static Factor factor(IntVec bytes, int index) { return bytes << (24 - 8 * index) >> 24; }
  static IntVec add_scaled(IntVec total, Sum sum, Factor factor) { return total + sum * factor; }
};
#else
// Products of two neighbours, added in 16 bits, which have room for kQuads of them.
template <int kBits>
struct Dot {
  using Sum = ShortVec;
  using Factor = ShortVec;
  static constexpr int kQuads = kBits <= 4 ? 8 : kBits == 5 ? 4 : 2;
  static constexpr bool kIsCentred = false;

  static Sum begin(IntVec) { return Sum{}; }
  static Sum add(Sum sum, IntVec levels, IntVec x) {
#if defined(PW_ISA_AVX512)
    return sum + (ShortVec)_mm512_maddubs_epi16((__m512i)levels, (__m512i)x);
#elif defined(PW_ISA_AVX2)
    return sum + (ShortVec)_mm256_maddubs_epi16((__m256i)levels, (__m256i)x);
#else
    return sum + even_bytes(levels) * even_bytes(x) + odd_bytes(levels) * odd_bytes(x);
#endif
  }
  static IntVec end(IntVec total, Sum sum) { return total + dot_pairs(sum, Sum{} + int16_t{1}); }
  static Factor factor(IntVec bytes, int index) {
    const IntVec top = bytes << (24 - 8 * index);
    return (ShortVec)((top >> 24 & 0xffff) | (top >> 8 & (int32_t)0xffff0000));
  }
  static IntVec add_scaled(IntVec total, Sum sum, Factor factor) { return total + dot_pairs(sum, factor); }
};

template <>
struct Dot<8> {
  using Sum = IntVec;
  static constexpr int kQuads = 8;
  static constexpr bool kIsCentred = true;

  static Sum begin(IntVec total) { return total; }
  static Sum add(Sum sum, IntVec levels, IntVec x) {
    const IntVec centred = levels ^ (int32_t)0x80808080;
#if defined(PW_ISA_AVX512)
    const __mmask64 is_negative = _mm512_movepi8_mask((__m512i)centred);
    const __m512i turned = _mm512_mask_sub_epi8((__m512i)x, is_negative, _mm512_setzero_si512(), (__m512i)x);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)centred), turned);
    return sum + dot_pairs((ShortVec)pairs, ShortVec{} + int16_t{1});
#elif defined(PW_ISA_AVX2)
    // |level| * (x with its sign): at most 2 * 128 * 127, which fits 16 bits.
    const __m256i turned = _mm256_sign_epi8((__m256i)x, (__m256i)centred);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)centred), turned);
    return sum + dot_pairs((ShortVec)pairs, ShortVec{} + int16_t{1});
#else
    return sum + dot_pairs(even_bytes(centred), even_bytes(x)) + dot_pairs(odd_bytes(centred), odd_bytes(x));
#endif
  }
  static IntVec end(IntVec, Sum sum) { return sum; }
};
#endif

#if defined(PW_HAS_BYTE_MATRIX_DOT)
// Sums of products of two lanes of the weight with two rows of x, eight columns at a time: this instruction multiplies
// twice as many bytes as a dot product does.
class PairDot {
 public:
  // x: eight columns of one row, then the same columns of the next. low, high: the levels of the first four and the last
  // four.
  void add(IntVec low, IntVec high, int8x16_t x) {
    const uint32x4_t first = (uint32x4_t)low, second = (uint32x4_t)high;
    sums_[0] = vusmmlaq_s32(sums_[0], vreinterpretq_u8_u32(vzip1q_u32(first, second)), x);
    sums_[1] = vusmmlaq_s32(sums_[1], vreinterpretq_u8_u32(vzip2q_u32(first, second)), x);
  }
  IntVec of_first_row() const { return (IntVec)vuzp1q_s32(sums_[0], sums_[1]); }
  IntVec of_second_row() const { return (IntVec)vuzp2q_s32(sums_[0], sums_[1]); }

 private:
  int32x4_t sums_[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
};
#endif

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
