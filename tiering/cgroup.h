/* cgroup.h - where the process's cgroups are. */
#ifndef FCDP_CGROUP_H
#define FCDP_CGROUP_H

#include "base/base.h"

/* The process's group in the hierarchy that has `controller` ("": version 2's), from the mount on; "" for the
 * root. False: it has none. `root` is put before /proc. */
bool fcdp__cgroup_find(const char *root, const char *controller, char *group_out, size_t n_bytes);
/* Go to the parent. False: `group` was the root. */
bool fcdp__cgroup_up(char *group);

#endif
