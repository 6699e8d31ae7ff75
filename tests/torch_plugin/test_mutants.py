"""The cases can fail: each wrong cache of mutants.py is caught by the cases that are there for it, and every
case catches one.  No FCDP is needed for that."""

import pytest

import cases  # noqa: F401
import launch
import run
from configurations import PLAIN
from test_matrix import KEPT_BY_TORCH

pytestmark = [pytest.mark.mutants, pytest.mark.timeout(7200)]


# What each mutant is there for: cases that must see through it.
CAUGHT_BY = {
    "version_only": ["full_adamw_foreach", "full_adamw_fused", "edits_uncounted_between_micro_batches"],
    "step_hook_only": ["edits_counted_between_micro_batches", "load_state_dict_copy_between_micro_batches"],
    "signals": [
        "fsdp1_edits_data_orig",
        "fsdp1_hand_written_optimizer",
        "ema_swap_data",
        "hand_written_data",
        "zeroth_order_data",
    ],
    "signals_and_flips": [
        "fsdp1_edits_raw",
        "edits_raw_between_evaluations",
        "zeroth_order_raw",
        "ema_swap_data_with_grad_enabled",
        "raw_optimizer_beside_torch_optim",
        "raw_write_to_frozen_weights_each_step",
        "optimizer_with_a_closure",
    ],
    "never_in_backward": [
        "step_in_backward_torch_block_twice",
        "step_between_forward_and_backward",
        "load_state_dict_copy_between_forward_and_backward",
    ],
    "own_shard_only": [
        "fsdp1_edits_raw_on_one_rank",
        "fsdp1_edits_raw_on_one_rank_orig",
        "edits_on_one_rank_between_micro_batches",
        "edits_on_one_rank_between_forward_and_backward",
    ],
    "sum": ["edits_raw_between_micro_batches"],
    "trainable_only": ["edits_of_frozen_groups", "teacher_is_a_moving_average"],
    "by_name": ["fsdp1_two_models_one_made_again", "model_deleted_and_made_again"],
    "keeps_edits": ["gathered_parameter_edited_in_forward_data", "gathered_parameter_edited_in_evaluation_raw"],
    "draws_random_numbers": ["full_dropout", "fsdp1_dropout"],
    "remembers_wholes": [
        "whole_at_each_moment",
        "whole_behind_counted_writes",
        "whole_behind_uncounted_writes",
        "whole_behind_raw_writes",
        "whole_behind_a_loaded_state_dict",
        "whole_between_writes_of_single_parameters",
        "whole_state_dicts",
        "whole_to_a_sampler_after_each_step",
    ],
    "wholes_by_own_shard": ["whole_behind_writes_on_one_rank"],
}


NAMES = sorted(run.CASES, key=lambda name: name in KEPT_BY_TORCH)
RUNS = [f"{name}@always" for name in NAMES] + [f"{name}@{mutant}" for mutant in CAUGHT_BY for name in CAUGHT_BY[mutant]]


def caught(launches, name, mutant):
    expected = launches.get(NAMES, PLAIN)[0][name]
    if expected[0].get("unsupported"):
        pytest.skip(expected[0]["unsupported"])
    return launch.first_difference(expected, launches.get(RUNS, PLAIN)[0][f"{name}@{mutant}"]) is not None


@pytest.mark.parametrize("name, mutant", [(name, mutant) for mutant in CAUGHT_BY for name in CAUGHT_BY[mutant]])
def test_a_wrong_cache_is_caught(launches, name, mutant):
    assert caught(launches, name, mutant)


@pytest.mark.parametrize("name", NAMES)
def test_the_case_can_fail(launches, name):
    """Against the crudest cache, which never gathers twice, or against one that the case is there for."""
    mine = [mutant for mutant in CAUGHT_BY if name in CAUGHT_BY[mutant]]
    assert any(caught(launches, name, mutant) for mutant in ["always", *mine])
