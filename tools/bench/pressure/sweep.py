"""Trains the demo's GPT on the simulated device, as 2 nodes x 2 ranks, with less and less device memory: tensors and
gathered parameters share FCDP_DEVICE_BUDGET. tools/bench.sh --help says what it prints.

The reference is plain FSDP2 over the same allocator, which needs less than PyTorch's own two (docs/allocator.md): its
least budget is found by bisection, in pages of 2 MiB.
"""

import argparse
import json
import os
import pathlib
import runpy
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time

from fcdp_lab.port import free_port

HERE = pathlib.Path(__file__).resolve().parent
PAGE = 2 << 20
N_RANKS = 4
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FCDP = {
    "FCDP": "1",
    "FCDP_LOCAL_SIZE": "2",
    "FCDP_TRANSPORT": "torch",
    "FCDP_TAU": "1",
    "FCDP_TIMEOUT": "120",
    "FCDP_SUMMARY": "0",
}
PLAIN = {"FCDP": "0"}
POLICIES = {f"`FCDP_TAU={tau}`": {"FCDP_TAU": tau} for tau in ("0", "0.25", "0.5", "0.75", "1")} | {
    "next-use": {"FCDP_TAU": "", "FCDP_POLICY": "next-use"}
}
BATCHES_PAGES = 40  # about twice what a batch of one needs
BURSTS = (1,)  # seeds
LEARNED = 4  # steps after which those of next-use are steady


def become_rank(rank, port, env, out, arguments):
    """In a fork: this process is a rank from here on, as torchrun starts one."""
    status = 1
    for signum in STOPS:
        signal.signal(signum, signal.SIG_DFL)
    try:
        log = os.open(out / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 1), os.dup2(log, 2)
        for name in [name for name in os.environ if name.startswith("FCDP_") and name != "FCDP_SIM_LIBRARY"]:
            del os.environ[name]
        os.environ.update(
            env,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(N_RANKS),
            LOCAL_WORLD_SIZE=str(N_RANKS),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
            OMP_NUM_THREADS="1",
        )
        exec(pathlib.Path(sysconfig.get_path("purelib"), "fcdp.pth").read_text(), {})  # turns FCDP on
        sys.argv[:] = ["job.py", str(out), *arguments]
        runpy.run_path(str(HERE / "job.py"), run_name="__main__")
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


class Run:
    """One job. `ranks`: what each wrote; `failed`: the first line of a rank that says why, or None."""

    def __init__(self, env, budget_pages, arguments, deadline_s=600):
        if budget_pages:
            env = env | {"FCDP_DEVICE_BUDGET": str(budget_pages * PAGE)}
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder)
            port, left = free_port(), set()
            for rank in range(N_RANKS):
                left.add(os.fork())
                if 0 in left:
                    become_rank(rank, port, env, out, arguments)
            try:
                statuses = self._await(left, time.monotonic() + deadline_s)
            finally:  # where a signal ends the sweep, its ranks end
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
            texts = [(out / f"rank{rank}.txt").read_text(errors="replace") for rank in range(N_RANKS)]
            files = [out / f"rank{rank}.json" for rank in range(N_RANKS)]
            self.ranks = [json.loads(file.read_text()) for file in files if file.exists()]
        self.out_of_memory = any("out_of_memory" in rank for rank in self.ranks)
        self.failed = None
        if any(statuses) or len(self.ranks) < N_RANKS:
            lines = [line for text in texts for line in text.splitlines()]
            self.failed = next((line for line in lines if "out of memory" in line or "Error" in line), "it ended")
            if not self.out_of_memory:
                sys.exit(f"a job failed, and not for memory: {env}\n" + "\n".join(text[-3000:] for text in texts))

    @staticmethod
    def _await(left, deadline):
        """Exit statuses. Where one rank fails or the deadline comes, the others are ended."""
        statuses = []
        while left:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in left:
                left.remove(pid)
                statuses.append(status)
            elif time.monotonic() > deadline:
                statuses.append(1)
            else:
                time.sleep(0.05)
            if any(statuses):
                for other in left:
                    os.kill(other, signal.SIGKILL)
        return statuses

    def numbers(self):
        return [(rank["losses"], rank["parameters"]) for rank in self.ranks]

    def most(self, name):
        return max(rank[name] for rank in self.ranks)


def least(env, low, high, arguments):
    """The fewest pages with which the job ends: `low` are too few, `high` enough."""
    while high - low > 1:
        middle = (low + high) // 2
        if Run(env, middle, arguments).failed:
            low = middle
        else:
            high = middle
    return high


def largest_batch(env, pages, arguments):
    """And a job of it, None where not even one sequence fits. At the edge it depends on how the streams of the ranks meet
    whether plain FSDP2 finds memory: a batch fits that trains twice."""
    jobs = {}

    def fits(batch):
        for _ in range(2):
            jobs[batch] = Run(env, pages, [*arguments, "--batch", str(batch)])
            if jobs[batch].failed:
                return False
        return True

    good, bad = 0, 1
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good, jobs.get(good)


