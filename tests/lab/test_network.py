"""The emulated network does what it says: addresses, rates, and counters that see the links alone."""

import pathlib
import tempfile

import pytest

TRANSFER = """
import array, fcntl, os, socket, sys, termios, time
n_bytes, node = int(sys.argv[1]), int(os.environ["GROUP_RANK"])
if node == 0:
    with socket.create_server((os.environ["MASTER_ADDR"], 7000)) as server:
        peer, _ = server.accept()
        peer.recv(1)
        started, came_before = time.monotonic(), array.array("i", [0])  # while this process had no core
        fcntl.ioctl(peer, termios.FIONREAD, came_before)
        got = -came_before[0]
        while data := peer.recv(1 << 20):
            got += len(data)
        print("bits", got * 8 / (time.monotonic() - started))
else:
    deadline = time.monotonic() + 20
    while True:
        try:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], 7000))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
    peer.sendall(bytes(n_bytes))
    peer.shutdown(socket.SHUT_WR)
    assert not peer.recv(1)  # what was sent has left the kernel's buffers before the counters are read
    fields = next(l for l in open("/proc/self/net/dev") if "eth0" in l).split()
    print("packets", fields[10])
"""

N_TRIES = 8


def _said(logs, node, word):
    for path in logs.glob(f"**/node{node}/direct/attempt_0/0/stdout.log"):
        return float(path.read_text().split(word)[1].split()[0])
    raise AssertionError(f"node {node} did not say {word}")


def _transfer(lab, rate, n_bytes):
    logs = pathlib.Path(tempfile.mkdtemp(dir=lab.folder))
    options = ["--nodes", "2", "--ranks", "1", "--rate", rate, "--modes", "fsdp", "--logs", str(logs)]
    document = lab.figures(lab.script(TRANSFER), str(n_bytes), options=options)
    return document["modes"][0]["runs"][0], logs


def test_a_link_has_its_rate_and_large_packets_stay_whole(lab):
    """The full bucket lets 256 KiB more through at the start; a busy machine may be slower than its link, not
    faster, and then TCP sends smaller packets."""
    n_bytes, rate = 12_500_000, 100e6
    for _ in range(N_TRIES):
        run, logs = _transfer(lab, "100mbit", n_bytes)
        bits = _said(logs, 0, "bits")
        assert bits < 1.05 * rate, f"{bits / 1e6:.1f} Mbit/s over a link of 100"
        packet_bytes = n_bytes / _said(logs, 1, "packets")  # at most 1500 where they are split before the queue
        assert n_bytes < run["sent_bytes_total_by_node"][1] < 1.2 * n_bytes, "data, its headers, what was lost"
        assert run["sent_bytes_total_by_node"][0] < 98 / 1448 * n_bytes, "at most an acknowledgement of each packet"
        if bits > 0.9 * rate and packet_bytes > 8 * 1500:
            return
    pytest.fail(
        f"each time slower than the link of 100 Mbit/s ({bits / 1e6:.1f}), or in packets of {packet_bytes:.0f} bytes"
    )


def test_an_unlimited_link_is_faster_than_any_that_is_shaped(lab):
    for _ in range(N_TRIES):  # two that take turns on a core are slow
        _, logs = _transfer(lab, "unlimited", 100_000_000)
        if _said(logs, 0, "bits") > 1.5e9:
            return
    pytest.fail(f"each time slow: {_said(logs, 0, 'bits') / 1e6:.0f} Mbit/s the last time")


def test_loopback_traffic_within_a_node_is_not_counted(lab):
    text = """
import socket
with socket.create_server((socket.gethostname(), 0)) as server:
    a = socket.create_connection(server.getsockname())
    b, _ = server.accept()
    for _ in range(100):
        a.sendall(bytes(10000))
        left = 10000
        while left:
            left -= len(b.recv(left))
"""
    options = ["--nodes", "1", "--ranks", "1", "--modes", "fsdp"]
    document = lab.figures(lab.script(text), options=options)
    assert document["modes"][0]["runs"][0]["sent_bytes_total_by_node"][0] < 2000


def test_three_nodes_reach_each_other_by_name_and_nothing_else(lab):
    text = """
import os, socket, time
n, me = int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["GROUP_RANK"])
assert socket.gethostname() == f"node{me}", socket.gethostname()
links = [line.split(":")[0].strip() for line in open("/proc/self/net/dev") if ":" in line]
assert sorted(links) == ["eth0", "lo"], links
inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
inbox.bind((socket.gethostname(), 7000))
inbox.settimeout(0.05)
heard, told = set(), set()
deadline = time.monotonic() + 20
while (len(heard) < n or len(told) < n) and time.monotonic() < deadline:
    for k in range(n):
        inbox.sendto(b"%d" % me, (f"node{k}", 7000))
    try:
        while True:
            data, sender = inbox.recvfrom(100)
            if data.startswith(b"heard"):
                told.add(int(data[5:]))
            else:
                heard.add(int(data))
                inbox.sendto(b"heard%d" % me, sender)
    except (TimeoutError, ConnectionRefusedError):
        pass
assert heard == told == set(range(n)), (heard, told)
try:
    socket.create_connection(("192.0.2.1", 80), 1)
    raise SystemExit("the host's network can be reached")
except OSError:
    pass
"""
    lab.figures(lab.script(text), options=["--nodes", "3", "--ranks", "1", "--modes", "fsdp"])


def test_a_queue_that_the_kernel_lacks_is_named(lab):
    done = lab.run(lab.script("pass"), options=["--delay", "1ms", "--ranks", "1", "--modes", "fsdp"])
    assert done.returncode == 0 or "netem" in done.stderr
