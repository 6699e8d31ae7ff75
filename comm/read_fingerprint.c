/* read_fingerprint.c - see the header. */
#include "comm/read_fingerprint.h"

#include <stdlib.h>

#include "comm/copy_fingerprint.h"
#include "comm/internal.h"

/* group->read_pieces[i]: of how many pieces extent i is in the batch; 0: it is not. */
static size_t pieces_collect(fcdp_group *group, const fcdp_evidence *evidence, uint64_t *arrays_out,
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
        if (group->stale[i])
            fcdp__validity_await(group->validity, i, &evidence->signals[i], group->n_reads);
        at += n_pieces;
    }
    return n;
}

static bool any_stale(const fcdp_group *group) {
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        if (group->stale[i]) return true;
    return false;
}

static size_t all_pieces(const fcdp_group *group, const fcdp_evidence *evidence) {
    size_t n = 0;
    for (uint32_t i = 0; i < group->layout->n_extents; i++) n += fcdp__evidence_n_pieces(evidence, i);
    return n;
}

fcdp_status fcdp__read_fingerprint_begin(fcdp_group *group, const fcdp_evidence *evidence,
                                         fcdp_stream stream) {
    fcdp_status status = fcdp__read_fingerprint_end(group);
    if (status || !any_stale(group)) return status;
    size_t n = all_pieces(group, evidence);
    uint64_t *arrays = malloc((n + 1) * sizeof *arrays);
    size_t *bytes = malloc((n + 1) * sizeof *bytes);
    if (!arrays || !bytes) {
        status = fcdp__fail(FCDP_ERR_SYSTEM, "no memory for %zu shards of '%s'", n, group->name);
    } else {
        n = pieces_collect(group, evidence, arrays, bytes);
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
        return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for %zu fingerprints of '%s'", n, group->name);
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
