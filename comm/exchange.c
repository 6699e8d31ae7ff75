/* exchange.c - all-gathers of host memory among members that have a connection each to each other one, on
 * each channel.
 *
 * Every member sends its bytes to every other one, straight from and to their place, and one poll() serves
 * all of these transfers, both ways at once. So an exchange waits for its slowest member, and never for the
 * order in which members come. Before its bytes a member sends a header, by which members that are not at
 * the same exchange find out:
 *
 *     of one exchange, each member:  sent = received = sizeof(header) + bytes    once it is done
 *
 * Nothing is read beyond that. So a member that ends after its last exchange, whose connection then says so,
 * disturbs nobody who still reads what it has sent.
 *
 * Those of one channel come one after another, and know nothing of the other channels'. A failure shuts all
 * connections down: the other members learn of it in the exchange that they are in, or at their next.
 */
#include "comm/exchange.h"

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

enum { LINGER_S = 2, MOST_WAIT_MS = 1000 * 1000 };

typedef struct header {
    uint64_t number, bytes; /* of the exchange; of one member */
} header;

typedef struct member {
    int fd; /* -1: this rank itself */
    uint32_t rank;
    header header;         /* its own, as it comes */
    size_t sent, received; /* to it and from it, in the exchange under way */
    uint64_t moved_ns;     /* when that last changed */
    atomic_bool is_behind; /* not all of its bytes have come */
} member;

typedef struct channel {
    uint64_t number; /* of the last exchange */
    member *members;
    struct pollfd *polled; /* failed_fd, and each member's */
} channel;

struct fcdp_exchange {
    pid_t pid;
    double timeout_s;
    uint32_t n, me, n_channels;
    int failed_fd; /* an eventfd, to be read once there is a failure: wakes poll() */
    channel channels[FCDP_N_CHANNELS];
    pthread_mutex_t mutex; /* what follows */
    fcdp_failure failure;  /* the first one */
    void (*failed)(void *arg);
    void *failed_arg;
};

typedef struct transfer {
    fcdp_exchange *exchange;
    channel *on;
    header header;
    char *buffer;
    size_t bytes; /* header and one member's bytes */
} transfer;

/* The i-th of all channels' members. */
static member *member_of(fcdp_exchange *exchange, uint32_t i) {
    return &exchange->channels[i / exchange->n].members[i % exchange->n];
}

/* ---- failures ---- */

/* Under the mutex what is told comes before the stream goes on. The connections stay open until the end, so
 * that no thread uses a number that is another file's by then. */
static fcdp_status latch(fcdp_exchange *exchange, fcdp_status status) {
    const uint64_t one = 1;
    pthread_mutex_lock(&exchange->mutex);
    if (!exchange->failure.status) {
        exchange->failure = fcdp__failure_keep(status);
        if (exchange->failed) exchange->failed(exchange->failed_arg);
        (void)!write(exchange->failed_fd, &one, sizeof one);
        for (uint32_t i = 0; i < exchange->n_channels * exchange->n; i++)
            if (i % exchange->n != exchange->me) shutdown(member_of(exchange, i)->fd, SHUT_RDWR);
    }
    status = fcdp__failure_restore(&exchange->failure);
    pthread_mutex_unlock(&exchange->mutex);
    return status;
}

fcdp_status fcdp__exchange_check(fcdp_exchange *exchange) {
    pthread_mutex_lock(&exchange->mutex);
    fcdp_status status = fcdp__failure_restore(&exchange->failure);
    pthread_mutex_unlock(&exchange->mutex);
    return status;
}

void fcdp__exchange_abort(fcdp_exchange *exchange, const char *why) {
    (void)!latch(exchange, fcdp__fail(FCDP_ERR_TRANSPORT, "%s", why));
}

void fcdp__exchange_on_failure(fcdp_exchange *exchange, void (*failed)(void *arg), void *arg) {
    pthread_mutex_lock(&exchange->mutex);
    exchange->failed = failed;
    exchange->failed_arg = arg;
    pthread_mutex_unlock(&exchange->mutex);
}

static bool is_behind(const channel *on, uint32_t i) {
    return atomic_load_explicit(&on->members[i].is_behind, memory_order_relaxed);
}

