/* Gathers of differences: fewer bytes cross, and whatever becomes of a base or of what was sent, every byte
 * that a use sees is right. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/delta_exchange.h"
#include "tests/comm/engine_world.h"
#include "tests/comm/random.h"
#include "tests/log_text.h"

enum { N_GROUPS = 4, N_STEPS = 4 };
static uint32_t n_groups = N_GROUPS;
static int n_steps = N_STEPS;
static bool forwards_alone; /* no backward restores a group, for which ranks that keep it would store it */
static bool abreast;        /* hub.h */

/* What all tests run in, one after the other. */
typedef struct world {
    const char *name;
    bool on_device; /* the model computes there, whose memory is not the host's */
    fcdp_restore_mode restore;
    unsigned n_parts; /* that come to the device before the verdict */
} world;
static const world worlds[] = {{"on the host", false, FCDP_RESTORE_WHOLE, 0},
                               {"on a device", true, FCDP_RESTORE_WHOLE, FCDP_DELTA_MOST_PARTS},
                               {"on the host, by slices", false, FCDP_RESTORE_SLICE, 0},
                               {"on a device, by slices", true, FCDP_RESTORE_SLICE, 1}};
static const world *here;

static cluster_config make_config(uint32_t n_nodes, uint32_t node_size) {
    cluster_config config = {.n_nodes = n_nodes,
                             .node_size = node_size,
                             .n_groups = n_groups,
                             .restore = here->restore,
                             .mapping = FCDP_MAPPING_SLOTS,
                             .prefetch = 1,
                             .host_computes = !here->on_device,
                             .deltas = true,
                             .alike = true,
                             .device_budget_bytes = 40 * (size_t)PAGE_BYTES};
    for (uint32_t g = 0; g < n_groups; g++) /* trainable, and in half of them frozen beside it */
        config.groups[g] = (group_spec){2, {{30000 + 100 * g, 1}, {g == N_GROUPS - 1 ? 6001 : 6004, g % 2}}};
    return config;
}

/* What happens to a rank in a forward, once all ranks have agreed: no rank restores what host memory has. Or
 * before, where the groups cross together then. */
typedef struct mishap mishap;
struct mishap {
    void (*happens)(const member *m, const mishap *what);
    int step;
    uint32_t rank, group; /* of group 2 or later: those before have begun by then */
    size_t byte;          /* of a piece of extent 0, which is the rank's own, or `ahead` nodes further */
    uint32_t ahead;
    bool before;
    pthread_barrier_t barrier; /* no rank restores what host memory has from there on to the agreement */
};

/* All ranks together: nothing of the passes before is under way. */
static void meet(const member *m, mishap *what) {
    MUST(!fcdp__driver_stream_sync(m->engine->drv, m->stream));
    MUST(!fcdp_engine_drain(m->engine));
    pthread_barrier_wait(&what->barrier);
}

static void base_flip(const member *m, const mishap *what) {
    const fcdp_group *group = m->groups[what->group];
    uint32_t node = (m->topology.node + what->ahead) % m->topology.n_nodes;
    fcdp_piece place = fcdp__plan_shard(group->layout, &m->topology, 0, node, m->topology.local);
    uint8_t *host = fcdp__host_data(group->block);
    host[place.offset_bytes + what->byte % place.bytes] ^= 1;
}

/* What the device encodes from. */
static void own_base_flip(const member *m, const mishap *what) {
    const fcdp_group *group = m->groups[what->group];
    size_t byte = what->byte % group->layout->extents[0].shard_bytes;
    *((uint8_t *)(uintptr_t)fcdp__own_base_at(group, 0).addr + byte) ^= 1; /* the simulated device's */
}

/* Something else takes pages until the own bases' have gone. */
static void own_bases_push_out(const member *m, const mishap *what) {
    enum { MOST = 8 };
    fcdp_pool *pool = m->engine->pool;
    const fcdp_own_bases *own = &m->comm->set->own_bases;
    fcdp_phys handles[MOST];
    size_t n_pages[MOST], n_budget;
    int n = 0;
    (void)what;
    MUST(own->pages.range);
    for (; own->pages.range; n++) {
        MUST(n < MOST);
        n_pages[n] = fcdp__pool_spare_pages(pool, &n_budget) + 1;
        MUST(!fcdp__pool_take_handle(pool, FCDP_HOLDER_GATHERED, n_pages[n], &handles[n]));
    }
    while (n-- > 0) fcdp__pool_give_handle(pool, FCDP_HOLDER_GATHERED, n_pages[n], handles[n]);
}

