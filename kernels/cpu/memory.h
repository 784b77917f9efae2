// Large buffers: zeroed, aligned, on huge pages where the system grants them, cut up without an allocation each.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <new>
#include <utility>

namespace arena {

constexpr size_t kHugePage = 2 << 20;

// Asks for huge pages, as far as the memory is not in use yet.
inline void advise_huge_pages(void* memory, size_t bytes) {
#ifdef MADV_HUGEPAGE
  const uintptr_t first = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kHugePage * kHugePage;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

class Mapping {
 public:
  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { release(); }

  // At least `bytes`; contents are lost, and zero, where it had to grow.
  char* grow(size_t bytes) {
    if (bytes <= bytes_) return base_;
    release();
    const size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    void* base = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    advise_huge_pages(base, whole);
    base_ = static_cast<char*>(base);
    bytes_ = whole;
    return base_;
  }

  void release() {
    if (base_) munmap(base_, bytes_);
    base_ = nullptr;
    bytes_ = 0;
  }

 private:
  char* base_ = nullptr;
  size_t bytes_ = 0;
};

// Hands out neighbouring pieces. Run over the same requests twice, first from null, it tells the size that they need.
class Pieces {
 public:
  explicit Pieces(char* base) : base_(base) {}

  template <class T>
  void take(T*& piece, int64_t count) {
    piece = reinterpret_cast<T*>(base_ + used_);
    used_ += (static_cast<size_t>(count) * sizeof(T) + 127) / 128 * 128;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

// Hands out memory that is asked for bit by bit, cut from large mappings.
class Shelf {
 public:
  uint8_t* take(size_t bytes) {
    if (bytes > left_) {
      left_ = std::max(bytes, kMapping);
      mappings_.emplace_back();
      place_ = reinterpret_cast<uint8_t*>(mappings_.back().grow(left_));
    }
    left_ -= bytes;
    return std::exchange(place_, place_ + bytes);
  }

 private:
  static constexpr size_t kMapping = 32 * kHugePage;  // of which the system gives what is touched
  std::list<Mapping> mappings_;
  uint8_t* place_ = nullptr;
  size_t left_ = 0;
};

}  // namespace arena
