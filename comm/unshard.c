/* unshard.c - what the plugin, the tests and the bench have in common when they drive the core.
 *
 * An unshard asks the other ranks or trusts what they have agreed on (tree.c says which), gathers what is
 * stale, and begins the groups that follow. The order of these steps is the same on every rank, since it
 * follows from what all ranks have in common: events of the program, and what was agreed. One rank's own
 * state (device memory is short, a kept copy was evicted) may only delay or add a restore that makes no
 * collective.
 *
 * No byte is moved here: use.c puts a use on the streams. The program's functions are called on the calling
 * thread, with no lock held.
 */
#include "comm/unshard.h"

#include <stdlib.h>
#include <string.h>

#include "base/size.h"
#include "comm/coalesce.h"
#include "comm/frozen.h"
#include "comm/moves.h"
#include "comm/trace.h"

/* ---- agreements ---- */

typedef struct asking { /* of one agreement */
    fcdp_group *const *groups;
    uint32_t n_groups;
    const fcdp_program *program;
    fcdp_stream stream;
    bool *reads;     /* n_groups: the device reads the group's shards for this vote */
    size_t n_pieces; /* of those */
    uint64_t *fingerprints;
    uint8_t *votes; /* of each group, n_extents + FCDP_VOTE_MORE */
    size_t n_votes;
} asking;

static fcdp_status out_of_memory(const asking *a) {
    return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for an agreement on %u groups", a->n_groups);
}

static fcdp_status look(const fcdp_program *program, fcdp_group *group, unsigned what) {
    return program->look(program->ctx, group, what, &group->sight);
}

/* Record where each group's shards lie, and which groups the device must fingerprint (reads[]). */
static fcdp_status places_look(asking *a) {
    fcdp_status status = FCDP_OK;
    a->n_pieces = 0;
    for (uint32_t g = 0; g < a->n_groups && !status; g++) {
        fcdp_group *group = a->groups[g];
        status = look(a->program, group, FCDP_LOOK_PLACES);
        a->reads[g] = !status && group->sight.by_device &&
                      fcdp_group_needs_fingerprints(group, group->sight.signals);
        if (a->reads[g]) a->n_pieces += fcdp__sight_n_pieces(&group->sight);
    }
    return status;
}

/* Start the device's fingerprints of the shards in reads[]. *begun_out: the caller must end them.
 * FCDP_ERR_UNSUPPORTED: the device takes no fingerprints. */
static fcdp_status fingerprints_begin(asking *a, bool *begun_out) {
    uint64_t *shards = malloc((a->n_pieces + 1) * sizeof *shards);
    size_t *bytes = malloc((a->n_pieces + 1) * sizeof *bytes), n = 0;
    uint64_t *fingerprints = realloc(a->fingerprints, (a->n_pieces + 1) * sizeof *fingerprints);
    fcdp_status status = FCDP_OK;
    bool reads = false;
    if (fingerprints) a->fingerprints = fingerprints;
    if (!shards || !bytes || !fingerprints) status = out_of_memory(a);
    for (uint32_t g = 0; g < a->n_groups && !status; g++) {
        const fcdp_sight *sight = &a->groups[g]->sight;
        reads = reads || a->reads[g];
        for (size_t p = 0; a->reads[g] && p < fcdp__sight_n_pieces(sight); p++, n++) {
            shards[n] = (uintptr_t)sight->shards[p];
            bytes[n] = sight->shards[p] ? sight->shard_bytes[p] : 0;
        }
    }
    if (!status && reads)
        status = fcdp_comm_fingerprint_begin(a->groups[0]->comm, shards, bytes, n, a->stream);
    *begun_out = !status && reads;
    free(shards);
    free(bytes);
    return status;
}

/* While the device reads the shards, the host looks at everything else; then it waits, once. What has begun
 * is ended in any case. Where no group's shards must be read, it does not wait. */
