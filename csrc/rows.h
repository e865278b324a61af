// What the CPU and the CUDA kernels share: a gather or scatter of rows as a list of byte strides.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace cp_dispatch {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// One loop. A step moves the source and the target by bytes, and the index by elements.
struct Dim {
  int64_t size, source, target, index;
};

// Copies runs of `run` bytes, one for every combination of `dims` (outermost first). With an
// index, the source (or, for a scatter, the target) moves `row_stride` bytes for each unit of the
// index's value, which must be below `rows`; -1 means zeros (or, for a scatter, nothing).
struct RowCopy {
  const char* source = nullptr;
  char* target = nullptr;
  std::vector<Dim> dims;
  int64_t run = 0;
  const void* index = nullptr;
  bool wide_index = false;
  bool scatter = false;
  int64_t row_stride = 0;
  int64_t rows = 0;

  int64_t count() const {
    int64_t product = 1;
    for (const Dim& dim : dims) product *= dim.size;
    return product;
  }
  int64_t index_at(int64_t at) const {
    return wide_index ? static_cast<const int64_t*>(index)[at]
                      : static_cast<const int32_t*>(index)[at];
  }
};

// Index (N) or (B, N); B may be 1. Stride of the batch dim, 0 when one index serves every batch.
struct IndexShape {
  int64_t length, row, batch, batches;
};

inline IndexShape index_shape(const Tensor& index) {
  const int64_t ndim = index.dim();
  STD_TORCH_CHECK(ndim == 1 || ndim == 2, "index must have shape (N,) or (B, N), got ", ndim, " dims");
  const auto type = index.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Long || type == ScalarType::Int,
                  "index must be int64 or int32");
  const int64_t batches = ndim == 2 ? index.size(0) : 1;
  return {index.size(ndim - 1), index.stride(ndim - 1),
          ndim == 2 && batches > 1 ? index.stride(0) : 0, batches};
}

// The copy with these loops, over items of so many bytes: sorted, and joined where memory is.
inline RowCopy arranged(RowCopy copy, std::vector<Dim> dims, int64_t item) {
  const auto is_one = [](const Dim& dim) { return dim.size == 1; };
  dims.erase(std::remove_if(dims.begin(), dims.end(), is_one), dims.end());
  for (const Dim& dim : dims) {
    if (dim.size == 0) {
      copy.dims = {{0, 0, 0, 0}};
      return copy;
    }
  }
  // Walk the side without an index in the order of its memory.
  std::stable_sort(dims.begin(), dims.end(), [&copy](const Dim& a, const Dim& b) {
    return copy.scatter ? a.source > b.source : a.target > b.target;
  });
  for (const Dim& dim : dims) {
    if (!copy.dims.empty()) {
      Dim& last = copy.dims.back();
      if (last.source == dim.source * dim.size && last.target == dim.target * dim.size &&
          last.index == dim.index * dim.size) {
        last = {last.size * dim.size, dim.source, dim.target, dim.index};
        continue;
      }
    }
    copy.dims.push_back(dim);
  }
  copy.run = item;
  if (!copy.dims.empty()) {
    const Dim& last = copy.dims.back();
    if (last.source == item && last.target == item && last.index == 0) {
      copy.run = item * last.size;
      copy.dims.pop_back();
    }
  }
  return copy;
}

