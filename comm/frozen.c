/* frozen.c - what the ranks ask each other before they trust a file, and the thread that writes the files.
 *
 * Three questions, each the maximum of bytes over all ranks:
 *
 *     prints   16 bytes a rank, each in its own place: the hash of what it would send
 *     lacks    is my slice not on my disk?
 *     wrong    do the bytes in my node's host memory differ from what some rank would send?
 *
 * Between the second and the third all slices of a node are in its host memory, so the answers are barriers,
 * too: no word on the board is needed before the span counts as stored.
 */
#include "comm/frozen.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/size.h"
#include "comm/internal.h"
#include "comm/trace.h"
#include "tiering/cache.h"

enum { PRINT_BYTES = 16, RUN_BYTES = 4 << 20, LOOK_NS = 20000000 };
size_t fcdp__frozen_batch_bytes = (size_t)1 << 30;
uint64_t fcdp__frozen_quiet_ns = 2000000000;

/* mutex guards all below it. */
struct fcdp_frozen {
    fcdp_engine *engine;
    fcdp_cache *cache; /* NULL: the directory cannot be used, as `problem` says */
    char problem[FCDP_OPTION_PATH_BYTES + 256];
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    pthread_t thread;
    bool started, stops, warned;
    fcdp_group *queue;   /* to write, by frozen.next; the last one first */
    fcdp_group *current; /* being written, without the mutex */
};

/* ---- the engine's ---- */

fcdp_status fcdp__frozen_open(fcdp_engine *engine, fcdp_frozen **frozen_out) {
    const fcdp_options *options = &engine->options;
    *frozen_out = NULL;
    if (!options->cache_dir[0]) return FCDP_OK;
    fcdp_frozen *frozen = calloc(1, sizeof *frozen);
    if (!frozen) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for FCDP_CACHE_DIR");
    frozen->engine = engine;
    if (fcdp__cache_open(options->cache_dir, options->cache_bytes, &frozen->cache))
        snprintf(frozen->problem, sizeof frozen->problem, "%s", fcdp_error_text());
    pthread_mutex_init(&frozen->mutex, NULL);
    fcdp__condition_init(&frozen->changed);
    *frozen_out = frozen;
    return FCDP_OK;
}

void fcdp__frozen_warn(const fcdp_comm *comm) {
    fcdp_frozen *frozen = comm->engine->frozen;
    if (!frozen || frozen->cache || frozen->warned || comm->topology.local) return;
    fcdp__log(FCDP_LOG_WARN, "%s; frozen parameters are gathered", frozen->problem);
    frozen->warned = true;
}

void fcdp__frozen_close(fcdp_frozen *frozen) {
    if (!frozen) return;
    pthread_mutex_lock(&frozen->mutex);
    FCDP_CHECK(0, !frozen->queue && !frozen->current);
    frozen->stops = true;
    pthread_cond_broadcast(&frozen->changed);
    pthread_mutex_unlock(&frozen->mutex);
    if (frozen->started) pthread_join(frozen->thread, NULL);
    pthread_cond_destroy(&frozen->changed);
    pthread_mutex_destroy(&frozen->mutex);
    fcdp__cache_close(frozen->cache);
    free(frozen);
}

/* ---- fingerprints and keys ---- */

static bool is_frozen(const fcdp_group *group, uint32_t i) {
    const fcdp_extent *extent = &group->layout->extents[i];
    return extent->span == FCDP_SPAN_FROZEN && extent->shard_bytes > 0;
}

static fcdp_piece slice_of(const fcdp_group *group) {
    return fcdp__layout_slice(group->layout, FCDP_SPAN_FROZEN, group->comm->topology.local);
}

static void digest_take(const XXH3_state_t *hash, uint8_t *out) {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(hash));
    memcpy(out, canonical.digest, PRINT_BYTES);
}

