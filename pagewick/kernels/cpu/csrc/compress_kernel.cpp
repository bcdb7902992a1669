// Makes compressed entries, in fp32 and rounded once. Compiled once per instruction set.
#include "compress.h"

#include "latent_keys.h"
#include "parallel.h"
#include "rotation.h"
#include "rows.h"
#include "vec_math.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// The rows of a window, over a cache of type C.
template <class C>
class Window {
 public:
  // rows: memory for the address of each row.
  Window(const CompressRowsArgs& args, const EndedWindow& window, const C** rows)
      : args_(args), rows_(rows), num_kinds_(args.has_overlap ? 2 : 1),
        num_earlier_(args.has_overlap && window.end > args.ratio ? args.ratio : 0) {
    const int32_t* const block_table = args.block_tables + window.seq * args.block_table_stride;
    const int64_t row_size = 2 * num_kinds_ * args.dim, first = window.end - num_rows();
    for (int64_t i = 0; i < num_rows(); ++i) {
      const int64_t block_id = block_table[(first + i) / args.block_size];
      is_whole_ = is_whole_ && block_id >= 0 && block_id < args.num_blocks;
      rows_[i] = static_cast<const C*>(args.cache) +
                 (is_whole_ ? (block_id * args.block_size + (first + i) % args.block_size) * row_size : 0);
    }
  }

  static int64_t max_rows(const CompressRowsArgs& args) { return (args.has_overlap ? 2 : 1) * args.ratio; }
  // Whether all rows lie inside the cache.
  bool is_whole() const { return is_whole_; }

  // Writes the sums of columns [first, first + kCount * kLanes), or of the `count` first of these, to out.
  template <int kCount>
  void add_columns(int64_t first, int64_t count, float* out) const {
    Vec highest[kCount], sums[kCount] = {}, totals[kCount] = {};
    for (int n = 0; n < kCount; ++n) highest[n] = set1(-__builtin_inff());
    for (int64_t row = 0; row < num_rows(); ++row)
      for (int n = 0; n < kCount; ++n) highest[n] = max(gate(row, first + n * kLanes, count), highest[n]);
    for (int64_t row = 0; row < num_rows(); ++row)
      for (int n = 0; n < kCount; ++n) {
        const Vec weight = exp(gate(row, first + n * kLanes, count) - highest[n]);
        sums[n] = sums[n] + weight;
        totals[n] = madd(weight, value(row, first + n * kLanes, count), totals[n]);
      }
    for (int n = 0; n < kCount; ++n) store_count(out + first + n * kLanes, totals[n] / sums[n], count);
  }

 private:
  int64_t num_rows() const { return num_earlier_ + args_.ratio; }
  // With overlap, what counts in the entry of the next window comes first.
  int64_t kind_of(int64_t row) const { return row < num_earlier_ ? 0 : num_kinds_ - 1; }

  Vec value(int64_t row, int64_t column, int64_t count) const {
    return load_count(rows_[row] + kind_of(row) * args_.dim + column, count);
  }

  Vec gate(int64_t row, int64_t column, int64_t count) const {
    const int64_t place = row < num_earlier_ ? row : row - num_earlier_, offset = kind_of(row) * args_.dim + column;
    const float* const bias = args_.bias + place * num_kinds_ * args_.dim + offset;
    return load_count(rows_[row] + num_kinds_ * args_.dim + offset, count) + load_count(bias, count);
  }

  const CompressRowsArgs& args_;
  const C** const rows_;
  const int64_t num_kinds_, num_earlier_;
  bool is_whole_ = true;
};

// Divides a row by its root mean square, and multiplies it by weights.
void normalise(const CompressRowsArgs& args, float* row) {
  const float mean = sum_of_squares(row, args.dim) / static_cast<float>(args.dim);
  const float scale = 1.0f / __builtin_sqrtf(mean + args.norm_eps);
  with_type(args.norm_dtype, [&](auto* type) {
    const auto* const weight = static_cast<const Element<decltype(type)>*>(args.norm_weight);
    for_vectors(0, args.dim, [&](int64_t i, auto count) {
      store_count(row + i, load_count(row + i, count()) * scale * load_count(weight + i, count()), count());
    });
  });
}

bool compress(const CompressRowsArgs& args, const EndedWindow& window) {
  constexpr int kTogether = 4;
  return with_type(args.cache_dtype, [&](auto* type) {
    using C = Element<decltype(type)>;
    const size_t row_bytes = static_cast<size_t>(round_up(args.dim, kKeyUnit)) * sizeof(float);
    char* const memory = static_cast<char*>(thread_scratch(
        Scratch::kKernel, row_bytes + static_cast<size_t>(Window<C>::max_rows(args)) * sizeof(const C*)));
    float* const row = reinterpret_cast<float*>(memory);
    const Window<C> rows(args, window, reinterpret_cast<const C**>(memory + row_bytes));
    if (!rows.is_whole()) return false;
    int64_t column = 0;
    for (; column + kTogether * kLanes <= args.dim; column += kTogether * kLanes)
      rows.template add_columns<kTogether>(column, kLanes, row);
    for_vectors(column, args.dim, [&](int64_t i, auto count) { rows.template add_columns<1>(i, count(), row); });
    normalise(args, row);
    const int64_t angles = window.token * args.angle_stride;
    const auto turn = args.is_interleaved ? rotate_neighbours : rotate_halves;
    turn(row, args.cos + angles, args.sin + angles, args.rope_dim / 2);
    const int64_t entry = args.entry_slots[window.token] / args.ratio;
    with_type(args.entry_dtype, [&](auto* entry_type) {
      using E = Element<decltype(entry_type)>;
      copy_rounded<E>(row, args.dim, static_cast<E*>(args.entries) + entry * args.dim);
    });
    return true;
  });
}

void store(const CompressRowsArgs& args, int64_t first_token, int64_t end_token) {
  const int64_t size = (args.has_overlap ? 4 : 2) * args.dim;
  with_type(args.dtype, [&](auto* type) {
    const auto* const rows = static_cast<const Element<decltype(type)>*>(args.rows);
    with_type(args.cache_dtype, [&](auto* cache_type) {
      using C = Element<decltype(cache_type)>;
      for (int64_t token = first_token; token < end_token; ++token) {
        const int64_t slot = args.slot_mapping[token];
        if (slot >= 0) copy_rounded<C>(rows + token * args.row_stride, size, static_cast<C*>(args.cache) + slot * size);
      }
    });
  });
}

}  // namespace

extern const CompressKernels kCompress;
const CompressKernels kCompress = {store, compress};

}  // namespace PW_ISA
}  // namespace pagewick
