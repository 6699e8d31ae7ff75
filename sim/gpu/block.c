/*
 * Calls that make a thread of the program wait for the device: how often, for how long, from where.
 *
 * A row is a thread, an entry point, the thread's label and the return addresses that led there, so that
 * "this thread waits nowhere but there" can be asserted and, where it is not so, the place be found. Return
 * addresses are named when the rows are listed. The table is bounded: what finds no room is counted in a last
 * row, which belongs to no thread.
 */
#include <dlfcn.h>
#include <execinfo.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sim/gpu/internal.h"

#define N_ROWS 2048
#define N_FRAMES 6
#define MOST_OWN_FRAMES 6 /* of this library, above the caller's */

struct key {
    int thread; /* 0: the row is free, or the last one */
    enum sim_entry entry;
    char label[SIM_TEXT_BYTES];
    void *frames[N_FRAMES];
};

struct row {
    struct key key;
    unsigned long calls;
    unsigned long waits;
    unsigned long spins;
    uint64_t wait_ns;
    uint64_t longest_ns;
};

static pthread_mutex_t rows_lock = PTHREAD_MUTEX_INITIALIZER;
static struct row rows[N_ROWS + 1]; /* hashed by key; the last is for what finds no room */

static _Thread_local struct {
    struct key key;
    uint64_t since_ns; /* it waits from then on; 0: it did not have to */
    bool spins;
} current;

int simgpu__thread_id(void) {
    static _Thread_local int id;
    if (!id) id = (int)syscall(SYS_gettid);
    return id;
}

/* From the linker: this library's first byte and the one behind its last. */
extern const char __ehdr_start[] __attribute__((visibility("hidden")));
extern const char _end[] __attribute__((visibility("hidden")));

static bool is_own(const void *frame) {
    return (const char *)frame >= __ehdr_start && (const char *)frame < _end;
}

/* Without the simulator's lock, since the unwinder takes the loader's. */
void simgpu__block_begin(enum sim_entry entry) {
    void *frames[MOST_OWN_FRAMES + N_FRAMES] = {0};
    int n = backtrace(frames, MOST_OWN_FRAMES + N_FRAMES), first = 0;
    for (int i = 0; i < n && i < MOST_OWN_FRAMES; i++)
        if (is_own(frames[i])) first = i + 1; /* above it may be a sanitizer's backtrace */
    memset(&current.key, 0, sizeof current.key);
    current.key.thread = simgpu__thread_id();
    current.key.entry = entry;
    simgpu__text_set(current.key.label, simgpu__label());
    memcpy(current.key.frames, frames + first, sizeof current.key.frames);
}

void simgpu__block_waits(void) {
    if (!current.since_ns) current.since_ns = simgpu__now_ns();
}

void simgpu__block_spins(void) {
    current.spins = true;
}

static size_t hash_of(const struct key *key) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof *key; i++) hash = (hash ^ ((const unsigned char *)key)[i]) * 0x100000001b3u;
    return hash % N_ROWS;
}

static struct row *row_of(const struct key *key) {
    size_t at = hash_of(key);
    for (size_t i = 0; i < N_ROWS; i++) {
        struct row *row = &rows[(at + i) % N_ROWS];
        if (row->key.thread && memcmp(&row->key, key, sizeof *key) != 0) continue;
        row->key = *key;
        return row;
    }
    rows[N_ROWS].key.entry = SIM_N_ENTRIES;
    return &rows[N_ROWS];
}

void simgpu__block_end(void) {
    uint64_t now = current.since_ns ? simgpu__now_ns() : 0, wait_ns = now - current.since_ns;
    pthread_mutex_lock(&rows_lock);
    struct row *row = row_of(&current.key);
    row->calls++;
    if (current.since_ns) row->waits++;
    row->spins += current.spins;
    row->wait_ns += wait_ns;
    if (wait_ns > row->longest_ns) row->longest_ns = wait_ns;
    pthread_mutex_unlock(&rows_lock);
    if (current.since_ns && simgpu__timeline_is_on())
        simgpu__timeline_wait(simgpu_entry_name(current.key.entry), current.key.label, current.since_ns, now);
    current.since_ns = 0;
    current.spins = false;
}

