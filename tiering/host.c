/* host.c - the node's host memory: creates the slab, joins it, allocates blocks in it and attaches them.
 *
 * A rank may detach a block while its peers still copy from it. So the leader only marks a freed block, and
 * gives its pages back to the system once every rank has detached.
 *
 * A rank page-locks what it copies and no more: page-locking takes time by its bytes (about 1 s for 1 to 2
 * GB), and each process pays for itself. A range may take several registrations, since drivers limit the size
 * of one. No registration may stay behind: another mapping may get its addresses, which CUDA would then take
 * for the old pages. A block's pages should come from the NUMA node of the device that copies them (numa.h),
 * and be huge where the system gives such pages to shared memory that asks for them.
 *
 * The file knows neither where in the slab there is room (offsets.c) nor what a block's bytes mean
 * (region.c).
 */
#include "tiering/host.h"

#include "base/size.h"
#include "base/trace.h"
#include "tiering/host_internal.h"
#include "tiering/numa.h"
#include "tiering/trace_events.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* The slab is sparse: addresses for size-class slack and for the arena's geometric growth cost nothing. */
enum { SLAB_OVERCOMMIT = 4 };

/* ---- the slab ---- */

static void host_free(fcdp_host *host) {
    if (host->header) munmap(host->header, host->header_bytes);
    if (host->fd >= 0) close(host->fd);
    fcdp__offsets_destroy(host->offsets);
    fcdp__lock_destroy(&host->lock);
    free(host);
}

static fcdp_status host_alloc(const fcdp_host_config *config, fcdp_host **host_out) {
    if (!config->n_slices || config->n_slices > FCDP_MAX_SLICES || config->slice >= config->n_slices)
        return fcdp__fail(FCDP_ERR_UNSUPPORTED, "host tier: slice %u of %u; a node may have 1 to %d ranks",
                          config->slice, config->n_slices, FCDP_MAX_SLICES);
    fcdp_host *host = calloc(1, sizeof *host);
    if (!host) return fcdp__fail(FCDP_ERR_SYSTEM, "host tier: no memory");
    host->config = *config;
    host->pid = getpid();
    host->fd = -1;
    long page = sysconf(_SC_PAGESIZE);
    host->page_bytes = page > 4096 ? (size_t)page : 4096;
    host->header_bytes = 2 * host->page_bytes + (size_t)config->n_slices * FCDP_MEETING_BYTES;
    atomic_init(&host->n_blocks, 0);
    atomic_init(&host->pin_warned, false);
    fcdp__lock_init(&host->lock, FCDP_RANK_HOST);
    *host_out = host;
    return FCDP_OK;
}

static fcdp_status header_map(fcdp_host *host) {
    char *at = fcdp__shared_map(host->fd, 0, host->header_bytes);
    if (!at)
        return fcdp__fail(FCDP_ERR_SYSTEM, "host tier: cannot map the slab's header: %s", strerror(errno));
    host->header = (fcdp_slab_header *)(void *)at;
    host->meeting = (fcdp_host_block){.host = host,
                                      .board = (fcdp_board_line *)(void *)(at + host->page_bytes),
                                      .data = at + 2 * host->page_bytes,
                                      .n_copies = 1,
                                      .data_bytes = host->header_bytes - 2 * host->page_bytes,
                                      .copy_bytes = host->header_bytes - 2 * host->page_bytes,
                                      .map_bytes = host->header_bytes - host->page_bytes};
    return FCDP_OK;
}

static fcdp_status member_enter(fcdp_host *host) {
    fcdp_slab_member *member = &host->header->members[host->config.slice];
    int32_t absent = FCDP_MEMBER_ABSENT;
    uint64_t start_time;
    if (!fcdp__process_start_time(host->pid, &start_time))
        return fcdp__fail(FCDP_ERR_UNSUPPORTED, "host tier: /proc/%d/stat cannot be read; FCDP needs /proc",
                          (int)host->pid);
    if (atomic_load(&member->pid) != FCDP_MEMBER_ABSENT)
        return fcdp__fail(FCDP_ERR_INVALID, "host tier: slice %u is already taken by process %d",
                          host->config.slice, (int)atomic_load(&member->pid));
    member->start_time = start_time;
    member->numa_node = host->config.numa_node;
    if (!atomic_compare_exchange_strong_explicit(&member->pid, &absent, host->pid, memory_order_release,
                                                 memory_order_relaxed))
        return fcdp__fail(FCDP_ERR_INVALID, "host tier: slice %u was taken by process %d at the same time",
                          host->config.slice, (int)absent);
    return FCDP_OK;
}

