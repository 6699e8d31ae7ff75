/* trace_events.h - what tiering says of its work. The rows' columns: base/trace_format.h.
 *
 * The object of each is a region. STATE follows every change of what the tiers hold of it; the same numbers
 * are in the table of objects (trace_format.h). All but STORE and LOAD are written under the tiering's
 * lock, so that a region's come in the order of what they say. STORE and LOAD are written once the device's
 * times are known, which may be after later events; `step` is the one in which they were enqueued.
 */
#ifndef FCDP_TIERING_TRACE_EVENTS_H
#define FCDP_TIERING_TRACE_EVENTS_H

#include "alloc/trace_events.h"

#define FCDP_TIERING_EVENTS(X)                                                                               \
    X(ACQUIRE, 32, "acquire", "slot", "the slot's bytes", "a use began: the region has device pages")        \
    X(RELEASE, 33, "release", "slot", "", "the use ended; the cause says what became of the pages")          \
    X(SLOT_PASSED, 34, "slot_passed", "slot", "object of the region that had it before, 0: none",            \
      "device pages that another region used pass on to this one, in stream order")                          \
    X(STORE, 35, "store", "spans, a mask", "", "`bytes` were copied from the device to the host")            \
    X(LOAD, 36, "load", "spans, a mask", "", "`bytes` were copied from the host to the device")              \
    X(EVICT, 37, "evict", "slot", "bytes that had to be written to the host first, 0: none",                 \
      "the region, kept on the device, gave its pages up; `bytes` is its size")                              \
    X(HOST_ALLOC, 38, "host_alloc", "offset in the node's host memory", "",                                  \
      "host memory of `bytes` is the region's (counted by the rank that allocates for its node)")            \
    X(HOST_FREE, 39, "host_free", "offset in the node's host memory", "",                                    \
      "host memory of `bytes` went back")                                                                    \
    X(INVALIDATE, 40, "invalidate", "spans, a mask", "", "the spans' copies mean nothing any more")          \
    X(STATE, 41, "state", "bytes valid on the device", "bytes valid on the host, or in a file (the cause)",  \
      "the region is so now: `bytes` of device pages are its own; flags >> FCDP_TRACE_STATE_SHIFT is its "   \
      "FCDP_OBJECT_... mask")                                                                                \
    X(REGION_MAP, 42, "region_map", "slot", "", "the region's addresses were mapped onto a slot's pages")    \
    X(REGION_UNMAP, 43, "region_unmap", "slot", "", "and were unmapped from them")                           \
    X(SLOT_MAKE, 44, "slot_make", "slot", "", "a slot of `bytes` was made, for this region first")           \
    X(SLOT_DISSOLVE, 45, "slot_dissolve", "slot", "", "a free slot of `bytes` went back to the pool")        \
    X(FILL, 46, "fill", "spans, a mask", "their new epoch",                                                  \
      "new content begins: what the tiers had of the spans is replaced")                                     \
    X(REGION_CREATE, 47, "region_create", "device address", "", "a region of `bytes` began its life")        \
    X(REGION_DESTROY, 48, "region_destroy", "device address", "", "and ended it")                            \
    X(SPILL_WRITE, 49, "spill_write", "an errno, 0: it was written", "",                                     \
      "this rank's slice of a span, of `bytes`, was written to FCDP_SPILL_DIR")                              \
    X(SPILL_READ, 50, "spill_read", "an errno, 0: it is what was written", "",                               \
      "it was read from there, for a load or ahead of one")                                                  \
    X(HOST_MAP, 51, "host_map", "NUMA node", "",                                                             \
      "host memory of `bytes` is under the region's device addresses, for its life (FCDP_HOST_MAP)")

/* Of RELEASE: what became of the pages. Of EVICT: why. Of STATE: where b is, if not in the
 * node's shared host memory. */
#define FCDP_TIERING_CAUSES(X)                                                                               \
    X(KEPT, 32, "kept", "the region stays on the device")                                                    \
    X(PASSED_ON, 33, "passed_on", "the pages are free for the next region")                                  \
    X(UNMAPPED, 34, "unmapped", "the pages are free, and the addresses are unmapped (exact mapping)")        \
    X(MEMORY_SHORT, 35, "memory_short", "pages were asked for and there were no others")                     \
    X(IN_FILE, 36, "in_file", "what the region has is in a file (FCDP_SPILL_DIR), and not in host memory")   \
    X(MAPPED, 37, "mapped", "the region's own pages are host memory (FCDP_HOST_MAP)")

