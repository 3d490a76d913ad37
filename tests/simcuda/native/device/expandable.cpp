// Expandable segments: addresses taken once, memory mapped behind them page by page.
#include <c10/core/AllocatorConfig.h>

#include "device/heap.h"

namespace simcuda {

using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;

// A free block of at least so many bytes at the lowest address with room, on no shelf. What was mapped before memory ran
// out stays mapped, as in torch.
Block* Heap::grow(Pool& pool, StreamId stream, size_t size) {
  Block* found = lowest_room(pool, stream, size);
  Block* b = found->state == State::Unmapped ? map_pages(found, std::min(found->size, size)) : found;
  while (b && b->size < size) b = map_pages(b->next, std::min(size - b->size, b->next->size));
  if (b) unshelve(b);
  return b;
}

Block* Heap::lowest_room(Pool& pool, StreamId stream, size_t size) {
  for (Block* b : pool.unmapped) {
    if (b->stream != stream) continue;
    Block* start = b->prev && b->prev->state == State::Free ? b->prev : b;
    size_t room = 0;
    for (Block* each = start; each && room < size; each = each->next) {
      if (each->state != State::Free && each->state != State::Unmapped) break;
      room += each->size;
    }
    if (room >= size) return start;
  }
  size_t page = pool.small ? kSmallSegment : Config::large_segment_size();
  size_t room = settings.capacity[device] + settings.capacity[device] / 8, span = (room + page - 1) / page * page;
  auto* reservation = new Reservation{space_.place(span), page, span};
  auto* b = new Block{&pool, stream, reservation->base, span, reservation, State::Unmapped};
  pool.unmapped.insert(b);
  heads[b->ptr] = b;
  return b;
}

// Memory behind the first bytes of an unmapped block, in whole pages; the free block it became part of, null where the
// device has no room.
Block* Heap::map_pages(Block* b, size_t size) {
  char* start = b->ptr;
  size_t n = b->reservation->page_after(start + size) - start;
  if (Space::units(n) > driver_free() || !space_.back(start, n)) return nullptr;
  Pool& pool = *b->pool;
  pool.unmapped.erase(b);
  if (n < b->size) {
    Block* rest = cut(b, n);
    rest->state = State::Unmapped;
    pool.unmapped.insert(rest);
  }
  b = settle(b);
  took("segment_map", start, n, b);
  return b;
}

// Give back the whole pages inside a free block; what is left at its edges stays free.
void Heap::unmap_pages(Block* b) {
  Reservation* reservation = b->reservation;
  char *start = reservation->page_after(b->ptr), *end = reservation->page_before(b->ptr + b->size);
  if (start >= end) return;
  unshelve(b);
  if (start > b->ptr) {
    Block* middle = cut(b, start - b->ptr);
    shelve(b);
    b = middle;
  }
  if (size_t(end - start) < b->size) shelve(cut(b, end - start));
  b = unmapped(b);
  space_.unback(start, end - start);
  gave("segment_unmap", start, end - start, b);
  if (!b->whole()) return;
  b->pool->unmapped.erase(b);
  heads.erase(b->ptr);
  space_.leave(b->ptr, b->size);
  delete reservation;
  delete b;
}

// A block loses its memory and is one with unmapped neighbours from now on.
Block* Heap::unmapped(Block* b) {
  b->state = State::Unmapped;
  auto& all = b->pool->unmapped;
  if (b->next && b->next->state == State::Unmapped) {
    all.erase(b->next);
    absorb_next(b);
  }
  if (b->prev && b->prev->state == State::Unmapped) {
    b = b->prev;
    absorb_next(b);
    return b;
  }
  all.insert(b);
  return b;
}

}  // namespace simcuda
