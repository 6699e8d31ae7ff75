// tensors.cpp - what ops.cpp's fallback cannot do: make tensors, view them, move them to and from the
// host.
//
// Copies follow CUDA's rules. Bytes cross between host and device as they are: a conversion, or strides, make
// a contiguous temporary first. Pinned memory with non_blocking=True: the host goes on. Pageable memory: the
// host waits, but for a small copy to the device, which takes its bytes along when it is launched.
#include "sim.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>

namespace sim {

using at::IntArrayRef;
using at::Tensor;

// ---- making ----

static void must_be_strided(std::optional<c10::Layout> layout, std::optional<bool> pin) {
    TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "sim: only dense tensors are simulated");
    TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
}

static Tensor empty(IntArrayRef sizes, std::optional<c10::ScalarType> dtype,
                    std::optional<c10::Layout> layout, std::optional<c10::Device> on, std::optional<bool> pin,
                    std::optional<c10::MemoryFormat> format) {
    must_be_strided(layout, pin);
    c10::OptionalDeviceGuard guard(on);
    return at::detail::empty_generic(sizes, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

static Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                            std::optional<c10::Layout> layout, std::optional<c10::Device> on,
                            std::optional<bool> pin) {
    must_be_strided(layout, pin);
    c10::OptionalDeviceGuard guard(on);
    return at::detail::empty_strided_generic(sizes, strides, allocator(),
                                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

// ---- viewing ----

static Tensor as_strided(const Tensor &self, IntArrayRef sizes, IntArrayRef strides,
                         std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

static Tensor reshape_alias(const Tensor &self, IntArrayRef sizes, IntArrayRef strides) {
    return at::native::as_strided_tensorimpl(self, sizes, strides);
}

static Tensor view(const Tensor &self, IntArrayRef sizes) {
    return at::native::view(self, sizes);
}

static Tensor unfold(const Tensor &self, int64_t dimension, int64_t size, int64_t step) {
    return at::native::unfold(self, dimension, size, step);
}

static const Tensor &resize_(const Tensor &self, IntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
    c10::TensorImpl *impl = self.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(sizes);
    if (format && *format != c10::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
    size_t needed_bytes = at::detail::computeStorageNbytes(impl->sizes(), impl->strides(),
                                                           self.element_size(), self.storage_offset());
    if (needed_bytes > self.storage().nbytes()) storage_resize(self.storage(), needed_bytes);
    return self;
}

static Tensor &set_storage_part(Tensor &self, at::Storage source, int64_t offset, IntArrayRef sizes,
                                IntArrayRef strides) {
    c10::TensorImpl *impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(source));
    if (strides.size() == sizes.size()) {
        impl->set_sizes_and_strides(sizes, strides, offset);
    } else {
        impl->set_storage_offset(offset);
        impl->set_sizes_contiguous(sizes);
    }
    return self;
}

static Tensor &set_storage(Tensor &self, at::Storage source) {
    auto n = static_cast<int64_t>(source.nbytes() / self.element_size());
    return set_storage_part(self, std::move(source), 0, {n}, {});
}

static Tensor &set_tensor(Tensor &self, const Tensor &source) {
    return set_storage_part(self, source.storage(), source.storage_offset(), source.sizes(),
                            source.strides());
}

static Tensor &set_nothing(Tensor &self) {
    at::Storage none(at::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true);
    return set_storage_part(self, std::move(none), 0, {0}, {});
}

// `parameter.data = ` may bring a tensor of the CPU to the device, as FSDP2 does with a model made there.
// PyTorch knows that of its own devices alone.
static bool may_take_the_place_of(const Tensor &self, const Tensor &from) {
    return self.layout() == c10::kStrided && from.layout() == c10::kStrided;
}

static void record_stream_op(Tensor &self, c10::Stream stream) {
    record_stream(self.storage().data_ptr(), handle_of(stream));
}

// ---- copying ----

static constexpr size_t TAKEN_ALONG_BYTES =
    64 << 10; // a pageable copy up to here is asynchronous (CUDA's own limit)

static bool is_alike(const Tensor &one, const Tensor &other) {
    return one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() &&
           one.is_conj() == other.is_conj() && one.is_neg() == other.is_neg();
}

// Its bytes are its values, in order.
static bool is_plain(const Tensor &tensor) {
    return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

static void copy_to_device(const Tensor &dst, const Tensor &src, bool non_blocking) {
    if (!is_plain(dst)) {
        Tensor whole = at::empty(dst.sizes(), dst.options());
        copy_to_device(whole, src, non_blocking);
        dst.copy_(whole);
        return;
    }
    Tensor from = src.to(dst.scalar_type()).expand(dst.sizes()).resolve_conj().resolve_neg().contiguous();
    size_t bytes = dst.nbytes();
    bool pinned = is_pinned(from.const_data_ptr());
    if (!pinned && bytes <= TAKEN_ALONG_BYTES) {
        std::vector<Access> accesses;
        add_access(accesses, dst, true);
        auto taken = std::make_shared<std::string>(static_cast<const char *>(from.const_data_ptr()), bytes);
        void *to = as_cpu(dst).data_ptr();
        launch(current(), "copy to device", accesses, 0, [=] { memcpy(to, taken->data(), taken->size()); });
        return;
    }
    copy_bytes(Copy::kToDevice, as_cpu(dst).data_ptr(), from.const_data_ptr(), bytes, current());
    if (!pinned) return; // the driver has waited
    if (non_blocking)
        pinned_record(from, current());
    else
        stream_synchronize(current());
}

static void copy_to_host(const Tensor &dst, const Tensor &src, bool non_blocking) {
    // what is not there byte by byte is made so by the device
    Tensor from = src.to(dst.scalar_type()).expand(dst.sizes()).resolve_conj().resolve_neg().contiguous();
    if (!is_plain(dst)) {
        Tensor whole = at::empty(dst.sizes(), dst.options());
        copy_to_host(whole, from, false);
        dst.copy_(whole);
        return;
    }
    copy_bytes(Copy::kToHost, dst.data_ptr(), as_cpu(from).const_data_ptr(), dst.nbytes(), current());
    if (is_pinned(dst.const_data_ptr()) && non_blocking)
        pinned_record(dst, current());
    else
        stream_synchronize(current());
}

static void copy_on_device(const Tensor &dst, const Tensor &src) {
    if (is_alike(dst, src) && dst.is_contiguous() && src.is_contiguous())
        return copy_bytes(Copy::kOnDevice, as_cpu(dst).data_ptr(), as_cpu(src).const_data_ptr(), dst.nbytes(),
                          current());
    std::vector<Access> accesses;
    add_access(accesses, src, false);
    add_access(accesses, dst, true);
    launch(current(), "copy", accesses, 0, [to = as_cpu(dst), from = as_cpu(src)] {
        at::AutoDispatchBelowADInplaceOrView below;
        to.copy_(from);
    });
}

// at::copy_ leaves all that has a side here to this; returns dst.
static Tensor copy_from(const Tensor &src, const Tensor &dst, bool non_blocking) {
    at::AutoDispatchBelowADInplaceOrView below;
    if (dst.numel() == 0) return dst;
    if (dst.device().type() == kSim && src.device().type() == kSim)
        copy_on_device(dst, src);
    else if (dst.device().type() == kSim)
        copy_to_device(dst, src.cpu(), non_blocking);
    else if (dst.device().is_cpu())
        copy_to_host(dst, src, non_blocking);
    else
        dst.copy_(src.cpu());
    return dst;
}

static Tensor copy_from_and_resize(const Tensor &src, const Tensor &dst) {
    dst.resize_(src.sizes());
    return copy_from(src, dst, false);
}

// ---- operators that a device brings under another name ----

static void run_named(const char *name, const char *overload, torch::jit::Stack *stack) {
    run(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload), stack);
}

static void convolution(const c10::OperatorHandle &, torch::jit::Stack *stack) {
    run_named("aten::convolution", "", stack);
}

// The same, less the bias's sizes: those are the output's channels.
static void convolution_backward(const c10::OperatorHandle &, torch::jit::Stack *stack) {
    auto at = stack->end() - 10;
    Tensor grad = at->toTensor();
    stack->insert(at + 3, c10::IValue(std::vector<int64_t>{grad.size(1)}));
    run_named("aten::convolution_backward", "", stack);
}

// Attention as the CPU would choose it: its fused kernel under the name that other devices have for theirs,
// or the math.
int64_t fused_sdp_choice(const Tensor &query, const Tensor &key, const Tensor &value,
                         const std::optional<Tensor> &mask, double dropout, bool causal,
                         std::optional<double> scale, bool gqa) {
    constexpr int64_t MATH = 0, FLASH = 1, OVERRIDEABLE = 4; // sdp::SDPBackend
    std::optional<Tensor> mask_alias;
    if (mask && mask->defined()) mask_alias = as_cpu(*mask);
    int64_t choice = at::native::_fused_sdp_choice_cpp(as_cpu(query), as_cpu(key), as_cpu(value), mask_alias,
                                                       dropout, causal, scale, gqa);
    bool trains_mask = mask && mask->defined() && mask->requires_grad();
    return choice == FLASH && !trains_mask ? OVERRIDEABLE : MATH;
}

static std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor &query, const Tensor &key, const Tensor &value, const std::optional<Tensor> &bias,
    double dropout, bool causal, bool, std::optional<double> scale) {
    auto [output, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout,
                                                                               causal, bias, scale);
    Tensor none = at::empty({0}, query.options());
    return {output, logsumexp, none, none, query.size(2), key.size(2), none, none, none};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor &grad, const Tensor &query, const Tensor &key, const Tensor &value, const Tensor &bias,
    std::array<bool, 4>, const Tensor &output, const Tensor &logsumexp, const Tensor &, const Tensor &,
    c10::SymInt, c10::SymInt, double dropout, bool causal, const Tensor &, const Tensor &,
    std::optional<double> scale) {
    auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, output, logsumexp, dropout, causal,
        bias.defined() ? std::optional<Tensor>(bias) : std::nullopt, scale);
    return {of_query, of_key, of_value, Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("as_strided", as_strided);
    library.impl("_reshape_alias", reshape_alias);
    library.impl("view", view);
    library.impl("unfold", unfold);
    library.impl("view_as_real", at::native::view_as_real);
    library.impl("view_as_complex", at::native::view_as_complex);
    library.impl("resize_", resize_);
    library.impl("set_.source_Storage_storage_offset", set_storage_part);
    library.impl("set_.source_Storage", set_storage);
    library.impl("set_.source_Tensor", set_tensor);
    library.impl("set_", set_nothing);
    library.impl("_has_compatible_shallow_copy_type", may_take_the_place_of);
    library.impl("record_stream", record_stream_op);
    library.impl("_copy_from", copy_from);
    library.impl("_copy_from_and_resize", copy_from_and_resize);
    library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
    library.impl("convolution_backward_overrideable",
                 torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
    library.impl("_scaled_dot_product_fused_attention_overrideable", attention);
    library.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
}

// A copy takes lazily conjugated and negated tensors itself. PyTorch's fallback for them would copy first,
// and so call itself without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
    library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
    library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::fused_sdp_choice)
} // namespace at::native
