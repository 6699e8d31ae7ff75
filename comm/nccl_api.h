/* nccl_api.h - NCCL's ABI as its own header has it, for nccl.c alone: building needs no NCCL. All of it is
 * ABI, and older than any version that serves here.
 */
#ifndef FCDP_NCCL_API_H
#define FCDP_NCCL_API_H

#include <stdbool.h>
#include <stddef.h>

typedef int ncclResult_t;
typedef struct ncclComm *ncclComm_t;
typedef struct ncclUniqueId {
    char internal[128];
} ncclUniqueId;
/* 2.17's. NCCL goes by `version` for which fields there are, so a newer library takes it as it is. */
typedef struct ncclConfig_v21700 {
    size_t size;
    unsigned magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs; /* NCCL_CONFIG_UNDEF: NCCL's own choice */
    const char *netName;
} ncclConfig_v21700;

enum {
    ncclSuccess = 0,
    ncclInvalidUsage = 5,
    ncclInProgress = 7,
    ncclInt8 = 0,
    NCCL_API_MAGIC = (int)0xcafebeef,
    NCCL_CONFIG_UNDEF = (int)0x80000000,
    NCCL_CONFIG_VERSION = 21700, /* ncclConfig_v21700's */
    NCCL_OLDEST = 22600          /* NCCL_LAUNCH_ORDER_IMPLICIT */
};

#define NCCL_CALLS(X)                                                                                        \
    X(ncclGetVersion, ncclResult_t, (int *version))                                                          \
    X(ncclGetUniqueId, ncclResult_t, (ncclUniqueId * id))                                                    \
    X(ncclCommInitRankConfig, ncclResult_t,                                                                  \
      (ncclComm_t * comm, int n_ranks, ncclUniqueId id, int rank, ncclConfig_v21700 *config))                \
    X(ncclCommFinalize, ncclResult_t, (ncclComm_t comm))                                                     \
    X(ncclCommDestroy, ncclResult_t, (ncclComm_t comm))                                                      \
    X(ncclCommAbort, ncclResult_t, (ncclComm_t comm))                                                        \
    X(ncclCommGetAsyncError, ncclResult_t, (ncclComm_t comm, ncclResult_t * error))                          \
    X(ncclGetErrorString, const char *, (ncclResult_t result))                                               \
    X(ncclGetLastError, const char *, (ncclComm_t comm))                                                     \
    X(ncclGroupStart, ncclResult_t, (void))                                                                  \
    X(ncclGroupEnd, ncclResult_t, (void))                                                                    \
    X(ncclAllGather, ncclResult_t,                                                                           \
      (const void *from, void *to, size_t count, int type, ncclComm_t comm, void *stream))                   \
    X(ncclSend, ncclResult_t,                                                                                \
      (const void *from, size_t count, int type, int peer, ncclComm_t comm, void *stream))                   \
    X(ncclRecv, ncclResult_t, (void *to, size_t count, int type, int peer, ncclComm_t comm, void *stream))

struct fcdp_nccl {
#define AS_FIELD(name, result, args) result(*name) args;
    NCCL_CALLS(AS_FIELD)
#undef AS_FIELD
    int version;    /* 2.28.9: 22809 */
    bool is_double; /* the test's: it moves the simulated device's memory, and no other */
};

#endif