/* Between two steps. */
static void engine_sleep(const member *m, const mishap *what) {
    (void)what;
    MUST(!fcdp_engine_sleep(m->engine, m->stream));
    MUST(!m->comm->set->own_bases.pages.range);
    fcdp_engine_wake(m->engine);
}

/* As a group that has been made since. */
static void own_place_lose(const member *m, const mishap *what) {
    const fcdp_own_base *half_frozen = m->groups[0]->own.extents;
    MUST(half_frozen[0].has_place && !half_frozen[1].has_place);
    m->groups[what->group]->own.generation = 0;
}

static void job_body(member *m, void *arg) {
    mishap *what = arg;
    for (uint32_t g = 0; g < n_groups; g++) MUST(!member_step(m, g, all_extents, true));
    for (int pass = 0; pass < 2 * n_steps; pass++) {
        bool back = pass % 2;
        if (!back)
            member_begin_forward(m);
        else if (!forwards_alone)
            member_begin_backward(m);
        for (uint32_t k = 0; k < n_groups && !(back && forwards_alone); k++) {
            uint32_t g = back ? n_groups - 1 - k : k;
            bool happens = what && k == 0 && pass == 2 * what->step && what->rank == m->topology.rank;
            if (what && (what->before || here->on_device) && k == 0) meet(m, what);
            if (happens && what->before) what->happens(m, what);
            MUST(!member_unshard(m, g, back ? UNSHARD_BACKWARD : UNSHARD_FORWARD));
            if (happens && !what->before) what->happens(m, what);
            MUST(!member_use(m, g));
            MUST(!member_reshard(m, g, false));
        }
        if (back) member_step_trainable(m);
    }
    MUST(!fcdp__driver_stream_sync(m->engine->drv, m->stream));
    MUST(!m->wrong[0]);
}

static void forward_alone(member *m, uint32_t n_groups) {
    member_begin_forward(m);
    for (uint32_t g = 0; g < n_groups; g++) {
        MUST(!member_unshard(m, g, UNSHARD_FORWARD));
        MUST(!member_use(m, g));
        MUST(!member_reshard(m, g, false));
    }
}

/* Then one group ends, and the others are gathered without it. */
static void a_group_ends(member *m, void *arg) {
    job_body(m, arg);
    fcdp_group_destroy(m->groups[N_GROUPS - 1]);
    m->groups[N_GROUPS - 1] = NULL;
    forward_alone(m, N_GROUPS - 1);
    MUST(!fcdp__driver_stream_sync(m->engine->drv, m->stream));
    MUST(!m->wrong[0]);
}

/* Of two extents that are trainable, one changes in each step. */
static void parts_change(member *m, void *arg) {
    static const uint8_t first[CLUSTER_MAX_EXTENTS] = {1};
    (void)arg;
    for (uint32_t g = 0; g < N_GROUPS; g++) MUST(!member_step(m, g, all_extents, true));
    for (int step = 0; step < n_steps; step++) {
        forward_alone(m, N_GROUPS);
        for (uint32_t g = 0; g < N_GROUPS; g++) MUST(!member_step(m, g, first, true));
    }
    MUST(!fcdp__driver_stream_sync(m->engine->drv, m->stream));
    MUST(!m->wrong[0]);
}

static void (*job)(member *m, void *arg) = job_body;

typedef struct outcome {
    uint64_t sent, n_deltas, n_whole, stored; /* bytes, gathers, bytes from devices */
    uint64_t n_by_device;                     /* of a rank's differences */
    /* Of the groups' last gathers: whose base had a name; whose shards were fetched beside the turn */
    uint64_t n_named, n_beside;
    uint64_t n_parts; /* and which came to the device by so many parts before the verdict */
} outcome;

