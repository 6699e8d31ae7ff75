/* column.c - the columns of an engine: mapped while something is in them, else only addresses. */
#include "comm/column.h"

#include <stdlib.h>

enum { MAX_IDLE = 4 }; /* ranges kept for the next gather of the same size */

struct fcdp_columns {
    fcdp_driver *drv;
    fcdp_pool *pool;
    fcdp_lock lock; /* rank ENGINE */
    /* guarded by lock */
    fcdp_column *idle, *lost;
    uint32_t n_idle;
};

static void list_destroy(fcdp_column *list) {
    while (list) {
        fcdp_column *column = list;
        list = column->next;
        fcdp__vrange_destroy(column->range);
        free(column);
    }
}

fcdp_status fcdp__columns_create(fcdp_driver *drv, fcdp_pool *pool, fcdp_columns **columns_out) {
    fcdp_columns *columns = calloc(1, sizeof *columns);
    if (!columns) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for columns");
    columns->drv = drv;
    columns->pool = pool;
    fcdp__lock_init(&columns->lock, FCDP_RANK_ENGINE);
    *columns_out = columns;
    return FCDP_OK;
}

void fcdp__columns_destroy(fcdp_columns *columns) {
    if (!columns) return;
    list_destroy(columns->idle);
    list_destroy(columns->lost);
    fcdp__lock_destroy(&columns->lock);
    free(columns);
}

static fcdp_column *idle_take(fcdp_columns *columns, size_t n_pages) {
    fcdp__lock_acquire(&columns->lock);
    fcdp_column **link = &columns->idle;
    while (*link && fcdp__vrange_n_pages((*link)->range) != n_pages) link = &(*link)->next;
    fcdp_column *column = *link;
    if (column) {
        *link = column->next;
        columns->n_idle--;
    }
    fcdp__lock_release(&columns->lock);
    return column;
}

static void idle_give(fcdp_columns *columns, fcdp_column *column) {
    fcdp__lock_acquire(&columns->lock);
    bool kept = columns->n_idle < MAX_IDLE;
    column->next = kept ? columns->idle : NULL;
    if (kept) {
        columns->idle = column;
        columns->n_idle++;
    }
    fcdp__lock_release(&columns->lock);
    if (!kept) list_destroy(column);
}

static fcdp_status column_create(fcdp_columns *columns, size_t bytes, fcdp_column **column_out) {
    fcdp_column *column = calloc(1, sizeof *column);
    if (!column) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a column");
    fcdp_status status = fcdp__vrange_create(columns->drv, columns->pool, bytes, &column->range);
    if (status)
        free(column);
    else
        *column_out = column;
    return status;
}

fcdp_status fcdp__column_take(fcdp_columns *columns, size_t bytes, fcdp_column **column_out) {
    size_t page_bytes = fcdp__driver_page_bytes(columns->drv);
    fcdp_column *column = idle_take(columns, (bytes + page_bytes - 1) / page_bytes);
    fcdp_status status = column ? FCDP_OK : column_create(columns, bytes, &column);
    if (status) return status;
    status = fcdp__vrange_map(column->range);
    if (status)
        idle_give(columns, column);
    else
        *column_out = column;
    return status;
}

fcdp_status fcdp__column_give(fcdp_columns *columns, fcdp_column *column) {
    fcdp_status status = fcdp__vrange_unmap(column->range);
    if (!status) idle_give(columns, column);
    return status;
}

void fcdp__column_lose(fcdp_columns *columns, fcdp_column *column) {
    fcdp__lock_acquire(&columns->lock);
    column->next = columns->lost;
    columns->lost = column;
    fcdp__lock_release(&columns->lock);
}
