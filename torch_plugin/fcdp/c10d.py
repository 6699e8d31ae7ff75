"""What FCDP needs from torch.distributed: shard process groups as nodes x ranks.

A Shards object is one shard process group seen as nodes x ranks: a control group for agreements and, unless
NCCL carries the core's collectives, two lanes (the ranks of this node; the ranks with this local index on
every node). All of them are backends that FCDP makes itself over the job's store, not process groups of
c10d's: they are in none of its tables, no dispatch mode counts what they do (CommDebugMode), nothing splits
the world's communicator for them, and they end when their shard group does. The core's streams use each lane
in turn. The program's own threads use the control group, and they order what they do over a process group; so
each is used in program order. All of them are gloo's: they carry host memory, whatever the device.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fcdp import OptionError, _fcdp, launcher, presence
from fcdp.rollcall import RollCall, connection

# Backends without several processes: nothing to serve.
_IN_PROCESS = ("fake", "threaded")


# Options that decide which collectives are made, in which order, and what the ranks of a node share: their keys in
# settings.options, and their names.
_ALIKE = {
    "agree": "FCDP_AGREE",
    "coalesce_bytes": "FCDP_COALESCE",
    "codec": "FCDP_CODEC",
    "host_copies": "FCDP_HOST_COPIES",
    "host_map_digest": "FCDP_HOST_MAP",
    "plan_digest": "FCDP_PLAN",
    "prefetch": "FCDP_PREFETCH",
    "reduce": "FCDP_REDUCE",
    "reduce_dtype": "FCDP_REDUCE_DTYPE",
    "restore": "FCDP_RESTORE",
    "transport": "FCDP_TRANSPORT",
    "whole_tensors": "FCDP_WHOLE_TENSORS",
}


class Unsupported(Exception):
    """FCDP cannot serve this process group; the text says why."""


class TurnedOff(Unsupported):
    """FCDP is off on some of the group's ranks. `first`: the first rank on which it is on."""

    def __init__(self, ranks: list[int], off: list[int]):
        names = ", ".join(map(str, off[:8])) + (", ..." if len(off) > 8 else "")
        super().__init__(f"FCDP is off on rank{'s'[: len(off) > 1]} {names}; set FCDP=1 on every rank")
        self.first = next(rank for rank in ranks if rank not in off)


def local_size(option: int) -> int:
    """Ranks per node: FCDP_LOCAL_SIZE, else what the launcher says."""
    try:
        return option or launcher.ranks_per_node(dist.get_world_size())[0]
    except ValueError as error:
        raise Unsupported(str(error)) from None


def _backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of the group's collectives for `device`. Direct calls of it bypass dispatch modes."""
    name = dist.get_backend(group)
    if name in _IN_PROCESS:
        raise Unsupported(f"its process group is of the backend '{name}', which moves no bytes between processes")
    try:
        backend = group._get_backend(device)
    except RuntimeError as error:
        raise Unsupported(f"its process group ({name}) serves no tensors of {device}: {error}") from None
    if _may_be_reconfigured(backend):
        raise Unsupported("its process group was made with enable_reconfigure, so its ranks may change")
    return backend


def _may_be_reconfigured(backend: Any) -> bool:
    try:
        return getattr(backend.options, "enable_reconfigure", False)
    except (AttributeError, RuntimeError):  # it has no options: an older torch's, or a backend of another library
        return False


def _has_interface() -> bool:
    """Does gloo find a network interface here? (It resolves the host's name, or takes GLOO_SOCKET_IFNAME.)"""
    try:
        distributed_c10d.ProcessGroupGloo.create_default_device()
    except RuntimeError:
        return False
    return True


def _one_by_one(timeout_s: float) -> Any:
    """gloo's options for a backend that carries out its collectives in order and one at a time. If a torch does not
    know these options, the timeout alone: then two collectives share the link, which is slower."""
    gloo, timeout = distributed_c10d.ProcessGroupGloo, timedelta(seconds=timeout_s)
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    try:
        options = gloo._Options()
        options._devices = (
            [gloo.create_device(interface=name) for name in names.split(",")]
            if names
            else [gloo.create_default_device()]
        )
        options._threads = 1
        options._timeout = timeout
    except (AttributeError, TypeError):
        return timeout
    return options


