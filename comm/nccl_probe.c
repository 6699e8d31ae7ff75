/* nccl_probe.c - see the header. */
#include "comm/nccl_probe.h"

#include <stdlib.h>
#include <string.h>

#include "comm/nccl_internal.h"

enum { PROBE_BYTES = 64 };

typedef struct probe {
    fcdp_nccl_transport *t;
    fcdp_stream stream;
    fcdp_dptr at; /* one page */
    size_t page_bytes;
    fcdp_phys page;
    int n_made;    /* of the steps of fcdp__nccl_probe */
    uint8_t *host; /* what goes to the page, and what comes from it */
} probe;

/* Each step that was made, backwards. Nothing of it is on the stream any more. */
static void probe_free(probe *p) {
    fcdp_driver *drv = p->t->drv;
    fcdp_status status = FCDP_OK;
    if (p->n_made > 3) fcdp__driver_stream_destroy(drv, p->stream);
    if (p->n_made > 2) status = fcdp__driver_unmap(drv, p->at, p->page_bytes);
    if (p->n_made > 1 && !status) status = fcdp__driver_phys_release(drv, p->page);
    if (p->n_made > 0 && !status) status = fcdp__driver_range_free(drv, p->at, p->page_bytes);
    if (status) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    free(p->host);
}

/* Not by a synchronise, which would have no end without a peer. */
static fcdp_status stream_await(probe *p, const nccl_lane *lane) {
    fcdp_nccl_transport *t = p->t;
    uint64_t begin_ns = fcdp__now_ns();
    for (unsigned n = 0;; n++) {
        fcdp_status status = fcdp__driver_stream_query(t->drv, p->stream);
        if (status != FCDP_PENDING) return status;
        status = fcdp__nccl_check(t);
        if (status) return status;
        uint64_t now_ns = fcdp__now_ns();
        if (now_ns > fcdp__nccl_wait_ends_ns(t))
            return fcdp__fail(FCDP_ERR_TIMEOUT,
                              "the first all-gather (%s, member %u of %u) has not ended after %.1f s "
                              "(FCDP_TIMEOUT=%g): the "
                              "network does not carry it; NCCL_DEBUG=INFO shows what NCCL has chosen",
                              lane->name, lane->place, lane->size, (double)(now_ns - begin_ns) / 1e9,
                              t->timeout_s);
        fcdp__nccl_poll_pause(n);
    }
}

static uint8_t *probe_place(const probe *p, const fcdp_part *part, uint32_t member) {
    return p->host + (part->at.addr - p->at.addr) + member * part->stride_bytes;
}

/* In both forms: members side by side at the page's begin, and with a gap each behind them. */
static fcdp_status lane_probe(probe *p, int number) {
    fcdp_nccl_transport *t = p->t;
    const nccl_lane *lane = &t->lanes[number];
    fcdp_part parts[2];
    if (lane->size == 1) return FCDP_OK;
    size_t bytes = (size_t)3 * lane->size * PROBE_BYTES;
    if (bytes > p->page_bytes) return fcdp__fail(FCDP_ERR_UNSUPPORTED, "a lane of %u members", lane->size);
    parts[0] = (fcdp_part){p->at, PROBE_BYTES, PROBE_BYTES};
    parts[1] = (fcdp_part){fcdp__dptr_add(p->at, (size_t)lane->size * PROBE_BYTES), PROBE_BYTES,
                           2 * PROBE_BYTES};
    memset(p->host, 0, bytes);
    for (int i = 0; i < 2; i++)
        memset(probe_place(p, &parts[i], lane->place), (uint8_t)(lane->place + 1), PROBE_BYTES);
    fcdp_status status = fcdp__driver_copy_h2d(t->drv, p->at, p->host, bytes, p->stream);
    if (!status) status = fcdp__nccl_enqueue(t, (fcdp_lane)number, parts, 2, p->stream);
    if (!status) status = stream_await(p, lane);
    if (!status) status = fcdp__driver_copy_d2h(t->drv, p->host, p->at, bytes, p->stream);
    if (!status) status = fcdp__driver_stream_sync(t->drv, p->stream);
    if (status) return status;
    for (int i = 0; i < 2; i++)
        for (uint32_t member = 0; member < lane->size; member++)
            for (size_t k = 0; k < PROBE_BYTES; k++)
                if (probe_place(p, &parts[i], member)[k] != (uint8_t)(member + 1))
                    return fcdp__fail(FCDP_ERR_TRANSPORT,
                                      "the first all-gather (%s, member %u of %u) brought %u from member %u, "
                                      "not %u: NCCL %d "
                                      "does not carry bytes right here; FCDP cannot use it",
                                      lane->name, lane->place, lane->size,
                                      probe_place(p, &parts[i], member)[k], member, (uint8_t)(member + 1),
                                      t->nccl.version);
    return FCDP_OK;
}

/* After a failure the stream ends with the abort; where that takes too long, what it uses stays. */
fcdp_status fcdp__nccl_probe(fcdp_nccl_transport *t) {
    fcdp_driver *drv = t->drv;
    probe p = {.t = t, .page_bytes = fcdp__driver_page_bytes(drv)};
    p.host = malloc(p.page_bytes);
    fcdp_status status = p.host ? fcdp__driver_range_reserve(drv, p.page_bytes, &p.at)
                                : fcdp__fail(FCDP_ERR_SYSTEM, "no memory to try NCCL's communicators");
    if (!status) p.n_made++, status = fcdp__driver_phys_create(drv, p.page_bytes, &p.page);
    if (!status) p.n_made++, status = fcdp__driver_map(drv, p.at, p.page_bytes, p.page);
    if (!status) p.n_made++, status = fcdp__driver_set_access(drv, p.at, p.page_bytes);
    if (!status) status = fcdp__driver_stream_create(drv, &p.stream);
    if (!status) p.n_made++;
    for (int lane = 0; lane < FCDP_N_LANES && !status; lane++) status = lane_probe(&p, lane);
    if (!status) {
        probe_free(&p);
        return FCDP_OK;
    }
    fcdp_failure error = fcdp__failure_keep(status);
    fcdp__nccl_abort(t, error.text);
    if (fcdp__nccl_abort_await(t) && (p.n_made < 4 || !fcdp__driver_stream_sync(t->drv, p.stream)))
        probe_free(&p);
    return fcdp__failure_restore(&error);
}
