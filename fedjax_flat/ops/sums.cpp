// Sums over the image of NHWC arrays, per example and channel, as XLA FFI handlers: total(a), and
// inner(a, b) = total(a b) without the product in memory.
//
// What one thread adds up is kBlock channels of one example, so bits do not depend on threads.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>

#include "threads.h"

namespace ffi = xla::ffi;

namespace {

using Array = ffi::Buffer<ffi::F32>;
using Result = ffi::ResultBuffer<ffi::F32>;

constexpr int64_t kBlock = 64;

template <int kWidth, bool kProduct>
void columns(const float* a, const float* b, int64_t rows, int64_t channels, float* sum) {
  float s[kWidth] = {};
  for (int64_t r = 0; r < rows; ++r, a += channels, b += channels)
    for (int c = 0; c < kWidth; ++c) s[c] += kProduct ? a[c] * b[c] : a[c];
  std::copy(s, s + kWidth, sum);
}

template <bool kProduct>
ffi::Error sums(ffi::ThreadPool& pool, const Array& a, const Array& b, Result& out) {
  try {
    auto d = a.dimensions();
    int64_t rows = d[1] * d[2], channels = d[3], blocks = (channels + kBlock - 1) / kBlock;
    int64_t tasks = d[0] * blocks;
    int parts = static_cast<int>(
        std::min<int64_t>(std::max<int64_t>(1, pool.num_threads()), tasks));
    share_out(pool, parts, [&](int part) {
      for (int64_t t = tasks * part / parts; t < tasks * (part + 1) / parts; ++t) {
        int64_t n = t / blocks, c = t % blocks * kBlock, end = std::min(c + kBlock, channels);
        const float *x = a.typed_data() + n * rows * channels,
                    *y = b.typed_data() + n * rows * channels;
        float* sum = out->typed_data() + n * channels;
        if (end - c == kBlock)
          columns<kBlock, kProduct>(x + c, y + c, rows, channels, sum + c);
        else {
          for (; c + 16 <= end; c += 16)
            columns<16, kProduct>(x + c, y + c, rows, channels, sum + c);
          for (; c < end; ++c) columns<1, kProduct>(x + c, y + c, rows, channels, sum + c);
        }
      }
    });
    return ffi::Error::Success();
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("sums: ") + e.what());
  }
}

ffi::Error total(ffi::ThreadPool pool, Array a, Result out) { return sums<false>(pool, a, a, out); }

ffi::Error inner(ffi::ThreadPool pool, Array a, Array b, Result out) {
  return sums<true>(pool, a, b, out);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(image_total, total,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Array>().Ret<Array>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(image_inner, inner,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Array>().Arg<Array>()
                                  .Ret<Array>());