/* Of bytes on the device, through a buffer of the host's. */
static fcdp_status device_hash(const fcdp_group *group, XXH3_state_t *hash, uint64_t at, size_t bytes,
                               void *buffer) {
    fcdp_driver *drv = group->comm->engine->drv;
    fcdp_stream d2h = group->comm->set->copies[FCDP_TO_HOST];
    fcdp_status status = FCDP_OK;
    for (size_t done = 0, run; done < bytes && !status; done += run) {
        run = bytes - done < RUN_BYTES ? bytes - done : RUN_BYTES;
        status = fcdp__driver_copy_d2h(drv, buffer, fcdp__dptr_add((fcdp_dptr){at}, done), run, d2h);
        if (!status) status = fcdp__driver_stream_sync(drv, d2h);
        if (!status) XXH3_128bits_update(hash, buffer, run);
    }
    return status;
}

/* Of this rank's frozen shards, at group->inputs, behind `stream`. */
static fcdp_status inputs_hash(fcdp_group *group, fcdp_stream stream, uint8_t *print) {
    fcdp_engine *engine = group->comm->engine;
    fcdp_stream d2h = group->comm->set->copies[FCDP_TO_HOST];
    void *buffer = engine->host_computes ? NULL : malloc(RUN_BYTES);
    fcdp_status status = FCDP_OK;
    XXH3_state_t hash;
    XXH3_128bits_reset(&hash);
    if (!engine->host_computes) {
        status = buffer ? fcdp__driver_event_record(engine->drv, group->written, stream)
                        : fcdp__fail(FCDP_ERR_SYSTEM, "no memory to hash '%s'", group->name);
        if (!status) status = fcdp__driver_stream_wait(engine->drv, d2h, group->written);
    }
    for (uint32_t i = 0; i < group->layout->n_extents && !status; i++) {
        size_t bytes = group->layout->extents[i].shard_bytes;
        if (!is_frozen(group, i)) continue;
        if (engine->host_computes)
            XXH3_128bits_update(&hash, (const void *)(uintptr_t)group->inputs[i], bytes);
        else
            status = device_hash(group, &hash, group->inputs[i], bytes, buffer);
    }
    free(buffer);
    digest_take(&hash, print);
    return status;
}

/* The other ranks wait for this one's answer. */
static fcdp_status failed_alone(const fcdp_group *group, fcdp_status status) {
    return status ? fcdp__comm_fail(group->comm, status) : FCDP_OK;
}

/* The inputs as for a gather, which the ranks have agreed to make: what is hashed is what the copy will be
 * of, in the parameters' evidence as well. */
static fcdp_status print_take(fcdp_group *group, const fcdp_program *program, fcdp_stream stream,
                              uint8_t *print) {
    uint32_t n = group->layout->n_extents;
    uint8_t *agreed = group->stale, *frozen = calloc(n + 1, 1);
    if (!frozen)
        return failed_alone(group, fcdp__fail(FCDP_ERR_SYSTEM, "no memory to hash '%s'", group->name));
    for (uint32_t i = 0; i < n; i++) frozen[i] = is_frozen(group, i) ? agreed[i] : 0;
    group->stale = frozen;
    fcdp_status status = fcdp__inputs_take(group, program, group->inputs, &stream);
    group->stale = agreed;
    free(frozen);
    if (!status) status = inputs_hash(group, stream, print);
    if (program->inputs_done) program->inputs_done(program->ctx, group);
    return failed_alone(group, status);
}

/* All that a slice's bytes follow from, but for padding, which nobody reads. */
static fcdp_cache_key key_make(const fcdp_group *group, const uint8_t *prints) {
    const fcdp_layout *layout = group->layout;
    fcdp_piece slice = slice_of(group);
    const uint64_t shape[] = {1 /* of this key */, layout->n_shards, layout->n_slices, slice.offset_bytes,
                              slice.bytes};
    fcdp_cache_key key;
    XXH3_state_t hash;
    XXH3_128bits_reset(&hash);
    XXH3_128bits_update(&hash, shape, sizeof shape);
    for (uint32_t i = 0; i < layout->n_extents; i++) {
        const uint64_t place[] = {layout->extents[i].offset_bytes, layout->extents[i].shard_bytes};
        if (is_frozen(group, i)) XXH3_128bits_update(&hash, place, sizeof place);
    }
    XXH3_128bits_update(&hash, prints, (size_t)layout->n_shards * PRINT_BYTES);
    digest_take(&hash, key.bytes);
    return key;
}

