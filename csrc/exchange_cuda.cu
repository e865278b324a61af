#include "exchange.h"

#include <algorithm>

#include "cuda_launch.h"

namespace cp_dispatch {
namespace {

// As many as fit in a kernel's arguments, and as few as most calls have: long arguments make a
// launch slower.
constexpr int kMost = 64, kFew = 16;
constexpr int kMostFlags = 24, kFewFlags = 8;
// Bytes of a slab beside attention, which leaves copies few SMs.
constexpr int64_t kShort = 64 * 1024;
// Units that a thread has in flight; threads of a block, and about how many blocks a launch has: so
// few that while they wait for a peer, kernels of collectives on other streams find SMs.
constexpr int kUnits = 4, kThreads = 512;
constexpr int64_t kBlocks = 64;

// A Slab in units of so many bytes, fewer than 2**31, and its blocks.
struct Units {
  char* target;
  const char* source;
  uint32_t into, from;
  Divider of_row;
  uint32_t all;
  uint16_t first_block, blocks;
  uint16_t bytes;
};

template <int N>
struct Slabs {
  Units slabs[N];
  int count;
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

template <typename Unit>
__device__ void copy_units(const Units& x) {
  const uint32_t step = x.blocks * blockDim.x;
  for (uint32_t first = (blockIdx.x - x.first_block) * blockDim.x + threadIdx.x; first < x.all;
       first += kUnits * step) {
    Unit held[kUnits];
    Unit* targets[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const uint32_t i = first + u * step;
      if (i >= x.all) continue;
      const uint32_t row = x.of_row.divide(i), at = i - row * x.of_row.divisor;
      targets[u] = reinterpret_cast<Unit*>(x.target) + int64_t{row} * x.into + at;
      held[u] = reinterpret_cast<const Unit*>(x.source)[int64_t{row} * x.from + at];
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (first + u * step < x.all) *targets[u] = held[u];
    }
  }
}

// What this block has got to do of the slabs.
template <int N>
__device__ void copy_by_blocks(const Slabs<N>& all) {
  int number = 0;
  while (number + 1 < all.count && blockIdx.x >= all.slabs[number + 1].first_block) ++number;
  const Units& x = all.slabs[number];
  if (x.bytes == 16) {
    copy_units<int4>(x);
  } else if (x.bytes == 4) {
    copy_units<uint32_t>(x);
  } else {
    copy_units<uint8_t>(x);
  }
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Slabs<kMost> all) {
  copy_by_blocks(all);
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
  if (blockIdx.x == 0) raise_all(x.raise_first);
  wait_for_all(x.take_first);
  copy_by_blocks(x.all);
  __shared__ bool is_last;
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(x.done, 1) == gridDim.x - 1;
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

// Bytes of the widest unit that a slab is made of.
int64_t unit_of(const Slab& x) {
  const auto places = reinterpret_cast<uintptr_t>(x.target) |
                      reinterpret_cast<uintptr_t>(x.source) | static_cast<uintptr_t>(x.into) |
                      static_cast<uintptr_t>(x.from) | static_cast<uintptr_t>(x.bytes);
  return places % 16 == 0 ? 16 : places % 4 == 0 ? 4 : 1;
}

bool fits(const Slab& x) {
  constexpr int64_t kMostUnits = int64_t{1} << 31, kMostPitch = int64_t{1} << 32;
  const int64_t unit = unit_of(x);
  return x.rows * x.bytes < kMostUnits * unit && std::max(x.into, x.from) < kMostPitch * unit;
}

bool is_short(const Slab& x) { return x.rows * x.bytes <= kShort && unit_of(x) == 16; }

// Blocks for so many bytes, if there may be any number.
int64_t blocks_for(int64_t bytes) {
  constexpr int64_t kOfBlock = int64_t{16} * kThreads * kUnits;
  return std::max<int64_t>((bytes + kOfBlock - 1) / kOfBlock, 1);
}

// Puts slabs in a kernel's arguments; the blocks that it takes. Each has its share of them.
template <int N>
uint32_t put_in(Slabs<N>& all, const Slab* slabs, size_t count) {
  int64_t wanted = 0;
  for (size_t i = 0; i < count; ++i) wanted += blocks_for(slabs[i].rows * slabs[i].bytes);
  uint32_t blocks = 0;
  for (size_t i = 0; i < count; ++i) {
    const Slab& x = slabs[i];
    const int64_t own = blocks_for(x.rows * x.bytes), unit = unit_of(x);
    const int64_t share = wanted <= kBlocks ? own : std::max<int64_t>(own * kBlocks / wanted, 1);
    all.slabs[i] = {static_cast<char*>(x.target),
                    static_cast<const char*>(x.source),
                    static_cast<uint32_t>(x.into / unit),
                    static_cast<uint32_t>(x.from / unit),
                    Divider(static_cast<uint32_t>(std::max<int64_t>(x.bytes / unit, 1))),
                    static_cast<uint32_t>(x.rows * x.bytes / unit),
                    static_cast<uint16_t>(blocks),
                    static_cast<uint16_t>(share),
                    static_cast<uint16_t>(unit)};
    blocks += static_cast<uint32_t>(share);
  }
  all.count = static_cast<int>(count);
  return blocks;
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
void launch(const Slab* slabs, size_t count, const Signals& signals, uint32_t* done,
            cudaStream_t stream) {
  Exchange<N, F> x;
  x.raise_first = list_of<F>(signals.raise_first);
  x.take_first = list_of<F>(signals.take_first);
  x.raise_then = list_of<F>(signals.raise_then);
  x.take_last = list_of<F>(signals.take_last);
  x.done = done;
  const uint32_t blocks = put_in(x.all, slabs, count);
  exchange_kernel<N, F><<<blocks, kThreads, 0, stream>>>(x);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

bool copy_by_kernel(const std::vector<Slab>& slabs, cudaStream_t stream) {
  if (slabs.size() <= 2 || !std::all_of(slabs.begin(), slabs.end(), is_short)) return false;
  for (size_t i = 0; i < slabs.size(); i += kMost) {
    const size_t count = std::min<size_t>(slabs.size() - i, kMost);
    Slabs<kMost> some;
    const uint32_t blocks = put_in(some, slabs.data() + i, count);
    copy_kernel<<<blocks, kThreads, 0, stream>>>(some);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return true;
}

bool push_by_kernel(const std::vector<Slab>& slabs, const Tensor& here, const Signals& signals,
                    cudaStream_t stream) {
  const int64_t flags = most_flags(signals);
  if (slabs.empty() || flags > kMostFlags || !std::all_of(slabs.begin(), slabs.end(), fits)) {
    return false;
  }
  STD_TORCH_CHECK(here.numel() * here.element_size() >= kHeader, "a room begins with a header");
  auto* done = reinterpret_cast<uint32_t*>(static_cast<char*>(here.mutable_data_ptr()) + kDone);
  const bool few = slabs.size() <= kFew && flags <= kFewFlags;
  for (size_t i = 0; i < slabs.size(); i += kMost) {
    const size_t count = std::min<size_t>(slabs.size() - i, kMost);
    Signals own;
    if (i == 0) own.raise_first = signals.raise_first, own.take_first = signals.take_first;
    if (i + count == slabs.size()) {
      own.raise_then = signals.raise_then, own.take_last = signals.take_last;
    }
    (few ? launch<kFew, kFewFlags> : launch<kMost, kMostFlags>)(slabs.data() + i, count, own, done,
                                                                stream);
  }
  return true;
}

}  // namespace cp_dispatch
