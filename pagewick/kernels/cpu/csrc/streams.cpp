#include "streams.h"

#include "parallel.h"

namespace pagewick {
namespace {

// Elements of a stream that are worth handing to another thread in one go.
constexpr int64_t kGrain = 1 << 13;

}  // namespace

Status mix_streams(const Kernels& kernels, const StreamsArgs& args) {
  parallel_elements(args.num_tokens, args.size, kGrain, [&](int64_t token, int64_t first_col, int64_t end_col) {
    kernels.streams->mix(args, token, first_col, end_col);
  });
  return kOk;
}

Status correct_streams(const Kernels& kernels, const StreamsArgs& args) {
  parallel_elements(args.num_tokens, args.size, kGrain, [&](int64_t token, int64_t first_col, int64_t end_col) {
    kernels.streams->correct(args, token, first_col, end_col);
  });
  return kOk;
}

Status match_magnitude(const Kernels& kernels, const MagnitudeArgs& args) {
  parallel_ranges(args.num_rows, kGrain / args.size,
                  [&](int64_t begin, int64_t end) { kernels.streams->match_magnitude(args, begin, end); });
  return kOk;
}

}  // namespace pagewick
