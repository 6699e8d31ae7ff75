"""tools/gpu.sh without a GPU: it says so; on the simulated device all of its sections run and their report is
whole; and a section that fails, hangs or dies takes no other along."""

import ctypes
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "gpu.sh"
BUNDLE = ROOT / "build" / "gpu-bundle"
MAXIMUM_BUNDLE_BYTES = 60 << 20

sys.path.insert(0, str(ROOT / "tools" / "gpu"))
import main as gpu  # noqa: E402


def environment():
    return {k: v for k, v in os.environ.items() if not k.startswith("FCDP")} | {"FCDP_PYTHON": sys.executable}


def tool(*arguments, timeout=600):
    return subprocess.run(
        [TOOL, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout,
    )


def has_gpu():
    try:
        cuda, n = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return False
    return cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(n)) == 0 and n.value > 0


@pytest.fixture(scope="session")
def bundle():
    """Of the wheel that is there: a test sets nothing up."""
    if not list((ROOT / "dist").glob("fcdp-*_x86_64.whl")) or not (ROOT / ".venv").exists():
        pytest.skip("no wheel in dist/ (tools/setup.sh builds it)")
    job = tool("--bundle", "--no-setup", "--bundle-dir", BUNDLE, timeout=1200)
    assert job.returncode == 0, job.stdout + job.stderr
    return BUNDLE


# ---- the command ----


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends(tmp_path):
    job = tool("--out", tmp_path / "out")
    assert job.returncode == gpu.NO_GPU
    assert (
        len(job.stdout.splitlines()) == 1
        and "no GPU can be used here" in job.stdout
        and "Nothing was measured" in job.stdout
    )
    assert not job.stderr and not (tmp_path / "out").exists()


def test_the_list_has_every_section_within_the_time():
    listed = re.findall(r"^(\w+) +(\d+) s  \S", tool("--list").stdout, re.M)
    assert [name for name, _ in listed] == [section.name for section in gpu.SECTIONS]
    assert sum(int(seconds) for _, seconds in listed) <= gpu.LIMIT_S


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--only", "nothing"], "no section nothing; there are c_tests"),
        (["--minutes", "0"], "--minutes"),
        (["--wrong"], "--bundle"),
    ],
)
def test_wrong_usage_is_told(arguments, says):
    job = tool(*arguments)
    assert job.returncode == 2 and says in job.stderr and "Traceback" not in job.stderr


def test_a_missing_bundle_is_told(tmp_path):
    job = tool("--simulated", "--bundle-dir", tmp_path / "none", "--out", tmp_path / "out")
    assert job.returncode == 2 and "tools/gpu.sh --bundle" in job.stderr


def test_a_folder_of_somebody_else_is_not_emptied(tmp_path):
    (tmp_path / "thesis.txt").write_text("all of it")
    job = tool("--simulated", "--bundle-dir", tmp_path, "--out", tmp_path)
    assert job.returncode == 2 and "--out names another folder" in job.stderr
    assert (tmp_path / "thesis.txt").read_text() == "all of it"


# ---- sections that end badly ----

HANG_S = 8  # until a section that hangs is ended; it imports no torch
PROGRAMS = {
    "good": "s.figure('a figure', 1.5, 'GB/s', 'command')\n    s.check('a check', True)",
    "false": "s.figure('before', 1, 'ms')\n    s.check('equality', False, 'rank 1 differs')",
    "raises": "s.figure('before', 2, 'ms')\n    raise ValueError('broken')",
    "hangs": "s.figure('before', 3, 'ms')\n    import subprocess, threading\n"
    "    print(subprocess.Popen(['sleep', '1000']).pid, flush=True)\n    threading.Event().wait()",
    "dies": "s.figure('before', 4, 'ms')\n    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)",
}


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def reported(tmp_path):
    """The report of sections that are made of PROGRAMS."""
    sections = []
    for name, body in PROGRAMS.items():
        path = tmp_path / f"{name}.py"
        path.write_text(
            f"import sys\nsys.path.insert(0, {str(ROOT / 'tools' / 'gpu')!r})\nfrom section import main\n\ndef body(s):\n    {body}\n\nmain(body)\n"
        )
        sections.append(gpu.Section(name, f"a section that is {name}", 60 if name != "hangs" else HANG_S, path))
    (tmp_path / "out").mkdir()
    settings = {"bundle_dir": str(tmp_path), "out_dir": str(tmp_path / "out"), "simulated": True, "machine": {}}
    results = [gpu.run_section(s, settings | {"seconds": s.seconds}, dict(os.environ)) for s in sections]
    gpu.report.write(tmp_path / "out", {"device": "none"}, results, 1.0)
    return {
        r["name"]: r for r in json.loads((tmp_path / "out" / "report.json").read_text())["sections"]
    }, tmp_path / "out"


