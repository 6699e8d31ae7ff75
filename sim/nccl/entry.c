/* entry.c - communicators' lives, faults, and what the control side asks. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim/nccl/internal.h"
#include "sim/nccl/nccl_entries.h"

enum { VERSION = 22809, CONFIG_MAGIC = (int)0xcafebeef };

typedef struct config_head { /* what all versions of ncclConfig_t begin with */
    size_t size;
    unsigned magic, version;
    int blocking;
    int cgaClusterSize, minCTAs, maxCTAs; /* from 2.17 on */
} config_head;

enum { CONFIG_HEAD_BYTES = 20, CONFIG_CTAS = 21700, CONFIG_UNDEF = (int)0x80000000, OWN_CTAS = 24 };

struct sim_nccl simnccl = {
    .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER, .version = VERSION};

static _Thread_local simnet_endpoint *thread_endpoint;

static struct {
    int entry;          /* -1: any */
    unsigned long left; /* calls; 0: none is armed */
    ncclResult_t result;
} fault;

static const char *const names[N_ENTRIES] = {
#define AS_NAME(name) #name,
    SIMNCCL_ENTRIES(AS_NAME)
#undef AS_NAME
};

ncclResult_t simnccl__enter(sim_entry entry) {
    if (!fault.left || (fault.entry >= 0 && fault.entry != (int)entry) || --fault.left > 0)
        return ncclSuccess;
    snprintf(simnccl.last_error, sizeof simnccl.last_error, "%s was made to fail", names[entry]);
    return fault.result;
}

ncclResult_t simnccl__broken(ncclResult_t result, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(simnccl.last_error, sizeof simnccl.last_error, format, arguments);
    va_end(arguments);
    if (simnccl.state.broken++ == 0)
        snprintf(simnccl.state.text, sizeof simnccl.state.text, "%s", simnccl.last_error);
    fprintf(stderr, "simnccl: %s\n", simnccl.last_error);
    return result;
}

/* ---- control ---- */

static sim_device *device_find(const simnet_endpoint *endpoint) {
    sim_device *device = simnccl.devices;
    while (device && device->endpoint != endpoint) device = device->next;
    return device;
}

static sim_device *device_make(simnet_endpoint *endpoint, fcdp_driver *drv) {
    sim_device *device = calloc(1, sizeof *device);
    if (!device) abort();
    const simnet_comm *inter = simnet_comm_get(endpoint, SIMNET_INTER, 0),
                      *intra = simnet_comm_get(endpoint, SIMNET_INTRA, 0);
    *device = (sim_device){.next = simnccl.devices,
                           .endpoint = endpoint,
                           .drv = drv,
                           .node = simnet_comm_index(inter),
                           .local = simnet_comm_index(intra),
                           .ranks_per_node = simnet_comm_size(intra)};
    *(void **)&device->ready_ns = fcdp__driver_sim_symbol(drv, "simgpu_ready_ns");
    *(void **)&device->end_at = fcdp__driver_sim_symbol(drv, "simgpu_end_at");
    if (!device->ready_ns || !device->end_at) abort();
    device->rank = device->node * device->ranks_per_node + device->local;
    simnccl.devices = device;
    return device;
}

void simnccl_device_set(simnet_endpoint *endpoint, fcdp_driver *drv) {
    pthread_mutex_lock(&simnccl.lock);
    thread_endpoint = endpoint;
    if (!device_find(endpoint)) device_make(endpoint, drv);
    pthread_mutex_unlock(&simnccl.lock);
}

int simnccl_fabric_make(const char *path, unsigned nodes, unsigned ranks_per_node) {
    simnet_config config = {
        .nodes = nodes, .ranks_per_node = ranks_per_node, .ids = SIMNET_MAX_IDS, .path = path};
    simnet_fabric *fabric;
    if (simnet_create(&config, &fabric)) {
        fprintf(stderr, "simnccl: %s\n", fcdp_error_text());
        return -1;
    }
    simnet_close(fabric);
    return 0;
}

/* With the lock. NULL: the environment names none. */
static sim_device *device_of_environment(void) {
    static simnet_endpoint *endpoint;
    const char *path = getenv("SIMNCCL_FABRIC"), *rank = getenv("RANK");
    if (endpoint) return device_find(endpoint);
    if (!path || !rank) return NULL;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        fprintf(stderr, "simnccl: SIMNCCL_FABRIC=%s: %s\n", path, strerror(errno));
        return NULL;
    }
    simnet_fabric *fabric;
    fcdp_driver *drv;
    fcdp_status status = fcdp__driver_open(FCDP_DRIVER_SIM, 0, NULL, &drv);
    if (!status) status = simnet_open(fd, &fabric);
    if (!status) status = simnet_attach(fabric, (uint32_t)atoi(rank), drv, &endpoint);
    close(fd);
    if (status) fprintf(stderr, "simnccl: %s\n", fcdp_error_text());
    return status ? NULL : device_make(endpoint, drv);
}

