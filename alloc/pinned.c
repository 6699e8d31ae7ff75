#include "alloc/pinned.h"

#include <sys/mman.h>

#include "base/size.h"

fcdp_status fcdp__pinned_create(fcdp_driver *drv, size_t bytes, const char *what, fcdp_pinned *memory_out) {
    size_t rounded = fcdp__round_up(bytes, 64 << 10), stay_bytes;
    void *at = mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no host memory for %s of %zu bytes", what, bytes);
    (void)madvise(at, rounded, MADV_DONTFORK);
    fcdp_status status = fcdp__driver_host_pin(drv, at, rounded, &stay_bytes);
    if (status) {
        if (!stay_bytes) munmap(at, rounded);
        return status;
    }
    *memory_out = (fcdp_pinned){at, rounded};
    return FCDP_OK;
}

fcdp_status fcdp__pinned_destroy(fcdp_driver *drv, fcdp_pinned *memory) {
    size_t stay_bytes;
    if (!memory->at) return FCDP_OK;
    fcdp_status status = fcdp__driver_host_unpin(drv, memory->at, memory->bytes, &stay_bytes);
    if (!status) munmap(memory->at, memory->bytes);
    *memory = (fcdp_pinned){0};
    return status;
}