/* The leader's slab is as large as the budget, times the factor of addresses that the allocator wastes. */
static fcdp_status slab_create(fcdp_host *host, fcdp_shared_ticket *ticket_out) {
    size_t budget_bytes = fcdp__account_budget_bytes(host->config.account);
    if (budget_bytes > SIZE_MAX / 2 / SLAB_OVERCOMMIT)
        return fcdp__fail(FCDP_ERR_OPTION,
                          "host tier: no machine has a host budget of %s; lower FCDP_HOST_BUDGET",
                          fcdp__size_text(budget_bytes).s);
    size_t capacity_bytes = fcdp__round_up(budget_bytes, (size_t)1 << 30) * SLAB_OVERCOMMIT;
    fcdp_status status = fcdp__shared_create("fcdp-host", capacity_bytes, &host->fd, ticket_out);
    if (status) return fcdp__fail(status, "host tier: %s", fcdp_error_text());
    status = header_map(host);
    if (status) return status;
    *host->header = (fcdp_slab_header){.magic = FCDP_SLAB_MAGIC,
                                       .capacity_bytes = capacity_bytes,
                                       .page_bytes = host->page_bytes,
                                       .version = FCDP_SLAB_VERSION,
                                       .n_slices = host->config.n_slices,
                                       .per_numa_node = host->config.per_numa_node};
    return fcdp__offsets_create(host->header_bytes, capacity_bytes, host->page_bytes, &host->offsets);
}

fcdp_status fcdp__host_create(const fcdp_host_config *config, fcdp_host **host_out,
                              fcdp_shared_ticket *ticket_out) {
    fcdp_host *host = NULL;
    fcdp_status status = host_alloc(config, &host);
    if (status) return status;
    status = slab_create(host, ticket_out);
    if (!status) status = member_enter(host);
    if (status) {
        host_free(host);
        return status;
    }
    *host_out = host;
    return FCDP_OK;
}

/* Check the header: the ranks of a node may be different builds, or count their ranks differently. */
fcdp_status fcdp__host_join(const fcdp_host_config *config, const fcdp_shared_ticket *ticket,
                            fcdp_host **host_out) {
    fcdp_host *host = NULL;
    fcdp_status status = host_alloc(config, &host);
    if (status) return status;
    status = fcdp__shared_open(ticket, &host->fd);
    if (status) status = fcdp__fail(status, "host tier: %s", fcdp_error_text());
    if (!status) status = header_map(host);
    const fcdp_slab_header *header = host->header; /* NULL where mapping it failed */
    if (!status && (header->magic != FCDP_SLAB_MAGIC || header->version != FCDP_SLAB_VERSION ||
                    header->capacity_bytes != ticket->bytes || header->page_bytes != host->page_bytes))
        status = fcdp__fail(FCDP_ERR_UNSUPPORTED, "host tier: the node's ranks run different versions of "
                                                  "FCDP; install one version for all of them");
    if (!status && header->n_slices != config->n_slices)
        status = fcdp__fail(FCDP_ERR_UNSUPPORTED,
                            "host tier: slice %u counts %u ranks on this node, the first rank counts %u; "
                            "check FCDP_LOCAL_SIZE",
                            config->slice, config->n_slices, header->n_slices);
    if (!status && header->per_numa_node != config->per_numa_node)
        status = fcdp__fail(FCDP_ERR_UNSUPPORTED,
                            "host tier: the node's ranks disagree on how many copies it keeps; set the same "
                            "FCDP_HOST_COPIES on all of them");
    if (!status) status = member_enter(host);
    if (status) {
        host_free(host);
        return status;
    }
    *host_out = host;
    return FCDP_OK;
}

