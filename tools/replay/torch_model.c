/* torch_model.c - the two modes of PyTorch's allocator, each as far as it decides which bytes are reserved.
 * Failures of host memory are not handled: a model that ends is no loss. */
#include "tools/replay/torch_model.h"

#include <stdlib.h>
#include <string.h>

enum {
    MIN_BLOCK = 512,
    SMALL = 1 << 20,
    SMALL_BUFFER = 2 << 20,
    LARGE_BUFFER = 20 << 20,
    MIN_LARGE = 10 << 20,
    ROUND_LARGE = 2 << 20,
    MAX_STREAMS = 8
};
/* of an expandable segment: whole handles of either size */
static const uint64_t ADDRESS_SPACE = 10ull << 40;

struct torch_block {
    uint64_t address, size;
    bool allocated, mapped;
    torch_block *prev, *next; /* in the segment */
    struct list *pool;
};

typedef struct set { /* in no order: few at a time */
    torch_block **items;
    size_t n, capacity;
} set;

typedef struct list { /* a pool: one stream's small or large blocks */
    set free, unmapped;
    bool small;
} list;

struct torch_model {
    bool expandable;
    list pools[MAX_STREAMS][2];
    uint64_t next_address;
    size_t budget, reserved, peak_reserved;
    unsigned long n_calls;
    set segments; /* their first blocks */
};

static void set_add(set *s, torch_block *block) {
    if (s->n == s->capacity) {
        s->capacity = s->capacity ? 2 * s->capacity : 64;
        s->items = realloc(s->items, s->capacity * sizeof *s->items);
    }
    s->items[s->n++] = block;
}

static void set_remove(set *s, const torch_block *block) {
    size_t i = 0;
    while (s->items[i] != block) i++;
    s->items[i] = s->items[--s->n];
}

static torch_block *block_make(list *pool, uint64_t address, uint64_t size, bool mapped) {
    torch_block *block = calloc(1, sizeof *block);
    *block = (torch_block){.address = address, .size = size, .mapped = mapped, .pool = pool};
    return block;
}

/* The part of `block` behind its first `size` bytes. */
static torch_block *block_split(torch_block *block, uint64_t size) {
    torch_block *rest = block_make(block->pool, block->address + size, block->size - size, block->mapped);
    rest->prev = block;
    rest->next = block->next;
    if (rest->next) rest->next->prev = rest;
    block->next = rest;
    block->size = size;
    return rest;
}

/* The block behind `block`, which is in no set, becomes part of it. */
static void block_swallow(torch_block *block) {
    torch_block *next = block->next;
    block->size += next->size;
    block->next = next->next;
    if (block->next) block->next->prev = block;
    free(next);
}

/* Merge a mapped block in no set with the free mapped blocks beside it. */
static torch_block *block_merge(torch_block *block) {
    torch_block *next = block->next, *prev = block->prev;
    if (next && !next->allocated && next->mapped) {
        set_remove(&block->pool->free, next);
        block_swallow(block);
    }
    if (prev && !prev->allocated && prev->mapped) {
        set_remove(&block->pool->free, prev);
        block_swallow(prev);
        block = prev;
    }
    return block;
}

/* ---- native: segments ---- */

static uint64_t segment_size(uint64_t size) {
    if (size <= SMALL) return SMALL_BUFFER;
    if (size < MIN_LARGE) return LARGE_BUFFER;
    return (size + ROUND_LARGE - 1) / ROUND_LARGE * ROUND_LARGE;
}

static bool reserve(torch_model *model, uint64_t bytes) {
    if (model->reserved + bytes > model->budget) return false;
    model->reserved += bytes;
    if (model->reserved > model->peak_reserved) model->peak_reserved = model->reserved;
    return true;
}

static torch_block *segment_make(torch_model *model, list *pool, uint64_t size) {
    model->n_calls++;
    if (!reserve(model, segment_size(size))) return NULL;
    torch_block *block = block_make(pool, model->next_address, segment_size(size), true);
    model->next_address += block->size + ROUND_LARGE;
    set_add(&model->segments, block);
    return block;
}

