#include "activation.h"

#include "parallel.h"

namespace pagewick {
namespace {

// Elements that are worth handing to another thread in one go.
constexpr int64_t kGrain = 1 << 14;

}  // namespace

Status activation(const Kernels& kernels, const ActivationArgs& args) {
  parallel_elements(args.num_rows, args.size, kGrain, [&](int64_t row, int64_t first_col, int64_t end_col) {
    kernels.activation->activation(args, row, first_col, end_col);
  });
  return kOk;
}

Status gaussian_top_k(const Kernels& kernels, const GaussianTopKArgs& args) {
  parallel_ranges(args.num_rows, kGrain / args.size,
                  [&](int64_t begin, int64_t end) { kernels.activation->gaussian_top_k(args, begin, end); });
  return kOk;
}

}  // namespace pagewick
