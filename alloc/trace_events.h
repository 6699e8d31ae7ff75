/* trace_events.h - what alloc says of its work. The rows' columns: base/trace_format.h. */
#ifndef FCDP_ALLOC_TRACE_EVENTS_H
#define FCDP_ALLOC_TRACE_EVENTS_H

#include "base/trace_format.h"

/* A pool's events are written under its lock, so that they come in the order of what they say. */
#define FCDP_ALLOC_EVENTS(X)                                                                                 \
    X(PAGES_CREATE, 1, "pages_create", "pool", "bytes that the pool has created now",                        \
      "device memory of `bytes` was created by the driver")                                                  \
    X(PAGES_RELEASE, 2, "pages_release", "pool", "bytes that the pool has created now",                      \
      "device memory of `bytes` went back to the driver")                                                    \
    X(MAP, 3, "map", "device address", "", "`bytes` of device memory were mapped there")                     \
    X(UNMAP, 4, "unmap", "device address", "", "`bytes` there were unmapped")                                \
    X(PAGES_TAKE, 5, "pages_take", "holder | pool << 8", "bytes that the holder has now",                    \
      "a holder took pages of `bytes` from the pool")                                                        \
    X(PAGES_GIVE, 6, "pages_give", "holder | pool << 8", "bytes that the holder has now",                    \
      "a holder gave pages of `bytes` back to the pool")                                                     \
    X(PRESSURE, 7, "pressure", "bytes that all holders have", "budget, bytes",                               \
      "pages of `bytes` were asked for, and there are not as many: others are asked to give some back")      \
    X(RECLAIM, 8, "reclaim", "bytes that were missing", "holder that asks | pool << 8",                      \
      "a reclaimer (the cause) was asked, took so long, and gave `bytes` back")                              \
    X(OOM_AVOIDED, 9, "oom_avoided", "bytes that reclaimers gave back", "holder | pool << 8",                \
      "pages of `bytes` were there only after others gave some back, which took so long")                    \
    X(OOM, 10, "oom", "bytes that all holders have", "budget, bytes",                                        \
      "pages of `bytes` were asked for in vain: a use or an allocation fails, or a framework tries again")   \
    X(ALLOCATE, 11, "allocate", "device address", "stream", "a tensor of `bytes` was allocated")             \
    X(FREE, 12, "free", "device address", "stream", "a tensor of `bytes` was freed")                         \
    X(NEIGHBOUR, 13, "native_allocator", "bytes that it lacked", "",                                         \
      "another allocator of the process lacked device memory, and was given `bytes`")                        \
    X(HOST_WAIT, 14, "host_wait", "", "", "a thread of the program waited, the cause says what for")         \
    X(SLEEP, 15, "sleep", "bytes of live tensors", "of these, copied to host memory",                        \
      "tensors left the device, which took so long: pages of `bytes` went back (fcdp.sleep)")                \
    X(WAKE, 16, "wake", "bytes of live tensors", "of these, copied to the device",                           \
      "and came back, pages of `bytes`")

/* RECLAIM: which reclaimer, in the order of fcdp_reclaimer. HOST_WAIT: FOR_x, of this layer and of others. */
#define FCDP_ALLOC_CAUSES(X)                                                                                 \
    X(RECLAIM_CACHES, 1, "caches", "freed tensors' pages that are idle at once")                             \
    X(RECLAIM_SCRATCH, 2, "scratch", "staging that no thread is using, once what is in it has been copied")  \
    X(RECLAIM_EVICT, 3, "evict", "free slots, then regions kept on the device")                              \
    X(RECLAIM_WAITING, 4, "waiting", "freed tensors' pages that other streams still use")                    \
    X(RECLAIM_NEIGHBOUR, 5, "native_allocator", "PyTorch's own allocator")                                   \
    X(FOR_MEMORY, 6, "memory", "device pages lacked")

