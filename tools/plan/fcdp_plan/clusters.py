"""Described hardware: the clusters that are built in, files that describe others, and the options that change them."""

from __future__ import annotations

import argparse
import json
import math

from fcdp_lab.network import PAYLOAD, burst_bytes, parse_delay, parse_rate
from fcdp_memtrace.arguments import at_least, within
from fcdp_memtrace.units import size
from fcdp_plan.failure import Error

# What each key is, in a file that describes a cluster: the parser of its text, and the field of plan_cluster.
SIZES = {"gpu_memory": "gpu_memory_bytes", "host_memory": "host_memory_bytes", "burst": "burst_bytes"}
RATES = {
    "memory_rate": "memory_rate",
    "pcie": "pcie_rate",
    "host_rate": "host_rate",
    "node_link": "node_rate",
    "disk": "file_rate",
    "optimizer_on_cpus": "cpu_rate",
    "reduce_link": "reduce_rate",
}
TIMES = {"gather_times", "reduce_times", "lane_gather_times", "lane_reduce_times"}  # of "wire"
LATENCIES = {"node_latency": "node_latency_s", "latency": "inter_latency_s"}
OTHERS = {"gpus_per_node", "teraflops", "link", "links", "mtu", "payload", "trees", "wire"}
MEASURED = "measured"  # the name of the machine that a profile was measured on
# Of a message of gloo's, what the kernel counts beside it: a preamble, and two notices of as many bytes, that sender and
# receiver are ready; of each packet its headers, and an acknowledgement's. (Notices are acknowledged by what follows them.)
# TCP hands down packets of at most 45 segments, and a virtual link's counters have the headers of each once.
PREAMBLE, HEADERS, LARGEST = 48, 14 + 52, 45 * 1448
MESSAGES = {
    "message_bytes": 3 * PREAMBLE + 2 * HEADERS,
    "packet_bytes": 2 * HEADERS,
    "packet_payload": LARGEST,
}
# TCP over Ethernet, of a frame: headers of IP and TCP inside the MTU; preamble, header, checksum and gap outside it.
INSIDE, OUTSIDE = 40, 38

BUILT_IN = {
    # The FCDP paper's: eight A40 a node. Measured in its Table III: what PCIe 4.0 gives, and InfiniBand's two ways.
    # Ethernet is described; NVLink is its Table II's. Half of the GPU's 149.7 TFLOPS in float16 are reached.
    "a40": {
        "gpus_per_node": 8,
        "gpu_memory": "46068MiB",
        "host_memory": "512GB",
        "teraflops": 75,
        "memory_rate": "696gbyte",
        "pcie": "26.1gbyte",
        "host_rate": "200gbyte",
        "node_link": "200gbyte",
        "reduce_link": "0gbyte",
        "disk": "0gbyte",
        "optimizer_on_cpus": "100gbyte",
        "node_latency": "20us",
        "latency": "50us",
        "link": "rdma",
        "burst": "0",
        "links": {"rdma": "8.43gbyte", "ipoib": "2.019gbyte"},
        "mtu": 1500,
        "payload": 0,
        "wire": {},
        "trees": False,
    },
    # A node of eight H100 SXM on NVLink, 400 Gbit/s to the others.
    "h100": {
        "gpus_per_node": 8,
        "gpu_memory": "80GB",
        "host_memory": "2TB",
        "teraflops": 450,
        "memory_rate": "3350gbyte",
        "pcie": "55gbyte",
        "host_rate": "300gbyte",
        "node_link": "370gbyte",
        "reduce_link": "0gbyte",
        "disk": "20gbyte",
        "optimizer_on_cpus": "200gbyte",
        "node_latency": "10us",
        "latency": "30us",
        "link": "400gbit",
        "burst": "0",
        "links": {},
        "mtu": 4096,
        "payload": 0,
        "wire": {},
        "trees": False,
    },
}

# Of a machine whose rates were measured: what was not takes no time.
UNMEASURED = dict.fromkeys(RATES, "0gbyte") | dict.fromkeys(LATENCIES, "0us") | {"link": "unlimited", "links": {}}


def ethernet(bits: float, mtu: int) -> float:
    """Bytes of payload per second."""
    return bits / 8 * (mtu - INSIDE) / (mtu + OUTSIDE)


def _rate(key: str, value: object) -> float:
    """Bytes per second; 0: unlimited, or there is none."""
    text = str(value)
    if text.startswith("0"):
        if not text.rstrip("bytegkm/s").strip("0."):
            return 0.0
    try:
        bits = parse_rate(text)
    except ValueError as error:
        raise Error(f"{key}: {str(error).removeprefix('--rate ')}") from None
    return 0.0 if bits is None else bits / 8


def link_rate(description: dict, text: str) -> float:
    """Payload in bytes per second of a link that is named in the description, or of Ethernet of a rate."""
    if text in description["links"]:
        return _rate(f"link {text}", description["links"][text])
    try:
        bits = parse_rate(text)
    except ValueError:
        named = ", ".join([*description["links"], "25gbit, 100gbit and so on", "unlimited"])
        raise Error(f"no link {text!r}: write {named}") from None
    if bits is None:
        return 0.0
    share = _number(description, "payload")
    return bits / 8 * share if share > 0 else ethernet(bits, description["mtu"])


