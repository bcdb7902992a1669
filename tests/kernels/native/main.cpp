// test_native [NAME ...]: runs families of tests with instruction sets of this processor, one after the other. A NAME
// is that of a family or of an instruction set; without names of one kind, all of that kind are wanted. Prints the
// instruction sets that the processor does not have.
#include <cstdio>
#include <cstring>

#include "testing.h"

namespace {

struct Family {
  const char* name;
  void (*test)();
};

constexpr Family kFamilies[] = {{"convert", test_convert},       {"norm", test_norm},
                                {"matrix", test_matrix},         {"quantized", test_quantized},
                                {"rope", test_rope},
                                {"activation", test_activation}, {"elementwise", test_elementwise},
                                {"logits", test_logits},         {"attention", test_attention},
                                {"kv_bytes", test_kv_bytes},     {"mla", test_mla},
                                {"index", test_index},
                                {"delta", test_delta},           {"scan", test_scan},
                                {"channel_scan", test_channel_scan}, {"convolution", test_convolution},
                                {"moe", test_moe},               {"streams", test_streams},
                                {"hyper", test_hyper},           {"compressed", test_compressed},
                                {"window", test_window},
                                {"recorded_steps", test_recorded_steps}};

// multiplies_bytes_only: it has kernels of its own for products with quantized weights only.
struct InstructionSet {
  const char* name;
  bool multiplies_bytes_only;
};

constexpr InstructionSet kInstructionSets[] = {
    {"generic", false},
#if defined(__x86_64__)
    {"avx2", false}, {"avx_vnni", true}, {"avx512", false}, {"avx512_vnni", true}, {"avx512_bf16", false}, {"amx", false},
#elif defined(__aarch64__)
    {"neon", false}, {"neon_dotprod", true}, {"neon_i8mm", true},
#endif
};

bool has_own_kernels(const InstructionSet& isa, const Family& family) {
  return !isa.multiplies_bytes_only || family.test == test_quantized || family.test == test_moe;
}

bool is_among(const char* name, int argc, char** argv) {
  for (int i = 1; i < argc; ++i)
    if (std::strcmp(argv[i], name) == 0) return true;
  return false;
}

// Whether `name`, which is one of `all`, is wanted: none of them is an argument, or this one is.
template <typename T, size_t N>
bool is_wanted(const char* name, const T (&all)[N], int argc, char** argv) {
  bool are_named = false;
  for (const T& each : all) are_named = are_named || is_among(each.name, argc, argv);
  return !are_named || is_among(name, argc, argv);
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  testing::require(pw_abi_version() == pagewick::kAbiVersion, "the library is of another version");
  testing::require(pw_select_isa("sse9") == -1, "an instruction set of no processor");
  for (const InstructionSet& set : kInstructionSets) {
    const char* const isa = set.name;
    if (!is_wanted(isa, kInstructionSets, argc, argv)) continue;
    if (pw_select_isa(isa) != 0) {
      std::printf("%s: not run, this processor does not have it\n", isa);
      continue;
    }
    testing::require(std::strcmp(pw_isa(), isa) == 0, "another instruction set was selected");
    for (const Family& family : kFamilies)
      if (is_wanted(family.name, kFamilies, argc, argv) && has_own_kernels(set, family)) {
        const int64_t before = testing::num_cases();
        family.test();
        std::printf("%s: %s passed, %d cases\n", isa, family.name, static_cast<int>(testing::num_cases() - before));
      }
  }
  std::printf("all tests passed\n");
}
