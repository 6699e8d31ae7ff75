/* Teams: that each part runs once and on its own thread, that all do at once, what time they take on the
 * simulated device. What a part waits for has a limit. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "alloc/team.h"
#include "tests/alloc/threads.h"
#include "tests/fail_thread.h"
#include "tests/log_text.h"

enum { MOST_PARTS = 6, N_RUNS = 500 };

static const char name[] = "fcdp-test";

static fcdp_team *team_create(fcdp_driver *drv, unsigned n_parts) {
    fcdp_team *team = fcdp__team_create(drv, name, n_parts);
    assert_non_null(team);
    return team;
}

/* ---- each part once, on its own thread ---- */

/* What the parts of one run noted. Nothing but the run itself orders that with its caller. */
typedef struct notes {
    unsigned counts[MOST_PARTS], ns[MOST_PARTS];
    pthread_t threads[MOST_PARTS];
} notes;

/* The caller is through with its own part first. */
static void note(notes *into, unsigned i, unsigned n, unsigned count) {
    for (unsigned k = 0; k < 4 * i; k++) sched_yield();
    into->counts[i] += count;
    into->ns[i] = n;
    into->threads[i] = pthread_self();
}

static void note_once(void *context, unsigned i, unsigned n) {
    note(context, i, n, 1);
}

static void note_ten_times(void *context, unsigned i, unsigned n) {
    note(context, i, n, 10);
}

/* `first`: an earlier run of the team; NULL: none. */
static bool is_right(const notes *run, unsigned n_parts, unsigned count, const notes *first) {
    bool right = pthread_equal(run->threads[0], pthread_self());
    for (unsigned i = 0; i < MOST_PARTS; i++) right &= run->counts[i] == (i < n_parts ? count : 0);
    for (unsigned i = 0; i < n_parts; i++) {
        right &= run->ns[i] == n_parts;
        for (unsigned k = 0; k < i; k++) right &= !pthread_equal(run->threads[i], run->threads[k]);
        if (first) right &= pthread_equal(run->threads[i], first->threads[i]);
    }
    return right;
}

/* With two functions and two contexts in turn. */
static void run_often(fcdp_team *team, unsigned n_parts) {
    notes runs[2], first;
    for (int k = 0; k < N_RUNS; k++) {
        notes *run = &runs[k % 2];
        memset(run, 0, sizeof *run);
        fcdp__team_run(team, k % 3 ? note_once : note_ten_times, run);
        if (!is_right(run, n_parts, k % 3 ? 1 : 10, k ? &first : NULL))
            fail_msg("run %d of %u parts: a part did not run once on its thread", k, n_parts);
        if (k == 0) first = *run;
    }
}

static void each_part_runs_once_on_its_thread(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    for (unsigned n_parts = 1; n_parts <= MOST_PARTS; n_parts++) {
        fcdp_team *team = team_create(drv, n_parts);
        assert_int_equal(n_threads(), n_parts - 1);
        run_often(team, n_parts);
        assert_int_equal(n_threads(), n_parts - 1);
        fcdp__team_destroy(team);
        assert_no_thread();
    }
    fcdp__driver_close(drv);
}

static atomic_uint n_ended;
static pthread_key_t ends;

/* As a thread ends, which takes it a while. */
static void note_end(void *unused) {
    (void)unused;
    for (int k = 0; k < 50; k++) sched_yield();
    atomic_fetch_add(&n_ended, 1);
}

static void will_note_end(void *context, unsigned i, unsigned n) {
    (void)n;
    if (i) pthread_setspecific(ends, context);
}

static void destroy_waits_for_the_threads_ends(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    assert_int_equal(pthread_key_create(&ends, note_end), 0);
    for (unsigned n_parts = 1; n_parts <= MOST_PARTS; n_parts++) {
        fcdp_team *team = team_create(drv, n_parts);
        fcdp__team_run(team, will_note_end, &ends);
        atomic_store(&n_ended, 0);
        fcdp__team_destroy(team);
        assert_int_equal(atomic_load(&n_ended), n_parts - 1);
    }
    pthread_key_delete(ends);
    fcdp__driver_close(drv);
}

static void no_team_is_one_part(void **state) {
    (void)state;
    run_often(NULL, 1);
    fcdp__team_destroy(NULL);
}

static void a_team_that_never_ran_leaves_nothing(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    for (int k = 0; k < 50; k++) {
        fcdp_team *team = team_create(drv, MOST_PARTS);
        fcdp__team_destroy(team);
        assert_no_thread();
    }
    fcdp__driver_close(drv);
}

