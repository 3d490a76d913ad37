#include "kernels/aliases.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

#include "device/memory.h"

namespace simcuda {

using c10::DispatchKey;
using c10::DispatchKeySet;

Tensor Aliases::of(const Tensor& t) {
  if (!is_cuda(t)) return t;
  for (auto& p : made_)
    if (p.cuda.is_same(t)) return p.cpu;
  auto* impl = t.unsafeGetTensorImpl();
  const c10::Storage& held = impl->unsafe_storage();
  c10::Storage storage;
  for (auto& p : made_)
    if (p.cuda.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == held.unsafeGetStorageImpl())
      storage = p.cpu.storage();
  if (!storage)
    storage = c10::Storage(c10::Storage::use_byte_size_t(), held.nbytes(),
                           c10::DataPtr(held.mutable_data(), Device(at::kCPU)), c10::GetAllocator(at::kCPU), true);
  void* data = storage.mutable_data();
  Tensor cpu = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CPU), impl->dtype());
  auto* made = cpu.unsafeGetTensorImpl();
  made->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (impl->is_wrapped_number()) made->set_wrapped_number(true);
  if (t.is_conj()) made->_set_conj(true);
  if (t.is_neg()) made->_set_neg(true);
  made_.push_back({t, cpu, data});
  return cpu;
}

void Aliases::write_back() {
  for (auto& p : made_) {
    bool moved = p.cpu.storage().mutable_data() != p.data;
    if (!moved && p.cpu.sizes() == p.cuda.sizes() && p.cpu.strides() == p.cuda.strides()) continue;
    auto* impl = p.cuda.unsafeGetTensorImpl();
    if (moved) {
      c10::DeviceGuard guard(p.cuda.device());
      size_t n = p.cpu.storage().nbytes();
      auto data = allocator()->allocate(n);
      memcpy(data.mutable_get(), p.cpu.storage().data(), n);
      impl->unsafe_storage().set_data_ptr_noswap(std::move(data));
      impl->unsafe_storage().unsafeGetStorageImpl()->set_nbytes(n);
    }
    impl->set_sizes_and_strides(p.cpu.sizes(), p.cpu.strides(), p.cpu.storage_offset());
  }
}

Tensor Aliases::back(const Tensor& out, Device device) {
  if (!out.defined() || is_cuda(out)) return out;
  for (auto& p : made_)
    if (p.cpu.is_same(out)) return p.cuda;
  for (auto& p : made_) {
    if (p.cpu.storage().unsafeGetStorageImpl() != out.storage().unsafeGetStorageImpl()) continue;
    Tensor view = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(p.cuda.storage()), DispatchKeySet(DispatchKey::CUDA), out.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(out.sizes(), out.strides(), out.storage_offset());
    return view;
  }
  c10::DeviceGuard guard(device);
  Tensor copy = at::detail::empty_strided_generic(
      out.sizes(), out.strides(), allocator(), DispatchKeySet(DispatchKey::CUDA), out.scalar_type());
  if (copy.storage().nbytes()) memcpy(copy.mutable_data_ptr(), out.const_data_ptr(), copy.storage().nbytes());
  return copy;
}

}  // namespace simcuda
