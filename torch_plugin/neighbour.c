/* neighbour.c - has PyTorch's cudaMalloc ask the engine for memory, and the engine ask PyTorch's cache.
 *
 * PyTorch offers no hook for the first. Its FreeMemoryCallback runs at every miss of its cache, before
 * cudaMalloc and never after it has failed, and registering one takes a template that libc10_cuda does not
 * export; an out-of-memory observer runs when the exception is as good as thrown. So the one place where
 * libc10_cuda calls cudaMalloc, an entry of its own table of imported functions (import_slot.h), is made to
 * call a function here. That one calls the real cudaMalloc, and calls it again where it found no memory and
 * FCDP gave some back. Other callers of cudaMalloc are not concerned. With expandable segments PyTorch calls
 * the driver by pointers of its own instead: then the observer gives back what helps the next attempt.
 *
 * The hook runs with the lock of PyTorch's allocator, and older torch empties its cache with the GIL: neither
 * may wait for a device whose collectives are Python's callables (gloo), which need both. There only the
 * observer is left, which has neither.
 */
#include "torch_plugin/neighbour.h"

#include <pthread.h>
#include <string.h>

#include "base/size.h"
#include "torch_plugin/handles.h"
#include "torch_plugin/import_slot.h"
#include "torch_plugin/transport.h"

enum { CUDA_OUT_OF_MEMORY = 2 }; /* cudaErrorMemoryAllocation */

typedef int (*malloc_fn)(void **at, size_t bytes);

/* n_inside: hooks that use the engine, which goes when there are none. */
static struct {
    pthread_mutex_t mutex;
    pthread_cond_t left;
    fcdp_engine *engine;
    size_t n_inside;
    PyObject *empty_cache; /* guarded by the GIL */
    malloc_fn real_malloc; /* set before the hook is */
    int (*last_error)(void);
} neighbour = {.mutex = PTHREAD_MUTEX_INITIALIZER, .left = PTHREAD_COND_INITIALIZER};

/* ---- PyTorch asks ---- */

static size_t engine_yield(size_t bytes) {
    pthread_mutex_lock(&neighbour.mutex);
    fcdp_engine *engine = neighbour.engine;
    neighbour.n_inside += engine != NULL;
    pthread_mutex_unlock(&neighbour.mutex);
    if (!engine) return 0;
    size_t n_given = fcdp_engine_yield(engine, bytes);
    pthread_mutex_lock(&neighbour.mutex);
    neighbour.n_inside--;
    pthread_cond_broadcast(&neighbour.left);
    pthread_mutex_unlock(&neighbour.mutex);
    if (n_given)
        fcdp__log(FCDP_LOG_INFO,
                  "gave %s of device memory back to the driver, as PyTorch's allocator lacked %s",
                  fcdp__size_text(n_given).s, fcdp__size_text(bytes).s);
    return n_given;
}

/* The failure is cleared before the second try, else the next launch's check would find it. */
static int hook_malloc(void **at, size_t bytes) {
    int result = neighbour.real_malloc(at, bytes);
    if (result != CUDA_OUT_OF_MEMORY || binding_transport_uses_python() || !engine_yield(bytes))
        return result;
    (void)neighbour.last_error();
    return neighbour.real_malloc(at, bytes);
}

/* ---- FCDP asks ---- */

/* torch.cuda.empty_cache() says nothing of what it freed: the pool tries again and sees. Where another thread
 * captures a graph it raises, and frees nothing. */
static size_t cache_empty(void *ctx, size_t n_pages) {
    (void)ctx;
    if (binding_transport_uses_python()) return 0;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result = neighbour.empty_cache ? PyObject_CallNoArgs(neighbour.empty_cache) : NULL;
    size_t n_given = result ? n_pages : 0;
    if (!result) PyErr_Clear();
    Py_XDECREF(result);
    PyGILState_Release(gil);
    return n_given;
}

/* ---- methods ---- */

void binding_neighbour_end(void) {
    pthread_mutex_lock(&neighbour.mutex);
    fcdp_engine *engine = neighbour.engine;
    neighbour.engine = NULL;
    while (neighbour.n_inside) pthread_cond_wait(&neighbour.left, &neighbour.mutex);
    pthread_mutex_unlock(&neighbour.mutex);
    if (engine) fcdp_engine_set_neighbour(engine, NULL, NULL);
}

/* The hook is set once, for the life of the process: without an engine it is what it replaces. */
PyObject *binding_share_device(PyObject *self, PyObject *empty_cache) {
    static const char *const names[] = {"cudaMalloc", "cudaGetLastError"};
    fcdp_engine *engine = binding_core(self);
    if (!engine) return NULL;
    Py_XDECREF(neighbour.empty_cache);
    neighbour.empty_cache = Py_NewRef(empty_cache);
    fcdp_engine_set_neighbour(engine, cache_empty, NULL);
    pthread_mutex_lock(&neighbour.mutex);
    neighbour.engine = engine;
    pthread_mutex_unlock(&neighbour.mutex);
    import_slot slot;
    void *real[2], *hook;
    malloc_fn function = hook_malloc;
    if (neighbour.real_malloc) Py_RETURN_TRUE;
    if (!binding_import_find("libc10_cuda.so", names, &slot, real)) Py_RETURN_FALSE;
    memcpy(&neighbour.real_malloc, &real[0], sizeof real[0]);
    memcpy(&neighbour.last_error, &real[1], sizeof real[1]);
    memcpy(&hook, &function, sizeof hook);
    if (binding_import_set(&slot, hook)) Py_RETURN_TRUE;
    neighbour.real_malloc = NULL;
    Py_RETURN_FALSE;
}

PyObject *binding_neighbour_yield(PyObject *self __attribute__((unused)), PyObject *args) {
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "n:neighbour_yield", &bytes)) return NULL;
    size_t n_given;
    Py_BEGIN_ALLOW_THREADS n_given = engine_yield((size_t)bytes);
    Py_END_ALLOW_THREADS return PyLong_FromSize_t(n_given);
}
