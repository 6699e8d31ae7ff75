/* cluster.c - the transport over shared memory, and the ranks. */
#include "tests/comm/cluster.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "tools/simgpu/simgpu.h"

enum { GIVE_UP_S = 60 };

/* ---- transport ---- */

static void lane_init(lane *l, uint32_t n) {
    pthread_mutex_init(&l->mutex, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&l->changed, &attr);
    pthread_condattr_destroy(&attr);
    l->n = n;
}

/* All have arrived: everybody's part to everybody, whoever waits for it and when. With the mutex. */
static void round_complete(lane *l, lane_round *round) {
    size_t bytes = round->bytes[0];
    round->disagrees = false;
    for (uint32_t i = 1; i < l->n; i++) round->disagrees = round->disagrees || round->bytes[i] != bytes;
    for (uint32_t to = 0; to < l->n && !round->disagrees; to++)
        for (uint32_t from = 0; from < l->n; from++)
            if (from != to)
                memcpy((char *)round->buffer[to].addr + from * bytes,
                       (char *)round->buffer[from].addr + from * bytes, bytes);
    pthread_cond_broadcast(&l->changed);
}

/* Rounds are numbered by each member's starts, so several may be under way. With the mutex. */
static lane_round *round_join(lane *l, uint32_t me, fcdp_dptr buffer, size_t bytes) {
    lane_round *round = &l->rounds[l->n_started[me]++ % LANE_ROUNDS];
    if (round->n_arrived == l->n) round->n_arrived = 0; /* it was that of an earlier lap */
    round->buffer[me] = buffer;
    round->bytes[me] = bytes;
    if (++round->n_arrived == l->n) round_complete(l, round);
    return round;
}

typedef struct pending {
    lane *lane;
    lane_round *round;
    uint64_t epoch; /* of the lane: rounds do not outlive a mend */
    uint32_t me;
    bool loses; /* the answer is lost */
} pending;

static fcdp_status lane_start(lane *l, pending *p, fcdp_dptr buffer, size_t bytes) {
    pthread_mutex_lock(&l->mutex);
    bool broken = l->broken;
    p->lane = l;
    p->epoch = l->epoch;
    if (!broken) p->round = round_join(l, p->me, buffer, bytes);
    pthread_mutex_unlock(&l->mutex);
    return broken ? fcdp__fail(FCDP_ERR_PEER, "a peer has failed") : FCDP_OK;
}

/* With the mutex. */
static fcdp_status lane_meet(const pending *p) {
    lane *l = p->lane;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += GIVE_UP_S;
    bool in_time = true;
    while (p->epoch == l->epoch && p->round->n_arrived < l->n && !l->broken && in_time)
        in_time = pthread_cond_timedwait(&l->changed, &l->mutex, &until) != ETIMEDOUT;
    if (p->epoch != l->epoch) return fcdp__fail(FCDP_ERR_PEER, "a peer had failed");
    if (p->round->n_arrived < l->n)
        return fcdp__fail(l->broken ? FCDP_ERR_PEER : FCDP_ERR_TIMEOUT, "%u of %u came", p->round->n_arrived,
                          l->n);
    if (p->round->disagrees)
        return fcdp__fail(FCDP_ERR_PEER, "ranks disagree on the bytes of a collective (%zu here)",
                          p->round->bytes[p->me]);
    return FCDP_OK;
}

static fcdp_status lane_wait(const pending *p) {
    pthread_mutex_lock(&p->lane->mutex);
    fcdp_status status = lane_meet(p);
    pthread_mutex_unlock(&p->lane->mutex);
    return status;
}

static fcdp_status hub_start(void *ctx, fcdp_lane which, fcdp_dptr buffer, size_t bytes, void **pending_out) {
    member *m = ctx;
    cluster *c = m->cluster;
    bool inter = which == FCDP_LANE_INTER;
    bool fails = atomic_fetch_add(&c->n_calls, 1) + 1 == atomic_load(&c->fail_at);
    if (fails && atomic_load(&c->fault) == HUB_FAULT_ABSENT)
        return fcdp__fail(FCDP_ERR_TRANSPORT, "the test's fault: the call did nothing");
    pending *p = calloc(1, sizeof *p);
    *p = (pending){.loses = fails, .me = inter ? m->topology.node : m->topology.local};
    fcdp_status status =
        lane_start(inter ? &c->inter[m->topology.local] : &c->intra[m->topology.node], p, buffer, bytes);
    if (status)
        free(p);
    else
        *pending_out = p;
    if (inter && !status) atomic_fetch_add(&c->inter_bytes_sent, (c->config.n_nodes - 1) * bytes);
    return status;
}

