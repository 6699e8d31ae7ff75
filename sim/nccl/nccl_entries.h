/* nccl_entries.h - the entry points by name, and the gate that each passes. */
#ifndef FCDP_SIMNCCL_ENTRIES_H
#define FCDP_SIMNCCL_ENTRIES_H

#include "sim/nccl/internal.h"

#define SIMNCCL_ENTRIES(X)                                                                                   \
    X(ncclGetVersion)                                                                                        \
    X(ncclGetUniqueId)                                                                                       \
    X(ncclCommInitRankConfig)                                                                                \
    X(ncclCommFinalize)                                                                                      \
    X(ncclCommDestroy)                                                                                       \
    X(ncclCommAbort)                                                                                         \
    X(ncclCommGetAsyncError)                                                                                 \
    X(ncclGroupStart)                                                                                        \
    X(ncclGroupEnd)                                                                                          \
    X(ncclAllGather)                                                                                         \
    X(ncclSend)                                                                                              \
    X(ncclRecv)

typedef enum sim_entry {
#define AS_ENUM(name) ENTRY_##name,
    SIMNCCL_ENTRIES(AS_ENUM)
#undef AS_ENUM
        N_ENTRIES
} sim_entry;

/* Counts the call; ncclSuccess, or the fault that was armed for it. With the lock. */
ncclResult_t simnccl__enter(sim_entry entry);

#endif
