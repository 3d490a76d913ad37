#include "device/state.h"

#include <c10/util/Exception.h>

#include <chrono>

namespace simcuda {

Settings settings;
Counters counters;
thread_local DeviceIndex this_device = 0;
thread_local std::array<StreamId, kMaxDevices> this_stream = {};
std::atomic<bool> used[kMaxDevices];

void count_sync(const char* what) {
  counters.syncs++;
  {
    std::lock_guard<std::mutex> lock(counters.mutex);
    counters.syncs_by[what]++;
  }
  TORCH_CHECK(settings.sync_debug != 2, "called a synchronizing CUDA operation");
  if (settings.sync_debug == 1) TORCH_WARN("called a synchronizing CUDA operation");
}

double now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

void check_device(DeviceIndex index) {
  if (index >= 0 && index < settings.devices) return;
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 101,
      "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?");
}

Device resolve(Device d) { return d.has_index() ? d : cuda(this_device); }

void set_device(int index) {
  check_device(static_cast<DeviceIndex>(index));
  this_device = static_cast<DeviceIndex>(index);
}

}  // namespace simcuda
