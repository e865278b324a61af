// Kernels that add on CPU: the merge of partial attention outputs, and sums of rows. Their twins
// are cp_dispatch/native/merge.py and cp_dispatch/native/rows.py.
#include "floats.h"
#include "rows.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace cp_dispatch {
namespace {

constexpr int64_t kChunk = 512;  // elements that are summed at a time, in a buffer on the stack
constexpr int64_t kGrain = 1 << 14;

// n elements at `from` with a step of `stride` bytes; copied to `buffer` if they are not dense.
const void* dense(const char* from, int64_t n, int64_t stride, int64_t item, char* buffer) {
  if (stride == item) return from;
  for (int64_t i = 0; i < n; ++i) std::memcpy(buffer + i * item, from + i * stride, item);
  return buffer;
}

void check_side(const Tensor& out, const Tensor& x, const Tensor& lse) {
  STD_TORCH_CHECK(x.dim() == 4 && lse.dim() == 3, "outputs must be (B, H, S, D), logsumexps (B, H, S)");
  for (int d = 0; d < 4; ++d) {
    STD_TORCH_CHECK(x.size(d) == out.size(d) && (d == 3 || lse.size(d) == out.size(d)),
                    "outputs and logsumexps must agree in dim ", d);
  }
}

struct Side {
  explicit Side(const Tensor& tensor)
      : data(static_cast<char*>(tensor.data_ptr())),
        item(static_cast<int64_t>(tensor.element_size())) {
    for (int d = 0; d < static_cast<int>(tensor.dim()); ++d) strides[d] = tensor.stride(d) * item;
  }
  char* at(const int64_t (&i)[3]) const {
    return data + i[0] * strides[0] + i[1] * strides[1] + i[2] * strides[2];
  }
  char* data;
  int64_t item;
  int64_t strides[4] = {0, 0, 0, 0};
};

template <typename Acc>
void merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b,
           Tensor& out, Tensor& lse) {
  const FloatOps<Acc>* ops[] = {float_ops<Acc>(out_a.scalar_type()),
                                float_ops<Acc>(out_b.scalar_type()),
                                float_ops<Acc>(out.scalar_type())};
  STD_TORCH_CHECK(ops[0] && ops[1] && ops[2], "outputs must be bfloat16, float16, float32 or float64");
  const Side a(out_a), b(out_b), to(out), la(lse_a), lb(lse_b), lto(lse);
  int order[] = {0, 1, 2};  // outermost first, as the target lies in memory
  std::stable_sort(order, order + 3,
                   [&](int x, int y) { return to.strides[x] > to.strides[y]; });
  const int64_t dim = out.size(3);
  const int64_t middle = out.size(order[1]), inner = out.size(order[2]);
  const int64_t rows = out.size(order[0]) * middle * inner;
  constexpr Acc nothing = -std::numeric_limits<Acc>::infinity();
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(dim, 1));
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    alignas(64) Acc sum[kChunk];
    alignas(64) char buffer[kChunk * sizeof(double)];
    for (int64_t row = begin; row < end; ++row) {
      int64_t i[3];
      i[order[2]] = row % inner;
      i[order[1]] = row / inner % middle;
      i[order[0]] = row / inner / middle;
      const Acc x = *reinterpret_cast<const Acc*>(la.at(i));
      const Acc y = *reinterpret_cast<const Acc*>(lb.at(i));
      const Acc difference = x == y ? Acc(0) : y - x;  // inf - inf would be NaN
      const Acc e = std::exp(-std::abs(difference));
      const Acc large = 1 / (1 + e), small = e / (1 + e);
      const Acc weight_a = difference > 0 ? small : large;
      const Acc weight_b = difference > 0 ? large : small;
      for (int64_t start = 0; start < dim; start += kChunk) {
        const int64_t n = std::min(kChunk, dim - start);
        const auto from = [&](const Side& side) {
          return dense(side.at(i) + start * side.strides[3], n, side.strides[3], side.item, buffer);
        };
        if (x == nothing) {
          std::fill(sum, sum + n, Acc(0));
        } else {
          ops[0]->scale(sum, from(a), weight_a, n);
        }
        if (y != nothing) ops[1]->add(sum, from(b), weight_b, n);
        char* target = to.at(i) + start * to.strides[3];
        if (to.strides[3] == to.item) {
          ops[2]->store(target, sum, n);
          continue;
        }
        ops[2]->store(buffer, sum, n);
        for (int64_t j = 0; j < n; ++j) {
          std::memcpy(target + j * to.strides[3], buffer + j * to.item, to.item);
        }
      }
      *reinterpret_cast<Acc*>(lto.at(i)) = (x > y ? x : y) + std::log1p(e);
    }
  });
}

