/* team.h - threads that take a part each of what one of FCDP's threads computes, and wait for nothing.
 *
 * Part 0 is the caller's, part i always thread i's: so the parts end together where they are alike, however
 * late a thread wakes up on the simulated device, whose time that is not.
 */
#ifndef FCDP_TEAM_H
#define FCDP_TEAM_H

#include "alloc/driver.h"

typedef struct fcdp_team fcdp_team;

/* Of `n_parts` >= 1, the caller's among them, or fewer where the system has no more threads, which it logs.
 * NULL: no memory. `name`: the threads', up to 15 bytes. */
fcdp_team *fcdp__team_create(fcdp_driver *drv, const char *name, unsigned n_parts);
/* Nothing runs. NULL: nothing. */
void fcdp__team_destroy(fcdp_team *team);

/* part(context, i, n) for each i < n, at once; returns when all have. By one thread at a time. NULL: one
 * part, the caller's. */
typedef void (*fcdp_team_part)(void *context, unsigned i, unsigned n);
void fcdp__team_run(fcdp_team *team, fcdp_team_part part, void *context);

#endif
