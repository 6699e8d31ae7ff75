/* model.c - groups the machine's processes into jobs and keeps their samples.
 *
 * A trace does not name its job, and a process learns its rank late. So each poll assigns processes to jobs
 * anew: one command, each rank once, started within a quarter of an hour.
 */
#include "tools/memtrace/model.h"

#include <stdlib.h>
#include <string.h>

#include "tools/memtrace/grow.h"
#include "tools/memtrace/kinds.h"

memtrace_model *memtrace_model_create(size_t history_bytes) {
    memtrace_model *m = calloc(1, sizeof *m);
    if (m) m->history_bytes = history_bytes;
    return m;
}

static void process_destroy(memtrace_live_process *p) {
    memtrace_follower_destroy(p->follower);
    memtrace_detach(&p->segment);
    for (size_t i = 0; i < p->n_samples; i++) free(p->samples[i]);
    free(p->samples);
    free(p);
}

void memtrace_model_destroy(memtrace_model *m) {
    if (!m) return;
    for (size_t i = 0; i < m->n_processes; i++) process_destroy(m->processes[i]);
    free(m->processes);
    free(m);
}

/* ---- processes ---- */

bool memtrace_model_add(memtrace_model *m, const memtrace_segment *segment) {
    memtrace_live_process *p = calloc(1, sizeof *p);
    if (!p) return false;
    p->segment = *segment;
    p->follower = memtrace_follower_create(&p->segment);
    void *processes = memtrace_grown(m->processes, &m->n_room, m->n_processes, sizeof *m->processes);
    if (processes) m->processes = processes;
    if (!p->follower || !processes) {
        memtrace_follower_destroy(p->follower);
        free(p);
        return false;
    }
    m->processes[m->n_processes++] = p;
    return true;
}

static bool is_followed(const memtrace_model *m, pid_t pid, uint64_t start_ticks) {
    for (size_t i = 0; i < m->n_processes; i++) {
        const memtrace_live_process *p = m->processes[i];
        if (p->segment.pid == pid && (p->segment.start_ticks == start_ticks || p->fate == MEMTRACE_RUNS))
            return true;
    }
    return false;
}

bool memtrace_model_attach(memtrace_model *m, pid_t pid, memtrace_error *error) {
    if (is_followed(m, pid, 0)) return true;
    memtrace_segment segment;
    if (!memtrace_attach(pid, &segment, error)) return false;
    if (memtrace_model_add(m, &segment)) return true;
    memtrace_detach(&segment);
    return memtrace_fail(error, "no memory to follow process %d", (int)pid);
}

static void found(pid_t pid, uint64_t start_ticks, void *context) {
    memtrace_model *m = context;
    /* A process that cannot be attached to has just ended, or is starting: the next scan finds out. */
    if (!is_followed(m, pid, start_ticks)) (void)memtrace_model_attach(m, pid, NULL);
}

/* Keep only the last MAX_GONE processes that are gone, so that a model may run for weeks. */
static void forget(memtrace_model *m) {
    enum { MAX_GONE = 64 };
    size_t n_gone = 0, n = 0;
    for (size_t i = 0; i < m->n_processes; i++) n_gone += m->processes[i]->fate != MEMTRACE_RUNS;
    for (size_t i = 0; i < m->n_processes; i++) {
        memtrace_live_process *p = m->processes[i];
        if (p->fate == MEMTRACE_RUNS || n_gone <= MAX_GONE) {
            m->processes[n++] = p;
            continue;
        }
        n_gone--;
        for (size_t k = 0; k < p->n_samples; k++) m->sample_bytes -= p->samples[k]->sample_bytes;
        process_destroy(p);
    }
    m->n_processes = n;
}

size_t memtrace_model_find(memtrace_model *m, pid_t ancestor) {
    forget(m);
    size_t n = m->n_processes;
    m->scan = memtrace_find(ancestor, found, m);
    return m->n_processes - n;
}

/* ---- jobs ---- */

static int rank_of(const memtrace_live_process *p) {
    return atomic_load_explicit(&p->segment.header->rank, memory_order_relaxed);
}

/* May `p` be of the job that `first` began? One command on as many ranks, started within a quarter of an
 * hour, each rank once. */
static bool is_of_job(const memtrace_model *m, size_t first, size_t i) {
    const fcdp_trace_header *a = m->processes[first]->segment.header, *b = m->processes[i]->segment.header;
    int world_size = atomic_load_explicit(&a->world_size, memory_order_relaxed);
    uint64_t apart_ns = a->start_monotonic_ns < b->start_monotonic_ns
                            ? b->start_monotonic_ns - a->start_monotonic_ns
                            : a->start_monotonic_ns - b->start_monotonic_ns;
    if (world_size == 0 || world_size != atomic_load_explicit(&b->world_size, memory_order_relaxed))
        return false;
    if (apart_ns > 900ull * 1000000000 || strncmp(a->command, b->command, sizeof a->command) != 0)
        return false;
    for (size_t k = 0; k < i; k++)
        if (m->processes[k]->job == first && rank_of(m->processes[k]) == rank_of(m->processes[i]))
            return false;
    return true;
}