static void a_team_is_smaller_where_threads_are_short(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    for (unsigned n = 0; n < MOST_PARTS; n++) {
        char expected[96];
        snprintf(expected, sizeof expected, "%s: %u of %d threads: %s", name, n + 1, MOST_PARTS,
                 strerror(EAGAIN));
        log_keep(FCDP_LOG_INFO);
        starts_no_thread = true;
        n_that_start = n;
        fcdp_team *team = fcdp__team_create(drv, name, MOST_PARTS);
        starts_no_thread = false;
        const char *said = log_kept();
        assert_non_null(team);
        if (n + 1 < MOST_PARTS)
            assert_says(said, expected);
        else
            assert_string_equal(said, "");
        assert_int_equal(n_threads(), n);
        run_often(team, n + 1);
        fcdp__team_destroy(team);
        assert_no_thread();
    }
    fcdp__driver_close(drv);
}

/* ---- at once ---- */

typedef struct meeting {
    sem_t semaphores[MOST_PARTS]; /* one a part */
    atomic_bool missed;
} meeting;

static void meeting_init(meeting *of) {
    for (int i = 0; i < MOST_PARTS; i++) sem_init(&of->semaphores[i], 0, 0);
    atomic_init(&of->missed, false);
}

/* Each waits until all others are here. */
static void meet(void *context, unsigned i, unsigned n) {
    meeting *of = context;
    for (unsigned k = 0; k < n; k++)
        if (k != i) sem_post(&of->semaphores[k]);
    for (unsigned k = 1; k < n; k++) {
        if (came(&of->semaphores[i])) continue;
        atomic_store(&of->missed, true);
        return;
    }
}

static void the_parts_run_at_once(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    for (unsigned n_parts = 2; n_parts <= MOST_PARTS; n_parts++) {
        fcdp_team *team = team_create(drv, n_parts);
        meeting of;
        meeting_init(&of);
        for (int k = 0; k < 50; k++) {
            fcdp__team_run(team, meet, &of);
            if (atomic_load(&of.missed)) fail_msg("run %d of %u parts: not all were there", k, n_parts);
        }
        fcdp__team_destroy(team);
    }
    fcdp__driver_close(drv);
}

typedef struct leader {
    fcdp_team *team;
    unsigned n_parts, number; /* its number: in the meeting */
    meeting *others;
    notes run;
    int n_wrong;
} leader;

/* One part of each run, the last, meets one of the other team's. */
static void meet_the_other_team(void *context, unsigned i, unsigned n) {
    leader *of = context;
    if (i == n - 1) meet(of->others, of->number, 2);
    note(&of->run, i, n, 1);
}

static void *leader_main(void *arg) {
    leader *of = arg;
    notes first;
    for (int k = 0; k < N_RUNS && !atomic_load(&of->others->missed); k++) {
        memset(&of->run, 0, sizeof of->run);
        fcdp__team_run(of->team, meet_the_other_team, of);
        of->n_wrong += !is_right(&of->run, of->n_parts, 1, k ? &first : NULL);
        if (k == 0) first = of->run;
    }
    return NULL;
}

static void two_teams_run_at_once(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    meeting of;
    leader leaders[2];
    pthread_t threads[2];
    meeting_init(&of);
    for (unsigned i = 0; i < 2; i++) {
        leaders[i] = (leader){.n_parts = 2 + i, .number = i, .others = &of};
        leaders[i].team = team_create(drv, leaders[i].n_parts);
    }
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, leader_main, &leaders[i]), 0);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    assert_false(atomic_load(&of.missed));
    for (int i = 0; i < 2; i++) {
        assert_int_equal(leaders[i].n_wrong, 0);
        fcdp__team_destroy(leaders[i].team);
    }
    fcdp__driver_close(drv);
}

/* ---- modelled time ---- */

#define MS ((uint64_t)1000000)
enum { N_TIMED = 4, CORE_TIMES = 20 };

/* Beside what the parts compute: 2 ms of a core. */
static const uint64_t slack_ns = 2 * CORE_TIMES * MS;

typedef struct timed {
    fcdp_driver *drv;
    fcdp_team *team;
    int64_t core_ns[N_TIMED];
    uint64_t begin_ns[N_TIMED], end_ns[N_TIMED]; /* the parts' */
    uint64_t before_ns, after_ns;                /* the caller's */
} timed;

static void part_compute(void *context, unsigned i, unsigned n) {
    timed *of = context;
    (void)n;
    of->begin_ns[i] = fcdp__driver_work_here(of->drv);
    compute(&of->core_ns[i]);
    of->end_ns[i] = fcdp__driver_work_here(of->drv);
}