void merge_partials(const Tensor out_a, const Tensor lse_a, const Tensor out_b,
                    const Tensor lse_b, Tensor out, Tensor lse) {
  check_side(out, out_a, lse_a);
  check_side(out, out_b, lse_b);
  check_side(out, out, lse);
  const auto type = lse.scalar_type();
  STD_TORCH_CHECK(type == lse_a.scalar_type() && type == lse_b.scalar_type() &&
                      (type == ScalarType::Float || type == ScalarType::Double),
                  "logsumexps must be float32 or float64, and of one dtype");
  type == ScalarType::Float ? merge<float>(out_a, lse_a, out_b, lse_b, out, lse)
                            : merge<double>(out_a, lse_a, out_b, lse_b, out, lse);
}

template <typename Acc>
void sum_runs(const RowCopy& copy, const int64_t* order, ScalarType type, int64_t item) {
  const FloatOps<Acc>* ops = float_ops<Acc>(type);
  const int64_t count = copy.count(), elements = copy.run / std::max<int64_t>(item, 1);
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(elements, 1));
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    alignas(64) Acc sum[kChunk];
    for (int64_t at = begin; at < end; ++at) {
      int64_t rest = at, source = 0, target = 0, index = 0;
      for (int d = static_cast<int>(copy.dims.size()) - 1; d >= 0; --d) {
        const Dim& dim = copy.dims[d];
        const int64_t i = rest % dim.size;
        rest /= dim.size;
        source += i * dim.source, target += i * dim.target, index += i * dim.index;
      }
      const int64_t first = copy.index_at(index), last = copy.index_at(index + 1);
      for (int64_t start = 0; start < elements; start += kChunk) {
        const int64_t n = std::min(kChunk, elements - start);
        std::fill(sum, sum + n, Acc(0));
        for (int64_t j = first; j < last; ++j) {
          const char* from = copy.source + source + order[j] * copy.row_stride + start * item;
          ops->add(sum, from, Acc(1), n);
        }
        ops->store(copy.target + target + start * item, sum, n);
      }
    }
  });
}

void check_range(const Tensor& values, int64_t last, const char* what) {
  const int64_t* at = static_cast<const int64_t*>(values.const_data_ptr());
  for (int64_t i = 0; i < values.numel(); ++i) {
    STD_TORCH_CHECK(at[i] >= 0 && at[i] <= last, what, " ", at[i], " is out of range: expected 0 to ",
                    last);
  }
}

void sum_rows(std::vector<Tensor> targets, std::vector<Tensor> sources, const Tensor order,
              const Tensor offsets, std::vector<int64_t> dims) {
  check_sums(targets, sources, order, offsets, dims);
  if (sources.empty()) return;
  std::vector<RowCopy> copies;  // all are planned and checked before the first is summed
  int64_t rows = INT64_MAX;
  for (size_t i = 0; i < sources.size(); ++i) {
    STD_TORCH_CHECK(float_ops<float>(sources[i].scalar_type()) != nullptr,
                    "rows must be bfloat16, float16, float32 or float64");
    copies.push_back(plan_rows(targets[i], sources[i], offsets, dims[i], false, 1));
    rows = std::min(rows, copies.back().rows);
  }
  check_range(order, rows - 1, "order");
  check_range(offsets, order.numel(), "offsets");
  const int64_t* values = static_cast<const int64_t*>(order.const_data_ptr());
  for (size_t i = 0; i < sources.size(); ++i) {
    const auto type = sources[i].scalar_type();
    const int64_t item = static_cast<int64_t>(sources[i].element_size());
    type == ScalarType::Double ? sum_runs<double>(copies[i], values, type, item)
                               : sum_runs<float>(copies[i], values, type, item);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cp_dispatch, CPU, m) {
  m.impl("merge_partials", TORCH_BOX(&merge_partials));
  m.impl("sum_rows", TORCH_BOX(&sum_rows));
}

}  // namespace cp_dispatch
