/* size.h - the text of a size in bytes, one for every option, tool or message.
 *
 *     8G, 8GiB      8 * 1024^3; K, M, G, T with or without "iB", either case
 *     8GB           8 * 1000^3
 *     1.5G, 2 GB    a fraction, and one space before the unit
 *     4096, 4096B   bytes
 *
 * What FCDP prints is in powers of 1000, "8.59 GB", so that what was read off the screen can be written back.
 * Pure, and of no other file of FCDP's: the simulated driver reads its FCDP_SIM_CAPACITY with it.
 */
#ifndef FCDP_SIZE_H
#define FCDP_SIZE_H

#include <stdbool.h>
#include <stddef.h>

#define FCDP_SIZE_EXPECTED "bytes, such as 512M, 1.5GiB or 8GB (M = MiB = 1024 KiB, MB = 1000 KB)"

/* Rounds down to whole bytes; false for anything else than the above, and for what no size_t holds. */
bool fcdp__size_parse(const char *text, size_t *bytes_out);

typedef struct fcdp_size_text {
    char s[16];
} fcdp_size_text;
/* Three digits: fcdp__size_text(n).s is an argument of printf. */
fcdp_size_text fcdp__size_text(size_t bytes);

#endif
