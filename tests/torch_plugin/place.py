"""Where the cases train: on the CPU, or with TEST_DEVICE=sim on the simulated device (sim/torch), one for each rank.
Imported by the ranks alone: a process that has the device has it for good."""

import os
import pathlib
import sys

import torch

KIND = os.environ.get("TEST_DEVICE", "cpu")
if KIND == "sim":
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "sim" / "torch"))
    import torch_sim  # noqa: F401

if KIND == "cpu":
    DEVICE = torch.device("cpu")
else:  # as a script finds a GPU
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    DEVICE = torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())


def synchronize():
    """Raises what an operation on a stream has raised."""
    if KIND != "cpu":
        torch.accelerator.synchronize()


def is_lost():
    """Behind some errors, as an access that nothing orders, a device does nothing more in this process."""
    try:
        synchronize()
    except RuntimeError:
        return True
    return False