/* Repeated in each poll, since a process learns its rank only when its group begins. A process belongs to the
 * latest job that it can belong to. */
static void jobs_assign(memtrace_model *m) {
    for (size_t i = 0; i < m->n_processes; i++) {
        m->processes[i]->job = (uint32_t)i;
        for (size_t k = i; k-- > 0;) {
            size_t first = m->processes[k]->job;
            if (first != k || !is_of_job(m, first, i)) continue;
            m->processes[i]->job = (uint32_t)first;
            break;
        }
    }
}

/* ---- history ---- */

static void drop_oldest(memtrace_model *m, memtrace_live_process *p) {
    m->sample_bytes -= p->samples[0]->sample_bytes;
    free(p->samples[0]);
    memmove(p->samples, p->samples + 1, --p->n_samples * sizeof *p->samples);
}

static void keep_within(memtrace_model *m) {
    while (m->sample_bytes > m->history_bytes) {
        memtrace_live_process *oldest = NULL;
        for (size_t i = 0; i < m->n_processes; i++) {
            memtrace_live_process *p = m->processes[i];
            if (p->n_samples > 1 && (!oldest || p->samples[0]->time_ns < oldest->samples[0]->time_ns))
                oldest = p;
        }
        if (!oldest) return;
        drop_oldest(m, oldest);
    }
}

/* A job that ends in order takes its regions down first. What it had before is what its last state means:
 * levels are of the sample before they went, sums are the last ones. NULL: nothing went, or no memory. */
static memtrace_sample *before_teardown(const memtrace_live_process *p, const memtrace_sample *last) {
    size_t i = p->n_samples;
    uint32_t n_places = last->n_places;
    while (i > 0 && (p->samples[i - 1]->n_places > n_places || n_places == 0))
        n_places = p->samples[--i]->n_places;
    if (n_places == last->n_places) return NULL;
    const memtrace_sample *had = p->samples[i];
    memtrace_sample *merged = malloc(had->sample_bytes);
    if (!merged) return NULL;
    memcpy(merged, last, sizeof *merged);
    merged->sample_bytes = had->sample_bytes;
    merged->n_places = had->n_places;
    memcpy(merged->places, had->places, had->n_places * sizeof *had->places);
    memcpy(merged->held_bytes, had->held_bytes, sizeof had->held_bytes);
    for (uint32_t counter = 0; counter < FCDP_TRACE_N_COUNTERS; counter++) {
        const memtrace_counter *known = memtrace_counter_of(counter);
        if (known && known->what == MEMTRACE_LEVEL) merged->counters[counter] = had->counters[counter];
    }
    return merged;
}

/* Check whether the process exists before reading, so that all that it wrote is in the segment. */
static void process_poll(memtrace_model *m, memtrace_live_process *p) {
    bool alive = memtrace_is_alive(&p->segment);
    bool ended = atomic_load_explicit(&p->segment.header->ended, memory_order_acquire) != 0;
    void *samples = memtrace_grown(p->samples, &p->n_room, p->n_samples, sizeof *p->samples);
    if (!samples) return;
    p->samples = samples;
    memtrace_sample *sample = memtrace_follower_poll(p->follower, m->now_ns, ended || !alive);
    if (!sample) return;
    memtrace_sample *merged = ended ? before_teardown(p, sample) : NULL;
    if (merged) {
        free(sample);
        sample = merged;
    }
    p->samples[p->n_samples++] = sample;
    m->sample_bytes += sample->sample_bytes;
    if (ended)
        p->fate = MEMTRACE_ENDED;
    else if (!alive)
        p->fate = MEMTRACE_KILLED;
}

void memtrace_model_poll(memtrace_model *m, uint64_t now_ns) {
    m->now_ns = now_ns;
    for (size_t i = 0; i < m->n_processes; i++)
        if (m->processes[i]->fate == MEMTRACE_RUNS) process_poll(m, m->processes[i]);
    jobs_assign(m);
    keep_within(m);
}

const memtrace_sample *memtrace_live_process_at(const memtrace_live_process *p, uint64_t time_ns) {
    if (p->n_samples == 0) return NULL;
    size_t low = 0, high = p->n_samples; /* samples[0 .. low) are at or before; samples[high ..) are after */
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (p->samples[middle]->time_ns <= time_ns)
            low = middle + 1;
        else
            high = middle;
    }
    return p->samples[low ? low - 1 : 0];
}
