/* under_tsan.h - UNDER_TSAN: this build has gcc's or clang's ThreadSanitizer. */
#ifndef FCDP_TEST_UNDER_TSAN_H
#define FCDP_TEST_UNDER_TSAN_H

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#elif defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#endif

#endif
