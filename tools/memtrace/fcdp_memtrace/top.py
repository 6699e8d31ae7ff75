"""fcdp-memtrace top: the live view, on a terminal or as JSON."""

from __future__ import annotations

import argparse
import contextlib
import curses
import json
import os
import signal
import sys
import termios
import time

from fcdp_memtrace import _trace, screen
from fcdp_memtrace.arguments import at_least
from fcdp_memtrace.screen import View

ABOUT = """\
Show live jobs: which regions are where, what moves, and what waits.

Finds the jobs of this user on this machine by itself, whenever they begin. Keys: ? lists them, q quits.
"""
HISTORY_BYTES = 64 << 20
WINDOW_S = 2.0  # over which rates are taken
FIND_S = 1.0  # between two looks for new processes
NOW = (1 << 64) - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--pid",
        type=at_least(1),
        metavar="PID",
        help="only the job that this process is of, or has started (torchrun's is one)",
    )
    add(
        "--interval",
        type=float,
        metavar="S",
        help="seconds between two looks (default 0.5); with --json: print again and again",
    )
    add("--json", action="store_true", help="print the state as one line of JSON and exit; in a loop with --interval")


class Jobs:
    """The jobs that are followed, and when to look for more."""

    def __init__(self, pid: int | None):
        self.model = _trace.top_create(HISTORY_BYTES)
        self.pid, self.scan, self.found_at = pid or 0, (0, 0), None

    def poll(self) -> None:
        now = time.monotonic()
        if self.found_at is None or now - self.found_at >= FIND_S:
            _, *self.scan = _trace.top_find(self.model, self.pid)
            self.found_at = now
        _trace.top_poll(self.model)

    def frame(self, pid: int, view: View) -> screen.Frame | None:
        at_ns = NOW if view.at_ns is None else view.at_ns
        return _trace.top_frame(self.model, pid, view.rank_pid, at_ns, view.at_peak, WINDOW_S)


# --- JSON -----------------------------------------------------------------------------------------------------------


def print_json(jobs: Jobs, interval: float | None) -> int:
    """Polls twice, since a rate needs two polls. Without a job it prints null and returns 1."""
    while True:
        jobs.poll()
        time.sleep(interval or 0.5)
        jobs.poll()
        frame = jobs.frame(0, View())
        if frame:
            frame["saved_bytes"] = frame["plain_bytes"] - frame["gather_bytes"]
        print(json.dumps(frame), flush=True)
        if interval is None:
            return 0 if frame else 1


# --- the terminal ---------------------------------------------------------------------------------------------------

# Style -> colour, and what stands for it without colours.
STYLES = {
    "plain": (None, curses.A_NORMAL),
    "bold": (None, curses.A_BOLD),
    "head": (None, curses.A_REVERSE),
    "selected": (None, curses.A_REVERSE),
    "match": (curses.COLOR_YELLOW, curses.A_UNDERLINE),
    "good": (curses.COLOR_GREEN, curses.A_BOLD),
    "warn": (curses.COLOR_YELLOW, curses.A_BOLD),
    "bad": (curses.COLOR_RED, curses.A_REVERSE),
    "device": (curses.COLOR_GREEN, curses.A_NORMAL),
    "both": (curses.COLOR_CYAN, curses.A_NORMAL),
    "host": (curses.COLOR_BLUE, curses.A_NORMAL),
    "mapped": (curses.COLOR_BLUE, curses.A_BOLD),
    "file": (curses.COLOR_MAGENTA, curses.A_NORMAL),
    "nowhere": (None, curses.A_DIM),
}


def attributes() -> dict[str, int]:
    """NO_COLOR (no-color.org) and terminals without colours get the second of each, and are sent no colour at all."""
    if os.environ.get("NO_COLOR") or curses.tigetnum("colors") < 8:
        return {style: plain for style, (_, plain) in STYLES.items()}
    curses.start_color()
    curses.use_default_colors()
    for color in range(8):
        curses.init_pair(color + 1, color, -1)
    return {style: plain if color is None else curses.color_pair(color + 1) for style, (color, plain) in STYLES.items()}