static outcome run(const cluster_config *config, mishap *what, long spoil_at, size_t spoil_byte) {
    cluster *c = start(config);
    outcome result = {0};
    c->hub.spoil_byte = spoil_byte;
    atomic_store(&c->hub.spoil_at, spoil_at);
    c->hub.abreast = abreast;
    cluster_run(c, job, what);
    cluster_check_launches(c, true);
    EVERY_MEMBER(c, m) {
        fcdp_engine_stats stats;
        fcdp_engine_stats_get(m->engine, &stats);
        result.sent += stats.gather.inter_bytes_sent;
        result.n_deltas += stats.n_delta_gathers;
        result.n_whole += stats.n_delta_whole;
        result.n_by_device += stats.n_delta_by_device;
        result.stored += stats.moves.d2h_bytes;
        for (uint32_t g = 0; g < N_GROUPS; g++) {
            const fcdp_delta *last = m->groups[g] ? m->groups[g]->delta.last : NULL;
            result.n_named += last && last->base_name;
            result.n_beside += last && last->fetches_beside;
            result.n_parts += last && last->copies ? last->n_parts : 0;
        }
    }
    assert_int_equal(result.sent, c->hub.inter_bytes_sent);
    end(c);
    return result;
}

/* Groups of which all that is trainable crosses in one gather, from the second step on. */
static cluster_config together(cluster_config config) {
    config.coalesce_bytes = 8 << 20;
    return config;
}

/* Of the ways of a test, all; with TEST_COARSER the first and one more, or the first alone. */
static int ways_apart(void) {
    const char *coarser = getenv("TEST_COARSER");
    return !coarser ? 1 : atoi(coarser) < 32 ? 5 : 8;
}

static const uint32_t shapes[][2] = {{2, 1}, {2, 2}, {3, 2}};

static void test_fewer_bytes_cross(void **state) {
    (void)state;
    for (int way = 0; way < 6; way += ways_apart()) {
        cluster_config config = make_config(shapes[way % 3][0], shapes[way % 3][1]);
        config.mapping = way < 3 ? FCDP_MAPPING_SLOTS : FCDP_MAPPING_EXACT;
        for (uint32_t r = 0; r < CLUSTER_MAX_RANKS; r++) config.tau[r] = way % 2;
        outcome differences = run(&config, NULL, 0, 0);
        config.alike = false;
        outcome different = run(&config, NULL, 0, 0);
        config.deltas = false;
        outcome whole = run(&config, NULL, 0, 0);
        print_message("%u x %u: %llu bytes whole, %llu as differences\n", config.n_nodes, config.node_size,
                      (unsigned long long)whole.sent, (unsigned long long)differences.sent);
        /* all but those of the first step, which have no base; in three of them one value of eight differs */
        uint64_t n_ranks = config.n_nodes * config.node_size, n = n_ranks * N_GROUPS * (N_STEPS - 1);
        assert_int_equal(differences.n_deltas, n);
        assert_int_equal(differences.n_whole, 0);
        /* the host those of the second step, behind which there are own bases, unless the base is there; then
         * those of the last group whose base is not aligned to its numbers */
        bool keeps_base = way % 2 && (config.node_size == 1 || here->restore == FCDP_RESTORE_SLICE);
        uint64_t n_by_host = keeps_base ? n_ranks - (n_ranks + 3) / 4 : n_ranks * N_GROUPS;
        assert_int_equal(differences.n_by_device, here->on_device ? n - n_by_host : 0);
        assert_true(differences.sent < whole.sent * 55 / 100);
        /* a base in host memory that other ranks have stored in part is read for its name */
        bool of_others = !here->on_device && here->restore == FCDP_RESTORE_SLICE && config.node_size > 1 &&
                         way % 2 == 0;
        assert_int_equal(differences.n_named, of_others ? 0 : n_ranks * N_GROUPS);
        assert_int_equal(differences.n_beside, here->on_device ? n_ranks * N_GROUPS : 0);
        assert_int_equal(differences.n_parts, n_ranks * N_GROUPS * here->n_parts);
        assert_int_equal(different.n_named, 0);
        assert_int_equal(different.n_deltas, 0);
        assert_int_equal(different.n_whole, n);
        assert_true(different.sent <= whole.sent + n * (config.n_nodes - 1) * 64);
        assert_int_equal(whole.n_deltas + whole.n_whole, 0);
        /* on a device that of the first step: the host has the others, which crossed whole, too */
        if (here->on_device && way % 2 == 0) {
            assert_int_equal(differences.stored, different.stored);
            assert_true(differences.stored < whole.stored / (N_STEPS - 1));
        }
    }
}

