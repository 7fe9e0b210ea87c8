// A pretend accelerator for the tests: its memory is the host's and torch's CPU operators compute,
// but tensors say "privateuseone:0". Mixing devices raises, as CUDA would, and everything for which
// a host would launch a kernel or wait for the device is counted.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

using at::Tensor;

const c10::Device device(c10::DeviceType::PrivateUse1, 0);

// Autograd has threads of its own, so the counters are locked.
std::mutex lock;
std::map<std::string, long> waits, launches;
thread_local bool counting = true;

void count(std::map<std::string, long>& counters, const std::string& what) {
  if (!counting) return;
  std::lock_guard<std::mutex> guard(lock);
  counters[what]++;
}

struct Uncounted {  // what an operator does inside is not the caller's
  bool before = counting;
  Uncounted() { counting = false; }
  ~Uncounted() { counting = before; }
};

// Memory

struct HostAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::aligned_alloc(256, (bytes + 255) / 256 * 256) : nullptr;
    return {data, data, &std::free, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

HostAllocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);

Tensor on_host(const Tensor& tensor) {  // the same memory, seen as a CPU tensor
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

Tensor on_device(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto result = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  if (tensor.numel()) on_host(result).copy_(tensor);
  return result;
}

constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, keys,
      c10::dtype_or_default(dtype));
}

const Tensor& resize(
    const Tensor& self, c10::SymIntArrayRef symbolic, std::optional<at::MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  if (self.sizes() == size) return self;
  int64_t elements = 1;
  for (auto each : size) elements *= each;
  size_t needed = (elements + self.storage_offset()) * self.element_size();
  auto storage = self.storage();
  if (storage.nbytes() < needed) {
    auto larger = allocator.allocate(needed);
    if (storage.nbytes()) std::memcpy(larger.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr(std::move(larger));
    storage.set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage(
    Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(storage);
  tensor->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  tensor->set_storage_offset(offset.expect_int());
  return self;
}

// Copies and waits. A copy to the device is queued; one to the host is waited for.

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.device() == to.device()) {
    count(launches, "copy");
  } else if (to.is_cpu()) {
    count(waits, non_blocking ? "copy to the host, not waited for" : "copy to the host");
  } else {
    count(launches, "copy to the device");
  }
  if (from.numel()) {
    Tensor target = to.is_cpu() ? to : on_host(to);
    target.copy_(from.is_cpu() ? from : on_host(from));
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  resize(to, c10::fromIntArrayRefSlow(from.sizes()), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& tensor) {
  count(waits, "item");
  return on_host(tensor).item();
}

// Everything else runs on the CPU, after a check that its tensors are where CUDA would want them.

// The shapes of their results depend on values, so a host waits for them.
const std::set<std::string> data_dependent = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::repeat_interleave", "aten::equal", "aten::bincount",
    "aten::is_nonzero"};
// Indices may be on the CPU for a tensor on the device.
const std::set<std::string> mixed = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_foreach_add_"};

struct Places {
  bool host = false, here = false;
  void see(const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (!tensor.is_cpu()) here = true;
    else if (tensor.dim() > 0) host = true;  // a CPU scalar goes with anything
  }
};

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.name();
  Places places;
  for (const auto& argument : torch::jit::last(stack, schema.arguments().size())) {
    if (argument.isTensor()) {
      places.see(argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const Tensor& each : argument.toTensorList()) places.see(each);
    } else if (argument.isOptionalTensorList()) {
      for (const std::optional<Tensor>& each : argument.toOptionalTensorList())
        if (each.has_value()) places.see(*each);
    } else if (argument.isGenerator()) {
      TORCH_CHECK(
          !argument.toGenerator().device().is_cpu(),
          "Expected a generator of the device, got one of the CPU: ", name);
    }
  }
  TORCH_CHECK(
      !(places.host && places.here) || mixed.count(name),
      "Expected all tensors to be on the same device, but found the CPU and ", device, ": ", name);
  count(launches, name);
  if (data_dependent.count(name)) count(waits, name);
  Uncounted inside;
  at::native::cpu_fallback(op, stack);
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
    bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  count(launches, "convolution");
  Uncounted inside;
  std::optional<Tensor> added;
  if (bias.has_value() && bias->defined()) added = on_host(*bias);
  return on_device(at::convolution_symint(
      on_host(input), on_host(weight), added, stride, padding, dilation, transposed,
      output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> wanted) {
  count(launches, "convolution backward");
  Uncounted inside;
  auto [first, second, third] = at::convolution_backward_symint(
      on_host(gradient), on_host(input), on_host(weight), std::nullopt, stride, padding, dilation,
      transposed, output_padding, groups, wanted);
  return {on_device(first), on_device(second), on_device(third)};
}

// What torch asks of a device: one of them, one stream, events that have always happened.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(
      void** event, const c10::Stream&, const c10::DeviceIndex,
      const c10::EventFlag) const override {
    static int something;
    *event = &something;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getCPUAllocator(); }
};

Hooks hooks;
[[maybe_unused]] const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

std::string listed(const std::map<std::string, long>& counters) {
  std::string text;
  for (const auto& [name, number] : counters) text += name + "\t" + std::to_string(number) + "\n";
  return text;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", [](const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                          std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
  });
  m.impl("view", [](const Tensor& self, at::IntArrayRef size) {
    return at::native::view(self, size);
  });
  m.impl("_reshape_alias", [](const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

extern "C" const char* pretend_counts(int of_waits) {
  static std::string text;
  std::lock_guard<std::mutex> guard(lock);
  text = listed(of_waits ? waits : launches);
  return text.c_str();
}

extern "C" void pretend_reset() {
  std::lock_guard<std::mutex> guard(lock);
  waits.clear();
  launches.clear();
}
