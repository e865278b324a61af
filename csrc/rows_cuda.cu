// copy_rows and the indices on CUDA. The twins are in cp_dispatch/native/rows.py.
#include "cuda_jobs.h"

namespace cp_dispatch {
namespace {

constexpr int kRowsAtOnce = 4;  // loads in flight for each thread

// Each row of a block's threads copies one run, a Unit at a time, and each thread keeps kRowsAtOnce
// runs in flight.
template <typename Unit>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Jobs jobs) {
  const Job& job = job_of_block(jobs);
  const uint32_t columns = 1u << job.columns_log2;
  const uint32_t column = threadIdx.x & (columns - 1);
  const uint32_t step = kThreads >> job.columns_log2;
  const uint32_t first =
      (blockIdx.x - job.first_block) * step * kRowsAtOnce + (threadIdx.x >> job.columns_log2);

  const Unit* from[kRowsAtOnce];
  Unit* to[kRowsAtOnce];
#pragma unroll
  for (int k = 0; k < kRowsAtOnce; ++k) {
    const uint32_t at = first + k * step;
    from[k] = nullptr;
    to[k] = nullptr;
    if (at >= job.count) continue;
    int64_t source, target, index;
    locate(job, at, source, target, index);
    bool found = true;
    if (job.index != nullptr) {
      const int64_t row = read_index(job, index);
      // Also for values out of range, of which the caller promised that there are none.
      found = row >= 0 && row < job.rows;
      (job.scatter ? target : source) += found ? row * job.row_stride : 0;
    }
    if (found) from[k] = reinterpret_cast<const Unit*>(job.source + source);
    if (found || !job.scatter) to[k] = reinterpret_cast<Unit*>(job.target + target);
  }
  for (uint32_t c = column; c < job.units; c += columns) {
    Unit values[kRowsAtOnce];
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      values[k] = from[k] != nullptr ? from[k][c] : Unit{};
    }
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      if (to[k] != nullptr) to[k][c] = values[k];
    }
  }
}

void launch_copy(const Jobs& jobs, uint32_t blocks, int unit, cudaStream_t stream) {
  switch (unit) {
    case 16: copy_kernel<uint4><<<blocks, kThreads, 0, stream>>>(jobs); break;
    case 8: copy_kernel<uint2><<<blocks, kThreads, 0, stream>>>(jobs); break;
    case 4: copy_kernel<uint32_t><<<blocks, kThreads, 0, stream>>>(jobs); break;
    case 2: copy_kernel<uint16_t><<<blocks, kThreads, 0, stream>>>(jobs); break;
    default: copy_kernel<uint8_t><<<blocks, kThreads, 0, stream>>>(jobs); break;
  }
}

void copy_rows(std::vector<Tensor> targets, std::vector<Tensor> sources,
               std::optional<Tensor> index, std::vector<int64_t> dims, bool scatter) {
  check_lists(targets, sources, dims);
  if (sources.empty()) return;
  STD_TORCH_CHECK(!index.has_value() || index->is_cuda(), "index must be on the tensors' device");
  std::vector<RowCopy> copies;
  copies.reserve(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    copies.push_back(plan_rows(targets[i], sources[i], index, dims[i], scatter));
  }
  const Launch launch(sources[0].get_device_index());
  copy_all(copies, launch.stream());
}

__global__ void span_kernel(const int64_t* spans, int64_t count, int64_t row, int64_t column,
                            const int64_t* ends, int64_t total, int64_t* out) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < total;
       i += int64_t{gridDim.x} * kThreads) {
    int64_t low = 0, high = count - 1;  // the first span whose end is beyond i
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (ends[middle] > i) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const int64_t start = ends[low] - spans[low * row + column];
    out[i] = spans[low * row] + i - start;
  }
}

uint32_t blocks_for(int64_t count) {
  return static_cast<uint32_t>(std::min<int64_t>((count + kThreads - 1) / kThreads, 65535));
}

// aten::cumsum(Tensor self, int dim, *, ScalarType? dtype=None)
Tensor cumulative(const Tensor& tensor) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(tensor),
                                    torch::stable::detail::from(int64_t{0}),
                                    torch::stable::detail::from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::cumsum", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor span_indices(const Tensor spans, int64_t total) {
  STD_TORCH_CHECK(spans.dim() == 2 && spans.size(1) == 2 &&
                      spans.scalar_type() == ScalarType::Long && total >= 0,
                  "spans must be int64 (n, 2): position, length");
  Tensor out = torch::stable::new_empty(spans, {total});
  if (total == 0 || spans.size(0) == 0) return out;
  const Launch launch(spans.get_device_index());
  const Tensor ends = cumulative(torch::stable::select(spans, 1, 1));
  span_kernel<<<blocks_for(total), kThreads, 0, launch.stream()>>>(
      static_cast<const int64_t*>(spans.const_data_ptr()), spans.size(0), spans.stride(0),
      spans.stride(1), static_cast<const int64_t*>(ends.const_data_ptr()), total,
      static_cast<int64_t*>(out.mutable_data_ptr()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

template <typename T>
__global__ void invert_kernel(const T* index, IndexShape shape, int64_t size, T* inverse) {
  const int64_t count = shape.batches * shape.length;
  for (int64_t at = blockIdx.x * int64_t{kThreads} + threadIdx.x; at < count;
       at += int64_t{gridDim.x} * kThreads) {
    const int64_t batch = at / shape.length, i = at % shape.length;
    const int64_t value = index[batch * shape.batch + i * shape.row];
    if (value >= 0 && value < size) inverse[batch * size + value] = static_cast<T>(i);
  }
}

Tensor invert_index(const Tensor index, int64_t size) {
  STD_TORCH_CHECK(size >= 0, "size must not be negative, got ", size);
  const IndexShape shape = index_shape(index);
  std::vector<int64_t> sizes;
  if (index.dim() == 2) sizes.push_back(index.size(0));
  sizes.push_back(size);
  Tensor out = torch::stable::new_empty(index, {sizes.data(), sizes.size()});
  torch::stable::fill_(out, -1);
  const int64_t count = shape.batches * shape.length;
  if (count == 0 || size == 0) return out;
  const Launch launch(index.get_device_index());
  if (index.scalar_type() == ScalarType::Long) {
    invert_kernel<<<blocks_for(count), kThreads, 0, launch.stream()>>>(
        static_cast<const int64_t*>(index.const_data_ptr()), shape, size,
        static_cast<int64_t*>(out.mutable_data_ptr()));
  } else {
    invert_kernel<<<blocks_for(count), kThreads, 0, launch.stream()>>>(
        static_cast<const int32_t*>(index.const_data_ptr()), shape, size,
        static_cast<int32_t*>(out.mutable_data_ptr()));
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

}  // namespace

void copy_all(const std::vector<RowCopy>& copies, cudaStream_t stream) {
  Batch batch({kThreads, kRowsAtOnce, 1}, [&](const Jobs& jobs, uint32_t blocks, int unit) {
    launch_copy(jobs, blocks, unit, stream);
  });
  for (const RowCopy& whole : copies) {
    for_jobs(whole, [&](const RowCopy& copy) { batch.add(copy, unit_of(copy)); });
  }
  batch.flush();
}

STABLE_TORCH_LIBRARY_IMPL(cp_dispatch, CUDA, m) {
  m.impl("copy_rows", TORCH_BOX(&copy_rows));
  m.impl("span_indices", TORCH_BOX(&span_indices));
  m.impl("invert_index", TORCH_BOX(&invert_index));
}

}  // namespace cp_dispatch
