#include "elementwise.h"

#include <algorithm>

#include "parallel.h"

namespace pagewick {
namespace {

// Elements that are worth handing to another thread in one go; a multiple of every vector's length.
constexpr int64_t kGrain = 1 << 15;

}  // namespace

Status elementwise(const Kernels& kernels, const ElementwiseArgs& args) {
  if (args.size == 0) return kOk;
  const int64_t rows = std::max<int64_t>(1, kGrain / args.size), row_chunks = ceil_div(args.num_rows, rows);
  const int64_t cols = std::min(args.size, kGrain), col_chunks = ceil_div(args.size, cols);
  parallel_for(row_chunks * col_chunks, [&](int64_t index) {
    const int64_t first_row = index / col_chunks * rows, first_col = index % col_chunks * cols;
    for (int64_t row = first_row; row < std::min(args.num_rows, first_row + rows); ++row)
      kernels.elementwise->elementwise(args, row, first_col, std::min(args.size, first_col + cols));
  });
  return kOk;
}

}  // namespace pagewick
