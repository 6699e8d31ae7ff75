/* join.c - how members find each other: a page of shared memory for each unique id. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim/nccl/internal.h"

/* What a unique id holds. */
typedef struct id_content {
    uint64_t nonce;
    int32_t pid, fd;
} id_content;

typedef struct own_id { /* its descriptor stays open until this process' member has seen all others */
    struct own_id *next;
    uint64_t nonce;
    int fd;
} own_id;

static own_id *own_ids;

ncclResult_t simnccl__id_make(ncclUniqueId *id) {
    static uint64_t n;
    int fd = memfd_create("fcdp-simnccl", MFD_CLOEXEC);
    own_id *own = malloc(sizeof *own);
    if (fd < 0 || !own || ftruncate(fd, sizeof(page)) != 0) abort();
    id_content content = {
        .nonce = ((uint64_t)getpid() << 32 | ++n) ^ fcdp__now_ns() << 8, .pid = getpid(), .fd = fd};
    if (pwrite(fd, &content.nonce, sizeof content.nonce, offsetof(page, nonce)) != sizeof content.nonce)
        abort();
    *own = (own_id){own_ids, content.nonce, fd};
    own_ids = own;
    memset(id, 0, sizeof *id);
    memcpy(id->internal, &content, sizeof content);
    return ncclSuccess;
}

void simnccl__id_close(uint64_t nonce) {
    for (own_id **link = &own_ids; *link;) {
        own_id *own = *link;
        if (nonce && own->nonce != nonce) {
            link = &own->next;
            continue;
        }
        *link = own->next;
        close(own->fd);
        free(own);
    }
}

static page *page_open(const id_content *content) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", content->pid, content->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return NULL;
    page *at = mmap(NULL, sizeof *at, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) return NULL;
    if (at->nonce == content->nonce) return at;
    munmap(at, sizeof *at);
    return NULL;
}

ncclResult_t simnccl__join(ncclComm_t comm, const ncclUniqueId *id) {
    id_content content;
    memcpy(&content, id->internal, sizeof content);
    if (content.pid <= 0) return simnccl__broken(ncclInvalidArgument, "ncclCommInitRankConfig: no unique id");
    comm->page = page_open(&content);
    if (!comm->page) {
        snprintf(simnccl.last_error, sizeof simnccl.last_error,
                 "the process %d that made the unique id is gone", content.pid);
        return ncclRemoteError;
    }
    comm->nonce = content.nonce;
    page_member *own = &comm->page->members[comm->rank];
    if (atomic_load(&own->joined))
        return simnccl__broken(ncclInvalidUsage, "ncclCommInitRankConfig: rank %u has joined already",
                               comm->rank);
    own->n = comm->n;
    own->device = comm->device->rank;
    atomic_store_explicit(&own->joined, 1, memory_order_release);
    return ncclInProgress;
}

/* The member that must be at this place of a lane; the number of ranks if the lane has none there. */
static uint32_t device_at(const sim_device *d, simnet_lane lane, uint32_t place) {
    switch (lane) {
    case SIMNET_INTER: return place * d->ranks_per_node + d->local;
    case SIMNET_INTRA: return d->node * d->ranks_per_node + place;
    default: return place;
    }
}

static bool is_lane(const ncclComm_t comm, simnet_lane lane) {
    bool is = comm->n == simnet_comm_size(simnet_comm_get(comm->device->endpoint, lane, 0));
    for (uint32_t i = 0; i < comm->n && is; i++)
        is = comm->page->members[i].device == device_at(comm->device, lane, i);
    return is;
}

static ncclResult_t members_check(const ncclComm_t comm) {
    const page_member *members = comm->page->members;
    for (uint32_t i = 0; i < comm->n; i++) {
        if (members[i].n != comm->n)
            return simnccl__broken(ncclInvalidArgument,
                                   "ncclCommInitRankConfig: rank %u says %u ranks, rank %u says %u",
                                   comm->rank, comm->n, i, members[i].n);
        for (uint32_t j = 0; j < i; j++)
            if (members[i].device == members[j].device)
                return simnccl__broken(ncclInvalidUsage,
                                       "Duplicate GPU detected : rank %u and rank %u both on device %u", j, i,
                                       members[i].device);
    }
    return ncclSuccess;
}

ncclResult_t simnccl__join_look(ncclComm_t comm) {
    for (uint32_t i = 0; i < comm->n; i++)
        if (!atomic_load_explicit(&comm->page->members[i].joined, memory_order_acquire))
            return ncclInProgress;
    ncclResult_t result = members_check(comm);
    if (result != ncclSuccess) return result;
    int lane = 0;
    while (lane < SIMNET_N_LANES && !is_lane(comm, (simnet_lane)lane)) lane++;
    if (lane == SIMNET_N_LANES)
        return simnccl__broken(ncclInvalidArgument,
                               "ncclCommInitRankConfig: its %u members are no lane of the fabric", comm->n);
    comm->net = simnet_comm_get(comm->device->endpoint, (simnet_lane)lane, comm->device->ids[lane]);
    if (!comm->net)
        return simnccl__broken(ncclSystemError,
                               "ncclCommInitRankConfig: the fabric has no more than %u communicators a lane",
                               comm->device->ids[lane]);
    comm->device->ids[lane]++;
    comm->state = COMM_READY;
    simnccl__id_close(comm->nonce);
    return ncclSuccess;
}
