#include "tests/tiering/support.h"

#include "base/trace.h"

#include <stdatomic.h>
#include <sys/mman.h>

bool steps_may_fail_once;
fcdp_pin_mode node_pin = FCDP_PIN_AUTO;
fcdp_policy_kind node_policy = FCDP_POLICY_TAU;
bool node_has_copies;
static _Atomic unsigned long n_wrong; /* comparisons that failed, on the device's threads */
static char wrong_text[256];

/* ---- nodes ---- */

static fcdp_status driver_open_once(fcdp_driver **drv_out) {
    fcdp_options options;
    fcdp_status status = fcdp_options_load(environ, &options);
    if (getenv("TEST_TRACE")) fcdp_trace_open(2, 1 << 20);
    return status ? status : fcdp__driver_open(options.driver, 0, NULL, drv_out);
}

static void rank_open(node *node, uint32_t r, fcdp_shared_ticket *ticket, size_t pool_pages, bool exact) {
    rank *rank = &node->ranks[r];
    char name[32];
    fcdp_host_config host = {.drv = node->drv,
                             .account = node->account,
                             .numa_node = node_has_copies ? (int)r % 2 : -1,
                             .pin = node_pin,
                             .per_numa_node = node_has_copies,
                             .slice = r,
                             .n_slices = node->n,
                             .timeout_s = node_timeout_s};
    if (r == 0)
        step(fcdp__host_create(&host, &rank->host, ticket));
    else
        step(fcdp__host_join(&host, ticket, &rank->host));
    step(fcdp__pool_create(node->drv, pool_pages * PAGE, &rank->pool));
    fcdp_tiering_config config = {.exact = exact, .policy = node_policy};
    step(fcdp__tiering_create(node->drv, rank->pool, &config, &rank->tiering));
    step(fcdp__driver_stream_create(node->drv, &rank->compute));
    step(fcdp__driver_stream_create(node->drv, &rank->gather));
    snprintf(name, sizeof name, "compute %u", r);
    fcdp__driver_stream_name(node->drv, rank->compute, name);
    snprintf(name, sizeof name, "gather %u", r);
    fcdp__driver_stream_name(node->drv, rank->gather, name);
}

void node_open(node *node, uint32_t n_ranks, size_t pool_pages, bool exact) {
    fcdp_shared_ticket ticket = {0};
    if (!steps_may_fail_once) simgpu_reset(); /* which would forget the fault */
    atomic_store(&n_wrong, 0);
    simgpu_set_races(1);
    *node = (struct node){.n = n_ranks};
    step(driver_open_once(&node->drv));
    if (!fcdp__driver_is_sim(node->drv)) fail_msg("these tests need the simulated driver");
    assert_ok(fcdp__account_create(1 << 30, &node->account, &ticket));
    for (uint32_t r = 0; r < n_ranks; r++) rank_open(node, r, &ticket, pool_pages, exact);
}

void assert_all_is_well(const node *node) {
    (void)node;
    struct simgpu_unordered unordered;
    simgpu_unordered(&unordered);
    if (unordered.aliases + unordered.races + unordered.unmaps) fail_msg("%s", unordered.text);
    if (atomic_load(&n_wrong))
        fail_msg("%lu comparisons failed; the last: %s", atomic_load(&n_wrong), wrong_text);
}

void node_sync(const node *node) {
    fcdp_status status = fcdp__driver_sync(node->drv);
    if (status && steps_may_fail_once) status = fcdp__driver_sync(node->drv);
    assert_all_is_well(node);
    assert_ok(status);
}

/* Before the context goes and takes registrations with it. Events and streams may wait for it: destroying one
 * is not tried twice, since CUDA may have destroyed it and reported an earlier error. */
static void assert_memory_is_given_back(void) {
    struct simgpu_live live;
    simgpu_live(&live);
    assert_int_equal(live.registrations, 0);
    assert_int_equal(live.maps, 0);
    assert_int_equal(live.handles, 0);
    assert_int_equal(live.ranges, 0);
    assert_int_equal(live.device_bytes, 0);
    assert_true(steps_may_fail_once || live.events + live.streams == 0);
}

