/* policy.c - decides what moves where. It touches nothing: the caller takes the snapshot and carries out the
 * decision.
 *
 * A plan for next-use chooses intervals of equal worth as Belady's rule does: in the order of uses, and where
 * too many are open, the one that ends last goes. For intervals of one size and one worth that is the best
 * choice there is (Faigle and Nawijn 1995). Worth is what an interval spares per page: twice its bytes where
 * the store is spared too, nothing where the next use fills the region anew. Intervals of more worth choose
 * first, in classes; what fits into the gaps at the end is added. Three periods are gone through, and the
 * middle one counts: it is neither cold nor cut off. Another plan keeps contents that fit from their fill to
 * the next one, which spares their stores. A third one keeps all but a few regions, where little room is
 * lacking. The best of them stands; and then what is not kept takes the room of others, if that moves fewer
 * bytes. At last, which ones of intervals that are alike are kept is chosen so that the moves of the others
 * do not come all at once.
 */
#include "tiering/policy.h"

#include <stdlib.h>
#include <string.h>

#include "tiering/layout.h"

bool fcdp__policy_keeps(double tau, size_t used_bytes, size_t budget_bytes) {
    return (double)used_bytes < tau * (double)budget_bytes;
}

static bool goes_before(const fcdp_candidate *one, const fcdp_candidate *other) {
    if (one->planned != other->planned) return other->planned;
    return one->clean != other->clean ? one->clean : one->distance > other->distance;
}

size_t fcdp__policy_victim(const fcdp_candidate *candidates, size_t n) {
    size_t best = n;
    for (size_t i = 0; i < n; i++) {
        const fcdp_candidate *it = &candidates[i];
        if (it->busy || !it->bytes) continue;
        if (best == n || goes_before(it, &candidates[best])) best = i;
    }
    return best;
}

/* In units of an extent's alignment, so that the product of two sizes fits: regions have less than 1 TiB. */
static uint64_t claim_spares(const fcdp_host_claim *claim) {
    uint64_t all = claim->bytes / FCDP_EXTENT_ALIGN, frozen = claim->frozen_bytes / FCDP_EXTENT_ALIGN;
    return claim->stays ? frozen : all + frozen;
}

static int claim_place(const fcdp_host_claim *claim) {
    return claim->tier == FCDP_TIER_GATHER ? 2 : claim->tier == FCDP_TIER_FILE;
}

