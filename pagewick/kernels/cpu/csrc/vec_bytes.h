// The vector layer's numbers of 8 and of 4 bits, in which a KV cache can be kept: int8, fp8 with 4 or 5 bits of exponent
// (Micikevicius et al., arXiv:2209.05433), and int4.
//
// Every one of them is exact in bf16. The bit patterns of fp8's NaN and infinities, which are never stored, count as
// further finite numbers, so that memory that was never written cannot make a sum NaN.
#pragma once

#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// kTargets: what the largest magnitude of a vector may become; the first is the format's largest number.
// ../../reference_kv.py explains them.
struct Int8 {
  static constexpr float kTargets[] = {127.0f};
  uint8_t bits;
};

// Two numbers from -8 to 7, the first in the low half. In a row that is not stored yet, a byte has one.
struct Int4 {
  static constexpr float kTargets[] = {7.0f, 7.75f, 8.5f};
  uint8_t bits;
};

// A number is 2^(exponent - kBias) * 1.mantissa, or 2^(1 - kBias) * 0.mantissa with an exponent of 0.
struct Fp8E4m3 {
  static constexpr int kMantissaBits = 3, kBias = 7;
  static constexpr float kTargets[] = {448.0f, 416.0f, 384.0f, 352.0f, 320.0f, 288.0f, 256.0f, 240.0f};
  uint8_t bits;
};
struct Fp8E5m2 {
  static constexpr int kMantissaBits = 2, kBias = 15;
  static constexpr float kTargets[] = {57344.0f, 49152.0f, 40960.0f, 32768.0f};
  uint8_t bits;
};

template <class T>
constexpr bool kIsByte = sizeof(T) == 1;

// The largest finite number.
template <class T>
constexpr float kLargest = T::kTargets[0];

// The numbers in an element of a cache.
template <class T>
constexpr int kNumbersOf = kIsSame<T, Int4> ? 2 : 1;

// Calls f with a null pointer of the element type of a cache of latents, which dtype names.
template <class F>
auto with_cache_type(DType dtype, const F& f) {
  if (dtype == DType::kInt8) return f(static_cast<Int8*>(nullptr));
  if (dtype == DType::kFp8E4m3) return f(static_cast<Fp8E4m3*>(nullptr));
  if (dtype == DType::kFp8E5m2) return f(static_cast<Fp8E5m2*>(nullptr));
  return with_type(dtype, f);
}

// Calls f with a null pointer of the element type of a cache of heads, which dtype names.
template <class F>
auto with_heads_type(DType dtype, const F& f) {
  if (dtype == DType::kInt4) return f(static_cast<Int4*>(nullptr));
  return with_cache_type(dtype, f);
}

typedef uint8_t ByteVec __attribute__((vector_size(kLanes)));

constexpr float power_of_two(int exponent) {
  float power = 1.0f;
  for (; exponent > 0; --exponent) power *= 2.0f;
  for (; exponent < 0; ++exponent) power *= 0.5f;
  return power;
}

// Returns the numbers in the top bytes of words, whose other bytes do not matter.
inline Vec widen_top(const Int8*, WordVec words) {
  const IntVec numbers = (IntVec)words >> 24;
#if defined(PW_ISA_AVX512)
  return (Vec)_mm512_cvtepi32_ps((__m512i)numbers);
#else
  return __builtin_convertvector(numbers, Vec);
#endif
}

template <class T>
inline Vec widen_top(const T*, WordVec words) {
  // The sign stays, and exponent and mantissa move to the low end of float32's exponent and the top of its mantissa.
  constexpr int kShift = 1 + T::kMantissaBits;
  constexpr uint32_t kMask = 0x80000000u | 0x7f000000u >> kShift;
  return (Vec)(WordVec)((WordVec)((IntVec)words >> kShift) & kMask) * power_of_two(127 - T::kBias);
}

// Returns kLanes numbers that lie beside each other.
template <class T>
inline Vec load_bytes(const T* source) {
  ByteVec bytes;
  memcpy(&bytes, source, sizeof(bytes));
  return widen_top(source, __builtin_convertvector(bytes, WordVec) << 24);
}

inline void load_pairs(const Int4* source, Vec& even, Vec& odd) {
  ByteVec bytes;
  memcpy(&bytes, source, sizeof(bytes));
  const WordVec words = __builtin_convertvector(bytes, WordVec);
  even = __builtin_convertvector((IntVec)(words << 28) >> 28, Vec);
  odd = __builtin_convertvector((IntVec)(words << 24) >> 28, Vec);
}

