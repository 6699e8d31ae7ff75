/* How the members of a lane find each other: which address they take, whom they let in, and what comes of
 * each call of the system's that fails. */
#include <errno.h>
#include <poll.h>
#include <sys/random.h>

#include "comm/exchange.h"
#include "comm/interface.h"
#include "tests/comm/lane.h"
#include "tests/comm/random.h"
#include "tests/log_text.h"

/* ---- addresses ---- */

typedef struct row {
    const char *list;
    bool is_nccls;
    const char *name;
    int place;
} row;

static const row rows[] = {
    {"eth0", false, "eth0", 0},      {"eth0", false, "eth01", -1},
    {"eth0", false, "eth", -1},      {"ib0,eth0", false, "eth0", 1},
    {"^eth0", false, "eth0", -1},    {"eth", true, "eth0", 0},
    {"eth", true, "xeth0", -1},      {"ib,eth", true, "eth1", 1},
    {"ib,,eth", true, "eth1", 2},    {"=eth0", true, "eth0", 0},
    {"=eth0", true, "eth01", -1},    {"=eth0,eth01", true, "eth01", 1},
    {"^docker,lo", true, "eth0", 0}, {"^docker,lo", true, "docker0", -1},
    {"^docker,lo", true, "lo", -1},  {"^=lo", true, "lo", -1},
    {"^=lo", true, "lo1", 0},        {"^", true, "eth0", 0},
};

static void a_list_allows_the_interfaces_that_it_names(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int place = fcdp__interface_place(rows[i].list, rows[i].is_nccls, rows[i].name);
        if (place != rows[i].place) fail_msg("%s of %s: %d", rows[i].name, rows[i].list, place);
    }
}

static const char *chosen(fcdp_interface_hints hints) {
    static char text[FCDP_ADDRESS_TEXT_BYTES];
    struct sockaddr_storage address;
    fcdp_listener *listener;
    assert_ok(fcdp__interface_choose(&hints, &address));
    assert_ok(fcdp__sockets_listen(&address, &listener));
    fcdp__sockets_close(listener);
    fcdp__interface_text(&address, text);
    return text;
}

static bool is_loopback(const char *text) {
    return !strncmp(text, "127.", 4) || !strcmp(text, "::1");
}

static void an_address_is_that_of_the_first_hint(void **state) {
    (void)state;
    struct sockaddr_storage address;
    assert_string_equal(chosen((fcdp_interface_hints){"lo", "=none0", "nowhere.invalid"}), "127.0.0.1");
    assert_string_equal(chosen((fcdp_interface_hints){"none0,lo", NULL, NULL}), "127.0.0.1");
    assert_string_equal(chosen((fcdp_interface_hints){"", "=lo", "nowhere.invalid"}), "127.0.0.1");
    const fcdp_interface_hints none = {NULL, "none", "127.0.0.1"}, gloos = {"none0", NULL, NULL};
    assert_int_equal(fcdp__interface_choose(&none, &address), FCDP_ERR_UNSUPPORTED);
    assert_says(fcdp_error_text(), "NCCL_SOCKET_IFNAME=none: no such network interface is up");
    assert_int_equal(fcdp__interface_choose(&gloos, &address), FCDP_ERR_UNSUPPORTED);
    assert_says(fcdp_error_text(), "GLOO_SOCKET_IFNAME=none0: ");
    if (fcdp__interface_choose(&(fcdp_interface_hints){NULL, "^lo", NULL}, &address)) {
        assert_says(fcdp_error_text(), "NCCL_SOCKET_IFNAME=^lo: ");
        skip(); /* this machine has the loopback alone */
    }
    const char *other = chosen((fcdp_interface_hints){NULL, "^lo", NULL});
    assert_false(is_loopback(other));
    char master[FCDP_ADDRESS_TEXT_BYTES];
    strcpy(master, other); /* an address of this machine is reached from there */
    assert_string_equal(chosen((fcdp_interface_hints){NULL, NULL, master}), master);
}

