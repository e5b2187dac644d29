// Three convolution maps (output, input gradient, filter gradient) by oneDNN, as XLA FFI handlers.
//
// Activations are NHWC, filters HWIO (groups: the output channels of group 0 come first). oneDNN's
// own OpenMP teams lose against other work on the machine and multiply under several callers, so
// every call of oneDNN here runs on one thread, and the examples are shared out over XLA's own
// threads instead: as many parts as XLA has threads, whoever is free taking the next. So are slices
// of the filters, where oneDNN wants them in an order of its own (it takes as long as half of the
// work for 512 channels of 4x4 pixels). Filter gradients are one partial sum per part, added up in
// the order of the parts, so that bits depend on the number of threads but not on scheduling.
//
// Primitives are cached by geometry; scratch memory belongs to the thread that uses it.

#include <omp.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "oneapi/dnnl/dnnl.hpp"
#include "threads.h"
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

// A part of the filters, some of the output channels, put into oneDNN's order or taken out of it.
struct Slice {
  dnnl::primitive reorder;
  memory::desc from, to;
};

struct Plan {
  dnnl::primitive compute;
  memory::desc first, second, packed, scratch;
  std::vector<Slice> slices;  // none, if oneDNN takes the filters as they are
  size_t packed_bytes = 0, scratch_bytes = 0;
};

memory::desc filter_desc(const Shape& s, memory::data_type type, memory::format_tag tag) {
  if (s.groups == 1) return {{s.o, s.c, s.kh, s.kw}, type, tag};
  return {{s.groups, s.o / s.groups, s.c / s.groups, s.kh, s.kw}, type, tag};
}

// Slices that divide the filters at multiples of 64 channels; one of all where the order of oneDNN's
// cannot be cut there.
std::vector<Slice> slices_of(const Shape& s, const memory::desc& plain, const memory::desc& packed,
                             int count, const dnnl::primitive_attr& attr) {
  bool out = s.kind == kFilterGrad;
  const auto &from = out ? packed : plain, &to = out ? plain : packed;
  int64_t blocks = s.groups == 1 ? (s.o + 63) / 64 : 1;
  int64_t slices = std::min<int64_t>(count, blocks);
  std::vector<Slice> found;
  for (int64_t i = 0; i < slices; ++i) {
    memory::desc a = from, b = to;
    if (slices > 1) {
      int64_t begin = blocks * i / slices * 64, end = std::min(blocks * (i + 1) / slices * 64, s.o);
      memory::dims size{end - begin, s.c, s.kh, s.kw}, offset{begin, 0, 0, 0};
      a = from.submemory_desc(size, offset, true);
      b = to.submemory_desc(size, offset, true);
      if (!a || !b) return slices_of(s, plain, packed, 1, attr);
    }
    dnnl::reorder::primitive_desc r(engine(), a, engine(), b, attr);
    found.push_back({dnnl::reorder(r), a, b});
  }
  return found;
}

// `packed`: the filters' order, if another part's plan has chosen one.
std::shared_ptr<Plan> make_plan(const Shape& s, int count, const memory::desc* packed) {
  using tag = memory::format_tag;
  auto type = s.operand();
  auto algorithm = dnnl::algorithm::convolution_direct;
  memory::dims strides{s.stride_h, s.stride_w}, before{s.top, s.left}, after{s.bottom, s.right};
  memory::dims dilation{s.dilate_h - 1, s.dilate_w - 1};
  memory::desc x({s.n, s.c, s.h, s.w}, type, tag::nhwc), y({s.n, s.o, s.oh, s.ow}, type, tag::nhwc);
  auto any = filter_desc(s, type, tag::any);
  auto order = packed ? *packed : filter_desc(s, s.filter(), tag::any);
  dnnl::primitive_attr attr, none;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  auto plan = std::make_shared<Plan>();
  dnnl::convolution_forward::primitive_desc forward(
      engine(), dnnl::prop_kind::forward_training, algorithm, x, s.kind == kOutput ? order : any, y,
      strides, dilation, before, after, s.kind == kOutput ? attr : none);
  if (s.kind == kOutput) {
    plan->compute = dnnl::convolution_forward(forward);
    plan->packed = forward.weights_desc();
    plan->scratch = forward.scratchpad_desc();
    plan->first = forward.src_desc();
    plan->second = forward.dst_desc();
  } else if (s.kind == kInputGrad) {
    dnnl::convolution_backward_data::primitive_desc d(
        engine(), algorithm, x, order, y, strides, dilation, before, after, forward, attr);
    plan->compute = dnnl::convolution_backward_data(d);
    plan->packed = d.weights_desc();
    plan->scratch = d.scratchpad_desc();
    plan->first = d.diff_dst_desc();
    plan->second = d.diff_src_desc();
  } else {
    dnnl::convolution_backward_weights::primitive_desc d(
        engine(), algorithm, x, order, y, strides, dilation, before, after, forward, attr);
    plan->compute = dnnl::convolution_backward_weights(d);
    plan->packed = d.diff_weights_desc();
    plan->scratch = d.scratchpad_desc();
    plan->first = d.src_desc();
    plan->second = d.diff_dst_desc();
  }
  auto plain = filter_desc(s, s.filter(), s.groups == 1 ? tag::hwio : tag::hwigo);
  plan->packed_bytes = plan->packed.get_size();
  plan->scratch_bytes = plan->scratch.get_size();
  if (plan->packed != plain) plan->slices = slices_of(s, plain, plan->packed, count, none);
  return plan;
}

