"""FCDP_REDUCE=hierarchical: gradients are summed within each node first, and then between the nodes.

FSDP's reduce-scatter is a ring over all ranks of a shard group: nearly all of the gradients leave each node, over
gloo twice. In two steps it is (N - 1)/N of them on N nodes, over any transport. A rank's gradients are
`nodes x ranks_per_node` rows, one for each rank of the group:

    within:   row (k, l) of every rank of the node -> summed on local rank l          for every node k
    between:  that sum goes to node k's local rank l, which adds what comes from the nodes in the nodes' order

A micro-batch without gradient synchronisation (FSDP2's) takes the first step alone. Its sums are kept, 1/g of the
gradients on each of a node's g ranks, and cross with the next micro-batch that is synchronised.

Both are made by backends like the job's own (gloo, NCCL), on the stream on which FSDP reduces. The order of the sums
is the same in every run. On two nodes of two ranks it is HSDP's, whose steps are a reduce-scatter within the node and
an all-reduce between the nodes; of more ranks within a node the backend decides the order. Where this cannot serve,
FSDP's own reduce-scatter runs, on all ranks of the shard group alike, and one line says so.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fcdp import _fcdp, plain, shard_groups, words
from fcdp.c10d import Shards, Unsupported, swap
from fcdp.rollcall import RollCall
from fcdp.settings import options
from fcdp.wire import Rounding, Wire, wire_for

_calls = {"hierarchical": 0, "flat": 0, "kept": 0}  # reduce-scatters while the option is on
_reasons: list[str] = []  # why some were flat

_rounding = Rounding()

_HALF = (torch.float16, torch.bfloat16)  # more than two of them are added in float32

# Of what goes to one node: up to this it is copied, so that one collective within the node serves for all nodes. Over
# gloo, two ranks and two nodes, that takes 0.6 times as long at 64 KiB, as long at 1 MiB, and longer above.
_SMALL_BYTES = 512 << 10


def is_on() -> bool:
    return options.get("reduce", _fcdp.REDUCE_FLAT) != _fcdp.REDUCE_FLAT


def counts() -> dict[str, Any]:
    """For fcdp.stats()."""
    return {**_calls, "reasons": list(_reasons), "rounding_error": _rounding.share()}


def count_flat() -> None:
    """FSDP's own reduce-scatter has run."""
    _calls["flat"] += is_on()


def leave(reason: str) -> None:
    """FSDP's own reduce-scatter runs, on all ranks of the shard group."""
    if reason not in _reasons:
        _reasons.append(reason)
        words.say(f"FCDP_REDUCE=hierarchical: {reason}; FSDP's own reduce-scatter runs")


_UNLIKE = (
    "fcdp: FCDP_REDUCE=hierarchical: in backwards without gradient synchronisation, the ranks of this node have reduced "
    "gradients of different modules, or in another order, so the sums are wrong. Let all of them use the same "
    "modules in one order, or set FCDP_REDUCE=flat"
)


class _Lane:
    """The ranks that one step is among, and their backend for the gradients' device. Making it is a collective of
    theirs."""

    def __init__(self, shards: Shards, kind: str, ranks: list[int], like: Any):
        me, store, name = shards.ranks[shards.rank], shards.lane_store, f"{shards.name}/{kind}"
        self.size, self.place = len(ranks), ranks.index(me)
        self.roll = RollCall(ranks, me, store, f"{name}/{ranks[0]}/roll")
        self.backend: Any = None
        if self.size > 1:
            own = dist.PrefixStore(f"{name}/{ranks[0]}", store)
            self.backend = _backend(like, own, self.place, self.size, timedelta(seconds=shards.timeout_s))


