"""torch.distributed's side: what the core's plan needs from process groups.

A Shards object is one shard process group seen as nodes x ranks: two lanes (the ranks of this node; the ranks with this local index on
every node) and one group for agreements. Each lane belongs to one of the core's workers, the agreement group to the thread that
runs the model, so each is used in program order.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Callable

import torch
import torch.distributed as dist

from fcdp import OptionError, _fcdp
from fcdp.rollcall import RollCall


class Unsupported(Exception):
    """FCDP cannot serve this process group; the text says why."""


def local_size(option: int) -> int:
    """Ranks per node: FCDP_LOCAL_SIZE, else what the launcher says."""
    if option:
        return option
    text = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE", "")
    try:
        return int(text)
    except ValueError:
        raise Unsupported("the launcher does not say how many ranks a node has (LOCAL_WORLD_SIZE); set FCDP_LOCAL_SIZE") from None


class Shards:
    """The lanes of one shard process group. Creating it is a collective of the group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size_option: int, timeout_s: float):
        self.group, self.device = group, device
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.agreements = 0
        self.agree_bytes = 0
        try:
            size, problem = local_size(size_option), ""
        except Unsupported as error:
            size, problem = 0, str(error)
        sizes = self._gather_ints(size)
        if not all(sizes):
            raise Unsupported(problem or "a rank does not know how many ranks its node has; set FCDP_LOCAL_SIZE")
        if len(set(sizes)) > 1:
            raise Unsupported(f"ranks per node differ: the group's ranks say {sizes}; FCDP needs the same number on every node")
        node_of = [rank // size for rank in self.ranks]
        self.node_of = b"".join(node.to_bytes(4, "little") for node in node_of)
        try:
            self.topology: dict[str, int] = _fcdp.topology(self.node_of, self.rank)
        except _fcdp.Error as error:
            raise Unsupported(error.args[0]) from None
        self.node_size, self.local = self.topology["ranks_per_node"], self.topology["local_rank"]
        node = self.topology["node"]
        timeout = timedelta(seconds=timeout_s)
        inter = [self.ranks[n * self.node_size + self.local] for n in range(self.topology["nodes"])]
        intra = self.ranks[node * self.node_size : (node + 1) * self.node_size]
        self.lanes = {
            _fcdp.LANE_INTER: _new_group(inter, timeout, "fcdp_inter"),
            _fcdp.LANE_INTRA: _new_group(intra, timeout, "fcdp_intra"),
        }
        self.agreement = _new_group(self.ranks, timeout, "fcdp_agree")
        self.rolls = {
            lane: RollCall(ranks, f"{self.lanes[lane].group_name}/{lane}")
            for lane, ranks in ((_fcdp.LANE_INTER, inter), (_fcdp.LANE_INTRA, intra))
        }
        self.agreement_roll = RollCall(self.ranks, f"{self.agreement.group_name}/agreements")

    def _gather_ints(self, value: int) -> list[int]:
        mine = torch.tensor([value], dtype=torch.int64, device=self.device)
        out = torch.empty(len(self.ranks), dtype=torch.int64, device=self.device)
        dist.all_gather_into_tensor(out, mine, group=self.group)
        return out.tolist()

    def agree(self, votes: bytes) -> bytes:
        """The maximum of every byte over the group's ranks. Two more bytes guard against ranks that are not at the same agreement."""
        self.agreements = number = self.agreement_roll.enter()
        stamp = (self.agreements + len(votes)) % 256
        ballot = torch.frombuffer(bytearray(votes) + bytes((stamp, 255 - stamp)), dtype=torch.uint8).to(self.device)
        try:
            dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self.agreement)
        except Exception as error:
            missing = self.agreement_roll.missing(number)
            raise RuntimeError(f"fcdp: agreement {number} of {len(self.ranks)} ranks on what is stale failed; {missing}: {error}") from error
        self.agree_bytes += len(votes) + 2
        result = bytes(ballot.cpu().numpy())
        if result[-2] + result[-1] != 255:
            raise RuntimeError(
                f"fcdp: the ranks are not in the same place (agreement {self.agreements}, {len(votes)} votes); do all ranks run the same model code?"
            )
        return result[:-2]

    def refuse_together(self, problem: Exception | None) -> None:
        """Raise on every rank if any rank has a problem: OptionError where an option asks for what some rank cannot have, else Unsupported."""
        stops = isinstance(problem, _fcdp.Error) and problem.args[1] == _fcdp.ERR_OPTION
        vote = self.agree(b"\0" if problem is None else b"\2" if stops else b"\1")
        if vote == b"\0":
            return
        problems: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(problems, problem and (stops, str(problem.args[0])), group=self.agreement)
        first, text = next((rank, said[1]) for rank, said in enumerate(problems) if said and said[0] == (vote == b"\2"))
        text = text if self.ranks[first] == dist.get_rank() else f"rank {self.ranks[first]}: {text}"
        raise OptionError(f"fcdp: {text}") if vote == b"\2" else Unsupported(text)

    def from_leader(self, payload: bytes, length: int) -> bytes:
        """`payload` of the node's local rank 0, on every rank of the node. `length` bytes everywhere."""
        out = torch.zeros(self.node_size * length, dtype=torch.uint8)
        out[self.local * length : (self.local + 1) * length] = torch.frombuffer(bytearray(payload.ljust(length, b"\0")), dtype=torch.uint8)
        out = out.to(self.device)
        part = out[self.local * length : (self.local + 1) * length].clone()
        roll = self.rolls[_fcdp.LANE_INTRA]
        with roll.explains(roll.enter()):
            dist.all_gather_into_tensor(out, part, group=self.lanes[_fcdp.LANE_INTRA])
        return bytes(out[:length].cpu().numpy())

    def transport(self, owner: Any) -> Callable[[int, int, int], Callable[[], None]]:
        """The core's all_gather: in place over `n * bytes` at `address`. Starts it on the lane's worker; returns what waits for it, on any thread."""
        kind, index = (1, 0) if self.device.type == "cpu" else (2, self.device.index or 0)
        places = {_fcdp.LANE_INTER: self.topology["node"], _fcdp.LANE_INTRA: self.local}
        sizes = {lane: dist.get_world_size(group) for lane, group in self.lanes.items()}
        # NCCL orders itself by the current stream. The core has waited for what it reads: nothing of the model's streams concerns it.
        streams = {lane: torch.cuda.Stream(self.device) if kind == 2 else None for lane in self.lanes}

        def start(lane: int, address: int, length: int) -> Callable[[], None]:
            out = torch.from_dlpack(_fcdp.dlpack(address, sizes[lane] * length, 1, 8, kind, index, owner))
            mine = out.narrow(0, places[lane] * length, length)
            stream, roll = streams[lane], self.rolls[lane]
            number = roll.enter()
            with roll.explains(number), torch.cuda.stream(stream) if stream else nullcontext():
                work = dist.all_gather_into_tensor(out, mine, group=self.lanes[lane], async_op=True)

            def finish() -> None:
                with roll.explains(number):
                    with torch.cuda.stream(stream) if stream else nullcontext():
                        work.wait()
                    if stream:
                        stream.synchronize()

            return finish

        return start


def _new_group(ranks: list[int], timeout: timedelta, name: str) -> dist.ProcessGroup:
    return dist.new_group(ranks, timeout=timeout, use_local_synchronization=True, group_desc=name)
