"""Draws a screen of `fcdp-memtrace top` as an SVG: python tools/memtrace/picture.py -o FILE [--pid PID] [--keys KEYS].

`top` runs in a terminal of tmux, so that the picture is what a user sees.
"""

import argparse
import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import rich.console
import rich.text


def tmux(socket, *arguments):
    command = ["tmux", "-S", socket, "-f", "/dev/null", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def screen_of(pid, width, height, keys, drawn, deadline_s):
    """The screen, with its colours as escape sequences, once `drawn` is on it and the keys have been pressed."""
    with tempfile.TemporaryDirectory() as folder:
        socket = os.path.join(folder, "tmux")
        job = f" --pid {pid}" if pid else ""
        top = f"TERM=screen-256color {sys.executable} -m fcdp_memtrace top{job}"
        tmux(socket, "new-session", "-d", "-x", str(width), "-y", str(height), top)
        try:
            end = time.monotonic() + deadline_s
            while not re.search(drawn, tmux(socket, "capture-pane", "-p").rstrip()):
                if time.monotonic() > end:
                    sys.exit(
                        f"{drawn!r} was not on the screen within {deadline_s} s:\n{tmux(socket, 'capture-pane', '-p')}"
                    )
                time.sleep(0.2)
            for key in keys:
                tmux(socket, "send-keys", key)
            time.sleep(2)  # of rates, and of what the keys asked for
            return tmux(socket, "capture-pane", "-p", "-e").rstrip("\n")
        finally:
            subprocess.run(["tmux", "-S", socket, "kill-server"], capture_output=True)


def draw(screen, width, height):
    console = rich.console.Console(
        record=True, width=width, height=height, file=io.StringIO(), force_terminal=True, color_system="256"
    )
    for line in (screen.split("\n") + [""] * height)[:height]:
        text = rich.text.Text.from_ansi(line)
        text.pad_right(max(0, width - text.cell_len))
        console.print(text, end="\n", no_wrap=True, soft_wrap=True)
    return console.export_svg(title="fcdp-memtrace top", unique_id="memtrace-top")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", required=True, metavar="FILE.svg")
    parser.add_argument("--pid", type=int, help="the job (default: any that runs)")
    parser.add_argument("--keys", default="", help="pressed before the picture is taken, as tmux names them: 'Down p'")
    parser.add_argument(
        "--wait-for", default="ms each", metavar="REGEX", help="on the screen, before (default: 'ms each')"
    )
    parser.add_argument("--size", default="96x24", help="columns x lines (default 96x24)")
    parser.add_argument("--deadline", type=float, default=300, metavar="S", help="for that to come (default 300)")
    args = parser.parse_args()
    width, height = (int(part) for part in args.size.split("x"))
    screen = screen_of(args.pid, width, height, args.keys.split(), args.wait_for, args.deadline)
    pathlib.Path(args.output).write_text(draw(screen, width, height))


if __name__ == "__main__":
    main()
