// Copies to other GPUs and flags between streams of several GPUs, by copy engines and the streams
// themselves: no kernel, so that attention keeps every SM. See cp_dispatch/schedules/mailbox.py.
#include <cuda.h>

#include "cuda_launch.h"
#include "rows.h"

namespace cp_dispatch {
namespace {

using BatchMemOp = CUresult (*)(CUstream, unsigned int, CUstreamBatchMemOpParams*, unsigned int);

// The driver's function, without linking to the driver: the module also loads where there is none.
BatchMemOp batch_mem_op() {
  static const BatchMemOp function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &found, 12000,
                                                               cudaEnableDefault, &result);
    STD_TORCH_CHECK(error == cudaSuccess && result == cudaDriverEntryPointSuccess && found,
                    "the CUDA driver has no cuStreamBatchMemOp of CUDA 12");
    return reinterpret_cast<BatchMemOp>(found);
  }();
  return function;
}

CUstreamBatchMemOpParams mem_op(CUstreamBatchMemOpType operation, Tensor& flag, uint32_t value) {
  STD_TORCH_CHECK(flag.is_cuda() && flag.numel() == 1 && flag.scalar_type() == ScalarType::Int,
                  "a flag must be one int32 on a GPU");
  CUstreamBatchMemOpParams params{};
  const auto address = reinterpret_cast<CUdeviceptr>(flag.mutable_data_ptr());
  if (operation == CU_STREAM_MEM_OP_WAIT_VALUE_32) {
    params.waitValue = {operation, address, {value}, CU_STREAM_WAIT_VALUE_EQ, 0};
  } else {
    params.writeValue = {operation, address, {value}, CU_STREAM_WRITE_VALUE_DEFAULT, 0};
  }
  return params;
}

void enqueue(std::vector<CUstreamBatchMemOpParams>& params, int32_t device) {
  constexpr size_t kMost = 128;  // the driver takes 256 at a time
  const Launch launch(device);
  for (size_t i = 0; i < params.size(); i += kMost) {
    const auto count = static_cast<unsigned int>(std::min(kMost, params.size() - i));
    const CUresult result = batch_mem_op()(launch.stream(), count, params.data() + i, 0);
    STD_TORCH_CHECK(result == CUDA_SUCCESS, "cuStreamBatchMemOp failed with ", int(result));
  }
}

// Once all earlier work of the stream is done and seen by the other GPUs, put 1 in each flag.
void raise_flags(std::vector<Tensor> flags) {
  if (flags.empty()) return;
  std::vector<CUstreamBatchMemOpParams> params;
  for (Tensor& flag : flags) params.push_back(mem_op(CU_STREAM_MEM_OP_WRITE_VALUE_32, flag, 1));
  enqueue(params, flags[0].get_device_index());
}

// Let the stream wait until each flag is 1, and put 0 there.
void take_flags(std::vector<Tensor> flags) {
  if (flags.empty()) return;
  std::vector<CUstreamBatchMemOpParams> params;
  for (Tensor& flag : flags) {
    params.push_back(mem_op(CU_STREAM_MEM_OP_WAIT_VALUE_32, flag, 1));
    params.push_back(mem_op(CU_STREAM_MEM_OP_WRITE_VALUE_32, flag, 0));
  }
  enqueue(params, flags[0].get_device_index());
}

// Copy each source (B, ...) to its target, a batch row at a time in one piece.
void copy_slabs(std::vector<Tensor> targets, std::vector<Tensor> sources) {
  STD_TORCH_CHECK(targets.size() == sources.size(), "as many targets as sources");
  if (targets.empty()) return;
  const Launch launch(targets[0].get_device_index());
  for (size_t i = 0; i < targets.size(); ++i) {
    Tensor& target = targets[i];
    const Tensor& source = sources[i];
    STD_TORCH_CHECK(target.is_cuda() && source.is_cuda() && target.dim() == source.dim() &&
                        target.dim() > 0 && target.scalar_type() == source.scalar_type(),
                    "a slab and its copy must be alike and on GPUs");
    int64_t slab = static_cast<int64_t>(target.element_size());
    for (int64_t d = target.dim() - 1; d >= 0; --d) {
      STD_TORCH_CHECK(target.size(d) == source.size(d), "sizes differ in dim ", d);
      if (d == 0) break;
      const int64_t item = static_cast<int64_t>(target.element_size());
      STD_TORCH_CHECK(target.size(d) == 1 || (target.stride(d) * item == slab &&
                                              source.stride(d) * item == slab),
                      "a batch row must be contiguous");
      slab *= target.size(d);
    }
    const int64_t rows = target.size(0), item = static_cast<int64_t>(target.element_size());
    if (rows * slab == 0) continue;
    const int64_t into = rows == 1 ? slab : target.stride(0) * item;
    const int64_t from = rows == 1 ? slab : source.stride(0) * item;
    const bool whole = into == slab && from == slab;
    const cudaError_t error =
        whole ? cudaMemcpyAsync(target.mutable_data_ptr(), source.const_data_ptr(), rows * slab,
                                cudaMemcpyDeviceToDevice, launch.stream())
              : cudaMemcpy2DAsync(target.mutable_data_ptr(), into, source.const_data_ptr(), from,
                                  slab, rows, cudaMemcpyDeviceToDevice, launch.stream());
    STD_TORCH_CHECK(error == cudaSuccess, "copy to a peer: ", cudaGetErrorString(error));
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cp_dispatch, CUDA, m) {
  m.impl("raise_flags", TORCH_BOX(&raise_flags));
  m.impl("take_flags", TORCH_BOX(&take_flags));
  m.impl("copy_slabs", TORCH_BOX(&copy_slabs));
}

}  // namespace cp_dispatch
