/* The page pool with many threads that take pages and blocks: each has one owner, and none is lost. */
#include <pthread.h>
#include <stdatomic.h>

#include "tests/alloc/pool_world.h"

enum { N_SLOTS = 1 << 16, N_THREADS = 4, N_ROUNDS = 10000, MOST_IN_HAND = 8 };

/* The oracle: the owner of each handle. A handle's slot is found by its value, which is unique while the pool
 * lives. */
typedef struct owners {
    _Atomic uint64_t handle[N_SLOTS];
    atomic_int owner[N_SLOTS];
} owners;

static size_t owners_slot(owners *o, uint64_t handle) {
    for (size_t i = handle * 0x9E3779B97F4A7C15u % N_SLOTS;; i = (i + 1) % N_SLOTS) {
        uint64_t seen = 0;
        if (atomic_compare_exchange_strong(&o->handle[i], &seen, handle) || seen == handle) return i;
    }
}

typedef struct taker {
    fcdp_pool *pool;
    spare *spare; /* NULL: gives back itself */
    owners *owners;
    uint64_t seed;
    int id;
    size_t n_taken, n_refused;
    const char *broken;
} taker;

static void taker_put_back(taker *t, size_t n, fcdp_phys *pages) {
    for (size_t i = 0; i < n; i++) {
        int me = t->id;
        if (!atomic_compare_exchange_strong(&t->owners->owner[owners_slot(t->owners, pages[i].handle)], &me,
                                            0))
            t->broken = "a page in hand changed its owner";
    }
    if (!t->spare || t->seed % 3 == 0) {
        fcdp__pool_give(t->pool, HOLDER_OTHERS, n, pages);
        return;
    }
    fcdp__lock_acquire(&t->spare->lock);
    memcpy(t->spare->pages + t->spare->n, pages, n * sizeof *pages);
    t->spare->n += n;
    fcdp__lock_release(&t->spare->lock);
}

static void *taker_run(void *arg) {
    taker *t = arg;
    fcdp_phys hand[MOST_IN_HAND];
    size_t n_hand = 0;
    for (int round = 0; round < N_ROUNDS && !t->broken; round++) {
        size_t n = random_below(&t->seed, MOST_IN_HAND + 1);
        if (n_hand + n <= MOST_IN_HAND) {
            fcdp_status status = fcdp__pool_take(t->pool, HOLDER_OTHERS, n, hand + n_hand);
            if (status && status != FCDP_ERR_NO_DEVICE_MEM)
                t->broken = "a take failed for another reason than memory";
            t->n_refused += status != FCDP_OK;
            for (size_t i = n_hand; !status && i < n_hand + n; i++) {
                int unowned = 0;
                size_t slot = owners_slot(t->owners, hand[i].handle);
                if (!atomic_compare_exchange_strong(&t->owners->owner[slot], &unowned, t->id))
                    t->broken = "a page has two owners";
            }
            if (!status) n_hand += n;
            if (!status) t->n_taken += n;
        } else {
            n = 1 + random_below(&t->seed, n_hand);
            n_hand -= n;
            taker_put_back(t, n, hand + n_hand);
        }
        if (round % 2048 == 0) (void)fcdp__pool_trim(t->pool);
    }
    taker_put_back(t, n_hand, hand);
    return NULL;
}

/* The same with blocks, whose handles are the pool's alone until they are given back. */
static void *block_taker_run(void *arg) {
    taker *t = arg;
    for (int round = 0; round < N_ROUNDS / 4 && !t->broken; round++) {
        size_t n = 1 + random_below(&t->seed, MOST_IN_HAND);
        fcdp_phys block;
        fcdp_status status = fcdp__pool_take_handle(t->pool, HOLDER_TENSORS, n, &block);
        t->n_refused += status != FCDP_OK;
        if (status && status != FCDP_ERR_NO_DEVICE_MEM)
            t->broken = "a block failed for another reason than memory";
        if (status) continue;
        t->n_taken += n;
        int unowned = 0, me = t->id;
        size_t slot = owners_slot(t->owners, block.handle);
        if (!atomic_compare_exchange_strong(&t->owners->owner[slot], &unowned, t->id))
            t->broken = "a block has two owners";
        if (!atomic_compare_exchange_strong(&t->owners->owner[slot], &me, 0))
            t->broken = "a block changed its owner";
        fcdp__pool_give_handle(t->pool, HOLDER_TENSORS, n, block);
    }
    return NULL;
}

