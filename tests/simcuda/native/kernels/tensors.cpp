// What makes tensors and moves them: nothing here computes.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/DeviceGuard.h>

#include "kernels/aliases.h"
#include "kernels/kernels.h"
#include "device/memory.h"

namespace simcuda {

namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

Device wanted(std::optional<Device> d, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return resolve(d.value_or(cuda(this_device)));
}

// From pageable memory the driver stages the copy and returns; into it, it waits.
void count_copy(const Tensor& host, bool to_device, bool non_blocking) {
  bool waits = !non_blocking || !is_pinned(host.storage().data());
  (to_device ? counters.h2d : counters.d2h)++;
  if (!waits) return;
  (to_device ? counters.h2d_blocking : counters.d2h_blocking)++;
  if (!to_device || !non_blocking) count_sync(to_device ? "copy to the device" : "copy to the host");
}

}  // namespace

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(wanted(device, pin));
  return at::detail::empty_generic(size, allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  c10::DeviceGuard guard(wanted(device, pin));
  return at::detail::empty_strided_generic(size, stride, allocator(), kKeys, c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  if (self.is_same(src)) return self;
  if (!is_cuda(self) && !self.device().is_cpu()) TORCH_CHECK(false, "copy_ to ", self.device());
  bool to = is_cuda(self), from = is_cuda(src);
  if (self.numel()) {
    counters.kernels++;
    if (!to || !from) count_copy(to ? src : self, to, non_blocking);
    else if (self.device() != src.device()) counters.peer++;
  }
  Aliases alias;
  Tensor a = alias.of(self), b = alias.of(src);
  Below below;
  a.copy_(b);
  return self;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  count_sync("aten::_local_scalar_dense");
  Aliases alias;
  Below below;
  return at::_local_scalar_dense(alias.of(self));
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

Tensor& set_storage_whole(Tensor& self, at::Storage source) {
  int64_t n = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {n}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.unsafeGetTensorImpl() == source.unsafeGetTensorImpl()) return self;
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  at::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator(), true);
  return set_storage(self, std::move(storage), 0, {0}, {});
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

void record_stream(Tensor& self, Stream s) { allocator()->recordStream(self.storage().data_ptr(), s); }

}  // namespace simcuda