/* The machine of rank 0 may be its own "localhost" (Kubernetes), and its host's name 127.0.1.1 (Debian). */
static void the_loopback_is_the_last_choice(void **state) {
    (void)state;
    struct sockaddr_storage address;
    char by_name[FCDP_ADDRESS_TEXT_BYTES] = "", host[256] = "";
    const fcdp_interface_hints nothing = {0};
    if (!fcdp__interface_choose(&nothing, &address)) fcdp__interface_text(&address, by_name);
    gethostname(host, sizeof host - 1);
    const char *by_master = chosen((fcdp_interface_hints){NULL, NULL, "localhost"});
    if (*by_name && !is_loopback(by_name))
        assert_string_equal(by_master, by_name);
    else
        assert_true(is_loopback(by_master));
    assert_string_equal(*by_name ? chosen((fcdp_interface_hints){NULL, NULL, host}) : "", by_name);
}

/* ---- strangers ---- */

typedef struct hello {
    uint8_t token[FCDP_TOKEN_BYTES];
    uint32_t from, channel;
} hello;

static hello hello_to(const fcdp_card *card, uint32_t from, uint32_t channel) {
    hello h = {.from = from, .channel = channel};
    memcpy(h.token, card->token, sizeof h.token);
    return h;
}

static int call_as_stranger(const fcdp_card *card, const void *words, size_t bytes) {
    int fd = socket(card->at.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&card->at, fcdp__interface_bytes(&card->at)), 0);
    assert_int_equal(send(fd, words, bytes, MSG_NOSIGNAL), bytes);
    return fd;
}

static void strangers_change_nothing(void **state) {
    (void)state;
    enum { N = 3, N_STRANGERS = 100 };
    fcdp_listener *listeners[LANE_MOST];
    fcdp_card cards[LANE_MOST];
    lane_caller callers[LANE_MOST];
    int strangers[N_STRANGERS], files = lane_files();
    lane_listen(N, false, listeners, cards);
    for (int i = 0; i < N_STRANGERS; i++) { /* all there before the members */
        int fault = i % 7;
        hello h = hello_to(&cards[0], fault == 0 ? 0 : fault == 1 ? N : 1, (uint32_t)i % FCDP_N_CHANNELS);
        if (fault == 2) h.token[FCDP_TOKEN_BYTES - 1] ^= 1;
        if (fault == 3) memcpy(h.token, "GET / HTTP/1.1\r\n", sizeof h.token);
        if (fault == 4) h.channel = FCDP_N_CHANNELS;
        if (fault == 5) h.channel = UINT32_MAX;
        strangers[i] = call_as_stranger(&cards[0], &h, fault == 6 ? (size_t)i % sizeof h : sizeof h);
    }
    for (uint32_t i = 0; i < N; i++) {
        callers[i] = (lane_caller){
            listeners[i], {N, i, lane_ranks}, cards, .limit_s = 60, .n_channels = FCDP_N_CHANNELS};
        lane_call_begin(&callers[i]);
    }
    for (uint32_t i = 0; i < N; i++) {
        pthread_join(callers[i].thread, NULL);
        if (callers[i].status) fail_msg("member %u: %s", i, callers[i].text);
        for (uint32_t k = 0; k < N * FCDP_N_CHANNELS; k++)
            if (k % N != i) close(callers[i].fds[k]);
        fcdp__sockets_close(listeners[i]);
    }
    for (int i = 0; i < N_STRANGERS; i++) {
        char byte;
        assert_true(read(strangers[i], &byte, 1) <= 0); /* none was answered */
        close(strangers[i]);
    }
    assert_int_equal(lane_files(), files);
}

