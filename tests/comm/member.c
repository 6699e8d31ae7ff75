/* member.c - one rank's program over the engine. Agreements carry the votes of all groups of the tree, or of
 * one. */
#include "tests/comm/member.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/coalesce.h"
#include "comm/internal.h"
#include "comm/tree.h"
#include "comm/unshard.h"
#include "comm/vote.h"
#include "sim/gpu/simgpu.h"

enum { MAX_AHEAD = 8 };

/* ---- agreements ---- */

static void signals_of(const member *m, uint32_t g, fcdp_signals signals_out[CLUSTER_MAX_EXTENTS]) {
    memset(signals_out, 0, CLUSTER_MAX_EXTENTS * sizeof signals_out[0]);
    for (uint32_t i = 0; i < m->cluster->config.groups[g].n_extents; i++)
        signals_out[i].optimizer_steps = m->steps[g][i];
}

enum { MAX_PIECES = 2 * CLUSTER_MAX_GROUPS * CLUSTER_MAX_EXTENTS };

/* What there is to see of group g's shards. The host reads every second extent's in two pieces. */
typedef struct sight {
    size_t n; /* pieces */
    fcdp_signals signals[CLUSTER_MAX_EXTENTS];
    const void *shards[2 * CLUSTER_MAX_EXTENTS];
    size_t shard_bytes[2 * CLUSTER_MAX_EXTENTS];
    uint64_t n_pieces[CLUSTER_MAX_EXTENTS];
} sight;

/* `fingerprints`: the device's, of the group's shards; NULL: none. The evidence borrows *s. */
static fcdp_evidence see(member *m, uint32_t g, const uint64_t *fingerprints, sight *s) {
    const group_spec *spec = &m->cluster->config.groups[g];
    size_t at = 0;
    memset(s, 0, sizeof *s);
    signals_of(m, g, s->signals);
    for (uint32_t i = 0; i < spec->n_extents; i++) {
        s->n_pieces[i] = m->cluster->config.host_computes ? 1 + i % 2 : 1;
        for (uint64_t p = 0; p < s->n_pieces[i]; p++, at++) {
            size_t begin = p * (spec->extents[i].shard_bytes / 3);
            size_t end = p + 1 < s->n_pieces[i] ? spec->extents[i].shard_bytes / 3
                                                : spec->extents[i].shard_bytes;
            s->shard_bytes[at] = end - begin;
            s->shards[at] = m->missing[g][i] ? NULL : m->shards + m->shard_at[g][i] + begin;
        }
    }
    s->n = at;
    return (fcdp_evidence){s->signals,   s->shards,   s->shard_bytes,
                           fingerprints, s->n_pieces, !m->cluster->config.host_computes};
}

static fcdp_status vote_one(member *m, uint32_t g, const uint64_t *fingerprints, uint8_t *vote_out,
                            uint32_t *moved_out) {
    sight s;
    fcdp_evidence evidence = see(m, g, fingerprints, &s);
    fcdp_process_signals process = {.grad_mode = !m->evaluates, .optimizer_seen = true};
    if (moved_out) *moved_out = fcdp_group_audit(m->groups[g], &evidence);
    return vote_out ? fcdp_group_vote(m->groups[g], &evidence, &process, vote_out) : FCDP_OK;
}

static bool needs_fingerprints(const member *m, uint32_t g) {
    uint64_t steps[CLUSTER_MAX_EXTENTS];
    for (uint32_t i = 0; i < m->cluster->config.groups[g].n_extents; i++) steps[i] = m->steps[g][i];
    return fcdp_group_needs_fingerprints(m->groups[g], steps);
}

/* Of the pieces of the shards of those of groups [first, end) that need them, by the device, in their order.
 * at_out: from where each group's begin. Without any the host does not wait. */
static fcdp_status fingerprints_take(member *m, uint32_t first, uint32_t end, uint64_t *fingerprints_out,
                                     size_t *at_out) {
    uint64_t shards[MAX_PIECES] = {0};
    size_t bytes[MAX_PIECES] = {0}, n = 0;
    for (uint32_t g = first; g < end; g++) {
        sight s;
        at_out[g] = SIZE_MAX;
        if (!needs_fingerprints(m, g)) continue;
        (void)see(m, g, NULL, &s);
        at_out[g] = n;
        for (size_t p = 0; p < s.n; p++, n++) {
            shards[n] = (uintptr_t)s.shards[p];
            bytes[n] = s.shards[p] ? s.shard_bytes[p] : 0;
        }
    }
    if (n == 0) return FCDP_OK;
    fcdp_status status = fcdp_comm_fingerprint_begin(m->comm, shards, bytes, n, m->stream);
    m->n_drains++;
    return status ? status : fcdp_comm_fingerprint_end(m->comm, fingerprints_out);
}

/* Votes of groups [first, end), n_extents + 1 each; how many in *n_out. */
static fcdp_status vote(member *m, uint32_t first, uint32_t end, uint8_t *votes_out, size_t *n_out) {
    uint64_t taken[MAX_PIECES];
    size_t at[CLUSTER_MAX_GROUPS], n = 0;
    bool takes = m->cluster->config.fingerprints && !m->cluster->config.host_computes;
    fcdp_status status = takes ? fingerprints_take(m, first, end, taken, at) : FCDP_OK;
    for (uint32_t g = first; g < end && !status; g++) {
        status = vote_one(m, g, takes && at[g] != SIZE_MAX ? taken + at[g] : NULL, votes_out + n, NULL);
        n += m->cluster->config.groups[g].n_extents + 1;
    }
    *n_out = n;
    return status;
}

