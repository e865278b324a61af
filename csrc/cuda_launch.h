// Where and how a kernel is launched.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstdint>

namespace cp_dispatch {

// The device of a tensor, current while this lives, and torch's current stream on it.
class Launch {
 public:
  explicit Launch(int32_t device) : guard_(device) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

// Quotient and remainder of numbers below 2**31 by a divisor of the launch, without a division.
struct Divider {
  uint32_t divisor = 1, magic = 0, shift = 0;

  Divider() = default;
  explicit Divider(uint32_t value) : divisor(value) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    magic = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) /
                                      divisor + 1);
  }
  __device__ __forceinline__ uint32_t divide(uint32_t n) const {
    return (__umulhi(n, magic) + n) >> shift;
  }
};

}  // namespace cp_dispatch
