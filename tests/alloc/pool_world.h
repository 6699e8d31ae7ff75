/* pool_world.h - what the tests of the page pool share: a pool with two holders, and a reclaimer with pages
 * that a holder could spare. */
#ifndef FCDP_TESTS_ALLOC_POOL_WORLD_H
#define FCDP_TESTS_ALLOC_POOL_WORLD_H

#include "alloc/pages.h"

#include "tests/alloc/support.h"

enum { PAGE = 2 << 20, MAX_PAGES = 256 };

enum { HOLDER_TENSORS = 0 };
static const fcdp_holder_words tensors_words = {"tensors", "free some"},
                               others_words = {"others", "ask less"};

static inline void assert_counts(fcdp_pool *pool, size_t n_live, size_t n_cached) {
    fcdp_pool_stats stats;
    fcdp__pool_stats(pool, &stats);
    assert_int_equal(stats.live_pages, n_live);
    assert_int_equal(stats.cached_pages, n_cached);
}

static inline fcdp_pool *pool_open(fcdp_driver *drv, size_t n_pages) {
    fcdp_pool *pool = NULL;
    assert_ok(fcdp__pool_create(drv, n_pages * PAGE, &pool));
    fcdp__pool_set_holder(pool, HOLDER_TENSORS, &tensors_words);
    fcdp__pool_set_holder(pool, HOLDER_OTHERS, &others_words);
    return pool;
}

/* Without asking anybody, all of them or none. */
static inline bool take_at_once(fcdp_pool *pool, fcdp_holder holder, size_t n, fcdp_phys *pages_out) {
    size_t n_taken;
    assert_ok(fcdp__pool_take_some(pool, holder, n, pages_out, &n_taken));
    if (n_taken < n) fcdp__pool_give(pool, holder, n_taken, pages_out);
    return n_taken == n;
}

static inline void pool_close(fcdp_pool *pool, fcdp_driver *drv) {
    fcdp__pool_destroy(pool);
    if (fcdp__driver_is_sim(drv)) assert_nothing_lives();
    fcdp__driver_close(drv);
}

/* ---- a reclaimer ---- */

/* Pages that a holder has and could spare. */
typedef struct spare {
    fcdp_pool *pool;
    fcdp_lock lock;
    fcdp_phys pages[MAX_PAGES];
    size_t n, n_asked, at_most;
    bool lies;
} spare;

static inline size_t spare_reclaim(void *ctx, size_t n_pages) {
    spare *s = ctx;
    fcdp__lock_acquire(&s->lock);
    s->n_asked = n_pages;
    size_t n = n_pages < s->n ? n_pages : s->n;
    if (s->at_most && n > s->at_most) n = s->at_most;
    s->n -= n;
    fcdp__pool_give(s->pool, HOLDER_OTHERS, n, s->pages + s->n);
    fcdp__lock_release(&s->lock);
    return s->lies ? n_pages : n;
}

static inline spare *spare_create(fcdp_pool *pool) {
    spare *s = calloc(1, sizeof *s);
    s->pool = pool;
    fcdp__lock_init(&s->lock,
                    FCDP_RANK_REGION); /* above the pool's: taking it proves that the pool's is not held */
    fcdp__pool_set_reclaimer(pool, FCDP_RECLAIM_EVICT, spare_reclaim, NULL, s);
    return s;
}

static inline void spare_destroy(spare *s) {
    fcdp__pool_set_reclaimer(s->pool, FCDP_RECLAIM_EVICT, NULL, NULL, NULL);
    fcdp__pool_give(s->pool, HOLDER_OTHERS, s->n, s->pages);
    fcdp__lock_destroy(&s->lock);
    free(s);
}

#endif
