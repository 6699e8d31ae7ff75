/* driver_timer.c - timing events. A failure is a status alone: the thread's failure text and the log describe
 * the program's own work, and a measurement must not change them. */
#include "alloc/driver_internal.h"

static fcdp_status status_of(CUresult result) {
    if (result == CUDA_ERROR_NOT_READY) return FCDP_PENDING;
    return result == CUDA_SUCCESS ? FCDP_OK : FCDP_ERR_DRIVER;
}

/* Drivers before CUDA 12.8 have the first version alone. */
static bool has_times(const fcdp_driver *drv) {
    return drv->api.cuEventElapsedTime_v2 || drv->api.cuEventElapsedTime;
}

fcdp_status fcdp__driver_timer_create(fcdp_driver *drv, fcdp_event *event_out) {
    CUevent event;
    if (!has_times(drv)) return FCDP_ERR_UNSUPPORTED;
    fcdp_status status = status_of(CALL(drv, cuEventCreate, &event, 0));
    if (!status) *event_out = event;
    return status;
}

fcdp_status fcdp__driver_timer_record(fcdp_driver *drv, fcdp_event event, fcdp_stream stream) {
    return status_of(CALL(drv, cuEventRecord, event, stream));
}

fcdp_status fcdp__driver_timer_wait(fcdp_driver *drv, fcdp_stream stream, fcdp_event event) {
    return status_of(CALL(drv, cuStreamWaitEvent, stream, event, 0));
}

fcdp_status fcdp__driver_timer_elapsed(fcdp_driver *drv, fcdp_event start, fcdp_event end, double *ns_out) {
    float milliseconds = 0;
    if (!has_times(drv)) return FCDP_ERR_UNSUPPORTED;
    fcdp_status status = status_of(drv->api.cuEventElapsedTime_v2
                                       ? CALL(drv, cuEventElapsedTime_v2, &milliseconds, start, end)
                                       : CALL(drv, cuEventElapsedTime, &milliseconds, start, end));
    if (!status) *ns_out = (double)milliseconds * 1e6;
    return status;
}