class Top:
    def __init__(self, window, jobs: Jobs, interval: float):
        self.window, self.jobs, self.interval = window, jobs, interval
        self.view = View()
        self.pid = 0  # of the job that is shown; 0: the latest
        self.frame: screen.Frame | None = None
        self.attributes = attributes()

    def run(self) -> None:
        next_poll = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= next_poll:
                self.jobs.poll()
                next_poll = now + self.interval
            self.frame = self.jobs.frame(self.pid, self.view)
            self.draw()
            self.window.timeout(max(1, int(1000 * (next_poll - time.monotonic()))))
            key = self.window.getch()
            if key == curses.KEY_RESIZE:
                curses.update_lines_cols()
                self.window.erase()
            elif key == -1 and terminal_is_gone():
                return  # SIGHUP may be ignored: under nohup, or as a namespace's first process
            elif key != -1 and not self.press(key):
                return

    def draw(self) -> None:
        height, width = self.window.getmaxyx()
        self.window.erase()
        lines = screen.render(self.frame, self.view, width, height, self.jobs.scan, self.jobs.pid)
        for y, line in enumerate(lines[:height]):
            x = 0
            for style, text in line:
                with contextlib.suppress(curses.error):  # the last column of the last line: curses moves on, and cannot
                    self.window.addstr(y, x, text, self.attributes[style])
                x += len(text)
        self.window.refresh()

    # --- keys ---

    def press(self, key: int) -> bool:
        """False: quit."""
        view = self.view
        view.message = ""
        if view.typing:
            self.type(key)
        elif view.help:
            view.help = False
            return key != ord("q")
        elif key == ord("q"):
            return False
        elif key in KEYS:
            KEYS[key](self)
        return True

    def type(self, key: int) -> None:
        view = self.view
        if key in (curses.KEY_ENTER, 10, 13):
            view.typing = False
        elif key == 27:
            view.typing, view.search = False, ""
        elif key in (curses.KEY_BACKSPACE, 8, 127):
            view.search = view.search[:-1]
        elif 32 <= key < 127:
            view.search += chr(key)
        if view.search:
            self.find(0)

    def find(self, step: int) -> None:
        """To the next row that matches, beginning `step` after the chosen one."""
        rows = self.view.rows(self.frame) if self.frame else []
        names = [row["name"] for row in rows]
        at = names.index(self.view.selected) if self.view.selected in names else 0
        for i in range(len(rows)):
            row = rows[(at + step + (i if step >= 0 else -i)) % len(rows)]
            if self.view.matches(row):
                self.view.selected = row["name"]
                return
        self.view.message = f"no region has '{self.view.search}' in its name"

    def search(self) -> None:
        self.view.typing, self.view.search = True, ""

    def end_search(self) -> None:
        self.view.search = ""

    def move(self, step: int) -> None:
        rows = self.view.rows(self.frame) if self.frame else []
        names = [row["name"] for row in rows]
        if names:
            at = names.index(self.view.selected) if self.view.selected in names else 0
            self.view.selected = names[max(0, min(len(names) - 1, at + step))]

    def page(self) -> int:
        return max(1, self.window.getmaxyx()[0] - 10)

    def choose(self, name: str, among: dict) -> None:
        names = list(among)
        setattr(self.view, name, names[(names.index(getattr(self.view, name)) + 1) % len(names)])

    def turn(self) -> None:
        self.view.reverse = not self.view.reverse

    def help(self) -> None:
        self.view.help = True

    def rank(self, step: int) -> None:
        """All ranks come before the first and after the last."""
        if self.frame:
            pids = [0, *(rank["pid"] for rank in self.frame["ranks"])]
            at = pids.index(self.view.rank_pid) if self.view.rank_pid in pids else 0
            self.view.rank_pid = pids[(at + step) % len(pids)]

    def all_ranks(self) -> None:
        self.view.rank_pid = 0

    def job(self) -> None:
        pids = _trace.top_jobs(self.jobs.model)
        if not self.frame or len(pids) < 2:
            self.view.message = "there is no other job"
            return
        self.pid = pids[(self.frame["job"] + 1) % len(pids)]
        self.live()
        self.view.rank_pid = 0

    # --- time ---

    def live(self) -> None:
        self.view.at_ns, self.view.at_peak = None, False

    def stop_at(self, at_ns: int) -> None:
        """Keeps showing the same job when another one begins."""
        self.pid = self.pid or self.frame["ranks"][0]["pid"]
        self.view.at_ns, self.view.at_peak = at_ns, False

    def pause(self) -> None:
        if self.view.at_ns is not None or self.view.at_peak:
            self.live()
        elif self.frame:
            self.stop_at(self.frame["at_ns"])

    def back(self, seconds: float) -> None:
        if not self.frame:
            return
        at_ns = self.frame["at_ns"] - max(1, int(seconds * 1e9))
        if at_ns < self.frame["oldest_ns"]:
            self.view.message = "the history begins here"
        self.stop_at(max(at_ns, self.frame["oldest_ns"]))

    def forward(self, seconds: float) -> None:
        if not self.frame or (self.view.at_ns is None and not self.view.at_peak):
            return
        at_ns = self.frame["at_ns"] + int(max(seconds, 1.01 * self.interval) * 1e9)
        if at_ns > self.frame["newest_ns"]:
            self.live()
        else:
            self.stop_at(at_ns)

    def peak(self) -> None:
        if not self.frame:
            return
        if not any(rank["peak_held_bytes"] for rank in self.frame["ranks"]):
            self.view.message = "no device memory was held yet"
            return
        self.stop_at(self.frame["at_ns"])
        self.view.at_peak = True