static fcdp_status hub_wait(void *ctx, void *pending_) {
    (void)ctx;
    pending *p = pending_;
    fcdp_status status = lane_wait(p);
    if (p->loses && !status) status = fcdp__fail(FCDP_ERR_TIMEOUT, "the test's fault: the answer was lost");
    free(p);
    return status;
}

static void lanes_set_broken(lane *lanes, uint32_t n, bool broken) {
    for (uint32_t i = 0; i < n; i++) {
        pthread_mutex_lock(&lanes[i].mutex);
        lanes[i].broken = broken;
        if (!broken) {
            lanes[i].epoch++;
            memset(lanes[i].n_started, 0, sizeof lanes[i].n_started);
            memset(lanes[i].rounds, 0, sizeof lanes[i].rounds);
        }
        pthread_cond_broadcast(&lanes[i].changed);
        pthread_mutex_unlock(&lanes[i].mutex);
    }
}

static void hub_set_broken(cluster *c, bool broken) {
    lanes_set_broken(c->inter, c->config.node_size, broken);
    lanes_set_broken(c->intra, c->config.n_nodes, broken);
}

void hub_break(cluster *c) {
    hub_set_broken(c, true);
}
void hub_mend(cluster *c) {
    hub_set_broken(c, false);
    for (uint32_t r = 0; r < c->n_ranks; r++) atomic_store(&c->members[r].comm->out_of_step, false);
}

/* ---- content ---- */

size_t cluster_extent_bytes(const cluster *c, uint32_t g, uint32_t i) {
    return c->n_ranks * c->config.groups[g].extents[i].shard_bytes;
}

void cluster_write(cluster *c, uint32_t g, uint32_t i) {
    uint64_t x = ((uint64_t)++c->version[g][i] << 16 | g << 8 | i) * 0x9e3779b97f4a7c15u | 1;
    size_t n = cluster_extent_bytes(c, g, i);
    for (size_t k = 0; k < n; k++) {
        if (k % 8 == 0) x = x * 6364136223846793005u + 1442695040888963407u;
        c->truth[g][i][k] = (uint8_t)(x >> (k % 8 * 8));
    }
}

fcdp_status member_update_shards(member *m, uint32_t g, const uint8_t *which) {
    cluster *c = m->cluster;
    fcdp_status status = FCDP_OK;
    for (uint32_t i = 0; i < c->config.groups[g].n_extents && !status; i++) {
        size_t bytes = c->config.groups[g].extents[i].shard_bytes;
        if (!which[i] || bytes == 0) continue;
        uint8_t *now = c->truth[g][i] + m->topology.rank * bytes;
        status = fcdp__driver_copy_d2d(m->engine->drv, (fcdp_dptr){(uintptr_t)m->shards[g][i]},
                                       (fcdp_dptr){(uintptr_t)now}, bytes, m->stream);
    }
    return status;
}

fcdp_status member_compute(member *m, uint32_t g) {
    return fcdp__driver_copy_d2d(m->engine->drv, (fcdp_dptr){(uintptr_t)m->sink[g]},
                                 fcdp__region_base(m->groups[g]->region), fcdp_group_bytes(m->groups[g]),
                                 m->stream);
}

static int wrong_extent(const member *m, uint32_t g, const uint8_t *bytes) {
    const cluster *c = m->cluster;
    for (uint32_t i = 0; i < c->config.groups[g].n_extents; i++)
        if (memcmp(bytes + m->groups[g]->layout->extents[i].offset_bytes, c->truth[g][i],
                   cluster_extent_bytes(c, g, i)))
            return (int)i;
    return -1;
}

int member_wrong_extent(const member *m, uint32_t g) {
    return wrong_extent(m, g, (const uint8_t *)(uintptr_t)fcdp__region_base(m->groups[g]->region).addr);
}

int member_wrong_sink(const member *m, uint32_t g) {
    return wrong_extent(m, g, m->sink[g]);
}

/* ---- life ---- */

static void member_start(cluster *c, uint32_t rank) {
    member *m = &c->members[rank];
    uint32_t node_of[CLUSTER_MAX_RANKS];
    for (uint32_t r = 0; r < c->n_ranks; r++) node_of[r] = 100 + r / c->config.node_size;
    m->cluster = c;
    assert_ok(fcdp__topology_make(node_of, c->n_ranks, rank, &m->topology));
    fcdp_engine_config config = {
        .options = {.tau = c->config.tau[rank],
                    .restore = c->config.restore,
                    .prefetch = 2,
                    .device_budget_bytes = c->config.device_budget_bytes,
                    .host_budget_bytes = (size_t)1 << 30,
                    .timeout_s = c->config.timeout_s ? c->config.timeout_s : GIVE_UP_S},
        .driver = FCDP_DRIVER_SIM,
        .one_worker = getenv("CLUSTER_ONE_WORKER") != NULL,
    };
    assert_ok(fcdp_engine_create(&config, &m->engine));
    assert_ok(fcdp__driver_stream_create(m->engine->drv, &m->stream));
}