void fcdp__host_destroy(fcdp_host *host) {
    if (!host) return;
    if (getpid() != host->pid) return; /* a forked child: the header is not even mapped there */
    FCDP_CHECK(1, atomic_load(&host->n_blocks) == 0);
    atomic_store_explicit(&host->header->members[host->config.slice].pid, FCDP_MEMBER_LEFT,
                          memory_order_release);
    while (
        host->records) { /* other ranks may have them mapped still; the memory goes with the last of them */
        fcdp_block_record *record = host->records;
        host->records = record->next;
        fcdp__trace_now(FCDP_EVENT_HOST_FREE, 0, record->bytes, record->offset, 0);
        fcdp__account_give(host->config.account, record->bytes);
        free(record);
    }
    host_free(host);
}

fcdp_status fcdp__host_try(size_t option_bytes) {
    fcdp_account *account;
    fcdp_shared_ticket ticket;
    fcdp_host *host;
    fcdp_status status = fcdp__account_create(option_bytes, &account, &ticket);
    if (status) return status;
    fcdp_host_config config = {.account = account, .numa_node = -1, .pin = FCDP_PIN_NEVER, .n_slices = 1};
    status = fcdp__host_create(&config, &host, &ticket);
    if (!status) fcdp__host_destroy(host);
    fcdp__account_destroy(account);
    return status;
}

/* ---- copies ---- */

/* Of a block's data, in the order of the first ranks that read them. */
typedef struct host_copies {
    uint32_t n, own;            /* own: which this rank reads */
    int nodes[FCDP_MAX_SLICES]; /* by copy; -1: wherever */
} host_copies;

static void copies_add(host_copies *copies, int node) {
    for (uint32_t i = 0; i < copies->n; i++)
        if (copies->nodes[i] == node) return;
    copies->nodes[copies->n++] = node;
}

/* The same on every rank and for the host's life: they follow from what all ranks said when they joined. */
static fcdp_status copies_find(const fcdp_host *host, host_copies *copies_out) {
    const fcdp_host_config *config = &host->config;
    *copies_out = (host_copies){.n = 0};
    for (uint32_t i = 0; i < config->n_slices && config->per_numa_node; i++) {
        const fcdp_slab_member *member = &host->header->members[i];
        /* member_enter's release: its node is there */
        if (atomic_load_explicit(&member->pid, memory_order_acquire) == FCDP_MEMBER_ABSENT)
            return fcdp__fail(FCDP_ERR_INVALID,
                              "host tier: slice %u has not joined, and its NUMA node is not known", i);
        if (member->numa_node >= 0) copies_add(copies_out, member->numa_node);
    }
    if (!copies_out->n) copies_add(copies_out, -1);
    for (uint32_t i = 0; i < copies_out->n; i++)
        if (copies_out->nodes[i] == config->numa_node) copies_out->own = i;
    return FCDP_OK;
}

uint32_t fcdp__host_copies(const fcdp_host *host) {
    host_copies copies;
    return copies_find(host, &copies) ? 0 : copies.n;
}

/* The board and the copies. False: no slab is as large. */
static bool block_bytes(const fcdp_host *host, size_t data_bytes, uint32_t n_copies, size_t *bytes_out) {
    size_t capacity = host->header->capacity_bytes, bytes;
    if (data_bytes > capacity ||
        __builtin_mul_overflow(fcdp__round_up(data_bytes, host->page_bytes), (size_t)n_copies, &bytes) ||
        bytes > capacity - host->page_bytes)
        return false;
    *bytes_out = host->page_bytes + bytes;
    return true;
}

/* ---- the leader's blocks ---- */

/* The pages go back to the system; the next reader finds zeroes there. */
static fcdp_status range_empty(const fcdp_host *host, uint64_t offset, size_t bytes) {
    if (!fallocate(host->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes))
        return FCDP_OK;
    return fcdp__fail(FCDP_ERR_SYSTEM, "host tier: %s of the node's host memory cannot be emptied: %s",
                      fcdp__size_text(bytes).s, strerror(errno));
}

/* Leader. Does any rank still have the block attached? Its own mapping may
 * be gone: read through the descriptor. */
