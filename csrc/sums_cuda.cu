// Sums of rows on CUDA: the gradient of an index with repeats. The twin is cp_dispatch/native/rows.py.
#include "cuda_floats.h"
#include "cuda_jobs.h"

#include <cstring>
#include <type_traits>

namespace cp_dispatch {
namespace {

// What a thread has in flight: so many rows of so many packs. Where a row's sources are is two
// reads away, which takes longer than the row itself if a thread has little of it.
// Small blocks, for a row without sources leaves its threads idle until the block's others are
// done.
constexpr int kBlock = 128;
constexpr int kInFlight = 2;
constexpr int kPacks = 4;

template <typename T, typename Acc, int N>
__global__ void __launch_bounds__(kBlock)
    sum_kernel(const __grid_constant__ Jobs jobs, const int64_t* order, int64_t places) {
  // Whole words until all of them are asked for: compilers take a pack of 16-bit floats apart right
  // where it is read, and so wait for it before the next one is read.
  using Loaded = std::conditional_t<N == 1, T, uint4>;
  static_assert(sizeof(Loaded) == sizeof(Pack<T, N>));
  const Job& job = job_of_block(jobs);
  const uint32_t columns = 1u << job.columns_log2, units = job.units;
  const uint32_t column = threadIdx.x & (columns - 1);
  const uint32_t at = (blockIdx.x - job.first_block) * (kBlock >> job.columns_log2) +
                      (threadIdx.x >> job.columns_log2);
  if (at >= job.count) return;
  int64_t source, target, index;
  locate(job, at, source, target, index);
  const auto* offsets = static_cast<const int64_t*>(job.index) + index;
  const int64_t first = max(offsets[0], int64_t{0}), last = min(offsets[1], places);
  const char* from = job.source + source;
  char* to = job.target + target;
  const int64_t row_stride = job.row_stride, rows = job.rows;
  for (uint32_t c = column; c < units; c += columns * kPacks) {
    Acc sum[kPacks][N] = {};
    // Several rows in flight; their order in the sum stays.
    for (int64_t j = first; j < last; j += kInFlight) {
      Loaded loaded[kInFlight][kPacks];
      int64_t row[kInFlight];
      bool inside[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) row[i] = j + i < last ? order[j + i] : -1;
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        inside[i] = row[i] >= 0 && row[i] < rows;
        const auto* packs =
            reinterpret_cast<const Loaded*>(from + (inside[i] ? row[i] : 0) * row_stride);
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          const uint32_t unit = c + p * columns;
          if (inside[i] && unit < units) loaded[i][p] = packs[unit];
        }
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (!inside[i]) continue;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          if (c + p * columns >= units) continue;
          Pack<T, N> pack;
          memcpy(&pack, &loaded[i][p], sizeof(pack));
#pragma unroll
          for (int k = 0; k < N; ++k) sum[p][k] += widen<Acc>(pack.values[k]);
        }
      }
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const uint32_t unit = c + p * columns;
      if (unit >= units) continue;
      Pack<T, N> pack;
#pragma unroll
      for (int k = 0; k < N; ++k) pack.values[k] = narrow<T>(sum[p][k]);
      reinterpret_cast<Pack<T, N>*>(to)[unit] = pack;
    }
  }
}

template <typename T, typename Acc>
void launch_sums(const std::vector<RowCopy>& sums, const int64_t* order, int64_t places,
                 cudaStream_t stream) {
  constexpr int kWide = 16, kNarrow = static_cast<int>(sizeof(T));
  Batch batch({kBlock, 1, kPacks}, [&](const Jobs& jobs, uint32_t blocks, int unit) {
    if (unit == kWide) {
      sum_kernel<T, Acc, kWide / kNarrow><<<blocks, kBlock, 0, stream>>>(jobs, order, places);
    } else {
      sum_kernel<T, Acc, 1><<<blocks, kBlock, 0, stream>>>(jobs, order, places);
    }
  });
  for (const RowCopy& sum : sums) {
    for_jobs(sum, [&](const RowCopy& copy) {
      batch.add(copy, unit_of(copy) == kWide ? kWide : kNarrow);
    });
  }
  batch.flush();
}

void sum_rows(std::vector<Tensor> targets, std::vector<Tensor> sources, const Tensor order,
              const Tensor offsets, std::vector<int64_t> dims) {
  check_sums(targets, sources, order, offsets, dims);
  if (sources.empty()) return;
  const Launch launch(sources[0].get_device_index());
  std::vector<RowCopy> sums[4];  // by dtype, and planned before the first of them is launched
  for (size_t i = 0; i < sources.size(); ++i) {
    sums[type_number(sources[i])].push_back(
        plan_rows(targets[i], sources[i], offsets, dims[i], false, 1));
  }
  const auto* values = static_cast<const int64_t*>(order.const_data_ptr());
  const int64_t places = order.numel();
  launch_sums<__nv_bfloat16, float>(sums[0], values, places, launch.stream());
  launch_sums<__half, float>(sums[1], values, places, launch.stream());
  launch_sums<float, float>(sums[2], values, places, launch.stream());
  launch_sums<double, double>(sums[3], values, places, launch.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cp_dispatch, CUDA, m) { m.impl("sum_rows", TORCH_BOX(&sum_rows)); }

}  // namespace cp_dispatch
