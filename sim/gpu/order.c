/*
 * What is ordered with what: each stream's position is a vector clock, and the edges that CUDA promises move
 * knowledge from one to another.
 *
 * - A stream's operations are in order; so is a host function, with what is before and behind it on its
 *   stream.
 * - cuEventRecord takes the stream's position, cuStreamWaitEvent gives it to another stream.
 * - The null stream and the streams without CU_STREAM_NON_BLOCKING wait for each other.
 * - Once a cuEventSynchronize, cuStreamSynchronize or cuCtxSynchronize is through, once cuEventQuery or
 *   cuStreamQuery answered success, and after a copy to pageable host memory, the host knows what was waited
 *   or asked for, and what it enqueues from then on is behind it. All threads of a process count as one host,
 *   since how they tell each other is not seen: that never reports what is ordered, and may miss what two
 *   threads did without a word. A copy from pageable memory is no such edge, nor are cuMemHostUnregister and
 *   cuStreamDestroy, as CUDA promises nothing there.
 * - cuStreamWriteValue32 (with its barrier) to cuStreamWaitValue32, where the value that ends the wait is the
 *   one that a stream wrote there last. Any other comes from elsewhere, a thread or another process, and
 *   might come after all that any stream or host function has signalled, and after all that the host knows:
 *   the wait is behind that, then.
 *   With SIMGPU_RACES_STRICT neither that nor an answer to a query orders anything.
 * - simgpu_signal to simgpu_observe, for what threads and host functions tell each other by means of their
 *   own.
 *
 * An operation's order is settled when it starts, which is late enough to know the value that it waited for,
 * and late enough for its memory to be mapped. Out of memory ends all checks until the next reset, since a
 * lost edge would be a false report.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim/gpu/internal.h"

#define FRESH_SLOTS 64 /* so many streams come and go before a slot serves a second one */
#define N_SIGNALS 1024
#define N_PROBES 8

struct slot {
    uint64_t epoch;
    bool in_use;
};

struct signal {
    struct sim_key key;
    bool in_use;
    uint32_t value;
    struct sim_clock *clock;
};

static struct {
    struct slot *slots; /* the null stream's is 0, and needs no entry */
    unsigned n_slots;
    struct sim_clock *host;      /* what the program's threads know to be over */
    struct sim_clock *signalled; /* what any signal knows */
    bool lost;
    struct signal signals[N_SIGNALS];
} order = {.n_slots = 1};

static void must(bool done) {
    if (!done) order.lost = true;
}

struct sim_clock *simgpu__order_host(void) {
    return order.host;
}

/* ---- positions ---- */

/* Slots are not reused early: what waited for a slot's second stream would seem to have waited for its
 * first. */
bool simgpu__order_begin(struct sim_position *position) {
    unsigned slot = order.n_slots;
    for (unsigned i = 1; order.n_slots > FRESH_SLOTS && i < order.n_slots; i++)
        if (!order.slots[i].in_use) slot = i;
    if (slot == order.n_slots) {
        struct slot *grown = realloc(order.slots, (order.n_slots + 1) * sizeof *grown);
        if (!grown) return false;
        order.slots = grown;
        order.slots[order.n_slots++] = (struct slot){0};
    }
    order.slots[slot].in_use = true;
    *position = (struct sim_position){.slot = slot, .epoch = order.slots[slot].epoch};
    return true;
}

void simgpu__order_end(struct sim_position *position) {
    order.slots[position->slot] = (struct slot){.epoch = position->epoch};
    simgpu__clock_drop(position->known);
    position->known = NULL;
}

static void learn(struct sim_clock **clock, const struct sim_position *of) {
    must(simgpu__clock_join(clock, of->known));
    must(simgpu__clock_raise(clock, of->slot, of->epoch));
}

void simgpu__order_learn(struct sim_position *position, const struct sim_position *of) {
    learn(&position->known, of);
}

void simgpu__order_host_learns(const struct sim_position *of) {
    learn(&order.host, of);
}

void simgpu__order_host_learns_ended(void) {
    for (unsigned i = 1; i < order.n_slots; i++)
        if (!order.slots[i].in_use) must(simgpu__clock_raise(&order.host, i, order.slots[i].epoch));
}

/* Its own operations, and all that was before them? */
static bool knows(const struct sim_clock *clock, unsigned own_slot, const struct sim_position *of) {
    return (own_slot == of->slot || simgpu__clock_at(clock, of->slot) >= of->epoch) &&
           simgpu__clock_covers(clock, of->known, own_slot);
}

bool simgpu__order_host_knows(const struct sim_position *of) {
    return simgpu__clock_at(order.host, of->slot) >= of->epoch;
}

