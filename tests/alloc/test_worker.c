/* Workers: in which order jobs run, what streams are behind, jobs that end before their turn. Linked with
 * --wrap of the driver's wait for a word and of its store, to know that a stream has come to its job, and to
 * hold the worker where it stores. Whatever could hang is waited for with a limit. */
#include <pthread.h>
#include <sched.h>

#include "alloc/pinned.h"
#include "alloc/worker.h"
#include "tests/alloc/driver_world.h"
#include "tests/alloc/threads.h"
#include "tests/fail_thread.h"

enum { N_STREAMS = 4, N_WORKERS = 2 };

/* ---- waiting ---- */

typedef struct gate {
    sem_t entered, opened;
} gate;

static void gate_init(gate *gate) {
    sem_init(&gate->entered, 0, 0);
    sem_init(&gate->opened, 0, 0);
}

static void gate_pass(void *context) {
    gate *through = context;
    sem_post(&through->entered);
    (void)came(&through->opened);
}

static void post(void *semaphore) {
    sem_post(semaphore);
}

/* ---- what the linker puts between the worker and the driver ---- */

static sem_t *_Atomic tell_posted; /* the next job's stream has come to it */
static gate *_Atomic store_gate;   /* the next store of a word passes it first */
fcdp_status __real_fcdp__driver_wait_value32(fcdp_driver *drv, fcdp_stream stream, fcdp_dptr word,
                                             uint32_t value);
fcdp_status __wrap_fcdp__driver_wait_value32(fcdp_driver *drv, fcdp_stream stream, fcdp_dptr word,
                                             uint32_t value);
void __real_fcdp__driver_word_store(const fcdp_driver *drv, uint32_t *word, uint32_t value);
void __wrap_fcdp__driver_word_store(const fcdp_driver *drv, uint32_t *word, uint32_t value);

__attribute__((visibility("default"))) fcdp_status __wrap_fcdp__driver_wait_value32(fcdp_driver *drv,
                                                                                    fcdp_stream stream,
                                                                                    fcdp_dptr word,
                                                                                    uint32_t value) {
    sem_t *posted = atomic_exchange(&tell_posted, NULL);
    fcdp_status status = posted ? fcdp__driver_host_function(drv, stream, post, posted) : FCDP_OK;
    return status ? status : __real_fcdp__driver_wait_value32(drv, stream, word, value);
}

__attribute__((visibility("default"))) void __wrap_fcdp__driver_word_store(const fcdp_driver *drv,
                                                                           uint32_t *word, uint32_t value) {
    gate *through = atomic_exchange(&store_gate, NULL);
    if (through) gate_pass(through);
    __real_fcdp__driver_word_store(drv, word, value);
}

/* ---- the world ---- */

typedef struct crew {
    world w; /* its stream is for time_for_mistakes */
    fcdp_stream streams[N_STREAMS];
    fcdp_worker *workers[N_WORKERS];
} crew;

static const char *const names[N_WORKERS] = {"fcdp-test-0", "fcdp-test-1"};

static crew crew_create_idle(void) {
    crew c = {.w = world_create()};
    for (int i = 0; i < N_STREAMS; i++) assert_ok(fcdp__driver_stream_create(c.w.drv, &c.streams[i]));
    return c;
}

static crew crew_create(void) {
    crew c = crew_create_idle();
    for (int i = 0; i < N_WORKERS; i++) assert_ok(fcdp__worker_create(c.w.drv, names[i], &c.workers[i]));
    return c;
}

static void crew_destroy(crew *c) {
    for (int i = 0; i < N_WORKERS; i++) fcdp__worker_destroy(c->workers[i]);
    assert_no_thread();
    for (int i = 0; i < N_STREAMS; i++) fcdp__driver_stream_destroy(c->w.drv, c->streams[i]);
    world_destroy(&c->w);
}

static void assert_goes_on(crew *c, int stream) {
    static sem_t there;
    sem_init(&there, 0, 0);
    assert_ok(fcdp__driver_host_function(c->w.drv, c->streams[stream], post, &there));
    if (!came(&there)) fail_msg("stream %d does not go on", stream);
}

/* Another stream runs several host functions, one after another: a thread, or a stream, that wrongly goes on
 * needs less. What is right passes however long that takes. */
