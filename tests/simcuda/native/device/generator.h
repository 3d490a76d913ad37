// The device's random numbers. A generator is a seed and an offset, 16 bytes, as Philox' on CUDA; what an operator
// draws comes from a generator of the host that is seeded by both. Not the numbers that a GPU would draw.
#pragma once

#include <ATen/core/Generator.h>

#include <mutex>

#include "device/state.h"

namespace simcuda {

const at::Generator& default_generator(DeviceIndex d);
at::Generator new_generator(DeviceIndex d);

// A generator of the host for one operator; the device's moves on.
at::Generator drawn_from(const at::Generator& device);

// While it stands, the host's default generator is one drawn from a device's.
class Draws {
 public:
  explicit Draws(DeviceIndex d);
  ~Draws();

 private:
  std::unique_lock<std::mutex> lock_;
  at::Generator held_;
};

}  // namespace simcuda
