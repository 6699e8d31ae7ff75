/* vrange.c - reserves, maps and unmaps.
 *
 * It decides nothing and waits for nothing. A map whose access cannot be set is undone; if the driver refuses
 * that too, the range remembers it, and its next map, unmap or destroy undoes it first.
 */
#include "alloc/vrange.h"

#include "alloc/trace.h"
#include "base/size.h"

#include <stdlib.h>

/* accessible => mapped_bytes > 0. mapped_bytes > 0 && !accessible: only after an undoing that the driver
 * refused; the next map, unmap or destroy undoes it first. */
struct fcdp_vrange {
    fcdp_driver *drv;
    fcdp_dptr base;
    size_t bytes, mapped_bytes;
    bool accessible;
};

fcdp_status fcdp__vrange_create(fcdp_driver *drv, size_t bytes, fcdp_vrange **range_out) {
    size_t page_bytes = fcdp__driver_page_bytes(drv);
    if (!bytes || bytes > SIZE_MAX - page_bytes)
        return fcdp__fail(FCDP_ERR_INVALID, "a range of %zu bytes cannot be reserved", bytes);
    fcdp_vrange *range = calloc(1, sizeof *range);
    if (!range) return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no host memory for a range");
    *range = (fcdp_vrange){.drv = drv, .bytes = fcdp__round_up(bytes, page_bytes)};
    fcdp_status status = fcdp__driver_range_reserve(drv, range->bytes, &range->base);
    if (status) {
        free(range);
        return status;
    }
    *range_out = range;
    return FCDP_OK;
}

static fcdp_status range_unmap(fcdp_vrange *range) {
    if (range->mapped_bytes == 0) return FCDP_OK;
    fcdp_status status = fcdp__driver_unmap(range->drv, range->base, range->mapped_bytes);
    if (status) return status;
    fcdp__trace_unmap(range->base.addr, range->mapped_bytes);
    range->mapped_bytes = 0;
    range->accessible = false;
    return FCDP_OK;
}

void fcdp__vrange_destroy(fcdp_vrange *range) {
    if (!range) return;
    fcdp_status status = FCDP_RETRY_ONCE(range_unmap(range));
    if (!status) status = FCDP_RETRY_ONCE(fcdp__driver_range_free(range->drv, range->base, range->bytes));
    if (status)
        fcdp__log(FCDP_LOG_WARN, "%s of device addresses are lost until the process ends: %s",
                  fcdp__size_text(range->bytes).s, fcdp_error_text());
    free(range);
}

fcdp_dptr fcdp__vrange_base(const fcdp_vrange *range) {
    return range->base;
}
size_t fcdp__vrange_bytes(const fcdp_vrange *range) {
    return range->bytes;
}
bool fcdp__vrange_is_mapped(const fcdp_vrange *range) {
    return range->accessible;
}

/* Without access the handle is taken away again. The text of the first failure says why. */
fcdp_status fcdp__vrange_map(fcdp_vrange *range, fcdp_phys handle, size_t bytes) {
    FCDP_CHECK(1, !range->accessible && bytes > 0 && bytes <= range->bytes);
    fcdp_status status = range_unmap(range);
    if (!status) status = fcdp__driver_map(range->drv, range->base, bytes, handle);
    if (status) return status;
    range->mapped_bytes = bytes;
    fcdp__trace_map(range->base.addr, bytes);
    status = fcdp__driver_set_access(range->drv, range->base, bytes);
    range->accessible = !status;
    if (!status) return FCDP_OK;
    fcdp_failure failure = fcdp__failure_keep(status);
    if (!range_unmap(range)) return fcdp__failure_restore(&failure);
    return fcdp__fail(status, "%s; and %zu bytes stay under the range, since undoing it failed too: %s",
                      failure.text, range->mapped_bytes, fcdp_error_text());
}

fcdp_status fcdp__vrange_unmap(fcdp_vrange *range) {
    FCDP_CHECK(1, range->accessible);
    return range_unmap(range);
}
