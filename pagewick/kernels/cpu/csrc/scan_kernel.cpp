// The selective scan in fp32. Compiled once per instruction set. Every sum has an order that depends on the sizes of
// the layer alone, and each step of S is rounded to fp32: a token's bits are the same in any chunk of a prompt, and
// however many tokens a pass takes.
#include "convolve.h"
#include "parallel.h"
#include "scan.h"
#include "vec_math.h"

namespace pagewick {
namespace PW_ISA {
namespace {

static_assert(kScanRowUnit % kLanes == 0, "rows of a slice have whole vectors");

// Vectors of a row of S, and tokens, that one pass takes. Their sums and values fill the registers.
constexpr int kVectors = kAccumulators >= 24 ? 4 : 2, kTokens = 2;
// Numbers of a block of columns, which is to stay in the first-level cache.
constexpr int64_t kBlock = 1 << 13;
constexpr int64_t kRowsAhead = 32;

template <class T>
Inputs<T> inputs_of(const ScanArgs& args, const StateSequence& sequence) {
  const T* const rows = static_cast<const T*>(args.xbc) + sequence.first_token * args.xbc_stride;
  return {rows, args.xbc_stride, sequence.source, args.conv_width - 1, num_channels(args)};
}

// Memory of a unit with some channels of the convolution. Rows have whole vectors.
struct Memory {
  float* taps;    // [K, width]
  float* newest;  // [K, width]
  float* x;       // [kChunk, width], values
  float* state;   // [N, width]
  int64_t width;
};

Memory memory_for(const ScanArgs& args, int64_t num_channels) {
  Memory m = {};
  m.width = padded(num_channels);
  const int64_t rows = 2 * args.conv_width + kChunk + args.state_dim;
  m.taps = static_cast<float*>(thread_scratch(Scratch::kKernel, static_cast<size_t>(rows * m.width) * sizeof(float)));
  m.newest = m.taps + args.conv_width * m.width, m.x = m.newest + args.conv_width * m.width;
  m.state = m.x + kChunk * m.width;
  return m;
}

// Writes SiLU of the convolution of channels [channel, channel + size) to rows `stride` apart, for `count` tokens. The
// taps have been turned.
template <class T>
void convolve(const ScanArgs& args, const Inputs<T>& inputs, const Memory& m, int64_t channel, int64_t size,
              int64_t begin, int64_t count, float* x, int64_t stride) {
  const Taps taps = {m.taps, m.width, args.conv_width, m.newest, m.width};
  const float* const bias = args.conv_bias + channel;
  const auto write = [x, stride, bias](int64_t n, int64_t i, auto part, Vec sum) {
    store(x + n * stride + i, silu(sum + load_count(bias + i, part())));
  };
  if (args.conv_width == 4) return convolve_taps<4>(inputs, taps, channel, size, begin, count, write);
  convolve_taps<0>(inputs, taps, channel, size, begin, count, write);
}

template <class T>
void convolve_keys_typed(const ScanArgs& args, const ScanPiece& piece, const ScanSlice& slice, int64_t first,
                         int64_t end) {
  const int64_t channel = args.num_heads * args.head_dim + first;
  const Memory m = memory_for(args, end - first);
  turn_taps(args.conv_weight + channel * args.conv_width, args.conv_width, end - first, m.taps, m.width);
  convolve(args, inputs_of<T>(args, piece.sequence), m, channel, end - first, piece.begin, piece.end - piece.begin,
           slice.keys + piece.row * slice.key_stride + first, slice.key_stride);
}

template <class T>
void set_factors_typed(const ScanArgs& args, const ScanPiece& piece, const ScanSlice& slice) {
  for (int64_t n = piece.begin; n < piece.end; ++n) {
    const T* const dt = static_cast<const T*>(args.dt) + (piece.sequence.first_token + n) * args.dt_stride;
    float* const steps = slice.factors + (piece.row + n - piece.begin) * 2 * slice.head_stride;
    for_vectors(0, args.num_heads, [&](int64_t head, auto count) {
      const Vec speed = exp(min(set1(88.0f), load_count(args.log_decay + head, count())));
      const Vec bias = load_count(args.dt_bias + head, count());
      const Vec step = softplus(load_count(dt + head, count()) * args.dt_scale + bias);
      store(steps + head, step), store(steps + slice.head_stride + head, exp(-speed * step));
    });
  }
}

// A token as one block of columns sees it.
struct Token {
  const float* key;
  const float* query;
  const float* values;
  float step;
  float kept;
  float* read;
};

// Columns of a state: rows `stride` apart.
struct Columns {
  float* first;
  int64_t stride;
};

// Passes once over rows of S with `kCount` tokens: S = kept * S + key * (step * values), which the query then reads.
template <int kWidth, int kCount>
void pass(int64_t rows, const float* source, int64_t source_stride, float* target, int64_t target_stride,
          const Token* tokens, float skip, int64_t num_columns) {
  Vec added[kCount][kWidth], sums[kCount][kWidth] = {};
  const float *keys[kCount], *queries[kCount];
  Vec kept[kCount];
  for (int t = 0; t < kCount; ++t) {
    keys[t] = tokens[t].key, queries[t] = tokens[t].query, kept[t] = set1(tokens[t].kept);
    for (int n = 0; n < kWidth; ++n) added[t][n] = load(tokens[t].values + n * kLanes) * tokens[t].step;
  }
  for (int64_t i = 0; i < rows; ++i) {
    // Read before anything is stored, which might be the same memory for all the compiler knows.
    Vec key[kCount], query[kCount];
    for (int t = 0; t < kCount; ++t) key[t] = set1(keys[t][i]), query[t] = set1(queries[t][i]);
#pragma GCC unroll 4
    for (int n = 0; n < kWidth; ++n) {
      // A single token finds S in memory. Prefetchers of the processor stop at each page.
      if (kCount == 1) __builtin_prefetch(source + (i + kRowsAhead) * source_stride + n * kLanes, 1, 3);
      Vec value = load(source + i * source_stride + n * kLanes);
#pragma GCC unroll 4
      for (int t = 0; t < kCount; ++t) {
        value = madd(key[t], added[t][n], value * kept[t]);
        sums[t][n] = madd(query[t], value, sums[t][n]);
      }
      store(target + i * target_stride + n * kLanes, value);
    }
  }
  for (int t = 0; t < kCount; ++t)
    for (int n = 0; n < kWidth; ++n) {
      const Vec read = madd(set1(skip), load(tokens[t].values + n * kLanes), sums[t][n]);
      store_count(tokens[t].read + n * kLanes, read, minimum(num_columns - n * kLanes, kLanes));
    }
}

// Takes a chunk of tokens over a block of columns. token_at(n): a token as the block sees it.
template <int kWidth, class F>
void pass_tokens(int64_t rows, const float* source, int64_t source_stride, const Columns& state, const Columns& target,
                 int64_t count, float skip, int64_t num_columns, const F& token_at) {
  for (int64_t n = 0; n < count; n += kTokens) {
    const bool is_last = n + kTokens >= count;
    const Columns& next = is_last ? target : state;
    const Token tokens[kTokens] = {token_at(n), token_at(minimum(n + 1, count - 1))};
    const auto run = count - n >= kTokens ? pass<kWidth, kTokens> : pass<kWidth, 1>;
    run(rows, source, source_stride, next.first, next.stride, tokens, skip, num_columns);
    source = state.first, source_stride = state.stride;
  }
}

template <class F>
void pass_block(int64_t rows, const float* source, int64_t source_stride, const Columns& state, const Columns& target,
                int64_t count, float skip, int64_t num_columns, const F& token_at) {
  const auto run = [&] {
    constexpr int kThree = kVectors < 3 ? kVectors : 3;
    static_assert(kVectors == 4 || kVectors == 2, "one case each");
    switch ((num_columns + kLanes - 1) / kLanes) {
      case 1: return pass_tokens<1, F>;
      case 2: return pass_tokens<2, F>;
      case 3: return pass_tokens<kThree, F>;
      default: return pass_tokens<kVectors, F>;
    }
  }();
  run(rows, source, source_stride, state, target, count, skip, num_columns, token_at);
}

// Takes the tokens of a chunk, whose values are in m.x, over the columns of a unit. S is in m.state between chunks.
template <class F>
void pass_chunk(const ScanArgs& args, const ScanPiece& piece, const Memory& m, int64_t head, int64_t first, int64_t end,
                bool is_first, bool is_last, int64_t count, const F& token_at) {
  const int64_t rows = args.state_dim;
  const int64_t begin = (args.conv_width - 1) * num_channels(args) + head * rows * args.head_dim + first;
  const int64_t width = (rows * kVectors * kLanes > kBlock ? kVectors / 2 : kVectors) * kLanes;
  for (int64_t column = 0; column < end - first; column += width) {
    const int64_t columns = minimum(end - first - column, width), own = padded(columns);
    const Columns state = {m.state + column * rows, own};
    const bool writes_target = is_last && piece.after != nullptr;
    const Columns target = writes_target ? Columns{piece.after + begin + column, args.head_dim} : state;
    const float* source = state.first;
    int64_t source_stride = own;
    // Whole vectors are read from the source and written to the target by the first and last pass themselves.
    const bool is_whole = columns == own;
    if (is_first && piece.before == nullptr) {
      memset(state.first, 0, static_cast<size_t>(rows * own) * sizeof(float));
    } else if (is_first && is_whole) {
      source = piece.before + begin + column, source_stride = args.head_dim;
    } else if (is_first) {
      load_columns(piece.before + begin + column, args.head_dim, rows, columns, state.first);
    }
    pass_block(rows, source, source_stride, state, is_whole ? target : state, count, args.skip[head],
               columns, [&](int64_t n) { return token_at(n, column); });
    if (writes_target && !is_whole) store_columns(state.first, rows, columns, target.first, target.stride);
  }
}

template <class T>
void advance_typed(const ScanArgs& args, const ScanPiece& piece, const ScanSlice& slice, int64_t head, int64_t first,
                   int64_t end) {
  const int64_t channel = head * args.head_dim + first, group = head / (args.num_heads / args.num_groups);
  const Memory m = memory_for(args, end - first);
  const Inputs<T> inputs = inputs_of<T>(args, piece.sequence);
  const auto prefetch_place = [&](int64_t place) {
    if (place < piece.end) prefetch(inputs.token(place, channel).row, end - first);
  };
  if (piece.end - piece.begin > 1)
    for (int64_t n = 0; n < kChunk; ++n) prefetch_place(piece.begin + n);
  turn_taps(args.conv_weight + channel * args.conv_width, args.conv_width, end - first, m.taps, m.width);
  for (int64_t begin = piece.begin; begin < piece.end; begin += kChunk) {
    const int64_t count = minimum(kChunk, piece.end - begin), row = piece.row + begin - piece.begin;
    convolve(args, inputs, m, channel, end - first, begin, count, m.x, m.width);
    const auto token_at = [&](int64_t n, int64_t column) {
      if (column == 0) prefetch_place(begin + kChunk + n);
      const float* const key = slice.keys + (row + n) * slice.key_stride + group * args.state_dim;
      const float* const step = slice.factors + (row + n) * 2 * slice.head_stride + head;
      float* const read = slice.reads + (row + n) * args.num_heads * args.head_dim + channel + column;
      const float* const query = key + args.num_groups * args.state_dim;
      return Token{key, query, m.x + n * m.width + column, step[0], step[slice.head_stride], read};
    };
    pass_chunk(args, piece, m, head, first, end, begin == piece.begin, begin + count == piece.end, count, token_at);
  }
}

// out = reads * silu(gate), with the norm before or after the gate if there is one.
template <class T>
void finish_typed(const ScanArgs& args, int64_t token, float* reads) {
  const int64_t row = args.num_heads * args.head_dim, size = row / args.num_norm_groups;
  const T* const gate = static_cast<const T*>(args.gate) + token * args.gate_stride;
  T* const out = static_cast<T*>(args.out) + token * row;
  const auto gated = [&](int64_t i, Vec value, int64_t count) {
    return value * silu(load_count(gate + i, count) * args.gate_scale);
  };
  const auto write = [&](int64_t i, Vec value, int64_t count) {
    count == kLanes ? store_result(out + i, value) : store_part(out + i, value, count);
  };
  if (args.norm_weight == nullptr)
    return for_vectors(0, row, [&](int64_t i, auto count) {
      write(i, gated(i, load_count(reads + i, count()), count()), count());
    });
  for (int64_t first = 0; first < row; first += size) {
    const float squares = sum_vectors(size, [&](Vec& sum, int64_t i, auto count) {
      Vec value = load_count(reads + first + i, count());
      if (!args.is_norm_first) store_count(reads + first + i, value = gated(first + i, value, count()), count());
      sum = madd(value, value, sum);
    });
    const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(size) + args.norm_eps);
    for_vectors(first, first + size, [&](int64_t i, auto count) {
      const Vec normed = load_count(reads + i, count()) * scale * load_count(args.norm_weight + i, count());
      write(i, args.is_norm_first ? gated(i, normed, count()) : normed, count());
    });
  }
}

void convolve_keys(const ScanArgs& args, const ScanPiece& piece, const ScanSlice& slice, int64_t first, int64_t end) {
  with_type(args.dtype, [&](auto* type) {
    convolve_keys_typed<Element<decltype(type)>>(args, piece, slice, first, end);
  });
}

void set_factors(const ScanArgs& args, const ScanPiece& piece, const ScanSlice& slice) {
  with_type(args.dtype, [&](auto* type) { set_factors_typed<Element<decltype(type)>>(args, piece, slice); });
}

void advance(const ScanArgs& args, const ScanPiece& piece, const ScanSlice& slice, int64_t head, int64_t first,
             int64_t end) {
  with_type(args.dtype, [&](auto* type) {
    advance_typed<Element<decltype(type)>>(args, piece, slice, head, first, end);
  });
}

void finish(const ScanArgs& args, int64_t token, float* reads) {
  with_type(args.dtype, [&](auto* type) { finish_typed<Element<decltype(type)>>(args, token, reads); });
}

void keep_inputs(const ScanArgs& args, const StateSequence& sequence, int64_t first, int64_t end) {
  with_type(args.dtype, [&](auto* type) {
    keep_newest_inputs(inputs_of<Element<decltype(type)>>(args, sequence), sequence, first, end);
  });
}

}  // namespace

extern const ScanKernels kScan;
const ScanKernels kScan = {convolve_keys, set_factors, advance, finish, keep_inputs};

}  // namespace PW_ISA
}  // namespace pagewick
