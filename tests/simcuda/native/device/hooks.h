#pragma once

namespace simcuda {

// Torch's own hooks, which raise that there is no CUDA, become the device's.
void install_hooks();

}  // namespace simcuda