/* A port may be another program's by the time that a member calls it. */
static void another_program_is_not_taken_for_a_member(void **state) {
    (void)state;
    fcdp_listener *listeners[LANE_MOST];
    fcdp_card cards[LANE_MOST];
    int fds[2], files = lane_files();
    const fcdp_members members = {2, 1, lane_ranks};
    lane_listen(2, false, listeners, cards);
    fcdp__sockets_close(listeners[0]);
    assert_int_equal(fcdp__sockets_connect(listeners[1], &members, 1, cards, 60, fds), FCDP_ERR_PEER);
    assert_says(fcdp_error_text(), "cannot connect to rank 10 at 127.0.0.1:");
    assert_says(fcdp_error_text(), "Connection refused; GLOO_SOCKET_IFNAME");
    struct sockaddr_storage address = lane_address(false);
    lane_caller other = {.members = {2, 0, lane_ranks}, .cards = cards, .n_channels = 1};
    assert_ok(fcdp__sockets_listen(&address, &other.listener));
    cards[0].at = fcdp__sockets_card(other.listener)->at; /* with the token of the one that has gone */
    other.limit_s = 1;
    lane_call_begin(&other);
    assert_int_equal(fcdp__sockets_connect(listeners[1], &members, 1, cards, 60, fds), FCDP_ERR_PEER);
    assert_says(fcdp_error_text(), "it hung up, or is another program");
    pthread_join(other.thread, NULL);
    assert_int_equal(other.status, FCDP_ERR_TIMEOUT);
    assert_says(other.text, "no connection after 1 s to rank 11 (is to call 127.0.0.1:");
    fcdp__sockets_close(other.listener);
    fcdp__sockets_close(listeners[1]);
    assert_int_equal(lane_files(), files);
}

/* Whose answer to a hello this is; -1: none came. */
static int answer_of(int fd, const fcdp_card *card, uint32_t channel) {
    hello h;
    ssize_t got = recv(fd, &h, sizeof h, MSG_WAITALL);
    if (got <= 0) return -1;
    assert_int_equal(got, sizeof h);
    assert_memory_equal(h.token, card->token, sizeof h.token);
    assert_int_equal(h.channel, channel);
    return (int)h.from;
}

/* By one that knows the secret. */
static void a_channel_is_taken_once(void **state) {
    (void)state;
    fcdp_listener *listeners[LANE_MOST];
    fcdp_card cards[LANE_MOST];
    int files = lane_files(), called[FCDP_N_CHANNELS];
    lane_listen(2, false, listeners, cards);
    lane_caller c = {listeners[0], {2, 0, lane_ranks}, cards, .limit_s = 60, .n_channels = FCDP_N_CHANNELS};
    lane_call_begin(&c);
    for (uint32_t k = FCDP_N_CHANNELS; k-- > 0;) {
        const hello h = hello_to(&cards[0], 1, k);
        called[k] = call_as_stranger(&cards[0], &h, sizeof h);
        assert_int_equal(answer_of(called[k], &cards[1], k), 0);
        if (!k) break; /* it has all */
        int again = call_as_stranger(&cards[0], &h, sizeof h);
        assert_int_equal(answer_of(again, &cards[1], k), -1);
        close(again);
    }
    pthread_join(c.thread, NULL);
    assert_int_equal(c.status, FCDP_OK);
    for (uint32_t k = 0; k < FCDP_N_CHANNELS; k++) { /* each under its number */
        char byte;
        assert_int_equal(c.fds[2 * k], -1);
        assert_int_equal(send(c.fds[2 * k + 1], &(char){(char)k}, 1, MSG_NOSIGNAL), 1);
        assert_int_equal(read(called[k], &byte, 1), 1);
        assert_int_equal(byte, k);
        close(c.fds[2 * k + 1]);
        close(called[k]);
    }
    for (uint32_t i = 0; i < 2; i++) fcdp__sockets_close(listeners[i]);
    assert_int_equal(lane_files(), files);
}

