// The CUDA hooks: what the CPU build asks of a library that it does not have.
#include "device/hooks.h"

#include <ATen/detail/CUDAHooksInterface.h>

#include <cstring>

#include "device/generator.h"
#include "device/memory.h"

namespace simcuda {

namespace {

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return settings.devices > 0; }
  bool hasPrimaryContext(DeviceIndex d) const override { return used[d]; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(settings.devices); }
  void setCurrentDevice(DeviceIndex d) const override { set_device(d); }
  DeviceIndex getCurrentDevice() const override { return this_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    DeviceIndex old = this_device;
    if (d >= 0) set_device(d);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return allocator(); }
  Device getDeviceFromPtr(void* p) const override { return device_of(p); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return new_generator(d); }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  DeviceIndex current_device() const override { return this_device; }
  int getNumGPUs() const override { return settings.devices; }
  long versionCUDART() const override { return 12080; }
  std::string showConfig() const override { return "simulated CUDA in host memory\n"; }
  void deviceSynchronize(DeviceIndex) const override { count_sync("synchronize"); }
};

}  // namespace

// Registering a class in CUDAHooksRegistry comes too late: torch._C asks for the hooks while it is imported, and the
// object that is made then stays. It has no members, and neither has ours, so it is made into one of ours.
void install_hooks() {
  auto& stub = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  static_assert(sizeof(Hooks) == sizeof(void*));
  static Hooks* ours = new Hooks;
  std::memcpy(static_cast<void*>(&stub), static_cast<void*>(ours), sizeof(void*));
}

}  // namespace simcuda
