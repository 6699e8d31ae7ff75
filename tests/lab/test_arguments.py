"""What the user can get wrong must be told in one line, before anything runs."""

import errno
import os
import pathlib
import subprocess
import sys
import types

import pytest

from fcdp_lab import cli, failure, lab, modes, namespaces, network


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nodes", "0"], "--nodes must be 1 to 250"),
        (["--rate", "fast"], "write e.g. 1gbit"),
        (["--rate", "1"], "write e.g. 1gbit"),
        (["--rate", "0gbit"], "write e.g. 1gbit"),
        (["--rate", "1Gbps"], "--rate 1Gbps: 1gbit, or 1gbyte?"),  # tc's bps are bytes
        (["--rate", "2.5G"], "--rate 2.5G: 2.5gbit, or 2.5gbyte?"),
        (["--rate", "100MB/s"], "--rate 100MB/s: 100mbit, or 100mbyte?"),
        (["--rate", "1kbit"], "below 100kbit"),
        (["--delay", "3"], "write e.g. 100us"),
        (["--modes", "fsdp,fcpd"], "did you mean 'fcdp'?"),
        (["--modes", "zero3"], "unknown mode 'zero3': there are fsdp, fcdp; --mode defines others"),
        (["--modes", "fsdp,fsdp"], "mode 'fsdp' is listed twice; --repeat N runs every mode N times"),
        (["--modes", ","], "no mode to run"),
        (["--mode", "hpz"], "mode 'hpz': write 'NAME: KEY=VALUE"),
        (["--mode", "fsdp"], "'fsdp' is built in: --modes fsdp runs it; to define another, write 'NAME: KEY=VALUE"),
        (["--mode", "hpz: --reshard 2"], "script arguments go after --"),
        (["--mode", "fsdp: FCDP=1"], "defined twice"),
        (["--env", "X"], "'X' is not KEY=VALUE"),
        (["--env", "FCDP=1"], "define a mode instead"),
        (["--mode", "mine: FCDP=1 FCDP_TAU=9"], "mode mine: FCDP_TAU=9: expected a number from 0 to 1\n"),
        (["--env", "FCDP_TAUU=1"], "mode fcdp: FCDP_TAUU is not an option; did you mean FCDP_TAU?\n"),
        (["--repeat", "0"], "--repeat must be at least 1"),
        (["--timeout", "0"], "--timeout must be above 0, --grace at least 0"),
        (["train.py"], "put -- before the script: fcdp-lab [options] -- train.py "),
        (["--json", "/nowhere/at/all.json"], "cannot write into"),
        (["--python", "/no/such/python"], "no such interpreter"),
    ],
)
def test_bad_options_are_named_with_what_to_write(command_line, options, said):
    done = command_line.run(command_line.script("pass"), options=options)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_script_is_named(command_line):
    done = command_line.run("nowhere.py")
    assert (done.returncode, done.stderr) == (2, "fcdp-lab: no such script: nowhere.py\n")


def test_what_the_machine_lacks_is_named_with_what_installs_it(command_line, monkeypatch, capsys):
    script, find_spec = command_line.script("pass"), cli.importlib.util.find_spec
    monkeypatch.setattr(network, "missing_tools", lambda: ["ip", "tc"])
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: name != "matplotlib" and find_spec(name) or None)
    lacks = {
        "cannot find ip and tc: install iproute2 (apt-get install iproute2)": ["--", script],
        "--svg needs matplotlib: pip install matplotlib": ["--svg", "x.svg", "--", script],
        "no script given: fcdp-lab [options] -- SCRIPT [ARGUMENTS]": ["--"],
    }
    for said, arguments in lacks.items():
        with pytest.raises(SystemExit) as ended:
            cli.parse(arguments)
        assert (ended.value.code, capsys.readouterr().err) == (2, f"fcdp-lab: {said}\n")


@pytest.mark.parametrize(
    ("files", "uid", "said"),
    [
        (
            {"kernel/apparmor_restrict_unprivileged_userns": "1"},
            7,
            "AppArmor restricts user namespaces: sysctl -w kernel.app",
        ),
        (
            {"kernel/unprivileged_userns_clone": "0"},
            7,
            "are switched off: sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        ({"user/max_user_namespaces": "0"}, 7, "are switched off: sysctl -w user.max_user_namespaces=15000"),
        ({}, 0, "this root lacks CAP_SYS_ADMIN: in Docker or Podman, start the container with --privileged"),
        ({}, 7, "the kernel says: Operation not permitted"),
    ],
)
def test_why_there_are_no_namespaces_is_said_with_what_allows_them(monkeypatch, files, uid, said):
    def refuses(flags):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(namespaces, "_read", lambda path: files.get(path.removeprefix("/proc/sys/")))
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: uid)
    monkeypatch.setattr(namespaces, "unshare", refuses)
    with pytest.raises(namespaces.NamespaceError, match="neither directly nor in a user namespace") as refused:
        namespaces.enter(0)
    assert said in str(refused.value) and "Run fcdp-lab as root" in str(refused.value), refused.value


