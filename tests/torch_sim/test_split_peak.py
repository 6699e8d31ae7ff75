"""fcdp.split() takes from the peak of device memory at least half of a layer that is most of the model, with FCDP and with
plain FSDP2: on 2 nodes x 1 rank; with TEST_MATRIX=whole x 2 ranks, and in more cases."""

import os
import pathlib

import pytest
import torch

MIB = 1 << 20
LAYER, PARTS = 16 * MIB, 8
WHOLE = os.environ.get("TEST_MATRIX") == "whole"
OF_NODE = 2 if WHOLE else 1
FCDP = {"FCDP": "1", "FCDP_LOCAL_SIZE": str(OF_NODE), "FCDP_TRANSPORT": "torch", "FCDP_TAU": "0", "FCDP_TIMEOUT": "60"}
MODES = {"fsdp2": {"FCDP": "0"}, "fcdp": FCDP}
# What training whole and in parts may differ by: in the loss, and in the parameters' norm. Measured with float32: 1.2e-7
# and less than 1e-6; with bfloat16: 7e-5 and less than 1e-2.
BOUNDS = {"plain": (1e-6, 1e-6), "frozen": (1e-6, 1e-6), "checkpointed": (1e-6, 1e-6), "bf16": (5e-3, 1e-2)}
RUNS = [(mode, case) for case in (BOUNDS if WHOLE else ["plain"]) for mode in MODES]


@pytest.mark.parametrize("mode, case", RUNS)
def test_the_peak_is_lower_by_half_of_the_layer_at_least(mode, case, run_job):
    whole, split = (run_job("split_job.py", case, n, "OUT", n_ranks=2 * OF_NODE, env=MODES[mode]) for n in (1, PARTS))
    gathered = LAYER // 2 if case == "bf16" else LAYER
    for one, other in zip(whole, split):
        peaks, lower = one["peaks"], other["peaks"]
        kind = "gathered" if mode == "fcdp" else "tensors"
        assert peaks[kind] - lower[kind] >= gathered // 2, (peaks, lower)
        assert lower["tensors"] <= peaks["tensors"]
        if mode == "fcdp":  # one part, one ahead, and a block's group
            assert lower["gathered"] <= 2 * gathered // PARTS + 8 * MIB, lower
            assert all(other["avoided"][f"head.parts.{i}"] > 0 for i in range(PARTS)), other["avoided"]
    check_training(whole, split, *BOUNDS[case])


def check_training(whole, split, of_losses, of_parameters):
    for one, other in zip(whole, split):
        assert one["losses"] == pytest.approx(other["losses"], rel=of_losses)
        assert one["losses"][0] == other["losses"][0]  # the same bits, until gradients are summed
        assert len(set(one["losses"])) == 3  # it trained
    values, others = (torch.load(pathlib.Path(ranks[0]["out"], "whole.pt")) for ranks in (whole, split))
    assert list(values) == list(others)
    for name, value in values.items():
        assert (value.double() - others[name].double()).norm() <= of_parameters * value.double().norm(), name
