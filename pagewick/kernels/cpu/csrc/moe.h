// A mixture of experts: the choice of experts for each token, products with the weights of several experts, and the sum
// of their results. The ids of experts are data: which calls run, and where they write, depends on the number of tokens
// alone.
//
// A choice is one of a token's top_k experts; the choices of a step are numbered token * top_k + i.
#pragma once

#include "activation.h"
#include "kernels.h"
#include "quantized_formats.h"

namespace pagewick {

enum class Scoring : int32_t { kSoftmax = 0, kSigmoid = 1, kNear = 2 };
enum class GroupScore : int32_t { kMax = 0, kSumOfTwo = 1 };

// Computes the scores of a row of logits, and chooses the top_k experts with the best score plus bias within the best
// groups. With kNear, which knows no bias and no groups, the weight of a choice is its softmax among the experts that
// are not chosen before it and whose logits are near its own.
struct RouteArgs {
  const float* logits;  // [num_tokens, num_experts], rows logits_stride elements apart
  const float* bias;    // [num_experts], for the choice only, or null
  const float* scales;  // [num_experts], factors of the weights, or null
  int32_t* expert_ids;  // [num_tokens, top_k], the best first
  float* weights;       // [num_tokens, top_k]
  int64_t num_tokens;
  int64_t num_experts;
  int64_t top_k;  // at most what top_k_groups groups have
  int64_t logits_stride;
  int64_t num_groups;  // divides num_experts
  int64_t top_k_groups;
  float scaling;
  float epsilon;  // added to the sum of the weights that are renormalized
  float margin;   // of kNear: the greatest distance of near logits, relative to the greater of both absolute values
  Scoring scoring;
  GroupScore group_score;
  int32_t renormalize;
};

// Multiplies the row of x of each choice by the weight of its expert and adds the expert's bias, as LinearArgs says, or
// as QuantizedLinearArgs says if the weights are quantized.
struct GroupedLinearArgs {
  const void* x;              // [num_tokens, K], or a row for each choice; rows x_stride elements apart
  const void* weight;         // [num_experts] packed weights [N, K], one after the other
  const void* bias;           // [num_experts, N], or null
  const int32_t* expert_ids;  // [num_tokens, top_k]
  void* grouped;              // [num_tokens * top_k, N], for results by expert
  void* out;                  // [num_tokens * top_k, N], rows out_stride elements apart
  int64_t num_tokens;
  int64_t top_k;
  int64_t num_experts;
  int64_t out_features;
  int64_t in_features;
  int64_t x_stride;
  int64_t out_stride;  // elements from a row of out to the next
  DType dtype;  // of x, bias, grouped and out, and of weights that are not quantized
  QuantizedFormat format;
  int32_t is_quantized;
  int32_t is_per_choice;
};

// out[t] = y[t] + B (A x[t]), with the factors of adapter ids[t], which are experts with one choice for each token and no
// bias; each product and the sum are rounded. The last adapter stands for none: y[t] is copied.
struct AddLowRankArgs {
  GroupedLinearArgs down;  // A; expert_ids are those of the adapters, and out is null
  GroupedLinearArgs up;    // B; x and out are null
  const void* y;           // [num_tokens, N], rows y_stride elements apart
  void* out;               // [num_tokens, N], contiguous; may be y if that is, too
  int64_t y_stride;
};

// out[t] = sum over i of weights[t][i] * y[t * top_k + i], plus sigmoid(shared_gate[t]) * shared[t]: in fp32 and in
// this order, rounded once. Choices whose place is num_products or greater have no row of y: they are those of experts
// that return identity[t].
struct CombineArgs {
  const void* y;             // [num_tokens * top_k, hidden_size]
  const int32_t* places;     // [num_tokens * top_k], rows of y by choice; null: the choices in order
  const float* weights;      // [num_tokens, top_k]
  const void* shared;        // [num_tokens, hidden_size], rows shared_stride elements apart, or null
  const float* shared_gate;  // [num_tokens], or null: 1 in place of the sigmoid
  const void* identity;      // [num_tokens, hidden_size], rows identity_stride elements apart, or null: zeros
  void* out;                 // [num_tokens, hidden_size]
  int64_t num_tokens;
  int64_t top_k;
  int64_t hidden_size;
  int64_t shared_stride;
  int64_t identity_stride;
  int64_t num_products;
  DType dtype;  // of y, shared, identity and out
};

// Runs all experts of a layer, `chunk` tokens at a time: route, gate_up, activation, down, combine. In the arguments of
// these parts, x, logits, shared, shared_gate, identity and out cover all tokens, while expert_ids, weights and the `grouped`
// results have room for the tokens of a chunk. The fields through which one part hands its results to the next, and the
// numbers of tokens, are filled in when the operation runs. route may know more experts than gate_up and down: those
// with the greatest ids return combine.identity.
struct FusedMoeArgs {
  RouteArgs route;
  GroupedLinearArgs gate_up;
  GroupedLinearArgs down;
  CombineArgs combine;
  void* activated;  // [chunk * top_k, in_features of down]
  void* weighed;    // [chunk * top_k, in_features of gate_up], for inputs times their weights; null: results are weighed
  int64_t num_tokens;
  int64_t chunk;
  Activation activation;
  int32_t is_gated;
};

// Logits whose softmax gives the weights of experts with scores sqrt(softplus(logit)): minus infinity for all but the
// chosen ones. ../../reference_moe.py has the definition.
struct RootLogitsArgs {
  const float* logits;  // [num_tokens, num_experts], rows logits_stride elements apart
  const float* bias;    // [num_experts], of scores, by which experts are chosen; unused with ids
  const int64_t* ids;   // [num_tokens, top_k], the chosen experts, one of which may repeat; null: the scores choose
  float* out;           // [num_tokens, num_experts]
  int64_t num_tokens;
  int64_t num_experts;
  int64_t top_k;
  int64_t logits_stride;
};

struct MoeKernels {
  // Both handle tokens [first, end) of args.
  void (*route)(const RouteArgs& args, int64_t first, int64_t end);
  void (*combine)(const CombineArgs& args, int64_t first, int64_t end);
};

Status route(const Kernels& kernels, const RouteArgs& args);
// Returns kBadRow if there is no expert with one of the ids.
Status root_logits(const Kernels& kernels, const RootLogitsArgs& args);
Status grouped_linear(const Kernels& kernels, const GroupedLinearArgs& args);
Status combine(const Kernels& kernels, const CombineArgs& args);
Status fused_moe(const Kernels& kernels, const FusedMoeArgs& args);
Status add_low_rank(const Kernels& kernels, const AddLowRankArgs& args);

}  // namespace pagewick