def _backend(like: Any, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """One of the kind of `like`, in none of c10d's tables (c10d.py says why). Raises Unsupported."""
    name = like.name()
    if name == "gloo":
        return distributed_c10d.ProcessGroupGloo(store, rank, size, timeout)
    if name == "nccl":
        nccl = distributed_c10d.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return distributed_c10d.ProcessGroupNCCL(store, rank, size, nccl)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None or plugin.extended_api:
        raise Unsupported(f"no backend of the kind '{name}' can be made beside the job's own")
    return plugin.creator_fn(store, rank, size, timeout)


def cross(lane: Any, rows: torch.Tensor, taken: torch.Tensor) -> None:
    """`taken`: of each other member of the lane, its row for this one; this one's own row there is not defined."""
    backend, number = lane.backend, lane.roll.enter()
    with lane.roll.explains(number):
        if rows.device.type != "cpu" or backend.name() != "gloo":
            backend.alltoall_base(taken, rows, [], [], distributed_c10d.AllToAllOptions()).wait()
            return
        others = [k for k in range(lane.size) if k != lane.place]
        mine, theirs = ({k: row[k] for k in others} for row in (rows.view(torch.uint8), taken.view(torch.uint8)))
        for work in swap(backend, number, mine, theirs):
            work.wait()


class Reducer:
    """Both steps for the ranks of one shard group. Making it is a collective of theirs."""

    def __init__(self, group: dist.ProcessGroup, shards: Shards):
        self.device, self.n_nodes = shards.device, shards.topology["nodes"]
        self.n_made = 0  # reduce-scatters so far
        self.kept: list[str] = []  # what keep() has summed since the last reduce-scatter, in order
        self.n_compared = 0
        node, n = shards.topology["node"], shards.node_size
        try:
            like = group._get_backend(self.device)
            self.within = _Lane(shards, "sum", shards.ranks[node * n : (node + 1) * n], like)
            self.between = _Lane(shards, "cross", shards.ranks[shards.local :: n], like)
            self.of_node = dist.PrefixStore(f"{shards.name}/kept/{node}", shards.lane_store)
            problem = None
        except (RuntimeError, AttributeError, TypeError, Unsupported) as error:
            problem = Unsupported(*map(str, error.args))
        shards.raise_together(problem)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        gradients: torch.Tensor,
        op: Any,
        may_overwrite: bool,
        kept: torch.Tensor | None = None,
    ) -> None:
        """`gradients`: this rank's, a row for each rank of the group; `output`: what all ranks' rows for this one add up
        to, with `op` as a reduce-scatter takes it. On the current stream. `may_overwrite`: the gradients are not read
        behind it. `kept`: what keep() has made of other gradients, which are added."""
        self.n_made += 1
        said = self._say_kept()
        _calls["hierarchical"] += 1
        start_ns = _fcdp.trace_start() if self.device.type == "cpu" else 0
        sums = self.sum_in_node(self._by_node(gradients), op)
        self._compare_kept(said)  # a rank that has died has been named by now
        if kept is not None:
            sums.add_(kept.view_as(sums))
        wire = wire_for(sums.dtype) if sums.numel() else None
        packed = sums if wire is None else wire.pack(sums)
        if may_overwrite and self.within.size > 1 and wire is None:
            taken = gradients.view(-1)[: sums.numel()].view_as(sums)
        else:
            taken = torch.empty_like(packed)
        if sums.numel():
            cross(self.between, packed, taken)
            rows, (mine, n) = list(taken.unbind()), (self.between.place, sums.shape[1])
            if wire is not None:
                self._note_rounding(wire, sums, packed)
                rows = [row if k == mine else wire.unpack(row, n) for k, row in enumerate(rows)]
            rows[mine] = sums[mine]
            self._add(output.view(-1), rows, op)
        sent = packed[0].nbytes * (self.n_nodes - 1), gradients.nbytes - sums.nbytes
        plain.count_reduction(*sent, self.n_nodes * self.within.size, start_ns)

    def _note_rounding(self, wire: Wire, sums: torch.Tensor, packed: torch.Tensor) -> None:
        if (self.n_made - 1) % Rounding.EVERY == 0:
            other = (self.between.place + 1) % self.n_nodes
            _rounding.note(wire, sums[other], packed[other])

    def keep(
        self, output: torch.Tensor, gradients: torch.Tensor, op: Any, kept: torch.Tensor | None, name: str
    ) -> None:
        """`output`: the node's sums of `gradients` alone, and of what was kept before; as long as `gradients` /
        ranks_per_node. Nothing leaves the node. `name`: of what has these gradients; where the node's ranks do not all
        keep the same, in one order, the next reduce-scatter raises."""
        self.n_made += 1
        self.kept.append(name)
        _calls["kept"] += 1
        start_ns = _fcdp.trace_start() if self.device.type == "cpu" else 0
        self.sum_in_node(self._by_node(gradients), op, self._by_node(output))
        if kept is not None:
            output.add_(kept.view_as(output))
        plain.count_reduction(0, gradients.nbytes - output.nbytes, self.n_nodes * self.within.size, start_ns)

    def _say_kept(self) -> str:
        """A digest of what this rank has kept since the last reduce-scatter, for the others of its node; "": nothing.
        Without synchronisation FSDP itself reduces nothing, so ranks may run different modules there, and sums of
        gradients of different ones look like any other."""
        if not self.kept:
            return ""
        digest = hashlib.blake2b(repr((self.n_made, self.kept)).encode(), digest_size=16).hexdigest()
        self.kept = []
        self.of_node.set(f"{self.n_compared}/{self.within.place}", digest)
        return digest

    def _compare_kept(self, digest: str) -> None:
        if not digest:
            return
        n, mine = self.n_compared, self.within.place
        self.n_compared += 1
        try:
            found = [self.of_node.get(f"{n}/{i}").decode() for i in range(self.within.size) if i != mine]
        except Exception as error:
            raise RuntimeError(
                f"fcdp: FCDP_REDUCE=hierarchical: a rank of this node did not say what it kept in backwards without gradient synchronisation: {error}"
            ) from error
        if any(one != digest for one in found):
            raise RuntimeError(_UNLIKE)
        if n > 0:  # all have read it
            self.of_node.delete_key(f"{n - 1}/{mine}")

    def _by_node(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(self.n_nodes, rows.numel() // self.n_nodes)

    def serves(self, op: Any) -> bool:
        """A sum whose terms are multiplied by a number first is one within the node, which then must have several
        ranks: a sum of such sums is a plain one. `op` is the same on all ranks."""
        of_several = [dist.ReduceOp.PREMUL_SUM] if self.within.size > 1 else []
        if any(op == one for one in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, *of_several)):
            return True
        leave(f"it does not reduce by {op}")
        return False

    def sum_in_node(self, gradients: torch.Tensor, op: Any, sums: torch.Tensor | None = None) -> torch.Tensor:
        """`sums`, (nodes, n): for each node, what the rows for its local rank add up to in this node. `gradients`:
        (nodes, ranks_per_node * n)."""
        lane = self.within
        if lane.backend is None:
            return gradients
        if sums is None:
            sums = gradients.new_empty(self.n_nodes, gradients.shape[1] // lane.size)
        if not sums.numel():
            return sums
        settings = distributed_c10d.ReduceScatterOptions()
        settings.reduceOp = op
        pairs = list(zip(sums, gradients))
        if gradients[0].nbytes <= _SMALL_BYTES:
            by_rank = gradients.view(self.n_nodes, lane.size, -1).transpose(0, 1)
            pairs = [(sums.view(-1), by_rank.reshape(-1))]
        with lane.roll.explains(lane.roll.enter()):
            works = [lane.backend._reduce_scatter_base(out, rows, settings) for out, rows in pairs]
            for work in works:
                work.wait()
        return sums

    def _add(self, output: torch.Tensor, rows: list[torch.Tensor], op: Any) -> None:
        """In this order; in float32 at least, if these are more than two halves or come of other dtypes."""
        first, *others = rows
        if first.dtype in _HALF and (len(others) > 1 or others[0].dtype != first.dtype):
            first = first.float()
        total = torch.add(first, others[0], out=output if first.dtype == output.dtype else None)
        for other in others[1:]:
            total.add_(other)
        if op == dist.ReduceOp.AVG:
            total.div_(self.n_nodes)
        if total is not output:
            output.copy_(total)


def reducer_of(group: dist.ProcessGroup) -> Reducer | None:
    """Of a shard group of several nodes; None: FSDP's own reduce-scatter runs. The same answer on every rank of the
    group, which all ask."""
    shards = shard_groups.known(group)
    if not isinstance(shards, Shards):
        leave(str(shards) if isinstance(shards, Unsupported) else "FCDP gathers no parameters of this process group")
        return None
    if shards.reducer is None:
        try:
            shards.reducer = Reducer(group, shards)
        except Unsupported as error:
            shards.reducer = error.with_traceback(None)
    if isinstance(shards.reducer, Unsupported):
        leave(str(shards.reducer))
        return None
    return shards.reducer
