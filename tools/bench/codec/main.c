/* main.c - how many bits a weight's difference takes after an optimizer's step, and how fast one core codes.
 *
 * The weights are modelled (weights.h). Rates are of the array's bytes, the least time of the rounds: an
 * encoder reads two such arrays, a decoder one and writes one.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/codec.h"
#include "tools/bench/codec/weights.h"

static const char usage[] = "fcdp-codec [--size MIB] [--rounds N] [--portable]\n"
                            "    --size      of each array (64; at most 4096)\n"
                            "    --rounds    of which the fastest counts (5; at most 1000)\n"
                            "    --portable  the code for any processor, also where there is a faster one\n";

static struct {
    size_t bytes;
    unsigned rounds;
} settings = {(size_t)64 << 20, 5};

typedef struct arrays {
    void *base, *now, *out, *wire;
    size_t bytes, capacity;
} arrays;

/* A step's weights and the next one's; the number that changed. */
static size_t step_make(const arrays *a, unsigned element_bytes, double lr) {
    uint64_t state = 1;
    size_t n = a->bytes / element_bytes, n_changed = 0;
    for (size_t i = 0; i < n; i++) {
        double w, u;
        weights_normal_pair(&state, &w, &u);
        float before = weights_first(w), after = weights_next(before, u, lr);
        if (element_bytes == 2) {
            ((uint16_t *)a->base)[i] = weights_bf16(before);
            ((uint16_t *)a->now)[i] = weights_bf16(after);
            n_changed += weights_bf16(before) != weights_bf16(after);
        } else {
            ((float *)a->base)[i] = before;
            ((float *)a->now)[i] = after;
            n_changed += before != after;
        }
    }
    return n_changed;
}

static double rate(size_t bytes, uint64_t ns) {
    return (double)bytes / (double)(ns ? ns : 1);
}

static void keep_least(uint64_t *least_ns, uint64_t begin_ns) {
    uint64_t ns = fcdp__now_ns() - begin_ns;
    if (ns < *least_ns) *least_ns = ns;
}

static bool row_print(const arrays *a, const char *name, unsigned element_bytes, double lr) {
    size_t n_changed = step_make(a, element_bytes, lr), wire = 0;
    uint64_t encode_ns = UINT64_MAX, decode_ns = UINT64_MAX, copy_ns = UINT64_MAX;
    for (unsigned i = 0; i < settings.rounds; i++) {
        uint64_t begin_ns = fcdp__now_ns();
        wire = fcdp__delta_encode(a->base, a->now, a->bytes, element_bytes, a->wire, a->capacity);
        keep_least(&encode_ns, begin_ns);
        begin_ns = fcdp__now_ns();
        if (fcdp__delta_decode(a->base, a->out, a->bytes, element_bytes, a->wire, wire)) {
            fprintf(stderr, "fcdp-codec: %s\n", fcdp_error_text());
            return false;
        }
        keep_least(&decode_ns, begin_ns);
        if (memcmp(a->out, a->now, a->bytes) != 0) {
            fprintf(stderr, "fcdp-codec: what was decoded is not what was encoded: %s, lr %g\n", name, lr);
            return false;
        }
        begin_ns = fcdp__now_ns();
        memcpy(a->out, a->now, a->bytes);
        keep_least(&copy_ns, begin_ns);
    }
    size_t n = a->bytes / element_bytes;
    printf("| %s | %.0e | %.2f %% | %.2f | %.4f | %.1f | %.1f | %.1f |\n", name, lr,
           100 * (double)n_changed / (double)n, 8 * (double)wire / (double)n, (double)wire / (double)a->bytes,
           rate(a->bytes, encode_ns), rate(a->bytes, decode_ns), rate(a->bytes, copy_ns));
    fflush(stdout);
    return true;
}

static bool number_read(const char *text, unsigned most, unsigned *number_out) {
    char *end;
    unsigned long number = strtoul(text, &end, 10);
    *number_out = (unsigned)number;
    return *text >= '0' && *text <= '9' && !*end && number >= 1 && number <= most;
}

static bool settings_read(int argc, char **argv) {
    static const struct option options[] = {
        {"size", 1, NULL, 's'}, {"rounds", 1, NULL, 'r'}, {"portable", 0, NULL, 'p'}, {NULL, 0, NULL, 0}};
    unsigned mib;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == 'p')
            fcdp__delta_portable = true;
        else if (c == 's' && number_read(optarg, 4096, &mib))
            settings.bytes = (size_t)mib << 20;
        else if (c != 'r' || !number_read(optarg, 1000, &settings.rounds))
            return false;
    }
    return optind == argc;
}

int main(int argc, char **argv) {
    static const double lrs[] = {3e-4, 1e-4, 1e-5, 1e-6};
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        fputs(usage, stdout);
        return 0;
    }
    if (!settings_read(argc, argv)) {
        fputs(usage, stderr);
        return 2;
    }
    arrays a = {.bytes = settings.bytes, .capacity = fcdp__delta_bound(settings.bytes)};
    void **each[] = {&a.base, &a.now, &a.out, &a.wire};
    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        size_t bytes = i < 3 ? a.bytes : a.capacity;
        *each[i] = malloc(bytes);
        if (!*each[i]) {
            fprintf(stderr, "fcdp-codec: no memory for four arrays of %zu bytes: try a smaller --size\n",
                    bytes);
            return 1;
        }
        memset(*each[i], 1, bytes);
    }
    printf("%zu MiB of weights, the fastest of %u rounds on one core%s\n\n"
           "| weights | lr | changed | bits a weight | of the array | encode GB/s | decode GB/s | memcpy "
           "GB/s |\n"
           "| --- | --- | --- | --- | --- | --- | --- | --- |\n",
           settings.bytes >> 20, settings.rounds,
           fcdp__delta_portable ? ", with the code for any processor" : "");
    bool good = true;
    for (size_t i = 0; good && i < 2 * sizeof lrs / sizeof *lrs; i++) {
        bool half = i < sizeof lrs / sizeof *lrs;
        good = row_print(&a, half ? "bf16" : "float32", half ? 2 : 4, lrs[i % (sizeof lrs / sizeof *lrs)]);
    }
    for (size_t i = 0; i < sizeof each / sizeof *each; i++) free(*each[i]);
    return good ? 0 : 1;
}
