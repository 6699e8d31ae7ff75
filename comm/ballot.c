/* ballot.c - agreements without a collective: shared memory within a node, log2 rounds between nodes.
 *
 * An agreement is on the critical path of every pass. A ring of all ranks would take a hop a rank; here only
 * a node's first rank leaves the node, and a maximum may be taken in any order, so ceil(log2 nodes) hops do.
 * The carrier moves the bytes; this file never opens a connection.
 *
 * A ballot travels in frames. The first is of one size on all ranks, and says how long the ballot is; nearly
 * all are over with it. Where a ballot is longer, the ranks know by then that all are of one length, and the
 * rest goes in frames as large as a rank's place in the meeting.
 */
#include "comm/ballot.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* `unlike` is 255 - `stamp`, byte by byte. Of their maxima over the ranks:
 *     stamp[i] + unlike[i] == 255 for all i <=> all ranks had the same stamp */
typedef struct frame_header {
    uint8_t failed;
    uint8_t stamp[2 * sizeof(uint64_t)]; /* the agreement's number, the ballot's length */
    uint8_t unlike[2 * sizeof(uint64_t)];
} frame_header;

enum { TEXT_BYTES = 512 };
_Static_assert(sizeof(frame_header) == 33, "a frame's header is bytes, without padding");
_Static_assert(sizeof(frame_header) + TEXT_BYTES <= (size_t)FCDP_MEETING_BYTES, "a text fits a place");
_Static_assert((int)FCDP_BALLOT_FRAME_BYTES <= (int)FCDP_MEETING_BYTES, "a frame fits a rank's place");

static void header_make(frame_header *header, uint64_t number, uint64_t n) {
    *header = (frame_header){0};
    memcpy(header->stamp, &number, sizeof number);
    memcpy(header->stamp + sizeof number, &n, sizeof n);
    for (size_t i = 0; i < sizeof header->stamp; i++) header->unlike[i] = (uint8_t)(255 - header->stamp[i]);
}

static bool header_is_one(const frame_header *header) {
    for (size_t i = 0; i < sizeof header->stamp; i++)
        if (header->stamp[i] + header->unlike[i] != 255) return false;
    return true;
}

static void frames_combine(uint8_t *into, const uint8_t *other, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (other[i] > into[i]) into[i] = other[i];
}

/* Slice 0's is the verdict's. */
static uint8_t *place_of(const fcdp_ballots *ballots, uint32_t slice) {
    return (uint8_t *)fcdp__host_data(ballots->meeting) + (size_t)slice * FCDP_MEETING_BYTES;
}

uint32_t fcdp__ballot_n_rounds(uint32_t n_nodes) {
    uint32_t n = 0;
    while ((UINT64_C(1) << n) < n_nodes) n++;
    return n;
}

/* ---- the node's first rank ---- */

/* The other ranks' ballots, in `frame`. */
static fcdp_status node_collect(const fcdp_ballots *ballots, uint8_t *frame, size_t bytes) {
    fcdp_status status = fcdp__board_wait_all(ballots->meeting, FCDP_BOARD_CAME, ballots->n_meetings,
                                              "the agreement of this node's ranks");
    for (uint32_t slice = 1; slice < ballots->topology.node_size && !status; slice++)
        frames_combine(frame, place_of(ballots, slice), bytes);
    return status;
}

/* `status`: of this node. The other nodes' ballots too, in `frame`, unless there was a failure: then they are
 * told, and the first one's status and text are returned. When its time is over, this rank does not wait for
 * others to tell: they have given up by then, or do so by themselves. */
static fcdp_status nodes_ask(fcdp_ballots *ballots, const fcdp_carrier *carrier, fcdp_status status,
                             uint8_t *frame, size_t bytes, uint64_t start_ns) {
    uint8_t *received = frame + bytes;
    const fcdp_topology *topology = &ballots->topology;
    uint32_t n_rounds = fcdp__ballot_n_rounds(topology->n_nodes), n = topology->n_nodes;
    frame_header *header = (frame_header *)(void *)frame;
    fcdp_failure first = fcdp__failure_keep(status);
    for (uint32_t k = 0; k < n_rounds; k++) {
        uint32_t distance = UINT32_C(1) << k;
        double left_s = ballots->timeout_s - (double)(fcdp__now_ns() - start_ns) / 1e9;
        if (first.status && left_s <= 0) break;
        header->failed = first.status != FCDP_OK;
        status = carrier->swap(carrier->ctx, (topology->node + distance) % n,
                               (topology->node + n - distance) % n, frame, received, bytes,
                               left_s > 0 ? left_s : 0);
        ballots->sent_bytes += bytes;
        if (!status && ((const frame_header *)(const void *)received)->failed)
            status = fcdp__fail(FCDP_ERR_PEER, "the ranks of another node did not all come, or one failed");
        if (!status)
            frames_combine(frame, received, bytes);
        else if (!first.status)
            first = fcdp__failure_keep(status);
    }
    header->failed = first.status != FCDP_OK;
    return first.status ? fcdp__failure_restore(&first) : FCDP_OK;
}

