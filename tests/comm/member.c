/* member.c - one rank of a training job, as the core sees it: it plays FSDP, the model and the optimizer.
 *
 * It answers the core's questions (fcdp_program) from what the test set, computes by writing and checking
 * every byte of its parameters, and steps them, so that a test is a list of passes and faults.
 */
#include "tests/comm/member.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/internal.h"
#include "sim/gpu/simgpu.h"

/* ---- the program ---- */

static uint32_t index_of(const member *m, const fcdp_group *group) {
    uint32_t g = 0;
    while (m->groups[g] != group) g++;
    return g;
}

/* The host reads every second extent's shard in two pieces. What nobody reads has no place. */
static fcdp_status places_see(const member *m, uint32_t g, fcdp_sight *sight) {
    const cluster_config *config = &m->cluster->config;
    const group_spec *spec = &config->groups[g];
    bool reads = config->host_computes || config->fingerprints;
    size_t at = 0;
    fcdp_status status = fcdp_sight_reserve(sight, 2 * spec->n_extents);
    for (uint32_t i = 0; i < spec->n_extents && !status; i++) {
        sight->n_pieces[i] = config->host_computes ? 1 + i % 2 : 1;
        for (uint64_t p = 0; p < sight->n_pieces[i]; p++, at++) {
            size_t begin = p * (spec->extents[i].shard_bytes / 3);
            size_t end = p + 1 < sight->n_pieces[i] ? spec->extents[i].shard_bytes / 3
                                                    : spec->extents[i].shard_bytes;
            bool is_there = !m->missing[g][i];
            sight->shards[at] = is_there && reads ? m->shards + m->shard_at[g][i] + begin : NULL;
            sight->shard_bytes[at] = is_there && !reads ? 0 : end - begin;
        }
    }
    sight->by_device = config->fingerprints && !config->host_computes;
    return status;
}

/* Do fingerprints of an agreement wait for their end? Then no others can begin. */
static bool device_reads(const member *m) {
    return fcdp_comm_fingerprint_begin(m->comm, NULL, NULL, 0, m->stream) == FCDP_ERR_INVALID;
}

static fcdp_status member_look(void *ctx, fcdp_group *group, unsigned what, fcdp_sight *sight) {
    member *m = ctx;
    uint32_t g = index_of(m, group);
    for (uint32_t i = 0; i < sight->n_extents; i++)
        sight->signals[i] = (fcdp_signals){.optimizer_steps = m->steps[g][i]};
    if (what & FCDP_LOOK_SCENE) {
        sight->process = (fcdp_process_signals){.grad_mode = !m->evaluates, .optimizer_seen = true};
        if (sight->by_device && group == m->asked_last) m->n_drains += device_reads(m);
    }
    return what & FCDP_LOOK_PLACES ? places_see(m, g, sight) : FCDP_OK;
}

/* A gather is of what the shards are now. */
static fcdp_status member_inputs(void *ctx, fcdp_group *group, const uint8_t *stale, uint64_t *inputs_out,
                                 fcdp_stream *stream) {
    member *m = ctx;
    uint32_t g = index_of(m, group);
    (void)stream;
    if (m->inputs_fail) return fcdp__fail(FCDP_ERR_INVALID, "inputs: planted");
    for (uint32_t i = 0; i < m->cluster->config.groups[g].n_extents; i++) {
        if (!stale[i]) continue;
        inputs_out[i] = (uintptr_t)(m->shards + m->shard_at[g][i]);
        m->held[g][i] = m->version[g][i];
    }
    return FCDP_OK;
}

static fcdp_status member_agree(void *ctx, fcdp_group *const *groups, uint32_t n_groups, uint8_t *votes,
                                size_t n) {
    member *m = ctx;
    return council_agree(&m->cluster->council, n_groups << 16 | index_of(m, groups[0]), votes, n);
}

/* The last of the groups that an agreement asks for looks whether the device reads. */
static fcdp_status member_settle(void *ctx, fcdp_group *group) {
    ((member *)ctx)->asked_last = group;
    return FCDP_OK;
}

