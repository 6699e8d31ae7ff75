/* program.c - steps of forward and backward over all groups, agreed staleness in between, every byte checked.
 *
 * After a failed call a rank goes on with the schedule, as far as it makes sense, and breaks the hub so that
 * no peer waits for it in a collective; the next step begins with everybody's queue drained and the hub
 * mended. So a fault costs a step, and whatever it left behind must not be believed by the next one.
 */
#include "tests/comm/program.h"

#include <stdarg.h>
#include <string.h>

typedef uint8_t stale_table[CLUSTER_MAX_GROUPS][CLUSTER_MAX_EXTENTS];

typedef struct shared {
    program *program;
    pthread_barrier_t barrier;
    pthread_mutex_t mutex;
    /* guarded by mutex between barriers */
    stale_table stale[2]; /* by step % 2: agreed */
    /* written by rank 0 between barriers */
    uint8_t changed[CLUSTER_MAX_GROUPS][CLUSTER_MAX_EXTENTS];
    uint8_t noticed_by[CLUSTER_MAX_GROUPS][CLUSTER_MAX_EXTENTS]; /* this rank, CLUSTER_MAX_RANKS: all */
} shared;

typedef struct evictor { /* takes regions away while the rank goes on */
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    fcdp_region *wanted;
    bool stop;
    shared *shared;
} evictor;

typedef struct runner {
    shared *shared;
    member *m;
    test_random schedule; /* the same on every rank */
    test_random own;
    int step;
    bool agreeing;                                                /* between two steps */
    uint64_t seen_steps[CLUSTER_MAX_GROUPS][CLUSTER_MAX_EXTENTS]; /* the signal this rank reports */
    bool usable[CLUSTER_MAX_GROUPS];                              /* unsharded without an error */
    bool spoiled[CLUSTER_MAX_GROUPS];                             /* in this step, on every rank */
    bool read[CLUSTER_MAX_GROUPS];                                /* compute read it since the last check */
    evictor evictor;
} runner;

/* ---- reports ---- */

static void wrong(runner *r, const char *format, ...) FCDP_PRINTF(2, 3);

static void wrong(runner *r, const char *format, ...) {
    program *p = r->shared->program;
    va_list args;
    va_start(args, format);
    pthread_mutex_lock(&r->shared->mutex);
    if (!p->wrong[0]) {
        int n = snprintf(p->wrong, sizeof p->wrong, "step %d, rank %u: ", r->step, r->m->topology.rank);
        vsnprintf(p->wrong + n, sizeof p->wrong - (size_t)n, format, args);
    }
    pthread_mutex_unlock(&r->shared->mutex);
    va_end(args);
}

/* A fault costs the step in which it shows, and what is told late is told by the next drain; after that all
 * must be well again. With the mutex. */
static bool is_expected(const runner *r) {
    const program *p = r->shared->program;
    return p->faults &&
           (r->step == p->first_error_step || (r->agreeing && r->step == p->first_error_step + 1));
}

/* True when the call succeeded. */
static bool went(runner *r, const char *what, uint32_t g, fcdp_status status) {
    program *p = r->shared->program;
    if (!status) return true;
    const char *text = fcdp_error_text();
    pthread_mutex_lock(&r->shared->mutex);
    if (p->n_errors++ == 0) {
        p->first_error_step = r->agreeing ? r->step - 1 : r->step;
        snprintf(p->first_error, sizeof p->first_error, "step %d, rank %u, %s of %u: %s (%s)", r->step,
                 r->m->topology.rank, what, g, fcdp_status_name(status), text);
    }
    bool expected = is_expected(r);
    pthread_mutex_unlock(&r->shared->mutex);
    if (!text[0]) wrong(r, "%s of group %u failed without a text", what, g);
    if (!expected) wrong(r, "%s of group %u: %s (%s)", what, g, fcdp_status_name(status), text);
    hub_break(r->m->cluster);
    return false;
}

/* ---- evictions ---- */

static void *evictor_main(void *arg) {
    evictor *e = arg;
    pthread_mutex_lock(&e->mutex);
    while (!e->stop || e->wanted) {
        fcdp_region *region = e->wanted;
        e->wanted = NULL;
        if (region) {
            pthread_mutex_unlock(&e->mutex);
            fcdp_status status = fcdp__region_evict(region);
            (void)status; /* in use, or a fault: either leaves the region as good as it was */
            pthread_mutex_lock(&e->mutex);
        } else {
            pthread_cond_wait(&e->changed, &e->mutex);
        }
    }
    pthread_mutex_unlock(&e->mutex);
    return NULL;
}

static void evictor_start(evictor *e, shared *s) {
    e->shared = s;
    pthread_mutex_init(&e->mutex, NULL);
    pthread_cond_init(&e->changed, NULL);
    pthread_create(&e->thread, NULL, evictor_main, e);
}

static void evictor_stop(evictor *e) {
    pthread_mutex_lock(&e->mutex);
    e->stop = true;
    pthread_cond_signal(&e->changed);
    pthread_mutex_unlock(&e->mutex);
    pthread_join(e->thread, NULL);
    pthread_mutex_destroy(&e->mutex);
    pthread_cond_destroy(&e->changed);
}

