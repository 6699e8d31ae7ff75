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

/* With the mutex: until *counter moves on from `seen`; false when broken (if that counts) or too late. */
static bool lane_await(lane *l, const uint64_t *counter, uint64_t seen, bool breakable) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += GIVE_UP_S;
    while (*counter == seen) {
        if (breakable && l->broken) return false;
        if (pthread_cond_timedwait(&l->changed, &l->mutex, &until) == ETIMEDOUT && *counter == seen)
            return false;
    }
    return true;
}

static fcdp_status lane_arrive(lane *l, uint32_t me, fcdp_dptr buffer, size_t bytes) {
    fcdp_status status = FCDP_OK;
    pthread_mutex_lock(&l->mutex);
    if (l->broken) {
        status = fcdp__fail(FCDP_ERR_PEER, "a peer has failed");
    } else {
        l->buffer[me] = buffer;
        l->bytes[me] = bytes;
        uint64_t met = l->n_met;
        if (++l->n_arrived == l->n) {
            l->n_arrived = 0;
            l->n_met++;
            pthread_cond_broadcast(&l->changed);
        } else if (!lane_await(l, &l->n_met, met, true)) {
            l->n_arrived--;
            status = fcdp__fail(l->broken ? FCDP_ERR_PEER : FCDP_ERR_TIMEOUT, "%u of %u came",
                                l->n_arrived + 1, l->n);
        }
    }
    pthread_mutex_unlock(&l->mutex);
    return status;
}

/* All have arrived, so all will leave: nobody fails between. */
static fcdp_status lane_leave(lane *l) {
    bool left = true;
    pthread_mutex_lock(&l->mutex);
    uint64_t parted = l->n_parted;
    if (++l->n_left == l->n) {
        l->n_left = 0;
        l->n_parted++;
        pthread_cond_broadcast(&l->changed);
    } else {
        left = lane_await(l, &l->n_parted, parted, false);
    }
    pthread_mutex_unlock(&l->mutex);
    return left ? FCDP_OK : fcdp__fail(FCDP_ERR_TIMEOUT, "a peer never left the collective");
}

static fcdp_status lane_all_gather(lane *l, uint32_t me, fcdp_dptr buffer, size_t bytes) {
    fcdp_status status = lane_arrive(l, me, buffer, bytes);
    if (status) return status;
    bool agree = true;
    for (uint32_t i = 0; i < l->n; i++) {
        agree = agree && l->bytes[i] == bytes;
        if (i != me && agree)
            memcpy((char *)buffer.addr + i * bytes, (char *)l->buffer[i].addr + i * bytes, bytes);
    }
    status = lane_leave(l);
    if (!status && !agree)
        status = fcdp__fail(FCDP_ERR_PEER, "ranks disagree on the bytes of a collective (%zu here)", bytes);
    return status;
}

static fcdp_status hub_all_gather(void *ctx, fcdp_lane which, fcdp_dptr buffer, size_t bytes) {
    member *m = ctx;
    cluster *c = m->cluster;
    bool inter = which == FCDP_LANE_INTER;
    bool fails = atomic_fetch_add(&c->n_calls, 1) + 1 == atomic_load(&c->fail_at);
    if (fails && atomic_load(&c->fault) == HUB_FAULT_ABSENT)
        return fcdp__fail(FCDP_ERR_TRANSPORT, "the test's fault: the call did nothing");
    fcdp_status status = inter
                             ? lane_all_gather(&c->inter[m->topology.local], m->topology.node, buffer, bytes)
                             : lane_all_gather(&c->intra[m->topology.node], m->topology.local, buffer, bytes);
    if (inter && !status) atomic_fetch_add(&c->inter_bytes_sent, (c->config.n_nodes - 1) * bytes);
    if (fails && !status) return fcdp__fail(FCDP_ERR_TIMEOUT, "the test's fault: the answer was lost");
    return status;
}

static void lanes_set_broken(lane *lanes, uint32_t n, bool broken) {
    for (uint32_t i = 0; i < n; i++) {
        pthread_mutex_lock(&lanes[i].mutex);
        lanes[i].broken = broken;
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
        .local = m->topology.local,
        .node_size = m->topology.node_size,
    };
    assert_ok(fcdp_engine_create(&config, &m->engine));
    fcdp_transport transport = {m, hub_all_gather};
    assert_ok(fcdp_comm_create(m->engine, &m->topology, &transport, &m->comm));
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
    fcdp_host_ticket ticket;
    assert_ok(fcdp_engine_host_create(first->engine, &ticket));
    for (uint32_t l = 1; l < c->config.node_size; l++)
        assert_ok(fcdp_engine_host_join(first[l].engine, &ticket));
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