static void node_tell(const fcdp_ballots *ballots, const uint8_t *frame, size_t bytes) {
    uint8_t *verdict = place_of(ballots, 0);
    memcpy(verdict, frame, bytes);
    if (((const frame_header *)(const void *)frame)->failed)
        snprintf((char *)verdict + sizeof(frame_header), TEXT_BYTES, "%s", fcdp_error_text());
    fcdp__board_publish(ballots->meeting, FCDP_BOARD_TOLD, ballots->n_meetings);
}

/* It comes first, and collects then: by that the others see that it lives. */
static fcdp_status meeting_lead(fcdp_ballots *ballots, const fcdp_carrier *carrier, uint8_t *frame,
                                size_t bytes) {
    uint64_t start_ns = fcdp__now_ns();
    fcdp__board_publish(ballots->meeting, FCDP_BOARD_CAME, ballots->n_meetings);
    fcdp_status status = node_collect(ballots, frame, bytes);
    status = nodes_ask(ballots, carrier, status, frame, bytes, start_ns);
    node_tell(ballots, frame, bytes);
    return status;
}

/* ---- its other ranks ---- */

/* Where the first rank gives up, it does so by its own timeout, which begins when it comes: it says why. */
static fcdp_status meeting_attend(const fcdp_ballots *ballots, uint8_t *frame, size_t bytes) {
    const char *what = "the agreement of this node's ranks";
    double told_within_s = 1.1 * ballots->timeout_s + 1;
    memcpy(place_of(ballots, ballots->topology.local), frame, bytes);
    fcdp__board_publish(ballots->meeting, FCDP_BOARD_CAME, ballots->n_meetings);
    fcdp_status status = fcdp__board_wait(ballots->meeting, FCDP_BOARD_CAME, 0, ballots->n_meetings,
                                          ballots->timeout_s, what);
    if (!status)
        status = fcdp__board_wait(ballots->meeting, FCDP_BOARD_TOLD, 0, ballots->n_meetings, told_within_s,
                                  "what the other nodes' ranks say");
    if (status) return status;
    memcpy(frame, place_of(ballots, 0), bytes);
    if (!((const frame_header *)(const void *)frame)->failed) return FCDP_OK;
    return fcdp__fail(FCDP_ERR_PEER, "%.*s", TEXT_BYTES,
                      (const char *)place_of(ballots, 0) +
                          sizeof(frame_header)); /* longer than the last frame */
}

/* ---- an agreement ---- */

/* n votes at `votes` become their maximum. `frame` begins with the header, and has `bytes` in all; behind it
 * is room for another one. */
static fcdp_status meeting_hold(fcdp_ballots *ballots, const fcdp_carrier *carrier, uint8_t *frame,
                                size_t bytes, uint8_t *votes, size_t n) {
    ballots->n_meetings++;
    if (n) memcpy(frame + sizeof(frame_header), votes, n);
    fcdp_status status = ballots->topology.local == 0 ? meeting_lead(ballots, carrier, frame, bytes)
                                                      : meeting_attend(ballots, frame, bytes);
    if (!status && n) memcpy(votes, frame + sizeof(frame_header), n);
    return status;
}

fcdp_status fcdp__ballots_agree(fcdp_ballots *ballots, const fcdp_carrier *carrier, uint64_t number,
                                uint8_t *votes, size_t n) {
    size_t header_bytes = sizeof(frame_header), first = FCDP_BALLOT_FRAME_BYTES - header_bytes;
    if (ballots->failed)
        return fcdp__fail(FCDP_ERR_PEER, "an agreement of this shard group has failed before");
    uint8_t *frame = calloc(1, 2 * (n > first ? (size_t)FCDP_MEETING_BYTES : FCDP_BALLOT_FRAME_BYTES));
    if (!frame) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a ballot of %zu votes", n);
    fcdp_status status = FCDP_OK;
    for (size_t at = 0; at < n || at == 0;) {
        size_t room = at ? FCDP_MEETING_BYTES - header_bytes : first, part = n - at < room ? n - at : room;
        header_make((frame_header *)(void *)frame, number, n);
        status = meeting_hold(ballots, carrier, frame, at ? header_bytes + part : FCDP_BALLOT_FRAME_BYTES,
                              votes + at, part);
        if (status || !header_is_one((const frame_header *)(const void *)frame)) break;
        at += part ? part : 1;
    }
    ballots->failed = status != FCDP_OK;
    if (!status && !header_is_one((const frame_header *)(const void *)frame))
        status = fcdp__fail(FCDP_ERR_INVALID,
                            "the ranks are not in the same place (agreement %llu, %zu votes); do all ranks "
                            "run the same model code?",
                            (unsigned long long)number, n);
    free(frame);
    return status;
}
