/* Vector clocks as counted arrays: copied when they change while shared, so that taking a snapshot costs
 * nothing. */
#include "sim/gpu/clock.h"

#include <stdlib.h>
#include <string.h>

struct sim_clock {
    unsigned refs;
    unsigned n;
    uint64_t at[];
};

struct sim_clock *simgpu__clock_keep(struct sim_clock *clock) {
    if (clock) clock->refs++;
    return clock;
}

void simgpu__clock_drop(struct sim_clock *clock) {
    if (clock && --clock->refs == 0) free(clock);
}

uint64_t simgpu__clock_at(const struct sim_clock *clock, unsigned slot) {
    return clock && slot < clock->n ? clock->at[slot] : 0;
}

/* Makes *clock the caller's alone, with at least n slots. */
static bool own(struct sim_clock **clock, unsigned n) {
    struct sim_clock *old = *clock;
    if (old && old->refs == 1 && old->n >= n) return true;
    unsigned n_old = old ? old->n : 0, n_new = n > n_old ? n : n_old;
    struct sim_clock *fresh = calloc(1, sizeof *fresh + n_new * sizeof *fresh->at);
    if (!fresh) return false;
    fresh->refs = 1;
    fresh->n = n_new;
    if (old) memcpy(fresh->at, old->at, n_old * sizeof *old->at);
    simgpu__clock_drop(old);
    *clock = fresh;
    return true;
}

bool simgpu__clock_raise(struct sim_clock **clock, unsigned slot, uint64_t epoch) {
    if (simgpu__clock_at(*clock, slot) >= epoch) return true;
    if (!own(clock, slot + 1)) return false;
    (*clock)->at[slot] = epoch;
    return true;
}

bool simgpu__clock_covers(const struct sim_clock *clock, const struct sim_clock *other, unsigned but_slot) {
    for (unsigned i = 0; other && i < other->n; i++)
        if (i != but_slot && other->at[i] > simgpu__clock_at(clock, i)) return false;
    return true;
}

bool simgpu__clock_join(struct sim_clock **clock, const struct sim_clock *other) {
    if (!other || other == *clock) return true;
    for (unsigned i = 0; i < other->n; i++) {
        if (other->at[i] <= simgpu__clock_at(*clock, i)) continue;
        if (!own(clock, other->n)) return false; /* once: then it is ours, and long enough */
        (*clock)->at[i] = other->at[i];
    }
    return true;
}
