/* follow.c - reads one process's segment again and again, and keeps what its events add up to.
 *
 * Events may be lost between two polls, while the table of objects and the counters are always current. So a
 * poll replays the events first and then corrects every region and sum by the table and the counters.
 */
#include "tools/memtrace/follow.h"

#include <stdlib.h>
#include <string.h>

#include "torch_plugin/trace_events.h"

enum { NO_REGION = UINT32_MAX };

typedef struct seen_object {
    uint32_t generation, region; /* generation 0: never used */
} seen_object;

struct memtrace_follower {
    const memtrace_segment *segment;
    uint64_t next, n_lost; /* the event to read next; those that could not be read */
    uint64_t stuck_at;     /* an event that was still being written in the last poll */
    uint64_t first_end_ns, step_ns;
    uint32_t first_step, first_end;
    bool has_polled, has_read; /* once; an event */
    struct held {
        bool is_told; /* by an event */
        uint64_t bytes;
    } held[MEMTRACE_N_POOLS][MEMTRACE_N_HOLDERS];
    uint64_t untold_bytes[MEMTRACE_N_HOLDERS]; /* of pools of which no event has told */
    uint64_t waited_ns[MEMTRACE_N_WAITS];

    memtrace_live_region *regions;
    memtrace_live_place *places; /* by region: as the events so far left it */
    uint32_t n_regions, n_room;
    seen_object objects[FCDP_TRACE_N_OBJECTS];

    memtrace_live_note notes[MEMTRACE_N_NOTES];
    uint64_t n_notes;

    /* The sample of the peak is made when something changes after it: while memory grows there is none. */
    memtrace_sample *peak;
    uint64_t peak_bytes, peak_ns;
    uint32_t peak_step;
    bool peak_pending;
};

memtrace_follower *memtrace_follower_create(const memtrace_segment *segment) {
    memtrace_follower *f = calloc(1, sizeof *f);
    if (!f) return NULL;
    f->segment = segment;
    uint64_t head = memtrace_head(segment), n_ring = segment->ring_events;
    f->next = head > n_ring ? head - n_ring : 0;
    f->stuck_at = UINT64_MAX;
    return f;
}

void memtrace_follower_destroy(memtrace_follower *f) {
    if (!f) return;
    free(f->regions);
    free(f->places);
    free(f->peak);
    free(f);
}

const memtrace_sample *memtrace_follower_peak(const memtrace_follower *f) {
    return f->peak;
}

const memtrace_live_region *memtrace_follower_region(const memtrace_follower *f, uint32_t id) {
    return &f->regions[id];
}

const memtrace_live_note *memtrace_follower_note(const memtrace_follower *f, size_t i) {
    if (i >= MEMTRACE_N_NOTES || i >= f->n_notes) return NULL;
    return &f->notes[(f->n_notes - 1 - i) % MEMTRACE_N_NOTES];
}

/* ---- objects ---- */

/* A new id. NO_REGION: no memory. */
static uint32_t region_add(memtrace_follower *f, const memtrace_live_region *region) {
    if (f->n_regions == f->n_room) {
        uint32_t n_room = f->n_room ? 2 * f->n_room : 64;
        memtrace_live_region *regions = realloc(f->regions, n_room * sizeof *regions);
        if (regions) f->regions = regions;
        memtrace_live_place *places = realloc(f->places, n_room * sizeof *places);
        if (places) f->places = places;
        if (!regions || !places) return NO_REGION;
        f->n_room = n_room;
    }
    f->regions[f->n_regions] = *region;
    f->places[f->n_regions] = (memtrace_live_place){.region = f->n_regions};
    return f->n_regions++;
}

/* The id of what object `number` stands for now. */
static uint32_t region_of(memtrace_follower *f, uint32_t number, const fcdp_trace_object *object) {
    seen_object *seen = &f->objects[number];
    if (seen->generation == object->generation) return seen->region;
    if (seen->generation) f->places[seen->region].state = 0;
    memtrace_live_region region = {.bytes = object->bytes};
    memcpy(region.name, object->name, sizeof region.name);
    uint32_t id = region_add(f, &region);
    if (id != NO_REGION) *seen = (seen_object){object->generation, id};
    return id;
}

