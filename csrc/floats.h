// Sums in float or double over memory of any floating dtype, on CPU.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

namespace cp_dispatch {

// For one dtype of memory and one type of accumulator. Products are rounded before they are added
// (no FMA), so that the order of two summands does not matter.
template <typename Acc>
struct FloatOps {
  void (*scale)(Acc* sum, const void* x, Acc weight, int64_t n);  // sum = weight * x
  void (*add)(Acc* sum, const void* x, Acc weight, int64_t n);    // sum += weight * x
  void (*store)(void* out, const Acc* sum, int64_t n);
};

// nullptr for a dtype that is not bfloat16, float16, float32 or float64.
template <typename Acc>
const FloatOps<Acc>* float_ops(torch::headeronly::ScalarType type);

}  // namespace cp_dispatch