// Splits 2 * kLanes numbers into those with even and those with odd places.
template <class T>
inline void load_pairs(const T* source, Vec& even, Vec& odd) {
  const WordVec words = load_halves(source);
  even = widen_top(source, words << 24);
  odd = widen_top(source, words << 16);
}

#if defined(PW_HAS_BF16_DOT)
// Returns 2 * kLanes numbers as bf16.
inline __m512i load_as_bfloat16(const Int8* source) {
  const auto part = [source](int index) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source) + index)));
  };
  return (__m512i)_mm512_cvtne2ps_pbh(part(1), part(0));
}

inline __m512i load_as_bfloat16(const Int4* source) {
  // By the numbers' bits.
  const __m512i numbers = _mm512_broadcast_i64x4(_mm256_setr_epi16(
      0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, -0x3f00, -0x3f20, -0x3f40, -0x3f60, -0x3f80, -0x3fc0,
      -0x4000, -0x4080));
  const __m512i words = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
  constexpr int kAOrBInC = 0xa8;
  const __m512i places = _mm512_ternarylogic_epi32(words, _mm512_slli_epi32(words, 12),
                                                   _mm512_set1_epi32(0x000f000f), kAOrBInC);
  return _mm512_permutexvar_epi16(places, numbers);
}

// The bf16 numbers 2^(1 - kBias) * 0.mantissa, by mantissa.
template <class T>
constexpr uint16_t kSmall[32] = {};
template <>
constexpr uint16_t kSmall<Fp8E4m3>[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
template <>
constexpr uint16_t kSmall<Fp8E5m2>[32] = {0, 0x3780, 0x3800, 0x3840};

template <class T>
inline __m512i load_as_bfloat16(const T* source) {
  constexpr int kShift = 7 - T::kMantissaBits, kExponent = 0x80 - (1 << T::kMantissaBits);
  const __m512i bytes = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
  const __m512i shifted = _mm512_and_si512(_mm512_slli_epi16(bytes, kShift), _mm512_set1_epi16(0x7f << kShift));
  const __m512i normal = _mm512_add_epi16(shifted, _mm512_set1_epi16((127 - T::kBias) << 7));
  // A product takes bf16's own subnormal numbers for 0, so small ones come from a table.
  const __mmask32 is_small = _mm512_testn_epi16_mask(bytes, _mm512_set1_epi16(kExponent));
  const __m512i magnitude =
      _mm512_mask_permutexvar_epi16(normal, is_small, bytes, _mm512_loadu_si512(kSmall<T>));
  constexpr int kAOrBAndC = 0xf8;
  return _mm512_ternarylogic_epi64(magnitude, bytes, _mm512_set1_epi16(-0x8000), kAOrBAndC);
}
#endif

// Rounds numbers to the nearest of the format, ties to even, and those beyond the largest to that.
inline WordVec narrow_byte(const Int8*, Vec value) {
  const Vec bounded = min(max(value, set1(-kLargest<Int8>)), set1(kLargest<Int8>));
  // Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits of the mantissa.
  return (WordVec)(bounded + 0x1.8p23f) & 0xff;
}

inline WordVec narrow_byte(const Int4*, Vec value) {
  const Vec bounded = min(max(value, set1(-kLargest<Int4>)), set1(kLargest<Int4>));
  return (WordVec)(bounded + 0x1.8p23f) & 0xf;
}

template <class T>
inline WordVec narrow_byte(const T*, Vec value) {
  constexpr int kDropped = 23 - T::kMantissaBits;
  constexpr uint32_t kLeastNormal = (128 - T::kBias) << 23;
  // Adding this leaves a small number, in units of the smallest, in the low bits of the mantissa.
  constexpr float kRounder = power_of_two(23 + 1 - T::kBias - T::kMantissaBits);
  const WordVec sign = (WordVec)value >> 24 & 0x80;
  const WordVec magnitude = (WordVec)min((Vec)((WordVec)value & 0x7fffffff), set1(kLargest<T>));
  const WordVec normal = (magnitude - ((127 - T::kBias) << 23) + ((1u << (kDropped - 1)) - 1) +
                          ((magnitude >> kDropped) & 1)) >> kDropped;
  const WordVec small = (WordVec)((Vec)magnitude + kRounder) - (WordVec)set1(kRounder);
  return (magnitude < kLeastNormal ? small : normal) | sign;
}

template <class T>
inline void store_bytes(T* target, WordVec words, int64_t count) {
  const ByteVec bytes = __builtin_convertvector(words, ByteVec);
  memcpy(target, &bytes, count);
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
