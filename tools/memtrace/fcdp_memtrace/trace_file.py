"""A trace's file, opened for a subcommand."""

from __future__ import annotations

import argparse
import sys

from fcdp_memtrace import _trace


def add_file(parser: argparse.ArgumentParser, name: str = "file", metavar: str = "FILE") -> None:
    parser.add_argument(name, metavar=metavar, help="a trace, as fcdp-memtrace record writes it")


class TraceFile:
    """Opens `path`; raises Error if it is not a trace that this program reads."""

    def __init__(self, path: str):
        self.path, self.handle = path, _trace.file_open(path)
        self.processes = _trace.file_processes(self.handle)

    @property
    def summary(self) -> dict:
        """Its notes and unreadable bytes are those of now: reading chunks finds more."""
        return _trace.file_summary(self.handle)

    def warn_of_damage(self) -> int:
        """Says on stderr what of the file could not be read so far. The exit status: 1 where bytes were left out."""
        summary = self.summary
        for note in summary["notes"]:
            print(f"fcdp-memtrace: {self.path}: {note}", file=sys.stderr)
        if not summary["unreadable_bytes"]:
            return 0
        print(
            f"fcdp-memtrace: {self.path}: {summary['unreadable_bytes']} of {summary['bytes']} bytes could not be read, and are left "
            "out of what is shown. If this is a copy, copy it again; if its recorder was killed, the rest is lost",
            file=sys.stderr,
        )
        return 1

    def warn(self) -> int:
        """As warn_of_damage, and says how many events were lost: called once the file has been read."""
        status = self.warn_of_damage()
        lost = sum(process["lost"] for process in self.processes)
        if lost:
            print(
                f"fcdp-memtrace: {self.path}: {lost} events were lost: overwritten before they were recorded "
                "(FCDP_TRACE_BUFFER); sums of events lack them, counters do not",
                file=sys.stderr,
            )
        return status
