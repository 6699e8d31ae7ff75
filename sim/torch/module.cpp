// module.cpp - what Python calls of the simulated device (torch_sim/__init__.py).
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "sim.h"

namespace py = pybind11;

static py::dict counts(bool reset) {
    py::dict found;
    auto put = [&](const char *name, std::atomic<uint64_t> &count) {
        found[name] = reset ? count.exchange(0) : count.load();
    };
    put("launched", sim::counts.launched);
    put("waited", sim::counts.waited);
    put("meta_calls", sim::counts.meta_calls);
    put("meta_hits", sim::counts.meta_hits);
    py::dict by_name;
    for (auto &[name, n] : sim::waited_ops(reset))
        by_name[name.c_str()] = n + (by_name.contains(name) ? by_name[name.c_str()].cast<uint64_t>() : 0);
    found["waited_for"] = by_name;
    return found;
}

// As torch.cuda.memory_stats_as_nested_dict has them.
static c10::CachingDeviceAllocator::DeviceStats stats_of(const py::dict &nested) {
    using c10::CachingAllocator::Stat;
    using c10::CachingAllocator::StatType;
    auto stat = [](const py::handle &of) {
        auto value = [&](const char *name) { return of[name].cast<int64_t>(); };
        return Stat{value("current"), value("peak"), value("allocated"), value("freed")};
    };
    auto stats = [&](const char *name) {
        py::object of = nested[name];
        c10::CachingAllocator::StatArray found;
        found[static_cast<size_t>(StatType::AGGREGATE)] = stat(of["all"]);
        found[static_cast<size_t>(StatType::SMALL_POOL)] = stat(of["small_pool"]);
        found[static_cast<size_t>(StatType::LARGE_POOL)] = stat(of["large_pool"]);
        return found;
    };
    auto number = [&](const char *name) { return nested[name].cast<int64_t>(); };
    c10::CachingDeviceAllocator::DeviceStats out;
    out.allocation = stats("allocation");
    out.segment = stats("segment");
    out.active = stats("active");
    out.inactive_split = stats("inactive_split");
    out.allocated_bytes = stats("allocated_bytes");
    out.reserved_bytes = stats("reserved_bytes");
    out.active_bytes = stats("active_bytes");
    out.inactive_split_bytes = stats("inactive_split_bytes");
    out.requested_bytes = stats("requested_bytes");
    out.num_alloc_retries = number("num_alloc_retries");
    out.num_ooms = number("num_ooms");
    out.num_sync_all_streams = number("num_sync_all_streams");
    out.num_device_alloc = number("num_device_alloc");
    out.num_device_free = number("num_device_free");
    out.max_split_size = number("max_split_size");
    return out;
}

// The functions live as long as the process, and are called by threads with and without the GIL.
static void figures(const py::function &stats, const py::function &reset_peaks,
                    const py::function &reset_accumulated) {
    auto call = [](const py::function &function) {
        return [of = function.inc_ref().ptr()] {
            py::gil_scoped_acquire gil;
            py::reinterpret_borrow<py::function>(of)(0);
        };
    };
    auto ask = [of = stats.inc_ref().ptr()] {
        py::gil_scoped_acquire gil;
        return stats_of(py::reinterpret_borrow<py::function>(of)(0));
    };
    sim::figures_from(new sim::Figures{ask, call(reset_peaks), call(reset_accumulated)});
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    py::module_::import("torch._C._distributed_c10d");
    using without_gil = py::call_guard<py::gil_scoped_release>;
    m.def("setup", [](const std::string &library, const py::dict &hooks, int n_devices) {
        auto hook = [&](const char *name) { return hooks[name].cast<uintptr_t>(); };
        sim::setup({library, hook("malloc"), hook("free"), hook("record_stream"), hook("reset"), n_devices});
    });
    m.def("set_device", [](int index) { sim::select(static_cast<c10::DeviceIndex>(index)); });
    m.def("synchronize", &sim::device_synchronize, without_gil());
    m.def("mem_get_info", &sim::memory_info);
    m.def("pinned_empty_cache", &sim::pinned_empty_cache, without_gil());
    m.def("set_rates", &sim::set_rates);
    m.def("figures", &figures);
    m.def("counts", &counts);
    m.def("default_generator", [] { return sim::default_generator(); });
    m.def("backend", &sim::backend_new);
}
