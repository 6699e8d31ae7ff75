/* cluster.c - the ranks: from creation to destruction, and what parameters hold. */
#include "tests/comm/cluster.h"

#include "comm/spilled.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "comm/internal.h"
#include "comm/moves.h"
#include "comm/tree.h"
#include "sim/gpu/simgpu.h"
#include "tests/comm/random.h"
#include "tests/tiering/described.h"

enum { PAGE_BYTES = 2 << 20, SHARD_ALIGN = 64, N_CONTENTS = 1 << 16, A_LONG_TIME_S = 120, RANGE_FACTOR = 4 };
enum { ALIKE_BYTES = 64 }; /* the last 8 of them are random, and the others of all of them the same */
enum { PACKED_ABOVE_PARTS = 36, PACKED_HALF_BYTES = 128 << 20 }; /* moves.c's */

/* ---- content ---- */

size_t cluster_extent_bytes(const cluster *c, uint32_t g, uint32_t i) {
    return c->n_ranks * c->config.groups[g].extents[i].shard_bytes;
}

const uint8_t *cluster_truth(const cluster *c, uint32_t g, uint32_t i, uint32_t version) {
    if (c->config.alike) return c->pool + (version * 67u + g * 15u + i * 3u) * ALIKE_BYTES % N_CONTENTS;
    return c->pool + (version * 4099u + g * 911u + i * 127u) % N_CONTENTS;
}

const uint8_t *cluster_gathered(const cluster *c, const fcdp_group *group, uint32_t g, uint32_t i,
                                uint32_t version, uint8_t *room) {
    const uint8_t *truth = cluster_truth(c, g, i, version);
    if (!fcdp__extent_rounds(group, i)) return truth;
    size_t bytes = c->config.groups[g].extents[i].shard_bytes;
    fcdp_number number = (fcdp_number)group->numbers[i];
    uint8_t *wire = malloc(fcdp__int8_bound(bytes, number) + 1);
    for (uint32_t r = 0; r < c->n_ranks; r++) {
        size_t n = fcdp__int8_encode(truth + r * bytes, bytes, number, wire, NULL);
        MUST(!fcdp__int8_decode(room + r * bytes, bytes, number, wire, n));
    }
    free(wire);
    return room;
}

static void pool_make(cluster *c) {
    test_random random = {c->n_ranks};
    size_t bytes = 0;
    for (uint32_t g = 0; g < c->config.n_groups; g++)
        for (uint32_t i = 0; i < c->config.groups[g].n_extents; i++)
            if (cluster_extent_bytes(c, g, i) > bytes) bytes = cluster_extent_bytes(c, g, i);
    bytes = fcdp__round_up(bytes + N_CONTENTS, sizeof(uint64_t));
    c->pool = malloc(bytes);
    for (size_t k = 0; k < bytes; k += sizeof(uint64_t)) {
        uint64_t word = random_next(&random);
        if (c->config.alike && (k + sizeof word) % ALIKE_BYTES) word = 0x3f8147aebf012345u;
        memcpy(c->pool + k, &word, sizeof word);
    }
}

size_t cluster_region_bytes(const cluster_config *config, uint32_t g) {
    fcdp_layout *layout;
    assert_ok(fcdp__layout_create(config->groups[g].extents, config->groups[g].n_extents,
                                  config->n_nodes * config->node_size, config->node_size, &layout));
    size_t bytes = layout->bytes;
    fcdp__layout_destroy(layout);
    return bytes;
}

size_t cluster_most_pages(const cluster_config *config) {
    size_t pages[CLUSTER_MAX_GROUPS], largest = 0, sum = 0;
    for (uint32_t g = 0; g < config->n_groups; g++) {
        pages[g] = fcdp__round_up(cluster_region_bytes(config, g), PAGE_BYTES) / PAGE_BYTES;
        if (pages[g] > largest) largest = pages[g];
    }
    for (uint32_t g = 0; g < config->n_groups; g++) {
        size_t most = RANGE_FACTOR * pages[g];
        sum += most < largest ? most : largest;
    }
    return sum;
}

/* ---- life ---- */

/* Which group, and where in its region. */
static uint64_t place_of(const void *owner, fcdp_dptr at) {
    const member *m = owner;
    for (uint32_t g = 0; g < m->cluster->config.n_groups; g++) {
        const fcdp_region *region = m->groups[g] ? m->groups[g]->region : NULL;
        uint64_t base = region ? fcdp__region_base(region).addr : 0;
        if (region && at.addr >= base && at.addr < base + m->groups[g]->layout->bytes)
            return (uint64_t)(g + 1) << 48 | (at.addr - base);
    }
    return 0;
}

