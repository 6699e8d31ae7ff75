/* sockets.c - makes the connections among a lane's members.
 *
 * Of each two members the one with the higher index connects. It says hello, with the token of the card that
 * it has called, its own index and the channel; the other answers with the token of the caller's card. So
 * both know whom they have reached, also where a port has been taken over by another program since. One
 * poll() serves all of a member's connections, strangers' too, so none of them waits for another:
 *
 *     n_contacts = connections that are being made + callers that have not shown a token
 */
#include "comm/sockets.h"

#include <errno.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "comm/interface.h"

enum { MAX_STRANGERS = 64, NOBODY = -1 };
static const uint64_t STRANGER_NS = 5000000000; /* for a hello, which a member sends at once */

typedef struct hello {
    uint8_t token[FCDP_TOKEN_BYTES];
    uint32_t from, channel;
} hello;

struct fcdp_listener {
    int fd;
    fcdp_card card;
};

typedef struct contact {
    int fd;
    int32_t member; /* NOBODY: a caller that has not shown a token */
    bool calls, is_open;
    hello out, in;
    size_t sent, received;
    uint64_t until_ns; /* of a caller */
} contact;

typedef struct meeting {
    const fcdp_listener *listener;
    const fcdp_members *members;
    uint32_t n_channels;
    const fcdp_card *cards;
    int *fds; /* by channel, by member; -1: not there yet */
    uint32_t n_open;
    contact *contacts;
    struct pollfd *polled; /* the listener's, and one for each contact */
    uint32_t n_contacts, n_strangers;
} meeting;

/* ---- listening ---- */

void fcdp__sockets_close(fcdp_listener *listener) {
    if (!listener) return;
    close(listener->fd);
    free(listener);
}

const fcdp_card *fcdp__sockets_card(const fcdp_listener *listener) {
    return &listener->card;
}

fcdp_status fcdp__sockets_listen(const struct sockaddr_storage *address, fcdp_listener **listener_out) {
    char text[FCDP_ADDRESS_TEXT_BYTES];
    fcdp_listener *listener = calloc(1, sizeof *listener);
    if (!listener) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a socket");
    fcdp_card *card = &listener->card;
    socklen_t bytes = sizeof card->at;
    listener->fd = socket(address->ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener->fd >= 0 &&
        !bind(listener->fd, (const struct sockaddr *)address, fcdp__interface_bytes(address)) &&
        !listen(listener->fd, SOMAXCONN) &&
        !getsockname(listener->fd, (struct sockaddr *)&card->at, &bytes) &&
        getrandom(card->token, sizeof card->token, 0) == sizeof card->token) {
        *listener_out = listener;
        return FCDP_OK;
    }
    int error = errno;
    if (listener->fd >= 0) close(listener->fd);
    free(listener);
    fcdp__interface_text(address, text);
    return fcdp__fail(FCDP_ERR_SYSTEM, "cannot listen at %s: %s", text, strerror(error));
}

/* ---- contacts ---- */

static fcdp_status call_failed(const meeting *m, const contact *c, int error) {
    char text[FCDP_ADDRESS_TEXT_BYTES];
    fcdp__interface_text(&m->cards[c->member].at, text);
    return fcdp__fail(
        FCDP_ERR_PEER,
        "cannot connect to rank %u at %s: %s; GLOO_SOCKET_IFNAME names the interface that joins the "
        "nodes",
        m->members->ranks[c->member], text, error ? strerror(error) : "it hung up, or is another program");
}

static int *fd_of(const meeting *m, uint32_t channel, uint32_t member) {
    return &m->fds[channel * m->members->n + member];
}

static contact *contact_add(meeting *m, int fd, int32_t member) {
    contact *c = &m->contacts[m->n_contacts++];
    *c = (contact){.fd = fd, .member = member, .until_ns = fcdp__now_ns() + STRANGER_NS};
    c->out.from = m->members->me;
    return c;
}

/* The last one takes its place, so who goes through all of them does so backwards. */
static void contact_remove(meeting *m, contact *c, bool closes) {
    if (closes) close(c->fd);
    if (!c->calls) m->n_strangers--;
    *c = m->contacts[--m->n_contacts];
}

static fcdp_status contact_done(meeting *m, contact *c) {
    int at_once = 1;
    if (setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once))
        return fcdp__fail(FCDP_ERR_SYSTEM, "TCP_NODELAY: %s", strerror(errno));
    *fd_of(m, c->out.channel, (uint32_t)c->member) = c->fd;
    m->n_open++;
    contact_remove(m, c, false);
    return FCDP_OK;
}