/* "rank 3, rank 5": who is behind on any of these channels. */
static bool missing_on(const channel *first, uint32_t n_channels, uint32_t n, char *text_out,
                       size_t text_bytes) {
    size_t end = 0;
    *text_out = 0;
    for (uint32_t i = 0; i < n; i++) {
        bool lacks = false;
        for (const channel *on = first; on < first + n_channels; on++) lacks = lacks || is_behind(on, i);
        if (!lacks) continue;
        snprintf(text_out + end, text_bytes - end, "%srank %u", end ? ", " : "", first->members[i].rank);
        end = strlen(text_out);
    }
    return end > 0;
}

bool fcdp__exchange_missing(fcdp_exchange *exchange, char *text_out, size_t text_bytes) {
    return missing_on(exchange->channels, exchange->n_channels, exchange->n, text_out, text_bytes);
}

/* With those whose bytes of this exchange this rank still lacks. */
static fcdp_status broken(const transfer *t, fcdp_status status, const char *what) {
    char missing[512];
    bool any = missing_on(t->on, 1, t->exchange->n, missing, sizeof missing);
    return fcdp__fail(status, "exchange %llu, of %llu bytes of each of %u ranks: %s%s%s",
                      (unsigned long long)t->header.number, (unsigned long long)t->header.bytes,
                      t->exchange->n, what, any ? "; this rank lacks the bytes of " : "", any ? missing : "");
}

static fcdp_status member_gone(const transfer *t, const member *m, int error) {
    char what[160];
    snprintf(what, sizeof what, "rank %u has left%s%s%s", m->rank, error ? " (" : "",
             error ? strerror(error) : "", error ? ")" : "");
    return broken(t, FCDP_ERR_PEER, what);
}

/* ---- the bytes ---- */

static bool passes(int error) {
    return error == EAGAIN || error == EINTR;
}

/* What of header and bytes is behind the first `done`. */
static size_t pieces_of(header *head, char *bytes, size_t n_bytes, size_t done, struct iovec *pieces_out) {
    size_t n = 0;
    if (done < sizeof *head) pieces_out[n++] = (struct iovec){(char *)head + done, sizeof *head - done};
    size_t at = done > sizeof *head ? done - sizeof *head : 0;
    if (at < n_bytes) pieces_out[n++] = (struct iovec){bytes + at, n_bytes - at};
    return n;
}

