/* tensors.c - the functions that PyTorch's pluggable allocator calls. Compiled with -fexceptions, see cxx.h:
 * nothing is held where one is thrown. */
#include "torch_plugin/tensors.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/size.h"
#include "comm/fingerprint.h"
#include "tiering/region.h"
#include "torch_plugin/allocator_calls.h"
#include "torch_plugin/cxx.h"
#include "torch_plugin/history.h"
#include "torch_plugin/methods.h"
#include "torch_plugin/transport.h"

/* Of addresses, which cost nothing but a list of them. */
static const size_t QUARANTINE_BYTES = (size_t)64 << 30;

static struct {
    fcdp_driver_kind driver;
    char *sim_library;
    size_t budget_bytes, headroom_bytes;
    _Atomic bool enabled; /* the others are set before, and not again */
    fcdp_lock lock;       /* opening, engine */
    _Atomic(fcdp_device *) devices[TENSORS_MAX_DEVICES];
    fcdp_engine *engine; /* under the lock; NULL: none */
} tensors;

/* ---- devices ---- */

static inline fcdp_device *device_of(int ordinal) {
    if (ordinal < 0 || ordinal >= TENSORS_MAX_DEVICES) return NULL;
    return atomic_load_explicit(&tensors.devices[ordinal], memory_order_acquire);
}

/* A device is opened at its first tensor, by one thread; the others find it without the lock. */
static fcdp_status device_need(int ordinal, fcdp_device **device_out) {
    *device_out = device_of(ordinal);
    if (*device_out) return FCDP_OK;
    if (ordinal < 0 || ordinal >= TENSORS_MAX_DEVICES ||
        !atomic_load_explicit(&tensors.enabled, memory_order_acquire))
        return fcdp__fail(FCDP_ERR_INVALID, "tensors on device %d are not fcdp_alloc's", ordinal);
    fcdp_status status = FCDP_OK;
    fcdp__lock_acquire(&tensors.lock);
    fcdp_device *device = device_of(ordinal);
    if (!device) {
        binding_trace_open();
        device = malloc(sizeof *device);
        status = device ? fcdp_device_open(tensors.driver, ordinal, tensors.sim_library, tensors.budget_bytes,
                                           tensors.headroom_bytes, true, device)
                        : fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for a device");
        if (!status && fcdp__check_level >= 2) fcdp_heap_set_quarantine(device->heap, QUARANTINE_BYTES);
        if (!status) /* partner: device_of */
            atomic_store_explicit(&tensors.devices[ordinal], device, memory_order_release);
    }
    fcdp__lock_release(&tensors.lock);
    *device_out = status ? NULL : device;
    if (!status) return FCDP_OK;
    free(device);
    return fcdp__fail(status, "%s; FCDP_ALLOC=native keeps PyTorch's own allocator", fcdp_error_text());
}

fcdp_status binding_tensors_device(int ordinal, const fcdp_device **device_out) {
    fcdp_device *device;
    fcdp_status status = device_need(ordinal, &device);
    if (!status) *device_out = device;
    return status;
}

/* ---- what PyTorch calls ---- */

static void raise_status(fcdp_status status, size_t bytes) __attribute__((noreturn));
static void raise_status(fcdp_status status, size_t bytes) {
    char text[2048];
    if (status != FCDP_ERR_NO_DEVICE_MEM) binding_cxx_throw(CXX_ERROR, fcdp_error_text());
    /* The words that scripts look for when they try a smaller batch. */
    snprintf(text, sizeof text, "CUDA out of memory. Tried to allocate %s. fcdp_alloc: %s",
             fcdp__size_text(bytes).s, fcdp_error_text());
    binding_cxx_throw(CXX_OUT_OF_MEMORY, text);
}

