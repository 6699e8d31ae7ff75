/* cxx.h - the little of C++ that PyTorch's pluggable allocator asks of a C library.
 *
 * It takes exceptions as reports of failure (a null pointer would be taken for memory), and passes a
 * std::function. Both are ABI (Itanium C++ ABI; libstdc++), reached by name at run time. */
#ifndef FCDP_CXX_H
#define FCDP_CXX_H

#include <stdbool.h>

typedef enum cxx_error_kind {
    CXX_OUT_OF_MEMORY, /* torch.OutOfMemoryError */
    CXX_ERROR,         /* RuntimeError */
} cxx_error_kind;

/* Find torch's exceptions in this process. NULL, or why they cannot be thrown. Before
 * the others; torch has been imported. */
const char *binding_cxx_open(void);
/* Throws a c10::Error with `text` through the caller's frames, which must
 * hold nothing: they are not cleaned up. */
void binding_cxx_throw(cxx_error_kind kind, const char *text) __attribute__((noreturn));

/* A copy of a std::function<bool(cudaStream_t)>; by that type's layout in libstdc++. */
typedef struct cxx_function {
    void *functor[2];
    bool (*manager)(void *to, const void *from, int operation);
    bool (*invoker)(const void *functor, void **stream);
} cxx_function;
void binding_cxx_function_copy(const cxx_function *from, cxx_function *copy_out);
bool binding_cxx_function_call(const cxx_function *function, void *stream);
void binding_cxx_function_end(cxx_function *function);

#endif
