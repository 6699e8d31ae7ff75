/* options.h - every FCDP_* environment variable, one row each: name, default, what it does.
 *
 * The table in options.c is the only list: parsing, checking, `fcdp-doctor --options` and docs/options.md
 * come from it.
 */
#ifndef FCDP_OPTIONS_H
#define FCDP_OPTIONS_H

#include "base/base.h"

typedef enum fcdp_driver_kind { FCDP_DRIVER_AUTO, FCDP_DRIVER_CUDA, FCDP_DRIVER_SIM } fcdp_driver_kind;
typedef enum fcdp_restore_mode {
    FCDP_RESTORE_SLICE,
    FCDP_RESTORE_WHOLE,
    FCDP_RESTORE_AUTO
} fcdp_restore_mode;
typedef enum fcdp_host_copies_mode { FCDP_HOST_COPIES_NODE, FCDP_HOST_COPIES_NUMA } fcdp_host_copies_mode;
typedef enum fcdp_pin_mode { FCDP_PIN_AUTO, FCDP_PIN_REQUIRE, FCDP_PIN_NEVER } fcdp_pin_mode;
typedef enum fcdp_pin_cpu_mode { FCDP_PIN_CPU_AUTO, FCDP_PIN_CPU_OFF } fcdp_pin_cpu_mode;
typedef enum fcdp_fingerprint_mode {
    FCDP_FINGERPRINT_AUTO,
    FCDP_FINGERPRINT_DEVICE,
    FCDP_FINGERPRINT_NEVER
} fcdp_fingerprint_mode;
typedef enum fcdp_reduce_mode { FCDP_REDUCE_FLAT, FCDP_REDUCE_HIERARCHICAL } fcdp_reduce_mode;
typedef enum fcdp_reduce_dtype {
    FCDP_REDUCE_DTYPE_SAME,
    FCDP_REDUCE_DTYPE_BF16,
    FCDP_REDUCE_DTYPE_INT8
} fcdp_reduce_dtype;
typedef enum fcdp_agree_mode { FCDP_AGREE_FORWARD, FCDP_AGREE_UNSHARD } fcdp_agree_mode;

typedef enum fcdp_mapping_mode {
    FCDP_MAPPING_AUTO,
    FCDP_MAPPING_SLOTS,
    FCDP_MAPPING_EXACT
} fcdp_mapping_mode;
typedef enum fcdp_policy_kind { FCDP_POLICY_TAU, FCDP_POLICY_NEXT_USE, FCDP_POLICY_AUTO } fcdp_policy_kind;
typedef enum fcdp_alloc_mode { FCDP_ALLOC_FCDP, FCDP_ALLOC_NATIVE } fcdp_alloc_mode;
typedef enum fcdp_codec_mode {
    FCDP_CODEC_NONE,
    FCDP_CODEC_DELTA,
    FCDP_CODEC_AUTO,
    FCDP_CODEC_INT8
} fcdp_codec_mode;
typedef enum fcdp_transport_mode {
    FCDP_TRANSPORT_AUTO,
    FCDP_TRANSPORT_NCCL,
    FCDP_TRANSPORT_TORCH
} fcdp_transport_mode;

enum { FCDP_OPTION_PATH_BYTES = 1024 };

