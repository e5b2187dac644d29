// The three loops of ops/lstm.py over time, as XLA FFI handlers.
//
// The examples of a batch are independent: every thread takes some of them through all steps. A
// step is done for kLanes units of the state at a time and up to kRows examples, all four gates in
// registers from the product with the weights to the last of the unit's results. The last units are
// kLanes counted from the end, so that some are computed twice, to the same bits.
//
// Arrays are (time, batch, 6, width): four gates, c, h, or their derivatives.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "threads.h"

namespace ffi = xla::ffi;

namespace {

using Array = ffi::Buffer<ffi::F32>;
using Result = ffi::ResultBuffer<ffi::F32>;

#ifdef __AVX512F__
constexpr int kLanes = 16, kRows = 6;
#else
constexpr int kLanes = 8, kRows = 3;
#endif
typedef float V __attribute__((vector_size(kLanes * sizeof(float))));

enum Kind { kForward, kLinear, kReverse };

inline V load(const float* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void store(float* to, V v) { std::memcpy(to, &v, sizeof v); }

// x P(x x) / Q(x x), to a few units in the last place: the rational function of Eigen and XLA.
inline V tanh(V x) {
  constexpr float end = 7.90531110763549805f;
  x = x > end ? V{} + end : x;
  x = x < -end ? V{} - end : x;
  V y = x * x, p = V{} - 2.76076847742355e-16f, q = V{} + 1.19825839466702e-06f;
  #pragma GCC unroll 8
  for (float a : {2.00018790482477e-13f, -8.60467152213735e-11f, 5.12229709037114e-08f,
                  1.48572235717979e-05f, 6.37261928875436e-04f, 4.89352455891786e-03f})
    p = p * y + a;
  #pragma GCC unroll 8
  for (float b : {1.18534705686654e-04f, 2.26843463243900e-03f, 4.89352518554385e-03f})
    q = q * y + b;
  return x * p / q;
}

inline V sigmoid(V x) { return 0.5f * tanh(0.5f * x) + 0.5f; }

inline V slope(V s) { return s * (1 - s); }

// What a thread needs to know; `w` is in the order of `pack`.
struct Loop {
  int64_t steps, batch, width, given, wanted;  // fields of the source and of the result
  const float *source, *states, *w;
  float *out, *carry;  // carry (2, batch, width): s of this step and of the one before
  int64_t panels() const { return (width + kLanes - 1) / kLanes; }
  int64_t first(int64_t panel) const { return std::min(panel * kLanes, width - kLanes); }
  int64_t size() const { return width * 4 * kLanes; }
};

// The weights of kLanes units from `first` on, as (width, 4, kLanes): of the gates' products in the
// forward loops, of each gate's contribution to h in reverse.
void pack(Kind kind, const float* w, int64_t width, int64_t first, float* to) {
  for (int64_t k = 0; k < width; ++k)
    for (int64_t g = 0; g < 4; ++g)
      for (int64_t lane = 0; lane < kLanes; ++lane)
        *to++ = kind == kReverse ? w[((first + lane) * 4 + g) * width + k]
                                 : w[(k * 4 + g) * width + first + lane];
}

// One step of the units from `first` on, for R examples from `n` on.
template <Kind kind, int R>
void tile(const Loop& l, int64_t t, int64_t n, int64_t first, const float* w) {
  const int64_t width = l.width, example = t * l.batch + n;
  const int64_t back = kind == kReverse ? -l.batch : l.batch;  // examples to the step before
  const bool start = kind == kReverse ? t == l.steps - 1 : t == 0;
  // Of six fields, those that an array of as many has.
  auto has = [](int64_t fields, int field) { return fields == 1 ? field == 5 : field < fields; };
  auto source = [&](int r, int field) {
    if (!has(l.given, field)) return V{};
    return load(l.source + ((example + r) * l.given + (l.given == 1 ? 0 : field)) * width + first);
  };
  V sum[R][4];
  #pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    #pragma GCC unroll 8
    for (int g = 0; g < 4; ++g) sum[r][g] = kind == kReverse ? V{} : source(r, g);
  const int64_t row = l.wanted * width;
  if (!start) {
    // h, or the gates in reverse
    const float* in = l.out + (example - back) * row + (kind == kReverse ? 0 : row - width);
    const int64_t gate = kind == kReverse ? width : 0;
    const float* at[4] = {in, in + gate, in + 2 * gate, in + 3 * gate};
    for (int64_t k = 0; k < width; ++k, w += 4 * kLanes)
      #pragma GCC unroll 8
      for (int g = 0; g < 4; ++g) {
        V weights = load(w + g * kLanes);
        const float* x = at[g]++;
        if (kind == kReverse) asm("" : "+r"(x));  // four addresses in registers, not 4 R
        #pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sum[r][g] += x[r * row] * weights;
      }
  }
  #pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    float* out = l.out + (example + r) * row + first;
    float *s_now = l.carry + ((t % 2) * l.batch + n + r) * width + first;
    const float* s_before = l.carry + ((1 - t % 2) * l.batch + n + r) * width + first;
    auto put = [&](int field, V v) {
      if (has(l.wanted, field)) store(out + (l.wanted == 1 ? 0 : field) * width, v);
    };
    if constexpr (kind == kForward) {
      V i = sigmoid(sum[r][0]), f = sigmoid(sum[r][1]), g = tanh(sum[r][2]), o = sigmoid(sum[r][3]);
      V c = i * g;
      if (!start) c += f * load(s_before);
      store(s_now, c);
      put(0, i), put(1, f), put(2, g), put(3, o), put(4, c), put(5, o * tanh(c));
    } else {
      const float* states = l.states + (example + r) * 6 * width + first;
      auto state = [&](int field) { return load(states + field * width); };
      V i = state(0), f = state(1), g = state(2), o = state(3), tanh_c = tanh(state(4));
      V before = t == 0 ? V{} : load(states + (4 - 6 * l.batch) * width);
      V pi = slope(i) * g, pf = slope(f) * before, pg = i * (1 - g * g), qo = slope(o) * tanh_c;
      V to_k = o * (1 - tanh_c * tanh_c), s = source(r, 4), k = source(r, 5);
      if constexpr (kind == kLinear) {
        s += pi * sum[r][0] + pf * sum[r][1] + pg * sum[r][2];
        if (!start) s += f * load(s_before);
        k += to_k * s + qo * sum[r][3];
        put(0, sum[r][0]), put(1, sum[r][1]), put(2, sum[r][2]), put(3, sum[r][3]);
      } else {
        k += (sum[r][0] + sum[r][1]) + (sum[r][2] + sum[r][3]);
        s += to_k * k;
        if (!start) s += load(states + (1 + 6 * l.batch) * width) * load(s_before);
        put(0, source(r, 0) + pi * s), put(1, source(r, 1) + pf * s);
        put(2, source(r, 2) + pg * s), put(3, source(r, 3) + qo * k);
      }
      store(s_now, s);
      put(4, s), put(5, k);
    }
  }
}

// One step of a panel, kLanes units, for the examples from `begin` to `end`.
template <Kind kind, int R = kRows>
void rows(const Loop& l, int64_t t, int64_t panel, int64_t begin, int64_t end) {
  for (; end - begin >= R; begin += R)
    tile<kind, R>(l, t, begin, l.first(panel), l.w + panel * l.size());
  if constexpr (R > 1) rows<kind, R - 1>(l, t, panel, begin, end);
}

template <Kind kind>
ffi::Error run(ffi::ThreadPool pool, int64_t given, const float* source, const float* states,
               Array w, Result out) {
  try {
    auto shape = out->dimensions();
    Loop l{shape[0], shape[1], shape[3], given, shape[2], source, states, nullptr,
           out->typed_data(), nullptr};
    int64_t weights = l.panels() * l.size();
    thread_local Room room;
    auto* packed = static_cast<float*>(
        room.of((weights + 2 * l.batch * l.width) * sizeof(float)));
    l.carry = packed + weights;
    l.w = packed;
    int threads = static_cast<int>(std::max<int64_t>(1, pool.num_threads()));
    share_out(pool, threads, [&](int i) {
      for (int64_t p = l.panels() * i / threads; p < l.panels() * (i + 1) / threads; ++p)
        pack(kind, w.typed_data(), l.width, l.first(p), packed + p * l.size());
    });
    int parts = static_cast<int>(std::min<int64_t>(threads, l.batch));
    share_out(pool, parts, [&](int i) {
      for (int64_t t = 0; t < l.steps; ++t)
        for (int64_t p = 0; p < l.panels(); ++p)
          rows<kind>(l, kind == kReverse ? l.steps - 1 - t : t, p, l.batch * i / parts,
                     l.batch * (i + 1) / parts);
    });
    return ffi::Error::Success();
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("lstm: ") + e.what());
  }
}

ffi::Error forward(ffi::ThreadPool pool, Array x, Array w, Result out) {
  return run<kForward>(pool, 4, x.typed_data(), nullptr, w, out);
}

template <Kind kind>
ffi::Error derivative(ffi::ThreadPool pool, Array source, Array states, Array w, Result out) {
  return run<kind>(pool, source.dimensions()[2], source.typed_data(), states.typed_data(), w, out);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(lstm_forward, forward,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Array>().Arg<Array>()
                                  .Ret<Array>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(lstm_linear, derivative<kLinear>,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Array>().Arg<Array>()
                                  .Arg<Array>().Ret<Array>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(lstm_reverse, derivative<kReverse>,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Array>().Arg<Array>()
                                  .Arg<Array>().Ret<Array>());
