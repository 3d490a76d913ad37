// The allocators that torch is given: the device's, over one Heap for each device, and the one of pinned memory.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include "device/state.h"

namespace simcuda {

c10::DeviceAllocator* allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* p);

// The device whose memory it is. Raises for the host's.
Device device_of(const void* p);

// Memory by its address, as torch.cuda.caching_allocator_alloc and _delete.
void* raw_allocate(size_t n, DeviceIndex d, StreamId stream);
void raw_free(void* p);

// The thread is about to multiply matrices on its current stream: cuBLAS has a workspace there from then on.
void hold_workspace(DeviceIndex d);
void drop_workspaces();

}  // namespace simcuda