static void time_for_mistakes(crew *c) {
    static sem_t there;
    sem_init(&there, 0, 0);
    for (int i = 0; i < 40; i++) {
        assert_ok(fcdp__driver_host_function(c->w.drv, c->w.stream, post, &there));
        assert_came(&there);
    }
}

/* ---- what was done, in which order ---- */

static struct {
    pthread_mutex_t mutex;
    int entries[16];
    int n;
} told = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static void tell(int what) {
    pthread_mutex_lock(&told.mutex);
    if (told.n < 16) told.entries[told.n++] = what;
    pthread_mutex_unlock(&told.mutex);
}

static void assert_told(int n, const int *entries) {
    pthread_mutex_lock(&told.mutex);
    int n_told = told.n;
    pthread_mutex_unlock(&told.mutex);
    assert_int_equal(n_told, n);
    for (int i = 0; i < n; i++) assert_int_equal(told.entries[i], entries[i]);
}

typedef struct work {
    int number;
    gate *gate; /* NULL: it does not wait */
} work;

static void work_do(void *context) {
    work *of = context;
    if (of->gate) gate_pass(of->gate);
    tell(of->number);
}

/* ---- order ---- */

static void jobs_run_in_the_order_of_launches(void **state) {
    (void)state;
    crew c = crew_create();
    for (int round = 0; round < 10; round++) {
        gate held, within;
        sem_t posted;
        work works[2] = {{0, NULL}, {1, &within}};
        fcdp_worker_job jobs[2] = {{0}, {0}};
        gate_init(&held);
        gate_init(&within);
        sem_init(&posted, 0, 0);
        told.n = 0;
        assert_ok(fcdp__driver_host_function(c.w.drv, c.streams[0], gate_pass, &held));
        for (int i = 0; i < 2; i++) {
            if (i == 1) atomic_store(&tell_posted, &posted);
            assert_ok(fcdp__worker_launch(c.workers[0], c.streams[i], work_do, &works[i], &jobs[i]));
        }
        assert_came(&posted);
        time_for_mistakes(&c);
        assert_told(0, NULL);
        sem_post(&held.opened);
        assert_goes_on(&c, 0);
        assert_came(&within.entered);
        time_for_mistakes(&c);
        assert_int_equal(fcdp__driver_stream_query(c.w.drv, c.streams[1]), FCDP_PENDING);
        sem_post(&within.opened);
        assert_goes_on(&c, 1);
        for (int i = 0; i < 2; i++) fcdp__worker_job_end(&jobs[i]);
        assert_told(2, (int[]){0, 1});
    }
    crew_destroy(&c);
}

typedef struct fill {
    gate gate;
    char *at;
    size_t bytes;
    int value;
} fill;

static void fill_do(void *context) {
    fill *of = context;
    gate_pass(&of->gate);
    memset(of->at, of->value, of->bytes);
}

static void a_stream_goes_on_behind_its_job(void **state) {
    (void)state;
    enum { BEFORE_JOB = 0xEE };
    crew c = crew_create();
    fcdp_pinned memory;
    const unsigned char *device = (const unsigned char *)(uintptr_t)c.w.base.addr;
    assert_ok(fcdp__pinned_create(c.w.drv, 1, "a test", &memory));
    for (int round = 1; round <= 10; round++) {
        fill of = {.at = memory.at, .bytes = memory.bytes, .value = round};
        fcdp_worker_job job = {0};
        gate_init(&of.gate);
        memset(memory.at, BEFORE_JOB, memory.bytes);
        assert_ok(fcdp__worker_launch(c.workers[0], c.streams[0], fill_do, &of, &job));
        assert_ok(fcdp__driver_copy_h2d(c.w.drv, c.w.base, memory.at, memory.bytes, c.streams[0]));
        assert_came(&of.gate.entered);
        time_for_mistakes(&c);
        assert_int_equal(device[0], round - 1);
        assert_int_equal(fcdp__driver_stream_query(c.w.drv, c.streams[0]), FCDP_PENDING);
        sem_post(&of.gate.opened);
        assert_goes_on(&c, 0);
        for (size_t i = 0; i < memory.bytes; i++)
            if (device[i] != round) fail_msg("byte %zu is %d", i, device[i]);
        fcdp__worker_job_end(&job);
    }
    assert_ok(fcdp__driver_stream_sync(c.w.drv, c.streams[0]));
    assert_ok(fcdp__pinned_destroy(c.w.drv, &memory));
    crew_destroy(&c);
}

