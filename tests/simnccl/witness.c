/* witness.c - stands before the NCCL double in a Python process, and counts the calls into
 * NCCL that a thread with the GIL makes. */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>

#include "comm/nccl_api.h"

#define EXPORT __attribute__((visibility("default")))

static _Atomic unsigned long n_calls, n_with_gil;

/* Whether the calling thread has the GIL; -1: there is no Python here. */
EXPORT int witness_has_gil(void) {
    int (*check)(void) = NULL;
    *(void **)&check = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    return check ? check() : -1;
}

EXPORT unsigned long witness_calls(void) {
    return n_calls;
}

EXPORT unsigned long witness_calls_with_gil(void) {
    return n_with_gil;
}

/* A process without Python counts every call as one with the GIL: nothing would be shown there. */
static void *witnessed(const char *name) {
    n_calls++;
    n_with_gil += witness_has_gil() != 0;
    return dlsym(RTLD_NEXT, name); /* the double, which this library is linked with */
}

#define WITNESS(name, params, args)                                                                          \
    EXPORT ncclResult_t name params {                                                                        \
        ncclResult_t(*next) params = NULL;                                                                   \
        *(void **)&next = witnessed(#name);                                                                  \
        return next args;                                                                                    \
    }

WITNESS(ncclGroupStart, (void), ())
WITNESS(ncclGroupEnd, (void), ())
WITNESS(ncclAllGather, (const void *from, void *to, size_t count, int type, ncclComm_t comm, void *stream),
        (from, to, count, type, comm, stream))
WITNESS(ncclSend, (const void *from, size_t count, int type, int peer, ncclComm_t comm, void *stream),
        (from, count, type, peer, comm, stream))
WITNESS(ncclRecv, (void *to, size_t count, int type, int peer, ncclComm_t comm, void *stream),
        (to, count, type, peer, comm, stream))
WITNESS(ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t *error), (comm, error))
