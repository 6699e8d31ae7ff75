/* series.c - sorts events into columns of time. */
#include "tools/memtrace/series.h"

#include <stdlib.h>
#include <string.h>

#include "tools/memtrace/each.h"
#include "tools/memtrace/grow.h"
#include "tools/memtrace/kinds.h"

const char *memtrace_tier_name(memtrace_tier tier) {
    static const char *const names[] = {"unknown", "nowhere", "file", "host", "mapped", "kept on the device",
                                        "in use"};
    return names[tier];
}

static memtrace_tier tier_of(unsigned state, uint64_t device, uint64_t host, uint64_t file, bool is_mapped) {
    if (device) return state & FCDP_OBJECT_IN_USE ? MEMTRACE_IN_USE : MEMTRACE_KEPT;
    if (host && is_mapped) return MEMTRACE_MAPPED;
    return host ? MEMTRACE_ON_HOST : file ? MEMTRACE_IN_FILE : MEMTRACE_NOWHERE;
}

memtrace_tier memtrace_tier_of_event(const fcdp_trace_event *event) {
    bool in_file = event->cause == FCDP_CAUSE_IN_FILE;
    return tier_of((unsigned)event->flags >> FCDP_TRACE_STATE_SHIFT, event->a, in_file ? 0 : event->b,
                   in_file ? event->b : 0, event->cause == FCDP_CAUSE_MAPPED);
}

memtrace_tier memtrace_tier_of_object(const fcdp_trace_object *object) {
    return tier_of(object->state, object->device_bytes, object->host_bytes, object->file_bytes,
                   object->lives & FCDP_LIVES_MAPPED);
}

const char *memtrace_link_name(memtrace_link link) {
    static const char *const names[] = {"between nodes", "within the node", "to the host", "to the device"};
    return names[link];
}

uint64_t memtrace_held_before(const fcdp_trace_event *e) {
    if (e->kind == FCDP_EVENT_PAGES_GIVE) return e->b + e->bytes;
    return e->b > e->bytes ? e->b - e->bytes : 0;
}

uint64_t memtrace_link_bytes(const fcdp_trace_event *e, memtrace_link link) {
    switch (link) {
    case MEMTRACE_BETWEEN_NODES:
        return e->kind == FCDP_EVENT_GATHER || e->kind == FCDP_EVENT_PLAIN_GATHER ||
                       e->kind == FCDP_EVENT_REDUCE_SCATTER
                   ? e->a
                   : 0;
    case MEMTRACE_WITHIN_NODE:
        if (e->kind == FCDP_EVENT_PLAIN_GATHER || e->kind == FCDP_EVENT_REDUCE_SCATTER)
            return e->bytes - e->a;
        return e->kind == FCDP_EVENT_GATHER || e->kind == FCDP_EVENT_RESTORE ? e->b : 0;
    case MEMTRACE_TO_HOST: return e->kind == FCDP_EVENT_STORE ? e->bytes : 0;
    case MEMTRACE_TO_DEVICE: return e->kind == FCDP_EVENT_LOAD ? e->bytes : 0;
    default: return 0;
    }
}

/* A state's sum over all pools, and how much of it is of the pools that events tell of. */
typedef struct sums {
    uint64_t head; /* events before it are in the sum */
    uint64_t all[MEMTRACE_N_HOLDERS], told[MEMTRACE_N_HOLDERS];
} sums;

enum { FIRST = 0, LAST = 1, N_SUMS };

/* What is being made, and where each region's row is known up to. */
typedef struct pass {
    memtrace_file *file;
    memtrace_series *series;
    struct known {
        size_t row; /* + 1 */
        const char *name;
        uint64_t since_ns;
        memtrace_tier tier;
    } *known; /* FCDP_TRACE_N_OBJECTS */
    size_t room_rows, room_steps, room_marks;
    struct held {
        bool is_told; /* by an event */
        uint64_t bytes;
    } held[MEMTRACE_N_POOLS][MEMTRACE_N_HOLDERS];
    uint64_t now[MEMTRACE_N_HOLDERS]; /* of the pools that events have told of */
    size_t held_column;               /* the series' held is known up to it */
    sums sums[N_SUMS];                /* of the process's first state and of its last */
} pass;

