// Quantizers of blocks. Compiled once per instruction set.
#include "quantizer_search.h"
#include "quantizers.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// As Format in reference_quantizers.py.
template <QuantizedFormat F, int Numbers, int NumBytes, int Group, int Low, int Top, bool HasMinimum, int ScaleLow = 0,
          int ScaleTop = 0, bool HasZero = false>
struct Shape {
  static constexpr QuantizedFormat kFormat = F;
  static constexpr int kNumbers = Numbers, kNumBytes = NumBytes, kGroup = Group, kLow = Low, kTop = Top;
  static constexpr bool kHasMinimum = HasMinimum;
  static constexpr int kScaleLow = ScaleLow, kScaleTop = ScaleTop;
  static constexpr bool kHasZero = HasZero;  // in place of a minimum
  static constexpr int kPerBlock = Numbers / Group;  // groups
  static constexpr int kNumGroups = kChunkNumbers / Group, kNumBlocks = kChunkNumbers / Numbers;  // of a chunk
};

// An int4 format.
template <QuantizedFormat F, int Group>
using Int4 = Shape<F, Group, Group / 2 + 5, Group, 0, 15, true, 0, 0, true>;

template <class S>
struct Chunk {
  alignas(64) float numbers[kChunkNumbers];               // as in the rows
  alignas(64) float x[S::kGroup][S::kNumGroups];          // a group is a column
  alignas(64) float weights[S::kGroup][S::kNumGroups];    // how much errors count
  alignas(64) float importance[S::kGroup][S::kNumGroups];
  alignas(64) float scale[S::kNumGroups], scale_weight[S::kNumGroups], minimum[S::kNumGroups], sums[S::kNumGroups];
  uint16_t d[S::kNumBlocks], dmin[S::kNumBlocks];                      // float16
  uint8_t scales[S::kNumBlocks][S::kPerBlock], minima[S::kNumBlocks][S::kPerBlock];  // from 0 on
  int64_t num_blocks;
};

// Stores rows of groups [kNumGroups][kGroup] as columns.
template <class S>
void to_columns(const float* source, float (*target)[S::kNumGroups]) {
  for (int group = 0; group < S::kNumGroups; group += kLanes)
    for (int k = 0; k < S::kGroup; k += kLanes) {
      Vec tile[kLanes];
      for (int i = 0; i < kLanes; ++i) tile[i] = load(source + (group + i) * S::kGroup + k);
      transpose(tile);
      for (int i = 0; i < kLanes; ++i) store(&target[k + i][group], tile[i]);
    }
}

// Reads a chunk; returns whether all of its numbers are finite and not too large.
template <class S, class T>
bool read(const QuantizeWeightArgs& args, int64_t first_block, Chunk<S>& chunk) {
  const int64_t per_row = args.num_columns / S::kNumbers;
  alignas(64) float importance[kChunkNumbers];
  Vec is_good = set1(1.0f);
  for (int64_t i = 0; i < chunk.num_blocks; ++i) {
    const int64_t row = (first_block + i) / per_row, col = (first_block + i) % per_row * S::kNumbers;
    const T* const source = static_cast<const T*>(args.x) + row * args.x_stride + col;
    for (int64_t k = 0; k < S::kNumbers; k += kLanes) {
      const Vec value = load(source + k);
      is_good = magnitude(value) <= kLargest ? is_good : zero();
      store(chunk.numbers + i * S::kNumbers + k, value);
      if (args.importance != nullptr) store(importance + i * S::kNumbers + k, load(args.importance + col + k));
    }
  }
  for (int64_t k = chunk.num_blocks * S::kNumbers; k < kChunkNumbers; ++k) chunk.numbers[k] = importance[k] = 0.0f;
  to_columns<S>(chunk.numbers, chunk.x);
  if (args.importance != nullptr) to_columns<S>(importance, chunk.importance);
  return hmax(1.0f - is_good) == 0.0f;
}

// error_weights of the reference, and their sums.
template <class S>
void weigh(bool has_importance, Chunk<S>& chunk) {
  const bool is_magnitude = !has_importance && S::kGroup == 16;
  alignas(64) float mean[S::kNumGroups];
  for (int group = 0; group < S::kNumGroups; group += kLanes) {
    Vec sum = zero();
    for (int k = 0; k < S::kGroup; ++k) sum += load(&chunk.x[k][group]) * load(&chunk.x[k][group]);
    store(mean + group, sum);
  }
  for (int block = 0; block < S::kNumBlocks; ++block) {
    float sum = mean[block * S::kPerBlock];
    for (int i = 1; i < S::kPerBlock; ++i) sum += mean[block * S::kPerBlock + i];
    for (int i = 0; i < S::kPerBlock; ++i) mean[block * S::kPerBlock + i] = sum / S::kNumbers;
  }
  for (int group = 0; group < S::kNumGroups; group += kLanes) {
    Vec sum = zero();
    for (int k = 0; k < S::kGroup; ++k) {
      const Vec value = load(&chunk.x[k][group]);
      Vec weight = is_magnitude ? magnitude(value) : sqrt(load(mean + group) + value * value);
      if (has_importance) weight = weight * load(&chunk.importance[k][group]);
      store(&chunk.weights[k][group], weight);
      sum += weight;
    }
    store(chunk.sums + group, sum);
  }
}

