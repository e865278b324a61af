// The sum of several tensors in one pass on CUDA. The twin is cp_dispatch/parts.py.
#include "cuda_floats.h"
#include "cuda_jobs.h"

namespace cp_dispatch {
namespace {

constexpr int kMaxParts = 48;  // as many as fit in a kernel's arguments

struct Sum {
  const void* parts[kMaxParts];
  int64_t at[kMaxParts][3];  // strides in elements, innermost loop of the target first
  void* out;
  int64_t at_out[3];
  Divider size[2];
  int64_t rows;
  int count, dim, columns_log2;
};

template <typename T, typename Out, typename Acc, int N>
__global__ void __launch_bounds__(kThreads) sum_parts_kernel(const __grid_constant__ Sum s) {
  const int columns = 1 << s.columns_log2;
  const int64_t row =
      int64_t{blockIdx.x} * (kThreads >> s.columns_log2) + (threadIdx.x >> s.columns_log2);
  if (row >= s.rows) return;
  const uint32_t n = static_cast<uint32_t>(row);
  const uint32_t q = s.size[0].divide(n), r = s.size[1].divide(q);
  const int64_t i = n - q * s.size[0].divisor, j = q - r * s.size[1].divisor, k = r;
  for (int c = (threadIdx.x & (columns - 1)) * N; c < s.dim; c += columns * N) {
    Acc sum[N] = {};
    for (int p = 0; p < s.count; ++p) {
      const int64_t at = i * s.at[p][0] + j * s.at[p][1] + k * s.at[p][2] + c;
      const Pack<T, N> pack =
          *reinterpret_cast<const Pack<T, N>*>(static_cast<const T*>(s.parts[p]) + at);
#pragma unroll
      for (int e = 0; e < N; ++e) sum[e] += widen<Acc>(pack.values[e]);
    }
    Pack<Out, N> pack;
#pragma unroll
    for (int e = 0; e < N; ++e) pack.values[e] = narrow<Out>(sum[e]);
    const int64_t at = i * s.at_out[0] + j * s.at_out[1] + k * s.at_out[2] + c;
    *reinterpret_cast<Pack<Out, N>*>(static_cast<Out*>(s.out) + at) = pack;
  }
}

bool is_packed(const Tensor& tensor, int n) {
  const int64_t item = static_cast<int64_t>(tensor.element_size());
  const int64_t unit = std::min<int64_t>(16, n * item);
  bool packed = tensor.size(3) % n == 0 &&
                reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % unit == 0;
  for (int d = 0; d < 3; ++d) {
    packed = packed && (tensor.size(d) == 1 || tensor.stride(d) * item % unit == 0);
  }
  return packed;
}

template <typename T, typename Out, typename Acc>
void launch_sum(Sum s, bool packed, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  const int n = packed ? kWide : 1;
  while ((n << s.columns_log2) < s.dim && s.columns_log2 < 5) ++s.columns_log2;
  const int rows = kThreads >> s.columns_log2;
  const auto blocks = static_cast<uint32_t>((s.rows + rows - 1) / rows);
  if (packed) {
    sum_parts_kernel<T, Out, Acc, kWide><<<blocks, kThreads, 0, stream>>>(s);
  } else {
    sum_parts_kernel<T, Out, Acc, 1><<<blocks, kThreads, 0, stream>>>(s);
  }
}

void sum_parts(std::vector<Tensor> parts, Tensor out) {
  const auto count = static_cast<int>(parts.size());
  STD_TORCH_CHECK(count >= 1 && count <= kMaxParts, "expected 1 to ", kMaxParts, " parts, got ",
                  count);
  STD_TORCH_CHECK(out.dim() == 4 && (out.stride(3) == 1 || out.size(3) == 1),
                  "the sum must be (B, H, S, D) with D contiguous");
  const int type = type_number(parts[0]), type_out = type_number(out);
  STD_TORCH_CHECK(type == type_out || (type == 2 && type_out < 2),
                  "parts must have the dtype of the sum, or be float32 for one of 16 bits");
  Sum s{};
  int order[] = {0, 1, 2};
  std::stable_sort(order, order + 3, [&](int x, int y) { return out.stride(x) < out.stride(y); });
  constexpr int kBytes = 16;
  const int n = kBytes / static_cast<int>(parts[0].element_size());
  bool packed = is_packed(out, n);
  for (int p = 0; p < count; ++p) {
    const Tensor& part = parts[p];
    STD_TORCH_CHECK(part.dim() == 4 && type_number(part) == type &&
                        part.get_device_index() == out.get_device_index() && part.is_cuda(),
                    "parts must be alike, (B, H, S, D), on one GPU");
    for (int d = 0; d < 4; ++d) {
      STD_TORCH_CHECK(part.size(d) == out.size(d), "sizes differ in dim ", d);
    }
    STD_TORCH_CHECK(part.stride(3) == 1 || part.size(3) == 1, "D must be contiguous");
    packed = packed && is_packed(part, n);
    s.parts[p] = part.const_data_ptr();
    for (int i = 0; i < 3; ++i) s.at[p][i] = part.stride(order[i]);
  }
  s.out = out.mutable_data_ptr();
  s.count = count, s.dim = static_cast<int>(out.size(3));
  s.rows = out.size(0) * out.size(1) * out.size(2);
  if (s.rows == 0 || s.dim == 0) return;
  STD_TORCH_CHECK(s.rows <= INT32_MAX && out.size(3) <= INT32_MAX / 2,
                  "more rows than a launch has: ", s.rows);
  for (int i = 0; i < 3; ++i) {
    if (i < 2) s.size[i] = Divider(static_cast<uint32_t>(out.size(order[i])));
    s.at_out[i] = out.stride(order[i]);
  }
  const Launch launch(out.get_device_index());
  switch (type) {
    case 0:
      launch_sum<__nv_bfloat16, __nv_bfloat16, float>(s, packed, launch.stream());
      break;
    case 1:
      launch_sum<__half, __half, float>(s, packed, launch.stream());
      break;
    case 2:
      if (type_out == 0) launch_sum<float, __nv_bfloat16, float>(s, packed, launch.stream());
      if (type_out == 1) launch_sum<float, __half, float>(s, packed, launch.stream());
      if (type_out == 2) launch_sum<float, float, float>(s, packed, launch.stream());
      break;
    default:
      launch_sum<double, double, double>(s, packed, launch.stream());
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cp_dispatch, CUDA, m) { m.impl("sum_parts", TORCH_BOX(&sum_parts)); }

}  // namespace cp_dispatch
