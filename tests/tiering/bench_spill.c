/* How fast slices go to their file and come back (FCDP_SPILL_DIR), on the simulated device. Not run by
 * ctest: tools/bench/spill.py runs it beside fio.
 *
 *     FCDP_DRIVER=sim FCDP_SIM_LIBRARY=... bench_spill DIRECTORY [slices, default 24] [MiB each, default 32]
 *
 * Prints a line of JSON: bytes per second of all slices stored, to the last byte's write, and of all of
 * them fetched and loaded, one after another. The first round, in which no order is known, is not counted.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "alloc/vrange.h"
#include "base/options.h"
#include "tiering/spill.h"
#include "tiering/trace_events.h"

extern char **environ;
enum { MAX_SLICES = 1024, PAGE = 2 << 20, N_BUFFERS = 4 };

static void check(fcdp_status status) {
    if (!status) return;
    fprintf(stderr, "bench: %s\n", fcdp_error_text());
    exit(1);
}

static double seconds_since(uint64_t start_ns) {
    return (double)(fcdp__now_ns() - start_ns) / 1e9;
}

int main(int argc, char **argv) {
    fcdp_options options;
    fcdp_driver *drv;
    fcdp_stream stream;
    fcdp_vrange *range;
    fcdp_phys pages;
    fcdp_spill *spill;
    static fcdp_counts counts;
    static fcdp_spilled *slices[MAX_SLICES];
    int n = argc > 2 ? atoi(argv[2]) : 24;
    size_t bytes = (size_t)(argc > 3 ? atoi(argv[3]) : 32) << 20;
    if (argc < 2 || n < 2 || n > MAX_SLICES || bytes < PAGE) {
        fprintf(stderr, "usage: bench_spill DIRECTORY [slices] [MiB each]\n");
        return 2;
    }
    check(fcdp_options_load(environ, &options));
    check(fcdp__driver_open(options.driver, 0, NULL, &drv));
    check(fcdp__driver_stream_create(drv, &stream));
    check(fcdp__vrange_create(drv, bytes, &range));
    check(fcdp__driver_phys_create(drv, bytes, &pages));
    check(fcdp__vrange_map(range, pages, bytes));
    fcdp_spill_config config = {.n_buffers = N_BUFFERS, .timeout_s = 60, .counts = &counts};
    check(fcdp__spill_open(drv, argv[1], &config, &spill));
    if (fcdp__spill_lacks(spill)[0]) fprintf(stderr, "bench: %s\n", fcdp__spill_lacks(spill));
    for (int i = 0; i < n; i++) check(fcdp__spill_reserve(spill, "bench", 0, bytes, &slices[i]));
    double write_s = 0, read_s = 0;
    for (int round = 0; round < 2; round++) {
        uint64_t written = atomic_load(&counts.n[FCDP_COUNT_SPILL_WRITTEN_BYTES]), start_ns = fcdp__now_ns();
        for (int i = 0; i < n; i++) check(fcdp__spill_store(slices[i], fcdp__vrange_base(range), stream));
        while (atomic_load(&counts.n[FCDP_COUNT_SPILL_WRITTEN_BYTES]) - written < (uint64_t)n * bytes)
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        write_s = seconds_since(start_ns);
        for (int pass = 0; pass < 2; pass++) {
            start_ns = fcdp__now_ns();
            for (int i = 0; i < n; i++) {
                if (!fcdp__spill_fetch(slices[i])) {
                    fprintf(stderr, "bench: a slice is lost\n");
                    return 1;
                }
                check(fcdp__spill_load(slices[i], fcdp__vrange_base(range), stream));
            }
            check(fcdp__driver_stream_sync(drv, stream));
            read_s = seconds_since(start_ns);
        }
    }
    for (int i = 0; i < n; i++) fcdp__spill_release(slices[i]);
    fcdp__spill_close(spill);
    fcdp__vrange_destroy(range);
    check(fcdp__driver_phys_release(drv, pages));
    fcdp__driver_stream_destroy(drv, stream);
    fcdp__driver_close(drv);
    double all = (double)n * (double)bytes;
    printf("{\"write\": %.0f, \"read\": %.0f}\n", all / write_s, all / read_s);
    return 0;
}
