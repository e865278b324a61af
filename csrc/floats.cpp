#include "floats.h"

#include <torch/headeronly/util/Half.h>

#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CP_DISPATCH_HAS_AVX2
#include <immintrin.h>
#endif

namespace cp_dispatch {
namespace {

struct Brain {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

namespace baseline {
#include "floats.inl"
}

#ifdef CP_DISPATCH_HAS_AVX2
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
namespace avx2 {
#include "floats.inl"
}
#pragma GCC pop_options

bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return has;
}
#endif

int slot(torch::headeronly::ScalarType type) {
  using torch::headeronly::ScalarType;
  switch (type) {
    case ScalarType::BFloat16: return 0;
    case ScalarType::Half: return 1;
    case ScalarType::Float: return 2;
    case ScalarType::Double: return 3;
    default: return -1;
  }
}

}  // namespace

template <>
const FloatOps<float>* float_ops<float>(torch::headeronly::ScalarType type) {
  const int at = slot(type);
  if (at < 0) return nullptr;
#ifdef CP_DISPATCH_HAS_AVX2
  if (has_avx2()) return avx2::float_table + at;
#endif
  return baseline::float_table + at;
}

template <>
const FloatOps<double>* float_ops<double>(torch::headeronly::ScalarType type) {
  const int at = slot(type);
  if (at < 0) return nullptr;
#ifdef CP_DISPATCH_HAS_AVX2
  if (has_avx2()) return avx2::double_table + at;
#endif
  return baseline::double_table + at;
}

}  // namespace cp_dispatch
