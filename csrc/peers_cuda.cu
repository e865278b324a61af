// Copies to other GPUs and flags between streams of several GPUs, by copy engines and the streams
// themselves: no kernel, so that attention keeps every SM. Many short copies are one kernel all the
// same, for each costs the host as much as a launch; and flags too where the current stream waits
// for all that at once. See cp_dispatch/schedules/mailbox.py.
#include <cuda.h>

#include <algorithm>
#include <vector>

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

// Operations on flags, which a stream does one after the other.
class Flags {
 public:
  // Puts 1 in each flag.
  void raise(const std::vector<int64_t>& flags) {
    for (const int64_t flag : flags) write(flag, 1);
  }
  // Waits until each flag is 1 and puts 0 there.
  void take(const std::vector<int64_t>& flags) {
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
  for (int64_t d = 0; d < target.dim(); ++d) {
    STD_TORCH_CHECK(target.size(d) == source.size(d), "sizes differ in dim ", d);
  }
  if (target.numel() == 0) return {};
  for (int64_t d = target.dim() - 1; d > 0; --d) {
    STD_TORCH_CHECK(target.size(d) == 1 || (target.stride(d) * item == bytes &&
                                            source.stride(d) * item == bytes),
                    "a batch row must be contiguous");
    bytes *= target.size(d);
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

constexpr int kMaxSlabs = 64;  // as many as fit in a kernel's arguments
constexpr int64_t kShort = 64 * 1024;

struct Slabs {
  Slab slabs[kMaxSlabs];
};

// 16 bytes for each thread at a time.
__device__ void copy_by_blocks(const Slab& x) {
  const int64_t units = x.bytes / 16;
  for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < x.rows * units;
       i += int64_t{gridDim.x} * 256) {
    const int64_t row = i / units, at = (i - row * units) * 16;
    *reinterpret_cast<int4*>(static_cast<char*>(x.target) + row * x.into + at) =
        *reinterpret_cast<const int4*>(static_cast<const char*>(x.source) + row * x.from + at);
  }
}

// A slab for each row of blocks.
__global__ void __launch_bounds__(256) copy_kernel(const __grid_constant__ Slabs all) {
  copy_by_blocks(all.slabs[blockIdx.y]);
}

constexpr int kMaxFlags = 24;

struct FlagList {
  uint32_t* flags[kMaxFlags];
  int count;
};

struct Exchange {
  Slabs all;
  FlagList raise_first, take_first, raise_then, take_last;
  uint32_t* done;  // blocks of this kernel; 0 before and after it
};

__device__ void put(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ void wait_until_raised(const uint32_t* flag) {
  uint32_t found;
  do {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
  } while (found != 1);
}

__device__ void raise_all(const FlagList& list) {
  for (int i = threadIdx.x; i < list.count; i += blockDim.x) put(list.flags[i], 1);
}

__device__ void wait_for_all(const FlagList& list) {
  for (int i = threadIdx.x; i < list.count; i += blockDim.x) wait_until_raised(list.flags[i]);
  __syncthreads();
}

__device__ void lower_all(const FlagList& list) {
  for (int i = threadIdx.x; i < list.count; i += blockDim.x) put(list.flags[i], 0);
}

// What `push` does on one stream, in one kernel: no block waits for another one of this GPU, and the
// last one that has copied does what comes after all copies.
__global__ void __launch_bounds__(256) exchange_kernel(const __grid_constant__ Exchange x) {
  if (blockIdx.x == 0 && blockIdx.y == 0) raise_all(x.raise_first);
  wait_for_all(x.take_first);
  copy_by_blocks(x.all.slabs[blockIdx.y]);
  __shared__ bool is_last;
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(x.done, 1) == gridDim.x * gridDim.y - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence_system();
  if (threadIdx.x == 0) *x.done = 0;
  // Peers raise these again once they have seen that their rooms are full.
  lower_all(x.take_first);
  __syncthreads();
  raise_all(x.raise_then);
  wait_for_all(x.take_last);
  lower_all(x.take_last);
}

bool is_short(const Slab& x) {
  const auto places = reinterpret_cast<uintptr_t>(x.target) |
                      reinterpret_cast<uintptr_t>(x.source) | static_cast<uintptr_t>(x.into) |
                      static_cast<uintptr_t>(x.from) | static_cast<uintptr_t>(x.bytes);
  return places % 16 == 0 && x.rows * x.bytes <= kShort;
}

bool make_one_kernel(const std::vector<Slab>& slabs) {
  return slabs.size() > 2 && std::all_of(slabs.begin(), slabs.end(), is_short);
}

void copy_by_kernel(const std::vector<Slab>& slabs, cudaStream_t stream) {
  for (size_t i = 0; i < slabs.size(); i += kMaxSlabs) {
    const size_t count = std::min<size_t>(slabs.size() - i, kMaxSlabs);
    Slabs some{};
    std::copy_n(slabs.begin() + static_cast<std::ptrdiff_t>(i), count, some.slabs);
    copy_kernel<<<dim3(4, static_cast<uint32_t>(count)), 256, 0, stream>>>(some);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

// See cp_dispatch/schedules/mailbox.py for what these do. `here` is a tensor of this GPU, the room
// where copies to it go; `stream` the handle of the one that carries the copies; flags are addresses
// of int32.
constexpr int64_t kCurrent = -1;  // no other stream than the current one
cudaStream_t handle(int64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

// Of the room's header, its flags ahead of what kernels count in.
constexpr int64_t kHeader = 4096, kDone = kHeader - sizeof(uint32_t);

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

// What is done to flags before and after the copies.
struct Signals {
  const std::vector<int64_t>&raise_first, &take_first, &raise_then, &take_last;
};

bool fits(const std::vector<int64_t>& flags) { return flags.size() <= kMaxFlags; }

FlagList list_of(const std::vector<int64_t>& flags) {
  FlagList list{};
  for (const int64_t flag : flags) list.flags[list.count++] = reinterpret_cast<uint32_t*>(flag);
  return list;
}

bool fit_one_kernel(const std::vector<Slab>& slabs, const Signals& signals) {
  return !slabs.empty() && slabs.size() <= kMaxSlabs &&
         std::all_of(slabs.begin(), slabs.end(), is_short) && fits(signals.raise_first) &&
         fits(signals.take_first) && fits(signals.raise_then) && fits(signals.take_last);
}

void push_by_kernel(const std::vector<Slab>& slabs, const Tensor& here, const Signals& signals,
                    cudaStream_t stream) {
  STD_TORCH_CHECK(here.numel() * here.element_size() >= kHeader, "a room begins with a header");
  auto* header = static_cast<char*>(here.mutable_data_ptr());
  Exchange x{{},
             list_of(signals.raise_first),
             list_of(signals.take_first),
             list_of(signals.raise_then),
             list_of(signals.take_last),
             reinterpret_cast<uint32_t*>(header + kDone)};
  std::copy(slabs.begin(), slabs.end(), x.all.slabs);
  exchange_kernel<<<dim3(4, static_cast<uint32_t>(slabs.size())), 256, 0, stream>>>(x);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void push(const std::vector<Slab>& slabs, const Tensor& here, const Signals& signals,
          int64_t stream, bool side_waits) {
  const Launch launch(here.get_device_index());
  if (stream == kCurrent) {
    if (fit_one_kernel(slabs, signals)) {
      push_by_kernel(slabs, here, signals, launch.stream());
      return;
    }
    stream = reinterpret_cast<int64_t>(launch.stream());
  }
  if (side_waits) wait_for(handle(stream), launch.stream());
  Flags before, after;
  before.raise(signals.raise_first);
  before.take(signals.take_first);
  before.enqueue(handle(stream));
  after.raise(signals.raise_then);
  if (make_one_kernel(slabs)) {
    copy_by_kernel(slabs, handle(stream));
  } else {
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

void join_streams(const Tensor here, int64_t stream, bool side_waits) {
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

// `moves` holds for each slab: which source (B, S, ...), its first row and how many, the address
// where they go and the bytes between batch rows there.
void push_rows(std::vector<Tensor> sources, const Tensor here, std::vector<int64_t> moves,
               std::vector<int64_t> raise_first, std::vector<int64_t> take_first,
               std::vector<int64_t> raise_then, std::vector<int64_t> take_last, int64_t stream,
               bool side_waits, bool then_wait) {
  struct Source {
    const char* start;
    int64_t row, batch, rows, count;
  };
  std::vector<Source> found;
  found.reserve(sources.size());
  for (const Tensor& x : sources) {
    STD_TORCH_CHECK(x.is_cuda() && x.dim() > 1, "a source must be (B, S, ...) on a GPU");
    if (x.numel() == 0) {
      found.push_back({nullptr, 0, 0, x.size(1), x.size(0)});
      continue;
    }
    int64_t row = static_cast<int64_t>(x.element_size());
    const int64_t item = row;
    for (int64_t d = x.dim() - 1; d > 0; --d) {
      STD_TORCH_CHECK(x.size(d) == 1 || x.stride(d) * item == row,
                      "a batch row must be contiguous");
      if (d > 1) row *= x.size(d);
    }
    found.push_back({static_cast<const char*>(x.const_data_ptr()), row, x.stride(0) * item,
                     x.size(1), x.size(0)});
  }
  STD_TORCH_CHECK(moves.size() % 5 == 0, "five numbers for each move");
  std::vector<Slab> slabs;
  slabs.reserve(moves.size() / 5);
  for (size_t i = 0; i < moves.size(); i += 5) {
    const int64_t index = moves[i], first = moves[i + 1], rows = moves[i + 2];
    STD_TORCH_CHECK(index >= 0 && index < static_cast<int64_t>(found.size()), "no such source");
    const Source& x = found[index];
    STD_TORCH_CHECK(first >= 0 && rows >= 0 && first + rows <= x.rows,
                    "rows that a source does not have");
    const int64_t bytes = rows * x.row;
    const bool one = x.count == 1;
    slabs.push_back({reinterpret_cast<void*>(moves[i + 3]), x.start + first * x.row,
                     one ? bytes : moves[i + 4], one ? bytes : x.batch, bytes, x.count});
  }
  push(slabs, here, {raise_first, take_first, raise_then, take_last}, stream, side_waits);
  if (then_wait) join_streams(here, stream, false);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cp_dispatch, CUDA, m) {
  m.impl("raise_flags", TORCH_BOX(&raise_flags));
  m.impl("push_slabs", TORCH_BOX(&push_slabs));
  m.impl("push_rows", TORCH_BOX(&push_rows));
  m.impl("join_streams", TORCH_BOX(&join_streams));
}

}  // namespace cp_dispatch
