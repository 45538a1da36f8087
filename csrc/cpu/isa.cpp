#include "isa.h"

#include <atomic>
#include <cstring>

#if defined(PS_HAVE_AMX) || defined(PS_HAVE_AVX2_VNNI)
#include <cpuid.h>
#endif
#ifdef PS_HAVE_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(PS_HAVE_NEON) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(PS_HAVE_NEON) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "pagedserve.h"
#include "status.h"

namespace ps {
namespace {

struct IsaEntry {
  Isa isa;
  const char* name;
  bool (*runs_here)();
  DotIsa dot = DotIsa::kOfBase;
};

[[maybe_unused]] bool always() { return true; }

#ifdef PS_HAVE_AVX2
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif
#ifdef PS_HAVE_AVX2_VNNI
bool has_avx2_vnni() {
  constexpr unsigned kAvxVnni = 1u << 4;
  unsigned eax, ebx, ecx, edx;
  return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & kAvxVnni) != 0;
}
#endif
#ifdef PS_HAVE_AVX512
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
#endif
#ifdef PS_HAVE_AMX
// The tiles' registers are 8 KiB of state that Linux keeps for a process only when it asks.
bool has_amx() {
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned eax, ebx, ecx, edx;
  if (!has_avx512() || !__builtin_cpu_supports("avx512vbmi2")) return false;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & kTile) == 0 || (edx & kInt8) == 0) return false;
  static const bool is_permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_permitted;
}
#endif

#if defined(PS_HAVE_NEON_DOTPROD) || defined(PS_HAVE_NEON_I8MM)
#if defined(__APPLE__)
[[maybe_unused]] bool has_feature(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
[[maybe_unused]] bool has_dotprod() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
[[maybe_unused]] bool has_i8mm() { return has_dotprod() && has_feature("hw.optional.arm.FEAT_I8MM"); }
#else
[[maybe_unused]] bool has_dotprod() {
  constexpr unsigned long kDotprod = 1ul << 20;  // HWCAP_ASIMDDP
  return (getauxval(AT_HWCAP) & kDotprod) != 0;
}
[[maybe_unused]] bool has_i8mm() {
  constexpr unsigned long kI8mm = 1ul << 13;  // HWCAP2_I8MM
  return has_dotprod() && (getauxval(AT_HWCAP2) & kI8mm) != 0;
}
#endif
#endif

const IsaEntry kIsas[] = {  // best first
    PS_IF_AMX({Isa::kAvx512, "amx", has_amx, DotIsa::kAmx}, )
    PS_IF_AVX512({Isa::kAvx512, "avx512", has_avx512}, )
    PS_IF_AVX2_VNNI({Isa::kAvx2, "avx2_vnni", has_avx2_vnni, DotIsa::kAvx2Vnni}, )
    PS_IF_AVX2({Isa::kAvx2, "avx2", has_avx2}, )
    PS_IF_NEON_I8MM({Isa::kNeon, "neon_i8mm", has_i8mm, DotIsa::kNeonI8mm}, )
    PS_IF_NEON_DOTPROD({Isa::kNeon, "neon_dotprod", has_dotprod, DotIsa::kNeonDotprod}, )
    PS_IF_NEON({Isa::kNeon, "neon", always}, )
    {Isa::kScalar, "scalar", always},
};

const IsaEntry& best_isa() {
  for (const IsaEntry& entry : kIsas) {
    if (entry.runs_here()) return entry;
  }
  return kIsas[sizeof kIsas / sizeof kIsas[0] - 1];
}

std::atomic<const IsaEntry*> g_isa{&best_isa()};

}  // namespace

Isa current_isa() { return g_isa.load(std::memory_order_relaxed)->isa; }

DotIsa current_dot_isa() { return g_isa.load(std::memory_order_relaxed)->dot; }

}  // namespace ps

extern "C" {

const char* ps_isa(void) { return ps::g_isa.load()->name; }

const char* ps_available_isas(void) {
  static const struct List {
    char text[64] = "";
    List() {
      for (const ps::IsaEntry& entry : ps::kIsas) {
        if (!entry.runs_here()) continue;
        if (text[0] != '\0') std::strcat(text, ",");
        std::strcat(text, entry.name);
      }
    }
  } list;
  return list.text;
}

int ps_select_isa(const char* name) {
  if (name == nullptr) {
    ps::g_isa.store(&ps::best_isa());
    return PS_OK;
  }
  for (const ps::IsaEntry& entry : ps::kIsas) {
    if (std::strcmp(entry.name, name) != 0) continue;
    if (!entry.runs_here()) return ps::fail(PS_UNSUPPORTED, "this CPU cannot run %s", name);
    ps::g_isa.store(&entry);
    return PS_OK;
  }
  return ps::fail(PS_UNSUPPORTED, "this library has no %s kernels (it has: %s)", name, ps_available_isas());
}

}  // extern "C"
