/* column.h - device buffers that bytes from other nodes arrive in (plan.h has what a column holds).
 *
 * A column has device pages from fcdp__column_take to fcdp__column_give; between two uses only its addresses are kept.
 * Any thread; a column belongs to who took it.
 */
#ifndef FCDP_COLUMN_H
#define FCDP_COLUMN_H

#include "alloc/vrange.h"

typedef struct fcdp_columns fcdp_columns;
typedef struct fcdp_column {
    struct fcdp_column *next; /* the owner list's */
    fcdp_vrange *range;
} fcdp_column;

fcdp_status fcdp__columns_create(fcdp_driver *drv, fcdp_pool *pool, fcdp_columns **columns_out) FCDP_MUST_CHECK;
/* With what is idle or lost; every other column has been given back. */
void fcdp__columns_destroy(fcdp_columns *columns);
/* At least `bytes`, mapped, of unknown content. */
fcdp_status fcdp__column_take(fcdp_columns *columns, size_t bytes, fcdp_column **column_out) FCDP_MUST_CHECK;
/* The device is done with it. When the unmap fails it stays the caller's. */
fcdp_status fcdp__column_give(fcdp_columns *columns, fcdp_column *column) FCDP_MUST_CHECK;
/* Copies into or out of it may be pending for ever: nobody gets it again, its pages go with the engine. */
void fcdp__column_lose(fcdp_columns *columns, fcdp_column *column);

#endif
