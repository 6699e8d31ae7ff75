/* one_rank_nccl - what one rank alone can show of NCCL, as comm/nccl.c uses it, on the driver that
 * FCDP_DRIVER chooses: the library, a communicator that does not block, all-gathers, its end and its abort;
 * and that a peer that never comes is a timeout.
 *
 * Usage: one_rank_nccl [LIBRARY]; else libnccl.so.2 wherever the loader finds it. One figure a line, "NAME =
 * VALUE UNIT". Exit status 1, with a line on stderr, where something is not as FCDP needs it. With the double
 * (sim/nccl) SIMNCCL_FABRIC names a fabric of two nodes of one rank, and RANK is 0.
 */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/options.h"
#include "comm/nccl.h"
#include "comm/nccl_api.h"

extern char **environ;
enum { BYTES = 64 << 20, GATHERED = 16 << 20, SETTLE_S = 60, TIMEOUT_S = 3 };

static void broken(const char *what, const char *why) {
    fprintf(stderr, "one_rank_nccl: %s: %s\n", what, why);
    _exit(1);
}

static void must(fcdp_status status, const char *what) {
    if (status) broken(what, fcdp_error_text());
}

typedef struct rank {
    fcdp_driver *drv;
    fcdp_nccl *nccl;
    ncclComm_t comm;
    fcdp_dptr at;
    fcdp_phys handle;
    fcdp_stream stream;
    unsigned char *host;
} rank;

static void ok(const rank *r, ncclResult_t result, const char *call) {
    if (result != ncclSuccess && result != ncclInProgress) broken(call, r->nccl->ncclGetErrorString(result));
}

/* Until what was begun has been done on the host. */
static void settle(const rank *r, const char *call) {
    ncclResult_t state = ncclInProgress;
    for (uint64_t begin_ns = fcdp__now_ns(); state == ncclInProgress; sched_yield()) {
        ok(r, r->nccl->ncclCommGetAsyncError(r->comm, &state), "ncclCommGetAsyncError");
        if (fcdp__now_ns() - begin_ns > SETTLE_S * 1000000000ull) broken(call, "is in progress for a minute");
    }
    ok(r, state, call);
}

static double ms_since(uint64_t begin_ns) {
    return (double)(fcdp__now_ns() - begin_ns) / 1e6;
}

/* ---- with the device's context ---- */

static void comm_init(void *arg) {
    rank *r = arg;
    ncclUniqueId id;
    ncclConfig_v21700 config = {.size = sizeof config,
                                .magic = (unsigned)NCCL_API_MAGIC,
                                .version = NCCL_CONFIG_VERSION,
                                .blocking = 0,
                                .cgaClusterSize = NCCL_CONFIG_UNDEF,
                                .minCTAs = NCCL_CONFIG_UNDEF,
                                .maxCTAs = NCCL_CONFIG_UNDEF};
    uint64_t begin_ns = fcdp__now_ns();
    ok(r, r->nccl->ncclGetUniqueId(&id), "ncclGetUniqueId");
    ok(r, r->nccl->ncclCommInitRankConfig(&r->comm, 1, id, 0, &config), "ncclCommInitRankConfig");
    settle(r, "ncclCommInitRankConfig");
    printf("a communicator of one rank is made in = %.1f ms\n", ms_since(begin_ns));
}

static void gather(const rank *r, uint64_t from, uint64_t to) {
    ok(r, r->nccl->ncclGroupStart(), "ncclGroupStart");
    ok(r,
       r->nccl->ncclAllGather((const void *)(uintptr_t)from, (void *)(uintptr_t)to, GATHERED, ncclInt8,
                              r->comm, r->stream),
       "ncclAllGather");
    ok(r, r->nccl->ncclGroupEnd(), "ncclGroupEnd");
    settle(r, "an all-gather");
}

static void in_place(void *arg) {
    gather(arg, ((rank *)arg)->at.addr, ((rank *)arg)->at.addr);
}

static void to_another_place(void *arg) {
    gather(arg, ((rank *)arg)->at.addr, ((rank *)arg)->at.addr + BYTES / 2);
}

static void comm_abort(void *arg) {
    rank *r = arg;
    uint64_t begin_ns = fcdp__now_ns();
    ok(r, r->nccl->ncclCommAbort(r->comm), "ncclCommAbort");
    printf("an abort takes = %.1f ms\n", ms_since(begin_ns));
}

