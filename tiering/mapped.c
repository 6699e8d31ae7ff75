/* mapped.c - takes the pages of a mapped region, and gives them back. What becomes of its bytes in between is
 * region.c's, as of any other region.
 *
 * CUDA calls such memory HOST_NUMA. The device alone is given access: the host reaches these bytes by copies,
 * as those of other regions.
 */
#include "tiering/mapped.h"

#include "base/size.h"
#include "tiering/slot.h"
#include "tiering/trace.h"

#include <stdlib.h>

bool fcdp__region_is_mapped_on_host(const fcdp_region *region) {
    return region->slot && region->slot->on_host;
}

size_t fcdp__mapped_bytes(const fcdp_region *region) {
    return fcdp__region_pages(region) * fcdp__driver_page_bytes(region->tiering->drv);
}

/* A handle needs one; where nodes are not known there is one. */
static int node_of(int numa_node) {
    return numa_node < 0 ? 0 : numa_node;
}

static size_t slot_bytes(const fcdp_slot *slot) {
    return slot->n_pages * slot->page_bytes;
}

/* Not in the budget any more, and of no region. A handle that cannot be released is lost until the process
 * ends. */
static void pages_give(fcdp_tiering *tiering, fcdp_account *account, fcdp_slot *slot) {
    if (FCDP_RETRY_ONCE(fcdp__driver_phys_release(tiering->drv, slot->phys)))
        fcdp__log(FCDP_LOG_WARN, "FCDP_HOST_MAP: %s of host memory stay in use until the process ends: %s",
                  fcdp__size_text(slot_bytes(slot)).s, fcdp_error_text());
    fcdp__account_give(account, slot_bytes(slot));
    free(slot);
}

void fcdp__mapped_free(fcdp_tiering *tiering, fcdp_account *account, fcdp_slot *slot) {
    fcdp__count(&tiering->counts, FCDP_COUNT_HOST_MAPPED_BYTES, -(uint64_t)slot_bytes(slot));
    pages_give(tiering, account, slot);
}

static fcdp_status pages_take(fcdp_region *region, fcdp_account *account, int numa_node, fcdp_slot *slot) {
    fcdp_driver *drv = region->tiering->drv;
    fcdp_status status = fcdp__account_take(account, slot_bytes(slot));
    if (status) return status;
    status = fcdp__driver_phys_create_host(drv, numa_node, slot_bytes(slot), &slot->phys);
    if (status) fcdp__account_give(account, slot_bytes(slot));
    return status;
}

fcdp_status fcdp__mapped_probe(fcdp_driver *drv, int numa_node) {
    size_t page_bytes = fcdp__driver_page_bytes(drv);
    fcdp_vrange *range;
    fcdp_phys page;
    fcdp_status status = fcdp__vrange_create(drv, page_bytes, &range);
    if (status) return status;
    status = fcdp__driver_phys_create_host(drv, node_of(numa_node), page_bytes, &page);
    if (status) {
        fcdp__vrange_destroy(range);
        return status;
    }
    status = fcdp__vrange_map(range, page, page_bytes);
    fcdp_failure failure = fcdp__failure_keep(status);
    fcdp__vrange_destroy(range);
    if (FCDP_RETRY_ONCE(fcdp__driver_phys_release(drv, page)))
        fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    return status ? fcdp__failure_restore(&failure) : FCDP_OK;
}

fcdp_status fcdp__region_map_host(fcdp_region *region, fcdp_account *account, int numa_node) {
    fcdp_tiering *tiering = region->tiering;
    FCDP_CHECK(1, region->block && !region->slot && !region->last_use);
    fcdp_slot *slot = calloc(1, sizeof *slot);
    if (!slot) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory to map '%s'", region->name);
    slot->on_host = true;
    slot->n_mapped = 1;
    slot->n_pages = fcdp__region_pages(region);
    slot->page_bytes = fcdp__driver_page_bytes(tiering->drv);
    fcdp_status status = pages_take(region, account, node_of(numa_node), slot);
    if (status) {
        free(slot);
        return status;
    }
    fcdp__region_lock(region);
    fcdp__region_begin_move(region);
    fcdp__region_unlock(region);
    status = fcdp__vrange_map(region->range, slot->phys, slot_bytes(slot));
    fcdp__region_lock(region);
    if (!status) {
        slot->owner = region;
        slot->number = ++tiering->n_slots_made;
        region->slot = slot;
        region->account = account;
        region->kept = true;
        region->tier = FCDP_TIER_MAPPED;
        fcdp__count(&tiering->counts, FCDP_COUNT_HOST_MAPPED_BYTES, slot_bytes(slot));
        fcdp__trace_now(FCDP_EVENT_HOST_MAP, region->object, slot_bytes(slot), (uint64_t)node_of(numa_node),
                        0);
    }
    fcdp__region_end_move(region);
    fcdp__region_unlock(region);
    if (!status) return FCDP_OK;
    fcdp_failure failure = fcdp__failure_keep(status);
    pages_give(tiering, account, slot);
    return fcdp__failure_restore(&failure);
}

fcdp_status fcdp__region_unmap_host(fcdp_region *region, fcdp_tier tier) {
    fcdp_tiering *tiering = region->tiering;
    FCDP_CHECK(1, fcdp__region_is_mapped_on_host(region) && !region->last_use);
    fcdp__region_lock(region);
    fcdp__region_begin_move(region);
    fcdp_slot *slot = region->slot;
    fcdp_account *account = region->account;
    fcdp__region_unlock(region);
    fcdp_status status = FCDP_RETRY_ONCE(fcdp__vrange_unmap(region->range));
    fcdp__region_lock(region);
    if (!status) {
        region->slot = NULL;
        region->account = NULL;
        region->kept = false;
        region->tier = tier;
    }
    fcdp__region_end_move(region);
    fcdp__region_unlock(region);
    if (!status) fcdp__mapped_free(tiering, account, slot);
    return status;
}