static void member_make_group(member *m, uint32_t g) {
    const group_spec *spec = &m->cluster->config.groups[g];
    char name[32];
    snprintf(name, sizeof name, "blocks.%u", g);
    assert_ok(fcdp_group_create(m->comm, name, spec->extents, spec->n_extents, &m->groups[g]));
    m->sink[g] = malloc(fcdp_group_bytes(m->groups[g]));
    for (uint32_t i = 0; i < spec->n_extents; i++) m->shards[g][i] = malloc(spec->extents[i].shard_bytes + 1);
}

static void node_start(cluster *c, uint32_t node) {
    member *first = &c->members[node * c->config.node_size];
    fcdp_shared_ticket account, host;
    for (uint32_t l = 0; l < c->config.node_size; l++) {
        member *m = &first[l];
        fcdp_transport transport = {m, hub_start, hub_wait, true};
        assert_ok(l ? fcdp_engine_account_join(m->engine, &account)
                    : fcdp_engine_account_create(m->engine, &account));
        assert_ok(fcdp_comm_create(m->engine, &m->topology, &transport, &m->comm));
        assert_ok(l ? fcdp_comm_host_join(m->comm, &host) : fcdp_comm_host_create(m->comm, &host));
    }
    for (uint32_t g = 0; g < c->config.n_groups; g++) {
        for (uint32_t l = 0; l < c->config.node_size; l++) member_make_group(&first[l], g);
        uint64_t offset;
        assert_ok(fcdp_group_carve(first->groups[g], &offset));
        for (uint32_t l = 0; l < c->config.node_size; l++)
            assert_ok(fcdp_group_attach(first[l].groups[g], offset));
    }
}

cluster *cluster_create(const cluster_config *config) {
    cluster *c = calloc(1, sizeof *c);
    c->config = *config;
    c->n_ranks = config->n_nodes * config->node_size;
    assert_true(c->n_ranks <= CLUSTER_MAX_RANKS);
    for (uint32_t i = 0; i < CLUSTER_MAX_RANKS; i++) {
        lane_init(&c->inter[i], config->n_nodes);
        lane_init(&c->intra[i], config->node_size);
    }
    for (uint32_t g = 0; g < config->n_groups; g++)
        for (uint32_t i = 0; i < config->groups[g].n_extents; i++) {
            c->truth[g][i] = malloc(cluster_extent_bytes(c, g, i) + 1);
            cluster_write(c, g, i);
        }
    for (uint32_t r = 0; r < c->n_ranks; r++) member_start(c, r);
    for (uint32_t node = 0; node < config->n_nodes; node++) node_start(c, node);
    return c;
}

static void member_end(member *m) {
    const cluster_config *config = &m->cluster->config;
    for (uint32_t g = 0; g < config->n_groups; g++) {
        for (uint32_t i = 0; i < config->groups[g].n_extents; i++) free(m->shards[g][i]);
        free(m->sink[g]);
    }
    fcdp__driver_stream_destroy(m->engine->drv, m->stream);
    fcdp_engine_destroy(m->engine);
}

void cluster_destroy(cluster *c) {
    for (uint32_t r = 0; r < c->n_ranks; r++)
        (void)!fcdp__driver_stream_sync(c->members[r].engine->drv, c->members[r].stream);
    for (uint32_t r = c->n_ranks; r-- > 0;) /* a node's leader last: it frees the blocks */
        for (uint32_t g = 0; g < c->config.n_groups; g++) fcdp_group_destroy(c->members[r].groups[g]);
    for (uint32_t r = c->n_ranks; r-- > 0;) member_end(&c->members[r]);
    for (uint32_t g = 0; g < c->config.n_groups; g++)
        for (uint32_t i = 0; i < c->config.groups[g].n_extents; i++) free(c->truth[g][i]);
    for (uint32_t i = 0; i < CLUSTER_MAX_RANKS; i++) {
        pthread_mutex_destroy(&c->inter[i].mutex);
        pthread_cond_destroy(&c->inter[i].changed);
        pthread_mutex_destroy(&c->intra[i].mutex);
        pthread_cond_destroy(&c->intra[i].changed);
    }
    free(c);
}

void assert_nothing_lives(void) {
    struct simgpu_live live;
    simgpu_live(&live);
    if (live.handles || live.ranges || live.maps || live.streams || live.events || live.registrations ||
        live.device_bytes)
        fail_msg("still held: %zu handles, %zu ranges, %zu maps, %zu streams, %zu events, %zu registrations, "
                 "%zu bytes",
                 live.handles, live.ranges, live.maps, live.streams, live.events, live.registrations,
                 live.device_bytes);
}
