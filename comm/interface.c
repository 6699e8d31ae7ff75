/* interface.c - chooses one of this machine's IP addresses, by what the job says of its network. It reads no
 * environment, and opens no connection. */
#include "comm/interface.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { HOST_NAME_BYTES = 256 };

/* ---- addresses ---- */

socklen_t fcdp__interface_bytes(const struct sockaddr_storage *address) {
    return address->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
}

void fcdp__interface_text(const struct sockaddr_storage *address, char text_out[FCDP_ADDRESS_TEXT_BYTES]) {
    char host[INET6_ADDRSTRLEN] = "?";
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    bool is_v6 = address->ss_family == AF_INET6;
    memcpy(&v4, address, sizeof v4);
    memcpy(&v6, address, sizeof v6);
    inet_ntop(address->ss_family, is_v6 ? (const void *)&v6.sin6_addr : &v4.sin_addr, host, sizeof host);
    unsigned port = ntohs(is_v6 ? v6.sin6_port : v4.sin_port);
    if (port)
        snprintf(text_out, FCDP_ADDRESS_TEXT_BYTES, is_v6 ? "[%s]:%u" : "%s:%u", host, port);
    else
        snprintf(text_out, FCDP_ADDRESS_TEXT_BYTES, "%s", host);
}

static bool is_loopback(const struct sockaddr_storage *address) {
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    memcpy(&v4, address, sizeof v4);
    memcpy(&v6, address, sizeof v6);
    return address->ss_family == AF_INET6 ? IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr)
                                          : ntohl(v4.sin_addr.s_addr) >> 24 == 127;
}

/* Such an address is of one link, and its number of the link is this machine's own. */
static bool is_link_local(const struct sockaddr *address) {
    struct sockaddr_in6 v6;
    if (address->sa_family != AF_INET6) return false;
    memcpy(&v6, address, sizeof v6);
    return IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr);
}

static void address_take(const struct sockaddr *from, struct sockaddr_storage *address_out) {
    *address_out = (struct sockaddr_storage){.ss_family = from->sa_family};
    memcpy(address_out, from, fcdp__interface_bytes(address_out));
}

/* ---- lists of interfaces ---- */

int fcdp__interface_place(const char *list, bool is_nccls, const char *name) {
    bool excludes = is_nccls && *list == '^';
    list += excludes;
    bool is_exact = !is_nccls || *list == '=';
    list += is_nccls && *list == '=';
    for (int place = 0;; place++) {
        size_t bytes = strcspn(list, ",");
        bool is_it = bytes && !strncmp(list, name, bytes) && (!is_exact || !name[bytes]);
        if (is_it) return excludes ? -1 : place;
        if (!list[bytes]) return excludes ? 0 : -1;
        list += bytes + 1;
    }
}

/* The first in the list's order; of one place those of other machines' reach first, and IPv4 before IPv6. */
static int preference(int place, const struct ifaddrs *interface) {
    bool is_inner = (interface->ifa_flags & IFF_LOOPBACK) || !strncmp(interface->ifa_name, "docker", 6);
    return place * 4 + is_inner * 2 + (interface->ifa_addr->sa_family == AF_INET6);
}

static fcdp_status of_list(const char *variable, const char *list, bool is_nccls,
                           struct sockaddr_storage *address_out) {
    struct ifaddrs *all;
    int best = INT_MAX;
    if (getifaddrs(&all)) return fcdp__fail(FCDP_ERR_SYSTEM, "getifaddrs: %s", strerror(errno));
    for (const struct ifaddrs *i = all; i; i = i->ifa_next) {
        if (!i->ifa_addr || !(i->ifa_flags & IFF_UP) || is_link_local(i->ifa_addr)) continue;
        if (i->ifa_addr->sa_family != AF_INET && i->ifa_addr->sa_family != AF_INET6) continue;
        int place = fcdp__interface_place(list, is_nccls, i->ifa_name);
        if (place < 0 || preference(place, i) >= best) continue;
        best = preference(place, i);
        address_take(i->ifa_addr, address_out);
    }
    freeifaddrs(all);
    if (best < INT_MAX) return FCDP_OK;
    return fcdp__fail(FCDP_ERR_UNSUPPORTED, "%s=%s: no such network interface is up and has an IP address",
                      variable, list);
}

/* ---- by the machines' names ---- */

/* The address from which this machine sends to `to`. Connecting a UDP socket sends nothing. */
static bool source_of(const struct addrinfo *to, struct sockaddr_storage *address_out) {
    int fd = socket(to->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return false;
    struct sockaddr_storage from = {0};
    socklen_t bytes = sizeof from;
    bool found = !connect(fd, to->ai_addr, to->ai_addrlen) &&
                 !getsockname(fd, (struct sockaddr *)&from, &bytes);
    close(fd);
    if (found) address_take((const struct sockaddr *)&from, address_out);
    return found;
}

/* An address of the host's name may be of no interface of its own. */
static bool is_own(const struct addrinfo *at, struct sockaddr_storage *address_out) {
    int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return false;
    bool binds = !bind(fd, at->ai_addr, at->ai_addrlen);
    close(fd);
    if (binds) address_take(at->ai_addr, address_out);
    return binds;
}

/* The first of the name's addresses that `serves` takes, and not the loopback's if there is another. */
static bool of_name(const char *name, const char *port,
                    bool (*serves)(const struct addrinfo *, struct sockaddr_storage *),
                    struct sockaddr_storage *address_out) {
    const struct addrinfo wanted = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_DGRAM};
    struct addrinfo *all;
    struct sockaddr_storage found;
    bool any = false;
    if (getaddrinfo(name, port, &wanted, &all)) return false;
    for (const struct addrinfo *at = all; at && !(any && !is_loopback(address_out)); at = at->ai_next) {
        if (is_link_local(at->ai_addr) || !serves(at, &found) || (any && is_loopback(&found))) continue;
        *address_out = found;
        any = true;
    }
    freeaddrinfo(all);
    return any;
}

static void port_clear(struct sockaddr_storage *address) {
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    memcpy(&v4, address, sizeof v4);
    memcpy(&v6, address, sizeof v6);
    v4.sin_port = v6.sin6_port = 0;
    if (address->ss_family == AF_INET6)
        memcpy(address, &v6, sizeof v6);
    else
        memcpy(address, &v4, sizeof v4);
}

fcdp_status fcdp__interface_choose(const fcdp_interface_hints *hints, struct sockaddr_storage *address_out) {
    struct sockaddr_storage by_master, by_name;
    char host[HOST_NAME_BYTES] = "";
    if (hints->gloo && *hints->gloo) return of_list("GLOO_SOCKET_IFNAME", hints->gloo, false, address_out);
    if (hints->nccl && *hints->nccl) return of_list("NCCL_SOCKET_IFNAME", hints->nccl, true, address_out);
    bool has_master = hints->master && *hints->master && of_name(hints->master, "9", source_of, &by_master);
    bool has_name = !(has_master && !is_loopback(&by_master)) && !gethostname(host, sizeof host - 1) &&
                    of_name(host, NULL, is_own, &by_name);
    if (!has_master && !has_name)
        return fcdp__fail(
            FCDP_ERR_UNSUPPORTED,
            "neither MASTER_ADDR (%s) nor the host's name (%s) leads to an address of this machine; "
            "GLOO_SOCKET_IFNAME names the interface that joins the nodes",
            hints->master && *hints->master ? hints->master : "not set", host);
    *address_out = has_name && !(has_master && is_loopback(&by_name)) ? by_name : by_master;
    port_clear(address_out);
    return FCDP_OK;
}
