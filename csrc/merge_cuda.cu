// The merge of partial attention outputs on CUDA. The twin is cp_dispatch/native/merge.py.
#include "cuda_floats.h"
#include "cuda_jobs.h"

namespace cp_dispatch {
namespace {

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm1p(float x) { return log1pf(x); }
__device__ __forceinline__ double logarithm1p(double x) { return log1p(x); }

// The three tensors (B, H, S, D) of a merge and their logsumexps (B, H, S), in elements. Loops
// are ordered as the target lies in memory, innermost first.
struct Merge {
  const void *a, *b;
  void* out;
  const void *lse_a, *lse_b;
  void* lse;
  Divider size[2];  // of the two inner loops
  int64_t at_a[3], at_b[3], at_out[3], at_lse_a[3], at_lse_b[3], at_lse[3];
  int64_t rows;
  int64_t column_a, column_b, column_out;
  int dim, columns_log2, type_a, type_b, type_out;
};

struct Place {
  int64_t i[3];
  __device__ __forceinline__ int64_t in(const int64_t (&strides)[3]) const {
    return i[0] * strides[0] + i[1] * strides[1] + i[2] * strides[2];
  }
};

__device__ __forceinline__ Place place(const Merge& m, int64_t row) {
  const uint32_t n = static_cast<uint32_t>(row);
  const uint32_t q = m.size[0].divide(n), r = m.size[1].divide(q);
  return {n - q * m.size[0].divisor, q - r * m.size[1].divisor, r};
}

template <typename Acc>
struct Weights {
  Acc a, b, lse;
  bool empty_a, empty_b;

  __device__ __forceinline__ Weights(Acc x, Acc y) {
    const Acc difference = x == y ? Acc(0) : y - x;  // inf - inf would be NaN
    const Acc e = exponential(-fabs(difference));
    const Acc large = 1 / (1 + e), small = e / (1 + e);
    a = difference > 0 ? small : large;
    b = difference > 0 ? large : small;
    lse = (x > y ? x : y) + logarithm1p(e);
    const Acc nothing = -INFINITY;
    empty_a = x == nothing;
    empty_b = y == nothing;
  }
  __device__ __forceinline__ Acc of(Acc x, Acc y) const {
    const Acc part_a = empty_a ? Acc(0) : a * x;
    return part_a + (empty_b ? Acc(0) : b * y);
  }
};

constexpr int kMergeRows = 2;  // rows in flight for each thread

// Lanes of one warp share a row, so that all have read its logsumexp before one overwrites it.
template <typename A, typename B, typename Out, int N>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ Merge m) {
  const int columns = 1 << m.columns_log2;
  const int column = threadIdx.x & (columns - 1);
  const int step = kThreads >> m.columns_log2;
  const int64_t first = int64_t{blockIdx.x} * step * kMergeRows + (threadIdx.x >> m.columns_log2);

  Place at[kMergeRows];
  float x[kMergeRows], y[kMergeRows];
  bool inside[kMergeRows];
#pragma unroll
  for (int k = 0; k < kMergeRows; ++k) {
    const int64_t row = first + k * step;
    inside[k] = row < m.rows;
    at[k] = place(m, inside[k] ? row : 0);
    x[k] = static_cast<const float*>(m.lse_a)[at[k].in(m.at_lse_a)];
    y[k] = static_cast<const float*>(m.lse_b)[at[k].in(m.at_lse_b)];
  }
  __syncwarp();
  for (int c = column * N; c < m.dim; c += columns * N) {
    Pack<A, N> a[kMergeRows];
    Pack<B, N> b[kMergeRows];
#pragma unroll
    for (int k = 0; k < kMergeRows; ++k) {
      a[k] = *reinterpret_cast<const Pack<A, N>*>(static_cast<const A*>(m.a) +
                                                  at[k].in(m.at_a) + c);
      b[k] = *reinterpret_cast<const Pack<B, N>*>(static_cast<const B*>(m.b) +
                                                  at[k].in(m.at_b) + c);
    }
#pragma unroll
    for (int k = 0; k < kMergeRows; ++k) {
      const Weights<float> weights(x[k], y[k]);
      Pack<Out, N> out;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        out.values[j] = narrow<Out>(
            weights.of(widen<float>(a[k].values[j]), widen<float>(b[k].values[j])));
      }
      if (inside[k]) {
        *reinterpret_cast<Pack<Out, N>*>(static_cast<Out*>(m.out) + at[k].in(m.at_out) + c) = out;
      }
    }
  }
  if (column != 0) return;
#pragma unroll
  for (int k = 0; k < kMergeRows; ++k) {
    if (inside[k]) {
      static_cast<float*>(m.lse)[at[k].in(m.at_lse)] = Weights<float>(x[k], y[k]).lse;
    }
  }
}

