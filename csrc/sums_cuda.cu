// Sums of rows on CUDA: the gradient of an index with repeats. The twin is cp_dispatch/rows.py.
#include "cuda_floats.h"
#include "cuda_jobs.h"

namespace cp_dispatch {
namespace {

// What a thread has in flight: so many rows of so many packs. Where a row's sources are is two reads
// away, which takes longer than the row itself if a thread has little of it.
// Small blocks, for a row without sources leaves its threads idle until the block's others are done.
constexpr int kBlock = 128;
constexpr int kInFlight = 2;
constexpr int kPacks = 4;

template <typename T, typename Acc, int N>
__global__ void __launch_bounds__(kBlock)
    sum_kernel(const __grid_constant__ Job job, const int64_t* order, int64_t places) {
  const uint32_t columns = 1u << job.columns_log2;
  const uint32_t column = threadIdx.x & (columns - 1);
  const uint32_t at =
      blockIdx.x * (kBlock >> job.columns_log2) + (threadIdx.x >> job.columns_log2);
  if (at >= job.count) return;
  int64_t source, target, index;
  locate(job, at, source, target, index);
  const int64_t first = max(read_index(job, index), int64_t{0});
  const int64_t last = min(read_index(job, index + 1), places);
  for (uint32_t c = column; c < job.units; c += columns * kPacks) {
    Acc sum[kPacks][N] = {};
    // Several rows in flight; their order in the sum stays.
    for (int64_t j = first; j < last; j += kInFlight) {
      Pack<T, N> packs[kInFlight][kPacks];
      bool inside[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int64_t row = j + i < last ? order[j + i] : -1;
        inside[i] = row >= 0 && row < job.rows;
        const auto* from = reinterpret_cast<const Pack<T, N>*>(job.source + source +
                                                               (inside[i] ? row : 0) *
                                                                   job.row_stride);
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          const uint32_t unit = c + p * columns;
          if (inside[i] && unit < job.units) packs[i][p] = from[unit];
        }
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (!inside[i]) continue;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          if (c + p * columns >= job.units) continue;
#pragma unroll
          for (int k = 0; k < N; ++k) sum[p][k] += widen<Acc>(packs[i][p].values[k]);
        }
      }
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const uint32_t unit = c + p * columns;
      if (unit >= job.units) continue;
      Pack<T, N> pack;
#pragma unroll
      for (int k = 0; k < N; ++k) pack.values[k] = narrow<T>(sum[p][k]);
      reinterpret_cast<Pack<T, N>*>(job.target + target)[unit] = pack;
    }
  }
}

template <typename T, typename Acc>
void launch_sum(const RowCopy& whole, const int64_t* order, int64_t places, cudaStream_t stream) {
  cut_runs(whole, 4096, [&](const RowCopy& run) {
    split(run, [&](const RowCopy& copy) {
      Job job = make_job(copy);
      const bool wide = unit_of(copy) == 16;
      job.units = static_cast<uint32_t>(copy.run / (wide ? 16 : static_cast<int>(sizeof(T))));
      while ((kPacks << job.columns_log2) < static_cast<int>(job.units) &&
             (1 << job.columns_log2) < kBlock) {
        ++job.columns_log2;
      }
      const uint32_t rows = kBlock >> job.columns_log2;
      const uint32_t blocks = (job.count + rows - 1) / rows;
      if (wide) {
        sum_kernel<T, Acc, 16 / sizeof(T)><<<blocks, kBlock, 0, stream>>>(job, order, places);
      } else {
        sum_kernel<T, Acc, 1><<<blocks, kBlock, 0, stream>>>(job, order, places);
      }
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
}

void sum_rows(Tensor out, const Tensor x, const Tensor order, const Tensor offsets, int64_t dim) {
  check_sum(out, x, order, offsets, dim);
  const Launch launch(x.get_device_index());
  const RowCopy copy = plan_rows(out, x, offsets, dim, false, 1);
  const auto* places = static_cast<const int64_t*>(order.const_data_ptr());
  const int64_t count = order.numel();
  switch (type_number(x)) {
    case 0: launch_sum<__nv_bfloat16, float>(copy, places, count, launch.stream()); break;
    case 1: launch_sum<__half, float>(copy, places, count, launch.stream()); break;
    case 2: launch_sum<float, float>(copy, places, count, launch.stream()); break;
    default: launch_sum<double, double>(copy, places, count, launch.stream()); break;
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cp_dispatch, CUDA, m) { m.impl("sum_rows", TORCH_BOX(&sum_rows)); }

}  // namespace cp_dispatch
