/* pin.c - page-locks a block's ranges, and unlocks them.
 *
 * A range may take several registrations, since drivers limit the size of one. No registration may stay
 * behind: another mapping may get its addresses, which CUDA would then take for the old pages.
 */
#include "tiering/pin.h"

void fcdp__pinned_cover(const fcdp_piece *pieces, size_t n, size_t page_bytes, fcdp_pinned *pinned_out) {
    pinned_out->n = 0;
    for (size_t i = 0; i < n; i++) {
        if (!pieces[i].bytes) continue;
        size_t begin = pieces[i].offset_bytes / page_bytes * page_bytes;
        size_t end = fcdp__round_up(pieces[i].offset_bytes + pieces[i].bytes, page_bytes);
        fcdp_piece *last = pinned_out->n ? &pinned_out->ranges[pinned_out->n - 1] : NULL;
        if (last && begin <= last->offset_bytes + last->bytes)
            last->bytes = end - last->offset_bytes;
        else
            pinned_out->ranges[pinned_out->n++] = (fcdp_piece){begin, end - begin};
    }
}

fcdp_status fcdp__pinned_lock(fcdp_driver *drv, char *base, const fcdp_pinned *pinned) {
    for (size_t i = 0; i < pinned->n; i++) {
        fcdp_status status = fcdp__driver_host_pin(drv, base + pinned->ranges[i].offset_bytes,
                                                   pinned->ranges[i].bytes);
        if (!status) continue;
        fcdp_pinned locked = *pinned;
        locked.n = i;
        return locked.n && fcdp__pinned_unlock(drv, base, &locked) ? FCDP_ERR_DRIVER : status;
    }
    return FCDP_OK;
}

/* A failure may be transient, and no registration may stay behind: try twice. */
fcdp_status fcdp__pinned_unlock(fcdp_driver *drv, char *base, const fcdp_pinned *pinned) {
    fcdp_status first = FCDP_OK;
    for (size_t i = 0; i < pinned->n; i++) {
        char *at = base + pinned->ranges[i].offset_bytes;
        fcdp_status status = FCDP_RETRY_ONCE(fcdp__driver_host_unpin(drv, at, pinned->ranges[i].bytes));
        if (status && !first) first = status;
    }
    return first;
}

size_t fcdp__pinned_bytes(const fcdp_pinned *pinned) {
    size_t bytes = 0;
    for (size_t i = 0; i < pinned->n; i++) bytes += pinned->ranges[i].bytes;
    return bytes;
}

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

/* A range longer than fcdp__driver_pin_chunk_bytes is several registrations. */
size_t fcdp__pinned_run_bytes(const fcdp_pinned *pinned, size_t offset_bytes, size_t bytes,
                              bool *pinned_out) {
    *pinned_out = false;
    for (size_t i = 0; i < pinned->n; i++) {
        const fcdp_piece *range = &pinned->ranges[i];
        if (offset_bytes < range->offset_bytes) return smaller(bytes, range->offset_bytes - offset_bytes);
        if (offset_bytes >= range->offset_bytes + range->bytes) continue;
        *pinned_out = true;
        size_t inside = offset_bytes - range->offset_bytes, chunk = fcdp__driver_pin_chunk_bytes;
        return smaller(bytes, smaller(range->bytes - inside, chunk - inside % chunk));
    }
    return bytes;
}