/* The other end answers for another channel, or as another member. */
static void an_answer_is_for_the_channel_that_called(void **state) {
    (void)state;
    for (int fault = 0; fault < 3; fault++) {
        fcdp_listener *listeners[LANE_MOST];
        fcdp_card cards[LANE_MOST];
        int files = lane_files(), answered[FCDP_N_CHANNELS];
        lane_listen(2, false, listeners, cards);
        struct sockaddr_storage address = lane_address(false);
        socklen_t bytes = sizeof address;
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        assert_int_equal(bind(fd, (const struct sockaddr *)&address, sizeof(struct sockaddr_in)), 0);
        assert_int_equal(listen(fd, FCDP_N_CHANNELS), 0);
        assert_int_equal(getsockname(fd, (struct sockaddr *)&cards[0].at, &bytes), 0);
        lane_caller c = {
            listeners[1], {2, 1, lane_ranks}, cards, .limit_s = 60, .n_channels = FCDP_N_CHANNELS};
        lane_call_begin(&c);
        for (uint32_t k = 0; k < FCDP_N_CHANNELS; k++) {
            hello in, out;
            answered[k] = accept(fd, NULL, NULL);
            assert_int_equal(recv(answered[k], &in, sizeof in, MSG_WAITALL), sizeof in);
            assert_memory_equal(in.token, cards[0].token, sizeof in.token);
            assert_int_equal(in.from, 1);
            out = hello_to(&cards[1], fault == 2,
                           fault == 1 ? (in.channel + 1) % FCDP_N_CHANNELS : in.channel);
            send(answered[k], &out, sizeof out, MSG_NOSIGNAL);
        }
        pthread_join(c.thread, NULL);
        assert_int_equal(c.status, fault ? FCDP_ERR_PEER : FCDP_OK);
        if (fault) assert_says(c.text, "it hung up, or is another program");
        for (uint32_t k = 0; k < FCDP_N_CHANNELS; k++) {
            close(answered[k]);
            if (!fault) close(c.fds[2 * k]);
        }
        close(fd);
        for (uint32_t i = 0; i < 2; i++) fcdp__sockets_close(listeners[i]);
        assert_int_equal(lane_files(), files);
    }
}

static void members_that_do_not_come_are_named(void **state) {
    (void)state;
    fcdp_listener *listeners[LANE_MOST];
    fcdp_card cards[LANE_MOST];
    int fds[3], files = lane_files();
    const fcdp_members members = {3, 1, lane_ranks};
    lane_listen(3, false, listeners, cards);
    assert_int_equal(fcdp__sockets_connect(listeners[1], &members, 1, cards, 0.1, fds), FCDP_ERR_TIMEOUT);
    assert_says(fcdp_error_text(), "to rank 10 (called at 127.0.0.1:");
    assert_says(fcdp_error_text(), ", rank 12 (is to call 127.0.0.1:");
    for (uint32_t i = 0; i < 3; i++) fcdp__sockets_close(listeners[i]);
    assert_int_equal(lane_files(), files);
}

/* ---- calls that fail ---- */

/* Of this thread: which call fails, from now on; 0: none. */
static _Thread_local unsigned n_until_failure;
static _Thread_local bool interrupts; /* it fails as by a signal instead, if it can */

static bool fails(bool can_be_interrupted) {
    if (!n_until_failure || (interrupts && !can_be_interrupted) || --n_until_failure) return false;
    errno = interrupts ? EINTR : ENOMEM;
    return true;
}

#define WRAP(result, name, parameters, arguments, interruptible)                                             \
    result __real_##name parameters;                                                                         \
    result __wrap_##name parameters;                                                                         \
    result __wrap_##name parameters {                                                                        \
        return fails(interruptible) ? (result) - 1 : __real_##name arguments;                                \
    }
WRAP(int, socket, (int family, int type, int protocol), (family, type, protocol), false)
WRAP(int, bind, (int fd, const struct sockaddr *at, socklen_t bytes), (fd, at, bytes), false)
WRAP(int, listen, (int fd, int most), (fd, most), false)
WRAP(int, getsockname, (int fd, struct sockaddr *at, socklen_t *bytes), (fd, at, bytes), false)
WRAP(ssize_t, getrandom, (void *at, size_t bytes, unsigned flags), (at, bytes, flags), false)
WRAP(int, accept4, (int fd, struct sockaddr *at, socklen_t *bytes, int flags), (fd, at, bytes, flags), true)
WRAP(int, poll, (struct pollfd * polled, nfds_t n, int ms), (polled, n, ms), true)
WRAP(int, setsockopt, (int fd, int level, int name, const void *value, socklen_t bytes),
     (fd, level, name, value, bytes), false)
WRAP(int, getsockopt, (int fd, int level, int name, void *value, socklen_t *bytes),
     (fd, level, name, value, bytes), false)
WRAP(ssize_t, send, (int fd, const void *at, size_t bytes, int flags), (fd, at, bytes, flags), true)
WRAP(ssize_t, recv, (int fd, void *at, size_t bytes, int flags), (fd, at, bytes, flags), true)
WRAP(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags), true)
WRAP(ssize_t, recvmsg, (int fd, struct msghdr *message, int flags), (fd, message, flags), true)
WRAP(int, eventfd, (unsigned value, int flags), (value, flags), false)

