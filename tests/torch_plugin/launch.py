"""Starting jobs of several ranks and seeing to it that nothing of them is left: every process carries a tag in its
environment, by which it is found and ended even where torchrun gave it a session of its own."""

import contextlib
import json
import os
import pathlib
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid

import pytest

from described import describe
from fcdp_lab.port import free_port

HERE = pathlib.Path(__file__).resolve().parent
WORLD = 4
GRACE_S = 5  # for the other ranks of a job of which one has failed
TAG_NAME = "TEST_JOB_TAG"  # not FCDP_*: FCDP refuses options that it does not know


def environment(tag, tmp, extra=None):
    """A clean environment: no FCDP option of the caller's reaches a job unless the test says so."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FCDP", "TORCHELASTIC", "NCCL_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    env.update(
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        TMPDIR=str(tmp),
        PYTHONFAULTHANDLER="1",
        PYTHONUNBUFFERED="1",
        TORCHINDUCTOR_CACHE_DIR=str(tmp / "inductor"),
    )
    env[TAG_NAME] = tag
    env.update(extra or {})
    return env


def build_sim():
    """The simulated device (sim/torch), against the torch that is there; skips where no compiler is."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs g++ or clang++: the simulated device is compiled against this torch")
    command = [sys.executable, HERE.parents[1] / "sim" / "torch" / "torch_sim" / "build.py"]
    build = subprocess.run(command, capture_output=True, text=True)
    assert build.returncode == 0, build.stderr[-8000:]


def new_tag():
    return uuid.uuid4().hex


def tagged(tag):
    """The live processes of a job, by the tag in their environment."""
    needle = f"{TAG_NAME}={tag}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as f:
                if needle not in f.read().split(b"\0"):
                    continue
            with open(f"/proc/{entry}/stat") as f:
                if f.read().rsplit(")", 1)[1].split()[0] != "Z":
                    found.append(int(entry))
        except OSError:
            continue
    return found


def lives_on(tag, patience_s=5):
    """Those of a job that do not end at once, as what has just been killed does. By pidfd, so that no time is guessed."""
    left = []
    for pid in tagged(tag):
        with contextlib.suppress(ProcessLookupError):
            ended = os.pidfd_open(pid)
            if not select.select([ended], [], [], patience_s)[0]:
                left.append(pid)
            os.close(ended)
    return left


def signal_all(tag, signum):
    for pid in tagged(tag):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def end(tag, process=None, deadline_s=10):
    signal_all(tag, signal.SIGKILL)
    if process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(deadline_s)


class Job:
    """What a launch left behind: exit code, output, and one JSON for each rank."""

    def __init__(self, returncode, output, timed_out, ranks, seconds):
        self.returncode, self.output, self.timed_out = returncode, output, timed_out
        self.ranks, self.seconds = ranks, seconds


def wait_while_it_moves(ended, tmp, stall_s):
    """Waits until `ended()`, which itself may wait for a second.  False where no rank has written a result for
    `stall_s`: a loaded machine is slow, not hung."""
    moved = time.monotonic()
    seen = None
    while not ended():
        now = sorted((p.name, p.stat().st_mtime_ns) for p in tmp.glob("rank*.json*"))
        if now != seen:
            seen, moved = now, time.monotonic()
        if time.monotonic() - moved > stall_s:
            return False
    return True


def ends_within(process, timeout_s):
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
        return True
    return False


def torchrun(script, arguments, tmp, env=None, n_ranks=WORLD, stall_s=120):
    tmp.mkdir(parents=True, exist_ok=True)
    tag = new_tag()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "1",
        "--nproc-per-node",
        str(n_ranks),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--rdzv-id",
        tag,
        "--local-addr",
        "127.0.0.1",
        str(script),
        *map(str, arguments),
    ]
    began = time.monotonic()
    log = tmp / "output.txt"
    with open(log, "wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=HERE,
            env=environment(tag, tmp, env),
            start_new_session=True,
        )
        timed_out = True
        try:
            timed_out = not wait_while_it_moves(lambda: ends_within(process, 1), tmp, stall_s)
            if timed_out:
                signal_all(tag, signal.SIGUSR1)  # faulthandler writes where every thread stands
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(2)
        finally:
            end(tag, process)
    return Job(process.returncode, log.read_text(errors="replace"), timed_out, ranks_in(tmp), time.monotonic() - began)


def ranks_in(tmp):
    """What the ranks of a job wrote there."""
    ranks = []
    for path in sorted(tmp.glob("rank*.json"), key=lambda p: int(p.stem[4:])):
        ranks.append(json.loads(path.read_text()))
    for path in sorted(tmp.glob("rank*.jsonl"), key=lambda p: int(p.stem[4:])):
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if lines:  # the head, then [name, result] of each case
            ranks.append({"head": lines[0], "cases": dict(lines[1:])})
    return ranks


