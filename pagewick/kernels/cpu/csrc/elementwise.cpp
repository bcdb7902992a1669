#include "elementwise.h"

#include "parallel.h"

namespace pagewick {

Status elementwise(const Kernels& kernels, const ElementwiseArgs& args) {
  // Elements that are worth handing to another thread in one go.
  constexpr int64_t kGrain = 1 << 15;
  parallel_elements(args.num_rows, args.size, kGrain, [&](int64_t row, int64_t first_col, int64_t end_col) {
    kernels.elementwise->elementwise(args, row, first_col, end_col);
  });
  return kOk;
}

}  // namespace pagewick
