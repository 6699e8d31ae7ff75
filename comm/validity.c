/* validity.c - signals and fingerprints, compared with those of the copy.
 *
 * A copy that is wrongly taken for fresh trains on old weights without any error; one that is wrongly taken
 * for stale costs a gather. So each doubt here ends in "stale". The one shortcut, a parameter that changed at
 * the optimizer's last step and is expected to change again, errs on that side too.
 *
 * It reads no bytes and knows no ranks: vote.c brings the signals and carries the answer.
 */
#include "comm/validity.h"

#include <stdlib.h>
#include <string.h>

typedef struct parameter {
    fcdp_observation observed, accepted;
    /* the copy before the accepted one, where an optimizer has stepped in between; its fingerprint */
    bool has_stepped;
    uint64_t before;
    bool moves_with_steps; /* the last step of an optimizer changed the bytes */
} parameter;

struct fcdp_validity {
    uint32_t n;
    parameter parameters[];
};

fcdp_status fcdp__validity_create(uint32_t n, fcdp_validity **validity_out) {
    fcdp_validity *validity = calloc(1, sizeof *validity + n * sizeof validity->parameters[0]);
    if (!validity) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for the validity of %u parameters", n);
    validity->n = n;
    *validity_out = validity;
    return FCDP_OK;
}

void fcdp__validity_destroy(fcdp_validity *validity) {
    free(validity);
}

/* The signals that hold with or without a fingerprint. */
static uint32_t signals_differ(const fcdp_signals *a, const fcdp_signals *b) {
    uint32_t mask = 0;
    if (a->object_id != b->object_id || a->storage != b->storage || a->dtypes != b->dtypes ||
        a->requires_grad != b->requires_grad)
        mask |= FCDP_STALE_IDENTITY;
    if (a->version_outer != b->version_outer || a->version_local != b->version_local ||
        a->version_data != b->version_data)
        mask |= FCDP_STALE_VERSION;
    if (a->optimizer_steps != b->optimizer_steps) mask |= FCDP_STALE_OPTIMIZER;
    return mask;
}

static uint32_t observations_differ(const fcdp_observation *a, const fcdp_observation *b) {
    return signals_differ(&a->signals, &b->signals) | (a->missed != b->missed ? FCDP_STALE_IDENTITY : 0);
}

/* With two fingerprints the signals decide only where the copy is not known to be of what was
 * fingerprinted. */
uint32_t fcdp__validity_observe(fcdp_validity *validity, uint32_t i, const fcdp_signals *signals,
                                const fcdp_process_signals *process, const uint64_t *fingerprint) {
    FCDP_CHECK(1, i < validity->n);
    fcdp_observation *now = &validity->parameters[i].observed;
    const fcdp_observation *copy = &validity->parameters[i].accepted;
    bool grad_mode_changed = now->exists && now->grad_mode != process->grad_mode;
    *now = (fcdp_observation){
        .signals = *signals,
        .fingerprint = fingerprint ? *fingerprint : 0,
        .reductions = process->reductions,
        .grad_mode_changes = now->grad_mode_changes + grad_mode_changed,
        .exists = true,
        .has_fingerprint = fingerprint != NULL,
        .grad_mode = process->grad_mode,
        .missed = now->missed,
    };
    if (!copy->exists) return FCDP_STALE_NEW;
    uint32_t mask = observations_differ(now, copy);
    if (now->has_fingerprint && copy->has_fingerprint) {
        if (mask & FCDP_STALE_OPTIMIZER)
            validity->parameters[i].moves_with_steps = now->fingerprint != copy->fingerprint;
        if (now->fingerprint != copy->fingerprint) return mask | FCDP_STALE_FINGERPRINT;
        if (!copy->confirmed) return mask;
        /* the same shard, gathered as something else */
        return now->signals.dtypes == copy->signals.dtypes ? 0 : FCDP_STALE_IDENTITY;
    }
    if (now->grad_mode_changes != copy->grad_mode_changes) mask |= FCDP_STALE_GRAD_MODE;
    if (!process->optimizer_seen && now->reductions != copy->reductions) mask |= FCDP_STALE_REDUCED;
    return mask;
}

