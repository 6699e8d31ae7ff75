/* neighbour.c - PyTorch's own caching allocator beside FCDP's pages (FCDP_ALLOC=native): before either says
 * that memory is out, the other gives back what it does not use.
 *
 * PyTorch offers no hook for this. Its FreeMemoryCallback runs at every miss of its cache, before cudaMalloc
 * and never after it has failed, and registering one takes a template that libc10_cuda does not export; an
 * out-of-memory observer runs when the exception is as good as thrown. So the one place where libc10_cuda
 * calls cudaMalloc, an entry of its own table of imported functions, is made to call a function here: the
 * real one first, and again where it finds no memory and FCDP gave some back. Whoever else calls cudaMalloc
 * is not concerned. With expandable segments PyTorch calls the driver by pointers of its own instead: then
 * the observer gives back what helps the next attempt.
 *
 * The hook runs with the lock of PyTorch's allocator, and older torch empties its cache with the GIL: neither
 * may wait for a device whose collectives are Python's callables (gloo), which need both. There only the
 * observer is left, which has neither.
 */
#include "torch_plugin/neighbour.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

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
        fcdp__log(FCDP_LOG_INFO, "gave back %zu MiB, of which PyTorch's allocator lacked %zu MiB",
                  n_given >> 20, bytes >> 20);
    return n_given;
}

/* What failed is forgotten before it is tried again, else the next launch's check would find it. */
static int hook_malloc(void **at, size_t bytes) {
    int result = neighbour.real_malloc(at, bytes);
    if (result != CUDA_OUT_OF_MEMORY || binding_transport_uses_python() || !engine_yield(bytes))
        return result;
    (void)neighbour.last_error();
    return neighbour.real_malloc(at, bytes);
}

/* ---- where libc10_cuda calls cudaMalloc ---- */

typedef struct slot {
    void **at;        /* NULL: not found */
    bool is_readonly; /* after its relocations */
    char library[4096];
} slot;

typedef struct tables {
    const ElfW(Sym) * symbols;
    const char *names;
    const ElfW(Rela) * relocations[2];
    size_t bytes[2];
} tables;

/* The loader has made addresses of them. */
static tables tables_of(const struct dl_phdr_info *info, const ElfW(Dyn) * entry) {
    tables t = {NULL, NULL, {NULL, NULL}, {0, 0}};
    for (; entry->d_tag != DT_NULL; entry++) {
        ElfW(Addr) at = entry->d_un.d_ptr;
        const void *pointer = (const void *)(at < info->dlpi_addr ? info->dlpi_addr + at : at);
        switch (entry->d_tag) {
        case DT_SYMTAB: t.symbols = pointer; break;
        case DT_STRTAB: t.names = pointer; break;
        case DT_JMPREL: t.relocations[0] = pointer; break;
        case DT_PLTRELSZ: t.bytes[0] = entry->d_un.d_val; break;
        case DT_RELA: t.relocations[1] = pointer; break;
        case DT_RELASZ: t.bytes[1] = entry->d_un.d_val; break;
        default: break;
        }
    }
    return t;
}

/* Of a function: its address is all that the relocation leaves there. */
static void **slot_in(const struct dl_phdr_info *info, const tables *t, const char *function) {
    for (int which = 0; which < 2 && t->symbols && t->names; which++)
        for (size_t i = 0; t->relocations[which] && i < t->bytes[which] / sizeof(ElfW(Rela)); i++) {
            const ElfW(Rela) *r = &t->relocations[which][i];
            size_t symbol = ELF64_R_SYM(r->r_info);
            if (symbol && !r->r_addend && !strcmp(t->names + t->symbols[symbol].st_name, function))
                return (void **)(info->dlpi_addr + r->r_offset);
        }
    return NULL;
}

