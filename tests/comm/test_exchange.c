/* All-gathers of host memory over TCP: what comes, and how one fails. Where one member alone is looked at,
 * the test has the others' connections in its own hands. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "comm/exchange.h"
#include "tests/comm/lane.h"
#include "tests/comm/random.h"
#include "tests/log_text.h"
#include "tests/under_tsan.h"

enum { LARGE = 64 << 20, BOUNDED = 32 }; /* more than the sockets keep; less than that */
typedef struct header {
    uint64_t number, bytes;
} header;

/* ---- members ---- */

typedef struct runner {
    fcdp_exchange *exchange;
    fcdp_channel on;
    char *buffer;
    size_t bytes;
    fcdp_status status;
    char text[FCDP_TEXT_BYTES];
    atomic_bool has_ended;
    pthread_t thread;
} runner;

static void *run(void *arg) {
    runner *r = arg;
    r->status = fcdp__exchange_run(r->exchange, r->on, r->buffer, r->bytes);
    strcpy(r->text, r->status ? fcdp_error_text() : "");
    r->has_ended = true;
    return NULL;
}

static void run_begin_on(runner *r, fcdp_exchange *exchange, fcdp_channel on, uint32_t n, size_t bytes) {
    *r = (runner){.exchange = exchange, .on = on, .buffer = calloc(n, bytes + 1), .bytes = bytes};
    assert_non_null(r->buffer);
    assert_int_equal(pthread_create(&r->thread, NULL, run, r), 0);
}

static void run_begin(runner *r, fcdp_exchange *exchange, uint32_t n, size_t bytes) {
    run_begin_on(r, exchange, FCDP_CHANNEL_TURN, n, bytes);
}

static void run_end(runner *r, fcdp_status status) {
    pthread_join(r->thread, NULL);
    free(r->buffer);
    if (r->status != status) fail_msg("status %d, not %d: %s", (int)r->status, (int)status, r->text);
}

static fcdp_exchange *exchange_on(uint32_t n, uint32_t n_channels, uint32_t me, const int *fds,
                                  double timeout_s) {
    const fcdp_members members = {n, me, lane_ranks};
    fcdp_exchange *exchange;
    assert_ok(fcdp__exchange_create(&members, n_channels, fds, timeout_s, &exchange));
    return exchange;
}

static fcdp_exchange *exchange_of(uint32_t n, uint32_t me, const int *fds, double timeout_s) {
    return exchange_on(n, 1, me, fds, timeout_s);
}

/* Of n, member 0's exchange; the others' connections to it. */
static fcdp_exchange *first_on(uint32_t n, uint32_t n_channels, double timeout_s,
                               int others_out[FCDP_N_CHANNELS][LANE_MOST]) {
    int fds[LANE_MOST][LANE_FDS];
    lane_make(n, n_channels, false, fds);
    for (uint32_t i = 1; i < n; i++)
        for (uint32_t k = 0; k < n_channels * n; k++) {
            if (k % n == 0)
                others_out[k / n][i] = fds[i][k];
            else if (k % n != i)
                close(fds[i][k]);
        }
    return exchange_on(n, n_channels, 0, fds[0], timeout_s);
}

static fcdp_exchange *first_of(uint32_t n, double timeout_s, int others_out[LANE_MOST]) {
    int others[FCDP_N_CHANNELS][LANE_MOST];
    fcdp_exchange *exchange = first_on(n, 1, timeout_s, others);
    memcpy(others_out, others[0], sizeof others[0]);
    return exchange;
}

static void readable_wait(int fd) {
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    assert_int_equal(poll(&polled, 1, 60 * 1000), 1);
}

/* How many bytes come before the end; a connection that is reset ends too. */
static size_t until_end(int fd) {
    static char buffer[1 << 16];
    size_t n = 0;
    for (;;) {
        readable_wait(fd);
        ssize_t got = read(fd, buffer, sizeof buffer);
        if (got <= 0) return n;
        n += (size_t)got;
    }
}