bool fcdp__validity_is_foretold(const fcdp_validity *validity, uint32_t i, uint64_t optimizer_steps) {
    FCDP_CHECK(1, i < validity->n);
    const parameter *p = &validity->parameters[i];
    return p->accepted.exists && p->moves_with_steps &&
           p->accepted.signals.optimizer_steps != optimizer_steps;
}

uint32_t fcdp__validity_miss(fcdp_validity *validity, uint32_t i) {
    FCDP_CHECK(1, i < validity->n);
    validity->parameters[i].observed.exists = false;
    validity->parameters[i].observed.missed++;
    return FCDP_STALE_MISSING;
}

/* A write that moves no signal, between the observation and the gather, is known by the bytes alone. */
void fcdp__validity_confirm(fcdp_validity *validity, uint32_t i, const fcdp_signals *signals,
                            const uint64_t *fingerprint) {
    FCDP_CHECK(1, i < validity->n);
    fcdp_observation *observed = &validity->parameters[i].observed;
    bool unmoved = !signals_differ(signals, &observed->signals);
    observed->read = 0;
    if (observed->has_fingerprint && fingerprint) {
        observed->fingerprint = *fingerprint;
        observed->signals = *signals;
    }
    observed->confirmed = observed->has_fingerprint && (fingerprint || unmoved);
}

void fcdp__validity_await(fcdp_validity *validity, uint32_t i, const fcdp_signals *signals, uint64_t read) {
    FCDP_CHECK(1, i < validity->n);
    fcdp_observation *observed = &validity->parameters[i].observed;
    if (!observed->has_fingerprint) observed->fingerprint = 0;
    observed->signals = *signals;
    observed->read = read;
    observed->has_fingerprint = true;
    observed->confirmed = false;
}

void fcdp__validity_amend(fcdp_validity *validity, uint32_t i, uint64_t read, uint64_t fingerprint) {
    FCDP_CHECK(1, i < validity->n);
    parameter *p = &validity->parameters[i];
    fcdp_observation *copy = &p->accepted;
    if (!copy->exists || copy->read != read || !copy->has_fingerprint) return;
    copy->fingerprint = fingerprint;
    copy->confirmed = true;
    if (p->has_stepped) p->moves_with_steps = fingerprint != p->before;
    p->has_stepped = false;
}

fcdp_observation fcdp__validity_observed(const fcdp_validity *validity, uint32_t i) {
    FCDP_CHECK(1, i < validity->n);
    return validity->parameters[i].observed;
}

void fcdp__validity_accept(fcdp_validity *validity, uint32_t i, const fcdp_observation *gathered) {
    FCDP_CHECK(1, i < validity->n);
    parameter *p = &validity->parameters[i];
    p->has_stepped = p->accepted.exists && p->accepted.has_fingerprint &&
                     p->accepted.signals.optimizer_steps != gathered->signals.optimizer_steps;
    p->before = p->accepted.fingerprint;
    p->accepted = *gathered;
}

void fcdp__validity_invalidate(fcdp_validity *validity) {
    for (uint32_t i = 0; i < validity->n; i++) validity->parameters[i].accepted.exists = false;
}

bool fcdp__validity_is_fresh(const fcdp_validity *validity, uint32_t i, const fcdp_signals *signals,
                             uint64_t fingerprint) {
    FCDP_CHECK(1, i < validity->n);
    const fcdp_observation *copy = &validity->parameters[i].accepted;
    if (!copy->exists || !copy->has_fingerprint || copy->fingerprint != fingerprint) return false;
    if (copy->confirmed) return signals->dtypes == copy->signals.dtypes;
    return !signals_differ(signals, &copy->signals) &&
           validity->parameters[i].observed.missed == copy->missed;
}

bool fcdp__validity_moved(const fcdp_validity *validity, uint32_t i, const fcdp_signals *signals,
                          const uint64_t *fingerprint) {
    FCDP_CHECK(1, i < validity->n);
    const fcdp_observation *observed = &validity->parameters[i].observed;
    if (!observed->exists || signals_differ(signals, &observed->signals)) return true;
    return fingerprint && observed->has_fingerprint && *fingerprint != observed->fingerprint;
}
