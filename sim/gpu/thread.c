/* What a thread of the program does in modelled time, between a host function that gave it the work and a
 * word that a stream waits for. */
#include "sim/gpu/internal.h"

/* The calling thread's; at_ns 0: it has no such work. */
static _Thread_local struct {
    uint64_t ready_ns, began_ns; /* the modelled time of its begin, and the real one */
    uint64_t at_ns;              /* the modelled time as of core_ns */
    uint64_t core_ns;            /* what the thread had had of a core then */
    double core_times;
} work;

void simgpu_work_begin(uint64_t from_ns) {
    if (simgpu__forked()) return;
    uint64_t free_ns = work.at_ns;
    sim_lock();
    work.core_times = sim.core_times;
    sim_unlock();
    work.at_ns = work.ready_ns = from_ns > free_ns ? from_ns : free_ns;
    work.began_ns = simgpu__now_ns();
    work.core_ns = simgpu__core_ns();
}

uint64_t simgpu__thread_here_ns(void) {
    if (!work.at_ns) return 0;
    if (work.core_times > 0)
        return work.at_ns + (uint64_t)(work.core_times * (double)(simgpu__core_ns() - work.core_ns));
    uint64_t now = simgpu__now_ns();
    return now > work.at_ns ? now : work.at_ns;
}

void simgpu__thread_end_at(uint64_t end_ns) {
    if (!work.at_ns) return;
    work.at_ns = end_ns;
    work.core_ns = simgpu__core_ns();
}

uint64_t simgpu_work_end(void) {
    if (simgpu__forked()) return 0;
    uint64_t here_ns = simgpu__thread_here_ns();
    simgpu__thread_end_at(here_ns);
    if (work.began_ns) simgpu__timeline_work(work.ready_ns, work.began_ns, here_ns);
    work.began_ns = 0;
    return here_ns;
}

void simgpu_word_store(uint32_t *word, uint32_t value) {
    if (simgpu__forked()) return;
    uint64_t here_ns = simgpu_work_end();
    simgpu__until_ns(here_ns);
    sim_lock();
    simgpu__order_store_value(simgpu__vspace_key((uintptr_t)word), value);
    simgpu__stream_store_value(word, value, here_ns ? here_ns : simgpu__now_ns());
    sim_unlock();
}