static bool is_attached(const fcdp_host *host, uint64_t offset) {
    fcdp_board_line board[FCDP_MAX_SLICES];
    if (pread(host->fd, board, sizeof board, (off_t)offset) != (ssize_t)sizeof board) return true;
    for (uint32_t i = 0; i < host->config.n_slices; i++)
        if (atomic_load_explicit(&board[i].words[FCDP_BOARD_ATTACHED], memory_order_relaxed)) return true;
    return false;
}

/* Leader, lock held: freed blocks that no rank has attached any more go back to the system. */
static void records_reap(fcdp_host *host) {
    for (fcdp_block_record **link = &host->records; *link;) {
        fcdp_block_record *record = *link;
        if (!record->freed || is_attached(host, record->offset)) {
            link = &record->next;
            continue;
        }
        *link = record->next;
        if (range_empty(host, record->offset, record->bytes))
            fcdp__log(FCDP_LOG_WARN, "%s; they stay in use until the node's ranks end", fcdp_error_text());
        else
            fcdp__offsets_free(host->offsets, record->offset);
        fcdp__trace_now(FCDP_EVENT_HOST_FREE, 0, record->bytes, record->offset, 0);
        fcdp__account_give(host->config.account, record->bytes);
        free(record);
    }
}

/* A block for which there is no memory: its text says if one copy of it would take less. */
static fcdp_status copies_say(const host_copies *copies, fcdp_status status) {
    if (status != FCDP_ERR_NO_HOST_MEM || copies->n == 1) return status;
    return fcdp__fail(status, "%s (of %u copies: FCDP_HOST_COPIES=node keeps one)", fcdp_error_text(),
                      copies->n);
}

fcdp_status fcdp__host_block_alloc(fcdp_host *host, size_t data_bytes, uint64_t *offset_out) {
    if (!host->offsets || getpid() != host->pid)
        return fcdp__fail(FCDP_ERR_INVALID, "host tier: only the node's first rank allocates blocks");
    host_copies copies;
    size_t bytes;
    fcdp_status status = copies_find(host, &copies);
    if (status) return status;
    if (!data_bytes || !block_bytes(host, data_bytes, copies.n, &bytes)) {
        status = fcdp__fail(data_bytes ? FCDP_ERR_NO_HOST_MEM : FCDP_ERR_INVALID,
                            "host tier: a block of %s does not fit into the node's host memory, which has "
                            "addresses for %s: raise FCDP_HOST_BUDGET",
                            fcdp__size_text(data_bytes).s, fcdp__size_text(host->header->capacity_bytes).s);
        return copies_say(&copies, status);
    }
    fcdp_block_record *record = calloc(1, sizeof *record);
    if (!record) return fcdp__fail(FCDP_ERR_SYSTEM, "host tier: no memory");
    record->bytes = bytes;
    fcdp__lock_acquire(&host->lock);
    records_reap(host);
    status = fcdp__offsets_alloc(host->offsets, record->bytes, &record->offset);
    if (!status) {
        /* A block's board begins as zeroes. A rank that was slower than the leader may have written to
         * the last one here after it was freed. */
        status = range_empty(host, record->offset, record->bytes);
        if (!status) status = fcdp__account_take(host->config.account, record->bytes);
        if (status) fcdp__offsets_free(host->offsets, record->offset);
    }
    if (!status) {
        record->next = host->records;
        host->records = record;
        fcdp__trace_now(FCDP_EVENT_HOST_ALLOC, 0, record->bytes, record->offset, 0);
        *offset_out = record->offset;
    }
    fcdp__lock_release(&host->lock);
    if (status) free(record);
    return copies_say(&copies, status);
}

void fcdp__host_block_free(fcdp_host *host, uint64_t offset) {
    if (getpid() != host->pid) return;
    fcdp__lock_acquire(&host->lock);
    fcdp_block_record *record = host->records;
    while (record && record->offset != offset) record = record->next;
    FCDP_CHECK(0, record != NULL && !record->freed); /* not a block, or freed twice */
    record->freed = true;
    records_reap(host);
    fcdp__lock_release(&host->lock);
}

void fcdp__host_reap(fcdp_host *host) {
    if (!host->offsets || getpid() != host->pid) return;
    fcdp__lock_acquire(&host->lock);
    records_reap(host);
    fcdp__lock_release(&host->lock);
}