/* A machine of two NUMA nodes, of which the simulated driver says that its device is on one. */
static void machine_make(void) {
    assert_int_equal(described_make(NULL), 0);
    described_put("/sys/devices/system/node/online", "0-1\n");
    setenv("FCDP_SIM_ROOT", described_root, 1);
}

static void machine_remove(void) {
    unsetenv("FCDP_SIM_ROOT");
    unsetenv("FCDP_SIM_NUMA");
    assert_int_equal(described_remove(NULL), 0);
}

static void member_start(cluster *c, uint32_t rank) {
    member *m = &c->members[rank];
    const cluster_config *of = &c->config;
    uint32_t node_of[CLUSTER_MAX_RANKS];
    for (uint32_t r = 0; r < c->n_ranks; r++) node_of[r] = 100 + r / of->node_size;
    m->cluster = c;
    pthread_mutex_init(&m->mutex, NULL);
    assert_ok(fcdp__topology_make(node_of, c->n_ranks, rank, &m->topology));
    fcdp_engine_config config = {
        .options = {.tau = of->tau[rank],
                    .policy = of->next_use ? FCDP_POLICY_NEXT_USE : FCDP_POLICY_TAU,
                    .trace = getenv("TEST_TRACE") != NULL,
                    .trace_bytes = 1 << 20,
                    .coalesce_bytes = of->coalesce_bytes,
                    .restore = of->restore,
                    .host_copies = of->host_copies ? FCDP_HOST_COPIES_NUMA : FCDP_HOST_COPIES_NODE,
                    .pin_cpu = of->host_copies ? FCDP_PIN_CPU_OFF : FCDP_PIN_CPU_AUTO,
                    .mapping = of->mapping,
                    .agree = of->agree,
                    .prefetch = of->prefetch,
                    .codec = of->rounds    ? FCDP_CODEC_INT8
                             : !of->deltas ? FCDP_CODEC_NONE
                             : of->by_gain ? FCDP_CODEC_AUTO
                                           : FCDP_CODEC_DELTA,
                    .codec_threads = 3,
                    .device_budget_bytes = of->device_budget_bytes,
                    .host_budget_bytes = (size_t)1 << 30,
                    .timeout_s = of->timeout_s},
        .driver = FCDP_DRIVER_SIM,
        .host_computes = of->host_computes,
        .storages_raise = true,
    };
    if (of->cache_dir)
        snprintf(config.options.cache_dir, sizeof config.options.cache_dir, "%s",
                 rank && rank == of->uncached_rank ? "/dev/null/none" : of->cache_dir);
    config.options.cache_bytes = of->cache_bytes;
    if (of->spill_dir)
        snprintf(config.options.spill_dir, sizeof config.options.spill_dir, "%s", of->spill_dir);
    if (of->host_copies) setenv("FCDP_SIM_NUMA", m->topology.local % 2 ? "1" : "0", 1);
    assert_ok(fcdp_engine_create(&config, &m->engine));
    assert_ok(fcdp__driver_stream_create(m->engine->drv, &m->stream));
    char name[32];
    snprintf(name, sizeof name, "compute of rank %u", rank);
    fcdp__driver_stream_name(m->engine->drv, m->stream, name);
}

static void member_make_shards(member *m) {
    const cluster_config *config = &m->cluster->config;
    size_t at = 0;
    for (uint32_t g = 0; g < config->n_groups; g++)
        for (uint32_t i = 0; i < config->groups[g].n_extents; i++) {
            m->shard_at[g][i] = at;
            at += fcdp__round_up(config->groups[g].extents[i].shard_bytes + 1, SHARD_ALIGN);
        }
    m->shards_bytes = fcdp__round_up(at, PAGE_BYTES);
    if (config->host_computes) {
        m->shards = malloc(m->shards_bytes);
    } else {
        fcdp_driver *drv = m->engine->drv;
        assert_ok(fcdp__vrange_create(drv, m->shards_bytes, &m->shards_range));
        assert_ok(fcdp__driver_phys_create(drv, m->shards_bytes, &m->shards_block));
        assert_ok(fcdp__vrange_map(m->shards_range, m->shards_block, m->shards_bytes));
        m->shards = (uint8_t *)(uintptr_t)fcdp__vrange_base(m->shards_range).addr;
    }
    memset(m->shards, 0x3C, m->shards_bytes);
}

/* A fault of the test's may hit here too: once. */
static void member_free_shards(member *m) {
    if (!m->shards_range) {
        free(m->shards);
        return;
    }
    fcdp__vrange_destroy(m->shards_range);
    if (fcdp__driver_phys_release(m->engine->drv, m->shards_block) &&
        fcdp__driver_phys_release(m->engine->drv, m->shards_block))
        print_message("the shards of rank %u: %s\n", m->topology.rank, fcdp_error_text());
}