/* The ranks of a node share the work. */
static bool node_has_all(const fcdp_group *group, const uint8_t *prints) {
    const fcdp_layout *layout = group->layout;
    const fcdp_topology *topology = &group->comm->topology;
    const char *data = fcdp__host_data(group->block);
    bool same = true;
    for (uint32_t r = topology->local; r < layout->n_shards && same; r += topology->node_size) {
        uint8_t print[PRINT_BYTES];
        XXH3_state_t hash;
        XXH3_128bits_reset(&hash);
        for (uint32_t i = 0; i < layout->n_extents; i++) {
            const fcdp_extent *extent = &layout->extents[i];
            if (is_frozen(group, i))
                XXH3_128bits_update(&hash, data + extent->offset_bytes + r * extent->shard_bytes,
                                    extent->shard_bytes);
        }
        digest_take(&hash, print);
        same = memcmp(print, prints + (size_t)r * PRINT_BYTES, PRINT_BYTES) == 0;
    }
    return same;
}

/* ---- loading ---- */

/* The span is nowhere yet, and nothing but its first gather would fill it: no rank reads or writes its host
 * memory. */
bool fcdp__frozen_is_asked(const fcdp_group *group) {
    fcdp_region_state state;
    const fcdp_frozen *frozen = group->comm->engine->frozen;
    if (!frozen || !frozen->cache || group->frozen.tried || !group->block ||
        !group->layout->span[FCDP_SPAN_FROZEN].bytes)
        return false;
    fcdp__region_state(group->region, &state);
    return state.span[FCDP_SPAN_FROZEN].epoch == 0 && !state.in_use;
}

static bool may_load(const fcdp_group *group) {
    if (!group->frozen.agreed || group->missing < group->layout->n_extents) return false;
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        if (is_frozen(group, i) && !group->stale[i]) return false;
    return true;
}

typedef struct loading { /* of the groups of one agreement that may come from disk */
    fcdp_group **groups;
    uint32_t n;
    const fcdp_program *program;
    uint8_t **prints; /* of each group, n_ranks * PRINT_BYTES */
    uint8_t *answers; /* a byte a group */
} loading;

static void loading_free(loading *l) {
    for (uint32_t g = 0; l->prints && g < l->n; g++) free(l->prints[g]);
    free(l->prints);
    free(l->groups);
    free(l->answers);
}

static fcdp_status loading_make(loading *l, fcdp_group *const *groups, uint32_t n) {
    l->groups = malloc((n + 1) * sizeof *l->groups);
    l->prints = calloc(n + 1, sizeof *l->prints);
    l->answers = calloc(n + 1, 1);
    bool ok = l->groups && l->prints && l->answers;
    for (uint32_t g = 0; g < n && ok; g++) {
        if (!may_load(groups[g])) continue;
        l->groups[l->n] = groups[g];
        ok = (l->prints[l->n] = calloc(groups[g]->comm->topology.n_ranks, PRINT_BYTES)) != NULL;
        l->n++;
    }
    return ok ? FCDP_OK : fcdp__fail(FCDP_ERR_SYSTEM, "no memory to look for frozen parameters on disk");
}

static fcdp_status prints_exchange(const loading *l, fcdp_stream stream) {
    fcdp_status status = FCDP_OK;
    for (uint32_t g = 0; g < l->n && !status; g++) {
        fcdp_group *group = l->groups[g];
        const fcdp_topology *topology = &group->comm->topology;
        group->frozen.tried = true;
        status = print_take(group, l->program, stream, l->prints[g] + (size_t)topology->rank * PRINT_BYTES);
        if (!status)
            status = l->program->agree(l->program->ctx, &l->groups[g], 1, l->prints[g],
                                       (size_t)topology->n_ranks * PRINT_BYTES);
        group->frozen.key = key_make(group, l->prints[g]);
    }
    return status;
}

/* Groups [from, to) of those that are loaded. */
typedef struct batch {
    uint32_t from, to;
} batch;

/* The ranks meet again after each gigabyte of slices, and not only after all of them: else those whose disks
 * are fast might wait for longer than FCDP_TIMEOUT. All of them make the same batches. */
