/* error.h - the text of a function's failure: one sentence for the user. */
#ifndef MEMTRACE_ERROR_H
#define MEMTRACE_ERROR_H

typedef struct memtrace_error {
    char
        text[512]; /* what was tried, with which numbers, and what the user can do; "" where nothing failed */
} memtrace_error;

/* Formats the text; false, so that callers can return it. `error` may be NULL. */
__attribute__((format(printf, 2, 3))) _Bool memtrace_fail(memtrace_error *error, const char *format, ...);

#endif
