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

// Raises flags (puts 1 there) or takes them (waits for 1, puts 0 there), in the stream's order.
void batch(cudaStream_t stream, const std::vector<int64_t>& flags, bool take) {
  constexpr size_t kMost = 64;  // the driver takes 256 operations at a time
  CUstreamBatchMemOpParams params[2 * kMost];
  for (size_t i = 0; i < flags.size(); i += kMost) {
    unsigned int count = 0;
    for (size_t j = i; j < std::min(flags.size(), i + kMost); ++j) {
      const auto address = static_cast<CUdeviceptr>(flags[j]);
      if (take) {
        params[count] = {};
        params[count++].waitValue = {CU_STREAM_MEM_OP_WAIT_VALUE_32, address, {1},
                                     CU_STREAM_WAIT_VALUE_EQ, 0};
      }
      params[count] = {};
      params[count++].writeValue = {CU_STREAM_MEM_OP_WRITE_VALUE_32, address,
                                    {take ? 0u : 1u}, CU_STREAM_WRITE_VALUE_DEFAULT, 0};
    }
    const CUresult result = batch_mem_op()(stream, count, params, 0);
    STD_TORCH_CHECK(result == CUDA_SUCCESS, "cuStreamBatchMemOp failed with ", int(result));
  }
}

void check(cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, "CUDA: ", cudaGetErrorString(error));
}

// Let a stream wait for what is queued in another by now.
void wait_for(cudaStream_t waiting, cudaStream_t other) {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  const cudaError_t recorded = cudaEventRecord(event, other);
  const cudaError_t waits = cudaStreamWaitEvent(waiting, event, 0);
  cudaEventDestroy(event);
  check(recorded);
  check(waits);
}

struct Slab {
  void* target;
  const void* source;
  int64_t into, from, bytes, rows;
};

// A tensor (B, ...) whose batch rows are contiguous, and its copy.
Slab slab_of(Tensor& target, const Tensor& source) {
  STD_TORCH_CHECK(target.is_cuda() && source.is_cuda() && target.dim() == source.dim() &&
                      target.dim() > 0 && target.scalar_type() == source.scalar_type(),
                  "a tensor and its copy must be alike and on GPUs");
  const int64_t item = static_cast<int64_t>(target.element_size());
  int64_t bytes = item;
  for (int64_t d = target.dim() - 1; d > 0; --d) {
    STD_TORCH_CHECK(target.size(d) == 1 || (target.stride(d) * item == bytes &&
                                            source.stride(d) * item == bytes),
                    "a batch row must be contiguous");
    bytes *= target.size(d);
  }
  for (int64_t d = 0; d < target.dim(); ++d) {
    STD_TORCH_CHECK(target.size(d) == source.size(d), "sizes differ in dim ", d);
  }
  const bool one = target.size(0) == 1;
  return {target.mutable_data_ptr(),
          source.const_data_ptr(),
          one ? bytes : target.stride(0) * item,
          one ? bytes : source.stride(0) * item,
          bytes,
          target.size(0)};
}

void copy(const Slab& x, cudaStream_t stream) {
  if (x.rows * x.bytes == 0) return;
  const bool whole = x.into == x.bytes && x.from == x.bytes;
  check(whole ? cudaMemcpyAsync(x.target, x.source, x.rows * x.bytes, cudaMemcpyDeviceToDevice,
                                stream)
              : cudaMemcpy2DAsync(x.target, x.into, x.source, x.from, x.bytes, x.rows,
                                  cudaMemcpyDeviceToDevice, stream));
}

// See cp_dispatch/schedules/mailbox.py for what these do. `here` is any tensor of this GPU,
// `stream` the handle of the one that carries the copies; flags are addresses of int32.
cudaStream_t handle(int64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

void raise_flags(const Tensor here, std::vector<int64_t> flags, int64_t stream) {
  const Launch launch(here.get_device_index());
  wait_for(handle(stream), launch.stream());
  batch(handle(stream), flags, false);
}

void push_slabs(std::vector<Tensor> targets, std::vector<Tensor> sources, const Tensor here,
                std::vector<int64_t> take_first, std::vector<int64_t> raise_then,
                std::vector<int64_t> take_last, int64_t stream, bool side_waits) {
  STD_TORCH_CHECK(targets.size() == sources.size(), "as many targets as sources");
  std::vector<Slab> slabs;
  slabs.reserve(targets.size());
  for (size_t i = 0; i < targets.size(); ++i) slabs.push_back(slab_of(targets[i], sources[i]));
  const Launch launch(here.get_device_index());
  if (side_waits) wait_for(handle(stream), launch.stream());
  batch(handle(stream), take_first, true);
  for (const Slab& slab : slabs) copy(slab, handle(stream));
  batch(handle(stream), raise_then, false);
  batch(handle(stream), take_last, true);
}

void join_streams(const Tensor here, int64_t stream, bool side_waits) {
  const Launch launch(here.get_device_index());
  if (side_waits) {
    wait_for(handle(stream), launch.stream());
  } else {
    wait_for(launch.stream(), handle(stream));
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cp_dispatch, CUDA, m) {
  m.impl("raise_flags", TORCH_BOX(&raise_flags));
  m.impl("push_slabs", TORCH_BOX(&push_slabs));
  m.impl("join_streams", TORCH_BOX(&join_streams));
}

}  // namespace cp_dispatch
