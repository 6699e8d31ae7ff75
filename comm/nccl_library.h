/* nccl_library.h - NCCL's library, loaded at run time. */
#ifndef FCDP_NCCL_LIBRARY_H
#define FCDP_NCCL_LIBRARY_H

#include "comm/topology.h"
#include "comm/transport.h"

enum { FCDP_NCCL_ID_BYTES = 128 };

typedef struct fcdp_nccl fcdp_nccl; /* the library's entry points */
/* What one rank brings to the exchange: the ids of the lanes that it leads (it is their first member), the
 * others zero. */
typedef struct fcdp_nccl_ids {
    uint8_t lane[FCDP_N_LANES][FCDP_NCCL_ID_BYTES];
} fcdp_nccl_ids;

/* `named`, if it is not NULL; else the first there is of: the libnccl.so.2 that this process has loaded
 * (torch's), `beside_torch` (may be NULL), the loader's. NCCL orders the communicators of one library only,
 * so the one that torch uses comes before the others. The library stays loaded. FCDP_ERR_UNSUPPORTED: there
 * is none, it is older than 2.26, or NCCL_LAUNCH_ORDER_IMPLICIT is not set. The caller frees with
 * fcdp__nccl_unload, after all that uses it. */
fcdp_status fcdp__nccl_load(const char *named, const char *beside_torch,
                            fcdp_nccl **nccl_out) FCDP_MUST_CHECK;
void fcdp__nccl_unload(fcdp_nccl *nccl);

fcdp_status fcdp__nccl_ids_make(const fcdp_nccl *nccl, const fcdp_topology *topology,
                                fcdp_nccl_ids *ids_out) FCDP_MUST_CHECK;

#endif
