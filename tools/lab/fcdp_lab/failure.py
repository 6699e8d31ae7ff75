"""Finds out which rank failed first in a failed run, and its message."""

import glob
import json
import os
import re
import signal

_LAUNCHER_FAILURE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
# Signals that kill a rank from outside or by a broken memory access: causes. SIGABRT and SIGTERM are mostly effects.
_CAUSES = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
_TAIL_LINES = 30
_TAIL_BYTES = 64 * 1024


def tail(path, n_lines):
    """The last lines, as far as they fit into the last 64 KiB; empty if there is no such file."""
    try:
        with open(path, "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = f.read().decode(errors="replace").splitlines()
            return "\n".join(lines[-n_lines:]).rstrip()
    except OSError:
        return ""


def rank_log(logs, node, local_rank, stream):
    """The newest attempt's file, or None."""
    found = glob.glob(f"{logs}/node{node}/**/attempt_*/{local_rank}/{stream}.log", recursive=True)
    return max(found, key=os.path.getmtime, default=None)


def read_records(probe_folder):
    """Rank -> its probe lines; of several processes of one rank, the one that wrote most."""
    ranks = {}
    for path in glob.glob(f"{probe_folder}/rank*.jsonl"):
        rank = int(re.match(r"rank(\d+)\.", os.path.basename(path))[1])
        with open(path) as f:
            lines = [json.loads(line) for line in f if line.endswith("\n")]
        if len(lines) > len(ranks.get(rank, [])):
            ranks[rank] = lines
    return ranks


def _launcher_failures(logs, n_nodes):
    """(node, local rank, exit code) in node order, each launcher's first."""
    for node in range(n_nodes):
        found = _LAUNCHER_FAILURE.search(tail(f"{logs}/node{node}/launcher.log", 400))
        if found:
            yield node, int(found[2]), int(found[1])


def _name(ranks_per_node, node, local_rank):
    return f"rank {node * ranks_per_node + local_rank} (node {node}, local rank {local_rank})"


def explain(folder, n_nodes, ranks_per_node):
    """One text: the rank that failed first, and its own message."""
    logs = f"{folder}/logs"
    exits = list(_launcher_failures(logs, n_nodes))
    for node, local_rank, code in exits:
        if code < 0 and -code in _CAUSES:
            return _killed(logs, _name(ranks_per_node, node, local_rank), node, local_rank, code)
    raised = sorted(
        (line["t"], rank, line["traceback"])
        for rank, lines in read_records(f"{folder}/probe").items()
        for line in lines
        if line["kind"] == "error"
    )
    if raised:
        _, rank, text = raised[0]
        return f"{_name(ranks_per_node, *divmod(rank, ranks_per_node))} failed:\n{text.rstrip()}"
    for node, local_rank, code in exits:
        name = _name(ranks_per_node, node, local_rank)
        if code < 0:
            return _killed(logs, name, node, local_rank, code)
        said = tail(rank_log(logs, node, local_rank, "stderr") or "", _TAIL_LINES)
        return f"{name} exited with code {code}" + (f":\n{said}" if said else " and said nothing on stderr")
    for node in range(n_nodes):
        said = tail(f"{logs}/node{node}/launcher.log", _TAIL_LINES)
        if said:
            return f"the launcher of node {node} failed:\n{said}"
    return "the job failed and left no message"


def _killed(logs, name, node, local_rank, code):
    said = tail(rank_log(logs, node, local_rank, "stderr") or "", _TAIL_LINES)
    return f"{name} was killed by {signal.Signals(-code).name}" + (f"; its last words:\n{said}" if said else "")