/* Without `state`, it is only learnt which region the number stands for: a new one begins with nothing. */
static void object_read(memtrace_follower *f, uint32_t number, bool state) {
    fcdp_trace_object object;
    if (!memtrace_read_object(f->segment, number, &object)) {
        if (state && f->objects[number].generation) f->places[f->objects[number].region].state = 0;
        return;
    }
    uint32_t id = region_of(f, number, &object);
    if (id == NO_REGION) return;
    f->regions[id].bytes = object.bytes;
    memtrace_live_place *place = &f->places[id];
    place->state = state ? object.state : place->state | FCDP_OBJECT_LIVE;
    place->lives = object.lives;
    if (!state) return;
    place->device_bytes = object.device_bytes;
    place->host_bytes = object.host_bytes;
    place->file_bytes = object.file_bytes;
}

static void objects_read(memtrace_follower *f, bool state) {
    uint32_t n = f->segment->n_objects;
    for (uint32_t i = 1; i < n && i < FCDP_TRACE_N_OBJECTS; i++) object_read(f, i, state);
}

static memtrace_live_place *place_of(memtrace_follower *f, uint32_t object) {
    if (object == 0 || object >= FCDP_TRACE_N_OBJECTS || !f->objects[object].generation) return NULL;
    return &f->places[f->objects[object].region];
}

/* ---- samples ---- */

static uint32_t n_live(const memtrace_follower *f) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < f->n_regions; i++) n += (f->places[i].state & FCDP_OBJECT_LIVE) != 0;
    return n;
}

static uint64_t held_by(const memtrace_follower *f, unsigned holder) {
    uint64_t bytes = f->untold_bytes[holder];
    for (unsigned pool = 0; pool < MEMTRACE_N_POOLS; pool++) bytes += f->held[pool][holder].bytes;
    return bytes;
}

/* As the follower has it now. */
static memtrace_sample *sample_make(const memtrace_follower *f, uint64_t time_ns) {
    uint32_t n = n_live(f);
    size_t bytes = sizeof(memtrace_sample) + n * sizeof(memtrace_live_place);
    memtrace_sample *sample = malloc(bytes);
    if (!sample) return NULL;
    const fcdp_trace_header *header = f->segment->header;
    *sample = (memtrace_sample){
        .sample_bytes = bytes,
        .time_ns = time_ns,
        .step_ns = f->step_ns,
        .first_end_ns = f->first_end_ns,
        .first_end = f->first_end,
        .step = atomic_load_explicit(&header->step, memory_order_relaxed),
        .head = memtrace_head(f->segment),
        .first_step = f->has_read ? f->first_step : atomic_load_explicit(&header->step, memory_order_relaxed),
        .n_lost = f->n_lost,
        .n_dropped = memtrace_n_dropped(f->segment),
    };
    for (unsigned i = 0; i < MEMTRACE_N_HOLDERS; i++) sample->held_bytes[i] = held_by(f, i);
    memcpy(sample->waited_ns, f->waited_ns, sizeof f->waited_ns);
    for (unsigned i = 0; i < FCDP_TRACE_N_COUNTERS; i++)
        sample->counters[i] = memtrace_read_counter(f->segment, i);
    for (uint32_t i = 0; i < f->n_regions && sample->n_places < n; i++)
        if (f->places[i].state & FCDP_OBJECT_LIVE) sample->places[sample->n_places++] = f->places[i];
    return sample;
}

/* What is resident has not changed since the most was held. */
static void peak_take(memtrace_follower *f) {
    f->peak_pending = false;
    memtrace_sample *peak = sample_make(f, f->peak_ns);
    if (!peak) return;
    peak->step = f->peak_step;
    free(f->peak);
    f->peak = peak;
}

