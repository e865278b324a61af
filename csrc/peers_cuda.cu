// Copies to other GPUs and flags between streams of several GPUs, by copy engines and the streams
// themselves: no kernel, so that attention keeps every SM. What is short, or has nothing to be hidden
// behind, is one all the same, see exchange.h. The protocol is told in cp_dispatch/schedules/mailbox.py.
#include <cuda.h>

#include <algorithm>
#include <vector>

#include "cuda_launch.h"
#include "exchange.h"
#include "slabs.h"

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

// Operations on flags, which a stream does one after the other.
class Flags {
 public:
  // Puts 1 in each flag.
  void raise(Numbers flags) {
    for (const int64_t flag : flags) write(flag, 1);
  }
  // Waits until each flag is 1 and puts 0 there.
  void take(Numbers flags) {
    for (const int64_t flag : flags) {
      CUstreamBatchMemOpParams wait{};
      wait.waitValue = {CU_STREAM_MEM_OP_WAIT_VALUE_32, static_cast<CUdeviceptr>(flag), {1},
                        CU_STREAM_WAIT_VALUE_EQ, 0};
      params_.push_back(wait);
      write(flag, 0);
    }
  }
  void enqueue(cudaStream_t stream) {
    constexpr size_t kMost = 128;  // the driver takes 256 at a time
    for (size_t i = 0; i < params_.size(); i += kMost) {
      const auto count = static_cast<unsigned int>(std::min(params_.size() - i, kMost));
      const CUresult result = batch_mem_op()(stream, count, params_.data() + i, 0);
      STD_TORCH_CHECK(result == CUDA_SUCCESS, "cuStreamBatchMemOp failed with ", int(result));
    }
  }

 private:
  void write(int64_t flag, cuuint32_t value) {
    CUstreamBatchMemOpParams op{};
    op.writeValue = {CU_STREAM_MEM_OP_WRITE_VALUE_32, static_cast<CUdeviceptr>(flag), {value},
                     CU_STREAM_WRITE_VALUE_DEFAULT, 0};
    params_.push_back(op);
  }
  std::vector<CUstreamBatchMemOpParams> params_;
};

void check(cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, "CUDA: ", cudaGetErrorString(error));
}

// Let a stream wait for what is queued in another by now.
void wait_for(cudaStream_t waiting, cudaStream_t other) {
  if (waiting == other) return;
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  const cudaError_t recorded = cudaEventRecord(event, other);
  const cudaError_t waits = cudaStreamWaitEvent(waiting, event, 0);
  cudaEventDestroy(event);
  check(recorded);
  check(waits);
}

void copy(const Slab& x, cudaStream_t stream) {
  if (x.rows * x.bytes == 0) return;
  const bool whole = x.into == x.bytes && x.from == x.bytes;
  check(whole ? cudaMemcpyAsync(x.target, x.source, x.rows * x.bytes, cudaMemcpyDeviceToDevice,
                                stream)
              : cudaMemcpy2DAsync(x.target, x.into, x.source, x.from, x.bytes, x.rows,
                                  cudaMemcpyDeviceToDevice, stream));
}

