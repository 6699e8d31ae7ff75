/* Vector clocks: of each stream, how many of its operations are known to be over. Under the simulator's
 * lock. */
#ifndef FCDP_SIMGPU_CLOCK_H
#define FCDP_SIMGPU_CLOCK_H

#include <stdbool.h>
#include <stdint.h>

struct sim_clock; /* counted, and not changed while it is shared; NULL knows nothing */

struct sim_clock *simgpu__clock_keep(struct sim_clock *clock);
void simgpu__clock_drop(struct sim_clock *clock);
uint64_t simgpu__clock_at(const struct sim_clock *clock, unsigned slot);
/* Adds knowledge to *clock, a reference of the caller's. False: no memory, and *clock is unchanged. */
bool simgpu__clock_raise(struct sim_clock **clock, unsigned slot, uint64_t epoch);
/* Does the clock know all that `other` knows, except for the slot's entry? */
bool simgpu__clock_covers(const struct sim_clock *clock, const struct sim_clock *other, unsigned but_slot);
bool simgpu__clock_join(struct sim_clock **clock, const struct sim_clock *other);

/* Where a stream is: its operations up to `epoch`, and what had to be over before them. */
struct sim_position {
    unsigned slot;
    uint64_t epoch;
    struct sim_clock *known;
};

#endif