@pytest.mark.slow  # one of them hangs, until it is ended
def test_each_section_ends_for_itself(reported):
    sections, out = reported
    assert {name: s["status"] for name, s in sections.items()} == {
        "good": "done",
        "false": "failed",
        "raises": "failed",
        "hangs": "timed out",
        "dies": "failed",
    }
    assert sections["good"]["figures"] == [{"name": "a figure", "value": 1.5, "unit": "GB/s", "command": "command"}]
    for name in ("false", "raises", "hangs", "dies"):  # what it had found by then is there
        assert [figure["name"] for figure in sections[name]["figures"]] == ["before"]
    assert "ValueError: broken" in str(sections["raises"]["checks"]) and "SIGKILL" in str(sections["dies"]["reasons"])
    assert f"ended at its limit of {HANG_S} s" in str(sections["hangs"]["reasons"])
    text = (out / "report.txt").read_text()
    assert "FAILS: equality: rank 1 differs" in text and "a figure: 1.5 GB/s" in text
    child = int((out / "hangs.log").read_text().split()[0])
    assert not is_alive(child)  # what it started has ended with it


def test_time_that_is_left_goes_to_later_sections(monkeypatch):
    given, clock = [], [0.0]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: clock[0])

    def run_section(section, settings, env):
        given.append(settings["seconds"])
        clock[0] += 1  # each needs a second
        return gpu.report.not_run(section.name, section.title, "")

    monkeypatch.setattr(gpu, "run_section", run_section)
    sections = [gpu.Section(name, "", 10, pathlib.Path()) for name in "abc"]
    gpu.run_sections(sections, {}, {}, 30)
    assert given == [10, 19, 28]
    given.clear()
    gpu.run_sections(sections, {}, {}, clock[0] + 15)
    assert given == [5, 9, 13]


def test_a_job_that_keeps_pytorchs_allocator_fails_its_section(monkeypatch, tmp_path):
    """nccl_alloc: what it has launched, and what it says of it."""
    import nccl_alloc
    import section

    run, launched = {"losses": [1.0], "digest": "d", "step_median_s": 0.001}, {}

    def launch(of, name, arguments, settings, limit_s, nccl, world):
        assert nccl and world == 1
        launched[name] = settings
        if name == "fcdp_alloc":
            raise section.Failed("rank 0: does not yet support snapshot")
        return [run | {"allocator": "native"}]

    monkeypatch.setattr(nccl_alloc, "launch", launch)
    settings = {"bundle_dir": tmp_path, "out_dir": tmp_path, "simulated": False, "seconds": 30, "machine": {}}
    of = section.Section("nccl_alloc", settings)
    nccl_alloc.body(of)
    said = [json.loads(line) for line in (tmp_path / "nccl_alloc.jsonl").read_text().splitlines()]
    checks = {entry["name"]: entry["ok"] for entry in said if entry["kind"] == "check"}
    assert not of.ok and [ok for name, ok in checks.items() if "tensors are FCDP's" in name] == [False]
    assert [ok for name, ok in checks.items() if "bit for bit" in name] == [False, True]
    assert "FCDP" not in launched["PyTorch's allocator"] and launched["fcdp_alloc"]["FCDP"] == "1"


def test_a_budget_without_fcdp_says_so(monkeypatch, tmp_path):
    """The wheel was not on the ranks' path, say: in the run with the budget."""
    import budget
    import ranks
    import section

    ended = dict.fromkeys(("step_median_s", "ahead_step_s", "ahead_host_share", "parameter_bytes", "trained_bytes"), 1)
    ended |= {"losses": [1.0], "digest": "d", "steps": 1, "device_peak_bytes": 0, "profile": None, "reduced_by": ""}
    stats = {"groups": [], "bypassed": [], "moves": {"h2d_bytes": 1}}

    def launch(of, name, *_):
        return [ended | dict.fromkeys(("before", "after"), None if "budget" in name else stats)]

    monkeypatch.setattr(ranks, "launch", launch)
    settings = {"bundle_dir": tmp_path, "out_dir": tmp_path, "simulated": True, "seconds": 30, "machine": {}}
    of = section.Section("budget", settings)
    budget.body(of)
    said = [json.loads(line) for line in (tmp_path / "budget.jsonl").read_text().splitlines()]
    failed = {entry["name"]: entry for entry in said if entry["kind"] == "check" and not entry["ok"]}
    assert "FCDP was not on" in str(failed["a budget of 10M: FCDP serves the model"])
    why = str(failed["the device budget's runs can be compared"])
    assert "a budget of 10M: ended early, or without FCDP" in why and "none kept" not in why, why
    assert any(entry["name"].startswith("none kept: brought to") for entry in said if entry["kind"] == "figure")


