/* sockets.h - TCP connections among the members of a lane: of each two of them, one for each channel.
 *
 *     fcdp__sockets_listen on every member -> its card; the caller brings every card to every member
 *     -> fcdp__sockets_connect on every member, a collective of them
 *
 * A card has a secret. A connection that does not begin with the secret of the card that it was made by is
 * closed, and changes nothing for the members.
 */
#ifndef FCDP_SOCKETS_H
#define FCDP_SOCKETS_H

#include <sys/socket.h>

#include "base/base.h"

enum { FCDP_TOKEN_BYTES = 16 };

typedef struct fcdp_card {
    struct sockaddr_storage at;
    uint8_t token[FCDP_TOKEN_BYTES];
} fcdp_card;

/* Of one lane. */
typedef struct fcdp_members {
    uint32_t n, me;
    const uint32_t *ranks; /* n, as messages name them */
} fcdp_members;

typedef struct fcdp_listener fcdp_listener;

/* On a port of the kernel's choice of `address`. */
fcdp_status fcdp__sockets_listen(const struct sockaddr_storage *address,
                                 fcdp_listener **listener_out) FCDP_MUST_CHECK;
/* Valid as long as the listener. */
const fcdp_card *fcdp__sockets_card(const fcdp_listener *listener);
/* `cards`: of all members, in their order. n_channels: the same on all. fds_out: n_channels times members->n
 * descriptors of connections that do not block, channel by channel, the caller's to close; those of `me` are
 * -1. Returns within timeout_s, with all of them or none. FCDP_ERR_TIMEOUT: a member did not come. */
fcdp_status fcdp__sockets_connect(fcdp_listener *listener, const fcdp_members *members, uint32_t n_channels,
                                  const fcdp_card *cards, double timeout_s, int *fds_out) FCDP_MUST_CHECK;
/* Its connections stay. NULL: nothing. */
void fcdp__sockets_close(fcdp_listener *listener);

#endif
