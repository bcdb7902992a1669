// Products of activations with panels of a packed weight. Compiled once per instruction set.
#include "matrix.h"
#include "panel.h"
#include "parallel.h"
#include "sums.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

static_assert(kPanelCols == kPanelRows, "a weight is multiplied transposed");

// The number of rows whose sums of a panel are kept while the panel is read, and the part of the panel that is read for
// all of these rows before the next part: it stays in the first-level cache.
constexpr int64_t kRowBlock = 256;
constexpr int64_t kDepthBlockBytes = 32 * 1024;
// Whether products of T are computed in AMX tiles.
#if defined(PW_HAS_AMX)
template <class T>
constexpr bool kHasTiles = kStep<T> == 2;
#else
template <class T>
constexpr bool kHasTiles = false;
#endif
// With at most as many rows as a register tile has, a panel is read once, and the sums never leave the registers.
template <class T>
constexpr int64_t kFewRows = kHasTiles<T> ? 16 : kRowTile;
// With at most this many rows, the coming panels are prefetched. With AMX that pays only while reading takes longer
// than multiplying.
template <class T>
constexpr int64_t kReadingRows = kHasTiles<T> ? 128 : kRowBlock;

template <class T>
int64_t padded_depth(int64_t depth) {
  return (depth + kStep<T> - 1) / kStep<T> * kStep<T>;
}

int64_t prepared_bytes(const LinearArgs& args) {
  return with_type(args.dtype, [&](auto* type) -> int64_t {
    using T = Element<decltype(type)>;
    const int64_t depth = padded_depth<T>(args.in_features);
    if (kIsSame<T, Left<T>> && depth == args.in_features) return 0;
    return depth * static_cast<int64_t>(sizeof(Left<T>));
  });
}

template <class T, class L>
void prepare_row(const T* x, int64_t size, int64_t padded, L* target) {
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes) store(target + k, load(x + k));
  if (k < size) store_part(target + k, load_part(x + k, size - k), size - k);
  for (k = size; k < padded; ++k) target[k] = L{};
}

void prepare(const LinearArgs& args, int64_t first_row, int64_t end_row, void* prepared) {
  with_type(args.dtype, [&](auto* type) {
    using T = Element<decltype(type)>;
    const int64_t depth = padded_depth<T>(args.in_features);
    for (int64_t row = first_row; row < end_row; ++row)
      prepare_row(static_cast<const T*>(args.x) + row * args.x_stride, args.in_features, depth,
                  static_cast<Left<T>*>(prepared) + row * depth);
  });
}

template <class T>
void multiply_panels(const LinearArgs& args, const Left<T>* x, int64_t x_stride, int64_t first_panel,
                     int64_t end_panel, int64_t first_row, int64_t end_row) {
  Multiplier multiplier;
  const int64_t depth = padded_depth<T>(args.in_features), rows = end_row - first_row;
  const int64_t depth_block = rows <= kFewRows<T> ? depth : kDepthBlockBytes / (kPanelCols * int64_t{sizeof(T)});
  const int64_t ahead = rows <= kReadingRows<T> ? kAhead : 0;
  constexpr int64_t kStride = kPanelCols * kStep<T>;
  float* const sums = static_cast<float*>(thread_scratch(Scratch::kKernel, kRowBlock * kPanelCols * sizeof(float)));
  for (int64_t panel = first_panel; panel < end_panel; ++panel) {
    const T* const weight = static_cast<const T*>(args.weight) + panel * depth * kPanelCols;
    const int64_t col = panel * kPanelCols, cols = minimum(kPanelCols, args.out_features - col);
    const T* const bias = args.bias == nullptr ? nullptr : static_cast<const T*>(args.bias) + col;
    for (int64_t row = first_row; row < end_row; row += kRowBlock) {
      const int64_t count = minimum(kRowBlock, end_row - row);
      for (int64_t k = 0; k < depth; k += depth_block)
        multiplier.multiply(x + row * x_stride + k, x_stride, count, weight + k * kPanelCols, kStride,
                            minimum(depth_block, depth - k), kPanelCols, sums, kPanelCols, k > 0, ahead);
      with_type(args.out_dtype, [&](auto* type) {
        using Out = Element<decltype(type)>;
        for (int64_t i = 0; i < count; ++i)
          store_sums(sums + i * kPanelCols, bias, cols,
                     static_cast<Out*>(args.out) + (row + i) * args.out_stride + col);
      });
    }
  }
}

void multiply(const LinearArgs& args, const void* prepared, int64_t first_panel, int64_t end_panel, int64_t first_row,
              int64_t end_row) {
  with_type(args.dtype, [&](auto* type) {
    using T = Element<decltype(type)>;
    const bool is_prepared = prepared != nullptr;
    multiply_panels<T>(args, static_cast<const Left<T>*>(is_prepared ? prepared : args.x),
                       is_prepared ? padded_depth<T>(args.in_features) : args.x_stride, first_panel, end_panel,
                       first_row, end_row);
  });
}

int64_t pack(const char* rows, int64_t row_bytes, int64_t num_words, uint32_t* columns) {
  int64_t word = 0;
  for (; word + kLanes <= num_words; word += kLanes) {
    Vec block[kLanes];
    for (int i = 0; i < kLanes; ++i) memcpy(&block[i], rows + i * row_bytes + word * 4, sizeof(Vec));
    transpose(block);
    for (int i = 0; i < kLanes; ++i) memcpy(columns + (word + i) * kPanelRows, &block[i], sizeof(Vec));
  }
  return word;
}

}  // namespace

extern const MatrixKernels kMatrix;
const MatrixKernels kMatrix = {prepared_bytes, prepare, multiply, pack, kLanes};

}  // namespace PW_ISA
}  // namespace pagewick
