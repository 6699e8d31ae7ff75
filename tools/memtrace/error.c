/* error.c - formats the text of a failure. */
#include "tools/memtrace/error.h"

#include <stdarg.h>
#include <stdio.h>

_Bool memtrace_fail(memtrace_error *error, const char *format, ...) {
    if (!error) return 0;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return 0;
}
