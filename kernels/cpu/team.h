// A few threads that run one function together and meet at barriers in it.
//
// Who waits spins for some microseconds, as the others are usually almost there, and then sleeps in the kernel: between
// steps the helpers use no processor, and on a busy machine the one that everybody waits for gets it. The caller is
// worker 0, so a team of one starts no thread.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "simd.h"

namespace arena {

// A number that threads wait on until it changes.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  void raise() {
    value_.fetch_add(1);
    if (sleepers_.load() > 0) wake();
  }

  void wait_while(uint32_t old) {
    for (int spin = 0; spin < kSpins; spin++) {
      if (value() != old) return;
      pause();
    }
    sleepers_.fetch_add(1);
    while (value_.load() == old) sleep(old);
    sleepers_.fetch_sub(1);
  }

 private:
  static constexpr int kSpins = 2000;  // some tens of microseconds

#if defined(__linux__)
  void sleep(uint32_t old) { syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0); }
  void wake() { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
  void sleep(uint32_t) { std::this_thread::sleep_for(std::chrono::microseconds(200)); }
  void wake() {}
#endif

  alignas(64) std::atomic<uint32_t> value_{0};
  std::atomic<int> sleepers_{0};
};

class Team;

struct Range {
  int64_t first, end;
};

struct Worker {
  Team& team;
  int number, count;

  void meet() const;  // returns once every worker has called it; what they wrote before is visible after

  // This worker's part of 0 .. total - 1, cut into equal neighbouring parts.
  Range share(int64_t total) const { return {total * number / count, total * (number + 1) / count}; }
};

class Team {
 public:
  explicit Team(int count) : count_(count) {
    for (int number = 1; number < count; number++) threads_.emplace_back([this, number] { help(number); });
  }

  ~Team() {
    call_ = nullptr;
    started_.raise();
    for (auto& thread : threads_) thread.join();
  }

  int count() const { return count_; }

  // Runs body(worker) on every thread and returns when all are done. One caller at a time.
  template <class Body>
  void run(Body&& body) {
    context_ = &body;
    call_ = [](void* context, const Worker& worker) { (*static_cast<std::remove_reference_t<Body>*>(context))(worker); };
    started_.raise();
    const Worker worker{*this, 0, count_};
    body(worker);
    worker.meet();
  }

 private:
  friend struct Worker;

  void help(int number) {
    const Worker worker{*this, number, count_};
    for (uint32_t seen = 0;; seen++) {
      started_.wait_while(seen);
      if (!call_) return;
      call_(context_, worker);
      worker.meet();
    }
  }

  const int count_;
  Signal started_, met_;
  alignas(64) std::atomic<int> arrived_{0};
  void* context_ = nullptr;
  void (*call_)(void*, const Worker&) = nullptr;
  std::vector<std::thread> threads_;  // last: they use all of the above
};

inline void Worker::meet() const {
  const uint32_t round = team.met_.value();
  if (team.arrived_.fetch_add(1, std::memory_order_acq_rel) < count - 1) return team.met_.wait_while(round);
  team.arrived_.store(0, std::memory_order_relaxed);
  team.met_.raise();
}

}  // namespace arena