/* ---- jobs that end ---- */

/* Three jobs, each on a stream of its own, of which those in `ends` (bits) end before their streams come to
 * them; with `runs`, while the first runs. Each stream goes on once it and those before have come so far. */
static void end_some(crew *c, unsigned ends, bool backwards, bool runs) {
    gate before[3], within;
    work works[3] = {{0, runs ? &within : NULL}, {1, NULL}, {2, NULL}};
    fcdp_worker_job jobs[3] = {{0}, {0}, {0}};
    int left[3], n_left = 0;
    told.n = 0;
    gate_init(&within);
    for (int i = 0; i < 3; i++) {
        gate_init(&before[i]);
        assert_ok(fcdp__driver_host_function(c->w.drv, c->streams[i], gate_pass, &before[i]));
        assert_ok(fcdp__worker_launch(c->workers[0], c->streams[i], work_do, &works[i], &jobs[i]));
        if (!(ends >> i & 1)) left[n_left++] = i;
    }
    if (runs) {
        sem_post(&before[0].opened);
        assert_came(&within.entered);
    }
    for (int i = 0; i < 3; i++) {
        int which = backwards ? 2 - i : i;
        if (ends >> which & 1) fcdp__worker_job_end(&jobs[which]);
    }
    if (runs) sem_post(&within.opened);
    for (int i = 0; i < 3; i++) {
        sem_post(&before[i].opened);
        assert_goes_on(c, i);
    }
    for (int i = 0; i < 3; i++) fcdp__worker_job_end(&jobs[i]);
    assert_told(n_left, left);
}

static void a_job_that_ends_before_its_turn_never_runs(void **state) {
    (void)state;
    crew c = crew_create();
    for (unsigned ends = 1; ends < 8; ends++)
        for (int backwards = 0; backwards < 2; backwards++)
            for (int runs = 0; runs <= !(ends & 1); runs++) end_some(&c, ends, backwards, runs);
    crew_destroy(&c);
}

/* Its stream waits for it already, and has to for the one before, too. */
static void a_job_that_is_not_the_next_ends_while_its_stream_waits(void **state) {
    (void)state;
    crew c = crew_create();
    gate before;
    sem_t posted;
    work works[2] = {{0, NULL}, {1, NULL}};
    fcdp_worker_job jobs[2] = {{0}, {0}};
    told.n = 0;
    gate_init(&before);
    sem_init(&posted, 0, 0);
    assert_ok(fcdp__driver_host_function(c.w.drv, c.streams[0], gate_pass, &before));
    assert_ok(fcdp__worker_launch(c.workers[0], c.streams[0], work_do, &works[0], &jobs[0]));
    atomic_store(&tell_posted, &posted);
    assert_ok(fcdp__worker_launch(c.workers[0], c.streams[1], work_do, &works[1], &jobs[1]));
    assert_came(&posted);
    fcdp__worker_job_end(&jobs[1]);
    time_for_mistakes(&c);
    assert_int_equal(fcdp__driver_stream_query(c.w.drv, c.streams[1]), FCDP_PENDING);
    sem_post(&before.opened);
    for (int i = 0; i < 2; i++) assert_goes_on(&c, i);
    fcdp__worker_job_end(&jobs[0]);
    assert_told(1, (int[]){0});
    crew_destroy(&c);
}

/* The worker has settled on what it stores by then. */
static void a_job_ends_while_the_worker_stores_the_word(void **state) {
    (void)state;
    crew c = crew_create();
    gate before, store;
    work works[2] = {{0, NULL}, {1, NULL}};
    fcdp_worker_job jobs[2] = {{0}, {0}};
    told.n = 0;
    gate_init(&before);
    gate_init(&store);
    assert_ok(fcdp__driver_host_function(c.w.drv, c.streams[0], gate_pass, &before));
    for (int i = 0; i < 2; i++)
        assert_ok(fcdp__worker_launch(c.workers[0], c.streams[i], work_do, &works[i], &jobs[i]));
    atomic_store(&store_gate, &store);
    sem_post(&before.opened);
    assert_came(&store.entered);
    fcdp__worker_job_end(&jobs[1]);
    sem_post(&store.opened);
    for (int i = 0; i < 2; i++) assert_goes_on(&c, i);
    fcdp__worker_job_end(&jobs[0]);
    crew_destroy(&c);
}