void node_close(node *node) {
    node_sync(node);
    for (uint32_t r = node->n; r-- > 0;) {
        rank *rank = &node->ranks[r];
        fcdp__tiering_destroy(rank->tiering);
        assert_int_equal(pool_stats_of(node, r).live_pages, 0);
        fcdp__pool_destroy(rank->pool);
        fcdp__host_destroy(rank->host);
        fcdp__driver_stream_destroy(node->drv, rank->compute);
        fcdp__driver_stream_destroy(node->drv, rank->gather);
    }
    fcdp__account_destroy(node->account);
    assert_memory_is_given_back();
    assert_all_is_well(node);
    fcdp__driver_close(node->drv);
    assert_nothing_lives();
}

/* ---- groups ---- */

double node_timeout_s = 20;
bool node_pins_slices;

static fcdp_host_share share_of(const fcdp_layout *layout, uint32_t r) {
    fcdp_host_share share;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        share.own[s] = fcdp__layout_slice(layout, s, r);
        share.copied[s] = node_pins_slices ? share.own[s] : layout->span[s];
    }
    return share;
}

void group_open(group *group, node *node, const char *name, const fcdp_extent_spec *specs, uint32_t n_extents,
                uint64_t seed) {
    *group = (struct group){.node = node, .seed = seed};
    assert_ok(fcdp__layout_create(specs, n_extents, 2 * node->n, node->n, &group->layout));
    assert_ok(fcdp__host_block_alloc(node->ranks[0].host, group->layout->bytes, &group->offset));
    for (uint32_t r = 0; r < node->n; r++) {
        fcdp_host_share share = share_of(group->layout, r);
        step(fcdp__host_attach(node->ranks[r].host, group->offset, group->layout->bytes, &share,
                               &group->blocks[r]));
        step(fcdp__region_create(node->ranks[r].tiering, name, group->layout, r, group->blocks[r],
                                 &group->regions[r]));
        step(fcdp__driver_event_create(node->drv, &group->crossed[r]));
    }
}

void group_open_pages(group *group, node *node, size_t n_pages, uint64_t seed) {
    char name[32];
    fcdp_extent_spec spec = {(n_pages * PAGE - 8192) / (2 * node->n), FCDP_SPAN_TRAINABLE};
    snprintf(name, sizeof name, "%zu pages, %llu", n_pages, (unsigned long long)(seed & 0xffff));
    group_open(group, node, name, &spec, 1, seed);
}

void group_close(group *group) {
    for (uint32_t r = 0; r < group->node->n; r++) {
        fcdp__region_destroy(group->regions[r]);
        fcdp__driver_event_destroy(group->node->drv, group->crossed[r]);
        fcdp__host_detach(group->blocks[r]);
    }
    fcdp__host_block_free(group->node->ranks[0].host, group->offset);
    fcdp__layout_destroy(group->layout);
}

/* ---- content ---- */

enum { UNIT = FCDP_EXTENT_ALIGN };

typedef struct content {
    uint64_t key, at, bytes, offset; /* `at`: of the memory; `offset`: in the region */
    uint32_t s, epoch;
    char name[32];
} content;

static content content_of(const group *group, uint32_t s, uint32_t epoch, size_t offset, size_t bytes,
                          uint64_t at) {
    uint64_t state = group->seed ^ ((uint64_t)epoch << 32) ^ s;
    content made = {
        .key = random_next(&state), .at = at, .bytes = bytes, .offset = offset, .s = s, .epoch = epoch};
    snprintf(made.name, sizeof made.name, "%s", group->regions[0]->name);
    return made;
}

static uint64_t word_of(const content *c, size_t i) {
    return (c->key + c->offset + i) * 0x9E3779B97F4A7C15u;
}

static void content_write(void *data) {
    const content *c = data;
    for (size_t i = 0; i < c->bytes; i += UNIT) {
        uint64_t first = word_of(c, i), last = word_of(c, i + UNIT - 8);
        memcpy((char *)c->at + i, &first, 8);
        memcpy((char *)c->at + i + UNIT - 8, &last, 8);
    }
}