def run_cases(names, tmp, env=None, max_launches=12, warm=True):
    """Runs the cases in one job; where one of them breaks the job, the rest go on in another.  Returns, for each
    case, a list of the ranks' results, and all the jobs.  `warm`: of ranks that are forked (warm.py), else of
    torchrun's."""
    results, jobs, left = {}, [], list(names)
    while left and len(jobs) < max_launches:
        folder = tmp / f"launch{len(jobs)}"
        folder.mkdir(parents=True)
        (folder / "cases.txt").write_text("\n".join(left))
        arguments = ["--out", folder, "--cases", folder / "cases.txt"]
        job = (forked if warm else torchrun)(HERE / "worker.py", arguments, folder, env)
        jobs.append(job)
        done = [name for name in left if len(job.ranks) == WORLD and all(name in rank["cases"] for rank in job.ranks)]
        for name in done:
            results[name] = [rank["cases"][name] for rank in job.ranks]
        clean = job.returncode == 0 and len(done) == len(left)
        if clean:
            return results, jobs
        broken_inside = bool(done) and any(r["error"] for r in results[done[-1]])
        if not broken_inside and len(done) < len(left):
            # It died or hung inside the case after the last one that all ranks finished.
            name = left[len(done)]
            what = "hung" if job.timed_out else f"ended with {job.returncode}"
            results[name] = [
                {"events": [], "marks": [], "error": f"the job {what} in this case", "traceback": job.output[-6000:]}
            ] * WORLD
            done.append(name)
        left = [name for name in left if name not in results]
    for name in left:
        results[name] = [
            {"events": [], "marks": [], "error": f"not run: {max_launches} launches broke before it", "traceback": ""}
        ] * WORLD
    return results, jobs


def first_difference(expected, got):
    """Where two lists of ranks' results differ first, in words; None where they are equal bit for bit."""
    for rank, (one, other) in enumerate(zip(expected, got)):
        if one.get("unsupported") != other.get("unsupported"):
            return f"rank {rank}: unsupported differs: {one.get('unsupported')!r}, {other.get('unsupported')!r}"
        for i, (a, b) in enumerate(zip(one["events"], other["events"])):
            if a[:2] != b[:2]:
                return (
                    f"rank {rank}, event {i}: {a[0]} = {a[2]!r} ({a[1]}) expected, {b[0]} = {b[2]!r} ({b[1]}) found"
                    + (f"; then raised {other['error']}" if other["error"] else "")
                )
        if (one["error"] or "").split(":")[0] != (other["error"] or "").split(":")[0]:
            return f"rank {rank}: error {one['error']!r} expected, {other['error']!r} found\n{other.get('traceback') or ''}"
        if len(one["events"]) != len(other["events"]):
            return f"rank {rank}: {len(one['events'])} events expected, {len(other['events'])} found"
    if len(expected) != len(got):
        return f"{len(expected)} ranks expected, {len(got)} found"
    return None


