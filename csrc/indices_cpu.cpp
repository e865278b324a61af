// Index generation on CPU: spans to positions, and the inverse of an index.
#include "rows.h"

namespace cp_dispatch {
namespace {

Tensor span_indices(const Tensor spans, int64_t total) {
  STD_TORCH_CHECK(spans.dim() == 2 && spans.size(1) == 2 &&
                      spans.scalar_type() == ScalarType::Long,
                  "spans must be int64 (n, 2): position, length");
  const int64_t count = spans.size(0), row = spans.stride(0), column = spans.stride(1);
  const int64_t* values = static_cast<const int64_t*>(spans.const_data_ptr());
  std::vector<int64_t> starts(count + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t length = values[i * row + column];
    STD_TORCH_CHECK(length >= 0 && length <= total - starts[i], "span ", i, " has length ", length,
                    " but all spans together should have ", total, " positions");
    starts[i + 1] = starts[i] + length;
  }
  STD_TORCH_CHECK(starts[count] == total, "spans have ", starts[count], " positions, not ", total);
  Tensor out = torch::stable::new_empty(spans, {total});
  int64_t* positions = static_cast<int64_t*>(out.mutable_data_ptr());
  torch::stable::parallel_for(0, total, 1 << 14, [&](int64_t begin, int64_t end) {
    int64_t span = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
    while (begin < end) {
      while (starts[span + 1] <= begin) ++span;
      const int64_t shift = values[span * row] - starts[span];
      for (const int64_t stop = std::min(end, starts[span + 1]); begin < stop; ++begin) {
        positions[begin] = begin + shift;
      }
    }
  });
  return out;
}

template <typename T>
void invert(const Tensor& index, const IndexShape& shape, int64_t size, T* out) {
  const T* values = static_cast<const T*>(index.const_data_ptr());
  for (int64_t b = 0; b < shape.batches; ++b) {
    T* inverse = out + b * size;
    std::fill(inverse, inverse + size, T{-1});
    for (int64_t i = 0; i < shape.length; ++i) {
      const int64_t value = values[b * shape.batch + i * shape.row];
      STD_TORCH_CHECK(value >= -1 && value < size, "index ", value, " at position ", i,
                      " is out of range: expected -1 (no row) or 0 to ", size - 1);
      if (value >= 0) inverse[value] = static_cast<T>(i);
    }
  }
}

Tensor invert_index(const Tensor index, int64_t size) {
  const IndexShape shape = index_shape(index);
  STD_TORCH_CHECK(size >= 0, "size must not be negative, got ", size);
  std::vector<int64_t> sizes;
  if (index.dim() == 2) sizes.push_back(index.size(0));
  sizes.push_back(size);
  Tensor out = torch::stable::new_empty(index, {sizes.data(), sizes.size()});
  if (index.scalar_type() == ScalarType::Long) {
    invert(index, shape, size, static_cast<int64_t*>(out.mutable_data_ptr()));
  } else {
    STD_TORCH_CHECK(shape.length <= INT32_MAX, "an int32 index must be shorter than 2**31");
    invert(index, shape, size, static_cast<int32_t*>(out.mutable_data_ptr()));
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cp_dispatch, CPU, m) {
  m.impl("span_indices", TORCH_BOX(&span_indices));
  m.impl("invert_index", TORCH_BOX(&invert_index));
}

}  // namespace cp_dispatch