/* PyGILState_Check, which is not of the limited API. */
static bool gil_is_held(void) {
    static int (*_Atomic check)(void);
    int (*known)(void) = atomic_load_explicit(&check, memory_order_relaxed);
    if (!known) {
        *(void **)(void *)&known = dlsym(RTLD_DEFAULT, "PyGILState_Check");
        atomic_store_explicit(&check, known, memory_order_relaxed);
    }
    return known && known();
}

/* Before a wait for the device, whose host functions may want the GIL for a collective. PyTorch keeps it in
 * some of its calls, such as a storage's resize. NULL: there is none to give, or none that wants it. */
static PyThreadState *gil_give(void) {
    return binding_transport_uses_python() && gil_is_held() ? PyEval_SaveThread() : NULL;
}

/* Where memory is short, this waits for the device. */
static fcdp_status heap_malloc(fcdp_heap *heap, size_t bytes, void *stream, fcdp_dptr *at_out) {
    PyThreadState *python = gil_give();
    fcdp_status status = fcdp_heap_malloc(heap, bytes, stream, at_out);
    if (python) PyEval_RestoreThread(python);
    return status;
}

/* A failure is recorded before it is thrown, with what the device had free. */
static void *hook_malloc(size_t bytes, int ordinal, void *stream) {
    fcdp_device *device;
    fcdp_dptr at;
    fcdp_status status = device_need(ordinal, &device);
    if (!status) status = heap_malloc(device->heap, bytes, stream, &at);
    if (status) {
        size_t free_bytes = 0, total_bytes;
        device = device_of(ordinal);
        if (status == FCDP_ERR_NO_DEVICE_MEM && device && binding_history_records()) {
            fcdp_failure error = fcdp__failure_keep(status);
            if (fcdp__driver_mem_info(device->drv, &free_bytes, &total_bytes)) free_bytes = 0;
            binding_history_add(HISTORY_OOM, ordinal, free_bytes, bytes, stream);
            status = fcdp__failure_restore(&error);
        }
        raise_status(status, bytes);
    }
    if (at.addr) binding_history_add(HISTORY_ALLOC, ordinal, at.addr, bytes, stream);
    return (void *)(uintptr_t)at.addr;
}

/* Called by destructors, which must not throw. */
static void hook_free(void *at, size_t bytes, int ordinal, void *stream) {
    fcdp_device *device = device_of(ordinal);
    if (!at || !device) return;
    /* before somebody else can have it */
    binding_history_add(HISTORY_FREE, ordinal, (uintptr_t)at, bytes, stream);
    if (fcdp_heap_free(device->heap, (fcdp_dptr){(uintptr_t)at}))
        fcdp__log(FCDP_LOG_WARN, "%s", fcdp_error_text());
}

/* PyTorch asks for any tensor. What is not ours (a gathered parameter, another library's
 * memory) has another owner, who waits. */
void binding_tensors_set_engine(fcdp_engine *engine) {
    if (!atomic_load_explicit(&tensors.enabled, memory_order_acquire)) return;
    fcdp__lock_acquire(&tensors.lock);
    tensors.engine = engine;
    fcdp__lock_release(&tensors.lock);
}

/* A gathered parameter is no tensor of a heap's. */
static fcdp_status record_gathered(fcdp_dptr at, fcdp_stream stream) {
    fcdp_status status = FCDP_ERR_INVALID;
    fcdp__lock_acquire(&tensors.lock);
    if (tensors.engine) status = fcdp_engine_record_stream(tensors.engine, at, stream);
    fcdp__lock_release(&tensors.lock);
    return status;
}

static void hook_record_stream(void *at, void *stream) {
    for (int ordinal = 0; ordinal < TENSORS_MAX_DEVICES; ordinal++) {
        fcdp_device *device = device_of(ordinal);
        fcdp_status status = device
                                 ? fcdp_heap_record_stream(device->heap, (fcdp_dptr){(uintptr_t)at}, stream)
                                 : FCDP_ERR_INVALID;
        if (status == FCDP_OK) return;
        /* unrecorded, the block could be used again too early */
        if (status != FCDP_ERR_INVALID) raise_status(status, 0);
    }
    fcdp_status status = record_gathered((fcdp_dptr){(uintptr_t)at}, stream);
    if (status && status != FCDP_ERR_INVALID) raise_status(status, 0);
}