/* ---- failures, and where the ranks meet ---- */

void fcdp__host_fail(fcdp_host *host) {
    atomic_store_explicit(&host->header->members[host->config.slice].has_failed, 1, memory_order_release);
}

fcdp_host_block *fcdp__host_meeting(fcdp_host *host) {
    return &host->meeting;
}

bool fcdp__host_peer_failed(const fcdp_host *host, uint32_t *slice_out) {
    for (uint32_t i = 0; i < host->config.n_slices; i++) {
        const fcdp_slab_member *member = &host->header->members[i];
        if (i == host->config.slice || !atomic_load_explicit(&member->has_failed, memory_order_acquire))
            continue;
        *slice_out = i;
        return true;
    }
    return false;
}

/* ---- page-locked ranges ---- */

/* The fewest ranges of whole pages that hold the `n` pieces, which ascend; n <= FCDP_MAX_PINNED, pieces may
 * be empty. Pure. */
static void pinned_cover(const fcdp_piece *pieces, size_t n, size_t page_bytes, fcdp_pinned *pinned_out) {
    pinned_out->n = 0;
    for (size_t i = 0; i < n; i++) {
        if (!pieces[i].bytes) continue;
        size_t begin = pieces[i].offset_bytes / page_bytes * page_bytes;
        size_t end = fcdp__round_up(pieces[i].offset_bytes + pieces[i].bytes, page_bytes);
        fcdp_piece *last = pinned_out->n ? &pinned_out->ranges[pinned_out->n - 1] : NULL;
        if (last && begin <= last->offset_bytes + last->bytes)
            last->bytes = end - last->offset_bytes;
        else
            pinned_out->ranges[pinned_out->n++] = (fcdp_piece){begin, end - begin};
    }
}

/* Each is tried; the first failure is returned. *pinned: what stays registered. */
static fcdp_status pinned_unlock(fcdp_driver *drv, char *base, fcdp_pinned *pinned) {
    fcdp_status first = FCDP_OK;
    size_t n_stay = 0, stay_bytes;
    for (size_t i = 0; i < pinned->n; i++) {
        const fcdp_piece range = pinned->ranges[i];
        fcdp_status status = fcdp__driver_host_unpin(drv, base + range.offset_bytes, range.bytes,
                                                     &stay_bytes);
        if (status) pinned->ranges[n_stay++] = (fcdp_piece){range.offset_bytes, stay_bytes};
        if (status && !first) first = status;
    }
    pinned->n = n_stay;
    return first;
}

/* Page-lock all of them, from `base` on. On failure none is, but for those whose registration could not be
 * undone: *pinned has these alone then. Errors as of fcdp__driver_host_pin. */
static fcdp_status pinned_lock(fcdp_driver *drv, char *base, fcdp_pinned *pinned) {
    for (size_t i = 0; i < pinned->n; i++) {
        const fcdp_piece range = pinned->ranges[i];
        size_t stay_bytes;
        fcdp_status status = fcdp__driver_host_pin(drv, base + range.offset_bytes, range.bytes, &stay_bytes);
        if (!status) continue;
        fcdp_failure failure = fcdp__failure_keep(status);
        pinned->n = i;
        (void)!pinned_unlock(drv, base, pinned);
        if (stay_bytes) pinned->ranges[pinned->n++] = (fcdp_piece){range.offset_bytes, stay_bytes};
        return fcdp__failure_restore(&failure);
    }
    return FCDP_OK;
}

static size_t pinned_bytes(const fcdp_pinned *pinned) {
    size_t bytes = 0;
    for (size_t i = 0; i < pinned->n; i++) bytes += pinned->ranges[i].bytes;
    return bytes;
}

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

/* From `offset_bytes` on, of at most `bytes`: how many lie in one registration, or in none (*pinned_out:
 * false). > 0 where bytes > 0. Pure. A range longer than fcdp__driver_pin_chunk_bytes is several
 * registrations. */