typedef struct fcdp_options {
    bool enabled;            /* FCDP */
    fcdp_driver_kind driver; /* FCDP_DRIVER=auto|cuda|sim */
    /* FCDP_TAU, 0..1: below this share of the budget a group stays on the device */
    double tau;
    bool tau_is_set;           /* to whatever value */
    fcdp_policy_kind policy;   /* FCDP_POLICY=tau|next-use|auto: which groups stay on the device */
    fcdp_restore_mode restore; /* FCDP_RESTORE=slice|whole|auto */
    /* FCDP_HOST_COPIES=node|numa: copies of what is gathered in a node's host memory */
    fcdp_host_copies_mode host_copies;
    fcdp_mapping_mode mapping;     /* FCDP_MAPPING=auto|slots|exact */
    fcdp_alloc_mode alloc;         /* FCDP_ALLOC=fcdp|native: the allocator of tensors on a GPU */
    fcdp_transport_mode transport; /* FCDP_TRANSPORT=auto|nccl|torch: what carries collectives */
    fcdp_codec_mode codec; /* FCDP_CODEC=none|delta|auto|int8: what of a stale parameter crosses the nodes */
    int codec_threads;     /* FCDP_CODEC_THREADS; 0: by the cores */
    /* FCDP_LOCAL_SIZE, ranks per node; 0: from the launcher (LOCAL_WORLD_SIZE) */
    int local_size;
    size_t device_budget_bytes; /* FCDP_DEVICE_BUDGET, e.g. 8G; 0: what is free but the headroom */
    size_t headroom_bytes;      /* FCDP_HEADROOM: device memory that is left to others */
    /* FCDP_HOST_BUDGET per node; 0: what the machine and its cgroup allow */
    size_t host_budget_bytes;
    fcdp_pin_mode pin;                 /* FCDP_PIN=auto|require|never */
    fcdp_pin_cpu_mode pin_cpu;         /* FCDP_PIN_CPU=auto|off */
    fcdp_fingerprint_mode fingerprint; /* FCDP_FINGERPRINT=auto|device|never */
    /* FCDP_AGREE=forward|unshard: how often the ranks agree on what is stale */
    fcdp_agree_mode agree;
    int prefetch;            /* FCDP_PREFETCH, groups gathered ahead in forward */
    fcdp_reduce_mode reduce; /* FCDP_REDUCE=flat|hierarchical: how gradients are summed */
    /* FCDP_REDUCE_DTYPE=same|bf16|int8: in which form they cross the nodes then */
    fcdp_reduce_dtype reduce_dtype;
    /* FCDP_COALESCE: stale groups up to this size are gathered together; 0: never */
    size_t coalesce_bytes;
    bool whole_tensors; /* FCDP_WHOLE_TENSORS=0|1: full_tensor() reads the node's copy */
    double timeout_s;   /* FCDP_TIMEOUT, seconds to wait for another rank */
    int check;          /* FCDP_CHECK, 0..3 */
    fcdp_log_level log; /* FCDP_LOG=quiet|warn|info|debug */
    bool summary;       /* FCDP_SUMMARY=0|1, the lines that say what was saved */
    int trace;          /* FCDP_TRACE, 0..2 */
    size_t trace_bytes; /* FCDP_TRACE_BUFFER, of the event ring */
    /* FCDP_CACHE_DIR: frozen parameters are kept there across runs; "": nowhere */
    char cache_dir[FCDP_OPTION_PATH_BYTES];
    /* FCDP_SPILL_DIR: groups for which host memory has no room; "": none */
    char spill_dir[FCDP_OPTION_PATH_BYTES];
    /* FCDP_PLAN: where each group lives (tiering/tiers.h), for the program to read; "": policy decides */
    char plan[FCDP_OPTION_PATH_BYTES];
    /* FCDP_HOST_MAP: names of groups that live in host memory at their device addresses, for the program to
     * read; "": none */
    char host_map[FCDP_OPTION_PATH_BYTES];
    size_t cache_bytes; /* FCDP_CACHE_SIZE, of all files there; 0: half of what the disk has free */
} fcdp_options;

/* The audience of an option: any user; an expert who tunes FCDP or works around something; a developer of
 * FCDP. */
typedef enum fcdp_option_audience {
    FCDP_OPTION_USER,
    FCDP_OPTION_EXPERT,
    FCDP_OPTION_DEVELOPMENT
} fcdp_option_audience;

typedef struct fcdp_option_row {
    const char *name, *values, *fallback, *help;
    fcdp_option_audience audience;
} fcdp_option_row;

/* The table, `n_out` rows, by audience. Names without a field above (FCDP_SIM_*, FCDP_NCCL_LIBRARY) have rows
 * too, so that they are known. Variables of the build, fcdp-lab and the tests (FCDP_CACHE, ...) have none and
 * are ignored. */
const fcdp_option_row *fcdp_options_table(size_t *n_out);

/* Read `envp` (NULL-terminated "NAME=VALUE" strings). A malformed value, or an unknown name that starts with
 * FCDP_, is FCDP_ERR_OPTION with a text that names it, what is allowed, and the nearest valid name. */
fcdp_status fcdp_options_load(char *const *envp, fcdp_options *options_out) FCDP_MUST_CHECK;

#endif