/* CUDA's, by PyTorch. */
static void hook_init(int n_devices) {
    (void)n_devices;
    binding_allocator_calls_pass_on();
}

/* torch.cuda.empty_cache(), which keeps the GIL in some torches; it waits for the device, as above. */
static void hook_reset(void) {
    PyThreadState *python = gil_give();
    for (int ordinal = 0; ordinal < TENSORS_MAX_DEVICES; ordinal++) {
        fcdp_device *device = device_of(ordinal);
        if (device && fcdp_heap_trim(device->heap)) fcdp__log(FCDP_LOG_WARN, "%s", fcdp_error_text());
    }
    if (python) PyEval_RestoreThread(python);
}

/* torch.cuda.set_per_process_memory_fraction(): of the whole device, for tensors and gathered parameters
 * together. FCDP_DEVICE_BUDGET stays an upper bound. */
static void hook_memory_fraction(double fraction, int ordinal) {
    fcdp_device *device;
    size_t free_bytes, total_bytes;
    fcdp_status status = device_need(ordinal, &device);
    if (!status) status = fcdp__driver_mem_info(device->drv, &free_bytes, &total_bytes);
    size_t bytes = status ? 0 : (size_t)(fraction * (double)total_bytes);
    if (tensors.budget_bytes && bytes > tensors.budget_bytes) bytes = tensors.budget_bytes;
    if (!status) status = fcdp__pool_set_budget(device->pool, bytes);
    if (status) raise_status(status, 0);
}

/* What a pool's `covers` calls: the pool's ctx from begin to end. */
static bool pool_covers(void *ctx, fcdp_stream stream) {
    return binding_cxx_function_call(ctx, stream);
}

static void covers_free(cxx_function *covers) {
    binding_cxx_function_end(covers);
    free(covers);
}

/* c10::MempoolId_t is a pair of 64 bit integers, passed as a struct of them; a
 * std::function is passed by its address. */
static void hook_begin_pool(int ordinal, fcdp_private_id id, const cxx_function *covers) {
    fcdp_device *device;
    cxx_function *copy = malloc(sizeof *copy);
    fcdp_status status = copy ? device_need(ordinal, &device)
                              : fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for a private pool");
    if (status) {
        free(copy);
        raise_status(status, 0);
    }
    binding_cxx_function_copy(covers, copy);
    void *previous = NULL;
    status = fcdp_heap_private_begin(device->heap, id, pool_covers, copy, &previous);
    if (previous) covers_free(previous);
    if (status) {
        covers_free(copy);
        raise_status(status, 0);
    }
}

static void hook_end_pool(int ordinal, fcdp_private_id id) {
    fcdp_device *device = device_of(ordinal);
    void *covers;
    if (!device) return;
    if (fcdp_heap_private_end(device->heap, id, &covers))
        fcdp__log(FCDP_LOG_WARN, "%s", fcdp_error_text());
    else
        covers_free(covers);
}

/* Also from a graph's destructor, which must not throw. */
static void hook_release_pool(int ordinal, fcdp_private_id id) {
    fcdp_device *device = device_of(ordinal);
    if (device && fcdp_heap_private_release(device->heap, id))
        fcdp__log(FCDP_LOG_WARN, "%s", fcdp_error_text());
}

/* ---- methods ---- */

/* A child forked off a process that uses a device has none: the parent's tensors are not its own to free. One
 * that was forked before that may open one. */
static void child_reset(void) {
    bool used = false;
    for (int ordinal = 0; ordinal < TENSORS_MAX_DEVICES; ordinal++)
        used = atomic_exchange_explicit(&tensors.devices[ordinal], NULL, memory_order_relaxed) || used;
    if (used) atomic_store_explicit(&tensors.enabled, false, memory_order_relaxed);
    fcdp__lock_init(&tensors.lock, FCDP_RANK_ENGINE); /* another thread of the parent may have had it */
}

