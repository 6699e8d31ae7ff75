"""Names the ranks that did not come to a collective that failed.

gloo reports a timeout, or that some peer has closed its connection, but not which rank. So a rank on which a
collective fails writes the collective's number into the job's store, waits a moment for the others to do the
same, and names the ranks that have not. Nothing is written while collectives succeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

# gloo fails on all of a group's ranks within a few milliseconds, since a rank that gives up closes its connections.
GRACE = timedelta(seconds=3)


class RollCall:
    """Numbers the collectives of some ranks, alike on each of them. One thread at a time enters; any thread may ask
    which ranks are missing."""

    def __init__(self, ranks: list[int], me: int, store: dist.Store, name: str):
        """`store`: the job's; only this roll call uses keys of `name`."""
        self.ranks, self.me, self.store, self.name, self.entered = ranks, me, store, name, 0

    def enter(self) -> int:
        """The number of the collective that begins."""
        self.entered += 1
        return self.entered

    @contextmanager
    def explains(self, number: int) -> Iterator[None]:
        """Puts the missing ranks before the text of an error that is raised inside."""
        try:
            yield
        except Exception as error:
            raise RuntimeError(f"{self.missing(number)}: {error}") from error

    def missing(self, number: int) -> str:
        """Called where collective `number` has failed: "did not come: rank 3", or what is known instead. Takes
        up to GRACE, and on the job's first rank up to twice that."""
        try:
            behind = self._behind(number)
        except Exception as error:
            return f"the missing ranks are not known: the job's store does not answer ({str(error).splitlines()[0]})"
        silent = [rank for rank, at in behind.items() if at is None]
        known = [f"rank {rank} (at collective {at}, this is {number})" for rank, at in behind.items() if at is not None]
        if len(silent) > 1:  # some may have come and not failed yet
            known.append("at least one of " + ", ".join(f"rank {rank}" for rank in silent))
        else:
            known += [f"rank {rank}" for rank in silent]
        return f"did not come: {', '.join(known)}" if known else "every rank came"

    def _behind(self, number: int) -> dict[int, int | None]:
        """The collective that each other rank is at, of the ranks that have not signed; None: the rank has signed
        nothing. A rank that is past the collective has come."""
        store = dist.PrefixStore(self.name, connection(self.store, GRACE))
        others = [rank for rank in self.ranks if rank != self.me]
        store.set(f"at/{self.me}", str(number))
        store.set(f"{number}/{self.me}", "")
        try:
            store.wait([f"{number}/{rank}" for rank in others], GRACE)
            return {}
        except Exception:  # its class is another in older torch; a store that is gone fails again below
            at = {rank: int(store.get(f"at/{rank}")) if store.check([f"at/{rank}"]) else None for rank in others}
            return {rank: n for rank, n in at.items() if n is None or n < number}
        finally:
            self._let_others_read(store, number, others)

    def _let_others_read(self, store: dist.Store, number: int, others: list[int]) -> None:
        """The job's first rank may hold the store, which ends with it. So that rank goes on only when the ranks that
        ask have their answer."""
        with suppress(Exception):  # the store may be gone by now, and those that died since do not read
            store.set(f"{number}/{self.me}/read", "")
            if self.me == 0:
                asking = [rank for rank in others if store.check([f"{number}/{rank}"])]
                store.wait([f"{number}/{rank}/read" for rank in asking], GRACE)


def connection(store: dist.Store, timeout: timedelta) -> dist.Store:
    """A connection of its own to the job's store, if torch can make one: a store answers one question at a time, and
    another thread may be waiting on the shared connection. It uses the store's address, if there is one: a clone waits
    as long as the store's own timeout, minutes, for a first rank that has died."""
    under = store
    while isinstance(under, dist.PrefixStore):
        under = under.underlying_store
    if isinstance(under, dist.TCPStore):
        return dist.TCPStore(under.host, under.port, is_master=False, timeout=timeout, wait_for_workers=False)
    if hasattr(store, "clone"):
        store = store.clone()
        store.set_timeout(timeout)
    return store