# ---- all of it ----


def simulated(bundle, folder, *options):
    """What a run on the simulated device reports, by section."""
    assert sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file()) < MAXIMUM_BUNDLE_BYTES
    job = tool("--simulated", "--bundle-dir", bundle, "--out", folder, "--minutes", 20, *options, timeout=1260)
    report, text = json.loads((folder / "report.json").read_text()), (folder / "report.txt").read_text()
    assert job.returncode == 0, text
    for section in report["sections"]:
        assert section["status"] == "done" and (section["figures"] or section["reasons"]), section
        assert section["title"] in text
        assert all(isinstance(figure["value"], (int, float)) and figure["command"] for figure in section["figures"]), (
            section
        )
    assert report["machine"]["torch"] and "simulated" in report["machine"]["device"]
    said = text[text.rindex(" s in all") :]
    assert all(what in said for what in ("NVLink", "GPUDirect", "Contention across GPUs")), said
    return {section["name"]: section for section in report["sections"]}


FIGURES = {
    "mapping": [
        "2 MiB, idle, create",
        "beside kernels, alias: map",
        "host memory, mapped: all of it read by a kernel",
        "mapped host memory over device memory, 4096 rows",
    ],
    "copies": ["both at once", "page-locking memory"],
    "fingerprints": ["by the kernel"],
    "codec": ["bf16 weights, lr 0.0003: both arrays read, slots on the device", "float32 weights, lr 0: both"],
    "nccl_one": ["a peer that never comes"],
    "dpo": ["over the trainable bytes"],
}
TRAINING = {
    "fsdp2": [
        f"FCDP, {mapping}, tensors PyTorch's: {what}"
        for mapping in ("slots", "exact")
        for what in ("host blocked for pages", "host blocked in agreements", "gathers between nodes")
    ],
    "budget": [
        f"a budget of 10M: {what}"
        for what in ("brought to the device, a step and rank", "a step, over that with room for all")
    ],
    "allocators": ["FCDP: steps per s"],
}


def assert_figures(sections, expected):
    for name, figures in expected.items():
        found = " ".join(figure["name"] for figure in sections[name]["figures"])
        assert all(figure in found for figure in figures), (name, found)


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_the_report_is_whole_on_the_simulated_device(bundle, tmp_path):
    """Of all sections but those whose jobs take longest."""
    names = [section.name for section in gpu.SECTIONS if section.name not in TRAINING]
    sections = simulated(bundle, tmp_path / "out", "--only", ",".join(names))
    assert list(sections) == names
    assert_figures(sections, FIGURES)
    assert sum("bit for bit" in check["name"] for check in sections["dpo"]["checks"]) == 1
    frozen = next(figure for figure in sections["dpo"]["figures"] if "trainable bytes" in figure["name"])
    assert frozen["value"] < 2.2 < frozen["plain_fsdp2"]


@pytest.mark.slow
@pytest.mark.further
@pytest.mark.timeout(2700)
def test_all_sections_run_on_the_simulated_device(bundle, tmp_path):
    sections = simulated(bundle, tmp_path / "out")
    assert list(sections) == [section.name for section in gpu.SECTIONS]
    assert_figures(sections, FIGURES | TRAINING)
    assert sum("bit for bit" in check["name"] for check in sections["fsdp2"]["checks"]) == 2  # slots and exact
    assert sum("bit for bit" in check["name"] for check in sections["budget"]["checks"]) == 3
    blocked = {figure["name"]: figure for figure in sections["fsdp2"]["figures"]}
    for mapping in ("slots", "exact"):
        agreements = blocked[f"FCDP, {mapping}, tensors PyTorch's: host blocked in agreements, a step, running ahead"]
        assert agreements["value"] > 0 and agreements["waits"] >= 2, agreements  # forward's and backward's
