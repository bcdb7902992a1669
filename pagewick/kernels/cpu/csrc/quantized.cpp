// Packs quantized weights, and divides products with them among the threads.
#include "quantized.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "matrix.h"
#include "parallel.h"

namespace pagewick {
namespace {

// Multiplications that are worth waking another thread for.
constexpr int64_t kGrain = 1 << 17;

int64_t panel_bytes(int64_t in_features) { return in_features / kBlockColumns * kBlockRowBytes * kPanelRows; }

Division divide(const QuantizedLinearArgs& args) {
  return divide_product(args.num_rows, args.out_features, args.in_features * kPanelRows, panel_bytes(args.in_features));
}

}  // namespace

Status quantized_linear(const Kernels& kernels, const QuantizedLinearArgs& args) {
  if (args.num_rows == 0) return kOk;
  const QuantizedKernels& quantized = *kernels.quantized;
  const int64_t row_bytes = prepared_row_bytes(args.in_features);
  void* const prepared = thread_scratch(Scratch::kPrepared, static_cast<size_t>(row_bytes * args.num_rows));
  parallel_ranges(args.num_rows, kGrain / row_bytes,
                  [&](int64_t begin, int64_t end) { quantized.prepare(args, begin, end, prepared); });
  const int64_t num_panels = ceil_div(args.out_features, kPanelRows);
  const Division division = divide(args);
  parallel_for(division.num_panel_chunks * division.num_row_blocks, [&](int64_t index) {
    const int64_t panel = index % division.num_panel_chunks * division.panels;
    const int64_t row = index / division.num_panel_chunks * division.rows;
    quantized.multiply(args, prepared, panel, std::min(num_panels, panel + division.panels), row,
                       std::min(args.num_rows, row + division.rows));
  });
  return kOk;
}

void expect_quantized_linear(const QuantizedLinearArgs& args) {
  const Division division = divide(args);
  if (division.num_row_blocks > 1) return expect_reading(nullptr, 0, 0);
  expect_reading(args.weight, division.num_panel_chunks, division.panels * panel_bytes(args.in_features));
}

Status pack_quantized_rows(const Kernels&, const PackQuantizedArgs& args) {
  if (args.num_rows == 0) return kOk;
  constexpr int64_t kScaleBytes = 2 * kPanelRows, kGroup = 4;
  const int64_t end_row = args.first_row + args.num_rows, first_panel = args.first_row / kPanelRows;
  parallel_for(ceil_div(end_row, kPanelRows) - first_panel, [&](int64_t index) {
    const int64_t panel = first_panel + index;
    const int64_t first = std::max(args.first_row, panel * kPanelRows);
    const int64_t end = std::min(end_row, (panel + 1) * kPanelRows);
    uint8_t* block = static_cast<uint8_t*>(args.weight) + panel * args.num_blocks * kBlockRowBytes * kPanelRows;
    for (int64_t i = 0; i < args.num_blocks; ++i, block += kBlockRowBytes * kPanelRows)
      for (int64_t row = first; row < end; ++row) {
        const uint8_t* const source =
            static_cast<const uint8_t*>(args.rows) + (row - args.first_row) * args.row_stride + i * kBlockRowBytes;
        const int64_t lane = row % kPanelRows;
        std::memcpy(block + 2 * lane, source, 2);
        for (int64_t k = 0; k < kBlockColumns; k += kGroup) {
          uint32_t bytes;
          std::memcpy(&bytes, source + 2 + k, kGroup);
          bytes ^= 0x80808080;
          std::memcpy(block + kScaleBytes + k * kPanelRows + lane * kGroup, &bytes, kGroup);
        }
      }
  });
  return kOk;
}

Status gather_quantized_rows(const Kernels& kernels, const GatherQuantizedArgs& args) {
  const int64_t row_bytes = args.in_features * element_bytes(args.dtype);
  std::atomic<bool> is_bad{false};
  parallel_ranges(args.num_rows, kGrain / row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row_id = args.row_ids[i];
      if (row_id < 0 || row_id >= args.out_features)
        is_bad = true;
      else
        kernels.quantized->unpack(args, row_id, static_cast<char*>(args.out) + i * row_bytes);
    }
  });
  return is_bad ? kBadRow : kOk;
}

}  // namespace pagewick
