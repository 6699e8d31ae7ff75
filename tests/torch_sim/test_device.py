"""Streams, events, memory, copies and random numbers of the simulated device: one behaviour of device_job.py each."""

import pytest

RACES = {"FCDP_SIM_RACES": "1"}
BEHAVIOURS = {
    "host_runs_ahead": {},
    "a_rate_is_kept": {},
    "streams_wait_for_events": RACES,
    "a_missing_wait_is_reported": RACES,
    "a_missing_wait_for_one_of_many_is_reported": RACES,
    "a_write_behind_a_reader_is_reported": RACES,
    "a_freed_tensor_that_another_stream_reads_is_reported": RACES,
    "record_stream_keeps_memory": RACES,
    "memory_is_used_again_in_stream_order": RACES,
    "out_of_memory_is_torchs": {"FCDP_SIM_CAPACITY": "64M"},
    "pinned_copies_do_not_wait": RACES,
    "pageable_copies_are_right_when_they_return": RACES,
    "an_operators_error_is_raised": {},
    "random_numbers_are_the_devices": RACES,
    "checkpointing_repeats_random_numbers": RACES,
    "autocast_and_its_scaler": RACES,
    "a_script_finds_it": {"TORCH_SIM_DEVICES": "4"},
    "storages_are_resized": {},
    "tensors_are_saved": {},
}


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_device(name, run_job):
    run_job("device_job.py", name, env=BEHAVIOURS[name])
