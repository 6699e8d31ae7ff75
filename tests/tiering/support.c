#include "tests/tiering/support.h"

bool steps_may_fail_once;

static fcdp_status driver_open_once(fcdp_driver **drv_out) {
    fcdp_options options;
    fcdp_status status = fcdp_options_load(environ, &options);
    return status ? status : fcdp__driver_open(options.driver, 0, NULL, drv_out);
}

void node_open(node *node, uint32_t n_ranks, size_t pool_pages) {
    fcdp_shared_ticket ticket = {0};
    *node = (struct node){.n = n_ranks};
    step(driver_open_once(&node->drv));
    step(fcdp__driver_stream_create(node->drv, &node->stream));
    assert_ok(fcdp__account_create(1 << 30, &node->account, &ticket));
    for (uint32_t r = 0; r < n_ranks; r++) {
        rank *rank = &node->ranks[r];
        fcdp_host_config host = {.drv = node->drv,
                                 .account = node->account,
                                 .numa_node = -1,
                                 .pin = FCDP_PIN_AUTO,
                                 .slice = r,
                                 .n_slices = n_ranks,
                                 .timeout_s = 20};
        if (r == 0)
            step(fcdp__host_create(&host, &rank->host, &ticket));
        else
            step(fcdp__host_join(&host, &ticket, &rank->host));
        step(fcdp__pool_create(node->drv, pool_pages * PAGE, &rank->pool));
        step(fcdp__tiering_create(node->drv, rank->pool, &rank->tiering));
    }
}

/* Before the context goes and takes registrations with it. Events and streams may wait for it: destroying one is not tried
 * twice, since CUDA may have destroyed it and reported an earlier error. */
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
    for (uint32_t r = node->n; r-- > 0;) {
        rank *rank = &node->ranks[r];
        fcdp_pool_stats stats;
        fcdp__tiering_destroy(rank->tiering);
        fcdp__pool_stats(rank->pool, &stats);
        assert_int_equal(stats.live_pages, 0);
        fcdp__pool_destroy(rank->pool);
        fcdp__host_destroy(rank->host);
    }
    fcdp__account_destroy(node->account);
    bool is_sim = fcdp__driver_is_sim(node->drv);
    fcdp__driver_stream_destroy(node->drv, node->stream);
    if (is_sim) assert_memory_is_given_back();
    fcdp__driver_close(node->drv);
    if (is_sim) assert_nothing_lives();
}

void group_open(group *group, node *node, const char *name, const fcdp_extent_spec *specs, uint32_t n_extents,
                uint64_t seed) {
    *group = (struct group){.node = node, .seed = seed};
    assert_ok(fcdp__layout_create(specs, n_extents, 2 * node->n, node->n, &group->layout));
    assert_ok(fcdp__host_carve(node->ranks[0].host, group->layout->bytes, &group->offset));
    for (uint32_t r = 0; r < node->n; r++) {
        step(fcdp__host_attach(node->ranks[r].host, group->offset, group->layout->bytes, &group->blocks[r]));
        step(fcdp__region_create(node->ranks[r].tiering, name, group->layout, r, group->blocks[r],
                                 &group->regions[r]));
    }
}

void group_close(group *group) {
    for (uint32_t r = 0; r < group->node->n; r++) {
        fcdp__region_destroy(group->regions[r]);
        fcdp__host_detach(group->blocks[r]);
    }
    fcdp__host_free(group->node->ranks[0].host, group->offset);
    fcdp__layout_destroy(group->layout);
}

void content_make(const group *group, uint32_t s, uint32_t epoch, size_t offset, size_t bytes,
                  uint8_t *bytes_out) {
    uint64_t state = group->seed ^ ((uint64_t)epoch << 32) ^ s, key = random_next(&state);
    for (size_t i = 0; i < bytes; i += 8) { /* a piece's bounds are multiples of 512 */
        uint64_t word = (key + offset + i) * 0x9E3779B97F4A7C15u;
        memcpy(bytes_out + i, &word, 8);
    }
}

/* The test's own copies are retried whole: a gather that failed is gathered again. */
static fcdp_status copy_try(node *node, fcdp_dptr at, uint8_t *host, size_t bytes, bool to_device) {
    fcdp_status status = to_device ? fcdp__driver_copy_h2d(node->drv, at, host, bytes, node->stream)
                                   : fcdp__driver_copy_d2h(node->drv, host, at, bytes, node->stream);
    return status ? status : fcdp__driver_stream_sync(node->drv, node->stream);
}

static void piece_write(group *group, uint32_t r, uint32_t s, uint32_t epoch, fcdp_piece piece) {
    uint8_t *bytes = malloc(piece.bytes);
    assert_non_null(bytes);
    content_make(group, s, epoch, piece.offset_bytes, piece.bytes, bytes);
    step(copy_try(group->node, fcdp__dptr_add(fcdp__region_base(group->regions[r]), piece.offset_bytes),
                  bytes, piece.bytes, true));
    free(bytes);
}

fcdp_region_state state_of(fcdp_region *region) {
    fcdp_region_state state;
    fcdp__region_state(region, &state);
    return state;
}

void span_fill(group *group, uint32_t r, uint32_t span_mask) {
    fcdp_region_state state = state_of(group->regions[r]);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (span_mask & 1u << s && group->layout->span[s].bytes)
            piece_write(group, r, s, state.span[s].epoch + 1, group->layout->span[s]);
    fcdp__region_filled(group->regions[r], span_mask);
}

void slices_arrive(group *group, uint32_t r, uint32_t s, uint32_t epoch) {
    if (!group->layout->span[s].bytes) return;
    for (uint32_t i = 0; i < group->node->n; i++)
        if (i != r) piece_write(group, r, s, epoch, fcdp__layout_slice(group->layout, s, i));
}

void assert_content(group *group, uint32_t r, uint32_t s, uint32_t epoch) {
    fcdp_piece piece = group->layout->span[s];
    if (!piece.bytes) return;
    uint8_t *want = malloc(piece.bytes), *have = calloc(1, piece.bytes);
    assert_true(want && have);
    content_make(group, s, epoch, piece.offset_bytes, piece.bytes, want);
    step(copy_try(group->node, fcdp__dptr_add(fcdp__region_base(group->regions[r]), piece.offset_bytes), have,
                  piece.bytes, false));
    if (memcmp(want, have, piece.bytes))
        fail_msg("rank %u: span %u of '%s' is not epoch %u", r, s, fcdp__region_name(group->regions[r]),
                 epoch);
    free(want);
    free(have);
}
