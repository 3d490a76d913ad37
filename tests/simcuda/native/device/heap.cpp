#include "device/heap.h"

#include <c10/core/Allocator.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <sstream>

namespace simcuda {

using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
using c10::CachingAllocator::StatType;

std::atomic<bool> History::recording{false};
size_t History::most = SIZE_MAX;

namespace {

void add(StatArray& stat, bool small, int64_t n) {
  for (auto type : {StatType::AGGREGATE, small ? StatType::SMALL_POOL : StatType::LARGE_POOL}) {
    auto& one = stat[static_cast<size_t>(type)];
    n >= 0 ? one.increase(n) : one.decrease(-n);
  }
}

bool fits(size_t block, size_t size) {
  size_t limit = Config::max_split_size();
  return size < limit ? block < limit : limit == SIZE_MAX || block < size + Config::max_non_split_rounding_size();
}

size_t reach(const Block* b) { return b->size + (b->next && b->next->state == State::Unmapped ? b->next->size : 0); }

bool may_split(const Block* b, size_t size) {
  size_t rest = b->size - size;
  if (b->pool->small || Config::use_expandable_segments()) return rest >= kMinBlock;
  return size < Config::max_split_size() && rest > kSmall;
}

}  // namespace

size_t rounded(size_t n) {
  if (n < kMinBlock) return kMinBlock;
  size_t divisions = Config::roundup_power2_divisions(n);
  if (divisions > 1 && n > kMinBlock * divisions) {
    if ((n & (n - 1)) == 0) return n;
    size_t part = (size_t(1) << (63 - __builtin_clzll(n))) / divisions;
    return (n + part - 1) / part * part;
  }
  return (n + kMinBlock - 1) / kMinBlock * kMinBlock;
}

std::string in_words(size_t n) {
  std::ostringstream out;
  out.precision(2);
  out << std::fixed;
  if (n <= 1024) out << n << " bytes";
  else if (n <= MiB) out << n / 1024.0 << " KiB";
  else if (n <= 1024 * MiB) out << n / double(MiB) << " MiB";
  else out << n / double(1024 * MiB) << " GiB";
  return out.str();
}

Heap& heap(DeviceIndex d) {
  static auto* all = [] {
    auto* made = new std::vector<Heap*>;
    for (int i = 0; i < kMaxDevices; i++) made->push_back(new Heap(static_cast<DeviceIndex>(i)));
    return made;
  }();
  return *all->at(d);
}

void Heap::note(const char* action, const void* address, size_t n, StreamId stream) {
  if (!History::recording) return;
  if (history.entries.size() >= History::most) history.entries.pop_front();
  history.entries.push_back({action, reinterpret_cast<size_t>(address), n, stream, int64_t(now_ms() * 1000)});
}

void* Heap::malloc(StreamId stream, size_t requested) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  used[device] = true;
  complete_pending();
  size_t size = rounded(requested);
  Pool& pool = size <= kSmall ? small_ : large_;
  bool fails = fail_in >= 0 && fail_in-- == 0;
  if (fraction < 1 && Config::garbage_collection_threshold() > 0) pool.searches++;
  Block* b = fails ? nullptr : search(pool, stream, size);
  if (b) unshelve(b);
  else b = obtain(pool, stream, size, fails);
  if (!b) out_of_memory(segment_size(size));
  if (may_split(b, size)) shelve(cut(b, size));
  hand_out(b, requested);
  return b->ptr;
}

// The smallest free block of the stream that may serve; of expandable ones the first that cannot grow further than the next.
Block* Heap::search(Pool& pool, StreamId stream, size_t size) {
  Block key{&pool, stream, nullptr, size};
  auto there = [&](Blocks::iterator it) { return it != pool.free.end() && (*it)->stream == stream; };
  auto it = pool.free.lower_bound(&key);
  if (there(it) && (*it)->reservation) {
    if (Config::use_expandable_segments()) {
      for (auto after = std::next(it); there(after) && (*it)->reservation && reach(*after) < reach(*it); ++after) it = after;
    } else {
      while (there(it) && (*it)->reservation) ++it;
    }
  }
  return there(it) && fits((*it)->size, size) ? *it : nullptr;
}

