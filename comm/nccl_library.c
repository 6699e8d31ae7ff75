/* nccl_library.c - see the header. */
#include "comm/nccl_library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/nccl_api.h"

_Static_assert(sizeof(ncclUniqueId) == FCDP_NCCL_ID_BYTES, "NCCL's ABI");

static const char IMPLICIT_ORDER[] = "NCCL_LAUNCH_ORDER_IMPLICIT";

/* False, with the reason appended: it is not there, or lacks something. It stays loaded all
 * the same: it has threads of its own. */
static bool api_load(const char *path, int flags, fcdp_nccl *nccl, char *reasons, size_t n_reasons) {
    size_t at = strlen(reasons);
    const char *between = at ? "; " : "";
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | flags);
    if (!library && flags) return false;
    if (!library) {
        snprintf(reasons + at, n_reasons - at, "%s%s", between, dlerror());
        return false;
    }
#define AS_LOAD(name, result, args)                                                                          \
    if (!(*(void **)&nccl->name = dlsym(library, #name))) {                                                  \
        snprintf(reasons + at, n_reasons - at, "%s%s has no %s", between, path, #name);                      \
        return false;                                                                                        \
    }
    NCCL_CALLS(AS_LOAD)
    nccl->is_double = dlsym(library, "simnccl_state") != NULL;
    return true;
}

/* Each communicator's kernels hold SMs until its members have come. Without an order on the device, two of
 * them can hold it against each other on two ranks: a deadlock (NCCL's user guide, "Using multiple NCCL
 * communicators concurrently"). NCCL makes the order of their launches that of the device, for the
 * communicators of one library, where this variable was set before its first launch. */
static fcdp_status order_check(void) {
    const char *value = getenv(IMPLICIT_ORDER);
    if (value && strtol(value, NULL, 10) != 0) return FCDP_OK;
    return fcdp__fail(
        FCDP_ERR_UNSUPPORTED,
        "%s is %s, so the job's communicators could block each other on the device; set it to 1 "
        "before the job starts",
        IMPLICIT_ORDER, value ? value : "not set");
}

fcdp_status fcdp__nccl_load(const char *named, const char *beside_torch, fcdp_nccl **nccl_out) {
    char reasons[512] = "";
    fcdp_nccl *nccl = calloc(1, sizeof *nccl);
    if (!nccl) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for NCCL's entry points");
    bool loaded = named ? api_load(named, 0, nccl, reasons, sizeof reasons)
                        : api_load("libnccl.so.2", RTLD_NOLOAD, nccl, reasons, sizeof reasons);
    if (!loaded && !named && beside_torch) loaded = api_load(beside_torch, 0, nccl, reasons, sizeof reasons);
    if (!loaded && !named) loaded = api_load("libnccl.so.2", 0, nccl, reasons, sizeof reasons);
    fcdp_status status = FCDP_OK;
    if (!loaded)
        status = fcdp__fail(
            FCDP_ERR_UNSUPPORTED,
            "no NCCL that FCDP can use: %s; it must be version 2.26 or later, beside torch or in the "
            "library path",
            reasons);
    else if (nccl->ncclGetVersion(&nccl->version) != ncclSuccess || nccl->version < NCCL_OLDEST)
        status = fcdp__fail(FCDP_ERR_UNSUPPORTED,
                            "NCCL says that it is version %d; FCDP needs 2.26 (22600) or later, which orders "
                            "the collectives of several communicators on a device",
                            nccl->version);
    else
        status = order_check();
    if (status)
        free(nccl);
    else
        *nccl_out = nccl;
    return status;
}

void fcdp__nccl_unload(fcdp_nccl *nccl) {
    free(nccl);
}

/* NCCL begins a thread for each id, which waits for the members: so only who leads a lane makes one. */
fcdp_status fcdp__nccl_ids_make(const fcdp_nccl *nccl, const fcdp_topology *topology,
                                fcdp_nccl_ids *ids_out) {
    fcdp_nccl_ids ids = {0};
    for (int lane = 0; lane < FCDP_N_LANES; lane++) {
        bool leads = lane == FCDP_LANE_NODE ? topology->local == 0 && topology->node_size > 1
                                            : topology->node == 0;
        if (!leads) continue;
        ncclUniqueId id;
        ncclResult_t result = nccl->ncclGetUniqueId(&id);
        if (result != ncclSuccess)
            return fcdp__fail(
                FCDP_ERR_TRANSPORT,
                "ncclGetUniqueId: %s (%s); NCCL_SOCKET_IFNAME names the network interface to use, "
                "NCCL_DEBUG=INFO shows more",
                nccl->ncclGetErrorString(result), nccl->ncclGetLastError(NULL));
        memcpy(ids.lane[lane], id.internal, sizeof id.internal);
    }
    *ids_out = ids;
    return FCDP_OK;
}