static int slot_look(struct dl_phdr_info *info, size_t size, void *found) {
    (void)size;
    slot *s = found;
    const char *file = strrchr(info->dlpi_name, '/');
    if (strcmp(file ? file + 1 : info->dlpi_name, "libc10_cuda.so") ||
        strlen(info->dlpi_name) >= sizeof s->library)
        return 0;
    strcpy(s->library, info->dlpi_name);
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC) {
            tables t = tables_of(info, (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr));
            s->at = slot_in(info, &t, "cudaMalloc");
        }
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        uintptr_t begin = info->dlpi_addr + p->p_vaddr, at = (uintptr_t)s->at;
        if (p->p_type == PT_GNU_RELRO && at >= begin && at < begin + p->p_memsz) s->is_readonly = true;
    }
    return 1;
}

/* What the slot holds where it is bound. Else it still leads back into libc10_cuda, and the
 * loader would look as here: in the process's scope, where a profiler may have put one of its
 * own, then in what the library is linked to. */
static void *malloc_find(const slot *s, void *library) {
    Dl_info about;
    void *bound = *s->at;
    if (dladdr(bound, &about) && about.dli_fname && strcmp(about.dli_fname, s->library)) return bound;
    void *found = dlsym(RTLD_DEFAULT, "cudaMalloc");
    return found || !library ? found : dlsym(library, "cudaMalloc");
}

/* Of the runtime that `function` is of, as a process may have several, each with an error of its own; a
 * profiler's function has no runtime beside it. */
static void *last_error_find(const void *function, void *library) {
    Dl_info about;
    void *own = dladdr(function, &about) && about.dli_fname ? dlopen(about.dli_fname, RTLD_LAZY | RTLD_NOLOAD)
                                                            : NULL;
    void *found = own ? dlsym(own, "cudaGetLastError") : NULL;
    return found || !library ? found : dlsym(library, "cudaGetLastError");
}

/* Once, and for ever: without an engine the hook is what it replaces. */
static bool hook_set(void) {
    slot s = {NULL, false, ""};
    if (neighbour.real_malloc) return true;
    if (!dl_iterate_phdr(slot_look, &s) || !s.at) return false;
    void *library = dlopen(s.library, RTLD_LAZY | RTLD_NOLOAD), *real = malloc_find(&s, library);
    void *last_error = real ? last_error_find(real, library) : NULL;
    malloc_fn hook = hook_malloc;
    if (!last_error) return false;
    uintptr_t page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE), page = (uintptr_t)s.at / page_bytes * page_bytes;
    if (s.is_readonly && mprotect((void *)page, page_bytes, PROT_READ | PROT_WRITE)) return false;
    memcpy(&neighbour.real_malloc, &real, sizeof real);
    memcpy(&neighbour.last_error, &last_error, sizeof last_error);
    void *value;
    memcpy(&value, &hook, sizeof value);
    __atomic_store_n(s.at, value, __ATOMIC_RELEASE);
    if (s.is_readonly) (void)mprotect((void *)page, page_bytes, PROT_READ);
    return true;
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

/* (engine, empty_cache) -> does PyTorch ask, too? Until the engine ends. */
PyObject *binding_neighbour_begin(PyObject *self __attribute__((unused)), PyObject *args) {
    PyObject *handle, *empty_cache;
    if (!PyArg_ParseTuple(args, "OO:neighbour_begin", &handle, &empty_cache)) return NULL;
    fcdp_engine *engine = binding_unwrap(BINDING_ENGINE, handle);
    if (!engine) return NULL;
    Py_XDECREF(neighbour.empty_cache);
    neighbour.empty_cache = Py_NewRef(empty_cache);
    fcdp_engine_set_neighbour(engine, cache_empty, NULL);
    pthread_mutex_lock(&neighbour.mutex);
    neighbour.engine = engine;
    pthread_mutex_unlock(&neighbour.mutex);
    return PyBool_FromLong(hook_set());
}

/* (bytes) -> bytes given back: for the observer of an out-of-memory. */
PyObject *binding_neighbour_yield(PyObject *self __attribute__((unused)), PyObject *args) {
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "n:neighbour_yield", &bytes)) return NULL;
    size_t n_given;
    Py_BEGIN_ALLOW_THREADS n_given = engine_yield((size_t)bytes);
    Py_END_ALLOW_THREADS return PyLong_FromSize_t(n_given);
}