// round_scales of the reference: scale becomes the value of the whole numbers. weights: null for no search.
template <class S>
void round_scales(float* scale, const float* weights, int low, uint16_t* halves, uint8_t (*whole)[S::kPerBlock]) {
  alignas(64) float x[S::kPerBlock][S::kNumBlocks], w[S::kPerBlock][S::kNumBlocks];
  for (int block = 0; block < S::kNumBlocks; ++block)
    for (int i = 0; i < S::kPerBlock; ++i) {
      x[i][block] = scale[block * S::kPerBlock + i];
      w[i][block] = weights == nullptr ? 0.0f : weights[block * S::kPerBlock + i];
    }
  for (int block = 0; block < S::kNumBlocks; block += kLanes) {
    const float* const block_weights = weights == nullptr ? nullptr : &w[0][block];
    const Fit fit = fit_scale<S::kPerBlock>(&x[0][block], block_weights, S::kNumBlocks, low, S::kScaleTop);
    const WordVec half = narrow_float16(fit.scale);
    store_halves(halves + block, half);
    const Vec d = widen_float16(half), factor = inverse(d);
    for (int i = 0; i < S::kPerBlock; ++i) {
      const Vec number = nearest(load(&x[i][block]) * factor, set1(low), set1(S::kScaleTop));
      for (int lane = 0; lane < kLanes; ++lane) {
        whole[block + lane][i] = static_cast<uint8_t>(static_cast<int>(number[lane]) - low);
        scale[(block + lane) * S::kPerBlock + i] = number[lane] * d[lane];
      }
    }
  }
}

// Rounds numbers to float16; with `replace`, the rounded values take their place.
template <class S>
void round_to_halves(float* numbers, uint16_t* halves, bool replace) {
  for (int i = 0; i < S::kNumGroups; i += kLanes) {
    const WordVec half = narrow_float16(load(numbers + i));
    store_halves(halves + i, half);
    if (replace) store(numbers + i, widen_float16(half));
  }
}

// Fits minima to rounded scales.
template <class S>
void fit_minima(Chunk<S>& chunk) {
  for (int group = 0; group < S::kNumGroups; group += kLanes) {
    const Vec scale = load(chunk.scale + group), minimum = load(chunk.minimum + group), factor = inverse(scale);
    Vec sum_x = zero(), sum_l = zero();
    for (int k = 0; k < S::kGroup; ++k) {
      const Vec value = load(&chunk.x[k][group]), weight = load(&chunk.weights[k][group]);
      sum_x += weight * value;
      sum_l += weight * nearest((value - minimum) * factor, zero(), set1(S::kTop));
    }
    store(chunk.minimum + group, min((sum_x - scale * sum_l) * inverse(load(chunk.sums + group)), zero()));
  }
}

// Computes everything but the levels.
template <class S>
void fit_chunk(bool search, Chunk<S>& chunk) {
  for (int group = 0; group < S::kNumGroups; group += kLanes) {
    const float* const weights = search ? &chunk.weights[0][group] : nullptr;
    Fit fit;
    if constexpr (S::kHasZero)
      fit = fit_scale_and_zero<S>(&chunk.x[0][group], weights);
    else if constexpr (S::kHasMinimum)
      fit = fit_scale_and_minimum<S>(&chunk.x[0][group], weights);
    else
      fit = fit_scale<S::kGroup>(&chunk.x[0][group], weights, S::kNumGroups, S::kLow, S::kTop);
    store(chunk.scale + group, fit.scale);
    store(chunk.scale_weight + group, fit.weight);
    store(chunk.minimum + group, fit.minimum);
  }
  if constexpr (S::kHasZero) return;
  if constexpr (S::kScaleTop == 0) {
    round_to_halves<S>(chunk.scale, chunk.d, search);
    if (S::kHasMinimum) round_to_halves<S>(chunk.minimum, chunk.dmin, search);
  } else {
    round_scales<S>(chunk.scale, search ? chunk.scale_weight : nullptr, S::kScaleLow, chunk.d, chunk.scales);
    if (!S::kHasMinimum) return;
    if (search) fit_minima(chunk);
    for (float& minimum : chunk.minimum) minimum = -minimum;
    round_scales<S>(chunk.minimum, search ? chunk.sums : nullptr, 0, chunk.dmin, chunk.minima);
    for (float& minimum : chunk.minimum) minimum = -minimum;
  }
}

