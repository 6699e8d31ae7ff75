/* options.c - the table of every FCDP_* variable, with its parser.
 *
 * A default is the table's own text, read by the same parser as a user's value. This file acts on no value.
 */
#include "base/options.h"

#include <ctype.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/size.h"

typedef enum value_kind {
    VALUE_TEXT,   /* a known name that someone else reads */
    VALUE_FLAG,   /* `values` is 0|1, into a bool */
    VALUE_CHOICE, /* index in `values`, into an enum of the same order */
    VALUE_INT,    /* min..max, into an int */
    VALUE_REAL,   /* min..max, into a double */
    VALUE_BYTES,  /* as in size.h, into a size_t */
    VALUE_PATH,   /* into a char[FCDP_OPTION_PATH_BYTES] */
} value_kind;

typedef struct option_parser {
    value_kind kind;
    size_t offset;
    double min, max;
} option_parser;

#define FIELD(kind, field, min, max) {VALUE_##kind, offsetof(fcdp_options, field), min, max}
#define NO_FIELD {VALUE_TEXT, 0, 0, 0}
#define BYTES_VALUES "bytes, e.g. 512M or 8GB"

/* audience, name, values, default, help, parser; the rows of one audience together */
#define OPTIONS(X)                                                                                           \
    X(USER, "FCDP", "0|1", "0", "turn FCDP on in an unmodified FSDP2 or FSDP1 script",                       \
      FIELD(FLAG, enabled, 0, 1))                                                                            \
    X(USER, "FCDP_TAU", "0..1", "0",                                                                         \
      "while device use is below this share of the budget, a group stays on the device after its use",       \
      FIELD(REAL, tau, 0, 1))                                                                                \
    X(USER, "FCDP_POLICY", "tau|next-use|auto", "auto",                                                      \
      "which groups stay on the device: tau: those that FCDP_TAU allows; next-use: whatever FCDP_TAU is, "   \
      "as many as fit of those that are needed soonest, once the order of uses is known; auto: next-use "    \
      "where FCDP allocates the device's tensors, unless FCDP_TAU is set or FCDP_FINGERPRINT is never; "     \
      "else tau",                                                                                            \
      FIELD(CHOICE, policy, 0, 0))                                                                           \
    X(USER, "FCDP_PLAN", "path", "",                                                                         \
      "a plan that fcdp-plan search has written: where each group lives between its uses. It goes before "   \
      "FCDP_TAU, FCDP_POLICY and FCDP_RESTORE; if it is of another model, they decide",                      \
      FIELD(PATH, plan, 0, 0))                                                                               \
    X(USER, "FCDP_DEVICE_BUDGET", BYTES_VALUES, "0",                                                         \
      "device memory for gathered parameters, and for tensors if FCDP allocates them; 0: what is free at "   \
      "start, less FCDP_HEADROOM",                                                                           \
      FIELD(BYTES, device_budget_bytes, 0, 0))                                                               \
    X(USER, "FCDP_HEADROOM", BYTES_VALUES, "2G",                                                             \
      "device memory that FCDP leaves to others where FCDP_DEVICE_BUDGET is 0: NCCL takes it as it "         \
      "connects, late; at most an eighth of the device",                                                     \
      FIELD(BYTES, headroom_bytes, 0, 0))                                                                    \
    X(USER, "FCDP_HOST_BUDGET", BYTES_VALUES, "0",                                                           \
      "host memory per node, for the groups of which a copy there spares most; 0: what the machine and its " \
      "cgroup allow",                                                                                        \
                                                                                                             \
      FIELD(BYTES, host_budget_bytes, 0, 0))                                                                 \
    X(USER, "FCDP_CACHE_DIR", "path", "",                                                                    \
      "a directory on each node's disk where frozen parameters are kept, so that the next run of a job "     \
      "gathers none of them",                                                                                \
      FIELD(PATH, cache_dir, 0, 0))                                                                          \
    X(USER, "FCDP_CACHE_SIZE", BYTES_VALUES, "0",                                                            \
      "the most that FCDP_CACHE_DIR may hold on a node: what was used longest ago makes room; 0: half of "   \
      "what the disk has free",                                                                              \
      FIELD(BYTES, cache_bytes, 0, 0))                                                                       \
    X(USER, "FCDP_SPILL_DIR", "path", "",                                                                    \
      "a directory on each node's disk for the groups for which host memory has no room: each rank keeps "   \
      "its slice in an unnamed file there; needs FCDP_PIN other than never, and over gloo one rank on a "    \
      "node, or models on CPUs",                                                                             \
      FIELD(PATH, spill_dir, 0, 0))                                                                          \
    X(USER, "FCDP_ALLOC", "fcdp|native", "fcdp",                                                             \
      "the allocator of tensors on a GPU: FCDP's, on the same pages as gathered parameters, or PyTorch's "   \
      "own",                                                                                                 \
      FIELD(CHOICE, alloc, 0, 0))                                                                            \
    X(USER, "FCDP_CODEC", "none|delta|auto|int8", "auto",                                                    \
      "how a gather sends parameters that have changed: auto: of a model on CPUs, as exact differences "     \
      "from the last gather while that is faster, by what link and codec were seen to take, else whole; "    \
      "delta: always as differences; none: always whole; int8: of a model on CPUs, rounded to a byte "       \
      "each, and a scale for 256 of them: training is not bit for bit the same",                             \
      FIELD(CHOICE, codec, 0, 0))                                                                            \
    X(USER, "FCDP_PREFETCH", "0..8", "1",                                                                    \
      "how many groups forward gathers ahead of their use, each into device pages of its own; 0: backward "  \
      "restores none ahead either, which takes the fewest device pages",                                     \
      FIELD(INT, prefetch, 0, 8))                                                                            \
    X(USER, "FCDP_REDUCE", "flat|hierarchical", "flat",                                                      \
      "how gradients are summed: flat: by FSDP's own reduce-scatter over all ranks; hierarchical: within "   \
      "each node, and then between the nodes, in their order, which sends less between them and rounds "     \
      "sums differently",                                                                                    \
      FIELD(CHOICE, reduce, 0, 0))                                                                           \
    X(USER, "FCDP_REDUCE_DTYPE", "same|bf16|int8", "same",                                                   \
      "with FCDP_REDUCE=hierarchical, what gradients are rounded to between nodes: same: nothing; bf16: "    \
      "bfloat16; int8: a byte each, and a scale for 256 of them",                                            \
      FIELD(CHOICE, reduce_dtype, 0, 0))                                                                     \
    X(USER, "FCDP_TIMEOUT", "0.1..86400", "300", "seconds to wait for another rank",                         \
      FIELD(REAL, timeout_s, 0.1, 86400))                                                                    \
    X(USER, "FCDP_LOG", "quiet|warn|info|debug", "warn", "what is written to stderr",                        \
      FIELD(CHOICE, log, 0, 0))                                                                              \
    X(USER, "FCDP_TRACE", "0..2", "1",                                                                       \
      "what is written to the event ring that fcdp-memtrace reads: 0: nothing; 1: what moves between tiers " \
      "and what threads and streams wait for; 2: each tensor's memory too",                                  \
      FIELD(INT, trace, 0, 2))                                                                               \
    X(EXPERT, "FCDP_DRIVER", "auto|cuda|sim", "auto",                                                        \
      "the device: CUDA, the simulated one, or CUDA where a device answers", FIELD(CHOICE, driver, 0, 0))    \
    X(EXPERT, "FCDP_RESTORE", "slice|whole|auto", "auto",                                                    \
      "how a node's ranks share what it has: slice: each restores its slice, and they all-gather; whole: "   \
      "each copies the "                                                                                     \
      "whole from the node's host memory; auto: slice over NCCL, whole over gloo and for models on "         \
      "the CPU",                                                                                             \
      FIELD(CHOICE, restore, 0, 0))                                                                          \
    X(EXPERT, "FCDP_CODEC_THREADS", "0..64", "0",                                                            \
      "with FCDP_CODEC=delta on a GPU, how many threads of a rank decode what one gather has brought; 0: "   \
      "half of the rank's share of the cores, at most 4",                                                    \
      FIELD(INT, codec_threads, 0, 64))                                                                      \
    X(EXPERT, "FCDP_HOST_COPIES", "node|numa", "node",                                                       \
      "where each rank restores the whole (FCDP_RESTORE), the copies of a group in a node's host memory: "   \
      "node: one; numa: one in each NUMA node of the ranks' devices, all in FCDP_HOST_BUDGET, so that each " \
      "rank reads from its own NUMA node; by slice, it does so with the one copy that there is",             \
      FIELD(CHOICE, host_copies, 0, 0))                                                                      \
    X(EXPERT, "FCDP_HOST_MAP", "names", "",                                                                  \
      "groups that take no device memory: the device reads them over PCIe, in host memory of each rank's. "  \
      "Names as in fcdp.stats(), their ends behind a dot, or patterns, with commas between: "                \
      "embed_tokens,layers.[0-3]",                                                                           \
      FIELD(PATH, host_map, 0, 0))                                                                           \
    X(EXPERT, "FCDP_MAPPING", "auto|slots|exact", "auto",                                                    \
      "device pages of gathered parameters: slots: groups take turns on pages that stay mapped; exact: a "   \
      "released group is unmapped, so that "                                                                 \
      "a stale access faults; auto: slots where torch makes stale accesses raise, and FCDP_CHECK is below "  \
      "2",                                                                                                   \
      FIELD(CHOICE, mapping, 0, 0))                                                                          \
    X(EXPERT, "FCDP_TRANSPORT", "auto|nccl|torch", "auto",                                                   \
      "what carries FCDP's collectives: nccl: NCCL, on communicators of FCDP's own, without Python; torch: " \
      "torch.distributed's gloo, through host "                                                              \
      "memory; auto: NCCL on a GPU, where it can serve",                                                     \
      FIELD(CHOICE, transport, 0, 0))                                                                        \
    X(EXPERT, "FCDP_NCCL_LIBRARY", "path", "", "libnccl.so.2 to use instead of torch's own", NO_FIELD)       \
    X(EXPERT, "FCDP_LOCAL_SIZE", "0..65536", "0", "ranks per node; 0: from the launcher (LOCAL_WORLD_SIZE)", \
      FIELD(INT, local_size, 0, 65536))                                                                      \
    X(EXPERT, "FCDP_PIN", "auto|require|never", "auto",                                                      \
      "page-lock the host tier: auto: if possible; require: or stop the job; never: not, so that "           \
      "FCDP_SPILL_DIR serves no group; a page of each group and what fcdp.sleep() saves are locked all the " \
      "same",                                                                                                \
      FIELD(CHOICE, pin, 0, 0))                                                                              \
    X(EXPERT, "FCDP_PIN_CPU", "auto|off", "auto",                                                            \
      "auto: a process whose model computes on a device runs on the CPUs of the device's NUMA node, if the " \
      "machine has several and nothing else has bound the process; off: threads are left where they are",    \
      FIELD(CHOICE, pin_cpu, 0, 0))                                                                          \
    X(EXPERT, "FCDP_FINGERPRINT", "auto|device|never", "auto",                                               \
      "compare parameters by content, to find unannounced changes: auto: by a kernel on a GPU, "             \
      "by the host on CPUs; device: by the kernel "                                                          \
      "on the simulated device too; never: other signs decide",                                              \
      FIELD(CHOICE, fingerprint, 0, 0))                                                                      \
    X(EXPERT, "FCDP_AGREE", "forward|unshard", "forward",                                                    \
      "how often the ranks agree on what is stale; unshard: for models that write parameters inside "        \
      "forward",                                                                                             \
      FIELD(CHOICE, agree, 0, 0))                                                                            \
    X(EXPERT, "FCDP_COALESCE", BYTES_VALUES, "1M",                                                           \
      "groups of which at most so much is stale cross the nodes together, in few collectives; 0: each by "   \
      "itself",                                                                                              \
      FIELD(BYTES, coalesce_bytes, 0, 0))                                                                    \
    X(EXPERT, "FCDP_WHOLE_TENSORS", "0|1", "1",                                                              \
      "full_tensor() of a parameter, and full state dicts, read the node's copy where it is fresh",          \
      FIELD(FLAG, whole_tensors, 0, 1))                                                                      \
    X(EXPERT, "FCDP_SUMMARY", "0|1", "1",                                                                    \
      "the line after the first step, and the two at exit: what was saved, what it cost",                    \
      FIELD(FLAG, summary, 0, 1))                                                                            \
    X(EXPERT, "FCDP_TRACE_BUFFER", BYTES_VALUES, "8M",                                                       \
      "size of the event ring of each process, of 64 bytes an event, down to a power of two; the oldest "    \
      "events are overwritten",                                                                              \
      FIELD(BYTES, trace_bytes, 0, 0))                                                                       \
    X(DEVELOPMENT, "FCDP_CHECK", "0..3", "0",                                                                \
      "internal checks: 0 corruption, 1 API, 2 locks and asserts, and freed tensors of more than 768 KiB "   \
      "are unmapped, so that a stale access faults, 3 every invariant",                                      \
      FIELD(INT, check, 0, 3))                                                                               \
    X(DEVELOPMENT, "FCDP_SIM_LIBRARY", "path", "", "the simulated driver, libfcdp_simgpu.so", NO_FIELD)      \
    X(DEVELOPMENT, "FCDP_SIM_CAPACITY", BYTES_VALUES, "", "simulated device memory", NO_FIELD)               \
    X(DEVELOPMENT, "FCDP_SIM_PCIE", "GB/s", "", "simulated rate between host and device, each way",          \
      NO_FIELD)                                                                                              \
    X(DEVELOPMENT, "FCDP_SIM_FAIL", "NAME:N[:CODE]", "",                                                     \
      "the simulated driver's N-th call of NAME fails with CODE", NO_FIELD)                                  \
    X(DEVELOPMENT, "FCDP_SIM_POISON", "0|1", "", "the simulated driver fills fresh pages with a pattern",    \
      NO_FIELD)                                                                                              \
    X(DEVELOPMENT, "FCDP_SIM_RACES", "0|1", "",                                                              \
      "the simulated driver fails on accesses of two streams to the same bytes that nothing orders",         \
      NO_FIELD)                                                                                              \
    X(DEVELOPMENT, "FCDP_SIM_SERIAL", "0|1", "",                                                             \
      "the simulated driver runs host functions one after another, as CUDA may", NO_FIELD)                   \
    X(DEVELOPMENT, "FCDP_SIM_ROOT", "path", "",                                                              \
      "a directory that is put before /sys and /proc where NUMA nodes and CPUs are read for the simulated "  \
      "device: the machine that it describes",                                                               \
      NO_FIELD)                                                                                              \
    X(DEVELOPMENT, "FCDP_SIM_NUMA", "node", "", "the simulated device's NUMA node", NO_FIELD)                \
    X(DEVELOPMENT, "FCDP_SIM_TIMELINE", "path", "",                                                          \
      "the simulated driver writes what its streams do as a Chrome trace; %p in the path is the process's "  \
      "id",                                                                                                  \
      NO_FIELD)
