"""The cases can fail: each wrong cache of mutants.py is caught, and each case catches one.  One job for each mutant, some
minutes in all: run with `-m mutants`."""
import pytest

import cases  # noqa: F401
import launch
import mutants
import run
from conftest import PLAIN

pytestmark = pytest.mark.mutants
NAMES = list(run.CASES)

# What each mutant is there for: cases that must see through it.
CAUGHT_BY = {
    "version_only": ["full_adamw_foreach", "full_adamw_fused", "edits_uncounted_between_micro_batches"],
    "step_hook_only": ["edits_counted_between_micro_batches", "load_state_dict_copy_between_micro_batches"],
    "signals": ["ema_swap_data", "hand_written_data", "zeroth_order_data"],
    "signals_and_flips": ["edits_raw_between_evaluations", "zeroth_order_raw", "ema_swap_data_with_grad_enabled",
                          "raw_optimizer_beside_torch_optim", "raw_write_to_frozen_weights_each_step",
                          "optimizer_with_a_closure"],
    "never_in_backward": ["step_in_backward_torch_block_twice", "step_between_forward_and_backward",
                          "load_state_dict_copy_between_forward_and_backward"],
    "own_shard_only": ["edits_on_one_rank_between_micro_batches", "edits_on_one_rank_between_forward_and_backward"],
    "sum": ["edits_raw_between_micro_batches"],
    "trainable_only": ["edits_of_frozen_groups", "teacher_is_a_moving_average"],
    "by_name": ["model_deleted_and_made_again"],
    "keeps_edits": ["gathered_parameter_edited_in_forward_data", "gathered_parameter_edited_in_evaluation_raw"],
    "draws_random_numbers": ["full_dropout"],
}


def caught(launches, tmp_path_factory, mutant):
    key = ("mutant", mutant)
    if key not in launches.known:
        launches.known[key] = launch.run_cases(NAMES, tmp_path_factory.mktemp(mutant), mutant=mutant)
    plain, _ = launches.get(NAMES, PLAIN)
    results, _ = launches.known[key]
    return {name for name in NAMES if not plain[name][0].get("unsupported")
            and launch.first_difference(plain[name], results[name]) is not None}


@pytest.mark.parametrize("mutant", CAUGHT_BY)
def test_a_wrong_cache_is_caught(launches, tmp_path_factory, mutant):
    missed = set(CAUGHT_BY[mutant]) - caught(launches, tmp_path_factory, mutant)
    assert not missed


def test_every_case_catches_a_wrong_cache(launches, tmp_path_factory):
    found = set().union(*(caught(launches, tmp_path_factory, mutant) for mutant in mutants.MUTANTS))
    plain, _ = launches.get(NAMES, PLAIN)
    assert {n for n in NAMES if not plain[n][0].get("unsupported")} - found == set()
