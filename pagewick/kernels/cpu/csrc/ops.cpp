// The C ABI of libpagewick_cpu and the choice of the instruction set: the library's table of contents.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels.h"
#include "parallel.h"

#define PW_EXPORT extern "C" __attribute__((visibility("default")))

namespace pagewick {

#define PW_DECLARE(isa)                    \
  namespace isa {                          \
  extern const AttentionKernels kAttention; \
  extern const RmsNormKernel kRmsNorm;     \
  }

PW_DECLARE(generic)
#if defined(__x86_64__)
PW_DECLARE(avx2)
PW_DECLARE(avx512)
#elif defined(__aarch64__)
PW_DECLARE(neon)
#endif

namespace {

struct InstructionSet {
  const char* name;
  bool (*is_supported)();
  const RmsNormKernel* rms_norm;
  const AttentionKernels* attention;
};

bool always() { return true; }

#if defined(__x86_64__)
bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// The best comes last.
const InstructionSet kInstructionSets[] = {
    {"generic", always, &generic::kRmsNorm, &generic::kAttention},
#if defined(__x86_64__)
    {"avx2", has_avx2, &avx2::kRmsNorm, &avx2::kAttention},
    {"avx512", has_avx512, &avx512::kRmsNorm, &avx512::kAttention},
#elif defined(__aarch64__)
    {"neon", always, &neon::kRmsNorm, &neon::kAttention},
#endif
};

const InstructionSet* best_supported() {
  const InstructionSet* best = kInstructionSets;
  for (const InstructionSet& candidate : kInstructionSets)
    if (candidate.is_supported()) best = &candidate;
  return best;
}

std::atomic<const InstructionSet*>& chosen() {
  static std::atomic<const InstructionSet*> choice{best_supported()};
  return choice;
}

// Elements that are worth handing to another thread in one go.
constexpr int64_t kNormGrain = 1 << 15;

}  // namespace
}  // namespace pagewick

using namespace pagewick;

PW_EXPORT int32_t pw_abi_version() { return kAbiVersion; }

PW_EXPORT const char* pw_isa() { return chosen().load()->name; }

// 0, or -1 when this build or this processor lacks the instruction set. Not while operations run.
PW_EXPORT int32_t pw_select_isa(const char* name) {
  for (const InstructionSet& candidate : kInstructionSets) {
    if (std::strcmp(candidate.name, name) == 0 && candidate.is_supported()) {
      chosen() = &candidate;
      return 0;
    }
  }
  return -1;
}

PW_EXPORT void pw_set_num_threads(int32_t count) { set_num_threads(count); }

PW_EXPORT int32_t pw_num_threads() { return num_threads(); }

PW_EXPORT void pw_rms_norm(const RmsNormArgs* args) {
  const RmsNormKernel rms_norm = *chosen().load()->rms_norm;
  const int64_t chunk = std::max<int64_t>(1, kNormGrain / args->hidden_size);
  parallel_for((args->num_rows + chunk - 1) / chunk, [&](int64_t index) {
    rms_norm(*args, index * chunk, std::min(args->num_rows, (index + 1) * chunk));
  });
}

// Returns a Status.
PW_EXPORT int32_t pw_paged_attention(const AttentionArgs* args) {
  return paged_attention(*chosen().load()->attention, *args);
}
