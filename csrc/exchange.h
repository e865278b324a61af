// Copies to other GPUs, and the flags around them, as one kernel: each copy or flag of its own
// would cost the host as much as a launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "rows.h"

namespace cp_dispatch {

// Numbers that somebody else holds.
struct Numbers {
  const int64_t* start = nullptr;
  int64_t size = 0;

  Numbers() = default;
  Numbers(const int64_t* first, int64_t count) : start(first), size(count) {}
  Numbers(const std::vector<int64_t>& all)  // NOLINT: as lists come
      : start(all.data()), size(static_cast<int64_t>(all.size())) {}
  const int64_t* begin() const { return start; }
  const int64_t* end() const { return start + size; }
};

// Rows of as many bytes, and how far apart they are where they go and where they come from.
struct Slab {
  void* target;
  const void* source;
  int64_t into, from, bytes, rows;
};

// Flags, as addresses of int32 of any GPU: put 1 in the first, wait until each of the next is 1 and
// put 0 there, copy, put 1 in flags and take others.
struct Signals {
  Numbers raise_first, take_first, raise_then, take_last;
};

// Copies by one kernel, if there are several and all are short; else false, and nothing is done.
bool copy_by_kernel(const std::vector<Slab>& slabs, cudaStream_t stream);

// Copies of any length and flags by a kernel, or more where copies are many, for a stream that has
// nothing else to do meanwhile; false, and nothing is done, without copies, with too many flags, and
// of 32 GiB. `here` is this GPU's room.
bool push_by_kernel(const std::vector<Slab>& slabs, const Tensor& here, const Signals& signals,
                    cudaStream_t stream);

constexpr int64_t kCurrent = -1;  // no other stream than the current one

// Copies and flags on the stream with this handle, by a kernel or by copy engines. If `side_waits`,
// it first waits for what the current stream has queued.
void push(const std::vector<Slab>& slabs, const Tensor& here, const Signals& signals,
          int64_t stream, bool side_waits);

}  // namespace cp_dispatch
