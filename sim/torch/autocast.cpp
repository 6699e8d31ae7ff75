// autocast.cpp - torch.autocast("sim"): which operators get which dtype, by PyTorch's own lists for
// accelerators.
#include "sim.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace sim {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

static void cast_all(Stack *stack, size_t n, c10::ScalarType to) {
    for (size_t i = stack->size() - n; i < stack->size(); i++) {
        IValue &value = (*stack)[i];
        if (value.isTensor()) {
            value = at::autocast::cached_cast(to, value.toTensor(), kSim);
        } else if (value.isTensorList()) {
            value = IValue(at::autocast::cached_cast(to, value.toTensorVector(), kSim));
        }
    }
}

// The rest of the dispatch, without autocast.
static void call(const OperatorHandle &op, Stack *stack) {
    c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastPrivateUse1);
    op.callBoxed(stack);
}

static size_t n_arguments(const OperatorHandle &op) {
    return op.schema().arguments().size();
}

static void in_lower_precision(const OperatorHandle &op, Stack *stack) {
    c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastPrivateUse1);
    cast_all(stack, n_arguments(op), at::autocast::get_autocast_dtype(kSim));
    op.callBoxed(stack);
}

static void in_float(const OperatorHandle &op, Stack *stack) {
    c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastPrivateUse1);
    cast_all(stack, n_arguments(op), c10::kFloat);
    op.callBoxed(stack);
}

// softmax and the like: their input stays, their result is float unless the caller says what it is.
static void into_float(const OperatorHandle &op, Stack *stack) {
    const auto &arguments = op.schema().arguments();
    size_t base = stack->size() - arguments.size();
    const IValue &input = (*stack)[base];
    bool eligible = input.isTensor() && at::autocast::is_eligible(input.toTensor(), kSim);
    for (size_t i = 0; i < arguments.size() && eligible; i++)
        if (arguments[i].name() == "dtype" && (*stack)[base + i].isNone()) (*stack)[base + i] = c10::kFloat;
    call(op, stack);
}

// All inputs in the widest dtype among them.
static void in_widest(const OperatorHandle &op, Stack *stack) {
    c10::ScalarType widest = at::autocast::get_autocast_dtype(kSim);
    auto look = [&](const at::Tensor &tensor) {
        if (at::autocast::is_eligible(tensor, kSim) && tensor.scalar_type() == c10::kFloat)
            widest = c10::kFloat;
    };
    for (size_t i = stack->size() - n_arguments(op); i < stack->size(); i++) {
        const IValue &value = (*stack)[i];
        if (value.isTensor()) look(value.toTensor());
        if (value.isTensorList())
            for (const at::Tensor &tensor : value.toTensorVector()) look(tensor);
    }
    c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastPrivateUse1);
    cast_all(stack, n_arguments(op), widest);
    op.callBoxed(stack);
}

static void refuse(const OperatorHandle &op, Stack *) {
    TORCH_CHECK(false, op.schema().name(), " is unsafe under autocast; use binary_cross_entropy_with_logits");
}

// PyTorch's lists name an operator, or an operator and its overload.
#define NAME_1(op) #op
#define NAME_2(op, overload) #op "." #overload
#define NAME_OF(one, two, macro, ...) macro
#define NAME(...) NAME_OF(__VA_ARGS__, NAME_2, NAME_1)(__VA_ARGS__),

static const char *const lower_precision_names[] = {AT_FORALL_LOWER_PRECISION_FP(NAME)};
static const char *const float_names[] = {AT_FORALL_FP32(NAME) "norm.Scalar", "norm.ScalarOpt_dim"};
static const char *const into_float_names[] = {AT_FORALL_FP32_SET_OPT_DTYPE(NAME)};
static const char *const widest_names[] = {AT_FORALL_PROMOTE(NAME)};

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
    for (const char *name : lower_precision_names)
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_lower_precision>());
    for (const char *name : float_names)
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_float>());
    for (const char *name : into_float_names)
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&into_float>());
    for (const char *name : widest_names)
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_widest>());
    library.impl("binary_cross_entropy", torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

} // namespace sim
