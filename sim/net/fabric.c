/* fabric.c - the shared memory: which ranks are there, which have died, until when links are busy. */
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "sim/net/internal.h"

#define MAGIC 0x315465536D695346u
#define PAGE_BYTES ((size_t)4096)

/* ---- layout ---- */

static uint32_t n_ranks(const shared_fabric *shared) {
    return shared->nodes * shared->ranks_per_node;
}

static uint32_t n_comms(const simnet_config *config) {
    return (config->ranks_per_node + config->nodes + 1) * config->ids;
}

/* Communicators of a lane that are not this rank's have other ranks: they are told apart by what its members
 * share. */
static uint32_t comm_number(const shared_fabric *shared, simnet_lane lane, uint32_t rank, uint32_t id) {
    uint32_t g = shared->ranks_per_node;
    uint32_t set = lane == SIMNET_INTER ? rank % g : lane == SIMNET_INTRA ? g + rank / g : g + shared->nodes;
    return set * shared->ids + id;
}

shared_comm *simnet__shared_comm(shared_fabric *shared, simnet_lane lane, uint32_t rank, uint32_t id) {
    return &shared->comms[comm_number(shared, lane, rank, id)];
}

/* Every communicator has room for as many members as there are ranks; untouched memory is not
 * there. */
char *simnet__staging(shared_fabric *shared, const shared_comm *comm) {
    size_t per_comm = n_ranks(shared) * shared->staging_bytes;
    return (char *)shared + shared->staging_offset + (size_t)(comm - shared->comms) * per_comm;
}

uint32_t simnet__members(const shared_fabric *shared, simnet_lane lane, uint32_t rank, uint32_t *ranks_out,
                         uint32_t *me_out) {
    uint32_t g = shared->ranks_per_node, n = 0;
    for (uint32_t other = 0; other < n_ranks(shared); other++) {
        bool member = lane == SIMNET_WORLD ||
                      (lane == SIMNET_INTER ? other % g == rank % g : other / g == rank / g);
        if (!member) continue;
        if (other == rank) *me_out = n;
        ranks_out[n++] = other;
    }
    return n;
}

/* ---- making, opening ---- */

static fcdp_status check_config(const simnet_config *config) {
    bool sane = config->nodes > 0 && config->ranks_per_node > 0 &&
                (uint64_t)config->nodes * config->ranks_per_node <= SIMNET_MAX_RANKS &&
                config->ids <= SIMNET_MAX_IDS && config->timeout_s >= 0;
    if (sane) return FCDP_OK;
    return fcdp__fail(FCDP_ERR_INVALID,
                      "a fabric of %u nodes x %u ranks with %u ids: at most %d ranks and %d ids",
                      config->nodes, config->ranks_per_node, config->ids, SIMNET_MAX_RANKS, SIMNET_MAX_IDS);
}

static fcdp_status map(int fd, size_t bytes, simnet_fabric **fabric_out) {
    simnet_fabric *fabric = malloc(sizeof *fabric);
    void *at = fabric ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0)
                      : MAP_FAILED;
    if (at == MAP_FAILED) {
        free(fabric);
        return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no addresses for a fabric of %zu bytes", bytes);
    }
    *fabric = (simnet_fabric){.fd = fd, .shared = at};
    *fabric_out = fabric;
    return FCDP_OK;
}

static void lock_init(pthread_mutex_t *lock) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
}

/* The magic comes last: a fabric that is not complete cannot be opened. */
static void shared_fill(shared_fabric *shared, const simnet_config *config, size_t offset, size_t bytes) {
    shared->nodes = config->nodes;
    shared->ranks_per_node = config->ranks_per_node;
    shared->ids = config->ids;
    shared->staging_bytes = config->staging_bytes;
    shared->staging_offset = offset;
    shared->total_bytes = bytes;
    shared->timeout_s = config->timeout_s;
    lock_init(&shared->lock);
    shared->magic = MAGIC;
}

