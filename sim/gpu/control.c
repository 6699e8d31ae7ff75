/* The control functions that concern all parts: what is alive, and the reset. */
#include "sim/gpu/internal.h"

void simgpu_live(struct simgpu_live *live_out) {
    *live_out = (struct simgpu_live){0};
    if (simgpu__forked()) return;
    sim_lock();
    live_out->handles = simgpu__phys_handles();
    simgpu__vspace_count(&live_out->ranges, &live_out->maps);
    live_out->streams = simgpu__stream_count();
    live_out->events = simgpu__event_count();
    live_out->registrations = simgpu__host_count();
    live_out->modules = simgpu__module_count();
    live_out->device_bytes = sim.used_bytes;
    sim_unlock();
}

void simgpu_reset(void) {
    if (simgpu__forked()) return;
    sim_lock();
    simgpu__stream_reset();
    simgpu__event_reset();
    simgpu__module_reset();
    simgpu__host_reset();
    simgpu__vspace_reset();
    simgpu__phys_reset();
    simgpu__stream_forget_order();
    simgpu__order_reset();
    atomic_store(&sim.initialised, false);
    atomic_store(&sim.context_refs, 0);
    atomic_store(&sim.sticky, CUDA_SUCCESS);
    atomic_fetch_add(&sim.generation, 1);
    sim.settings_loaded = false;
    for (int i = 0; i < SIM_N_LINKS; i++) sim.link_free_ns[i] = 0;
    sim.function_free_ns = 0;
    simgpu__fault_clear();
    sim_unlock();
    simgpu_blocking_reset();
}
