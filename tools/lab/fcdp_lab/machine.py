"""How busy the machine was with other work while a run lasted, since that is part of its step times.

    others = (busy time of the CPUs that the lab may use - CPU time of the lab and of all that it started) / wall time

Time in interrupts is left out: they carry the run's own traffic. Time that a hypervisor took is others'.
"""

import os
import resource
import time

BUSY_SHARE = 0.1  # of the CPUs; an idle machine's own daemons and kernel threads stay below


def busy_s(stat, cpus):
    """CPU seconds in user and kernel mode, and stolen ones, of these CPUs since the start: from /proc/stat's text."""
    names = {f"cpu{cpu}" for cpu in cpus}
    ticks = 0
    for name, *fields in filter(None, (line.split() for line in stat.splitlines())):
        if name in names:
            user, nice, system, _, _, _, _, steal = (int(field) for field in [*fields, *"00000000"][:8])
            ticks += user + nice + system + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def own_s():
    """CPU seconds of this process and of all descendants that have been waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _read_stat():
    with open("/proc/stat") as f:
        return f.read()


class Watch:
    """Measures from its creation to others_cpus(), which needs all processes of the run to have been waited for."""

    def __init__(self, read_stat=_read_stat, clock=time.monotonic):
        self._read_stat, self._clock = read_stat, clock
        self._cpus = os.sched_getaffinity(0)
        self._begun = self._now()

    def _now(self):
        return self._clock(), busy_s(self._read_stat(), self._cpus), own_s()

    def others_cpus(self):
        """The mean number of CPUs that other programs used; None: /proc/stat has no times."""
        wall, busy, own = (now - before for now, before in zip(self._now(), self._begun))
        return max(0.0, busy - own) / wall if wall > 0 and busy > 0 else None
