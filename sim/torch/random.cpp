// random.cpp - random numbers of the device, as CUDA has them: a seed and an offset.
//
// Each kernel that draws takes the next offset when it is launched, and draws behind the host from a CPU
// generator seeded by both. So the state is known without a wait, and saving and restoring it repeats the
// numbers whatever streams the kernels run on: that is what activation checkpointing needs. The numbers are
// not the CPU generator's.
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>

namespace sim {

struct SimGenerator final : c10::GeneratorImpl {
    uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;

    SimGenerator() : GeneratorImpl(sim::device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
    void set_current_seed(uint64_t seed) override {
        seed_ = seed;
        offset_ = 0;
    }
    void set_offset(uint64_t offset) override {
        offset_ = offset;
    }
    uint64_t get_offset() const override {
        return offset_;
    }
    uint64_t current_seed() const override {
        return seed_;
    }
    uint64_t seed() override {
        set_current_seed(c10::detail::getNonDeterministicRandom(true));
        return seed_;
    }
    // 16 bytes on the CPU, seed and offset, as CUDA's.
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        at::Tensor state = at::empty({16}, at::kByte);
        memcpy(state.mutable_data_ptr(), &seed_, 8);
        memcpy(static_cast<char *>(state.mutable_data_ptr()) + 8, &offset_, 8);
        return state.getIntrusivePtr();
    }
    void set_state(const c10::TensorImpl &state) override {
        TORCH_CHECK(state.numel() == 16 && state.dtype() == at::kByte && state.device().is_cpu(),
                    "sim: a generator's state is 16 bytes on the CPU, from get_rng_state; this is ",
                    state.numel(), " of ", state.dtype().name(), " on ", state.device());
        memcpy(&seed_, state.data(), 8);
        memcpy(&offset_, static_cast<const char *>(state.data()) + 8, 8);
    }
    SimGenerator *clone_impl() const override {
        auto *copy = new SimGenerator;
        copy->seed_ = seed_;
        copy->offset_ = offset_;
        return copy;
    }
};

at::Generator generator_new() {
    return at::make_generator<SimGenerator>();
}

const at::Generator &default_generator() {
    static const at::Generator generator = generator_new();
    return generator;
}

at::Generator generator_for_kernel(const std::optional<at::Generator> &asked) {
    const at::Generator &generator = asked && asked->defined() ? *asked : default_generator();
    TORCH_CHECK(generator.device().type() == kSim, "Expected a 'sim' device type for generator but found '",
                generator.device().type(), "'");
    auto *impl = static_cast<SimGenerator *>(generator.unsafeGetGeneratorImpl());
    std::lock_guard<std::mutex> guard(impl->mutex_);
    // mt19937 is seeded by 32 bits: spread both over them (splitmix64's finaliser).
    uint64_t mixed = impl->seed_ + 0x9e3779b97f4a7c15u * ++impl->offset_;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    return at::make_generator<at::CPUGeneratorImpl>((mixed ^ (mixed >> 31)) & 0xffffffffu);
}

// The CPU's kernel draws from the host's default generator; this one does the same with the device's.
static std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor &input, double p,
                                                         std::optional<bool> train) {
    at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
    if (!train.value_or(true)) return {input.clone(), mask.fill_(true)};
    mask.bernoulli_(1 - p);
    return {input.mul(mask).mul_(p == 1 ? 0.0 : 1.0 / (1 - p)), mask};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("native_dropout", native_dropout);
}

} // namespace sim
