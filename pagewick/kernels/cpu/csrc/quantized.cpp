// Divides products with quantized weights among the threads.
#include "quantized.h"

#include <algorithm>

#include "matrix.h"
#include "parallel.h"

namespace pagewick {
namespace {

// Bytes of x that are worth waking another thread for.
constexpr int64_t kGrain = 1 << 17;
constexpr int64_t kLineBytes = 64;

int64_t panel_bytes(const QuantizedLinearArgs& args) {
  const BlockFormat& format = block_format(args.format);
  return args.in_features / format.columns * format.bytes * kPanelRows;
}

Division divide(const QuantizedLinearArgs& args) {
  return divide_product(args.num_rows, args.out_features, args.in_features * kPanelRows, panel_bytes(args));
}

}  // namespace

Status quantized_linear(const Kernels& kernels, const QuantizedLinearArgs& args) {
  if (args.num_rows == 0) return kOk;
  const QuantizedKernels& quantized = *kernels.quantized;
  const int64_t row_bytes = quantized.row_bytes(args.format, args.in_features);
  const int64_t rows_bytes = ceil_div(row_bytes * args.num_rows, kLineBytes) * kLineBytes;
  const int64_t arranged_bytes = quantized.arranged_bytes(args);
  char* const prepared =
      static_cast<char*>(thread_scratch(Scratch::kPrepared, static_cast<size_t>(rows_bytes + arranged_bytes)));
  char* const arranged = arranged_bytes > 0 ? prepared + rows_bytes : nullptr;
  parallel_ranges(args.num_rows, kGrain / row_bytes, [&](int64_t begin, int64_t end) {
    quantized.prepare(args, begin, end, prepared);
    if (arranged != nullptr) quantized.arrange(args, prepared, begin, end, arranged);
  });
  const int64_t num_panels = ceil_div(args.out_features, kPanelRows);
  const Division division = divide(args);
  parallel_for(division.num_panel_chunks * division.num_row_blocks, [&](int64_t index) {
    const int64_t panel = index % division.num_panel_chunks * division.panels;
    const int64_t row = index / division.num_panel_chunks * division.rows;
    quantized.multiply(args, {prepared, nullptr, arranged}, panel, std::min(num_panels, panel + division.panels), row,
                       std::min(args.num_rows, row + division.rows));
  });
  return kOk;
}

void expect_quantized_linear(const QuantizedLinearArgs& args) {
  const Division division = divide(args);
  if (division.num_row_blocks > 1) return expect_reading(nullptr, 0, 0);
  expect_reading(args.weight, division.num_panel_chunks, division.panels * panel_bytes(args));
}

}  // namespace pagewick