static size_t column_of(const memtrace_series *s, uint64_t time_ns) {
    if (time_ns <= s->first_ns) return 0;
    double share = (double)(time_ns - s->first_ns) / (double)(s->last_ns - s->first_ns);
    size_t column = (size_t)(share * (double)s->n_columns);
    return column < s->n_columns ? column : s->n_columns - 1;
}

/* The row of an object; NULL: no memory. A number that stands for another object by now has another row. */
static struct known *known_of(pass *p, size_t process, size_t chunk, uint32_t number, uint64_t now_ns) {
    memtrace_series *s = p->series;
    struct known *known = &p->known[number];
    const char *name = memtrace_file_object_name(p->file, process, chunk, number);
    if (known->row && known->name == name) return known;
    void *rows = memtrace_grown(s->rows, &p->room_rows, s->n_rows, sizeof *s->rows);
    if (!rows) return NULL;
    s->rows = rows;
    uint8_t *tiers = calloc(s->n_columns, 1);
    if (!tiers) return NULL;
    s->rows[s->n_rows++] = (memtrace_row){.name = name, .number = number, .tiers = tiers};
    *known = (struct known){s->n_rows, name, now_ns, MEMTRACE_UNKNOWN};
    return known;
}

/* The object is in `tier` from now on; its columns up to here get the tier before. */
static void set_tier(pass *p, struct known *known, uint64_t now_ns, memtrace_tier tier) {
    memtrace_series *s = p->series;
    uint8_t *tiers = s->rows[known->row - 1].tiers;
    size_t end = column_of(s, now_ns);
    for (size_t i = column_of(s, known->since_ns); i <= end; i++)
        if (tiers[i] < known->tier) tiers[i] = (uint8_t)known->tier;
    known->since_ns = now_ns;
    known->tier = tier;
}

static bool add_mark(pass *p, const fcdp_trace_event *e) {
    memtrace_series *s = p->series;
    memtrace_mark mark = {.time_ns = e->time_ns, .kind = e->kind};
    uint64_t all = 0;
    for (int link = 0; link < MEMTRACE_N_LINKS; link++)
        all += mark.bytes[link] = memtrace_link_bytes(e, link);
    if (!all) return true;
    void *marks = memtrace_grown(s->marks, &p->room_marks, s->n_marks, sizeof *s->marks);
    if (!marks) return false;
    s->marks = marks;
    s->marks[s->n_marks++] = mark;
    return true;
}

/* Spreads `value` evenly over the columns of the time that the event took. */
static void spread(const memtrace_series *s, const fcdp_trace_event *e, double value, double *columns) {
    size_t first = column_of(s, e->time_ns), last = column_of(s, e->time_ns + e->duration_ns);
    for (size_t i = first; value > 0 && i <= last; i++) columns[i] += value / (double)(last - first + 1);
}

static void add_span(memtrace_series *s, const fcdp_trace_event *e) {
    for (int link = 0; link < MEMTRACE_N_LINKS; link++)
        spread(s, e, (double)memtrace_link_bytes(e, link), s->links[link]);
    if (e->kind == FCDP_EVENT_STALL || e->kind == FCDP_EVENT_HOST_WAIT)
        spread(s, e, (double)e->duration_ns, s->waited);
}

static void fill_held(pass *p, size_t column) {
    if (column < p->held_column) return;
    for (; p->held_column <= column; p->held_column++)
        for (int i = 0; i < MEMTRACE_N_HOLDERS; i++)
            if (p->series->held[i][p->held_column] < p->now[i])
                p->series->held[i][p->held_column] = p->now[i];
    p->held_column = column;
}

/* The holder has had so much more all the while, up to now. */
static void add_always(pass *p, size_t holder, uint64_t bytes) {
    for (size_t i = 0; i <= p->held_column; i++) p->series->held[holder][i] += bytes;
    for (int i = 0; i < N_SUMS; i++) p->sums[i].told[holder] += bytes;
    p->now[holder] += bytes;
}

