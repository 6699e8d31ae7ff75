/* processes.c - reads /proc/PID/stat of every process. */
#include "tools/memtrace/processes.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool read_text(const char *path, char *text, size_t n_bytes) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = read(fd, text, n_bytes - 1);
    close(fd);
    if (n <= 0) return false;
    text[n] = 0;
    return true;
}

/* "PID (NAME) S PPID ...": the name may hold anything, so fields are counted from its last ')'. */
bool memtrace_process_get(pid_t pid, memtrace_process_entry *entry_out) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    if (!read_text(path, text, sizeof text)) return false;
    const char *rest = strrchr(text, ')');
    char state;
    int parent;
    unsigned long long start;
    if (!rest ||
        sscanf(rest + 1, " %c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
               &state, &parent, &start) != 3)
        return false;
    *entry_out = (memtrace_process_entry){pid, parent, start, state == 'Z' || state == 'X'};
    return true;
}

pid_t memtrace_process_inner_pid(pid_t pid) {
    char path[64], text[4096];
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    if (!read_text(path, text, sizeof text)) return -1;
    const char *line = strstr(text, "\nNSpid:");
    if (!line) return pid;
    line += strlen("\nNSpid:");
    int inner = pid, taken = 0;
    for (int next; sscanf(line, "%*[ \t]%d%n", &next, &taken) == 1; line += taken) inner = next;
    return inner;
}

static memtrace_process_entry *entry_of(memtrace_process_entry *all, size_t n, pid_t pid) {
    for (size_t i = 0; i < n; i++)
        if (all[i].pid == pid) return &all[i];
    return NULL;
}

/* Keeps those under `ancestor`, which may have been started in any order of numbers: each one's parents are
 * followed. A loop cannot arise in one reading of /proc, but may in one that takes a while: n steps
 * bound it. */
static size_t keep_descendants(memtrace_process_entry *all, size_t n, pid_t ancestor) {
    bool *keeps = calloc(n ? n : 1, sizeof *keeps);
    if (!keeps) return 0;
    for (size_t i = 0; i < n; i++) {
        const memtrace_process_entry *at = &all[i];
        for (size_t steps = 0; at && at->pid != ancestor && steps < n; steps++)
            at = at->parent > 0 ? entry_of(all, n, at->parent) : NULL;
        keeps[i] = at && at->pid == ancestor;
    }
    size_t n_kept = 0;
    for (size_t i = 0; i < n; i++)
        if (keeps[i]) all[n_kept++] = all[i];
    free(keeps);
    return n_kept;
}

memtrace_process_entry *memtrace_processes(pid_t ancestor, size_t *n_out) {
    DIR *proc = opendir("/proc");
    size_t n = 0, room = 256;
    memtrace_process_entry *all = malloc(room * sizeof *all);
    for (struct dirent *entry; proc && all && (entry = readdir(proc));) {
        pid_t pid = atoi(entry->d_name);
        if (pid <= 0 || !memtrace_process_get(pid, &all[n]) || ++n < room) continue;
        memtrace_process_entry *more = realloc(all, 2 * room * sizeof *all);
        if (!more) break;
        all = more;
        room *= 2;
    }
    if (proc) closedir(proc);
    *n_out = all && ancestor ? keep_descendants(all, n, ancestor) : n;
    return all;
}