def test_a_job_that_says_little_is_told_of_all_the_same(tmp_path):
    assert failure.explain(tmp_path, 2, 1) == "the job failed and left no message"
    (tmp_path / "logs" / "node1").mkdir(parents=True)
    (tmp_path / "logs" / "node1" / "launcher.log").write_text("no module named torch\n")
    assert failure.explain(tmp_path, 2, 1) == "the launcher of node 1 failed:\nno module named torch"
    assert lab._steps_of_all(tmp_path) == "no rank came up"


def test_a_queue_that_the_kernel_lacks_is_told():
    said = network._hint("Error: Specified qdisc kind is unknown.")
    assert "This kernel lacks that queue" in said and "load sch_tbf/sch_netem, or leave the option out" in said
    assert network._hint("RTNETLINK answers: File exists") == ""


def test_a_probe_that_fails_leaves_the_script_to_run(command_line, monkeypatch, capsys):
    """A lab without figures is better than a script that does not start."""
    from fcdp_lab import probe

    def fails(module):
        raise AttributeError("no FSDPParam")

    loader = probe._Loader(types.SimpleNamespace(exec_module=lambda module: None), fails)
    module = types.ModuleType("torch.of_another_day")
    module.__spec__ = types.SimpleNamespace(loader=loader)
    loader.exec_module(module)
    said = "fcdp-lab: the probe could not hook torch.of_another_day: AttributeError('no FSDPParam')\n"
    assert capsys.readouterr().err == said
    monkeypatch.setitem(sys.modules, "of_another_day._fsdp_param", types.ModuleType("_fsdp_param"))
    probe._Gathered().watch(types.ModuleType("of_another_day._fsdp_param_group"))
    said = "fcdp-lab: this torch's FSDP2 is unknown; device bytes are not measured\n"
    assert capsys.readouterr().err == said
    inject, folder = pathlib.Path(probe.__file__).with_name("inject"), pathlib.Path(command_line.folder)
    (folder / "fcdp_doctor").mkdir()
    (folder / "fcdp_doctor" / "__init__.py").write_text("raise ImportError('another version')")
    paths = os.pathsep.join(map(str, (inject, folder)))
    env = {**os.environ, "PYTHONPATH": paths, "RANK": "0", "DOCTOR_FOLDER": str(folder), "LAB_PROBE_DIR": ""}
    done = subprocess.run([sys.executable, "-c", "print('ran')"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert done.stderr == "fcdp-lab: the probe could not be loaded: ImportError('another version')\n"


def test_modes_are_an_environment_and_arguments():
    mode = modes.parse_mode("peer.a: FCDP=1 X='a b' -- --reshard-after-forward 2 --note 'c d'")
    assert mode.env == {"FCDP": "1", "X": "a b"}
    assert mode.args == ("--reshard-after-forward", "2", "--note", "c d")
    assert mode.wants_fcdp


def test_own_modes_run_where_modes_names_them_or_last():
    own = ["a: X=1", "b: -- --flag"]
    assert [m.name for m in modes.select("b,fsdp", own)] == ["b", "fsdp", "a"]
    assert [m.name for m in modes.select("fsdp,fcdp", own)] == ["fsdp", "fcdp", "a", "b"]


def test_a_mode_in_which_fcdp_served_nothing_says_why():
    why = "this job has no FSDP modules (found: DDP)"
    bypassed = [{"group": "every group", "reason": why}] * 2
    for found, said in ((bypassed, why), ([], "run with --logs DIR, and read there what rank 0 wrote")):
        figures = {"runs": [{"fcdp": {"enabled": False, "bypassed": found}}]}
        text = cli._missing_fcdp(modes.BUILT_IN[1], figures)
        assert text == f"mode fcdp sets FCDP, but FCDP served nothing in it: {said}"


@pytest.mark.parametrize(
    ("text", "bits"),
    [("1gbit", 1e9), ("2.5gbit", 2.5e9), ("125mbyte", 1e9), ("1Gbit/s", 1e9), ("100kbit", 1e5), ("unlimited", None)],
)
def test_a_rate_says_whether_it_is_of_bits_or_of_bytes(text, bits):
    assert network.parse_rate(text) == bits


def test_the_bucket_holds_several_of_the_largest_packets_at_any_rate():
    assert all(network.burst_bytes(rate) >= 4 * 65536 for rate in (1e5, 1e9, 1e11))
