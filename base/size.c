/* size.c - reads and writes sizes. It reads the digits as whole numbers, since a double cannot hold every
 * byte of a size such as 16777216.5T. */
#include "base/size.h"

#include <ctype.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

/* The factor of "", "B", "K", "KiB", "KB" and so on; 0: it is no unit. */
static uint64_t unit_factor(const char *unit) {
    static const char letters[] = "KMGT";
    if (!*unit || !strcasecmp(unit, "B")) return 1;
    const char *letter = strchr(letters, toupper((unsigned char)*unit));
    if (!letter) return 0;
    bool decimal = !strcasecmp(unit + 1, "B");
    if (!decimal && unit[1] && strcasecmp(unit + 1, "iB") != 0 && strcasecmp(unit + 1, "i") != 0) return 0;
    uint64_t factor = 1;
    for (const char *at = letters; at <= letter; at++) factor *= decimal ? 1000 : 1024;
    return factor;
}

/* Of a fraction, digits behind the 18th are below one byte of any unit. */
bool fcdp__size_parse(const char *text, size_t *bytes_out) {
    enum { MAX_DIGITS = 18 };
    uint64_t whole = 0, fraction = 0, scale = 1;
    int n_digits = 0;
    const char *at = text;
    for (; isdigit((unsigned char)*at); at++)
        if (__builtin_mul_overflow(whole, 10, &whole) ||
            __builtin_add_overflow(whole, (uint64_t)(*at - '0'), &whole))
            return false;
    if (at == text) return false;
    bool has_fraction = *at == '.';
    if (has_fraction) {
        const char *first = ++at;
        for (; isdigit((unsigned char)*at); at++)
            if (n_digits++ < MAX_DIGITS) {
                fraction = 10 * fraction + (uint64_t)(*at - '0');
                scale *= 10;
            }
        if (at == first) return false;
    }
    if (*at == ' ' && at[1]) at++;
    uint64_t factor = unit_factor(at);
    if (!factor || (has_fraction && factor == 1)) return false;
    unsigned __int128 bytes = (unsigned __int128)whole * factor +
                              (unsigned __int128)fraction * factor / scale;
    if (bytes > SIZE_MAX) return false;
    *bytes_out = (size_t)bytes;
    return true;
}

/* What rounds to 1000 is 1 of the next unit. */
fcdp_size_text fcdp__size_text(size_t bytes) {
    static const char *const units[] = {"B", "KB", "MB", "GB", "TB", "PB", "EB"};
    fcdp_size_text text;
    double value = (double)bytes;
    int unit = 0;
    for (; value >= 999.5; unit++) value /= 1000;
    snprintf(text.s, sizeof text.s, "%.3g %s", value, units[unit]);
    return text;
}