/* Of all pools of the process. HELD_x follow the holders (fcdp_holder): 0 tensors, 1 gathered parameters. */
#define FCDP_ALLOC_COUNTERS(X)                                                                               \
    X(SPANS_BEGUN, 0, "trace.spans_begun", COUNT, SUM, "spans of streams that were begun")                   \
    X(SPANS_ENDED, 1, "trace.spans_ended", COUNT, SUM, "of those, written as events")                        \
    X(SPANS_UNTIMED, 2, "trace.spans_untimed", COUNT, SUM, "of those, without the device's times")           \
    X(BUDGET_BYTES, 3, "device.budget_bytes", BYTES, LEVEL, "the device budget (FCDP_DEVICE_BUDGET)")        \
    X(CREATED_BYTES, 4, "device.created_bytes", BYTES, LEVEL, "pages that were created = held + cached")     \
    X(CACHED_BYTES, 5, "device.cached_bytes", BYTES, LEVEL, "of those, idle in the pool")                    \
    X(HELD_0_BYTES, 6, "device.tensors_bytes", BYTES, LEVEL, "of those, pages of tensors")                   \
    X(HELD_1_BYTES, 7, "device.gathered_bytes", BYTES, LEVEL, "of those, pages of gathered parameters")      \
    X(PEAK_0_BYTES, 10, "device.tensors_peak_bytes", BYTES, PEAK, "the most that tensors had")               \
    X(PEAK_1_BYTES, 11, "device.gathered_peak_bytes", BYTES, PEAK, "the most that gathered parameters had")  \
    X(PEAK_BYTES, 14, "device.peak_bytes", BYTES, PEAK, "the most that all holders had at once")             \
    X(CREATES, 15, "device.creates", COUNT, SUM, "times that the driver created memory")                     \
    X(MAPPED_BYTES, 16, "device.mapped_bytes", BYTES, LEVEL,                                                 \
      "mapped under addresses; a page under several counts for each")                                        \
    X(MAPS, 17, "device.maps", COUNT, SUM, "times that memory was mapped")                                   \
    X(UNMAPS, 18, "device.unmaps", COUNT, SUM, "times that memory was unmapped")                             \
    X(PRESSURES, 19, "device.pressures", COUNT, SUM, "times that pages lacked and others were asked")        \
    X(RECLAIMS, 20, "device.reclaims", COUNT, SUM, "times that a reclaimer was asked")                       \
    X(OOMS_AVOIDED, 21, "device.ooms_avoided", COUNT, SUM, "times that reclaimers found enough")             \
    X(OOMS, 22, "device.ooms", COUNT, SUM, "times that they did not")                                        \
    X(TOTAL_BYTES, 23, "device.total_bytes", BYTES, LEVEL, "the device's memory")                            \
    X(FREE_BYTES, 24, "device.free_bytes", BYTES, LEVEL, "free on the device when it was last asked")        \
    X(OTHERS_BYTES, 25, "device.others_bytes", BYTES, LEVEL,                                                 \
      "used on the device by then, but not from the pool: other processes, NCCL, the CUDA context")          \
    X(YIELDED_BYTES, 26, "device.yielded_bytes", BYTES, SUM, "given to the process's other allocator")       \
    X(HOST_PINS, 27, "host.pins", COUNT, SUM, "ranges of host memory that were page-locked")                 \
    X(HOST_UNPINS, 28, "host.unpins", COUNT, SUM, "of those, unlocked again")                                \
    X(HOST_PINNED_BYTES, 29, "host.pinned_bytes", BYTES, LEVEL, "page-locked now, by FCDP in this process")  \
    X(ASLEEP_BYTES, 30, "device.asleep_bytes", BYTES, LEVEL,                                                 \
      "pages of tensors that are away (fcdp.sleep), and come back when they wake")

/* None: alloc has no streams of its own. */
#define FCDP_ALLOC_STREAMS(X)

enum { FCDP_ALLOC_EVENTS(FCDP_AS_EVENT) };
enum { FCDP_ALLOC_CAUSES(FCDP_AS_CAUSE) };
enum { FCDP_ALLOC_COUNTERS(FCDP_AS_COUNTER) };

#endif
