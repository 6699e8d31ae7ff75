/* fit.c - do groups fit the device, before the first of them is gathered?
 * Arithmetic over layouts; nothing is taken. */
#include "comm/internal.h"

static const size_t MIB = 1 << 20;

/* What FSDP2's own order takes at once, in pages: the groups that stay gathered, and beside them one of the
 * others, or two while one is gathered or restored ahead of its use. */
typedef struct total {
    const fcdp_group *largest;
    size_t most;          /* pages of `largest` */
    size_t stays;         /* of those that stay gathered, all */
    size_t first, second; /* of the others, the two largest */
} total;

static size_t pages_of(const fcdp_group *group) {
    size_t page_bytes = fcdp__driver_page_bytes(group->comm->engine->drv);
    return fcdp__round_up(group->layout->bytes, page_bytes) / page_bytes;
}

static void total_add(total *t, const fcdp_group *group, bool stays) {
    size_t n_pages = pages_of(group);
    if (!t->largest || n_pages > t->most) {
        t->most = n_pages;
        t->largest = group;
    }
    if (stays) {
        t->stays += n_pages;
    } else if (n_pages > t->first) {
        t->second = t->first;
        t->first = n_pages;
    } else if (n_pages > t->second) {
        t->second = n_pages;
    }
}

static fcdp_status refuse(const total *t, const fcdp_engine *engine, const fcdp_pool_stats *pool) {
    size_t would_do = t->stays + t->first + (engine->options.prefetch > 0 ? t->second : 0);
    const char *which = engine->options.device_budget_bytes ? "FCDP_DEVICE_BUDGET"
                                                            : "what the device has free";
    return fcdp__fail(FCDP_ERR_NO_DEVICE_MEM,
                      "%s, %zu MiB, is too small for the gathered parameters: the largest group, '%s', takes "
                      "%zu MiB, groups that stay "
                      "gathered between forward and backward %zu MiB; FCDP_DEVICE_BUDGET=%zuM would do",
                      which, pool->budget_bytes / MIB, t->largest->name, t->most * pool->page_bytes / MIB,
                      t->stays * pool->page_bytes / MIB, would_do * pool->page_bytes / MIB);
}

fcdp_status fcdp_groups_fit(fcdp_group *const *groups, const uint8_t *stays, uint32_t n, bool *ahead_out) {
    *ahead_out = true;
    if (n == 0) return FCDP_OK;
    const fcdp_engine *engine = groups[0]->comm->engine;
    total t = {0};
    for (uint32_t i = 0; i < n; i++) total_add(&t, groups[i], stays[i]);
    fcdp_pool_stats pool;
    fcdp__pool_stats(engine->pool, &pool);
    *ahead_out = (t.stays + t.first + t.second) * pool.page_bytes <= pool.budget_bytes;
    return (t.stays + t.first) * pool.page_bytes > pool.budget_bytes ? refuse(&t, engine, &pool) : FCDP_OK;
}