static void maybe_evict(runner *r) {
    const cluster *c = r->m->cluster;
    if (random_below(&r->own, 256) >= r->shared->program->evict_chance) return;
    pthread_mutex_lock(&r->evictor.mutex);
    r->evictor.wanted = r->m->groups[random_below(&r->own, c->config.n_groups)]->region;
    pthread_cond_signal(&r->evictor.changed);
    pthread_mutex_unlock(&r->evictor.mutex);
}

/* ---- calls ---- */

static const uint8_t none_stale[CLUSTER_MAX_EXTENTS];
static const uint8_t all_stale[CLUSTER_MAX_EXTENTS] = {1, 1, 1, 1, 1, 1, 1, 1};

static void inputs_of(const runner *r, uint32_t g, uint64_t *inputs_out) {
    for (uint32_t i = 0; i < CLUSTER_MAX_EXTENTS; i++) inputs_out[i] = (uintptr_t)r->m->shards[g][i];
}

/* A failure shows at the unshard, or when it is thrown away. */
static void prefetch(runner *r, uint32_t g, const uint8_t *stale) {
    uint64_t inputs[CLUSTER_MAX_EXTENTS];
    bool ahead;
    inputs_of(r, g, inputs);
    (void)went(r, "prefetch", g, fcdp_group_prefetch(r->m->groups[g], stale, inputs, r->m->stream, &ahead));
}

static void unshard(runner *r, uint32_t g, const uint8_t *stale, fcdp_pass pass) {
    uint64_t inputs[CLUSTER_MAX_EXTENTS];
    inputs_of(r, g, inputs);
    maybe_evict(r);
    fcdp_job *job;
    bool good = went(r, "submission", g,
                     fcdp_group_unshard(r->m->groups[g], stale, inputs, pass, r->m->stream, &job));
    if (good) good = went(r, "unshard", g, fcdp_job_wait(job));
    r->usable[g] = good;
    if (!good) return;
    int extent = member_wrong_extent(r->m, g);
    if (extent >= 0)
        wrong(r, "group %u, extent %d is not the parameter after an unshard (stale %d, pass %d)", g, extent,
              stale[extent], (int)pass);
    r->read[g] = went(r, "compute", g, member_compute(r->m, g));
}

static void reshard(runner *r, uint32_t g) {
    maybe_evict(r);
    (void)went(r, "reshard", g, fcdp_group_reshard(r->m->groups[g], r->m->stream));
    r->usable[g] = false;
}

/* Everything that compute has read so far. */
static void check_reads(runner *r) {
    fcdp_driver *drv = r->m->engine->drv;
    fcdp_status status = fcdp__driver_stream_sync(drv, r->m->stream);
    if (status && r->shared->program->faults) status = fcdp__driver_stream_sync(drv, r->m->stream);
    if (!went(r, "stream sync", 0, status)) return;
    for (uint32_t g = 0; g < r->m->cluster->config.n_groups; g++) {
        if (r->read[g] && member_wrong_sink(r->m, g) >= 0)
            wrong(r, "group %u: pages went away under a reader", g);
        r->read[g] = false;
    }
}

/* ---- a step ---- */

static void scribble(runner *r, uint32_t g) {
    if (!r->usable[g]) return;
    check_reads(r);
    fcdp_group *group = r->m->groups[g];
    memset((void *)(uintptr_t)fcdp__region_base(group->region).addr, 0x11, fcdp_group_bytes(group));
}

static void forward_extras(runner *r, uint32_t g, const uint8_t *stale) {
    switch (random_below(&r->schedule, 8)) {
    case 0:
        unshard(r, g, none_stale, FCDP_PASS_OTHER);
        break; /* again, without a reshard between */
    case 1:
        reshard(r, g);
        reshard(r, g); /* twice */
        unshard(r, g, none_stale, FCDP_PASS_FORWARD);
        break;
    case 2:
        unshard(r, g, stale, FCDP_PASS_FORWARD); /* gathered again, in place */
        break;
    case 3:
        (void)went(r, "unprefetch", g, fcdp_group_unprefetch(r->m->groups[g]));
        break;
    case 4:
        r->spoiled[g] = true;
        scribble(r, g);
        fcdp_group_spoil(r->m->groups[g]);
        break;
    default:
        break;
    }
}

static void forward(runner *r, const stale_table stale) {
    uint32_t n = r->m->cluster->config.n_groups;
    bool ahead = r->shared->program->plain || random_below(&r->schedule, 2);
    bool deep = ahead && !r->shared->program->plain && random_below(&r->schedule, 2);
    for (uint32_t g = 0; g < n; g++) {
        unshard(r, g, stale[g], FCDP_PASS_FORWARD);
        if (!r->shared->program->plain) forward_extras(r, g, stale[g]);
        if (ahead && g + 1 < n && !fcdp_group_is_prefetched(r->m->groups[g + 1], stale[g + 1]))
            prefetch(r, g + 1, random_below(&r->schedule, 8) ? stale[g + 1] : all_stale);
        if (deep && g + 2 < n) prefetch(r, g + 2, stale[g + 2]);
        reshard(r, g);
    }
}

