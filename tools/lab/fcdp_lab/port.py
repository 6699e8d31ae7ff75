"""A port at which the ranks of a job on this machine may meet."""

from __future__ import annotations

import errno
import pathlib
import random
import socket

RANGE = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST, N_WANTED, ATTEMPTS = 1024, 1000, 100  # those below are for services


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def free_port() -> int:
    """A free port outside the range that the kernel chooses from, if that leaves enough ports: it may give a port of
    its range to any other connection before this one is used."""
    try:
        chosen_from = int(RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        chosen_from = LOWEST
    if chosen_from - LOWEST >= N_WANTED:
        for _ in range(ATTEMPTS):
            port = random.SystemRandom().randrange(LOWEST, chosen_from)
            if _is_free(port):
                return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