def batches(pages, arguments, n_steps):
    """The largest batch of plain FSDP2 in so many pages; then each policy at that one and at the next, and at the largest
    that plain trains with random allocations beside it."""
    settings = [{}, *({"PRESSURE_BURSTS": str(seed)} for seed in BURSTS)]
    most, plain = zip(*(largest_batch(PLAIN | each, pages, arguments) for each in settings), strict=True)
    print(
        f"in {pages * PAGE / 1e6:.0f} MB plain FSDP2's largest batch is {most[0]}; with bursts {most[1:]}", flush=True
    )
    if not all(most):
        sys.exit("that is too little for any batch: --pages N for more")
    head = f"policy | largest batch | training | moved per step | evictions in steps {LEARNED + 1} to {n_steps} | with bursts"
    print(f"\n| {head} |\n|{' --- |' * (head.count('|') + 1)}")
    bad = False
    for name, policy in POLICIES.items():
        env = FCDP | policy
        runs = [
            Run(env | each, pages, [*arguments, "--batch", str(batch)])
            for each, batch in zip(settings, most, strict=True)
        ]
        words = [
            "out of memory" if run.failed else "equal" if run.numbers() == reference.numbers() else "DIFFERS"
            for run, reference in zip(runs, plain, strict=True)
        ]
        bad = bad or set(words) != {"equal"}
        cells = [name, "-", words[0], "-", "-", ", ".join(words[1:])]
        if not runs[0].failed:
            fits_more = not Run(env, pages, [*arguments, "--batch", str(most[0] + 1)]).failed
            moves, steady = runs[0].ranks[0]["moves"], runs[0].ranks[0]["evictions"][LEARNED:]
            cells[1] = f"at least {most[0] + 1}" if fits_more else str(most[0])
            cells[3] = f"{(moves['h2d_bytes'] + moves['d2h_bytes']) / n_steps / 1e6:.1f} MB"
            cells[4] = str(sum(steady))
            bad = bad or (name == "next-use" and sum(steady) > 0)
        print(f"| {' | '.join(cells)} |", flush=True)
    return int(bad)


def row_of(pages, plain_least, run, reference, n_steps):
    share = f"{pages / plain_least:.2f}"
    if run.failed:
        return [f"{pages * PAGE / 1e6:.0f} MB", share, "out of memory", "-", "-", "-", "-", "-"]
    rank = run.ranks[0]
    gathers, moves = rank["gathers"], rank["moves"]
    equal = "equal" if run.numbers() == reference.numbers() else "DIFFERS"
    return [
        f"{pages * PAGE / 1e6:.0f} MB",
        share,
        "no",
        equal,
        f"{100 * gathers['avoided'] / (gathers['made'] + gathers['avoided']):.0f} %",
        f"{(moves['h2d_bytes'] + moves['d2h_bytes']) / n_steps / 1e6:.1f} MB",
        f"{moves['evictions'] / n_steps:.1f}",
        f"{statistics.median(rank['seconds'][1:]):.2f} s",
    ]


def draw(picture, pages, arguments):
    """The trace keeps few events of before, so that the picture begins with steps. Those that its ring has overwritten
    meanwhile are a line of plot's."""
    with tempfile.TemporaryDirectory() as folder:
        trace = os.path.join(folder, "rank0.trace")
        Run(FCDP | {"PRESSURE_TRACE": trace, "FCDP_TRACE_BUFFER": "128K"}, pages, arguments)
        subprocess.run([sys.executable, "-m", "fcdp_memtrace", "plot", trace, "-o", picture])


def main():
    parser = argparse.ArgumentParser(prog="tools/bench.sh pressure", description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", type=int, default=6, help="how many (default %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="of each job (default %(default)s)")
    parser.add_argument("--picture", metavar="X.svg", help="draw the job of a budget in the middle")
    parser.add_argument("--pages", type=int, metavar="N", help="draw the job of N pages of 2 MiB, and train no other")
    parser.add_argument("--batches", action="store_true", help="each policy at the largest batch of plain FSDP2")
    parser.add_argument("gpt", nargs="*", help="behind --: options of tools/demo/gpt.py")
    args = parser.parse_args()
    gpt = args.gpt or ["--dim", "280", "--layers", "6", *([] if args.batches else ["--batch", "2"])]
    if args.budgets < 2 or args.steps < 2:
        parser.error(f"--budgets and --steps must be at least 2, not {args.budgets} and {args.steps}")
    if args.batches and args.steps < LEARNED + 2:
        args.steps = LEARNED + 4
    arguments = [*gpt, "--steps", str(args.steps)]
    for signum in STOPS:
        if signal.getsignal(signum) != signal.SIG_IGN:  # as SIGHUP under nohup
            signal.signal(signum, lambda signum, _: sys.exit(128 + signum))
    import torch.distributed.fsdp  # noqa: F401 (once, for all ranks)

    if args.batches:
        return batches(args.pages or BATCHES_PAGES, arguments, args.steps)
    if args.picture and args.pages:
        draw(args.picture, args.pages, arguments)
        return 0
    reference = Run(PLAIN, 0, arguments)
    live = reference.most("tensors_peak_bytes")
    plain_least = least(PLAIN, live // PAGE - 1, reference.most("reserved_peak_bytes") // PAGE, arguments)
    roomy = Run(FCDP, 0, arguments)
    all_pages = (roomy.most("tensors_peak_bytes") + roomy.ranks[0]["device_bytes"]["peak"]) // PAGE + 8
    print(
        f"plain FSDP2's tensors are {live / 1e6:.1f} MB at most; its least budget is {plain_least * PAGE / 1e6:.0f} MB"
    )
    budgets = sorted(
        {plain_least + i * (all_pages - plain_least) // (args.budgets - 1) for i in range(args.budgets)}, reverse=True
    )
    head = "budget | over plain's least | out of memory | training | gathers avoided | moved per step | evictions per step | step"
    print(f"\n| {head} |\n|{' --- |' * (head.count('|') + 1)}")
    rows = []
    for pages in budgets:
        rows.append(row_of(pages, plain_least, Run(FCDP, pages, arguments), reference, args.steps))
        print(f"| {' | '.join(rows[-1])} |", flush=True)
    if args.picture:
        draw(args.picture, budgets[len(budgets) // 2], arguments)
    return int(any(row[2] != "no" or row[3] != "equal" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
