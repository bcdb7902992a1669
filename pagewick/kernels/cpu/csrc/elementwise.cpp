#include "elementwise.h"

#include <algorithm>

#include "parallel.h"

namespace pagewick {
namespace {

// Elements that are worth handing to another thread in one go.
constexpr int64_t kGrain = 1 << 15;

template <class Word>
void gather(const GatherColumnsArgs& args, int64_t row, int64_t first, int64_t end) {
  const Word* const x = static_cast<const Word*>(args.x) + row * args.x_stride;
  Word* const out = static_cast<Word*>(args.out) + row * args.size;
  for (int64_t i = first; i < end; ++i) out[i] = x[args.columns[i]];
}

}  // namespace

Status elementwise(const Kernels& kernels, const ElementwiseArgs& args) {
  parallel_elements(args.num_rows, args.size, kGrain, [&](int64_t row, int64_t first_col, int64_t end_col) {
    kernels.elementwise->elementwise(args, row, first_col, end_col);
  });
  return kOk;
}

Status xielu(const Kernels& kernels, const XieluArgs& args) {
  parallel_elements(args.num_rows, args.size, kGrain, [&](int64_t row, int64_t first_col, int64_t end_col) {
    kernels.elementwise->xielu(args, row, first_col, end_col);
  });
  return kOk;
}

Status widen(const Kernels& kernels, const WidenArgs& args) {
  parallel_elements(args.num_rows, args.size, kGrain, [&](int64_t row, int64_t first_col, int64_t end_col) {
    kernels.elementwise->widen(args, row, first_col, end_col);
  });
  return kOk;
}

Status gather_columns(const Kernels&, const GatherColumnsArgs& args) {
  const auto is_inside = [&args](int64_t column) { return column >= 0 && column < args.num_columns; };
  if (!std::all_of(args.columns, args.columns + args.size, is_inside)) return kBadRow;
  const auto gather_part = args.dtype == DType::kFloat32 ? gather<uint32_t> : gather<uint16_t>;
  parallel_elements(args.num_rows, args.size, kGrain, [&](int64_t row, int64_t first_col, int64_t end_col) {
    gather_part(args, row, first_col, end_col);
  });
  return kOk;
}

}  // namespace pagewick