static void held_changed(memtrace_follower *f, uint64_t time_ns, uint32_t step) {
    uint64_t held_bytes = 0;
    for (unsigned i = 0; i < MEMTRACE_N_HOLDERS; i++) held_bytes += held_by(f, i);
    if (held_bytes <= f->peak_bytes) return;
    f->peak_bytes = held_bytes;
    f->peak_ns = time_ns;
    f->peak_step = step;
    f->peak_pending = true;
}

/* ---- events ---- */

static void note(memtrace_follower *f, const fcdp_trace_event *e) {
    const memtrace_live_place *place = place_of(f, e->object);
    f->notes[f->n_notes++ % MEMTRACE_N_NOTES] = (memtrace_live_note){.time_ns = e->time_ns,
                                                                     .bytes = e->bytes,
                                                                     .a = e->a,
                                                                     .b = e->b,
                                                                     .region = place ? place->region
                                                                                     : NO_REGION,
                                                                     .kind = e->kind,
                                                                     .cause = e->cause};
}

static void moved(memtrace_live_place *place, const fcdp_trace_event *e) {
    for (int link = 0; place && link < MEMTRACE_N_LINKS; link++)
        place->moved[link] += memtrace_link_bytes(e, (memtrace_link)link);
}

static const uint8_t wait_causes[] = {FCDP_CAUSE_FOR_AGREEMENT, FCDP_CAUSE_FOR_MEMORY,
                                      FCDP_CAUSE_FOR_END,       FCDP_CAUSE_FOR_COMPUTE,
                                      FCDP_CAUSE_FOR_WRITES,    FCDP_CAUSE_FOR_FINGERPRINT};
_Static_assert(sizeof wait_causes == MEMTRACE_OTHER_CAUSE - MEMTRACE_FIRST_CAUSE, "one wait each");

uint8_t memtrace_wait_cause(unsigned wait) {
    return wait >= MEMTRACE_FIRST_CAUSE && wait < MEMTRACE_OTHER_CAUSE
               ? wait_causes[wait - MEMTRACE_FIRST_CAUSE]
               : 0;
}

static void host_waited(memtrace_follower *f, const fcdp_trace_event *e) {
    unsigned wait = MEMTRACE_FIRST_CAUSE;
    while (wait < MEMTRACE_OTHER_CAUSE && memtrace_wait_cause(wait) != e->cause) wait++;
    f->waited_ns[wait] += e->duration_ns;
}

/* A pool's first event also says what it had before: that is no longer of the untold ones. */
static void pages_moved(memtrace_follower *f, const fcdp_trace_event *e) {
    uint64_t holder = e->a & 0xff, pool = e->a >> 8;
    if (holder >= MEMTRACE_N_HOLDERS || pool >= MEMTRACE_N_POOLS) return;
    struct held *held = &f->held[pool][holder];
    if (!held->is_told) {
        uint64_t before = memtrace_held_before(e), *untold = &f->untold_bytes[holder];
        *held = (struct held){true, before};
        *untold -= *untold < before ? *untold : before;
    }
    if (f->peak_pending && e->b < held->bytes) peak_take(f);
    held->bytes = e->b;
    held_changed(f, e->time_ns, e->step);
}

static void placed(memtrace_follower *f, const fcdp_trace_event *e) {
    memtrace_live_place *place = place_of(f, e->object);
    if (!place) return;
    if (f->peak_pending) peak_take(f);
    place->device_bytes = e->a;
    place->host_bytes = e->cause == FCDP_CAUSE_IN_FILE ? 0 : e->b;
    place->file_bytes = e->cause == FCDP_CAUSE_IN_FILE ? e->b : 0;
    place->state = e->flags >> FCDP_TRACE_STATE_SHIFT;
}

static void evicted(memtrace_follower *f, const fcdp_trace_event *e) {
    memtrace_live_place *place = place_of(f, e->object);
    if (place) place->n_evictions++;
    note(f, e);
}