static void backward(runner *r) {
    for (uint32_t g = r->m->cluster->config.n_groups; g-- > 0;) {
        unshard(r, g, r->spoiled[g] ? all_stale : none_stale, FCDP_PASS_BACKWARD);
        reshard(r, g);
    }
}

/* By rank 0 alone. */
static void optimizer_step(runner *r) {
    shared *s = r->shared;
    const cluster_config *config = &r->m->cluster->config;
    test_random *random = &r->own;
    uint32_t chance = s->program->plain ? 2 : random_below(random, 5);
    memset(s->changed, 0, sizeof s->changed);
    for (uint32_t g = 0; g < config->n_groups; g++)
        for (uint32_t i = 0; i < config->groups[g].n_extents; i++) {
            if (r->step > 0 && random_below(random, 4) >= chance) continue;
            cluster_write(r->m->cluster, g, i);
            s->changed[g][i] = 1;
            bool all = random_below(random, 2);
            s->noticed_by[g][i] =
                (uint8_t)(all ? CLUSTER_MAX_RANKS : random_below(random, r->m->cluster->n_ranks));
        }
}

static void observe(runner *r, uint32_t g) {
    shared *s = r->shared;
    uint32_t n = r->m->cluster->config.groups[g].n_extents;
    fcdp_signals signals[CLUSTER_MAX_EXTENTS] = {{0}};
    fcdp_scene scene = {.grad_mode = true, .optimizer_seen = true};
    uint8_t stale[CLUSTER_MAX_EXTENTS];
    for (uint32_t i = 0; i < n; i++) {
        uint32_t by = s->noticed_by[g][i];
        if (s->changed[g][i] && (by == CLUSTER_MAX_RANKS || by == r->m->topology.rank)) r->seen_steps[g][i]++;
        signals[i].optimizer_steps = r->seen_steps[g][i];
    }
    fcdp_group_observe(r->m->groups[g], signals, &scene, NULL, NULL, stale);
    pthread_mutex_lock(&s->mutex);
    for (uint32_t i = 0; i < n; i++) s->stale[r->step % 2][g][i] |= stale[i];
    pthread_mutex_unlock(&s->mutex);
}

/* All ranks idle: parameters change, ranks look, and agree. */
static void agree(runner *r) {
    shared *s = r->shared;
    uint32_t n = r->m->cluster->config.n_groups;
    (void)went(r, "drain", 0, fcdp_engine_drain(r->m->engine));
    check_reads(r);
    memset(r->spoiled, 0, sizeof r->spoiled);
    pthread_barrier_wait(&s->barrier);
    if (r->m->topology.rank == 0) {
        hub_mend(r->m->cluster);
        optimizer_step(r);
    }
    pthread_barrier_wait(&s->barrier);
    for (uint32_t g = 0; g < n; g++) {
        fcdp_status status = member_update_shards(r->m, g, s->changed[g]);
        if (status && s->program->faults) status = member_update_shards(r->m, g, s->changed[g]);
        (void)went(r, "update", g, status);
        observe(r, g);
    }
    pthread_barrier_wait(&s->barrier);
    if (r->m->topology.rank == 0) memset(s->stale[(r->step + 1) % 2], 0, sizeof(stale_table));
}

static void *runner_main(void *arg) {
    runner *r = arg;
    shared *s = r->shared;
    for (r->step = 0; r->step < s->program->n_steps; r->step++) {
        r->schedule.state = s->program->seed * 1000003 + (uint64_t)r->step;
        r->agreeing = true;
        agree(r);
        r->agreeing = false;
        forward(r, s->stale[r->step % 2]);
        if (s->program->plain || random_below(&r->schedule, 4)) backward(r);
    }
    r->agreeing = true;
    (void)went(r, "drain", 0, fcdp_engine_drain(r->m->engine));
    check_reads(r);
    return NULL;
}

void program_run(program *p) {
    uint32_t n = p->cluster->n_ranks;
    shared *s = calloc(1, sizeof *s);
    runner *runners = calloc(n, sizeof *runners);
    pthread_t threads[CLUSTER_MAX_RANKS];
    s->program = p;
    p->wrong[0] = p->first_error[0] = 0;
    p->n_errors = 0;
    pthread_barrier_init(&s->barrier, NULL, n);
    pthread_mutex_init(&s->mutex, NULL);
    for (uint32_t i = 0; i < n; i++) {
        runners[i].shared = s;
        runners[i].m = &p->cluster->members[i];
        runners[i].own.state = p->seed * 7919 + i;
        evictor_start(&runners[i].evictor, s);
        pthread_create(&threads[i], NULL, runner_main, &runners[i]);
    }
    for (uint32_t i = 0; i < n; i++) pthread_join(threads[i], NULL);
    for (uint32_t i = 0; i < n; i++) evictor_stop(&runners[i].evictor);
    hub_mend(p->cluster);
    pthread_barrier_destroy(&s->barrier);
    pthread_mutex_destroy(&s->mutex);
    free(runners);
    free(s);
}
