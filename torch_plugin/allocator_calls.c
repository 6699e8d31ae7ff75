/* allocator_calls.c - passes two calls of PyTorch's NCCL on to PyTorch's own allocator.
 *
 * By the Itanium C++ ABI an object begins with the address of its class's table of virtual functions. So the
 * pluggable allocator gets a copy of its table in which two entries are ours; PyTorch itself offers no way to
 * replace them. All of it is found by name. Where anything is not as expected, the allocator stays as it is.
 */
#include "torch_plugin/allocator_calls.h"

#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define PLUGGABLE "N5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator"

/* A table begins with the offset to the object's top and the type; objects hold the address behind them. */
enum { N_HEAD = 2, N_MOST = 256 };

/* What our entries call: PyTorch's own allocator, its snapshot, its attachAllocatorTraceTracker. */
extern void *fcdp__allocator_calls[3];
void *fcdp__allocator_calls[3] __attribute__((visibility("hidden")));
extern char fcdp__allocator_snapshot[] __attribute__((visibility("hidden")));
extern char fcdp__allocator_attach[] __attribute__((visibility("hidden")));

/* Each replaces `this` and jumps. C has no word for where an object is returned (aarch64: x8), and a jump
 * leaves no frame that an exception would have to pass. Returning in memory, x86 has `this` second. */
#if defined(__x86_64__)
#define PASS_ON(name, self, entry)                                                                           \
    ".hidden " name "\n.globl " name "\n.type " name ", @function\n" name ":\n"                              \
    "    movq fcdp__allocator_calls(%rip), %" self "\n"                                                      \
    "    jmp *fcdp__allocator_calls+" entry "(%rip)\n"
__asm__(".pushsection .text\n" PASS_ON("fcdp__allocator_snapshot", "rsi", "8")
            PASS_ON("fcdp__allocator_attach", "rdi", "16") ".popsection\n");
#elif defined(__aarch64__)
#define PASS_ON(name, entry)                                                                                 \
    ".hidden " name "\n.globl " name "\n.type " name ", %function\n" name ":\n"                              \
    "    adrp x16, fcdp__allocator_calls\n"                                                                  \
    "    add x16, x16, :lo12:fcdp__allocator_calls\n"                                                        \
    "    ldr x0, [x16]\n"                                                                                    \
    "    ldr x16, [x16, " entry "]\n"                                                                        \
    "    br x16\n"
__asm__(".pushsection .text\n.p2align 2\n" PASS_ON("fcdp__allocator_snapshot", "#8")
            PASS_ON("fcdp__allocator_attach", "#16") ".popsection\n");
#else
#error "fcdp_alloc: pass on two calls of an allocator on this architecture"
#endif

static struct {
    _Atomic(void *) *current; /* PyTorch's pointer to its current allocator; NULL: nothing was found */
    void **table;             /* the class's */
    void *copy[N_MOST];
} calls;

/* By the parameters that versions of torch have given them. */
static const char *const snapshots[] = {"8snapshotESt4pairIyyEb", "8snapshotESt4pairIyyE", "8snapshotEv",
                                        NULL};
static const char *const attaches[] = {
    "27attachAllocatorTraceTrackerESt8functionIFvRKN3c1022CachingDeviceAllocator10TraceEntryEEE",
    "27attachAllocatorTraceTrackerESt8functionIFvRKN3c104cuda20CUDACachingAllocator10TraceEntryEEE", NULL};

/* Which entry is the class's function of one of these names; 0: none, or more than one. */
static size_t entry_find(void *library, void **table, size_t n, const char *const *names) {
    void *function = NULL;
    size_t found = 0, n_found = 0;
    for (; !function && *names; names++) {
        char name[256];
        snprintf(name, sizeof name, "_Z" PLUGGABLE "%s", *names);
        function = dlsym(library, name);
    }
    for (size_t i = N_HEAD; function && i < n; i++) {
        if (table[i] != function) continue;
        found = i;
        n_found++;
    }
    return n_found == 1 ? found : 0;
}

/* Whatever is not as expected: the pluggable allocator stays as it is. */
PyObject *binding_allocator_calls_find(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    if (calls.current) Py_RETURN_NONE;
    void *c10 = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void *torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    _Atomic(void *) *current = c10 ? dlsym(c10, "_ZN3c104cuda20CUDACachingAllocator9allocatorE") : NULL;
    void **table = torch ? dlsym(torch, "_ZTV" PLUGGABLE "E") : NULL;
    void ***own = current ? atomic_load(current) : NULL;
    Dl_info about;
    const ElfW(Sym) *symbol = NULL;
    size_t n = 0;
    if (table && dladdr1(table, &about, (void **)&symbol, RTLD_DL_SYMENT) && about.dli_saddr == table)
        n = symbol->st_size / sizeof *table;
    size_t snapshot = n <= N_MOST ? entry_find(torch, table, n, snapshots) : 0;
    size_t attach = n <= N_MOST ? entry_find(torch, table, n, attaches) : 0;
    if (!snapshot || !attach || !own || *own == table + N_HEAD)
        return PyUnicode_FromString("this torch's pluggable allocator has no snapshot as FCDP knows it");
    memcpy(calls.copy, table, n * sizeof *table);
    calls.copy[snapshot] = fcdp__allocator_snapshot;
    calls.copy[attach] = fcdp__allocator_attach;
    fcdp__allocator_calls[0] = own;
    fcdp__allocator_calls[1] = (*own)[snapshot - N_HEAD];
    fcdp__allocator_calls[2] = (*own)[attach - N_HEAD];
    calls.table = table;
    calls.current = current;
    Py_RETURN_NONE;
}

void binding_allocator_calls_pass_on(void) {
    if (!calls.current) return;
    _Atomic(void *) *object = atomic_load(calls.current);
    if (atomic_load(object) == calls.table + N_HEAD) atomic_store(object, calls.copy + N_HEAD);
}
