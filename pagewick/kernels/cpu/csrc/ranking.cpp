// The ranks of tokens, and the most likely ones.
#include "token_order.h"

namespace pagewick {

Status rank_tokens(const Kernels& kernels, const RankArgs& args) {
  for (int64_t i = 0; i < args.num_rows; ++i)
    if (args.token_ids[i] < 0 || args.token_ids[i] >= args.vocab_size) return kBadRow;
  parallel_for(args.num_rows, [&](int64_t row) {
    const float* const logits = args.logits + row * args.stride;
    args.ranks[row] = 1 + kernels.logits->count_above(logits, args.vocab_size, logits[args.token_ids[row]]);
    int64_t* const ids = args.top_ids + row * args.num_top;
    float* const values = args.top_logits + row * args.num_top;
    if (args.num_top == 0) return;
    const float max = kernels.logits->find_greatest(logits, args.vocab_size).value;
    if (std::isnan(max)) {
      std::fill(ids, ids + args.num_top, 0);
      std::fill(values, values + args.num_top, max);
      return;
    }
    RowGroups groups(*kernels.logits, logits, args.vocab_size);
    const int64_t count = groups.choose(groups.least_of(args.num_top));
    int32_t* const chosen = groups.token_ids();
    std::partial_sort(chosen, chosen + args.num_top, chosen + count, [logits](int32_t a, int32_t b) {
      return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    });
    for (int64_t i = 0; i < args.num_top; ++i) {
      ids[i] = chosen[i];
      values[i] = logits[chosen[i]];
    }
  });
  return kOk;
}

}  // namespace pagewick
