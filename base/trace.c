/* trace.c - the only file that writes the segment's ring.
 *
 * A writer claims a number with one atomic add; the number's last bits are its slot. The slot's stamp is odd
 * while the event is written. So writers never wait: an event that finds its slot still being written, a
 * whole ring later, is dropped and counted.
 *
 * An event's cost is mostly its clock, so the file has a faster one of its own. It knows no kind of event and
 * reads no ring: kinds are the layers', and tools/memtrace reads.
 */
#include "base/trace.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/size.h"
#include "base/trace_probe.h"

enum { N_WORDS = FCDP_TRACE_EVENT_BYTES / sizeof(uint64_t), MIN_EVENTS = 1 << 10 };
typedef _Atomic uint64_t ring_slot[N_WORDS];

/* All but `header` is written before it (release), and read after it (acquire). */
static struct {
    _Atomic(fcdp_trace_header *) header; /* NULL: nothing is written */
    _Atomic uint64_t *counters;
    fcdp_trace_object *objects;
    ring_slot *ring;
    uint64_t mask; /* of an event's number, for its slot */
    int descriptor;
    atomic_flag opening;          /* by one thread */
    _Atomic uint32_t next_object; /* where a search for a free one begins */
} trace = {.descriptor = -1, .opening = ATOMIC_FLAG_INIT};

/* ---- the clock ---- */

/* CLOCK_MONOTONIC, read in a third of its time. Where the kernel's own clock is the processor's counter
 * (x86-64, clocksource tsc), so is this one: each thread that writes events reads CLOCK_MONOTONIC once in 10
 * ms, and goes on from there by the counter and its rate:
 *
 *     time = base_ns + (counter - base_counter) * rate / 2^32      while counter - base_counter < 10 ms
 *
 * The difference stays below a microsecond. Elsewhere, and in the first milliseconds, CLOCK_MONOTONIC is read
 * each time. */
enum { RATE_SHIFT = 32, MAX_TRIES = 8, MOST_BETWEEN = 2000 /* counts, for one reading of the clock */ };
static const uint64_t SPAN_NS = 10 * 1000 * 1000;

typedef struct thread_clock {
    uint64_t base_ns, base_counter; /* of one moment; 0: none yet */
    uint64_t most;                  /* the counter may be so much further */
    uint64_t rate;
    uint32_t thread; /* 0: not asked yet */
} thread_clock;

typedef struct moment {
    uint64_t time_ns;
    uint32_t thread; /* gettid() */
} moment;

static _Thread_local thread_clock own;
static uint64_t open_ns, open_counter; /* of one moment, the first */
static bool is_counted;

#if defined(__x86_64__)
static uint64_t counter_read(void) {
    return __builtin_ia32_rdtsc();
}
#else
static uint64_t counter_read(void) {
    return 0;
}
#endif

/* The kernel has looked whether the processors' counters agree, and goes on looking. */
static bool counter_is_the_kernels(void) {
#if defined(__x86_64__)
    char text[16] = "";
    int file = open("/sys/devices/system/clocksource/clocksource0/current_clocksource", O_RDONLY | O_CLOEXEC);
    ssize_t n = file >= 0 ? read(file, text, sizeof text - 1) : 0;
    if (file >= 0) (void)close(file);
    return n == 4 && !memcmp(text, "tsc\n", 4);
#else
    return false;
#endif
}

/* One moment by both clocks. False: each time the thread lost its core between the two. No rate may rest on
 * that: a millisecond there would be one in each ten afterwards. */
static bool both_read(uint64_t *counter_out, uint64_t *now_ns_out) {
    for (int tries = 0; tries < MAX_TRIES; tries++) {
        *counter_out = counter_read();
        *now_ns_out = fcdp__now_ns();
        if (counter_read() - *counter_out < MOST_BETWEEN) return true;
    }
    return false;
}

/* Once, before the others, and again in a forked child. */
static void clock_open(void) {
    own = (thread_clock){0}; /* a forked child's thread has another number */
    is_counted = counter_is_the_kernels() && both_read(&open_counter, &open_ns);
}