typedef struct ender {
    fcdp_worker_job *job;
    fcdp_worker *drained; /* NULL: the job is ended */
    sem_t begun;
} ender;

static void *ender_main(void *arg) {
    ender *of = arg;
    sem_post(&of->begun);
    if (of->drained)
        fcdp__worker_drain(of->drained);
    else
        fcdp__worker_job_end(of->job);
    tell(-1);
    return NULL;
}

static void running_job_wait(bool drains) {
    crew c = crew_create();
    gate within;
    pthread_t thread;
    work of = {0, &within};
    fcdp_worker_job job = {0};
    ender ender = {.job = &job, .drained = drains ? c.workers[0] : NULL};
    told.n = 0;
    gate_init(&within);
    sem_init(&ender.begun, 0, 0);
    assert_ok(fcdp__worker_launch(c.workers[0], c.streams[0], work_do, &of, &job));
    assert_came(&within.entered);
    assert_int_equal(pthread_create(&thread, NULL, ender_main, &ender), 0);
    assert_came(&ender.begun);
    time_for_mistakes(&c);
    assert_told(0, NULL);
    sem_post(&within.opened);
    pthread_join(thread, NULL);
    assert_told(2, (int[]){0, -1});
    assert_goes_on(&c, 0);
    fcdp__worker_job_end(&job);
    crew_destroy(&c);
}

static void the_end_of_a_running_job_is_waited_for(void **state) {
    (void)state;
    running_job_wait(false);
    running_job_wait(true);
}

/* Its stream may never come to it, where the device has failed. */
static void a_job_whose_turn_has_not_come_is_not_drained(void **state) {
    (void)state;
    crew c = crew_create();
    gate before;
    work of = {0, NULL};
    fcdp_worker_job job = {0};
    gate_init(&before);
    assert_ok(fcdp__driver_host_function(c.w.drv, c.streams[0], gate_pass, &before));
    assert_ok(fcdp__worker_launch(c.workers[0], c.streams[0], work_do, &of, &job));
    assert_came(&before.entered);
    fcdp__worker_drain(c.workers[0]);
    fcdp__worker_job_end(&job);
    sem_post(&before.opened);
    assert_goes_on(&c, 0);
    crew_destroy(&c);
}

static void jobs_that_were_not_launched_end(void **state) {
    (void)state;
    fcdp_worker_job job = {0};
    fcdp__worker_job_end(&job);
    fcdp__worker_drain(NULL);
    fcdp__worker_destroy(NULL);
}

/* ---- host functions that run one after another, as CUDA may ---- */

typedef struct meeting {
    sem_t *mine, *other; /* other: NULL */
    char thread[16];
    bool met;
} meeting;

static void meet(void *context) {
    meeting *of = context;
    pthread_getname_np(pthread_self(), of->thread, sizeof of->thread);
    if (of->other) sem_post(of->other);
    of->met = came(of->mine);
}

/* The jobs of two workers wait for each other, then one for a host function. */
static void jobs_hold_no_host_function_up(void **state) {
    (void)state;
    crew c = crew_create();
    sem_t semaphores[3];
    meeting meetings[3] = {{&semaphores[0], &semaphores[1], "", false},
                           {&semaphores[1], &semaphores[0], "", false},
                           {&semaphores[2], NULL, "", false}};
    fcdp_worker_job jobs[3] = {{0}, {0}, {0}};
    simgpu_set_serial(1);
    for (int i = 0; i < 3; i++) sem_init(&semaphores[i], 0, 0);
    for (int i = 0; i < 3; i++)
        assert_ok(fcdp__worker_launch(c.workers[i % 2], c.streams[i], meet, &meetings[i], &jobs[i]));
    for (int i = 0; i < 2; i++) assert_goes_on(&c, i);
    assert_ok(fcdp__driver_host_function(c.w.drv, c.streams[3], post, &semaphores[2]));
    assert_goes_on(&c, 2);
    for (int i = 0; i < 3; i++) {
        fcdp__worker_job_end(&jobs[i]);
        assert_true(meetings[i].met);
        assert_string_equal(meetings[i].thread, names[i % 2]);
    }
    simgpu_set_serial(0);
    crew_destroy(&c);
}