static fcdp_status call(meeting *m, uint32_t member, uint32_t channel) {
    const struct sockaddr_storage *to = &m->cards[member].at;
    int fd = socket(to->ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return fcdp__fail(FCDP_ERR_SYSTEM, "no socket: %s", strerror(errno));
    contact *c = contact_add(m, fd, (int32_t)member);
    c->calls = true;
    c->out.channel = channel;
    memcpy(c->out.token, m->cards[member].token, FCDP_TOKEN_BYTES);
    if (!connect(fd, (const struct sockaddr *)to, fcdp__interface_bytes(to)) || errno == EINPROGRESS ||
        errno == EINTR)
        return FCDP_OK;
    return call_failed(m, c, errno);
}

/* Takes the same time wherever they differ. */
static bool token_is(const uint8_t *token, const uint8_t *wanted) {
    uint8_t differs = 0;
    for (int i = 0; i < FCDP_TOKEN_BYTES; i++) differs |= token[i] ^ wanted[i];
    return !differs;
}

/* A caller's hello: the answer to it, or false. Its place may be taken before the answer is sent. */
static bool hello_accept(const meeting *m, contact *c) {
    bool is_callers = c->in.from > m->members->me && c->in.from < m->members->n &&
                      c->in.channel < m->n_channels;
    if (!token_is(c->in.token, m->listener->card.token) || !is_callers) return false;
    c->member = (int32_t)c->in.from;
    c->out.channel = c->in.channel;
    memcpy(c->out.token, m->cards[c->in.from].token, FCDP_TOKEN_BYTES);
    return true;
}

static bool would_block(ssize_t moved) {
    return moved < 0 && (errno == EAGAIN || errno == EINTR);
}

/* 0, an errno, or -1: the other end has hung up, or is not who it should be. */
static int contact_move(const meeting *m, contact *c) {
    int error = 0;
    socklen_t bytes = sizeof error;
    if (c->calls && !c->is_open) {
        if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &bytes)) return errno;
        if (error) return error;
        c->is_open = true;
    }
    bool sends = c->calls || c->received == sizeof c->in;
    if (sends && c->sent < sizeof c->out) {
        if (*fd_of(m, c->out.channel, (uint32_t)c->member) >= 0) return -1;
        ssize_t sent = send(c->fd, (const char *)&c->out + c->sent, sizeof c->out - c->sent,
                            MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) return would_block(sent) ? 0 : errno;
        c->sent += (size_t)sent;
    }
    if (c->received < sizeof c->in) {
        ssize_t got = recv(c->fd, (char *)&c->in + c->received, sizeof c->in - c->received, MSG_DONTWAIT);
        if (got < 0) return would_block(got) ? 0 : errno;
        if (got == 0) return -1;
        c->received += (size_t)got;
        if (c->received < sizeof c->in) return 0;
        if (!c->calls) return hello_accept(m, c) ? contact_move(m, c) : -1;
        bool is_it = token_is(c->in.token, m->cards[m->members->me].token) &&
                     c->in.from == (uint32_t)c->member && c->in.channel == c->out.channel;
        return is_it ? 0 : -1;
    }
    return 0;
}

static short contact_awaits(const contact *c) {
    if (c->calls) return !c->is_open || c->sent < sizeof c->out ? POLLOUT : POLLIN;
    return c->received < sizeof c->in ? POLLIN : POLLOUT;
}

static fcdp_status contact_serve(meeting *m, contact *c) {
    int error = contact_move(m, c);
    if (error && c->calls) return call_failed(m, c, error > 0 ? error : 0);
    if (error)
        contact_remove(m, c, true);
    else if (c->sent == sizeof c->out && c->received == sizeof c->in)
        return contact_done(m, c);
    return FCDP_OK;
}

/* What accept() says of the connection that it would have returned, or of the network, passes. */
static fcdp_status callers_take(meeting *m) {
    while (m->n_strangers < MAX_STRANGERS) {
        int fd = accept4(m->listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS ||
                       errno == EBADF || errno == EINVAL))
            return fcdp__fail(FCDP_ERR_SYSTEM, "accept: %s", strerror(errno));
        if (fd < 0) return FCDP_OK;
        contact_add(m, fd, NOBODY);
        m->n_strangers++;
    }
    return FCDP_OK;
}

/* ---- the meeting ---- */

static bool is_there(const meeting *m, uint32_t member) {
    bool is_there = true;
    for (uint32_t channel = 0; channel < m->n_channels && member != m->members->me; channel++)
        is_there = is_there && *fd_of(m, channel, member) >= 0;
    return is_there;
}