/* (driver, sim_library) -> {hook: address}; raises Error where this torch cannot be
 * served. The options have been loaded. */
PyObject *binding_tensors_enable(PyObject *self, PyObject *args) {
    (void)self;
    int driver;
    const char *sim_library;
    if (!PyArg_ParseTuple(args, "iz:tensors_enable", &driver, &sim_library)) return NULL;
    const char *why_not = binding_cxx_open();
    if (why_not) return binding_raise(fcdp__fail(FCDP_ERR_UNSUPPORTED, "fcdp_alloc: %s", why_not));
    if (!atomic_load_explicit(&tensors.enabled, memory_order_relaxed)) {
        tensors.sim_library = sim_library ? strdup(sim_library) : NULL;
        if (sim_library && !tensors.sim_library)
            return binding_raise(fcdp__fail(FCDP_ERR_SYSTEM, "no host memory"));
        tensors.driver = (fcdp_driver_kind)driver;
        tensors.budget_bytes = binding_options()->device_budget_bytes;
        tensors.headroom_bytes = binding_options()->headroom_bytes;
        fcdp__lock_init(&tensors.lock, FCDP_RANK_ENGINE);
        pthread_atfork(NULL, NULL, child_reset);
        atomic_store_explicit(&tensors.enabled, true, memory_order_release); /* partner: device_need */
    } else if ((fcdp_driver_kind)driver != tensors.driver) {
        return binding_raise(fcdp__fail(FCDP_ERR_INVALID, "fcdp_alloc is on another driver already"));
    }
#define HOOK(name) #name, (unsigned long long)(uintptr_t)(void (*)(void))hook_##name
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", HOOK(malloc), HOOK(free), HOOK(init),
                         HOOK(record_stream), HOOK(reset), HOOK(memory_fraction), HOOK(begin_pool),
                         HOOK(end_pool), HOOK(release_pool));
#undef HOOK
}

/* NULL where no tensor has been asked for yet, or with a Python error set. */
static fcdp_device *device_from(PyObject *args, const char *format) {
    int ordinal;
    return PyArg_ParseTuple(args, format, &ordinal) ? device_of(ordinal) : NULL;
}

static PyObject *counts_dict(const fcdp_heap_counts *c) {
    return Py_BuildValue(
        "{s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:K,s:K,s:K,s:K}", "n_live", (Py_ssize_t)c->n_live,
        "allocated_bytes", (Py_ssize_t)c->allocated_bytes, "requested_bytes", (Py_ssize_t)c->requested_bytes,
        "n_free", (Py_ssize_t)c->n_free, "free_bytes", (Py_ssize_t)c->free_bytes, "busy_bytes",
        (Py_ssize_t)c->busy_bytes, "asleep_bytes", (Py_ssize_t)c->asleep_bytes, "peak_n_live",
        (Py_ssize_t)c->peak_n_live, "peak_allocated_bytes", (Py_ssize_t)c->peak_allocated_bytes,
        "peak_requested_bytes", (Py_ssize_t)c->peak_requested_bytes, "peak_reserved_bytes",
        (Py_ssize_t)c->peak_reserved_bytes, "n_mallocs", c->n_mallocs, "n_frees", c->n_frees, "malloc_bytes",
        c->malloc_bytes, "malloc_requested_bytes", c->malloc_requested_bytes);
}

