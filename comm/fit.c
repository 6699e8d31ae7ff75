/* fit.c - see the header. Arithmetic over layouts. */
#include "comm/fit.h"

#include "base/size.h"
#include "comm/internal.h"
#include "comm/moves.h"

static const size_t MB = 1000000;

/* In pages, what FSDP2's own order takes at once: the groups that stay gathered, and beside them one of the
 * others, or two while one is gathered or restored ahead of its use. */
typedef struct total {
    const fcdp_group *largest;
    size_t most;          /* pages of `largest` */
    size_t stays;         /* of those that stay gathered, all */
    size_t first, second; /* of the others, the two largest */
    size_t staging;       /* of the buffer that gathers go through */
} total;

/* The two largest of the groups that are resharded are found in one pass. */
fcdp_status fcdp_groups_fit(fcdp_group *const *groups, const uint8_t *stays, uint32_t n, bool *ahead_out) {
    *ahead_out = true;
    if (n == 0) return FCDP_OK;
    const fcdp_engine *engine = groups[0]->comm->engine;
    total t = {0};
    fcdp_pool_stats pool;
    fcdp__pool_stats(engine->pool, &pool);
    for (uint32_t i = 0; i < n; i++) {
        size_t n_pages = fcdp__round_up(groups[i]->layout->bytes, pool.page_bytes) / pool.page_bytes;
        if (!t.largest || n_pages > t.most) {
            t.most = n_pages;
            t.largest = groups[i];
        }
        size_t staged = fcdp__round_up(fcdp__gather_staging_bytes(groups[i]), pool.page_bytes) /
                        pool.page_bytes;
        if (staged > t.staging) t.staging = staged;
        if (stays[i]) {
            t.stays += n_pages;
        } else if (n_pages > t.first) {
            t.second = t.first;
            t.first = n_pages;
        } else if (n_pages > t.second) {
            t.second = n_pages;
        }
    }
    t.stays += t.staging;
    *ahead_out = (t.stays + t.first + t.second) * pool.page_bytes <= pool.budget_bytes;
    if ((t.stays + t.first) * pool.page_bytes <= pool.budget_bytes) return FCDP_OK;
    const char *limit = engine->options.device_budget_bytes ? "FCDP_DEVICE_BUDGET"
                        : engine->host_computes             ? "what the device has free"
                                                            : "what the device has free but FCDP_HEADROOM";
    size_t would_do = t.stays + t.first + (engine->options.prefetch > 0 ? t.second : 0);
    return fcdp__fail(
        FCDP_ERR_NO_DEVICE_MEM,
        "%s, %s, is too small for the gathered parameters: the largest group, '%s', takes %s, groups "
        "that stay gathered between forward and backward, and the staging buffer, %s; "
        "FCDP_DEVICE_BUDGET=%zuMB would do",
        limit, fcdp__size_text(pool.budget_bytes).s, t.largest->name[0] ? t.largest->name : "the root",
        fcdp__size_text(t.most * pool.page_bytes).s, fcdp__size_text(t.stays * pool.page_bytes).s,
        fcdp__round_up(would_do * pool.page_bytes, MB) / MB);
}