static batch batch_from(const loading *l, uint32_t from) {
    batch b = {from, from};
    for (size_t bytes = 0; b.to < l->n && bytes < fcdp__frozen_batch_bytes; b.to++)
        bytes += slice_of(l->groups[b.to]).bytes;
    return b;
}

static fcdp_status answers_exchange(const loading *l, batch b) {
    return l->program->agree(l->program->ctx, l->groups + b.from, b.to - b.from, l->answers + b.from,
                             b.to - b.from);
}

static void on_disk_set(fcdp_group *group) {
    atomic_store_explicit(&group->frozen.on_disk, true, memory_order_relaxed);
    fcdp__group_trace_on_disk(group);
}

/* To every copy of the node's host memory: what is compared of one holds for all. */
static bool slice_read(fcdp_group *group, fcdp_piece slice) {
    fcdp_cache *cache = group->comm->engine->frozen->cache;
    char *to = (char *)fcdp__host_data(group->block) + slice.offset_bytes;
    uint64_t start_ns = fcdp__trace_start();
    fcdp_status status = fcdp__cache_read(cache, &group->frozen.key, to, slice.bytes);
    if (status == FCDP_PENDING) return false;
    fcdp__group_trace_cache(group, FCDP_EVENT_CACHE_READ, start_ns, slice.bytes, status);
    group->frozen.is_unread = status != FCDP_OK;
    if (status) return false;
    for (uint32_t i = 0; i < fcdp__host_block_copies(group->block); i++) {
        char *copy = (char *)fcdp__host_copy(group->block, i) + slice.offset_bytes;
        if (copy != to) memcpy(copy, to, slice.bytes);
    }
    return true;
}

static void slices_read(const loading *l, batch b) {
    for (uint32_t g = b.from; g < b.to; g++) {
        fcdp_group *group = l->groups[g];
        fcdp_piece slice = slice_of(group);
        l->answers[g] = !slice_read(group, slice);
    }
}

/* answers[g]: 0 where the group has come from disk, on all ranks. */
static void bytes_compare(const loading *l, batch b) {
    for (uint32_t g = b.from; g < b.to; g++)
        if (!l->answers[g]) l->answers[g] = node_has_all(l->groups[g], l->prints[g]) ? 0 : 2;
}

/* Which slice is wrong is not known: all are written anew. */
static void slice_drop(fcdp_group *group) {
    const fcdp_cache *cache = group->comm->engine->frozen->cache;
    if (group->comm->topology.local == 0)
        fcdp__log(FCDP_LOG_WARN,
                  "FCDP_CACHE_DIR: a file of '%s' in %s is damaged: its files are removed, and its "
                  "frozen parameters are gathered",
                  fcdp__name_text(group->name), fcdp__cache_dir(cache));
    fcdp__cache_drop(group->comm->engine->frozen->cache, &group->frozen.key);
    fcdp__group_trace_cache(group, FCDP_EVENT_CACHE_READ, fcdp__trace_start(), slice_of(group).bytes,
                            FCDP_ERR_SYSTEM);
}

static void span_accept(fcdp_group *group) {
    fcdp__region_fill_by_host(group->region, 1u << FCDP_SPAN_FROZEN);
    for (uint32_t i = 0; i < group->layout->n_extents; i++) {
        if (!is_frozen(group, i)) continue;
        fcdp_observation observed = fcdp__validity_observed(group->validity, i);
        fcdp__validity_accept(group->validity, i, &observed);
        group->stale[i] = 0;
    }
}

static fcdp_status batch_load(const loading *l, batch b, uint64_t *bytes) {
    slices_read(l, b);
    fcdp_status status = answers_exchange(l, b);
    if (!status) {
        bytes_compare(l, b);
        status = answers_exchange(l, b);
    }
    for (uint32_t g = b.from; g < b.to && !status; g++) {
        if (l->answers[g] == 0) {
            span_accept(l->groups[g]);
            on_disk_set(l->groups[g]);
            *bytes += l->groups[g]->layout->span[FCDP_SPAN_FROZEN].bytes;
        } else {
            if (l->answers[g] == 2) slice_drop(l->groups[g]);
            l->groups[g]->frozen.writes = true;
        }
    }
    return status;
}

