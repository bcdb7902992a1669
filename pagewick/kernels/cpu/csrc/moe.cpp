// Sorts the choices of a step by expert, and divides the products among the threads.
#include "moe.h"

#include <algorithm>
#include <cstring>

#include "elementwise.h"
#include "matrix.h"
#include "parallel.h"
#include "quantized.h"

namespace pagewick {
namespace {

// As in matrix.cpp. With up to kFewRows rows nearly all time goes into reading the weights, and a thread takes
// kRunBytes bytes of them at a time. kGrain: multiplications that are worth waking another thread for. kRowUnit: rows
// that share one reading of a panel.
constexpr int64_t kRunBytes = 1 << 17;
constexpr int64_t kFewRows = 16;
constexpr int64_t kGrain = 1 << 16;
constexpr int64_t kRowUnit = 64;
// Pieces of work for each thread, so that all threads finish at about the same time.
constexpr int64_t kPieces = 4;
// Products that are added to something else at once should stay in the cache of a core until then.
constexpr int64_t kBlockBytes = 1 << 19;

// The choices sorted by expert, and by number within an expert. The i-th of them in this order has place i.
struct Groups {
  const int32_t* order;    // [num_choices], the choice at a place
  const int32_t* places;   // [num_choices], the place of a choice
  int32_t* rows;           // [num_choices], scratch memory for the row of x at a place
  const int32_t* experts;  // [num_used], the experts that were chosen
  const int64_t* starts;   // [num_experts + 1], the first place of each expert
  int64_t* first_pieces;   // [num_used + 1], scratch memory for multiply_groups
  int64_t num_choices;
  int64_t num_used;
};

// Returns false if an id is not that of an expert. The groups lie in scratch memory of this thread until its next call.
bool group_choices(const int32_t* expert_ids, int64_t num_choices, int64_t num_experts, Groups& groups) {
  const int64_t num_bytes = (3 * num_experts + 2) * 8 + (3 * num_choices + num_experts) * 4;
  int64_t* const starts = static_cast<int64_t*>(thread_scratch(Scratch::kPlan, static_cast<size_t>(num_bytes)));
  int64_t* const first_pieces = starts + num_experts + 1;
  int64_t* const next = first_pieces + num_experts + 1;
  int32_t* const order = reinterpret_cast<int32_t*>(next + num_experts);
  int32_t* const places = order + num_choices;
  int32_t* const rows = places + num_choices;
  int32_t* const experts = rows + num_choices;
  std::fill_n(starts, num_experts + 1, int64_t{0});
  for (int64_t choice = 0; choice < num_choices; ++choice) {
    if (expert_ids[choice] < 0 || expert_ids[choice] >= num_experts) return false;
    ++starts[expert_ids[choice] + 1];
  }
  int64_t num_used = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    if (starts[expert + 1] > 0) experts[num_used++] = static_cast<int32_t>(expert);
    starts[expert + 1] += starts[expert];
    next[expert] = starts[expert];
  }
  for (int64_t choice = 0; choice < num_choices; ++choice) {
    places[choice] = static_cast<int32_t>(next[expert_ids[choice]]++);
    order[places[choice]] = static_cast<int32_t>(choice);
  }
  groups = {order, places, rows, experts, starts, first_pieces, num_choices, num_used};
  return true;
}

char* at(const void* memory, int64_t elements, DType dtype) {
  return const_cast<char*>(static_cast<const char*>(memory)) + elements * element_bytes(dtype);
}

// Calls copy(i) for every i < count; one call copies `bytes` bytes.
template <class Copy>
void for_rows(int64_t count, int64_t bytes, const Copy& copy) {
  parallel_ranges(count, kGrain / bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) copy(i);
  });
}

int64_t panel_bytes(const GroupedLinearArgs& args) {
  if (!args.is_quantized) return panel_elements(args.dtype, args.in_features) * element_bytes(args.dtype);
  const BlockFormat& format = block_format(args.format);
  return args.in_features / format.columns * format.bytes * kPanelRows;
}

