"""A job that memtrace_synthetic (tools/memtrace/synthetic.c) plays, for tests of what attaches to live ones."""

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOBODY = 65534  # another user, without files


class Job:
    """A job that memtrace_synthetic plays: it does what it is told, and nothing in between."""

    def __init__(self, program, *options, **how):
        self.process = subprocess.Popen(
            [program, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, **how
        )
        self.pids = [int(word) for word in self.process.stdout.readline().split()[1:]]
        self._answered()

    def _answered(self):
        answer = self.process.stdout.readline()
        assert answer == "ok\n", answer

    def tell(self, *commands):
        for command in commands:
            self.process.stdin.write(command + "\n")
            self._answered()

    def end(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


def build(program):
    """With the system's compiler, which takes a second: no build folder has to be there."""
    source = ROOT / "tools" / "memtrace" / "synthetic.c"
    options = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", f"-I{ROOT}"]
    subprocess.run(["cc", *options, str(source), "-o", str(program)], check=True)
