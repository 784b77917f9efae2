// A few threads that run one function together and meet at barriers in it.
//
// Inside a step a waiting thread spins for some microseconds and then yields; between steps the helpers sleep in the
// kernel and use no processor. The caller is worker 0, so a team of one starts no thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "simd.h"

namespace arena {

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
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
      started_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int count() const { return count_; }

  // Runs body(worker) on every thread, returns when all are done. One caller at a time.
  template <class Body>
  void run(Body&& body) {
    std::lock_guard<std::mutex> one_caller(callers_);
    if (count_ > 1) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        context_ = &body;
        call_ = [](void* context, const Worker& worker) { (*static_cast<std::remove_reference_t<Body>*>(context))(worker); };
        started_.fetch_add(1, std::memory_order_release);
      }
      wake_.notify_all();
    }
    const Worker worker{*this, 0, count_};
    body(worker);
    worker.meet();
  }

 private:
  friend struct Worker;
  static constexpr int kSpins = 4000;  // about 50 microseconds

  void help(int number) {
    const Worker worker{*this, number, count_};
    for (uint32_t seen = 0;;) {
      for (int spin = 0; spin < kSpins && started_.load(std::memory_order_acquire) == seen; spin++) pause();
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return started_.load(std::memory_order_acquire) != seen; });
        seen = started_.load();
        if (closing_) return;
      }
      call_(context_, worker);
      worker.meet();
    }
  }

  const int count_;
  std::vector<std::thread> threads_;
  std::mutex callers_, mutex_;
  std::condition_variable wake_;
  std::atomic<uint32_t> started_{0};
  bool closing_ = false;
  void* context_ = nullptr;
  void (*call_)(void*, const Worker&) = nullptr;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

inline void Worker::meet() const {
  if (count == 1) return;
  const uint32_t round = team.round_.load(std::memory_order_relaxed);
  if (team.arrived_.fetch_add(1, std::memory_order_acq_rel) == count - 1) {
    team.arrived_.store(0, std::memory_order_relaxed);
    team.round_.store(round + 1, std::memory_order_release);
    return;
  }
  for (int spin = 0; team.round_.load(std::memory_order_acquire) == round; spin++)
    spin < Team::kSpins ? pause() : std::this_thread::yield();
}

}  // namespace arena