fcdp_status fcdp__frozen_load(fcdp_group *const *groups, uint32_t n, const fcdp_program *program,
                              fcdp_stream stream) {
    loading l = {.program = program};
    bool any = false;
    for (uint32_t g = 0; g < n; g++) any = any || may_load(groups[g]);
    if (!any) return FCDP_OK;
    uint64_t start_ns = fcdp__now_ns(), bytes = 0;
    fcdp_status status = failed_alone(groups[0], loading_make(&l, groups, n));
    if (!status) status = prints_exchange(&l, stream);
    for (batch b = batch_from(&l, 0); b.from < l.n && !status; b = batch_from(&l, b.to))
        status = batch_load(&l, b, &bytes);
    if (bytes && groups[0]->comm->topology.local == 0)
        fcdp__log(FCDP_LOG_INFO, "%s of frozen parameters came from %s in %.1f s", fcdp__size_text(bytes).s,
                  groups[0]->comm->engine->options.cache_dir, (double)(fcdp__now_ns() - start_ns) / 1e9);
    loading_free(&l);
    return status;
}

/* ---- writing ---- */

/* It has the epoch of its first gather, and is what that has stored: nothing has been written over it in host
 * memory. */
static bool is_first(void *ctx) {
    fcdp_region_state state;
    fcdp__region_state(((const fcdp_group *)ctx)->region, &state);
    return state.span[FCDP_SPAN_FROZEN].epoch == 1 && state.span[FCDP_SPAN_FROZEN].stored;
}

/* Until the node's other ranks have stored theirs. A job that has failed does not wait for them. */
static fcdp_status others_await(fcdp_frozen *frozen, const fcdp_group *group) {
    uint64_t start_ns = fcdp__now_ns();
    fcdp_status status = FCDP_PENDING;
    while (status == FCDP_PENDING) {
        status = fcdp_comm_check(group->comm);
        if (!status)
            status = fcdp__board_query_all(group->block, FCDP_BOARD_STORED_0, 1, group->name,
                                           fcdp__now_ns() - start_ns);
        if (status != FCDP_PENDING) break;
        pthread_mutex_lock(&frozen->mutex);
        (void)fcdp__condition_wait(&frozen->changed, &frozen->mutex, fcdp__now_ns() + LOOK_NS);
        pthread_mutex_unlock(&frozen->mutex);
    }
    return status;
}

/* Once all ranks of the node have stored their pieces of it: this rank's slice may hold pieces of others. A
 * job that has failed is about to end with that: the writer has nothing to add. */
static fcdp_status slice_write(fcdp_frozen *frozen, fcdp_group *group) {
    const fcdp_topology *topology = &group->comm->topology;
    fcdp_piece slice = slice_of(group);
    fcdp_cache_entry entry = {.key = group->frozen.key,
                              .name = group->name[0] ? group->name : "(root)",
                              .slice = topology->local,
                              .n_slices = topology->node_size,
                              .from = (const char *)fcdp__host_data(group->block) + slice.offset_bytes,
                              .bytes = slice.bytes};
    fcdp_status status = fcdp_comm_check(group->comm);
    if (!status) {
        status = fcdp__driver_event_sync(frozen->engine->drv, fcdp__region_stored(group->region));
        if (status && !fcdp_comm_check(group->comm)) return status;
    }
    if (!status && topology->node_size > 1) status = others_await(frozen, group);
    if (status) {
        fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
        return FCDP_OK;
    }
    if (!is_first(group)) return FCDP_OK;
    uint64_t start_ns = fcdp__trace_start();
    status = fcdp__cache_write(frozen->cache, &entry, is_first, group);
    bool is_there = !status || (status == FCDP_PENDING && !group->frozen.is_unread &&
                                is_first(group)); /* by another process */
    if (is_there) on_disk_set(group);
    if (status == FCDP_PENDING) return FCDP_OK;
    fcdp__group_trace_cache(group, FCDP_EVENT_CACHE_WRITE, start_ns, slice.bytes, status);
    return status;
}

/* The one that was queued first: the mutex is held. */
static fcdp_group *queue_take(fcdp_frozen *frozen) {
    fcdp_group **link = &frozen->queue;
    while (*link && (*link)->frozen.next) link = &(*link)->frozen.next;
    fcdp_group *group = *link;
    *link = NULL;
    return group;
}