void Heap::hand_out(Block* b, size_t requested) {
  bool small = b->pool->small;
  b->state = State::Live;
  b->requested = requested;
  b->elsewhere = false;
  live[b->ptr] = b;
  note("alloc", b->ptr, requested, b->stream);
  add(stats.allocation, small, 1);
  add(stats.active, small, 1);
  add(stats.allocated_bytes, small, b->size);
  add(stats.active_bytes, small, b->size);
  add(stats.requested_bytes, small, requested);
  if (b->size >= Config::max_split_size()) stats.oversize_allocations.increase(1);
  c10::reportMemoryUsageToProfiler(b->ptr, b->size, allocated(), reserved(), cuda(device));
  if (settings.poison >= 0) memset(b->ptr, settings.poison, b->size);
}

void Heap::out_of_memory(size_t wanted) {
  stats.num_ooms++;
  note("oom", reinterpret_cast<void*>(driver_free()), wanted, 0);
  std::string limit = fraction < 1 ? in_words(allowed()) + " allowed; " : "";
  c10::reportOutOfMemoryToProfiler(wanted, allocated(), reserved(), cuda(device));
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", in_words(wanted), ". GPU ", int(device),
      " has a total capacity of ", in_words(settings.capacity[device]), " of which ", in_words(driver_free()),
      " is free. Including non-PyTorch memory, this process has ", in_words(reserved() + settings.context),
      " memory in use. ", limit, "Of the allocated memory ", in_words(allocated()), " is allocated by PyTorch, and ",
      in_words(reserved() - allocated()),
      " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
      "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
      "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)");
  std::abort();
}

void Heap::free(void* p) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto it = live.find(p);
  if (it == live.end()) return;
  Block* b = it->second;
  live.erase(it);
  note("free_requested", b->ptr, b->requested, b->stream);
  add(stats.allocation, b->pool->small, -1);
  add(stats.allocated_bytes, b->pool->small, -int64_t(b->size));
  if (b->size >= Config::max_split_size()) stats.oversize_allocations.decrease(1);
  if (b->elsewhere) {
    b->state = State::Pending;
    pending_.push_back(b);
  } else {
    complete(b);
  }
}

void Heap::complete_pending() {
  auto done = std::move(pending_);
  pending_.clear();
  for (Block* b : done) complete(b);
}

void Heap::complete(Block* b) {
  bool small = b->pool->small;
  char* p = b->ptr;
  int64_t freed = int64_t(b->size), requested = int64_t(b->requested);
  note("free_completed", p, b->requested, b->stream);
  settle(b);
  add(stats.active, small, -1);
  add(stats.active_bytes, small, -freed);
  add(stats.requested_bytes, small, -requested);
  c10::reportMemoryUsageToProfiler(p, -freed, allocated(), reserved(), cuda(device));
}

// Free a block: one with its free neighbours from now on.
Block* Heap::settle(Block* b) {
  b->state = State::Free;
  if (b->next && b->next->state == State::Free) {
    unshelve(b->next);
    absorb_next(b);
  }
  if (b->prev && b->prev->state == State::Free) {
    b = b->prev;
    unshelve(b);
    absorb_next(b);
  }
  shelve(b);
  return b;
}

void Heap::shelve(Block* b) {
  b->state = State::Free;
  b->born = b->pool->searches;
  b->pool->free.insert(b);
  count_split(b, 1);
}

void Heap::unshelve(Block* b) {
  count_split(b, -1);
  b->pool->free.erase(b);
}

void Heap::count_split(Block* b, int sign) {
  if (b->reservation || b->whole()) return;
  add(stats.inactive_split, b->pool->small, sign);
  add(stats.inactive_split_bytes, b->pool->small, sign * int64_t(b->size));
}

// Keep the first bytes; the rest is a block of its own behind it, on no shelf yet.
Block* Heap::cut(Block* b, size_t size) {
  auto* rest = new Block{b->pool, b->stream, b->ptr + size, b->size - size, b->reservation};
  rest->prev = b, rest->next = b->next;
  if (b->next) b->next->prev = rest;
  b->next = rest;
  b->size = size;
  return rest;
}

void Heap::absorb_next(Block* b) {
  Block* gone = b->next;
  b->size += gone->size;
  b->next = gone->next;
  if (b->next) b->next->prev = b;
  delete gone;
}

void Heap::used_by(const void* p, StreamId stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto it = live.find(const_cast<void*>(p));
  if (it != live.end() && it->second->stream != stream) it->second->elsewhere = true;
}

bool Heap::owns(const void* p) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  for (auto& [at, block] : live)
    if (p >= at && p < static_cast<char*>(at) + block->size) return true;
  return false;
}

}  // namespace simcuda