static void member_make_group(member *m, uint32_t g) {
    const group_spec *spec = &m->cluster->config.groups[g];
    char name[32];
    snprintf(name, sizeof name, "blocks.%u", g);
    if (m->cluster->config.has_root && g == 0) name[0] = '\0';
    assert_ok(fcdp_group_create(m->comm, name, spec->extents, spec->n_extents, &m->groups[g]));
    fcdp_tier tier = m->cluster->config.tiers[g];
    fcdp_group_set_tier(m->groups[g], tier == FCDP_TIER_MAPPED ? FCDP_TIER_POLICY : tier);
    uint8_t numbers[CLUSTER_MAX_EXTENTS];
    for (uint32_t i = 0; i < spec->n_extents; i++) numbers[i] = (uint8_t)((g + i + 3) % FCDP_N_NUMBERS);
    fcdp_group_set_numbers(m->groups[g], numbers);
    fcdp_group_join(m->groups[g], m->tree);
}

static void node_start(cluster *c, uint32_t node) {
    member *first = &c->members[node * c->config.node_size];
    fcdp_shared_ticket account, host;
    for (uint32_t l = 0; l < c->config.node_size; l++) {
        member *m = &first[l];
        hub_port_init(&m->port, &c->hub, &m->topology, m->engine->drv, place_of, m);
        fcdp_transport transport = hub_transport(&m->port);
        assert_ok(l ? fcdp_engine_account_join(m->engine, &account)
                    : fcdp_engine_account_create(m->engine, &account));
        assert_ok(fcdp_comm_create(m->engine, &m->topology, &transport, &m->comm));
        if (c->config.codec_is_slow)
            m->comm->delta_rates = (fcdp_delta_rates){.link_ns = 1, .encode_ns = 1e12, .decode_ns = 1e12};
        assert_ok(l ? fcdp_comm_host_join(m->comm, &host) : fcdp_comm_host_create(m->comm, &host));
        assert_ok(fcdp_tree_create(m->comm, &m->tree));
        member_make_shards(m);
    }
    for (uint32_t g = 0; g < c->config.n_groups; g++) {
        for (uint32_t l = 0; l < c->config.node_size; l++) member_make_group(&first[l], g);
        if (c->config.spilled[g]) {
            for (uint32_t l = 0; l < c->config.node_size; l++)
                assert_ok(fcdp_group_attach_file(first[l].groups[g]));
            continue;
        }
        uint64_t offset;
        assert_ok(fcdp_group_host_alloc(first->groups[g], &offset));
        for (uint32_t l = 0; l < c->config.node_size; l++)
            assert_ok(fcdp_group_attach(first[l].groups[g], offset));
        for (uint32_t l = 0; l < c->config.node_size && c->config.tiers[g] == FCDP_TIER_MAPPED; l++)
            assert_ok(fcdp_group_map_host(first[l].groups[g]));
    }
    for (uint32_t l = 0; l < c->config.node_size; l++)
        assert_ok(fcdp_tree_set_groups(first[l].tree, first[l].groups, c->config.n_groups));
}

cluster *cluster_create(const cluster_config *config) {
    cluster *c = calloc(1, sizeof *c);
    c->config = *config;
    if (c->config.timeout_s <= 0) c->config.timeout_s = A_LONG_TIME_S;
    c->n_ranks = config->n_nodes * config->node_size;
    fcdp__packed_above_parts = config->packed_half_bytes ? 0 : PACKED_ABOVE_PARTS;
    fcdp__packed_half_bytes = config->packed_half_bytes ? config->packed_half_bytes : PACKED_HALF_BYTES;
    assert_true(c->n_ranks <= CLUSTER_MAX_RANKS);
    pool_make(c);
    hub_init(&c->hub, config->n_nodes, config->node_size);
    council_init(&c->council, c->n_ranks, c->config.timeout_s);
    if (config->host_copies) machine_make();
    for (uint32_t r = 0; r < c->n_ranks; r++) member_start(c, r);
    if (config->host_copies) machine_remove();
    for (uint32_t node = 0; node < config->n_nodes; node++) node_start(c, node);
    return c;
}

/* The stream first, since what it computes waits for what a group that goes away would bring. */
static void member_end(member *m) {
    for (uint32_t g = 0; g < m->cluster->config.n_groups; g++) fcdp_group_destroy(m->groups[g]);
    fcdp_tree_destroy(m->tree);
    if (fcdp__driver_stream_sync(m->engine->drv, m->stream))
        print_message("at the end of rank %u: %s\n", m->topology.rank, fcdp_error_text());
    if (fcdp_engine_drain(m->engine)) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    member_free_shards(m);
    fcdp__driver_stream_destroy(m->engine->drv, m->stream);
    fcdp_engine_destroy(m->engine);
    hub_port_destroy(&m->port);
    pthread_mutex_destroy(&m->mutex);
}

