/* foresight.c - the last two events say where a step is: in forward groups come in the opposite order than in
 * backward, so one alone would not. A wrong guess costs a read. */
#include "tiering/foresight.h"

void fcdp__foresight_note(fcdp_foresight *of, const void *what, bool stores) {
    size_t at = of->n++ % FCDP_FORESIGHT_EVENTS;
    of->events[at].what = what;
    of->events[at].stores = stores;
}

void fcdp__foresight_forget(fcdp_foresight *of, const void *what) {
    for (size_t i = 0; i < FCDP_FORESIGHT_EVENTS; i++)
        if (of->events[i].what == what) of->events[i].what = NULL;
}

static bool same(const fcdp_foresight *of, size_t a, size_t b) {
    a %= FCDP_FORESIGHT_EVENTS;
    b %= FCDP_FORESIGHT_EVENTS;
    return of->events[a].what == of->events[b].what && of->events[a].stores == of->events[b].stores;
}

static bool is_among(const void *what, const void *const *list, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (list[i] == what) return true;
    return false;
}

/* The list of those stored on the way is bounded, as is the walk; beyond it a store is not known, and its
 * read is a wrong guess. */
static size_t walk(const fcdp_foresight *of, size_t from, const void **what_out, size_t most) {
    enum { MAX_STORED = 64 };
    const void *stored[MAX_STORED];
    size_t n = 0, n_stored = 0;
    for (size_t k = from; k < of->n && n < most && n_stored < MAX_STORED; k++) {
        const void *what = of->events[k % FCDP_FORESIGHT_EVENTS].what;
        if (!what) continue;
        if (of->events[k % FCDP_FORESIGHT_EVENTS].stores)
            stored[n_stored++] = what;
        else if (!is_among(what, stored, n_stored) && !is_among(what, what_out, n))
            what_out[n++] = what;
    }
    return n;
}

size_t fcdp__foresight_reads(const fcdp_foresight *of, const void **what_out, size_t most) {
    size_t oldest = of->n > FCDP_FORESIGHT_EVENTS ? of->n - FCDP_FORESIGHT_EVENTS : 0;
    if (of->n < oldest + 3) return 0;
    size_t last = of->n - 1;
    for (size_t k = last - 1; k > oldest; k--)
        if (same(of, k, last) && same(of, k - 1, last - 1)) return walk(of, k + 1, what_out, most);
    return 0;
}
