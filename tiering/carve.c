/* carve.c - the private jemalloc arena behind the slab, the one file that knows jemalloc.
 *
 * The hooks hand out the reserved range from its start upwards and never take anything back: dalloc and
 * decommit refuse, purge is absent, decay is off, so freed extents wait in the arena for the next block. The
 * arena's own metadata stays in ordinary memory (metadata_use_hooks = false).
 */
#include "tiering/carve.h"

#include <errno.h>
#include <jemalloc/jemalloc.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct fcdp_carver {
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
    (void)zero; /* the slab's untouched pages are zero, and nobody reads through this range */
    fcdp_carver *carver = (fcdp_carver *)hooks;
    if (getpid() != carver->pid) return NULL;
    size_t next = atomic_load_explicit(&carver->next_bytes, memory_order_relaxed), at;
    do {
        /* The range starts at its largest alignment only by luck: align the address, not the offset. */
        at = fcdp__round_up((uintptr_t)carver->base + next, alignment) - (uintptr_t)carver->base;
        if (at > carver->capacity_bytes || size > carver->capacity_bytes - at) return NULL;
        if (new_addr && new_addr != carver->base + at) return NULL;
    } while (!atomic_compare_exchange_weak_explicit(&carver->next_bytes, &next, at + size,
                                                    memory_order_relaxed, memory_order_relaxed));
    *commit = true;
    return carver->base + at;
}

static bool extent_dalloc(extent_hooks_t *hooks, void *addr, size_t size, bool committed, unsigned arena) {
    (void)hooks, (void)addr, (void)size, (void)committed, (void)arena;
    return true; /* refused */
}

static bool extent_commit(extent_hooks_t *hooks, void *addr, size_t size, size_t offset, size_t length,
                          unsigned arena) {
    (void)hooks, (void)addr, (void)size, (void)offset, (void)length, (void)arena;
    return false; /* always committed */
}

static bool extent_decommit(extent_hooks_t *hooks, void *addr, size_t size, size_t offset, size_t length,
                            unsigned arena) {
    (void)hooks, (void)addr, (void)size, (void)offset, (void)length, (void)arena;
    return true; /* refused */
}

static bool extent_split(extent_hooks_t *hooks, void *addr, size_t size, size_t size_a, size_t size_b,
                         bool committed, unsigned arena) {
    (void)hooks, (void)addr, (void)size, (void)size_a, (void)size_b, (void)committed, (void)arena;
    return false; /* fine */
}

static bool is_inside(const fcdp_carver *carver, const void *addr, size_t size) {
    uintptr_t at = (uintptr_t)addr, base = (uintptr_t)carver->base;
    return at >= base && at - base <= carver->capacity_bytes && size <= carver->capacity_bytes - (at - base);
}

static bool extent_merge(extent_hooks_t *hooks, void *addr_a, size_t size_a, void *addr_b, size_t size_b,
                         bool committed, unsigned arena) {
    (void)committed, (void)arena;
    const fcdp_carver *carver = (const fcdp_carver *)hooks;
    return !is_inside(carver, addr_a, size_a) ||
           !is_inside(carver, addr_b, size_b); /* refused across slabs */
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

static int arena_create(fcdp_carver *carver) {
    arena_config config = {.extent_hooks = &carver->hooks, .metadata_use_hooks = false};
    size_t size = sizeof carver->arena;
    int rc = je_mallctl("experimental.arenas_create_ext", &carver->arena, &size, &config, sizeof config);
    if (!rc) rc = arena_set_decay(carver->arena, "dirty_decay_ms");
    if (!rc) rc = arena_set_decay(carver->arena, "muzzy_decay_ms");
    return rc;
}

fcdp_status fcdp__carver_create(size_t first_bytes, size_t capacity_bytes, size_t page_bytes,
                                fcdp_carver **carver_out) {
    fcdp_carver *carver = calloc(1, sizeof *carver);
    if (!carver) return fcdp__fail(FCDP_ERR_SYSTEM, "host tier: no memory");
    carver->hooks = (extent_hooks_t){.alloc = extent_alloc,
                                     .dalloc = extent_dalloc,
                                     .commit = extent_commit,
                                     .decommit = extent_decommit,
                                     .split = extent_split,
                                     .merge = extent_merge};
    carver->pid = getpid();
    carver->page_bytes = page_bytes;
    carver->capacity_bytes = capacity_bytes;
    atomic_init(&carver->next_bytes, first_bytes);
    carver->base = mmap(NULL, capacity_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (carver->base == MAP_FAILED) {
        int err = errno;
        free(carver);
        return fcdp__fail(FCDP_ERR_SYSTEM,
                          "host tier: cannot reserve %zu GiB of addresses (%s); raise `ulimit -v` or lower "
                          "FCDP_HOST_BUDGET",
                          capacity_bytes >> 30, strerror(err));
    }
    int rc = arena_create(carver);
    if (rc) {
        munmap(carver->base, capacity_bytes);
        free(carver);
        return fcdp__fail(FCDP_ERR_SYSTEM, "host tier: the private jemalloc refuses an arena: %s",
                          strerror(rc));
    }
    *carver_out = carver;
    return FCDP_OK;
}

void fcdp__carver_destroy(fcdp_carver *carver) {
    if (!carver) return;
    if (getpid() != carver->pid)
        return; /* the arena's locks and the hooks' address belong to the parent's state */
    char name[64];
    snprintf(name, sizeof name, "arena.%u.destroy", carver->arena);
    int rc = je_mallctl(name, NULL, NULL, NULL, 0);
    FCDP_CHECK(0, rc == 0);
    munmap(carver->base, carver->capacity_bytes);
    free(carver);
}

static int carver_flags(const fcdp_carver *carver) {
    return MALLOCX_ALIGN(carver->page_bytes) | MALLOCX_ARENA(carver->arena) | MALLOCX_TCACHE_NONE;
}

fcdp_status fcdp__carver_take(fcdp_carver *carver, size_t bytes, uint64_t *offset_out) {
    FCDP_CHECK(1, bytes > 0 && bytes % carver->page_bytes == 0);
    if (getpid() != carver->pid) return fcdp__fail(FCDP_ERR_INVALID, "host tier: carved in a forked child");
    char *at = je_mallocx(bytes, carver_flags(carver));
    if (!at)
        return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "host tier: no gap of %zu bytes in a slab of %zu GiB", bytes,
                          carver->capacity_bytes >> 30);
    FCDP_CHECK(0, is_inside(carver, at, bytes) && (size_t)(at - carver->base) % carver->page_bytes == 0);
    *offset_out = (uint64_t)(at - carver->base);
    return FCDP_OK;
}

void fcdp__carver_give(fcdp_carver *carver, uint64_t offset) {
    if (getpid() != carver->pid) return;
    je_dallocx(carver->base + offset, carver_flags(carver));
}