static void content_compare(void *data) {
    const content *c = data;
    for (size_t i = 0; i < c->bytes; i += UNIT) {
        uint64_t first, last;
        memcpy(&first, (char *)c->at + i, 8);
        memcpy(&last, (char *)c->at + i + UNIT - 8, 8);
        if (first == word_of(c, i) && last == word_of(c, i + UNIT - 8)) continue;
        if (!atomic_fetch_add(&n_wrong, 1))
            snprintf(wrong_text, sizeof wrong_text, "'%s', span %u: byte %zu is not of epoch %u", c->name,
                     c->s, (size_t)c->offset + i, c->epoch);
        return;
    }
}

static void launch(fcdp_stream stream, struct simgpu_kernel *kernel) {
    int result = simgpu_launch(stream, kernel);
    if (result) fail_msg("'%s' was not launched: %d", kernel->name, result);
}

static void content_launch(const group *group, uint32_t r, uint32_t s, uint32_t epoch, fcdp_piece piece,
                           fcdp_stream stream, uint64_t duration_ns, bool writes) {
    if (!piece.bytes) return;
    uint64_t at = fcdp__region_base(group->regions[r]).addr + piece.offset_bytes;
    content c = content_of(group, s, epoch, piece.offset_bytes, piece.bytes, at);
    struct simgpu_kernel kernel = {.name = writes ? "write" : "compare",
                                   .duration_ns = duration_ns,
                                   .n_accesses = 1,
                                   .accesses = {{at, piece.bytes, writes}},
                                   .body = writes ? content_write : content_compare,
                                   .data = &c,
                                   .data_bytes = sizeof c};
    launch(stream, &kernel);
}

void span_write(group *group, uint32_t r, uint32_t s, uint32_t epoch, fcdp_piece piece, fcdp_stream stream) {
    content_launch(group, r, s, epoch, piece, stream, 0, true);
}

void span_expect(group *group, uint32_t r, uint32_t s, uint32_t epoch, fcdp_stream stream,
                 uint64_t duration_ns) {
    content_launch(group, r, s, epoch, group->layout->span[s], stream, duration_ns, false);
    if (duration_ns) content_launch(group, r, s, epoch, group->layout->span[s], stream, 0, false);
}

static void flag_set(void *data) {
    atomic_store(*(_Atomic bool **)data, true);
}

void pause_enqueue(fcdp_stream stream, uint64_t duration_ns, _Atomic bool *done) {
    struct simgpu_kernel pause = {.name = "pause", .duration_ns = duration_ns};
    struct simgpu_kernel end = {
        .name = "pause's end", .body = flag_set, .data = &done, .data_bytes = sizeof done};
    launch(stream, &pause);
    if (done) launch(stream, &end);
}

/* ---- one rank's part ---- */

static fcdp_status wait_event(const group *group, fcdp_stream stream, fcdp_event event) {
    return fcdp__driver_stream_wait(group->node->drv, stream, event);
}

static void others_write(group *group, uint32_t r, uint32_t s, uint32_t epoch) {
    for (uint32_t i = 0; i < group->node->n; i++)
        if (i != r)
            span_write(group, r, s, epoch, fcdp__layout_slice(group->layout, s, i),
                       group->node->ranks[r].gather);
}

static void store(group *group, uint32_t r, uint32_t span_mask, fcdp_event after) {
    fcdp_piece pieces[FCDP_N_SPANS];
    size_t n = 0;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (span_mask & 1u << s) pieces[n++] = fcdp__layout_slice(group->layout, s, r);
    step(fcdp__region_store(group->regions[r], span_mask, (fcdp_piece_list){pieces, n}, after));
}

static void load_pieces(group *group, uint32_t r, uint32_t span_mask) {
    fcdp_piece pieces[FCDP_N_SPANS * MAX_RANKS];
    size_t n = 0;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        for (uint32_t i = 0; i < group->node->n; i++)
            if (span_mask & 1u << s && i != r) pieces[n++] = fcdp__layout_slice(group->layout, s, i);
    step(fcdp__region_order(group->regions[r],
                            fcdp__tiering_stream(group->node->ranks[r].tiering, FCDP_TO_DEVICE)));
    step(fcdp__region_load_pieces(group->regions[r], span_mask, (fcdp_piece_list){pieces, n}));
    step(wait_event(group, group->node->ranks[r].gather, fcdp__region_loaded(group->regions[r])));
}

