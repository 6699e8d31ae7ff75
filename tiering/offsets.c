/* offsets.c - the private jemalloc arena behind the slab's offsets. No other file knows jemalloc.
 *
 * The hooks hand out the reserved range from its start upwards, and nothing returns to it: dalloc and
 * decommit decline, purge is absent, decay is off. Freed extents stay in the arena for the next block. The
 * arena's own metadata is in ordinary memory (metadata_use_hooks = false).
 */
#include "tiering/offsets.h"

#include <errno.h>
#include <jemalloc/jemalloc.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/size.h"

struct fcdp_offsets {
    extent_hooks_t hooks; /* first: jemalloc gives its address back to us */
    pid_t pid;
    unsigned arena;
    char *base; /* PROT_NONE, capacity_bytes */
    size_t page_bytes, capacity_bytes;
    _Atomic size_t next_bytes; /* [next_bytes, capacity_bytes) was never handed out */
};

static void *extent_alloc(extent_hooks_t *hooks, void *new_addr, size_t size, size_t alignment, bool *zero,
                          bool *commit, unsigned arena) {
    (void)arena;
    (void)zero; /* the slab's untouched pages are zero, and nothing reads through this range */
    fcdp_offsets *offsets = (fcdp_offsets *)hooks;
    if (getpid() != offsets->pid) return NULL;
    size_t next = atomic_load_explicit(&offsets->next_bytes, memory_order_relaxed), at;
    do {
        /* The range need not start at its largest alignment: align the address, not the offset. */
        at = fcdp__round_up((uintptr_t)offsets->base + next, alignment) - (uintptr_t)offsets->base;
        if (at > offsets->capacity_bytes || size > offsets->capacity_bytes - at) return NULL;
        if (new_addr && new_addr != offsets->base + at) return NULL;
    } while (!atomic_compare_exchange_weak_explicit(&offsets->next_bytes, &next, at + size,
                                                    memory_order_relaxed, memory_order_relaxed));
    *commit = true;
    return offsets->base + at;
}

static bool extent_dalloc(extent_hooks_t *hooks, void *addr, size_t size, bool committed, unsigned arena) {
    (void)hooks, (void)addr, (void)size, (void)committed, (void)arena;
    return true; /* declined */
}

static bool extent_commit(extent_hooks_t *hooks, void *addr, size_t size, size_t offset, size_t length,
                          unsigned arena) {
    (void)hooks, (void)addr, (void)size, (void)offset, (void)length, (void)arena;
    return false; /* always committed */
}

static bool extent_decommit(extent_hooks_t *hooks, void *addr, size_t size, size_t offset, size_t length,
                            unsigned arena) {
    (void)hooks, (void)addr, (void)size, (void)offset, (void)length, (void)arena;
    return true; /* declined */
}

static bool extent_split(extent_hooks_t *hooks, void *addr, size_t size, size_t size_a, size_t size_b,
                         bool committed, unsigned arena) {
    (void)hooks, (void)addr, (void)size, (void)size_a, (void)size_b, (void)committed, (void)arena;
    return false; /* fine */
}

static bool is_inside(const fcdp_offsets *offsets, const void *addr, size_t size) {
    uintptr_t at = (uintptr_t)addr, base = (uintptr_t)offsets->base;
    return at >= base && at - base <= offsets->capacity_bytes &&
           size <= offsets->capacity_bytes - (at - base);
}

static bool extent_merge(extent_hooks_t *hooks, void *addr_a, size_t size_a, void *addr_b, size_t size_b,
                         bool committed, unsigned arena) {
    (void)committed, (void)arena;
    const fcdp_offsets *offsets = (const fcdp_offsets *)hooks;
    return !is_inside(offsets, addr_a, size_a) ||
           !is_inside(offsets, addr_b, size_b); /* declined across slabs */
}

static int arena_set_decay(unsigned arena, const char *which) {
    char name[64];
    ssize_t never = -1;
    snprintf(name, sizeof name, "arena.%u.%s", arena, which);
    return je_mallctl(name, NULL, NULL, &never, sizeof never);
}

/* jemalloc 5.3 takes this by experimental.arenas_create_ext but does not declare it (arena_config_s). */
typedef struct arena_config {
    extent_hooks_t *extent_hooks;
    bool metadata_use_hooks;
} arena_config;

