// The gated delta rule in fp32. Compiled once per instruction set. Every sum has an order that depends on the sizes of
// the layer alone, and each step of S is rounded to fp32: a token's bits are the same in any chunk of a prompt.
#include "delta_inputs.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// Vectors of a row of S that are computed together: a block of columns that fits into the first-level cache, with
// enough sums to hide the latency of additions.
constexpr int kVectors = 4;

// A token as one block of columns sees it.
struct Step {
  const float* query;  // these two read S as it is before the token
  const float* key;
  const float* new_key;  // in whose place S puts the change
  const float* row_kept;  // factors of rows of S
  float kept;             // or a factor of all rows; then 1
};

// Passes once over rows of S: brings them to the state after the token `last`, which puts `delta` in the place of its
// key, and then reads them with the key and the query of the token `next`. Both or one of the two.
template <int kWidth, bool kRowsDecay, bool kUpdates, bool kReads>
void pass(int64_t rows, const float* source, int64_t source_stride, float* target, int64_t target_stride,
          const Step& last, const Vec* delta, const Step& next, Vec* held, Vec* seen) {
  Vec add[kWidth], key_sums[kWidth] = {}, query_sums[kWidth] = {};
  for (int n = 0; n < kWidth; ++n) add[n] = kUpdates ? delta[n] : zero();
  const Vec kept = set1(last.kept);
  for (int64_t i = 0; i < rows; ++i) {
    // Read before anything is stored, which might be the same memory for all the compiler knows.
    const Vec last_key = kUpdates ? set1(last.new_key[i]) : zero();
    const Vec factor = kUpdates && kRowsDecay ? set1(last.row_kept[i]) : kept;
    const Vec next_key = kReads ? set1(next.key[i]) : zero(), query = kReads ? set1(next.query[i]) : zero();
#pragma GCC unroll 4
    for (int n = 0; n < kWidth; ++n) {
      Vec value = load(source + i * source_stride + n * kLanes);
      if (kUpdates) {
        value = madd(last_key, add[n], value * factor);
        store(target + i * target_stride + n * kLanes, value);
      }
      if (kReads) {
        key_sums[n] = madd(next_key, value, key_sums[n]);
        query_sums[n] = madd(query, value, query_sums[n]);
      }
    }
  }
  for (int n = 0; n < kWidth && kReads; ++n) held[n] = key_sums[n], seen[n] = query_sums[n];
}

// A block of columns of one head's S, and the tokens that pass over it.
struct Block {
  const float* source;  // rows source_stride apart
  float* target;
  int64_t source_stride, target_stride;
  float* state;  // [DK, kWidth * kLanes], for the states between
  int64_t offset;  // of the block in the columns of the unit
  int64_t head;    // in the unit
};

// Takes the tokens of a chunk over a block of columns. ahead(n) is called once for each token.
template <int kWidth, bool kRowsDecay, class F>
void pass_tokens(const DeltaArgs& args, const Memory& m, const Block& block, int64_t count, float* reads,
                 int64_t reads_stride, int64_t num_columns, const F& ahead) {
  const int64_t rows = args.key_dim, own = kWidth * kLanes;
  const auto step = [&](int64_t n) {
    const float *const x = m.x + n * m.width, *const key = x + m.key_begin;
    const float* const decayed = m.decayed + n * m.decayed_width;
    if (kRowsDecay) return Step{decayed + m.key_begin, decayed + 2 * m.key_begin, key, decayed, 1.0f};
    return Step{x, key, key, nullptr, m.factors[block.head * 2 * kChunk + n]};
  };
  Vec delta[kWidth], held[kWidth], seen[kWidth];
  Step last = {}, next = step(0);
  pass<kWidth, kRowsDecay, false, true>(rows, block.source, block.source_stride, nullptr, 0, last, nullptr, next, held, seen);
  for (int64_t n = 0; n < count; ++n) {
    if (block.offset == 0) ahead(n);
    last = next;
    const float taken = m.factors[(block.head * 2 + 1) * kChunk + n];
    const float* const values = m.x + n * m.width + m.value_begin + block.offset;
    for (int i = 0; i < kWidth; ++i) {
      delta[i] = taken * (load(values + i * kLanes) - last.kept * held[i]);
      // S^T q after the step, from S before it.
      const Vec read = madd(set1(m.common[n]), delta[i], last.kept * seen[i]);
      const int64_t left = num_columns - i * kLanes;
      store_count(reads + n * reads_stride + i * kLanes, read, minimum(left, kLanes));
    }
    const float* const source = n == 0 ? block.source : block.state;
    const int64_t stride = n == 0 ? block.source_stride : own;
    if (n + 1 < count) {
      next = step(n + 1);
      pass<kWidth, kRowsDecay, true, true>(rows, source, stride, block.state, own, last, delta, next, held, seen);
    } else {
      pass<kWidth, kRowsDecay, true, false>(rows, source, stride, block.target, block.target_stride, last, delta, next,
                                            held, seen);
    }
  }
}

template <bool kRowsDecay, class F>
void pass_block(const DeltaArgs& args, const Memory& m, const Block& block, int64_t count, float* reads,
                int64_t reads_stride, int64_t num_columns, const F& ahead) {
  static_assert(kVectors == 4, "one case each");
  switch ((num_columns + kLanes - 1) / kLanes) {
    case 1: return pass_tokens<1, kRowsDecay>(args, m, block, count, reads, reads_stride, num_columns, ahead);
    case 2: return pass_tokens<2, kRowsDecay>(args, m, block, count, reads, reads_stride, num_columns, ahead);
    case 3: return pass_tokens<3, kRowsDecay>(args, m, block, count, reads, reads_stride, num_columns, ahead);
    default: return pass_tokens<4, kRowsDecay>(args, m, block, count, reads, reads_stride, num_columns, ahead);
  }
}

