// Operations on parallel residual streams, in fp32 and rounded once. Compiled once per instruction set.
#include "streams.h"

#include "rows.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// The rows of one token; index 0 is the active stream.
template <class T>
struct Token {
  const T* streams[kMaxStreams];
  T* out[kMaxStreams];
  int64_t num_streams;

  Token(const StreamsArgs& args, int64_t token) : num_streams(1 + args.num_others) {
    streams[0] = static_cast<const T*>(args.active) + token * args.active_stride;
    out[0] = static_cast<T*>(args.out_active) + token * args.size;
    for (int64_t other = 0; other < args.num_others; ++other) {
      const int64_t offset = (token * args.num_others + other) * args.size;
      streams[1 + other] = static_cast<const T*>(args.others) + offset;
      out[1 + other] = static_cast<T*>(args.out_others) + offset;
    }
  }
};

// The coefficients of one token in fp32.
template <class T>
struct Coefficients {
  float values[kMaxStreams * kMaxStreams];

  Coefficients(const StreamsArgs& args, int64_t token, int64_t count) {
    const T* const source = static_cast<const T*>(args.coefficients) + token * count;
    for_vectors(0, count, [&](int64_t i, auto left) {
      store_count(values + i, load_count(source + i, left()), left());
    });
  }
};

template <class T>
void mix(const StreamsArgs& args, int64_t index, int64_t first_col, int64_t end_col) {
  const Token<T> token(args, index);
  const int64_t num_streams = token.num_streams;
  const Coefficients<T> coefficients(args, index, num_streams * num_streams);
  for (int64_t out = 0; out < num_streams; ++out) {
    const float* const factors = coefficients.values + out * num_streams;
    for_vectors(first_col, end_col, [&](int64_t i, auto count) {
      Vec sum = load_count(token.streams[out] + i, count());
      for (int64_t in = 0; in < num_streams; ++in)
        sum = madd(set1(factors[in]), load_count(token.streams[in] + i, count()), sum);
      store_count(token.out[out] + i, sum, count());
    });
  }
}

template <class T>
void correct(const StreamsArgs& args, int64_t index, int64_t first_col, int64_t end_col) {
  const Token<T> token(args, index);
  const Coefficients<T> coefficients(args, index, token.num_streams);
  const T* const computed = static_cast<const T*>(args.computed) + index * args.computed_stride;
  for_vectors(first_col, end_col, [&](int64_t i, auto count) {
    const Vec innovation = load_count(computed + i, count()) - load_count(token.streams[0] + i, count());
    for (int64_t n = 0; n < token.num_streams; ++n) {
      const Vec stream = load_count(token.streams[n] + i, count());
      store_count(token.out[n] + i, madd(set1(1.0f + coefficients.values[n]), innovation, stream), count());
    }
  });
}

template <class T>
float mean_square(const T* x, int64_t size) {
  return sum_of_squares(x, size) / static_cast<float>(size);
}

template <class T>
void match_magnitude(const MagnitudeArgs& args, int64_t first_row, int64_t end_row) {
  for (int64_t row = first_row; row < end_row; ++row) {
    const T* const x = static_cast<const T*>(args.x) + row * args.x_stride;
    const T* const target = static_cast<const T*>(args.target) + row / args.repeat * args.target_stride;
    T* const out = static_cast<T*>(args.out) + row * args.size;
    const float own = mean_square(x, args.size), wanted = mean_square(target, args.size);
    // A row that is not a number stays so.
    const float factor = __builtin_sqrtf(wanted / (own < args.least ? args.least : own));
    for_vectors(0, args.size, [&](int64_t i, auto count) {
      store_count(out + i, load_count(x + i, count()) * factor, count());
    });
  }
}

void mix_any(const StreamsArgs& args, int64_t token, int64_t first_col, int64_t end_col) {
  with_type(args.dtype, [&](auto* type) { mix<Element<decltype(type)>>(args, token, first_col, end_col); });
}

void correct_any(const StreamsArgs& args, int64_t token, int64_t first_col, int64_t end_col) {
  with_type(args.dtype, [&](auto* type) { correct<Element<decltype(type)>>(args, token, first_col, end_col); });
}

void match_any(const MagnitudeArgs& args, int64_t first_row, int64_t end_row) {
  with_type(args.dtype, [&](auto* type) { match_magnitude<Element<decltype(type)>>(args, first_row, end_row); });
}

}  // namespace

extern const StreamsKernels kStreams;
const StreamsKernels kStreams = {mix_any, correct_any, match_any};

}  // namespace PW_ISA
}  // namespace pagewick