// See cp_dispatch/schedules/mailbox.py for what these do. `here` is a tensor of this GPU, the room
// where copies to it go; `stream` the handle of the one that carries the copies; flags are addresses
// of int32.
cudaStream_t handle(int64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

bool is_within(const void* place, const Tensor& tensor) {
  const auto start = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const auto at = reinterpret_cast<uintptr_t>(place);
  return at >= start && at < start + tensor.numel() * tensor.element_size();
}

void raise_flags(const Tensor here, std::vector<int64_t> flags, int64_t stream) {
  const Launch launch(here.get_device_index());
  wait_for(handle(stream), launch.stream());
  Flags raised;
  raised.raise(flags);
  raised.enqueue(handle(stream));
}

void join_streams(const Tensor here, int64_t stream, bool side_waits) {
  if (stream == kCurrent) return;
  const Launch launch(here.get_device_index());
  if (side_waits) {
    wait_for(handle(stream), launch.stream());
  } else {
    wait_for(launch.stream(), handle(stream));
  }
}

void push_slabs(std::vector<Tensor> targets, std::vector<Tensor> sources, const Tensor here,
                std::vector<int64_t> raise_first, std::vector<int64_t> take_first,
                std::vector<int64_t> raise_then, std::vector<int64_t> take_last, int64_t stream,
                bool side_waits, bool then_wait) {
  STD_TORCH_CHECK(targets.size() == sources.size(), "as many targets as sources");
  std::vector<Slab> slabs;
  slabs.reserve(targets.size());
  for (size_t i = 0; i < targets.size(); ++i) slabs.push_back(slab_of(targets[i], sources[i]));
  push(slabs, here, {raise_first, take_first, raise_then, take_last}, stream, side_waits);
  if (then_wait) join_streams(here, stream, false);
}

void push_rows(std::vector<Tensor> sources, const Tensor here, std::vector<int64_t> moves,
               std::vector<int64_t> raise_first, std::vector<int64_t> take_first,
               std::vector<int64_t> raise_then, std::vector<int64_t> take_last, int64_t stream,
               bool side_waits, bool then_wait) {
  std::vector<Source> found;
  found.reserve(sources.size());
  for (const Tensor& x : sources) found.push_back(source_of(x, 1));
  push(slabs_of(found.data(), static_cast<int64_t>(found.size()), moves), here,
       {raise_first, take_first, raise_then, take_last}, stream, side_waits);
  if (then_wait) join_streams(here, stream, false);
}

// push_rows of two sources (B, H, S, D) on the current stream; `numbers` are the moves and the flags.
void push_pair(const Tensor first, const Tensor second, const Tensor here, const Tensor numbers) {
  const auto lists = lists_of<5>(numbers);
  const Source sources[] = {source_of(first, 2), source_of(second, 2)};
  push(slabs_of(sources, 2, lists[0]), here, {lists[1], lists[2], lists[3], lists[4]}, kCurrent,
       false);
}

// `numbers` are the moves and the flags. A move: which source, its batch row, the first row and how
// many, the first head and how many, the address where they go and the bytes between rows there (of
// one number for each, between heads).
void push_heads(std::vector<Tensor> sources, const Tensor here, const Tensor numbers, int64_t stream,
                bool then_wait) {
  constexpr int64_t kNumbers = 8;
  const auto lists = lists_of<5>(numbers);
  STD_TORCH_CHECK(lists[0].size % kNumbers == 0, "eight numbers for each move");
  std::vector<Heads> heads;
  heads.reserve(sources.size());
  for (const Tensor& x : sources) heads.emplace_back(x);
  std::vector<Slab> slabs;
  slabs.reserve(lists[0].size / kNumbers);
  for (const int64_t* move = lists[0].begin(); move != lists[0].end(); move += kNumbers) {
    STD_TORCH_CHECK(move[0] >= 0 && move[0] < static_cast<int64_t>(heads.size()), "no such source");
    slabs.push_back(heads[move[0]].part(move + 1));
  }
  push(slabs, here, {lists[1], lists[2], lists[3], lists[4]}, stream, true);
  if (then_wait) join_streams(here, stream, false);
}

}  // namespace

void push(const std::vector<Slab>& slabs, const Tensor& here, const Signals& signals,
          int64_t stream, bool side_waits) {
  const Launch launch(here.get_device_index());
  if (stream == kCurrent) {
    if (push_by_kernel(slabs, here, signals, launch.stream())) return;
    stream = reinterpret_cast<int64_t>(launch.stream());
  }
  if (side_waits) wait_for(handle(stream), launch.stream());
  Flags before, after;
  before.raise(signals.raise_first);
  before.take(signals.take_first);
  before.enqueue(handle(stream));
  after.raise(signals.raise_then);
  if (!copy_by_kernel(slabs, handle(stream))) {
    // Peers need not wait for copies within this GPU, which are kernels: they start when attention
    // leaves SMs free.
    std::vector<Slab> own;
    for (const Slab& x : slabs) {
      if (is_within(x.target, here)) {
        own.push_back(x);
      } else {
        copy(x, handle(stream));
      }
    }
    if (!own.empty()) {
      after.enqueue(handle(stream));
      after = Flags();
    }
    for (const Slab& x : own) copy(x, handle(stream));
  }
  after.take(signals.take_last);
  after.enqueue(handle(stream));
}

STABLE_TORCH_LIBRARY_IMPL(cp_dispatch, CUDA, m) {
  m.impl("raise_flags", TORCH_BOX(&raise_flags));
  m.impl("push_slabs", TORCH_BOX(&push_slabs));
  m.impl("push_rows", TORCH_BOX(&push_rows));
  m.impl("push_pair", TORCH_BOX(&push_pair));
  m.impl("push_heads", TORCH_BOX(&push_heads));
  m.impl("join_streams", TORCH_BOX(&join_streams));
}

}  // namespace cp_dispatch
