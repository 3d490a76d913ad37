#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace simcuda {

// Any operator of the device that has no kernel of its own: the host's kernel, on aliases of the same memory. Outputs
// that the kernel made itself are copied into device memory, so that the allocator sees them.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace simcuda
