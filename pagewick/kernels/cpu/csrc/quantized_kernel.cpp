// Products of activations with panels of a quantized weight. Compiled once per instruction set.
#include "matrix.h"
#include "quantized.h"
#include "sums.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

constexpr int64_t kGroup = 4;  // columns whose bytes lie beside each other
constexpr int64_t kScaleBytes = 2 * kPanelRows;
constexpr int64_t kPanelBlockBytes = kBlockRowBytes * kPanelRows;
// Bytes ahead of the current block that are prefetched while a panel is read for the first rows.
constexpr int64_t kAhead = 2 * kPanelBlockBytes;
constexpr int kTileRows = 6;

struct Row {
  const int8_t* values;
  const float* scales;
  const int32_t* offsets;
};

Row prepared_row(const void* prepared, int64_t row, int64_t in_features) {
  const char* const start = static_cast<const char*>(prepared) + row * prepared_row_bytes(in_features);
  const char* const scales = start + in_features;
  return {reinterpret_cast<const int8_t*>(start), reinterpret_cast<const float*>(scales),
          reinterpret_cast<const int32_t*>(scales + in_features / kBlockColumns * 4)};
}

// Four bytes of x for each lane.
inline IntVec broadcast(const int8_t* values) {
  int32_t word;
  memcpy(&word, values, sizeof(word));
  return IntVec{} + word;
}

// sums + the products of the four bytes of each lane; those of `weight` are 128 too large. With kTakesOffset the result
// is too, by 128 times the sum of the bytes of x.
#if defined(PW_HAS_VNNI)
constexpr bool kTakesOffset = true;
inline IntVec dot(IntVec sums, IntVec weight, IntVec x) {
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weight, (__m512i)x);
}
#else
constexpr bool kTakesOffset = false;
inline IntVec dot(IntVec sums, IntVec weight, IntVec x) {
  weight ^= (int32_t)0x80808080;
#if defined(PW_ISA_AVX512)
  const __m512i signed_weight = (__m512i)weight;
  const __m512i turned =
      _mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask(signed_weight), _mm512_setzero_si512(), (__m512i)x);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(signed_weight), turned);
  return (IntVec)_mm512_add_epi32((__m512i)sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(PW_ISA_AVX2)
  // |weight| * (x with weight's sign): at most 2 * 128 * 127, which fits 16 bits.
  const __m256i turned = _mm256_sign_epi8((__m256i)x, (__m256i)weight);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)weight), turned);
  return (IntVec)_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
  for (int shift = 24; shift >= 0; shift -= 8) sums += ((weight << shift) >> 24) * ((x << shift) >> 24);
  return sums;
#endif
}
#endif

template <class T>
void prepare_row(const T* x, int64_t size, Row target) {
  float values[kBlockColumns];
  for (int64_t block = 0; block < size / kBlockColumns; ++block) {
    Vec largest = zero();
    for (int64_t k = 0; k < kBlockColumns; k += kLanes) {
      const Vec part = load(x + block * kBlockColumns + k);
      store(values + k, part);
      largest = max(largest, part < 0.0f ? -part : part);
    }
    const float amax = hmax(largest), factor = amax > 0.0f ? 127.0f / amax : 0.0f;
    int32_t sum = 0;
    int8_t* const out = const_cast<int8_t*>(target.values) + block * kBlockColumns;
    for (int64_t k = 0; k < kBlockColumns; ++k) {
      // Adding 1.5 * 2^23 rounds to the nearest whole number, the even one of two.
      const float rounded = values[k] * factor + 0x1.8p23f;
      int32_t bits;
      memcpy(&bits, &rounded, sizeof(bits));
      const int32_t value = bits - 0x4b400000;
      out[k] = static_cast<int8_t>(value);
      sum += value;
    }
    const_cast<float*>(target.scales)[block] = amax / 127.0f;
    const_cast<int32_t*>(target.offsets)[block] = kTakesOffset ? -128 * sum : 0;
  }
}

void prepare(const QuantizedLinearArgs& args, int64_t first_row, int64_t end_row, void* prepared) {
  with_type(args.dtype, [&](auto* type) {
    using T = Element<decltype(type)>;
    for (int64_t row = first_row; row < end_row; ++row)
      prepare_row(static_cast<const T*>(args.x) + row * args.x_stride, args.in_features,
                  prepared_row(prepared, row, args.in_features));
  });
}

