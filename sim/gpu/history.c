/*
 * The last accesses to a piece of memory, one by one, without gaps being closed.
 *
 * A touch makes an earlier one superfluous that is ordered before it, lies within it, goes through the same
 * address and conflicts with no more than it does: whatever is unordered with the earlier one is unordered
 * with this one too. So a program that does the same in every step keeps a history of constant length. It is
 * cut at MOST_TOUCHES: what is forgotten then can only go unreported.
 */
#include "sim/gpu/history.h"

#include <stdlib.h>
#include <string.h>

#define MOST_TOUCHES 1024

struct sim_history {
    size_t n;
    size_t n_capacity;
    struct sim_touch touches[]; /* oldest first */
};

void simgpu__note_drop(struct sim_note *note) {
    if (note && --note->refs == 0) free(note);
}

static bool is_before(const struct sim_touch *earlier, const struct sim_touch *touch,
                      const struct sim_clock *known) {
    return earlier->slot == touch->slot || simgpu__clock_at(known, earlier->slot) >= earlier->epoch;
}

static bool conflict(const struct sim_touch *a, const struct sim_touch *b) {
    return a->begin < b->end && b->begin < a->end && (a->writes || b->writes) && !(a->atomic && b->atomic);
}

const struct sim_touch *simgpu__history_find(const struct sim_history *history, const struct sim_touch *touch,
                                             const struct sim_clock *known, bool same_address) {
    const struct sim_touch *race = NULL;
    for (size_t i = 0; history && i < history->n; i++) {
        const struct sim_touch *earlier = &history->touches[i];
        if (!conflict(earlier, touch) || is_before(earlier, touch, known)) continue;
        if (earlier->base != touch->base) return earlier;
        race = earlier;
    }
    return same_address ? race : NULL;
}

static bool is_superfluous(const struct sim_touch *earlier, const struct sim_touch *touch,
                           const struct sim_clock *known) {
    return earlier->base == touch->base && touch->begin <= earlier->begin && earlier->end <= touch->end &&
           (touch->writes || !earlier->writes) && (earlier->atomic || !touch->atomic) &&
           is_before(earlier, touch, known);
}

static bool grow(struct sim_history **history) {
    size_t n = *history ? 2 * (*history)->n_capacity : 4;
    struct sim_history *grown = realloc(*history, sizeof *grown + n * sizeof *grown->touches);
    if (!grown) return false;
    if (!*history) grown->n = 0;
    grown->n_capacity = n;
    *history = grown;
    return true;
}

static void forget_oldest(struct sim_history *history) {
    simgpu__note_drop(history->touches[0].note);
    memmove(history->touches, history->touches + 1, --history->n * sizeof *history->touches);
}

/* One pass drops what is superfluous, so that the array grows only with what must be kept. */
void simgpu__history_add(struct sim_history **history, const struct sim_touch *touch,
                         const struct sim_clock *known) {
    struct sim_history *old = *history;
    size_t n_kept = 0;
    for (size_t i = 0; old && i < old->n; i++) {
        if (is_superfluous(&old->touches[i], touch, known))
            simgpu__note_drop(old->touches[i].note);
        else
            old->touches[n_kept++] = old->touches[i];
    }
    if (old) old->n = n_kept;
    bool full = old && old->n == old->n_capacity;
    if ((!old || full) && (n_kept >= MOST_TOUCHES || !grow(history))) {
        if (!old) return;
        forget_oldest(old);
    }
    touch->note->refs++;
    (*history)->touches[(*history)->n++] = *touch;
}

const struct sim_touch *simgpu__history_unknown(const struct sim_history *history, uintptr_t base,
                                                const struct sim_clock *known) {
    for (size_t i = 0; history && i < history->n; i++) {
        const struct sim_touch *touch = &history->touches[i];
        if (touch->base == base && simgpu__clock_at(known, touch->slot) < touch->epoch) return touch;
    }
    return NULL;
}

void simgpu__history_unmap(struct sim_history *history, uintptr_t base) {
    size_t n_kept = 0;
    for (size_t i = 0; history && i < history->n; i++) {
        if (history->touches[i].base == base)
            simgpu__note_drop(history->touches[i].note);
        else
            history->touches[n_kept++] = history->touches[i];
    }
    if (history) history->n = n_kept;
}

void simgpu__history_free(struct sim_history *history) {
    for (size_t i = 0; history && i < history->n; i++) simgpu__note_drop(history->touches[i].note);
    free(history);
}
