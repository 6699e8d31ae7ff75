/* cgroup.c - reads /proc/self/cgroup, whose lines are "hierarchy:controllers:path". */
#include "tiering/cgroup.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

bool fcdp__cgroup_find(const char *root, const char *controller, char *group_out, size_t n_bytes) {
    char path[PATH_MAX], line[PATH_MAX];
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "re");
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *controllers = strchr(line, ':');
        char *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        controllers++;
        found = controller[0] ? strstr(controllers, controller) != NULL : !controllers[0];
        if (found) snprintf(group_out, n_bytes, "%s", strcmp(group, "/") ? group : "");
    }
    if (file) fclose(file);
    return found;
}

bool fcdp__cgroup_up(char *group) {
    char *slash = strrchr(group, '/');
    if (slash) *slash = 0;
    return slash != NULL;
}