static void comm_end(void *arg) {
    rank *r = arg;
    uint64_t begin_ns = fcdp__now_ns();
    ok(r, r->nccl->ncclCommFinalize(r->comm), "ncclCommFinalize");
    settle(r, "ncclCommFinalize");
    ok(r, r->nccl->ncclCommDestroy(r->comm), "ncclCommDestroy");
    printf("finalize and destroy take = %.1f ms\n", ms_since(begin_ns));
}

/* ---- what came ---- */

static void bytes_check(const rank *r, size_t offset, const char *what) {
    unsigned char *got = malloc(GATHERED);
    if (!got) broken(what, "no memory");
    must(fcdp__driver_copy_d2h(r->drv, got, fcdp__dptr_add(r->at, offset), GATHERED, r->stream), what);
    must(fcdp__driver_stream_sync(r->drv, r->stream), what);
    if (memcmp(got, r->host, GATHERED)) broken(what, "the bytes are not those that were sent");
    printf("%s brings the bytes = 1 true\n", what);
    free(got);
}

static void with_context(rank *r, void (*call)(void *)) {
    must(fcdp__driver_with_context(r->drv, call, r), "the device's context");
    fflush(stdout);
}

static void memory_make(rank *r) {
    r->host = malloc(GATHERED);
    if (!r->host) broken("memory", "none");
    for (size_t i = 0; i < GATHERED; i++) r->host[i] = (unsigned char)(i * 7 + (i >> 13));
    must(fcdp__driver_range_reserve(r->drv, BYTES, &r->at), "memory");
    must(fcdp__driver_phys_create(r->drv, BYTES, &r->handle), "memory");
    must(fcdp__driver_map(r->drv, r->at, BYTES, r->handle), "memory");
    must(fcdp__driver_set_access(r->drv, r->at, BYTES), "memory");
    must(fcdp__driver_stream_create(r->drv, &r->stream), "memory");
    must(fcdp__driver_copy_h2d(r->drv, r->at, r->host, GATHERED, r->stream), "memory");
    must(fcdp__driver_stream_sync(r->drv, r->stream), "memory");
}

/* The other node's rank never comes: as in a job, by comm/nccl.c. */
static void timeout_check(const rank *r) {
    fcdp_topology two = {.n_ranks = 2, .n_nodes = 2, .node_size = 1};
    fcdp_nccl_ids ids[2] = {0};
    fcdp_nccl_transport *transport;
    must(fcdp__nccl_ids_make(r->nccl, &two, &ids[0]), "ids");
    uint64_t begin_ns = fcdp__now_ns();
    fcdp_nccl_config config = {
        .nccl = r->nccl, .drv = r->drv, .topology = two, .ids = ids, .timeout_s = TIMEOUT_S};
    fcdp_status status = fcdp__nccl_create(&config, &transport);
    double took_ms = ms_since(begin_ns);
    if (status != FCDP_ERR_TIMEOUT)
        broken("a peer that never comes is no timeout", status ? fcdp_error_text() : "no failure");
    fprintf(stderr, "%s\n", fcdp_error_text());
    printf("a peer that never comes is a timeout (of %d s) after = %.2f s\n", TIMEOUT_S, took_ms / 1e3);
    fflush(stdout);
    if (took_ms > 1e3 * (TIMEOUT_S + 10)) broken("the timeout", "came late");
}

int main(int argc, char **argv) {
    fcdp_options options;
    rank r = {0};
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
    must(fcdp_options_load(environ, &options), "options");
    must(fcdp__driver_open(options.driver, 0, NULL, &r.drv), "driver");
    uint64_t begin_ns = fcdp__now_ns();
    must(fcdp__nccl_load(argc > 1 ? argv[1] : NULL, NULL, &r.nccl), "library");
    printf("NCCL's version = %d code\nloading the library takes = %.1f ms\n", r.nccl->version,
           ms_since(begin_ns));
    memory_make(&r);
    with_context(&r, comm_init);
    with_context(&r, in_place);
    bytes_check(&r, 0, "an all-gather in place");
    if (!r.nccl->is_double) { /* which refuses it */
        with_context(&r, to_another_place);
        bytes_check(&r, BYTES / 2, "an all-gather to another place");
    }
    with_context(&r, comm_end);
    with_context(&r, comm_init);
    with_context(&r, in_place);
    with_context(&r, comm_abort);
    bytes_check(&r, 0, "after an abort the device still works: a copy");
    timeout_check(&r);
    _exit(0); /* threads of NCCL's may still wait for the peer */
}
