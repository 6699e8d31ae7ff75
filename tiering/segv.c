/* segv.c - the handler and its table of watched ranges.
 *
 * A handler may take no lock. Readers count themselves in, walk the list, copy what they need and count
 * themselves out; unwatch unlinks a range and frees it once no reader is inside. Both sides store first and
 * look afterwards, all sequentially consistent: a reader that the other does not see counted has not looked
 * at the list yet, and then finds it without the range.
 */
#include "tiering/segv.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char ADVICE[] =
    ", which is sharded: its memory is released. A tensor, view, array or pointer of it outlived its "
    "reshard, "
    "or set_unshard_in_backward(False) left it sharded: call unshard() on its module first, or clone() what "
    "must outlive the reshard\n";

enum { LINE_BYTES = 1024, NAME_BYTES = 256 }; /* of a line; of a name in it */

struct fcdp_segv_watch {
    _Atomic(fcdp_segv_watch *) next;
    uintptr_t base;
    size_t bytes;
    char *name;
    size_t n_parts;
    fcdp_segv_part parts[]; /* their names are the watch's own */
};

static _Atomic(fcdp_segv_watch *) watches;
static atomic_uint n_readers;
static pthread_mutex_t writers = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction before; /* written before the handler is installed */

/* ---- the handler: async-signal-safe from here ---- */

typedef struct line {
    size_t n;
    char text[LINE_BYTES];
} line;

static void line_add(line *l, const char *text, size_t limit) {
    for (size_t i = 0; text[i] && i < limit && l->n + 1 < sizeof l->text; i++) l->text[l->n++] = text[i];
}

static void line_add_hex(line *l, uintptr_t value) {
    char digits[2 * sizeof value + 1];
    size_t at = sizeof digits - 1;
    digits[at] = 0;
    do {
        digits[--at] = "0123456789abcdef"[value % 16];
        value /= 16;
    } while (value);
    line_add(l, "0x", 2);
    line_add(l, digits + at, sizeof digits);
}

/* False: no watch has the address. No watch is freed between the two counts. */
static bool fault_explain(uintptr_t at, line *l) {
    atomic_fetch_add(&n_readers, 1); /* partner: fcdp__segv_unwatch */
    fcdp_segv_watch *watch = atomic_load(&watches);
    while (watch && at - watch->base >= watch->bytes) watch = atomic_load(&watch->next);
    if (watch) {
        const char *part = NULL;
        for (size_t i = 0; i < watch->n_parts && !part; i++)
            if (at - watch->base - watch->parts[i].offset_bytes < watch->parts[i].bytes)
                part = watch->parts[i].name;
        line_add(l, "fcdp: SIGSEGV: ", LINE_BYTES);
        line_add_hex(l, at);
        line_add(l, part ? " is in the gathered parameter " : " is in gathered parameters", LINE_BYTES);
        if (part) line_add(l, part, NAME_BYTES);
        line_add(l, " of ", LINE_BYTES);
        line_add(l, watch->name, NAME_BYTES);
        line_add(l, ADVICE, LINE_BYTES);
    }
    atomic_fetch_sub(&n_readers, 1);
    return l->n > 0;
}

/* Pass the signal on. A previous handler function that returns is called in place and stays behind this one.
 * Any other action is restored and gets the signal anew; a fault recurs by itself, since the instruction runs
 * again. */
static void pass_on(int signum, siginfo_t *info, void *context, bool explained) {
    bool sent = info->si_code <= 0; /* by kill or raise: nothing runs again */
    bool by_default = !(before.sa_flags & SA_SIGINFO) &&
                      (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN);
    if (sent && by_default && before.sa_handler == SIG_IGN) return;
    if (!explained && !by_default && !(before.sa_flags & (int)SA_RESETHAND)) {
        if (before.sa_flags & SA_SIGINFO)
            before.sa_sigaction(signum, info, context);
        else
            before.sa_handler(signum);
        return;
    }
    (void)sigaction(signum, &before, NULL);
    if (sent) (void)raise(signum);
}

static void on_segv(int signum, siginfo_t *info, void *context) {
    int saved_errno = errno;
    line l;
    l.n = 0;
    bool explained = info->si_code > 0 && fault_explain((uintptr_t)info->si_addr, &l);
    for (size_t written = 0; explained && written < l.n;) {
        ssize_t n = write(STDERR_FILENO, l.text + written, l.n - written);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        written += (size_t)n;
    }
    errno = saved_errno;
    pass_on(signum, info, context, explained);
}

/* ---- the table's writers ---- */

static void handler_install(void) {
    if (sigaction(SIGSEGV, NULL, &before)) return;
    struct sigaction ours = {.sa_sigaction = on_segv, .sa_mask = before.sa_mask};
    /* On the thread's alternate stack where it has one, as a handler of stack overflows behind this one
     * expects. */
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | (before.sa_flags & (SA_NODEFER | SA_RESTART));
    (void)sigaction(SIGSEGV, &ours, NULL);
}

static void watch_free(fcdp_segv_watch *watch) {
    for (size_t i = 0; i < watch->n_parts; i++) free((char *)watch->parts[i].name);
    free(watch->name);
    free(watch);
}

static fcdp_segv_watch *watch_make(uintptr_t base, size_t bytes, const char *name,
                                   const fcdp_segv_part *parts, size_t n_parts) {
    fcdp_segv_watch *watch = calloc(1, sizeof *watch + n_parts * sizeof watch->parts[0]);
    if (!watch) return NULL;
    watch->base = base;
    watch->bytes = bytes;
    watch->name = strdup(name);
    bool whole = watch->name != NULL;
    for (; watch->n_parts < n_parts && whole; watch->n_parts++) {
        fcdp_segv_part *part = &watch->parts[watch->n_parts];
        *part = parts[watch->n_parts];
        part->name = strdup(part->name);
        whole = part->name != NULL;
    }
    if (whole) return watch;
    watch_free(watch);
    return NULL;
}

fcdp_status fcdp__segv_watch(fcdp_dptr base, size_t bytes, const char *name, const fcdp_segv_part *parts,
                             size_t n_parts, fcdp_segv_watch **watch_out) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    fcdp_segv_watch *watch = watch_make((uintptr_t)base.addr, bytes, name, parts, n_parts);
    if (!watch) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory to name %zu parameters of '%s'", n_parts, name);
    (void)pthread_once(&once, handler_install);
    (void)pthread_mutex_lock(&writers);
    atomic_store(&watch->next, atomic_load(&watches));
    atomic_store(&watches, watch);
    (void)pthread_mutex_unlock(&writers);
    *watch_out = watch;
    return FCDP_OK;
}

void fcdp__segv_unwatch(fcdp_segv_watch *watch) {
    if (!watch) return;
    (void)pthread_mutex_lock(&writers);
    _Atomic(fcdp_segv_watch *) *link = &watches;
    while (atomic_load(link) != watch) link = &atomic_load(link)->next;
    atomic_store(link, atomic_load(&watch->next));
    while (atomic_load(&n_readers)) (void)sched_yield(); /* partner: fault_explain */
    (void)pthread_mutex_unlock(&writers);
    watch_free(watch);
}
