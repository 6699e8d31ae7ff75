"""A program in a terminal that tests look at and type into: a tmux server of its own."""

import os
import pathlib
import re
import select
import shlex
import subprocess
import time

DEADLINE_S = 120
NOT_THE_TERMINALS = ("TMUX", "NO_COLOR", "COLUMNS", "LINES")  # of this process's own; curses goes by the last two
DRAWN = re.compile(r"\? help$|\(Enter keeps, Esc ends\)$|exit status \d+|is too small")


class Terminal:
    def __init__(self, folder, command, width=80, height=24, **environment):
        self.socket = str(folder / "tmux")
        settings = {"LC_ALL": "C.UTF-8", "ESCDELAY": "25"} | environment
        shown = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
        program = " ".join(shlex.quote(str(word)) for word in command)
        log = shlex.quote(str(folder / "stderr"))
        # What it has written stays to be read when the program is gone, and how it went. Ctrl-C is for the program.
        script = f'trap : INT; {shown} {program} 2>{log}; echo "exit status $?"; cat {log}; read _'
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height), script)
        fifo = folder / "output"
        os.mkfifo(fifo)
        self.output = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
        self._tmux("pipe-pane", f"cat > {shlex.quote(str(fifo))}")

    def _tmux(self, *arguments):
        clean = {name: value for name, value in os.environ.items() if name not in NOT_THE_TERMINALS}
        done = subprocess.run(
            ["tmux", "-S", self.socket, *arguments], capture_output=True, text=True, env=clean, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def screen(self, colors=False):
        """Its lines, without trailing spaces."""
        return self._tmux("capture-pane", "-p", *(["-e"] if colors else [])).rstrip("\n")

    def keys(self, *keys):
        for key in keys:
            self._tmux("send-keys", key)

    def type(self, text):
        self._tmux("send-keys", "-l", text)

    def resize(self, width, height):
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def wait(self, condition, what):
        """The first screen for which the condition holds; looks whenever the program has written something."""
        end = time.monotonic() + DEADLINE_S
        while True:
            screen = self.screen()
            if condition(screen):
                return screen
            assert time.monotonic() < end, f"{what} did not come within {DEADLINE_S} s; the screen:\n{screen}"
            if select.select([self.output], [], [], 0.2)[0]:  # at times, tmux shows what it wrote a little later
                os.read(self.output, 1 << 16)

    def wait_for(self, *patterns):
        """The first screen that has all of them, and a last line. A change is drawn from the top down: what a test asserts
        of the lines below a pattern, in a screen that has changed, is to be a pattern too."""
        return self.wait(
            lambda screen: DRAWN.search(screen) and all(re.search(p, screen) for p in patterns),
            f"a screen with {patterns}",
        )

    def wait_without(self, pattern):
        return self.wait(lambda screen: not re.search(pattern, screen), f"a screen without /{pattern}/")

    def pid_of(self, word):
        """Of the program that runs in it: the shell's child with this word in its command line."""
        shell = self._tmux("list-panes", "-F", "#{pane_pid}").strip()
        for child in pathlib.Path(f"/proc/{shell}/task/{shell}/children").read_text().split():
            if word in pathlib.Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
        raise AssertionError(f"no child of {shell} has {word} in its command line")

    def close(self):
        subprocess.run(["tmux", "-S", self.socket, "kill-server"], capture_output=True, timeout=60)
        os.close(self.output)
