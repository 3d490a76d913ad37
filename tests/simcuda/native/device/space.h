// Addresses of one device: memory of the host where a segment is, nothing elsewhere. Each new segment lies above those
// that are there, on a boundary of 2 MiB.
#pragma once

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstring>

#include "device/state.h"

namespace simcuda {

class Space {
 public:
  explicit Space(size_t reserved) : reserved_(reserved) {}

  static size_t units(size_t n) { return (n + 2 * MiB - 1) / (2 * MiB) * (2 * MiB); }

  char* place(size_t n) {
    if (!base_) base_ = next_ = static_cast<char*>(nowhere(nullptr, reserved_ + 2 * MiB, 0));
    TORCH_CHECK(next_ + n <= base_ + reserved_, "the simulated device has no addresses left");
    char* p = next_;
    next_ += units(n);
    return p;
  }
  void leave(char* p, size_t n) {
    if (p + units(n) == next_) next_ = p;
  }
  bool back(char* p, size_t n) {
    if (mprotect(p, n, PROT_READ | PROT_WRITE) != 0) return false;
    if (settings.poison >= 0) memset(p, settings.poison, n);
    return true;
  }
  void unback(char* p, size_t n) { nowhere(p, n, MAP_FIXED); }

 private:
  static void* nowhere(void* at, size_t n, int flags) {
    void* p = mmap(at, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
    TORCH_CHECK(p != MAP_FAILED, "the simulated device finds no addresses (a limit on them?)");
    if (!at) p = reinterpret_cast<void*>(units(reinterpret_cast<size_t>(p)));
    return p;
  }

  size_t reserved_;
  char *base_ = nullptr, *next_ = nullptr;
};

}  // namespace simcuda