static fcdp_status evidence_collect(asking *a) {
    bool begun;
    fcdp_status status = places_look(a);
    if (!status) status = fingerprints_begin(a, &begun);
    if (status) return status;
    for (uint32_t g = 0; g < a->n_groups && !status; g++)
        status = look(a->program, a->groups[g], FCDP_LOOK_SIGNALS | FCDP_LOOK_SCENE);
    if (!begun) return status;
    fcdp_failure failure = fcdp__failure_keep(status);
    status = fcdp_comm_fingerprint_end(a->groups[0]->comm, a->fingerprints);
    return failure.status ? fcdp__failure_restore(&failure) : status;
}

static fcdp_status votes_make(asking *a) {
    fcdp_status status = evidence_collect(a);
    if (status == FCDP_ERR_UNSUPPORTED && a->program->blind) {
        a->program->blind(a->program->ctx, a->groups[0]);
        status = evidence_collect(a);
    }
    const uint64_t *fingerprints = a->fingerprints;
    for (uint32_t g = 0; g < a->n_groups && !status; g++) {
        fcdp_group *group = a->groups[g];
        fcdp_evidence evidence = fcdp__sight_evidence(&group->sight, a->reads[g] ? fingerprints : NULL);
        status = fcdp_group_vote(group, &evidence, &group->sight.process, a->votes + a->n_votes);
        a->n_votes += group->layout->n_extents + FCDP_VOTE_MORE;
        if (a->reads[g]) fingerprints += fcdp__sight_n_pieces(&group->sight);
    }
    return status;
}

/* If an earlier collective has failed, return its error: it names the cause; this one only names the rank
 * that did not come. */
static fcdp_status votes_carry(asking *a) {
    const fcdp_program *program = a->program;
    uint64_t start_ns = fcdp__trace_start();
    fcdp_status status = program->agree(program->ctx, a->groups, a->n_groups, a->votes, a->n_votes);
    if (status) {
        fcdp_failure failure = fcdp__failure_keep(status);
        fcdp_status earlier = fcdp_engine_check(a->groups[0]->comm->engine);
        return earlier ? earlier : fcdp__failure_restore(&failure);
    }
    size_t at = 0;
    uint32_t n_stale = 0;
    for (uint32_t g = 0; g < a->n_groups; g++) {
        (void)fcdp_group_agree(a->groups[g], a->votes + at);
        n_stale += fcdp__group_is_stale(a->groups[g]);
        at += a->groups[g]->layout->n_extents + FCDP_VOTE_MORE;
    }
    fcdp__trace_since(start_ns, (fcdp_trace_event){.kind = FCDP_EVENT_AGREE, .a = a->n_groups, .b = n_stale});
    return FCDP_OK;
}

fcdp_status fcdp_agree(fcdp_group *const *groups, uint32_t n_groups, const fcdp_program *program,
                       fcdp_stream stream) {
    asking a = {.groups = groups, .n_groups = n_groups, .program = program, .stream = stream};
    fcdp_status status = FCDP_OK;
    size_t n_votes = 0;
    for (uint32_t g = 0; g < n_groups; g++) n_votes += groups[g]->layout->n_extents + FCDP_VOTE_MORE;
    a.votes = malloc(n_votes + 1);
    a.reads = calloc(n_groups + 1, sizeof *a.reads);
    if (!a.votes || !a.reads) status = out_of_memory(&a);
    for (uint32_t g = 0; g < n_groups && !status && program->settle; g++)
        status = program->settle(program->ctx, groups[g]);
    if (!status) status = votes_make(&a);
    if (!status) status = votes_carry(&a);
    free(a.votes);
    free(a.reads);
    free(a.fingerprints);
    return status;
}

/* ---- what is gathered ---- */

static const char *extent_name(const fcdp_group *group, uint32_t i) {
    return group->extent_names ? group->extent_names[i] : group->name;
}

