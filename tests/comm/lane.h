/* lane.h - members of a lane in one process, connected over the loopback. */
#ifndef FCDP_TEST_LANE_H
#define FCDP_TEST_LANE_H

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <string.h>
#include <unistd.h>

#include "comm/sockets.h"
#include "comm/transport.h"
#include "tests/assert_ok.h"

enum { LANE_MOST = 5, LANE_FDS = LANE_MOST * FCDP_N_CHANNELS };
static const uint32_t lane_ranks[LANE_MOST] = {10, 11, 12, 13, 14}; /* no member's index */

static inline struct sockaddr_storage lane_address(bool is_v6) {
    struct sockaddr_storage address = {0};
    const struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    memcpy(&address, is_v6 ? (const void *)&v6 : &v4, is_v6 ? sizeof v6 : sizeof v4);
    return address;
}

/* Has this machine IPv6? */
static inline bool lane_has_v6(void) {
    struct sockaddr_storage address = lane_address(true);
    fcdp_listener *listener;
    bool has = !fcdp__sockets_listen(&address, &listener);
    if (has) fcdp__sockets_close(listener);
    return has;
}

typedef struct lane_caller {
    fcdp_listener *listener;
    fcdp_members members;
    const fcdp_card *cards;
    double limit_s;
    uint32_t n_channels;
    int fds[LANE_FDS];
    fcdp_status status;
    char text[FCDP_TEXT_BYTES];
    pthread_t thread;
} lane_caller;

static inline void *lane_call(void *arg) {
    lane_caller *c = arg;
    c->status = fcdp__sockets_connect(c->listener, &c->members, c->n_channels, c->cards, c->limit_s, c->fds);
    strcpy(c->text, c->status ? fcdp_error_text() : "");
    return NULL;
}

static inline void lane_call_begin(lane_caller *c) {
    assert_int_equal(pthread_create(&c->thread, NULL, lane_call, c), 0);
}

/* Listeners of n members and their cards. */
static inline void lane_listen(uint32_t n, bool is_v6, fcdp_listener **listeners, fcdp_card *cards) {
    struct sockaddr_storage address = lane_address(is_v6);
    for (uint32_t i = 0; i < n; i++) {
        assert_ok(fcdp__sockets_listen(&address, &listeners[i]));
        cards[i] = *fcdp__sockets_card(listeners[i]);
    }
}

/* Connected: fds[i][c * n + k] is member i's connection to k on channel c. */
static inline void lane_make(uint32_t n, uint32_t n_channels, bool is_v6, int fds[LANE_MOST][LANE_FDS]) {
    fcdp_listener *listeners[LANE_MOST];
    fcdp_card cards[LANE_MOST];
    lane_caller callers[LANE_MOST];
    lane_listen(n, is_v6, listeners, cards);
    for (uint32_t i = 0; i < n; i++) {
        callers[i] = (lane_caller){
            listeners[i], {n, i, lane_ranks}, cards, .limit_s = 60, .n_channels = n_channels};
        lane_call_begin(&callers[i]);
    }
    for (uint32_t i = 0; i < n; i++) {
        pthread_join(callers[i].thread, NULL);
        if (callers[i].status) fail_msg("member %u: %s", i, callers[i].text);
        memcpy(fds[i], callers[i].fds, sizeof callers[i].fds);
        fcdp__sockets_close(listeners[i]);
    }
}

/* How many files this process has open. */
static inline int lane_files(void) {
    DIR *folder = opendir("/proc/self/fd");
    int n = 0;
    assert_non_null(folder);
    while (readdir(folder)) n++;
    closedir(folder);
    return n;
}

#endif
