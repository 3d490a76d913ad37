// One device's memory by the rules of torch's CUDACachingAllocator (2.13), within a capacity. The settings are torch's
// own reading of PYTORCH_CUDA_ALLOC_CONF. heap.cpp hands out and takes back, segments.cpp asks the driver,
// expandable.cpp is for segments that grow.
//
// Not covered: private pools (CUDA graphs, MemPool), addresses of a real driver, its own overhead.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "device/space.h"
#include "device/state.h"

namespace simcuda {

using Stats = c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;

constexpr size_t kMinBlock = 512, kSmall = MiB, kSmallSegment = 2 * MiB, kMinLarge = 10 * MiB, kRoundLarge = 2 * MiB;

// A block is cached, handed out, freed but still used on another stream, or addresses without memory behind them.
enum class State : uint8_t { Free, Live, Pending, Unmapped };

// The addresses of an expandable segment.
struct Reservation {
  char* base;
  size_t page, span;
  char* page_before(char* p) const { return p - (p - base) % page; }
  char* page_after(char* p) const { return p + (page - (p - base) % page) % page; }
};

struct Pool;

struct Block {
  Pool* pool;
  StreamId stream;
  char* ptr;
  size_t size;
  Reservation* reservation = nullptr;
  State state = State::Free;
  bool elsewhere = false;  // used by another stream (record_stream)
  size_t requested = 0;
  int64_t born = 0;  // the pool's searches when it became free
  Block *prev = nullptr, *next = nullptr;
  bool whole() const { return !prev && !next; }
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->stream, a->size, a->ptr) < std::tie(b->stream, b->size, b->ptr);
  }
};
struct ByAddress {
  bool operator()(const Block* a, const Block* b) const { return std::tie(a->stream, a->ptr) < std::tie(b->stream, b->ptr); }
};
using Blocks = std::set<Block*, BySize>;

struct Pool {
  bool small;
  Blocks free{};
  std::set<Block*, ByAddress> unmapped{};
  int64_t searches = 0;
};

struct Entry {  // of the history, torch.cuda.memory._record_memory_history
  const char* action;
  size_t address, size;
  StreamId stream;
  int64_t time_us;
};

struct History {
  static std::atomic<bool> recording;
  static size_t most;
  std::deque<Entry> entries;
};

class Heap {
 public:
  explicit Heap(DeviceIndex d) : device(d), space_(kReserved) {}

  void* malloc(StreamId stream, size_t requested);
  void free(void* p);  // nothing where it is not one of its blocks
  void used_by(const void* p, StreamId stream);
  void empty();
  bool owns(const void* p);  // whether it lies in one of the live blocks
  size_t driver_free() const;
  size_t reserved() const { return stats.reserved_bytes[0].current; }
  size_t allocated() const { return stats.allocated_bytes[0].current; }

  const DeviceIndex device;
  std::recursive_mutex mutex;
  std::map<char*, Block*> heads;  // the first block of every segment
  std::unordered_map<void*, Block*> live;
  Stats stats;
  double fraction = 1.0;
  int64_t fail_in = -1;  // so many allocations from now on, one fails as if the device were full
  History history;

 private:
  static constexpr size_t kReserved = size_t(8) << 40;  // bytes of addresses

  // heap.cpp
  Block* search(Pool& pool, StreamId stream, size_t size);
  void hand_out(Block* b, size_t requested);
  void complete(Block* b);
  void complete_pending();
  Block* settle(Block* b);
  void shelve(Block* b);
  void unshelve(Block* b);
  Block* cut(Block* b, size_t size);
  void absorb_next(Block* b);
  void count_split(Block* b, int sign);
  void note(const char* action, const void* address, size_t n, StreamId stream);
  [[noreturn]] void out_of_memory(size_t wanted);

  // segments.cpp
  size_t allowed() const;
  Block* obtain(Pool& pool, StreamId stream, size_t size, bool fails);
  Block* new_block(Pool& pool, StreamId stream, size_t size);
  void release_segment(Block* b);
  void release_pool(Pool& pool);
  bool release_oversize(Pool& pool, StreamId stream, size_t size);
  void collect_garbage();
  void took(const char* action, char* p, size_t n, const Block* b);
  void gave(const char* action, char* p, size_t n, const Block* b);

  // expandable.cpp
  Block* grow(Pool& pool, StreamId stream, size_t size);
  Block* lowest_room(Pool& pool, StreamId stream, size_t size);
  Block* map_pages(Block* b, size_t size);
  void unmap_pages(Block* b);
  Block* unmapped(Block* b);

  Pool small_{true}, large_{false};
  Space space_;
  std::vector<Block*> pending_;  // freed, but another stream may still use them: until the next allocation
};

Heap& heap(DeviceIndex d);

size_t rounded(size_t n);
size_t segment_size(size_t n);
std::string in_words(size_t bytes);

}  // namespace simcuda