static size_t pinned_run_bytes(const fcdp_pinned *pinned, size_t offset_bytes, size_t bytes,
                               bool *pinned_out) {
    *pinned_out = false;
    for (size_t i = 0; i < pinned->n; i++) {
        const fcdp_piece *range = &pinned->ranges[i];
        if (offset_bytes < range->offset_bytes) return smaller(bytes, range->offset_bytes - offset_bytes);
        if (offset_bytes >= range->offset_bytes + range->bytes) continue;
        *pinned_out = true;
        size_t inside = offset_bytes - range->offset_bytes, chunk = fcdp__driver_pin_chunk_bytes;
        return smaller(bytes, smaller(range->bytes - inside, chunk - inside % chunk));
    }
    return bytes;
}

/* ---- a block as this rank attaches it ---- */

/* What of the mapping is page-locked in the ordinary case: the board, and what this rank copies. */
static void pinned_wanted(const fcdp_host_block *block, const fcdp_host_share *share,
                          fcdp_pinned *pinned_out) {
    size_t page = block->host->page_bytes;
    fcdp_piece pieces[FCDP_MAX_PINNED] = {{0, block->n_copies > 1 ? block->map_bytes : page}};
    for (int s = 0; s < FCDP_N_SPANS && block->n_copies == 1; s++)
        pieces[1 + s] = (fcdp_piece){page + share->copied[s].offset_bytes, share->copied[s].bytes};
    pinned_cover(pieces, FCDP_MAX_PINNED, page, pinned_out);
}

/* The board must be page-locked, since streams write it and wait for it; the data should be. Without a driver
 * nothing needs to be. On failure block->pinned has what stays registered, which detach must know. */
static fcdp_status block_pin(fcdp_host_block *block, const fcdp_host_share *share) {
    fcdp_host *host = block->host;
    fcdp_driver *drv = host->config.drv;
    const fcdp_pinned board = {.n = 1, .ranges = {{0, host->page_bytes}}};
    if (!drv) return FCDP_OK;
    bool all = host->config.pin != FCDP_PIN_NEVER;
    block->pinned = board;
    if (all) pinned_wanted(block, share, &block->pinned);
    size_t wanted_bytes = pinned_bytes(&block->pinned);
    fcdp_status status = pinned_lock(drv, (char *)block->board, &block->pinned);
    if (status && all && host->config.pin == FCDP_PIN_REQUIRE)
        status = fcdp__fail(
            FCDP_ERR_OPTION,
            "host tier: FCDP_PIN=require, and %s cannot be pinned: %s (FCDP_PIN=auto goes on without)",
            fcdp__size_text(wanted_bytes).s, fcdp_error_text());
    else if (status && all && !block->pinned.n) {
        if (!atomic_exchange(&host->pin_warned, true))
            fcdp__log(FCDP_LOG_WARN,
                      "host tier: host memory is not pinned, so copies are slower: %s (FCDP_PIN=never says "
                      "nothing, and uses no FCDP_SPILL_DIR)",
                      fcdp_error_text());
        block->pinned = board;
        status = pinned_lock(drv, (char *)block->board, &block->pinned);
    }
    if (status && status != FCDP_ERR_OPTION)
        return fcdp__fail(FCDP_ERR_NO_HOST_MEM,
                          block->pinned.n ? "host tier: a group's host memory is pinned in part, which the "
                                            "driver does not undo: %s"
                                          : "host tier: the page of signals beside a group must be pinned, "
                                            "whatever FCDP_PIN says: %s",
                          fcdp_error_text());
    return status ? status : fcdp__driver_host_dptr(drv, block->board, &block->board_at);
}

/* Those that lie in [offset, offset + bytes) as a whole. Pure. */
static fcdp_piece inner_pages(size_t offset_bytes, size_t bytes, size_t page_bytes) {
    size_t begin = fcdp__round_up(offset_bytes, page_bytes);
    size_t end = (offset_bytes + bytes) / page_bytes * page_bytes;
    return (fcdp_piece){begin, begin < end ? end - begin : 0};
}

/* Ask for huge pages in [at, at + bytes), which other ranks' slices adjoin: of those alone that lie in it.
 * /sys/kernel/mm/transparent_hugepage/shmem_enabled decides. */