static fcdp_status missing_fail(const fcdp_group *group, uint32_t i) {
    return fcdp__fail(
        FCDP_ERR_INVALID,
        "%s cannot be gathered: the storage of its shard is freed, or smaller than the shard, on "
        "some rank. Fill it before the forward that uses it",
        extent_name(group, i));
}

/* Take the addresses of the stale shards, right before the gather reads them. A shard whose bytes are missing
 * is an error that names the parameter. fcdp_group_confirm then takes the fingerprints of what the gather
 * reads, behind the stream on which the inputs are made. */
fcdp_status fcdp__inputs_take(fcdp_group *group, const fcdp_program *program, uint64_t *inputs_out,
                              fcdp_stream *stream) {
    uint32_t n = group->layout->n_extents;
    bool any = false;
    memset(inputs_out, 0, n * sizeof *inputs_out);
    for (uint32_t i = 0; i < n; i++) any = any || (group->stale[i] && group->layout->extents[i].shard_bytes);
    if (!any) return FCDP_OK;
    fcdp_status status = look(program, group, FCDP_LOOK_PLACES | FCDP_LOOK_SIGNALS);
    if (status) return status;
    fcdp_evidence evidence = fcdp__sight_evidence(&group->sight, NULL);
    size_t at = 0;
    for (uint32_t i = 0; i < n; at += fcdp__evidence_n_pieces(&evidence, i), i++)
        if (group->stale[i] && group->layout->extents[i].shard_bytes &&
            fcdp__evidence_is_missing(&evidence, i, at))
            return missing_fail(group, i);
    status = program->inputs(program->ctx, group, group->stale, inputs_out, stream);
    return status ? status : fcdp_group_confirm(group, &evidence, *stream);
}

static fcdp_status begin(fcdp_group *group, const fcdp_program *program, fcdp_pass pass, fcdp_stream stream) {
    if (fcdp_group_has_begun(group)) return FCDP_OK;
    fcdp_status status = fcdp__inputs_take(group, program, group->inputs, &stream);
    return status ? status : fcdp_group_begin(group, group->inputs, pass, stream);
}

/* Begin the use before its wait. If device memory is short and the use makes no collective, return FCDP_OK
 * with *begun_out false: fcdp_wait begins it. */
static fcdp_status begin_now(fcdp_group *group, const fcdp_program *program, const fcdp_unshard_args *args,
                             bool *begun_out) {
    fcdp_status status = begin(group, program, args->pass, args->stream);
    *begun_out = status == FCDP_OK;
    return status == FCDP_ERR_NO_DEVICE_MEM && fcdp_group_begins_alone(group) ? FCDP_OK : status;
}

/* In few collectives, to host memory. All of each is stale, so all inputs are made on one stream. */
static fcdp_status gather_together(fcdp_group *const *small, uint32_t n, const fcdp_program *program,
                                   fcdp_stream stream) {
    size_t n_inputs = 0, at = 0;
    for (uint32_t g = 0; g < n; g++) n_inputs += small[g]->layout->n_extents;
    uint64_t *inputs = malloc((n_inputs + 1) * sizeof *inputs);
    if (!inputs) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory to gather %u small groups together", n);
    fcdp_stream behind = stream;
    fcdp_status status = FCDP_OK;
    for (uint32_t g = 0; g < n && !status; at += small[g]->layout->n_extents, g++) {
        behind = stream;
        status = fcdp__inputs_take(small[g], program, inputs + at, &behind);
    }
    if (!status) status = fcdp_groups_coalesce(small, inputs, n, behind);
    free(inputs);
    return status;
}

/* Right after an agreement on all groups of the tree. */
static fcdp_status small_groups_gather(fcdp_group *const *groups, uint32_t n, const fcdp_program *program,
                                       fcdp_stream stream) {
    fcdp_group **small = malloc((n + 1) * sizeof *small);
    uint32_t n_small = 0;
    if (!small) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory to look for small ones among %u groups", n);
    for (uint32_t g = 0; g < n; g++)
        if (fcdp_group_is_small(groups[g]) &&
            (!program->may_begin || program->may_begin(program->ctx, groups[g], false)))
            small[n_small++] = groups[g];
    fcdp_status status = n_small > 1 ? gather_together(small, n_small, program, stream) : FCDP_OK;
    free(small);
    return status;
}

