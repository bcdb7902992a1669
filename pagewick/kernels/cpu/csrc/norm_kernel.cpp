// RMS and layer normalisation, with an optional residual added first. Compiled once per instruction set.
#include "norm.h"

#include "rows.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// new_residual = x + residual, rounded to T.
template <class T>
void add_row(const T* x, const T* residual, T* new_residual, int64_t size) {
  for_vectors(0, size, [&](int64_t i, auto count) {
    store_count(new_residual + i, load_count(x + i, count()) + load_count(residual + i, count()), count());
  });
}

// new_residual = x + residual in fp32, and out the same rounded to T.
template <class T>
void add_wide_row(const T* x, const float* residual, float* new_residual, T* out, int64_t size) {
  for_vectors(0, size, [&](int64_t i, auto count) {
    const Vec sum = load_count(x + i, count()) + load_count(residual + i, count());
    store_count(new_residual + i, sum, count());
    store_count(out + i, sum, count());
  });
}

// out = round(x / rms(x)) * weight, each step rounded to T; with an offset, x / rms(x) * (weight + offset), rounded
// once.
template <class T>
void rms_norm_row(const NormArgs& args, const T* x, T* out) {
  const int64_t size = args.hidden_size;
  const T* const weight = static_cast<const T*>(args.weight);
  const float scale = 1.0f / __builtin_sqrtf(sum_of_squares(x, size) / static_cast<float>(size) + args.eps);
  if (args.weight_offset == 0.0f)
    for_vectors(0, size, [&](int64_t i, auto count) {
      const Vec normed = round_to(x, load_count(x + i, count()) * scale);
      store_count(out + i, normed * load_count(weight + i, count()), count());
    });
  else
    for_vectors(0, size, [&](int64_t i, auto count) {
      const Vec normed = load_count(x + i, count()) * scale;
      store_count(out + i, normed * (load_count(weight + i, count()) + args.weight_offset), count());
    });
}

// out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, rounded once.
template <class T>
void layer_norm_row(const NormArgs& args, const T* x, T* out) {
  const int64_t size = args.hidden_size;
  const T *const weight = static_cast<const T*>(args.weight), *const bias = static_cast<const T*>(args.bias);
  const float mean = mean_of(x, size), squares = sum_of_squares_about(x, size, mean);
  const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(size) + args.eps);
  for_vectors(0, size, [&](int64_t i, auto count) {
    const Vec normed = (load_count(x + i, count()) - mean) * scale * load_count(weight + i, count());
    store_count(out + i, bias == nullptr ? normed : normed + load_count(bias + i, count()), count());
  });
}

template <class T, class Row>
void norm_rows(const NormArgs& args, int64_t first_row, int64_t end_row, const Row& norm_row) {
  for (int64_t row = first_row; row < end_row; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    T* const out = static_cast<T*>(args.out) + row * args.out_stride;
    if (args.has_wide_residual) {
      const float* const residual = static_cast<const float*>(args.residual) + row * args.residual_stride;
      float* const new_residual = static_cast<float*>(args.new_residual) + row * args.hidden_size;
      add_wide_row(x, residual, new_residual, out, args.hidden_size);
      x = out;
    } else if (args.residual != nullptr) {
      T* const new_residual = static_cast<T*>(args.new_residual) + row * args.hidden_size;
      add_row(x, static_cast<const T*>(args.residual) + row * args.residual_stride, new_residual, args.hidden_size);
      x = new_residual;
    }
    norm_row(args, x, out);
  }
}

void rms_norm(const NormArgs& args, int64_t first_row, int64_t end_row) {
  with_type(args.dtype, [&](auto* type) {
    using T = Element<decltype(type)>;
    norm_rows<T>(args, first_row, end_row, rms_norm_row<T>);
  });
}

void layer_norm(const NormArgs& args, int64_t first_row, int64_t end_row) {
  with_type(args.dtype, [&](auto* type) {
    using T = Element<decltype(type)>;
    norm_rows<T>(args, first_row, end_row, layer_norm_row<T>);
  });
}

}  // namespace

extern const NormKernels kNorm;
const NormKernels kNorm = {rms_norm, layer_norm};

}  // namespace PW_ISA
}  // namespace pagewick
