// The Python module: what device.py and torch.cuda's own functions ask of the device.
#include "python/bindings.h"

#include <c10/core/Allocator.h>
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>

#include "device/generator.h"
#include "device/hooks.h"
#include "device/memory.h"
#include "device/state.h"
#include "kernels/kernels.h"

namespace py = pybind11;
using namespace simcuda;

namespace {

void configure(int devices, const std::vector<size_t>& capacity, size_t context, size_t workspace, int poison, bool fused) {
  TORCH_CHECK(devices >= 0 && devices <= kMaxDevices, "0 to ", kMaxDevices, " devices");
  settings.devices = devices;
  for (int d = 0; d < devices; d++) settings.capacity[d] = capacity.at(d);
  settings.context = context;
  settings.workspace = workspace;
  settings.poison = poison;
  settings.fused_attention = fused;
}

int exchange_device(int d) {
  int old = this_device;
  if (d < 0) return -1;
  set_device(d);
  return old;
}

py::dict counted() {
  py::dict r;
  r["kernels"] = counters.kernels.load(), r["syncs"] = counters.syncs.load(), r["h2d"] = counters.h2d.load();
  r["h2d_blocking"] = counters.h2d_blocking.load(), r["d2h"] = counters.d2h.load();
  r["d2h_blocking"] = counters.d2h_blocking.load(), r["peer"] = counters.peer.load();
  std::lock_guard<std::mutex> lock(counters.mutex);
  r["syncs_by"] = counters.syncs_by, r["fell_back"] = counters.fell_back;
  return r;
}

void reset_counters() {
  for (auto* c : {&counters.kernels, &counters.syncs, &counters.h2d, &counters.h2d_blocking, &counters.d2h,
                  &counters.d2h_blocking, &counters.peer})
    *c = 0;
  std::lock_guard<std::mutex> lock(counters.mutex);
  counters.syncs_by.clear(), counters.fell_back.clear();
}

}  // namespace

PYBIND11_MODULE(_simcuda, m) {
  c10::SetAllocator(c10::DeviceType::CUDA, allocator(), 1);
  install_hooks();
  install_attention_choice();
  install_staging();

  m.def("configure", &configure);
  m.def("device_count", [] { return settings.devices; });
  m.def("get_device", [] { return int(this_device); });
  m.def("set_device", &set_device);
  m.def("exchange_device", &exchange_device);
  m.def("get_stream", [](int d) { return py::make_tuple(this_stream[d], d, int(c10::DeviceType::CUDA)); });
  m.def("set_stream", [](int64_t id, int d) {
    set_device(d);
    this_stream[d] = id;
  });
  m.def("synchronize", [] { count_sync("synchronize"); });
  m.def("set_sync_debug", [](int mode) { settings.sync_debug = mode; });
  m.def("get_sync_debug", [] { return settings.sync_debug; });
  m.def("default_generator", [](int d) {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(default_generator(static_cast<DeviceIndex>(d))));
  });
  m.def("count_by_operator", [](bool on) { counters.by_operator = on; });
  m.def("counters", &counted);
  m.def("reset_counters", &reset_counters);
  m.def("begin_another_backward", &begin_another_backward, py::call_guard<py::gil_scoped_release>());
  bind_memory(m);
}
