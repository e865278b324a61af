// What is copied to other GPUs, as tensors and numbers say it: slabs.
#pragma once

#include <array>
#include <vector>

#include "exchange.h"

namespace cp_dispatch {

// A tensor (B, ...) whose batch rows are contiguous, and its copy.
inline Slab slab_of(Tensor& target, const Tensor& source) {
  STD_TORCH_CHECK(target.is_cuda() && source.is_cuda() && target.dim() == source.dim() &&
                      target.dim() > 0 && target.scalar_type() == source.scalar_type(),
                  "a tensor and its copy must be alike and on GPUs");
  const int64_t item = static_cast<int64_t>(target.element_size());
  int64_t bytes = item;
  for (int64_t d = 0; d < target.dim(); ++d) {
    STD_TORCH_CHECK(target.size(d) == source.size(d), "sizes differ in dim ", d);
  }
  if (target.numel() == 0) return {};
  for (int64_t d = target.dim() - 1; d > 0; --d) {
    STD_TORCH_CHECK(target.size(d) == 1 || (target.stride(d) * item == bytes &&
                                            source.stride(d) * item == bytes),
                    "a batch row must be contiguous");
    bytes *= target.size(d);
  }
  const bool one = target.size(0) == 1;
  return {target.mutable_data_ptr(),
          source.const_data_ptr(),
          one ? bytes : target.stride(0) * item,
          one ? bytes : source.stride(0) * item,
          bytes,
          target.size(0)};
}

// The rows of a source whose batch rows are contiguous.
struct Source {
  const char* start;
  int64_t row, batch, rows, count;
};

// Of (B, ...) with the rows in dim `rows`, ahead of the other dims in memory.
inline Source source_of(const Tensor& x, int64_t rows) {
  STD_TORCH_CHECK(x.is_cuda() && x.dim() > rows, "a source must be on a GPU, with rows in dim ",
                  rows);
  if (x.numel() == 0) return {nullptr, 0, 0, x.size(rows), x.size(0)};
  const int64_t item = static_cast<int64_t>(x.element_size());
  int64_t row = item;
  const auto check_dim = [&](int64_t d) {
    STD_TORCH_CHECK(x.size(d) == 1 || x.stride(d) * item == row, "a batch row must be contiguous");
  };
  for (int64_t d = x.dim() - 1; d > 0; --d) {
    if (d == rows) continue;
    check_dim(d);
    row *= x.size(d);
  }
  check_dim(rows);
  return {static_cast<const char*>(x.const_data_ptr()), row, x.stride(0) * item, x.size(rows),
          x.size(0)};
}

// `moves` holds for each slab: which source, its first row and how many, the address where they go
// and the bytes between batch rows there.
inline std::vector<Slab> slabs_of(const Source* sources, int64_t count, Numbers moves) {
  STD_TORCH_CHECK(moves.size % 5 == 0, "five numbers for each move");
  std::vector<Slab> slabs;
  slabs.reserve(moves.size / 5);
  for (const int64_t* move = moves.start; move != moves.start + moves.size; move += 5) {
    const int64_t index = move[0], first = move[1], rows = move[2];
    STD_TORCH_CHECK(index >= 0 && index < count, "no such source");
    const Source& x = sources[index];
    STD_TORCH_CHECK(first >= 0 && rows >= 0 && first + rows <= x.rows,
                    "rows that a source does not have");
    const int64_t bytes = rows * x.row;
    const bool one = x.count == 1;
    slabs.push_back({reinterpret_cast<void*>(move[3]), x.start + first * x.row,
                     one ? bytes : move[4], one ? bytes : x.batch, bytes, x.count});
  }
  return slabs;
}

// Lists of numbers that a tensor of the host holds, one after the other, behind the length of each:
// lists as arguments would cost the host more than a launch.
template <int N>
std::array<Numbers, N> lists_of(const Tensor& numbers) {
  STD_TORCH_CHECK(numbers.is_cpu() && numbers.is_contiguous() &&
                      numbers.scalar_type() == torch::headeronly::ScalarType::Long &&
                      numbers.numel() >= N,
                  "numbers must be int64, contiguous and on the host");
  const auto* counts = static_cast<const int64_t*>(numbers.const_data_ptr());
  int64_t left = numbers.numel() - N;
  const int64_t* next = counts + N;
  std::array<Numbers, N> lists;
  for (int i = 0; i < N; ++i) {
    STD_TORCH_CHECK(counts[i] >= 0 && counts[i] <= left, "fewer numbers than they say");
    lists[i] = {next, counts[i]};
    next += counts[i];
    left -= counts[i];
  }
  return lists;
}

// Heads (B, H, S, D) whose rows hold one head after the other; or (B, H, S), one number for each row
// of a head. Strides in bytes.
class Heads {
 public:
  explicit Heads(const Tensor& x) : dims_(x.dim()) {
    STD_TORCH_CHECK(x.is_cuda() && (dims_ == 3 || dims_ == 4),
                    "heads must be on a GPU, in 3 or 4 dims");
    item_ = static_cast<int64_t>(x.element_size());
    batch_ = x.size(0), heads_ = x.size(1), rows_ = x.size(2), dim_ = dims_ == 4 ? x.size(3) : 1;
    if (x.numel() == 0) return;
    const auto has_stride = [&x](int64_t d, int64_t stride) {
      return x.size(d) == 1 || x.stride(d) == stride;
    };
    STD_TORCH_CHECK(dims_ == 4 ? has_stride(3, 1) && has_stride(1, dim_) : has_stride(2, 1),
                    "a row's heads, or a head's rows, must be contiguous");
    start_ = static_cast<const char*>(x.const_data_ptr());
    batch_stride_ = x.stride(0) * item_;
    stride_ = x.stride(dims_ == 4 ? 2 : 1) * item_;
  }

  // Some rows of some heads of a batch row, to an address, `into` bytes between rows or heads there.
  Slab part(const int64_t* move) const {
    const int64_t batch = move[0], row = move[1], rows = move[2], head = move[3], heads = move[4];
    STD_TORCH_CHECK(batch >= 0 && batch < batch_ && are_within(row, rows, rows_) &&
                        are_within(head, heads, heads_),
                    "heads or rows that a source does not have");
    const char* const source = start_ + batch * batch_stride_;
    if (dims_ == 4) {
      const int64_t width = dim_ * item_;
      return slab(move, source + row * stride_ + head * width, heads * width, rows);
    }
    return slab(move, source + head * stride_ + row * item_, rows * item_, heads);
  }

 private:
  // The stride of a dim of size 1 says nothing, and CUDA takes none that is shorter than a row.
  Slab slab(const int64_t* move, const char* source, int64_t bytes, int64_t count) const {
    const bool one = count == 1;
    return {reinterpret_cast<void*>(move[5]), source, one ? bytes : move[6],
            one ? bytes : stride_, bytes, count};
  }
  static bool are_within(int64_t first, int64_t count, int64_t all) {
    return first >= 0 && count >= 0 && count <= all && first <= all - count;
  }

  int64_t dims_, item_, batch_, heads_, rows_, dim_;
  const char* start_ = nullptr;
  int64_t batch_stride_ = 0, stride_ = 0;
};

}  // namespace cp_dispatch