/* ---- failures, and drivers that lack the calls ---- */

static void count(void *n) {
    __atomic_fetch_add((int *)n, 1, __ATOMIC_RELAXED);
}

static size_t n_registrations(void) {
    struct simgpu_live live;
    simgpu_live(&live);
    return live.registrations;
}

/* A job that was not launched holds no other up, even before it ends. */
static void every_failure_leaves_nothing(void **state) {
    (void)state;
    size_t n_failed[2] = {0, 0}; /* of the worker's making, and of launches */
    for (unsigned long n = 1;; n++) {
        crew c = crew_create_idle();
        fcdp_worker *worker = NULL;
        fcdp_worker_job jobs[3] = {{0}, {0}, {0}};
        fcdp_status statuses[3] = {FCDP_OK, FCDP_OK, FCDP_OK};
        int ran[3] = {0, 0, 0};
        gate before;
        gate_init(&before);
        assert_ok(fcdp__driver_host_function(c.w.drv, c.streams[0], gate_pass, &before));
        unsigned long first = simgpu_calls(NULL);
        assert_int_equal(simgpu_fail_nth(NULL, n, CUDA_UNKNOWN), 0);
        fcdp_status status = fcdp__worker_create(c.w.drv, names[0], &worker);
        if (status) {
            n_failed[0]++;
            assert_int_equal(status, FCDP_ERR_DRIVER);
            assert_true(strlen(fcdp_error_text()) > 0);
            assert_null(worker);
            assert_int_equal(n_registrations(), 0);
            assert_no_thread();
        }
        for (int i = 0; worker && i < 3; i++) {
            statuses[i] = fcdp__worker_launch(worker, c.streams[i % 2], count, &ran[i], &jobs[i]);
            if (statuses[i]) assert_int_equal(statuses[i], FCDP_ERR_DRIVER);
            n_failed[1] += statuses[i] != FCDP_OK;
        }
        bool spent = simgpu_calls(NULL) - first >= n;
        assert_int_equal(simgpu_fail_nth(NULL, 0, 0), 0);
        sem_post(&before.opened);
        for (int i = 0; i < 2; i++) assert_goes_on(&c, i);
        for (int i = 0; worker && i < 3; i++) {
            fcdp__worker_job_end(&jobs[i]);
            if (!statuses[i]) assert_int_equal(ran[i], 1);
        }
        fcdp__worker_destroy(worker);
        assert_int_equal(n_registrations(), 0);
        crew_destroy(&c);
        if (!spent) break;
    }
    assert_true(n_failed[0] >= 2 && n_failed[1] >= 6); /* two calls each, contexts aside */
}

static void a_thread_that_cannot_start_leaves_nothing(void **state) {
    (void)state;
    crew c = crew_create_idle();
    fcdp_worker *worker = NULL;
    starts_no_thread = true;
    fcdp_status status = fcdp__worker_create(c.w.drv, names[0], &worker);
    starts_no_thread = false;
    assert_int_equal(status, FCDP_ERR_SYSTEM);
    assert_text(names[0]);
    assert_null(worker);
    crew_destroy(&c);
}

static void without_words_jobs_are_host_functions(void **state) {
    (void)state;
    for (int lacks = 0; lacks < 2; lacks++) {
        crew c = crew_create_idle();
        work of = {7, NULL}, behind = {8, NULL};
        fcdp_worker *worker = NULL;
        fcdp_worker_job job = {0};
        told.n = 0;
        if (lacks)
            c.w.drv->api.cuStreamWaitValue32_v2 = NULL;
        else
            c.w.drv->api.cuStreamWriteValue32_v2 = NULL;
        assert_ok(fcdp__worker_create(c.w.drv, names[0], &worker));
        assert_no_thread();
        assert_int_equal(n_registrations(), 0);
        unsigned long before = simgpu_calls("cuStreamWaitValue32");
        assert_ok(fcdp__worker_launch(worker, c.streams[0], work_do, &of, &job));
        assert_null(job.worker);
        assert_ok(fcdp__driver_host_function(c.w.drv, c.streams[0], work_do, &behind));
        assert_goes_on(&c, 0);
        assert_int_equal(simgpu_calls("cuStreamWaitValue32"), before);
        assert_told(2, (int[]){7, 8});
        fcdp__worker_job_end(&job);
        assert_int_equal(simgpu_fail_nth("cuLaunchHostFunc", 1, CUDA_UNKNOWN), 0);
        assert_int_equal(fcdp__worker_launch(worker, c.streams[0], work_do, &of, &job), FCDP_ERR_DRIVER);
        fcdp__worker_job_end(&job);
        fcdp__worker_destroy(worker);
        crew_destroy(&c);
    }
}

