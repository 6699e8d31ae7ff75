/*
 * Calls that order, one row for each place of the program that makes them: listed, and left out.
 *
 * A test that asks whether each wait is needed, and whether its absence would be found, leaves them out one
 * after another. A wait has taught its stream something if nothing else had put it behind what it waited
 * for: one that never does is implied by others.
 *
 * A place is the return addresses outside of this library, so that one place in the program that is reached
 * from two is two. All of it is off until a test turns it on.
 */
#include <dlfcn.h>
#include <execinfo.h>
#include <stdio.h>
#include <string.h>

#include "sim/gpu/internal.h"

enum { N_ROWS = 512, N_FRAMES = 3, MOST_OWN_FRAMES = 4 };

static atomic_bool is_on;
static struct simgpu_site rows[N_ROWS]; /* under the simulator's lock, as is what follows */
static bool is_dropped[N_ROWS];
static size_t n_rows;
static struct simgpu_site dropped; /* entry NULL: nothing is */

/* Without the lock, as the names are the loader's. */
void simgpu__site_take(struct sim_site *site_out) {
    void *frames[MOST_OWN_FRAMES + N_FRAMES];
    size_t at = 0, n_named = 0;
    Dl_info about, own;
    site_out->text[0] = '\0';
    if (!atomic_load_explicit(&is_on, memory_order_relaxed) || !dladdr((void *)simgpu__site_take, &own))
        return;
    int n = backtrace(frames, MOST_OWN_FRAMES + N_FRAMES);
    for (int i = 0; i < n && n_named < N_FRAMES && at < sizeof site_out->text; i++) {
        const char *call = (const char *)frames[i] - 1;
        if (!dladdr(call, &about) || !about.dli_fname || about.dli_fbase == own.dli_fbase) continue;
        const char *file = strrchr(about.dli_fname, '/');
        at += (size_t)snprintf(site_out->text + at, sizeof site_out->text - at, "%s%s+%#zx",
                               n_named++ ? " < " : "", file ? file + 1 : about.dli_fname,
                               (size_t)(call - (const char *)about.dli_fbase));
    }
}

/* An empty text stands for any. */
static bool matches(const char *text, const char *wanted) {
    return strncmp(text, wanted, strlen(wanted)) == 0;
}

static bool is_wanted(const struct simgpu_site *row) {
    return dropped.entry && strcmp(row->entry, dropped.entry) == 0 && matches(row->stream, dropped.stream) &&
           matches(row->event, dropped.event) && matches(row->site, dropped.site);
}

bool simgpu__site_drops(const struct sim_site *site, enum sim_entry entry, const char *stream,
                        const char *event, unsigned long **taught_out) {
    *taught_out = NULL;
    if (!site->text[0]) return false;
    size_t i = 0;
    const char *name = simgpu_entry_name(entry);
    while (i < n_rows && (rows[i].entry != name || strcmp(rows[i].stream, stream) != 0 ||
                          strcmp(rows[i].event, event) != 0 || strcmp(rows[i].site, site->text) != 0))
        i++;
    if (i == N_ROWS) return false;
    if (i == n_rows) {
        n_rows++;
        rows[i] = (struct simgpu_site){.entry = name};
        simgpu__text_set(rows[i].stream, stream);
        simgpu__text_set(rows[i].event, event);
        memcpy(rows[i].site, site->text, sizeof rows[i].site);
        is_dropped[i] = is_wanted(&rows[i]);
    }
    rows[i].calls++;
    *taught_out = &rows[i].taught;
    return is_dropped[i];
}

void simgpu_sites_watch(int on) {
    if (simgpu__forked()) return;
    sim_lock();
    n_rows = 0;
    dropped.entry = NULL;
    atomic_store(&is_on, on);
    sim_unlock();
}

size_t simgpu_sites_list(struct simgpu_site *list_out, size_t n) {
    if (simgpu__forked()) return 0;
    sim_lock();
    memcpy(list_out, rows, (n < n_rows ? n : n_rows) * sizeof *rows);
    size_t n_listed = n_rows;
    sim_unlock();
    return n_listed;
}

int simgpu_sites_drop(const struct simgpu_site *like) {
    int entry = like ? simgpu__fault_find(like->entry) : SIM_N_ENTRIES;
    if (simgpu__forked() || entry < 0) return -1;
    sim_lock();
    dropped = like ? *like : (struct simgpu_site){0};
    if (like) dropped.entry = simgpu_entry_name((unsigned)entry);
    for (size_t i = 0; i < n_rows; i++) is_dropped[i] = is_wanted(&rows[i]);
    sim_unlock();
    return 0;
}
