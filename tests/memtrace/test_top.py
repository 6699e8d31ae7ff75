"""`fcdp-memtrace top` in a real terminal: what a user sees and types."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys

import pytest

from live import NOBODY
from terminal import Terminal

pytest.importorskip("fcdp_memtrace", reason="the wheel is not installed in this interpreter (tools/setup.sh)")
pytestmark = pytest.mark.slow  # it builds a job, and waits for terminals
needs_tmux = pytest.mark.skipif(
    not shutil.which("tmux"), reason="no tmux here: it is the terminal that `top` is tried in"
)
COMMAND = [sys.executable, "-m", "fcdp_memtrace", "top"]
ROW = re.compile(r"^[> ][*k~b ] (\S+) +([D#HMF.]+) +(\S+) +(\S+) +(\S+) +(\S+) +(\S+) +(\S+)$", re.M)
# Other jobs may run on this machine: each test follows its own, but for those that find it.
LABEL = "mine.py --test"


def rows_of(screen):
    """(name, strip, size, ...) of each region that is shown."""
    return ROW.findall(screen)


def names_of(screen):
    return [row[0] for row in rows_of(screen)]


@pytest.fixture
def top(tmp_path):
    opened = []

    def start(job=None, *options, **how):
        pids = ["--pid", job.process.pid] if job else []
        opened.append(Terminal(tmp_path, [*COMMAND, *pids, "--interval", "0.1", *options], **how))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def machine_json(*options, **how):
    return subprocess.run([*COMMAND, "--json", *options], capture_output=True, text=True, timeout=60, **how)


# --- the first look -------------------------------------------------------------------------------------------------


@needs_tmux
def test_what_a_job_does_is_on_the_first_screen(play, top):
    mine = play("--label", LABEL)
    mine.tell("wait 7 agreement", "steps 4")
    screen = top(mine).wait_for(r"model\.layers\.6")
    lines = screen.splitlines()
    # 7 regions of 12 MiB, of which the root is gathered once and the others in each step: plain FSDP2 sends twice as much.
    assert lines[0].startswith(
        f" {(1 + 6 * 4) * 12 * 1.048576:.3g} MB saved between nodes (50%); waited 7.0 ms/step for agreement (rank"
    )
    assert lines[1].startswith(" mine.py --test running; 4 of 4 ranks, 2 nodes, step 4")
    # The root and one MiB of activations, of a budget of 64 MiB.
    assert re.match(r" device rank \d \[\|\|\s+\] 20% of 67.1 MB  tensors 1.05 MB  gathered 12.6 MB$", lines[2])
    assert lines[3].startswith(" simulated 268 MB: others and NCCL 44 MB (16%)")
    shown = {name: (strip, size) for name, strip, size, *_ in rows_of(screen)}
    assert list(shown) == ["model", *(f"model.layers.{i}" for i in range(7))]
    assert set(shown["model"][0]) == {"#"}
    assert set(shown["model.layers.0"][0]) == {"H"}
    assert set(shown["model.layers.6"][0]) == {"."}
    assert shown["model"][1] == "50.3M"  # on four ranks
    assert len(lines) == 24 and max(map(len, lines)) <= 80


@needs_tmux
def test_rates_are_of_the_last_seconds(play, top):
    mine = play("--step-ms", "20", "--label", LABEL)
    mine.tell("run")
    screen = top(mine).wait_for(r"step \d+, \d[\d.]* ms each", r"inter-node [1-9]", r"layers\.0 .* \d+M +\d")
    by_name = {row[0]: row for row in rows_of(screen)}
    assert by_name["model.layers.0"][3:7] != ("-",) * 4
    assert by_name["model.layers.6"][3:7] == ("-",) * 4


@needs_tmux
def test_a_job_that_a_process_starts_later_is_waited_for(synthetic, top):
    shell = subprocess.Popen(["sh"], stdin=subprocess.PIPE, text=True, bufsize=1)
    try:
        done = machine_json("--pid", str(shell.pid))
        assert done.returncode == 1 and f"process {shell.pid} writes no trace" in done.stderr, done
        terminal = top(None, "--pid", shell.pid)
        terminal.wait_for(f"Process {shell.pid} runs, and no job with FCDP in it yet")
        shell.stdin.write(f"(echo run; read _) | {synthetic} --label '{LABEL}' >/dev/null\n")  # until stdin ends
        terminal.wait_for(r"mine\.py --test running")
    finally:
        shell.stdin.close()
        shell.wait(timeout=60)
    done = machine_json("--pid", str(shell.pid))
    assert done.returncode == 1 and f"there is no process {shell.pid}" in done.stderr, done


ALONE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]  # with no other job of this machine in its /proc


@needs_tmux
def test_jobs_are_found_and_none_is_said(synthetic, tmp_path):
    if not shutil.which("unshare") or subprocess.run([*ALONE, "true"], capture_output=True).returncode:
        pytest.skip("processes of its own: only root has them here (unshare --pid)")
    done = subprocess.run([*ALONE, *COMMAND, "--json"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "null\n", "")
    for name in ("first", "second"):  # each job starts once its pipe is opened, and ends when it is closed
        os.mkfifo(tmp_path / name)
    jobs = (
        f"{synthetic} --label '{LABEL}' <{tmp_path}/first >/dev/null &"
        f"{synthetic} --label other.py --ranks 2 --nodes 1 <{tmp_path}/second >/dev/null &"
    )
    terminal = Terminal(tmp_path, [*ALONE, "sh", "-c", f"{jobs} {' '.join(COMMAND)} --interval 0.1"])
    try:
        terminal.wait_for("No job with FCDP is running here", "FCDP=1")
        with open(tmp_path / "first", "w"):
            terminal.wait_for(r"mine\.py --test running; 4 of 4 ranks")
        terminal.wait_for(r"mine\.py --test ENDED, this is its last state")
        with open(tmp_path / "second", "w"):
            terminal.wait_for(r"\[job 2/2\] other\.py running; 2 of 2 ranks")
            terminal.keys("j")
            terminal.wait_for(r"\[job 1/2\] mine\.py --test ENDED")
            terminal.keys("j")
            terminal.wait_for(r"\[job 2/2\] other\.py")
    finally:
        terminal.close()


# --- the table ------------------------------------------------------------------------------------------------------


@needs_tmux
def test_regions_are_sorted_filtered_and_searched(play, top):
    mine = play("--regions", "14", "--label", LABEL)
    mine.tell("steps 1")
    terminal = top(mine)
    terminal.wait_for(r"model\.layers\.5", "order: order")
    terminal.keys("s")
    by_name = names_of(terminal.wait_for("order: name "))
    assert by_name.index("model.layers.2") < by_name.index("model.layers.9")
    terminal.keys("S")
    terminal.wait(lambda screen: names_of(screen)[:1] == ["model.layers.12"], "the last name first")
    terminal.wait_for("order: name reversed")
    terminal.keys("S", "s", "s")
    terminal.wait_for("order: device ")
    assert names_of(terminal.screen())[0] == "model"

    terminal.keys("f")
    assert names_of(terminal.wait_for("filter: device")) == ["model"]
    terminal.keys("f", "f")
    assert names_of(terminal.wait_for("filter: nowhere")) == ["model.layers.12"]
    terminal.keys("f", "f")
    terminal.wait_for("filter: evicted", r"no region passes this filter \(f: next\)")
    terminal.keys("f")
    terminal.wait_for("filter: file", r"no region passes this filter \(f: next\)")
    terminal.keys("f")
    terminal.wait_for("filter: all")

    terminal.keys("Home", "/")
    terminal.type("layers.1")
    terminal.wait_for(r"search: layers\.1_")
    terminal.wait_for(r"\n>  model\.layers\.1 ")
    terminal.keys("Enter", "n")
    terminal.wait_for(r"\n>[ *k] model\.layers\.10 ")
    terminal.keys("n", "n", "n")
    terminal.wait_for(r"\n>[ *k] model\.layers\.1 ")
    terminal.keys("N")
    terminal.wait_for(r"\n>[ *k] model\.layers\.12 ")
    terminal.keys("/")
    terminal.type("nothing like it")
    terminal.wait_for(r"search: nothing like it_")
    terminal.keys("Enter")
    terminal.keys("Escape")
    terminal.wait_without(r"/nothing|search:")


@needs_tmux
def test_a_table_longer_than_the_screen_scrolls(play, top):
    mine = play("--regions", "300", "--ranks", "1", "--nodes", "1", "--label", LABEL)
    terminal = top(mine)
    screen = terminal.wait_for(r"\n>[ *k] model ")
    assert "model.layers.298" not in screen
    terminal.keys("End")
    terminal.wait_for(r"\n>[ *k] model\.layers\.298 ")
    terminal.keys("PPage")
    terminal.wait_without(r"\n>[ *k] model\.layers\.298 ")
    terminal.keys("Home", "Down")
    terminal.wait_for(r"\n>[ *k] model\.layers\.0 ")


@needs_tmux
def test_one_rank_is_picked(play, top):
    mine = play("--label", LABEL)
    terminal = top(mine)
    terminal.wait_for("all ranks")
    sizes = {}
    for key, shown in (("r", 0), ("r", 1), ("R", 0)):
        terminal.keys(key)
        screen = terminal.wait_for(rf"rank {shown} \(pid {mine.pids[shown]}\)")
        sizes[shown] = rows_of(screen)[0][2]
    assert sizes == {0: "12.6M", 1: "12.6M"}
    terminal.keys("a")
    assert rows_of(terminal.wait_for("all ranks"))[0][2] == "50.3M"


@needs_tmux
def test_evictions_say_what_why_and_when(play, top):
    mine = play("--label", LABEL)
    mine.tell("steps 1", "short 9000000", "evict model")
    screen = top(mine).wait_for(r" s ago 4 ranks evicted model 12\.6 MB: memory short")
    assert re.search(r" s ago 4 ranks memory short 9 MB: 13\.6 MB of 67\.1 MB are held", screen), screen
    assert "short of memory 4 times" in screen
    assert rows_of(screen)[0][7] == "4"


@needs_tmux
def test_what_sleeps_and_what_disks_lose_is_said(play, top):
    mine = play("--label", LABEL)
    mine.tell("steps 1", "lose model")
    screen = top(mine).wait_for(
        r" s ago 4 ranks put to sleep 12\.6 MB, 3\.15 MB copied",
        r" s ago 4 ranks woken up 12\.6 MB, 12\.6 MB copied",
        r" s ago 4 ranks not read from FCDP_SPILL_DIR model: Input/output error",
        r" s ago 4 ranks not read from FCDP_CACHE_DIR model",
    )
    assert screen.count("FCDP_SPILL_DIR") == screen.count("FCDP_CACHE_DIR") == 1, screen


@needs_tmux
def test_a_region_that_is_mapped_on_the_host_looks_so(play, top):
    mine = play("--label", LABEL)
    mine.tell("map model.layers.2")
    rows = {row[0]: row for row in rows_of(top(mine).wait_for(r"model\.layers\.2 +M+ "))}
    assert "M" not in rows["model.layers.1"][1], rows
    frame = json.loads(machine_json("--pid", str(mine.process.pid)).stdout)
    of = {row["name"]: (row["mapped"], row["on_disk"]) for row in frame["regions"]}
    assert of["model.layers.2"] == (True, True) and of["model.layers.1"] == (False, False), of


# --- time -----------------------------------------------------------------------------------------------------------


@needs_tmux
def test_pause_holds_the_screen_and_the_cursor_goes_back(play, top):
    mine = play("--label", LABEL)
    mine.tell("steps 1")
    terminal = top(mine)
    terminal.wait_for("step 1[, \n]")
    mine.tell("steps 1")
    terminal.wait_for("step 2[, \n]")
    terminal.keys("Space")
    terminal.wait_for("PAUSED")
    mine.tell("steps 5")
    terminal.wait_for(r"PAUSED, +[1-9][\d.]* s ago|PAUSED, +0\.[5-9] s ago")
    assert "step 2" in terminal.screen()
    for _ in range(200):  # each a moment, until there was one step
        terminal.keys("Left")
        screen = terminal.wait_for("PAUSED")
        if "step 1" in screen:
            break
    terminal.wait_for("step 1[, \n]")
    terminal.keys("Right")
    terminal.keys("l")
    terminal.wait_for(r"step 7[, \n][\s\S]*live")
    for _ in range(100):  # 10 s each
        terminal.keys("[")
        if "the history begins here" in terminal.wait_for("PAUSED"):
            break
    terminal.wait_for("the history begins here")
    terminal.keys("Space")
    terminal.wait_for("live")


@needs_tmux
def test_the_peak_shows_what_was_resident_then(play, top):
    """Six regions are used one after the other; the most is held before the last one goes, between two looks."""
    mine = play("--ranks", "1", "--nodes", "1", "--label", LABEL)
    terminal = top(mine)
    terminal.wait_for("nothing gathered")
    mine.tell("steps 1")
    terminal.wait_for("step 1[, \n]", "20% of 67.1 MB  tensors 1.05 MB  gathered 12.6 MB")
    terminal.keys("p")
    screen = terminal.wait_for("AT THE PEAK")
    # The root, kept, and the region that backward begins with; the activations of all seven.
    assert "48% of 67.1 MB  tensors 7.34 MB  gathered 25.2 MB" in screen, screen
    assert set({row[0]: row[1] for row in rows_of(screen)}["model"]) == {"#"}
    terminal.keys("p", "l")
    terminal.wait_for("live")


# --- the end of a job -----------------------------------------------------------------------------------------------


@needs_tmux
def test_a_job_that_ends_leaves_its_last_state(play, top):
    mine = play("--label", LABEL)
    terminal = top(mine)
    terminal.wait_for("running")
    mine.tell("steps 3")
    mine.end()
    screen = terminal.wait_for("ENDED, this is its last state", "step 3[, \n]", r"\n>[ *k] model +#+ ")
    assert len(rows_of(screen)) == 8
    terminal.keys("q")
    terminal.wait_for("exit status 0")


@needs_tmux
@pytest.mark.parametrize(("how", "status"), [("C-c", 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_the_terminal_is_as_before_however_it_ends(play, top, tmp_path, how, status):
    mine = play("--label", LABEL)
    terminal = top(mine)
    terminal.wait_for("running")
    if how == "C-c":
        terminal.keys(how)
    else:
        os.kill(terminal.pid_of("fcdp_memtrace"), how)
    screen = terminal.wait_for(f"exit status {status}")
    assert "REGION" not in screen


@needs_tmux
def test_a_job_that_is_killed_leaves_its_last_state(play, top):
    mine = play("--label", LABEL)
    terminal = top(mine)
    terminal.wait_for("running")
    mine.tell("steps 3")
    os.kill(mine.pids[2], signal.SIGKILL)
    terminal.wait_for("1 of 4 ranks KILLED")
    for pid in mine.pids:
        os.kill(pid, signal.SIGKILL)
    terminal.wait_for("KILLED, this is its last state", "step 3[, \n]", r"\n>[ *k] model +#+ ")


# --- terminals ------------------------------------------------------------------------------------------------------


@needs_tmux
def test_resizing_redraws(play, top):
    mine = play("--label", LABEL)
    terminal = top(mine)
    narrow = len(rows_of(terminal.wait_for(r"model\.layers\.6"))[0][1])
    terminal.resize(150, 40)
    terminal.wait(lambda screen: rows_of(screen) and len(rows_of(screen)[0][1]) > narrow, "a wider strip")
    assert len(terminal.wait_for("live").splitlines()) == 40
    terminal.resize(40, 10)
    terminal.wait_for("40 x 10 is too small")
    terminal.resize(72, 12)
    screen = terminal.wait_for(r"REGION[\s\S]*live")
    assert len(rows_of(screen)) >= 3 and max(map(len, screen.splitlines())) <= 72


COLOR = re.compile(r"\x1b\[(?:\d+;)*(?:[39][0-7]|4[0-7])(?:;\d+)*m")  # not the terminal's own (39, 49)


@needs_tmux
@pytest.mark.parametrize(
    ("environment", "colors"),
    [
        ({"TERM": "screen-256color"}, True),
        ({"TERM": "screen-256color", "NO_COLOR": "1"}, False),
        ({"TERM": "vt100"}, False),
    ],
    ids=["colours", "NO_COLOR", "vt100"],
)
def test_colours_are_for_terminals_that_have_them_alone(play, top, environment, colors):
    mine = play("--label", LABEL)
    mine.tell("steps 1")
    terminal = top(mine, **environment)
    assert set(rows_of(terminal.wait_for(r"model\.layers\.6"))[1][1]) == {"H"}
    assert bool(COLOR.search(terminal.screen(colors=True))) == colors
    terminal.keys("Down")
    terminal.wait_for(r"\n>[ *k] model\.layers\.0 ")
    terminal.keys("q")
    terminal.wait_for("exit status 0")


@needs_tmux
def test_an_unknown_terminal_is_named(play, top):
    terminal = top(play("--label", LABEL), TERM="no-such-terminal")
    terminal.wait_for(r"exit status 1\s+fcdp-memtrace: the terminal TERM=no-such-terminal is not known here")


@needs_tmux
def test_help_names_every_key(play, top):
    terminal = top(play("--label", LABEL))
    terminal.wait_for("live")
    terminal.keys("?")
    keys = ("space", "left right", "/", "s S", "r R", " p ", " j ", " f ", " q ")
    terminal.wait_for("WHERE is a strip", "FCDP_TRACE=0", *keys)
    terminal.keys("x")
    terminal.wait_for("REGION")


def test_no_terminal_is_said(play):
    done = subprocess.run(COMMAND, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "top needs a terminal; --json prints what it shows" in done.stderr


# --- numbers --------------------------------------------------------------------------------------------------------


def test_json_once(play):
    mine = play("--label", LABEL)
    mine.tell("wait 3 memory", "steps 2", "evict model")
    done = machine_json("--pid", str(mine.process.pid))
    assert done.returncode == 0, done.stderr
    frame = json.loads(done.stdout)
    assert (frame["running"], frame["ended"], frame["killed"]) == (4, 0, 0)
    assert frame["saved_bytes"] == (1 + 6 * 2) * 12 << 20
    assert [rank["rank"] for rank in frame["ranks"]] == [0, 1, 2, 3]
    for rank in frame["ranks"]:
        assert rank["step"] == 2 and rank["waits_ms"] == {"memory": 3} and rank["waited_ms"] == 3
        assert rank["counters"]["saved.plain_bytes"] == 2 * rank["counters"]["saved.gather_bytes"]
        assert rank["counters"]["steps"] == 2
    regions = {row["name"]: row for row in frame["regions"]}
    assert regions["model"]["evictions"] == 4 and regions["model"]["device_bytes"] == 0
    assert regions["model.layers.0"]["host_bytes"] == 4 * 12 << 20
    assert [note["kind"] for note in frame["notes"]] == ["evict"] * 4


def test_json_in_a_loop(play):
    mine = play("--label", LABEL)
    looking = subprocess.Popen(
        [*COMMAND, "--json", "--interval", "0.1", "--pid", str(mine.process.pid)], stdout=subprocess.PIPE, text=True
    )
    steps = [json.loads(looking.stdout.readline())["ranks"][0]["step"]]
    mine.tell("steps 2")
    while steps[-1] != 2:
        steps.append(json.loads(looking.stdout.readline())["ranks"][0]["step"])
    assert steps == sorted(steps)
    mine.end()
    while json.loads(looking.stdout.readline())["ended"] != 4:
        pass
    looking.terminate()
    looking.wait(timeout=60)
    looking.stdout.close()


@needs_tmux
def test_overwritten_events_are_counted_and_shown(play, top):
    mine = play("--ring", "1024", "--ranks", "1", "--nodes", "1", "--label", LABEL)
    terminal = top(mine)
    assert "overwritten" not in terminal.wait_for("live")
    mine.tell("flood 3000")
    screen = terminal.wait_for(r"(\d+) events were overwritten before they were read")
    # It had read what was there before, and the ring keeps the last 1024.
    lost = int(re.search(r"(\d+) events were overwritten", screen)[1])
    assert 0 < lost <= 3000 - 1024


def test_events_from_before_the_look_are_not_lost(play):
    mine = play("--ring", "1024", "--label", LABEL)
    mine.tell("flood 3000")
    assert json.loads(machine_json("--pid", str(mine.process.pid)).stdout)["events_lost"] == 0


# --- permissions ----------------------------------------------------------------------------------------------------


def as_nobody(*command):
    """Runs as another user, if that user may read the Python that root runs."""
    return subprocess.run(
        ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", *command],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
    )


@pytest.fixture
def second_user():
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root can be a second user here (setpriv)")
    if as_nobody(sys.executable, "-c", "import fcdp_memtrace").returncode:
        pytest.skip(f"user {NOBODY} may not run this Python")


def test_another_users_job_is_not_readable(second_user, play):
    mine = play("--label", LABEL)
    done = as_nobody(*COMMAND, "--json", "--pid", str(mine.pids[0]))
    assert done.returncode == 1 and not done.stdout
    assert f"process {mine.pids[0]} belongs to another user, and only that user may read its trace" in done.stderr, (
        done.stderr
    )
    # What a reader opens, opened by hand.
    opened = as_nobody("sh", "-c", f"cat /proc/{mine.pids[0]}/fd/*")
    assert "Permission denied" in opened.stderr or "No such file" in opened.stderr, opened
    everything = as_nobody(*COMMAND, "--json")
    frame = json.loads(everything.stdout)
    assert frame is None or LABEL not in {rank["command"] for rank in frame["ranks"]}


def test_the_other_way_round_root_reads(second_user, play):
    theirs = play("--label", LABEL, user=NOBODY, group=NOBODY, extra_groups=[])
    frame = json.loads(machine_json("--pid", str(theirs.process.pid)).stdout)
    assert frame["running"] == 4


def test_a_segment_is_for_its_user_alone(play):
    """No name, no right for others."""
    mine = play("--label", LABEL)
    folder = f"/proc/{mine.pids[0]}/fd"
    segments = [fd for fd in os.listdir(folder) if os.readlink(f"{folder}/{fd}").startswith("/memfd:fcdp-trace")]
    assert len(segments) == 1
    assert stat.S_IMODE(os.stat(f"{folder}/{segments[0]}").st_mode) == 0o600
