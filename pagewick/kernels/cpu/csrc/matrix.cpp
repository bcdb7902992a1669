// Packs weights, reads rows out of packed weights, and divides a product among the threads.
#include "matrix.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "parallel.h"

namespace pagewick {
namespace {

// Bytes of weights that a thread takes at a time where nearly all time goes into reading them: few enough for all
// threads to finish at about the same time.
constexpr int64_t kRunBytes = 1 << 17;
// Multiplications that are worth waking another thread for.
constexpr int64_t kGrain = 1 << 16;
// The least and the greatest number of rows that share one reading of a panel. With all of their columns they stay in
// the second-level cache while the panels are read one after the other. Multiples of kRowUnit fill the register tiles.
constexpr int64_t kMinRowBlock = 64;
constexpr int64_t kMaxRowBlock = 256;
constexpr int64_t kRowUnit = 32;
// With up to this number of rows nearly all time goes into reading the weights.
constexpr int64_t kFewRows = 16;

const char* row_of(const void* rows, int64_t row, int64_t stride, DType dtype) {
  return static_cast<const char*>(rows) + row * stride * element_bytes(dtype);
}

Division divide(const LinearArgs& args) {
  const int64_t panel_work = panel_elements(args.dtype, args.in_features);
  return divide_product(args.num_rows, args.out_features, panel_work, panel_work * element_bytes(args.dtype));
}

// Packs whole groups of rows with the kernel. Returns how many words at the beginning of each row it has packed.
int64_t pack_groups(const MatrixKernels& matrix, const PackArgs& args, int64_t first, int64_t end, uint32_t* target) {
  const int64_t row_bytes = args.row_stride * element_bytes(args.dtype);
  const int64_t num_words = args.in_features * element_bytes(args.dtype) / 4;
  int64_t done = 0;
  for (int64_t row = first; row < end; row += matrix.pack_rows)
    done = matrix.pack(row_of(args.rows, row - args.first_row, args.row_stride, args.dtype), row_bytes, num_words,
                       target + row % kPanelRows);
  return done;
}

template <class Word>
void pack_panel(const MatrixKernels& matrix, const PackArgs& args, int64_t first, int64_t end, int64_t panel) {
  // One cache line of each row of the panel at a time.
  constexpr int64_t kWords = 64 / sizeof(Word);
  const int64_t depth = args.in_features * element_bytes(args.dtype) / static_cast<int64_t>(sizeof(Word));
  const int64_t panel_words = panel_elements(args.dtype, args.in_features) * element_bytes(args.dtype) / sizeof(Word);
  Word* const target = static_cast<Word*>(args.weight) + panel * panel_words;
  int64_t k = 0;
  if constexpr (sizeof(Word) == 4)
    if (first % matrix.pack_rows == 0 && (end - first) % matrix.pack_rows == 0)
      k = pack_groups(matrix, args, first, end, target);
  for (; k < depth; k += kWords) {
    const int64_t count = std::min(kWords, depth - k);
    for (int64_t row = first; row < end; ++row) {
      Word words[kWords];
      std::memcpy(words, row_of(args.rows, row - args.first_row, args.row_stride, args.dtype) + k * sizeof(Word),
                  static_cast<size_t>(count) * sizeof(Word));
      Word* const column = target + k * kPanelRows + row % kPanelRows;
      for (int64_t i = 0; i < count; ++i) column[i * kPanelRows] = words[i];
    }
  }
}

// Packs the last of an odd number of columns, with zeros beside it.
void pack_last_column(const PackArgs& args, int64_t first, int64_t end, int64_t panel) {
  const int64_t last = args.in_features - 1;
  uint16_t* const target =
      static_cast<uint16_t*>(args.weight) + panel * panel_elements(args.dtype, args.in_features) + last * kPanelRows;
  for (int64_t row = first; row < end; ++row) {
    uint16_t* const pair = target + row % kPanelRows * 2;
    std::memcpy(pair, row_of(args.rows, row - args.first_row, args.row_stride, args.dtype) + last * 2, 2);
    pair[1] = 0;
  }
}

template <class Word>
void gather_packed(const GatherArgs& args, int64_t row_id, char* out) {
  const int64_t num_bytes = args.in_features * element_bytes(args.dtype);
  const int64_t panel_words =
      panel_elements(args.dtype, args.in_features) * element_bytes(args.dtype) / static_cast<int64_t>(sizeof(Word));
  const Word* source = static_cast<const Word*>(args.weight) + row_id / kPanelRows * panel_words + row_id % kPanelRows;
  int64_t byte = 0;
  for (; byte + static_cast<int64_t>(sizeof(Word)) <= num_bytes; byte += sizeof(Word), source += kPanelRows)
    std::memcpy(out + byte, source, sizeof(Word));
  std::memcpy(out + byte, source, static_cast<size_t>(num_bytes - byte));
}

}  // namespace

Division divide_product(int64_t num_rows, int64_t out_features, int64_t panel_work, int64_t panel_bytes) {
  const int64_t num_panels = ceil_div(out_features, kPanelRows), threads = num_threads();
  int64_t panels = 1, rows = std::max<int64_t>(num_rows, 1);
  if (num_rows <= kFewRows) {
    panels = std::max<int64_t>(1, std::min(kRunBytes / panel_bytes, ceil_div(num_panels, threads)));
  } else {
    const int64_t for_balance = threads > 1 ? ceil_div(4 * threads, num_panels) : 1;
    const int64_t blocks = std::max(for_balance, ceil_div(num_rows, kMaxRowBlock));
    rows = std::max(kMinRowBlock, ceil_div(ceil_div(num_rows, blocks), kRowUnit) * kRowUnit);
  }
  panels = std::max(panels, std::min(num_panels, kGrain / (panel_work * rows)));
  return {panels, rows, ceil_div(num_panels, panels), ceil_div(num_rows, rows)};
}

Status linear(const Kernels& kernels, const LinearArgs& args) {
  const MatrixKernels& matrix = *kernels.matrix;
  const int64_t row_bytes = matrix.prepared_bytes(args);
  void* prepared = nullptr;
  if (row_bytes > 0 && args.num_rows > 0) {
    prepared = thread_scratch(Scratch::kPrepared, static_cast<size_t>(row_bytes * args.num_rows));
    parallel_ranges(args.num_rows, kGrain / std::max<int64_t>(1, row_bytes),
                    [&](int64_t begin, int64_t end) { matrix.prepare(args, begin, end, prepared); });
  }
  const int64_t num_panels = ceil_div(args.out_features, kPanelRows);
  const Division division = divide(args);
  parallel_for(division.num_panel_chunks * division.num_row_blocks, [&](int64_t index) {
    const int64_t panel = index % division.num_panel_chunks * division.panels;
    const int64_t row = index / division.num_panel_chunks * division.rows;
    matrix.multiply(args, prepared, panel, std::min(num_panels, panel + division.panels), row,
                    std::min(args.num_rows, row + division.rows));
  });
  return kOk;
}

void expect_linear(const LinearArgs& args) {
  if (args.num_rows > kFewRows) return expect_reading(nullptr, 0, 0);
  const Division division = divide(args);
  expect_reading(args.weight, division.num_panel_chunks,
                 division.panels * panel_elements(args.dtype, args.in_features) * element_bytes(args.dtype));
}

Status pack_rows(const Kernels& kernels, const PackArgs& args) {
  const MatrixKernels& matrix = *kernels.matrix;
  if (args.num_rows == 0) return kOk;
  const int64_t end_row = args.first_row + args.num_rows, first_panel = args.first_row / kPanelRows;
  parallel_for(ceil_div(end_row, kPanelRows) - first_panel, [&](int64_t index) {
    const int64_t panel = first_panel + index;
    const int64_t first = std::max(args.first_row, panel * kPanelRows);
    const int64_t end = std::min(end_row, (panel + 1) * kPanelRows);
    if (args.dtype == DType::kFloat16) return pack_panel<uint16_t>(matrix, args, first, end, panel);
    pack_panel<uint32_t>(matrix, args, first, end, panel);
    if (args.dtype == DType::kBFloat16 && args.in_features % 2) pack_last_column(args, first, end, panel);
  });
  return kOk;
}

Status gather_rows(const Kernels&, const GatherArgs& args) {
  const int64_t row_bytes = args.in_features * element_bytes(args.dtype);
  std::atomic<bool> is_bad{false};
  parallel_ranges(args.num_rows, kGrain / row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row_id = args.row_ids[i];
      char* const out = static_cast<char*>(args.out) + i * row_bytes;
      if (row_id < 0 || row_id >= args.out_features) {
        is_bad = true;
      } else if (args.is_packed == 0) {
        std::memcpy(out, row_of(args.weight, row_id, args.in_features, args.dtype), static_cast<size_t>(row_bytes));
      } else if (args.dtype == DType::kFloat16) {
        gather_packed<uint16_t>(args, row_id, out);
      } else {
        gather_packed<uint32_t>(args, row_id, out);
      }
    }
  });
  return is_bad ? kBadRow : kOk;
}

}  // namespace pagewick