static void huge_ask(char *at, size_t bytes) {
    fcdp_piece inner = inner_pages((uintptr_t)at, bytes, FCDP_HUGE_BYTES);
    if (inner.bytes) (void)madvise((void *)inner.offset_bytes, inner.bytes, MADV_HUGEPAGE);
}

/* Slice i's NUMA node; -1: wherever, or that rank is not here. */
static int slice_node(const fcdp_host *host, uint32_t i) {
    const fcdp_slab_member *member = &host->header->members[i];
    if (i == host->config.slice) return host->config.numa_node;
    return atomic_load_explicit(&member->pid, memory_order_acquire) > 0 ? member->numa_node : -1;
}

static bool lies_in(fcdp_piece inner, const fcdp_piece *outer) {
    return inner.offset_bytes >= outer->offset_bytes &&
           inner.offset_bytes + inner.bytes <= outer->offset_bytes + outer->bytes;
}

/* Before the first use of the pages. The NUMA policy is the memory's, not the mapping's, and the first rank
 * that uses a page decides: so a rank asks for the copies of others, too. */
static void copies_prepare(const fcdp_host_block *block, const host_copies *copies) {
    for (uint32_t i = 0; i < copies->n; i++) {
        char *at = fcdp__host_copy(block, i);
        (void)fcdp__numa_prefer(at, block->copy_bytes, copies->nodes[i]);
        huge_ask(at, block->copy_bytes);
    }
}

/* Of a block of one copy, likewise: a rank asks for the slices of others that it copies as they do. A span's
 * slices are of one size, side by side. */
static void slices_prepare(const fcdp_host_block *block, const fcdp_host_share *share) {
    const fcdp_host *host = block->host;
    for (uint32_t i = 0; i < host->config.n_slices; i++)
        for (int s = 0; s < FCDP_N_SPANS; s++) {
            fcdp_piece slice = share->own[s];
            fcdp_pinned whole_pages;
            slice.offset_bytes += ((size_t)i - host->config.slice) * slice.bytes; /* modulo 2^64 */
            if (i != host->config.slice && !lies_in(slice, &share->copied[s])) continue;
            pinned_cover(&slice, 1, host->page_bytes, &whole_pages);
            if (!whole_pages.n) continue;
            char *at = block->data + whole_pages.ranges[0].offset_bytes;
            (void)fcdp__numa_prefer(at, whole_pages.ranges[0].bytes, slice_node(host, i));
            huge_ask(at, whole_pages.ranges[0].bytes);
        }
}

static void pages_count(const fcdp_host_block *block, fcdp_piece pages) {
    const fcdp_host_config *config = &block->host->config;
    size_t near_bytes, far_bytes;
    fcdp__numa_count(block->data + pages.offset_bytes, pages.bytes, config->numa_node, &near_bytes,
                     &far_bytes);
    fcdp__count(config->counts, FCDP_COUNT_HOST_NEAR_BYTES, near_bytes);
    fcdp__count(config->counts, FCDP_COUNT_HOST_FAR_BYTES, far_bytes);
}

/* Where the pages came from: known once they are page-locked. Of its copy, if there are several; else of its
 * slices: a page at a slice's edge is the neighbour's, too. */
static void block_count(const fcdp_host_block *block, const fcdp_host_share *share) {
    const fcdp_host_config *config = &block->host->config;
    fcdp__trace_set(FCDP_COUNT_HOST_COPIES, block->n_copies);
    if (!config->counts || config->numa_node < 0) return;
    if (block->n_copies > 1) pages_count(block, (fcdp_piece){0, block->copy_bytes});
    for (int s = 0; s < FCDP_N_SPANS && block->n_copies == 1; s++)
        pages_count(block,
                    inner_pages(share->own[s].offset_bytes, share->own[s].bytes, block->host->page_bytes));
}

static bool share_fits(const fcdp_host_share *share, size_t data_bytes) {
    for (int s = 0; s < FCDP_N_SPANS; s++) {
        const fcdp_piece pieces[] = {share->own[s], share->copied[s]};
        for (int i = 0; i < 2; i++)
            if (pieces[i].offset_bytes > data_bytes || pieces[i].bytes > data_bytes - pieces[i].offset_bytes)
                return false;
    }
    return true;
}

