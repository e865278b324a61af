// A RowCopy as kernels take it.
#pragma once

#include "cuda_launch.h"
#include "rows.h"

namespace cp_dispatch {

constexpr int kThreads = 256;
constexpr int kMaxDims = 6;
constexpr int64_t kMaxCount = int64_t{1} << 30;  // runs of one job, for Divider
constexpr int kMaxJobs = 4;                      // of one launch
constexpr int64_t kPieceBytes = 4096;            // what a long run is cut into

struct Loop {
  int64_t source, target, index;
  Divider size;
};

struct Job {
  const char* source;
  char* target;
  const void* index;
  int64_t row_stride, rows;
  Loop loops[kMaxDims];  // innermost first
  uint32_t count, units, first_block;
  int ndims, columns_log2;
  bool wide_index, scatter;
};

struct Jobs {
  Job jobs[kMaxJobs];
  int count;
};

inline Job make_job(const RowCopy& copy) {
  Job job{};
  job.source = copy.source;
  job.target = copy.target;
  job.index = copy.index;
  job.wide_index = copy.wide_index;
  job.scatter = copy.scatter;
  job.row_stride = copy.row_stride;
  job.rows = copy.rows;
  job.count = static_cast<uint32_t>(copy.count());
  job.ndims = static_cast<int>(copy.dims.size());
  for (int d = 0; d < job.ndims; ++d) {
    const Dim& dim = copy.dims[job.ndims - 1 - d];
    job.loops[d] = {dim.source, dim.target, dim.index, Divider(static_cast<uint32_t>(dim.size))};
  }
  return job;
}

// Calls `emit` with copies that fit in a Job and make up `copy`. Divides the outermost loop, into
// its steps if there are too many loops, else into halves.
template <typename Emit>
void split(const RowCopy& copy, const Emit& emit) {
  const int64_t count = copy.count();
  if (count == 0 || copy.run == 0) return;
  const bool by_step = static_cast<int>(copy.dims.size()) > kMaxDims;
  if (!by_step && count <= kMaxCount) {
    emit(copy);
    return;
  }
  const Dim outer = copy.dims[0];
  const int64_t size = by_step ? 1 : (outer.size + 1) / 2;
  for (int64_t start = 0; start < outer.size; start += size) {
    RowCopy part = copy;
    part.source += start * outer.source;
    part.target += start * outer.target;
    if (copy.index != nullptr) {
      const int64_t item = copy.wide_index ? 8 : 4;
      part.index = static_cast<const char*>(copy.index) + start * outer.index * item;
    }
    part.dims[0].size = std::min(size, outer.size - start);
    if (part.dims[0].size == 1) part.dims.erase(part.dims.begin());
    split(part, emit);
  }
}

// The widest unit, up to 16 bytes, that divides every address and the run.
inline int unit_of(const RowCopy& copy) {
  uint64_t bits = reinterpret_cast<uintptr_t>(copy.source) |
                  reinterpret_cast<uintptr_t>(copy.target) | static_cast<uint64_t>(copy.run) |
                  static_cast<uint64_t>(copy.row_stride) | 16u;
  for (const Dim& dim : copy.dims) {
    bits |= static_cast<uint64_t>(dim.source) | static_cast<uint64_t>(dim.target);
  }
  return static_cast<int>(bits & (~bits + 1));
}

// What a block of a kernel works on at once: its threads are rows x columns, and each of them has
// so many runs in flight, and so many units of each.
struct Tile {
  int threads, runs, units;
};

// Calls `launch(jobs, blocks, unit)` with jobs of one unit, as many as a launch takes.
template <typename Kernel>
class Batch {
 public:
  Batch(Tile tile, Kernel launch) : tile_(tile), launch_(launch) {}

  void add(const RowCopy& copy, int unit) {
    if (unit != unit_) flush();  // a short tail must not narrow the others
    unit_ = unit;
    Job& job = jobs_.jobs[jobs_.count++];
    job = make_job(copy);
    job.units = static_cast<uint32_t>(copy.run / unit);
    while ((static_cast<uint32_t>(tile_.units) << job.columns_log2) < job.units &&
           (1 << job.columns_log2) < tile_.threads) {
      ++job.columns_log2;
    }
    const uint32_t runs = (tile_.threads >> job.columns_log2) * tile_.runs;
    job.first_block = blocks_;
    blocks_ += (job.count + runs - 1) / runs;
    if (jobs_.count == kMaxJobs) flush();
  }

  void flush() {
    if (jobs_.count == 0) return;
    launch_(jobs_, blocks_, unit_);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    jobs_.count = 0;
    blocks_ = 0;
  }

 private:
  Tile tile_;
  Kernel launch_;
  Jobs jobs_{};
  uint32_t blocks_ = 0;
  int unit_ = 16;
};

// Calls `emit` with copies that make up `whole`: each fits in a Job, and in many threads.
template <typename Emit>
void for_jobs(const RowCopy& whole, const Emit& emit) {
  cut_runs(whole, kPieceBytes, [&](const RowCopy& run) { split(run, emit); });
}

// Makes all copies in as few launches as possible.
void copy_all(const std::vector<RowCopy>& copies, cudaStream_t stream);

__device__ __forceinline__ const Job& job_of_block(const Jobs& jobs) {
  int number = 0;
  while (number + 1 < jobs.count && blockIdx.x >= jobs.jobs[number + 1].first_block) ++number;
  return jobs.jobs[number];
}

__device__ __forceinline__ int64_t read_index(const Job& job, int64_t at) {
  return job.wide_index ? static_cast<const int64_t*>(job.index)[at]
                        : static_cast<const int32_t*>(job.index)[at];
}

// Where run number `at` begins, in bytes, and its place in the index.
__device__ __forceinline__ void locate(const Job& job, uint32_t at, int64_t& source,
                                       int64_t& target, int64_t& index) {
  source = target = index = 0;
#pragma unroll
  for (int d = 0; d < kMaxDims; ++d) {
    if (d >= job.ndims) break;
    const Loop& loop = job.loops[d];
    const uint32_t quotient = loop.size.divide(at);
    const uint32_t i = at - quotient * loop.size.divisor;
    at = quotient;
    source += i * loop.source;
    target += i * loop.target;
    index += i * loop.index;
  }
}

}  // namespace cp_dispatch
