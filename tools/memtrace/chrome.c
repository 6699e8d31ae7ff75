/* chrome.c - writes the events of a trace as JSON. */
#include "tools/memtrace/chrome.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tools/memtrace/each.h"
#include "tools/memtrace/grow.h"
#include "tools/memtrace/kinds.h"
#include "tools/memtrace/series.h"

/* Numbers of tracks within a process; threads have those of the kernel, from OF_THREADS on. */
enum { OF_STEPS = 1, OF_STREAMS = 100, OF_REGIONS = 10000, OF_THREADS = 1000000 };
/* Of the first process: beyond what the kernel gives, so that a profiler's beside it are others. */
enum { FIRST_PROCESS = 5000000 };

/* A change of a link's rate, in bytes per second. */
typedef struct change {
    uint64_t time_ns;
    double rate;
} change;
typedef struct changes {
    change *all;
    size_t n, room;
} changes;

typedef struct thread {
    uint32_t number;
    struct thread *next;
} thread;

/* A slice that an arrow begins or ends at. */
typedef struct slice {
    uint64_t track, begin_ns, end_ns;
    uint32_t step;
    const char *kind;
} slice;

/* One region's row: the tier since when; its last uses, the latest first; the moves for a use that is still
 * to come. */
typedef struct row {
    char *quoted; /* its name as JSON */
    const char *name;
    uint64_t since_ns;
    memtrace_tier tier;
    slice uses[2], *moves;
    size_t n_moves, room_moves;
} row;

typedef struct writer {
    memtrace_file *file;
    FILE *out;
    memtrace_encode *encode;
    void *context;
    uint64_t base_ns, n_events, n_flows;
    size_t process;
    uint64_t to_real_ns; /* the process's CLOCK_MONOTONIC to that since 1970 */
    row *rows;           /* FCDP_TRACE_N_OBJECTS */
    bool has_stream[256];
    thread *threads;
    changes links[MEMTRACE_N_LINKS];
    uint64_t held[MEMTRACE_N_POOLS][MEMTRACE_N_HOLDERS];
    uint64_t step_ns;
    bool has_failed;
} writer;

static double microseconds(const writer *w, uint64_t time_ns) {
    return (double)(int64_t)(time_ns + w->to_real_ns - w->base_ns) / 1e3;
}

/* Begins an event; the caller goes on with its fields, and ends it. */
static void begin(writer *w, const char *phase, uint64_t track, uint64_t time_ns) {
    fprintf(w->out, "%s\n{\"ph\":\"%s\",\"pid\":%zu,\"tid\":%" PRIu64 ",\"ts\":%.3f", w->n_events ? "," : "",
            phase, FIRST_PROCESS + w->process, track, microseconds(w, time_ns));
    w->n_events++;
}

static void name_track(writer *w, const char *what, uint64_t track, const char *text) {
    const char *quoted = w->encode(w->context, text);
    if (!quoted) w->has_failed = true;
    fprintf(w->out,
            "%s\n{\"ph\":\"M\",\"pid\":%zu,\"tid\":%" PRIu64 ",\"name\":\"%s\",\"args\":{\"name\":%s}}",
            w->n_events ? "," : "", FIRST_PROCESS + w->process, track, what, quoted ? quoted : "\"\"");
    w->n_events++;
}

static void row_clear(row *r) {
    free(r->quoted);
    free(r->moves);
    *r = (row){0};
}

static row *row_of(writer *w, size_t chunk, uint32_t number) {
    if (!number || number >= FCDP_TRACE_N_OBJECTS) return NULL;
    row *r = &w->rows[number];
    const char *name = memtrace_file_object_name(w->file, w->process, chunk, number);
    if (r->quoted && r->name == name) return r;
    const char *quoted = w->encode(w->context, name);
    row_clear(r);
    r->quoted = quoted ? strdup(quoted) : NULL;
    r->name = name;
    if (!r->quoted)
        w->has_failed = true;
    else
        name_track(w, "thread_name", OF_REGIONS + number, name);
    return r->quoted ? r : NULL;
}