// sums[r][0 .. V * kLanes): the outputs of R rows for the panel's columns from `col` on.
template <int R, int V>
void multiply_tile(const void* prepared, int64_t first_row, int64_t in_features, const uint8_t* panel, int64_t col,
                   bool is_reading, float (*sums)[kPanelRows]) {
  Row rows[R];
  for (int r = 0; r < R; ++r) rows[r] = prepared_row(prepared, first_row + r, in_features);
  Vec total[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) total[r][v] = zero();
  for (int64_t block = 0; block < in_features / kBlockColumns; ++block, panel += kPanelBlockBytes) {
    IntVec products[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) products[r][v] = IntVec{} + rows[r].offsets[block];
    const uint8_t* const bytes = panel + kScaleBytes + col * kGroup;
#pragma GCC unroll 8
    for (int64_t group = 0; group < kBlockColumns / kGroup; ++group) {
      const uint8_t* const source = bytes + group * kPanelRows * kGroup;
      IntVec weight[V];
      for (int v = 0; v < V; ++v) memcpy(&weight[v], source + v * sizeof(IntVec), sizeof(IntVec));
      if (is_reading)
        for (int64_t byte = 0; byte < V * int64_t{sizeof(IntVec)}; byte += 64)
          __builtin_prefetch(source + kAhead + byte, 0, 3);
      for (int r = 0; r < R; ++r) {
        const IntVec x = broadcast(rows[r].values + block * kBlockColumns + group * kGroup);
        for (int v = 0; v < V; ++v) products[r][v] = dot(products[r][v], weight[v], x);
      }
    }
    for (int v = 0; v < V; ++v) {
      const Vec scale = load(reinterpret_cast<const Float16*>(panel) + col + v * kLanes);
      for (int r = 0; r < R; ++r)
        total[r][v] =
            madd(__builtin_convertvector(products[r][v], Vec), scale * set1(rows[r].scales[block]), total[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(sums[r] + col + v * kLanes, total[r][v]);
}

// The number of vectors beside each other for R rows. Each takes two registers: one for integers, one for floats.
template <int R>
constexpr int tile_vectors() {
  int vectors = 1;
  while (4 * vectors * R <= kAccumulators && 2 * vectors * kLanes <= kPanelRows) vectors *= 2;
  return vectors;
}

template <int R>
void multiply_rows(const QuantizedLinearArgs& args, const void* prepared, int64_t row, const uint8_t* panel,
                   bool is_reading, float (*sums)[kPanelRows]) {
  constexpr int kVectors = tile_vectors<R>();
  for (int64_t col = 0; col < kPanelRows; col += kVectors * kLanes)
    multiply_tile<R, kVectors>(prepared, row, args.in_features, panel, col, is_reading, sums);
}

void multiply(const QuantizedLinearArgs& args, const void* prepared, int64_t first_panel, int64_t end_panel,
              int64_t first_row, int64_t end_row) {
  using Tile = void (*)(const QuantizedLinearArgs&, const void*, int64_t, const uint8_t*, bool, float (*)[kPanelRows]);
  constexpr Tile kTiles[kTileRows + 1] = {nullptr,          multiply_rows<1>, multiply_rows<2>, multiply_rows<3>,
                                          multiply_rows<4>, multiply_rows<5>, multiply_rows<6>};
  alignas(64) float sums[kTileRows][kPanelRows];
  for (int64_t panel = first_panel; panel < end_panel; ++panel) {
    const uint8_t* const weight =
        static_cast<const uint8_t*>(args.weight) + panel * (args.in_features / kBlockColumns) * kPanelBlockBytes;
    const int64_t col = panel * kPanelRows, cols = minimum(kPanelRows, args.out_features - col);
    for (int64_t row = first_row; row < end_row; row += kTileRows) {
      const int64_t count = minimum(kTileRows, end_row - row);
      kTiles[count](args, prepared, row, weight, row == first_row, sums);
      with_type(args.dtype, [&](auto* type) {
        using T = Element<decltype(type)>;
        const T* const bias = args.bias == nullptr ? nullptr : static_cast<const T*>(args.bias) + col;
        with_type(args.out_dtype, [&](auto* out_type) {
          using Out = Element<decltype(out_type)>;
          for (int64_t i = 0; i < count; ++i)
            store_sums(sums[i], bias, cols, static_cast<Out*>(args.out) + (row + i) * args.out_stride + col);
        });
      });
    }
  }
}

void unpack(const GatherQuantizedArgs& args, int64_t row_id, void* out) {
  const int64_t num_blocks = args.in_features / kBlockColumns, lane = row_id % kPanelRows;
  const uint8_t* panel =
      static_cast<const uint8_t*>(args.weight) + row_id / kPanelRows * num_blocks * kPanelBlockBytes;
  with_type(args.dtype, [&](auto* type) {
    using T = Element<decltype(type)>;
    for (int64_t block = 0; block < num_blocks; ++block, panel += kPanelBlockBytes) {
      float values[kBlockColumns];
      const float scale = load_part(reinterpret_cast<const Float16*>(panel) + lane, 1)[0];
      for (int64_t k = 0; k < kBlockColumns; ++k)
        values[k] = scale * (panel[kScaleBytes + k / kGroup * kPanelRows * kGroup + lane * kGroup + k % kGroup] - 128);
      for (int64_t k = 0; k < kBlockColumns; k += kLanes)
        store(static_cast<T*>(out) + block * kBlockColumns + k, load(values + k));
    }
  });
}

}  // namespace

extern const QuantizedKernels kQuantized;
const QuantizedKernels kQuantized = {prepare, multiply, unpack};

}  // namespace PW_ISA
}  // namespace pagewick
