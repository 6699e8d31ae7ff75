/* schedule.c - records uses, finds the period, and holds the plan that policy.c makes of it. */
#include "tiering/schedule.h"

#include "tiering/policy.h"
#include "tiering/slot.h"
#include "tiering/trace.h"

#include <stdlib.h>
#include <string.h>

/* A period of half of the record can be told from its repetition: an 8B model's step with 32 micro-batches
 * has 2,200 uses. */
enum { N_RECORDED = 8192 };
/* Symbols that must agree before a period is believed: a quarter of it, and more than a turn of forward to
 * backward makes agree (the last group's two uses are one after the other). */
enum { N_ALIKE = 4, ALIKE_SHARE = 4 };
enum { SLACK_SHARE = 32 }; /* of the budget: what may be left unused before there is a new plan */
enum { MARGIN_DECAY = 8 }; /* each period takes an eighth off the margin */
/* Periods in which a region is not kept where it was evicted twice in turn: others take memory there that no
 * sample sees, between a use's end and the begin of the next one. (Once, it may have been in the way of a new
 * plan.) */
enum { N_SHUNNED = 32 };

struct fcdp_schedule {
    fcdp_planned_use *uses; /* n of N_RECORDED */
    uint32_t *symbols;      /* of each: its region, and whether it filled that */
    uint32_t *scratch;
    size_t n;
    /* The plan: uses[at + k] is to be as uses[at - n_period + k % n_period], and keeps what keep[] says.
     * n_period 0: there is none */
    size_t at, n_period;
    bool *keep;
    size_t n_budget;       /* pages that it was made for; SIZE_MAX: a new one is due with the next period */
    size_t n_until_search; /* uses, before a period is looked for again */
    size_t n_as_planned;   /* uses since the last surprise for which there was a plan */
    size_t n_margin_pages; /* left free, since evictions were needed */
    size_t n_regions;      /* numbers that were given */
};

fcdp_status fcdp__schedule_create(fcdp_tiering *tiering) {
    fcdp_schedule *s = calloc(1, sizeof *s);
    tiering->schedule = s;
    if (s) {
        s->uses = calloc(N_RECORDED, sizeof *s->uses);
        s->symbols = calloc(N_RECORDED, sizeof *s->symbols);
        s->scratch = calloc(N_RECORDED, sizeof *s->scratch);
        s->keep = calloc(N_RECORDED, sizeof *s->keep);
    }
    if (s && s->uses && s->symbols && s->scratch && s->keep) return FCDP_OK;
    fcdp__schedule_destroy(tiering);
    return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a schedule");
}

void fcdp__schedule_destroy(fcdp_tiering *tiering) {
    fcdp_schedule *s = tiering->schedule;
    tiering->schedule = NULL;
    if (!s) return;
    free(s->uses);
    free(s->symbols);
    free(s->scratch);
    free(s->keep);
    free(s);
}

void fcdp__schedule_forget(fcdp_tiering *tiering) {
    fcdp_schedule *s = tiering->schedule;
    if (!s) return;
    s->n = s->n_period = s->n_regions = s->n_as_planned = 0;
    for (fcdp_region *r = tiering->regions; r; r = r->next) {
        r->number = (uint32_t)s->n_regions++;
        r->use = FCDP_NO_USE;
        r->planned = r->dies = false;
    }
}

/* ---- recording ---- */

/* The older half goes. */
static void record_halve(fcdp_tiering *tiering) {
    fcdp_schedule *s = tiering->schedule;
    size_t half = s->n / 2;
    memmove(s->uses, s->uses + half, (s->n - half) * sizeof *s->uses);
    memmove(s->symbols, s->symbols + half, (s->n - half) * sizeof *s->symbols);
    s->n -= half;
    if (s->at < half + s->n_period)
        s->n_period = 0;
    else
        s->at -= half;
    for (fcdp_region *r = tiering->regions; r; r = r->next)
        r->use = r->use != FCDP_NO_USE && r->use >= half ? r->use - half : FCDP_NO_USE;
}

/* Did the last use, which is known in full now, and this one come as planned? */
static bool is_as_planned(const fcdp_schedule *s, const fcdp_region *region) {
    size_t i = s->n;
    return s->uses[i - s->n_period].region == region->number &&
           (i == s->at || s->symbols[i - 1] == s->symbols[i - 1 - s->n_period]);
}

/* Does the region's use behind the new one, which comes as that a period ago did, fill it and load nothing?
 * Of a region that a period uses once, that one is the new one's own. Only where a whole period has come as
 * planned: a wrong guess costs a gather, and a longer period may begin as a shorter one. */
