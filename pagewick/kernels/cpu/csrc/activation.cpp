#include "activation.h"

#include "parallel.h"

namespace pagewick {

Status activation(const Kernels& kernels, const ActivationArgs& args) {
  // Elements that are worth handing to another thread in one go.
  constexpr int64_t kGrain = 1 << 14;
  parallel_elements(args.num_rows, args.size, kGrain, [&](int64_t row, int64_t first_col, int64_t end_col) {
    kernels.activation->activation(args, row, first_col, end_col);
  });
  return kOk;
}

}  // namespace pagewick
