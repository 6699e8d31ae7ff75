/* The accesses to the bytes of one piece of memory, as far as they may still matter. Under the simulator's
 * lock. */
#ifndef FCDP_SIMGPU_HISTORY_H
#define FCDP_SIMGPU_HISTORY_H

#include "sim/gpu/clock.h"

#include <stddef.h>

struct sim_history; /* NULL: nothing yet */

enum { SIM_TEXT_BYTES = 48 }; /* of names and labels, with the terminating zero */

/* What an operation was, for reports; counted. */
struct sim_note {
    unsigned refs;
    char name[SIM_TEXT_BYTES];
    char label[SIM_TEXT_BYTES];
    char stream[SIM_TEXT_BYTES];
};

void simgpu__note_drop(struct sim_note *note);

/* One access by one operation to bytes [begin, end) of the memory, through the address `base` + begin. */
struct sim_touch {
    size_t begin;
    size_t end;
    uintptr_t base;
    unsigned slot;
    uint64_t epoch;
    bool writes;
    bool atomic; /* a value that streams wait for */
    struct sim_note *note;
};

/* An earlier touch that conflicts: it shares bytes, one of both writes, and what `known` says does not put it
 * before `touch`. NULL: none. One through another address comes first; without `same_address` none through
 * the same one is looked for. */
const struct sim_touch *simgpu__history_find(const struct sim_history *history, const struct sim_touch *touch,
                                             const struct sim_clock *known, bool same_address);
/* Remembers a touch, keeping its note, and forgets the touches that it makes superfluous. A full history
 * forgets its oldest touch. */
void simgpu__history_add(struct sim_history **history, const struct sim_touch *touch,
                         const struct sim_clock *known);
/* A touch through `base` that `known` does not know to be over; NULL: none. */
const struct sim_touch *simgpu__history_unknown(const struct sim_history *history, uintptr_t base,
                                                const struct sim_clock *known);
/* Forgets what was touched through `base`. */
void simgpu__history_unmap(struct sim_history *history, uintptr_t base);
void simgpu__history_free(struct sim_history *history);

#endif
