/* import_slot.h - the entry of a library's table of imported functions through which it calls one of them. */
#ifndef FCDP_IMPORT_SLOT_H
#define FCDP_IMPORT_SLOT_H

#include <stdbool.h>

typedef struct import_slot {
    void **at;        /* NULL: not found */
    bool is_readonly; /* after its relocations */
    char library[4096];
} import_slot;

/* The slot in `library` (loaded; its file's name) of the function names[0], and real_out[0], the function
 * that it stands for. real_out[1]: the function names[1] of the same library as that one. False: not
 * found. */
bool binding_import_find(const char *library, const char *const names[2], import_slot *slot_out,
                         void *real_out[2]);
/* From here on the library calls `function` in its place. */
bool binding_import_set(const import_slot *slot, void *function);

#endif