#define AS_ROW(audience, name, values, fallback, help, ...)                                                  \
    {name, values, fallback, help, FCDP_OPTION_##audience},
#define AS_PARSER(audience, name, values, fallback, help, ...) __VA_ARGS__,

static const fcdp_option_row rows[] = {OPTIONS(AS_ROW)};
static const option_parser parsers[] = {OPTIONS(AS_PARSER)};
enum { N_ROWS = sizeof rows / sizeof rows[0] };

/* What starts so is read by other programs: fcdp-lab, which checks it itself, the build, the tests. */
static const char *const others[] = {"FCDP_LAB_",     "FCDP_CACHE=",   "FCDP_PYTHON",
                                     "FCDP_JEMALLOC", "FCDP_LIBURING", "FCDP_TEST_"};

const fcdp_option_row *fcdp_options_table(size_t *n_out) {
    *n_out = N_ROWS;
    return rows;
}

/* "a|b|c" as "a, b or c". */
static void choices_describe(const char *values, char *text, size_t n_bytes) {
    size_t at = 0;
    const char *last_bar = strrchr(values, '|');
    for (const char *c = values; *c && at + 8 < n_bytes; c++) {
        if (*c != '|')
            text[at++] = *c;
        else
            at += (size_t)snprintf(text + at, n_bytes - at, c == last_bar ? " or " : ", ");
    }
    text[at] = '\0';
}

static fcdp_status value_refused(const fcdp_option_row *row, const option_parser *parser, const char *value) {
    char allowed[128];
    if (parser->kind == VALUE_INT)
        snprintf(allowed, sizeof allowed, "a whole number from %.0f to %.0f", parser->min, parser->max);
    else if (parser->kind == VALUE_REAL)
        snprintf(allowed, sizeof allowed, "a number from %g to %g", parser->min, parser->max);
    else if (parser->kind == VALUE_PATH)
        snprintf(allowed, sizeof allowed, "a path of less than %d bytes", FCDP_OPTION_PATH_BYTES);
    else if (parser->kind == VALUE_BYTES)
        snprintf(allowed, sizeof allowed, FCDP_SIZE_EXPECTED);
    else
        choices_describe(row->values, allowed, sizeof allowed);
    return fcdp__fail(FCDP_ERR_OPTION, "%s=%s: expected %s", row->name, value, allowed);
}

static bool choice_parse(const char *values, const char *value, int *index_out) {
    size_t n_value = strlen(value);
    int index = 0;
    for (const char *at = values;; index++) {
        size_t n = strcspn(at, "|");
        if (n == n_value && memcmp(at, value, n) == 0) {
            *index_out = index;
            return true;
        }
        if (!at[n]) return false;
        at += n + 1;
    }
}

/* A decimal number with '.', whatever locale the program set. */
static bool real_parse(const char *value, double min, double max, double *real_out) {
    if (!isdigit((unsigned char)value[0]) || value[strspn(value, "0123456789.eE+-")]) return false;
    locale_t c_locale = newlocale(LC_NUMERIC_MASK, "C", (locale_t)0);
    if (!c_locale) return false;
    char *end;
    double real = strtod_l(value, &end, c_locale);
    freelocale(c_locale);
    if (*end || !(real >= min && real <= max)) return false; /* nor an infinity */
    *real_out = real;
    return true;
}

/* One switch over the kinds, so that a row of the table needs no function of its own. */
static fcdp_status value_store(size_t row, const char *value, fcdp_options *options) {
    const option_parser *parser = &parsers[row];
    void *field = (char *)options + parser->offset;
    int index = 0;
    double number;
    bool ok = true;
    switch (parser->kind) {
    case VALUE_TEXT: break;
    case VALUE_FLAG:
        ok = choice_parse(rows[row].values, value, &index);
        if (ok) *(bool *)field = index;
        break;
    case VALUE_CHOICE:
        ok = choice_parse(rows[row].values, value, &index);
        if (ok)
            memcpy(field, &index,
                   sizeof index); /* an enum of non-negative constants has int's representation */
        break;
    case VALUE_INT:
        ok = !value[strspn(value, "0123456789")] && real_parse(value, parser->min, parser->max, &number);
        if (ok) *(int *)field = (int)number;
        break;
    case VALUE_REAL: ok = real_parse(value, parser->min, parser->max, field); break;
    case VALUE_BYTES: ok = fcdp__size_parse(value, field); break;
    case VALUE_PATH:
        ok = strlen(value) < FCDP_OPTION_PATH_BYTES;
        if (ok) memcpy(field, value, strlen(value) + 1);
        break;
    }
    return ok ? FCDP_OK : value_refused(&rows[row], parser, value);
}

static size_t edit_distance(const char *a, size_t n_a, const char *b) {
    enum { MAX_NAME = 64 };
    size_t previous[MAX_NAME + 1], current[MAX_NAME + 1], n_b = strlen(b);
    FCDP_CHECK(0, n_b <= MAX_NAME);
    for (size_t j = 0; j <= n_b; j++) previous[j] = j;
    for (size_t i = 1; i <= n_a; i++) {
        current[0] = i;
        for (size_t j = 1; j <= n_b; j++) {
            size_t best = previous[j - 1] + (a[i - 1] != b[j - 1]);
            if (previous[j] + 1 < best) best = previous[j] + 1;
            if (current[j - 1] + 1 < best) best = current[j - 1] + 1;
            current[j] = best;
        }
        memcpy(previous, current, (n_b + 1) * sizeof *current);
    }
    return previous[n_b];
}

static fcdp_status name_refused(const char *name, size_t n_name) {
    size_t nearest = 0, nearest_distance = SIZE_MAX;
    for (size_t row = 0; row < N_ROWS; row++) {
        size_t distance = edit_distance(name, n_name, rows[row].name);
        if (distance < nearest_distance) {
            nearest = row;
            nearest_distance = distance;
        }
    }
    return fcdp__fail(FCDP_ERR_OPTION, "%.*s is not an option; did you mean %s?", (int)n_name, name,
                      rows[nearest].name);
}

static bool is_others(const char *variable) {
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        if (strncmp(variable, others[i], strlen(others[i])) == 0) return true;
    return false;
}

fcdp_status fcdp_options_load(char *const *envp, fcdp_options *options_out) {
    fcdp_options options = {0};
    for (size_t row = 0; row < N_ROWS; row++) {
        fcdp_status status = value_store(row, rows[row].fallback, &options);
        FCDP_CHECK(0, status == FCDP_OK);
    }
    for (; *envp; envp++) {
        const char *variable = *envp;
        size_t n_name = strcspn(variable, "="), row = 0;
        bool ours = strncmp(variable, "FCDP", 4) == 0 && (n_name == 4 || variable[4] == '_');
        if (!ours || !variable[n_name]) continue;
        while (row < N_ROWS &&
               (strlen(rows[row].name) != n_name || memcmp(rows[row].name, variable, n_name) != 0))
            row++;
        if (row == N_ROWS && is_others(variable)) continue;
        if (row == N_ROWS) return name_refused(variable, n_name);
        const char *value = variable + n_name + 1;
        fcdp_status status = value[0] ? value_store(row, value, &options) : FCDP_OK;
        if (status) return status;
        if (value[0] && parsers[row].offset == offsetof(fcdp_options, tau)) options.tau_is_set = true;
    }
    *options_out = options;
    return FCDP_OK;
}