int simnccl_fail_nth(const char *entry, unsigned long n, int result) {
    int found = -1;
    for (int i = 0; i < N_ENTRIES && entry; i++)
        if (!strcmp(names[i], entry)) found = i;
    if (entry && found < 0) return -1;
    pthread_mutex_lock(&simnccl.lock);
    fault.entry = found;
    fault.left = n;
    fault.result = (ncclResult_t)result;
    pthread_mutex_unlock(&simnccl.lock);
    return 0;
}

bool simnccl_fault_is_spent(void) {
    pthread_mutex_lock(&simnccl.lock);
    bool spent = fault.left == 0;
    pthread_mutex_unlock(&simnccl.lock);
    return spent;
}

void simnccl_set_connection_bytes(size_t bytes) {
    simnccl.connection_bytes = bytes;
}

void simnccl_set_version(int version) {
    simnccl.version = version;
}

static bool is_dead(const ncclComm_t comm) {
    return comm->state == COMM_DESTROYED || comm->state == COMM_ABORTED;
}

void simnccl_state(struct simnccl_state *state_out) {
    pthread_mutex_lock(&simnccl.lock);
    *state_out = simnccl.state;
    for (ncclComm_t comm = simnccl.comms; comm; comm = comm->next) state_out->live += !is_dead(comm);
    pthread_mutex_unlock(&simnccl.lock);
}

static void comm_free(ncclComm_t comm) {
    if (comm->page) munmap(comm->page, sizeof *comm->page);
    free(comm->parts);
    free(comm);
}

void simnccl_reset(void) {
    pthread_mutex_lock(&simnccl.lock);
    while (simnccl.comms) {
        ncclComm_t comm = simnccl.comms;
        simnccl.comms = comm->next;
        comm_free(comm);
    }
    while (simnccl.devices) {
        sim_device *device = simnccl.devices;
        simnccl.devices = device->next;
        free(device);
    }
    simnccl__id_close(0);
    simnccl.state = (struct simnccl_state){0};
    simnccl.version = VERSION;
    simnccl.connection_bytes = 0;
    simnccl.last_error[0] = '\0';
    fault.left = 0;
    thread_endpoint = NULL;
    pthread_mutex_unlock(&simnccl.lock);
}

/* ---- a communicator's life, with the lock ---- */

static ncclResult_t comm_fail(ncclComm_t comm, ncclResult_t result) {
    if (comm->failure == ncclSuccess) {
        comm->failure = result;
        snprintf(comm->text, sizeof comm->text, "%s", simnccl.last_error);
    }
    return comm->failure;
}

/* Of a communicator that can still be asked something. */
static ncclResult_t call_check(const char *call, const ncclComm_t comm) {
    if (!comm) return simnccl__broken(ncclInvalidArgument, "%s: no communicator", call);
    if (simnccl__group_depth() > 0) return simnccl__broken(ncclInvalidUsage, "%s: a group is open", call);
    if (!is_dead(comm)) return ncclSuccess;
    return simnccl__broken(ncclInvalidArgument, "%s: the communicator was %s", call,
                           comm->state == COMM_ABORTED ? "aborted" : "destroyed");
}

/* A poll ends and frees what was begun (NCCL 2.26), even while the thread that began it is inside. */
static ncclResult_t user_check(const ncclComm_t comm) {
    bool in_progress = comm->state == COMM_JOINS || comm->polls_left;
    if (!in_progress || pthread_equal(comm->user, pthread_self())) return ncclSuccess;
    return simnccl__broken(ncclInvalidUsage,
                           "ncclCommGetAsyncError: the communicator is in progress in another thread");
}

/* What its peers, or the network, have come to. */
static ncclResult_t net_look(ncclComm_t comm) {
    fcdp_status status = simnet_status(comm->device->endpoint, simnccl.last_error, sizeof simnccl.last_error);
    if (status) return status == FCDP_ERR_TRANSPORT ? ncclSystemError : ncclRemoteError;
    if (atomic_load_explicit(&comm->page->broken, memory_order_acquire) != 2) return ncclSuccess;
    snprintf(simnccl.last_error, sizeof simnccl.last_error, "%s", comm->page->text);
    return ncclInvalidUsage;
}