/* One sparse file for all that there could be: pages exist once they are touched. */
fcdp_status simnet_create(const simnet_config *asked, simnet_fabric **fabric_out) {
    simnet_config config = *asked;
    if (!config.ids) config.ids = 4;
    if (!config.staging_bytes) config.staging_bytes = (size_t)16 << 20;
    fcdp_status status = check_config(&config);
    if (status) return status;
    config.staging_bytes = fcdp__round_up(config.staging_bytes, PAGE_BYTES);
    size_t ranks = (size_t)config.nodes * config.ranks_per_node;
    size_t offset = fcdp__round_up(sizeof(shared_fabric) + n_comms(&config) * sizeof(shared_comm),
                                   PAGE_BYTES);
    size_t bytes = offset + n_comms(&config) * ranks * config.staging_bytes;
    int fd = config.path ? open(config.path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600)
                         : memfd_create("fcdp-simnet", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
        status = fcdp__fail(FCDP_ERR_SYSTEM, "%s of %zu bytes: %s", config.path ? config.path : "a memfd",
                            bytes, strerror(errno));
    if (!status) status = map(fd, bytes, fabric_out);
    if (!status)
        shared_fill((*fabric_out)->shared, &config, offset, bytes);
    else if (fd >= 0)
        close(fd);
    return status;
}

fcdp_status simnet_open(int fd, simnet_fabric **fabric_out) {
    struct stat about;
    shared_fabric head;
    bool is_one = fstat(fd, &about) == 0 && pread(fd, &head, sizeof head, 0) == (ssize_t)sizeof head &&
                  head.magic == MAGIC && head.total_bytes == (size_t)about.st_size;
    if (!is_one) return fcdp__fail(FCDP_ERR_INVALID, "descriptor %d is not a fabric's", fd);
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0) return fcdp__fail(FCDP_ERR_SYSTEM, "another descriptor of the fabric: %s", strerror(errno));
    fcdp_status status = map(own, head.total_bytes, fabric_out);
    if (status) close(own);
    return status;
}

int simnet_fd(const simnet_fabric *fabric) {
    return fabric->fd;
}

void simnet_close(simnet_fabric *fabric) {
    if (!fabric) return;
    munmap(fabric->shared, fabric->shared->total_bytes);
    close(fabric->fd);
    free(fabric);
}

/* ---- which ranks are there ---- */

/* The process's state and when it began: a killed one stays a zombie until its parent looks. False: it is
 * gone. */
static bool process_look(int32_t pid, char *state_out, uint64_t *started_out) {
    char path[64], line[512];
    unsigned long long started;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "re");
    if (!file) return false;
    size_t n = fread(line, 1, sizeof line - 1, file);
    fclose(file);
    line[n] = '\0';
    const char *after = strrchr(line, ')'); /* the name may hold anything */
    if (!after) return false;
    if (sscanf(after, ") %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
               state_out, &started) != 2)
        return false;
    *started_out = started;
    return true;
}

void simnet__rank_begin(shared_fabric *shared, uint32_t rank) {
    shared_rank *own = &shared->ranks[rank];
    char state;
    own->pid = getpid();
    if (!process_look(own->pid, &state, &own->started)) own->started = 0;
    atomic_store_explicit(&own->state, RANK_ATTACHED, memory_order_release);
}

void simnet__rank_end(shared_fabric *shared, uint32_t rank, rank_state state, const char *text) {
    shared_rank *own = &shared->ranks[rank];
    if (atomic_load(&own->state) == RANK_ATTACHED && state == RANK_FAILED)
        snprintf(own->text, sizeof own->text, "%s", text);
    atomic_store_explicit(&own->state, state, memory_order_release);
    uint32_t n = (shared->ranks_per_node + shared->nodes + 1) * shared->ids;
    for (uint32_t i = 0; i < n; i++) simnet__wake(&shared->comms[i]);
}