/* A new base, and the rate since the beginning: the longer that is, the better it is known. */
static uint64_t base_renew(void) {
    uint64_t counter, now_ns;
    bool together = both_read(&counter, &now_ns);
    if (!own.thread) own.thread = (uint32_t)syscall(SYS_gettid);
    if (!is_counted || !together || now_ns - open_ns < SPAN_NS || counter <= open_counter) return now_ns;
    double rate = (double)(now_ns - open_ns) / (double)(counter - open_counter);
    own.rate = (uint64_t)(rate * (double)(1ull << RATE_SHIFT));
    own.most = (uint64_t)((double)SPAN_NS / rate);
    own.base_ns = now_ns;
    own.base_counter = counter;
    return now_ns;
}

static moment moment_now(void) {
    uint64_t counter = counter_read() - own.base_counter;
    uint64_t now_ns = counter < own.most ? own.base_ns + (counter * own.rate >> RATE_SHIFT) : base_renew();
    return (moment){now_ns, own.thread};
}

/* ---- opening ---- */

fcdp_trace_header *fcdp__trace_header(void) {
    return atomic_load_explicit(&trace.header, memory_order_acquire);
}

bool fcdp__trace_is_on(uint32_t level) {
    const fcdp_trace_header *header = fcdp__trace_header();
    return header && header->level >= level;
}

/* A forked child has the parent's pages: what it wrote there would be the parent's. */
static void child_forget(void) {
    fcdp_trace_header *header = fcdp__trace_header();
    atomic_flag_clear(&trace.opening); /* the thread that was at it is not here */
    if (!header) return;
    atomic_store_explicit(&trace.header, NULL, memory_order_relaxed);
    (void)munmap(header, header->segment_bytes);
    (void)close(trace.descriptor);
    trace.descriptor = -1;
}

/* Readers tell a process that has ended from one that was killed. */
__attribute__((destructor)) static void process_ends(void) {
    fcdp_trace_header *header = fcdp__trace_header();
    if (header && header->pid == getpid()) atomic_store_explicit(&header->ended, 1, memory_order_release);
}

static void command_read(char text[FCDP_TRACE_LABEL_BYTES]) {
    int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t n = file >= 0 ? read(file, text, FCDP_TRACE_LABEL_BYTES - 1) : 0;
    if (file >= 0) (void)close(file);
    text[n > 0 ? n : 0] = '\0';
    for (ssize_t i = 0; i + 1 < n; i++)
        if (!text[i]) text[i] = ' ';
}

/* A power of two, since an event's place is its number's last bits. */
static uint64_t ring_events(size_t bytes) {
    uint64_t n = MIN_EVENTS;
    while (n <= bytes / FCDP_TRACE_EVENT_BYTES / 2) n *= 2;
    return n;
}

/* Where everything lies: one list, which readers follow by the header's numbers. */
static fcdp_trace_header header_make(uint32_t level, size_t ring_bytes) {
    struct timespec real;
    fcdp_trace_header header = {.version = FCDP_TRACE_VERSION,
                                .header_bytes = sizeof header,
                                .n_counters = FCDP_TRACE_N_COUNTERS,
                                .n_objects = FCDP_TRACE_N_OBJECTS,
                                .ring_events = ring_events(ring_bytes),
                                .pid = getpid(),
                                .level = level,
                                .start_monotonic_ns = fcdp__now_ns(),
                                .rank = -1,
                                .node = -1,
                                .local_rank = -1};
    clock_gettime(CLOCK_REALTIME, &real);
    header.start_real_ns = (uint64_t)real.tv_sec * 1000000000u + (uint64_t)real.tv_nsec;
    header.counters_at = 4096;
    header.objects_at = header.counters_at + 4096;
    header.ring_at = header.objects_at + FCDP_TRACE_N_OBJECTS * sizeof(fcdp_trace_object);
    header.segment_bytes = header.ring_at + header.ring_events * FCDP_TRACE_EVENT_BYTES;
    memcpy(header.magic, FCDP_TRACE_MAGIC, sizeof header.magic);
    (void)gethostname(header.host, sizeof header.host - 1);
    command_read(header.command);
    return header;
}

/* Its size is sealed: a reader of a segment that shrank would die of it. Pages come as they are written
 * to. */
