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
    m.def("counts", &counts);
    m.def("default_generator", [] { return sim::default_generator(); });
    m.def("backend", &sim::backend_new);
}