/* Where a rank is alone on its node, or stores slices, and keeps the groups, host memory has no base for the
 * first gather. */
static void test_groups_that_cross_together_send_differences(void **state) {
    (void)state;
    for (int way = 0; way < 6; way += ways_apart()) {
        cluster_config config = together(make_config(shapes[way % 3][0], shapes[way % 3][1]));
        config.mapping = way < 3 ? FCDP_MAPPING_SLOTS : FCDP_MAPPING_EXACT;
        for (uint32_t r = 0; r < CLUSTER_MAX_RANKS; r++) config.tau[r] = way % 2;
        uint64_t n_ranks = config.n_nodes * config.node_size, n = n_ranks * (N_STEPS - 1);
        bool stores_kept = config.node_size > 1 && here->restore == FCDP_RESTORE_WHOLE;
        uint64_t baseless = !stores_kept && way % 2 ? n_ranks : 0;
        outcome differences = run(&config, NULL, 0, 0);
        config.alike = false;
        outcome different = run(&config, NULL, 0, 0);
        config.deltas = false;
        outcome whole = run(&config, NULL, 0, 0);
        print_message("%u x %u, together: %llu bytes whole, %llu as differences\n", config.n_nodes,
                      config.node_size, (unsigned long long)whole.sent, (unsigned long long)differences.sent);
        assert_int_equal(differences.n_deltas, n - baseless);
        assert_int_equal(differences.n_whole, baseless);
        assert_true(differences.sent < whole.sent * (baseless ? 65 : 55) / 100);
        assert_int_equal(different.n_deltas, 0);
        assert_int_equal(different.n_whole, n);
        assert_true(different.sent <= whole.sent + n * (config.n_nodes - 1) * 64);
    }
}

/* What the device encodes has nothing of the host's copy of this rank's own piece, which no other reads. */
static void test_a_changed_base_crosses_whole(void **state) {
    (void)state;
    test_random random = {random_seed("test_a_changed_base_crosses_whole", 1)};
    for (int round = 0; round < (getenv("TEST_COARSER") ? 3 : 12); round++) {
        cluster_config config = make_config(shapes[round % 3][0], shapes[round % 3][1]);
        if (round % 2) config = together(config);
        uint32_t n_ranks = config.n_nodes * config.node_size;
        mishap what = {.happens = base_flip,
                       .step = 1 + (int)random_below(&random, 2),
                       .rank = random_below(&random, n_ranks),
                       .group = 2 + random_below(&random, N_GROUPS - 2),
                       .byte = random_next(&random),
                       .ahead = random_below(&random, config.n_nodes),
                       .before = round % 2};
        pthread_barrier_init(&what.barrier, NULL, n_ranks);
        outcome result = run(&config, &what, 0, 0);
        pthread_barrier_destroy(&what.barrier);
        bool is_read = !(here->on_device && round % 2 == 0 && what.step == 2 && what.ahead == 0);
        /* to all members of the rank's lane, once */
        assert_int_equal(result.n_whole, is_read ? config.n_nodes : 0);
        assert_int_equal(result.n_deltas + result.n_whole,
                         (uint64_t)n_ranks * (round % 2 ? 1 : N_GROUPS) * (N_STEPS - 1));
    }
}

/* Of two gathers that use the same host memory, the second fetches its shards while what the first has
 * brought is still copied to the device, and they are of different sizes. As many are ahead as take turns in
 * it, and there are more groups. */
static void test_gathers_of_other_sizes_follow(void **state) {
    (void)state;
    enum { N_TURNS = FCDP_DELTA_N_ROOMS * FCDP_N_INTER };
    n_groups = N_TURNS + 2;
    for (int way = 0; way < 6; way += ways_apart()) {
        cluster_config config = make_config(shapes[way % 3][0], shapes[way % 3][1]);
        config.prefetch = N_TURNS;
        for (uint32_t r = 0; r < CLUSTER_MAX_RANKS; r++) config.tau[r] = way / 3;
        for (uint32_t g = 0; g < n_groups; g++)
            config.groups[g].extents[0].shard_bytes = (uint32_t)way % 2 == g / 2 ? 30000 : 50000;
        outcome result = run(&config, NULL, 0, 0);
        assert_int_equal(result.n_whole, 0);
    }
    n_groups = N_GROUPS;
}