static void *segment_map(size_t bytes, int *descriptor_out) {
    int descriptor = memfd_create(FCDP_TRACE_MEMFD, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    void *at = MAP_FAILED;
    if (descriptor >= 0 && !fchmod(descriptor, 0600) && !ftruncate(descriptor, (off_t)bytes) &&
        !fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (at == MAP_FAILED) {
        fcdp__log(FCDP_LOG_WARN,
                  "no trace is written: a shared segment of %s cannot be had (%s); make FCDP_TRACE_BUFFER "
                  "smaller, or "
                  "set FCDP_TRACE=0",
                  fcdp__size_text(bytes).s, strerror(errno));
        if (descriptor >= 0) (void)close(descriptor);
        return NULL;
    }
    *descriptor_out = descriptor;
    return at;
}

static void at_fork_register(void) {
    (void)pthread_atfork(NULL, NULL, child_forget);
}

/* `opening` stays set: a process that could not have a segment is told once, and one that has it keeps it. */
void fcdp_trace_open(uint32_t level, size_t ring_bytes) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (!level || fcdp__trace_header() || atomic_flag_test_and_set(&trace.opening)) return;
    (void)pthread_once(&once, at_fork_register);
    clock_open();
    fcdp_trace_header made = header_make(level, ring_bytes);
    char *at = segment_map(made.segment_bytes, &trace.descriptor);
    if (!at) return;
    memcpy(at, &made, sizeof made);
    trace.counters = (_Atomic uint64_t *)(void *)(at + made.counters_at);
    trace.objects = (fcdp_trace_object *)(void *)(at + made.objects_at);
    trace.ring = (ring_slot *)(void *)(at + made.ring_at);
    trace.mask = made.ring_events - 1;
    atomic_store_explicit(&trace.next_object, 0, memory_order_relaxed);
    atomic_store_explicit(&trace.header, (fcdp_trace_header *)(void *)at, memory_order_release);
}

/* ---- events ---- */

/* A slot's words are stored with release and read with acquire: a reader that has read a word of event n then
 * sees the stamp 2 n + 1, or a later one, and knows that the words mix two events. A fence would do as well,
 * but TSan does not support fences. */
static void slot_write(ring_slot *slot, uint64_t n, const fcdp_trace_event *event) {
    uint64_t words[N_WORDS];
    memcpy(words, event, sizeof words);
    for (size_t i = 1; i < N_WORDS; i++) atomic_store_explicit(&(*slot)[i], words[i], memory_order_release);
    atomic_store_explicit(&(*slot)[0], 2 * n + 2, memory_order_release);
}

/* The slot belongs to this thread once the stamp is odd. If another writer has it, from a lap before or
 * after, this thread does not wait. */
void fcdp__trace_as_is(const fcdp_trace_event *event) {
    fcdp_trace_header *header = fcdp__trace_header();
    if (!header) return;
    uint64_t n = atomic_fetch_add_explicit(&header->head, 1, memory_order_relaxed);
    ring_slot *slot = &trace.ring[n & trace.mask];
    uint64_t stamp = atomic_load_explicit(&(*slot)[0], memory_order_relaxed);
    bool is_free = !(stamp & 1) && stamp <= 2 * n;
    if (!is_free || !atomic_compare_exchange_strong_explicit(&(*slot)[0], &stamp, 2 * n + 1,
                                                             memory_order_acq_rel, memory_order_relaxed)) {
        atomic_fetch_add_explicit(&header->n_dropped, 1, memory_order_relaxed);
        return;
    }
    slot_write(slot, n, event);
    FCDP_PROBE4(event, event->kind, event->object, event->bytes, event->duration_ns);
}

uint32_t fcdp__trace_step(void) {
    const fcdp_trace_header *header = fcdp__trace_header();
    return header ? atomic_load_explicit(&header->step, memory_order_relaxed) : 0;
}

void fcdp__trace(const fcdp_trace_event *event) {
    if (!fcdp__trace_header()) return;
    fcdp_trace_event whole = *event;
    moment now = moment_now();
    whole.step = fcdp__trace_step();
    whole.thread = now.thread;
    if (!whole.time_ns) whole.time_ns = now.time_ns;
    fcdp__trace_as_is(&whole);
}

void fcdp__trace_now(uint16_t kind, uint32_t object, uint64_t bytes, uint64_t a, uint64_t b) {
    fcdp__trace(&(fcdp_trace_event){.kind = kind, .object = object, .bytes = bytes, .a = a, .b = b});
}

uint64_t fcdp__trace_start(void) {
    return fcdp__trace_header() ? moment_now().time_ns : 0;
}

void fcdp__trace_since(uint64_t start_ns, fcdp_trace_event event) {
    if (!start_ns) return;
    uint64_t now_ns = moment_now().time_ns;
    event.time_ns = start_ns;
    event.duration_ns = now_ns > start_ns ? now_ns - start_ns : 1;
    fcdp__trace(&event);
}

/* ---- counters ---- */

void fcdp__trace_count(unsigned counter, uint64_t n) {
    if (n && fcdp__trace_header())
        atomic_fetch_add_explicit(&trace.counters[counter], n, memory_order_relaxed);
}

void fcdp__trace_set(unsigned counter, uint64_t value) {
    if (fcdp__trace_header()) atomic_store_explicit(&trace.counters[counter], value, memory_order_relaxed);
}

void fcdp__count(fcdp_counts *counts, unsigned counter, uint64_t n) {
    for (; counts; counts = counts->whole)
        atomic_fetch_add_explicit(&counts->n[counter], n, memory_order_relaxed);
    fcdp__trace_count(counter, n);
}

/* ---- objects ---- */

/* Stored with release, the name's words too, as those of an event: memtrace_read_any_object (attach.c of
 * tools/memtrace) loads them with acquire, and after one of these words sees the odd generation, or a later
 * one. */
static void object_write(fcdp_trace_object *object, const fcdp_trace_new *what) {
    uint64_t words[FCDP_TRACE_NAME_BYTES / sizeof(uint64_t)] = {0};
    _Atomic uint64_t *name = (_Atomic uint64_t *)(void *)object->name;
    strncpy((char *)words, what->name, sizeof words - 1);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        atomic_store_explicit(&name[i], words[i], memory_order_release);
    atomic_store_explicit(&object->bytes, what->bytes, memory_order_release);
    atomic_store_explicit(&object->why, what->why, memory_order_release);
    atomic_store_explicit(&object->shard_group, 0, memory_order_release);
    atomic_store_explicit(&object->trainable_bytes, what->trainable_bytes, memory_order_release);
    atomic_store_explicit(&object->n_uses, 0, memory_order_release);
    atomic_store_explicit(&object->plain_bytes, 0, memory_order_release);
    atomic_store_explicit(&object->gather_bytes, 0, memory_order_release);
    atomic_store_explicit(&object->state, what->state, memory_order_release);
}

/* Free ones are taken in turn, so that what is still said of one that is gone rarely falls to another. */
uint32_t fcdp__trace_object_add(const fcdp_trace_new *what) {
    if (!fcdp__trace_header()) return 0;
    for (uint32_t tries = 1; tries < FCDP_TRACE_N_OBJECTS; tries++) {
        uint32_t turn = atomic_fetch_add_explicit(&trace.next_object, 1, memory_order_relaxed);
        uint32_t number = 1 + turn % (FCDP_TRACE_N_OBJECTS - 1);
        fcdp_trace_object *object = &trace.objects[number];
        uint32_t generation = atomic_load_explicit(&object->generation, memory_order_acquire);
        if (generation & 1 || atomic_load_explicit(&object->state, memory_order_acquire)) continue;
        if (!atomic_compare_exchange_strong(&object->generation, &generation, generation + 1)) continue;
        object_write(object, what);
        atomic_store_explicit(&object->generation, generation + 2, memory_order_release);
        return number;
    }
    return 0;
}

uint32_t fcdp__trace_object_create(const char *name, uint64_t bytes) {
    return fcdp__trace_object_add(&(fcdp_trace_new){.name = name, .state = FCDP_OBJECT_LIVE, .bytes = bytes});
}

void fcdp__trace_object_destroy(uint32_t object) {
    fcdp_trace_object *at = fcdp__trace_object(object);
    if (!at) return;
    atomic_store_explicit(&at->device_bytes, 0, memory_order_relaxed);
    atomic_store_explicit(&at->host_bytes, 0, memory_order_relaxed);
    atomic_store_explicit(&at->file_bytes, 0, memory_order_relaxed);
    atomic_store_explicit(&at->mapped_bytes, 0, memory_order_relaxed);
    atomic_store_explicit(&at->lives, 0, memory_order_relaxed);
    atomic_store_explicit(&at->state, 0, memory_order_release);
}

fcdp_trace_object *fcdp__trace_object(uint32_t object) {
    return object && object < FCDP_TRACE_N_OBJECTS && fcdp__trace_header() ? &trace.objects[object] : NULL;
}
