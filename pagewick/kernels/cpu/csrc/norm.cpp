#include "norm.h"

#include "parallel.h"

namespace pagewick {
namespace {

// Elements that are worth handing to another thread in one go.
constexpr int64_t kGrain = 1 << 15;

Status for_rows(const NormArgs& args, void (*kernel)(const NormArgs&, int64_t, int64_t)) {
  parallel_ranges(args.num_rows, kGrain / args.hidden_size,
                  [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  return kOk;
}

}  // namespace

Status rms_norm(const Kernels& kernels, const NormArgs& args) { return for_rows(args, kernels.norm->rms_norm); }

Status layer_norm(const Kernels& kernels, const NormArgs& args) { return for_rows(args, kernels.norm->layer_norm); }

}  // namespace pagewick