fcdp_status member_vote(member *m, uint32_t g, uint8_t *vote_out) {
    size_t n;
    return vote(m, g, g + 1, vote_out, &n);
}

/* A gather reads the group's shards next. A rank without fingerprints need not say so. */
static fcdp_status confirm(member *m, uint32_t g) {
    sight s;
    fcdp_evidence evidence = see(m, g, NULL, &s);
    return m->cluster->config.fingerprints ? fcdp_group_confirm(m->groups[g], &evidence, m->stream) : FCDP_OK;
}

/* What the framework's side does after an agreement on the whole tree. */
static fcdp_status cross_small(member *m) {
    fcdp_group *small[CLUSTER_MAX_GROUPS];
    uint64_t inputs[CLUSTER_MAX_GROUPS * CLUSTER_MAX_EXTENTS];
    uint32_t n = 0, n_inputs = 0;
    for (uint32_t g = 0; g < m->cluster->config.n_groups; g++) {
        if (!fcdp_group_is_small(m->groups[g])) continue;
        for (uint32_t i = 0; i < m->cluster->config.groups[g].n_extents; i++)
            inputs[n_inputs++] = (uintptr_t)(m->shards + m->shard_at[g][i]);
        fcdp_status status = confirm(m, g);
        if (status) return status;
        small[n++] = m->groups[g];
        memcpy(m->held[g], m->version[g], sizeof m->held[g]);
    }
    return n > 1 ? fcdp_groups_coalesce(small, inputs, n, m->stream) : FCDP_OK;
}

/* Groups [first, end). */
static fcdp_status agree(member *m, fcdp_question question, uint32_t first, uint32_t end) {
    uint8_t votes[COUNCIL_MAX_VOTES];
    size_t n;
    fcdp_status status = vote(m, first, end, votes, &n);
    if (!status) status = council_agree(&m->cluster->council, (uint32_t)question << 16 | first, votes, n);
    fcdp_status known = status ? fcdp_engine_check(m->engine)
                               : FCDP_OK; /* it says more than which rank has left */
    if (known || status) return known ? known : status;
    n = 0;
    for (uint32_t g = first; g < end; g++) {
        fcdp_group_agree(m->groups[g], votes + n);
        n += m->cluster->config.groups[g].n_extents + 1;
    }
    if (question != FCDP_ASK_TREE) return FCDP_OK;
    fcdp_tree_agreed(m->tree);
    return cross_small(m);
}

static fcdp_status audit(member *m, uint32_t g) {
    uint32_t moved = 0;
    fcdp_status status = vote_one(m, g, NULL, NULL, &moved);
    if (status || moved == m->cluster->config.groups[g].n_extents) return status;
    return fcdp__fail(FCDP_ERR_INVALID, "extent %u of group %u has changed since the ranks agreed", moved, g);
}

static fcdp_status ask(member *m, uint32_t g, bool by_hand) {
    switch (fcdp_group_question(m->groups[g], by_hand)) {
    case FCDP_ASK_TREE: return agree(m, FCDP_ASK_TREE, 0, m->cluster->config.n_groups);
    case FCDP_ASK_GROUP: return agree(m, FCDP_ASK_GROUP, g, g + 1);
    case FCDP_ASK_NOBODY: break;
    }
    return audit(m, g);
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
    for (uint32_t i = 0; i < m->cluster->config.groups[g].n_extents; i++)
        inputs[i] = (uintptr_t)(m->shards + m->shard_at[g][i]);
    bool begins = !fcdp_group_has_begun(m->groups[g]);
    fcdp_status status = begins ? confirm(m, g) : FCDP_OK;
    if (!status) status = fcdp_group_begin(m->groups[g], inputs, pass, m->stream);
    if (!status && begins) memcpy(m->held[g], m->version[g], sizeof m->held[g]);
    return status;
}

static uint32_t index_of(const member *m, const fcdp_group *group) {
    uint32_t g = 0;
    while (m->groups[g] != group) g++;
    return g;
}

fcdp_status member_unshard(member *m, uint32_t g, unshard_kind kind) {
    static const fcdp_pass passes[] = {FCDP_PASS_FORWARD, FCDP_PASS_BACKWARD, FCDP_PASS_OTHER};
    fcdp_group *ahead[MAX_AHEAD];
    fcdp_status status = ask(m, g, kind == UNSHARD_BY_HAND);
    if (!status) status = member_begin(m, g, passes[kind]);
    if (status) return status;
    size_t n = fcdp_group_unsharded(m->groups[g], kind == UNSHARD_FORWARD, ahead, MAX_AHEAD);
    for (size_t k = 0; k < n && !status; k++)
        status = member_begin(m, index_of(m, ahead[k]), FCDP_PASS_FORWARD);
    return status;
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
        const uint8_t *truth = cluster_truth(c, l->g, i, l->held[i]),
                      *is = bytes + group->layout->extents[i].offset_bytes;
        size_t n = cluster_extent_bytes(c, l->g, i), k = 0;
        if (!memcmp(is, truth, n)) continue;
        while (is[k] == truth[k]) k++;
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
    memcpy(l.held, m->held[g], sizeof l.held);
    fcdp_status status = fcdp_group_wait(m->groups[g], m->stream);
    if (status) return status;
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
