// Memory of a thread, and work for XLA's threads.

#pragma once

#include <atomic>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "xla/ffi/api/ffi.h"

// Memory of one thread that only grows.
struct Room {
  void* data = nullptr;
  size_t size = 0;
  void* of(size_t bytes) {
    if (bytes > size) {
      std::free(data);
      size = (bytes + 4095) / 4096 * 4096;
      data = std::aligned_alloc(4096, size);
      if (!data) throw std::bad_alloc();
    }
    return data;
  }
  ~Room() { std::free(data); }
};

// f(0) .. f(count - 1) on XLA's threads. The caller takes part, so a busy pool blocks nothing.
template <typename F>
void share_out(xla::ffi::ThreadPool& pool, int count, const F& f) {
  if (count < 2) {
    if (count) f(0);
    return;
  }
  struct Shared {
    std::atomic<int> next{0}, done{0};
    int count;
    const F* f;
    std::mutex mutex;
    std::exception_ptr error;
  };
  auto shared = std::make_shared<Shared>();
  shared->count = count;
  shared->f = &f;
  auto work = [](Shared& s) {
    for (int i; (i = s.next.fetch_add(1)) < s.count;) {
      try {
        (*s.f)(i);
      } catch (...) {
        std::lock_guard<std::mutex> lock(s.mutex);
        s.error = std::current_exception();
      }
      s.done.fetch_add(1, std::memory_order_acq_rel);
    }
  };
  for (int i = 1; i < count; ++i) pool.Schedule([shared, work] { work(*shared); });
  work(*shared);
  for (int spin = 0; shared->done.load(std::memory_order_acquire) < count; ++spin)
    if (spin > 2000) std::this_thread::yield();
  if (shared->error) std::rethrow_exception(shared->error);
}
