#include <c10/core/AllocatorConfig.h>
#include <pybind11/stl.h>

#include "python/bindings.h"
#include "device/heap.h"
#include "device/memory.h"

namespace simcuda {

namespace py = pybind11;
using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;

namespace {

py::dict one_stat(const Stat& s) {
  py::dict d;
  d["current"] = s.current, d["peak"] = s.peak, d["allocated"] = s.allocated, d["freed"] = s.freed;
  return d;
}

py::dict stat_array(const StatArray& a) {
  py::dict d;
  d["all"] = one_stat(a[0]), d["small_pool"] = one_stat(a[1]), d["large_pool"] = one_stat(a[2]);
  return d;
}

int64_t max_split_size() { return Config::max_split_size() == SIZE_MAX ? -1 : int64_t(Config::max_split_size()); }

py::dict memory_stats(int device) {
  auto s = allocator()->getDeviceStats(static_cast<DeviceIndex>(device));
  py::dict r;
  r["num_alloc_retries"] = s.num_alloc_retries, r["num_ooms"] = s.num_ooms, r["max_split_size"] = max_split_size();
  r["num_sync_all_streams"] = s.num_sync_all_streams, r["num_device_alloc"] = s.num_device_alloc;
  r["num_device_free"] = s.num_device_free;
  r["allocation"] = stat_array(s.allocation), r["segment"] = stat_array(s.segment), r["active"] = stat_array(s.active);
  r["inactive_split"] = stat_array(s.inactive_split), r["allocated_bytes"] = stat_array(s.allocated_bytes);
  r["reserved_bytes"] = stat_array(s.reserved_bytes), r["active_bytes"] = stat_array(s.active_bytes);
  r["inactive_split_bytes"] = stat_array(s.inactive_split_bytes), r["requested_bytes"] = stat_array(s.requested_bytes);
  r["oversize_allocations"] = one_stat(s.oversize_allocations), r["oversize_segments"] = one_stat(s.oversize_segments);
  return r;
}

const char* in_torchs_words(State state) {
  return state == State::Live ? "active_allocated" : state == State::Pending ? "active_pending_free" : "inactive";
}

// Blocks in a row, as far as memory is behind them.
py::dict segment(const Heap& heap, Block* first, Block* end) {
  py::list blocks;
  size_t total = 0, taken = 0, active = 0, asked = 0;
  for (Block* b = first; b != end; b = b->next) {
    bool used = b->state != State::Free;
    py::dict block;
    block["address"] = reinterpret_cast<size_t>(b->ptr), block["size"] = b->size;
    block["requested_size"] = used ? b->requested : 0, block["state"] = in_torchs_words(b->state);
    block["frames"] = py::list();
    blocks.append(block);
    total += b->size, taken += b->state == State::Live ? b->size : 0;
    active += used ? b->size : 0, asked += used ? b->requested : 0;
  }
  py::dict one;
  one["device"] = int(heap.device), one["address"] = reinterpret_cast<size_t>(first->ptr), one["total_size"] = total;
  one["allocated_size"] = taken, one["active_size"] = active, one["requested_size"] = asked;
  one["stream"] = first->stream, one["segment_type"] = first->pool->small ? "small" : "large";
  one["segment_pool_id"] = py::make_tuple(0, 0), one["is_expandable"] = first->reservation != nullptr;
  one["frames"] = py::list(), one["blocks"] = blocks;
  return one;
}

void add_segments(const Heap& heap, py::list& all) {
  for (auto [p, head] : heap.heads) {
    for (Block* b = head; b;) {
      Block* end = b;
      while (end && end->state != State::Unmapped) end = end->next;
      if (end != b) all.append(segment(heap, b, end));
      b = end ? end->next : nullptr;
    }
  }
}

py::list history(const Heap& heap) {
  py::list trace;
  for (auto& e : heap.history.entries) {
    py::dict one;
    one["action"] = e.action, one["size"] = e.size, one["stream"] = e.stream, one["time_us"] = e.time_us;
    one[std::string(e.action) == "oom" ? "device_free" : "addr"] = e.address;
    one["frames"] = py::list(), one["pool_id"] = py::make_tuple(0, 0);
    trace.append(one);
  }
  return trace;
}

py::dict allocator_settings() {
  py::dict divisions, r;
  for (int i = 0; i < 16; i++) divisions[py::str(std::to_string(1 << i))] = Config::roundup_power2_divisions()[i];
  r["PYTORCH_CUDA_ALLOC_CONF"] = Config::last_allocator_settings(), r["max_split_size"] = max_split_size();
  r["garbage_collection_threshold"] = Config::garbage_collection_threshold();
  r["expandable_segments"] = Config::use_expandable_segments(), r["pinned_num_register_threads"] = 1;
  r["release_lock_on_malloc"] = false, r["pinned_use_host_register"] = false, r["roundup_power2_divisions"] = divisions;
  return r;
}

py::dict snapshot() {
  py::list segments, traces;
  for (int d = 0; d < settings.devices; d++) {
    std::lock_guard<std::recursive_mutex> lock(heap(d).mutex);
    add_segments(heap(d), segments);
    traces.append(history(heap(d)));
  }
  py::dict r;
  r["segments"] = segments, r["device_traces"] = traces, r["allocator_settings"] = allocator_settings();
  r["external_annotations"] = py::list();
  return r;
}

void record_history(bool on, size_t most, bool clear) {
  History::recording = on;
  History::most = most;
  for (int d = 0; clear && d < settings.devices; d++) heap(d).history.entries.clear();
}

}  // namespace

void bind_memory(py::module_& m) {
  m.def("capacity", [](int d) { return settings.capacity[d]; });
  m.def("set_capacity", [](int d, size_t n) { settings.capacity[d] = n; });
  m.def("set_others", [](int d, size_t n) { settings.others[d] = n; });
  m.def("fail_in", [](int d, int64_t n) { heap(d).fail_in = n; });
  m.def("memory_stats", &memory_stats);
  m.def("reset_peak", [](int d) { allocator()->resetPeakStats(static_cast<DeviceIndex>(d)); });
  m.def("reset_accumulated", [](int d) { allocator()->resetAccumulatedStats(static_cast<DeviceIndex>(d)); });
  m.def("empty_cache", [] { allocator()->emptyCache({0, 0}); });
  m.def("memory_info", [](int d) { return allocator()->getMemoryInfo(static_cast<DeviceIndex>(d)); });
  m.def("set_fraction", [](double fraction, int d) { heap(d).fraction = fraction; });
  m.def("get_fraction", [](int d) { return heap(d).fraction; });
  m.def("record_history", &record_history);
  m.def("snapshot", &snapshot);
  m.def("raw_allocate", [](size_t n, int d, int64_t stream) { return reinterpret_cast<size_t>(raw_allocate(n, d, stream)); });
  m.def("raw_free", [](size_t p) { raw_free(reinterpret_cast<void*>(p)); });
  m.def("record_stream", [](size_t p, int d, int64_t stream) { heap(d).used_by(reinterpret_cast<void*>(p), stream); });
  m.def("drop_workspaces", &drop_workspaces);
}

}  // namespace simcuda