static bool is_filled_next(const fcdp_schedule *s, const fcdp_region *region) {
    if (!s->n_period || s->n_as_planned < s->n_period) return false;
    size_t same = s->n - s->n_period, next = same;
    for (size_t k = 1; k < s->n_period && next == same; k++)
        if (s->uses[same + k].region == region->number) next = same + k;
    return s->uses[next].load_bytes == 0 && s->symbols[next] == region->number * 2 + 1;
}

void fcdp__schedule_record(fcdp_region *region) {
    fcdp_schedule *s = region->tiering->schedule;
    if (!s) return;
    if (s->n == N_RECORDED) record_halve(region->tiering);
    if (s->n_period && !is_as_planned(s, region)) {
        fcdp__count(&region->tiering->counts, FCDP_COUNT_SURPRISES, 1);
        s->n_period = 0;
        s->n_until_search = N_ALIKE; /* so many must be alike */
        s->n_as_planned = 0;
        for (fcdp_region *r = region->tiering->regions; r; r = r->next) r->dies = false;
    }
    region->use = s->n;
    region->planned = s->n_period && s->keep[(s->n - s->at) % s->n_period];
    const fcdp_planned_use nothing = {0}, *before = s->n_period ? &s->uses[s->n - s->n_period] : &nothing;
    uint32_t n_shunned = before->n_shunned > 0 ? before->n_shunned - 1 : 0;
    if (region->tier != FCDP_TIER_POLICY) n_shunned = 1;
    s->uses[s->n] = (fcdp_planned_use){.region = region->number,
                                       .n_pages = (uint32_t)fcdp__region_pages(region),
                                       .n_shunned = n_shunned,
                                       .evicted_before = before->evicted};
    s->n_as_planned += s->n_period > 0;
    region->dies = is_filled_next(s, region);
    s->symbols[s->n++] = region->number * 2;
    s->n_until_search -= s->n_until_search > 0;
}

void fcdp__schedule_note_release(fcdp_region *region) {
    fcdp_schedule *s = region->tiering->schedule;
    if (!s || region->use == FCDP_NO_USE) return;
    uint32_t n_held = (uint32_t)(s->n - 1 - region->use);
    if (region->use < s->at && s->uses[region->use].n_held != n_held)
        s->n_budget = SIZE_MAX; /* a wrong guess */
    s->uses[region->use].n_held = n_held;
}

void fcdp__region_plan_use(fcdp_region *region, size_t load_bytes, size_t store_bytes, bool fills) {
    fcdp_schedule *s = region->tiering->schedule;
    if (!s) return;
    fcdp__region_lock(region);
    if (region->use != FCDP_NO_USE) {
        s->uses[region->use].load_bytes = load_bytes;
        s->uses[region->use].store_bytes = store_bytes;
        s->symbols[region->use] = region->number * 2 + fills;
    }
    fcdp__region_unlock(region);
}

bool fcdp__region_is_planned(fcdp_region *region) {
    fcdp__region_lock(region);
    bool planned = region->planned;
    fcdp__region_unlock(region);
    return planned;
}

bool fcdp__region_dies(fcdp_region *region) {
    fcdp__region_lock(region);
    bool dies = region->dies && region->tiering->schedule->n_period;
    fcdp__region_unlock(region);
    return dies;
}

/* Kept regions are those that a plan may give up. */
void fcdp__schedule_sample(fcdp_tiering *tiering, size_t n_pages) {
    fcdp_schedule *s = tiering->schedule;
    if (!s) return;
    size_t n_in_use = fcdp__pool_pages_in_use(tiering->pool) + n_pages;
    size_t n_kept = fcdp__tiering_unplanned_pages(tiering);
    fcdp__lock_acquire(&tiering->lock);
    size_t n_busy = n_in_use > n_kept ? n_in_use - n_kept : 0;
    if (s->n && s->uses[s->n - 1].busy_pages < n_busy) s->uses[s->n - 1].busy_pages = n_busy;
    fcdp__lock_release(&tiering->lock);
}

void fcdp__schedule_note_eviction(fcdp_tiering *tiering, const fcdp_region *region) {
    fcdp_schedule *s = tiering->schedule;
    if (!s) return;
    s->n_margin_pages += fcdp__region_pages(region);
    if (!s->n_period || region->use == FCDP_NO_USE) return;
    fcdp_planned_use *use = &s->uses[region->use];
    if (use->evicted_before) use->n_shunned = N_SHUNNED;
    use->evicted = true;
}

/* ---- planning ---- */

