// The query rows of a unit: which keys they see, and where their queries and results lie. Part of attention_kernel.cpp.
#pragma once

#include "attention.h"
#include "attention_softmax.h"
#include "hadamard.h"
#include "panel.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

// Which keys the rows of one KV head of a unit see, as absolute positions [begin, end).
struct RowRange {
  int64_t first_position, group, window, first_row, num_rows;
  bool is_chunked;
  const int32_t* ends;  // of the sequence's tokens; null: each sees the keys up to its own

  RowRange(const AttentionArgs& args, const AttentionUnit& unit)
      : first_position(args.context_lens[unit.seq] - (args.cu_seqlens_q[unit.seq + 1] - args.cu_seqlens_q[unit.seq])),
        group(args.num_heads / args.num_kv_heads),
        window(args.sliding_window),
        first_row(unit.first_row),
        num_rows(unit.num_rows),
        is_chunked(args.is_chunked != 0),
        ends(args.key_ends == nullptr ? nullptr : args.key_ends + args.cu_seqlens_q[unit.seq]) {}

  int64_t token(int64_t row) const { return (first_row + row) / group; }
  int64_t begin(int64_t row) const { return first_seen_key(first_position + token(row), window, is_chunked); }
  int64_t end(int64_t row) const { return ends == nullptr ? first_position + token(row) + 1 : ends[token(row)]; }
  // Returns the end of the rows that belong to the same token as `row`.
  int64_t token_end(int64_t row) const { return minimum(num_rows, (token(row) + 1) * group - first_row); }
  KeySpan span(int64_t row, int64_t start) const { return {begin(row) - start, end(row) - start}; }
  bool sees_segment(int64_t row, int64_t segment) const {
    return begin(row) < (segment + 1) * kSegmentKeys && end(row) > segment * kSegmentKeys;
  }
};

// Goes through the rows of a unit, head by head, and gives their places in [T, H, D] tensors.
class RowCursor {
 public:
  RowCursor(const AttentionArgs& args, const AttentionUnit& unit)
      : head_dim_(args.head_dim), group_(args.num_heads / args.num_kv_heads), num_rows_(unit.num_rows),
        first_token_(args.cu_seqlens_q[unit.seq] + unit.first_row / group_), first_member_(unit.first_row % group_),
        first_head_(unit.kv_head * group_), token_(first_token_), member_(first_member_) {}

  void next() {
    if (++row_ == num_rows_) {
      row_ = 0, first_head_ += group_, token_ = first_token_, member_ = first_member_;
    } else if (++member_ == group_) {
      member_ = 0, ++token_;
    }
  }

  int64_t head() const { return first_head_ + member_; }
  // Returns the index of the row's first element, where tokens lie `stride` elements apart.
  int64_t offset(int64_t stride) const { return token_ * stride + head() * head_dim_; }

 private:
  const int64_t head_dim_, group_, num_rows_, first_token_, first_member_;
  int64_t first_head_, token_, member_, row_ = 0;
};

template <class Rounded, class Source, class L>
void copy_query(const Source* source, int64_t head_dim, int64_t dim, L* target) {
  const Rounded* type = nullptr;
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store(target + d, round_to(type, load(source + d)));
  if (d < head_dim) store_part(target + d, round_to(type, load_part(source + d, head_dim - d)), head_dim - d);
  for (d = head_dim; d < dim; ++d) target[d] = L{};
}

// Rows lie too far apart for the processor's own prefetchers, which would fetch one after the other.
template <int kForWriting>
void prefetch_rows(const AttentionArgs& args, const AttentionUnit& unit, const void* tensor, int64_t stride) {
  const int64_t element = with_type(args.q_dtype, [](auto* type) { return int64_t{sizeof(*type)}; });
  const int64_t row_bytes = args.head_dim * element;
  RowCursor cursor(args, unit);
  for (int64_t r = 0; r < unit.total_rows(); ++r, cursor.next()) {
    const char* const row = static_cast<const char*>(tensor) + cursor.offset(stride) * element;
    for (int64_t byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(row + byte, kForWriting, 2);
  }
}

// Queries are rounded to bf16 where they are multiplied with bf16: over a bf16 cache on every instruction set. They are
// rotated as the keys of a cache of elements C are.
template <class T, class C>
void load_queries(const AttentionArgs& args, const AttentionUnit& unit, int64_t dim, Left<T>* q) {
  prefetch_rows<0>(args, unit, args.q, args.q_stride);
  with_type(args.q_dtype, [&](const auto* type) {
    const auto source = static_cast<decltype(type)>(args.q);
    RowCursor cursor(args, unit);
    for (int64_t r = 0; r < unit.total_rows(); ++r, cursor.next()) {
      const auto* const row = source + cursor.offset(args.q_stride);
      if constexpr (kIsSame<C, Int4>) {
        alignas(64) float rotated[kMaxHeadDim];
        copy_query<float>(row, args.head_dim, args.head_dim, rotated);
        rotate_by_hadamard(rotated, args.head_dim);
        copy_query<float>(rotated, args.head_dim, dim, q + r * dim);
      } else if constexpr (kIsSame<T, BFloat16>) copy_query<BFloat16>(row, args.head_dim, dim, q + r * dim);
      else copy_query<float>(row, args.head_dim, dim, q + r * dim);
    }
  });
}

void store_outputs(const AttentionArgs& args, const AttentionUnit& unit, const State& state) {
  with_type(args.q_dtype, [&](auto* type) {
    const auto target = static_cast<decltype(type)>(args.out);
    RowCursor cursor(args, unit);
    for (int64_t r = 0; r < unit.total_rows(); ++r, cursor.next()) {
      const float* const sink = args.sinks == nullptr ? nullptr : args.sinks + cursor.head();
      const float factor = normalizer(state, r, sink);
      float* const values = state.row(r);
      if (args.kv_dtype == DType::kInt4) rotate_by_hadamard(values, args.head_dim);
      auto* const out = target + cursor.offset(args.num_heads * args.head_dim);
      int64_t d = 0;
      for (; d + kLanes <= args.head_dim; d += kLanes) store_result(out + d, load(values + d) * factor);
      if (d < args.head_dim) store_part(out + d, load(values + d) * factor, args.head_dim - d);
    }
  });
}

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