/* ---- asking ---- */

/* On all groups of the tree, `group` among them: else nothing is known of it afterwards. */
static fcdp_status tree_ask(const fcdp_group *group, fcdp_tree *tree, const fcdp_program *program,
                            fcdp_stream stream) {
    uint32_t n;
    bool is_listed = false;
    fcdp_group *const *groups = fcdp__tree_groups(tree, &n);
    for (uint32_t g = 0; g < n; g++) is_listed = is_listed || groups[g] == group;
    if (!is_listed)
        return fcdp__fail(FCDP_ERR_INVALID, "'%s' is not among the groups of its tree (fcdp_tree_set_groups)",
                          group->name);
    for (uint32_t g = 0; g < n; g++) fcdp_group_join(groups[g], tree);
    fcdp_status status = fcdp_agree(groups, n, program, stream);
    if (status) return status;
    fcdp_tree_agreed(tree);
    status = fcdp__frozen_load(groups, n, program, stream);
    return status ? status : small_groups_gather(groups, n, program, stream);
}

static fcdp_status group_ask(fcdp_group *group, const fcdp_program *program, fcdp_stream stream) {
    fcdp_status status = fcdp_agree(&group, 1, program, stream);
    return status ? status : fcdp__frozen_load(&group, 1, program, stream);
}

/* A group that is reused, or was begun ahead, must be unchanged since the agreement; else an error names the
 * parameter. */
static fcdp_status audit(fcdp_group *group, const fcdp_program *program) {
    fcdp_status status = look(program, group, FCDP_LOOK_PLACES | FCDP_LOOK_SIGNALS);
    if (status) return status;
    fcdp_evidence evidence = fcdp__sight_evidence(&group->sight, NULL);
    uint32_t changed = fcdp_group_audit(group, &evidence);
    if (changed == group->layout->n_extents) return FCDP_OK;
    return fcdp__fail(
        FCDP_ERR_INVALID,
        "%s was written inside forward or backward, after the ranks had agreed on what is stale. "
        "Set FCDP_AGREE=unshard for such a model (the ranks then agree at every unshard), or FCDP=0",
        extent_name(group, changed));
}

static fcdp_status ask(fcdp_group *group, fcdp_tree *tree, const fcdp_program *program,
                       const fcdp_unshard_args *args) {
    switch (fcdp_group_question(group, args->by_hand)) {
    case FCDP_ASK_TREE: return tree_ask(group, tree, program, args->stream);
    case FCDP_ASK_GROUP: return group_ask(group, program, args->by_hand ? args->made_on : args->stream);
    case FCDP_ASK_NOBODY: break;
    }
    return audit(group, program);
}

uint32_t fcdp_group_missing(const fcdp_group *group) {
    return group->missing;
}

/* ---- unshard ---- */

/* A stale group begins now, so that its gather reads the shards when FSDP would. A restore may be later. */
static fcdp_status begin_or_put_off(fcdp_group *group, const fcdp_program *program,
                                    const fcdp_unshard_args *args) {
    const fcdp_comm *comm = group->comm;
    bool at_once = (comm->engine->options.prefetch > 0 && comm->ahead) || fcdp__group_is_stale(group);
    bool begun = true;
    fcdp_status status = at_once ? begin_now(group, program, args, &begun) : FCDP_OK;
    group->pass = args->pass;
    group->late = !status && !begun;
    return status;
}

/* Begin the groups that follow. Once one has failed for lack of device memory, skip the restores that make no
 * collective. Groups that make one begin all the same: the other ranks make it in this order. */