static void message_send(int fd, uint64_t number, uint64_t bytes, size_t n) {
    static const char zeros[BOUNDED];
    const header head = {number, bytes};
    assert_int_equal(send(fd, &head, sizeof head, MSG_NOSIGNAL), sizeof head);
    assert_int_equal(send(fd, zeros, n, MSG_NOSIGNAL), n);
}

/* ---- what comes ---- */

/* A member's thread on a channel. */
typedef struct party {
    fcdp_exchange *exchange;
    fcdp_channel on;
    uint32_t n, me;
    uint64_t seed;
    char *said; /* NULL: all came */
    pthread_t thread;
} party;

/* A member: it ends as soon as it has all, whatever the others still read. */
typedef struct house {
    party parties[FCDP_N_CHANNELS];
    pthread_t thread;
} house;

static size_t size_choose(test_random *random) {
    static const size_t most[] = {1, 2, 20, 5000, 200000, 1 << 20};
    return random_below(random, (uint32_t)most[random_below(random, 6)] + 1);
}

static uint8_t content(uint64_t seed, uint32_t member, size_t i) {
    return (uint8_t)(seed + member * 37 + i * 7 + (i >> 12));
}

static void *party_main(void *arg) {
    party *p = arg;
    test_random random = {p->seed};
    for (uint64_t round = 0; round < 6 && !p->said; round++) {
        uint64_t seed = round + (uint64_t)p->on * 101;
        size_t bytes = size_choose(&random);
        uint8_t *all = malloc(p->n * bytes + 1);
        for (size_t i = 0; i < bytes; i++) all[p->me * bytes + i] = content(seed, p->me, i);
        if (fcdp__exchange_run(p->exchange, p->on, all, bytes)) p->said = strdup(fcdp_error_text());
        for (uint32_t m = 0; m < p->n && !p->said; m++)
            for (size_t i = 0; i < bytes && !p->said; i++)
                if (all[m * bytes + i] != content(seed, m, i)) p->said = strdup("other bytes");
        free(all);
    }
    return NULL;
}

static void *house_main(void *arg) {
    house *h = arg;
    for (uint32_t k = 1; k < FCDP_N_CHANNELS; k++)
        if (pthread_create(&h->parties[k].thread, NULL, party_main, &h->parties[k])) abort();
    party_main(&h->parties[0]);
    for (uint32_t k = 1; k < FCDP_N_CHANNELS; k++) pthread_join(h->parties[k].thread, NULL);
    fcdp__exchange_destroy(h->parties[0].exchange);
    return NULL;
}

static void members_hold_all(void **state) {
    (void)state;
    uint64_t seed = random_seed("members_hold_all", 1);
    int files = lane_files();
    for (int v6 = 0; v6 <= lane_has_v6(); v6++)
        for (uint32_t n = 2; n <= LANE_MOST; n++) {
            int fds[LANE_MOST][LANE_FDS];
            house houses[LANE_MOST];
            lane_make(n, FCDP_N_CHANNELS, v6, fds);
            for (uint32_t i = 0; i < n; i++) {
                fcdp_exchange *exchange = exchange_on(n, FCDP_N_CHANNELS, i, fds[i], 60);
                for (uint32_t k = 0; k < FCDP_N_CHANNELS; k++)
                    houses[i].parties[k] = (party){exchange, k, n, i, .seed = seed + n + 1000 * k};
            }
            for (uint32_t i = 0; i < n; i++)
                assert_int_equal(pthread_create(&houses[i].thread, NULL, house_main, &houses[i]), 0);
            for (uint32_t i = 0; i < n; i++) pthread_join(houses[i].thread, NULL);
            for (uint32_t i = 0; i < n * FCDP_N_CHANNELS; i++) {
                const party *p = &houses[i % n].parties[i / n];
                if (p->said) fail_msg("%u members, member %u, channel %u: %s", n, p->me, p->on, p->said);
            }
            assert_int_equal(lane_files(), files);
        }
}