/* ---- modelled time ---- */

static void stamp(void *data) {
    **(uint64_t **)data = simgpu_ready_ns();
}

static void launch_stamped(fcdp_stream stream, uint64_t *ready_ns_out) {
    assert_int_equal(simgpu_launch(stream, &(struct simgpu_kernel){.duration_ns = 1,
                                                                   .body = stamp,
                                                                   .data = &ready_ns_out,
                                                                   .data_bytes = sizeof ready_ns_out}),
                     0);
}

static void a_job_takes_its_core_s_time(void **state) {
    (void)state;
    crew c = crew_create();
    int64_t core_ns = 2000000;
    uint64_t ready_ns[2];
    fcdp_worker_job job = {0};
    simgpu_set_core(20);
    launch_stamped(c.streams[0], &ready_ns[0]);
    assert_ok(fcdp__worker_launch(c.workers[0], c.streams[0], compute, &core_ns, &job));
    launch_stamped(c.streams[0], &ready_ns[1]);
    assert_goes_on(&c, 0);
    fcdp__worker_job_end(&job);
    assert_true(ready_ns[1] - ready_ns[0] >= 20 * (uint64_t)core_ns);
    crew_destroy(&c);
}

/* ---- at random ---- */

enum { MOST_JOBS = 24, N_STEPS = 80 };

typedef struct random_job {
    fcdp_worker_job job;
    struct random_job *before; /* launched on the same worker before */
    int spins;
    atomic_bool has_come;        /* the stream, to it */
    atomic_bool ending, ended;   /* fcdp__worker_job_end was called, has returned */
    atomic_bool in_it, was_done; /* the function runs, has run */
    atomic_int *n_wrong;
} random_job;

static void random_come(void *context) {
    atomic_store(&((random_job *)context)->has_come, true);
}

static bool is_over(random_job *of) {
    return atomic_load(&of->was_done) || atomic_load(&of->ending);
}

static void random_do(void *context) {
    random_job *of = context;
    bool wrong = !atomic_load(&of->has_come) || atomic_load(&of->ended) || atomic_load(&of->was_done);
    for (random_job *before = of->before; before; before = before->before) wrong |= !is_over(before);
    atomic_store(&of->in_it, true);
    for (int i = 0; i < of->spins; i++) sched_yield();
    wrong |= atomic_load(&of->ended);
    atomic_store(&of->in_it, false);
    atomic_store(&of->was_done, true);
    if (wrong) atomic_fetch_add(of->n_wrong, 1);
}

/* On the stream behind the job: it is over, and so are all before. */
static void random_behind(void *context) {
    bool wrong = false;
    for (random_job *of = context; of; of = of->before) wrong |= !is_over(of);
    if (wrong) atomic_fetch_add(((random_job *)context)->n_wrong, 1);
}

static void random_end(random_job *of) {
    if (atomic_load(&of->ended)) return;
    atomic_store(&of->ending, true);
    fcdp__worker_job_end(&of->job);
    if (atomic_load(&of->in_it)) atomic_fetch_add(of->n_wrong, 1);
    atomic_store(&of->ended, true);
}

typedef struct schedule {
    uint64_t random;
    random_job *jobs[MOST_JOBS], *last[N_WORKERS];
    gate gates[N_STEPS], *held[N_STREAMS]; /* held: the gate on it that was not opened */
    size_t n_jobs, n_gates;
    atomic_int n_wrong;
} schedule;