/* A pool's first event also says what it had before, which it had since the beginning. */
static void add_held(pass *p, const fcdp_trace_event *e) {
    size_t pool = (size_t)(e->a >> 8), holder = (size_t)(e->a & 255);
    if (pool >= MEMTRACE_N_POOLS || holder >= MEMTRACE_N_HOLDERS) return;
    struct held *held = &p->held[pool][holder];
    size_t column = column_of(p->series, e->time_ns);
    fill_held(p, column);
    if (!held->is_told) {
        held->is_told = true;
        held->bytes = memtrace_held_before(e);
        add_always(p, holder, held->bytes);
    }
    uint64_t change = e->b - held->bytes;
    for (int i = 0; i < N_SUMS; i++)
        if (e->stamp < p->sums[i].head) p->sums[i].told[holder] += change;
    held->bytes = e->b;
    p->now[holder] += change;
    uint64_t *most = &p->series->held[holder][column];
    if (*most < p->now[holder]) *most = p->now[holder];
}

/* A region's tier is what STATE says; all other events are sums or levels over time. */
static bool visit(void *context, size_t process, size_t chunk, const fcdp_trace_event *e) {
    pass *p = context;
    memtrace_series *s = p->series;
    if (e->duration_ns)
        add_span(s, e);
    else if (!add_mark(p, e))
        return false;
    if (e->kind == FCDP_EVENT_PAGES_TAKE || e->kind == FCDP_EVENT_PAGES_GIVE) add_held(p, e);
    if (e->kind == FCDP_EVENT_STEP) {
        void *steps = memtrace_grown(s->steps_ns, &p->room_steps, s->n_steps, sizeof *s->steps_ns);
        if (!steps) return false;
        s->steps_ns = steps;
        s->steps_ns[s->n_steps++] = e->time_ns;
    }
    bool begins = e->kind == FCDP_EVENT_REGION_CREATE, ends = e->kind == FCDP_EVENT_REGION_DESTROY;
    if (!begins && !ends && e->kind != FCDP_EVENT_STATE) return true;
    if (!e->object || e->object >= FCDP_TRACE_N_OBJECTS) return true;
    struct known *known = known_of(p, process, chunk, e->object, e->time_ns);
    if (!known) return false;
    memtrace_tier tier = begins ? MEMTRACE_NOWHERE : ends ? MEMTRACE_UNKNOWN : memtrace_tier_of_event(e);
    set_tier(p, known, e->time_ns, tier);
    return true;
}

static void read_sums(sums *sums, const memtrace_state *state) {
    if (state->state.n_counters <= FCDP_COUNT_HELD_1_BYTES) return;
    sums->head = state->state.head;
    memcpy(sums->all, &state->counters[FCDP_COUNT_HELD_0_BYTES], sizeof sums->all);
}

/* Pools of which no event tells have had all the while what the others leave of the sum. By two states, as
 * one may have been read in the middle of a change. */
static void add_untold(pass *p) {
    for (size_t holder = 0; holder < MEMTRACE_N_HOLDERS; holder++) {
        uint64_t untold = UINT64_MAX;
        for (int i = 0; i < N_SUMS; i++) {
            uint64_t all = p->sums[i].all[holder], told = p->sums[i].told[holder];
            uint64_t left = all > told ? all - told : 0;
            if (left < untold) untold = left;
        }
        add_always(p, holder, untold);
    }
}