static void stepped(memtrace_follower *f, const fcdp_trace_event *e) {
    f->step_ns = e->time_ns;
    if (f->first_end_ns) return;
    f->first_end_ns = e->time_ns;
    f->first_end = (uint32_t)e->a;
}

/* Kinds that say nothing of where bytes are or what waits are left to `record`. */
static void apply(memtrace_follower *f, const fcdp_trace_event *e) {
    switch (e->kind) {
    case FCDP_EVENT_PAGES_TAKE:
    case FCDP_EVENT_PAGES_GIVE: pages_moved(f, e); break;
    case FCDP_EVENT_STATE: placed(f, e); break;
    case FCDP_EVENT_STORE:
    case FCDP_EVENT_LOAD:
    case FCDP_EVENT_GATHER:
    case FCDP_EVENT_RESTORE: moved(place_of(f, e->object), e); break;
    case FCDP_EVENT_EVICT: evicted(f, e); break;
    case FCDP_EVENT_PRESSURE:
    case FCDP_EVENT_OOM:
    case FCDP_EVENT_NEIGHBOUR:
    case FCDP_EVENT_SLEEP:
    case FCDP_EVENT_WAKE:
    case FCDP_EVENT_FAIL: note(f, e); break;
    case FCDP_EVENT_SPILL_WRITE:
    case FCDP_EVENT_SPILL_READ:
    case FCDP_EVENT_CACHE_READ:
    case FCDP_EVENT_CACHE_WRITE:
        if (e->a) note(f, e);
        break;
    case FCDP_EVENT_HOST_WAIT: host_waited(f, e); break;
    case FCDP_EVENT_STALL: f->waited_ns[MEMTRACE_STALL] += e->duration_ns; break;
    case FCDP_EVENT_STEP: stepped(f, e); break;
    default: break;
    }
}

/* An event that is still being written gets until the next poll: its writer may have been stopped, or
 * killed, or never have written it (n_dropped). */
static void events_read(memtrace_follower *f, bool is_last) {
    uint64_t head = memtrace_head(f->segment), n_ring = f->segment->ring_events;
    if (head - f->next > n_ring) {
        f->n_lost += head - n_ring - f->next;
        f->next = head - n_ring;
    }
    for (; f->next < head; f->next++) {
        fcdp_trace_event event;
        memtrace_read found = memtrace_read_event(f->segment, f->next, &event);
        if (found == MEMTRACE_READ) {
            if (!f->has_read) f->first_step = event.step;
            f->has_read = true;
            apply(f, &event);
        } else if (found == MEMTRACE_LOST) {
            f->n_lost++;
        } else if (f->stuck_at != f->next && !is_last) {
            f->stuck_at = f->next;
            return;
        }
    }
}

/* What all pools have is exact; what each has is of its last event. */
static void held_read(memtrace_follower *f) {
    for (unsigned i = 0; i < MEMTRACE_N_HOLDERS; i++) {
        uint64_t told = held_by(f, i) - f->untold_bytes[i],
                 all = memtrace_read_counter(f->segment, FCDP_COUNT_HELD_0_BYTES + i);
        f->untold_bytes[i] = all > told ? all - told : 0;
    }
}

/* The events lead from the state of the last poll to the one that the objects and counters have now.
 * Before the first poll nothing is known, and what holds now is taken for what held then. */
memtrace_sample *memtrace_follower_poll(memtrace_follower *f, uint64_t now_ns, bool is_last) {
    objects_read(f, !f->has_polled);
    f->has_polled = true;
    events_read(f, is_last);
    if (f->peak_pending) peak_take(f);
    objects_read(f, true);
    held_read(f);
    held_changed(f, now_ns, atomic_load_explicit(&f->segment->header->step, memory_order_relaxed));
    if (f->peak_pending) peak_take(f);
    return sample_make(f, now_ns);
}
