// Floating dtypes in CUDA kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "rows.h"

namespace cp_dispatch {

template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T values[N];
};

template <typename Acc, typename T>
__device__ __forceinline__ Acc widen(T x) {
  return static_cast<Acc>(x);
}
template <>
__device__ __forceinline__ float widen<float, __nv_bfloat16>(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
template <>
__device__ __forceinline__ float widen<float, __half>(__half x) {
  return __half2float(x);
}
template <>
__device__ __forceinline__ double widen<double, __nv_bfloat16>(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
template <>
__device__ __forceinline__ double widen<double, __half>(__half x) {
  return __half2float(x);
}
template <typename T, typename Acc>
__device__ __forceinline__ T narrow(Acc x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(x));
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(static_cast<float>(x));
  } else {
    return static_cast<T>(x);
  }
}

inline int type_number(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16: return 0;
    case ScalarType::Half: return 1;
    case ScalarType::Float: return 2;
    case ScalarType::Double: return 3;
    default: STD_TORCH_CHECK(false, "expected bfloat16, float16, float32 or float64"); return -1;
  }
}

}  // namespace cp_dispatch
