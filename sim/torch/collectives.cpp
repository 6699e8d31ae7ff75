// collectives.cpp - "simgloo", the c10d backend for tensors of the simulated device: gloo, in stream order.
//
// As with NCCL, a collective is an operation of a stream that the process group owns. It waits there for what
// was on the current stream when it was called, and Work.wait() makes the stream that is current then wait
// for it: the host never waits, except in a barrier. The operation runs gloo's collective on CPU aliases of
// the tensors.
//
// All collectives of a process group run one after the other. Those between startCoalescing and endCoalescing
// (batch_isend_irecv and the like) are one operation: all of them begin before one is waited for.
#include "sim.h"

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <mutex>

#include "collectives.h"

namespace sim {

using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Start = std::function<std::vector<WorkPtr>()>; // on the stream: begins gloo's collectives

static Tensors cpu(const Tensors &tensors) {
    Tensors aliases;
    for (const Tensor &tensor : tensors) aliases.push_back(as_cpu(tensor));
    return aliases;
}

static TensorLists cpu(const TensorLists &lists) {
    TensorLists aliases;
    for (const Tensors &list : lists) aliases.push_back(cpu(list));
    return aliases;
}

static Tensors flat(const TensorLists &lists) {
    Tensors all;
    for (const Tensors &list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
}

// gloo has no PREMUL_SUM, which NCCL has: `options` with a sum in its place, and the factor that each rank's
// tensors are to be multiplied by in front of it.
template <class Options> static std::optional<double> take_factor(Options &options) {
    if (options.reduceOp != c10d::ReduceOp::PREMUL_SUM) return std::nullopt;
    auto *given = dynamic_cast<c10d::NCCLPreMulSumSupplement *>(options.reduceOp.supplement_.get());
    TORCH_CHECK_VALUE(given && !given->tensor_factor.defined(),
                      "simgloo: the factor of ReduceOp.PREMUL_SUM must be a number, not a tensor");
    options.reduceOp = c10d::ReduceOp::SUM;
    return given->double_factor;
}

static Tensor multiplied(const Tensor &tensor, std::optional<double> factor) {
    return factor ? tensor * at::scalar_tensor(*factor, tensor.options()) : tensor;
}

static Tensors multiplied(const Tensors &tensors, std::optional<double> factor) {
    Tensors made;
    for (const Tensor &tensor : tensors) made.push_back(multiplied(tensor, factor));
    return made;
}

static void multiply(const Tensors &tensors, std::optional<double> factor) {
    for (const Tensor &tensor : tensors)
        if (factor) tensor.copy_(multiplied(tensor, factor));
}

// ---- the work of one collective ----

struct Failure { // of the operation on the stream; outlives either side
    std::mutex lock;
    std::exception_ptr error;
};

struct SimWork final : c10d::Work {
    std::shared_ptr<Failure> failure = std::make_shared<Failure>();
    Tensors outputs;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    EventHandle event = nullptr;
    StreamHandle blocks_host_on = nullptr; // a barrier: waiting for it is the host's

    SimWork(int rank, OpType type) : Work(rank, type) {}
    ~SimWork() override {
        event_destroy(event);
    }
    bool isCompleted() override {
        return event_query(event);
    }
    bool isSuccess() const override {
        std::lock_guard<std::mutex> guard(failure->lock);
        return !failure->error;
    }
    std::exception_ptr exception() const override {
        std::lock_guard<std::mutex> guard(failure->lock);
        return failure->error;
    }
    void synchronize() override {
        event_block(event, current());
    }
    bool wait(std::chrono::milliseconds) override {
        if (auto error = exception()) std::rethrow_exception(error);
        synchronize();
        if (blocks_host_on) stream_synchronize(blocks_host_on);
        return true;
    }
    Tensors result() override {
        return outputs;
    }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
        return future;
    }
};

// ---- the backend ----

struct SimGloo final : c10d::Backend {
    c10::intrusive_ptr<c10d::Backend> gloo;
    StreamHandle stream = stream_new(0);
    struct { // what is being coalesced
        bool on = false;
        Tensors inputs, outputs;
        std::vector<Start> starts;
    } batch;