static fcdp_status member_send(transfer *t, member *m, uint64_t now_ns) {
    struct iovec pieces[2];
    size_t n_bytes = (size_t)t->header.bytes;
    struct msghdr message = {.msg_iov = pieces};
    message.msg_iovlen = pieces_of(&t->header, t->buffer + t->exchange->me * n_bytes, n_bytes, m->sent,
                                   pieces);
    ssize_t sent = sendmsg(m->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return passes(errno) ? FCDP_OK : member_gone(t, m, errno);
    m->sent += (size_t)sent;
    m->moved_ns = now_ns;
    return FCDP_OK;
}

static fcdp_status member_receive(transfer *t, member *m, uint64_t now_ns) {
    struct iovec pieces[2];
    size_t n_bytes = (size_t)t->header.bytes, place = (size_t)(m - t->on->members);
    struct msghdr message = {.msg_iov = pieces};
    message.msg_iovlen = pieces_of(&m->header, t->buffer + place * n_bytes, n_bytes, m->received, pieces);
    ssize_t got = recvmsg(m->fd, &message, MSG_DONTWAIT);
    if (got < 0) return passes(errno) ? FCDP_OK : member_gone(t, m, errno);
    if (got == 0) return member_gone(t, m, 0);
    m->received += (size_t)got;
    m->moved_ns = now_ns;
    if (m->received >= sizeof m->header && memcmp(&m->header, &t->header, sizeof m->header)) {
        char what[160];
        snprintf(what, sizeof what, "rank %u is at exchange %llu, of %llu bytes", m->rank,
                 (unsigned long long)m->header.number, (unsigned long long)m->header.bytes);
        return broken(t, FCDP_ERR_PEER, what);
    }
    if (m->received == t->bytes) atomic_store_explicit(&m->is_behind, false, memory_order_relaxed);
    return FCDP_OK;
}

/* ---- the exchange ---- */

/* How many members are not done. A member that has sent all and hangs up will not take the rest. */
static uint32_t polled_set(const transfer *t) {
    const fcdp_exchange *exchange = t->exchange;
    uint32_t n = 0;
    t->on->polled[0] = (struct pollfd){.fd = exchange->failed_fd, .events = POLLIN};
    for (uint32_t i = 0; i < exchange->n; i++) {
        const member *m = &t->on->members[i];
        bool sends = m->sent < t->bytes, receives = m->received < t->bytes;
        bool is_done = i == exchange->me || !(sends || receives);
        int events = (sends ? POLLOUT : 0) | (receives ? POLLIN : POLLRDHUP);
        t->on->polled[1 + i] = (struct pollfd){.fd = is_done ? -1 : m->fd, .events = (short)events};
        n += !is_done;
    }
    return n;
}

static fcdp_status member_serve(transfer *t, member *m, int happened, uint64_t now_ns) {
    fcdp_status status = FCDP_OK;
    bool sends = m->sent < t->bytes, receives = m->received < t->bytes;
    if (sends && !receives && (happened & POLLRDHUP)) return member_gone(t, m, 0);
    if (receives && (happened & (POLLIN | POLLHUP | POLLERR))) status = member_receive(t, m, now_ns);
    if (!status && sends && (happened & (POLLOUT | POLLHUP | POLLERR))) status = member_send(t, m, now_ns);
    return status;
}

static uint64_t patience_ns(const fcdp_exchange *exchange) {
    return (uint64_t)(exchange->timeout_s * 1e9);
}

/* Waits until something can move. FCDP_ERR_TIMEOUT: a member has moved nothing for too long. */
static fcdp_status wait(const transfer *t) {
    fcdp_exchange *exchange = t->exchange;
    char what[640] = "";
    uint64_t first_ns = UINT64_MAX, now_ns = fcdp__now_ns();
    for (uint32_t i = 0; i < exchange->n; i++) {
        const member *m = &t->on->members[i];
        if (t->on->polled[1 + i].fd < 0) continue;
        if (m->moved_ns < first_ns) first_ns = m->moved_ns;
        size_t end = strlen(what);
        if (now_ns >= m->moved_ns + patience_ns(exchange))
            snprintf(what + end, sizeof what - end, "%srank %u", end ? ", " : "", m->rank);
    }
    size_t end = strlen(what);
    if (end) {
        snprintf(what + end, sizeof what - end, " sent and took nothing for %g s (FCDP_TIMEOUT)",
                 exchange->timeout_s);
        return broken(t, FCDP_ERR_TIMEOUT, what);
    }
    uint64_t ms = (first_ns + patience_ns(exchange) - now_ns) / 1000000 + 1;
    if (poll(t->on->polled, 1 + exchange->n, ms < MOST_WAIT_MS ? (int)ms : MOST_WAIT_MS) >= 0) return FCDP_OK;
    if (errno != EINTR) return fcdp__fail(FCDP_ERR_SYSTEM, "poll: %s", strerror(errno));
    for (uint32_t i = 0; i <= exchange->n; i++) t->on->polled[i].revents = 0;
    return FCDP_OK;
}

/* The first round asks no poll(): most sends fit into the sockets' buffers. */
static fcdp_status members_serve(transfer *t) {
    fcdp_exchange *exchange = t->exchange;
    fcdp_status status = FCDP_OK;
    for (bool is_first = true; !status && polled_set(t) > 0; is_first = false) {
        if (!is_first) status = wait(t);
        if (!status) status = fcdp__exchange_check(exchange);
        uint64_t now_ns = fcdp__now_ns();
        for (uint32_t i = 0; i < exchange->n && !status; i++) {
            int happened = is_first ? POLLIN | POLLOUT : t->on->polled[1 + i].revents;
            if (t->on->polled[1 + i].fd >= 0 && happened)
                status = member_serve(t, &t->on->members[i], happened, now_ns);
        }
    }
    return status;
}

fcdp_status fcdp__exchange_run(fcdp_exchange *exchange, fcdp_channel on, void *buffer, size_t bytes) {
    FCDP_CHECK(1, (uint32_t)on < exchange->n_channels);
    fcdp_status status = fcdp__exchange_check(exchange);
    if (status) return status;
    transfer t = {.exchange = exchange,
                  .on = &exchange->channels[on],
                  .header = {++exchange->channels[on].number, bytes},
                  .buffer = buffer,
                  .bytes = sizeof t.header + bytes};
    uint64_t now_ns = fcdp__now_ns();
    for (uint32_t i = 0; i < exchange->n; i++) {
        member *m = &t.on->members[i];
        m->sent = m->received = 0;
        m->moved_ns = now_ns;
        atomic_store_explicit(&m->is_behind, i != exchange->me, memory_order_relaxed);
    }
    status = members_serve(&t);
    return status ? latch(exchange, status) : FCDP_OK;
}

/* ---- making and ending ---- */

static void exchange_free(fcdp_exchange *exchange) {
    if (exchange->failed_fd >= 0) close(exchange->failed_fd);
    pthread_mutex_destroy(&exchange->mutex);
    for (uint32_t k = 0; k < exchange->n_channels; k++) {
        free(exchange->channels[k].members);
        free(exchange->channels[k].polled);
    }
    free(exchange);
}

static bool channel_make(channel *on, const fcdp_members *members, const int *fds) {
    on->members = calloc(members->n, sizeof *on->members);
    on->polled = calloc(1 + members->n, sizeof *on->polled);
    for (uint32_t i = 0; i < members->n && on->members; i++) {
        on->members[i].fd = fds[i];
        on->members[i].rank = members->ranks[i];
    }
    return on->members && on->polled;
}

fcdp_status fcdp__exchange_create(const fcdp_members *members, uint32_t n_channels, const int *fds,
                                  double timeout_s, fcdp_exchange **exchange_out) {
    FCDP_CHECK(1, n_channels <= FCDP_N_CHANNELS);
    fcdp_exchange *exchange = calloc(1, sizeof *exchange);
    if (!exchange) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for exchanges");
    *exchange = (fcdp_exchange){.pid = getpid(), .timeout_s = timeout_s, .n = members->n, .me = members->me};
    exchange->n_channels = n_channels;
    pthread_mutex_init(&exchange->mutex, NULL);
    exchange->failed_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int error = errno;
    bool has_memory = true;
    for (uint32_t k = 0; k < n_channels; k++)
        has_memory = channel_make(&exchange->channels[k], members, fds + (size_t)k * members->n) &&
                     has_memory;
    if (exchange->failed_fd < 0 || !has_memory) {
        exchange_free(exchange);
        return fcdp__fail(FCDP_ERR_SYSTEM, "cannot make exchanges of %u members: %s", members->n,
                          has_memory ? strerror(error) : "no memory");
    }
    *exchange_out = exchange;
    return FCDP_OK;
}

fcdp_status fcdp__exchange_connect(fcdp_listener *listener, const fcdp_members *members,
                                   const fcdp_card *cards, double limit_s, double timeout_s,
                                   fcdp_exchange **exchange_out) {
    uint32_t n = FCDP_N_CHANNELS * members->n;
    int *fds = malloc(n * sizeof *fds);
    if (!fds) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for %u connections", members->n);
    fcdp_status status = fcdp__sockets_connect(listener, members, FCDP_N_CHANNELS, cards, limit_s, fds);
    if (!status) {
        status = fcdp__exchange_create(members, FCDP_N_CHANNELS, fds, timeout_s, exchange_out);
        for (uint32_t i = 0; i < n && status; i++)
            if (fds[i] >= 0) close(fds[i]);
    }
    free(fds);
    return status;
}

/* Waits for the last bytes until then, in whole seconds. */
static void member_close(const member *m, uint64_t until_ns) {
    const uint64_t second_ns = 1000000000, now_ns = fcdp__now_ns();
    struct linger last_bytes = {.l_onoff = now_ns < until_ns};
    if (last_bytes.l_onoff) last_bytes.l_linger = (int)((until_ns - now_ns + second_ns - 1) / second_ns);
    (void)setsockopt(m->fd, SOL_SOCKET, SO_LINGER, &last_bytes, sizeof last_bytes);
    close(m->fd);
}

/* Where all went well, the last bytes are on their way, and close() waits until they have arrived: this
 * machine's network may end with the process, as a container's does. All wait together, so that members that
 * are gone cost no more than one. */
void fcdp__exchange_destroy(fcdp_exchange *exchange) {
    if (!exchange || exchange->pid != getpid()) return;
    bool has_failed = exchange->failure.status != FCDP_OK;
    uint64_t until_ns = has_failed ? 0 : fcdp__now_ns() + LINGER_S * UINT64_C(1000000000);
    for (uint32_t i = 0; i < exchange->n_channels * exchange->n; i++)
        if (i % exchange->n != exchange->me && !has_failed) shutdown(member_of(exchange, i)->fd, SHUT_WR);
    for (uint32_t i = 0; i < exchange->n_channels * exchange->n; i++)
        if (i % exchange->n != exchange->me) member_close(member_of(exchange, i), until_ns);
    exchange_free(exchange);
}