static bool process_lives(const shared_rank *rank) {
    uint64_t started;
    char state;
    return process_look(rank->pid, &state, &started) && started == rank->started && state != 'Z' &&
           state != 'X';
}

/* The cause alone is passed on from rank to rank, so that texts do not grow with their number. */
bool simnet__rank_gone(const shared_fabric *shared, uint32_t rank, bool look, char *text, size_t n,
                       const char **cause_out) {
    const shared_rank *other = &shared->ranks[rank];
    *cause_out = text;
    switch ((rank_state)atomic_load_explicit(&other->state, memory_order_acquire)) {
    case RANK_ABSENT: return false;
    case RANK_FAILED:
        *cause_out = text + snprintf(text, n, "rank %u has failed: ", rank);
        snprintf(text + strlen(text), n - strlen(text), "%s", other->text);
        return true;
    case RANK_LEFT: snprintf(text, n, "rank %u has left", rank); return true;
    case RANK_ATTACHED: break;
    }
    if (!look || other->pid == getpid() || !other->started || process_lives(other)) return false;
    snprintf(text, n, "rank %u has died (process %d)", rank, other->pid);
    return true;
}

/* ---- waiting ---- */

void simnet__wake(shared_comm *comm) {
    atomic_fetch_add_explicit(&comm->wake, 1, memory_order_release);
    syscall(SYS_futex, &comm->wake, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void simnet__sleep(shared_comm *comm, uint32_t seen) {
    struct timespec most = {.tv_nsec = SIMNET_POLL_NS};
    syscall(SYS_futex, &comm->wake, FUTEX_WAIT, seen, &most, NULL, 0);
}

/* ---- links ---- */

/* A dead process's lock is taken over: what it guards is times and sums, each right enough as it is. */
static void fabric_lock(shared_fabric *shared) {
    if (pthread_mutex_lock(&shared->lock) == EOWNERDEAD) pthread_mutex_consistent(&shared->lock);
}

void simnet_set_rate(simnet_fabric *fabric, simnet_lane lane, double gigabytes_per_s, double latency_us) {
    FCDP_CHECK(0, lane == SIMNET_INTER || lane == SIMNET_INTRA);
    fabric_lock(fabric->shared);
    fabric->shared->rates[lane] = (shared_rate){.bytes_per_ns = gigabytes_per_s,
                                                .latency_ns = (uint64_t)(latency_us * 1e3)};
    pthread_mutex_unlock(&fabric->shared->lock);
}

void simnet_link_get(simnet_fabric *fabric, uint32_t node, simnet_lane lane, simnet_link *link_out) {
    FCDP_CHECK(0, node < fabric->shared->nodes && (lane == SIMNET_INTER || lane == SIMNET_INTRA));
    fabric_lock(fabric->shared);
    *link_out = fabric->shared->links[node][lane].total;
    pthread_mutex_unlock(&fabric->shared->lock);
}

/* Bytes of one operation on a node's link, or inside the node; simnet.h has the sums. */
static uint64_t bytes_on(const shared_fabric *shared, const simnet_op *op, uint32_t node, simnet_lane link) {
    const simnet_comm *comm = op->comm;
    uint64_t ring = (comm->n - 1) * (uint64_t)op->bytes, g = shared->ranks_per_node;
    bool one_node = shared->nodes == 1;
    switch (comm->lane) {
    case SIMNET_INTER: return link == SIMNET_INTER ? ring : 0;
    case SIMNET_INTRA: return link == SIMNET_INTRA && node == comm->ranks[0] / g ? g * ring : 0;
    default: break;
    }
    if (link == SIMNET_INTER) return one_node ? 0 : ring;
    return (one_node ? g : g - 1) * ring;
}

/* What an operation keeps one link busy for; 0: it does not use it, or it takes no time. */
static uint64_t busy_on(const shared_fabric *shared, const simnet_op *op, uint32_t i) {
    uint64_t bytes = bytes_on(shared, op, i / 2, i % 2);
    const shared_rate *rate = &shared->rates[i % 2];
    return rate->bytes_per_ns > 0 ? (uint64_t)((double)bytes / rate->bytes_per_ns) : 0;
}

/* The first moment from `start` on at which the link is free for so long. */
static uint64_t link_fit(const shared_link *link, uint64_t start, uint64_t busy_ns) {
    for (uint32_t i = 0; i < link->n_gaps; i++) {
        uint64_t begin = link->gaps[i].begin_ns > start ? link->gaps[i].begin_ns : start;
        if (begin + busy_ns <= link->gaps[i].end_ns) return begin;
    }
    return link->free_ns > start ? link->free_ns : start;
}

static void gap_add(shared_link *link, uint32_t at, uint64_t begin_ns, uint64_t end_ns) {
    if (begin_ns >= end_ns) return;
    if (link->n_gaps == SIMNET_GAPS) {
        memmove(link->gaps, link->gaps + 1, --link->n_gaps * sizeof link->gaps[0]);
        if (at > 0) at--;
    }
    memmove(link->gaps + at + 1, link->gaps + at, (link->n_gaps - at) * sizeof link->gaps[0]);
    link->gaps[at] = (shared_gap){begin_ns, end_ns};
    link->n_gaps++;
}

/* `start` is what link_fit has found. What is left of the gap on either side stays one. */
static void link_take(shared_link *link, uint64_t start, uint64_t busy_ns) {
    uint32_t i = 0;
    while (i < link->n_gaps && link->gaps[i].end_ns <= start) i++;
    if (start >= link->free_ns) {
        gap_add(link, link->n_gaps, link->free_ns, start);
        link->free_ns = start + busy_ns;
        return;
    }
    shared_gap gap = link->gaps[i];
    memmove(link->gaps + i, link->gaps + i + 1, (--link->n_gaps - i) * sizeof link->gaps[0]);
    gap_add(link, i, start + busy_ns, gap.end_ns);
    gap_add(link, i, gap.begin_ns, start);
}

/* It starts when all that it uses is free, and keeps each of them for as long as that takes. Members come
 * here when threads of this machine wake up, so an operation that could start earlier than one that is booked
 * already takes a gap before it. Its end; 0: nothing takes any time. */
static uint64_t book_links(shared_fabric *shared, const simnet_op *op, uint64_t ready_ns) {
    uint64_t start = ready_ns, end = 0, before;
    do {
        before = start;
        for (uint32_t i = 0; i < 2 * shared->nodes; i++) {
            uint64_t busy_ns = busy_on(shared, op, i);
            if (busy_ns) start = link_fit(&shared->links[i / 2][i % 2], start, busy_ns);
        }
    } while (start != before);
    for (uint32_t i = 0; i < 2 * shared->nodes; i++) {
        shared_link *link = &shared->links[i / 2][i % 2];
        uint64_t bytes = bytes_on(shared, op, i / 2, i % 2), busy_ns = busy_on(shared, op, i);
        if (!bytes) continue;
        uint64_t took_ns = busy_ns + shared->rates[i % 2].latency_ns;
        link->total.operations++;
        link->total.bytes += bytes;
        link->total.busy_ns += busy_ns;
        if (busy_ns) link_take(link, start, busy_ns);
        if (took_ns && start + took_ns > end) end = start + took_ns;
    }
    return end;
}

uint64_t simnet__book(shared_fabric *shared, const simnet_op *op) {
    shared_comm *comm = op->comm->shared;
    fabric_lock(shared);
    if (comm->booked <= op->number) {
        uint64_t ready_ns = 0;
        for (uint32_t i = 0; i < op->comm->n; i++)
            if (comm->members[i].ready_ns > ready_ns) ready_ns = comm->members[i].ready_ns;
        atomic_store(&comm->end_ns, book_links(shared, op, ready_ns));
        comm->booked = op->number + 1;
    }
    uint64_t end_ns = atomic_load(&comm->end_ns);
    pthread_mutex_unlock(&shared->lock);
    return end_ns;
}
