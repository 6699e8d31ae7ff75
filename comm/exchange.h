/* exchange.h - all-gathers of host memory among the members of a lane, over TCP.
 *
 * What a transport's exchange, check, abort, missing and on_failure promise (transport.h), without a thread
 * of its own.
 */
#ifndef FCDP_EXCHANGE_H
#define FCDP_EXCHANGE_H

#include "comm/sockets.h"
#include "comm/transport.h"

typedef struct fcdp_exchange fcdp_exchange;

/* `fds`: fcdp__sockets_connect's for so many channels, taken over if this succeeds. timeout_s: how long a
 * member may move no byte. */
fcdp_status fcdp__exchange_create(const fcdp_members *members, uint32_t n_channels, const int *fds,
                                  double timeout_s, fcdp_exchange **exchange_out) FCDP_MUST_CHECK;
/* Connects all channels and creates: fcdp__sockets_connect within limit_s, whose errors these are. The
 * listener stays the caller's. */
fcdp_status fcdp__exchange_connect(fcdp_listener *listener, const fcdp_members *members,
                                   const fcdp_card *cards, double limit_s, double timeout_s,
                                   fcdp_exchange **exchange_out) FCDP_MUST_CHECK;
/* No call of it is under way. The members may still be reading what they got last; a member that wants more
 * gets an error. NULL, or a forked child's: nothing. */
void fcdp__exchange_destroy(fcdp_exchange *exchange);

/* As transport.h has them. One thread at a time runs on a channel; the others are any thread's.
 * FCDP_ERR_PEER: a member has ended, or is at another exchange. FCDP_ERR_TIMEOUT: a member did not come. */
fcdp_status fcdp__exchange_run(fcdp_exchange *exchange, fcdp_channel on, void *buffer,
                               size_t bytes) FCDP_MUST_CHECK;
fcdp_status fcdp__exchange_check(fcdp_exchange *exchange) FCDP_MUST_CHECK;
void fcdp__exchange_abort(fcdp_exchange *exchange, const char *why);
bool fcdp__exchange_missing(fcdp_exchange *exchange, char *text_out, size_t text_bytes);
void fcdp__exchange_on_failure(fcdp_exchange *exchange, void (*failed)(void *arg), void *arg);

#endif
