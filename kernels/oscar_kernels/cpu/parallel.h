// parallel_for(count, threads, body): body(i) for i in 0 … count, taken in order by whoever is free.
#pragma once

#include <atomic>

#ifndef _OPENMP
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>
#endif

namespace oscar {

#ifdef _OPENMP

template <class Body>
void parallel_for(int count, int threads, const Body& body) {
  if (threads > count) threads = count;
  if (threads <= 1) {
    for (int i = 0; i < count; ++i) body(i);
    return;
  }
  std::atomic<int> next{0};
#pragma omp parallel num_threads(threads)
  for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
}

#else

// Workers that live as long as the process; one job at a time, a second caller works alone.
class Pool {
 public:
  static Pool& instance() {
    static Pool* pool = new Pool;  // never destroyed: workers may outlive static destructors
    return *pool;
  }

  void run(int count, int threads, const std::function<void(int)>& body) {
    std::unique_lock<std::mutex> busy(busy_, std::try_to_lock);
    if (!busy.owns_lock()) {
      for (int i = 0; i < count; ++i) body(i);
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (int(workers_.size()) < threads - 1) workers_.emplace_back([this, n = int(workers_.size())] { work(n); });
      body_ = &body;
      count_ = count;
      helpers_ = threads - 1;
      next_ = 0;
    }
    wake_.notify_all();
    take(body, count);
    std::unique_lock<std::mutex> lock(mutex_);
    body_ = nullptr;  // a worker that comes too late finds nothing, and is not waited for
    done_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  void take(const std::function<void(int)>& body, int count) {
    for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
  }

  void work(int number) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return body_ && number < helpers_ && next_.load(std::memory_order_relaxed) < count_; });
      const std::function<void(int)>* body = body_;
      const int count = count_;
      ++running_;
      lock.unlock();
      take(*body, count);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  const std::function<void(int)>* body_ = nullptr;
  int count_ = 0, helpers_ = 0, running_ = 0;
  std::atomic<int> next_{0};
};

template <class Body>
void parallel_for(int count, int threads, const Body& body) {
  if (threads > count) threads = count;
  if (threads <= 1) {
    for (int i = 0; i < count; ++i) body(i);
    return;
  }
  Pool::instance().run(count, threads, body);
}

#endif

}  // namespace oscar