static void name_thread(writer *w, uint32_t number) {
    char text[64];
    for (thread *t = w->threads; t; t = t->next)
        if (t->number == number) return;
    thread *t = malloc(sizeof *t);
    if (!t) return;
    *t = (thread){number, w->threads};
    w->threads = t;
    snprintf(text, sizeof text, "thread %u", number);
    name_track(w, "thread_name", OF_THREADS + number, text);
}

static void name_stream(writer *w, uint32_t number) {
    char text[64];
    const memtrace_stream *stream = memtrace_stream_of(number);
    if (number >= 256 || w->has_stream[number]) return;
    w->has_stream[number] = true;
    if (stream)
        snprintf(text, sizeof text, "stream %s", stream->name);
    else
        snprintf(text, sizeof text, "stream %u", number);
    name_track(w, "thread_name", OF_STREAMS + number, text);
}

static void add_change(changes *c, uint64_t time_ns, double rate) {
    change *all = memtrace_grown(c->all, &c->room, c->n, sizeof *all);
    if (!all) return;
    c->all = all;
    c->all[c->n++] = (change){time_ns, rate};
}

static void add_rates(writer *w, const fcdp_trace_event *e) {
    for (int link = 0; e->duration_ns && link < MEMTRACE_N_LINKS; link++) {
        double rate = (double)memtrace_link_bytes(e, link) * 1e9 / (double)e->duration_ns;
        if (rate <= 0) continue;
        add_change(&w->links[link], e->time_ns, rate);
        add_change(&w->links[link], e->time_ns + e->duration_ns, -rate);
    }
}

/* What a or b is, by the kind's list; one that says nothing is left out. */
static void write_argument(writer *w, const char *says, uint64_t value) {
    if (*says && strcmp(says, "0") != 0) fprintf(w->out, ",\"%s\":%" PRIu64, says, value);
}

/* The names are the lists' and the region's: both are JSON already. */
static void write_event(writer *w, const fcdp_trace_event *e, const row *r, uint64_t track) {
    const memtrace_kind *kind = memtrace_kind_of(e->kind);
    const memtrace_cause *cause = e->cause ? memtrace_cause_of(e->cause) : NULL;
    char name[32];
    if (kind)
        snprintf(name, sizeof name, "%s", kind->name);
    else
        snprintf(name, sizeof name, "kind %u", e->kind);
    begin(w, e->duration_ns ? "X" : "i", track, e->time_ns);
    if (e->duration_ns)
        fprintf(w->out, ",\"dur\":%.3f", (double)e->duration_ns / 1e3);
    else
        fprintf(w->out, ",\"s\":\"t\"");
    if (r)
        fprintf(w->out, ",\"name\":\"%s %s", name, r->quoted + 1);
    else
        fprintf(w->out, ",\"name\":\"%s\"", name);
    fprintf(w->out, ",\"cat\":\"%s\",\"args\":{\"kind\":\"%s\"", kind ? kind->layer : "unknown", name);
    if (r) fprintf(w->out, ",\"region\":%s", r->quoted);
    if (cause) fprintf(w->out, ",\"cause\":\"%s\"", cause->name);
    fprintf(w->out, ",\"step\":%u,\"bytes\":%" PRIu64, e->step, e->bytes);
    write_argument(w, kind ? kind->a : "a", e->a);
    write_argument(w, kind ? kind->b : "b", e->b);
    fprintf(w->out, ",\"backward\":%s,\"event\":%" PRIu64 "}}",
            e->flags & FCDP_TRACE_BACKWARD ? "true" : "false", e->stamp);
}

/* ---- arrows: from what brought a region's bytes to the use that waited for them ---- */

/* The wait that a use begins with is the compute stream's, or for CPU tensors the host's. */
static bool is_use(const fcdp_trace_event *e) {
    return e->kind == FCDP_EVENT_STALL ||
           (e->kind == FCDP_EVENT_HOST_WAIT && e->cause == FCDP_CAUSE_FOR_COMPUTE);
}

static bool is_move(const fcdp_trace_event *e) {
    return e->kind == FCDP_EVENT_GATHER || e->kind == FCDP_EVENT_RESTORE || e->kind == FCDP_EVENT_LOAD;
}

/* A use waits until its moves have ended. Two clocks may be compared, the device's and the host's. */
static bool is_for(const slice *move, const slice *use) {
    enum { SLACK_NS = 200000 };
    return use->kind && move->step == use->step && move->begin_ns <= use->end_ns &&
           move->end_ns <= use->end_ns + SLACK_NS;
}