/* Cached segments of which nothing is used. */
static void segments_release(torch_model *model, list *pool) {
    for (size_t i = pool->free.n; i-- > 0;) {
        torch_block *block = pool->free.items[i];
        if (block->prev || block->next) continue;
        set_remove(&pool->free, block);
        set_remove(&model->segments, block);
        model->reserved -= block->size;
        model->n_calls++;
        free(block);
    }
}

/* ---- expandable ---- */

static uint64_t handle_bytes(const list *pool) {
    return pool->small ? SMALL_BUFFER : LARGE_BUFFER;
}

static bool is_spare(const torch_block *block) {
    return block && !block->allocated;
}

static bool has_room(const torch_block *block, uint64_t size) {
    uint64_t bytes = 0;
    for (; bytes < size && is_spare(block); block = block->next) bytes += block->size;
    return bytes >= size;
}

/* By the lowest address that has room. */
static torch_block *place_find(torch_model *model, list *pool, uint64_t size) {
    torch_block *found = NULL;
    for (size_t i = 0; i < pool->unmapped.n; i++) {
        torch_block *at = pool->unmapped.items[i];
        if (found && at->address > found->address) continue;
        if (is_spare(at->prev)) at = at->prev;
        if (has_room(at, size)) found = at;
    }
    if (found) return found;
    found = block_make(pool, model->next_address, ADDRESS_SPACE, false);
    model->next_address += ADDRESS_SPACE;
    model->n_calls++;
    set_add(&model->segments, found);
    set_add(&pool->unmapped, found);
    return found;
}

/* Map the first `size` bytes of an unmapped block, in whole handles, and merge them with what is free beside;
 * NULL: not all of them could be created, and none is. */
static torch_block *block_map(torch_model *model, torch_block *block, uint64_t size) {
    uint64_t handle = handle_bytes(block->pool), n = (size + handle - 1) / handle;
    uint64_t n_room = (model->budget - model->reserved) / handle;
    if (n > n_room) {
        model->n_calls += 2 * n_room + 1; /* created and released again, and the one that failed */
        return NULL;
    }
    (void)reserve(model, n * handle);
    model->n_calls += 2 * n + 1;
    set_remove(&block->pool->unmapped, block);
    if (n * handle < block->size) set_add(&block->pool->unmapped, block_split(block, n * handle));
    block->mapped = true;
    block = block_merge(block);
    set_add(&block->pool->free, block);
    return block;
}

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static torch_block *place_make(torch_model *model, list *pool, uint64_t size) {
    torch_block *block = place_find(model, pool, size);
    if (!block->mapped) block = block_map(model, block, least(block->size, size));
    while (block && block->size < size)
        block = block_map(model, block->next, least(size - block->size, block->next->size));
    if (block) set_remove(&pool->free, block);
    return block;
}

/* A free block's whole handles are unmapped; what is left at its ends stays free. Addresses are kept: the one
 * segment of a pool is as good as another. */
static void block_unmap(torch_model *model, torch_block *block) {
    uint64_t handle = handle_bytes(block->pool), end = block->address + block->size;
    uint64_t from = (block->address + handle - 1) / handle * handle, to = end / handle * handle;
    if (from >= to) return;
    set_remove(&block->pool->free, block);
    model->reserved -= to - from;
    model->n_calls += 2 * ((to - from) / handle);
    if (to < end) set_add(&block->pool->free, block_split(block, to - block->address));
    if (block->address < from) {
        set_add(&block->pool->free, block);
        block = block_split(block, from - block->address);
    }
    block->mapped = false;
    torch_block *next = block->next, *prev = block->prev;
    if (next && !next->mapped) {
        set_remove(&block->pool->unmapped, next);
        block_swallow(block);
    }
    if (prev && !prev->mapped) {
        set_remove(&block->pool->unmapped, prev);
        block = prev;
        block_swallow(block);
    }
    set_add(&block->pool->unmapped, block);
}