// The product of rows of x with the weight of one expert. Linear: LinearArgs, or QuantizedLinearArgs without a format.
template <class Linear>
Linear product(const GroupedLinearArgs& args, int64_t expert, const void* x, int64_t x_stride, int64_t first_place,
               int64_t num_rows) {
  Linear linear = {};
  linear.x = x;
  linear.weight =
      static_cast<const char*>(args.weight) + expert * ceil_div(args.out_features, kPanelRows) * panel_bytes(args);
  linear.bias = args.bias == nullptr ? nullptr : at(args.bias, expert * args.out_features, args.dtype);
  linear.out = at(args.grouped, first_place * args.out_features, args.dtype);
  linear.num_rows = num_rows;
  linear.out_features = args.out_features;
  linear.in_features = args.in_features;
  linear.x_stride = x_stride;
  linear.out_stride = args.out_features;
  linear.dtype = linear.out_dtype = args.dtype;
  return linear;
}

// Rows of x in the form that `multiply` takes. The row at a place is rows[ids[place]], or rows[place] if ids is null.
struct Prepared {
  const char* rows;
  int64_t row_bytes;
  const int32_t* ids;
};

QuantizedLinearArgs quantized_product(const GroupedLinearArgs& args, int64_t expert, int64_t first_place,
                                      int64_t num_rows) {
  auto linear = product<QuantizedLinearArgs>(args, expert, args.x, args.x_stride, first_place, num_rows);
  linear.format = args.format;
  return linear;
}

// Quantizes every row of x once, also where several experts multiply it.
Prepared quantize(const QuantizedKernels& quantized, const GroupedLinearArgs& args, const Groups& groups,
                  bool is_grouped) {
  const int64_t choices_per_row = args.is_per_choice || is_grouped ? 1 : args.top_k;
  // Not all rows of x need belong to one of these choices.
  const int64_t num_rows = is_grouped ? groups.num_choices : args.num_tokens * args.top_k / choices_per_row;
  const int64_t row_bytes = quantized.row_bytes(args.format, args.in_features);
  char* const rows =
      static_cast<char*>(thread_scratch(Scratch::kPrepared, static_cast<size_t>(num_rows * row_bytes)));
  const QuantizedLinearArgs linear = quantized_product(args, 0, 0, num_rows);
  parallel_ranges(num_rows, kGrain / row_bytes,
                  [&](int64_t begin, int64_t end) { quantized.prepare(linear, begin, end, rows); });
  if (is_grouped) return {rows, row_bytes, nullptr};
  for (int64_t place = 0; place < groups.num_choices; ++place)
    groups.rows[place] = static_cast<int32_t>(groups.order[place] / choices_per_row);
  return {rows, row_bytes, groups.rows};
}

Prepared prepare(const MatrixKernels& matrix, const GroupedLinearArgs& args, const Groups& groups, bool is_grouped) {
  const int64_t own_bytes = args.in_features * element_bytes(args.dtype);
  const int64_t form_bytes = matrix.prepared_bytes(product<LinearArgs>(args, 0, args.x, args.x_stride, 0, 1));
  if (is_grouped && form_bytes == 0)
    return {static_cast<const char*>(args.x), args.x_stride * element_bytes(args.dtype), nullptr};
  const int64_t row_bytes = form_bytes == 0 ? own_bytes : form_bytes;
  const size_t num_bytes = static_cast<size_t>(groups.num_choices * row_bytes);
  char* const prepared = static_cast<char*>(thread_scratch(Scratch::kPrepared, num_bytes));
  const int64_t choices_per_row = args.is_per_choice ? 1 : args.top_k;
  for_rows(groups.num_choices, row_bytes, [&](int64_t place) {
    const int64_t row = is_grouped ? place : groups.order[place] / choices_per_row;
    const char* const source = at(args.x, row * args.x_stride, args.dtype);
    char* const target = prepared + place * row_bytes;
    if (form_bytes == 0) std::memcpy(target, source, static_cast<size_t>(own_bytes));
    else matrix.prepare(product<LinearArgs>(args, 0, source, args.x_stride, 0, 1), 0, 1, target);
  });
  return {prepared, row_bytes, nullptr};
}

// How the product of one expert is divided into pieces of work.
struct Division {
  int64_t panels, rows, num_panel_chunks, num_row_blocks;
};

