#include "norm.h"

#include <algorithm>

#include "parallel.h"

namespace pagewick {
namespace {

// Elements that are worth handing to another thread in one go.
constexpr int64_t kGrain = 1 << 15;

Status for_rows(const NormArgs& args, void (*kernel)(const NormArgs&, int64_t, int64_t)) {
  const int64_t chunk = std::max<int64_t>(1, kGrain / args.hidden_size);
  parallel_for(ceil_div(args.num_rows, chunk), [&](int64_t index) {
    kernel(args, index * chunk, std::min(args.num_rows, (index + 1) * chunk));
  });
  return kOk;
}

}  // namespace

Status rms_norm(const Kernels& kernels, const NormArgs& args) { return for_rows(args, kernels.norm->rms_norm); }

Status layer_norm(const Kernels& kernels, const NormArgs& args) { return for_rows(args, kernels.norm->layer_norm); }

}  // namespace pagewick
