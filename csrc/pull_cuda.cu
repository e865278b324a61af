// What a rank offers, copied to its room, and what it needs of the others' rooms: one call for the
// host, for copies that are the same at every call but for the tensors' addresses.
#include "cuda_jobs.h"
#include "slabs.h"

namespace cp_dispatch {
namespace {

// Reads numbers one after the other.
class Reader {
 public:
  explicit Reader(Numbers numbers) : at_(numbers.begin()), end_(numbers.end()) {}
  bool is_done() const { return at_ == end_; }
  int64_t next() {
    STD_TORCH_CHECK(at_ != end_, "fewer numbers than a copy has");
    return *at_++;
  }

 private:
  const int64_t *at_, *end_;
};

char* place(std::vector<Tensor>& tensors, Reader& numbers) {
  const int64_t index = numbers.next(), offset = numbers.next();
  STD_TORCH_CHECK(index >= 0 && index < static_cast<int64_t>(tensors.size()), "no such tensor");
  return static_cast<char*>(tensors[index].mutable_data_ptr()) + offset;
}

// A copy's numbers: tensor and bytes into it where it goes, the same where it comes from, the bytes
// of an item, how many dims, and for each of them its size and the bytes between its steps, there and
// here.
struct Copy {
  Copy(std::vector<Tensor>& tensors, Reader& numbers)
      : target(place(tensors, numbers)), source(place(tensors, numbers)), item(numbers.next()) {
    const int64_t count = numbers.next();
    for (int64_t d = 0; d < count; ++d) {
      const int64_t size = numbers.next(), into = numbers.next(), from = numbers.next();
      dims.push_back({size, from, into, 0});
    }
  }
  char* target;
  const char* source;
  int64_t item;
  std::vector<Dim> dims;
};

RowCopy rows_of(Copy copy) {
  RowCopy rows;
  rows.source = copy.source;
  rows.target = copy.target;
  return arranged(std::move(rows), std::move(copy.dims), copy.item);
}

Slab slab_of(const Copy& copy) {
  int64_t bytes = copy.item;
  for (size_t d = copy.dims.size(); d-- > 1;) {
    const Dim& dim = copy.dims[d];
    STD_TORCH_CHECK(dim.size == 1 || (dim.target == bytes && dim.source == bytes),
                    "a row must be contiguous");
    bytes *= dim.size;
  }
  const Dim rows = copy.dims.empty() ? Dim{1, bytes, bytes, 0} : copy.dims[0];
  const bool one = rows.size == 1;
  return {copy.target, copy.source, one ? bytes : rows.target, one ? bytes : rows.source, bytes,
          rows.size};
}

void copy_and_pull(std::vector<Tensor> tensors, const Tensor here, const Tensor numbers) {
  const auto lists = lists_of<6>(numbers);
  std::vector<RowCopy> copies;
  for (Reader own(lists[0]); !own.is_done();) copies.push_back(rows_of(Copy(tensors, own)));
  std::vector<Slab> slabs;
  for (Reader others(lists[1]); !others.is_done();) {
    slabs.push_back(slab_of(Copy(tensors, others)));
  }
  const Launch launch(here.get_device_index());
  copy_all(copies, launch.stream());
  push(slabs, here, {lists[2], lists[3], lists[4], lists[5]}, kCurrent, false);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cp_dispatch, CUDA, m) {
  m.impl("copy_and_pull", TORCH_BOX(&copy_and_pull));
}

}  // namespace cp_dispatch
