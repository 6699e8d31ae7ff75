/* headroom.c - reads /proc/meminfo and the memory controllers of cgroup v2 and v1.
 *
 * A container sees the machine's MemAvailable, not its own limit. So every cgroup that encloses the process
 * is read as well, and the smallest number counts.
 */
#include "tiering/headroom.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/size.h"

enum { PATH_BYTES = PATH_MAX };
/* Other processes of the machine still grow, so an eighth of what is left stays free by default. */
enum { KEEP_FREE_DIVISOR = 8 };

/* The names differ between the two cgroup versions, the meaning does not. */
typedef struct memory_controller {
    const char *mount, *limit_file, *usage_file, *cache_key;
} memory_controller;

static const memory_controller CGROUP_V2 = {"/sys/fs/cgroup", "memory.max", "memory.current",
                                            "inactive_file "};
static const memory_controller CGROUP_V1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                                            "memory.usage_in_bytes", "total_inactive_file "};
/* v1 writes "no limit" as the largest page-aligned int64. */
static const uint64_t UNLIMITED_FROM = UINT64_C(1) << 60;

/* The number after `key` at the start of a line (key "": the file's first
 * word); false when absent or not a number. */
static bool read_number(const char *path, const char *key, uint64_t *value_out) {
    FILE *file = fopen(path, "re");
    if (!file) return false;
    char line[256];
    bool found = false;
    while (!found && fgets(line, sizeof line, file))
        if (!strncmp(line, key, strlen(key))) found = sscanf(line + strlen(key), "%" SCNu64, value_out) == 1;
    fclose(file);
    return found;
}

static size_t left_of(uint64_t limit, uint64_t usage, uint64_t reclaimable) {
    usage -= reclaimable < usage ? reclaimable : usage;
    return limit > usage ? (size_t)(limit - usage) : 0;
}

/* Every cgroup from `group` up to the root may have a limit; the tightest counts. */
static void narrow_by_cgroup(const char *root, const memory_controller *controller, char *group,
                             fcdp_headroom *h) {
    char dir[PATH_BYTES], path[PATH_BYTES + 64];
    for (;;) {
        uint64_t limit, usage = 0, cache = 0;
        if (snprintf(dir, sizeof dir, "%s%s%s", root, controller->mount, group) >= (int)sizeof dir) return;
        snprintf(path, sizeof path, "%s/%s", dir, controller->usage_file);
        (void)read_number(path, "", &usage);
        snprintf(path, sizeof path, "%s/memory.stat", dir);
        (void)read_number(path, controller->cache_key, &cache);
        snprintf(path, sizeof path, "%s/%s", dir, controller->limit_file);
        if (read_number(path, "", &limit) && limit < UNLIMITED_FROM &&
            left_of(limit, usage, cache) < h->available_bytes) {
            h->available_bytes = left_of(limit, usage, cache);
            snprintf(h->limit, sizeof h->limit, "what the cgroup's limit of %s leaves (%.100s)",
                     fcdp__size_text(limit).s, path + strlen(root));
        }
        char *slash = strrchr(group, '/');
        if (!slash) return;
        *slash = 0;
    }
}

fcdp_status fcdp__headroom_read(const char *root, fcdp_headroom *headroom_out) {
    char path[PATH_BYTES], line[PATH_BYTES];
    uint64_t total_kib, available_kib;
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    if (!read_number(path, "MemTotal:", &total_kib) || !read_number(path, "MemAvailable:", &available_kib))
        return fcdp__fail(FCDP_ERR_SYSTEM,
                          "host tier: %s has no MemTotal or MemAvailable; set FCDP_HOST_BUDGET", path);
    fcdp_headroom h = {.available_bytes = available_kib * 1024, .total_bytes = total_kib * 1024};
    snprintf(h.limit, sizeof h.limit, "the memory that this machine has left (MemAvailable)");

    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) { /* "hierarchy:controllers:path" */
        line[strcspn(line, "\n")] = 0;
        char *controllers = strchr(line, ':');
        char *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        if (!strcmp(group, "/")) group++;
        if (!controllers[1])
            narrow_by_cgroup(root, &CGROUP_V2, group, &h);
        else if (strstr(controllers, "memory"))
            narrow_by_cgroup(root, &CGROUP_V1, group, &h);
    }
    if (file) fclose(file);
    *headroom_out = h;
    return FCDP_OK;
}

fcdp_status fcdp__host_budget_read(const char *root, size_t option_bytes, fcdp_host_budget *budget_out) {
    fcdp_host_budget budget = {.bytes = option_bytes, .limit = "FCDP_HOST_BUDGET"};
    if (!option_bytes) {
        fcdp_headroom headroom;
        fcdp_status status = fcdp__headroom_read(root, &headroom);
        if (status) return status;
        budget.bytes = headroom.available_bytes - headroom.available_bytes / KEEP_FREE_DIVISOR;
        snprintf(budget.limit, sizeof budget.limit, "7/8 of %s", headroom.limit);
    }
    *budget_out = budget;
    return FCDP_OK;
}
