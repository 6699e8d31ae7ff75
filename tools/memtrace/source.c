/* source.c - empties the ring of one process into chunks. */
#include "tools/memtrace/source.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { EVENTS_OF_A_CHUNK = 16384 };                 /* 1 MB */
static const uint64_t WRITE_AFTER_NS = 250000000;   /* what a killed recorder loses */
static const uint64_t GIVE_UP_AFTER_NS = 100000000; /* how long to wait for a missing event */
static const uint64_t STATE_AFTER_NS = 5000000000;
static const uint64_t LOOK_AFTER_NS = 100000000;

uint64_t memtrace_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t mixed(uint64_t sum, uint64_t value) {
    return (sum ^ value) * 0x9E3779B97F4A7C15u;
}

/* Of what the header says of the process only once it knows. */
static uint64_t identity_of(const fcdp_trace_header *h) {
    uint64_t sum = mixed(mixed(0, (uint32_t)h->rank), (uint32_t)h->world_size);
    sum = mixed(mixed(mixed(sum, (uint32_t)h->node), (uint32_t)h->n_nodes), (uint32_t)h->local_rank);
    sum = mixed(sum, (uint32_t)h->node_size);
    sum = mixed(mixed(sum, h->page_bytes), h->device_budget_bytes);
    for (size_t i = 0; i < sizeof h->device; i++) sum = mixed(sum, (unsigned char)h->device[i]);
    return sum;
}

static uint64_t objects_of(const memtrace_segment *s) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < s->n_objects; i++)
        sum = mixed(sum, atomic_load_explicit(&s->objects[i].generation, memory_order_relaxed));
    return sum;
}

static bool write_process(memtrace_source *s, memtrace_writer *writer, memtrace_error *error) {
    fcdp_trace_header header;
    memtrace_read_header(&s->segment, &header);
    s->identity = identity_of(&header);
    uint64_t now = memtrace_now_ns();
    fcdp_trace_chunk chunk = {.type = FCDP_CHUNK_PROCESS,
                              .process = s->process,
                              .n = 1,
                              .first_ns = now,
                              .last_ns = now,
                              .first_step = header.step,
                              .last_step = header.step};
    return memtrace_writer_chunk(writer, &chunk, &(struct iovec){&header, sizeof header}, 1, error);
}

typedef struct numbered_object {
    uint64_t number;
    fcdp_trace_object object;
} numbered_object;

/* The live objects of the segment, and those that came and went since the last look, whose events are to have
 * a name; into room for all; how many. */
static uint32_t read_objects(memtrace_source *s, numbered_object *objects) {
    uint32_t n = 0;
    for (uint32_t i = 1; i < s->segment.n_objects && i < FCDP_TRACE_N_OBJECTS; i++) {
        fcdp_trace_object *object = &objects[n].object;
        if (!memtrace_read_any_object(&s->segment, i, object) || object->state & FCDP_OBJECT_TEXT) continue;
        if (!(object->state & FCDP_OBJECT_LIVE) && object->generation == s->generations[i]) continue;
        s->generations[i] = object->generation;
        objects[n++].number = i;
    }
    return n;
}

/* What holds now, as the segment has it: the process goes on meanwhile, so the numbers are of moments close
 * together. */
static bool write_state(memtrace_source *s, uint16_t type, memtrace_writer *writer, memtrace_error *error) {
    const fcdp_trace_header *h = s->segment.header;
    const uint32_t n_counters = s->segment.n_counters;
    uint64_t *counters = malloc(n_counters * sizeof *counters + 1);
    numbered_object *objects = malloc(s->segment.n_objects * sizeof *objects + 1);
    bool is_good = counters && objects;
    s->objects = objects_of(&s->segment);
    s->state_ns = memtrace_now_ns();
    fcdp_trace_state state = {.time_ns = s->state_ns,
                              .head = memtrace_head(&s->segment),
                              .n_dropped = memtrace_n_dropped(&s->segment),
                              .n_lost = s->n_lost,
                              .step = h->step,
                              .ended = h->ended,
                              .n_counters = n_counters};
    for (uint32_t i = 0; is_good && i < n_counters; i++) counters[i] = memtrace_read_counter(&s->segment, i);
    if (is_good) state.n_objects = read_objects(s, objects);
    fcdp_trace_chunk chunk = {.type = type,
                              .process = s->process,
                              .n = state.n_objects,
                              .first_ns = s->state_ns,
                              .last_ns = s->state_ns,
                              .first_step = state.step,
                              .last_step = state.step};
    struct iovec parts[] = {{&state, sizeof state},
                            {counters, n_counters * sizeof *counters},
                            {objects, state.n_objects * sizeof *objects}};
    if (is_good)
        is_good = memtrace_writer_chunk(writer, &chunk, parts, 3, error);
    else
        memtrace_fail(error, "not enough memory to write what process %d holds", (int)s->segment.pid);
    free(counters);
    free(objects);
    return is_good;
}

