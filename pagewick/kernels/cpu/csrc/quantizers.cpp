// Divides the work of the quantizers among the threads.
#include "quantizers.h"

#include <atomic>

#include "parallel.h"

namespace pagewick {

Status quantize_weight(const Kernels& kernels, const QuantizeWeightArgs& args) {
  std::atomic<bool> is_bad{false};
  parallel_for(ceil_div(args.num_rows * args.num_columns, kChunkNumbers), [&](int64_t index) {
    if (!kernels.quantizers->quantize(args, index)) is_bad = true;
  });
  return is_bad ? kBadRow : kOk;
}

}  // namespace pagewick