/* Lock held. The period that the last uses repeat; 0: none. */
static size_t period_find(fcdp_schedule *s) {
    size_t n_same;
    size_t n_period = fcdp__policy_period(s->symbols, s->n, s->scratch, &n_same);
    bool is_known = n_same >= N_ALIKE && n_same * ALIKE_SHARE >= n_period && n_period <= N_RECORDED / 2;
    return is_known ? n_period : 0;
}

/* Each period is planned for anew: others' memory may not be what it was. Lock held. */
static bool is_due(const fcdp_schedule *s) {
    return s->n_period ? s->n - s->at >= s->n_period : s->n && !s->n_until_search;
}

/* Uses that have not ended yet are taken to last as long as a period ago. Lock held. */
static void held_guess(fcdp_tiering *tiering, size_t n_period) {
    fcdp_schedule *s = tiering->schedule;
    for (const fcdp_region *r = tiering->regions; r && n_period; r = r->next)
        if (r->in_use && r->use != FCDP_NO_USE && r->use >= n_period)
            s->uses[r->use].n_held = s->uses[r->use - n_period].n_held;
}

/* The period was as the one before, and others' memory is what the plan was made for, or a little less. Lock
 * held. */
static bool is_still_right(const fcdp_schedule *s, size_t n_budget) {
    if (!s->n_period || n_budget != s->n_budget) return false;
    const fcdp_planned_use *was = s->uses + s->at - s->n_period, *is = s->uses + s->at;
    for (size_t k = 0; k < s->n_period; k++)
        if (is[k].load_bytes != was[k].load_bytes || is[k].store_bytes != was[k].store_bytes ||
            is[k].n_held != was[k].n_held || !is[k].n_shunned != !was[k].n_shunned ||
            is[k].busy_pages > was[k].busy_pages ||
            was[k].busy_pages - is[k].busy_pages > n_budget / SLACK_SHARE)
            return false;
    return true;
}

/* All recorded uses have begun, so what each filled is known. (With several threads one may not have told it
 * yet. Then it counts as one that fills nothing.) */
void fcdp__schedule_prepare(fcdp_tiering *tiering) {
    fcdp_schedule *s = tiering->schedule;
    if (!s) return;
    fcdp__lock_acquire(&tiering->lock);
    bool due = is_due(s);
    fcdp__lock_release(&tiering->lock);
    if (!due) return;
    size_t page_bytes = fcdp__driver_page_bytes(tiering->drv);
    size_t n_room = fcdp__pool_room_bytes(tiering->pool) / page_bytes;
    fcdp__lock_acquire(&tiering->lock);
    s->n_margin_pages -= (s->n_margin_pages + MARGIN_DECAY - 1) / MARGIN_DECAY;
    size_t n_budget = n_room > s->n_margin_pages ? n_room - s->n_margin_pages : 0;
    held_guess(tiering, s->n_period);
    if (is_still_right(s, n_budget)) {
        for (size_t k = 0; k < s->n_period; k++) /* so that little by little is not too much */
            s->uses[s->at + k].busy_pages = s->uses[s->at + k - s->n_period].busy_pages;
        s->at += s->n_period;
        fcdp__lock_release(&tiering->lock);
        return;
    }
    size_t n_period = period_find(s);
    held_guess(tiering, n_period);
    s->n_budget = n_budget;
    s->n_until_search = s->n_regions / ALIKE_SHARE + N_ALIKE;
    s->n_period = 0;
    if (n_period && !fcdp__policy_plan(s->uses + s->n - n_period, n_period, (uint32_t)s->n_regions, n_budget,
                                       page_bytes, s->keep)) {
        s->at = s->n;
        s->n_period = n_period;
        fcdp__count(&tiering->counts, FCDP_COUNT_PLANS, 1);
    }
    fcdp__lock_release(&tiering->lock);
}

uint64_t fcdp__schedule_distance(const fcdp_region *region) {
    const fcdp_schedule *s = region->tiering->schedule;
    if (!s || !s->n_period) return region->tiering->clock - region->last_use;
    for (size_t k = 0; k < s->n_period; k++) {
        const fcdp_planned_use *use = &s->uses[s->n + k - s->n_period];
        if (use->region == region->number) return use->load_bytes ? k : UINT64_MAX;
    }
    return UINT64_MAX;
}

size_t fcdp__schedule_period(fcdp_tiering *tiering) {
    fcdp__lock_acquire(&tiering->lock);
    size_t n = tiering->schedule ? tiering->schedule->n_period : 0;
    fcdp__lock_release(&tiering->lock);
    return n;
}
