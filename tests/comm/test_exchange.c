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
    char *buffer;
    size_t bytes;
    fcdp_status status;
    char text[FCDP_TEXT_BYTES];
    pthread_t thread;
} runner;

static void *run(void *arg) {
    runner *r = arg;
    r->status = fcdp__exchange_run(r->exchange, r->buffer, r->bytes);
    strcpy(r->text, r->status ? fcdp_error_text() : "");
    return NULL;
}

static void run_begin(runner *r, fcdp_exchange *exchange, uint32_t n, size_t bytes) {
    *r = (runner){.exchange = exchange, .buffer = calloc(n, bytes + 1), .bytes = bytes};
    assert_non_null(r->buffer);
    assert_int_equal(pthread_create(&r->thread, NULL, run, r), 0);
}

static void run_end(runner *r, fcdp_status status) {
    pthread_join(r->thread, NULL);
    free(r->buffer);
    if (r->status != status) fail_msg("status %d, not %d: %s", (int)r->status, (int)status, r->text);
}

static fcdp_exchange *exchange_of(uint32_t n, uint32_t me, const int *fds, double timeout_s) {
    const fcdp_members members = {n, me, lane_ranks};
    fcdp_exchange *exchange;
    assert_ok(fcdp__exchange_create(&members, fds, timeout_s, &exchange));
    return exchange;
}

/* Of n, member 0's exchange; the others' connections to it. */
static fcdp_exchange *first_of(uint32_t n, double timeout_s, int others_out[LANE_MOST]) {
    int fds[LANE_MOST][LANE_MOST];
    lane_make(n, false, fds);
    for (uint32_t i = 1; i < n; i++) {
        others_out[i] = fds[i][0];
        for (uint32_t k = 1; k < n; k++)
            if (k != i) close(fds[i][k]);
    }
    return exchange_of(n, 0, fds[0], timeout_s);
}

