#include "comm/lent.h"

#include "tiering/tiering.h"

void fcdp__lent_init(fcdp_lent *lent) {
    fcdp__lock_init(&lent->lock, FCDP_RANK_ENGINE);
    pthread_cond_init(&lent->released, NULL);
}

void fcdp__lent_destroy(fcdp_lent *lent) {
    pthread_cond_destroy(&lent->released);
    fcdp__lock_destroy(&lent->lock);
}

/* ---- threads ---- */

void fcdp__lent_acquire(fcdp_lent *lent) {
    fcdp__lock_acquire(&lent->lock);
    while (lent->busy) fcdp__lock_wait(&lent->lock, &lent->released);
    lent->busy = true;
    fcdp__lock_release(&lent->lock);
}

bool fcdp__lent_try_acquire(fcdp_lent *lent) {
    fcdp__lock_acquire(&lent->lock);
    bool is_mine = !lent->busy;
    if (is_mine) lent->busy = true;
    fcdp__lock_release(&lent->lock);
    return is_mine;
}

void fcdp__lent_release(fcdp_lent *lent) {
    fcdp__lock_acquire(&lent->lock);
    lent->busy = false;
    pthread_cond_broadcast(&lent->released);
    fcdp__lock_release(&lent->lock);
}

size_t fcdp__lent_idle(fcdp_lent *lent) {
    fcdp__lock_acquire(&lent->lock);
    size_t n_pages = !lent->busy && lent->range ? lent->n_pages : 0;
    fcdp__lock_release(&lent->lock);
    return n_pages;
}

/* ---- pages ---- */

fcdp_status fcdp__lent_take(fcdp_lent *lent, fcdp_driver *drv, fcdp_pool *pool, size_t n_pages,
                            bool reclaims) {
    size_t bytes = n_pages * fcdp__driver_page_bytes(drv);
    fcdp_vrange *range;
    fcdp_phys block;
    fcdp_status status = fcdp__vrange_create(drv, bytes, &range);
    if (status) return status;
    status = reclaims ? fcdp__pool_take_handle(pool, FCDP_HOLDER_GATHERED, n_pages, &block)
                      : fcdp__pool_try_handle(pool, FCDP_HOLDER_GATHERED, n_pages, &block);
    if (!status) {
        status = fcdp__vrange_map(range, block, bytes);
        if (status) fcdp__pool_give_handle(pool, FCDP_HOLDER_GATHERED, n_pages, block);
    }
    if (status) {
        fcdp__vrange_destroy(range);
        return status;
    }
    lent->range = range;
    lent->block = block;
    lent->n_pages = n_pages;
    return FCDP_OK;
}

void fcdp__lent_give(fcdp_lent *lent, fcdp_pool *pool) {
    fcdp__vrange_destroy(lent->range);
    lent->range = NULL;
    fcdp__pool_give_handle(pool, FCDP_HOLDER_GATHERED, lent->n_pages, lent->block);
}