/* What a signal interrupts goes on. */
int __real_connect(int fd, const struct sockaddr *at, socklen_t bytes);
int __wrap_connect(int fd, const struct sockaddr *at, socklen_t bytes);
int __wrap_connect(int fd, const struct sockaddr *at, socklen_t bytes) {
    if (fails(true) && !interrupts) return -1;
    int result = __real_connect(fd, at, bytes);
    return n_until_failure || !interrupts || errno != EINPROGRESS ? result : (errno = EINTR, -1);
}

void *__real_calloc(size_t n, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes) {
    return fails(false) ? NULL : __real_calloc(n, bytes);
}
void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes) {
    return fails(false) ? NULL : __real_malloc(bytes);
}

enum { MEMBERS = 3, EXCHANGED = 100000 };

/* One of a lane's: it connects, and exchanges once. */
typedef struct life {
    fcdp_listener *listener;
    const fcdp_card *cards;
    uint32_t me;
    double limit_s;
    fcdp_status status;
    char text[FCDP_TEXT_BYTES];
    pthread_t thread;
} life;

static fcdp_status live(life *l, char *buffer) {
    const fcdp_members members = {MEMBERS, l->me, lane_ranks};
    fcdp_exchange *exchange;
    fcdp_status status = fcdp__exchange_connect(l->listener, &members, l->cards, l->limit_s, l->limit_s,
                                                &exchange);
    if (status) return status;
    memset(buffer + l->me * EXCHANGED, 'a' + (int)l->me, EXCHANGED);
    status = fcdp__exchange_run(exchange, FCDP_CHANNEL_VERDICT_1, buffer, EXCHANGED);
    fcdp__exchange_destroy(exchange);
    for (size_t i = 0; i < (size_t)MEMBERS * EXCHANGED && !status; i++)
        if (buffer[i] != (char)('a' + i / EXCHANGED)) return fcdp__fail(FCDP_ERR_INVALID, "other bytes");
    return status;
}

typedef struct late {
    const fcdp_card *card;
    int twins[2], called;
} late;

/* Once each of the twins has an answer or its end. */
static void *late_main(void *arg) {
    late *l = arg;
    for (int i = 0; i < 2; i++) {
        struct pollfd polled = {.fd = l->twins[i], .events = POLLIN};
        poll(&polled, 1, -1);
    }
    const hello h = hello_to(l->card, 1, FCDP_N_CHANNELS - 1);
    l->called = call_as_stranger(l->card, &h, sizeof h);
    return NULL;
}

/* Two callers that know the secret, for one channel, and a signal at any of the calls. */
static void a_channel_is_taken_once_whatever_a_signal_ends(void **state) {
    (void)state;
    int files = lane_files();
    bool failed = true;
    for (unsigned n = 1; failed; n++) {
        fcdp_listener *listeners[LANE_MOST];
        fcdp_card cards[LANE_MOST];
        int called[FCDP_N_CHANNELS + 1], fds[2 * FCDP_N_CHANNELS];
        const fcdp_members members = {2, 0, lane_ranks};
        pthread_t thread;
        lane_listen(2, false, listeners, cards);
        for (uint32_t i = 0; i < FCDP_N_CHANNELS; i++) {
            const hello h = hello_to(&cards[0], 1, i ? i - 1 : 0);
            called[i] = call_as_stranger(&cards[0], &h, sizeof h);
        }
        late l = {.card = &cards[0], .twins = {called[0], called[1]}};
        assert_int_equal(pthread_create(&thread, NULL, late_main, &l), 0);
        n_until_failure = n;
        interrupts = true;
        fcdp_status status = fcdp__sockets_connect(listeners[0], &members, FCDP_N_CHANNELS, cards, 60, fds);
        failed = !n_until_failure;
        n_until_failure = 0;
        pthread_join(thread, NULL);
        called[FCDP_N_CHANNELS] = l.called;
        assert_ok(status);
        for (uint32_t k = 0; k < FCDP_N_CHANNELS; k++) assert_int_equal(close(fds[2 * k + 1]), 0);
        int n_answered = 0;
        for (uint32_t i = 0; i <= FCDP_N_CHANNELS; i++) {
            n_answered += answer_of(called[i], &cards[1], i ? i - 1 : 0) == 0;
            close(called[i]);
        }
        assert_int_equal(n_answered, FCDP_N_CHANNELS);
        for (uint32_t i = 0; i < 2; i++) fcdp__sockets_close(listeners[i]);
        assert_int_equal(lane_files(), files);
    }
}

