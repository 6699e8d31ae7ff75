// ops.cpp - how an operator runs on the simulated device: PyTorch's CPU kernel, behind the host.
//
// fallback() is the kernel of every operator that has none of its own here:
//   1. the operator's Meta kernel says what the outputs are like (remembered by the arguments' shapes and
//      dtypes; where Meta is wrong about the CPU's, the first run with such arguments is waited for, and says
//      it);
//   2. the outputs are allocated from fcdp_alloc;
//   3. a simgpu kernel is launched on the current stream: it runs the operator's CPU kernel on CPU tensors
//      that alias the same bytes, and copies what the CPU kernel returned into the outputs;
//   4. the operator's schema says what is read and what is written, and simgpu is told, so that its race
//      check sees operators by name.
// The aliases hold nothing: a tensor that is freed before its operator has run is as good as one on CUDA,
// since fcdp_alloc gives its memory to nobody who could come earlier in stream order.
//
// The host waits where an answer is needed at once: for operators that return a number, whose outputs' shapes
// depend on values, or that have no Meta kernel.
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace sim {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

Counts counts;

// ---- aliases and accesses ----

static bool is_sim(const at::Tensor &tensor) {
    return tensor.defined() && tensor.device().type() == kSim;
}

static size_t spanned_bytes(const at::Tensor &tensor) {
    return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size());
}

static char *address_of(const at::Tensor &tensor) {
    auto *base = static_cast<char *>(tensor.storage().unsafeGetStorageImpl()->mutable_data());
    TORCH_CHECK(base, "sim: this tensor's memory was freed (its storage was resized to 0) before its use");
    return base + tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
}

at::Tensor as_cpu(const at::Tensor &tensor) {
    if (!is_sim(tensor)) return tensor;
    c10::InferenceMode not_here(false); // the stream's thread, which writes into it, is not in that mode
    auto options = tensor.options().device(c10::kCPU);
    if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    c10::Storage bytes(c10::Storage::use_byte_size_t(), spanned_bytes(tensor),
                       c10::DataPtr(address_of(tensor), c10::Device(c10::kCPU)), nullptr, false);
    auto alias = at::detail::make_tensor<c10::TensorImpl>(
        std::move(bytes), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    if (tensor.is_conj()) alias._set_conj(true);
    if (tensor.is_neg()) alias._set_neg(true);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
        alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    return alias;
}

void add_access(std::vector<Access> &accesses, const at::Tensor &tensor, bool writes) {
    if (!is_sim(tensor) || tensor.numel() == 0) return;
    accesses.push_back({reinterpret_cast<uint64_t>(address_of(tensor)), spanned_bytes(tensor), writes});
}

// ---- walking over arguments ----

// `value` with each tensor in it, alone or in a list, replaced by what `of` makes of it. Undefined ones stay.
template <class Of> static IValue each_tensor(const IValue &value, Of of) {
    auto one = [&](const at::Tensor &tensor) { return tensor.defined() ? of(tensor) : tensor; };
    if (value.isTensor()) return one(value.toTensor());
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor &tensor : value.toTensorVector()) list.push_back(one(tensor));
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto &tensor : value.toOptionalTensorVector())
            list.push_back(tensor ? std::optional<at::Tensor>(one(*tensor)) : std::nullopt);
        return list;
    }
    return value;
}

static IValue with_device(const IValue &value, c10::DeviceType type) {
    return value.isDevice() && value.toDevice().type() == kSim ? IValue(c10::Device(type)) : value;
}

static bool writes_to(const c10::Argument &argument) {
    return argument.alias_info() && argument.alias_info()->isWrite();
}

// ---- what is known of an operator, once ----

// kWrong: its answer is not what the CPU's kernel returns, so that is learned from the first run with such
// arguments.
enum class Meta { kAsked, kNone, kWrong };