    explicit SimGloo(c10::intrusive_ptr<c10d::Backend> inner)
        : Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)) {}
    const std::string getBackendName() const override {
        return "simgloo";
    }
    bool supportsCoalescing() const override {
        return true;
    }

    // Puts one operation on the stream, or adds it to the batch. What it reads and writes is kept by
    // record_stream.
    WorkPtr put(const char *name, OpType type, const Tensors &inputs, const Tensors &outputs, Start start) {
        if (batch.on) {
            batch.inputs.insert(batch.inputs.end(), inputs.begin(), inputs.end());
            batch.outputs.insert(batch.outputs.end(), outputs.begin(), outputs.end());
            batch.starts.push_back(std::move(start));
            return {};
        }
        std::vector<Access> accesses;
        auto touch = [&](const Tensors &tensors, bool writes) {
            for (const Tensor &tensor : tensors) {
                TORCH_CHECK(tensor.device().type() == kSim,
                            "simgloo serves tensors of the simulated device; this is on ", tensor.device());
                add_access(accesses, tensor, writes);
                record_stream(tensor.storage().data_ptr(), stream);
            }
        };
        touch(inputs, false);
        touch(outputs, true);
        EventHandle before = nullptr;
        event_record(&before, current(), false);
        event_block(before, stream);
        event_destroy(before);

        auto work = c10::make_intrusive<SimWork>(getRank(), type);
        launch(stream, name, accesses, 0, [start = std::move(start), failure = work->failure] {
            try {
                for (WorkPtr &begun : start()) begun->wait();
            } catch (...) {
                std::lock_guard<std::mutex> guard(failure->lock);
                failure->error = std::current_exception();
                throw;
            }
        });
        event_record(&work->event, stream, false);
        work->outputs = outputs;
        c10::StreamGuard guard(stream_of(stream));
        work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                                std::vector<c10::Device>{device()});
        work->future->markCompleted(
            c10::IValue(outputs)); // behind the operation: the future records an event
        return work;
    }

    // `call` begins one collective of gloo.
    template <class Call>
    WorkPtr put_one(const char *name, OpType type, const Tensors &inputs, const Tensors &outputs, Call call) {
        return put(name, type, inputs, outputs,
                   [call = std::move(call)]() mutable { return std::vector<WorkPtr>{call()}; });
    }

    void startCoalescing() override {
        TORCH_CHECK(!batch.on, "simgloo: a coalesced batch has begun already");
        batch.on = true;
    }
    WorkPtr endCoalescing() override {
        auto all = std::move(batch);
        batch = {};
        if (all.starts.empty()) return {};
        return put("coalesced", OpType::COALESCED, all.inputs, all.outputs, [starts = std::move(all.starts)] {
            std::vector<WorkPtr> begun;
            for (const Start &start : starts)
                for (WorkPtr &work : start()) begun.push_back(std::move(work));
            return begun;
        });
    }

    WorkPtr broadcast(Tensors &tensors, const c10d::BroadcastOptions &options) override {
        return put_one("broadcast", OpType::BROADCAST, {}, tensors,
                       [g = gloo, t = cpu(tensors), options]() mutable { return g->broadcast(t, options); });
    }
    WorkPtr allreduce(Tensors &tensors, const c10d::AllreduceOptions &given) override {
        auto options = given;
        auto factor = take_factor(options);
        return put_one("all_reduce", OpType::ALLREDUCE, {}, tensors,
                       [g = gloo, t = cpu(tensors), options, factor]() mutable {
                           multiply(t, factor);
                           return g->allreduce(t, options);
                       });
    }
    WorkPtr allreduce_coalesced(Tensors &tensors, const c10d::AllreduceCoalescedOptions &given) override {
        auto options = given;
        auto factor = take_factor(options);
        return put_one("all_reduce_coalesced", OpType::ALLREDUCE_COALESCED, {}, tensors,
                       [g = gloo, t = cpu(tensors), options, factor]() mutable {
                           multiply(t, factor);
                           return g->allreduce_coalesced(t, options);
                       });
    }
    WorkPtr reduce(Tensors &tensors, const c10d::ReduceOptions &given) override {
        auto options = given;
        auto factor = take_factor(options);
        return put_one("reduce", OpType::REDUCE, {}, tensors,
                       [g = gloo, t = cpu(tensors), options, factor]() mutable {
                           multiply(t, factor);
                           return g->reduce(t, options);
                       });
    }
    WorkPtr allgather(TensorLists &outputs, Tensors &inputs, const c10d::AllgatherOptions &options) override {
        return put_one("all_gather", OpType::ALLGATHER, inputs, flat(outputs),
                       [g = gloo, o = cpu(outputs), i = cpu(inputs), options]() mutable {
                           return g->allgather(o, i, options);
                       });
    }
    WorkPtr _allgather_base(Tensor &output, Tensor &input, const c10d::AllgatherOptions &options) override {
        return put_one("all_gather_into_tensor", OpType::_ALLGATHER_BASE, {input}, {output},
                       [g = gloo, o = as_cpu(output), i = as_cpu(input), options]() mutable {
                           return g->_allgather_base(o, i, options);
                       });
    }
    WorkPtr allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                            const c10d::AllgatherOptions &options) override {
        return put("all_gather_into_tensor_coalesced", OpType::COALESCED, inputs, outputs,
                   [g = gloo, o = cpu(outputs), i = cpu(inputs), options]() mutable {
                       std::vector<WorkPtr> begun;
                       for (size_t k = 0; k < o.size(); k++)
                           begun.push_back(g->_allgather_base(o[k], i[k], options));
                       return begun;
                   });
    }
    WorkPtr gather(TensorLists &outputs, Tensors &inputs, const c10d::GatherOptions &options) override {
        return put_one("gather", OpType::GATHER, inputs, flat(outputs),
                       [g = gloo, o = cpu(outputs), i = cpu(inputs), options]() mutable {
                           return g->gather(o, i, options);
                       });
    }
    WorkPtr scatter(Tensors &outputs, TensorLists &inputs, const c10d::ScatterOptions &options) override {
        return put_one("scatter", OpType::SCATTER, flat(inputs), outputs,
                       [g = gloo, o = cpu(outputs), i = cpu(inputs), options]() mutable {
                           return g->scatter(o, i, options);
                       });
    }
    WorkPtr reduce_scatter(Tensors &outputs, TensorLists &inputs,
                           const c10d::ReduceScatterOptions &given) override {
        auto options = given;
        auto factor = take_factor(options);
        return put_one("reduce_scatter", OpType::REDUCE_SCATTER, flat(inputs), outputs,
                       [g = gloo, o = cpu(outputs), i = cpu(inputs), options, factor]() mutable {
                           for (Tensors &list : i) list = multiplied(list, factor);
                           return g->reduce_scatter(o, i, options);
                       });
    }
    WorkPtr _reduce_scatter_base(Tensor &output, Tensor &input,
                                 const c10d::ReduceScatterOptions &given) override {
        auto options = given;
        auto factor = take_factor(options);
        return put_one("reduce_scatter_tensor", OpType::_REDUCE_SCATTER_BASE, {input}, {output},
                       [g = gloo, o = as_cpu(output), i = as_cpu(input), options, factor]() mutable {
                           i = multiplied(i, factor);
                           return g->_reduce_scatter_base(o, i, options);
                       });
    }
    WorkPtr reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                            const c10d::ReduceScatterOptions &given) override {
        auto options = given;
        auto factor = take_factor(options);
        return put("reduce_scatter_tensor_coalesced", OpType::COALESCED, inputs, outputs,
                   [g = gloo, o = cpu(outputs), i = cpu(inputs), options, factor]() mutable {
                       i = multiplied(i, factor);
                       std::vector<WorkPtr> begun;
                       for (size_t k = 0; k < o.size(); k++)
                           begun.push_back(g->_reduce_scatter_base(o[k], i[k], options));
                       return begun;
                   });
    }
    WorkPtr alltoall_base(Tensor &output, Tensor &input, std::vector<int64_t> &output_sizes,
                          std::vector<int64_t> &input_sizes, const c10d::AllToAllOptions &options) override {
        return put_one(
            "all_to_all_single", OpType::ALLTOALL_BASE, {input}, {output},
            [g = gloo, o = as_cpu(output), i = as_cpu(input), output_sizes, input_sizes, options]() mutable {
                return g->alltoall_base(o, i, output_sizes, input_sizes, options);
            });
    }
    // gloo has none for lists: each pair of ranks exchanges its tensors, all at once.
    WorkPtr alltoall(Tensors &outputs, Tensors &inputs, const c10d::AllToAllOptions &) override {
        return put("all_to_all", OpType::ALLTOALL, inputs, outputs,
                   [g = gloo, o = cpu(outputs), i = cpu(inputs), me = getRank()] {
                       constexpr int TAG = 0x517a;
                       std::vector<WorkPtr> begun;
                       for (int peer = 0; peer < static_cast<int>(o.size()); peer++) {
                           if (peer == me) {
                               o[peer].copy_(i[peer]);
                               continue;
                           }
                           Tensors from{o[peer]}, to{i[peer]};
                           begun.push_back(g->recv(from, peer, TAG));
                           begun.push_back(g->send(to, peer, TAG));
                       }
                       return begun;
                   });
    }
    WorkPtr send(Tensors &tensors, int peer, int tag) override {
        return put_one("send", OpType::SEND, tensors, {},
                       [g = gloo, t = cpu(tensors), peer, tag]() mutable { return g->send(t, peer, tag); });
    }
    WorkPtr recv(Tensors &tensors, int peer, int tag) override {
        return put_one("recv", OpType::RECV, {}, tensors,
                       [g = gloo, t = cpu(tensors), peer, tag]() mutable { return g->recv(t, peer, tag); });
    }
    WorkPtr barrier(const c10d::BarrierOptions &options) override {
        WorkPtr work = put_one("barrier", OpType::BARRIER, {}, {},
                               [g = gloo, options] { return g->barrier(options); });
        if (work) static_cast<SimWork *>(work.get())->blocks_host_on = stream;
        return work;
    }
};

c10::intrusive_ptr<c10d::Backend> backend_new(c10::intrusive_ptr<c10d::Backend> gloo) {
    return c10::make_intrusive<SimGloo>(std::move(gloo));
}

} // namespace sim
