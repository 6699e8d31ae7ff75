/* fuzz_reader.c - libFuzzer's entry into the reader: any bytes are a file, of which everything is asked that
 * the tool asks. Without libFuzzer (FCDP_FUZZ off) a main that runs the files it is given.
 *
 *     CC=clang cmake -B build/fuzz -DFCDP_FUZZ=ON && ninja -C build/fuzz fuzz_memtrace_reader &&
 * build/fuzz/tests/memtrace/fuzz_memtrace_reader -max_len=65536 tests/memtrace/corpus
 *
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/fuzz_main.h"
#include "tools/memtrace/check.h"
#include "tools/memtrace/chrome.h"
#include "tools/memtrace/chunk.h"
#include "tools/memtrace/report.h"
#include "tools/memtrace/series.h"

/* Checksums would stop almost every change: those of chunks whose magic is right are made right. */
static void repair(uint8_t *bytes, size_t n_bytes) {
    for (size_t at = sizeof(fcdp_trace_file_header); at + sizeof(fcdp_trace_chunk) <= n_bytes;) {
        fcdp_trace_chunk chunk;
        memcpy(&chunk, bytes + at, sizeof chunk);
        size_t room = n_bytes - at - sizeof chunk;
        if (memcmp(chunk.magic, MEMTRACE_CHUNK_MAGIC, sizeof chunk.magic) != 0) return;
        chunk.bytes = chunk.bytes % (room + 1) / MEMTRACE_ALIGNMENT * MEMTRACE_ALIGNMENT;
        chunk.checksum = memtrace_checksum(bytes + at + sizeof chunk, chunk.bytes);
        chunk.header_checksum = memtrace_header_checksum(&chunk);
        memcpy(bytes + at, &chunk, sizeof chunk);
        at += sizeof chunk + chunk.bytes;
    }
}

static const char *encode(void *context, const char *text) {
    (void)context, (void)text;
    return "\"\"";
}

static void use(memtrace_file *file) {
    memtrace_gates gates = {UINT64_MAX, UINT64_MAX, UINT64_MAX, 0};
    memtrace_checked checked;
    memtrace_violation violation;
    uint64_t n;
    memtrace_report_destroy(memtrace_report_create(file, 0));
    (void)memtrace_check(file, &gates, &checked, &violation);
    for (size_t i = 0; i < memtrace_file_summary(file).n_processes && i < 4; i++)
        memtrace_series_destroy(memtrace_series_create(file, i, 20));
    FILE *null = fopen("/dev/null", "w");
    if (null && memtrace_file_summary(file).n_processes < 4)
        (void)memtrace_chrome_write(file, 0, null, encode, NULL, &n);
    if (null) fclose(null);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    for (int repairs = 0; repairs < 2; repairs++) {
        uint8_t *copy = malloc(n_bytes + 1);
        int fd = memfd_create("fuzz", MFD_CLOEXEC);
        if (!copy || fd < 0) abort();
        memcpy(copy, data, n_bytes);
        if (repairs) repair(copy, n_bytes);
        if (write(fd, copy, n_bytes) != (ssize_t)n_bytes) abort();
        free(copy);
        memtrace_file *file;
        memtrace_error error;
        if (!memtrace_file_open_descriptor(fd, "fuzz", &file, &error)) continue;
        use(file);
        memtrace_file_close(file);
    }
    return 0;
}