struct Op {
    std::string name;
    bool returns_tensors = true;    // and lists of them, nothing else
    bool returns_fresh = false;     // at least one that is not an argument
    bool waits = false;             // the shapes of its outputs, or its answer, are values of the device
    bool takes_cpu_indices = false; // as index_put_ does, on CUDA too
    int generator = -1;             // the argument's number
    bool draws = false;
    std::vector<int> returned_argument; // of each return: the argument that it is, or -1
    std::vector<int> also_writes;       // arguments that the schema forgets to mark
    enum class Cost {
        kBytes,
        kMatmul,
        kConvolution,
        kConvolutionBackward,
        kAttention,
        kAttentionBackward
    } cost = Cost::kBytes;
    std::atomic<Meta> meta{Meta::kAsked};
    std::mutex lock;                                              // of `outputs`
    std::unordered_map<std::string, std::vector<IValue>> outputs; // Meta's answers, by describe()
    std::atomic<uint64_t> n_waits{0};
};

static bool is_tensor_type(const c10::TypePtr &type) {
    if (type->kind() == c10::TypeKind::TensorType) return true;
    return type->kind() == c10::TypeKind::ListType &&
           type->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType;
}

static void learn(Op &op, const OperatorHandle &handle) {
    const c10::FunctionSchema &schema = handle.schema();
    op.name = schema.name();
    for (size_t i = 0; i < schema.arguments().size(); i++)
        if (schema.arguments()[i].name() == "generator") op.generator = static_cast<int>(i);
    for (const c10::Argument &result : schema.returns()) {
        op.returns_tensors = op.returns_tensors && is_tensor_type(result.type());
        int returned = -1;
        for (size_t i = 0; result.alias_info() && i < schema.arguments().size(); i++) {
            const auto *info = schema.arguments()[i].alias_info();
            if (info && info->beforeSets() == result.alias_info()->beforeSets())
                returned = static_cast<int>(i);
        }
        TORCH_CHECK_NOT_IMPLEMENTED(
            !result.alias_info() || (returned >= 0 && writes_to(result)), "sim: ", op.name,
            " returns a view and is not implemented on the simulated device; see tensors.cpp");
        op.returned_argument.push_back(returned);
        op.returns_fresh = op.returns_fresh || returned < 0;
    }
    op.draws = handle.hasTag(at::Tag::nondeterministic_seeded) &&
               op.name.find("aten::_scaled_dot_product") != 0;
    op.waits = !op.returns_tensors || handle.hasTag(at::Tag::data_dependent_output) ||
               handle.hasTag(at::Tag::dynamic_output_shape);
    op.takes_cpu_indices = op.name == "aten::index" || op.name == "aten::index_put_" ||
                           op.name == "aten::index_put" || op.name == "aten::_index_put_impl_" ||
                           op.name == "aten::_unsafe_index";
    if (op.name == "aten::native_batch_norm") op.also_writes = {3, 4};
    // mean and rstd are float in Meta, as on CUDA, and of the input's dtype on the CPU
    if (op.name == "aten::native_layer_norm" || op.name == "aten::native_group_norm") op.meta = Meta::kWrong;
    using Cost = Op::Cost;
    static const std::map<std::string, Cost> costs = {
        {"aten::mm", Cost::kMatmul},
        {"aten::addmm", Cost::kMatmul},
        {"aten::addmm_", Cost::kMatmul},
        {"aten::_addmm_activation", Cost::kMatmul},
        {"aten::bmm", Cost::kMatmul},
        {"aten::baddbmm", Cost::kMatmul},
        {"aten::convolution", Cost::kConvolution},
        {"aten::convolution_backward", Cost::kConvolutionBackward},
        {"aten::_scaled_dot_product_flash_attention_for_cpu", Cost::kAttention},
        {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", Cost::kAttentionBackward},
    };
    if (auto found = costs.find(op.name); found != costs.end()) op.cost = found->second;
}

static std::mutex ops_lock;
static std::unordered_map<const void *, std::unique_ptr<Op>> ops;

static Op &op_of(const OperatorHandle &handle) {
    static thread_local std::unordered_map<const void *, Op *> known; // without the lock
    const void *key = &handle.schema();
    if (auto found = known.find(key); found != known.end()) return *found->second;
    std::lock_guard<std::mutex> guard(ops_lock);
    std::unique_ptr<Op> &op = ops[key];
    if (!op) {
        auto made = std::make_unique<Op>();
        learn(*made, handle);
        op = std::move(made);
    }
    return *(known[key] = op.get());
}

std::vector<std::pair<std::string, uint64_t>> waited_ops(bool reset) {
    std::lock_guard<std::mutex> guard(ops_lock);
    std::vector<std::pair<std::string, uint64_t>> found;
    for (auto &[key, op] : ops)
        if (op && op->n_waits)
            found.emplace_back(op->name, reset ? op->n_waits.exchange(0) : op->n_waits.load());
    return found;
}

// ---- what the outputs are like ----

// Appends all that a Meta kernel may look at; false where an argument is of a kind that is not known here.
static bool describe(std::string &text, const IValue &value) {
    auto put = [&](const auto &number) {
        text.append(reinterpret_cast<const char *>(&number), sizeof number);
    };
    auto put_all = [&](const auto &list) {
        put(list.size());
        for (auto item : list) put(item);
    };
    auto put_tensor = [&](const at::Tensor &tensor) {
        if (!tensor.defined()) return text.push_back('u');
        text.push_back('t');
        auto flags = tensor.is_conj() | tensor.is_neg() << 1 |
                     tensor.unsafeGetTensorImpl()->is_wrapped_number() << 2 | is_sim(tensor) << 3;
        put(tensor.scalar_type());
        put(flags);
        put_all(tensor.sizes());
        put_all(tensor.strides());
    };
    if (value.isNone())
        text.push_back('n');
    else if (value.isTensor())
        put_tensor(value.toTensor());
    else if (value.isTensorList()) {
        auto list = value.toTensorVector();
        text.push_back('l');
        put(list.size());
        for (const at::Tensor &tensor : list) put_tensor(tensor);
    } else if (value.isBool())
        text.push_back(value.toBool() ? '1' : '0');
    else if (value.isInt())
        text.push_back('i'), put(value.toInt());
    else if (value.isDouble())
        text.push_back('d'), put(value.toDouble());
    else if (value.isIntList())
        text.push_back('I'), put_all(value.toIntVector());
    else if (value.isDoubleList())
        text.push_back('D'), put_all(value.toDoubleVector());
    else if (value.isBoolList()) {
        text.push_back('B');
        auto list = value.toBoolList();
        put(list.size());
        for (bool item : list) put(item);
    } else if (value.isString())
        text.push_back('s'), text += value.toStringRef(), text.push_back('\0');
    else if (value.isDevice())
        text.push_back('v'), put(value.toDevice().type());
    else
        return false;
    return true;
}

static at::Tensor as_meta(const at::Tensor &tensor) {
    if (tensor.is_cpu() && tensor.dim() == 0) return tensor; // a number: only its type matters
    auto like = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
    if (tensor.is_conj()) like._set_conj(true);
    if (tensor.is_neg()) like._set_neg(true);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
        like.unsafeGetTensorImpl()->set_wrapped_number(true);
    return like;
}

// False where an argument is of a kind that is not known: then nothing is remembered.
static bool describe_all(const Op &op, at::ArrayRef<IValue> arguments, std::string &key) {
    for (size_t i = 0; i < arguments.size(); i++)
        if (static_cast<int>(i) != op.generator && !describe(key, arguments[i])) return false;
    return true;
}

static bool recall(Op &op, const std::string &key, std::vector<IValue> &outputs) {
    std::lock_guard<std::mutex> guard(op.lock);
    auto found = op.outputs.find(key);
    if (found == op.outputs.end()) return false;
    outputs = found->second;
    counts.meta_hits++;
    return true;
}

static void remember(Op &op, std::string key, const std::vector<IValue> &outputs) {
    constexpr size_t MOST = 4096; // of an operator; a job with ever new shapes starts again
    std::lock_guard<std::mutex> guard(op.lock);
    if (op.outputs.size() >= MOST) op.outputs.clear();
    op.outputs.emplace(std::move(key), outputs);
}

// The operator's returns as meta tensors; false where that is not known without running it.
static bool outputs_like(Op &op, const OperatorHandle &handle, at::ArrayRef<IValue> arguments,
                         std::vector<IValue> &outputs) {
    if (op.meta == Meta::kNone) return false;
    std::string key;
    bool is_described = describe_all(op, arguments, key);
    if (is_described && recall(op, key, outputs)) return true;
    if (op.meta == Meta::kWrong) return false;
    Stack meta;
    for (size_t i = 0; i < arguments.size(); i++)
        meta.push_back(static_cast<int>(i) == op.generator
                           ? IValue()
                           : with_device(each_tensor(arguments[i], as_meta), c10::kMeta));
    try {
        handle.callBoxed(&meta);
    } catch (const c10::NotImplementedError &) {
        op.meta = Meta::kNone;
        return false;
    }
    counts.meta_calls++;
    outputs.assign(meta.begin(), meta.end());
    if (is_described) remember(op, std::move(key), outputs);
    return true;
}

// As Meta's answer, from what the CPU kernel returned.
static void learn_outputs(Op &op, at::ArrayRef<IValue> arguments, const Stack &returned) {
    std::string key;
    if (!describe_all(op, arguments, key)) return;
    std::vector<IValue> outputs;
    for (const IValue &value : returned)
        outputs.push_back(each_tensor(value, [](const at::Tensor &tensor) {
            return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
        }));
    remember(op, std::move(key), outputs);
}

static at::Tensor allocate_like(const at::Tensor &like) {
    return at::empty_strided(like.sizes(), like.strides(), like.options().device(device()));
}

// ---- modelled time ----

static double flops_per_ns, bytes_per_ns; // 0: as fast as the CPU is

void set_rates(double gflops, double gbytes) {
    TORCH_CHECK(gflops >= 0 && gbytes >= 0, "sim: a rate is at least 0; 0 is as fast as the CPU");
    flops_per_ns = gflops;
    bytes_per_ns = gbytes;
}

// Multiplications and additions of what is dense arithmetic; everything else is bound by its bytes.
static double flops_of(const Op &op, at::ArrayRef<IValue> arguments) {
    std::vector<at::Tensor> tensors;
    for (const IValue &value : arguments)
        if (value.isTensor() && value.toTensor().defined()) tensors.push_back(value.toTensor());
    switch (op.cost) {
    case Op::Cost::kBytes: return 0;
    case Op::Cost::kMatmul: { // ... [m, k] x [k, n]: the last two matrices; an out= follows them
        size_t first = op.name == "aten::mm" || op.name == "aten::bmm" ? 0 : 1;
        return tensors.size() < first + 2 ? 0
                                          : 2.0 * static_cast<double>(tensors[first].numel()) *
                                                static_cast<double>(tensors[first + 1].size(-1));
    }
    case Op::Cost::kConvolution:
    case Op::Cost::
        kConvolutionBackward: { // a multiplication for each weight and place of the input, strides aside
        bool forward = op.cost == Op::Cost::kConvolution;
        const at::Tensor &input = tensors[forward ? 0 : 1], &weight = tensors[forward ? 1 : 2];
        return (forward ? 2.0 : 4.0) * static_cast<double>(input.numel()) *
               static_cast<double>(weight.numel()) /
               static_cast<double>(std::max<int64_t>(weight.size(1), 1));
    }
    case Op::Cost::kAttention:
    case Op::Cost::kAttentionBackward: {
        size_t query = op.cost == Op::Cost::kAttention ? 0 : 1; // behind the gradient
        double forward = 4.0 * static_cast<double>(tensors[query].numel()) *
                         static_cast<double>(tensors[query + 1].size(-2));
        return op.cost == Op::Cost::kAttention ? forward : 2.5 * forward;
    }
    }
    return 0;
}

static uint64_t duration_ns(const Op &op, at::ArrayRef<IValue> arguments,
                            const std::vector<Access> &accesses) {
    double by_flops = flops_per_ns > 0 ? flops_of(op, arguments) / flops_per_ns : 0, bytes = 0;
    if (bytes_per_ns > 0)
        for (const Access &access : accesses) bytes += static_cast<double>(access.bytes);
    return static_cast<uint64_t>(std::ceil(std::max(by_flops, bytes_per_ns > 0 ? bytes / bytes_per_ns : 0)));
}

// ---- running ----

// An argument as the CPU kernel gets it, later and on another thread.
static IValue for_cpu(const Op &op, const IValue &value) {
    return with_device(each_tensor(value,
                                   [&](const at::Tensor &tensor) {
                                       if (is_sim(tensor)) return as_cpu(tensor);
                                       TORCH_CHECK(
                                           tensor.dim() == 0 || op.takes_cpu_indices || !tensor.is_cpu(),
                                           "Expected all tensors to be on the same device, but ", op.name,
                                           " got one on ", device(), " and one on ", tensor.device());
                                       // the script may write into its own before the kernel runs
                                       bool is_constant = tensor.unsafeGetTensorImpl()->is_wrapped_number();
                                       return is_constant ? tensor : tensor.clone();
                                   }),
                       c10::kCPU);
}

static void copy_into(const Op &op, const at::Tensor &to, const at::Tensor &from) {
    if (!to.defined() || !from.defined()) return;
    TORCH_CHECK(to.sizes() == from.sizes() && to.scalar_type() == from.scalar_type(), op.name,
                ": its Meta kernel says ", to.sizes(), " of ", to.scalar_type(), ", its CPU kernel returned ",
                from.sizes(), " of ", from.scalar_type(), "; register another form of it in tensors.cpp");
    to.copy_(from);
}

struct Call {
    Op &op;
    OperatorHandle handle;
    Stack cpu; // the arguments, then the returns
    std::vector<Access> accesses;

    Call(Op &op, const OperatorHandle &handle, at::ArrayRef<IValue> given) : op(op), handle(handle) {
        const auto &arguments = handle.schema().arguments();
        for (size_t i = 0; i < given.size(); i++) {
            bool writes = writes_to(arguments[i]) ||
                          std::count(op.also_writes.begin(), op.also_writes.end(), int(i));
            each_tensor(given[i], [&](const at::Tensor &tensor) {
                add_access(accesses, tensor, writes);
                return tensor;
            });
            if (static_cast<int>(i) == op.generator) {
                auto asked = given[i].isNone() ? std::nullopt
                                               : std::optional<at::Generator>(given[i].toGenerator());
                cpu.push_back(op.draws || asked ? IValue(generator_for_kernel(asked)) : IValue());
            } else
                cpu.push_back(for_cpu(op, given[i]));
        }
        TORCH_CHECK_NOT_IMPLEMENTED(
            !op.draws || op.generator >= 0, "sim: ", op.name,
            " draws random numbers without a generator, so its numbers could not be the "
            "device's own; write it with an operator that takes one");
    }

    // On the stream's thread. A kernel that resizes what it writes into has resized the alias alone.
    void run() {
        at::AutoDispatchBelowADInplaceOrView below;
        std::vector<std::pair<at::Tensor, int64_t>> written;
        const auto &arguments = handle.schema().arguments();
        for (size_t i = 0; i < cpu.size(); i++)
            if (writes_to(arguments[i]))
                each_tensor(cpu[i], [&](const at::Tensor &tensor) {
                    written.emplace_back(tensor, tensor.numel());
                    return tensor;
                });
        handle.callBoxed(&cpu);
        for (auto &[tensor, numel] : written)
            TORCH_CHECK(tensor.numel() == numel, op.name,
                        " resized a tensor that it was to write into, from ", numel, " to ", tensor.numel(),
                        " elements; give it one of the right size");
    }
};

// What the operator returns: arguments that it wrote into, and `fresh` (of which those are placeholders).
static void put_returns(const Op &op, Stack *stack, at::ArrayRef<IValue> given, at::ArrayRef<IValue> fresh) {
    std::vector<IValue> returns;
    for (size_t i = 0; i < op.returned_argument.size(); i++)
        returns.push_back(op.returned_argument[i] >= 0 ? given[op.returned_argument[i]] : fresh[i]);
    stack->resize(stack->size() - given.size());
    for (IValue &value : returns) stack->push_back(std::move(value));
}

// The host waits for the operator, and then knows what it returned.
static void run_and_wait(Op &op, const OperatorHandle &handle, Stack *stack, at::ArrayRef<IValue> given) {
    auto call = std::make_shared<Call>(op, handle, given);
    launch(current(), op.name.c_str(), call->accesses, duration_ns(op, given, call->accesses),
           [call] { call->run(); });
    stream_synchronize(current());
    if (op.meta == Meta::kWrong)
        learn_outputs(op, given, call->cpu);
    else
        counts.waited++, op.n_waits++;
    std::vector<IValue> fresh;
    for (size_t i = 0; i < op.returned_argument.size(); i++)
        fresh.push_back(
            op.returned_argument[i] >= 0 ? IValue() : each_tensor(call->cpu[i], [](const at::Tensor &from) {
                at::Tensor to = allocate_like(from);
                std::vector<Access> accesses;
                add_access(accesses, to, true);
                if (!accesses.empty())
                    launch(current(), "copy", accesses, 0, [from, to = as_cpu(to)] { to.copy_(from); });
                return to;
            }));
    put_returns(op, stack, given, fresh);
}

// Outputs that the caller left empty, for the operator to give them their size (out=torch.empty(0)).
static void resize_outputs(Op &op, const OperatorHandle &handle, at::ArrayRef<IValue> given) {
    std::vector<IValue> like;
    for (size_t i = 0; i < op.returned_argument.size(); i++) {
        const IValue &output = given[op.returned_argument[i]];
        if (!output.isTensor() || output.toTensor().numel() != 0) continue;
        if (like.empty() && !outputs_like(op, handle, given, like)) return;
        if (like[i].toTensor().numel()) output.toTensor().resize_(like[i].toTensor().sizes());
    }
}

void run(const OperatorHandle &handle, Stack *stack) {
    at::AutoDispatchBelowADInplaceOrView below;
    Op &op = op_of(handle);
    size_t n = handle.schema().arguments().size();
    std::vector<IValue> given(stack->end() - static_cast<ptrdiff_t>(n), stack->end());
    std::vector<IValue> fresh;
    if (op.waits) return run_and_wait(op, handle, stack, given);
    if (op.returns_fresh) {
        if (!outputs_like(op, handle, given, fresh)) return run_and_wait(op, handle, stack, given);
        for (size_t i = 0; i < fresh.size(); i++)
            fresh[i] = op.returned_argument[i] >= 0 ? IValue() : each_tensor(fresh[i], allocate_like);
    } else
        resize_outputs(op, handle, given);
    auto call = std::make_shared<Call>(op, handle, given);
    std::vector<IValue> into;
    for (const IValue &value : fresh)
        into.push_back(each_tensor(value, [&](const at::Tensor &tensor) {
            add_access(call->accesses, tensor, true);
            return as_cpu(tensor);
        }));
    uint64_t ns = duration_ns(op, given, call->accesses);
    put_returns(op, stack, given, fresh);
    counts.launched++;
    launch(current(), op.name.c_str(), call->accesses, ns, [call, into = std::move(into)] {
        call->run();
        at::AutoDispatchBelowADInplaceOrView below_too;
        for (size_t i = 0; i < into.size(); i++) {
            if (into[i].isTensor()) copy_into(call->op, into[i].toTensor(), call->cpu[i].toTensor());
            if (!into[i].isTensorList()) continue;
            auto to = into[i].toTensorVector(), from = call->cpu[i].toTensorVector();
            for (size_t j = 0; j < to.size(); j++) copy_into(call->op, to[j], from[j]);
        }
    });
}

static void fallback(const OperatorHandle &handle, Stack *stack) {
    run(handle, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// An operator may have a CPU kernel of its own, and for all other devices a composite one, which rounds
// otherwise (native_layer_norm, silu_backward): those take the CPU's. And mse_loss and smooth_l1_loss, whose
// out= forms make room for more than their result.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    for (const c10::OperatorName &name : c10::Dispatcher::singleton().getAllOpNames()) {
        if (name.name.rfind("aten::", 0) != 0) continue;
        auto handle = c10::Dispatcher::singleton().findOp(name);
        if (!handle || !handle->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
        bool is_composite = handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
                            handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
        bool resizes = name.overload_name.empty() &&
                       (name.name == "aten::mse_loss" || name.name == "aten::smooth_l1_loss");
        if (!is_composite && !resizes) continue;
        std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
        library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
}

} // namespace sim