class WarmProcess:
    """A rank forked from a process of warm.py's, one for each choice of modules that it is to have imported. Such a
    process is started when it is first asked for, and ends with this one."""

    orders = {}

    def __init__(self, script, arguments, env, out, err, preload=()):
        order = {
            "tag_name": TAG_NAME,
            "env": env,
            "argv": [str(script), *map(str, arguments)],
            "stdin": os.devnull,
            "out": str(out),
            "err": str(err),
        }
        self.said, theirs = os.pipe()
        socket.send_fds(self.forker(tuple(preload)), [json.dumps(order).encode()], [theirs])
        os.close(theirs)
        self.returncode, self.text = None, b""

    @classmethod
    def forker(cls, preload):
        if preload not in cls.orders:
            cls.orders[preload], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if preload:  # forked off the one that has torch
                socket.send_fds(cls.forker(()), [json.dumps({"preload": preload}).encode()], [theirs.fileno()])
            else:
                subprocess.Popen(
                    [sys.executable, HERE / "warm.py", str(theirs.fileno())],
                    cwd=HERE,
                    env=environment("0" * len(new_tag()), HERE),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            theirs.close()
        return cls.orders[preload]

    def wait(self, timeout):
        deadline = time.monotonic() + timeout
        while self.returncode is None:
            if not select.select([self.said], [], [], max(0, deadline - time.monotonic()))[0]:
                raise subprocess.TimeoutExpired("a warm rank", timeout)
            more = os.read(self.said, 100)
            assert more, "warm.py has ended"
            self.text += more
            lines = self.text.split(b"\n")
            if len(lines) > 2:
                self.returncode = int(lines[1])
                os.close(self.said)
        return self.returncode


def may_be_warm(env):
    """Whether nothing is asked for that an interpreter reads at its start alone."""
    return not any(name.startswith(("PYTHON", "LD_")) for name in env or {})


class Rank:
    def __init__(self, process, out, err):
        self.process, self.out_path, self.err_path = process, out, err

    @property
    def returncode(self):
        return self.process.returncode

    @property
    def out(self):
        return self.out_path.read_text(errors="replace")

    @property
    def err(self):
        return self.err_path.read_text(errors="replace")


def machine_of(env, tmp):
    """Of a job that keeps a copy in each NUMA node: a machine with two, and half of this one's CPUs in each."""
    if (env or {}).get("FCDP_HOST_COPIES") != "numa" or "FCDP_SIM_ROOT" in env:
        return {}
    cpus = sorted(os.sched_getaffinity(0))
    return {"FCDP_SIM_ROOT": str(describe(tmp / "machine", cpus[::2], cpus[1::2]))}


class Spawned:
    """Ranks started without torchrun, whose own killing of the survivors would hide what they have to say.
    `warm`: forked from a process that has imported torch (warm.py), where what the start itself does is not
    what is tried. `preload`: further modules that it has imported."""

    def __init__(
        self,
        script,
        arguments,
        tmp,
        env=None,
        rank_env=None,
        n_ranks=WORLD,
        warm=False,
        preload=(),
    ):
        tmp.mkdir(parents=True, exist_ok=True)
        self.tag, self.tmp, self.ranks, self.timed_out = new_tag(), tmp, [], False
        port = free_port()
        warm, machine = warm and may_be_warm(env), machine_of(env, tmp)
        for rank in range(n_ranks):
            own = environment(self.tag, tmp, env)
            own.update(
                RANK=str(rank),
                WORLD_SIZE=str(n_ranks),
                LOCAL_RANK=str(rank),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                LOCAL_WORLD_SIZE=str(n_ranks),
            )
            if machine:
                own.update(machine, FCDP_SIM_NUMA=str(rank % 2))
            own.update((rank_env or {}).get(rank, {}))
            paths = tmp / f"out{rank}.txt", tmp / f"err{rank}.txt"
            if warm:
                paths[0].touch(), paths[1].touch()
                self.ranks.append(Rank(WarmProcess(script, arguments, own, *paths, preload), *paths))
                continue
            with open(paths[0], "wb") as out, open(paths[1], "wb") as err:
                process = subprocess.Popen(
                    [sys.executable, str(script), *map(str, arguments)],
                    cwd=HERE,
                    env=own,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            self.ranks.append(Rank(process, *paths))

    def wait_until_said(self, text, timeout_s):
        """Until every rank has printed it, or one has ended: a loaded machine takes long to import torch."""
        deadline = time.monotonic() + timeout_s
        while not all(text in rank.out for rank in self.ranks) and time.monotonic() < deadline:
            for rank in self.ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(0.05)
                    return

    def wait(self, timeout_s):
        """True where every rank ended by itself in time; none is alive afterwards in any case."""
        deadline = time.monotonic() + timeout_s
        try:
            for rank in self.ranks:
                rank.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.timed_out = True
            signal_all(self.tag, signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.ranks[0].process.wait(2)
        self.left_alive = [] if self.timed_out else tagged(self.tag)
        signal_all(self.tag, signal.SIGKILL)
        for rank in self.ranks:
            rank.process.wait(10)
        return not self.timed_out

    def report(self):
        return "\n".join(
            f"--- rank {i}: exit {r.returncode}\n{r.out[-1500:]}\n{r.err[-4000:]}" for i, r in enumerate(self.ranks)
        )


def forked(script, arguments, tmp, env=None, stall_s=120, preload=()):
    """As torchrun() with ranks that start warm: when one fails, the others are ended."""
    began = time.monotonic()
    job = Spawned(script, arguments, tmp, env, warm=True, preload=preload)

    def ended():
        left = [rank for rank in job.ranks if rank.returncode is None]
        if left and not any(rank.returncode for rank in job.ranks):
            select.select([rank.process.said for rank in left], [], [], 1)
        for rank in left:
            ends_within(rank.process, 0)
        return not left or any(rank.returncode for rank in job.ranks)

    try:
        timed_out = not wait_while_it_moves(ended, tmp, stall_s)
        failed = [rank.returncode for rank in job.ranks if rank.returncode]
        job.wait(GRACE_S if failed or timed_out else 1)
    finally:
        signal_all(job.tag, signal.SIGKILL)
    output = "".join(rank.out + rank.err for rank in job.ranks)
    return Job(
        (failed or [-signal.SIGUSR1 if timed_out else 0])[0], output, timed_out, ranks_in(tmp), time.monotonic() - began
    )
