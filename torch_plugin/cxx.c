/* cxx.c - throws PyTorch's exceptions and holds a std::function, in C.
 *
 * The wheel serves several versions of torch, so it cannot be linked to one: all that this needs of libc10
 * and libstdc++ is looked up by its mangled name once torch is loaded. If a name is missing, binding_cxx_open
 * says so, and the allocator is not used. The file is compiled with -fexceptions, since torch's exceptions
 * pass through its frames.
 */
#include "torch_plugin/cxx.h"

#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

typedef struct source_location { /* c10::SourceLocation, c10/util/Exception.h */
    const char *function, *file;
    uint32_t line;
} source_location;

/* c10::Error has 80 bytes in torch 2.6 and 128 in 2.15; room for more costs nothing. A
 * std::string has 32, before C++11's ABI 8. */
enum { ERROR_BYTES = 1024, STRING_BYTES = 32 };

static struct {
    void *(*allocate)(size_t bytes); /* __cxa_allocate_exception */
    /* __cxa_throw, does not return */
    void (*throw_)(void *object, void *type, void (*destroy)(void *));
    /* std::string(const char *, allocator) */
    void (*string_make)(void *string, const char *text, const void *allocator);
    void (*string_end)(void *string);
    /* c10::Error(SourceLocation, std::string) */
    void (*error_make)(void *error, source_location where, void *string);
    void *error_type, *out_of_memory_type; /* std::type_info */
} cxx;

/* torch before 2.7 is built with the strings from before C++11. */
static const struct {
    const char *error_make, *string_make, *string_end;
} abis[] = {
    {"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
     "_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEC1EPKcRKS3_",
     "_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEED1Ev"},
    {"_ZN3c105ErrorC1ENS_14SourceLocationESs", "_ZNSsC1EPKcRKSaIcE", "_ZNSsD1Ev"},
};

static void *library(const char *name) {
    return dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
}

/* dlsym as a function pointer: a cast that ISO C has no words for. */
static bool find(void *in, const char *name, void *pointer_out) {
    void *found = in ? dlsym(in, name) : NULL;
    if (found) memcpy(pointer_out, &found, sizeof found);
    return found != NULL;
}

/* Its libraries are in this process already, or torch is not. */
const char *binding_cxx_open(void) {
    void *c10 = library("libc10.so"), *std = library("libstdc++.so.6");
    if (!c10 || !std) return "torch's libc10.so is not in this process";
    size_t abi = 0, n_abis = sizeof abis / sizeof *abis;
    while (abi < n_abis && !find(c10, abis[abi].error_make, &cxx.error_make)) abi++;
    if (abi == n_abis || !find(std, abis[abi].string_make, &cxx.string_make) ||
        !find(std, abis[abi].string_end, &cxx.string_end) ||
        !find(std, "__cxa_allocate_exception", &cxx.allocate) || !find(std, "__cxa_throw", &cxx.throw_) ||
        !find(c10, "_ZTIN3c105ErrorE", &cxx.error_type))
        return "this torch has no c10::Error as FCDP knows it, by which it would say that memory is out";
    static const char *const homes[] = {"libc10.so", "libc10_cuda.so", "libtorch_python.so"};
    for (size_t i = 0; i < sizeof homes / sizeof *homes; i++)
        if (find(library(homes[i]), "_ZTIN3c1016OutOfMemoryErrorE", &cxx.out_of_memory_type)) return NULL;
    return "this torch has no c10::OutOfMemoryError as FCDP knows it";
}

/* std::exception's first virtual function is its destructor: the table's first
 * entry destroys, the second also deletes. */
static void error_end(void *error) {
    void (***table)(void *) = error;
    (*table)[0](error);
}

void binding_cxx_throw(cxx_error_kind kind, const char *text) {
    static const source_location where = {"fcdp_alloc", "torch_plugin/cxx.c", 0};
    _Alignas(16) char string[STRING_BYTES];
    char allocator = 0; /* std::allocator<char> has no state */
    void *error = cxx.allocate(ERROR_BYTES);
    cxx.string_make(string, text, &allocator);
    cxx.error_make(error, where, string);
    cxx.string_end(string); /* what it left of it */
    /* OutOfMemoryError adds nothing to Error: its type is what it is caught by. */
    cxx.throw_(error, kind == CXX_OUT_OF_MEMORY ? cxx.out_of_memory_type : cxx.error_type, error_end);
    __builtin_unreachable();
}

enum { CLONE = 2, DESTROY = 3 }; /* std::_Manager_operation */

void binding_cxx_function_copy(const cxx_function *from, cxx_function *copy_out) {
    *copy_out = (cxx_function){{NULL, NULL}, NULL, NULL};
    if (!from->manager) return; /* an empty one */
    from->manager(copy_out->functor, from->functor, CLONE);
    copy_out->manager = from->manager;
    copy_out->invoker = from->invoker;
}

bool binding_cxx_function_call(const cxx_function *function, void *stream) {
    return function->manager && function->invoker(function->functor, &stream);
}

void binding_cxx_function_end(cxx_function *function) {
    if (function->manager) function->manager(function->functor, function->functor, DESTROY);
    *function = (cxx_function){{NULL, NULL}, NULL, NULL};
}
