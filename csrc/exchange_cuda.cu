#include "exchange.h"

#include <algorithm>

#include "cuda_launch.h"

namespace cp_dispatch {
namespace {

// As many as fit in a kernel's arguments, and as few as most calls have: long arguments make a
// launch slower.
constexpr int kMost = 64, kFew = 16;
constexpr int kMostFlags = 24, kFewFlags = 8;
constexpr int64_t kShort = 64 * 1024;
constexpr int kThreads = 256, kBlocks = 4;

template <int N>
struct Slabs {
  Slab slabs[N];
};

template <int N>
struct FlagList {
  uint32_t* flags[N];
  int count;
};

template <int N, int F>
struct Exchange {
  Slabs<N> all;
  FlagList<F> raise_first, take_first, raise_then, take_last;
  uint32_t* done;  // blocks of this kernel; 0 before and after it
};

// Of the room's header, its flags ahead of what kernels count in.
constexpr int64_t kHeader = 4096, kDone = kHeader - sizeof(uint32_t);

// 16 bytes for each thread at a time.
__device__ void copy_by_blocks(const Slab& x) {
  const int64_t units = x.bytes / 16;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < x.rows * units;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / units, at = (i - row * units) * 16;
    *reinterpret_cast<int4*>(static_cast<char*>(x.target) + row * x.into + at) =
        *reinterpret_cast<const int4*>(static_cast<const char*>(x.source) + row * x.from + at);
  }
}

// A slab for each row of blocks.
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Slabs<kMost> all) {
  copy_by_blocks(all.slabs[blockIdx.y]);
}

__device__ void put(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ void wait_until_raised(const uint32_t* flag) {
  uint32_t found;
  do {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
  } while (found != 1);
}

template <int N>
__device__ void raise_all(const FlagList<N>& list) {
  for (int i = threadIdx.x; i < list.count; i += blockDim.x) put(list.flags[i], 1);
}

template <int N>
__device__ void wait_for_all(const FlagList<N>& list) {
  for (int i = threadIdx.x; i < list.count; i += blockDim.x) wait_until_raised(list.flags[i]);
  __syncthreads();
}

template <int N>
__device__ void lower_all(const FlagList<N>& list) {
  for (int i = threadIdx.x; i < list.count; i += blockDim.x) put(list.flags[i], 0);
}

// No block waits for another one of this GPU, and the last one that has copied does what comes after
// all copies.
template <int N, int F>
__global__ void __launch_bounds__(kThreads)
    exchange_kernel(const __grid_constant__ Exchange<N, F> x) {
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

bool are_short(const std::vector<Slab>& slabs) {
  return std::all_of(slabs.begin(), slabs.end(), is_short);
}

int64_t most_flags(const Signals& signals) {
  return std::max({signals.raise_first.size, signals.take_first.size, signals.raise_then.size,
                   signals.take_last.size});
}

template <int N>
FlagList<N> list_of(Numbers flags) {
  FlagList<N> list;
  list.count = 0;
  for (const int64_t flag : flags) list.flags[list.count++] = reinterpret_cast<uint32_t*>(flag);
  return list;
}

template <int N, int F>
void launch(const std::vector<Slab>& slabs, const Signals& signals, uint32_t* done,
            cudaStream_t stream) {
  Exchange<N, F> x;
  x.raise_first = list_of<F>(signals.raise_first);
  x.take_first = list_of<F>(signals.take_first);
  x.raise_then = list_of<F>(signals.raise_then);
  x.take_last = list_of<F>(signals.take_last);
  x.done = done;
  std::copy(slabs.begin(), slabs.end(), x.all.slabs);
  const dim3 grid(kBlocks, static_cast<uint32_t>(slabs.size()));
  exchange_kernel<N, F><<<grid, kThreads, 0, stream>>>(x);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

bool copy_by_kernel(const std::vector<Slab>& slabs, cudaStream_t stream) {
  if (slabs.size() <= 2 || !are_short(slabs)) return false;
  for (size_t i = 0; i < slabs.size(); i += kMost) {
    const size_t count = std::min<size_t>(slabs.size() - i, kMost);
    Slabs<kMost> some;
    std::copy_n(slabs.begin() + static_cast<std::ptrdiff_t>(i), count, some.slabs);
    copy_kernel<<<dim3(kBlocks, static_cast<uint32_t>(count)), kThreads, 0, stream>>>(some);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return true;
}

bool push_by_kernel(const std::vector<Slab>& slabs, const Tensor& here, const Signals& signals,
                    cudaStream_t stream) {
  const int64_t flags = most_flags(signals);
  if (slabs.empty() || slabs.size() > kMost || flags > kMostFlags || !are_short(slabs)) {
    return false;
  }
  STD_TORCH_CHECK(here.numel() * here.element_size() >= kHeader, "a room begins with a header");
  auto* done = reinterpret_cast<uint32_t*>(static_cast<char*>(here.mutable_data_ptr()) + kDone);
  const bool few = slabs.size() <= kFew && flags <= kFewFlags;
  (few ? launch<kFew, kFewFlags> : launch<kMost, kMostFlags>)(slabs, signals, done, stream);
  return true;
}

}  // namespace cp_dispatch
