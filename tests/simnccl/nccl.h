/* nccl.h - NCCL's entry points, as tests call them directly. */
#ifndef FCDP_TESTS_SIMNCCL_NCCL_H
#define FCDP_TESTS_SIMNCCL_NCCL_H

#include <stddef.h>

enum {
    SUCCESS = 0,
    CUDA_ERROR = 1,
    SYSTEM_ERROR = 2,
    INTERNAL_ERROR = 3,
    INVALID_ARGUMENT = 4,
    INVALID_USAGE = 5,
    REMOTE_ERROR = 6,
    IN_PROGRESS = 7
};

typedef struct ncclComm *ncclComm_t;
typedef struct nccl_id {
    char internal[128];
} nccl_id;
typedef struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas; /* the last three from 2.17 on */
} nccl_config;

int ncclGetUniqueId(nccl_id *id);
int ncclCommInitRankConfig(ncclComm_t *comm, int n, nccl_id id, int rank, nccl_config *config);
int ncclCommFinalize(ncclComm_t comm);
int ncclCommDestroy(ncclComm_t comm);
int ncclCommAbort(ncclComm_t comm);
int ncclCommGetAsyncError(ncclComm_t comm, int *error);
const char *ncclGetLastError(ncclComm_t comm);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclAllGather(const void *from, void *to, size_t count, int type, ncclComm_t comm, void *stream);
int ncclSend(const void *from, size_t count, int type, int peer, ncclComm_t comm, void *stream);
int ncclRecv(void *to, size_t count, int type, int peer, ncclComm_t comm, void *stream);

#endif