static void write_arrow(writer *w, const slice *move, const slice *use) {
    uint64_t at = use->begin_ns > move->begin_ns ? use->begin_ns : move->begin_ns;
    w->n_flows++;
    begin(w, "s", move->track, move->begin_ns);
    fprintf(w->out, ",\"name\":\"%s to use\",\"cat\":\"flow\",\"id\":%" PRIu64 "}", move->kind, w->n_flows);
    begin(w, "f", use->track, at);
    fprintf(w->out, ",\"bp\":\"e\",\"name\":\"%s to use\",\"cat\":\"flow\",\"id\":%" PRIu64 "}", move->kind,
            w->n_flows);
}

/* Spans of streams are written when their end is known, which may be after the use. */
static void add_move(writer *w, row *r, const slice *move) {
    for (int i = 1; i >= 0; i--) {
        if (!is_for(move, &r->uses[i])) continue;
        write_arrow(w, move, &r->uses[i]);
        return;
    }
    void *moves = memtrace_grown(r->moves, &r->room_moves, r->n_moves, sizeof *r->moves);
    if (!moves) return;
    r->moves = moves;
    r->moves[r->n_moves++] = *move;
}

static void add_use(writer *w, row *r, const slice *use) {
    size_t n = 0;
    r->uses[1] = r->uses[0];
    r->uses[0] = *use;
    for (size_t i = 0; i < r->n_moves; i++)
        if (is_for(&r->moves[i], use))
            write_arrow(w, &r->moves[i], use);
        else if (r->moves[i].step >= use->step)
            r->moves[n++] = r->moves[i];
    r->n_moves = n;
}

static void add_arrows(writer *w, const fcdp_trace_event *e, row *r, uint64_t track) {
    const memtrace_kind *kind = memtrace_kind_of(e->kind);
    if (!r || !e->duration_ns || !kind) return;
    slice slice = {track, e->time_ns, e->time_ns + e->duration_ns, e->step, kind->name};
    if (is_move(e)) add_move(w, r, &slice);
    if (is_use(e)) add_use(w, r, &slice);
}

static void set_tier(writer *w, row *r, uint32_t number, uint64_t now_ns, memtrace_tier tier) {
    if (r->tier == tier) return;
    if (r->tier > MEMTRACE_NOWHERE && now_ns > r->since_ns) {
        begin(w, "X", OF_REGIONS + number, r->since_ns);
        fprintf(w->out, ",\"dur\":%.3f,\"name\":\"%s\",\"cat\":\"region\",\"args\":{\"region\":%s}}",
                (double)(now_ns - r->since_ns) / 1e3, memtrace_tier_name(r->tier), r->quoted);
    }
    r->tier = tier;
    r->since_ns = now_ns;
}

static void write_held(writer *w, const fcdp_trace_event *e) {
    size_t pool = (size_t)(e->a >> 8), holder = (size_t)(e->a & 255);
    if (pool >= MEMTRACE_N_POOLS || holder >= MEMTRACE_N_HOLDERS) return;
    w->held[pool][holder] = e->b;
    uint64_t tensors = 0, gathered = 0;
    for (size_t i = 0; i < MEMTRACE_N_POOLS; i++) tensors += w->held[i][0], gathered += w->held[i][1];
    begin(w, "C", 0, e->time_ns);
    fprintf(w->out,
            ",\"name\":\"device memory\",\"args\":{\"tensors\":%" PRIu64 ",\"gathered\":%" PRIu64 "}}",
            tensors, gathered);
}

static void write_step(writer *w, const fcdp_trace_event *e) {
    if (w->step_ns && e->time_ns > w->step_ns) {
        begin(w, "X", OF_STEPS, w->step_ns);
        fprintf(w->out,
                ",\"dur\":%.3f,\"name\":\"step %" PRIu64 "\",\"cat\":\"step\",\"args\":{\"step\":%" PRIu64
                "}}",
                (double)(e->time_ns - w->step_ns) / 1e3, e->a - 1, e->a - 1);
    }
    w->step_ns = e->time_ns;
}