static void handles_release(torch_model *model, list *pool) {
    set blocks = {0};
    for (size_t i = 0; i < pool->free.n; i++) set_add(&blocks, pool->free.items[i]);
    for (size_t i = 0; i < blocks.n; i++) block_unmap(model, blocks.items[i]);
    free(blocks.items);
}

/* ---- both ---- */

static uint64_t expanded_size(const torch_block *block) {
    return block->size + (block->next && !block->next->mapped ? block->next->size : 0);
}

static int by_size(const void *a, const void *b) {
    const torch_block *x = *(torch_block *const *)a, *y = *(torch_block *const *)b;
    if (x->size != y->size) return x->size < y->size ? -1 : 1;
    return x->address < y->address ? -1 : x->address > y->address;
}

static torch_block *free_take(torch_model *model, list *pool, uint64_t size) {
    set fits = {0};
    for (size_t i = 0; i < pool->free.n; i++)
        if (pool->free.items[i]->size >= size) set_add(&fits, pool->free.items[i]);
    if (fits.n == 0) return NULL;
    qsort(fits.items, fits.n, sizeof *fits.items, by_size);
    size_t at = 0;
    if (model->expandable)
        while (at + 1 < fits.n && expanded_size(fits.items[at + 1]) < expanded_size(fits.items[at])) at++;
    torch_block *block = fits.items[at];
    free(fits.items);
    set_remove(&pool->free, block);
    return block;
}

static torch_block *block_new(torch_model *model, list *pool, uint64_t size) {
    return model->expandable ? place_make(model, pool, size) : segment_make(model, pool, size);
}

/* What it does before it is out of memory: everything that is cached, of every stream. */
static void cache_release(torch_model *model) {
    for (int stream = 0; stream < MAX_STREAMS; stream++)
        for (int small = 0; small < 2; small++) {
            list *pool = &model->pools[stream][small];
            model->expandable ? handles_release(model, pool) : segments_release(model, pool);
        }
}

torch_block *torch_model_malloc(torch_model *model, size_t bytes, unsigned stream) {
    uint64_t size = bytes < MIN_BLOCK ? MIN_BLOCK : (bytes + MIN_BLOCK - 1) / MIN_BLOCK * MIN_BLOCK;
    list *pool = &model->pools[stream % MAX_STREAMS][size <= SMALL];
    pool->small = size <= SMALL;
    torch_block *block = free_take(model, pool, size);
    if (!block) block = block_new(model, pool, size);
    if (!block) {
        cache_release(model);
        block = block_new(model, pool, size);
    }
    if (!block) return NULL;
    uint64_t rest = block->size - size;
    if (pool->small || model->expandable ? rest >= MIN_BLOCK : rest > SMALL)
        set_add(&pool->free, block_split(block, size));
    block->allocated = true;
    return block;
}

void torch_model_free(torch_model *model, torch_block *block) {
    block->allocated = false;
    torch_block *merged = block_merge(block);
    set_add(&merged->pool->free, merged);
    (void)model;
}

torch_model *torch_model_create(bool expandable, size_t budget_bytes) {
    torch_model *model = calloc(1, sizeof *model);
    model->expandable = expandable;
    model->budget = budget_bytes;
    model->next_address = ADDRESS_SPACE;
    return model;
}

void torch_model_destroy(torch_model *model) {
    for (size_t i = 0; i < model->segments.n; i++)
        for (torch_block *block = model->segments.items[i], *next; block; block = next) {
            next = block->next;
            free(block);
        }
    for (int s = 0; s < MAX_STREAMS; s++)
        for (int small = 0; small < 2; small++) {
            free(model->pools[s][small].free.items);
            free(model->pools[s][small].unmapped.items);
        }
    free(model->segments.items);
    free(model);
}

size_t torch_model_peak_reserved(const torch_model *model) {
    return model->peak_reserved;
}

unsigned long torch_model_driver_calls(const torch_model *model) {
    return model->n_calls;
}