def _nodes(ranks: Iterable[int], size: int) -> bytes:
    """The node of each rank of the job, for the core."""
    return b"".join((rank // size).to_bytes(4, "little") for rank in ranks)


def _as_written(name: str, value: int) -> str:
    """An option's value, as a user writes it; of a plan and of names, their digest."""
    if name in ("FCDP_PLAN", "FCDP_HOST_MAP"):
        return f"{'plan' if name == 'FCDP_PLAN' else 'a list'} {value:014x}" if value else "not set"
    values = next(row[1] for row in _fcdp.options_table() if row[0] == name).split("|")
    return values[value] if len(values) > 1 else str(value)


def _check_alike(ranks: list[int], said: list[list[int]]) -> None:
    """`said`: every rank's values of _ALIKE. Raises the same error on every rank."""
    problems = []
    for name, values in zip(_ALIKE.values(), zip(*said)):
        other = next((i for i, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            here, there = (f"{_as_written(name, values[i])} on rank {ranks[i]}" for i in (0, other))
            problems.append(f"{name} is {here} and {there}")
    if problems:
        raise OptionError(f"fcdp: {'; '.join(problems)}; set the same value on every rank")


def swap(backend: Any, number: int, mine: dict[int, torch.Tensor], theirs: dict[int, torch.Tensor]) -> list[Any]:
    """Over gloo, by a backend or a process group, `mine` to each member that it names, and `theirs` from each, straight
    to their place: bytes in host memory, two of each member or more. The works, to be waited for in this order.
    `number`: the same on all members.

    Each message's last byte is one of its own. gloo tells what waits for a message that has not begun that its peer
    has ended, and not what waits for the rest of one."""
    tag = number % 1024  # of several interfaces, gloo takes one by the tag
    pieces = [(rank, piece) for rank, whole in theirs.items() for piece in (whole[:-1], whole[-1:])]
    received = [backend.recv([piece], rank, tag) for rank, piece in pieces]
    sent = [backend.send([piece], rank, tag) for rank, whole in mine.items() for piece in (whole[:-1], whole[-1:])]
    return [*received[1::2], *received[::2], *sent]


class Lane:
    """The members of one kind of collective, and the backend that carries it. Creating it is a collective of its
    members."""

    def __init__(self, ranks: list[int], me: int, store: dist.Store, name: str, timeout_s: float):
        self.size, self.place = len(ranks), ranks.index(me)
        self.roll = RollCall(ranks, me, store, f"{name}/{ranks[0]}/roll")
        self.backend: Any = None
        if self.size > 1:
            own = dist.PrefixStore(f"{name}/{ranks[0]}", store)
            self.backend = distributed_c10d.ProcessGroupGloo(own, self.place, self.size, _one_by_one(timeout_s))

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> Any:
        """`mine` of every member, in their order, in `out`; the work, to be waited for."""
        return self.backend._allgather_base(out, mine)

    def all_gather_in_place(self, out: torch.Tensor, number: int) -> list[Any]:
        """As all_gather, where this member's part lies in `out` already; the works, to be waited for in this order.
        Between two members the bytes go straight to their place, where gloo's all-gather takes another buffer of this
        size. `number`: the same on both."""
        parts = out.chunk(self.size)
        mine, other = parts[self.place], 1 - self.place
        if self.size != 2:
            return [self.all_gather(out, mine)]
        return swap(self.backend, number, {other: mine}, {other: parts[other]})

    def max_(self, tensor: torch.Tensor) -> None:
        options = distributed_c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self.backend.allreduce([tensor], options).wait()

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """The payload of every member, in their order; the payloads need not be of one length."""
        if self.size == 1:
            return [payload]
        lengths = self._rows(torch.tensor([[len(payload)]], dtype=torch.int64, device="cpu"))[:, 0].tolist()
        padded = bytearray(payload.ljust(max(*lengths, 1), b"\0"))
        rows = self._rows(torch.frombuffer(padded, dtype=torch.uint8)[None])
        return [bytes(row[:length].tolist()) for row, length in zip(rows, lengths)]

    def _rows(self, mine: torch.Tensor) -> torch.Tensor:
        out = torch.empty((self.size, mine.shape[1]), dtype=mine.dtype, device=mine.device)
        self.all_gather(out, mine).wait()
        return out

    def close(self) -> None:
        self.backend = self.roll.store = None


class Shards:
    """The lanes of one shard process group. Creating it is a collective of the group's ranks with FCDP on; `gather`
    is presence.py's."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, options: dict[str, Any], gather: Callable[[], None]
    ):
        self.device = device
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.comm: _fcdp.ShardGroup | None = None  # the core's; shard_groups.py makes it
        self.ahead = True  # every rank's device has room for a group that is begun ahead of its use; agreed
        self.wholes: dict[Any, list[Any]] = {}  # whole.py's; keys are the same on every rank, and stay
        self.n_groups = 0  # served so far
        self.agreements = 0
        self.agree_bytes = 0  # from this rank to other nodes
        self.reducer: Any = None  # reduce.py's
        self.meets = False  # its ranks of each node have host memory in common
        backend, self.store = _backend_of(group, device), distributed_c10d._get_default_store()
        if self.store is None:
            raise Unsupported("the job has no store (its backend is MPI?)")
        if off := presence.absent(group, self.store, gather):
            raise TurnedOff(self.ranks, off)
        try:
            size, problem = local_size(options["local_size"]), ""
        except Unsupported as error:
            size, problem = 0, str(error)
        # The group's first rank names what follows, so that a store which is used again holds no old keys of ours.
        alike = [min(int(options[key]), 2**63 - 1) for key in _ALIKE]
        said = self._gather_ints(backend, [size, _has_interface(), secrets.randbits(62), *alike])
        sizes, name = [row[0] for row in said], f"fcdp/{said[0][2]:x}"
        no_interface = [rank for rank, row in zip(self.ranks, said) if not row[1]]
        if no_interface:
            raise Unsupported(
                f"gloo finds no network interface on rank {no_interface[0]}; set GLOO_SOCKET_IFNAME to the one that joins the nodes"
            )
        if not all(sizes):
            unknown = self.ranks[sizes.index(0)]
            raise Unsupported(
                problem
                or f"rank {unknown} does not know how many ranks its node has; set FCDP_LOCAL_SIZE on every rank"
            )
        if len(set(sizes)) > 1:
            raise Unsupported(
                f"ranks per node differ: the group's ranks say {sizes}; FCDP needs the same number on every node"
            )
        self.machine = self.ranks[self.rank] // size  # of the whole job, whatever this group takes of it
        self.node_of = _nodes(self.ranks, size)
        try:
            self.topology: dict[str, int] = _fcdp.topology(self.node_of, self.rank)
        except _fcdp.Error as error:
            alone = dist.get_world_size() <= size  # on this node, the whole job
            advice = (
                "; fcdp-lab emulates nodes on this machine, and shows what FCDP saves between them"
                if alone
                else self._served_mesh(size)
            )
            raise Unsupported(error.args[0] + advice) from None
        _check_alike(self.ranks, [row[-len(alike) :] for row in said])
        self.node_size, self.local = self.topology["ranks_per_node"], self.topology["local_rank"]
        self.name, self.timeout_s = name, options["timeout_s"]
        self.lanes: dict[int, Lane] = {}
        # missing() has an answer to find: the core's collectives cannot name the ranks, and no call has asked yet
        self.can_ask = False
        # Several threads may make lanes at once, if each has a model: a rank waits on the store for the lane of one,
        # and that of another must not wait for it. So each shard group has a connection of its own.
        self.lane_store = connection(self.store, timedelta(seconds=self.timeout_s))
        self.control = self._lane("control", self.ranks)

    def _served_mesh(self, size: int) -> str:
        """For a group inside one node of several: the mesh with as many shards that FCDP would serve, if there is one."""
        n_ranks, (n_others, rest) = len(self.ranks), divmod(dist.get_world_size(), len(self.ranks))
        if rest or len({rank // size for rank in self.ranks}) > 1:
            return ""
        try:
            _fcdp.topology(_nodes(range(0, n_ranks * n_others, n_others), size), 0)
        except _fcdp.Error:
            return ""
        mesh = f'init_device_mesh("{self.device.type}", ({n_ranks}, {n_others}), mesh_dim_names=("shard", "other"))'
        return f'. FCDP serves a mesh whose sharded dimension comes first: {mesh}["shard"]'

    def number(self) -> int:
        """A number of 64 bits, the same on each of the group's ranks, so that no two groups of a job share one."""
        return int.from_bytes(hashlib.blake2b(repr(self.ranks).encode(), digest_size=8).digest(), "little")

    def _lane(self, kind: str, ranks: list[int]) -> Lane:
        return Lane(ranks, self.ranks[self.rank], self.lane_store, f"{self.name}/{kind}", self.timeout_s)

    def _gather_ints(self, backend: Any, values: list[int]) -> list[list[int]]:
        mine = torch.tensor(values, dtype=torch.int64, device=self.device)
        out = torch.empty(len(self.ranks) * len(values), dtype=torch.int64, device=self.device)
        backend._allgather_base(out, mine).wait()
        return out.view(len(self.ranks), len(values)).tolist()

    def crosses(self, ranks: list[int]) -> bool:
        """Does this rank's hop to the next one leave the node, in a ring of `ranks` of this group?"""
        me = self.ranks[self.rank]
        following = ranks[(ranks.index(me) + 1) % len(ranks)]
        node = [self.node_of[4 * i : 4 * i + 4] for i in (self.rank, self.ranks.index(following))]
        return node[0] != node[1]

    def close(self) -> None:
        """Its connections end. No collective of it is under way."""
        self._close_lanes()
        self.control.close()
        self.lane_store = self.reducer = None

    def agree(self, votes: bytes) -> bytes:
        """The maximum of every byte over the group's ranks (comm/ballot.h)."""
        start, before = _fcdp.trace_start(), self.agreements
        self.agreements = number = self.control.roll.enter()
        try:
            agreed, sent = self.comm.agree(self._swap, number, votes) if self.meets else self._max(votes, number)
        except Exception as error:
            if isinstance(error, _fcdp.Error) and error.args[1] == _fcdp.ERR_INVALID:
                raise RuntimeError(f"fcdp: {error.args[0]}") from None
            missing = self.control.roll.missing(number)
            why = error.args[0] if isinstance(error, _fcdp.Error) else error
            raise RuntimeError(
                f"fcdp: agreement {number} of {len(self.ranks)} ranks on what is stale failed; {missing}: {why}"
            ) from error
        self.agree_bytes += sent
        _fcdp.trace_agreement(start, number - before, sent)
        return agreed

    def _swap(self, to: int, from_: int, mine: bytes, timeout_s: float) -> bytes:
        """Swap bytes with the first ranks of two other nodes; returns those of node `from_`. Only first ranks call
        this."""
        limit, theirs = timedelta(seconds=max(timeout_s, 0.001)), bytearray(len(mine))
        backend, n = self.control.backend, self.node_size
        coming = backend.recv([torch.frombuffer(theirs, dtype=torch.uint8)], from_ * n, 0)
        going = backend.send([torch.frombuffer(bytearray(mine), dtype=torch.uint8)], to * n, 0)
        coming.wait(limit)
        going.wait(limit)
        return bytes(theirs)

    def _max(self, votes: bytes, number: int) -> tuple[bytes, int]:
        """The agreement while the ranks of a node have no memory in common: all ranks of the group in a ring. Two more
        bytes guard against ranks that are at different agreements."""
        stamp = (number + len(votes)) % 256
        ballot = torch.frombuffer(bytearray(votes) + bytes((stamp, 255 - stamp)), dtype=torch.uint8)
        self.control.max_(ballot)
        result = bytes(ballot.tolist())  # not by NumPy, which torch does not bring
        if result[-2] + result[-1] != 255:
            raise RuntimeError(f"the ranks are not at the same agreement ({len(votes)} votes on this rank)")
        return result[:-2], 2 * len(result) if self.local == self.node_size - 1 else 0

    def agreed(self) -> tuple[int, int, int]:
        """Agreements so far, and their bytes from this rank to other nodes, and within the node, in whose memory
        its ranks meet."""
        return self.agreements, self.agree_bytes, 0

    def raise_together(self, problem: Exception | None) -> None:
        """Raise on every rank if any rank has a problem: OptionError if some rank cannot satisfy an option, else
        Unsupported."""
        stops = isinstance(problem, _fcdp.Error) and problem.args[1] == _fcdp.ERR_OPTION
        mine = b"\0" if problem is None else b"\2" if stops else b"\1"
        worst = self.agree(mine)
        if worst == b"\0":
            return
        said = self.control.all_gather_bytes(mine + (str(problem.args[0]).encode() if problem else b""))
        first = next(rank for rank, row in enumerate(said) if row[:1] == worst)
        text = said[first][1:].decode()
        text = text if first == self.rank else f"rank {self.ranks[first]}: {text}"
        raise OptionError(f"fcdp: {text}") if worst == b"\2" else Unsupported(text)

    def from_leader(self, payload: bytes) -> bytes:
        """`payload` of the node's local rank 0, on every rank of the node. It goes over the control group, since a
        stream may be gathering an earlier group on the node's lane."""
        with self.control.roll.explains(self.control.roll.enter()):
            return self.control.all_gather_bytes(payload)[self.rank - self.local]

    def missing(self) -> str:
        """The ranks that have not come to a collective that has failed since the last agreement. "": the failure names
        them itself, or an earlier call has asked."""
        can_ask, self.can_ask = self.can_ask, False
        return self.control.roll.missing(self.agreements) if can_ask else ""

    def members_between_nodes(self) -> list[int]:
        """The ranks of the group with this rank's local index, one of each node."""
        return [k * self.node_size + self.local for k in range(self.topology["nodes"])]

    def transport(self) -> Transport:
        """Makes the lanes and a transport over them; a collective of the group."""
        node, n = self.topology["node"], self.node_size
        between = [self.ranks[member] for member in self.members_between_nodes()]
        lanes = {
            _fcdp.LANE_INTER: self._lane("inter", between),
            _fcdp.LANE_NODE: self._lane("node", self.ranks[node * n : (node + 1) * n]),
        }
        self._close_lanes()
        self.lanes = lanes
        return Transport(lanes)

    def _close_lanes(self) -> None:
        for lane in self.lanes.values():
            lane.close()
        self.lanes = {}

    def all_gather_bytes(self, mine: bytes) -> bytes:
        """What every rank brings, one after another."""
        return b"".join(self.control.all_gather_bytes(mine))

    def first_problem(self, problem: str) -> str:
        """The problem of the first rank that has one, on every rank; "": no rank has any."""
        said = self.control.all_gather_bytes(problem.encode())
        return next((f"rank {rank}: {row.decode()}" for rank, row in zip(self.ranks, said) if row), "")


class Transport:
    """The core's all-gathers of host memory, in place over `members * length` bytes at `address`; called on
    threads of the core's streams, `begin` by one at a time. What has begun first crosses first."""

    def __init__(self, lanes: dict[int, Lane]):
        self.lanes = lanes

    def begin(self, key: int, address: int, length: int) -> tuple[list[Any], int, torch.Tensor]:
        lane = self.lanes[key]
        out = torch.from_dlpack(_fcdp.dlpack(address, lane.size * length, 1, 8, 1, 0, None))
        number = lane.roll.enter()
        with lane.roll.explains(number):
            return lane.all_gather_in_place(out, number), number, out

    def finish(self, key: int, begun: tuple[list[Any], int, torch.Tensor]) -> None:
        works, number, _ = begun
        with self.lanes[key].roll.explains(number):
            for work in works:
                work.wait()