/* The gather of all of them is ended by the next one. */
static void test_a_group_ends_behind_a_gather_together(void **state) {
    (void)state;
    for (int way = 0; way < 3; way++) {
        cluster_config config = together(make_config(shapes[way][0], shapes[way][1]));
        job = a_group_ends;
        outcome result = run(&config, NULL, 0, 0);
        job = job_body;
        assert_int_equal(result.n_deltas, config.n_nodes * config.node_size * N_STEPS);
        assert_int_equal(result.n_whole, 0);
    }
}

/* A group that is kept has its base on the device, from where it comes with the shards. */
static void test_a_base_on_the_device_is_there_before_it_is_read(void **state) {
    (void)state;
    n_steps = 6;
    for (int way = 0; way < 6; way += ways_apart()) {
        cluster_config config = make_config(shapes[way % 3][0], shapes[way % 3][1]);
        for (uint32_t r = 0; r < CLUSTER_MAX_RANKS; r++) config.tau[r] = way / 3 == 0;
        job = parts_change;
        outcome result = run(&config, NULL, 0, 0);
        job = job_body;
        assert_int_equal(result.n_whole, 0);
        assert_true(result.n_deltas > 0);
    }
    n_steps = N_STEPS;
}

/* The first rank of a node stores its slices, and the second one keeps the groups on its device, where it has
 * the base of its lane. On a device all ranks store the next gather, as the host has it; where the host
 * computes, the second rank never does. (A rank that is ahead would store the next gather before the other
 * looks, which then finds a later word, and takes what is there if all members have the same.) */
static void test_what_a_node_has_not_stored_is_no_base(void **state) {
    (void)state;
    if (here->restore != FCDP_RESTORE_SLICE) skip(); /* a rank reads what it has stored itself */
    for (int way = 0; way < 2; way++) {
        cluster_config config = make_config(2 + way, 2);
        for (uint32_t r = 0; r < CLUSTER_MAX_RANKS; r++) config.tau[r] = r % 2;
        forwards_alone = abreast = true;
        outcome result = run(&config, NULL, 0, 0);
        forwards_alone = abreast = false;
        uint64_t n = (uint64_t)config.n_nodes * N_GROUPS, n_baseless = here->on_device ? 1 : N_STEPS - 1;
        assert_int_equal(result.n_whole, n * n_baseless);
        assert_int_equal(result.n_deltas, n * (2 * (N_STEPS - 1) - n_baseless));
    }
}

/* Of the rank to which it happens: how many of its gathers the host encodes that the device would have. */
static void own_bases_go(void (*happens)(const member *m, const mishap *what), bool before, int of_steps,
                         uint64_t n_lost, bool crosses_whole) {
    test_random random = {random_seed("own_bases_go", 1)};
    for (int round = 0; round < 6; round += ways_apart()) {
        cluster_config config = make_config(shapes[round % 3][0], shapes[round % 3][1]);
        uint32_t n_ranks = config.n_nodes * config.node_size;
        mishap what = {.happens = happens,
                       .step = 2,
                       .rank = random_below(&random, n_ranks),
                       .group = 2,
                       .byte = random_next(&random),
                       .before = before};
        pthread_barrier_init(&what.barrier, NULL, n_ranks);
        n_steps = of_steps;
        outcome result = run(&config, &what, 0, 0);
        pthread_barrier_destroy(&what.barrier);
        assert_int_equal(result.n_by_device, (uint64_t)n_ranks * N_GROUPS * (uint32_t)(n_steps - 2) - n_lost);
        assert_int_equal(result.n_whole, crosses_whole ? config.n_nodes : 0);
        assert_int_equal(result.n_deltas + result.n_whole,
                         (uint64_t)n_ranks * N_GROUPS * (uint32_t)(n_steps - 1));
        n_steps = N_STEPS;
    }
}

static void test_an_own_base_that_has_changed_is_seen(void **state) {
    (void)state;
    if (!here->on_device) skip();
    own_bases_go(own_base_flip, true, 6, 0, true);
}