/* NCCL connects the members in the first operation that goes one way. */
static bool is_connected(const ncclComm_t comm) {
    uint32_t missing = comm->wanted & ~comm->connected;
    for (uint32_t i = 0; i < comm->n && missing; i++)
        if (missing & ~atomic_load(&comm->page->members[i].begun)) return false;
    return true;
}

/* One step of what is in progress. */
static ncclResult_t comm_look(ncclComm_t comm) {
    if (comm->failure != ncclSuccess) return comm->failure;
    ncclResult_t result = ncclSuccess;
    if (comm->state == COMM_JOINS) {
        result = simnccl__join_look(comm);
    } else if (comm->polls_left) {
        bool finalizes = comm->state == COMM_FINALIZED;
        if (comm->polls_left > 1 || (finalizes ? comm->device->in_flight > 0 : !is_connected(comm))) {
            if (comm->polls_left > 1) comm->polls_left--;
            return ncclInProgress;
        }
        comm->polls_left = 0;
        if (!finalizes) result = simnccl__launch(comm);
    }
    if (result == ncclSuccess) result = net_look(comm);
    return result == ncclSuccess || result == ncclInProgress ? result : comm_fail(comm, result);
}

static bool device_is_shared(const sim_device *device) {
    ncclComm_t comm = simnccl.comms;
    while (comm && (comm->device != device || is_dead(comm))) comm = comm->next;
    return comm;
}

static bool orders_launches(void) {
    const char *value = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    return value && strtol(value, NULL, 10) != 0;
}

/* The CTAs that a collective of a communicator holds at most, as NCCL decides it: the environment over the
 * configuration, which has them from 2.17 on, over what NCCL finds best. 0: they are out of range. */
static int ctas_of(const config_head *config) {
    const char *named = getenv("NCCL_MAX_CTAS");
    if (named && atoi(named) > 0) return atoi(named);
    if (config->version < CONFIG_CTAS || config->maxCTAs == CONFIG_UNDEF) return OWN_CTAS;
    if (config->maxCTAs < 1 || (config->minCTAs != CONFIG_UNDEF && config->minCTAs > config->maxCTAs))
        return 0;
    return config->maxCTAs < OWN_CTAS ? config->maxCTAs : OWN_CTAS;
}

static ncclResult_t comm_make(ncclComm_t *comm_out, int n, const ncclUniqueId *id, int rank,
                              const config_head *config) {
    sim_device *device = thread_endpoint ? device_find(thread_endpoint) : device_of_environment();
    if (!config || config->magic != (unsigned)CONFIG_MAGIC || config->size < CONFIG_HEAD_BYTES ||
        (config->version >= CONFIG_CTAS && config->size < sizeof *config))
        return simnccl__broken(ncclInvalidArgument,
                               "ncclCommInitRankConfig: its configuration is not initialized");
    if (config->blocking != 0)
        return simnccl__broken(ncclInternalError, "communicators that block are not modelled");
    int n_ctas = ctas_of(config);
    if (n_ctas < 1)
        return simnccl__broken(ncclInvalidArgument, "ncclCommInitRankConfig: minCTAs %d, maxCTAs %d",
                               config->minCTAs, config->maxCTAs);
    if (!device)
        return simnccl__broken(ncclUnhandledCudaError,
                               "ncclCommInitRankConfig: the thread has no device (simnccl_device_set)");
    if (device_is_shared(device) && !orders_launches())
        return simnccl__broken(ncclInvalidUsage,
                               "ncclCommInitRankConfig: the device has a communicator; a second one needs "
                               "NCCL_LAUNCH_ORDER_IMPLICIT=1");
    if (n < 1 || n > SIMNET_MAX_RANKS || rank < 0 || rank >= n)
        return simnccl__broken(ncclInvalidArgument, "ncclCommInitRankConfig: rank %d of %d", rank, n);
    ncclComm_t comm = calloc(1, sizeof *comm);
    if (!comm) abort();
    comm->next = simnccl.comms;
    comm->device = device;
    comm->n = (uint32_t)n;
    comm->rank = (uint32_t)rank;
    comm->n_ctas = n_ctas;
    comm->user = pthread_self();
    ncclResult_t result = simnccl__join(comm, id);
    if (result != ncclInProgress) {
        comm_free(comm);
        return result;
    }
    simnccl.comms = comm;
    *comm_out = comm;
    return ncclInProgress;
}

/* ---- the calls ---- */