/* 1 to 4 ms of a core, the longest in that part. */
static void run_timed(timed *of, unsigned longest) {
    for (unsigned i = 0; i < N_TIMED; i++)
        of->core_ns[(longest + i) % N_TIMED] = (int64_t)((N_TIMED - i) * MS);
    of->before_ns = fcdp__driver_work_here(of->drv);
    fcdp__team_run(of->team, part_compute, of);
    of->after_ns = fcdp__driver_work_here(of->drv);
}

static void a_run_takes_its_longest_part_s_time(void **state) {
    (void)state;
    timed of = {.drv = driver_open_sim()};
    of.team = team_create(of.drv, N_TIMED);
    simgpu_set_core(CORE_TIMES);
    fcdp__driver_work_begin(of.drv, fcdp__now_ns());
    for (unsigned longest = 0; longest < N_TIMED; longest++) {
        uint64_t sum_ns = 0;
        run_timed(&of, longest);
        for (unsigned i = 0; i < N_TIMED; i++) {
            uint64_t took_ns = CORE_TIMES * (uint64_t)of.core_ns[i];
            assert_in_range(of.begin_ns[i], of.before_ns, of.before_ns + slack_ns);
            assert_true(of.end_ns[i] >= of.begin_ns[i] + took_ns);
            assert_true(of.after_ns >= of.end_ns[i]);
            sum_ns += took_ns;
        }
        assert_true(of.after_ns - of.before_ns < sum_ns);
        assert_in_range(of.after_ns, of.end_ns[longest], of.end_ns[longest] + slack_ns);
    }
    fcdp__team_destroy(of.team);
    fcdp__driver_close(of.drv);
}

typedef struct early {
    fcdp_driver *drv;
    unsigned longest;
} early;

/* It is the first to end, but by 1 s of modelled time the last. */
static void part_ends_early(void *context, unsigned i, unsigned n) {
    const early *of = context;
    (void)n;
    if (i == of->longest)
        fcdp__driver_work_until(of->drv, fcdp__driver_work_here(of->drv) + 1000 * MS);
    else
        compute(&(int64_t){(int64_t)MS});
}

static void a_run_ends_with_the_last_part_in_modelled_time(void **state) {
    (void)state;
    early of = {.drv = driver_open_sim()};
    fcdp_team *team = team_create(of.drv, N_TIMED);
    simgpu_set_core(CORE_TIMES);
    fcdp__driver_work_begin(of.drv, fcdp__now_ns());
    for (unsigned k = 0; k < 5 * N_TIMED; k++) {
        uint64_t before_ns = fcdp__driver_work_here(of.drv);
        of.longest = k % N_TIMED;
        fcdp__team_run(team, part_ends_early, &of);
        uint64_t took_ns = fcdp__driver_work_here(of.drv) - before_ns;
        assert_in_range(took_ns, 1000 * MS, 1000 * MS + slack_ns);
    }
    fcdp__team_destroy(team);
    fcdp__driver_close(of.drv);
}

static void *timed_main(void *arg) {
    run_timed(arg, 1);
    return NULL;
}

static void a_caller_without_work_gets_none(void **state) {
    (void)state;
    timed of = {.drv = driver_open_sim()};
    pthread_t thread;
    of.team = team_create(of.drv, N_TIMED);
    simgpu_set_core(CORE_TIMES);
    assert_int_equal(pthread_create(&thread, NULL, timed_main, &of), 0);
    pthread_join(thread, NULL);
    assert_int_equal(of.before_ns, 0);
    assert_int_equal(of.after_ns, 0);
    for (unsigned i = 0; i < N_TIMED; i++) {
        assert_int_equal(of.begin_ns[i], 0);
        assert_int_equal(of.end_ns[i], 0);
    }
    fcdp__team_destroy(of.team);
    fcdp__driver_close(of.drv);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_part_runs_once_on_its_thread),
        cmocka_unit_test(destroy_waits_for_the_threads_ends),
        cmocka_unit_test(no_team_is_one_part),
        cmocka_unit_test(a_team_that_never_ran_leaves_nothing),
        cmocka_unit_test(a_team_is_smaller_where_threads_are_short),
        cmocka_unit_test(the_parts_run_at_once),
        cmocka_unit_test(two_teams_run_at_once),
        cmocka_unit_test(a_run_takes_its_longest_part_s_time),
        cmocka_unit_test(a_run_ends_with_the_last_part_in_modelled_time),
        cmocka_unit_test(a_caller_without_work_gets_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
