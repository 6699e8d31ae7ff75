"""What the user can get wrong must be told in one line, before anything runs."""

import pytest

from fcdp_lab import cli, modes, network


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
        (["--modes", "fsdp,fsdp"], "listed twice"),
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
