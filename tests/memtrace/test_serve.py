"""`fcdp-memtrace serve`: what Prometheus reads from it."""

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

pytest.importorskip("fcdp_memtrace", reason="the wheel is not installed in this interpreter (tools/setup.sh)")
parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed (tools/setup.sh)")
pytestmark = pytest.mark.slow  # it builds a job
COMMAND = [sys.executable, "-m", "fcdp_memtrace"]
MIB = 1 << 20


class Server:
    def __init__(self, *options):
        command = [*COMMAND, "serve", "--port", "0", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        said = self.process.stderr.readline()
        assert said.startswith("fcdp-memtrace: serving http://"), said
        self.url = said.split()[-1]

    def metrics(self):
        """name -> {labels: value}, parsed as Prometheus parses them."""
        with urllib.request.urlopen(self.url, timeout=60) as answer:
            assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/plain; version=")
            text = answer.read().decode()
        found = {}
        for family in parser.text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        return found

    def close(self):
        self.process.terminate()
        assert self.process.wait(60) == -signal.SIGTERM
        self.process.stderr.close()


@pytest.fixture
def serve():
    started = []

    def start(*options):
        started.append(Server(*options))
        return started[-1]

    yield start
    for server in started:
        server.close()


def by_rank(samples):
    return {dict(labels)["rank"]: value for labels, value in samples.items()}


def test_the_counters_of_a_live_job_are_served(play, serve):
    mine = play("--label", "mine.py")
    mine.tell("wait 7 agreement", "steps 4")
    server = serve("--pid", str(mine.process.pid))
    now = server.metrics()
    assert by_rank(now["fcdp_steps_total"]) == {str(rank): 4 for rank in range(4)}
    labels = dict(next(iter(now["fcdp_process"])))
    assert labels["command"] == "mine.py" and labels["world_size"] == "4" and labels["nodes"] == "2"
    # the device's levels are gauges, sums are counters; nanoseconds are seconds
    assert set(by_rank(now["fcdp_device_budget_bytes"]).values()) == {64 * MIB}
    assert "fcdp_stalls_seconds_total" in now and not [name for name in now if "_ns" in name or "." in name]
    mine.tell("steps 2")
    assert by_rank(server.metrics()["fcdp_steps_total"]) == {str(rank): 6 for rank in range(4)}


def test_jobs_come_and_go(play, serve):
    server = serve()
    mine = play("--label", "mine.py")
    pids = {str(pid) for pid in mine.pids}
    assert pids <= {dict(labels)["pid"] for labels in server.metrics()["fcdp_process"]}
    mine.end()
    left = server.metrics().get("fcdp_process", {})
    assert not pids & {dict(labels)["pid"] for labels in left}


def test_it_listens_on_this_machine_alone_unless_told_otherwise(serve):
    server = serve()
    host, port = server.url.removeprefix("http://").removesuffix("/metrics").split(":")
    assert host == "127.0.0.1"
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.2:{port}/metrics", timeout=10)
    everywhere = serve("--address", "0.0.0.0")
    port = everywhere.url.removesuffix("/metrics").rpartition(":")[2]
    with urllib.request.urlopen(f"http://127.0.0.2:{port}/metrics", timeout=60) as answer:
        assert answer.status == 200


def run(*options, **settings):
    env = {**os.environ, **settings}
    return subprocess.run([*COMMAND, "serve", *options], capture_output=True, text=True, timeout=60, env=env)


def test_what_cannot_be_served_is_said(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("--port", port)
        assert done.returncode == 1 and f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    done = run("--port", "70000")
    assert done.returncode == 1 and "--port must be 0 to 65535" in done.stderr
    (tmp_path / "prometheus_client.py").write_text("raise ImportError\n")
    done = run(PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "pip install prometheus-client" in done.stderr, done.stderr
