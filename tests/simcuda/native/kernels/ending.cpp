// A process that ends: autograd's threads have to be done with the last backward by then.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <thread>

#include "device/state.h"
#include "kernels/kernels.h"

namespace simcuda {

// A backward over nothing on each device. A thread of autograd's lets go of one backward before it begins another; this one
// comes from a thread that Python does not know, so that there is nothing of Python's to let go of.
void begin_another_backward() {
  auto begin = [] {
    for (int d = 0; d < settings.devices; d++) {
      auto nothing = at::TensorOptions().device(cuda(d));  // which a full device has room for
      Tensor x = at::empty({0}, nothing);
      x.set_requires_grad(true);
      x.view({0}).backward(at::empty({0}, nothing));
    }
  };
  std::exception_ptr failed;
  std::thread([&] {
    try {
      begin();
    } catch (...) {
      failed = std::current_exception();
    }
  }).join();
  if (failed) std::rethrow_exception(failed);
}

}  // namespace simcuda
