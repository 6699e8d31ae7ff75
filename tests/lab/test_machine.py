"""That the machine was busy with other work is measured, and said."""

import os
import subprocess
import sys

import pytest

from fcdp_lab import machine, report

TICK = os.sysconf("SC_CLK_TCK")


def _stat(seconds, idle=1000, interrupts=77, **cpus):
    """/proc/stat with so many busy seconds on the first CPU that this process may use."""
    cpu = min(os.sched_getaffinity(0))
    ticks = int(seconds * TICK)
    lines = ["cpu  9 9 9 9 9 9 9 9 0 0", f"cpu{cpu} {ticks} 0 0 {idle} 5 {interrupts} {interrupts} 0 0 0"]
    return "\n".join([*lines, f"cpu{cpu + 4096} 999999 0 0 0 0 0 0 0 0 0", "intr 1 2 3"])


def _watch(*readings):
    """A watch that sees these texts of /proc/stat, two seconds apart."""
    clock = iter([10.0, 12.0])
    texts = iter(readings)
    return machine.Watch(read_stat=lambda: next(texts), clock=lambda: next(clock))


def test_others_are_what_is_busy_less_what_the_run_used():
    """On the lab's CPUs, without interrupts; a child that was waited for is the run's own."""
    watch = _watch(_stat(100), _stat(103, interrupts=10**6))
    before = machine.own_s()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-I", "-S", "-c", burn], check=True)
    others = watch.others_cpus()
    assert 0.3 <= machine.own_s() - before
    assert others == pytest.approx((3 - (machine.own_s() - before)) / 2, abs=0.1)


def test_an_idle_machine_has_no_others_and_a_silent_kernel_says_nothing():
    assert _watch(_stat(100), _stat(100 + 2 / TICK)).others_cpus() <= 0.01
    assert _watch("", "").others_cpus() is None


@pytest.mark.parametrize(("fsdp", "fcdp", "is_busy"), [(0.05, 0.1, False), (0.9, 0.1, True), (None, None, False)])
def test_a_busy_machine_is_said_in_one_line_with_the_figure(fsdp, fcdp, is_busy):
    modes = [{"name": "fsdp", "others_cpus": fsdp}, {"name": "fcdp", "others_cpus": fcdp}]
    line = report.busy({"machine": {"cpus": 2}, "modes": modes})
    assert bool(line) == is_busy
    if is_busy:
        assert "other programs used 0.9 of its 2 CPUs during fsdp, 0.1 during fcdp" in line and "\n" not in line