static int claims_compare(const void *one, const void *other) {
    const fcdp_host_claim *a = one, *b = other;
    if (claim_place(a) != claim_place(b)) return claim_place(a) - claim_place(b);
    if (claim_place(a) > 0) return a->index < b->index ? -1 : a->index > b->index;
    uint64_t a_worth = claim_spares(a) * (b->bytes / FCDP_EXTENT_ALIGN);
    uint64_t b_worth = claim_spares(b) * (a->bytes / FCDP_EXTENT_ALIGN);
    if (a_worth != b_worth) return a_worth > b_worth ? -1 : 1;
    if (a->frozen_bytes != b->frozen_bytes) return a->frozen_bytes > b->frozen_bytes ? -1 : 1;
    if (a->bytes != b->bytes) return a->bytes > b->bytes ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

void fcdp__policy_host_order(fcdp_host_claim *claims, size_t n) {
    if (n) qsort(claims, n, sizeof *claims, claims_compare);
}

/* ---- the period ---- */

/* z[i]: how many symbols that end at n - 1 - i agree with those that end at n - 1, by the Z algorithm
 * (Gusfield 1997, 1.3) over the reversed symbols: [left, right) is the match that reaches furthest. */
size_t fcdp__policy_period(const uint32_t *symbols, size_t n, uint32_t *scratch, size_t *n_same_out) {
    uint32_t *z = scratch;
    size_t best = 0, left = 0, right = 0;
    *n_same_out = 0;
    for (size_t i = 1; i < n; i++) {
        size_t same = i < right ? z[i - left] : 0;
        if (same > right - i && i < right) same = right - i;
        while (i + same < n && symbols[n - 1 - same] == symbols[n - 1 - i - same]) same++;
        z[i] = (uint32_t)same;
        if (i + same > right) {
            left = i;
            right = i + same;
        }
        if (same > *n_same_out) {
            *n_same_out = same;
            best = i;
        }
    }
    return best;
}

/* ---- a plan ---- */

enum { N_CLASSES = 9, CLASSES_PER_BYTE = 4 }; /* of worth: 0, 1/4, ... 2 and above bytes per byte of pages */
enum { N_SHORT = 1024 };                      /* up to so many uses, gaps are filled */
enum { MAX_INNER = 10 };                      /* as FCDP_PREFETCH may be, and the turn's two */
enum { MAX_REFINED = 1 << 13, MAX_ROUNDS = 4 }; /* up to so many uses x regions, others are replaced */
enum { MAX_LEFT_OUT = 6, MAX_TRIED = 512 };     /* sets of so many regions are left out */

typedef struct region {
    size_t n_pages;
    size_t bytes;    /* that it would spare if it were always kept */
    size_t n_busy;   /* pages of others at its uses, in sum */
    uint32_t before; /* the last region before this one that is alike in all of that; itself: there is none */
} region;

typedef struct plan {
    const fcdp_planned_use *uses;
    size_t n, n_budget;
    size_t *ends;      /* of the interval that begins at use i: i < ends[i] <= i + n */
    unsigned *classes; /* of its worth */
    size_t *kept;      /* pages of the intervals chosen so far that are open at use i */
    size_t *open;      /* of each region: the use at which its open interval begins, or NONE */
    size_t *spare;     /* for a copy of kept */
    size_t *members;   /* n of intervals that are alike */
    region *regions;   /* n_regions */
    bool *keep;
} plan;

static const size_t NONE = (size_t)-1;

/* The first use at which interval `i` takes pages that are not the use's own. */
static size_t begin_of(const plan *p, size_t i) {
    return i + p->uses[i].n_held + 1;
}

static size_t room_at(const plan *p, size_t at) {
    size_t used = p->uses[at % p->n].busy_pages + p->kept[at % p->n];
    return used < p->n_budget ? p->n_budget - used : 0;
}

/* Where the region's next use comes, and from there the next one. */
static void ends_find(plan *p, size_t *next, uint32_t n_regions) {
    for (uint32_t r = 0; r < n_regions; r++) next[r] = NONE;
    for (size_t i = 2 * p->n; i-- > 0;) {
        uint32_t region = p->uses[i % p->n].region;
        if (i < p->n) p->ends[i] = next[region];
        next[region] = i;
    }
}

/* The content that use `first` fills lives until the next fill of its region, and the last of its intervals
 * may load nothing. Its store is spared if it is kept in all of them. The interval behind interval `i`; n:
 * the content ends, or `first` fills nothing and its interval stands alone. */
static size_t content_next(const plan *p, size_t first, size_t i) {
    size_t next = p->ends[i] % p->n;
    return !p->uses[first].store_bytes || p->uses[next].store_bytes || next == first ? p->n : next;
}

/* Bytes of the store for each interval that loads something. */
static size_t store_share(const plan *p, size_t first) {
    size_t n_intervals = 0;
    for (size_t i = first; i < p->n; i = content_next(p, first, i))
        n_intervals += p->uses[p->ends[i] % p->n].load_bytes > 0;
    return n_intervals ? p->uses[first].store_bytes / n_intervals : 0;
}

static void classes_find(plan *p, size_t page_bytes) {
    for (size_t first = 0; first < p->n; first++) { /* by load alone, and then what the fills add */
        const fcdp_planned_use *later = &p->uses[p->ends[first] % p->n];
        size_t worth = later->load_bytes * CLASSES_PER_BYTE;
        p->classes[first] = (unsigned)(worth / (p->uses[first].n_pages * page_bytes));
        if (later->load_bytes && !p->classes[first]) p->classes[first] = 1;
    }
    for (size_t first = 0; first < p->n; first++) {
        size_t share = p->uses[first].store_bytes ? store_share(p, first) : 0;
        unsigned more = (unsigned)(share * CLASSES_PER_BYTE / (p->uses[first].n_pages * page_bytes));
        for (size_t i = first; share && i < p->n; i = content_next(p, first, i))
            if (p->classes[i]) p->classes[i] += more;
    }
    for (size_t i = 0; i < p->n; i++) {
        if (p->classes[i] >= N_CLASSES) p->classes[i] = N_CLASSES - 1;
        if (p->uses[i].n_shunned) p->classes[i] = 0;
    }
}

static bool takes_room(const plan *p, uint32_t region, size_t at) {
    size_t begin = p->open[region];
    return begin != NONE && at > begin + p->uses[begin % p->n].n_held;
}

/* At use `at`, drop open intervals until the rest has room. */
static void open_fit(plan *p, size_t at, uint32_t n_regions, bool *dropped) {
    size_t n_pages = 0, room = room_at(p, at);
    for (uint32_t r = 0; r < n_regions; r++)
        if (takes_room(p, r, at)) n_pages += p->uses[p->open[r] % p->n].n_pages;
    while (n_pages > room) {
        uint32_t last = n_regions;
        size_t last_end = 0;
        for (uint32_t r = 0; r < n_regions; r++) {
            if (!takes_room(p, r, at)) continue;
            size_t begin = p->open[r], end = begin - begin % p->n + p->ends[begin % p->n];
            if (last == n_regions || end > last_end) {
                last = r;
                last_end = end;
            }
        }
        dropped[p->open[last]] = true;
        n_pages -= p->uses[p->open[last] % p->n].n_pages;
        p->open[last] = NONE;
    }
}

/* Add or take away an interval's pages, at the uses at which it is open. */
static void interval_set(plan *p, size_t i, bool keep) {
    p->keep[i] = keep;
    for (size_t at = begin_of(p, i); at < p->ends[i]; at++)
        p->kept[at % p->n] += keep ? p->uses[i].n_pages : -(size_t)p->uses[i].n_pages;
}

static bool interval_fits(const plan *p, size_t i) {
    if (p->uses[i].n_shunned) return false;
    for (size_t at = begin_of(p, i); at < p->ends[i]; at++)
        if (room_at(p, at) < p->uses[i].n_pages) return false;
    return true;
}

/* `dropped` has an element for each use of three periods. */
static void class_choose(plan *p, unsigned class, uint32_t n_regions, bool *dropped) {
    memset(dropped, 0, 3 * p->n * sizeof *dropped);
    for (uint32_t r = 0; r < n_regions; r++) p->open[r] = NONE;
    for (size_t at = 0; at < 3 * p->n; at++) {
        uint32_t region = p->uses[at % p->n].region;
        p->open[region] = NONE;
        open_fit(p, at, n_regions, dropped);
        if (p->classes[at % p->n] == class) p->open[region] = at;
    }
    for (size_t i = 0; i < p->n; i++) /* what the middle period holds may not close to a circle: checked */
        if (p->classes[i] == class && !dropped[p->n + i] && interval_fits(p, i)) interval_set(p, i, true);
}

/* Keep or drop all intervals of what use `first` fills; the one that begins there if it fills nothing. */
static void content_set(plan *p, size_t first, bool keep) {
    for (size_t i = first; i < p->n; i = content_next(p, first, i))
        if (p->keep[i] != keep) interval_set(p, i, keep);
}

/* Complete contents first, and then intervals. */
static void gaps_fill(plan *p) {
    for (size_t first = p->n; first-- > 0;) {
        bool fits = p->uses[first].store_bytes > 0;
        for (size_t i = first; fits && i < p->n; i = content_next(p, first, i))
            fits = p->keep[i] || interval_fits(p, i);
        if (fits) content_set(p, first, true);
    }
    for (unsigned class = N_CLASSES - 1; class > 0; class--)
        for (size_t i = 0; i < p->n; i++)
            if (!p->keep[i] && p->classes[i] == class && interval_fits(p, i)) interval_set(p, i, true);
}

/* Drop kept intervals that are open at `at`, but for `region`'s, until there is room. */
static void others_drop(plan *p, size_t at, uint32_t region) {
    while (p->uses[at].busy_pages + p->kept[at] > p->n_budget) {
        size_t least = p->n;
        for (size_t i = 0; i < p->n; i++) {
            size_t begin = begin_of(p, i);
            bool is_open = (at >= begin && at < p->ends[i]) || (at + p->n >= begin && at + p->n < p->ends[i]);
            if (!p->keep[i] || !is_open || p->uses[i].region == region) continue;
            if (least == p->n || p->classes[i] < p->classes[least] ||
                (p->classes[i] == p->classes[least] && p->ends[i] - i > p->ends[least] - least))
                least = i;
        }
        if (least == p->n) return; /* not even alone */
        interval_set(p, least, false);
    }
}

static bool content_is_kept(const plan *p, size_t first) {
    bool kept = true;
    for (size_t i = first; kept && i < p->n; i = content_next(p, first, i)) kept = p->keep[i];
    return kept;
}

/* Bytes that the plan spares. */
static size_t spared(const plan *p) {
    size_t bytes = 0;
    for (size_t i = 0; i < p->n; i++) {
        if (p->keep[i]) bytes += p->uses[p->ends[i] % p->n].load_bytes;
        if (content_is_kept(p, i)) bytes += p->uses[i].store_bytes;
    }
    return bytes;
}

static void region_drop(plan *p, uint32_t region) {
    for (size_t i = 0; i < p->n; i++)
        if (p->uses[i].region == region && p->keep[i]) interval_set(p, i, false);
}

static bool is_over(const plan *p) {
    for (size_t at = 0; at < p->n; at++)
        if ((p->kept[at] && p->uses[at].busy_pages + p->kept[at] > p->n_budget) ||
            (p->keep[at] && p->uses[at].n_shunned))
            return true;
    return false;
}

typedef struct choice { /* a copy of a plan's, and what it spares */
    bool *keep;
    size_t *kept;
    size_t bytes;
} choice;

static void choice_take(const plan *p, choice *c) {
    memcpy(c->keep, p->keep, p->n * sizeof *c->keep);
    memcpy(c->kept, p->kept, p->n * sizeof *c->kept);
    c->bytes = spared(p);
}

static void choice_put_back(plan *p, const choice *c) {
    memcpy(p->keep, c->keep, p->n * sizeof *c->keep);
    memcpy(p->kept, c->kept, p->n * sizeof *c->kept);
}

/* Is what `p` has become better than `best`, which is the plan as it was? It is `best` then, and otherwise as
 * it was. */
static bool choice_improve(plan *p, choice *best) {
    bool fits = !is_over(p), improves = false;
    if (fits) {
        gaps_fill(p);
        improves = spared(p) > best->bytes;
    }
    if (improves)
        choice_take(p, best);
    else
        choice_put_back(p, best);
    return improves;
}

/* Make room for what use `first` fills, or for the interval that begins there: of what spares least, or of
 * one whole region. */
static bool others_replace(plan *p, size_t first, uint32_t n_regions, choice *best) {
    uint32_t region = p->uses[first].region;
    content_set(p, first, true);
    for (size_t at = 0; at < p->n; at++) others_drop(p, at, region);
    if (choice_improve(p, best)) return true;
    for (uint32_t other = 0; other < n_regions; other++) {
        if (other == region) continue;
        region_drop(p, other);
        content_set(p, first, true);
        if (choice_improve(p, best)) return true;
    }
    return false;
}

static void choice_refine(plan *p, uint32_t n_regions, choice *best) {
    bool improves = true;
    for (int round = 0; round < MAX_ROUNDS && improves; round++) {
        improves = false;
        for (size_t first = 0; first < p->n; first++)
            if ((p->uses[first].store_bytes || p->classes[first]) && !content_is_kept(p, first))
                improves |= others_replace(p, first, n_regions, best);
    }
}

/* ---- what to leave out ---- */

static void all_keep(plan *p) {
    memset(p->keep, 0, p->n * sizeof *p->keep);
    memset(p->kept, 0, p->n * sizeof *p->kept);
    for (size_t i = 0; i < p->n; i++)
        if (p->classes[i]) interval_set(p, i, true);
}

/* Keep all but `n` regions, and of these what then fits. False: the others do not fit. */
static bool regions_leave(plan *p, const uint32_t *regions, size_t n, choice *best) {
    all_keep(p);
    for (size_t k = 0; k < n; k++) region_drop(p, regions[k]);
    bool fits = !is_over(p);
    choice_improve(p, best);
    return fits;
}

static bool are_alike(const region *a, const region *b) {
    return a->n_pages == b->n_pages && a->bytes == b->bytes && a->n_busy == b->n_busy;
}

static void regions_find(plan *p, uint32_t n_regions) {
    memset(p->regions, 0, n_regions * sizeof *p->regions);
    for (size_t i = 0; i < p->n; i++) {
        const fcdp_planned_use *use = &p->uses[i];
        region *r = &p->regions[use->region];
        r->n_pages = use->n_pages;
        r->bytes += use->load_bytes + use->store_bytes;
        r->n_busy += use->busy_pages;
    }
    for (uint32_t r = 0; r < n_regions; r++) {
        p->regions[r].before = r;
        for (uint32_t other = 0; other < r; other++)
            if (are_alike(&p->regions[other], &p->regions[r])) p->regions[r].before = other;
    }
}

static size_t lacking_pages(const plan *p) {
    size_t lacking = 0;
    for (size_t at = 0; at < p->n; at++) {
        size_t used = p->uses[at].busy_pages + p->kept[at];
        if (p->kept[at] && used > p->n_budget && used - p->n_budget > lacking) lacking = used - p->n_budget;
    }
    return lacking;
}

/* Can region `next` be left out beside `left`? Of those that are alike, the first ones are. */
static bool may_leave(const plan *p, const uint32_t *left, size_t n, uint32_t next) {
    uint32_t before = p->regions[next].before;
    bool is_next = before == next;
    for (size_t k = 0; k < n && !is_next; k++) is_next = left[k] == before;
    return is_next && p->regions[next].n_pages;
}

/* Where little room is lacking, which regions to leave out is a knapsack: sets of up to MAX_LEFT_OUT are
 * tried in turn, as long as others do not fit without their last one. A region that is left out still takes
 * its pages while it is used, so a set may need more than what is lacking. */
static void few_leave(plan *p, uint32_t n_regions, choice *best) {
    uint32_t left[MAX_LEFT_OUT];
    size_t n = 0, sum = 0, n_tried = 0;
    regions_find(p, n_regions);
    all_keep(p);
    size_t lacking = lacking_pages(p);
    choice_put_back(p, best);
    for (uint32_t next = 0; lacking && n_tried < MAX_TRIED;) { /* depth first: `left` ascends */
        bool fits = false, goes_down = next < n_regions && n < MAX_LEFT_OUT;
        if (goes_down && may_leave(p, left, n, next)) {
            left[n++] = next;
            sum += p->regions[next].n_pages;
            n_tried++;
            fits = sum >= lacking && regions_leave(p, left, n, best);
        }
        next++;
        if (goes_down && !fits) continue;
        if (!n) return;
        next = left[--n] + 1;
        sum -= p->regions[left[n]].n_pages;
    }
}

/* Keep the last `n_inner` of n members, and evenly spaced ones of those before, n_kept in all. If that fits
 * and spares as much as `best`, it is `best` then. */
static bool members_try(plan *p, const size_t *members, size_t n, size_t n_kept, size_t n_inner,
                        choice *best) {
    size_t n_outer = n - n_inner, n_spread = n_kept - n_inner;
    for (size_t k = 0; k < n; k++) content_set(p, members[k], false);
    for (size_t k = 0; k < n; k++)
        if (k >= n_outer || (k + 1) * n_spread / n_outer > k * n_spread / n_outer)
            interval_set(p, members[k], true);
    bool fits = !is_over(p);
    if (fits) gaps_fill(p); /* the rest of their contents */
    fits = fits && spared(p) >= best->bytes;
    if (fits)
        choice_take(p, best);
    else
        choice_put_back(p, best);
    return fits;
}

/* Of intervals that are alike and lie within each other, as those from forward to backward do, the plan has
 * kept the inner ones. So all others are stored one right after another, and compute waits. Keep as many that
 * are evenly spaced: the copy engine has the time of those between. The innermost stay kept as far as they
 * must: they fit where no other does, into the pages of groups that were in use before the turn. */
static void members_spread(plan *p, const size_t *members, size_t n, choice *best) {
    size_t n_kept = 0;
    for (size_t k = 0; k < n; k++) n_kept += p->keep[members[k]];
    if (n_kept == 0 || n_kept == n) return;
    for (size_t n_inner = 1; n_inner < n_kept && n_inner <= MAX_INNER; n_inner++)
        if (members_try(p, members, n, n_kept, n_inner, best)) return;
}

/* `members` has n elements, and `is_member` as many. */
static void choice_spread(plan *p, size_t *members, bool *is_member, choice *best) {
    memset(is_member, 0, p->n * sizeof *is_member);
    for (size_t first = 0; first < p->n; first++) {
        size_t n = 0, last = first;
        for (size_t i = first; i < p->n && p->classes[first]; i++) {
            bool is_alike = p->classes[i] == p->classes[first] &&
                            p->uses[i].n_pages == p->uses[first].n_pages;
            if (!is_alike || is_member[i]) continue;
            if (n > 0 && (i >= p->ends[last] || p->ends[i] > p->ends[last])) break;
            is_member[i] = true;
            members[n++] = last = i;
        }
        members_spread(p, members, n, best);
    }
}

/* What is filled is kept to its next fill where that fits, and the gaps between are for the rest. */
static void contents_first(plan *p) {
    memset(p->keep, 0, p->n * sizeof *p->keep);
    memset(p->kept, 0, p->n * sizeof *p->kept);
    gaps_fill(p);
}

static fcdp_status plan_alloc(plan *p, uint32_t n_regions, bool **dropped_out) {
    p->ends = calloc(p->n, sizeof *p->ends);
    p->classes = calloc(p->n, sizeof *p->classes);
    p->kept = calloc(p->n, sizeof *p->kept);
    p->open = calloc(n_regions, sizeof *p->open);
    *dropped_out = calloc(3 * p->n, sizeof **dropped_out);
    p->spare = calloc(p->n, sizeof *p->spare);
    p->members = calloc(p->n, sizeof *p->members);
    p->regions = calloc(n_regions, sizeof *p->regions);
    bool has_all = p->regions && p->members && p->ends && p->classes && p->kept && p->open && p->spare &&
                   *dropped_out;
    return has_all ? FCDP_OK : fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a plan of %zu uses", p->n);
}

fcdp_status fcdp__policy_plan(const fcdp_planned_use *uses, size_t n, uint32_t n_regions,
                              size_t n_budget_pages, size_t page_bytes, bool *keep_out) {
    plan p = {.uses = uses, .n = n, .n_budget = n_budget_pages, .keep = keep_out};
    bool *dropped = NULL;
    if (n == 0) return FCDP_OK;
    fcdp_status status = plan_alloc(&p, n_regions, &dropped);
    if (!status) {
        memset(keep_out, 0, n * sizeof *keep_out);
        ends_find(&p, p.open, n_regions);
        classes_find(&p, page_bytes);
        for (unsigned class = N_CLASSES - 1; class > 0; class--) class_choose(&p, class, n_regions, dropped);
        if (n <= N_SHORT) {
            choice best = {dropped, p.spare, 0}; /* the classes have chosen */
            gaps_fill(&p);
            choice_take(&p, &best);
            contents_first(&p);
            if (spared(&p) > best.bytes) choice_take(&p, &best);
            choice_put_back(&p, &best);
            if (n * n_regions <= MAX_REFINED) {
                few_leave(&p, n_regions, &best);
                choice_refine(&p, n_regions, &best);
            }
            choice_spread(&p, p.members, dropped + n, &best);
        }
    }
    free(p.ends);
    free(p.classes);
    free(p.kept);
    free(p.open);
    free(p.spare);
    free(p.members);
    free(p.regions);
    free(dropped);
    return status;
}
