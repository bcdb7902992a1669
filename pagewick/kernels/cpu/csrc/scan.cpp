// Divides the selective scan among the threads. Whoever computes a column of a state, its sums have one order.
#include "scan.h"

#include <algorithm>

#include "parallel.h"

namespace pagewick {
namespace {

// Tokens of the batch between two norms, which bounds the memory for what they read. A longer slice reads and writes S
// less often.
constexpr int64_t kSlice = 128;
// Columns of a head's S in a unit: a block of that many with 128 rows fits the first-level cache.
constexpr int64_t kColumns = 64;
// Channels of the convolution that are worth handing to another thread in one go.
constexpr int64_t kKeyGrain = 128, kGrain = 1 << 11;

int64_t padded(int64_t size) { return ceil_div(size, kScanRowUnit) * kScanRowUnit; }

ScanSlice memory_for(const ScanArgs& args, int64_t num_rows) {
  ScanSlice slice = {};
  slice.key_stride = padded(2 * args.num_groups * args.state_dim), slice.head_stride = padded(args.num_heads);
  const int64_t keys = num_rows * slice.key_stride, factors = num_rows * 2 * slice.head_stride;
  const int64_t total = keys + factors + num_rows * args.num_heads * args.head_dim;
  slice.keys = static_cast<float*>(thread_scratch(Scratch::kPartials, static_cast<size_t>(total) * sizeof(float)));
  slice.factors = slice.keys + keys, slice.reads = slice.factors + factors;
  return slice;
}

// Writes the pieces of tokens [begin, end) of the batch; returns their number. seq: the first sequence that may have
// some of them; becomes that for the tokens from `end` on.
int64_t cut_pieces(const ScanArgs& args, int64_t begin, int64_t end, int64_t& seq, ScanPiece* pieces) {
  int64_t count = 0;
  for (; seq < args.num_seqs && args.cu_seqlens_q[seq] < end; ++seq) {
    const StateSequence sequence = sequence_at(args, seq);
    const int64_t first = std::max(begin, sequence.first_token), last = sequence.first_token + sequence.num_tokens;
    if (first < last) {
      const float* const before = first == sequence.first_token ? sequence.source : sequence.target;
      pieces[count++] = {sequence, first - sequence.first_token, std::min(end, last) - sequence.first_token,
                         first - begin, before, nullptr};
    }
    if (last > end) break;
  }
  return count;
}

// Returns the end of a slice that begins at a token of the batch and may have `size` tokens. It does not divide those
// behind a stored state, since S is nowhere between them.
int64_t end_of_slice(const ScanArgs& args, int64_t begin, int64_t size, int64_t seq) {
  const int64_t end = std::min(args.num_tokens, begin + size);
  for (; seq < args.num_seqs && args.cu_seqlens_q[seq] < end; ++seq) {
    const StateSequence sequence = sequence_at(args, seq);
    const int64_t stored = sequence.first_token + sequence.num_stored;
    if (stored < end && end < sequence.first_token + sequence.num_tokens) return stored;
  }
  return end;
}

// Takes a piece through columns of a head's S, and stores S where it is to be stored. Its `after` is not used.
void advance_parts(const ScanKernels& scan, const ScanArgs& args, const ScanSlice& slice, ScanPiece piece, int64_t head,
                   int64_t first, int64_t last) {
  const int64_t begin = piece.begin, end = piece.end, stored = piece.sequence.num_stored;
  const int64_t middle = std::max(begin, std::min(end, stored));
  piece.end = middle, piece.after = piece.sequence.target;
  if (begin < middle) scan.advance(args, piece, slice, head, first, last);
  if (middle == end) return;
  piece.begin = middle, piece.end = end, piece.row += middle - begin;
  piece.before = piece.sequence.target, piece.after = nullptr;
  scan.advance(args, piece, slice, head, first, last);
}

void advance_slice(const ScanKernels& scan, const ScanArgs& args, const ScanSlice& slice, const ScanPiece* pieces,
                   int64_t num_pieces) {
  const int64_t num_keys = 2 * args.num_groups * args.state_dim, key_parts = ceil_div(num_keys, kKeyGrain);
  parallel_for(num_pieces * (key_parts + 1), [&](int64_t index) {
    const ScanPiece& piece = pieces[index / (key_parts + 1)];
    const int64_t first = index % (key_parts + 1) * kKeyGrain;
    if (first >= num_keys) return scan.set_factors(args, piece, slice);
    scan.convolve_keys(args, piece, slice, first, std::min(num_keys, first + kKeyGrain));
  });
  const int64_t parts = ceil_div(args.head_dim, kColumns), num_units = args.num_heads * parts;
  parallel_for(num_pieces * num_units, [&](int64_t index) {
    const int64_t head = index % num_units / parts, first = index % parts * kColumns;
    const int64_t last = std::min(args.head_dim, first + kColumns);
    advance_parts(scan, args, slice, pieces[index / num_units], head, first, last);
  });
}

}  // namespace

Status selective_scan(const Kernels& kernels, const ScanArgs& args) {
  if (const Status status = check_sequences(args); status != kOk) return status;
  const ScanKernels& scan = *kernels.scan;
  const int64_t row = args.num_heads * args.head_dim;
  int64_t size = std::min(args.num_tokens, kSlice);
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    const StateSequence sequence = sequence_at(args, seq);
    size = std::max(size, sequence.num_tokens - sequence.num_stored);
  }
  const ScanSlice slice = memory_for(args, size);
  auto* const pieces = static_cast<ScanPiece*>(
      thread_scratch(Scratch::kPlan, static_cast<size_t>(size) * sizeof(ScanPiece)));
  int64_t seq = 0;
  for (int64_t begin = 0, end = 0; begin < args.num_tokens; begin = end) {
    end = end_of_slice(args, begin, size, seq);
    advance_slice(scan, args, slice, pieces, cut_pieces(args, begin, end, seq, pieces));
    parallel_for(end - begin, [&](int64_t i) { scan.finish(args, begin + i, slice.reads + i * row); });
  }
  // A source that is the target, too, is read until now.
  parallel_elements(args.num_seqs, num_channels(args), kGrain, [&](int64_t seq, int64_t first, int64_t end) {
    const StateSequence sequence = sequence_at(args, seq);
    if (sequence.num_tokens > 0) scan.keep_inputs(args, sequence, first, end);
  });
  return kOk;
}

}  // namespace pagewick
