// Copies to other GPUs and flags between streams of several GPUs, by copy engines and the streams
// themselves: no kernel, so that attention keeps every SM. Short copies may be one all the same, see
// exchange.h. The protocol is told in cp_dispatch/schedules/mailbox.py.
#include <cuda.h>

#include <algorithm>
#include <vector>

#include "cuda_launch.h"
#include "exchange.h"
#include "rows.h"

namespace cp_dispatch {
namespace {

using BatchMemOp = CUresult (*)(CUstream, unsigned int, CUstreamBatchMemOpParams*, unsigned int);

// The driver's function, without linking to the driver: the module also loads where there is none.
BatchMemOp batch_mem_op() {
  static const BatchMemOp function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &found, 12000,
                                                               cudaEnableDefault, &result);
    STD_TORCH_CHECK(error == cudaSuccess && result == cudaDriverEntryPointSuccess && found,
                    "the CUDA driver has no cuStreamBatchMemOp of CUDA 12");
    return reinterpret_cast<BatchMemOp>(found);
  }();
  return function;
}

// Operations on flags, which a stream does one after the other.
class Flags {
 public:
  // Puts 1 in each flag.
  void raise(Numbers flags) {
    for (const int64_t flag : flags) write(flag, 1);
  }
  // Waits until each flag is 1 and puts 0 there.
  void take(Numbers flags) {
    for (const int64_t flag : flags) {
      CUstreamBatchMemOpParams wait{};
      wait.waitValue = {CU_STREAM_MEM_OP_WAIT_VALUE_32, static_cast<CUdeviceptr>(flag), {1},
                        CU_STREAM_WAIT_VALUE_EQ, 0};
      params_.push_back(wait);
      write(flag, 0);
    }
  }
  void enqueue(cudaStream_t stream) {
    constexpr size_t kMost = 128;  // the driver takes 256 at a time
    for (size_t i = 0; i < params_.size(); i += kMost) {
      const auto count = static_cast<unsigned int>(std::min(params_.size() - i, kMost));
      const CUresult result = batch_mem_op()(stream, count, params_.data() + i, 0);
      STD_TORCH_CHECK(result == CUDA_SUCCESS, "cuStreamBatchMemOp failed with ", int(result));
    }
  }

 private:
  void write(int64_t flag, cuuint32_t value) {
    CUstreamBatchMemOpParams op{};
    op.writeValue = {CU_STREAM_MEM_OP_WRITE_VALUE_32, static_cast<CUdeviceptr>(flag), {value},
                     CU_STREAM_WRITE_VALUE_DEFAULT, 0};
    params_.push_back(op);
  }
  std::vector<CUstreamBatchMemOpParams> params_;
};

void check(cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, "CUDA: ", cudaGetErrorString(error));
}

// Let a stream wait for what is queued in another by now.
void wait_for(cudaStream_t waiting, cudaStream_t other) {
  if (waiting == other) return;
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  const cudaError_t recorded = cudaEventRecord(event, other);
  const cudaError_t waits = cudaStreamWaitEvent(waiting, event, 0);
  cudaEventDestroy(event);
  check(recorded);
  check(waits);
}

