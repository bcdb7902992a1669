// The vector layer. Code that depends on an instruction set is here, in vec_int8.h and vec_math.h, and in the panels of
// matrices. Kernels are written once over it and compiled once per set, with -DPW_ISA=<namespace> and one of the
// PW_ISA_* macros.
//
// Everything lies in an anonymous namespace and no function of the standard library is used, so that
// no code compiled for a newer processor can be linked into the path of an older one.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

// A set includes the one whose macro it defines.
#if defined(PW_ISA_AMX)
#define PW_HAS_AMX
#define PW_ISA_AVX512_BF16
#endif
#if defined(PW_ISA_AVX512_BF16)
// Every processor with dot products of bf16 also has those of bytes.
#define PW_HAS_BF16_DOT
#define PW_ISA_AVX512_VNNI
#endif
#if defined(PW_ISA_AVX512_VNNI)
#define PW_HAS_BYTE_DOT
#define PW_ISA_AVX512
#endif
#if defined(PW_ISA_AVX_VNNI)
#define PW_HAS_BYTE_DOT
#define PW_ISA_AVX2
#endif
#if defined(PW_ISA_NEON_I8MM)
#define PW_HAS_BYTE_MATRIX_DOT
#define PW_ISA_NEON_DOTPROD
#endif
#if defined(PW_ISA_NEON_DOTPROD)
#define PW_HAS_BYTE_DOT
#define PW_ISA_NEON
#endif

#if defined(PW_ISA_AVX512) || defined(PW_ISA_AVX2)
#include <immintrin.h>
#elif defined(PW_ISA_NEON)
#include <arm_neon.h>
#endif