static bool write_events(memtrace_source *s, memtrace_writer *writer, memtrace_error *error) {
    bool is_good = memtrace_writer_events(writer, s->process, s->events, s->n, error);
    s->n_events += s->n;
    s->n = 0;
    return is_good;
}

/* A recording of many short processes keeps the rings of those that live. */
static void forget(memtrace_source *s) {
    memtrace_segment was = s->segment;
    free(s->events);
    free(s->generations);
    s->events = NULL;
    s->generations = NULL;
    memtrace_detach(&s->segment);
    s->segment.pid = was.pid;
    s->segment.start_ticks = was.start_ticks;
}

bool memtrace_source_begin(memtrace_source *s, const memtrace_segment *segment, uint32_t process,
                           memtrace_writer *writer, memtrace_error *error) {
    uint64_t head = memtrace_head(segment), ring = segment->ring_events;
    *s = (memtrace_source){.segment = *segment, .process = process, .next = head > ring ? head - ring : 0};
    s->events = malloc(EVENTS_OF_A_CHUNK * sizeof *s->events);
    s->generations = calloc(FCDP_TRACE_N_OBJECTS, sizeof *s->generations);
    bool is_good = (s->events && s->generations) ||
                   memtrace_fail(error, "not enough memory to record process %d", (int)segment->pid);
    is_good = is_good && write_process(s, writer, error) && write_state(s, FCDP_CHUNK_STATE, writer, error);
    s->is_gone = !is_good;
    if (!is_good) forget(s);
    return is_good;
}

/* Goes past event `next`, if it is lost or will not come: its writer was killed, or stopped in the middle of
 * it. */
static bool is_passed(memtrace_source *s, memtrace_read read, bool is_gone, uint64_t now_ns) {
    if (read == MEMTRACE_NOT_YET && !is_gone) {
        if (!s->stuck_ns) s->stuck_ns = now_ns;
        if (now_ns - s->stuck_ns < GIVE_UP_AFTER_NS) return false;
    }
    if (read != MEMTRACE_READ) s->n_lost++;
    s->stuck_ns = 0;
    s->next++;
    return true;
}

static bool read_events(memtrace_source *s, bool is_gone, uint64_t now_ns, memtrace_writer *writer,
                        memtrace_error *error) {
    uint64_t head = memtrace_head(&s->segment), ring = s->segment.ring_events;
    if (head - s->next > ring) {
        s->n_lost += head - ring - s->next;
        s->next = head - ring;
        s->stuck_ns = 0;
    }
    while (s->next < head) {
        memtrace_read read = memtrace_read_event(&s->segment, s->next, &s->events[s->n]);
        if (!is_passed(s, read, is_gone, now_ns)) break;
        if (read != MEMTRACE_READ) continue;
        if (!s->n++) s->since_ns = now_ns;
        if (s->n == EVENTS_OF_A_CHUNK && !write_events(s, writer, error)) return false;
    }
    return true;
}

/* The names that the next events need go before them: the process and its objects. */
static bool write_changes(memtrace_source *s, uint64_t now_ns, memtrace_writer *writer,
                          memtrace_error *error) {
    if (now_ns - s->looked_ns < LOOK_AFTER_NS) return true;
    s->looked_ns = now_ns;
    bool has_changed = objects_of(&s->segment) != s->objects;
    if (identity_of(s->segment.header) != s->identity && !write_process(s, writer, error)) return false;
    if (!has_changed && now_ns - s->state_ns < STATE_AFTER_NS) return true;
    return write_events(s, writer, error) && write_state(s, FCDP_CHUNK_STATE, writer, error);
}

/* Check whether the process is alive before reading, so that all that it wrote is there. */
bool memtrace_source_drain(memtrace_source *s, uint64_t now_ns, memtrace_writer *writer,
                           memtrace_error *error) {
    if (s->is_gone) return true;
    bool is_gone = !memtrace_is_alive(&s->segment);
    s->step = s->segment.header->step;
    if (is_gone) s->looked_ns = 0;
    if (!write_changes(s, now_ns, writer, error) || !read_events(s, is_gone, now_ns, writer, error))
        return false;
    if (s->n && (is_gone || now_ns - s->since_ns >= WRITE_AFTER_NS) && !write_events(s, writer, error))
        return false;
    if (!is_gone) return true;
    s->is_gone = true;
    bool is_good = write_state(s, FCDP_CHUNK_END, writer, error);
    forget(s);
    return is_good;
}

bool memtrace_source_end(memtrace_source *s, memtrace_writer *writer, memtrace_error *error) {
    uint64_t now = memtrace_now_ns();
    s->looked_ns = 0;
    bool is_good = memtrace_source_drain(s, now, writer, error) && write_events(s, writer, error) &&
                   (s->is_gone || write_state(s, FCDP_CHUNK_STATE, writer, error));
    forget(s);
    return is_good;
}