def read(name: str, job: dict | None = None) -> dict:
    """A cluster's description by its name, or from a file: keys that a file leaves out are those of a40. "measured": the
    machine that the job was measured on."""
    if name == MEASURED:
        if not job or "machine" not in job:
            raise Error("--cluster measured: the profile has no machine; fcdp-plan profile -- SCRIPT measures one")
        return BUILT_IN["a40"] | UNMEASURED | job["machine"]
    if name in BUILT_IN:
        return dict(BUILT_IN[name])
    try:
        with open(name) as file:
            given = json.load(file)
    except FileNotFoundError:
        raise Error(f"no cluster {name!r}: {', '.join(BUILT_IN)}, or a JSON file (docs/plan.md)") from None
    except (OSError, ValueError) as error:
        raise Error(f"{name}: {error}") from None
    known = {*SIZES, *RATES, *LATENCIES, *OTHERS}
    if not isinstance(given, dict) or not given.keys() <= known:
        wrong = ", ".join(sorted(given.keys() - known)) if isinstance(given, dict) else "no object"
        raise Error(f"{name}: {wrong}: a cluster has {', '.join(sorted(known))}")
    return BUILT_IN["a40"] | given


def _number(description: dict, key: str) -> float:
    try:
        return float(description[key])
    except (ValueError, TypeError):
        raise ValueError(f"{key}: {description[key]!r} is no number") from None


def numbers(description: dict, nodes: int) -> dict[str, float]:
    """What _plan takes."""
    fields: dict[str, float] = {"n_nodes": nodes}
    try:
        fields |= {field: float(size(str(description[key]))) for key, field in SIZES.items()}
        fields |= {field: _rate(key, description[key]) for key, field in RATES.items()}
        fields |= {field: parse_delay(str(description[key])) for key, field in LATENCIES.items()}
        fields["gpus_per_node"] = _number(description, "gpus_per_node")
        fields["trees"] = bool(description["trees"])
        fields["flops"] = _number(description, "teraflops") * 1e12
        fields["speed"] = _number({"speed": 1} | description, "speed")
        fields |= {key: _number(description["wire"], key) for key in TIMES & description["wire"].keys()}
        fields |= {key: _number(description, key) for key in MESSAGES.keys() & description.keys()}
        fields["inter_rate"] = link_rate(description, str(description["link"]))
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        raise Error(f"the cluster's description: {error}") from None
    if fields["gpus_per_node"] not in range(1, 65) or fields["flops"] <= 0:
        raise Error("a node has 1 to 64 GPUs, which compute at more than 0 teraflops")
    fields["gpus_per_node"] = int(fields["gpus_per_node"])
    return fields


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster",
        default="a40",
        metavar="NAME",
        help="a40 (default), h100, a JSON file, or measured: the machine of the profile",
    )
    parser.add_argument("--nodes", type=at_least(1), default=2, metavar="N", help="default 2")
    parser.add_argument("--gpus", type=at_least(1), metavar="G", help="per node")
    parser.add_argument(
        "--link", metavar="RATE", help="between nodes: 25gbit, 100gbit, ..., or one that the cluster names"
    )
    parser.add_argument(
        "--shaped",
        action="store_true",
        help="the links are those of fcdp-lab, which a token bucket shapes: to compare with it",
    )
    parser.add_argument("--latency", metavar="TIME", help="of a hop between nodes: 50us, 1ms")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="of a GPU: 48GB")
    parser.add_argument("--host-memory", metavar="SIZE", help="of a node")
    parser.add_argument("--pcie", metavar="RATE", help="of a GPU, each way: 26gbyte")
    parser.add_argument("--node-link", metavar="RATE", help="of a GPU to those of its node: 300gbyte")
    parser.add_argument("--disk", metavar="RATE", help="of a node: 6gbyte")
    parser.add_argument(
        "--trees", action="store_true", help="log2 hops between nodes, not one a node: NCCL's trees and PAT"
    )
    parser.add_argument("--teraflops", type=float, metavar="T", help="that a GPU reaches in a layer")
    parser.add_argument(
        "--speed",
        type=within(0.001, float("inf"), "times"),
        default=1.0,
        metavar="TIMES",
        help="a measured profile: a GPU computes so many times as fast as the machine that was measured",
    )


def described(args: argparse.Namespace, job: dict | None = None) -> dict:
    """The description that the options make, for the job."""
    description = read(args.cluster, job)
    for key in ("link", "latency", "gpu_memory", "host_memory", "pcie", "node_link", "disk", "teraflops"):
        value = getattr(args, key)
        if value is not None:
            description[key] = value
    if args.gpus is not None:
        description["gpus_per_node"] = args.gpus
    if args.trees:
        description["trees"] = True
    if args.shaped:
        description |= shaped(str(description["link"]), job)
    return description | {"speed": args.speed}


def shaped(link: str, job: dict | None) -> dict:
    """Of fcdp-lab's links: what their token buckets hold, and of the bytes that these count, how many are payload; and
    how long collectives hold them, where the profile has that."""
    try:
        bits = parse_rate(link)
    except ValueError:
        raise Error(f"--shaped: {link!r} is no rate of fcdp-lab") from None
    wire = (job or {}).get("calibration", {}).get("wire", {})
    own = {"burst": burst_bytes(bits), "payload": PAYLOAD, "wire": _wire_at(bits, wire)} if bits else {}
    return own | MESSAGES


def _wire_at(bits: float, wire: dict[str, dict]) -> dict[str, float]:
    """Of a rate between two that were measured, by its logarithm; of another, as at the nearest."""
    points = sorted((parse_rate(rate), times) for rate, times in wire.items())
    if not points:
        return {}
    for (low, slower), (high, faster) in zip(points, points[1:]):
        if low <= bits <= high:
            share = math.log(bits / low) / math.log(high / low)
            return {key: slower[key] * (1 - share) + faster[key] * share for key in TIMES}
    return points[0][1] if bits < points[0][0] else points[-1][1]
