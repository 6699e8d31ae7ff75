/* The page pool beside another allocator of the process on the same device. */
#include "tests/alloc/pool_world.h"

/* Another pool on the same device: it keeps what was given back to it. */
typedef struct neighbour {
    fcdp_pool *pool;
    unsigned n_asked;
    size_t n_wanted;
} neighbour;

static size_t neighbour_reclaim(void *ctx, size_t n_pages) {
    neighbour *n = ctx;
    n->n_asked++;
    n->n_wanted = n_pages;
    return fcdp__pool_trim(n->pool) / PAGE;
}

/* A device of 8 pages, of which another allocator uses 3 and keeps 4 without using them. */
typedef struct street {
    fcdp_driver *drv;
    fcdp_pool *pool;
    neighbour other;
    fcdp_phys used[7];
} street;

static street *street_open(void) {
    street *s = calloc(1, sizeof *s);
    s->drv = driver_open_sim();
    simgpu_set_capacity(8 * PAGE);
    s->pool = pool_open(s->drv, 8);
    s->other.pool = pool_open(s->drv, 8);
    assert_ok(fcdp__pool_take(s->other.pool, HOLDER_TENSORS, 7, s->used));
    fcdp__pool_give(s->other.pool, HOLDER_TENSORS, 4, s->used + 3);
    fcdp__pool_set_reclaimer(s->pool, FCDP_RECLAIM_NEIGHBOUR, neighbour_reclaim, NULL, &s->other);
    return s;
}

static void street_close(street *s) {
    fcdp__pool_give(s->other.pool, HOLDER_TENSORS, 3, s->used);
    fcdp__pool_destroy(s->other.pool);
    pool_close(s->pool, s->drv);
    free(s);
}

static void a_full_device_asks_the_neighbour_once(void **state) {
    (void)state;
    for (int block = 0; block < 2; block++) {
        street *s = street_open();
        fcdp_phys pages[8];
        fcdp_status (*take)(fcdp_pool *, fcdp_holder, size_t, fcdp_phys *) = block ? fcdp__pool_take_handle
                                                                                   : fcdp__pool_take;
        assert_ok(take(s->pool, HOLDER_OTHERS, 4, pages)); /* 1 was free */
        assert_int_equal(s->other.n_asked, 1);
        assert_int_equal(s->other.n_wanted, block ? 4 : 3);
        /* it has nothing left: one free */
        assert_int_equal(fcdp__pool_take(s->pool, HOLDER_OTHERS, 2, pages + 4), FCDP_ERR_NO_DEVICE_MEM);
        assert_text("other allocations fill the device");
        assert_int_equal(s->other.n_asked, 2);
        if (block)
            fcdp__pool_give_handle(s->pool, HOLDER_OTHERS, 4, pages[0]);
        else
            fcdp__pool_give(s->pool, HOLDER_OTHERS, 4, pages);
        street_close(s);
    }
}

/* Beyond the budget its memory would be of no use; and what is not all that lacks
 * is no reason to ask again and again. */
static void the_neighbour_is_left_alone_where_it_cannot_help(void **state) {
    (void)state;
    street *s = street_open();
    fcdp_phys pages[8];
    assert_ok(fcdp__pool_set_budget(s->pool, 3 * PAGE));
    assert_int_equal(fcdp__pool_take(s->pool, HOLDER_OTHERS, 4, pages), FCDP_ERR_NO_DEVICE_MEM);
    assert_ok(fcdp__pool_take(s->pool, HOLDER_OTHERS, 1, pages));
    assert_int_equal(fcdp__pool_take(s->pool, HOLDER_OTHERS, 3, pages + 1), FCDP_ERR_NO_DEVICE_MEM);
    assert_int_equal(s->other.n_asked, 0);
    assert_ok(fcdp__pool_set_budget(s->pool, 8 * PAGE));
    /* 4 of 5 missing */
    assert_int_equal(fcdp__pool_take(s->pool, HOLDER_OTHERS, 6, pages + 1), FCDP_ERR_NO_DEVICE_MEM);
    assert_int_equal(s->other.n_asked, 1);
    fcdp__pool_give(s->pool, HOLDER_OTHERS, 1, pages);
    street_close(s);
}

/* A reclaimer of unused blocks, as regions' slots are. */
typedef struct slots {
    fcdp_pool *pool;
    fcdp_phys blocks[3];
    size_t n;
} slots;

static size_t slots_reclaim(void *ctx, size_t n_pages) {
    slots *s = ctx;
    size_t n_back = 0;
    for (; s->n > 0 && n_back < n_pages; n_back++)
        fcdp__pool_give_handle(s->pool, HOLDER_OTHERS, 1, s->blocks[--s->n]);
    return n_back;
}

/* The other allocator's take fails, asks the pool, and goes on with the memory: of the idle
 * pages all, of the rest what it asks for. */
static void the_pool_yields_what_it_does_not_use(void **state) {
    (void)state;
    street *s = street_open();
    slots unused = {.pool = s->pool};
    fcdp_phys pages[5], more[5];
    for (; unused.n < 3; unused.n++)
        assert_ok(fcdp__pool_take_handle(s->pool, HOLDER_OTHERS, 1, &unused.blocks[unused.n]));
    assert_ok(fcdp__pool_take(s->pool, HOLDER_OTHERS, 2, pages));
    fcdp__pool_give(s->pool, HOLDER_OTHERS, 1, pages);
    fcdp__pool_set_reclaimer(s->pool, FCDP_RECLAIM_EVICT, slots_reclaim, NULL, &unused);
    s->other.n_asked = 0;
    assert_false(take_at_once(s->other.pool, HOLDER_TENSORS, 2, more));
    assert_int_equal(fcdp__pool_yield(s->pool, PAGE + 1), 2 * PAGE);
    assert_counts(s->pool, 3, 0);
    assert_true(take_at_once(s->other.pool, HOLDER_TENSORS, 2, more));
    assert_int_equal(unused.n, 2);
    assert_int_equal(fcdp__pool_yield(s->pool, SIZE_MAX), 2 * PAGE);
    assert_true(take_at_once(s->other.pool, HOLDER_TENSORS, 2, more + 2));
    assert_int_equal(fcdp__pool_yield(s->pool, SIZE_MAX), 0); /* the last page is in use */
    assert_int_equal(s->other.n_asked, 0);                    /* it is not asked for its own take */
    fcdp__pool_give(s->pool, HOLDER_OTHERS, 1, pages + 1);
    fcdp__pool_give(s->other.pool, HOLDER_TENSORS, 4, more);
    fcdp__pool_set_reclaimer(s->pool, FCDP_RECLAIM_EVICT, NULL, NULL, NULL);
    street_close(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_full_device_asks_the_neighbour_once),
        cmocka_unit_test(the_neighbour_is_left_alone_where_it_cannot_help),
        cmocka_unit_test(the_pool_yields_what_it_does_not_use),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
