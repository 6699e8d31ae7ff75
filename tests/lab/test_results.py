"""From records to figures, on records written by hand: what counts as a step, as sent, and as equal."""

import json

from fcdp_lab import lab, modes, report, results


def _step(n, t_in, t_out, digest="d", optimizer=0, layout="l", sent=0, fcdp=None, collectives=None):
    return {
        "kind": "step",
        "t": t_out,
        "optimizer": optimizer,
        "step": n,
        "t_in": t_in,
        "t_out": t_out,
        "sent": sent,
        "received": 0,
        "digest": digest,
        "layout": layout,
        "gathered": {"current": 0, "peak": 7},
        "fcdp": fcdp,
        "collectives": collectives,
    }


def _run(folder, ranks, sent, stdout=""):
    """A lab.Run whose files are those records; rank r is alone on node r."""
    (folder / "probe").mkdir(parents=True)
    for rank, lines in enumerate(ranks):
        start = {"kind": "start", "t": 0, "rank": rank, "local_rank": 0, "node": rank, "pid": 1}
        text = "".join(json.dumps(line) + "\n" for line in [start, *lines])
        (folder / "probe" / f"rank{rank}.1.jsonl").write_text(text)
    log = folder / "logs" / "node0" / "x" / "attempt_0" / "0"
    log.mkdir(parents=True)
    (log / "stdout.log").write_text(stdout)
    return lab.Run(modes.BUILT_IN[0], str(folder), dict(enumerate(sent)), dict(enumerate(sent)), 1.0)


def test_step_time_leaves_out_the_probe_and_the_warm_up(tmp_path):
    lines = [_step(1, 10, 11), _step(2, 16, 18), _step(3, 20, 20.5), _step(4, 23.5, 24), _step(5, 26, 26)]
    figures = results.of_run(_run(tmp_path, [lines], [0]), warmup=2)
    assert figures["step_s_each"] == [5, 2, 3, 2]
    assert figures["step_s"] == 2
    assert figures["steps"] == 5


def test_the_probe_s_work_for_further_optimizers_is_left_out_too(tmp_path):
    lines = [_step(1, 10, 11), _step(1, 12, 13, optimizer=1), _step(2, 16, 17), _step(2, 18, 18.5, optimizer=1)]
    figures = results.of_run(_run(tmp_path, [lines], [0]), warmup=1)
    assert figures["step_s_each"] == [4]


def test_bytes_are_those_between_counted_steps_and_split_by_collective(tmp_path):
    def stats(gather, reduce):
        kinds = {"gather": {"inter_bytes_sent": gather}, "reduce_scatter": {"inter_bytes_sent": reduce}}
        return {
            "enabled": True,
            "driver": "sim",
            "topology": {},
            "gathers": {},
            "bypassed": [],
            "groups": gather // 10,
            "collectives": kinds,
            "device_bytes": {"peak": 5},
            "host_bytes": {"peak": 9},
        }

    ranks = [
        [_step(n, n, n, sent=base + 100 * n, fcdp=stats(40 * n, 60 * n)) for n in range(1, 6)] for base in (5000, 9000)
    ]
    figures = results.of_run(_run(tmp_path, ranks, [1, 2]), warmup=2)
    assert figures["sent_bytes_per_step"] == 100
    assert figures["sent_bytes_per_step_by_collective"] == {"gather": 40, "reduce_scatter": 60}
    assert figures["device_gathered_peak_bytes"] == 5
    assert figures["host_peak_bytes"] == 9
    assert figures["fcdp"]["groups_served"] == 20


def test_without_fcdp_the_split_is_what_the_probe_counted(tmp_path):
    def sent(n):
        return {"plain_gather": {"inter_bytes_sent": 30 * n}} | (
            {"reduce_scatter": {"inter_bytes_sent": 50 * n}} if n > 1 else {}
        )

    ranks = [[_step(n, n, n, sent=100 * n, collectives=sent(n)) for n in range(1, 6)]] * 2
    figures = results.of_run(_run(tmp_path, ranks, [1, 2]), warmup=2)
    assert figures["sent_bytes_per_step_by_collective"] == {"plain_gather": 30, "reduce_scatter": 50}


