// Devices, streams and events, as the core of torch asks for them. Everything is done when it is called: a stream is a
// number, an event the time at which it was recorded, and only the places where the host would wait are counted.
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "device/state.h"

namespace simcuda {

namespace {

std::atomic<StreamId> streams_made{0};
constexpr StreamId kStreamsInPool = 32;

struct Event {
  double at = 0;
};

}  // namespace

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Device exchangeDevice(Device d) const override {
    Device old = getDevice();
    setDevice(d);
    return old;
  }
  Device getDevice() const override { return cuda(this_device); }
  void setDevice(Device d) const override { set_device(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) this_device = d.index();
  }
  Stream getStream(Device d) const override {
    d = resolve(d);
    return Stream(Stream::UNSAFE, d, this_stream[d.index()]);
  }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, resolve(d)); }
  Stream getNewStream(Device d, int) const override {
    return Stream(Stream::UNSAFE, resolve(d), streams_made++ % kStreamsInPool + 1);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    auto& held = this_stream[s.device_index()];
    Stream old(Stream::UNSAFE, s.device(), held);
    held = s.id();
    return old;
  }
  void* getStreamNativeHandle(const Stream s) const override { return reinterpret_cast<void*>(s.id()); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->at = now_ms();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(settings.devices); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { count_sync("stream.synchronize"); }
  void synchronizeEvent(void*) const override { count_sync("event.synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { count_sync("synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    TORCH_CHECK(a && b, "Both events must be recorded before calculating elapsed time.");
    return static_cast<Event*>(b)->at - static_cast<Event*>(a)->at;
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace simcuda