/* `n_budget` pages; with `sparing`, pages not in hand are kept until the reclaimer takes them; with `blocks`,
 * every other taker takes blocks. The takers' refusals. */
static size_t takers_run(const char *test, size_t n_budget, size_t n_capacity, bool sparing, bool blocks) {
    fcdp_driver *drv = driver_open_sim();
    simgpu_set_capacity(n_capacity * PAGE);
    fcdp_pool *pool = pool_open(drv, n_budget);
    spare *s = sparing ? spare_create(pool) : NULL;
    owners *o = calloc(1, sizeof *o);
    taker takers[N_THREADS];
    pthread_t threads[N_THREADS];
    uint64_t seed = seed_choose(test);
    size_t n_refused = 0, n_taken = 0;
    for (int i = 0; i < N_THREADS; i++) {
        takers[i] = (taker){.pool = pool, .spare = s, .owners = o, .seed = seed + (uint64_t)i, .id = i + 1};
        bool of_blocks = blocks && i % 2 == 1;
        assert_int_equal(
            pthread_create(&threads[i], NULL, of_blocks ? block_taker_run : taker_run, &takers[i]), 0);
    }
    for (int i = 0; i < N_THREADS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        if (takers[i].broken) fail_msg("%s", takers[i].broken);
        n_refused += takers[i].n_refused;
        n_taken += takers[i].n_taken;
    }
    fcdp_pool_stats stats;
    fcdp__pool_stats(pool, &stats);
    assert_true(n_taken > 0);
    assert_true(stats.peak_live_pages <= n_budget);
    assert_int_equal(stats.live_pages, s ? s->n : 0);
    if (s) spare_destroy(s);
    free(o);
    pool_close(pool, drv);
    simgpu_reset();
    return n_refused;
}

static void takers_with_room_are_never_refused(void **state) {
    (void)state;
    assert_int_equal(takers_run(__func__, N_THREADS * MOST_IN_HAND, MAX_PAGES, false, false), 0);
}

static void takers_with_little_room_share_it(void **state) {
    (void)state;
    takers_run(__func__, MOST_IN_HAND + 2, MAX_PAGES, false, false);
}

static void takers_reclaim_from_each_other(void **state) {
    (void)state;
    assert_int_equal(takers_run(__func__, N_THREADS * MOST_IN_HAND, MAX_PAGES, true, false), 0);
}

static void takers_reclaim_on_a_full_device(void **state) {
    (void)state;
    takers_run(__func__, N_THREADS * MOST_IN_HAND, N_THREADS * MOST_IN_HAND / 2, true, false);
}

static void takers_of_pages_and_of_blocks_with_room(void **state) {
    (void)state;
    assert_int_equal(takers_run(__func__, N_THREADS * MOST_IN_HAND, MAX_PAGES, false, true), 0);
    assert_int_equal(takers_run(__func__, N_THREADS * MOST_IN_HAND, MAX_PAGES, true, true), 0);
}

static void takers_of_pages_and_of_blocks_with_little_room(void **state) {
    (void)state;
    takers_run(__func__, MOST_IN_HAND + 2, MAX_PAGES, false, true);
    takers_run(__func__, N_THREADS * MOST_IN_HAND, N_THREADS * MOST_IN_HAND / 2, true, true);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(takers_with_room_are_never_refused),
        cmocka_unit_test(takers_with_little_room_share_it),
        cmocka_unit_test(takers_reclaim_from_each_other),
        cmocka_unit_test(takers_reclaim_on_a_full_device),
        cmocka_unit_test(takers_of_pages_and_of_blocks_with_room),
        cmocka_unit_test(takers_of_pages_and_of_blocks_with_little_room),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