SIMNCCL_API ncclResult_t ncclGetVersion(int *version) {
    pthread_mutex_lock(&simnccl.lock);
    ncclResult_t result = simnccl__enter(ENTRY_ncclGetVersion);
    if (result == ncclSuccess) *version = simnccl.version;
    pthread_mutex_unlock(&simnccl.lock);
    return result;
}

SIMNCCL_API int simnccl_ctas(const void *comm) {
    return ((const struct ncclComm *)comm)->n_ctas;
}

SIMNCCL_API const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return (unsigned)result < sizeof texts / sizeof *texts ? texts[result] : "unknown result code";
}

/* As NCCL's, whatever thread's error it was. The copy is the calling thread's. */
SIMNCCL_API const char *ncclGetLastError(ncclComm_t comm) {
    static _Thread_local char copy[SIMNCCL_TEXT_BYTES];
    pthread_mutex_lock(&simnccl.lock);
    snprintf(copy, sizeof copy, "%s", comm && comm->failure != ncclSuccess ? comm->text : simnccl.last_error);
    pthread_mutex_unlock(&simnccl.lock);
    return copy;
}

SIMNCCL_API ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    pthread_mutex_lock(&simnccl.lock);
    ncclResult_t result = simnccl__enter(ENTRY_ncclGetUniqueId);
    if (result == ncclSuccess) result = simnccl__id_make(id);
    pthread_mutex_unlock(&simnccl.lock);
    return result;
}

SIMNCCL_API ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int n, ncclUniqueId id, int rank,
                                                const config_head *config) {
    pthread_mutex_lock(&simnccl.lock);
    ncclResult_t result = simnccl__enter(ENTRY_ncclCommInitRankConfig);
    if (result == ncclSuccess) result = comm_make(comm, n, &id, rank, config);
    pthread_mutex_unlock(&simnccl.lock);
    return result;
}

SIMNCCL_API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    pthread_mutex_lock(&simnccl.lock);
    ncclResult_t result = simnccl__enter(ENTRY_ncclCommGetAsyncError);
    if (result == ncclSuccess) result = call_check("ncclCommGetAsyncError", comm);
    if (result == ncclSuccess) result = user_check(comm);
    if (result == ncclSuccess) *error = comm_look(comm);
    pthread_mutex_unlock(&simnccl.lock);
    return result;
}

SIMNCCL_API ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    pthread_mutex_lock(&simnccl.lock);
    ncclResult_t result = simnccl__enter(ENTRY_ncclCommFinalize);
    if (result == ncclSuccess) result = call_check("ncclCommFinalize", comm);
    if (result == ncclSuccess && (comm->state != COMM_READY || comm->polls_left))
        result = simnccl__broken(ncclInvalidUsage,
                                 "ncclCommFinalize: the communicator is in progress, or finalized");
    if (result == ncclSuccess) result = comm->failure;
    if (result == ncclSuccess) {
        comm->state = COMM_FINALIZED;
        comm->polls_left = POLLS_IN_PROGRESS;
        comm->user = pthread_self();
        result = ncclInProgress;
    }
    pthread_mutex_unlock(&simnccl.lock);
    return result;
}

SIMNCCL_API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    pthread_mutex_lock(&simnccl.lock);
    ncclResult_t result = simnccl__enter(ENTRY_ncclCommDestroy);
    if (result == ncclSuccess) result = call_check("ncclCommDestroy", comm);
    if (result == ncclSuccess && (comm->state != COMM_FINALIZED || comm->polls_left))
        result = simnccl__broken(ncclInvalidUsage,
                                 "ncclCommDestroy: the communicator has not been finalized");
    if (result == ncclSuccess) {
        comm->state = COMM_DESTROYED;
        simnccl__disconnect(comm);
    }
    pthread_mutex_unlock(&simnccl.lock);
    return result;
}

/* The device's memory is freed only once nothing runs on it that NCCL began. */
SIMNCCL_API ncclResult_t ncclCommAbort(ncclComm_t comm) {
    pthread_mutex_lock(&simnccl.lock);
    ncclResult_t result = simnccl__enter(ENTRY_ncclCommAbort);
    if (result == ncclSuccess) result = call_check("ncclCommAbort", comm);
    if (result == ncclSuccess) {
        comm->state = COMM_ABORTED;
        simnet_abort(comm->device->endpoint);
        pthread_cond_broadcast(&simnccl.changed);
        while (comm->device->in_flight > 0) pthread_cond_wait(&simnccl.changed, &simnccl.lock);
        simnccl__disconnect(comm);
    }
    pthread_mutex_unlock(&simnccl.lock);
    return result;
}
