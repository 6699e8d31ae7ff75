/* import_slot.c - finds and replaces the address by which one library calls a function of another.
 *
 * A library that was not linked for it offers no such hook, but the loader keeps the addresses of what it
 * imports in a table. This reads the ELF tables that the loader works on, so only one library's calls are
 * redirected, and those of all others stay as they are.
 */
#include "torch_plugin/import_slot.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

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

typedef struct search {
    const char *library, *function;
    import_slot *slot;
} search;

/* Of a function, its address is all that the relocation leaves in the slot. Relocations of a library that is
 * linked with RELRO are read-only once the loader has made them. */
static int library_look(struct dl_phdr_info *info, size_t size, void *arg) {
    (void)size;
    const search *of = arg;
    import_slot *s = of->slot;
    const char *file = strrchr(info->dlpi_name, '/');
    if (strcmp(file ? file + 1 : info->dlpi_name, of->library) ||
        strlen(info->dlpi_name) >= sizeof s->library)
        return 0;
    strcpy(s->library, info->dlpi_name);
    tables t = {NULL, NULL, {NULL, NULL}, {0, 0}};
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            t = tables_of(info, (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr));
    for (int which = 0; which < 2 && t.symbols && t.names; which++)
        for (size_t i = 0; !s->at && t.relocations[which] && i < t.bytes[which] / sizeof(ElfW(Rela)); i++) {
            const ElfW(Rela) *r = &t.relocations[which][i];
            size_t symbol = ELF64_R_SYM(r->r_info);
            if (symbol && !r->r_addend && !strcmp(t.names + t.symbols[symbol].st_name, of->function))
                s->at = (void **)(info->dlpi_addr + r->r_offset);
        }
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        uintptr_t begin = info->dlpi_addr + p->p_vaddr, at = (uintptr_t)s->at;
        if (p->p_type == PT_GNU_RELRO && at >= begin && at < begin + p->p_memsz) s->is_readonly = true;
    }
    return 1;
}

/* The function is what the slot holds, where it is bound. Else the slot still leads back into the
 * library, and the loader would look as here: in the process's scope, where a profiler may have put one
 * of its own, then in what the library is linked to. The second function is of the first one's library,
 * as a process may have several CUDA runtimes, each with an error of its own; a profiler's function has
 * no runtime beside it. */
bool binding_import_find(const char *library, const char *const names[2], import_slot *slot_out,
                         void *real_out[2]) {
    *slot_out = (import_slot){NULL, false, ""};
    search of = {library, names[0], slot_out};
    if (!dl_iterate_phdr(library_look, &of) || !slot_out->at) return false;
    void *loaded = dlopen(slot_out->library, RTLD_LAZY | RTLD_NOLOAD);
    Dl_info about;
    void *real = *slot_out->at, *home = NULL;
    if (!dladdr(real, &about) || !about.dli_fname || !strcmp(about.dli_fname, slot_out->library)) {
        real = dlsym(RTLD_DEFAULT, names[0]);
        if (!real && loaded) real = dlsym(loaded, names[0]);
    }
    if (!real) return false;
    if (dladdr(real, &about) && about.dli_fname) home = dlopen(about.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    real_out[0] = real;
    real_out[1] = home ? dlsym(home, names[1]) : NULL;
    if (!real_out[1] && loaded) real_out[1] = dlsym(loaded, names[1]);
    return real_out[1] != NULL;
}

bool binding_import_set(const import_slot *slot, void *function) {
    uintptr_t page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE),
              page = (uintptr_t)slot->at / page_bytes * page_bytes;
    if (slot->is_readonly && mprotect((void *)page, page_bytes, PROT_READ | PROT_WRITE)) return false;
    __atomic_store_n(slot->at, function, __ATOMIC_RELEASE);
    if (slot->is_readonly) (void)mprotect((void *)page, page_bytes, PROT_READ);
    return true;
}