// `extra` is how many entries more than rows the index has (for offsets, of which a row has two).
inline RowCopy plan_rows(const Tensor& target, const Tensor& source,
                         const std::optional<Tensor>& index, int64_t dim, bool scatter,
                         int64_t extra = 0) {
  const int64_t ndim = source.dim();
  STD_TORCH_CHECK(target.dim() == ndim, "source and target must have the same number of dims");
  STD_TORCH_CHECK(target.scalar_type() == source.scalar_type(),
                  "source and target must have one dtype");
  STD_TORCH_CHECK(dim >= 0 && dim < ndim, "dim must be in [0, ", ndim, "), got ", dim);
  const int64_t item = static_cast<int64_t>(source.element_size());
  const Tensor& free_side = scatter ? source : target;
  const Tensor& indexed_side = scatter ? target : source;

  RowCopy copy;
  copy.source = static_cast<const char*>(source.const_data_ptr());
  copy.target = static_cast<char*>(target.mutable_data_ptr());
  copy.scatter = scatter;
  IndexShape shape{};
  if (index.has_value()) {
    shape = index_shape(*index);
    STD_TORCH_CHECK(index->get_device_index() == source.get_device_index(),
                    "index must be on the tensors' device");
    STD_TORCH_CHECK(shape.length == free_side.size(dim) + extra, "index has ", shape.length,
                    " entries for ", free_side.size(dim), " rows");
    STD_TORCH_CHECK(shape.batches == 1 || (dim != 0 && shape.batches == source.size(0)),
                    "an index per batch row needs dim != 0 and as many rows as dim 0");
    copy.index = index->const_data_ptr();
    copy.wide_index = index->scalar_type() == ScalarType::Long;
    copy.row_stride = indexed_side.stride(dim) * item;
    copy.rows = indexed_side.size(dim);
  }
  std::vector<Dim> dims;
  for (int64_t d = 0; d < ndim; ++d) {
    const bool indexed = index.has_value() && d == dim;
    STD_TORCH_CHECK(indexed || target.size(d) == source.size(d),
                    "source and target differ in dim ", d, ": ", source.size(d), " and ",
                    target.size(d));
    Dim loop{free_side.size(d), source.stride(d) * item, target.stride(d) * item, 0};
    if (indexed) {
      (scatter ? loop.target : loop.source) = 0;
      loop.index = shape.row;
    } else if (index.has_value() && d == 0) {
      loop.index = shape.batch;
    }
    dims.push_back(loop);
  }
  return arranged(std::move(copy), std::move(dims), item);
}

// Calls `emit` with copies that make up `copy`, whose runs are pieces of `piece` bytes if they
// are much longer, so that one long run is work for many threads.
template <typename Emit>
void cut_runs(RowCopy copy, int64_t piece, const Emit& emit) {
  if (copy.run % piece != 0 && copy.run < 16 * piece) {
    emit(copy);
    return;
  }
  const int64_t pieces = copy.run / piece, rest = copy.run % piece;
  if (rest != 0) {
    RowCopy tail = copy;
    tail.source += pieces * piece;
    tail.target += pieces * piece;
    tail.run = rest;
    emit(tail);
  }
  copy.run = piece;
  if (pieces != 1) copy.dims.push_back({pieces, piece, piece, 0});
  emit(copy);
}

inline void check_lists(const std::vector<Tensor>& targets, const std::vector<Tensor>& sources,
                        const std::vector<int64_t>& dims) {
  STD_TORCH_CHECK(targets.size() == sources.size() && dims.size() == sources.size(),
                  "expected as many sources and dims as targets");
  for (size_t i = 0; i < sources.size(); ++i) {
    STD_TORCH_CHECK(targets[i].is_cuda() == sources[i].is_cuda() &&
                        targets[i].get_device_index() == sources[0].get_device_index() &&
                        sources[i].get_device_index() == sources[0].get_device_index(),
                    "all tensors must be on one device");
  }
}

// The rows that row r of a target sums are order[offsets[r]] to order[offsets[r + 1] - 1] of its
// source. Sizes and dtypes of a pair are for plan_rows to check.
inline void check_sums(const std::vector<Tensor>& targets, const std::vector<Tensor>& sources,
                       const Tensor& order, const Tensor& offsets,
                       const std::vector<int64_t>& dims) {
  check_lists(targets, sources, dims);
  STD_TORCH_CHECK(order.scalar_type() == ScalarType::Long &&
                      offsets.scalar_type() == ScalarType::Long,
                  "order and offsets must be int64");
  STD_TORCH_CHECK(order.dim() == 1 && order.is_contiguous() && offsets.is_contiguous(),
                  "order must be (N,), order and offsets contiguous");
  for (size_t i = 0; i < sources.size(); ++i) {
    STD_TORCH_CHECK(order.get_device_index() == sources[i].get_device_index() &&
                        order.is_cuda() == sources[i].is_cuda() &&
                        offsets.is_cuda() == sources[i].is_cuda(),
                    "all tensors must be on one device");
    STD_TORCH_CHECK(offsets.dim() == 1 || offsets.size(0) == 1 || dims[i] != 0,
                    "an index per batch row needs dim != 0");
  }
}

}  // namespace cp_dispatch