fcdp_program member_program(member *m) {
    return (fcdp_program){.ctx = m,
                          .settle = member_settle,
                          .look = member_look,
                          .inputs = member_inputs,
                          .agree = member_agree};
}

/* ---- agreements by hand ---- */

typedef struct ballot_box {
    member *m;
    uint8_t *vote;
    size_t n; /* 0: nobody has voted yet */
} ballot_box;

static fcdp_status box_look(void *ctx, fcdp_group *group, unsigned what, fcdp_sight *sight) {
    return member_look(((ballot_box *)ctx)->m, group, what, sight);
}

static fcdp_status box_agree(void *ctx, fcdp_group *const *groups, uint32_t n_groups, uint8_t *votes,
                             size_t n) {
    ballot_box *box = ctx;
    (void)groups;
    (void)n_groups;
    memcpy(box->vote, votes, n);
    box->n = n;
    return FCDP_ERR_PROGRAM; /* the test carries it */
}

fcdp_status member_vote(member *m, uint32_t g, uint8_t *vote_out) {
    ballot_box box = {m, vote_out, 0};
    fcdp_program program = {.ctx = &box, .look = box_look, .agree = box_agree};
    m->asked_last = m->groups[g];
    fcdp_status status = fcdp_agree(&m->groups[g], 1, &program, m->stream);
    return box.n ? FCDP_OK : status;
}

/* ---- uses ---- */

void member_begin_forward(member *m) {
    fcdp_engine_begin_pass(m->engine);
    fcdp_tree_begin_forward(m->tree);
}

void member_begin_backward(member *m) {
    fcdp_tree_begin_backward(m->tree);
}

fcdp_status member_begin(member *m, uint32_t g, fcdp_pass pass) {
    uint64_t inputs[CLUSTER_MAX_EXTENTS] = {0};
    fcdp_program program = member_program(m);
    fcdp_stream stream = m->stream;
    if (fcdp_group_has_begun(m->groups[g])) return FCDP_OK;
    fcdp_status status = fcdp__inputs_take(m->groups[g], &program, inputs, &stream);
    return status ? status : fcdp_group_begin(m->groups[g], inputs, pass, stream);
}

fcdp_status member_unshard(member *m, uint32_t g, unshard_kind kind) {
    static const fcdp_pass passes[] = {FCDP_PASS_FORWARD, FCDP_PASS_BACKWARD, FCDP_PASS_OTHER};
    fcdp_program program = member_program(m);
    fcdp_unshard_args args = {passes[kind], kind == UNSHARD_BY_HAND, m->stream, m->stream};
    return fcdp_unshard(m->groups[g], m->tree, &program, &args);
}

typedef struct look {
    member *m;
    uint32_t g, held[CLUSTER_MAX_EXTENTS];
} look;

/* On the compute stream's thread, or the rank's. */
static void look_body(void *data) {
    const look *l = data;
    const cluster *c = l->m->cluster;
    const fcdp_group *group = l->m->groups[l->g];
    const uint8_t *bytes = (const uint8_t *)(uintptr_t)fcdp__region_base(group->region).addr;
    for (uint32_t i = 0; i < c->config.groups[l->g].n_extents; i++) {
        size_t n = cluster_extent_bytes(c, l->g, i), k = 0;
        uint8_t *room = c->config.rounds ? malloc(n + 1) : NULL;
        const uint8_t *truth = cluster_gathered(c, group, l->g, i, l->held[i], room),
                      *is = bytes + group->layout->extents[i].offset_bytes;
        bool is_right = !memcmp(is, truth, n);
        while (!is_right && is[k] == truth[k]) k++;
        free(room);
        if (is_right) continue;
        pthread_mutex_lock(&l->m->mutex);
        if (!l->m->wrong[0])
            snprintf(l->m->wrong, sizeof l->m->wrong,
                     "rank %u, group %u, extent %u: byte %zu of %zu is not version %u's", l->m->topology.rank,
                     l->g, i, k, n, l->held[i]);
        pthread_mutex_unlock(&l->m->mutex);
    }
}