// The whole part of each number; no number is negative.
inline Vec whole_part(Vec x) { return __builtin_convertvector(__builtin_convertvector(x, IntVec), Vec); }

// nearest_levels of the reference for a group.
template <class S>
void find_levels(const float* x, float scale, float minimum, uint8_t* levels) {
  typedef uint8_t ByteVec __attribute__((vector_size(kLanes)));
  const Vec factor = set1(inverse(scale)), shift = set1(minimum);
  for (int k = 0; k < S::kGroup; k += kLanes) {
    Vec level = (S::kHasMinimum && !S::kHasZero ? load(x + k) - shift : load(x + k)) * factor;
    if (S::kHasZero) level += shift;
    if (S::kLow == -S::kTop) {
      const Vec size = magnitude(level), whole = whole_part(size), rounded = whole + whole_part(2.0f * (size - whole));
      level = (level < 0.0f ? -rounded : rounded) - S::kLow;
    } else {
      level += 0.5f - S::kLow;
    }
    level = min(max(level, zero()), set1(S::kTop - S::kLow));
    const ByteVec bytes = __builtin_convertvector(__builtin_convertvector(level, IntVec), ByteVec);
    memcpy(levels + k, &bytes, sizeof(bytes));
  }
}

// Writes bytes that have kBits bits of kParts parts each: those from `shift` on.
template <int kParts, int kBytes, int kBits>
uint8_t* interleave(const uint8_t* parts, int shift, uint8_t* out) {
  for (int i = 0; i < kBytes; ++i) {
    uint32_t byte = 0;
    for (int part = 0; part < kParts; ++part)
      byte |= (parts[part * kBytes + i] >> shift & ((1u << kBits) - 1)) << (kBits * part);
    out[i] = static_cast<uint8_t>(byte);
  }
  return out + kBytes;
}

uint8_t* write_half(uint16_t half, uint8_t* out) {
  memcpy(out, &half, sizeof(half));
  return out + sizeof(half);
}

uint8_t* write_six_bit_scales(const uint8_t* scales, const uint8_t* minima, uint8_t* out) {
  for (int i = 0; i < 4; ++i) {
    out[i] = static_cast<uint8_t>(scales[i] | scales[i + 4] >> 4 << 6);
    out[i + 4] = static_cast<uint8_t>(minima[i] | minima[i + 4] >> 4 << 6);
    out[i + 8] = static_cast<uint8_t>((scales[i + 4] & 15) | (minima[i + 4] & 15) << 4);
  }
  return out + 12;
}

// Writes block i as reference_packing.py does.
template <class S>
void write(const Chunk<S>& chunk, int64_t i, const uint8_t* levels, uint8_t* out) {
  constexpr QuantizedFormat F = S::kFormat;
  if constexpr (S::kHasZero) {
    memcpy(out, &chunk.scale[i], sizeof(float));
    out[4] = static_cast<uint8_t>(chunk.minimum[i]);
    out += 5;
    for (int k = 0; k < S::kNumbers; k += 32) out = interleave<2, 16, 4>(levels + k, 0, out);
  } else if constexpr (S::kNumbers == 32) {
    out = write_half(chunk.d[i], out);
    if (S::kHasMinimum) out = write_half(chunk.dmin[i], out);
    if constexpr (F == QuantizedFormat::kQ8_0) {
      for (int k = 0; k < S::kNumbers; ++k) out[k] = static_cast<uint8_t>(levels[k] - 127);
      return;
    }
    if (S::kTop - S::kLow == 31)
      for (int k = 0; k < S::kNumbers; k += 8) out = interleave<8, 1, 1>(levels + k, 4, out);
    interleave<2, 16, 4>(levels, 0, out);
  } else if constexpr (F == QuantizedFormat::kQ2_K) {
    for (int k = 0; k < 16; ++k) *out++ = static_cast<uint8_t>(chunk.scales[i][k] | chunk.minima[i][k] << 4);
    for (int k = 0; k < 256; k += 128) out = interleave<4, 32, 2>(levels + k, 0, out);
    write_half(chunk.dmin[i], write_half(chunk.d[i], out));
  } else if constexpr (F == QuantizedFormat::kQ3_K) {
    out = interleave<8, 32, 1>(levels, 2, out);
    for (int k = 0; k < 256; k += 128) out = interleave<4, 32, 2>(levels + k, 0, out);
    out = interleave<4, 4, 2>(chunk.scales[i], 4, interleave<2, 8, 4>(chunk.scales[i], 0, out));
    write_half(chunk.d[i], out);
  } else if constexpr (F == QuantizedFormat::kQ6_K) {
    for (int k = 0; k < 256; k += 128) out = interleave<2, 64, 4>(levels + k, 0, out);
    for (int k = 0; k < 256; k += 128) out = interleave<4, 32, 2>(levels + k, 4, out);
    for (int k = 0; k < 16; ++k) *out++ = static_cast<uint8_t>(chunk.scales[i][k] - 128);
    write_half(chunk.d[i], out);
  } else {
    out = write_half(chunk.dmin[i], write_half(chunk.d[i], out));
    out = write_six_bit_scales(chunk.scales[i], chunk.minima[i], out);
    if (F == QuantizedFormat::kQ5_K) out = interleave<8, 32, 1>(levels, 4, out);
    for (int k = 0; k < 256; k += 64) out = interleave<2, 32, 4>(levels + k, 0, out);
  }
}