template <typename Acc>
__device__ __forceinline__ Acc load(const void* data, int64_t at, int type) {
  switch (type) {
    case 0: return widen<Acc>(static_cast<const __nv_bfloat16*>(data)[at]);
    case 1: return widen<Acc>(static_cast<const __half*>(data)[at]);
    case 2: return widen<Acc>(static_cast<const float*>(data)[at]);
    default: return widen<Acc>(static_cast<const double*>(data)[at]);
  }
}
template <typename Acc>
__device__ __forceinline__ void store(void* data, int64_t at, int type, Acc x) {
  switch (type) {
    case 0: static_cast<__nv_bfloat16*>(data)[at] = narrow<__nv_bfloat16>(x); break;
    case 1: static_cast<__half*>(data)[at] = narrow<__half>(x); break;
    case 2: static_cast<float*>(data)[at] = narrow<float>(x); break;
    default: static_cast<double*>(data)[at] = narrow<double>(x); break;
  }
}

// Any dtypes, any strides: one warp for a row, one element at a time.
template <typename Acc>
__global__ void __launch_bounds__(kThreads) merge_any_kernel(const __grid_constant__ Merge m) {
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (row >= m.rows) return;
  const Place at = place(m, row);
  const Acc x = static_cast<const Acc*>(m.lse_a)[at.in(m.at_lse_a)];
  const Acc y = static_cast<const Acc*>(m.lse_b)[at.in(m.at_lse_b)];
  __syncwarp();
  const Weights<Acc> weights(x, y);
  for (int c = lane; c < m.dim; c += 32) {
    const Acc a = load<Acc>(m.a, at.in(m.at_a) + c * m.column_a, m.type_a);
    const Acc b = load<Acc>(m.b, at.in(m.at_b) + c * m.column_b, m.type_b);
    store<Acc>(m.out, at.in(m.at_out) + c * m.column_out, m.type_out, weights.of(a, b));
  }
  if (lane == 0) static_cast<Acc*>(m.lse)[at.in(m.at_lse)] = weights.lse;
}

// Whether every run of n elements along D starts at a multiple of 16 bytes, or of its own size.
bool is_packed(const Tensor& tensor, int n) {
  const int64_t item = static_cast<int64_t>(tensor.element_size());
  const int64_t unit = std::min<int64_t>(16, n * item);
  bool packed = tensor.size(3) % n == 0 && (tensor.stride(3) == 1 || tensor.size(3) == 1) &&
                reinterpret_cast<uintptr_t>(tensor.data_ptr()) % unit == 0;
  for (int d = 0; d < 3; ++d) {
    packed = packed && (tensor.size(d) == 1 || tensor.stride(d) * item % unit == 0);
  }
  return packed;
}

template <typename A, typename B, typename Out>
void launch_merge(Merge m, int n, cudaStream_t stream) {
  m.columns_log2 = 0;
  while ((n << m.columns_log2) < m.dim && m.columns_log2 < 5) ++m.columns_log2;
  const int64_t rows = (kThreads >> m.columns_log2) * kMergeRows;
  const auto blocks = static_cast<uint32_t>((m.rows + rows - 1) / rows);
  if constexpr (sizeof(A) == 4 && sizeof(B) == 4 && sizeof(Out) == 4) {
    merge_kernel<A, B, Out, 4><<<blocks, kThreads, 0, stream>>>(m);
  } else {
    merge_kernel<A, B, Out, 8><<<blocks, kThreads, 0, stream>>>(m);
  }
}

