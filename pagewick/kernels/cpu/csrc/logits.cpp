#include "logits.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "parallel.h"

namespace pagewick {
namespace {

// Elements of a piece of a row. A piece is read twice, and its 32 KiB stay in the first-level cache between the two.
constexpr int64_t kPiece = 8192;

// Calls kernel(row, first, x, size) for every piece of every row, where x are `size` logits from the element `first`
// on. Returns the results [rows][pieces] in scratch memory of this thread.
template <class Args, class Kernel>
auto for_pieces(const Args& args, const Kernel& kernel) {
  using Result = decltype(kernel(int64_t{}, int64_t{}, args.logits, int64_t{}));
  const int64_t pieces = ceil_div(args.vocab_size, kPiece);
  const size_t num_bytes = static_cast<size_t>(args.num_rows * pieces) * sizeof(Result);
  Result* const results = static_cast<Result*>(thread_scratch(Scratch::kPartials, num_bytes));
  parallel_for(args.num_rows * pieces, [&](int64_t index) {
    const int64_t row = index / pieces, first = index % pieces * kPiece;
    const float* const x = args.logits + row * args.stride + first;
    results[index] = kernel(row, first, x, std::min(kPiece, args.vocab_size - first));
  });
  return static_cast<const Result*>(results);
}

// Returns the first NaN of the pieces of a row, else the first of the greatest; of_piece(i).index counts within piece i.
template <class OfPiece>
Greatest first_greatest(int64_t pieces, const OfPiece& of_piece) {
  Greatest best = of_piece(0);
  for (int64_t i = 1; i < pieces && !std::isnan(best.value); ++i) {
    const Greatest found = of_piece(i);
    if (found.value > best.value || std::isnan(found.value)) best = {found.value, i * kPiece + found.index};
  }
  return best;
}

float log_of_sum(const ExpSum* pieces, int64_t count, float max) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i)
    // A piece that is all -inf adds nothing, not exp(-inf - -inf), which is NaN.
    if (pieces[i].sum != 0.0f) sum += pieces[i].sum * std::exp(static_cast<double>(pieces[i].max) - max);
  return static_cast<float>(std::log(sum));
}

}  // namespace

Status argmax_rows(const Kernels& kernels, const ArgmaxArgs& args) {
  const int64_t pieces = ceil_div(args.vocab_size, kPiece);
  const Greatest* const found = for_pieces(args, [&](int64_t, int64_t, const float* x, int64_t size) {
    return kernels.logits->find_greatest(x, size);
  });
  for (int64_t row = 0; row < args.num_rows; ++row) {
    const Greatest best = first_greatest(pieces, [&](int64_t i) { return found[row * pieces + i]; });
    args.token_ids[row] = best.index;
    if (args.values != nullptr) args.values[row] = best.value;
  }
  return kOk;
}

Status argmax_allowed(const Kernels& kernels, const AllowedArgs& args) {
  const int64_t pieces = ceil_div(args.vocab_size, kPiece);
  const Allowed* const found = for_pieces(args, [&](int64_t row, int64_t first, const float* x, int64_t size) {
    return kernels.logits->find_allowed(x, args.masks + row * args.mask_bytes + first / 8, size);
  });
  for (int64_t row = 0; row < args.num_rows; ++row) {
    const Allowed* const of_row = found + row * pieces;
    const Greatest best = first_greatest(pieces, [&](int64_t i) { return of_row[i].greatest; });
    args.token_ids[row] = best.index;
    args.values[row] = best.value;
    args.highest[row] = first_greatest(pieces, [&](int64_t i) { return Greatest{of_row[i].highest, 0}; }).value;
  }
  return kOk;
}

Status log_softmax_stats(const Kernels& kernels, const LogSoftmaxArgs& args) {
  const int64_t pieces = ceil_div(args.vocab_size, kPiece);
  const ExpSum* const sums = for_pieces(args, [&](int64_t, int64_t, const float* x, int64_t size) {
    return kernels.logits->sum_exp(x, size);
  });
  for (int64_t row = 0; row < args.num_rows; ++row) {
    const ExpSum* const of_row = sums + row * pieces;
    float max = of_row[0].max;
    for (int64_t i = 1; i < pieces && !std::isnan(max); ++i)
      if (of_row[i].max > max || std::isnan(of_row[i].max)) max = of_row[i].max;
    args.max[row] = max;
    args.log_sum[row] = std::isfinite(max) ? log_of_sum(of_row, pieces, max) : std::numeric_limits<float>::quiet_NaN();
  }
  return kOk;
}

Status mask_rows(const Kernels& kernels, const MaskArgs& args) {
  const int64_t pieces = ceil_div(args.vocab_size, kPiece);
  parallel_for(args.num_rows * pieces, [&](int64_t index) {
    const int64_t row = index / pieces, first = index % pieces * kPiece;
    kernels.logits->mask(args.logits + row * args.stride + first, args.masks + row * args.mask_bytes + first / 8,
                         std::min(kPiece, args.vocab_size - first), args.masked + row * args.vocab_size + first);
  });
  return kOk;
}

}  // namespace pagewick
