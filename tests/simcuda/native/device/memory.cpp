#include "device/memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "device/heap.h"

namespace simcuda {

namespace {

struct CachingAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = n ? heap(this_device).malloc(this_stream[this_device], n) : nullptr;
    return {p, p, &raw_free, cuda(this_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &raw_free; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int d = 0; d < settings.devices; d++) heap(d).empty();
  }
  void recordStream(const c10::DataPtr& p, Stream s) override { heap(s.device_index()).used_by(p.get(), s.id()); }
  Stats getDeviceStats(DeviceIndex d) override {
    std::lock_guard<std::recursive_mutex> lock(heap(d).mutex);
    return heap(d).stats;
  }
  template <class F>
  static void each_stat(DeviceIndex d, F f) {
    std::lock_guard<std::recursive_mutex> lock(heap(d).mutex);
    auto& s = heap(d).stats;
    for (auto* a : {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes, &s.reserved_bytes,
                    &s.active_bytes, &s.inactive_split_bytes, &s.requested_bytes})
      for (auto& one : *a) f(one);
    f(s.oversize_allocations), f(s.oversize_segments);
  }
  void resetAccumulatedStats(DeviceIndex d) override {
    each_stat(d, [](Stat& s) { s.reset_accumulated(); });
    auto& s = heap(d).stats;
    s.num_alloc_retries = s.num_ooms = s.num_sync_all_streams = s.num_device_alloc = s.num_device_free = 0;
  }
  void resetPeakStats(DeviceIndex d) override { each_stat(d, [](Stat& s) { s.reset_peak(); }); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    std::lock_guard<std::recursive_mutex> lock(heap(d).mutex);
    return {heap(d).driver_free(), settings.capacity[d]};
  }
};

struct PinnedAllocator final : c10::Allocator {
  std::mutex mutex;
  std::map<char*, size_t> held;

  static PinnedAllocator* get() {
    static auto* one = new PinnedAllocator;
    return one;
  }
  static void free_one(void* p) {
    {
      std::lock_guard<std::mutex> lock(get()->mutex);
      get()->held.erase(static_cast<char*>(p));
    }
    ::free(p);
  }
  c10::DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, nullptr, &free_one, Device(c10::DeviceType::CPU)};
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 64, n) == 0, "pinned memory");
    std::lock_guard<std::mutex> lock(mutex);
    held[static_cast<char*>(p)] = n;
    return {p, p, &free_one, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_one; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  bool has(const void* p) {
    std::lock_guard<std::mutex> lock(mutex);
    auto it = held.upper_bound(static_cast<char*>(const_cast<void*>(p)));
    if (it == held.begin()) return false;
    --it;
    return p < it->first + it->second;
  }
};

// Handles of cuBLAS belong to a thread; those of threads that end serve the next one. So: a thread has a number, the
// smallest that no other one has, and a workspace belongs to that number, a device and a stream.
struct Workspaces {
  std::mutex mutex;
  std::set<int> taken;
  std::map<std::tuple<int, DeviceIndex, StreamId>, c10::DataPtr> held;
  static Workspaces& get() {
    static auto* one = new Workspaces;
    return *one;
  }
};

struct ThreadNumber {
  int number = 0;
  ThreadNumber() {
    auto& all = Workspaces::get();
    std::lock_guard<std::mutex> lock(all.mutex);
    while (!all.taken.insert(number).second) number++;
  }
  ~ThreadNumber() {
    auto& all = Workspaces::get();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.taken.erase(number);
  }
};

}  // namespace

c10::DeviceAllocator* allocator() {
  static auto* one = new CachingAllocator;
  return one;
}

c10::Allocator* pinned_allocator() { return PinnedAllocator::get(); }
bool is_pinned(const void* p) { return PinnedAllocator::get()->has(p); }

Device device_of(const void* p) {
  for (int d = 0; d < settings.devices; d++)
    if (heap(d).owns(p)) return cuda(d);
  TORCH_CHECK(false, "The specified pointer resides on host memory and is not registered with any CUDA device.");
}

void* raw_allocate(size_t n, DeviceIndex d, StreamId stream) { return heap(d).malloc(stream, n); }

void raw_free(void* p) {
  for (int d = 0; p && d < kMaxDevices; d++)
    if (used[d]) heap(d).free(p);
}

void hold_workspace(DeviceIndex d) {
  if (!settings.workspace) return;
  static thread_local ThreadNumber me;
  auto& all = Workspaces::get();
  auto key = std::make_tuple(me.number, d, this_stream[d]);
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    if (all.held.count(key)) return;
  }
  void* p = heap(d).malloc(this_stream[d], settings.workspace);
  std::lock_guard<std::mutex> lock(all.mutex);
  all.held.emplace(key, c10::DataPtr(p, p, &raw_free, cuda(d)));
}

void drop_workspaces() {
  auto& all = Workspaces::get();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.held.clear();
}

}  // namespace simcuda