/* Regions that were there before the recording: the first state says where. */
static void begin(pass *p, size_t process) {
    long at = memtrace_file_process(p->file, process)->first_state,
         last = memtrace_file_process(p->file, process)->last_state;
    memtrace_state state;
    memtrace_file_object_name(p->file, process, 0, 1); /* reads the names, before a body is looked at */
    if (last != MEMTRACE_NO_CHUNK && memtrace_file_state(p->file, (size_t)last, &state))
        read_sums(&p->sums[LAST], &state);
    if (at == MEMTRACE_NO_CHUNK || !memtrace_file_state(p->file, (size_t)at, &state)) return;
    read_sums(&p->sums[FIRST], &state);
    for (size_t i = 0; i < state.state.n_objects; i++) {
        uint32_t number;
        const fcdp_trace_object *object = memtrace_state_object(&state, i, &number);
        if (!number || number >= FCDP_TRACE_N_OBJECTS || !(object->state & FCDP_OBJECT_LIVE)) continue;
        struct known *known = known_of(p, process, (size_t)at, number, p->series->first_ns);
        if (!known) return;
        known->tier = memtrace_tier_of_object(object);
        p->series->rows[known->row - 1].bytes = object->bytes;
    }
}

static void end(pass *p, size_t process) {
    memtrace_series *s = p->series;
    long at = memtrace_file_process(p->file, process)->last_state;
    memtrace_state state;
    for (uint32_t i = 0; i < FCDP_TRACE_N_OBJECTS; i++)
        if (p->known[i].row) set_tier(p, &p->known[i], s->last_ns, p->known[i].tier);
    fill_held(p, s->n_columns - 1);
    add_untold(p);
    if (at == MEMTRACE_NO_CHUNK || !memtrace_file_state(p->file, (size_t)at, &state)) return;
    for (size_t i = 0; i < state.state.n_objects; i++) {
        uint32_t number;
        const fcdp_trace_object *object = memtrace_state_object(&state, i, &number);
        if (number < FCDP_TRACE_N_OBJECTS && p->known[number].row)
            s->rows[p->known[number].row - 1].bytes = object->bytes;
    }
}

/* From its first event to its last; a recording may begin before, and go on behind. */
static void set_span(memtrace_series *s, memtrace_file *file, size_t process) {
    const memtrace_process *of = memtrace_file_process(file, process);
    uint64_t first = UINT64_MAX, last = 0;
    for (size_t i = 0; i < memtrace_file_summary(file).n_chunks; i++) {
        const fcdp_trace_chunk *chunk = memtrace_file_chunk(file, i);
        if (chunk->process != process || chunk->type != FCDP_CHUNK_EVENTS) continue;
        if (chunk->first_ns < first) first = chunk->first_ns;
        if (chunk->last_ns > last) last = chunk->last_ns;
    }
    s->first_ns = first <= last ? first : of->first_ns;
    s->last_ns = (first <= last ? last : of->last_ns) + 1;
}

memtrace_series *memtrace_series_create(memtrace_file *file, size_t process, size_t n_columns) {
    memtrace_series *s = calloc(1, sizeof *s);
    pass p = {.file = file, .series = s, .known = calloc(FCDP_TRACE_N_OBJECTS, sizeof *p.known)};
    bool is_good = s && p.known;
    if (is_good) {
        s->n_columns = n_columns;
        set_span(s, file, process);
    }
    for (int i = 0; is_good && i < MEMTRACE_N_LINKS; i++)
        is_good = (s->links[i] = calloc(n_columns, sizeof *s->links[i])) != NULL;
    for (int i = 0; is_good && i < MEMTRACE_N_HOLDERS; i++)
        is_good = (s->held[i] = calloc(n_columns, sizeof *s->held[i])) != NULL;
    is_good = is_good && (s->waited = calloc(n_columns, sizeof *s->waited)) != NULL;
    if (is_good) {
        begin(&p, process);
        memtrace_each(file, (long)process, visit, &p);
        end(&p, process);
    } else {
        memtrace_series_destroy(s);
        s = NULL;
    }
    free(p.known);
    return s;
}

void memtrace_series_destroy(memtrace_series *s) {
    if (!s) return;
    for (size_t i = 0; i < s->n_rows; i++) free(s->rows[i].tiers);
    for (int i = 0; i < MEMTRACE_N_LINKS; i++) free(s->links[i]);
    for (int i = 0; i < MEMTRACE_N_HOLDERS; i++) free(s->held[i]);
    free(s->rows);
    free(s->marks);
    free(s->waited);
    free(s->steps_ns);
    free(s);
}
