// Which instruction sets the processor that runs this has. With PW_STAND_INS, which only tests define, other instructions
// stand in for those that the processor lacks (tests/kernels/native/stand_ins.h).
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace pagewick {

inline bool always() { return true; }

#if defined(__x86_64__)
inline bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

inline bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

inline bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

inline bool is_intel_with_avx512_bf16() { return has_avx512_bf16() && __builtin_cpu_is("intel"); }

// Whether this is a Zen 4, if it has AVX-512: no other processor of AMD's family 25 does. The family is the sum of two
// fields (AMD64 Architecture Programmer's Manual, volume 3, CPUID function 1).
inline bool is_zen4_if_avx512() {
  __builtin_cpu_init();
  unsigned signature = 0, b = 0, c = 0, d = 0;
  __get_cpuid(1, &signature, &b, &c, &d);
  return __builtin_cpu_is("amd") && (signature >> 8 & 0xf) + (signature >> 20 & 0xff) == 25;
}

// The registers that CPUID writes for leaf 7: what each bit means is in the Intel 64 and IA-32 Architectures Software
// Developer's Manual, volume 2, CPUID. All are 0 for a subleaf that the processor does not have.
struct Leaf7 {
  unsigned a = 0, b = 0, c = 0, d = 0;

  explicit Leaf7(unsigned subleaf) { __get_cpuid_count(7, subleaf, &a, &b, &c, &d); }
};

inline bool has_avx_vnni() {
#if defined(PW_STAND_INS)
  return has_avx512_vnni();
#else
  return has_avx2() && (Leaf7(1).a & 1u << 4) != 0;
#endif
}

// Whether the processor has tile registers and the operating system lets this process use them. On Linux a process must
// ask for them once, because they make a thread's state larger (Documentation/arch/x86/xstate.rst).
inline bool has_amx() {
#if defined(PW_STAND_INS)
  return has_avx512_bf16();
#elif defined(__linux__)
  constexpr unsigned kTileBit = 1u << 24, kBf16Bit = 1u << 22, kInt8Bit = 1u << 25;
  constexpr unsigned kWanted = kTileBit | kBf16Bit | kInt8Bit;
  if (!has_avx512_bf16() || (Leaf7(0).d & kWanted) != kWanted) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#elif defined(__aarch64__)
#if defined(__APPLE__)
inline bool has_feature(const char* name) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

inline bool has_dotprod() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
inline bool has_i8mm() { return has_dotprod() && has_feature("hw.optional.arm.FEAT_I8MM"); }
#elif defined(__linux__)
// Bits of the auxiliary vector (Documentation/arch/arm64/elf_hwcaps.rst).
inline bool has_dotprod() { return (getauxval(AT_HWCAP) & 1u << 20) != 0; }
inline bool has_i8mm() { return has_dotprod() && (getauxval(AT_HWCAP2) & 1u << 13) != 0; }
#else
inline bool has_dotprod() { return false; }
inline bool has_i8mm() { return false; }
#endif
#endif

}  // namespace pagewick
