/* described.h - a made-up /proc and /sys in a folder of /tmp: another machine, as code that takes a root sees
 * it. */
#ifndef TESTS_TIERING_DESCRIBED_H
#define TESTS_TIERING_DESCRIBED_H

#include <stdio.h>

extern char described_root[64];

/* cmocka's set-up and tear-down: an empty folder, which goes with all that is in it. */
int described_make(void **state);
int described_remove(void **state);
/* Write a file, with the folders above it. */
void described_put(const char *path, const char *text);

#endif
