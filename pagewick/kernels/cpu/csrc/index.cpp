// Divides the scoring of keys, and the choice among them, among the threads.
#include "index.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>

#include "attention_units.h"

namespace pagewick {
namespace {

// Elements that are worth handing to another thread in one go.
constexpr int64_t kGrain = 1 << 14;
// The scores of more tokens are computed only when those of the first have been used.
constexpr int64_t kMaxScores = int64_t{1} << 24;
// Keys that a thread scores in one go.
constexpr int64_t kKeysPerUnit = 2 * kTileKeys;

// Successive tokens of a sequence whose keys, or blocks of keys, are scored together. scores: [num_tokens, num_keys], the
// keys of the last; for blocks, [num_tokens, H, num_keys].
struct TokenGroup {
  int64_t seq;
  int64_t first_token;
  int64_t num_tokens;
  int64_t num_keys;
  int64_t first_unit;
  float* scores;
};

// Returns a number that is greater for a better key. Among equal scores, that of the earlier key is better. NaN is the worst.
uint64_t rank_of(float score, int64_t position) {
  const float value = score + 0.0f;  // one zero in place of two
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  bits = bits >> 31 ? ~bits : bits | 0x80000000u;
  if (value != value) bits = 0;
  return uint64_t{bits} << 32 | (0xffffffffu - static_cast<uint32_t>(position));
}

class Selection {
 public:
  Selection(const Kernels& kernels, const SelectKeysArgs& args, const RaggedBatch& batch)
      : kernels_(kernels),
        args_(args),
        batch_(batch),
        num_rows_(args.has_blocks ? args.num_heads : 1),
        keys_per_unit_(args.has_blocks ? std::max<int64_t>(1, kKeysPerUnit / args.ratio) : kKeysPerUnit),
        tokens_per_group_(std::max<int64_t>(1, kMaxRows / args.num_heads)),
        groups_(static_cast<TokenGroup*>(
            thread_scratch(Scratch::kPlan, static_cast<size_t>(args.num_tokens + 1) * sizeof(TokenGroup)))) {}

  Status run() {
    reserve_scores();
    for (int64_t seq = 0; seq < args_.num_seqs; ++seq) {
      const int64_t first = args_.cu_seqlens_q[seq], end = args_.cu_seqlens_q[seq + 1];
      // Tokens that have no more than top_k keys see all of them.
      const int64_t least = args_.has_blocks ? args_.top_k * args_.ratio + 1 : (args_.top_k + 1) * args_.ratio;
      const int64_t scored = std::min(end, first + std::max<int64_t>(0, least - first_length(seq)));
      parallel_ranges(scored - first, kGrain / args_.top_k + 1, [&](int64_t begin, int64_t stop) {
        for (int64_t token = first + begin; token < first + stop; ++token) take_all(seq, token);
      });
      for (int64_t token = scored; token < end; token += tokens_per_group_)
        if (!add(seq, token, std::min(tokens_per_group_, end - token))) return kBadBlockId;
    }
    return flush() ? kOk : kBadBlockId;
  }

 private:
  // The number of tokens up to the first of a sequence's new ones, which it includes.
  int64_t first_length(int64_t seq) const { return args_.context_lens[seq] - batch_.query_len(seq) + 1; }
  int64_t length_at(int64_t seq, int64_t token) const { return first_length(seq) + token - args_.cu_seqlens_q[seq]; }
  int64_t keys_of(int64_t seq, int64_t token) const { return length_at(seq, token) / args_.ratio; }
  // Whether a token is in an incomplete block, which is one of those that it sees.
  bool has_tail(int64_t seq, int64_t token) const {
    return args_.has_blocks && length_at(seq, token) % args_.ratio != 0;
  }

  // The memory is one piece, since every request for it may move it.
  void reserve_scores() {
    int64_t total = 0, largest = 0;
    for (int64_t seq = 0; seq < args_.num_seqs; ++seq) {
      const int64_t num_keys = args_.context_lens[seq] / args_.ratio;
      if (num_keys < args_.top_k + !args_.has_blocks) continue;
      const int64_t size = std::min(batch_.query_len(seq), tokens_per_group_) * num_rows_ * num_keys;
      largest = std::max(largest, size);
      total += ceil_div(batch_.query_len(seq), tokens_per_group_) * size;
    }
    room_ = std::min(total, std::max(kMaxScores, largest));
    scores_ = static_cast<float*>(thread_scratch(Scratch::kPartials, static_cast<size_t>(room_) * sizeof(float)));
  }

  // Adds tokens whose keys are to be scored. False if a block id is outside the cache.
  bool add(int64_t seq, int64_t token, int64_t num_tokens) {
    const int64_t num_keys = keys_of(seq, token + num_tokens - 1);
    const int64_t size = num_tokens * num_rows_ * num_keys;
    if (used_ + size > room_ && !flush()) return false;
    groups_[num_groups_++] = {seq, token, num_tokens, num_keys, num_units_, scores_ + used_};
    used_ += size;
    num_units_ += ceil_div(num_keys, keys_per_unit_);
    return true;
  }