// Takes a chunk of tokens over all columns of a unit. S is in m.state between chunks.
template <class F>
void pass_chunk(const DeltaArgs& args, const DeltaUnit& unit, const Memory& m, bool is_first, bool is_last, int64_t count,
                float* reads, int64_t reads_stride, const F& ahead) {
  const int64_t rows = args.key_dim, size = (unit.end_column - unit.first_column) / m.heads;
  const auto run = args.has_channel_decay ? pass_block<true, F> : pass_block<false, F>;
  for (int64_t head = 0; head < m.heads; ++head)
    for (int64_t column = 0; column < size; column += kVectors * kLanes) {
      const int64_t columns = minimum(size - column, kVectors * kLanes), own = padded(columns);
      const int64_t global = unit.first_column + head * size + column, offset = head * padded(size) + column;
      const int64_t place = (args.conv_width - 1) * num_channels(args) +
                            global / args.value_dim * rows * args.value_dim + global % args.value_dim;
      float* const state = m.state + offset * rows;
      Block block = {state, state, own, own, state, offset, head};
      if (is_first && unit.before == nullptr) memset(state, 0, static_cast<size_t>(rows * own) * sizeof(float));
      // Whole vectors are read from the source and written to the target by the first and last pass themselves.
      const bool is_whole = columns == own, reads_source = is_first && unit.before != nullptr;
      const bool writes_target = is_last && unit.after != nullptr;
      if (reads_source && is_whole) block.source = unit.before + place, block.source_stride = args.value_dim;
      if (reads_source && !is_whole) load_columns(unit.before + place, args.value_dim, rows, columns, state);
      if (writes_target && is_whole) block.target = unit.after + place, block.target_stride = args.value_dim;
      run(args, m, block, count, reads + head * size + column, reads_stride, columns, ahead);
      if (writes_target && !is_whole) store_columns(state, rows, columns, unit.after + place, args.value_dim);
    }
}

// out = read / sqrt(mean(read^2) + eps) * weight * activation(gate), for each value head.
template <class T>
void finish_heads(const DeltaArgs& args, int64_t token, int64_t first_head, int64_t end_head, const float* reads) {
  const int64_t size = args.value_dim, row = args.num_value_heads * size;
  for (int64_t head = first_head; head < end_head; ++head, reads += size) {
    const T* const gate = static_cast<const T*>(args.gate) + token * args.gate_stride + head * size;
    T* const out = static_cast<T*>(args.out) + token * row + head * size;
    const float mean = sum_of_squares(reads, size) / static_cast<float>(size);
    const float scale = 1.0f / __builtin_sqrtf(mean + args.norm_eps);
    for_vectors(0, size, [&](int64_t i, auto count) {
      const Vec normed = load_count(reads + i, count()) * scale * load_count(args.norm_weight + i, count());
      const Vec x = load_count(gate + i, count());
      const Vec result = normed * times_sigmoid(args.has_sigmoid_gate ? set1(1.0f) : x, x);
      count() == kLanes ? store_result(out + i, result) : store_part(out + i, result, count());
    });
  }
}

template <class T>
void advance_typed(const DeltaArgs& args, const StateSequence& sequence, const DeltaUnit& unit, float* reads) {
  const Memory m = memory_for(args, unit);
  const int64_t row = args.num_value_heads * args.value_dim, columns = unit.end_column - unit.first_column;
  const int64_t first_head = unit.first_column / args.value_dim;
  const auto prefetch_place = [&](int64_t place) {
    if (place < unit.end) prefetch_token<T>(args, sequence, unit, m, place, reads == nullptr);
  };
  if (unit.end - unit.begin > 1)
    for (int64_t n = 0; n < kChunk; ++n) prefetch_place(unit.begin + n);
  load_taps(args, unit, m);
  for (int64_t begin = unit.begin; begin < unit.end; begin += kChunk) {
    const int64_t count = minimum(kChunk, unit.end - begin);
    prepare<T>(args, sequence, unit, m, begin, count);
    const bool is_first = begin == unit.begin, is_last = begin + count == unit.end;
    float* const wanted = reads == nullptr ? m.reads : reads + (begin - unit.begin) * row + unit.first_column;
    pass_chunk(args, unit, m, is_first, is_last, count, wanted, reads == nullptr ? columns : row,
               [&](int64_t n) { prefetch_place(begin + kChunk + n); });
    if (reads != nullptr) continue;
    for (int64_t n = 0; n < count; ++n)
      finish_heads<T>(args, sequence.first_token + begin + n, first_head, first_head + m.heads, wanted + n * columns);
  }
}

void advance(const DeltaArgs& args, const StateSequence& sequence, const DeltaUnit& unit, float* reads) {
  with_type(args.dtype, [&](auto* type) { advance_typed<Element<decltype(type)>>(args, sequence, unit, reads); });
}

void finish(const DeltaArgs& args, int64_t token, int64_t first_head, int64_t end_head, const float* reads) {
  with_type(args.dtype, [&](auto* type) {
    finish_heads<Element<decltype(type)>>(args, token, first_head, end_head, reads);
  });
}

void keep_inputs(const DeltaArgs& args, const StateSequence& sequence, int64_t first, int64_t end) {
  with_type(args.dtype, [&](auto* type) {
    keep_newest_inputs(inputs_of<Element<decltype(type)>>(args, sequence), sequence, first, end);
  });
}

}  // namespace

extern const DeltaKernels kDelta;
const DeltaKernels kDelta = {advance, finish, keep_inputs};

}  // namespace PW_ISA
}  // namespace pagewick
