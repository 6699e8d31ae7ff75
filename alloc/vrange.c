/* vrange.c - reserve, map, unmap. Decides nothing, waits for nothing.
 *
 * A rollback that the driver refuses leaves pages under the range that nobody may touch and nobody else may
 * have. They stay the range's own, and the next map, unmap or destroy undoes them first.
 */
#include "alloc/vrange.h"

#include <stdio.h>
#include <stdlib.h>

/*     pages[0 .. n_held) are the range's, mapped in order from base          accessible => n_held == n_pages
 *     n_held > 0 && !accessible: only after a rollback that the driver refused */
struct fcdp_vrange {
    fcdp_driver *drv;
    fcdp_pool *pool;
    fcdp_dptr base;
    size_t page_bytes, n_pages;
    size_t n_held;
    bool accessible;
    fcdp_phys pages[];
};

static bool vrange_is_valid(const fcdp_vrange *range) {
    return range->n_held <= range->n_pages && (!range->accessible || range->n_held == range->n_pages);
}

fcdp_status fcdp__vrange_create(fcdp_driver *drv, fcdp_pool *pool, size_t bytes, fcdp_vrange **range_out) {
    size_t page_bytes = fcdp__driver_page_bytes(drv);
    if (!bytes || bytes > SIZE_MAX - page_bytes)
        return fcdp__fail(FCDP_ERR_INVALID, "a range of %zu bytes cannot be reserved", bytes);
    size_t n_pages = fcdp__round_up(bytes, page_bytes) / page_bytes;
    fcdp_vrange *range = calloc(1, sizeof *range + n_pages * sizeof range->pages[0]);
    if (!range) return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no host memory for a range of %zu pages", n_pages);
    range->drv = drv;
    range->pool = pool;
    range->page_bytes = page_bytes;
    range->n_pages = n_pages;
    fcdp_status status = fcdp__driver_range_reserve(drv, n_pages * page_bytes, &range->base);
    if (status) {
        free(range);
        return status;
    }
    *range_out = range;
    return FCDP_OK;
}

/* Unmap the pages held and give them back. On failure the range still holds them. */
static fcdp_status pages_drop(fcdp_vrange *range) {
    if (range->n_held == 0) return FCDP_OK;
    fcdp_status status = fcdp__driver_unmap(range->drv, range->base, range->n_held * range->page_bytes);
    if (status) return status;
    fcdp__pool_give(range->pool, FCDP_HOLDER_REGIONS, range->n_held, range->pages);
    range->n_held = 0;
    range->accessible = false;
    return FCDP_OK;
}

void fcdp__vrange_destroy(fcdp_vrange *range) {
    if (!range) return;
    size_t bytes = range->n_pages * range->page_bytes;
    fcdp_status status = pages_drop(range);
    if (status) status = pages_drop(range); /* a failure that passes must not cost the pages */
    if (!status) status = fcdp__driver_range_free(range->drv, range->base, bytes);
    if (status && !range->n_held) status = fcdp__driver_range_free(range->drv, range->base, bytes);
    if (status) fcdp__log(FCDP_LOG_WARN, "a device range of %zu bytes is lost: %s", bytes, fcdp_error_text());
    if (range->n_held) fcdp__pool_forget(range->pool, FCDP_HOLDER_REGIONS, range->n_held, range->pages);
    free(range);
}

fcdp_dptr fcdp__vrange_base(const fcdp_vrange *range) {
    return range->base;
}
size_t fcdp__vrange_n_pages(const fcdp_vrange *range) {
    return range->n_pages;
}
bool fcdp__vrange_is_mapped(const fcdp_vrange *range) {
    return range->accessible;
}

/* Map the pages taken, in order; n_held counts those that are. */
static fcdp_status pages_map(fcdp_vrange *range) {
    while (range->n_held < range->n_pages) {
        fcdp_dptr at = fcdp__dptr_add(range->base, range->n_held * range->page_bytes);
        fcdp_status status = fcdp__driver_map(range->drv, at, range->page_bytes, range->pages[range->n_held]);
        if (status) return status;
        range->n_held++;
    }
    return fcdp__driver_set_access(range->drv, range->base, range->n_pages * range->page_bytes);
}

/* After a failed map with `status`: all pages go back, and the failure's text stays the first one's. */
static fcdp_status map_undo(fcdp_vrange *range, fcdp_status status) {
    char first[512];
    snprintf(first, sizeof first, "%s", fcdp_error_text());
    fcdp__pool_give(range->pool, FCDP_HOLDER_REGIONS, range->n_pages - range->n_held, range->pages + range->n_held);
    if (!pages_drop(range)) return fcdp__fail(status, "%s", first);
    return fcdp__fail(status, "%s; and %zu pages stay under the range, since undoing it failed too: %s",
                      first, range->n_held, fcdp_error_text());
}

fcdp_status fcdp__vrange_map(fcdp_vrange *range) {
    FCDP_CHECK(1, !range->accessible);
    fcdp_status status = pages_drop(range);
    if (!status) status = fcdp__pool_take(range->pool, FCDP_HOLDER_REGIONS, range->n_pages, range->pages);
    if (status) return status;

    status = pages_map(range);
    range->accessible = !status;
    if (status) status = map_undo(range, status);
    FCDP_CHECK(3, vrange_is_valid(range));
    return status;
}

fcdp_status fcdp__vrange_unmap(fcdp_vrange *range) {
    FCDP_CHECK(1, range->accessible);
    fcdp_status status = pages_drop(range);
    FCDP_CHECK(3, vrange_is_valid(range));
    return status;
}