  // Scores the keys of all groups so far, and chooses among them.
  bool flush() {
    std::atomic<bool> has_bad_block{false};
    groups_[num_groups_].first_unit = num_units_;
    parallel_for(num_units_, [&](int64_t index) {
      const TokenGroup& group =
          std::upper_bound(groups_, groups_ + num_groups_, index,
                           [](int64_t unit, const TokenGroup& next) { return unit < next.first_unit; })[-1];
      const int64_t first = (index - group.first_unit) * keys_per_unit_, size = args_.has_blocks ? args_.ratio : 1;
      const IndexUnit unit = {group.seq, group.first_token, group.num_tokens, first * size,
                              std::min(group.num_keys, first + keys_per_unit_) * size};
      if (!kernels_.index->score(args_, unit, group.scores, group.num_keys)) has_bad_block = true;
    });
    if (has_bad_block) return false;
    parallel_for(num_groups_, [&](int64_t index) {
      const TokenGroup& group = groups_[index];
      for (int64_t i = 0; i < group.num_tokens; ++i)
        take_best(group.seq, group.first_token + i, group.scores + i * num_rows_ * group.num_keys, group.num_keys);
    });
    num_groups_ = num_units_ = used_ = 0;
    return true;
  }

  void take_all(int64_t seq, int64_t token) {
    const int64_t count = keys_of(seq, token);
    for (int64_t row = 0; row < num_rows_; ++row) {
      int32_t* const slots = slots_of(token, row);
      for (int64_t position = 0; position < count; ++position) slots[position] = slot_of(seq, position);
      std::fill(slots + count, slots + args_.top_k, 0);
    }
    args_.counts[token] = static_cast<int32_t>(count);
  }

  void take_best(int64_t seq, int64_t token, const float* scores, int64_t stride) {
    const int64_t num_keys = keys_of(seq, token), tail = has_tail(seq, token), count = args_.top_k - tail;
    const int64_t first_local = args_.has_blocks ? num_keys - (args_.num_local - tail) : num_keys;
    uint64_t* const ranks =
        static_cast<uint64_t*>(thread_scratch(Scratch::kKernel, static_cast<size_t>(num_keys) * sizeof(uint64_t)));
    for (int64_t row = 0; row < num_rows_; ++row, scores += stride) {
      for (int64_t position = 0; position < num_keys; ++position)
        ranks[position] = rank_of(position < first_local ? scores[position] : INFINITY, position);
      int32_t* const slots = slots_of(token, row);
      if (count > 0) std::nth_element(ranks, ranks + count - 1, ranks + num_keys, std::greater<uint64_t>());
      for (int64_t i = 0; i < count; ++i) slots[i] = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(ranks[i]));
      std::sort(slots, slots + count);
      for (int64_t i = 0; i < count; ++i) slots[i] = slot_of(seq, slots[i]);
      std::fill(slots + count, slots + args_.top_k, 0);
    }
    args_.counts[token] = static_cast<int32_t>(count);
  }

  int32_t* slots_of(int64_t token, int64_t row) const {
    return args_.slots + (token * num_rows_ + row) * args_.top_k;
  }

  int32_t slot_of(int64_t seq, int64_t position) const {
    if (!args_.target_tables) return static_cast<int32_t>(position);
    const int64_t block_id = args_.target_tables[seq * args_.target_table_stride + position / args_.block_size];
    return static_cast<int32_t>(block_id * args_.block_size + position % args_.block_size);
  }

  const Kernels& kernels_;
  const SelectKeysArgs& args_;
  const RaggedBatch& batch_;
  // Choices of a token, and keys, or blocks of keys, that a thread scores in one go.
  const int64_t num_rows_, keys_per_unit_;
  const int64_t tokens_per_group_;
  TokenGroup* const groups_;
  int64_t num_groups_ = 0, num_units_ = 0, used_ = 0, room_ = 0;
  float* scores_ = nullptr;
};

}  // namespace

Status store_index_keys(const Kernels& kernels, const StoreIndexArgs& args) {
  if (!slots_are_valid(args.slot_mapping, args.num_tokens, args.num_blocks * args.block_size)) return kBadBlockId;
  parallel_ranges(args.num_tokens, kGrain / args.dim,
                  [&](int64_t begin, int64_t end) { kernels.index->store(args, begin, end); });
  return kOk;
}

Status select_keys(const Kernels& kernels, const SelectKeysArgs& args) {
  const RaggedBatch batch = {args.context_lens, args.cu_seqlens_q, args.num_tokens, args.num_seqs,
                             args.max_blocks * args.block_size * (args.has_blocks ? 1 : args.ratio), 1, args.num_heads, 0, false};
  if (!batch.has_valid_lengths()) return kBadLengths;
  for (int64_t token = 0; token <= args.num_tokens; ++token) args.starts[token] = static_cast<int32_t>(token);
  return Selection(kernels, args, batch).run();
}

}  // namespace pagewick