static fcdp_status too_late(const meeting *m, double timeout_s) {
    char text[512] = "", at[FCDP_ADDRESS_TEXT_BYTES];
    for (uint32_t i = 0; i < m->members->n; i++) {
        size_t end = strlen(text);
        if (is_there(m, i)) continue;
        fcdp__interface_text(i < m->members->me ? &m->cards[i].at : &m->listener->card.at, at);
        snprintf(text + end, sizeof text - end, "%srank %u (%s %s)", end ? ", " : "", m->members->ranks[i],
                 i < m->members->me ? "called at" : "is to call", at);
    }
    return fcdp__fail(
        FCDP_ERR_TIMEOUT,
        "no connection after %.0f s to %s; does a firewall stand between? GLOO_SOCKET_IFNAME names the "
        "interface that joins the nodes",
        timeout_s, text);
}

/* Until something can move, but no longer than until `until_ns`. */
static fcdp_status wait(meeting *m, uint64_t until_ns) {
    bool listens = m->n_strangers < MAX_STRANGERS;
    m->polled[0] = (struct pollfd){.fd = listens ? m->listener->fd : -1, .events = POLLIN};
    for (uint32_t i = 0; i < m->n_contacts; i++) {
        m->polled[1 + i] = (struct pollfd){.fd = m->contacts[i].fd,
                                           .events = contact_awaits(&m->contacts[i])};
        if (!m->contacts[i].calls && m->contacts[i].until_ns < until_ns) until_ns = m->contacts[i].until_ns;
    }
    uint64_t now_ns = fcdp__now_ns();
    int ms = until_ns > now_ns ? (int)((until_ns - now_ns) / 1000000) + 1 : 0;
    if (poll(m->polled, 1 + m->n_contacts, ms) >= 0) return FCDP_OK;
    if (errno != EINTR) return fcdp__fail(FCDP_ERR_SYSTEM, "poll: %s", strerror(errno));
    for (uint32_t i = 0; i <= m->n_contacts; i++) m->polled[i].revents = 0;
    return FCDP_OK;
}

static fcdp_status meet(meeting *m, double timeout_s) {
    uint64_t until_ns = fcdp__now_ns() + (uint64_t)(timeout_s * 1e9);
    fcdp_status status = FCDP_OK;
    for (uint32_t channel = 0; channel < m->n_channels; channel++)
        for (uint32_t i = 0; i < m->members->me && !status; i++) status = call(m, i, channel);
    while (!status && m->n_open < m->n_channels * (m->members->n - 1)) {
        uint64_t now_ns = fcdp__now_ns();
        if (now_ns >= until_ns) return too_late(m, timeout_s);
        status = wait(m, until_ns);
        now_ns = fcdp__now_ns();
        for (uint32_t i = m->n_contacts; i-- > 0 && !status;) {
            if (m->polled[1 + i].revents)
                status = contact_serve(m, &m->contacts[i]);
            else if (!m->contacts[i].calls && now_ns >= m->contacts[i].until_ns)
                contact_remove(m, &m->contacts[i], true);
        }
        if (!status && m->polled[0].revents) status = callers_take(m);
    }
    return status;
}

fcdp_status fcdp__sockets_connect(fcdp_listener *listener, const fcdp_members *members, uint32_t n_channels,
                                  const fcdp_card *cards, double timeout_s, int *fds_out) {
    size_t n = (size_t)members->n * n_channels, most = n + MAX_STRANGERS;
    meeting m = {.listener = listener, .members = members, .n_channels = n_channels, .cards = cards};
    m.contacts = calloc(most, sizeof *m.contacts);
    m.polled = calloc(1 + most, sizeof *m.polled);
    m.fds = malloc(n * sizeof *m.fds);
    for (size_t i = 0; i < n && m.fds; i++) m.fds[i] = -1;
    fcdp_status status = m.contacts && m.polled && m.fds
                             ? meet(&m, timeout_s)
                             : fcdp__fail(FCDP_ERR_SYSTEM, "no memory for %u connections", members->n);
    for (uint32_t i = 0; i < m.n_contacts; i++) close(m.contacts[i].fd);
    for (size_t i = 0; i < n && m.fds && status; i++)
        if (m.fds[i] >= 0) close(m.fds[i]);
    if (!status) memcpy(fds_out, m.fds, n * sizeof *m.fds);
    free(m.contacts);
    free(m.polled);
    free(m.fds);
    return status;
}