Division divide(const GroupedLinearArgs& args, int64_t num_rows, int64_t num_choices, int64_t threads) {
  const int64_t num_panels = ceil_div(args.out_features, kPanelRows);
  const int64_t panel_work = args.in_features * kPanelRows;
  const int64_t share = ceil_div(num_choices * num_panels, kPieces * threads);  // rows times panels
  const int64_t rows = std::max<int64_t>(1, std::min(num_rows, ceil_div(share, kRowUnit) * kRowUnit));
  int64_t panels = 1;
  if (num_rows <= kFewRows)
    panels = std::min(std::max<int64_t>(1, kRunBytes / panel_bytes(args)), share);
  panels = std::min(num_panels, std::max(panels, kGrain / (panel_work * rows)));
  return {panels, rows, ceil_div(num_panels, panels), ceil_div(num_rows, rows)};
}

// Writes the products of all choices into args.grouped, ordered by place. If is_grouped, x is ordered by place, too.
void multiply_groups(const Kernels& kernels, const GroupedLinearArgs& args, const Groups& groups, bool is_grouped) {
  const Prepared prepared = args.is_quantized ? quantize(*kernels.quantized, args, groups, is_grouped)
                                              : prepare(*kernels.matrix, args, groups, is_grouped);
  const auto num_rows = [&](int64_t used) {
    return groups.starts[groups.experts[used] + 1] - groups.starts[groups.experts[used]];
  };
  // Read once, since all pieces must agree on the division even if another thread changes the number meanwhile.
  const int64_t threads = num_threads();
  groups.first_pieces[0] = 0;
  for (int64_t used = 0; used < groups.num_used; ++used) {
    const Division division = divide(args, num_rows(used), groups.num_choices, threads);
    groups.first_pieces[used + 1] = groups.first_pieces[used] + division.num_panel_chunks * division.num_row_blocks;
  }
  const int64_t num_panels = ceil_div(args.out_features, kPanelRows);
  parallel_for(groups.first_pieces[groups.num_used], [&](int64_t index) {
    const int64_t* const found =
        std::upper_bound(groups.first_pieces, groups.first_pieces + groups.num_used + 1, index) - 1;
    const int64_t used = found - groups.first_pieces, expert = groups.experts[used], piece = index - *found;
    const Division division = divide(args, num_rows(used), groups.num_choices, threads);
    const int64_t start = groups.starts[expert];
    const char* const rows = prepared.rows + (prepared.ids == nullptr ? start * prepared.row_bytes : 0);
    const int64_t panel = piece / division.num_row_blocks * division.panels;
    const int64_t end_panel = std::min(num_panels, panel + division.panels);
    const int64_t row = piece % division.num_row_blocks * division.rows;
    const int64_t end_row = std::min(num_rows(used), row + division.rows);
    if (args.is_quantized)
      kernels.quantized->multiply(quantized_product(args, expert, start, num_rows(used)),
                                  {rows, prepared.ids == nullptr ? nullptr : prepared.ids + start, nullptr}, panel,
                                  end_panel, row, end_row);
    else
      kernels.matrix->multiply(product<LinearArgs>(args, expert, rows, args.x_stride, start, num_rows(used)), rows,
                               panel, end_panel, row, end_row);
  });
}

}  // namespace

Status route(const Kernels& kernels, const RouteArgs& args) {
  parallel_ranges(args.num_tokens, (kGrain >> 4) / args.num_experts,
                  [&](int64_t begin, int64_t end) { kernels.moe->route(args, begin, end); });
  return kOk;
}

Status grouped_linear(const Kernels& kernels, const GroupedLinearArgs& args) {
  Groups groups;
  if (!group_choices(args.expert_ids, args.num_tokens * args.top_k, args.num_experts, groups)) return kBadRow;
  multiply_groups(kernels, args, groups, false);
  const int64_t row_bytes = args.out_features * element_bytes(args.dtype);
  for_rows(groups.num_choices, row_bytes, [&](int64_t choice) {
    std::memcpy(at(args.out, choice * args.out_stride, args.dtype),
                static_cast<const char*>(args.grouped) + groups.places[choice] * row_bytes,
                static_cast<size_t>(row_bytes));
  });
  return kOk;
}