#define FCDP_TIERING_COUNTERS(X)                                                                             \
    X(H2D_BYTES, 32, "moves.h2d_bytes", BYTES, SUM, "copies from the host that were enqueued")               \
    X(D2H_BYTES, 33, "moves.d2h_bytes", BYTES, SUM, "copies to the host that were enqueued")                 \
    X(STORES, 34, "moves.stores", COUNT, SUM, "stores to the host")                                          \
    X(SLICE_LOADS, 35, "moves.slice_loads", COUNT, SUM, "loads of this rank's slice of a span")              \
    X(WHOLE_LOADS, 36, "moves.whole_loads", COUNT, SUM, "loads of a whole span")                             \
    X(EVICTIONS, 37, "moves.evictions", COUNT, SUM, "regions evicted from the device")                       \
    X(REGION_MAPS, 38, "moves.maps", COUNT, SUM, "times that a region was mapped onto a slot")               \
    X(MEMORY_WAITS, 39, "moves.memory_waits", COUNT, SUM, "times that the host waited for pages")            \
    X(REGIONS, 40, "regions.count", COUNT, LEVEL, "regions that live")                                       \
    X(REGION_BYTES, 41, "regions.bytes", BYTES, LEVEL, "their size")                                         \
    X(ACQUIRED_BYTES, 42, "regions.in_use_bytes", BYTES, LEVEL, "of those in use now")                       \
    X(KEPT_BYTES, 43, "regions.kept_bytes", BYTES, LEVEL, "of those kept on the device between uses")        \
    X(SLOTS, 44, "slots.count", COUNT, LEVEL, "slots")                                                       \
    X(SLOT_BYTES, 45, "slots.bytes", BYTES, LEVEL, "their device pages")                                     \
    X(HOST_BYTES, 46, "host.bytes", BYTES, LEVEL, "the node's host memory in use, of all its ranks")         \
    X(HOST_PEAK_BYTES, 47, "host.peak_bytes", BYTES, PEAK, "the most of it")                                 \
    X(HOST_BUDGET_BYTES, 48, "host.budget_bytes", BYTES, LEVEL, "its budget (FCDP_HOST_BUDGET)")             \
    X(MEMORY_WAIT_NS, 49, "moves.memory_wait_ns", NS, SUM, "time of moves.memory_waits")                     \
    X(PLANS, 50, "moves.plans", COUNT, SUM, "plans of what to keep (FCDP_POLICY=next-use)")                  \
    X(SURPRISES, 51, "moves.surprises", COUNT, SUM, "uses that a plan did not expect, which ended it")       \
    X(HOST_NEAR_BYTES, 52, "host.near_bytes", BYTES, SUM,                                                    \
      "of this rank's slices, or, with several copies, of the one that it reads, pages that came from its "  \
      "device's NUMA node (0 where there is one node)")                                                      \
    X(HOST_FAR_BYTES, 53, "host.far_bytes", BYTES, SUM, "and from others")                                   \
    X(BOUND_CPUS, 54, "host.bound_cpus", COUNT, LEVEL,                                                       \
      "CPUs to which threads are bound (FCDP_PIN_CPU); 0: none")                                             \
    X(SPILL_BYTES, 55, "spill.bytes", BYTES, LEVEL, "this rank's slices that live in FCDP_SPILL_DIR")        \
    X(SPILL_WRITTEN_BYTES, 56, "spill.written_bytes", BYTES, SUM, "slices written there")                    \
    X(SPILL_READ_BYTES, 57, "spill.read_bytes", BYTES, SUM, "slices read from there")                        \
    X(SPILL_FAILURES, 58, "spill.failures", COUNT, SUM,                                                      \
      "slices that could not be written, or not be read as they were written")                               \
    X(SPILL_WAITS, 59, "spill.waits", COUNT, SUM, "times that the host waited for the disk")                 \
    X(SPILL_WAIT_NS, 60, "spill.wait_ns", NS, SUM, "time of spill.waits")                                    \
    X(HOST_COPIES, 61, "host.copies", COUNT, LEVEL, "copies in the node's host memory (FCDP_HOST_COPIES)")   \
    X(HOST_MAPPED_BYTES, 62, "host.mapped_bytes", BYTES, LEVEL,                                              \
      "this process's host pages under regions' device addresses (FCDP_HOST_MAP)")

/* Of events with FCDP_TRACE_ON_STREAM: what their `thread` is. */
#define FCDP_TIERING_STREAMS(X)                                                                              \
    X(TO_HOST, 32, "d2h", "copies from the device to the host")                                              \
    X(TO_DEVICE, 33, "h2d", "copies from the host to the device")

enum { FCDP_TIERING_EVENTS(FCDP_AS_EVENT) };
enum { FCDP_TIERING_CAUSES(FCDP_AS_CAUSE) };
enum { FCDP_TIERING_COUNTERS(FCDP_AS_COUNTER) };
enum { FCDP_TIERING_STREAMS(FCDP_AS_TRACK) };

#endif