void simgpu__order_start(struct sim_position *position, const struct sim_op *op) {
    must(simgpu__clock_join(&position->known, op->host));
    if (op->taught) *op->taught += !knows(position->known, position->slot, &op->waits_for->position);
    if (op->waits_for) simgpu__order_learn(position, &op->waits_for->position);
    if (op->work != SIM_POINT && op->work != SIM_WAIT_POINT) position->epoch++; /* those touch nothing */
}

/* ---- signals ---- */

static void signals_clear(void) {
    for (size_t i = 0; i < N_SIGNALS; i++) simgpu__clock_drop(order.signals[i].clock);
    memset(order.signals, 0, sizeof order.signals);
}

static size_t hash_of(struct sim_key key) {
    uint64_t mixed = ((uint64_t)key.base ^ (uint64_t)key.offset * 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
    return (size_t)(mixed >> 40) % N_SIGNALS;
}

/* The key's entry, or a free one for it; NULL: neither near its place. */
static struct signal *signal_find(struct sim_key key) {
    size_t at = hash_of(key);
    for (size_t i = 0; i < N_PROBES; i++) {
        struct signal *signal = &order.signals[(at + i) % N_SIGNALS];
        if (!signal->in_use || (signal->key.base == key.base && signal->key.offset == key.offset))
            return signal;
    }
    return NULL;
}

/* `signalled` has it all, so that a table that is cleared because it is full loses precision and no edge. */
static void signal_put(struct sim_key key, uint32_t value, struct sim_clock *clock) {
    must(simgpu__clock_join(&order.signalled, clock));
    struct signal *signal = signal_find(key);
    if (!signal) {
        signals_clear();
        signal = signal_find(key);
    }
    struct sim_clock *before = signal->clock;
    *signal = (struct signal){.key = key, .in_use = true, .value = value, .clock = simgpu__clock_keep(clock)};
    simgpu__clock_drop(before);
}

void simgpu__order_write_value(const struct sim_position *position, struct sim_key key, uint32_t value,
                               bool barrier) {
    struct sim_clock *clock = NULL;
    if (barrier) learn(&clock, position);
    signal_put(key, value, clock);
    simgpu__clock_drop(clock);
}

void simgpu__order_store_value(struct sim_key key, uint32_t value) {
    signal_put(key, value, NULL);
}

void simgpu__order_wait_value(struct sim_position *position, struct sim_key key, uint32_t value) {
    const struct signal *signal = signal_find(key);
    bool written_here = signal && signal->in_use && signal->value == value;
    if (!written_here && sim.strict) return;
    must(simgpu__clock_join(&position->known, written_here ? signal->clock : order.signalled));
    if (!written_here) must(simgpu__clock_join(&position->known, order.host));
}

/* Earlier signals under the key stay in it: several threads may signal, and an observer comes after all of
 * them. */
void simgpu_signal(const void *key) {
    if (simgpu__forked()) return;
    sim_lock();
    struct sim_position *position = simgpu__stream_position();
    struct signal *before = signal_find(simgpu__vspace_key((uintptr_t)key));
    struct sim_clock *clock = simgpu__clock_keep(before && before->in_use ? before->clock : NULL);
    if (position)
        learn(&clock, position);
    else
        must(simgpu__clock_join(&clock, order.host));
    signal_put(simgpu__vspace_key((uintptr_t)key), 0, clock);
    simgpu__clock_drop(clock);
    sim_unlock();
}

void simgpu_observe(const void *key) {
    if (simgpu__forked()) return;
    sim_lock();
    struct sim_position *position = simgpu__stream_position();
    struct signal *signal = signal_find(simgpu__vspace_key((uintptr_t)key));
    must(simgpu__clock_join(position ? &position->known : &order.host,
                            signal && signal->in_use ? signal->clock : order.signalled));
    sim_unlock();
}

/* ---- the accesses ---- */

/* One access of an operation, on its way through the maps that it touches. */
struct visit {
    const struct sim_position *position;
    struct sim_note *note;
    struct simgpu_access access;
    bool atomic;
    bool ordered; /* false, once a conflict was reported */
};

static struct simgpu_unordered found; /* since the last reset */

static void describe(char *text, size_t n, const struct sim_note *note, const struct sim_touch *touch) {
    snprintf(text, n, "%s%s%s%s on stream \"%s\" %s [%#llx, %#llx)", note->name, *note->label ? " (" : "",
             note->label, *note->label ? ")" : "", note->stream, touch->writes ? "writes" : "reads",
             (unsigned long long)(touch->base + touch->begin),
             (unsigned long long)(touch->base + touch->end));
}

static void report(const char *what, const char *first, const char *second, const char *advice) {
    char text[sizeof found.text];
    snprintf(text, sizeof text, "%s: %s; %s: %s", what, first, second, advice);
    if (*found.text && sim.goes_on) return;
    if (!*found.text) memcpy(found.text, text, sizeof text);
    fprintf(stderr, "fcdp_simgpu: %s\n", text);
}

static void report_pair(const struct sim_touch *earlier, const struct sim_touch *touch) {
    char first[256], second[256];
    bool aliased = earlier->base != touch->base;
    ++*(aliased ? &found.aliases : &found.races);
    describe(first, sizeof first, earlier->note, earlier);
    describe(second, sizeof second, touch->note, touch);
    report(aliased ? "unordered accesses to the same memory through two addresses"
                   : "unordered accesses to the same memory",
           first, second, "neither waits for the other; let an event order them");
}

/* Look for a conflict before remembering the touch, since a refused operation has not happened. */
static bool touch(void *context, struct sim_history **history, size_t begin, size_t bytes, uintptr_t base) {
    struct visit *visit = context;
    struct sim_touch now = {.begin = begin,
                            .end = begin + bytes,
                            .base = base,
                            .slot = visit->position->slot,
                            .epoch = visit->position->epoch,
                            .writes = visit->access.writes,
                            .atomic = visit->atomic,
                            .note = visit->note};
    const struct sim_touch *earlier = simgpu__history_find(*history, &now, visit->position->known, sim.races);
    if (earlier) {
        report_pair(earlier, &now);
        visit->ordered = sim.goes_on;
        if (!sim.goes_on) return false;
    }
    simgpu__history_add(history, &now, visit->position->known);
    return true;
}

/* Memory that is registered has one address, as far as is known, so it matters for races alone. */
static void touch_access(struct visit *visit) {
    uintptr_t address = visit->access.address;
    switch (simgpu__place_of(address, visit->access.bytes)) {
    case SIM_RESERVED: simgpu__vspace_visit(address, visit->access.bytes, touch, visit); break;
    case SIM_PINNED:
        if (sim.races) simgpu__host_visit(address, visit->access.bytes, touch, visit);
        break;
    case SIM_FOREIGN:
    case SIM_MIXED: break;
    }
}

/* One note for all that the operation touches, as it may be hundreds of pages. */
bool simgpu__order_check(const struct sim_position *position, const struct sim_op *op,
                         const char *stream_name) {
    if (op->n_accesses == 0 || order.lost) return true;
    struct sim_note *note = calloc(1, sizeof *note);
    if (!note) {
        order.lost = true;
        return true;
    }
    note->refs = 1;
    simgpu__text_set(note->name, simgpu__op_name(op));
    simgpu__text_set(note->label, op->label);
    simgpu__text_set(note->stream, stream_name);
    struct visit visit = {.position = position, .note = note, .ordered = true};
    visit.atomic = op->work == SIM_WAIT_VALUE || op->work == SIM_WRITE_VALUE;
    for (unsigned i = 0; visit.ordered && i < op->n_accesses; i++) {
        visit.access = simgpu__accesses_of(op)[i];
        touch_access(&visit);
    }
    simgpu__note_drop(note);
    return visit.ordered;
}

bool simgpu__order_check_unmap(const struct sim_history *history, uintptr_t base) {
    if (!sim.races || order.lost) return true;
    const struct sim_touch *unknown = simgpu__history_unknown(history, base, order.host);
    if (!unknown) return true;
    char first[256], second[64];
    found.unmaps++;
    describe(first, sizeof first, unknown->note, unknown);
    snprintf(second, sizeof second, "the map at %#llx is taken away", (unsigned long long)base);
    report("memory is unmapped that may be in use", first, second,
           "nothing told the host that this was over; synchronise with, or query, an event behind it first");
    return sim.goes_on;
}

void simgpu_unordered(struct simgpu_unordered *unordered_out) {
    *unordered_out = (struct simgpu_unordered){0};
    if (simgpu__forked()) return;
    sim_lock();
    *unordered_out = found;
    sim_unlock();
}

void simgpu_unordered_reset(void) {
    if (simgpu__forked()) return;
    sim_lock();
    found = (struct simgpu_unordered){0};
    sim_unlock();
}

void simgpu__order_reset(void) {
    signals_clear();
    simgpu__clock_drop(order.host);
    simgpu__clock_drop(order.signalled);
    free(order.slots);
    order.host = order.signalled = NULL;
    order.slots = NULL;
    order.n_slots = 1;
    order.lost = false;
    found = (struct simgpu_unordered){0};
}