/* For 64 forwards; in the one that follows the host encodes, behind which they are there. */
static void test_own_bases_give_way_and_come_back(void **state) {
    (void)state;
    if (!here->on_device) skip();
    own_bases_go(own_bases_push_out, true, 6, N_GROUPS * 4, false);
    own_bases_go(own_bases_push_out, true, 69, N_GROUPS * 65, false);
}

/* The device may still encode the first two groups from them. */
static void test_own_bases_in_use_are_waited_for(void **state) {
    (void)state;
    if (!here->on_device) skip();
    own_bases_go(own_bases_push_out, false, 6, N_GROUPS * 4 - 2, false);
}

static void test_own_bases_are_anew_behind_a_sleep(void **state) {
    (void)state;
    if (!here->on_device) skip();
    own_bases_go(engine_sleep, true, 6, N_GROUPS, false);
}

/* What is known of the groups before and behind it goes, too. */
static void test_own_bases_make_room_for_a_later_group(void **state) {
    (void)state;
    if (!here->on_device) skip();
    own_bases_go(own_place_lose, true, 6, N_GROUPS, false);
}

static void test_what_comes_wrong_crosses_whole(void **state) {
    (void)state;
    test_random random = {random_seed("test_what_comes_wrong_crosses_whole", 1)};
    uint64_t n_seen = 0, n_rounds = getenv("TEST_COARSER") ? 6 : 24;
    log_keep(FCDP_LOG_WARN);
    for (uint64_t round = 1; round <= n_rounds; round++) {
        cluster_config config = make_config(shapes[round % 3][0], shapes[round % 3][1]);
        if (round % 2) config = together(config);
        outcome result = run(&config, NULL, 1 + (long)random_below(&random, round % 2 ? 6 : 24),
                             random_next(&random));
        /* the byte may lie behind what a rank sent, whose differences are not the largest */
        assert_true(result.n_whole == config.n_nodes || result.n_whole == 0);
        n_seen += result.n_whole > 0;
    }
    const char *said = log_kept();
    fcdp_log_set_level(FCDP_LOG_QUIET); /* as main() does */
    bool is_first = here == worlds;     /* of the process */
    if (is_first)
        assert_says(
            said, "': what came of differences is not the same on all ranks, and crosses whole; this is said "
                  "once\n");
    assert_int_equal(log_count(said, "this is said once"), is_first);
    print_message("%llu of %llu reached a value\n", (unsigned long long)n_seen, (unsigned long long)n_rounds);
    assert_true(n_seen >= n_rounds * 3 / 4);
}

/* The first gather of a group has no base, the second encodes in vain, and the third says so. */
static void test_by_gain_too_many_differences_are_not_made_again(void **state) {
    (void)state;
    if (here->on_device) skip(); /* parameters cross whole there */
    for (int way = 0; way < 3; way++) {
        cluster_config config = make_config(shapes[way][0], shapes[way][1]);
        config.alike = false;
        config.by_gain = true;
        outcome result = run(&config, NULL, 0, 0);
        assert_int_equal(result.n_deltas, 0);
        assert_int_equal(result.n_whole, 2 * N_GROUPS * config.n_nodes * config.node_size);
        config = together(config);
        result = run(&config, NULL, 0, 0);
        assert_int_equal(result.n_deltas, 0);
        assert_int_equal(result.n_whole, 2 * config.n_nodes * config.node_size);
    }
}

/* Where differences gain nothing, they are tried again behind 1, 3, 7, and then each 15 gathers: a group's
 * are tried in its gathers 2 and 3, which begin that, and in 5, 9, 17 and 33. */
static void test_by_gain_rests_become_longer(void **state) {
    (void)state;
    if (here->on_device) skip(); /* parameters cross whole there */
    enum { N_TRIED = 6 };
    cluster_config config = make_config(2, 1);
    config.alike = false;
    config.by_gain = true;
    for (n_steps = 33; n_steps <= 48; n_steps += 15) {
        outcome result = run(&config, NULL, 0, 0);
        assert_int_equal(result.n_whole, N_TRIED * N_GROUPS * config.n_nodes);
        cluster_config joined = together(config);
        result = run(&joined, NULL, 0, 0);
        assert_int_equal(result.n_whole, N_TRIED * joined.n_nodes);
    }
    n_steps = N_STEPS;
}