// The plans of a shape's `count` parts, which all have their filters in the order of the first.
std::vector<std::shared_ptr<Plan>> find_plans(const std::vector<Shape>& parts) {
  static std::mutex mutex;
  static std::map<std::array<int64_t, 21>, std::shared_ptr<Plan>> plans;
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<std::shared_ptr<Plan>> found;
  for (const auto& s : parts) {
    std::array<int64_t, 21> key;
    auto numbers = s.tie();
    std::copy(numbers.begin(), numbers.end(), key.begin());
    key.back() = parts[0].n;
    auto& plan = plans[key];
    bool first = s.n == parts[0].n;
    if (!plan)
      plan = make_plan(s, static_cast<int>(parts.size()), first ? nullptr : &found[0]->packed);
    found.push_back(plan);
  }
  return found;
}

// oneDNN on the calling thread alone; plans depend on it, too.
struct OneThread {
  int threads = omp_get_max_threads();
  OneThread() { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(threads); }
};

dnnl::stream& stream() {
  thread_local dnnl::stream s(engine());
  return s;
}

// One part of the examples.
void compute(Kind kind, const Plan& plan, void* first, void* second, void* filters) {
  thread_local Room room;
  OneThread one;
  memory scratch(plan.scratch, engine(), room.of(plan.scratch_bytes));
  memory a(plan.first, engine(), first), b(plan.second, engine(), second);
  memory packed(plan.packed, engine(), filters);
  if (kind == kFilterGrad)
    plan.compute.execute(stream(), {{DNNL_ARG_SRC, a},
                                    {DNNL_ARG_DIFF_DST, b},
                                    {DNNL_ARG_DIFF_WEIGHTS, packed},
                                    {DNNL_ARG_SCRATCHPAD, scratch}});
  else
    plan.compute.execute(stream(), {{kind == kOutput ? DNNL_ARG_SRC : DNNL_ARG_DIFF_DST, a},
                                    {DNNL_ARG_WEIGHTS, packed},
                                    {kind == kOutput ? DNNL_ARG_DST : DNNL_ARG_DIFF_SRC, b},
                                    {DNNL_ARG_SCRATCHPAD, scratch}});
  stream().wait();
}

void reorder(const Slice& slice, void* from, void* to) {
  OneThread one;
  memory a(slice.from, engine(), from), b(slice.to, engine(), to);
  slice.reorder.execute(stream(), {{DNNL_ARG_FROM, a}, {DNNL_ARG_TO, b}});
  stream().wait();
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
    std::vector<Shape> shapes(parts, shape);
    for (int i = 0; i < parts; ++i) shapes[i].n = begin(i + 1) - begin(i);
    std::vector<std::shared_ptr<Plan>> plans;
    {
      OneThread one;
      plans = find_plans(shapes);
    }
    const Plan& plan = *plans[0];
    int slices = static_cast<int>(plan.slices.size());
    thread_local Room room;
    if (kind != kFilterGrad) {
      void *plain = b.untyped_data(), *filters = slices ? room.of(plan.packed_bytes) : plain;
      share_out(pool, slices, [&](int i) { reorder(plan.slices[i], plain, filters); });
      share_out(pool, parts,
                [&](int i) { compute(kind, *plans[i], from(a, i), from(*out, i), filters); });
      return ffi::Error::Success();
    }
    // Partial sums, one after the other; the first is the result, if it need not be reordered.
    size_t numbers = plan.packed_bytes / sizeof(float);
    auto* sums = static_cast<float*>(room.of(plan.packed_bytes * parts));
    auto* whole = slices ? sums : static_cast<float*>(out->untyped_data());
    auto partial = [&](int i) { return i == 0 ? whole : sums + numbers * i; };
    share_out(pool, parts, [&](int i) {
      compute(kind, *plans[i], from(a, i), from(b, i), partial(i));
    });
    share_out(pool, parts, [&](int k) {
      for (int i = 1; i < parts; ++i)
        for (size_t j = numbers * k / parts, end = numbers * (k + 1) / parts; j < end; ++j)
          whole[j] += partial(i)[j];
    });
    share_out(pool, slices, [&](int i) { reorder(plan.slices[i], whole, out->untyped_data()); });
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
