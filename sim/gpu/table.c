/* Ids instead of pointers, as handles for callers: tag | generation | slot | 0000. A slot's generation
 * grows with every reuse, so a handle that was destroyed, or that belongs to another table, is recognised
 * and never dereferenced. The last bits are zero, as a pointer's are: PyTorch tells streams by them.
 */
#include <stdlib.h>

#include "sim/gpu/internal.h"

enum {
    ZERO_BITS = 4,
    SLOT_BITS = 24,
    GENERATION_BITS = 28,
    TAG_AT = ZERO_BITS + SLOT_BITS + GENERATION_BITS
};
#define SLOT_MASK (((uint64_t)1 << SLOT_BITS) - 1)
#define GENERATION_MASK (((uint64_t)1 << GENERATION_BITS) - 1)

struct sim_slot {
    void *item; /* NULL: free */
    uint32_t generation;
    uint32_t next_free;
};

static bool table_grow(struct sim_table *table) {
    size_t n = table->n_capacity ? 2 * table->n_capacity : 64;
    if (n > SLOT_MASK) return false;
    struct sim_slot *slots = realloc(table->slots, n * sizeof *slots);
    if (!slots) return false;
    table->slots = slots;
    table->n_capacity = n;
    return true;
}

static uint64_t id_of(const struct sim_table *table, size_t i) {
    uint64_t generation = table->slots[i].generation & GENERATION_MASK;
    return (uint64_t)table->tag << TAG_AT | (generation << SLOT_BITS | (i + 1)) << ZERO_BITS;
}

uint64_t simgpu__table_put(struct sim_table *table, void *item) {
    uint32_t i = table->first_free;
    if (i) {
        table->first_free = table->slots[--i].next_free;
    } else {
        if (table->n_slots == table->n_capacity && !table_grow(table)) return 0;
        i = (uint32_t)table->n_slots++;
        table->slots[i].generation = 0;
    }
    table->slots[i].item = item;
    table->n_live++;
    table->slots[i].generation++;
    return id_of(table, i);
}

static struct sim_slot *slot_of(const struct sim_table *table, uint64_t id) {
    uint64_t i = (id >> ZERO_BITS & SLOT_MASK) - 1;
    if (id >> TAG_AT != table->tag || i >= table->n_slots) return NULL;
    struct sim_slot *slot = &table->slots[i];
    return slot->item && id == id_of(table, i) ? slot : NULL;
}

void *simgpu__table_get(const struct sim_table *table, uint64_t id) {
    struct sim_slot *slot = slot_of(table, id);
    return slot ? slot->item : NULL;
}

void *simgpu__table_take(struct sim_table *table, uint64_t id) {
    struct sim_slot *slot = slot_of(table, id);
    if (!slot) return NULL;
    void *item = slot->item;
    slot->item = NULL;
    slot->next_free = table->first_free;
    table->first_free = (uint32_t)(slot - table->slots) + 1;
    table->n_live--;
    return item;
}

void simgpu__table_clear(struct sim_table *table, void (*drop)(void *item)) {
    for (size_t i = 0; i < table->n_slots; i++) {
        struct sim_slot *slot = &table->slots[i];
        if (!slot->item) continue;
        drop(simgpu__table_take(table, id_of(table, i)));
    }
}