static void *live_main(void *arg) {
    life *l = arg;
    static _Thread_local char buffer[MEMBERS * EXCHANGED];
    l->status = live(l, buffer);
    strcpy(l->text, l->status ? fcdp_error_text() : "");
    return NULL;
}

/* The n-th call of member `victim` fails. False: it makes fewer. */
static bool nth_fails(uint32_t victim, unsigned n, bool by_signal) {
    life lives[MEMBERS] = {0};
    fcdp_card cards[MEMBERS];
    struct sockaddr_storage address = lane_address(false);
    static char buffer[MEMBERS * EXCHANGED];
    fcdp_status status = FCDP_OK;
    for (uint32_t i = 0; i < MEMBERS && !status; i++) {
        lives[i] = (life){.cards = cards, .me = i, .limit_s = by_signal ? 60 : 0.5};
        n_until_failure = i == victim ? n : 0;
        interrupts = by_signal;
        status = fcdp__sockets_listen(&address, &lives[i].listener);
        if (i == victim) n = n_until_failure;
        n_until_failure = 0;
        if (!status) cards[i] = *fcdp__sockets_card(lives[i].listener);
    }
    bool failed = status != FCDP_OK || !n;
    if (!failed) {
        for (uint32_t i = 0; i < MEMBERS; i++)
            if (i != victim)
                assert_int_equal(pthread_create(&lives[i].thread, NULL, live_main, &lives[i]), 0);
        n_until_failure = n;
        status = live(&lives[victim], buffer);
        failed = !n_until_failure;
        n_until_failure = 0;
        fcdp__sockets_close(lives[victim].listener);
        lives[victim].listener = NULL;
        for (uint32_t i = 0; i < MEMBERS; i++)
            if (i != victim) pthread_join(lives[i].thread, NULL);
    }
    for (uint32_t i = 0; i < MEMBERS; i++) fcdp__sockets_close(lives[i].listener);
    assert_int_not_equal(status, FCDP_ERR_INVALID); /* whoever ends well has the right bytes */
    for (uint32_t i = 0; i < MEMBERS; i++) assert_int_not_equal(lives[i].status, FCDP_ERR_INVALID);
    if (by_signal && status) fail_msg("call %u of member %u: %s", n, victim, fcdp_error_text());
    for (uint32_t i = 0; i < MEMBERS && by_signal; i++)
        if (lives[i].status) fail_msg("call %u of member %u: member %u: %s", n, victim, i, lives[i].text);
    return failed;
}

static void whichever_call_fails_nothing_is_left(void **state) {
    (void)state;
    int files = lane_files();
    for (int by_signal = 0; by_signal < 2; by_signal++)
        for (uint32_t victim = 0; victim < MEMBERS; victim++) {
            unsigned n = 1;
            while (nth_fails(victim, n, by_signal)) {
                assert_int_equal(lane_files(), files);
                n++;
            }
            print_message("member %u: %u calls%s\n", victim, n - 1,
                          by_signal ? " that a signal may end" : "");
            assert_true(n > 3);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_list_allows_the_interfaces_that_it_names),
        cmocka_unit_test(an_address_is_that_of_the_first_hint),
        cmocka_unit_test(the_loopback_is_the_last_choice),
        cmocka_unit_test(strangers_change_nothing),
        cmocka_unit_test(another_program_is_not_taken_for_a_member),
        cmocka_unit_test(a_channel_is_taken_once),
        cmocka_unit_test(an_answer_is_for_the_channel_that_called),
        cmocka_unit_test(members_that_do_not_come_are_named),
        cmocka_unit_test(a_channel_is_taken_once_whatever_a_signal_ends),
        cmocka_unit_test(whichever_call_fails_nothing_is_left),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
