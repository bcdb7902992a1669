// Operations on whole rows of logits. A row is always divided into the same pieces, and the results of the pieces are
// combined in order.
#pragma once

#include "kernels.h"

namespace pagewick {

// token_ids = index of the greatest logit of each row: the first NaN, else the first of equal ones; values = the logit.
struct ArgmaxArgs {
  const float* logits;  // [num_rows, vocab_size], rows `stride` elements apart
  int64_t* token_ids;   // [num_rows]
  float* values;        // [num_rows]; may be null
  int64_t num_rows;
  int64_t vocab_size;  // at least 1
  int64_t stride;
};

// log_sum = log(sum(exp(logits - max))).
struct LogSoftmaxArgs {
  const float* logits;  // [num_rows, vocab_size], rows `stride` elements apart
  float* max;           // [num_rows]
  float* log_sum;       // [num_rows]
  int64_t num_rows;
  int64_t vocab_size;  // at least 1
  int64_t stride;
};

// Draws a token id of each row: the inverse CDF of `uniform` over the tokens by falling logit, equal ones by id. It
// keeps those with min_p times the weight of the first, of these top_k (0: all), and of these the shortest prefix with
// top_p of the mass. Temperature 0: the greatest.
struct SampleArgs {
  const float* logits;       // [num_rows, vocab_size], rows `stride` elements apart; the greatest of a row is finite
  const float* temperature;  // [num_rows], 0 or above
  const double* min_p;       // [num_rows], in [0, 1]
  const int64_t* top_k;      // [num_rows]
  const double* top_p;       // [num_rows]
  const double* uniform;     // [num_rows], in [0, 1)
  const uint8_t* masks;      // [num_rows, mask_bytes], as in MaskArgs; null: all tokens are allowed
  int64_t* token_ids;        // [num_rows]
  int64_t num_rows;
  int64_t vocab_size;  // at least 1
  int64_t stride;
  int64_t mask_bytes;
};

// masked = logits, and -inf where the bit of a token is not set.
struct MaskArgs {
  const float* logits;   // [num_rows, vocab_size], rows `stride` elements apart
  const uint8_t* masks;  // [num_rows, mask_bytes]: one bit per token, least significant first
  float* masked;         // [num_rows, vocab_size]
  int64_t num_rows;
  int64_t vocab_size;  // at least 1
  int64_t stride;
  int64_t mask_bytes;
};

// token_ids, values: as ArgmaxArgs has them, with -inf in place of the logits whose bit is not set; highest = the
// greatest of all logits of a row.
struct AllowedArgs {
  const float* logits;   // [num_rows, vocab_size], rows `stride` elements apart
  const uint8_t* masks;  // [num_rows, mask_bytes], as in MaskArgs
  int64_t* token_ids;    // [num_rows]
  float* values;         // [num_rows]
  float* highest;        // [num_rows]
  int64_t num_rows;
  int64_t vocab_size;  // at least 1
  int64_t stride;
  int64_t mask_bytes;
};

enum class Truncation : int32_t {
  kMinP = 0,
  kSigmas = 1,
  kTypicalP = 2,
  kTopP = 3,
  kXtc = 4,
  kSurprise = 5,
};

// masked = logits, and -inf where a filter drops a token. Its definition is in reference_truncation.py.
struct TruncateArgs {
  const float* logits;        // [num_rows, vocab_size], rows `stride` elements apart; the greatest of a row is finite
  const double* temperature;  // [num_rows], above 0; without meaning for kSigmas
  const double* limits;       // [num_rows]: min_p, the number of sigmas, typical_p, top_p, the threshold or mu
  const int64_t* top_k;       // [num_rows], 0: all; only for kTopP, else null
  float* masked;              // [num_rows, vocab_size]
  int64_t num_rows;
  int64_t vocab_size;  // at least 1
  int64_t stride;
  Truncation filter;
};

// bits = -log2 of the probability of a token.
struct SurpriseArgs {
  const float* logits;        // [num_rows, vocab_size], rows `stride` elements apart; the greatest of a row is finite
  const double* temperature;  // [num_rows], above 0
  const int64_t* token_ids;   // [num_rows]
  double* bits;               // [num_rows]
  int64_t num_rows;
  int64_t vocab_size;  // at least 1
  int64_t stride;
};

// ranks = 1 + the number of logits that are greater than a token's; top = the greatest logits, equal ones by id. Rows
// with a NaN have results without meaning.
struct RankArgs {
  const float* logits;       // [num_rows, vocab_size], rows `stride` elements apart
  const int64_t* token_ids;  // [num_rows]
  int64_t* ranks;            // [num_rows]
  int64_t* top_ids;          // [num_rows, num_top]
  float* top_logits;         // [num_rows, num_top]
  int64_t num_rows;
  int64_t vocab_size;  // at least 1
  int64_t stride;
  int64_t num_top;  // 0 to vocab_size
};

struct Greatest {
  float value;
  int64_t index;
};

struct Allowed {
  Greatest greatest;  // of the elements whose bit is set
  float highest;      // of all elements; NaN if one is
};

struct ExpSum {
  float max;  // NaN if there is a NaN
  float sum;  // of exp(x - max)
};

struct WeightSums {
  double mass;       // the sum of exp(-distance)
  double distances;  // the sum of distance * exp(-distance)
};

struct Moments {
  int64_t count;
  double sum;      // of x - max
  double squares;  // of x - max - mean
};

// The greatest of this many elements is found at a time, to look for large elements only where there are some.
constexpr int64_t kGroup = 128;

// Buckets of tokens of similar weight. Bucket 0 has the greatest weights.
constexpr int64_t kNumBuckets = 2048;

struct LogitsKernels {
  Greatest (*find_greatest)(const float* x, int64_t size);
  int64_t (*count_above)(const float* x, int64_t size, float limit);
  // greatest[i] = the greatest of the elements from i * kGroup on; there are no NaNs.
  void (*find_group_greatest)(const float* x, int64_t size, float* greatest);
  ExpSum (*sum_exp)(const float* x, int64_t size);
  // weights = exp(-distance), where distance = (max - x) / temperature; buckets = the bucket of each weight that is not
  // 0, by the difference of its distance from `center`.
  void (*weigh)(const float* x, int64_t size, float max, float temperature, float center, float* weights,
                int32_t* buckets);
  // Sums over the elements below `end`.
  WeightSums (*sum_weights)(const float* x, int64_t size, float max, float temperature, float end);
  // Counts and sums the elements that are not -inf.
  Moments (*sum_moments)(const float* x, int64_t size, float max, double mean);
  // out = x, and -inf where the element's bit is not set.
  void (*mask)(const float* x, const uint8_t* bits, int64_t size, float* out);
  Allowed (*find_allowed)(const float* x, const uint8_t* bits, int64_t size);
};

Status argmax_rows(const Kernels& kernels, const ArgmaxArgs& args);

Status log_softmax_stats(const Kernels& kernels, const LogSoftmaxArgs& args);

Status mask_rows(const Kernels& kernels, const MaskArgs& args);

Status argmax_allowed(const Kernels& kernels, const AllowedArgs& args);

// sampling.cpp
Status sample_tokens(const Kernels& kernels, const SampleArgs& args);

// ranking.cpp
Status rank_tokens(const Kernels& kernels, const RankArgs& args);

// truncation.cpp
Status truncate_rows(const Kernels& kernels, const TruncateArgs& args);
Status surprise(const Kernels& kernels, const SurpriseArgs& args);

}  // namespace pagewick