Status combine(const Kernels& kernels, const CombineArgs& args) {
  parallel_ranges(args.num_tokens, kGrain / (args.hidden_size * args.top_k),
                  [&](int64_t begin, int64_t end) { kernels.moe->combine(args, begin, end); });
  return kOk;
}

namespace {

// The arguments of a fused call for tokens [first, first + count).
FusedMoeArgs chunk_of(const FusedMoeArgs& args, int64_t first, int64_t count) {
  FusedMoeArgs part = args;
  RouteArgs& route = part.route;
  route.num_tokens = part.gate_up.num_tokens = part.down.num_tokens = part.combine.num_tokens = count;
  route.logits += first * route.logits_stride;
  part.gate_up.x = at(args.gate_up.x, first * args.gate_up.x_stride, args.gate_up.dtype);
  part.down.x = args.activated;
  part.down.x_stride = args.down.in_features;
  CombineArgs& combine = part.combine;
  combine.y = args.down.grouped;
  combine.weights = route.weights;
  combine.out = at(combine.out, first * combine.hidden_size, combine.dtype);
  if (combine.shared != nullptr) combine.shared = at(combine.shared, first * combine.shared_stride, combine.dtype);
  if (combine.shared_gate != nullptr) combine.shared_gate += first;
  if (combine.identity != nullptr)
    combine.identity = at(combine.identity, first * combine.identity_stride, combine.dtype);
  return part;
}

// Multiplies the inputs of each choice by its weight, in place of the results.
void weigh_inputs(const Kernels& kernels, FusedMoeArgs& part) {
  GroupedLinearArgs& args = part.gate_up;
  const int64_t size = args.in_features, num_choices = part.route.num_tokens * part.route.top_k;
  for_rows(num_choices, size * element_bytes(args.dtype), [&](int64_t choice) {
    const void* const source = at(args.x, choice / part.route.top_k * args.x_stride, args.dtype);
    void* const target = at(part.weighed, choice * size, args.dtype);
    kernels.elementwise->elementwise({source, nullptr, target, 1, size, size, 0, 1, part.route.weights[choice],
                                      args.dtype, Elementwise::kScale},
                                     0, 0, size);
    part.route.weights[choice] = 1.0f;
  });
  args.x = part.weighed;
  args.x_stride = size;
  args.is_per_choice = 1;
}

}  // namespace

Status fused_moe(const Kernels& kernels, const FusedMoeArgs& args) {
  for (int64_t first = 0; first < args.num_tokens; first += args.chunk) {
    FusedMoeArgs part = chunk_of(args, first, std::min(args.chunk, args.num_tokens - first));
    route(kernels, part.route);
    if (args.weighed != nullptr) weigh_inputs(kernels, part);
    const int64_t num_choices = part.route.num_tokens * part.route.top_k;
    Groups groups;
    if (!group_choices(part.route.expert_ids, num_choices, part.route.num_experts, groups)) return kBadRow;
    // The choices of experts that return their input have the last places.
    groups.num_choices = part.combine.num_products = groups.starts[part.gate_up.num_experts];
    while (groups.num_used > 0 && groups.experts[groups.num_used - 1] >= part.gate_up.num_experts) --groups.num_used;
    if (groups.num_used > 0) {
      multiply_groups(kernels, part.gate_up, groups, false);
      activation(kernels, {part.gate_up.grouped, args.activated, groups.num_choices, part.down.in_features,
                           part.gate_up.out_features, part.gate_up.dtype, args.activation, args.is_gated});
      multiply_groups(kernels, part.down, groups, true);
    }
    part.combine.places = groups.places;
    combine(kernels, part.combine);
  }
  return kOk;
}

