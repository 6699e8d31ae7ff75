"""A trace's file, opened for a subcommand."""

from __future__ import annotations

import argparse
import sys

from fcdp_memtrace import _trace


def add_file(parser: argparse.ArgumentParser, name: str = "file", metavar: str = "FILE") -> None:
    parser.add_argument(name, metavar=metavar, help="a trace, as fcdp-memtrace record writes it")


class TraceFile:
    """Opens `path`; raises Error where it is no trace that this program reads."""

    def __init__(self, path: str):
        self.path, self.handle = path, _trace.file_open(path)
        self.processes = _trace.file_processes(self.handle)

    @property
    def summary(self) -> dict:
        """Its notes are those of now: reading chunks finds more."""
        return _trace.file_summary(self.handle)

    def warn(self) -> None:
        """What of the file could not be read, on stderr."""
        for note in self.summary["notes"]:
            print(f"fcdp-memtrace: {self.path}: {note}", file=sys.stderr)
        lost = sum(process["lost"] for process in self.processes)
        if lost:
            print(
                f"fcdp-memtrace: {self.path}: {lost} events were lost: overwritten before they were recorded "
                "(FCDP_TRACE_BUFFER); sums of events lack them, counters do not",
                file=sys.stderr,
            )
