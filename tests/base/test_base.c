/* The failure text, the log, checks and lock ranks. */
#include "tests/alloc/support.h"
#include "tests/log_text.h"

#define fail_with(...) assert_int_equal(fcdp__fail(FCDP_ERR_PEER, __VA_ARGS__), FCDP_ERR_PEER)

static void a_text_may_wrap_the_one_before(void **state) {
    (void)state;
    assert_int_equal(fcdp__fail(FCDP_ERR_SYSTEM, "open: %s", "no such file"), FCDP_ERR_SYSTEM);
    assert_int_equal(fcdp__fail(FCDP_ERR_PEER, "joining: %s", fcdp_error_text()), FCDP_ERR_PEER);
    assert_string_equal(fcdp_error_text(), "joining: open: no such file");
    for (int i = 0; i < 2000; i++) fail_with("%s and on", fcdp_error_text()); /* cut, not overrun */
    assert_true(strlen(fcdp_error_text()) < 4096);
    assert_memory_equal(fcdp_error_text(), "joining: ", 9);
}

static void a_kept_failure_comes_back_after_others(void **state) {
    (void)state;
    fcdp_failure error, none = {0};
    fail_with("%s", "the first one");
    error = fcdp__failure_keep(FCDP_ERR_PEER);
    assert_int_equal(fcdp__fail(FCDP_ERR_SYSTEM, "undoing it"), FCDP_ERR_SYSTEM);
    assert_int_equal(fcdp__failure_restore(&error), FCDP_ERR_PEER);
    assert_string_equal(fcdp_error_text(), "the first one");
    assert_int_equal(fcdp__failure_restore(&none), FCDP_OK);
    assert_string_equal(fcdp_error_text(), "the first one");
}

static void *text_of_new_thread(void *arg) {
    strcpy(arg, fcdp_error_text());
    fail_with("%s", "of the other thread");
    return NULL;
}

static void a_text_is_its_threads(void **state) {
    (void)state;
    char seen[64] = "unset";
    pthread_t thread;
    fail_with("%s", "of this thread");
    assert_int_equal(pthread_create(&thread, NULL, text_of_new_thread, seen), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_string_equal(seen, "");
    assert_string_equal(fcdp_error_text(), "of this thread");
}

/* What fcdp__log writes at threshold `threshold`, one line of each level. */
static const char *log_of(fcdp_log_level threshold) {
    log_keep(threshold);
    fcdp__log(FCDP_LOG_QUIET, "summary");
    fcdp__log(FCDP_LOG_WARN, "%d of %s", 3, "them");
    fcdp__log(FCDP_LOG_INFO, "told");
    fcdp__log(FCDP_LOG_DEBUG, "detail");
    return log_kept();
}

static void the_log_has_a_threshold(void **state) {
    (void)state;
    assert_string_equal(log_of(FCDP_LOG_QUIET), "fcdp: summary\n");
    assert_string_equal(log_of(FCDP_LOG_WARN), "fcdp: summary\nfcdp: warning: 3 of them\n");
    assert_string_equal(log_of(FCDP_LOG_DEBUG),
                        "fcdp: summary\nfcdp: warning: 3 of them\nfcdp: info: told\nfcdp: debug: detail\n");
}

static void check_at(void *arg) {
    fcdp__check_level = 1;
    FCDP_CHECK(*(int *)arg, 1 + 1 == 3);
}

static void a_failed_check_aborts_at_its_level(void **state) {
    (void)state;
    int level = 0;
    assert_dies(check_at, &level, SIGABRT);
    level = 1;
    assert_dies(check_at, &level, SIGABRT);
    level = 2;
    assert_int_equal(child_run(check_at, &level), 0);
}

static fcdp_lock region, pool;

static void locks_in_order(void *arg) {
    (void)arg;
    fcdp__check_level = 2;
    fcdp__lock_acquire(&region);
    fcdp__lock_acquire(&pool);
    fcdp__lock_release(&region); /* released in any order */
    fcdp__lock_release(&pool);
    fcdp__lock_acquire(&pool);
    fcdp__lock_release(&pool);
}

static void locks_against_order(void *arg) {
    fcdp__check_level = *(int *)arg;
    fcdp__lock_acquire(&pool);
    fcdp__lock_acquire(&region);
}

static void lock_twice(void *arg) {
    (void)arg;
    fcdp__check_level = 2;
    fcdp__lock_acquire(&pool);
    fcdp__lock_acquire(&pool); /* aborts instead of hanging */
}

static void release_without(void *arg) {
    (void)arg;
    fcdp__lock_release(&pool);
}

static void lock_ranks_are_checked(void **state) {
    (void)state;
    int level = 2;
    fcdp__lock_init(&region, FCDP_RANK_REGION);
    fcdp__lock_init(&pool, FCDP_RANK_POOL);
    assert_int_equal(child_run(locks_in_order, NULL), 0);
    assert_dies(locks_against_order, &level, SIGABRT);
    level = 1;
    assert_int_equal(child_run(locks_against_order, &level), 0);
    assert_dies(lock_twice, NULL, SIGABRT);
    assert_dies(release_without, NULL, SIGABRT);
    fcdp__lock_destroy(&region);
    fcdp__lock_destroy(&pool);
}

static pthread_cond_t turn = PTHREAD_COND_INITIALIZER;
static int whose;

static void *take_turns(void *arg) {
    int me = *(int *)arg;
    for (int i = 0; i < 100; i++) {
        fcdp__lock_acquire(&pool);
        while (whose != me) fcdp__lock_wait(&pool, &turn);
        whose = !me;
        pthread_cond_signal(&turn);
        fcdp__lock_release(&pool);
    }
    return NULL;
}

static void waiting_gives_the_lock_up(void **state) {
    (void)state;
    int zero = 0, one = 1;
    pthread_t other;
    fcdp__lock_init(&pool, FCDP_RANK_POOL);
    assert_int_equal(pthread_create(&other, NULL, take_turns, &one), 0);
    take_turns(&zero);
    assert_int_equal(pthread_join(other, NULL), 0);
    fcdp__lock_destroy(&pool);
}

static void the_clock_is_monotonic(void **state) {
    (void)state;
    uint64_t before = fcdp__now_ns();
    for (int i = 0; i < 1000; i++) {
        uint64_t now = fcdp__now_ns();
        assert_true(now >= before);
        before = now;
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_text_may_wrap_the_one_before),
        cmocka_unit_test(a_kept_failure_comes_back_after_others),
        cmocka_unit_test(a_text_is_its_threads),
        cmocka_unit_test(the_log_has_a_threshold),
        cmocka_unit_test(a_failed_check_aborts_at_its_level),
        cmocka_unit_test(lock_ranks_are_checked),
        cmocka_unit_test(waiting_gives_the_lock_up),
        cmocka_unit_test(the_clock_is_monotonic),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