namespace {

// Adds the products of the second factors to y, for rows of x in the form that `multiply` takes, ordered by place. A
// piece of work is a block of one adapter's rows and some panels: its products go through memory that stays in a core's
// cache.
void multiply_and_add(const Kernels& kernels, const AddLowRankArgs& args, const Groups& groups,
                      const Prepared& prepared) {
  const GroupedLinearArgs& up = args.up;
  const int64_t size = up.out_features, num_panels = ceil_div(size, kPanelRows);
  const int64_t row_bytes = size * element_bytes(up.dtype);
  const int64_t block = std::max<int64_t>(kFewRows, std::min(kRowUnit, kBlockBytes / row_bytes / kFewRows * kFewRows));
  const auto start_of = [&](int64_t used) { return groups.starts[groups.experts[used]]; };
  const auto num_rows = [&](int64_t used) { return groups.starts[groups.experts[used] + 1] - start_of(used); };
  groups.first_pieces[0] = 0;
  for (int64_t used = 0; used < groups.num_used; ++used)
    groups.first_pieces[used + 1] = groups.first_pieces[used] + ceil_div(num_rows(used), block);
  const int64_t num_blocks = groups.first_pieces[groups.num_used];
  const int64_t most_chunks = ceil_div(num_panels * up.in_features * kPanelRows * block, kGrain);
  const int64_t wanted = std::min(ceil_div(kPieces * num_threads(), num_blocks), most_chunks);
  const int64_t panels = ceil_div(num_panels, std::max<int64_t>(1, std::min(num_panels, wanted)));
  const int64_t num_chunks = ceil_div(num_panels, panels);
  parallel_for(num_blocks * num_chunks, [&](int64_t index) {
    const int64_t number = index / num_chunks, panel = index % num_chunks * panels;
    const int64_t* const found =
        std::upper_bound(groups.first_pieces, groups.first_pieces + groups.num_used + 1, number) - 1;
    const int64_t used = found - groups.first_pieces, first = start_of(used) + (number - *found) * block;
    const int64_t count = std::min(block, start_of(used) + num_rows(used) - first);
    const int64_t end_panel = std::min(num_panels, panel + panels);
    const int64_t first_col = panel * kPanelRows, end_col = std::min(size, end_panel * kPanelRows);
    char* const change = static_cast<char*>(thread_scratch(Scratch::kPartials, static_cast<size_t>(block * row_bytes)));
    const char* const rows = prepared.rows + first * prepared.row_bytes;
    auto linear = product<LinearArgs>(up, groups.experts[used], rows, up.x_stride, 0, count);
    linear.out = change;
    kernels.matrix->multiply(linear, rows, panel, end_panel, 0, count);
    for (int64_t row = 0; row < count; ++row) {
      const int64_t token = groups.order[first + row];
      kernels.elementwise->elementwise({at(args.y, token * args.y_stride, up.dtype), change + row * row_bytes,
                                        at(args.out, token * size, up.dtype), 1, size, size, size, 1, 1.0f, up.dtype,
                                        Elementwise::kAdd},
                                       0, first_col, end_col);
    }
  });
}

}  // namespace

Status add_low_rank(const Kernels& kernels, const AddLowRankArgs& args) {
  const int64_t num_tokens = args.down.num_tokens, none = args.down.num_experts - 1;
  Groups groups;
  if (!group_choices(args.down.expert_ids, num_tokens, args.down.num_experts, groups)) return kBadRow;
  // Tokens without an adapter have the last places.
  groups.num_choices = groups.starts[none];
  if (groups.num_used > 0 && groups.experts[groups.num_used - 1] == none) --groups.num_used;
  if (groups.num_used > 0) {
    // Rows that lie in the order of the adapters, as with one for all, need not be copied.
    const bool is_ordered = args.down.x_stride == args.down.in_features &&
                            std::is_sorted(groups.order, groups.order + groups.num_choices) &&
                            groups.order[groups.num_choices - 1] == groups.num_choices - 1;
    multiply_groups(kernels, args.down, groups, is_ordered);
    AddLowRankArgs second = args;
    second.up.x = args.down.grouped;
    second.up.x_stride = args.down.out_features;
    multiply_and_add(kernels, second, groups, prepare(*kernels.matrix, second.up, groups, true));
  }
  if (args.out == args.y) return kOk;
  const int64_t row_bytes = args.up.out_features * element_bytes(args.up.dtype);
  for_rows(num_tokens - groups.num_choices, row_bytes, [&](int64_t i) {
    const int64_t token = groups.order[groups.num_choices + i];
    std::memcpy(at(args.out, token * args.up.out_features, args.up.dtype),
                at(args.y, token * args.y_stride, args.up.dtype), static_cast<size_t>(row_bytes));
  });
  return kOk;
}

}  // namespace pagewick