/* ---- reading ---- */

/* Looked up only when rows are listed: a symbol costs more than the call that is counted. */
static void name_frames(char *text, size_t n, void *const *frames) {
    size_t at = 0;
    text[0] = '\0';
    for (size_t i = 0; i < N_FRAMES && frames[i] && at < n; i++) {
        Dl_info about;
        const char *call = (const char *)frames[i] - 1, *file, *before = i ? " < " : "";
        if (!dladdr(call, &about) || !about.dli_fname) {
            at += (size_t)snprintf(text + at, n - at, "%s%p", before, frames[i]);
            continue;
        }
        file = strrchr(about.dli_fname, '/');
        file = file ? file + 1 : about.dli_fname;
        if (about.dli_sname)
            at += (size_t)snprintf(text + at, n - at, "%s%s (%s)", before, about.dli_sname, file);
        else
            at += (size_t)snprintf(text + at, n - at, "%s%s+%#zx", before, file,
                                   (size_t)(call - (const char *)about.dli_fbase));
    }
}

static void add(struct simgpu_blocking *sum, const struct row *row) {
    sum->calls += row->calls;
    sum->waits += row->waits;
    sum->spins += row->spins;
    sum->wait_ns += row->wait_ns;
    if (row->longest_ns > sum->longest_ns) sum->longest_ns = row->longest_ns;
}

static int longest_first(const void *a, const void *b) {
    const struct row *one = a, *other = b;
    if (one->wait_ns != other->wait_ns) return one->wait_ns > other->wait_ns ? -1 : 1;
    return one->calls == other->calls ? 0 : one->calls > other->calls ? -1 : 1;
}

/* Rows are copied first, so that no counted thread waits for the naming. */
size_t simgpu_blocking_list(struct simgpu_blocking *list_out, size_t n) {
    struct row *copies = malloc(sizeof rows);
    if (!copies || simgpu__forked()) {
        free(copies);
        return 0;
    }
    size_t n_rows = 0;
    pthread_mutex_lock(&rows_lock);
    for (size_t i = 0; i <= N_ROWS; i++)
        if (rows[i].calls) copies[n_rows++] = rows[i];
    pthread_mutex_unlock(&rows_lock);
    qsort(copies, n_rows, sizeof *copies, longest_first);
    for (size_t i = 0; i < n_rows && i < n; i++) {
        const struct key *key = &copies[i].key;
        list_out[i] = (struct simgpu_blocking){.thread = key->thread, .entry = simgpu_entry_name(key->entry)};
        if (!list_out[i].entry) list_out[i].entry = "others";
        memcpy(list_out[i].label, key->label, sizeof key->label);
        name_frames(list_out[i].site, sizeof list_out[i].site, key->frames);
        add(&list_out[i], &copies[i]);
    }
    free(copies);
    return n_rows;
}

void simgpu_blocking_total(int thread, struct simgpu_blocking *total_out) {
    *total_out = (struct simgpu_blocking){.thread = thread ? thread : simgpu__thread_id(), .entry = "all"};
    if (simgpu__forked()) return;
    pthread_mutex_lock(&rows_lock);
    for (size_t i = 0; i <= N_ROWS; i++)
        if (thread < 0 || rows[i].key.thread == total_out->thread) add(total_out, &rows[i]);
    pthread_mutex_unlock(&rows_lock);
}

void simgpu_blocking_reset(void) {
    if (simgpu__forked()) return;
    pthread_mutex_lock(&rows_lock);
    memset(rows, 0, sizeof rows);
    pthread_mutex_unlock(&rows_lock);
}
