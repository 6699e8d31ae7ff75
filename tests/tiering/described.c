#include "tests/tiering/described.h"

#include "tests/alloc/support.h"

#include <errno.h>
#include <ftw.h>
#include <sys/stat.h>

char described_root[64];

void described_put(const char *path, const char *text) {
    char full[512];
    snprintf(full, sizeof full, "%s%s", described_root, path);
    for (char *at = full + strlen(described_root) + 1; (at = strchr(at, '/')); *at++ = '/') {
        *at = 0;
        assert_true(mkdir(full, 0700) == 0 || errno == EEXIST);
    }
    FILE *file = fopen(full, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

int described_make(void **state) {
    (void)state;
    snprintf(described_root, sizeof described_root, "/tmp/fcdp-described-XXXXXX");
    return mkdtemp(described_root) ? 0 : -1;
}

static int entry_remove(const char *path, const struct stat *st, int kind, struct FTW *at) {
    (void)st, (void)kind, (void)at;
    return remove(path);
}

int described_remove(void **state) {
    (void)state;
    return nftw(described_root, entry_remove, 8, FTW_DEPTH | FTW_PHYS);
}