static void readable_wait(int fd) {
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    assert_int_equal(poll(&polled, 1, -1), 1);
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

typedef struct party {
    uint32_t n, me;
    int *fds;
    uint64_t seed;
    char *said; /* NULL: all came */
    pthread_t thread;
} party;

static size_t size_choose(test_random *random) {
    static const size_t most[] = {1, 2, 20, 5000, 200000, 1 << 20};
    return random_below(random, (uint32_t)most[random_below(random, 6)] + 1);
}

static uint8_t content(uint64_t seed, uint32_t member, size_t i) {
    return (uint8_t)(seed + member * 37 + i * 7 + (i >> 12));
}

/* It ends as soon as it has all, whatever the others still read. */
static void *party_main(void *arg) {
    party *p = arg;
    test_random random = {p->seed};
    const fcdp_members members = {p->n, p->me, lane_ranks};
    fcdp_exchange *exchange;
    if (fcdp__exchange_create(&members, p->fds, 60, &exchange))
        return p->said = strdup(fcdp_error_text()), NULL;
    for (uint64_t round = 0; round < 20 && !p->said; round++) {
        size_t bytes = size_choose(&random);
        uint8_t *all = malloc(p->n * bytes + 1);
        for (size_t i = 0; i < bytes; i++) all[p->me * bytes + i] = content(round, p->me, i);
        if (fcdp__exchange_run(exchange, all, bytes)) p->said = strdup(fcdp_error_text());
        for (uint32_t m = 0; m < p->n && !p->said; m++)
            for (size_t i = 0; i < bytes && !p->said; i++)
                if (all[m * bytes + i] != content(round, m, i)) p->said = strdup("other bytes");
        free(all);
    }
    fcdp__exchange_destroy(exchange);
    return NULL;
}

static void members_hold_all(void **state) {
    (void)state;
    uint64_t seed = random_seed("members_hold_all", 1);
    int files = lane_files();
    for (int v6 = 0; v6 <= lane_has_v6(); v6++)
        for (uint32_t n = 2; n <= LANE_MOST; n++) {
            int fds[LANE_MOST][LANE_MOST];
            party parties[LANE_MOST];
            lane_make(n, v6, fds);
            for (uint32_t i = 0; i < n; i++) {
                parties[i] = (party){.n = n, .me = i, .fds = fds[i], .seed = seed + n};
                assert_int_equal(pthread_create(&parties[i].thread, NULL, party_main, &parties[i]), 0);
            }
            for (uint32_t i = 0; i < n; i++) {
                pthread_join(parties[i].thread, NULL);
                if (parties[i].said) fail_msg("%u members, member %u: %s", n, i, parties[i].said);
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
    assert_ok(fcdp__exchange_run(exchange, buffer, BOUNDED));
    fcdp__exchange_destroy(exchange);
    assert_int_equal(until_end(others[1]), sizeof(header) + BOUNDED);
    close(others[1]);
}

/* And what it had sent is an exchange, though it has ended by the time that it is wanted. */
static void a_member_that_ended_is_missed_at_the_next_exchange(void **state) {
    (void)state;
    int others[LANE_MOST];
    char buffer[2 * BOUNDED] = {0};
    fcdp_exchange *exchange = first_of(2, 60, others);
    message_send(others[1], 1, BOUNDED, BOUNDED);
    shutdown(others[1], SHUT_WR);
    assert_ok(fcdp__exchange_run(exchange, buffer, BOUNDED));
    assert_ok(fcdp__exchange_check(exchange));
    assert_int_equal(fcdp__exchange_run(exchange, buffer, BOUNDED), FCDP_ERR_PEER);
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
    int fds[LANE_MOST][LANE_MOST];
    runner r[2];
    lane_make(2, false, fds);
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
    int fds[LANE_MOST][LANE_MOST];
    runner r;
    lane_make(2, false, fds);
    fcdp_exchange *exchange = exchange_of(2, 0, fds[0], 0.2);
    run_begin(&r, exchange, 2, LARGE);
    run_end(&r, FCDP_ERR_TIMEOUT);
    assert_says(r.text, "rank 11 sent and took nothing for 0.2 s (FCDP_TIMEOUT)");
    fcdp__exchange_destroy(exchange);
    close(fds[1][0]);
}

static void members_at_other_exchanges_find_out(void **state) {
    (void)state;
    int fds[LANE_MOST][LANE_MOST];
    runner r[2];
    char text[80];
    lane_make(2, false, fds);
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
    assert_int_equal(fcdp__exchange_run(exchange, buffer, BOUNDED), FCDP_ERR_PEER);
    assert_says(fcdp_error_text(),
                "exchange 1, of 32 bytes of each of 2 ranks: rank 11 is at exchange 2, of 32 bytes");
    fcdp__exchange_destroy(exchange);
    close(fds[1][1]);
}

/* ---- a failure ---- */

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
    assert_int_equal(fcdp__exchange_run(exchange, buffer, BOUNDED), FCDP_ERR_TRANSPORT);
    assert_int_equal(fcdp__exchange_check(exchange), FCDP_ERR_TRANSPORT);
    assert_string_equal(fcdp_error_text(), "the device has failed");
    for (uint32_t i = 1; i < 3; i++) {
        until_end(others[i]);
        close(others[i]);
    }
    fcdp__exchange_destroy(exchange);
    assert_int_equal(lane_files(), files);
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
    assert_ok(fcdp__exchange_run(exchange, buffer, BOUNDED));
    fcdp__exchange_destroy(exchange);
    close(others[1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(members_hold_all),
        cmocka_unit_test(a_member_that_ends_has_sent_all),
        cmocka_unit_test(a_member_that_ended_is_missed_at_the_next_exchange),
        cmocka_unit_test(a_signal_ends_no_exchange),
        cmocka_unit_test(a_member_that_is_killed_is_named_at_once),
        cmocka_unit_test(a_member_that_aborts_while_it_is_sent_to_is_named_at_once),
        cmocka_unit_test(a_member_that_takes_no_more_is_named_at_once),
        cmocka_unit_test(a_member_that_stalls_is_named_after_the_timeout),
        cmocka_unit_test(a_member_that_takes_nothing_is_named_after_the_timeout),
        cmocka_unit_test(members_at_other_exchanges_find_out),
        cmocka_unit_test(an_abort_ends_an_exchange_and_all_later_ones),
        cmocka_unit_test(an_abort_says_what_the_thread_has_failed_with),
        cmocka_unit_test(a_forked_child_ends_no_connection),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