KEYS = {
    ord("/"): Top.search,
    27: Top.end_search,
    ord("n"): lambda top: top.find(1),
    ord("N"): lambda top: top.find(-1),
    curses.KEY_UP: lambda top: top.move(-1),
    curses.KEY_DOWN: lambda top: top.move(1),
    curses.KEY_PPAGE: lambda top: top.move(-top.page()),
    curses.KEY_NPAGE: lambda top: top.move(top.page()),
    curses.KEY_HOME: lambda top: top.move(-(1 << 20)),
    curses.KEY_END: lambda top: top.move(1 << 20),
    ord("s"): lambda top: top.choose("sort", screen.SORTS),
    ord("S"): Top.turn,
    ord("f"): lambda top: top.choose("filter", screen.FILTERS),
    ord("r"): lambda top: top.rank(1),
    ord("R"): lambda top: top.rank(-1),
    ord("a"): Top.all_ranks,
    ord("j"): Top.job,
    ord(" "): Top.pause,
    ord("l"): Top.live,
    ord("p"): Top.peak,
    curses.KEY_LEFT: lambda top: top.back(0),
    curses.KEY_RIGHT: lambda top: top.forward(0),
    ord("["): lambda top: top.back(10),
    ord("]"): lambda top: top.forward(10),
    ord("?"): Top.help,
    ord("h"): Top.help,
}


def on_terminal(jobs: Jobs, interval: float) -> None:
    """As curses.wrapper, which would set colours in any case. The terminal is as it was, however this ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    window = curses.initscr()
    try:
        curses.noecho()
        curses.cbreak()
        window.keypad(True)
        with contextlib.suppress(curses.error):  # a terminal that cannot hide it
            curses.curs_set(0)
        Top(window, jobs, interval).run()
    finally:
        curses.endwin()


def may_look_at(pid: int) -> bool:
    """Does the process exist, and is it this user's? Then its job may still begin."""
    try:
        return bool(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def terminal_is_gone() -> bool:
    try:
        termios.tcgetattr(sys.stdin.fileno())
    except termios.error:
        return True
    return False


def run(args: argparse.Namespace) -> int:
    if args.interval is not None and not 0.05 <= args.interval <= 3600:
        raise _trace.Error(f"--interval must be 0.05 to 3600 seconds, not {args.interval:g}")
    jobs = Jobs(args.pid)
    if (
        args.pid is not None
        and not _trace.top_find(jobs.model, args.pid)[0]
        and (args.json or not may_look_at(args.pid))
    ):
        _trace.top_attach(jobs.model, args.pid)  # says why not
    if args.json:
        return print_json(jobs, args.interval)
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise _trace.Error("top needs a terminal; --json prints what it shows")
    os.environ.setdefault("ESCDELAY", "25")  # Esc alone takes effect at once
    try:
        curses.setupterm()
    except curses.error as error:
        raise _trace.Error(
            f"the terminal TERM={os.environ.get('TERM', '')} is not known here ({error}); try TERM=vt100"
        ) from None
    on_terminal(jobs, args.interval or 0.5)
    return 0