static void ready_record(group *group, uint32_t r) {
    step(fcdp__driver_event_record(group->node->drv, fcdp__region_ready(group->regions[r]),
                                   group->node->ranks[r].gather));
}

void region_fill(group *group, uint32_t r, uint32_t span_mask, fill_way way) {
    fcdp_region *region = group->regions[r];
    fcdp_stream gather = group->node->ranks[r].gather;
    fcdp_region_state state;
    step(fcdp__region_begin_fill(region, span_mask));
    step(fcdp__region_order(region, gather));
    state = state_of(region);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (span_mask & 1u << s)
            span_write(group, r, s, state.span[s].epoch, fcdp__layout_slice(group->layout, s, r), gather);
    step(fcdp__driver_event_record(group->node->drv, group->crossed[r], gather));
    if (way != FILL_KEPT) store(group, r, span_mask, group->crossed[r]);
    if (way == FILL_HOST) load_pieces(group, r, span_mask);
    for (uint32_t s = 0; s < FCDP_N_SPANS && way != FILL_HOST; s++)
        if (span_mask & 1u << s) others_write(group, r, s, state.span[s].epoch);
    step(wait_event(group, gather, fcdp__region_stored(region)));
    ready_record(group, r);
}

void region_restore(group *group, uint32_t r, uint32_t s, bool whole) {
    fcdp_region *region = group->regions[r];
    fcdp_stream gather = group->node->ranks[r].gather;
    uint32_t epoch = state_of(region).span[s].epoch;
    step(fcdp__region_order(region, fcdp__tiering_stream(group->node->ranks[r].tiering, FCDP_TO_DEVICE)));
    step(fcdp__region_order(region, gather));
    if (whole)
        step(fcdp__region_load_whole(region, s));
    else
        step(fcdp__region_load_slice(region, s));
    if (!whole) others_write(group, r, s, epoch);
    step(wait_event(group, gather, fcdp__region_loaded(region)));
    ready_record(group, r);
}

void region_compute(group *group, uint32_t r, uint64_t duration_ns) {
    fcdp_region_state state = state_of(group->regions[r]);
    step(wait_event(group, group->node->ranks[r].compute, fcdp__region_ready(group->regions[r])));
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (state.span[s].on_device)
            span_expect(group, r, s, state.span[s].epoch, group->node->ranks[r].compute, duration_ns);
}

void region_store_late(group *group, uint32_t r, uint32_t span_mask) {
    store(group, r, span_mask, fcdp__region_ready(group->regions[r]));
}

void region_release(group *group, uint32_t r, bool keep) {
    assert_ok(fcdp__region_release(group->regions[r], group->node->ranks[r].compute, keep));
}

/* ---- every rank ---- */

void group_acquire(group *group) {
    for (uint32_t r = 0; r < group->node->n; r++) step(fcdp__region_acquire(group->regions[r]));
}

void group_release(group *group, bool keep) {
    for (uint32_t r = 0; r < group->node->n; r++) region_release(group, r, keep);
}

void group_fill(group *group, uint32_t span_mask, fill_way way, uint64_t duration_ns) {
    group_acquire(group);
    for (uint32_t r = 0; r < group->node->n; r++) {
        region_fill(group, r, span_mask, way);
        region_compute(group, r, duration_ns);
    }
}

void group_restore(group *group, bool whole, uint64_t duration_ns) {
    group_acquire(group);
    for (uint32_t r = 0; r < group->node->n; r++) {
        fcdp_region_state state = state_of(group->regions[r]);
        for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
            if (!state.span[s].on_device && group->layout->span[s].bytes) region_restore(group, r, s, whole);
        region_compute(group, r, duration_ns);
    }
}

/* ---- looking ---- */

fcdp_region_state state_of(fcdp_region *region) {
    fcdp_region_state state;
    fcdp__region_state(region, &state);
    return state;
}