fcdp_status fcdp__host_attach(fcdp_host *host, uint64_t offset, size_t data_bytes,
                              const fcdp_host_share *share, fcdp_host_block **block_out) {
    const fcdp_host_share all = {.own = {{0, data_bytes}}, .copied = {{0, data_bytes}}};
    if (!share) share = &all;
    size_t page = host->page_bytes, map_bytes;
    uint64_t capacity = host->header->capacity_bytes;
    host_copies copies;
    fcdp_status status = copies_find(host, &copies);
    if (status) return status;
    if (!data_bytes || offset < host->header_bytes || offset % page ||
        !block_bytes(host, data_bytes, copies.n, &map_bytes) || offset > capacity ||
        map_bytes > capacity - offset || !share_fits(share, data_bytes))
        return fcdp__fail(FCDP_ERR_INVALID, "host tier: no block of %zu bytes at %llu", data_bytes,
                          (unsigned long long)offset);
    fcdp_host_block *block = calloc(1, sizeof *block);
    if (!block) return fcdp__fail(FCDP_ERR_SYSTEM, "host tier: no memory");
    char *at = fcdp__shared_map(host->fd, offset, map_bytes);
    if (!at) {
        int error = errno;
        free(block);
        return fcdp__fail(FCDP_ERR_SYSTEM,
                          "host tier: cannot map %s of the node's host memory: %s; if this process has very "
                          "many mappings, raise vm.max_map_count",
                          fcdp__size_text(map_bytes).s, strerror(error));
    }
    *block = (fcdp_host_block){.host = host,
                               .board = (fcdp_board_line *)at,
                               .n_copies = copies.n,
                               .data_bytes = data_bytes,
                               .copy_bytes = fcdp__round_up(data_bytes, page),
                               .map_bytes = map_bytes};
    block->data = fcdp__host_copy(block, copies.own);
    if (copies.n > 1)
        copies_prepare(block, &copies);
    else
        slices_prepare(block, share);
    atomic_fetch_add(&host->n_blocks, 1);
    status = block_pin(block, share);
    if (!status) block_count(block, share);
    if (status) {
        fcdp_failure failure = fcdp__failure_keep(status);
        fcdp__host_detach(block);
        return fcdp__failure_restore(&failure);
    }
    fcdp__board_publish(block, FCDP_BOARD_ATTACHED, 1);
    *block_out = block;
    return FCDP_OK;
}

void fcdp__host_detach(fcdp_host_block *block) {
    if (!block) return;
    fcdp_host *host = block->host;
    if (getpid() != host->pid) return;
    bool stays = block->pinned.n && pinned_unlock(host->config.drv, (char *)block->board, &block->pinned);
    if (stays)
        fcdp__log(FCDP_LOG_WARN,
                  "host tier: %s of host memory stay mapped until the process ends, as they stay pinned: %s",
                  fcdp__size_text(block->map_bytes).s, fcdp_error_text());
    fcdp__board_publish(block, FCDP_BOARD_ATTACHED, 0); /* the last use of its bytes, see records_reap() */
    /* To CUDA these addresses are these pages as long as they are
     * registered: nothing else may be mapped there. */
    if (!stays) munmap(block->board, block->map_bytes);
    atomic_fetch_sub(&host->n_blocks, 1);
    free(block);
}

void *fcdp__host_data(const fcdp_host_block *block) {
    return block->data;
}

uint32_t fcdp__host_block_copies(const fcdp_host_block *block) {
    return block->n_copies;
}

void *fcdp__host_copy(const fcdp_host_block *block, uint32_t copy) {
    FCDP_CHECK(1, copy < block->n_copies);
    return (char *)block->board + block->host->page_bytes + copy * block->copy_bytes;
}

size_t fcdp__host_data_bytes(const fcdp_host_block *block) {
    return block->data_bytes;
}

size_t fcdp__host_run_bytes(const fcdp_host_block *block, const void *at, size_t bytes, bool *pinned_out) {
    size_t offset_bytes = (size_t)((const char *)at - (const char *)block->board);
    return pinned_run_bytes(&block->pinned, offset_bytes, bytes, pinned_out);
}