static struct simgpu_access region_access(const member *m, uint32_t g, bool writes) {
    const fcdp_group *group = m->groups[g];
    return (struct simgpu_access){fcdp__region_base(group->region).addr, group->layout->bytes, writes};
}

static fcdp_status launched(int result) {
    return result ? fcdp__fail(FCDP_ERR_DRIVER, "the kernel was refused with %d", result) : FCDP_OK;
}

fcdp_status member_use(member *m, uint32_t g) {
    look l = {.m = m, .g = g};
    fcdp_program program = member_program(m);
    fcdp_status status = fcdp_wait(m->groups[g], &program, m->stream);
    if (status) return status;
    memcpy(l.held, m->held[g], sizeof l.held);
    if (m->cluster->config.host_computes) {
        look_body(&l);
        return FCDP_OK;
    }
    struct simgpu_kernel kernel = {.name = "compute",
                                   .n_accesses = 1,
                                   .accesses = {region_access(m, g, false)},
                                   .body = look_body,
                                   .data = &l,
                                   .data_bytes = sizeof l};
    return launched(simgpu_launch(m->stream, &kernel));
}

static void scribble_body(void *data) {
    const look *l = data;
    const fcdp_group *group = l->m->groups[l->g];
    memset((void *)(uintptr_t)fcdp__region_base(group->region).addr, 0x11, group->layout->bytes);
}

fcdp_status member_scribble(member *m, uint32_t g) {
    look l = {.m = m, .g = g};
    if (m->cluster->config.host_computes) {
        scribble_body(&l);
        return FCDP_OK;
    }
    struct simgpu_kernel kernel = {.name = "scribble",
                                   .n_accesses = 1,
                                   .accesses = {region_access(m, g, true)},
                                   .body = scribble_body,
                                   .data = &l,
                                   .data_bytes = sizeof l};
    return launched(simgpu_launch(m->stream, &kernel));
}

fcdp_status member_reshard(member *m, uint32_t g, bool written) {
    return fcdp_group_reshard(m->groups[g], m->stream, written);
}

/* ---- steps ---- */

typedef struct write {
    uint8_t *to;
    const uint8_t *from;
    size_t bytes;
} write;

static void write_body(void *data) {
    const write *w = data;
    memcpy(w->to, w->from, w->bytes);
}

static fcdp_status shard_write(member *m, uint32_t g, uint32_t i) {
    size_t bytes = m->cluster->config.groups[g].extents[i].shard_bytes;
    write w = {m->shards + m->shard_at[g][i],
               cluster_truth(m->cluster, g, i, m->version[g][i]) + m->topology.rank * bytes, bytes};
    if (m->cluster->config.host_computes || bytes == 0) {
        write_body(&w);
        return FCDP_OK;
    }
    struct simgpu_kernel kernel = {.name = "step",
                                   .n_accesses = 1,
                                   .accesses = {{(uintptr_t)w.to, bytes, 1}},
                                   .body = write_body,
                                   .data = &w,
                                   .data_bytes = sizeof w};
    return launched(simgpu_launch(m->stream, &kernel));
}

fcdp_status member_step(member *m, uint32_t g, const uint8_t *which, bool noticed) {
    fcdp_status status = fcdp_engine_order_writes(m->engine, m->stream);
    for (uint32_t i = 0; i < m->cluster->config.groups[g].n_extents && !status; i++) {
        if (!which[i]) continue;
        m->version[g][i]++;
        m->steps[g][i] += noticed;
        status = shard_write(m, g, i);
    }
    return status;
}

void member_step_trainable(member *m) {
    const cluster_config *config = &m->cluster->config;
    for (uint32_t g = 0; g < config->n_groups; g++) {
        uint8_t trainable[CLUSTER_MAX_EXTENTS] = {0};
        for (uint32_t i = 0; i < config->groups[g].n_extents; i++)
            trainable[i] = config->groups[g].extents[i].span == FCDP_SPAN_TRAINABLE;
        MUST(!member_step(m, g, trainable, true));
    }
}
