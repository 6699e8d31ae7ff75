/* lent.h - device pages under one range that one thread at a time uses, and that the pool may have back
 * whenever none does.
 *
 * A reclaim may come from the very thread that has them, so it never waits for a thread: busy pages are not
 * given. Whether the device is done with them is their owner's to see to (staging.h, own_base.h).
 */
#ifndef FCDP_LENT_H
#define FCDP_LENT_H

#include "alloc/pages.h"
#include "alloc/vrange.h"

typedef struct fcdp_lent {
    fcdp_lock lock;
    pthread_cond_t released; /* `busy` became false */
    bool busy; /* guarded by lock: one thread uses or changes what follows, and its owner, without the lock */
    fcdp_vrange *range; /* NULL: there are no pages */
    fcdp_phys block;
    size_t n_pages;
} fcdp_lent;

void fcdp__lent_init(fcdp_lent *lent);
/* Without pages. */
void fcdp__lent_destroy(fcdp_lent *lent);

/* Waits until no other thread has them. */
void fcdp__lent_acquire(fcdp_lent *lent);
/* If no thread has them, whether or not there are any. */
bool fcdp__lent_try_acquire(fcdp_lent *lent);
void fcdp__lent_release(fcdp_lent *lent);
/* Pages that no thread has. */
size_t fcdp__lent_idle(fcdp_lent *lent);

/* Acquired, without pages. One block, so that one operation may use all of them. Errors as from
 * fcdp__pool_take_handle, or, with nobody's pages reclaimed, fcdp__pool_try_handle; there are none then. */
fcdp_status fcdp__lent_take(fcdp_lent *lent, fcdp_driver *drv, fcdp_pool *pool, size_t n_pages,
                            bool reclaims) FCDP_MUST_CHECK;
/* Acquired, with pages: the device is done with them. */
void fcdp__lent_give(fcdp_lent *lent, fcdp_pool *pool);

#endif