static void random_launch(crew *c, schedule *s, fcdp_stream stream, size_t worker) {
    if (s->n_jobs == MOST_JOBS) return;
    random_job *of = calloc(1, sizeof *of);
    assert_non_null(of);
    of->before = s->last[worker];
    of->spins = (int)random_below(&s->random, 4);
    of->n_wrong = &s->n_wrong;
    s->jobs[s->n_jobs++] = s->last[worker] = of;
    assert_ok(fcdp__driver_host_function(c->w.drv, stream, random_come, of));
    assert_ok(fcdp__worker_launch(c->workers[worker], stream, random_do, of, &of->job));
    assert_ok(fcdp__driver_host_function(c->w.drv, stream, random_behind, of));
}

static void random_open(schedule *s, size_t stream) {
    if (s->held[stream]) sem_post(&s->held[stream]->opened);
    s->held[stream] = NULL;
}

static void random_hold(crew *c, schedule *s, size_t stream) {
    random_open(s, stream);
    gate_init(s->held[stream] = &s->gates[s->n_gates++]);
    assert_ok(fcdp__driver_host_function(c->w.drv, c->streams[stream], gate_pass, s->held[stream]));
}

/* What is enqueued waits only for gates and for what was enqueued before it. */
static void random_step(crew *c, schedule *s) {
    size_t stream = random_below(&s->random, N_STREAMS);
    switch (random_below(&s->random, 6)) {
    case 0:
    case 1: random_launch(c, s, c->streams[stream], random_below(&s->random, N_WORKERS)); break;
    case 2:
        if (s->n_jobs) random_end(s->jobs[random_below(&s->random, s->n_jobs)]);
        break;
    case 3: random_hold(c, s, stream); break;
    case 4: random_open(s, stream); break;
    case 5:
        assert_ok(
            fcdp__driver_event_record(c->w.drv, c->w.event, c->streams[random_below(&s->random, N_STREAMS)]));
        assert_ok(fcdp__driver_stream_wait(c->w.drv, c->streams[stream], c->w.event));
        break;
    }
}

static void random_schedules(void **state) {
    (void)state;
    uint64_t random = seed_choose("random_schedules");
    int n_rounds = getenv("TEST_COARSER") ? 15 : 150;
    size_t n_ran = 0, n_never = 0;
    crew c = crew_create();
    for (int round = 0; round < n_rounds; round++) {
        schedule s = {.random = random_next(&random)};
        for (int step = 0; step < N_STEPS; step++) random_step(&c, &s);
        for (size_t i = 0; i < N_STREAMS; i++) random_open(&s, i);
        for (int i = 0; i < N_STREAMS; i++) assert_goes_on(&c, i);
        for (size_t i = 0; i < s.n_jobs; i++) {
            bool ran = atomic_load(&s.jobs[i]->was_done);
            if (!ran && !atomic_load(&s.jobs[i]->ended)) fail_msg("round %d: job %zu did not run", round, i);
            *(ran ? &n_ran : &n_never) += 1;
            random_end(s.jobs[i]);
        }
        if (atomic_load(&s.n_wrong))
            fail_msg("round %d: %d are out of order", round, atomic_load(&s.n_wrong));
        for (size_t i = 0; i < s.n_jobs; i++) free(s.jobs[i]);
    }
    assert_true(n_ran > 0 && n_never > 0);
    crew_destroy(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(jobs_run_in_the_order_of_launches),
        cmocka_unit_test(a_stream_goes_on_behind_its_job),
        cmocka_unit_test(a_job_that_ends_before_its_turn_never_runs),
        cmocka_unit_test(a_job_that_is_not_the_next_ends_while_its_stream_waits),
        cmocka_unit_test(a_job_ends_while_the_worker_stores_the_word),
        cmocka_unit_test(the_end_of_a_running_job_is_waited_for),
        cmocka_unit_test(a_job_whose_turn_has_not_come_is_not_drained),
        cmocka_unit_test(jobs_that_were_not_launched_end),
        cmocka_unit_test(jobs_hold_no_host_function_up),
        cmocka_unit_test(every_failure_leaves_nothing),
        cmocka_unit_test(a_thread_that_cannot_start_leaves_nothing),
        cmocka_unit_test(without_words_jobs_are_host_functions),
        cmocka_unit_test(a_job_takes_its_core_s_time),
        cmocka_unit_test(random_schedules),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