void assert_span(fcdp_region *region, uint32_t s, bool on_device, bool stored, bool whole, uint32_t epoch) {
    fcdp_span_state span = state_of(region).span[s];
    if (span.on_device != on_device || span.stored != stored || span.whole != whole || span.epoch != epoch)
        fail_msg("'%s', span %u: on_device %d, stored %d, whole %d, epoch %u", region->name, s,
                 span.on_device, span.stored, span.whole, span.epoch);
}

/* `at`: the piece's bytes, which the host can read. */
static void assert_bytes(group *group, uint32_t s, uint32_t epoch, fcdp_piece piece, const void *at) {
    content c = content_of(group, s, epoch, piece.offset_bytes, piece.bytes, (uint64_t)at);
    unsigned long before = atomic_load(&n_wrong);
    content_compare(&c);
    if (atomic_load(&n_wrong) != before) fail_msg("on the host: %s", wrong_text);
}

static void assert_host_piece(group *group, uint32_t r, uint32_t s, uint32_t epoch, fcdp_piece piece) {
    step(fcdp__driver_event_sync(group->node->drv, fcdp__region_stored(group->regions[r])));
    assert_bytes(group, s, epoch, piece, (char *)fcdp__host_data(group->blocks[r]) + piece.offset_bytes);
}

void assert_peek(group *group, uint32_t r, uint32_t s, uint32_t epoch, bool has) {
    fcdp_piece piece = fcdp__layout_slice(group->layout, s, r);
    fcdp_span_state span = state_of(group->regions[r]).span[s];
    void *bytes = malloc(piece.bytes + 1);
    bool found;
    assert_non_null(bytes);
    step(fcdp__region_peek(group->regions[r], s, piece, bytes, &found));
    assert_int_equal(found, has);
    if (has) assert_bytes(group, s, epoch, piece, bytes);
    assert_span(group->regions[r], s, span.on_device, span.stored, span.whole, span.epoch);
    free(bytes);
}

void assert_host_slice(group *group, uint32_t r, uint32_t s, uint32_t slice, uint32_t epoch) {
    assert_host_piece(group, r, s, epoch, fcdp__layout_slice(group->layout, s, slice));
}

void assert_host_span(group *group, uint32_t r, uint32_t s, uint32_t epoch) {
    assert_host_piece(group, r, s, epoch, group->layout->span[s]);
}

fcdp_pool_stats pool_stats_of(const node *node, uint32_t r) {
    fcdp_pool_stats stats;
    fcdp__pool_stats(node->ranks[r].pool, &stats);
    return stats;
}

fcdp_tiering_stats stats_of(const node *node, uint32_t r) {
    fcdp_tiering_stats stats;
    fcdp__tiering_stats_get(node->ranks[r].tiering, &stats);
    return stats;
}

void pages_squeeze(node *node, uint32_t r, size_t n_pages) {
    fcdp_phys block;
    step(fcdp__pool_take_handle(node->ranks[r].pool, FCDP_HOLDER_TENSORS, n_pages, &block));
    fcdp__pool_give_handle(node->ranks[r].pool, FCDP_HOLDER_TENSORS, n_pages, block);
}

/* ---- gates ---- */

enum { GATE_BYTES = 4096 };

gate gate_make(const node *node) {
    gate made = {.drv = node->drv};
    made.word = mmap(NULL, GATE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(made.word != MAP_FAILED);
    assert_ok(fcdp__driver_host_pin(node->drv, made.word, GATE_BYTES, &(size_t){0}));
    assert_ok(fcdp__driver_host_dptr(node->drv, made.word, &made.at));
    return made;
}

void gate_hold(const gate *gate, fcdp_stream stream) {
    assert_ok(fcdp__driver_wait_value32(gate->drv, stream, gate->at, 1));
}

void gate_open(const gate *gate) {
    atomic_store_explicit(gate->word, 1, memory_order_release);
}

void gate_destroy(gate *gate) {
    assert_ok(fcdp__driver_host_unpin(gate->drv, gate->word, GATE_BYTES, &(size_t){0}));
    munmap(gate->word, GATE_BYTES);
}

bool has_passed(const node *node, fcdp_event event) {
    fcdp_status status = fcdp__driver_event_query(node->drv, event);
    assert_true(status == FCDP_OK || status == FCDP_PENDING);
    return status == FCDP_OK;
}