def test_equal_means_every_rank_at_every_step(tmp_path):
    def train(name, digests, layout="l", stdout="loss 1.5"):
        lines = [_step(n, n, n, d, layout=layout) for n, d in enumerate(digests, 1)]
        return _run(tmp_path / name, [lines, lines], [0, 0], stdout)

    reference = train("reference", "abc")
    same = results.compare(train("same", "abc"), reference)
    assert same == {"shards": True, "losses": True, "first_difference": None}
    assert results.compare(train("late", "abx", stdout="loss 1.6"), reference) == {
        "shards": False,
        "losses": False,
        "first_difference": 3,
    }
    assert results.compare(train("short", "ab"), reference)["first_difference"] == 3
    other = results.compare(train("other", "xyz", layout="m"), reference)
    assert other == {"shards": None, "losses": True, "first_difference": None}


def test_nothing_that_stepped_is_not_called_equal(tmp_path):
    run = _run(tmp_path, [[]], [100])
    assert results.compare(run, run)["shards"] is None
    figures = results.of_mode(modes.BUILT_IN[0], [run], [run], 2)
    assert figures["step_s"] is None and figures["sent_bytes_per_step"] is None
    assert figures["runs"][0]["sent_bytes_total_by_node"] == [100]


def test_losses_are_read_as_text(tmp_path):
    run = _run(tmp_path, [[]], [0], "step 1 loss 5.748012542724609\nLoss: 1e-05\nloss=nan\nglossy 4\n")
    assert results.of_run(run, 1)["losses"] == ["5.748012542724609", "1e-05", "nan"]


def test_runs_are_interleaved_and_every_second_round_is_reversed():
    order = [(repeat, mode) for repeat, mode in lab.order_of_runs(["a", "b"], 3)]
    assert order == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_a_table_row_has_a_cell_per_column():
    mode = {
        "name": "fsdp",
        "env": {},
        "step_s": 2.0,
        "sent_bytes_per_step": 3e8,
        "sent_W_per_step": 3.0,
        "W_bytes": 1e8,
        "device_gathered_peak_bytes": 1e6,
        "device_state_bytes": None,
        "host_peak_bytes": 0,
        "equal": {"shards": False, "losses": None, "first_difference": 4},
    }
    first, second = report.rows({"modes": [mode, {**mode, "name": "x", "step_s": 1.0}]})
    assert len(first) == len(second) == len(report.COLUMNS)
    assert first[-1] == "reference" and second[-1] == "NOT from step 4"
    assert second[1] == "1.000 (0.50x)"


def test_a_device_has_a_column_and_its_moves_a_line(tmp_path):
    def moved(n):
        moves = {"h2d_bytes": 30 * n, "d2h_bytes": 10 * n, "evictions": n, "memory_waits": 0, "stores": n}
        return stats | {"moves": moves if n > 1 else {}}

    stats = {"enabled": True, "collectives": {}, "groups": 2, "gathers": {}, "bypassed": []}
    stats |= {"device_bytes": {"peak": 5}, "host_bytes": {"peak": 9}}
    ranks = [[_step(n, n, n, fcdp=moved(n)) | {"device": 40 - n} for n in range(1, 6)]] * 2
    run = _run(tmp_path, ranks, [1, 2])
    mode = results.of_mode(modes.BUILT_IN[1], [run], [run], warmup=2)
    assert mode["moves_per_step"] == {"h2d_bytes": 30, "d2h_bytes": 10, "evictions": 1, "memory_waits": 0}
    assert mode["device_taken_bytes"] == 39
    document = {"modes": [mode]}
    (row,) = report.rows(document)
    assert dict(zip(report.columns(document), row))["device MB"] == "0.0" and len(row) == len(report.columns(document))
    assert any("1.0 groups made room for others" in line for line in report.splits(document))
    stats["enabled"] = False  # it is imported there, and serves nothing
    plain = _run(tmp_path / "plain", [[_step(n, n, n, fcdp=moved(n)) for n in range(1, 6)]], [1])
    assert results.of_mode(modes.BUILT_IN[0], [plain], [plain], warmup=2)["moves_per_step"] is None


def test_without_a_device_there_is_neither(tmp_path):
    run = _run(tmp_path, [[_step(n, n, n) for n in range(1, 6)]], [1])
    mode = results.of_mode(modes.BUILT_IN[0], [run], [run], warmup=2)
    assert mode["moves_per_step"] is None is mode["device_taken_bytes"]
    assert report.columns({"modes": [mode]}) == report.COLUMNS
    assert report.unused({"modes": [mode], "device": {"type": "cpu"}}) is None
    assert "torch.accelerator" in report.unused({"modes": [mode], "device": {"type": "sim"}})
    used = {**mode, "device_taken_bytes": 1}
    assert report.unused({"modes": [mode, used], "device": {"type": "sim"}}) is None