namespace pagewick {
namespace PW_ISA {
namespace {

// kAccumulators: the number of vectors that a register tile may hold beside its operands.
#if defined(PW_ISA_AVX512)
constexpr int kLanes = 16, kAccumulators = 24;
#elif defined(PW_ISA_AVX2)
constexpr int kLanes = 8, kAccumulators = 12;
#elif defined(PW_ISA_NEON)
constexpr int kLanes = 4, kAccumulators = 24;
#else
constexpr int kLanes = 4, kAccumulators = 12;
#endif

// GCC and Clang vectors: + - * < ?: << & and casts of bits work on them for every instruction set.
typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class Pointer>
struct Pointee;
template <class T>
struct Pointee<T*> {
  using type = T;
};
template <class Pointer>
using Element = typename Pointee<Pointer>::type;

template <class A, class B>
constexpr bool kIsSame = false;
template <class A>
constexpr bool kIsSame<A, A> = true;

inline int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t maximum(int64_t a, int64_t b) { return a > b ? a : b; }

// Calls f with a null pointer of the element type that dtype names.
template <class F>
auto with_type(DType dtype, const F& f) {
  if (dtype == DType::kBFloat16) return f(static_cast<BFloat16*>(nullptr));
  if (dtype == DType::kFloat16) return f(static_cast<Float16*>(nullptr));
  return f(static_cast<float*>(nullptr));
}

inline Vec zero() { return Vec{}; }
inline Vec set1(float value) {
#if defined(PW_ISA_AVX512)
  return (Vec)_mm512_set1_ps(value);
#elif defined(PW_ISA_AVX2)
  return (Vec)_mm256_set1_ps(value);
#elif defined(PW_ISA_NEON)
  return (Vec)vdupq_n_f32(value);
#else
  return Vec{value, value, value, value};
#endif
}
// A NaN in b is kept.
inline Vec max(Vec a, Vec b) {
#if defined(PW_ISA_AVX512)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);  // GCC makes two instructions of the comparison
#else
  return a > b ? a : b;
#endif
}

inline Vec min(Vec a, Vec b) {
#if defined(PW_ISA_AVX512)
  return (Vec)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}

inline Vec sqrt(Vec value) {
#if defined(PW_ISA_AVX512)
  return (Vec)_mm512_sqrt_ps((__m512)value);
#elif defined(PW_ISA_AVX2)
  return (Vec)_mm256_sqrt_ps((__m256)value);
#else
  for (int i = 0; i < kLanes; ++i) value[i] = __builtin_sqrtf(value[i]);
  return value;
#endif
}

inline Vec load(const float* source) {
  Vec value;
  memcpy(&value, source, sizeof(value));
  return value;
}

inline void store(float* target, Vec value) { memcpy(target, &value, sizeof(value)); }

// a * b + c, fused where the instruction set can.
inline Vec madd(Vec a, Vec b, Vec c) {
#if defined(PW_ISA_AVX512)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(PW_ISA_AVX2)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(PW_ISA_NEON)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Halves are folded until one lane is left, which is a fixed order of additions.
inline float hsum(Vec value) {
#if defined(PW_ISA_AVX512)
  return _mm512_reduce_add_ps((__m512)value);
#else
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) value[i] += value[i + width];
  return value[0];
#endif
}

inline float hmax(Vec value) {
#if defined(PW_ISA_AVX512)
  return _mm512_reduce_max_ps((__m512)value);
#else
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) value[i] = value[i] > value[i + width] ? value[i] : value[i + width];
  return value[0];
#endif
}

inline uint32_t hmax(WordVec words) {
#if defined(PW_ISA_AVX512)
  return _mm512_reduce_max_epu32((__m512i)words);
#else
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) words[i] = words[i] > words[i + width] ? words[i] : words[i + width];
  return words[0];
#endif
}

// Merge two inputs lane by lane (a0 b0 a1 b1 ...): the first half of the result, and the second half.
inline Vec interleave_low(Vec a, Vec b) {
#if defined(PW_ISA_AVX512)
  const __m512i lanes = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  return (Vec)_mm512_permutex2var_ps((__m512)a, lanes, (__m512)b);
#elif defined(PW_ISA_AVX2)
  const __m256 low = _mm256_unpacklo_ps((__m256)a, (__m256)b), high = _mm256_unpackhi_ps((__m256)a, (__m256)b);
  return (Vec)_mm256_permute2f128_ps(low, high, 0x20);
#else
  return Vec{a[0], b[0], a[1], b[1]};
#endif
}

inline Vec interleave_high(Vec a, Vec b) {
#if defined(PW_ISA_AVX512)
  const __m512i lanes = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  return (Vec)_mm512_permutex2var_ps((__m512)a, lanes, (__m512)b);
#elif defined(PW_ISA_AVX2)
  const __m256 low = _mm256_unpacklo_ps((__m256)a, (__m256)b), high = _mm256_unpackhi_ps((__m256)a, (__m256)b);
  return (Vec)_mm256_permute2f128_ps(low, high, 0x31);
#else
  return Vec{a[2], b[2], a[3], b[3]};
#endif
}

// Exchanges rows[i][j] and rows[j][i] by interleaving each row with the row half a matrix away, log2(kLanes) times.
inline void transpose(Vec (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int stage = 1; stage < kLanes; stage *= 2) {
    Vec next[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = interleave_low(rows[i], rows[i + kLanes / 2]);
      next[2 * i + 1] = interleave_high(rows[i], rows[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

// Convert between adjacent 16-bit values and 16-bit values in the low half of each word.
inline WordVec widen(HalfVec halves) {
#if defined(PW_ISA_AVX512)
  return (WordVec)_mm512_cvtepu16_epi32((__m256i)halves);  // __builtin_convertvector takes three instructions
#elif defined(PW_ISA_AVX2)
  return (WordVec)_mm256_cvtepu16_epi32((__m128i)halves);
#else
  return __builtin_convertvector(halves, WordVec);
#endif
}

inline HalfVec narrow(WordVec words) {
#if defined(PW_ISA_AVX512)
  return (HalfVec)_mm512_cvtepi32_epi16((__m512i)words);
#else
  return __builtin_convertvector(words, HalfVec);
#endif
}

inline Vec widen_bfloat16(WordVec halves) { return (Vec)(halves << 16); }

inline WordVec narrow_bfloat16(Vec value) {
  const WordVec bits = (WordVec)value;
  const WordVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return value == value ? rounded : (bits >> 16) | 0x40;
}

// Convert IEEE half precision in the low 16 bits of each word, subnormals and infinities included.
inline Vec widen_float16(WordVec halves) {
#if defined(PW_ISA_AVX512)
  return (Vec)_mm512_cvtph_ps((__m256i)narrow(halves));
#elif defined(PW_ISA_AVX2)
  return (Vec)_mm256_cvtph_ps((__m128i)narrow(halves));
#elif defined(PW_ISA_NEON)
  return (Vec)vcvt_f32_f16((float16x4_t)narrow(halves));
#else
  const WordVec magnitude = (halves & 0x7fff) << 13;
  const WordVec scaled = (WordVec)((Vec)magnitude * 0x1p112f);
  const WordVec finite_or_not = magnitude >= 0x7c00u << 13 ? magnitude | 0x7f800000 : scaled;
  return (Vec)(finite_or_not | (halves & 0x8000) << 16);
#endif
}

inline WordVec narrow_float16(Vec value) {
#if defined(PW_ISA_AVX512)
  return widen((HalfVec)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(PW_ISA_AVX2)
  return widen((HalfVec)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(PW_ISA_NEON)
  return widen((HalfVec)vcvt_f16_f32((float32x4_t)value));
#else
  const WordVec sign = (WordVec)value >> 16 & 0x8000, magnitude = (WordVec)value & 0x7fffffff;
  const WordVec normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Adding 0.5 leaves the value, in units of the smallest half, in the low bits of the mantissa.
  const WordVec subnormal = (WordVec)((Vec)magnitude + 0.5f) - 0x3f000000;
  WordVec half = magnitude < 113u << 23 ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? WordVec{} + 0x7c00 : half;
  half = magnitude > 0x7f800000 ? WordVec{} + 0x7e00 : half;
  return half | sign;
#endif
}

inline WordVec load_halves(const void* source) {
  HalfVec halves;
  memcpy(&halves, source, sizeof(halves));
  return widen(halves);
}

inline void store_halves(void* target, WordVec words) {
  const HalfVec halves = narrow(words);
  memcpy(target, &halves, sizeof(halves));
}

inline Vec load(const BFloat16* source) { return widen_bfloat16(load_halves(source)); }
inline Vec load(const Float16* source) { return widen_float16(load_halves(source)); }
inline void store(BFloat16* target, Vec value) { store_halves(target, narrow_bfloat16(value)); }
inline void store(Float16* target, Vec value) { store_halves(target, narrow_float16(value)); }

// As store, for results of computations: where the processor rounds to bf16 itself, numbers below 2^-126 become 0.
template <class T>
inline void store_result(T* target, Vec value) {
  store(target, value);
}
#if defined(PW_HAS_BF16_DOT)
inline void store_result(BFloat16* target, Vec value) {
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
  memcpy(target, &rounded, sizeof(rounded));
}
#endif

// Load and store the first `count` < kLanes elements only. The other lanes of a loaded vector are 0.
template <class T>
inline Vec load_part(const T* source, int64_t count) {
  T elements[kLanes] = {};
  memcpy(elements, source, count * sizeof(T));
  return load(elements);
}

template <class T>
inline void store_part(T* target, Vec value, int64_t count) {
  T elements[kLanes];
  store(elements, value);
  memcpy(target, elements, count * sizeof(T));
}

#if defined(PW_HAS_BF16_DOT)
// Stores 2 * kLanes values rounded to bf16 and adds the rounded values to `sum`, two neighbours one after the other.
// Numbers below 2^-126 become 0: dot products, for which the values are stored, take them for 0 as well.
inline Vec store_and_add(BFloat16* target, Vec first, Vec second, Vec sum) {
  const __m512bh rounded = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  memcpy(target, &rounded, sizeof(rounded));
  return (Vec)_mm512_dpbf16_ps((__m512)sum, rounded, (__m512bh)_mm512_set1_epi16(0x3f80));
}
#endif

// Returns the float32 value that storing as T and loading again gives.
inline Vec round_to(const float*, Vec value) { return value; }
inline Vec round_to(const BFloat16*, Vec value) { return widen_bfloat16(narrow_bfloat16(value)); }
inline Vec round_to(const Float16*, Vec value) { return widen_float16(narrow_float16(value)); }

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