/* (ordinal) -> dict; None: no tensor of that device has been fcdp_alloc's. */
PyObject *binding_tensors_stats(PyObject *self, PyObject *args) {
    (void)self;
    fcdp_device *device = device_from(args, "i:tensors_stats");
    if (!device) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    fcdp_heap_stats s;
    fcdp_pool_stats pool;
    Py_BEGIN_ALLOW_THREADS fcdp_heap_stats_get(device->heap, &s);
    fcdp__pool_stats(device->pool, &pool);
    Py_END_ALLOW_THREADS PyObject *large = counts_dict(&s.large), *small = counts_dict(&s.small);
    if (!large || !small) {
        Py_XDECREF(large);
        Py_XDECREF(small);
        return NULL;
    }
    return Py_BuildValue(
        "{s:N,s:N,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "large_pool", large,
        "small_pool", small, "allocated_bytes", (Py_ssize_t)s.allocated_bytes, "reserved_bytes",
        (Py_ssize_t)s.reserved_bytes, "peak_allocated_bytes", (Py_ssize_t)s.peak_allocated_bytes,
        "peak_reserved_bytes", (Py_ssize_t)s.peak_reserved_bytes, "page_bytes", (Py_ssize_t)pool.page_bytes,
        "budget_bytes", (Py_ssize_t)pool.budget_bytes, "region_bytes",
        (Py_ssize_t)(pool.held_pages[FCDP_HOLDER_GATHERED] * pool.page_bytes), "idle_bytes",
        (Py_ssize_t)(pool.cached_pages * pool.page_bytes), "n_creates", (unsigned long long)pool.n_creates,
        "n_taken", s.n_pages_taken, "n_moved", s.n_pages_moved, "n_hits", s.n_hits, "n_grows", s.n_grows,
        "n_retries", s.n_retries, "n_ooms", s.n_ooms);
}