inline bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

template <class S>
bool quantize_chunk(const QuantizeWeightArgs& args, int64_t index) {
  Chunk<S> chunk;
  const int64_t first_block = index * S::kNumBlocks;
  chunk.num_blocks = minimum(S::kNumBlocks, args.num_rows * args.num_columns / S::kNumbers - first_block);
  if (!with_type(args.dtype, [&](auto* type) { return read<S, Element<decltype(type)>>(args, first_block, chunk); }))
    return false;
  const bool search = args.search != 0 && S::kFormat != QuantizedFormat::kQ8_0;
  if (search) weigh<S>(args.importance != nullptr, chunk);
  fit_chunk<S>(search, chunk);
  for (int64_t i = 0; i < chunk.num_blocks; ++i) {
    const bool is_good = S::kHasZero || (is_finite(chunk.d[i]) && (!S::kHasMinimum || is_finite(chunk.dmin[i])));
    if (!is_good) return false;
    uint8_t levels[S::kNumbers];
    for (int64_t group = 0; group < S::kPerBlock; ++group)
      find_levels<S>(chunk.numbers + i * S::kNumbers + group * S::kGroup, chunk.scale[i * S::kPerBlock + group],
                     chunk.minimum[i * S::kPerBlock + group], levels + group * S::kGroup);
    write<S>(chunk, i, levels, args.rows + (first_block + i) * S::kNumBytes);
  }
  return true;
}

bool quantize(const QuantizeWeightArgs& args, int64_t index) {
  using F = QuantizedFormat;
  switch (args.format) {
    case F::kQ4_0: return quantize_chunk<Shape<F::kQ4_0, 32, 18, 32, -8, 7, false>>(args, index);
    case F::kQ4_1: return quantize_chunk<Shape<F::kQ4_1, 32, 20, 32, 0, 15, true>>(args, index);
    case F::kQ5_0: return quantize_chunk<Shape<F::kQ5_0, 32, 22, 32, -16, 15, false>>(args, index);
    case F::kQ5_1: return quantize_chunk<Shape<F::kQ5_1, 32, 24, 32, 0, 31, true>>(args, index);
    case F::kQ8_0: return quantize_chunk<Shape<F::kQ8_0, 32, 34, 32, -127, 127, false>>(args, index);
    case F::kQ2_K: return quantize_chunk<Shape<F::kQ2_K, 256, 84, 16, 0, 3, true, 0, 15>>(args, index);
    case F::kQ3_K: return quantize_chunk<Shape<F::kQ3_K, 256, 110, 16, -4, 3, false, -32, 31>>(args, index);
    case F::kQ4_K: return quantize_chunk<Shape<F::kQ4_K, 256, 144, 32, 0, 15, true, 0, 63>>(args, index);
    case F::kQ5_K: return quantize_chunk<Shape<F::kQ5_K, 256, 176, 32, 0, 31, true, 0, 63>>(args, index);
    case F::kQ6_K: return quantize_chunk<Shape<F::kQ6_K, 256, 210, 16, -32, 31, false, -128, 127>>(args, index);
    case F::kInt4G32: return quantize_chunk<Int4<F::kInt4G32, 32>>(args, index);
    case F::kInt4G64: return quantize_chunk<Int4<F::kInt4G64, 64>>(args, index);
    case F::kInt4G128: return quantize_chunk<Int4<F::kInt4G128, 128>>(args, index);
    default: return false;
  }
}

}  // namespace

extern const QuantizerKernels kQuantizers;
const QuantizerKernels kQuantizers = {quantize};

}  // namespace PW_ISA
}  // namespace pagewick