/* The last bytes are there for a member that comes to read them later. */
static void a_member_that_ends_has_sent_all(void **state) {
    (void)state;
    int others[LANE_MOST];
    char buffer[2 * BOUNDED] = {0};
    fcdp_exchange *exchange = first_of(2, 60, others);
    message_send(others[1], 1, BOUNDED, BOUNDED);
    assert_ok(fcdp__exchange_run(exchange, FCDP_CHANNEL_TURN, buffer, BOUNDED));
    fcdp__exchange_destroy(exchange);
    assert_int_equal(until_end(others[1]), sizeof(header) + BOUNDED);
    close(others[1]);
}

/* But not for ever, and not for one connection after the other. */
static void the_last_bytes_of_all_are_waited_for_together(void **state) {
    (void)state;
    enum { KEPT = 64 << 10, LINGER_S = 2 }; /* more than the other end takes */
    static char sent[KEPT], buffer[2 * KEPT];
    int fds[LANE_MOST][LANE_FDS], small = 1, large = 4 * KEPT;
    lane_make(2, FCDP_N_CHANNELS, false, fds);
    for (uint32_t k = 0; k < FCDP_N_CHANNELS; k++) {
        int own = fds[0][2 * k + 1], other = fds[1][2 * k];
        const header head = {1, KEPT};
        setsockopt(other, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
        setsockopt(other, SOL_SOCKET, SO_SNDBUF, &large, sizeof large);
        setsockopt(own, SOL_SOCKET, SO_SNDBUF, &large, sizeof large);
        assert_int_equal(send(other, &head, sizeof head, MSG_NOSIGNAL), sizeof head);
        assert_int_equal(send(other, sent, sizeof sent, MSG_NOSIGNAL), sizeof sent);
    }
    fcdp_exchange *exchange = exchange_on(2, FCDP_N_CHANNELS, 0, fds[0], 60);
    for (uint32_t k = 0; k < FCDP_N_CHANNELS; k++) assert_ok(fcdp__exchange_run(exchange, k, buffer, KEPT));
    uint64_t start_ns = fcdp__now_ns();
    fcdp__exchange_destroy(exchange);
    double took_s = (double)(fcdp__now_ns() - start_ns) / 1e9;
    if (took_s < LINGER_S - 0.1 || took_s > FCDP_N_CHANNELS * LINGER_S - 0.5) fail_msg("%g s", took_s);
    for (uint32_t k = 0; k < FCDP_N_CHANNELS; k++) close(fds[1][2 * k]);
}

/* And what it had sent is an exchange, though it has ended by the time that it is wanted. */
static void a_member_that_ended_is_missed_at_the_next_exchange(void **state) {
    (void)state;
    int others[LANE_MOST];
    char buffer[2 * BOUNDED] = {0};
    fcdp_exchange *exchange = first_of(2, 60, others);
    message_send(others[1], 1, BOUNDED, BOUNDED);
    shutdown(others[1], SHUT_WR);
    assert_ok(fcdp__exchange_run(exchange, FCDP_CHANNEL_TURN, buffer, BOUNDED));
    assert_ok(fcdp__exchange_check(exchange));
    assert_int_equal(fcdp__exchange_run(exchange, FCDP_CHANNEL_TURN, buffer, BOUNDED), FCDP_ERR_PEER);
    assert_says(fcdp_error_text(), "exchange 2, of 32 bytes of each of 2 ranks: rank 11 has left");
    fcdp__exchange_destroy(exchange);
    close(others[1]);
}

static atomic_int n_signals;
static void signal_count(int number) {
    (void)number;
    n_signals++;
}

/* Not by a signal either. */
static void a_signal_ends_no_exchange(void **state) {
    (void)state;
#ifdef UNDER_TSAN
    print_message("a thread's first signal may leave all signals blocked in it under gcc's TSan\n");
    skip();
#endif
    const struct sigaction counts = {.sa_handler = signal_count};
    struct sigaction before;
    int others[LANE_MOST];
    runner r;
    sigaction(SIGUSR1, &counts, &before);
    fcdp_exchange *exchange = first_of(2, 60, others);
    run_begin(&r, exchange, 2, BOUNDED);
    readable_wait(others[1]); /* it waits, or is about to */
    for (int i = 1; i <= 100; i++) {
        pthread_kill(r.thread, SIGUSR1);
        while (n_signals < i) sched_yield();
    }
    message_send(others[1], 1, BOUNDED, BOUNDED);
    run_end(&r, FCDP_OK);
    fcdp__exchange_destroy(exchange);
    close(others[1]);
    sigaction(SIGUSR1, &before, NULL);
}

/* ---- members that do not come ---- */

static void a_member_that_is_killed_is_named_at_once(void **state) {
    (void)state;
    static const size_t sizes[] = {BOUNDED, LARGE};
    for (size_t i = 0; i < 2; i++) {
        int others[LANE_MOST];
        runner r;
        fcdp_exchange *exchange = first_of(3, 600, others);
        message_send(others[1], 1, sizes[i], sizes[i] == BOUNDED ? BOUNDED : 0);
        pid_t child = fork();
        if (!child) {
            message_send(others[2], 1, sizes[i], BOUNDED / 2);
            raise(SIGKILL);
        }
        close(others[2]); /* the child alone has it; it has the first member's too, but reads none of it */
        run_begin(&r, exchange, 3, sizes[i]);
        run_end(&r, FCDP_ERR_PEER);
        assert_says(r.text, "rank 12 has left");
        fcdp__exchange_destroy(exchange);
        close(others[1]);
        waitpid(child, NULL, 0);
    }
}

/* It has sent all of its own, takes nothing more, and lives on. */
static void a_member_that_aborts_while_it_is_sent_to_is_named_at_once(void **state) {
    (void)state;
    int fds[LANE_MOST][LANE_FDS];
    runner r[2];
    lane_make(2, 1, false, fds);
    fcdp_exchange *first = exchange_of(2, 0, fds[0], 600), *second = exchange_of(2, 1, fds[1], 600);
    int buffer = 4096; /* so that it is the sender whom the full window stops */
    setsockopt(fds[1][0], SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);
    run_begin(&r[0], first, 2, LARGE);
    readable_wait(fds[1][0]);
    fcdp__exchange_abort(second, "the second has failed");
    run_end(&r[0], FCDP_ERR_PEER);
    assert_says(r[0].text, "rank 11 has left");
    assert_int_equal(fcdp__exchange_check(first), FCDP_ERR_PEER);
    fcdp__exchange_destroy(first);
    fcdp__exchange_destroy(second);
}

/* Its window is closed and it has sent all: nothing of its end can come but that. */
static void a_member_that_takes_no_more_is_named_at_once(void **state) {
    (void)state;
    int others[LANE_MOST];
    static char rest[LARGE];
    runner r;
    fcdp_exchange *exchange = first_of(2, 600, others);
    run_begin(&r, exchange, 2, LARGE);
    const header head = {1, LARGE};
    assert_int_equal(send(others[1], &head, sizeof head, MSG_NOSIGNAL), sizeof head);
    for (size_t at = 0; at < LARGE;) { /* as its connection does not block */
        struct pollfd polled = {.fd = others[1], .events = POLLOUT};
        assert_int_equal(poll(&polled, 1, -1), 1);
        ssize_t sent = send(others[1], rest + at, LARGE - at, MSG_NOSIGNAL);
        assert_true(sent > 0);
        at += (size_t)sent;
    }
    shutdown(others[1], SHUT_RDWR);
    run_end(&r, FCDP_ERR_PEER);
    assert_says(r.text, "rank 11 has left");
    fcdp__exchange_destroy(exchange);
    close(others[1]);
}

static void a_member_that_stalls_is_named_after_the_timeout(void **state) {
    (void)state;
    int others[LANE_MOST];
    runner r;
    fcdp_exchange *exchange = first_of(4, 0.2, others);
    message_send(others[1], 1, BOUNDED, BOUNDED);
    message_send(others[2], 1, BOUNDED, BOUNDED / 2);
    run_begin(&r, exchange, 4, BOUNDED);
    run_end(&r, FCDP_ERR_TIMEOUT);
    assert_says(r.text, "rank 12, rank 13 sent and took nothing for 0.2 s (FCDP_TIMEOUT)");
    assert_null(strstr(r.text, "rank 11"));
    for (uint32_t i = 1; i < 4; i++) { /* who learn of it */
        assert_int_equal(until_end(others[i]), sizeof(header) + BOUNDED);
        close(others[i]);
    }
    fcdp__exchange_destroy(exchange);
}

static void a_member_that_takes_nothing_is_named_after_the_timeout(void **state) {
    (void)state;
    int fds[LANE_MOST][LANE_FDS];
    runner r;
    lane_make(2, 1, false, fds);
    fcdp_exchange *exchange = exchange_of(2, 0, fds[0], 0.2);
    run_begin(&r, exchange, 2, LARGE);
    run_end(&r, FCDP_ERR_TIMEOUT);
    assert_says(r.text, "rank 11 sent and took nothing for 0.2 s (FCDP_TIMEOUT)");
    fcdp__exchange_destroy(exchange);
    close(fds[1][0]);
}

static void members_at_other_exchanges_find_out(void **state) {
    (void)state;
    int fds[LANE_MOST][LANE_FDS];
    runner r[2];
    char text[80];
    lane_make(2, 1, false, fds);
    fcdp_exchange *exchanges[] = {exchange_of(2, 0, fds[0], 600), exchange_of(2, 1, fds[1], 600)};
    for (uint32_t i = 0; i < 2; i++) run_begin(&r[i], exchanges[i], 2, 8 + i);
    unsigned n_found = 0;
    for (uint32_t i = 0; i < 2; i++) {
        run_end(&r[i], FCDP_ERR_PEER); /* the second one may see the first one's end alone */
        snprintf(text, sizeof text, "rank %u is at exchange 1, of %u bytes", 11 - i, 9 - i);
        n_found += strstr(r[i].text, text) != NULL;
        fcdp__exchange_destroy(exchanges[i]);
    }
    assert_true(n_found > 0);
    fcdp_exchange *exchange = first_of(2, 600, fds[1]);
    message_send(fds[1][1], 2, BOUNDED, BOUNDED);
    char buffer[2 * BOUNDED] = {0};
    assert_int_equal(fcdp__exchange_run(exchange, FCDP_CHANNEL_TURN, buffer, BOUNDED), FCDP_ERR_PEER);
    assert_says(fcdp_error_text(),
                "exchange 1, of 32 bytes of each of 2 ranks: rank 11 is at exchange 2, of 32 bytes");
    fcdp__exchange_destroy(exchange);
    close(fds[1][1]);
}

/* ---- a failure ---- */

static bool says_missing(fcdp_exchange *exchange, const char *wanted) {
    char text[64];
    bool any = fcdp__exchange_missing(exchange, text, sizeof text);
    return any == (*wanted != 0) && !strcmp(text, wanted);
}

static void missing_await(fcdp_exchange *exchange, const char *wanted) {
    uint64_t until_ns = fcdp__now_ns() + 60 * 1000000000ull;
    while (!says_missing(exchange, wanted) && fcdp__now_ns() < until_ns) sched_yield();
    assert_true(says_missing(exchange, wanted));
}

static void failure_count(void *arg) {
    ++*(int *)arg;
}

static void an_abort_ends_an_exchange_and_all_later_ones(void **state) {
    (void)state;
    int others[LANE_MOST], n_told = 0, files = lane_files();
    char text[64], buffer[3 * BOUNDED] = {0};
    runner r;
    fcdp_exchange *exchange = first_of(3, 600, others);
    fcdp__exchange_on_failure(exchange, failure_count, &n_told);
    assert_false(fcdp__exchange_missing(exchange, text, sizeof text));
    message_send(others[1], 1, BOUNDED, BOUNDED);
    run_begin(&r, exchange, 3, BOUNDED);
    readable_wait(others[2]);
    while (!fcdp__exchange_missing(exchange, text, sizeof text) || strstr(text, "11")) sched_yield();
    assert_string_equal(text, "rank 12");
    assert_int_equal(n_told, 0);
    fcdp__exchange_abort(exchange, "the device has failed");
    run_end(&r, FCDP_ERR_TRANSPORT);
    assert_string_equal(r.text, "the device has failed");
    fcdp__exchange_abort(exchange, "again");
    assert_int_equal(n_told, 1);
    assert_int_equal(fcdp__exchange_run(exchange, FCDP_CHANNEL_TURN, buffer, BOUNDED), FCDP_ERR_TRANSPORT);
    assert_int_equal(fcdp__exchange_check(exchange), FCDP_ERR_TRANSPORT);
    assert_string_equal(fcdp_error_text(), "the device has failed");
    for (uint32_t i = 1; i < 3; i++) {
        until_end(others[i]);
        close(others[i]);
    }
    fcdp__exchange_destroy(exchange);
    assert_int_equal(lane_files(), files);
}

/* ---- channels ---- */

static void a_channel_goes_on_while_another_one_waits(void **state) {
    (void)state;
    for (uint32_t slow = 0; slow < FCDP_N_CHANNELS; slow++) {
        int others[FCDP_N_CHANNELS][LANE_MOST];
        char buffer[2 * BOUNDED] = {0};
        runner r;
        fcdp_exchange *exchange = first_on(2, FCDP_N_CHANNELS, 600, others);
        run_begin_on(&r, exchange, slow, 2, BOUNDED);
        readable_wait(others[slow][1]);
        for (uint64_t number = 1; number <= 3; number++)
            for (uint32_t k = 0; k < FCDP_N_CHANNELS; k++) {
                if (k == slow) continue;
                message_send(others[k][1], number, BOUNDED, BOUNDED);
                assert_ok(fcdp__exchange_run(exchange, k, buffer, BOUNDED));
            }
        assert_true(says_missing(exchange, "rank 11"));
        message_send(others[slow][1], 1, BOUNDED, BOUNDED);
        run_end(&r, FCDP_OK);
        assert_true(says_missing(exchange, ""));
        fcdp__exchange_destroy(exchange);
        for (uint32_t k = 0; k < FCDP_N_CHANNELS; k++) close(others[k][1]);
    }
}

/* And a failure names those that the exchange itself lacks. */
static void a_member_that_is_behind_on_any_channel_is_missing(void **state) {
    (void)state;
    for (uint32_t one = 0; one < FCDP_N_CHANNELS; one++) {
        uint32_t other = (one + 1) % FCDP_N_CHANNELS;
        int others[FCDP_N_CHANNELS][LANE_MOST];
        runner r[2];
        fcdp_exchange *exchange = first_on(5, FCDP_N_CHANNELS, 600, others);
        message_send(others[one][1], 1, BOUNDED, BOUNDED);
        message_send(others[other][1], 1, BOUNDED, BOUNDED);
        run_begin_on(&r[0], exchange, one, 5, BOUNDED);
        readable_wait(others[one][4]); /* the last one that it sends to: nobody is added from here on */
        missing_await(exchange, "rank 12, rank 13, rank 14");
        message_send(others[one][3], 1, BOUNDED, BOUNDED);
        missing_await(exchange, "rank 12, rank 14"); /* the other channel has none under way */
        message_send(others[other][2], 1, BOUNDED, BOUNDED);
        run_begin_on(&r[1], exchange, other, 5, BOUNDED);
        readable_wait(others[other][4]);
        missing_await(exchange, "rank 12, rank 13, rank 14");
        message_send(others[one][2], 1, BOUNDED, BOUNDED);
        message_send(others[other][3], 1, BOUNDED, BOUNDED);
        missing_await(exchange, "rank 14");
        message_send(others[one][4], 1, BOUNDED, BOUNDED);
        run_end(&r[0], FCDP_OK);
        assert_true(says_missing(exchange, "rank 14"));
        run_begin_on(&r[0], exchange, one, 5, BOUNDED);
        missing_await(exchange, "rank 11, rank 12, rank 13, rank 14");
        shutdown(others[other][4], SHUT_RDWR);
        for (uint32_t i = 0; i < 2; i++) {
            run_end(&r[i], FCDP_ERR_PEER);
            assert_string_equal(r[i].text, "exchange 1, of 32 bytes of each of 5 ranks: rank 14 has left; "
                                           "this rank lacks the bytes of rank 14");
        }
        fcdp__exchange_destroy(exchange);
        for (uint32_t i = 1; i < 5; i++)
            for (uint32_t k = 0; k < FCDP_N_CHANNELS; k++) close(others[k][i]);
    }
}

enum { BY_END, BY_TIMEOUT, BY_ABORT, N_WAYS };

/* Every member of the others moves on, on the other channels: a byte now and then until this one ends. */
static void trickle(const runner *failing, int others[FCDP_N_CHANNELS][LANE_MOST]) {
    struct pollfd end = {.fd = others[failing->on][1], .events = POLLRDHUP};
    for (size_t i = 0; i < BOUNDED && !failing->has_ended; i++) {
        for (uint32_t k = 0; k < FCDP_N_CHANNELS; k++)
            for (uint32_t m = 1; m < 3 && k != failing->on; m++) send(others[k][m], "", 1, MSG_NOSIGNAL);
        poll(&end, 1, 50);
    }
}

static void channels_fail(uint32_t failing, int way) {
    static const fcdp_status statuses[N_WAYS] = {FCDP_ERR_PEER, FCDP_ERR_TIMEOUT, FCDP_ERR_TRANSPORT};
    int others[FCDP_N_CHANNELS][LANE_MOST], n_told = 0;
    char text[FCDP_TEXT_BYTES], buffer[3 * BOUNDED] = {0};
    runner r[FCDP_N_CHANNELS];
    fcdp_exchange *exchange = first_on(3, FCDP_N_CHANNELS, way == BY_TIMEOUT ? 0.5 : 600, others);
    fcdp__exchange_on_failure(exchange, failure_count, &n_told);
    for (uint32_t i = 0; i < FCDP_N_CHANNELS; i++) { /* the one that fails first, so that it is the oldest */
        uint32_t k = (failing + i) % FCDP_N_CHANNELS;
        if (k != failing)
            for (uint32_t m = 1; m < 3; m++) message_send(others[k][m], 1, BOUNDED + k, 0);
        run_begin_on(&r[k], exchange, k, 3, BOUNDED + k);
        for (uint32_t m = 1; m < 3; m++) readable_wait(others[k][m]);
    }
    if (way == BY_END) shutdown(others[failing][1], SHUT_RDWR);
    if (way == BY_TIMEOUT) trickle(&r[failing], others);
    if (way == BY_ABORT) fcdp__exchange_abort(exchange, "the device has failed");
    snprintf(text, sizeof text,
             "exchange 1, of %u bytes of each of 3 ranks: %s; this rank lacks the bytes of rank 11, rank 12",
             BOUNDED + failing,
             way == BY_END ? "rank 11 has left"
                           : "rank 11, rank 12 sent and took nothing for 0.5 s (FCDP_TIMEOUT)");
    if (way == BY_ABORT) strcpy(text, "the device has failed");
    for (uint32_t k = 0; k < FCDP_N_CHANNELS; k++) {
        run_end(&r[k], statuses[way]);
        assert_string_equal(r[k].text, text);
        assert_int_equal(fcdp__exchange_run(exchange, k, buffer, BOUNDED), statuses[way]);
        assert_string_equal(fcdp_error_text(), text);
    }
    assert_int_equal(n_told, 1);
    for (uint32_t k = 0; k < FCDP_N_CHANNELS; k++)
        for (uint32_t m = 1; m < 3; m++) { /* who learn of it on all channels */
            until_end(others[k][m]);
            close(others[k][m]);
        }
    fcdp__exchange_destroy(exchange);
}

static void a_failure_on_a_channel_ends_the_exchanges_of_all(void **state) {
    (void)state;
    int files = lane_files();
    for (uint32_t failing = 0; failing < FCDP_N_CHANNELS; failing++)
        for (int way = 0; way < N_WAYS; way++) {
            channels_fail(failing, way);
            assert_int_equal(lane_files(), files);
        }
}

/* The text may be the thread's own. */
static void an_abort_says_what_the_thread_has_failed_with(void **state) {
    (void)state;
    int others[LANE_MOST];
    fcdp_exchange *exchange = first_of(2, 600, others);
    (void)!fcdp__fail(FCDP_ERR_DRIVER, "no such device");
    fcdp__exchange_abort(exchange, fcdp_error_text());
    assert_int_equal(fcdp__exchange_check(exchange), FCDP_ERR_TRANSPORT);
    assert_string_equal(fcdp_error_text(), "no such device");
    fcdp__exchange_destroy(exchange);
    close(others[1]);
}

/* A child that a fork has left ends nothing of its parent's. */
static void a_forked_child_ends_no_connection(void **state) {
    (void)state;
    int others[LANE_MOST];
    char buffer[2 * BOUNDED] = {0};
    fcdp_exchange *exchange = first_of(2, 600, others);
    pid_t child = fork();
    if (!child) {
        fcdp__exchange_destroy(exchange);
        _exit(0);
    }
    waitpid(child, NULL, 0);
    message_send(others[1], 1, BOUNDED, BOUNDED);
    assert_ok(fcdp__exchange_run(exchange, FCDP_CHANNEL_TURN, buffer, BOUNDED));
    fcdp__exchange_destroy(exchange);
    close(others[1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(members_hold_all),
        cmocka_unit_test(a_member_that_ends_has_sent_all),
        cmocka_unit_test(the_last_bytes_of_all_are_waited_for_together),
        cmocka_unit_test(a_member_that_ended_is_missed_at_the_next_exchange),
        cmocka_unit_test(a_signal_ends_no_exchange),
        cmocka_unit_test(a_member_that_is_killed_is_named_at_once),
        cmocka_unit_test(a_member_that_aborts_while_it_is_sent_to_is_named_at_once),
        cmocka_unit_test(a_member_that_takes_no_more_is_named_at_once),
        cmocka_unit_test(a_member_that_stalls_is_named_after_the_timeout),
        cmocka_unit_test(a_member_that_takes_nothing_is_named_after_the_timeout),
        cmocka_unit_test(members_at_other_exchanges_find_out),
        cmocka_unit_test(an_abort_ends_an_exchange_and_all_later_ones),
        cmocka_unit_test(a_channel_goes_on_while_another_one_waits),
        cmocka_unit_test(a_member_that_is_behind_on_any_channel_is_missing),
        cmocka_unit_test(a_failure_on_a_channel_ends_the_exchanges_of_all),
        cmocka_unit_test(an_abort_says_what_the_thread_has_failed_with),
        cmocka_unit_test(a_forked_child_ends_no_connection),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