PyObject *binding_tensors_reset_peaks(PyObject *self, PyObject *args) {
    (void)self;
    fcdp_device *device = device_from(args, "i:tensors_reset_peaks");
    if (!device) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    Py_BEGIN_ALLOW_THREADS fcdp_heap_reset_peaks(device->heap);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

PyObject *binding_tensors_tag(PyObject *self, PyObject *args) {
    (void)self;
    unsigned tag;
    if (!PyArg_ParseTuple(args, "I:tensors_tag", &tag)) return NULL;
    return PyLong_FromUnsignedLong(fcdp_heap_set_tag(tag));
}

/* Whose tensors: a tag, or None for all. */
static bool named(PyObject *tag, fcdp_sleep_of *of) {
    of->all = tag == Py_None;
    of->tag = of->all ? 0 : (uint32_t)PyLong_AsUnsignedLong(tag);
    return !PyErr_Occurred();
}

static void counts_sum(fcdp_sleep_counts *sum, const fcdp_sleep_counts *more) {
    sum->live_bytes += more->live_bytes;
    sum->copied_bytes += more->copied_bytes;
    sum->page_bytes += more->page_bytes;
}

/* Those that this call has put to sleep, as a later device has failed. */
static fcdp_status sleep_undo(const fcdp_sleep_of *of, const bool *slept, fcdp_status status) {
    fcdp_failure failure = fcdp__failure_keep(status);
    fcdp_sleep_counts one;
    for (int i = 0; i < TENSORS_MAX_DEVICES; i++)
        if (slept[i] && fcdp_heap_wake(device_of(i)->heap, of, true, &one))
            fcdp__log(FCDP_LOG_WARN,
                      "sleep failed, and so did waking device %d (%s): free memory and call "
                      "fcdp.wake() again",
                      i, fcdp_error_text());
    return fcdp__failure_restore(&failure);
}

PyObject *binding_tensors_check_capture(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    fcdp_status status = FCDP_OK;
    Py_BEGIN_ALLOW_THREADS for (int i = 0; i < TENSORS_MAX_DEVICES && !status; i++) {
        fcdp_device *device = device_of(i);
        if (device) status = fcdp_heap_check_capture(device->heap);
    }
    Py_END_ALLOW_THREADS return status ? binding_raise(status) : Py_NewRef(Py_None);
}

PyObject *binding_tensors_sleep(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *tag;
    fcdp_sleep_of of;
    if (!PyArg_ParseTuple(args, "O:tensors_sleep", &tag) || !named(tag, &of)) return NULL;
    fcdp_sleep_counts sum = {0}, one;
    bool slept[TENSORS_MAX_DEVICES] = {false};
    fcdp_status status = FCDP_OK;
    Py_BEGIN_ALLOW_THREADS for (int i = 0; i < TENSORS_MAX_DEVICES && !status; i++) {
        fcdp_device *device = device_of(i);
        if (!device) continue;
        status = fcdp_heap_sleep(device->heap, &of, fcdp_fingerprints_of, device->drv, &one);
        slept[i] = !status && one.fell_asleep;
        counts_sum(&sum, &one);
    }
    if (status) status = sleep_undo(&of, slept, status);
    Py_END_ALLOW_THREADS if (status) return binding_raise(status);
    return Py_BuildValue("{s:n,s:n,s:n}", "live_bytes", (Py_ssize_t)sum.live_bytes, "copied_bytes",
                         (Py_ssize_t)sum.copied_bytes, "freed_bytes", (Py_ssize_t)sum.page_bytes);
}

PyObject *binding_tensors_wake(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *tag;
    int keep;
    fcdp_sleep_of of;
    if (!PyArg_ParseTuple(args, "Op:tensors_wake", &tag, &keep) || !named(tag, &of)) return NULL;
    fcdp_sleep_counts sum = {0}, one;
    fcdp_status status = FCDP_OK;
    Py_BEGIN_ALLOW_THREADS for (int i = 0; i < TENSORS_MAX_DEVICES && !status; i++) {
        fcdp_device *device = device_of(i);
        if (!device) continue;
        status = fcdp_heap_wake(device->heap, &of, keep, &one);
        counts_sum(&sum, &one);
    }
    Py_END_ALLOW_THREADS if (status) return binding_raise(status);
    return Py_BuildValue("{s:n,s:n}", "live_bytes", (Py_ssize_t)sum.live_bytes, "copied_bytes",
                         (Py_ssize_t)sum.copied_bytes);
}

typedef struct block_list {
    fcdp_heap_view *blocks;
    size_t n, room;
    bool failed;
} block_list;

/* With an arena's lock: no Python here, a garbage collection may free tensors. */
static void block_add(void *ctx, const fcdp_heap_view *view) {
    block_list *list = ctx;
    if (list->n == list->room) {
        size_t room = list->room ? 2 * list->room : 1024;
        fcdp_heap_view *blocks = realloc(list->blocks, room * sizeof *blocks);
        list->failed = list->failed || !blocks;
        if (!blocks) return;
        list->blocks = blocks;
        list->room = room;
    }
    list->blocks[list->n++] = *view;
}

/* (ordinal) -> [(stream, address, bytes, requested_bytes, state, pool id,
 * small?)], every mapped block; None as above. */
PyObject *binding_tensors_blocks(PyObject *self, PyObject *args) {
    static const char *const state_name[] = {"hole", "free", "free", "live", "held"};
    (void)self;
    fcdp_device *device = device_from(args, "i:tensors_blocks");
    if (!device) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    block_list list = {NULL, 0, 0, false};
    Py_BEGIN_ALLOW_THREADS fcdp_heap_walk(device->heap, block_add, &list);
    Py_END_ALLOW_THREADS PyObject *out = list.failed ? PyErr_NoMemory() : PyList_New(0);
    for (size_t i = 0; out && i < list.n; i++) {
        const fcdp_heap_view *b = &list.blocks[i];
        PyObject *tuple = Py_BuildValue(
            "(KKnns(KK)i)", (unsigned long long)(uintptr_t)b->stream, (unsigned long long)b->address,
            (Py_ssize_t)b->bytes, (Py_ssize_t)b->requested_bytes, state_name[b->state],
            (unsigned long long)b->private_id.first, (unsigned long long)b->private_id.second, (int)b->small);
        if (!tuple || PyList_Append(out, tuple) < 0) Py_CLEAR(out);
        Py_XDECREF(tuple);
    }
    free(list.blocks);
    return out;
}
