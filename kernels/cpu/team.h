// A few threads that share out the work of one phase after another.
//
// A phase is some items, cut into short chunks of neighbours. Every thread has a run of chunks of its own, which it takes
// from the front, so that what it streams stays in order, and then helps the others from the back of theirs. The phase is
// over when all chunks are done, whoever did them: a thread that the system gave no processor finds nothing left, and
// nobody has waited for it. Only one stopped in the middle of a chunk is waited for, hence chunks of microseconds.
//
// Who waits spins for some microseconds, as the others are usually almost done, and then sleeps in the kernel: between
// steps the helpers use no processor, and on a busy machine the one that everybody waits for gets it. The caller works
// too, so a team of one starts no thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
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

  // Only while nobody waits.
  void reset() { value_.store(0, std::memory_order_relaxed); }

  void add(uint32_t amount) {
    value_.fetch_add(amount);
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

// The chunks first .. end - 1 that are left of one thread's run, with the number of their phase: one word, so that a
// thread which slept through the phase cannot take a chunk of another by mistake.
class Run {
 public:
  static constexpr int64_t kMost = 0xffff;

  void set(uint32_t phase, int64_t first, int64_t end) {
    word_.store(static_cast<uint64_t>(phase) << 32 | first << 16 | end, std::memory_order_release);
  }

  // A chunk of that phase, from the front or the back; -1 where none is left.
  int64_t take(uint32_t phase, bool from_front) {
    uint64_t word = word_.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t first = word >> 16 & kMost, end = word & kMost;
      if (word >> 32 != phase || first >= end) return -1;
      const uint64_t rest = from_front ? word + (1 << 16) : word - 1;
      if (word_.compare_exchange_weak(word, rest, std::memory_order_acquire)) return from_front ? first : end - 1;
    }
  }

 private:
  alignas(64) std::atomic<uint64_t> word_{0};
};

class Team {
 public:
  explicit Team(int count) : count_(count), runs_(new Run[count]) {
    try {
      for (int number = 1; number < count; number++) threads_.emplace_back([this, number] { help(number); });
    } catch (...) {  // the system gives no more threads; one that runs must be joined, or it ends the process
      close();
      throw;
    }
  }

  ~Team() { close(); }

  int count() const { return count_; }

  // Calls body(thread, first, end) until every one of 0 .. total - 1 lay in one of the calls' first .. end - 1, no more
  // than `grain` of them in each (or total / kMost, where that is more), and returns when all calls have. What they wrote
  // is visible after. One caller at a time.
  template <class Body>
  void each(int64_t total, int64_t grain, Body&& body) {
    grain = std::max({grain, int64_t{1}, (total + Run::kMost - 1) / Run::kMost});
    const int64_t chunks = (total + grain - 1) / grain;
    if (count_ == 1 || chunks <= 1) {
      for (int64_t first = 0; first < total; first += grain) body(0, first, std::min(first + grain, total));
      return;
    }
    job_ = {&body, total, grain, [](const Job& job, int thread, int64_t chunk) {
              const int64_t first = chunk * job.grain;
              (*static_cast<std::remove_reference_t<Body>*>(job.body))(thread, first, std::min(first + job.grain, job.total));
            }};
    done_.reset();
    const uint32_t phase = phase_.value() + 1;
    for (int number = 0; number < count_; number++)
      runs_[number].set(phase, chunks * number / count_, chunks * (number + 1) / count_);
    phase_.add(1);
    work(0, phase);
    for (uint32_t done; (done = done_.value()) != chunks;) done_.wait_while(done);
  }

 private:
  struct Job {
    void* body;
    int64_t total, grain;
    void (*call)(const Job&, int thread, int64_t chunk);
  };

  void close() {
    closing_.store(true, std::memory_order_relaxed);
    phase_.add(1);
    for (auto& thread : threads_) thread.join();
  }

  void help(int number) {
    const DenormalsOff denormals_off;
    for (uint32_t seen = 0;;) {
      phase_.wait_while(seen);
      if (closing_.load(std::memory_order_relaxed)) return;
      seen = phase_.value();
      work(number, seen);
    }
  }

  // Own chunks first, then the others'. The job is looked at only with a chunk in hand: until then it may be another.
  void work(int number, uint32_t phase) {
    uint32_t done = 0;
    for (int i = 0; i < count_; i++) {
      Run& run = runs_[(number + i) % count_];
      for (int64_t chunk; (chunk = run.take(phase, i == 0)) >= 0; done++) job_.call(job_, number, chunk);
    }
    if (done) done_.add(done);
  }

  const int count_;
  Signal phase_, done_;
  const std::unique_ptr<Run[]> runs_;
  alignas(64) Job job_{};
  std::atomic<bool> closing_{false};
  std::vector<std::thread> threads_;  // last: they use all of the above
};

}  // namespace arena