static int arena_create(fcdp_offsets *offsets) {
    arena_config config = {.extent_hooks = &offsets->hooks, .metadata_use_hooks = false};
    size_t size = sizeof offsets->arena;
    int rc = je_mallctl("experimental.arenas_create_ext", &offsets->arena, &size, &config, sizeof config);
    if (!rc) rc = arena_set_decay(offsets->arena, "dirty_decay_ms");
    if (!rc) rc = arena_set_decay(offsets->arena, "muzzy_decay_ms");
    return rc;
}

fcdp_status fcdp__offsets_create(size_t first_bytes, size_t capacity_bytes, size_t page_bytes,
                                 fcdp_offsets **offsets_out) {
    fcdp_offsets *offsets = calloc(1, sizeof *offsets);
    if (!offsets) return fcdp__fail(FCDP_ERR_SYSTEM, "host tier: no memory");
    offsets->hooks = (extent_hooks_t){.alloc = extent_alloc,
                                      .dalloc = extent_dalloc,
                                      .commit = extent_commit,
                                      .decommit = extent_decommit,
                                      .split = extent_split,
                                      .merge = extent_merge};
    offsets->pid = getpid();
    offsets->page_bytes = page_bytes;
    offsets->capacity_bytes = capacity_bytes;
    atomic_init(&offsets->next_bytes, first_bytes);
    offsets->base = mmap(NULL, capacity_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (offsets->base == MAP_FAILED) {
        int err = errno;
        free(offsets);
        return fcdp__fail(FCDP_ERR_SYSTEM,
                          "host tier: cannot reserve %s of addresses (%s); raise `ulimit -v` or lower "
                          "FCDP_HOST_BUDGET",
                          fcdp__size_text(capacity_bytes).s, strerror(err));
    }
    int rc = arena_create(offsets);
    if (rc) {
        munmap(offsets->base, capacity_bytes);
        free(offsets);
        return fcdp__fail(FCDP_ERR_SYSTEM, "host tier: the private jemalloc cannot create an arena: %s",
                          strerror(rc));
    }
    *offsets_out = offsets;
    return FCDP_OK;
}

void fcdp__offsets_destroy(fcdp_offsets *offsets) {
    if (!offsets) return;
    if (getpid() != offsets->pid)
        return; /* the arena's locks and the hooks' address belong to the parent's state */
    char name[64];
    snprintf(name, sizeof name, "arena.%u.destroy", offsets->arena);
    int rc = je_mallctl(name, NULL, NULL, NULL, 0);
    FCDP_CHECK(0, rc == 0);
    munmap(offsets->base, offsets->capacity_bytes);
    free(offsets);
}

static int alloc_flags(const fcdp_offsets *offsets) {
    return MALLOCX_ALIGN(offsets->page_bytes) | MALLOCX_ARENA(offsets->arena) | MALLOCX_TCACHE_NONE;
}

fcdp_status fcdp__offsets_alloc(fcdp_offsets *offsets, size_t bytes, uint64_t *offset_out) {
    FCDP_CHECK(1, bytes > 0 && bytes % offsets->page_bytes == 0);
    if (getpid() != offsets->pid)
        return fcdp__fail(FCDP_ERR_INVALID, "host tier: a forked child cannot allocate host memory");
    char *at = je_mallocx(bytes, alloc_flags(offsets));
    if (!at)
        return fcdp__fail(
            FCDP_ERR_NO_HOST_MEM,
            "host tier: the node's host memory has no free addresses for a block of %s, of %s: raise "
            "FCDP_HOST_BUDGET",
            fcdp__size_text(bytes).s, fcdp__size_text(offsets->capacity_bytes).s);
    FCDP_CHECK(0, is_inside(offsets, at, bytes) && (size_t)(at - offsets->base) % offsets->page_bytes == 0);
    *offset_out = (uint64_t)(at - offsets->base);
    return FCDP_OK;
}

void fcdp__offsets_free(fcdp_offsets *offsets, uint64_t offset) {
    if (getpid() != offsets->pid) return;
    je_dallocx(offsets->base + offset, alloc_flags(offsets));
}
