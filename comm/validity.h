/* validity.h - is a gathered copy of a parameter still what its shard says? Pure: signals in, an answer out.
 * Not thread-safe.
 *
 * A version counter alone trains wrongly, silently (foreach and fused optimizers over DTensors move none), so
 * every signal that a parameter gives is compared with what it was when the copy was gathered, and any change
 * makes it stale. A fingerprint of the shard's bytes is the one signal that nothing escapes; where there is
 * none, a change of grad mode and gradients that were reduced without any optimizer hook ever firing count as
 * changes.
 *
 * Equal fingerprints make a copy fresh whatever signals moved, if the copy is known to be of the bytes that
 * were fingerprinted. It need not be: a shard may be written between the observation and its gather, and be
 * as it was at the next observation. So where the gather reads it, its fingerprint is taken anew, or, where
 * that would wait for a device, its signals are compared once more (fcdp__validity_confirm). Where they have
 * moved, or were not compared, a signal that moves later counts as ever.
 *
 * observed: the signals of now, taken by fcdp__validity_observe. accepted: those of the copy, set by
 * fcdp__validity_accept when its gather is done, to what was observed when the gather was submitted
 * (fcdp__validity_observed; shards may be observed again meanwhile).
 *
 *     fresh <=> accepted exists and equals observed under the rules
 */
#ifndef FCDP_VALIDITY_H
#define FCDP_VALIDITY_H

#include "base/base.h"

typedef struct fcdp_signals { /* of one parameter */
    /* of the sharded parameter: load_state_dict(assign=True) changes it */
    uint64_t object_id;
    uint64_t storage;         /* address of the shard's storage */
    uint64_t version_outer;   /* DTensor's counter: p.mul_, p.copy_, load_state_dict */
    uint64_t version_local;   /* its local tensor's: to_local().mul_ */
    uint64_t version_data;    /* the padded flat shard's */
    uint64_t optimizer_steps; /* steps of optimizers that may have written it */
    uint64_t dtypes;          /* stored and gathered dtype, any encoding */
    uint64_t requires_grad;
} fcdp_signals;

typedef struct fcdp_process_signals { /* of the whole process, at the moment of the observation */
    bool grad_mode;
    bool optimizer_seen; /* a step hook has ever fired for this model */
    uint64_t reductions; /* backward passes that reduced gradients of this group */
} fcdp_process_signals;

typedef struct fcdp_observation { /* of one parameter; only fcdp__validity_* looks inside */
    fcdp_signals signals;
    uint64_t fingerprint;
    uint64_t reductions;
    /* between observations of this parameter, so far: a change there and back counts twice */
    uint64_t grad_mode_changes;
    bool exists, has_fingerprint, grad_mode;
    uint64_t read;   /* number of the gather's read, which is fingerprinted on the device; 0: by none */
    bool confirmed;  /* the gather read what was fingerprinted, as far as could be told */
    uint64_t missed; /* times that the shard's bytes were not there, so far */
} fcdp_observation;

/* Why a copy is stale, a mask; 0 is fresh. Of a copy that is known to be of what was fingerprinted, only its
 * dtype and the fingerprint count. */
typedef enum fcdp_stale {
    FCDP_STALE_NEW = 1,      /* never gathered, or invalidated */
    FCDP_STALE_IDENTITY = 2, /* object, storage, dtype or requires_grad */
    FCDP_STALE_VERSION = 4,  /* one of the three counters */
    FCDP_STALE_OPTIMIZER = 8,
    FCDP_STALE_FINGERPRINT = 16,
    FCDP_STALE_GRAD_MODE = 32, /* only without a fingerprint */
    FCDP_STALE_REDUCED = 64,   /* only without a fingerprint and without any optimizer hook */
    FCDP_STALE_MISSING = 128,  /* the shard's bytes are not there: its storage was freed */
} fcdp_stale;

/* Of a parameter that changed at the optimizer's last step, as far as fingerprints told, one more step says
 * that it has changed again: its bytes need not be read. That may be wrong, and then costs a gather; the
 * fingerprint of what that gather read says so. */
typedef struct fcdp_validity fcdp_validity; /* of one group: n parameters */

fcdp_status fcdp__validity_create(uint32_t n, fcdp_validity **validity_out) FCDP_MUST_CHECK;
void fcdp__validity_destroy(fcdp_validity *validity);
/* `fingerprint`: of the shard's bytes, by one function for all observations; NULL where they
 * were not read. The mask of reasons. */
uint32_t fcdp__validity_observe(fcdp_validity *validity, uint32_t i, const fcdp_signals *signals,
                                const fcdp_process_signals *process, const uint64_t *fingerprint);
/* Would an observation with these steps, and no fingerprint, say what one with a fingerprint is expected
 * to? */
bool fcdp__validity_is_foretold(const fcdp_validity *validity, uint32_t i, uint64_t optimizer_steps);
/* In place of an observation, where the shard's bytes are not there. Nothing is known of what comes in their
 * place, maybe at the same address with the same counters: only an equal fingerprint makes a copy fresh that
 * was gathered before. FCDP_STALE_MISSING. */
uint32_t fcdp__validity_miss(fcdp_validity *validity, uint32_t i);
/* A gather reads the shard now, whose bytes have `fingerprint`: this is the observation, of what the copy
 * will be. NULL: they were not read again; then the one before stands where no signal has moved since. */
void fcdp__validity_confirm(fcdp_validity *validity, uint32_t i, const fcdp_signals *signals,
                            const uint64_t *fingerprint);
/* A gather reads the shard now, and a device fingerprints what it reads: `read` numbers that, not 0. This is
 * the observation, of which the fingerprint is still to come. Until then the copy is like no other bytes. */
void fcdp__validity_await(fcdp_validity *validity, uint32_t i, const fcdp_signals *signals, uint64_t read);
/* The fingerprint of that read: the copy is of it, where it is still the copy that was gathered then. */
void fcdp__validity_amend(fcdp_validity *validity, uint32_t i, uint64_t read, uint64_t fingerprint);
/* The last observation: what a gather submitted now will bring. */
fcdp_observation fcdp__validity_observed(const fcdp_validity *validity, uint32_t i);
/* The copy is now what `gathered` saw. One that saw nothing (never observed) leaves the copy stale. */
void fcdp__validity_accept(fcdp_validity *validity, uint32_t i, const fcdp_observation *gathered);
/* The copy of every parameter is stale (it was written into). */
void fcdp__validity_invalidate(fcdp_validity *validity);
/* Is the copy of what the shard is now, by its bytes? A copy without a fingerprint is not. Nothing is
 * remembered: what the ranks agreed on stays what they agreed on. */
bool fcdp__validity_is_fresh(const fcdp_validity *validity, uint32_t i, const fcdp_signals *signals,
                             uint64_t fingerprint);
/* Signals, and the fingerprint where it is not NULL, against the last observation: has
 * something changed since the ranks agreed? */
bool fcdp__validity_moved(const fcdp_validity *validity, uint32_t i, const fcdp_signals *signals,
                          const uint64_t *fingerprint);

#endif
