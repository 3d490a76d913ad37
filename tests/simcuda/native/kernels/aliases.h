// Device tensors as the host's kernels take them: over the same memory, with the same sizes and strides.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include "device/state.h"

namespace simcuda {

using at::Tensor;

inline bool is_cuda(const Tensor& t) { return t.defined() && t.device().is_cuda(); }

class Aliases {
 public:
  // The host's tensor over a device tensor's memory; any other tensor is itself, and none is none.
  Tensor of(const Tensor& t);
  Tensor of(const std::optional<Tensor>& t) { return t ? of(*t) : Tensor(); }

  // What the host's kernel resized is resized, in device memory.
  void write_back();

  // A host kernel's output as a device tensor: the argument that it is, a view of the argument that it views, or a copy.
  Tensor back(const Tensor& out, Device device);

 private:
  struct Pair {
    Tensor cuda, cpu;
    void* data;
  };
  c10::SmallVector<Pair, 8> made_;
};

// Below autograd, autocast and Python's modes, as a kernel is.
struct Below {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_more{c10::autocast_dispatch_keyset | c10::python_ks};
};

}  // namespace simcuda
