// The sum of several tensors in one pass on CUDA. The twin is cp_dispatch/native/parts.py.
#include "cuda_floats.h"
#include "cuda_jobs.h"

namespace cp_dispatch {
namespace {

// Kernels' arguments hold so many parts of one sum, or of each of several sums.
constexpr int kMaxParts = 48, kFewParts = 8, kMaxSums = 8;

template <int kParts>
struct Sum {
  const void* parts[kParts];
  int64_t at[kParts][3];  // strides in elements, innermost loop of the target first
  void* out;
  int64_t at_out[3];
  Divider size[2];
  int64_t rows;
  int count, dim, columns_log2;
};

template <int kParts, int kSums>
struct Sums {
  Sum<kParts> sums[kSums];
};

// A sum for each row of blocks.
template <typename T, typename Out, typename Acc, int N, int kParts, int kSums>
__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(const __grid_constant__ Sums<kParts, kSums> all) {
  const Sum<kParts>& s = all.sums[blockIdx.y];
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

// Which kernel a sum takes.
struct Kind {
  int type, type_out;
  bool packed;
  bool operator==(const Kind& other) const {
    return type == other.type && type_out == other.type_out && packed == other.packed;
  }
};

template <typename T, typename Out, typename Acc, int kParts, int kSums>
void launch_typed(Sums<kParts, kSums> all, int count, bool packed, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  const int n = packed ? kWide : 1;
  int64_t blocks = 1;
  for (int i = 0; i < count; ++i) {
    auto& s = all.sums[i];
    while ((n << s.columns_log2) < s.dim && s.columns_log2 < 5) ++s.columns_log2;
    const int rows = kThreads >> s.columns_log2;
    blocks = std::max(blocks, (s.rows + rows - 1) / rows);
  }
  const dim3 grid(static_cast<uint32_t>(blocks), static_cast<uint32_t>(count));
  if (packed) {
    sum_parts_kernel<T, Out, Acc, kWide, kParts, kSums><<<grid, kThreads, 0, stream>>>(all);
  } else {
    sum_parts_kernel<T, Out, Acc, 1, kParts, kSums><<<grid, kThreads, 0, stream>>>(all);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <int kParts, int kSums>
void launch(const Sums<kParts, kSums>& all, int count, const Kind& kind, cudaStream_t stream) {
  const auto with = [&](auto in, auto out, auto acc) {
    launch_typed<decltype(in), decltype(out), decltype(acc)>(all, count, kind.packed, stream);
  };
  const __nv_bfloat16 bfloat{};
  const __half half{};
  switch (kind.type) {
    case 0:
      if (kind.type_out == 0) with(bfloat, bfloat, 0.0f);
      if (kind.type_out == 2) with(bfloat, 0.0f, 0.0f);
      break;
    case 1:
      if (kind.type_out == 1) with(half, half, 0.0f);
      if (kind.type_out == 2) with(half, 0.0f, 0.0f);
      break;
    case 2:
      if (kind.type_out == 0) with(0.0f, bfloat, 0.0f);
      if (kind.type_out == 1) with(0.0f, half, 0.0f);
      if (kind.type_out == 2) with(0.0f, 0.0f, 0.0f);
      break;
    default:
      with(0.0, 0.0, 0.0);
  }
}

// Of a piece of a sum: its rows of the target, and for each part which tensor and its first row.
struct Piece {
  int64_t first, rows, count;
  const int64_t* parts;
};

// A sum, and which kernel it takes; no rows where there is nothing to write.
Sum<kMaxParts> sum_of(const std::vector<Tensor>& parts, const Piece& piece, Tensor& out,
                      Kind& kind) {
  STD_TORCH_CHECK(piece.count <= kMaxParts, "expected up to ", kMaxParts, " parts, got ",
                  piece.count);
  STD_TORCH_CHECK(piece.first >= 0 && piece.rows >= 0 && piece.first + piece.rows <= out.size(2),
                  "rows that the sum does not have");
  const int type_out = type_number(out);
  const int type = piece.count ? type_number(parts[piece.parts[0]]) : type_out;
  STD_TORCH_CHECK(type == type_out || (type == 2 && type_out < 2) || (type < 2 && type_out == 2),
                  "parts must have the dtype of the sum, or of both one be float32, the other of "
                  "16 bits");
  Sum<kMaxParts> s{};
  int order[] = {0, 1, 2};
  std::stable_sort(order, order + 3, [&](int x, int y) { return out.stride(x) < out.stride(y); });
  const auto item_out = static_cast<int64_t>(out.element_size());
  constexpr int kBytes = 16;
  const auto item = piece.count
                        ? static_cast<int64_t>(parts[piece.parts[0]].element_size())
                        : item_out;
  const int n = kBytes / static_cast<int>(item);
  bool packed = is_packed(out, n);
  for (int p = 0; p < piece.count; ++p) {
    const int64_t first = piece.parts[2 * p + 1];
    const Tensor& part = parts[piece.parts[2 * p]];
    STD_TORCH_CHECK(part.dim() == 4 && type_number(part) == type &&
                        part.get_device_index() == out.get_device_index() && part.is_cuda(),
                    "parts must be alike, (B, H, S, D), on one GPU");
    for (const int d : {0, 1, 3}) {
      STD_TORCH_CHECK(part.size(d) == out.size(d), "sizes differ in dim ", d);
    }
    STD_TORCH_CHECK(first >= 0 && first + piece.rows <= part.size(2),
                    "sizes differ in dim 2: rows that a part does not have");
    STD_TORCH_CHECK(part.stride(3) == 1 || part.size(3) == 1, "D must be contiguous");
    packed = packed && is_packed(part, n);
    s.parts[p] = static_cast<const char*>(part.const_data_ptr()) + first * part.stride(2) * item;
    for (int i = 0; i < 3; ++i) s.at[p][i] = part.stride(order[i]);
  }
  s.out = static_cast<char*>(out.mutable_data_ptr()) + piece.first * out.stride(2) * item_out;
  s.count = static_cast<int>(piece.count), s.dim = static_cast<int>(out.size(3));
  s.rows = out.size(0) * out.size(1) * piece.rows;
  if (s.rows == 0 || s.dim == 0) return s;
  STD_TORCH_CHECK(s.rows <= INT32_MAX && out.size(3) <= INT32_MAX / 2,
                  "more rows than a launch has: ", s.rows);
  for (int i = 0; i < 3; ++i) {
    const int64_t size = order[i] == 2 ? piece.rows : out.size(order[i]);
    if (i < 2) s.size[i] = Divider(static_cast<uint32_t>(size));
    s.at_out[i] = out.stride(order[i]);
  }
  kind = {type, type_out, packed};
  return s;
}

Sum<kFewParts> with_few_parts(const Sum<kMaxParts>& sum) {
  Sum<kFewParts> few{};
  std::copy_n(sum.parts, sum.count, few.parts);
  for (int p = 0; p < sum.count; ++p) std::copy_n(sum.at[p], 3, few.at[p]);
  few.out = sum.out;
  std::copy_n(sum.at_out, 3, few.at_out);
  std::copy_n(sum.size, 2, few.size);
  few.rows = sum.rows, few.count = sum.count, few.dim = sum.dim;
  return few;
}

// Sums of few parts, as many of a kind as a launch takes.
class Batch {
 public:
  explicit Batch(cudaStream_t stream) : stream_(stream) {}
  void add(const Sum<kMaxParts>& sum, const Kind& kind) {
    if (sum.rows == 0 || sum.dim == 0) return;
    if (sum.count > kFewParts) {
      Sums<kMaxParts, 1> alone{};
      alone.sums[0] = sum;
      launch(alone, 1, kind, stream_);
      return;
    }
    if (count_ == kMaxSums || (count_ > 0 && !(kind == kind_))) flush();
    kind_ = kind;
    sums_.sums[count_++] = with_few_parts(sum);
  }
  void flush() {
    if (count_ > 0) launch(sums_, count_, kind_, stream_);
    count_ = 0;
  }

 private:
  cudaStream_t stream_;
  Sums<kFewParts, kMaxSums> sums_{};
  int count_ = 0;
  Kind kind_{};
};

// `pieces` holds for each of them: target, first row, rows, number of parts, and for each part
// which one and its first row.
void sum_parts(std::vector<Tensor> parts, std::vector<int64_t> pieces, std::vector<Tensor> outs) {
  if (outs.empty()) return;
  for (const Tensor& out : outs) {
    STD_TORCH_CHECK(out.is_cuda() && out.get_device_index() == outs[0].get_device_index() &&
                        out.dim() == 4 && (out.stride(3) == 1 || out.size(3) == 1),
                    "the sums must be (B, H, S, D) with D contiguous, on one GPU");
  }
  const Launch launch(outs[0].get_device_index());
  Batch batch(launch.stream());
  for (size_t at = 0; at < pieces.size();) {
    STD_TORCH_CHECK(at + 4 <= pieces.size() && pieces[at + 3] >= 0 &&
                        at + 4 + 2 * static_cast<size_t>(pieces[at + 3]) <= pieces.size(),
                    "pieces end too early");
    const Piece piece{pieces[at + 1], pieces[at + 2], pieces[at + 3], pieces.data() + at + 4};
    for (int64_t p = 0; p < piece.count; ++p) {
      STD_TORCH_CHECK(piece.parts[2 * p] >= 0 &&
                          piece.parts[2 * p] < static_cast<int64_t>(parts.size()),
                      "no such part");
    }
    STD_TORCH_CHECK(pieces[at] >= 0 && pieces[at] < static_cast<int64_t>(outs.size()),
                    "no such sum");
    Kind kind{};
    const Sum<kMaxParts> sum = sum_of(parts, piece, outs[pieces[at]], kind);
    batch.add(sum, kind);
    at += 4 + 2 * static_cast<size_t>(piece.count);
  }
  batch.flush();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cp_dispatch, CUDA, m) { m.impl("sum_parts", TORCH_BOX(&sum_parts)); }

}  // namespace cp_dispatch
