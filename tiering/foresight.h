/* foresight.h - which slices will be read next, judged by what followed the last time. Pure. */
#ifndef FCDP_FORESIGHT_H
#define FCDP_FORESIGHT_H

#include <stdbool.h>
#include <stddef.h>

/* A step of a model with 500 groups stores and reads each once or twice. */
enum { FCDP_FORESIGHT_EVENTS = 4096 };

typedef struct fcdp_foresight {
    struct {
        const void *what; /* NULL: it is gone */
        bool stores;      /* else it was read */
    } events[FCDP_FORESIGHT_EVENTS];
    size_t n; /* ever: event k lies at k % FCDP_FORESIGHT_EVENTS */
} fcdp_foresight;

void fcdp__foresight_note(fcdp_foresight *of, const void *what, bool stores);
/* `what` ends. */
void fcdp__foresight_forget(fcdp_foresight *of, const void *what);
/* Of what followed the last time that the last two events were the same, at most `most` different ones that
 * were read, in this order. Not what is to be stored before it is read: its bytes are not there yet. */
size_t fcdp__foresight_reads(const fcdp_foresight *of, const void **what_out, size_t most);

#endif
