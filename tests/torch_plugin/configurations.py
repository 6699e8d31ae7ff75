"""Which training cases run, and in which configurations. TEST_MATRIX=whole: all, in all."""

import collections
import os
import re
import zlib

import cases  # noqa: F401
import run

PLAIN = "plain"
CONFIGURATIONS = {
    f"tau{tau}-{restore}": {
        "FCDP": "1",
        "FCDP_LOCAL_SIZE": "2",
        "FCDP_TAU": str(tau),
        "FCDP_RESTORE": restore,
        "FCDP_TIMEOUT": "60",
        **others,
    }
    for tau, restore, others in (
        (0, "slice", {"FCDP_CODEC": "none"}),  # by which bytes are counted: they are the same in each run
        (0, "whole", {"FCDP_COALESCE": "0", "FCDP_MAPPING": "exact", "FCDP_CODEC": "delta"}),
        (1, "slice", {"FCDP_COALESCE": "0", "FCDP_FINGERPRINT": "device"}),  # FCDP_CODEC's default
        (1, "whole", {"FCDP_MAPPING": "exact", "FCDP_CODEC": "delta", "FCDP_HOST_COPIES": "numa"}),
    )
}
CONFIGURATIONS["next_use-slice"] = {**CONFIGURATIONS["tau0-slice"], "FCDP_COALESCE": "0", "FCDP_POLICY": "next-use"}
IN_TURN = ("tau0-slice", "tau0-whole", "tau1-slice", "tau1-whole")
# The same cases on torch.device("sim") (sim/torch), where the host runs ahead and every access is checked.
SIM = {"TEST_DEVICE": "sim", "FCDP_SIM_RACES": "1"}
SIM_FCDP = {**SIM, "FCDP": "1", "FCDP_LOCAL_SIZE": "2", "FCDP_TRANSPORT": "torch", "FCDP_TIMEOUT": "60"}
SIM_PLAIN = "sim-plain"
ON_SIM = {
    SIM_PLAIN: SIM,
    "sim-slots": {**SIM_FCDP, "FCDP_MAPPING": "slots"},  # the default policy, which is next-use there
    "sim-exact": {**SIM_FCDP, "FCDP_MAPPING": "exact", "FCDP_TAU": "0"},
    "sim-next-use": {**SIM_FCDP, "FCDP_MAPPING": "exact", "FCDP_POLICY": "next-use"},
    "sim-exact-kept": {**SIM_FCDP, "FCDP_MAPPING": "exact", "FCDP_TAU": "1"},
    # The host waits for fingerprints, and for what it coalesces: that would hide an order that is missing.
    "sim-signals": {**SIM_FCDP, "FCDP_FINGERPRINT": "never", "FCDP_COALESCE": "0"},
    "sim-quarantine": {**SIM_FCDP, "FCDP_CHECK": "2"},
    "sim-delta": {
        **SIM_FCDP,
        "FCDP_MAPPING": "exact",
        "FCDP_CODEC": "delta",
        "FCDP_COALESCE": "0",
        "FCDP_SIM_SERIAL": "1",
        "FCDP_CODEC_THREADS": "2",
    },
}
# FCDP_REDUCE=hierarchical, and plain FSDP whose reduce-scatter is made to add in that order (compat.py).
REDUCED = {
    "two_steps": {"TEST_REDUCE": "two_steps"},
    "hierarchical": {**CONFIGURATIONS["tau0-slice"], "FCDP_REDUCE": "hierarchical"},
    "sim-hierarchical": {**ON_SIM["sim-slots"], "FCDP_REDUCE": "hierarchical"},
}
IN_ALL = ("accumulate_with_sync",)  # cases by which tests see that a configuration is what it says
OF_ORDER = ("fsdp1_cpu_offload", "fsdp1_parameters_replaced_by_data_bf16")  # whose faults only a device shows
COLD = "tau0-slice"  # the matrix's job is torchrun's there, and each rank imports all by itself


def is_whole():
    """TEST_MATRIX=whole (tools/test.sh --matrix): what else is done in one of several ways is done in all."""
    return os.environ.get("TEST_MATRIX") == "whole"


