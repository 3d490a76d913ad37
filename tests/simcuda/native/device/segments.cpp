// What the heap asks of the driver, and what it gives back when memory is short.
#include <c10/core/AllocatorConfig.h>

#include "device/heap.h"

namespace simcuda {

using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
using c10::CachingAllocator::StatType;

size_t segment_size(size_t n) {
  if (n <= kSmall) return kSmallSegment;
  if (n < kMinLarge) return Config::large_segment_size();
  return (n + kRoundLarge - 1) / kRoundLarge * kRoundLarge;
}

size_t Heap::allowed() const { return fraction < 1 ? size_t(fraction * settings.capacity[device]) : SIZE_MAX; }

size_t Heap::driver_free() const {
  size_t taken = reserved() + settings.others[device] + settings.context;
  return taken >= settings.capacity[device] ? 0 : settings.capacity[device] - taken;
}

// A block that no cached one could give, after giving back what stands in its way; null where that does not help.
Block* Heap::obtain(Pool& pool, StreamId stream, size_t size, bool fails) {
  if (fraction < 1 && Config::garbage_collection_threshold() > 0) collect_garbage();
  Block* b = fails ? nullptr : new_block(pool, stream, size);
  if (!b && release_oversize(pool, stream, size) && !fails) b = new_block(pool, stream, size);
  if (b) return b;
  empty();
  stats.num_alloc_retries++;
  return fails ? nullptr : new_block(pool, stream, size);
}

Block* Heap::new_block(Pool& pool, StreamId stream, size_t size) {
  size_t n = segment_size(size);
  if (fraction < 1 && reserved() + n > allowed()) return nullptr;
  if (Config::use_expandable_segments()) return grow(pool, stream, size);
  if (Space::units(n) > driver_free()) return nullptr;
  char* p = space_.place(n);
  if (!space_.back(p, n)) return nullptr;
  auto* b = new Block{&pool, stream, p, n};
  heads[p] = b;
  if (n >= Config::max_split_size()) stats.oversize_segments.increase(1);
  took("segment_alloc", p, n, b);
  return b;
}

void Heap::took(const char* action, char* p, size_t n, const Block* b) {
  for (auto type : {StatType::AGGREGATE, b->pool->small ? StatType::SMALL_POOL : StatType::LARGE_POOL}) {
    stats.segment[static_cast<size_t>(type)].increase(1);
    stats.reserved_bytes[static_cast<size_t>(type)].increase(n);
  }
  stats.num_device_alloc++;
  note(action, p, n, b->stream);
}

void Heap::gave(const char* action, char* p, size_t n, const Block* b) {
  for (auto type : {StatType::AGGREGATE, b->pool->small ? StatType::SMALL_POOL : StatType::LARGE_POOL}) {
    stats.segment[static_cast<size_t>(type)].decrease(1);
    stats.reserved_bytes[static_cast<size_t>(type)].decrease(n);
  }
  stats.num_device_free++;
  note(action, p, n, b->stream);
}

void Heap::release_segment(Block* b) {
  unshelve(b);
  heads.erase(b->ptr);
  space_.unback(b->ptr, b->size);
  space_.leave(b->ptr, b->size);
  if (b->size >= Config::max_split_size()) stats.oversize_segments.decrease(1);
  gave("segment_free", b->ptr, b->size, b);
  delete b;
}

// Every whole segment, then every whole page inside a free block.
void Heap::release_pool(Pool& pool) {
  std::vector<Block*> expandable;
  for (auto it = pool.free.begin(); it != pool.free.end();) {
    Block* b = *it++;
    if (b->reservation) expandable.push_back(b);
    else if (b->whole()) release_segment(b);
  }
  for (Block* b : expandable) unmap_pages(b);
}

void Heap::empty() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  complete_pending();
  release_pool(large_);
  release_pool(small_);
}

// With a max_split_size: just enough of the stream's oversize blocks, or all there are. Whether it was enough.
bool Heap::release_oversize(Pool& pool, StreamId stream, size_t size) {
  size_t limit = Config::max_split_size();
  if (limit == SIZE_MAX) return false;
  size_t wanted = std::max(size, limit), released = 0;
  Block key{&pool, stream, nullptr, wanted};
  auto it = pool.free.lower_bound(&key);
  if (it != pool.free.end() && (*it)->stream == stream && !(*it)->reservation) {
    release_segment(*it);
    return true;
  }
  while (it != pool.free.begin() && released < wanted) {
    Block* b = *--it;
    if (b->stream != stream || b->size < limit) break;
    if (b->reservation) continue;
    released += b->size;
    auto after = std::next(it);
    release_segment(b);
    it = after;
  }
  return released >= wanted;
}

// The large segments that lay free longest, until no more is reserved than the threshold says.
void Heap::collect_garbage() {
  int64_t target = int64_t(reserved()) - int64_t(size_t(Config::garbage_collection_threshold() * allowed()));
  std::vector<std::pair<int64_t, Block*>> aged;
  double total = 0;
  for (Block* b : large_.free)
    if (b->whole()) aged.emplace_back(large_.searches - b->born, b), total += aged.back().first;
  double count = aged.size();
  for (bool found = true; target > 0 && found && count > 0;) {
    double mean = total / count;
    found = false;
    for (auto it = aged.begin(); it != aged.end();) {
      auto [age, b] = *it;
      if (b->reservation || age < mean) {
        ++it;
        continue;
      }
      found = true;
      target -= int64_t(b->size), total -= age, count -= 1;
      release_segment(b);
      it = aged.erase(it);
    }
  }
}

}  // namespace simcuda