/* A group's gather 2 encodes, and says so; 4, 8 and 16 measure the link. */
static void test_by_gain_what_cannot_gain_is_not_encoded(void **state) {
    (void)state;
    if (here->on_device) skip(); /* parameters cross whole there */
    cluster_config config = make_config(2, 1);
    config.by_gain = config.codec_is_slow = true;
    n_steps = 16;
    outcome result = run(&config, NULL, 0, 0);
    assert_int_equal(result.n_deltas, N_GROUPS * config.n_nodes);
    assert_int_equal(result.n_whole, 3 * N_GROUPS * config.n_nodes);
    n_steps = N_STEPS;
}

/* Also the first gathers, which have no base. Extents are of each kind of numbers, and random bytes are many
 * that cannot be rounded. */
static void test_rounded_gathers_are_the_same_on_all_ranks(void **state) {
    (void)state;
    if (here->on_device || here->restore != FCDP_RESTORE_WHOLE) skip(); /* they are not rounded there */
    test_random random = {random_seed("test_rounded_gathers_are_the_same_on_all_ranks", 1)};
    for (int way = 0; way < 8; way += ways_apart()) {
        cluster_config config = make_config(shapes[way % 3][0], shapes[way % 3][1]);
        if (way % 2) config = together(config);
        config.deltas = false;
        config.rounds = true;
        config.alike = way % 4 < 2;
        for (uint32_t r = 0; r < CLUSTER_MAX_RANKS; r++) config.tau[r] = way / 2 % 2;
        outcome rounded = run(&config, NULL, 0, 0);
        config.rounds = false;
        outcome whole = run(&config, NULL, 0, 0);
        config.rounds = true;
        uint64_t n_ranks = config.n_nodes * config.node_size;
        assert_int_equal(rounded.n_deltas, n_ranks * (way % 2 ? N_GROUPS + N_STEPS - 1 : N_GROUPS * N_STEPS));
        assert_int_equal(rounded.n_whole, 0);
        print_message("%u x %u: %llu bytes whole, %llu rounded\n", config.n_nodes, config.node_size,
                      (unsigned long long)whole.sent, (unsigned long long)rounded.sent);
        assert_true(rounded.sent < whole.sent * (config.alike ? 80 : 101) / 100);
        outcome spoilt = run(&config, NULL, 1 + (long)random_below(&random, 6), random_next(&random));
        assert_true(spoilt.n_whole == config.n_nodes || spoilt.n_whole == 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fewer_bytes_cross),
        cmocka_unit_test(test_groups_that_cross_together_send_differences),
        cmocka_unit_test(
            test_what_comes_wrong_crosses_whole), /* the first of those in which a line is said */
        cmocka_unit_test(test_a_changed_base_crosses_whole),
        cmocka_unit_test(test_gathers_of_other_sizes_follow),
        cmocka_unit_test(test_a_group_ends_behind_a_gather_together),
        cmocka_unit_test(test_a_base_on_the_device_is_there_before_it_is_read),
        cmocka_unit_test(test_what_a_node_has_not_stored_is_no_base),
        cmocka_unit_test(test_an_own_base_that_has_changed_is_seen),
        cmocka_unit_test(test_own_bases_give_way_and_come_back),
        cmocka_unit_test(test_own_bases_in_use_are_waited_for),
        cmocka_unit_test(test_own_bases_are_anew_behind_a_sleep),
        cmocka_unit_test(test_own_bases_make_room_for_a_later_group),
        cmocka_unit_test(test_by_gain_too_many_differences_are_not_made_again),
        cmocka_unit_test(test_by_gain_rests_become_longer),
        cmocka_unit_test(test_by_gain_what_cannot_gain_is_not_encoded),
        cmocka_unit_test(test_rounded_gathers_are_the_same_on_all_ranks),
    };
    fcdp_log_set_level(FCDP_LOG_QUIET);
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    int n_failed = 0;
    for (here = worlds; here < worlds + sizeof worlds / sizeof *worlds; here++) {
        simgpu_reset(); /* all ranks' host functions run one after another: none waits for a peer */
        setenv("FCDP_SIM_SERIAL", here->on_device ? "1" : "0", 1);
        fcdp__delta_part_bytes = here->n_parts == FCDP_DELTA_MOST_PARTS ? 1 : SIZE_MAX;
        n_failed += cmocka_run_group_tests_name(here->name, tests, NULL, NULL);
    }
    return n_failed;
}
