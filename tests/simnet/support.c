/* support.c - making and unmaking the ranks. */
#include "tests/simnet/support.h"

static void rank_make(net *net, uint32_t i) {
    rank *rank = &net->ranks[i];
    assert_ok(simnet_attach(net->fabric, i, net->drv, &rank->endpoint));
    for (int s = 0; s < STREAMS; s++) assert_ok(fcdp__driver_stream_create(net->drv, &rank->streams[s]));
    assert_ok(fcdp__driver_range_reserve(net->drv, MEMORY_BYTES, &rank->memory));
    for (size_t p = 0; p < MEMORY_BYTES / PAGE_BYTES; p++) {
        assert_ok(fcdp__driver_phys_create(net->drv, PAGE_BYTES, &rank->pages[p]));
        assert_ok(fcdp__driver_map(net->drv, fcdp__dptr_add(rank->memory, p * PAGE_BYTES), PAGE_BYTES,
                                   rank->pages[p]));
    }
    assert_ok(fcdp__driver_set_access(net->drv, rank->memory, MEMORY_BYTES));
    rank->bytes = (uint8_t *)(uintptr_t)rank->memory.addr;
}

net *net_create(simnet_config config) {
    net *net = calloc(1, sizeof *net);
    net->drv = driver_open_sim();
    net->nodes = config.nodes;
    net->ranks_per_node = config.ranks_per_node;
    net->n = config.nodes * config.ranks_per_node;
    assert_ok(simnet_create(&config, &net->fabric));
    for (uint32_t i = 0; i < net->n; i++) rank_make(net, i);
    return net;
}

net *net_make(uint32_t nodes, uint32_t ranks_per_node) {
    return net_create((simnet_config){
        .nodes = nodes, .ranks_per_node = ranks_per_node, .staging_bytes = 64 << 10, .timeout_s = 60});
}

void sync_all(net *net) {
    assert_ok(fcdp__driver_sync(net->drv));
}

void net_destroy(net *net) {
    sync_all(net);
    for (uint32_t i = 0; i < net->n; i++) {
        rank *rank = &net->ranks[i];
        simnet_detach(rank->endpoint);
        for (int s = 0; s < STREAMS; s++) fcdp__driver_stream_destroy(net->drv, rank->streams[s]);
        assert_ok(fcdp__driver_unmap(net->drv, rank->memory, MEMORY_BYTES));
        for (size_t p = 0; p < MEMORY_BYTES / PAGE_BYTES; p++)
            assert_ok(fcdp__driver_phys_release(net->drv, rank->pages[p]));
        assert_ok(fcdp__driver_range_free(net->drv, rank->memory, MEMORY_BYTES));
    }
    simnet_close(net->fabric);
    assert_nothing_lives();
    fcdp__driver_close(net->drv);
    free(net);
}

simnet_comm *comm_of(net *net, uint32_t rank, simnet_lane lane, uint32_t id) {
    simnet_comm *comm = simnet_comm_get(net->ranks[rank].endpoint, lane, id);
    assert_non_null(comm);
    return comm;
}

void assert_all_ok(net *net) {
    char text[512];
    for (uint32_t i = 0; i < net->n; i++)
        if (simnet_status(net->ranks[i].endpoint, text, sizeof text)) fail_msg("rank %u: %s", i, text);
}

void assert_failed(net *net, uint32_t rank, fcdp_status status, const char *part) {
    char text[512];
    fcdp_status now = simnet_status(net->ranks[rank].endpoint, text, sizeof text);
    if (now != status || !strstr(text, part))
        fail_msg("rank %u: status %d with \"%s\", expected %d with \"%s\"", rank, now, text, status, part);
}
