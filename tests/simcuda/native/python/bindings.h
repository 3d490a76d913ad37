#pragma once

#include <pybind11/pybind11.h>

namespace simcuda {

// What torch.cuda.memory asks: statistics, snapshots, limits.
void bind_memory(pybind11::module_& m);

}  // namespace simcuda
