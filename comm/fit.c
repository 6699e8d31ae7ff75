/* fit.c - do groups fit the device, before the first of them is gathered? Arithmetic over layouts; nothing is
 * taken. */
#include <stdlib.h>

#include "comm/crossing.h"

static const size_t MIB = 1 << 20;

/* Pages; `column`: of what crosses the nodes while the group is gathered. */
typedef struct need {
    size_t region, column;
} need;

static size_t pages_of(const fcdp_engine *engine, size_t bytes) {
    size_t page_bytes = fcdp__driver_page_bytes(engine->drv);
    return fcdp__round_up(bytes, page_bytes) / page_bytes;
}

/* Of a gather of all extents, the first one's. */
static fcdp_status need_of(const fcdp_group *group, need *need_out) {
    const fcdp_engine *engine = group->comm->engine;
    uint32_t n = group->layout->n_extents;
    uint8_t *stale = malloc(n + 1);
    if (!stale) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory to plan '%s'", group->name);
    for (uint32_t i = 0; i < n; i++) stale[i] = 1;
    fcdp_plan *plan;
    fcdp_status status = fcdp__plan_make(group->layout, &group->comm->topology, stale, &plan);
    free(stale);
    if (status) return status;
    *need_out = (need){pages_of(engine, group->layout->bytes),
                       pages_of(engine, fcdp__crossing_column_bytes(group, plan))};
    fcdp__plan_destroy(plan);
    return FCDP_OK;
}

/* What FSDP2's own order takes at once: the groups that stay gathered; beside them one of the others, with
 * the columns that are ahead of it, or (restored ahead in backward) two. `at_least`: with nothing ahead. All
 * in pages. */
typedef struct total {
    const fcdp_group *largest;
    need most;                   /* of any one group */
    size_t stays, first, second; /* of those that stay, all; of the others, the two largest regions */
    size_t at_least, would_do;
} total;

static void total_add(total *t, const fcdp_group *group, need need, bool stays) {
    if (!t->largest || need.region > t->most.region) {
        t->most.region = need.region;
        t->largest = group;
    }
    if (need.column > t->most.column) t->most.column = need.column;
    if (stays) {
        t->stays += need.region;
    } else if (need.region > t->first) {
        t->second = t->first;
        t->first = need.region;
    } else if (need.region > t->second) {
        t->second = need.region;
    }
}

static void total_make(total *t, const fcdp_comm *comm) {
    bool ahead = comm->engine->options.prefetch > 0;
    size_t columns = (ahead ? comm->ahead_limit + 1 : 1) * t->most.column;
    size_t beside = ahead ? t->second : 0;
    t->at_least = t->stays + t->first + t->most.column;
    t->would_do = t->stays + t->first + (columns > beside ? columns : beside);
}

static fcdp_status refuse(const total *t, const fcdp_engine *engine, const fcdp_pool_stats *pool) {
    size_t page_bytes = pool->page_bytes;
    const char *which =
        engine->options.device_budget_bytes ? "FCDP_DEVICE_BUDGET" : "what the device has free";
    return fcdp__fail(FCDP_ERR_NO_DEVICE_MEM,
                      "%s, %zu MiB, is too small for the gathered parameters: the largest group, '%s', takes "
                      "%zu MiB and %zu MiB more while it "
                      "is gathered, groups that stay gathered between forward and backward %zu MiB; "
                      "FCDP_DEVICE_BUDGET=%zuM would do",
                      which, pool->budget_bytes / MIB, t->largest->name, t->most.region * page_bytes / MIB,
                      t->most.column * page_bytes / MIB, t->stays * page_bytes / MIB,
                      t->would_do * page_bytes / MIB);
}

fcdp_status fcdp_groups_fit(fcdp_group *const *groups, const uint8_t *stays, uint32_t n) {
    if (n == 0) return FCDP_OK;
    const fcdp_engine *engine = groups[0]->comm->engine;
    total t = {0};
    for (uint32_t i = 0; i < n; i++) {
        need need = {0, 0};
        fcdp_status status = need_of(groups[i], &need);
        if (status) return status;
        total_add(&t, groups[i], need, stays[i]);
    }
    total_make(&t, groups[0]->comm);
    fcdp_pool_stats pool;
    fcdp__pool_stats(engine->pool, &pool);
    return t.at_least * pool.page_bytes > pool.budget_bytes ? refuse(&t, engine, &pool) : FCDP_OK;
}
