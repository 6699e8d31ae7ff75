/* assert_ok.h - a call of FCDP that must succeed; else the test fails with what FCDP says. */
#ifndef FCDP_TESTS_ASSERT_OK_H
#define FCDP_TESTS_ASSERT_OK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h> /* after those, which it needs */

#include "base/base.h"

#define assert_ok(call)                                                                                      \
    do {                                                                                                     \
        fcdp_status status_ = (call);                                                                        \
        if (status_) fail_msg("%s: status %d: %s", #call, (int)status_, fcdp_error_text());                  \
    } while (0)

#endif
