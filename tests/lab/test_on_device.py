"""fcdp-lab --device sim: a script finds a simulated GPU as it would find a GPU, and trains on it as on the CPU."""

import json
import pathlib
import shutil
import subprocess
import sysconfig

import pytest

import fcdp_lab

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEMO = str(ROOT / "tools" / "demo" / "gpt.py")
FINDS_IT = """
import os, torch
assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "sim"
assert torch.accelerator.device_count() == int(os.environ["LOCAL_WORLD_SIZE"])
assert torch.sim.mem_get_info()[1] == 96 << 20, torch.sim.mem_get_info()
assert os.environ["TORCH_SIM_GFLOPS"] == "0.5" and os.environ["TORCH_SIM_GBYTES"] == "2"
assert torch.ones(3, device=torch.accelerator.current_accelerator()).sum().item() == 3
print("loss 1.5")
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "gpu"], "invalid choice: 'gpu'"),
        (["--device", "sim", "--device-memory", "much"], "--device-memory much: write e.g. 512M or 8GB, at least 2M"),
        (["--device", "sim", "--device-memory", "1M"], "--device-memory 1M: write e.g. 512M"),
        (["--device", "sim", "--gflops", "fast"], "--gflops fast: write a number, in 1e9 a second"),
        (["--device", "sim", "--gbytes", "-1"], "--gbytes -1: write a number"),
        (["--device-memory", "1G"], "--device-memory is of the simulated device: give --device sim with it"),
        (["--device", "cpu", "--gflops", "0"], "--gflops is of the simulated device"),
    ],
)
def test_bad_options_of_the_device_are_named(command_line, options, said):
    done = command_line.run(command_line.script("pass"), options=options)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.fixture
def away(command_line):
    """The package as the wheel installs it, with no checkout around it nor around the current folder."""
    installed = pathlib.Path(sysconfig.get_path("purelib"), "fcdp_lab")
    shutil.copytree(
        installed if installed.is_dir() else fcdp_lab.__path__[0], command_line.folder / "away" / "fcdp_lab"
    )
    command_line.env["PYTHONPATH"] = str(command_line.folder / "away")
    return command_line


def test_without_a_checkout_it_says_where_the_device_is(away):
    done = away.run(away.script("pass"), options=["--device", "sim"], cwd=away.folder)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "compiled from a checkout of FCDP. Run fcdp-lab in a checkout, or set TORCH_SIM_FOLDER" in done.stderr
    away.env["TORCH_SIM_FOLDER"] = str(away.folder)
    done = away.run(away.script("pass"), options=["--device", "sim"], cwd=away.folder)
    assert done.returncode == 2 and f"TORCH_SIM_FOLDER={away.folder}: this is not the folder sim/torch" in done.stderr


@pytest.mark.parametrize("how", ["variable", "folder"])
def test_a_checkout_is_found_from_outside_of_it(away, how):
    """Seen from the next thing that is refused."""
    options = ["--device", "sim", "--device-memory", "much"]
    if how == "variable":
        away.env["TORCH_SIM_FOLDER"] = str(ROOT / "sim" / "torch")
    done = away.run(away.script("pass"), options=options, cwd=away.folder if how == "variable" else ROOT / "tests")
    assert done.returncode == 2 and "--device-memory much" in done.stderr, done.stderr


def test_a_device_that_cannot_be_compiled_says_what_the_compiler_said(lab):
    folder = lab.folder / "sim" / "torch" / "torch_sim"
    folder.mkdir(parents=True)
    (folder / "build.py").write_text("raise SystemExit('sim.h: no such file')")
    lab.env["TORCH_SIM_FOLDER"] = str(folder.parent)
    done = lab.run(lab.script("pass"), options=["--device", "sim"])
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "--device sim: the simulated device cannot be built:\nsim.h: no such file" in done.stderr


@pytest.fixture(scope="module")
def compiler():
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs g++ or clang++: the simulated device is compiled against this torch")


@pytest.mark.slow
def test_a_script_finds_the_device_that_was_asked_for(lab, compiler):
    """From a checkout, by torchrun, whose own process has a device too."""
    options = ["--nodes", "1", "--ranks", "2", "--modes", "fsdp", "--device", "sim"]
    options += ["--device-memory", "96M", "--gflops", "0.5", "--gbytes", "2"]
    document = lab.figures(lab.script(FINDS_IT), options=options, launcher="torchrun")
    assert document["device"] == {"type": "sim", "memory_bytes": 96 << 20, "gflops": 0.5, "gbytes": 2.0}
    assert document["modes"][0]["runs"][0]["losses"] == ["1.5"]


@pytest.mark.slow
def test_the_demo_trains_on_it_as_on_the_cpu(lab, compiler):
    """By the installed command, in a checkout. On "sim" plain and under FCDP, and plain on the CPU."""
    out = lab.folder / "out.json"
    options = ["--ranks", "1", "--rate", "unlimited", "--launcher", "direct", "--device", "sim", "--require-equal"]
    options += ["--mode", "cpu: -- --device cpu", "--env", "OMP_NUM_THREADS=1", "--json", str(out)]
    done = subprocess.run(
        [sysconfig.get_path("scripts") + "/fcdp-lab", *options, "--", DEMO, *"--steps 4 --dim 56 --layers 3".split()],
        env={k: v for k, v in lab.env.items() if k != "PYTHONPATH"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "the simulated device: built in " in done.stderr
    assert 'on torch.device("sim")' in done.stdout
    document = json.loads(out.read_text())
    plain, fcdp, cpu = document["modes"]
    assert len(set(plain["runs"][0]["losses"])) == 4 == plain["runs"][0]["steps"]
    assert plain["runs"][0]["losses"] == fcdp["runs"][0]["losses"] == cpu["runs"][0]["losses"]
    assert fcdp["equal"]["shards"] is True is cpu["equal"]["shards"]
    assert fcdp["runs"][0]["fcdp"]["groups_served"] == 4 and not fcdp["runs"][0]["fcdp"]["bypassed"]
    assert plain["device_gathered_peak_bytes"] > 0 < fcdp["device_gathered_peak_bytes"]
    assert plain["device_taken_bytes"] > 0 < fcdp["device_taken_bytes"] and cpu["device_taken_bytes"] is None
    assert plain["moves_per_step"] is None is cpu["moves_per_step"] and fcdp["moves_per_step"]["h2d_bytes"] > 0
    assert "fcdp: moved per step and rank: " in done.stdout and "fsdp: moved" not in done.stdout
    for mode in (plain, fcdp):  # gloo's, whichever the tensors' device
        counted = sum(mode["sent_bytes_per_step_by_collective"].values())
        assert counted == pytest.approx(mode["sent_bytes_per_step"], rel=0.15), mode["name"]
