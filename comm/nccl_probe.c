/* nccl_probe.c - see the header. */
#include "comm/nccl_probe.h"

#include <stdlib.h>
#include <string.h>

#include "comm/nccl_internal.h"

enum { PROBE_BYTES = 64, PROBE_STEP = 16 };

size_t fcdp__nccl_probe_bytes = (size_t)32 << 20;

typedef struct probe {
    fcdp_nccl_transport *t;
    fcdp_stream stream;
    fcdp_dptr at; /* whole pages */
    size_t bytes;
    fcdp_phys pages;
    int n_made;    /* of the steps of fcdp__nccl_probe */
    uint8_t *host; /* what goes to the pages, and what comes from them */
} probe;

/* Each step that was made, backwards. Nothing of it is on the stream any more. */
static void probe_free(probe *p) {
    fcdp_driver *drv = p->t->drv;
    fcdp_status status = FCDP_OK;
    if (p->n_made > 3) fcdp__driver_stream_destroy(drv, p->stream);
    if (p->n_made > 2) status = fcdp__driver_unmap(drv, p->at, p->bytes);
    if (p->n_made > 1 && !status) status = fcdp__driver_phys_release(drv, p->pages);
    if (p->n_made > 0 && !status) status = fcdp__driver_range_free(drv, p->at, p->bytes);
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

/* All members bring the number of their place, and one more. */
static fcdp_status parts_probe(probe *p, int number, const fcdp_part *parts, int n, size_t bytes) {
    fcdp_nccl_transport *t = p->t;
    const nccl_lane *lane = &t->lanes[number];
    memset(p->host, 0, bytes);
    for (int i = 0; i < n; i++)
        memset(probe_place(p, &parts[i], lane->place), (uint8_t)(lane->place + 1), parts[i].bytes);
    fcdp_status status = fcdp__driver_copy_h2d(t->drv, p->at, p->host, bytes, p->stream);
    if (!status) status = fcdp__nccl_enqueue(t, (fcdp_lane)number, parts, (size_t)n, p->stream);
    if (!status) status = stream_await(p, lane);
    if (!status) status = fcdp__driver_copy_d2h(t->drv, p->host, p->at, bytes, p->stream);
    if (!status) status = fcdp__driver_stream_sync(t->drv, p->stream);
    if (status) return status;
    for (int i = 0; i < n; i++)
        for (uint32_t member = 0; member < lane->size; member++) {
            const uint8_t *came = probe_place(p, &parts[i], member);
            for (size_t k = 0; k < parts[i].bytes; k++)
                if (came[k] != (uint8_t)(member + 1))
                    return fcdp__fail(FCDP_ERR_TRANSPORT,
                                      "the first all-gather (%s, member %u of %u) brought %u from member %u, "
                                      "not %u: NCCL %d "
                                      "does not carry bytes right here; FCDP cannot use it",
                                      lane->name, lane->place, lane->size, came[k], member,
                                      (uint8_t)(member + 1), t->nccl.version);
        }
    return FCDP_OK;
}

/* In both forms: members side by side, and with a gap each behind them. Then ever larger ones. */
static fcdp_status lane_probe(probe *p, int number) {
    uint32_t size = p->t->lanes[number].size;
    if (size == 1) return FCDP_OK;
    const fcdp_part forms[] = {
        {p->at, PROBE_BYTES, PROBE_BYTES},
        {fcdp__dptr_add(p->at, (size_t)size * PROBE_BYTES), PROBE_BYTES, 2 * PROBE_BYTES}};
    if ((size_t)3 * size * PROBE_BYTES > p->bytes)
        return fcdp__fail(FCDP_ERR_UNSUPPORTED, "a lane of %u members", size);
    fcdp_status status = parts_probe(p, number, forms, 2, (size_t)3 * size * PROBE_BYTES);
    for (size_t bytes = PROBE_STEP * PROBE_BYTES; size * bytes <= fcdp__nccl_probe_bytes && !status;
         bytes *= PROBE_STEP)
        status = parts_probe(p, number, &(fcdp_part){p->at, bytes, bytes}, 1, size * bytes);
    return status;
}

/* After a failure the stream ends with the abort; where that takes too long, what it uses stays. */
fcdp_status fcdp__nccl_probe(fcdp_nccl_transport *t) {
    fcdp_driver *drv = t->drv;
    size_t page_bytes = fcdp__driver_page_bytes(drv);
    probe p = {.t = t, .bytes = fcdp__round_up(fcdp__nccl_probe_bytes, page_bytes)};
    p.host = malloc(p.bytes);
    fcdp_status status = p.host ? fcdp__driver_range_reserve(drv, p.bytes, &p.at)
                                : fcdp__fail(FCDP_ERR_SYSTEM, "no memory to try NCCL's communicators");
    if (!status) p.n_made++, status = fcdp__driver_phys_create(drv, p.bytes, &p.pages);
    if (!status) p.n_made++, status = fcdp__driver_map(drv, p.at, p.bytes, p.pages);
    if (!status) p.n_made++, status = fcdp__driver_set_access(drv, p.at, p.bytes);
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
