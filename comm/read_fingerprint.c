/* read_fingerprint.c - see the header. */
#include "comm/read_fingerprint.h"

#include <stdlib.h>

#include "comm/copy_fingerprint.h"
#include "comm/internal.h"

/* group->read_pieces[i]: of how many pieces extent i is in the batch; 0: it is not. */
static void pieces_collect(fcdp_group *group, const fcdp_evidence *evidence, uint64_t *arrays_out,
                           size_t *bytes_out) {
    size_t n = 0, at = 0;
    group->n_reads++;
    for (uint32_t i = 0; i < group->layout->n_extents; i++) {
        size_t n_pieces = fcdp__evidence_n_pieces(evidence, i);
        group->read_pieces[i] = group->stale[i] ? n_pieces : 0;
        for (size_t p = at; p < at + group->read_pieces[i]; p++, n++) {
            arrays_out[n] = (uintptr_t)evidence->shards[p];
            bytes_out[n] = evidence->shard_bytes[p];
        }
        if (group->stale[i]) fcdp__validity_await(group->validity, i, &evidence->signals[i], group->n_reads);
        at += n_pieces;
    }
}

fcdp_status fcdp__read_fingerprint_begin(fcdp_group *group, const fcdp_evidence *evidence,
                                         fcdp_stream stream) {
    fcdp_status status = fcdp__read_fingerprint_end(group);
    size_t n = 0;
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        if (group->stale[i]) n += fcdp__evidence_n_pieces(evidence, i);
    if (status || n == 0) return status;
    uint64_t *arrays = malloc(n * sizeof *arrays);
    size_t *bytes = malloc(n * sizeof *bytes);
    if (!arrays || !bytes) {
        status = fcdp__comm_fail(
            group->comm, fcdp__fail(FCDP_ERR_SYSTEM, "no memory for %zu shards of '%s'", n, group->name));
    } else {
        pieces_collect(group, evidence, arrays, bytes);
        status = fcdp__comm_fingerprint_begin(group->comm, &group->reads, arrays, bytes, n, stream);
    }
    group->has_reads = status == FCDP_OK;
    free(arrays);
    free(bytes);
    return status;
}

fcdp_status fcdp__read_fingerprint_end(fcdp_group *group) {
    if (!group->has_reads) return FCDP_OK;
    size_t n = 0, at = 0;
    for (uint32_t i = 0; i < group->layout->n_extents; i++) n += group->read_pieces[i];
    uint64_t *fingerprints = malloc((n + 1) * sizeof *fingerprints);
    if (!fingerprints)
        return fcdp__comm_fail(
            group->comm,
            fcdp__fail(FCDP_ERR_SYSTEM, "no memory for %zu fingerprints of '%s'", n, group->name));
    fcdp_status status = fcdp__comm_fingerprint_end(group->comm, group->reads, fingerprints);
    fcdp_evidence taken = {.fingerprints = fingerprints, .n_pieces = group->read_pieces};
    for (uint32_t i = 0; i < group->layout->n_extents && !status; i++) {
        if (!group->read_pieces[i]) continue;
        uint64_t own;
        fcdp__validity_amend(group->validity, i, group->n_reads,
                             *fcdp__evidence_fingerprint(&taken, i, &at, &own));
    }
    group->has_reads = false;
    free(fingerprints);
    return status;
}