// The kernel for this choice of float32 or one 16-bit dtype for each tensor; false if there is none.
template <typename Narrow>
bool launch_narrow(const Merge& m, int number, int n, cudaStream_t stream) {
  for (int type : {m.type_a, m.type_b, m.type_out}) {
    if (type != number && type != 2) return false;
  }
  const int kind = (m.type_a == 2) * 4 + (m.type_b == 2) * 2 + (m.type_out == 2);
  switch (kind) {
    case 0: launch_merge<Narrow, Narrow, Narrow>(m, n, stream); break;
    case 1: launch_merge<Narrow, Narrow, float>(m, n, stream); break;
    case 2: launch_merge<Narrow, float, Narrow>(m, n, stream); break;
    case 3: launch_merge<Narrow, float, float>(m, n, stream); break;
    case 4: launch_merge<float, Narrow, Narrow>(m, n, stream); break;
    case 5: launch_merge<float, Narrow, float>(m, n, stream); break;
    case 6: launch_merge<float, float, Narrow>(m, n, stream); break;
    default: launch_merge<float, float, float>(m, n, stream); break;
  }
  return true;
}

void check_side(const Tensor& out, const Tensor& x, const Tensor& lse) {
  STD_TORCH_CHECK(x.dim() == 4 && lse.dim() == 3,
                  "outputs must be (B, H, S, D), logsumexps (B, H, S)");
  for (int d = 0; d < 4; ++d) {
    STD_TORCH_CHECK(x.size(d) == out.size(d) && (d == 3 || lse.size(d) == out.size(d)),
                    "outputs and logsumexps must agree in dim ", d);
  }
  STD_TORCH_CHECK(x.get_device_index() == out.get_device_index() && x.is_cuda() &&
                      lse.get_device_index() == out.get_device_index() && lse.is_cuda(),
                  "all tensors must be on one device");
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
  Merge m{};
  m.a = out_a.const_data_ptr(), m.b = out_b.const_data_ptr(), m.out = out.mutable_data_ptr();
  m.lse_a = lse_a.const_data_ptr(), m.lse_b = lse_b.const_data_ptr();
  m.lse = lse.mutable_data_ptr();
  m.type_a = type_number(out_a), m.type_b = type_number(out_b), m.type_out = type_number(out);
  m.column_a = out_a.stride(3), m.column_b = out_b.stride(3), m.column_out = out.stride(3);
  m.dim = static_cast<int>(out.size(3));
  m.rows = out.size(0) * out.size(1) * out.size(2);
  if (m.rows == 0) return;
  STD_TORCH_CHECK(m.rows <= INT32_MAX && out.size(3) <= INT32_MAX / 2,
                  "more rows than a launch has: ", m.rows);
  int order[] = {0, 1, 2};  // innermost first, as the target lies in memory
  std::stable_sort(order, order + 3, [&](int x, int y) { return out.stride(x) < out.stride(y); });
  for (int i = 0; i < 3; ++i) {
    const int d = order[i];
    if (i < 2) m.size[i] = Divider(static_cast<uint32_t>(out.size(d)));
    m.at_a[i] = out_a.stride(d), m.at_b[i] = out_b.stride(d), m.at_out[i] = out.stride(d);
    m.at_lse_a[i] = lse_a.stride(d), m.at_lse_b[i] = lse_b.stride(d);
    m.at_lse[i] = lse.stride(d);
  }
  const Launch launch(out.get_device_index());
  const bool all_float = m.type_a == 2 && m.type_b == 2 && m.type_out == 2;
  const int n = all_float ? 4 : 8;
  const bool packed = is_packed(out_a, n) && is_packed(out_b, n) && is_packed(out, n);
  if (!(packed && type == ScalarType::Float &&
        (launch_narrow<__nv_bfloat16>(m, 0, n, launch.stream()) ||
         launch_narrow<__half>(m, 1, n, launch.stream())))) {
    const auto blocks = static_cast<uint32_t>((m.rows + kThreads / 32 - 1) / (kThreads / 32));
    type == ScalarType::Float
        ? merge_any_kernel<float><<<blocks, kThreads, 0, launch.stream()>>>(m)
        : merge_any_kernel<double><<<blocks, kThreads, 0, launch.stream()>>>(m);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cp_dispatch, CUDA, m) {
  m.impl("merge_partials", TORCH_BOX(&merge_partials));
}

}  // namespace cp_dispatch
