/* What a SIGSEGV says, and that it ends as it would have ended: children that fault, their last words and
 * their status. */
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "tests/alloc/support.h"
#include "tests/log_text.h"
#include "tiering/segv.h"

enum { BYTES = 1 << 16, SAID_BYTES = 4096 };

static char *nowhere; /* inaccessible BYTES */
static char *elsewhere;

typedef struct death {
    int status;
    char said[SAID_BYTES];
} death;

/* Run `life` in a child whose SIGSEGV is as a process starts with; what it wrote to stderr and how it ended.
 */
static void live(void *life) {
    signal(SIGSEGV, SIG_DFL); /* a sanitizer has its own */
    (*(void (**)(void))life)();
}

static death die_of(void (*life)(void)) {
    death d = {0};
    const char *said = child_says(live, (void *)&life, &d.status);
    snprintf(d.said, sizeof d.said, "%s", said);
    return d;
}

#define assert_killed(d) assert_true(WIFSIGNALED((d).status) && WTERMSIG((d).status) == SIGSEGV)

static char touch(const volatile char *at) {
    return *at;
}

static fcdp_segv_watch *watch_nowhere(void) {
    const fcdp_segv_part parts[] = {{512, 1024, "up.weight"}, {2048, 100, "up.bias"}};
    fcdp_segv_watch *watch = NULL;
    if (fcdp__segv_watch((fcdp_dptr){(uintptr_t)nowhere}, BYTES, "blocks.3", parts, 2, &watch)) _exit(99);
    return watch;
}

static void in_a_part(void) {
    (void)watch_nowhere();
    touch(nowhere + 512 + 1023);
}

static void between_the_parts(void) {
    (void)watch_nowhere();
    touch(nowhere + 512 + 1024);
}

static void in_what_nobody_watches(void) {
    (void)watch_nowhere();
    touch(elsewhere);
}

static void in_what_was_forgotten(void) {
    fcdp__segv_unwatch(watch_nowhere());
    touch(nowhere + 600);
}

static void a_fault_names_the_range_and_the_part(void **state) {
    (void)state;
    death d = die_of(in_a_part);
    char at[128];
    snprintf(at, sizeof at, "fcdp: SIGSEGV: %p is in the gathered parameter up.weight of blocks.3, ",
             (void *)(nowhere + 1535));
    assert_killed(d);
    assert_true(strstr(d.said, at) == d.said);
    assert_says(d.said, "unshard()");
    assert_ptr_equal(strchr(d.said, '\n'), d.said + strlen(d.said) - 1);
    d = die_of(between_the_parts);
    assert_killed(d);
    assert_says(d.said, "is in gathered parameters of blocks.3, ");
}

static void any_other_fault_is_left_alone(void **state) {
    (void)state;
    death d = die_of(in_what_nobody_watches);
    assert_killed(d);
    assert_string_equal(d.said, "");
    d = die_of(in_what_was_forgotten);
    assert_killed(d);
    assert_string_equal(d.said, "");
}

/* ---- the action of before ---- */

static void says_where(int signum, siginfo_t *info, void *context) {
    (void)signum;
    (void)context;
    char text[64];
    int n = snprintf(text, sizeof text, "before: code %d at %p\n", info->si_code, info->si_addr);
    _exit(write(STDERR_FILENO, text, (size_t)n) == n ? 3 : 7);
}

static void allows_it(int signum, siginfo_t *info, void *context) {
    (void)signum;
    (void)context;
    if ((char *)info->si_addr >= elsewhere && (char *)info->si_addr < elsewhere + BYTES) {
        mprotect(elsewhere, BYTES, PROT_READ);
        return;
    }
    _exit(4);
}

static void install(void (*action)(int, siginfo_t *, void *)) {
    struct sigaction a = {.sa_sigaction = action, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &a, NULL);
}

static void with_a_handler_of_before(void) {
    install(says_where);
    in_a_part();
}

static void with_one_that_recovers(void) {
    install(allows_it);
    (void)watch_nowhere();
    for (int i = 0; i < 3; i++) {
        touch(elsewhere + i);
        mprotect(elsewhere, BYTES, PROT_NONE);
    }
    touch(nowhere + 2048);
}

static void the_handler_of_before_sees_the_same_fault(void **state) {
    (void)state;
    death d = die_of(with_a_handler_of_before);
    char second[64];
    snprintf(second, sizeof second, "\nbefore: code %d at %p\n", SEGV_ACCERR, (void *)(nowhere + 1535));
    if (!WIFEXITED(d.status) || WEXITSTATUS(d.status) != 3) fail_msg("status %#x: %s", d.status, d.said);
    assert_says(d.said, "up.weight");
    assert_says(d.said, second);
}

/* A program that catches faults of its own goes on doing so, and the line still comes afterwards. */
static void a_handler_of_before_that_recovers_goes_on(void **state) {
    (void)state;
    death d = die_of(with_one_that_recovers);
    assert_true(WIFEXITED(d.status) && WEXITSTATUS(d.status) == 4);
    assert_says(d.said, "up.bias");
}

static void sent_by_another(void) {
    (void)watch_nowhere();
    kill(getpid(), SIGSEGV);
    _exit(5);
}

static void sent_and_ignored(void) {
    signal(SIGSEGV, SIG_IGN);
    (void)watch_nowhere();
    kill(getpid(), SIGSEGV);
    _exit(6);
}

static void a_signal_that_is_no_fault_does_what_it_did(void **state) {
    (void)state;
    death d = die_of(sent_by_another);
    assert_killed(d);
    assert_string_equal(d.said, "");
    d = die_of(sent_and_ignored);
    assert_true(WIFEXITED(d.status) && WEXITSTATUS(d.status) == 6);
}

/* ---- faults while the table changes ---- */

static atomic_bool over;

static void *come_and_go(void *arg) {
    while (!atomic_load(&over)) {
        fcdp_segv_watch *watch;
        const fcdp_segv_part part = {0, BYTES, "comes and goes"};
        if (fcdp__segv_watch((fcdp_dptr){(uintptr_t)arg}, BYTES, "other", &part, 1, &watch)) _exit(99);
        fcdp__segv_unwatch(watch);
    }
    return NULL;
}

static void faults_while_others_come_and_go(void) {
    pthread_t threads[2];
    static char theirs[2];
    install(allows_it);
    (void)watch_nowhere();
    for (int i = 0; i < 2; i++)
        if (pthread_create(&threads[i], NULL, come_and_go, &theirs[i])) _exit(98);
    for (int i = 0; i < 2000; i++) {
        touch(elsewhere + i);
        mprotect(elsewhere, BYTES, PROT_NONE);
    }
    atomic_store(&over, true);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    touch(nowhere + 600);
}

static void the_table_is_read_while_it_changes(void **state) {
    (void)state;
    death d = die_of(faults_while_others_come_and_go);
    assert_true(WIFEXITED(d.status) && WEXITSTATUS(d.status) == 4);
    assert_says(d.said, "up.weight of blocks.3");
}

int main(void) {
    nowhere = mmap(NULL, BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    elsewhere = mmap(NULL, BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (nowhere == MAP_FAILED || elsewhere == MAP_FAILED) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_fault_names_the_range_and_the_part),
        cmocka_unit_test(any_other_fault_is_left_alone),
        cmocka_unit_test(the_handler_of_before_sees_the_same_fault),
        cmocka_unit_test(a_handler_of_before_that_recovers_goes_on),
        cmocka_unit_test(a_signal_that_is_no_fault_does_what_it_did),
        cmocka_unit_test(the_table_is_read_while_it_changes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
