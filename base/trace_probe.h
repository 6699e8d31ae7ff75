/* trace_probe.h - a USDT probe: a nop, which bpftrace, perf or gdb can make a breakpoint of.
 *
 * A note in the library says where it is, with its arguments. An unused probe costs a nop.
 *
 * The note is the one that SystemTap's <sys/sdt.h> makes, whose header is not everywhere
 * (https://sourceware.org/systemtap/wiki/UserSpaceProbeImplementation). Elsewhere there is no probe.
 */
#ifndef FCDP_TRACE_PROBE_H
#define FCDP_TRACE_PROBE_H

#include <stdint.h>

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
/* fcdp:NAME with four unsigned 64-bit arguments, each in a register. */
#define FCDP_PROBE4(name, a, b, c, d)                                                                        \
    __asm__ volatile("990: nop\n"                                                                            \
                     ".pushsection .note.stapsdt, \"\", \"note\"\n"                                          \
                     ".balign 4\n"                                                                           \
                     ".4byte 992f - 991f, 994f - 993f, 3\n"                                                  \
                     "991: .asciz \"stapsdt\"\n"                                                             \
                     "992: .balign 4\n"                                                                      \
                     "993: .8byte 990b, _.stapsdt.base, 0\n"                                                 \
                     ".asciz \"fcdp\"\n"                                                                     \
                     ".asciz \"" #name "\"\n"                                                                \
                     ".asciz \"8@%0 8@%1 8@%2 8@%3\"\n"                                                      \
                     "994: .balign 4\n"                                                                      \
                     ".popsection\n"                                                                         \
                     ".ifndef _.stapsdt.base\n"                                                              \
                     ".pushsection .stapsdt.base, \"aG\", \"progbits\", .stapsdt.base, comdat\n"             \
                     ".weak _.stapsdt.base\n"                                                                \
                     ".hidden _.stapsdt.base\n"                                                              \
                     "_.stapsdt.base: .space 1\n"                                                            \
                     ".size _.stapsdt.base, 1\n"                                                             \
                     ".popsection\n"                                                                         \
                     ".endif\n" ::"r"((uint64_t)(a)),                                                        \
                     "r"((uint64_t)(b)), "r"((uint64_t)(c)), "r"((uint64_t)(d)))
#else
#define FCDP_PROBE4(name, a, b, c, d) ((void)(a), (void)(b), (void)(c), (void)(d))
#endif

#endif
