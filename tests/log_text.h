/* log_text.h - what FCDP logs during a test: standard error goes to a file in memory meanwhile.
 *
 *     log_keep(FCDP_LOG_WARN);
 *     ...
 *     assert_says(log_kept(), "is gathered again");
 *
 * A test that fails in between has its own words there, too: the next log_keep() or the end of the program
 * prints them. child_says() has what a process of its own wrote, which may die.
 */
#ifndef FCDP_TESTS_LOG_TEXT_H
#define FCDP_TESTS_LOG_TEXT_H

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/assert_ok.h"

enum { LOG_TEXT_BYTES = 1 << 16 }; /* longer texts are cut */

static struct {
    bool keeps;
    int file, before;      /* while it keeps: where standard error goes, and where it went */
    void (*at_abort)(int); /* what SIGABRT did */
    char text[LOG_TEXT_BYTES];
} log_text;

#define assert_says(said, part)                                                                              \
    do {                                                                                                     \
        const char *said_ = (said);                                                                          \
        if (!strstr(said_, (part))) fail_msg("\"%s\" is not in \"%s\"", (part), said_);                      \
    } while (0)

static inline unsigned log_count(const char *text, const char *part) {
    unsigned n = 0;
    for (; (text = strstr(text, part)); text += strlen(part)) n++;
    return n;
}

/* So far. Also while it keeps, and on any thread but with one at a time. */
static inline const char *log_peek(void) {
    ssize_t n = pread(log_text.file, log_text.text, LOG_TEXT_BYTES - 1, 0);
    log_text.text[n > 0 ? n : 0] = '\0';
    return log_text.text;
}

/* The text, until the next log_keep(). From here on the level is a program's own, FCDP_LOG_WARN. */
static inline const char *log_kept(void) {
    fflush(stderr);
    dup2(log_text.before, STDERR_FILENO);
    signal(SIGABRT, log_text.at_abort);
    fcdp_log_set_level(FCDP_LOG_WARN);
    (void)log_peek();
    close(log_text.before);
    close(log_text.file);
    log_text.keeps = false;
    return log_text.text;
}

__attribute__((destructor)) static void log_show_unread(void) {
    if (log_text.keeps) fputs(log_kept(), stderr);
}

/* A thread that a check or MUST() ends has said why. */
static inline void log_show_and_abort(int signal_number) {
    char part[4096];
    lseek(log_text.file, 0, SEEK_SET); /* writers append */
    for (ssize_t n; (n = read(log_text.file, part, sizeof part)) > 0;)
        if (write(log_text.before, part, (size_t)n) != n) break;
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static inline void log_keep(fcdp_log_level level) {
    log_show_unread();
    fflush(stderr);
    log_text.before = dup(STDERR_FILENO);
    log_text.file = memfd_create("log", MFD_CLOEXEC);
    assert_true(log_text.before >= 0 && log_text.file >= 0);
    assert_true(fcntl(log_text.file, F_SETFL, O_APPEND) == 0); /* else threads would write over each other */
    assert_true(dup2(log_text.file, STDERR_FILENO) == STDERR_FILENO);
    log_text.at_abort = signal(SIGABRT, log_show_and_abort);
    fcdp_log_set_level(level);
    log_text.keeps = true;
}

/* Run `body` in a child of its own; what it wrote to standard error, until the next log_keep(), and its wait
 * status. */
static inline const char *child_says(void (*body)(void *), void *arg, int *wait_status_out) {
    fflush(NULL);
    log_keep(FCDP_LOG_WARN);
    pid_t child = fork();
    if (child == 0) {
        body(arg);
        _exit(0);
    }
    pid_t ended = child > 0 ? waitpid(child, wait_status_out, 0) : -1;
    const char *said = log_kept();
    assert_true(child > 0 && ended == child);
    return said;
}

#endif
