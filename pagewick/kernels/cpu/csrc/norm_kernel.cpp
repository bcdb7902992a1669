// RMS normalisation, with an optional residual added first. Compiled once per instruction set.
#include "norm.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

constexpr int kChains = 4;  // independent sums, to hide the latency of an addition

// Calls f(offset, count) for whole vectors and once more for what is left.
template <class F>
void for_vectors(int64_t begin, int64_t size, const F& f) {
  int64_t i = begin;
  for (; i + kLanes <= size; i += kLanes) f(i, [] { return int64_t{kLanes}; });
  if (i < size) f(i, [left = size - i] { return left; });
}

template <class T>
Vec load_count(const T* source, int64_t count) {
  return count == kLanes ? load(source) : load_part(source, count);
}

template <class T>
void store_count(T* target, Vec value, int64_t count) {
  count == kLanes ? store(target, value) : store_part(target, value, count);
}

// new_residual = x + residual, rounded to T.
template <class T>
void add_row(const T* x, const T* residual, T* new_residual, int64_t size) {
  for_vectors(0, size, [&](int64_t i, auto count) {
    store_count(new_residual + i, load_count(x + i, count()) + load_count(residual + i, count()), count());
  });
}

template <class T>
float sum_of_squares(const T* x, int64_t size) {
  Vec sums[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kLanes <= size; i += kChains * kLanes)
    for (int n = 0; n < kChains; ++n) {
      const Vec value = load(x + i + n * kLanes);
      sums[n] = madd(value, value, sums[n]);
    }
  for_vectors(i, size, [&](int64_t offset, auto count) {
    const Vec value = load_count(x + offset, count());
    sums[0] = madd(value, value, sums[0]);
  });
  return hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// out = round(x / rms(x)) * weight, each step rounded to T.
template <class T>
void norm_row(const T* x, const T* weight, T* out, int64_t size, float eps) {
  const float scale = 1.0f / __builtin_sqrtf(sum_of_squares(x, size) / static_cast<float>(size) + eps);
  for_vectors(0, size, [&](int64_t i, auto count) {
    const Vec normed = round_to(x, load_count(x + i, count()) * scale);
    store_count(out + i, normed * load_count(weight + i, count()), count());
  });
}

template <class T>
void norm_rows(const T*, const RmsNormArgs& args, int64_t first_row, int64_t end_row) {
  for (int64_t row = first_row; row < end_row; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    if (args.residual != nullptr) {
      T* new_residual = static_cast<T*>(args.new_residual) + row * args.hidden_size;
      add_row(x, static_cast<const T*>(args.residual) + row * args.residual_stride, new_residual, args.hidden_size);
      x = new_residual;
    }
    norm_row(x, static_cast<const T*>(args.weight), static_cast<T*>(args.out) + row * args.hidden_size,
             args.hidden_size, args.eps);
  }
}

void rms_norm(const RmsNormArgs& args, int64_t first_row, int64_t end_row) {
  with_type(args.dtype, [&](auto* type) { norm_rows(type, args, first_row, end_row); });
}

}  // namespace

extern const NormKernels kNorm;
const NormKernels kNorm = {rms_norm};

}  // namespace PW_ISA
}  // namespace pagewick