// A tensor (B, ...) whose batch rows are contiguous, and its copy.
Slab slab_of(Tensor& target, const Tensor& source) {
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

void copy(const Slab& x, cudaStream_t stream) {
  if (x.rows * x.bytes == 0) return;
  const bool whole = x.into == x.bytes && x.from == x.bytes;
  check(whole ? cudaMemcpyAsync(x.target, x.source, x.rows * x.bytes, cudaMemcpyDeviceToDevice,
                                stream)
              : cudaMemcpy2DAsync(x.target, x.into, x.source, x.from, x.bytes, x.rows,
                                  cudaMemcpyDeviceToDevice, stream));
}

// See cp_dispatch/schedules/mailbox.py for what these do. `here` is a tensor of this GPU, the room
// where copies to it go; `stream` the handle of the one that carries the copies; flags are addresses
// of int32.
constexpr int64_t kCurrent = -1;  // no other stream than the current one
cudaStream_t handle(int64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

bool is_within(const void* place, const Tensor& tensor) {
  const auto start = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const auto at = reinterpret_cast<uintptr_t>(place);
  return at >= start && at < start + tensor.numel() * tensor.element_size();
}

void raise_flags(const Tensor here, std::vector<int64_t> flags, int64_t stream) {
  const Launch launch(here.get_device_index());
  wait_for(handle(stream), launch.stream());
  Flags raised;
  raised.raise(flags);
  raised.enqueue(handle(stream));
}

void push(const std::vector<Slab>& slabs, const Tensor& here, const Signals& signals,
          int64_t stream, bool side_waits) {
  const Launch launch(here.get_device_index());
  if (stream == kCurrent) {
    if (push_by_kernel(slabs, here, signals, launch.stream())) return;
    stream = reinterpret_cast<int64_t>(launch.stream());
  }
  if (side_waits) wait_for(handle(stream), launch.stream());
  Flags before, after;
  before.raise(signals.raise_first);
  before.take(signals.take_first);
  before.enqueue(handle(stream));
  after.raise(signals.raise_then);
  if (!copy_by_kernel(slabs, handle(stream))) {
    // Peers need not wait for copies within this GPU, which are kernels: they start when attention
    // leaves SMs free.
    std::vector<Slab> own;
    for (const Slab& x : slabs) {
      if (is_within(x.target, here)) {
        own.push_back(x);
      } else {
        copy(x, handle(stream));
      }
    }
    if (!own.empty()) {
      after.enqueue(handle(stream));
      after = Flags();
    }
    for (const Slab& x : own) copy(x, handle(stream));
  }
  after.take(signals.take_last);
  after.enqueue(handle(stream));
}

void join_streams(const Tensor here, int64_t stream, bool side_waits) {
  const Launch launch(here.get_device_index());
  if (side_waits) {
    wait_for(handle(stream), launch.stream());
  } else {
    wait_for(launch.stream(), handle(stream));
  }
}

void push_slabs(std::vector<Tensor> targets, std::vector<Tensor> sources, const Tensor here,
                std::vector<int64_t> raise_first, std::vector<int64_t> take_first,
                std::vector<int64_t> raise_then, std::vector<int64_t> take_last, int64_t stream,
                bool side_waits, bool then_wait) {
  STD_TORCH_CHECK(targets.size() == sources.size(), "as many targets as sources");
  std::vector<Slab> slabs;
  slabs.reserve(targets.size());
  for (size_t i = 0; i < targets.size(); ++i) slabs.push_back(slab_of(targets[i], sources[i]));
  push(slabs, here, {raise_first, take_first, raise_then, take_last}, stream, side_waits);
  if (then_wait) join_streams(here, stream, false);
}

// The rows of a source whose batch rows are contiguous.
struct Source {
  const char* start;
  int64_t row, batch, rows, count;
};

// Of (B, ...) with the rows in dim `rows`, ahead of the other dims in memory.
Source source_of(const Tensor& x, int64_t rows) {
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
std::vector<Slab> slabs_of(const Source* sources, int64_t count, Numbers moves) {
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

void push_rows(std::vector<Tensor> sources, const Tensor here, std::vector<int64_t> moves,
               std::vector<int64_t> raise_first, std::vector<int64_t> take_first,
               std::vector<int64_t> raise_then, std::vector<int64_t> take_last, int64_t stream,
               bool side_waits, bool then_wait) {
  std::vector<Source> found;
  found.reserve(sources.size());
  for (const Tensor& x : sources) found.push_back(source_of(x, 1));
  push(slabs_of(found.data(), static_cast<int64_t>(found.size()), moves), here,
       {raise_first, take_first, raise_then, take_last}, stream, side_waits);
  if (then_wait) join_streams(here, stream, false);
}

// push_rows of two sources (B, H, S, D) on the current stream, with all numbers in one int64 tensor of
// the host: how many there are of each kind, and then they. Lists of numbers would cost the host more
// than the kernel's launch.
void push_pair(const Tensor first, const Tensor second, const Tensor here, const Tensor numbers) {
  STD_TORCH_CHECK(numbers.is_cpu() && numbers.is_contiguous() &&
                      numbers.scalar_type() == torch::headeronly::ScalarType::Long &&
                      numbers.numel() >= 5,
                  "numbers must be int64, contiguous and on the host");
  const auto* counts = static_cast<const int64_t*>(numbers.const_data_ptr());
  int64_t left = numbers.numel() - 5;
  const int64_t* next = counts + 5;
  Numbers parts[5];
  for (int i = 0; i < 5; ++i) {
    STD_TORCH_CHECK(counts[i] >= 0 && counts[i] <= left, "fewer numbers than they say");
    parts[i] = {next, counts[i]};
    next += counts[i];
    left -= counts[i];
  }
  const Source sources[] = {source_of(first, 2), source_of(second, 2)};
  push(slabs_of(sources, 2, parts[0]), here, {parts[1], parts[2], parts[3], parts[4]}, kCurrent,
       false);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cp_dispatch, CUDA, m) {
  m.impl("raise_flags", TORCH_BOX(&raise_flags));
  m.impl("push_slabs", TORCH_BOX(&push_slabs));
  m.impl("push_rows", TORCH_BOX(&push_rows));
  m.impl("push_pair", TORCH_BOX(&push_pair));
  m.impl("join_streams", TORCH_BOX(&join_streams));
}

}  // namespace cp_dispatch
