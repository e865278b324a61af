// copy_rows on CPU: gather and scatter of rows. The twin is cp_dispatch/native/rows.py.
#include "rows.h"

#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace cp_dispatch {
namespace {

// Above this many bytes the target will not be read from cache soon, and stores that bypass it
// save reading every line before it is overwritten.
constexpr int64_t kStreamFrom = int64_t{4} << 20;
constexpr int64_t kGrainBytes = int64_t{64} << 10;
constexpr int64_t kPieceBytes = int64_t{64} << 10;

#ifdef __SSE2__
void stream(char* target, const char* source, int64_t bytes) {
  const int64_t head = std::min<int64_t>(bytes, -reinterpret_cast<intptr_t>(target) & 15);
  std::memcpy(target, source, head);
  target += head, source += head, bytes -= head;
  int64_t i = 0;
  for (; i + 64 <= bytes; i += 64) {
    const auto* from = reinterpret_cast<const __m128i*>(source + i);
    auto* to = reinterpret_cast<__m128i*>(target + i);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a), _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c), _mm_stream_si128(to + 3, d);
  }
  std::memcpy(target + i, source + i, bytes - i);
}
void stream_end() { _mm_sfence(); }
#else
void stream(char* target, const char* source, int64_t bytes) { std::memcpy(target, source, bytes); }
void stream_end() {}
#endif

// Runs of one element are common (a strided head dim): a fixed size makes memcpy a move.
template <int Bytes>
void put(char* target, const char* source, int64_t) {
  std::memcpy(target, source, Bytes);
}
void put_any(char* target, const char* source, int64_t bytes) {
  std::memcpy(target, source, bytes);
}
template <int Bytes>
void clear(char* target, int64_t) {
  std::memset(target, 0, Bytes);
}
void clear_any(char* target, int64_t bytes) { std::memset(target, 0, bytes); }

template <void (*Put)(char*, const char*, int64_t), void (*Clear)(char*, int64_t)>
void copy_range(const RowCopy& copy, int64_t begin, int64_t end) {
  // The innermost loop runs over the last dim; the others count like an odometer.
  const Dim inner = copy.dims.empty() ? Dim{1, 0, 0, 0} : copy.dims.back();
  const int outer = copy.dims.empty() ? 0 : static_cast<int>(copy.dims.size()) - 1;
  std::vector<int64_t> at(outer);
  int64_t source = 0, target = 0, index = 0, rest = begin / inner.size, first = begin % inner.size;
  for (int d = outer - 1; d >= 0; --d) {
    at[d] = rest % copy.dims[d].size;
    rest /= copy.dims[d].size;
    source += at[d] * copy.dims[d].source;
    target += at[d] * copy.dims[d].target;
    index += at[d] * copy.dims[d].index;
  }
  while (begin < end) {
    const int64_t last = std::min(inner.size, first + end - begin);
    for (int64_t i = first; i < last; ++i) {
      const char* from = copy.source + source + i * inner.source;
      char* to = copy.target + target + i * inner.target;
      if (copy.index == nullptr) {
        Put(to, from, copy.run);
        continue;
      }
      const int64_t row = copy.index_at(index + i * inner.index);
      if (row >= 0) {
        const int64_t shift = row * copy.row_stride;
        copy.scatter ? Put(to + shift, from, copy.run) : Put(to, from + shift, copy.run);
      } else if (!copy.scatter) {
        Clear(to, copy.run);
      }
    }
    begin += last - first;
    first = 0;
    for (int d = outer - 1; d >= 0; --d) {
      const Dim& dim = copy.dims[d];
      source += dim.source, target += dim.target, index += dim.index;
      if (++at[d] < dim.size) break;
      source -= dim.size * dim.source, target -= dim.size * dim.target;
      index -= dim.size * dim.index;
      at[d] = 0;
    }
  }
}

void run_copy(const RowCopy& copy) {
  if (copy.run == 0) return;
  const int64_t count = copy.count();
  const bool streams = copy.run >= 128 && count * copy.run >= kStreamFrom;
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(copy.run, 1));
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    if (streams) {
      copy_range<stream, clear_any>(copy, begin, end);
      stream_end();
      return;
    }
    switch (copy.run) {
      case 1: return copy_range<put<1>, clear<1>>(copy, begin, end);
      case 2: return copy_range<put<2>, clear<2>>(copy, begin, end);
      case 4: return copy_range<put<4>, clear<4>>(copy, begin, end);
      case 8: return copy_range<put<8>, clear<8>>(copy, begin, end);
      case 16: return copy_range<put<16>, clear<16>>(copy, begin, end);
      default: return copy_range<put_any, clear_any>(copy, begin, end);
    }
  });
}

template <typename T>
void check_values(const Tensor& index, int64_t rows) {
  const IndexShape shape = index_shape(index);
  const T* values = static_cast<const T*>(index.const_data_ptr());
  for (int64_t b = 0; b < shape.batches; ++b) {
    for (int64_t i = 0; i < shape.length; ++i) {
      const int64_t value = values[b * shape.batch + i * shape.row];
      STD_TORCH_CHECK(value >= -1 && value < rows, "index ", value, " at position ", i,
                      " is out of range: expected -1 (no row) or 0 to ", rows - 1);
    }
  }
}

void copy_rows(std::vector<Tensor> targets, std::vector<Tensor> sources,
               std::optional<Tensor> index, std::vector<int64_t> dims, bool scatter) {
  check_lists(targets, sources, dims);
  std::vector<RowCopy> copies;
  int64_t rows = INT64_MAX;
  for (size_t i = 0; i < sources.size(); ++i) {
    copies.push_back(plan_rows(targets[i], sources[i], index, dims[i], scatter));
    rows = std::min(rows, (scatter ? targets[i] : sources[i]).size(dims[i]));
  }
  if (index.has_value() && !sources.empty()) {
    STD_TORCH_CHECK(!index->is_cuda(), "index must be on the tensors' device");
    index->scalar_type() == ScalarType::Long ? check_values<int64_t>(*index, rows)
                                             : check_values<int32_t>(*index, rows);
  }
  for (const RowCopy& copy : copies) cut_runs(copy, kPieceBytes, run_copy);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cp_dispatch, CPU, m) { m.impl("copy_rows", TORCH_BOX(&copy_rows)); }

}  // namespace cp_dispatch