/* It may wait for events only once the driver lets it ignore that another thread captures a graph: else it
 * would break that graph, as the monitor's queries would. */
static void *writer_main(void *arg) {
    fcdp_frozen *frozen = arg;
    bool may_wait = false;
    pthread_mutex_lock(&frozen->mutex);
    while (!frozen->stops) {
        frozen->current = queue_take(frozen);
        if (!frozen->current) {
            pthread_cond_wait(&frozen->changed, &frozen->mutex);
            continue;
        }
        pthread_mutex_unlock(&frozen->mutex);
        int mode = FCDP_CAPTURE_MODE_RELAXED;
        fcdp_status status = may_wait ? FCDP_OK
                                      : fcdp__driver_capture_mode_exchange(frozen->engine->drv, &mode);
        may_wait = !status;
        if (!status) status = slice_write(frozen, frozen->current);
        pthread_mutex_lock(&frozen->mutex);
        if (status && !frozen->warned)
            fcdp__log(
                FCDP_LOG_WARN,
                "FCDP_CACHE_DIR: the frozen parameters of '%s' cannot be written, so the next run gathers "
                "them: %s (this is said once)",
                fcdp__name_text(frozen->current->name), fcdp_error_text());
        frozen->warned = frozen->warned || status;
        frozen->current = NULL;
        pthread_cond_broadcast(&frozen->changed);
    }
    pthread_mutex_unlock(&frozen->mutex);
    return NULL;
}

uint32_t fcdp__frozen_stores(const fcdp_group *group) {
    return group->frozen.writes ? 1u << FCDP_SPAN_FROZEN : 0;
}

void fcdp__frozen_write(fcdp_group *group) {
    fcdp_frozen *frozen = group->comm->engine->frozen;
    fcdp_region_state state;
    if (!group->frozen.writes) return;
    fcdp__region_state(group->region, &state);
    if (!state.span[FCDP_SPAN_FROZEN].stored && state.span[FCDP_SPAN_FROZEN].epoch <= 1) return;
    group->frozen.writes = false;
    if (state.span[FCDP_SPAN_FROZEN].epoch != 1) return;
    pthread_mutex_lock(&frozen->mutex);
    int error = frozen->started ? 0 : fcdp__thread_start(writer_main, frozen, &frozen->thread);
    if (!error) {
        if (!frozen->started) pthread_setname_np(frozen->thread, "fcdp-frozen");
        frozen->started = true;
        group->frozen.next = frozen->queue;
        frozen->queue = group;
        pthread_cond_broadcast(&frozen->changed);
    } else if (!frozen->warned) {
        fcdp__log(FCDP_LOG_WARN,
                  "FCDP_CACHE_DIR: no thread can be started to write frozen parameters (%s), so the next run "
                  "gathers them",
                  strerror(error));
        frozen->warned = true;
    }
    pthread_mutex_unlock(&frozen->mutex);
}

static bool is_queued(const fcdp_frozen *frozen, const fcdp_group *group) {
    for (const fcdp_group *one = frozen->queue; one; one = one->frozen.next)
        if (one == group) return true;
    return frozen->current == group;
}

void fcdp__frozen_forget(fcdp_group *group) {
    fcdp_frozen *frozen = group->comm->engine->frozen;
    if (!frozen) return;
    uint64_t said_ns = fcdp__now_ns() + fcdp__frozen_quiet_ns;
    bool says = true;
    pthread_mutex_lock(&frozen->mutex);
    while (is_queued(frozen, group)) {
        if (!says) {
            pthread_cond_wait(&frozen->changed, &frozen->mutex);
        } else if (!fcdp__condition_wait(&frozen->changed, &frozen->mutex, said_ns)) {
            fcdp__log(
                FCDP_LOG_WARN,
                "FCDP_CACHE_DIR: the frozen parameters of '%s' are not written to %s yet, which is waited "
                "for; if this does not end, check the disk and the node's other ranks",
                fcdp__name_text(group->name), fcdp__cache_dir(frozen->cache));
            says = false;
        }
    }
    pthread_mutex_unlock(&frozen->mutex);
}