def configurations_of(name):
    """In which a case of the matrix trains: in one, by its name."""
    if name in IN_ALL + OF_ORDER or is_whole():
        return tuple(CONFIGURATIONS)
    configuration = IN_TURN[zlib.crc32(name.encode()) % len(IN_TURN)]
    if re.search("^(lora|accumulate|fsdp1_trains|frozen)", name):  # of several steps that are alike
        configuration = configuration.replace("tau1-slice", "next_use-slice")
    return (configuration,)


def in_one_mapping(names, mapping):
    """Those that train in it on the simulated device: about half of them, by their names."""
    return [
        name
        for name in names
        if name in IN_ALL + OF_ORDER or is_whole() or ("slots", "exact")[zlib.crc32(name.encode()) // 4 % 2] == mapping
    ]


def some(functions, of_a_file, of_alike=None):
    """Of cases by name: of those that one function makes each `of_alike`-th, and of a file's others each `of_a_file`-th,
    their first included; without `of_alike`, of a file's each `of_a_file`-th. All of them where the whole matrix is asked
    for."""
    seen, chosen = collections.Counter(), {}
    for name, function in functions.items():
        made_by = function.__qualname__ if of_alike and "<locals>" in function.__qualname__ else ""
        is_always = name in IN_ALL + OF_ORDER or name.startswith("gathered_parameter_")
        if is_always or is_whole() or seen[function.__module__, made_by] % (of_alike if made_by else of_a_file) == 0:
            chosen[name] = function
        seen[function.__module__, made_by] += 1
    return chosen


# What the device does not have (sim/torch/README.md).
NOT_THERE = {
    r"^compiled_|_in_compiled_code": "torch.compile",
    r"^a_reduction_that_the_backend_refuses$": "reduction that its backend refuses",
}
# Cases that tests look at by their names, or which alone see through one of the wrong caches (test_mutants.py).
NAMED = (
    "a_block_used_twice_is_written_into_on_one_rank",
    "a_reduction_that_the_backend_refuses",
    "all_gather_extension_of_two_tensors",
    "all_gather_extension_that_gathers_a_subclass",
    "backward_of_a_root_left_sharded",
    "custom_all_gather",
    "edits_of_frozen_groups",
    "edits_on_one_rank_between_forward_and_backward",
    "edits_raw_between_micro_batches",
    "edits_uncounted_between_micro_batches",
    "ema_swap_data_with_grad_enabled",
    "exception_in_backward_then_load",
    "exception_in_the_head_then_load",
    "fsdp1_bf16_orig",
    "fsdp1_edits_data_orig",
    "fsdp1_edits_raw_on_one_rank",
    "fsdp1_edits_raw_on_one_rank_orig",
    "fsdp1_hybrid_inside_the_nodes",
    "full_adamw_fused",
    "load_state_dict_copy_between_micro_batches",
    "model_deleted_and_made_again",
    "lora",
    "reshard_after_forward_2",
    "sharded_along_the_second_dimension",
    "step_in_backward_torch_block_twice",
    "tied_weights_in_a_list_of_modules",
    "two_parameter_groups_of_one_block",
    "unsharded_storage_kept",
    "views_that_outlive_a_reshard",
    "whole_behind_uncounted_writes",
    "whole_behind_writes_on_one_rank",
    "whole_of_what_the_program_wrote_into",
    "zeroth_order_raw",
)
TRAINED = some(run.CASES, of_a_file=3, of_alike=8) | {name: run.CASES[name] for name in NAMED}
THERE = {name: case for name, case in TRAINED.items() if not any(re.search(why, name) for why in NOT_THERE)}
# Of these the simulated device has one more mapping or policy each (test_on_sim.py).
OF_STREAMS = (
    "checkpoint_around_reentrant",
    "exception_in_backward_then_load",
    "exception_in_the_head_then_load",
    "frozen_groups",
    "fsdp1_bf16_orig",
    "fsdp1_full_shard",
    "lora",
    "prefetch_in_forward",
    "reshard_after_forward_2",
    "whole_of_what_the_program_wrote_into",
)
TRAINED_ON_SIM = sorted(some(THERE, of_a_file=4) | {name: run.CASES[name] for name in OF_STREAMS})
