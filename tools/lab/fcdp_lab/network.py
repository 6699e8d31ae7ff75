"""The emulated network: one switch (a bridge in a namespace of its own) and one link per node.

Each end of a link has a token bucket at the link's rate, so a node's sends and its receives are bounded alike.
Only names and commands live here; the caller chooses the namespace in which a command runs.
"""

import re
import shutil
import subprocess

BRIDGE = "lab0"
NODE_INTERFACE = "eth0"
MASTER_PORT = 29500

_LATENCY_MS = 50
_MIN_BURST_BYTES = 256 * 1024
_BURST_SECONDS = 0.001
# Of the bytes that a shaper counts, those that TCP carries: of a frame it counts 1,500 bytes and the header of Ethernet, but
# neither checksum nor gap; 52 bytes are headers of IP and of TCP, with its timestamps.
PAYLOAD = (1500 - 52) / (1500 + 14)
_PREFIXES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_UNITS = {"bit": 1, "byte": 8}
_DELAY_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class NetworkError(Exception):
    """The network could not be built; the message says what to do about it."""


def parse_rate(text):
    """Bits per second, or None for an unshaped link. 1gbit is 1e9 bits, 1gbyte 8e9. An ambiguous unit is refused
    (tc's own 1gbps is 1e9 bytes, most others' is bits)."""
    if text == "unlimited":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)(bit|byte|bps|b|)s?(?:/s)?", text.lower())
    if not found or float(found[1]) <= 0 or not found[2] + found[3]:
        raise ValueError(f"--rate {text}: write e.g. 1gbit, 2.5gbit, 500mbit, 125mbyte or unlimited")
    if found[3] not in _UNITS:
        number = found[1] + found[2]
        raise ValueError(f"--rate {text}: {number}bit, or {number}byte?")
    bits = float(found[1]) * _PREFIXES[found[2]] * _UNITS[found[3]]
    if bits < 1e5:
        raise ValueError(f"--rate {text} is below 100kbit: no job would end")
    return bits


def parse_delay(text):
    """Seconds, one way."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text)
    if not found:
        raise ValueError(f"delay {text!r} is not a time: write e.g. 100us or 2ms")
    return float(found[1]) * _DELAY_UNITS[found[2]]


def node_address(node):
    return f"10.77.{node // 250}.{node % 250 + 1}"


def node_name(node):
    return f"node{node}"


def hosts_file(n_nodes):
    lines = ["127.0.0.1 localhost"] + [f"{node_address(k)} {node_name(k)}" for k in range(n_nodes)]
    return "\n".join(lines) + "\n"


def missing_tools():
    return [tool for tool in ("ip", "tc") if _find(tool) is None]


def _find(tool):
    return shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin:/usr/bin:/bin")


def _run(*command):
    done = subprocess.run([_find(command[0]), *command[1:]], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise NetworkError(
            f"{' '.join(command)}: {done.stderr.strip() or f'exit {done.returncode}'}{_hint(done.stderr)}"
        )


def _hint(stderr):
    if "qdisc kind is unknown" in stderr:
        return "\nThis kernel lacks that queue (tbf shapes, netem delays): load sch_tbf/sch_netem, or leave the option out."
    return ""


def burst_bytes(rate_bits):
    """At least four of the largest GSO packets (64 KiB), so that tbf never has to split one."""
    return int(max(_MIN_BURST_BYTES, rate_bits / 8 * _BURST_SECONDS))


def _shape(interface, rate_bits):
    _run(
        "tc",
        "qdisc",
        "add",
        "dev",
        interface,
        "root",
        "handle",
        "1:",
        "tbf",
        "rate",
        f"{int(rate_bits)}bit",
        "burst",
        f"{burst_bytes(rate_bits)}b",
        "latency",
        f"{_LATENCY_MS}ms",
    )


def create_switch():
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "name", BRIDGE, "type", "bridge", "mcast_snooping", "0")
    _run("ip", "link", "set", BRIDGE, "addrgenmode", "none", "up")


def connect_node(node, pid, rate_bits):
    """In the switch's namespace: a link whose other end appears in the namespace of process `pid`."""
    port = f"port{node}"
    _run("ip", "link", "add", "name", port, "type", "veth", "peer", "name", NODE_INTERFACE, "netns", str(pid))
    _run("ip", "link", "set", port, "addrgenmode", "none", "master", BRIDGE, "up")
    if rate_bits:
        _shape(port, rate_bits)


def bring_up_node(node, rate_bits, delay_s):
    """In the node's namespace, after connect_node."""
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "set", NODE_INTERFACE, "addrgenmode", "none")
    _run("ip", "address", "add", f"{node_address(node)}/16", "dev", NODE_INTERFACE)
    _run("ip", "link", "set", NODE_INTERFACE, "up")
    if rate_bits:
        _shape(NODE_INTERFACE, rate_bits)
    if delay_s:
        place = ["parent", "1:1"] if rate_bits else ["root"]
        _run(
            "tc",
            "qdisc",
            "add",
            "dev",
            NODE_INTERFACE,
            *place,
            "netem",
            "delay",
            f"{int(delay_s * 1e6)}us",
            "limit",
            "20000",
        )


def read_counters(path="/proc/self/net/dev"):
    """Bytes sent and received by this namespace's interfaces other than lo."""
    sent = received = 0
    with open(path) as f:
        for line in f:
            name, colon, rest = line.partition(":")
            if colon and name.strip() != "lo":
                fields = rest.split()
                received += int(fields[0])
                sent += int(fields[8])
    return sent, received
