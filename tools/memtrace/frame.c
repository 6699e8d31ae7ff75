/* frame.c - computes what `top` shows from the model's samples.
 *
 * A rate is the difference of two samples' counters, so it is exact even if events were lost. A frame of an
 * earlier time is made of that time's samples.
 */
#include "tools/memtrace/frame.h"

#include <stdlib.h>
#include <string.h>

#include "torch_plugin/trace_events.h"

/* Of waits per step; of rates, since a step has a forward and a backward that move other things. */
enum { MIN_STEPS = 4, RATE_STEPS = 2, MAX_NOTES = 32 };
#define RATE_MOST_NS 30000000000ull

static uint64_t later(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

/* ---- which job, which time ---- */

/* Running ones come first, of these the last. SIZE_MAX: there is none. */
static size_t choose_job(const memtrace_model *m, int pid) {
    size_t chosen = SIZE_MAX;
    bool runs = false;
    for (size_t i = 0; i < m->n_processes; i++) {
        const memtrace_live_process *p = m->processes[i];
        if (p->n_samples == 0) continue;
        if (pid && p->segment.pid == pid) return p->job;
        bool more = p->fate == MEMTRACE_RUNS;
        if (runs && !more) continue;
        if (chosen == SIZE_MAX || (more && !runs) || p->job >= chosen) chosen = p->job;
        runs = runs || more;
    }
    return chosen;
}

static void count_jobs(const memtrace_model *m, size_t job, memtrace_frame *frame) {
    for (size_t i = 0; i < m->n_processes; i++) {
        if (m->processes[i]->job != i) continue;
        if (i < job) frame->job++;
        frame->n_jobs++;
    }
}

static const memtrace_sample *sample_at(const memtrace_live_process *p, const memtrace_query *query) {
    const memtrace_sample *peak = query->at_peak ? memtrace_follower_peak(p->follower) : NULL;
    return peak ? peak : memtrace_live_process_at(p, query->at_ns);
}

/* ---- ranks ---- */

/* The last sample that lies at least the window, and `n_steps`, before `now`, and at most `most_ns`; else
 * the first that is not further. */
static const memtrace_sample *sample_before(const memtrace_live_process *p, const memtrace_sample *now,
                                            uint64_t window_ns, uint32_t n_steps, uint64_t most_ns) {
    const memtrace_sample *found = now;
    for (size_t i = p->n_samples; i-- > 0;) {
        const memtrace_sample *s = p->samples[i];
        if (s->time_ns > now->time_ns) continue;
        if (now->time_ns - s->time_ns > most_ns && found != now) break;
        found = s;
        if (s->time_ns + window_ns <= now->time_ns && s->step + n_steps <= now->step) break;
    }
    return found;
}

/* Where the history has no step, those that the ring still knew when the follower began serve. */
static void rank_fill(memtrace_live_rank *rank, uint64_t window_ns) {
    const memtrace_sample *now = rank->sample;
    const memtrace_sample *then = sample_before(rank->process, now, window_ns, MIN_STEPS, UINT64_MAX);
    uint32_t n_steps = now->step > then->step ? now->step - then->step : 0;
    if (n_steps && then->step_ns && now->step_ns > then->step_ns)
        rank->step_ns = (double)(now->step_ns - then->step_ns) / n_steps;
    else if (now->step > now->first_end && now->step_ns > now->first_end_ns)
        rank->step_ns = (double)(now->step_ns - now->first_end_ns) / (now->step - now->first_end);
    bool in_history = n_steps > 0;
    rank->n_waited_steps = in_history ? n_steps : now->step - now->first_step;
    for (unsigned i = 0; i < MEMTRACE_N_WAITS; i++) {
        uint64_t ns = now->waited_ns[i] - (in_history ? then->waited_ns[i] : 0);
        rank->waited_ns[i] = (double)ns / (rank->n_waited_steps ? rank->n_waited_steps : 1);
        rank->all_waited_ns += rank->waited_ns[i];
    }
}

static int rank_number(const memtrace_live_process *p) {
    return atomic_load_explicit(&p->segment.header->rank, memory_order_relaxed);
}

static int by_rank(const void *a, const void *b) {
    const memtrace_live_process *p = ((const memtrace_live_rank *)a)->process,
                                *q = ((const memtrace_live_rank *)b)->process;
    int first = rank_number(p), second = rank_number(q);
    if (first != second) return first < second ? -1 : 1;
    return p->segment.pid < q->segment.pid ? -1 : p->segment.pid > q->segment.pid;
}

/* Used for its budget, where it has one. */
static double fullness(const memtrace_sample *s) {
    uint64_t budget_bytes = s->counters[FCDP_COUNT_BUDGET_BYTES];
    uint64_t used = 0;
    for (unsigned i = 0; i < MEMTRACE_N_HOLDERS; i++) used += s->held_bytes[i];
    return budget_bytes ? (double)used / (double)budget_bytes : 0;
}

static bool is_shown(const memtrace_query *query, const memtrace_live_rank *rank) {
    return !query->rank_pid || rank->process->segment.pid == query->rank_pid;
}

/* The ranks of the job, and of them all what the first lines say. */
static void ranks_collect(const memtrace_model *m, size_t job, const memtrace_query *query,
                          memtrace_frame *frame) {
    for (size_t i = 0; i < m->n_processes; i++) {
        const memtrace_live_process *p = m->processes[i];
        if (p->job != job || p->n_samples == 0) continue;
        memtrace_live_rank *rank = &frame->ranks[frame->n_ranks++];
        *rank = (memtrace_live_rank){.process = p, .sample = sample_at(p, query)};
        rank_fill(rank, query->window_ns);
        frame->n_running += p->fate == MEMTRACE_RUNS;
        frame->n_ended += p->fate == MEMTRACE_ENDED;
        frame->n_killed += p->fate == MEMTRACE_KILLED;
        const memtrace_sample *s = rank->sample;
        frame->at_ns = later(frame->at_ns, s->time_ns);
        frame->newest_ns = later(frame->newest_ns, p->samples[p->n_samples - 1]->time_ns);
        uint64_t first_ns = p->samples[0]->time_ns;
        if (!frame->oldest_ns || first_ns < frame->oldest_ns) frame->oldest_ns = first_ns;
        /* What a node sent is counted by each of its ranks. */
        frame->plain_bytes = later(frame->plain_bytes, s->counters[FCDP_COUNT_SAVED_PLAIN_BYTES]);
        frame->gather_bytes = later(frame->gather_bytes, s->counters[FCDP_COUNT_SAVED_GATHER_BYTES]);
        frame->n_lost += s->n_lost;
        frame->n_dropped += s->n_dropped;
    }
    qsort(frame->ranks, frame->n_ranks, sizeof *frame->ranks, by_rank);
    double most = -1;
    for (size_t i = 0; i < frame->n_ranks; i++) {
        if (frame->ranks[i].all_waited_ns > frame->ranks[frame->worst].all_waited_ns) frame->worst = i;
        if (!is_shown(query, &frame->ranks[i]) || fullness(frame->ranks[i].sample) <= most) continue;
        most = fullness(frame->ranks[i].sample);
        frame->fullest = i;
    }
}

/* ---- rows ---- */

/* The row of a name; ranks have like regions in like order, so that it mostly is the one after the last
 * that was found. NULL: there is none. */
static memtrace_live_row *row_find(memtrace_frame *frame, const char *name, size_t *hint) {
    for (size_t i = 0; i < frame->n_rows; i++) {
        size_t at = (*hint + i) % frame->n_rows;
        if (strcmp(frame->rows[at].name, name) != 0) continue;
        *hint = at + 1;
        return &frame->rows[at];
    }
    return NULL;
}

static const memtrace_live_place *place_in(const memtrace_sample *sample, const memtrace_live_place *place) {
    for (size_t low = 0, high = sample->n_places; low < high;) {
        size_t middle = (low + high) / 2;
        if (sample->places[middle].region == place->region) return &sample->places[middle];
        if (sample->places[middle].region < place->region)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

static void row_add(memtrace_live_row *row, const memtrace_live_place *now, const memtrace_live_place *then,
                    double seconds) {
    row->n_ranks++;
    row->device_bytes += now->device_bytes;
    row->host_bytes += now->host_bytes;
    row->file_bytes += now->file_bytes;
    row->state |= now->state;
    row->lives |= now->lives;
    row->n_evictions += now->n_evictions;
    for (unsigned link = 0; link < MEMTRACE_N_LINKS && seconds > 0; link++) {
        uint64_t before = then ? then->moved[link] : 0;
        row->moved_per_s[link] += (double)(now->moved[link] - before) / seconds;
    }
}

/* Of the counters, which are exact where events were lost. FSDP2's own collectives are on the same links. */
static void sums_add(memtrace_frame *frame, const memtrace_sample *now, const memtrace_sample *then,
                     double seconds) {
    static const struct {
        memtrace_link link;
        unsigned counter;
    } counts[] = {{MEMTRACE_BETWEEN_NODES, FCDP_COUNT_GATHER_INTER_BYTES},
                  {MEMTRACE_BETWEEN_NODES, FCDP_COUNT_PLAIN_GATHER_INTER_BYTES},
                  {MEMTRACE_BETWEEN_NODES, FCDP_COUNT_REDUCE_SCATTER_INTER_BYTES},
                  {MEMTRACE_BETWEEN_NODES, FCDP_COUNT_AGREE_INTER_BYTES},
                  {MEMTRACE_WITHIN_NODE, FCDP_COUNT_GATHER_INTRA_BYTES},
                  {MEMTRACE_WITHIN_NODE, FCDP_COUNT_RESTORE_INTRA_BYTES},
                  {MEMTRACE_WITHIN_NODE, FCDP_COUNT_PLAIN_GATHER_INTRA_BYTES},
                  {MEMTRACE_WITHIN_NODE, FCDP_COUNT_REDUCE_SCATTER_INTRA_BYTES},
                  {MEMTRACE_TO_HOST, FCDP_COUNT_D2H_BYTES},
                  {MEMTRACE_TO_DEVICE, FCDP_COUNT_H2D_BYTES}};
    for (size_t i = 0; i < sizeof counts / sizeof *counts && seconds > 0; i++) {
        uint64_t moved = now->counters[counts[i].counter] - then->counters[counts[i].counter];
        frame->moved_per_s[counts[i].link] += (double)moved / seconds;
    }
}

/* A sample of the peak is of a moment between two others, and its counters of a later one: no rates are
 * of it. */
static void rank_rows(memtrace_frame *frame, const memtrace_live_rank *rank, const memtrace_query *query) {
    const memtrace_live_process *p = rank->process;
    const memtrace_sample *now = rank->sample;
    const memtrace_sample *then = sample_before(p, now, query->window_ns, RATE_STEPS, RATE_MOST_NS);
    double seconds = then->time_ns < now->time_ns && !query->at_peak
                         ? (double)(now->time_ns - then->time_ns) / 1e9
                         : 0;
    sums_add(frame, now, then, seconds);
    size_t hint = 0;
    for (uint32_t i = 0; i < now->n_places; i++) {
        const memtrace_live_region *region = memtrace_follower_region(p->follower, now->places[i].region);
        memtrace_live_row *row = row_find(frame, region->name, &hint);
        if (!row) {
            row = &frame->rows[frame->n_rows++];
            *row = (memtrace_live_row){.name = region->name};
            hint = frame->n_rows;
        }
        row->bytes += region->bytes;
        row_add(row, &now->places[i], place_in(then, &now->places[i]), seconds);
    }
}

/* ---- notes ---- */

static int newest_first(const void *a, const void *b) {
    uint64_t first = ((const memtrace_shown_note *)a)->note->time_ns;
    uint64_t second = ((const memtrace_shown_note *)b)->note->time_ns;
    return first < second ? 1 : first > second ? -1 : 0;
}

static void rank_notes(memtrace_frame *frame, const memtrace_live_rank *rank) {
    const memtrace_live_note *note;
    const memtrace_follower *f = rank->process->follower;
    for (size_t i = 0, n = 0; n < MAX_NOTES && (note = memtrace_follower_note(f, i)); i++) {
        if (note->time_ns > rank->sample->time_ns) continue;
        const char *name = note->region == UINT32_MAX ? NULL
                                                      : memtrace_follower_region(f, note->region)->name;
        frame->notes[frame->n_notes++] = (memtrace_shown_note){note, rank_number(rank->process), name};
        n++;
    }
}

/* ---- the whole ---- */

/* Room for what the ranks can have at most. False: no memory. */
static bool frame_reserve(memtrace_frame *frame, const memtrace_model *m) {
    frame->ranks = calloc(m->n_processes + 1, sizeof *frame->ranks);
    frame->notes = calloc(m->n_processes * MAX_NOTES + 1, sizeof *frame->notes);
    return frame->ranks && frame->notes;
}

static bool rows_reserve(memtrace_frame *frame) {
    size_t n = 1;
    for (size_t i = 0; i < frame->n_ranks; i++) n += frame->ranks[i].sample->n_places;
    frame->rows = calloc(n, sizeof *frame->rows);
    return frame->rows != NULL;
}

/* Ranks come before rows, since rows are made of those that are shown, and room for rows of all samples'
 * places. */
memtrace_frame *memtrace_frame_create(const memtrace_model *model, const memtrace_query *query) {
    size_t job = choose_job(model, query->pid);
    memtrace_frame *frame = job == SIZE_MAX ? NULL : calloc(1, sizeof *frame);
    if (!frame) return NULL;
    frame->now_ns = model->now_ns;
    count_jobs(model, job, frame);
    if (!frame_reserve(frame, model)) goto failed;
    ranks_collect(model, job, query, frame);
    if (!rows_reserve(frame)) goto failed;
    for (size_t i = 0; i < frame->n_ranks; i++) {
        if (!is_shown(query, &frame->ranks[i])) continue;
        rank_rows(frame, &frame->ranks[i], query);
        rank_notes(frame, &frame->ranks[i]);
    }
    qsort(frame->notes, frame->n_notes, sizeof *frame->notes, newest_first);
    if (frame->n_notes > MAX_NOTES) frame->n_notes = MAX_NOTES;
    return frame;
failed:
    memtrace_frame_destroy(frame);
    return NULL;
}

void memtrace_frame_destroy(memtrace_frame *frame) {
    if (!frame) return;
    free(frame->ranks);
    free(frame->rows);
    free(frame->notes);
    free(frame);
}
