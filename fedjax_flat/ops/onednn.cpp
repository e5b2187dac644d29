// Three convolution maps (output, input gradient, filter gradient) by oneDNN, as XLA FFI handlers.
//
// Activations are NHWC, filters HWIO (groups: the output channels of group 0 come first). oneDNN's
// own OpenMP teams lose against other work on the machine and multiply under several callers, so
// every call of oneDNN here runs on one thread, and the examples are shared out over XLA's own
// threads instead: as many parts as XLA has threads, whoever is free taking the next. Filter
// gradients are one partial sum per part, added up in the order of the parts, so that bits depend on
// the number of threads but not on scheduling.
//
// Primitives are cached by geometry; scratch memory belongs to the thread that uses it.

#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "oneapi/dnnl/dnnl.hpp"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using dnnl::memory;

namespace {

enum Kind : int64_t { kOutput, kInputGrad, kFilterGrad };

// What a primitive depends on; n is the number of examples of one part.
struct Shape {
  int64_t kind, half, n, h, w, c, o, oh, ow, kh, kw, stride_h, stride_w, top, left, bottom, right,
      dilate_h, dilate_w, groups;
  auto tie() const {
    return std::array<int64_t, 20>{kind, half, n, h, w, c, o, oh, ow, kh, kw, stride_h, stride_w,
                                   top, left, bottom, right, dilate_h, dilate_w, groups};
  }
  // Operands are float32 or bfloat16; gradients of filters are sums, and always float32.
  auto operand() const { return half ? memory::data_type::bf16 : memory::data_type::f32; }
  auto filter() const { return kind == kFilterGrad ? memory::data_type::f32 : operand(); }
};

dnnl::engine& engine() {
  static dnnl::engine e(dnnl::engine::kind::cpu, 0);
  return e;
}

struct Plan {
  dnnl::primitive compute, reorder;  // reorder: filters in or, for the filter gradient, out
  memory::desc first, second, filters, packed, scratch;
  bool reorders = false;
  size_t packed_bytes = 0, scratch_bytes = 0;
};

memory::desc filter_desc(const Shape& s, memory::data_type type, memory::format_tag tag) {
  if (s.groups == 1) return {{s.o, s.c, s.kh, s.kw}, type, tag};
  return {{s.groups, s.o / s.groups, s.c / s.groups, s.kh, s.kw}, type, tag};
}

std::shared_ptr<Plan> make_plan(const Shape& s) {
  using tag = memory::format_tag;
  auto type = s.operand();
  auto algorithm = dnnl::algorithm::convolution_direct;
  memory::dims strides{s.stride_h, s.stride_w}, before{s.top, s.left}, after{s.bottom, s.right};
  memory::dims dilation{s.dilate_h - 1, s.dilate_w - 1};
  memory::desc x({s.n, s.c, s.h, s.w}, type, tag::nhwc), y({s.n, s.o, s.oh, s.ow}, type, tag::nhwc);
  auto any = filter_desc(s, type, tag::any);
  dnnl::primitive_attr attr, none;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  auto plan = std::make_shared<Plan>();
  dnnl::convolution_forward::primitive_desc forward(
      engine(), dnnl::prop_kind::forward_training, algorithm, x, any, y, strides, dilation, before,
      after, s.kind == kOutput ? attr : none);
  if (s.kind == kOutput) {
    plan->compute = dnnl::convolution_forward(forward);
    plan->packed = forward.weights_desc();
    plan->scratch = forward.scratchpad_desc();
    plan->first = forward.src_desc();
    plan->second = forward.dst_desc();
  } else if (s.kind == kInputGrad) {
    dnnl::convolution_backward_data::primitive_desc d(
        engine(), algorithm, x, any, y, strides, dilation, before, after, forward, attr);
    plan->compute = dnnl::convolution_backward_data(d);
    plan->packed = d.weights_desc();
    plan->scratch = d.scratchpad_desc();
    plan->first = d.diff_dst_desc();
    plan->second = d.diff_src_desc();
  } else {
    dnnl::convolution_backward_weights::primitive_desc d(
        engine(), algorithm, x, filter_desc(s, s.filter(), tag::any), y, strides, dilation, before,
        after, forward, attr);
    plan->compute = dnnl::convolution_backward_weights(d);
    plan->packed = d.diff_weights_desc();
    plan->scratch = d.scratchpad_desc();
    plan->first = d.src_desc();
    plan->second = d.diff_dst_desc();
  }
  plan->filters = filter_desc(s, s.filter(), s.groups == 1 ? tag::hwio : tag::hwigo);
  plan->reorders = plan->packed != plan->filters;
  plan->scratch_bytes = plan->scratch.get_size();
  if (plan->reorders) {
    bool out = s.kind == kFilterGrad;
    dnnl::reorder::primitive_desc r(engine(), out ? plan->packed : plan->filters, engine(),
                                    out ? plan->filters : plan->packed, attr);
    plan->reorder = dnnl::reorder(r);
    plan->packed_bytes = plan->packed.get_size();
    plan->scratch_bytes = std::max(plan->scratch_bytes, r.scratchpad_desc().get_size());
  }
  return plan;
}

std::shared_ptr<Plan> find_plan(const Shape& s) {
  static std::mutex mutex;
  static std::map<std::array<int64_t, 20>, std::shared_ptr<Plan>> plans;
  std::lock_guard<std::mutex> lock(mutex);
  auto& plan = plans[s.tie()];
  if (!plan) plan = make_plan(s);
  return plan;
}

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

// One part of the examples, on the thread that calls.
void run_part(const Shape& s, void* first, void* second, void* filters) {
  thread_local Room packed_room, scratch_room;
  thread_local dnnl::stream stream(engine());
  int threads = omp_get_max_threads();
  omp_set_num_threads(1);  // of this thread's own parallel regions; plans depend on it too
  struct Restore {
    int threads;
    ~Restore() { omp_set_num_threads(threads); }
  } restore{threads};
  auto plan = find_plan(s);
  memory plain(plan->filters, engine(), filters);
  memory packed = plan->reorders
                      ? memory(plan->packed, engine(), packed_room.of(plan->packed_bytes))
                      : plain;
  memory scratch(plan->scratch, engine(), scratch_room.of(plan->scratch_bytes));
  memory a(plan->first, engine(), first), b(plan->second, engine(), second);
  auto reorder = [&](memory& from, memory& to) {
    if (plan->reorders)
      plan->reorder.execute(stream, {{DNNL_ARG_FROM, from},
                                     {DNNL_ARG_TO, to},
                                     {DNNL_ARG_SCRATCHPAD, scratch}});
  };
  if (s.kind == kFilterGrad) {
    plan->compute.execute(stream, {{DNNL_ARG_SRC, a},
                                   {DNNL_ARG_DIFF_DST, b},
                                   {DNNL_ARG_DIFF_WEIGHTS, packed},
                                   {DNNL_ARG_SCRATCHPAD, scratch}});
    reorder(packed, plain);
  } else {
    bool out = s.kind == kOutput;
    reorder(plain, packed);
    plan->compute.execute(stream, {{out ? DNNL_ARG_SRC : DNNL_ARG_DIFF_DST, a},
                                   {DNNL_ARG_WEIGHTS, packed},
                                   {out ? DNNL_ARG_DST : DNNL_ARG_DIFF_SRC, b},
                                   {DNNL_ARG_SCRATCHPAD, scratch}});
  }
  stream.wait();
}

// f(0) .. f(count - 1) on XLA's threads. The caller takes part, so a busy pool blocks nothing.
template <typename F>
void share_out(ffi::ThreadPool& pool, int count, const F& f) {
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

ffi::Error run(Kind kind, ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b,
               ffi::Result<ffi::AnyBuffer> out, ffi::Span<const int64_t> image,
               ffi::Span<const int64_t> kernel, ffi::Span<const int64_t> strides,
               ffi::Span<const int64_t> padding, ffi::Span<const int64_t> dilation,
               int64_t groups) {
  try {
    auto da = a.dimensions(), db = b.dimensions(), dr = out->dimensions();
    int64_t n = da[0];
    int64_t c = kind == kInputGrad ? dr[3] : da[3], o = kind == kInputGrad ? da[3] : db[3];
    auto dy = kind == kOutput ? dr : (kind == kInputGrad ? da : db);
    Shape shape{kind,       a.element_type() == ffi::BF16,
                n,          image[0],   image[1],    c,           o,          dy[1],
                dy[2],      kernel[0],  kernel[1],   strides[0],  strides[1], padding[0],
                padding[2], padding[1], padding[3],  dilation[0], dilation[1], groups};
    int parts = static_cast<int>(std::min<int64_t>(std::max<int64_t>(1, pool.num_threads()), n));
    auto begin = [&](int i) { return n * i / parts; };
    // Where an array's part i starts.
    auto from = [&](auto& array, int i) {
      return static_cast<char*>(array.untyped_data()) + array.size_bytes() / n * begin(i);
    };
    auto part = [&](int i) {
      Shape s = shape;
      s.n = begin(i + 1) - begin(i);
      return s;
    };
    if (kind != kFilterGrad) {
      share_out(pool, parts, [&](int i) {
        run_part(part(i), from(a, i), from(*out, i), b.untyped_data());
      });
      return ffi::Error::Success();
    }
    size_t filters = out->element_count();
    auto* result = static_cast<float*>(out->untyped_data());
    std::vector<float> rest(filters * (parts - 1));
    share_out(pool, parts, [&](int i) {
      run_part(part(i), from(a, i), from(b, i),
               i == 0 ? result : rest.data() + filters * (i - 1));
    });
    for (int i = 1; i < parts; ++i) {
      const float* more = rest.data() + filters * (i - 1);
      for (size_t j = 0; j < filters; ++j) result[j] += more[j];
    }
    return ffi::Error::Success();
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("oneDNN: ") + e.what());
  }
}

template <Kind kind>
ffi::Error conv_map(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b,
                    ffi::Result<ffi::AnyBuffer> out, ffi::Span<const int64_t> image,
                    ffi::Span<const int64_t> kernel, ffi::Span<const int64_t> strides,
                    ffi::Span<const int64_t> padding, ffi::Span<const int64_t> dilation,
                    int64_t groups) {
  return run(kind, pool, a, b, out, image, kernel, strides, padding, dilation, groups);
}

auto binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Attr<ffi::Span<const int64_t>>("image")
      .Attr<ffi::Span<const int64_t>>("kernel")
      .Attr<ffi::Span<const int64_t>>("strides")
      .Attr<ffi::Span<const int64_t>>("padding")
      .Attr<ffi::Span<const int64_t>>("dilation")
      .Attr<int64_t>("groups");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(conv_output, conv_map<kOutput>, binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(conv_input_grad, conv_map<kInputGrad>, binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(conv_filter_grad, conv_map<kFilterGrad>, binding());
