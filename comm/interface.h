/* interface.h - which of this machine's IP addresses the job's other machines reach. */
#ifndef FCDP_INTERFACE_H
#define FCDP_INTERFACE_H

#include <sys/socket.h>

#include "base/base.h"

/* What the job says of its network; NULL or "": nothing. */
typedef struct fcdp_interface_hints {
    const char *gloo; /* GLOO_SOCKET_IFNAME: names, by commas */
    const char *nccl; /* NCCL_SOCKET_IFNAME: beginnings of names, by commas; "=eth0" is a name, and behind "^"
                           are those that are not to be used */
    const char *master; /* MASTER_ADDR: the machine of rank 0 */
} fcdp_interface_hints;

/* The first of these that is said: an interface that gloo may use, or else NCCL; the address from which
 * `master` is reached; the address that the host's name has, as gloo takes. A loopback address is taken where
 * a list names it or there is no other: of rank 0's machine it is often what MASTER_ADDR says. The port is 0.
 * FCDP_ERR_UNSUPPORTED: a list has no interface that is up, or nothing gives an address. May ask a name
 * server. */
fcdp_status fcdp__interface_choose(const fcdp_interface_hints *hints,
                                   struct sockaddr_storage *address_out) FCDP_MUST_CHECK;

/* The place in `list`, NCCL's or gloo's, of what allows this interface; -1: nothing does. */
int fcdp__interface_place(const char *list, bool is_nccls, const char *name);

/* "10.0.0.1:29500", "[::1]:29500"; without the port where it is 0. */
enum { FCDP_ADDRESS_TEXT_BYTES = 64 };
void fcdp__interface_text(const struct sockaddr_storage *address, char text_out[FCDP_ADDRESS_TEXT_BYTES]);
/* Of the address, as bind() wants it. */
socklen_t fcdp__interface_bytes(const struct sockaddr_storage *address);

#endif
