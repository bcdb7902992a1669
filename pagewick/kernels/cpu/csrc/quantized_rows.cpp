// Packs quantized weights, and reads rows out of them as numbers.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "matrix.h"
#include "parallel.h"
#include "quantized.h"

namespace pagewick {
namespace {

constexpr int64_t kGrain = 1 << 16;  // columns to read that are worth waking another thread for
constexpr int kMaxColumns = 256;
constexpr int kWordBytes = 4;
constexpr int64_t kWordsBytes = kWordBytes * kPanelRows;  // of a word of every row
constexpr uint32_t kEveryByte = 0x01010101;
constexpr uint32_t kSigns = 0x80808080;

uint32_t word_at(const uint8_t* source) {
  uint32_t word;
  std::memcpy(&word, source, sizeof(word));
  return word;
}

// levels |= the parts of a field, shifted.
void add_field(const uint8_t* block, const BitField& field, int shift, uint8_t* levels) {
  const uint32_t mask = (1u << field.bits) - 1;
  for (int begin = 0; begin < field.num_bytes; begin += field.width)
    for (int part = 0; part < 8; part += field.bits)
      for (int i = 0; i < field.width; ++i)
        *levels++ |= static_cast<uint8_t>((block[field.at + begin + i] >> part & mask) << shift);
}

// Where the words of a field's bits for 32 columns begin among those of all bits, and which bits of a level they hold.
struct Plane {
  int first_word, bits, shift;
};

// Calls body(plane) for the lower bits of a level and for the upper ones.
template <class Body>
void for_planes(const BlockFormat& format, const Body& body) {
  body(Plane{0, format.low.bits, 0});
  if (format.high.bits > 0) body(Plane{format.low.bits, format.high.bits, format.low.bits});
}

// The offsets of the parts of a block of a panel.
struct PanelBlock {
  int64_t minima, zeros, groups, levels, unit_bytes, num_bytes;
};

PanelBlock panel_block(const BlockFormat& format) {
  PanelBlock found = {};
  found.minima = format.num_scales * format.scale_bytes * kPanelRows;
  found.zeros = found.minima + (format.has_minimum() ? 2 * kPanelRows : 0);
  found.groups = found.zeros + (format.has_zero() ? kPanelRows : 0);
  found.levels = found.groups + format.num_group_words * kWordsBytes;
  found.unit_bytes = format.bits() * kWordsBytes;
  found.num_bytes = format.bytes * kPanelRows;
  return found;
}

void pack_block(const BlockFormat& format, const PanelBlock& at, const uint8_t* source, int64_t lane, uint8_t* target) {
  for (int i = 0; i < format.num_scales; ++i)
    std::memcpy(target + (i * kPanelRows + lane) * format.scale_bytes,
                source + format.scale_at + i * format.scale_bytes, static_cast<size_t>(format.scale_bytes));
  if (format.has_minimum()) std::memcpy(target + at.minima + 2 * lane, source + format.minimum_at, 2);
  if (format.has_zero()) target[at.zeros + lane] = source[format.zero_at];
  for (int i = 0; i < format.num_group_words; ++i)
    std::memcpy(target + at.groups + i * kWordsBytes + lane * kWordBytes, source + format.groups_at + i * kWordBytes,
                kWordBytes);
  if (format.is_fp8) {
    for (int column = 0; column < format.columns; column += 2)
      std::memcpy(target + at.levels + column * kPanelRows + 2 * lane, source + format.low.at + column, 2);
    return;
  }
  uint8_t levels[kMaxColumns] = {};
  add_field(source, format.low, 0, levels);
  add_field(source, format.high, format.low.bits, levels);
  uint8_t* unit = target + at.levels + lane * kWordBytes;
  const uint32_t signs = format.bits() == 8 ? kSigns : 0;
  for (int column = 0; column < format.columns; column += 32, unit += at.unit_bytes)
    for_planes(format, [&](const Plane& plane) {
      const uint8_t* quad = levels + column;
      const uint32_t mask = ((1u << plane.bits) - 1) * kEveryByte;
      for (int i = 0; i < plane.bits; ++i) {
        uint32_t word = 0;
        for (int bit = 0; bit < 8; bit += plane.bits, quad += kWordBytes)
          word |= (word_at(quad) >> plane.shift & mask) << bit;
        word ^= signs;
        std::memcpy(unit + (plane.first_word + i) * kWordsBytes, &word, kWordBytes);
      }
    });
}

// Reads the levels of 32 columns.
void read_levels(const BlockFormat& format, const uint8_t* unit, uint8_t* levels) {
  std::memset(levels, 0, 32);
  for_planes(format, [&](const Plane& plane) {
    uint8_t* quad = levels;
    const uint32_t mask = ((1u << plane.bits) - 1) * kEveryByte;
    for (int i = 0; i < plane.bits; ++i)
      for (int bit = 0; bit < 8; bit += plane.bits, quad += kWordBytes) {
        const uint32_t word = word_at(unit + (plane.first_word + i) * kWordsBytes);
        const uint32_t sum = word_at(quad) | (word >> bit & mask) << plane.shift;
        std::memcpy(quad, &sum, kWordBytes);
      }
  });
}

float read_half(const uint8_t* source) {
  uint16_t half;
  std::memcpy(&half, source, sizeof(half));
  const uint32_t magnitude = (half & 0x7fffu) << 13;
  float value;
  std::memcpy(&value, &magnitude, sizeof(value));
  value *= 0x1p112f;  // moves the exponent to where a float has it, for subnormals, too
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (magnitude >= 0x7c00u << 13) bits = magnitude | 0x7f800000;
  bits |= (half & 0x8000u) << 16;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The bits of half a power of two in E8M0, since levels are twice the numbers.
uint32_t half_of_power(uint8_t exponent) { return exponent < 2 ? 0x200000u << exponent : (exponent - 1u) << 23; }

float read_scale(const BlockFormat& format, const uint8_t* block, int index, int64_t lane) {
  const uint8_t* const source = block + (index * kPanelRows + lane) * format.scale_bytes;
  if (format.scale_bytes == 1) {
    const uint32_t bits = half_of_power(*source);
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  if (format.scale_bytes == 2) return read_half(source);
  float value;
  std::memcpy(&value, source, sizeof(value));
  return value;
}

float read_e4m3(uint8_t bits) {
  const uint32_t exponent = bits >> 3 & 15, mantissa = bits & 7, normal = (exponent + 120) << 23 | mantissa << 20;
  float magnitude;
  std::memcpy(&magnitude, &normal, sizeof(magnitude));
  if (exponent == 0) magnitude = static_cast<float>(mantissa) * 0x1p-9f;
  return bits < 128 ? magnitude : -magnitude;
}

void split(QuantizedFormat format, const int32_t* packed, int32_t* scales, int32_t* minima) {
  switch (format) {
    case QuantizedFormat::kQ2_K: return split_groups<QuantizedFormat::kQ2_K>(packed, scales, minima);
    case QuantizedFormat::kQ3_K: return split_groups<QuantizedFormat::kQ3_K>(packed, scales, minima);
    case QuantizedFormat::kQ6_K: return split_groups<QuantizedFormat::kQ6_K>(packed, scales, minima);
    default: return split_groups<QuantizedFormat::kQ4_K>(packed, scales, minima);
  }
}

// Writes the numbers of a row's block.
void read_block(QuantizedFormat name, const PanelBlock& at, const uint8_t* block, int64_t lane, float* numbers) {
  const BlockFormat& format = block_format(name);
  constexpr int kMaxGroups = 16;
  float scales[kMaxGroups], minima[kMaxGroups] = {};
  for (int i = 0; i < format.num_scales; ++i) scales[i] = read_scale(format, block, i, lane);
  if (format.is_fp8) {
    for (int column = 0; column < format.columns; ++column)
      numbers[column] = read_e4m3(block[at.levels + (column - column % 2) * kPanelRows + 2 * lane + column % 2]) * scales[0];
    return;
  }
  if (format.has_minimum()) minima[0] = read_half(block + at.minima + 2 * lane);
  if (format.is_k()) {
    int32_t packed[4], whole_scales[4], whole_minima[4];
    for (int i = 0; i < format.num_group_words; ++i)
      std::memcpy(packed + i, block + at.groups + i * kWordsBytes + lane * kWordBytes, kWordBytes);
    split(name, packed, whole_scales, whole_minima);
    const float scale = scales[0], minimum = -minima[0];
    for (int i = 0; i < format.columns / format.group_columns; ++i) {
      scales[i] = scale * static_cast<float>(reinterpret_cast<const int8_t*>(whole_scales)[i]);
      if (format.has_minimum()) minima[i] = minimum * static_cast<float>(reinterpret_cast<const int8_t*>(whole_minima)[i]);
    }
  }
  uint8_t levels[kMaxColumns];
  for (int column = 0; column < format.columns; column += 32)
    read_levels(format, block + at.levels + column / 32 * at.unit_bytes + lane * kWordBytes, levels + column);
  if (format.has_codes())
    for (int column = 0; column < format.columns; ++column) levels[column] = format.codebook[levels[column]];
  const int offset = format.has_zero() ? block[at.zeros + lane] : format.offset;
  for (int column = 0; column < format.columns; ++column) {
    const int group = column / format.group_columns;
    numbers[column] = static_cast<float>(levels[column] - offset) * scales[group];
    if (format.has_minimum()) numbers[column] += minima[group];
  }
}

}  // namespace

Status pack_quantized_rows(const Kernels&, const PackQuantizedArgs& args) {
  if (args.num_rows == 0) return kOk;
  const BlockFormat& format = block_format(args.format);
  const PanelBlock at = panel_block(format);
  const int64_t end_row = args.first_row + args.num_rows, first_panel = args.first_row / kPanelRows;
  parallel_for(ceil_div(end_row, kPanelRows) - first_panel, [&](int64_t index) {
    const int64_t panel = first_panel + index;
    const int64_t first = std::max(args.first_row, panel * kPanelRows);
    const int64_t end = std::min(end_row, (panel + 1) * kPanelRows);
    for (int64_t i = 0; i < args.num_blocks; ++i) {
      uint8_t* const target = static_cast<uint8_t*>(args.weight) + (panel * args.num_blocks + i) * at.num_bytes;
      for (int64_t row = first; row < end; ++row) {
        const uint8_t* const source = static_cast<const uint8_t*>(args.rows) + (row - args.first_row) * args.row_stride;
        pack_block(format, at, source + i * format.bytes, row % kPanelRows, target);
      }
    }
  });
  return kOk;
}

Status gather_quantized_rows(const Kernels& kernels, const GatherQuantizedArgs& args) {
  const BlockFormat& format = block_format(args.format);
  const PanelBlock at = panel_block(format);
  const int64_t num_blocks = args.in_features / format.columns;
  const int64_t block_bytes = format.columns * element_bytes(args.dtype);
  std::atomic<bool> is_bad{false};
  parallel_ranges(args.num_rows, kGrain / std::max<int64_t>(1, args.in_features), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row_id = args.row_ids[i];
      if (row_id < 0 || row_id >= args.out_features) {
        is_bad = true;
        continue;
      }
      const uint8_t* block =
          static_cast<const uint8_t*>(args.weight) + row_id / kPanelRows * num_blocks * at.num_bytes;
      char* out = static_cast<char*>(args.out) + i * num_blocks * block_bytes;
      for (int64_t n = 0; n < num_blocks; ++n, block += at.num_bytes, out += block_bytes) {
        float numbers[kMaxColumns];
        read_block(args.format, at, block, row_id % kPanelRows, numbers);
        kernels.quantized->convert(numbers, format.columns, args.dtype, out);
      }
    }
  });
  return is_bad ? kBadRow : kOk;
}

}  // namespace pagewick