/* Ranks that raised are processes that end all at once; here they are taken down one after the other. */
void cluster_destroy(cluster *c) {
    for (uint32_t r = 0; r < c->n_ranks && c->council.n_left; r++) hub_port_exit(&c->members[r].port);
    /* a node's leader last: it frees the blocks */
    for (uint32_t r = c->n_ranks; r-- > 0;) member_end(&c->members[r]);
    bool gave_up = c->hub.gave_up;
    hub_destroy(&c->hub);
    council_destroy(&c->council);
    free(c->pool);
    free(c);
    if (gave_up) fail_msg("a collective that could not end was not aborted");
}

typedef struct running {
    member *m;
    void (*body)(member *m, void *arg);
    void *arg;
} running;

static void *running_main(void *arg) {
    running *r = arg;
    r->body(r->m, r->arg);
    return NULL;
}

void cluster_run(cluster *c, void (*body)(member *m, void *arg), void *arg) {
    pthread_t threads[CLUSTER_MAX_RANKS];
    running ranks[CLUSTER_MAX_RANKS];
    for (uint32_t r = 0; r < c->n_ranks; r++) {
        ranks[r] = (running){&c->members[r], body, arg};
        pthread_create(&threads[r], NULL, running_main, &ranks[r]);
    }
    for (uint32_t r = 0; r < c->n_ranks; r++) pthread_join(threads[r], NULL);
}

/* ---- checks ---- */

/* Of every `stride`-th rank from `first` on. */
static void launches_check(const cluster *c, uint32_t first, uint32_t stride, bool whole) {
    const hub_port *longest = &c->members[first].port;
    for (uint32_t r = first; r < c->n_ranks; r += stride)
        if (c->members[r].port.n_launches > longest->n_launches) longest = &c->members[r].port;
    for (uint32_t r = first; r < c->n_ranks; r += stride) {
        const hub_port *port = &c->members[r].port;
        for (size_t k = 0; k < port->n_launches; k++) {
            const hub_launch *a = &port->launches[k], *b = &longest->launches[k];
            uint64_t group_a = a->place >> 48, group_b = b->place >> 48;
            if (a->lane != b->lane || a->n_parts != b->n_parts || a->bytes != b->bytes || group_a != group_b)
                fail_msg("collective %zu: rank %u launched lane %d, group %d, %zu bytes, rank %u lane %d, "
                         "group %d, %zu",
                         k, r, (int)a->lane, (int)group_a - 1, a->bytes, longest->topology.rank, (int)b->lane,
                         (int)group_b - 1, b->bytes);
        }
        if (whole) assert_int_equal(port->n_launches, longest->n_launches);
    }
}

/* With FCDP_CODEC=auto, the members of each lane between the nodes choose by what they measure there. */
void cluster_check_launches(const cluster *c, bool whole) {
    uint32_t n_lanes = c->config.by_gain ? c->config.node_size : 1;
    for (uint32_t lane = 0; lane < n_lanes; lane++) launches_check(c, lane, n_lanes, whole);
    assert_false(c->hub.disagrees);
    assert_false(c->council.disagrees);
}

void assert_nobody_spun(void) {
    static struct simgpu_blocking rows[2048];
    size_t n = simgpu_blocking_list(rows, 2048);
    for (size_t i = 0; i < n && i < 2048; i++)
        if (rows[i].spins)
            fail_msg("%lu of %lu waits may spin: %s by %s", rows[i].spins, rows[i].calls, rows[i].entry,
                     rows[i].site);
}

void assert_nothing_lives_after(const char *what, long n) {
    struct simgpu_live live;
    struct simgpu_unordered unordered;
    simgpu_live(&live);
    simgpu_unordered(&unordered);
    if (unordered.text[0]) fail_msg("%s %ld: %s", what, n, unordered.text);
    if (live.handles || live.ranges || live.maps || live.streams || live.events || live.registrations ||
        live.modules || live.device_bytes)
        fail_msg("%s %ld: still held: %zu handles, %zu ranges, %zu maps, %zu streams, %zu events, "
                 "%zu registrations, %zu modules, %zu bytes",
                 what, n, live.handles, live.ranges, live.maps, live.streams, live.events, live.registrations,
                 live.modules, live.device_bytes);
}

void assert_nothing_lives(void) {
    assert_nothing_lives_after("run", 1);
}