static fcdp_status following_begin(fcdp_group *const *following, size_t n, const fcdp_program *program,
                                   const fcdp_unshard_args *args) {
    bool goes_on = true;
    fcdp_status status = FCDP_OK;
    for (size_t k = 0; k < n && !status; k++) {
        fcdp_group *group = following[k];
        bool begun;
        if (!group->comm->ahead || fcdp__group_needs_file(group) ||
            (program->may_begin && !program->may_begin(program->ctx, group, true)) ||
            (!goes_on && fcdp_group_begins_alone(group)))
            continue;
        status = begin_now(group, program, args, &begun);
        goes_on = goes_on && begun;
    }
    return status;
}

fcdp_status fcdp_unshard(fcdp_group *group, fcdp_tree *tree, const fcdp_program *program,
                         const fcdp_unshard_args *args) {
    enum { MAX_FOLLOWING = 8 };
    fcdp_group *following[MAX_FOLLOWING];
    fcdp_status status = fcdp__engine_check_awake(group->comm->engine, group->name);
    if (!status) status = fcdp_group_check_capture(group, args->stream); /* before the ranks meet */
    if (status) return status;
    fcdp_group_join(group, tree);
    status = ask(group, tree, program, args);
    if (!status && group->missing < group->layout->n_extents) status = missing_fail(group, group->missing);
    if (!status) status = fcdp__spilled_fetch(group, program);
    if (!status) status = begin_or_put_off(group, program, args);
    if (status) return status;
    size_t n = fcdp_group_unsharded(group, args->pass == FCDP_PASS_FORWARD, following, MAX_FOLLOWING);
    status = following_begin(following, n, program, args);
    if (status) fcdp_give_up(group, program, args->stream);
    return status;
}

/* The wait may be on another stream than the unshard was: backward prefetch unshards a group under the stream
 * of the one before, and a program waits for an asynchronous unshard where it needs the parameters. */
fcdp_status fcdp_wait(fcdp_group *group, const fcdp_program *program, fcdp_stream stream) {
    bool begins = group->late || !fcdp_group_has_begun(group);
    fcdp_status status = begins ? fcdp__engine_check_awake(group->comm->engine, group->name) : FCDP_OK;
    if (!status && group->late) {
        status = fcdp_group_begin_late(group, group->pass, stream);
        if (!status) fcdp__count(&group->comm->engine->counts, FCDP_COUNT_GATHERS_LATE, 1);
    }
    if (!status) group->late = false;
    if (!status) status = begin(group, program, group->pass, stream);
    return status ? status : fcdp_group_wait(group, stream);
}

fcdp_status fcdp_cancel(fcdp_group *group, const fcdp_program *program, fcdp_stream stream) {
    return fcdp_group_has_begun(group) ? fcdp_wait(group, program, stream) : FCDP_OK;
}

void fcdp_give_up(fcdp_group *group, const fcdp_program *program, fcdp_stream stream) {
    fcdp_failure failure = fcdp__failure_keep(FCDP_ERR_INVALID);
    fcdp_status status = fcdp_cancel(group, program, stream);
    if (status) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    bool written = program->written && program->written(program->ctx, group);
    status = fcdp_group_reshard(group, stream, written);
    if (status) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    (void)!fcdp__failure_restore(&failure);
}

/* ---- does the device budget suffice? ----
 *
 * Asked before the first group is gathered, so that a job with too small a budget ends with the figure that
 * would do, and not in the middle of its first step. Arithmetic over layouts. */

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
        bool is_mapped = groups[i]->tier == FCDP_TIER_MAPPED; /* it takes none */
        size_t bytes = is_mapped ? 0 : groups[i]->layout->bytes;
        size_t n_pages = fcdp__round_up(bytes, pool.page_bytes) / pool.page_bytes;
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
        limit, fcdp__size_text(pool.budget_bytes).s, fcdp__name_text(t.largest->name),
        fcdp__size_text(t.most * pool.page_bytes).s, fcdp__size_text(t.stays * pool.page_bytes).s,
        fcdp__round_up(would_do * pool.page_bytes, MB) / MB);
}
