// What the whole device shares: settings, counters, and which device and streams a thread is on.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace simcuda {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

constexpr int kMaxDevices = 8;
constexpr size_t MiB = size_t(1) << 20;

struct Settings {
  int devices = 2;
  size_t capacity[kMaxDevices] = {};
  size_t others[kMaxDevices] = {};  // held by other processes
  size_t context = 0;               // held by this process beside the allocator, on each device
  size_t workspace = 0;             // of cuBLAS, for each thread and stream that multiplies matrices
  int sync_debug = 0;               // torch.cuda.set_sync_debug_mode
  int poison = -1;                  // byte that fresh blocks are filled with; -1: left as they are
  bool fused_attention = true;
};
extern Settings settings;

struct Counters {
  std::atomic<int64_t> kernels{0}, syncs{0}, h2d{0}, h2d_blocking{0}, d2h{0}, d2h_blocking{0}, peer{0};
  std::mutex mutex;
  std::map<std::string, int64_t> syncs_by, fell_back;  // by operator
  bool by_operator = false;                            // whether fell_back is counted
};
extern Counters counters;

// The host waits for the device here.
void count_sync(const char* what);

double now_ms();

extern thread_local DeviceIndex this_device;
extern thread_local std::array<StreamId, kMaxDevices> this_stream;
extern std::atomic<bool> used[kMaxDevices];  // whether the process has a context there

inline Device cuda(int index) { return Device(c10::DeviceType::CUDA, static_cast<DeviceIndex>(index)); }

// The device itself, with the thread's index where it has none. Raises for one that is not there.
Device resolve(Device d);
void check_device(DeviceIndex index);
void set_device(int index);

}  // namespace simcuda