/* Pages and states become counters and the regions' tracks; all else is shown where it happened. */
static bool visit(void *context, size_t process, size_t chunk, const fcdp_trace_event *e) {
    writer *w = context;
    (void)process;
    row *r = row_of(w, chunk, e->object);
    add_rates(w, e);
    if (e->kind == FCDP_EVENT_PAGES_TAKE || e->kind == FCDP_EVENT_PAGES_GIVE) {
        write_held(w, e);
    } else if (e->kind == FCDP_EVENT_STATE) {
        if (r) set_tier(w, r, e->object, e->time_ns, memtrace_tier_of_event(e));
    } else if (e->flags & FCDP_TRACE_ON_STREAM) {
        name_stream(w, e->thread);
        write_event(w, e, r, OF_STREAMS + (e->thread & 255));
        add_arrows(w, e, r, OF_STREAMS + (e->thread & 255));
    } else {
        name_thread(w, e->thread);
        write_event(w, e, r, OF_THREADS + e->thread);
        add_arrows(w, e, r, OF_THREADS + e->thread);
        if (e->kind == FCDP_EVENT_STEP) write_step(w, e);
    }
    return !w->has_failed && !ferror(w->out);
}

static int compare_changes(const void *a, const void *b) {
    const change *x = a, *y = b;
    return x->time_ns < y->time_ns ? -1 : x->time_ns > y->time_ns;
}

static void write_rates(writer *w, memtrace_link link) {
    changes *c = &w->links[link];
    double rate = 0;
    if (c->n) qsort(c->all, c->n, sizeof *c->all, compare_changes);
    for (size_t i = 0; i < c->n; i++) {
        rate += c->all[i].rate;
        if (i + 1 < c->n && c->all[i + 1].time_ns == c->all[i].time_ns) continue;
        begin(w, "C", 0, c->all[i].time_ns);
        fprintf(w->out, ",\"name\":\"link %s\",\"args\":{\"bytes per second\":%.0f}}",
                memtrace_link_name(link), rate > 0.5 ? rate : 0);
    }
    free(c->all);
    *c = (changes){0};
}

/* One process; its tracks are named as they appear. */
static void write_process(writer *w, size_t process) {
    const memtrace_process *p = memtrace_file_process(w->file, process);
    char label[64], text[128];
    w->process = process;
    w->to_real_ns = p->header.start_real_ns - p->header.start_monotonic_ns;
    memset(w->held, 0, sizeof w->held);
    memset(w->has_stream, 0, sizeof w->has_stream);
    w->step_ns = 0;
    memtrace_process_label(p, label);
    snprintf(text, sizeof text, "%s (pid %d)", label, p->header.pid);
    name_track(w, "process_name", 0, text);
    name_track(w, "thread_name", OF_STEPS, "steps");
    memtrace_each(w->file, (long)process, visit, w);
    for (uint32_t i = 0; i < FCDP_TRACE_N_OBJECTS; i++) {
        if (w->rows[i].quoted) set_tier(w, &w->rows[i], i, p->last_ns, MEMTRACE_UNKNOWN);
        row_clear(&w->rows[i]);
    }
    for (int link = 0; link < MEMTRACE_N_LINKS; link++) write_rates(w, link);
    while (w->threads) {
        thread *next = w->threads->next;
        free(w->threads);
        w->threads = next;
    }
}

bool memtrace_chrome_write(memtrace_file *file, uint64_t base_real_ns, FILE *out, memtrace_encode *encode,
                           void *context, uint64_t *n_events_out) {
    writer w = {.file = file, .out = out, .encode = encode, .context = context, .base_ns = base_real_ns};
    w.rows = calloc(FCDP_TRACE_N_OBJECTS, sizeof *w.rows);
    if (!w.rows) return false;
    fprintf(out, "{\"displayTimeUnit\":\"ms\",\"baseTimeNanoseconds\":%" PRIu64 ",\"traceEvents\":[",
            base_real_ns);
    for (size_t i = 0; i < memtrace_file_summary(file).n_processes && !w.has_failed; i++)
        write_process(&w, i);
    fprintf(out, "\n]}\n");
    free(w.rows);
    *n_events_out = w.n_events;
    return !w.has_failed && fflush(out) == 0 && !ferror(out);
}
