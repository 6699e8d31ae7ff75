"""NCCL with what one rank can run: the library that torch brought, a communicator, all-gathers, abort, and the
timeout of a peer that never comes."""

import ctypes
import os

from section import Section, main


def body(section: Section) -> None:
    if section.simulated:
        path = str(section.bundle / "lib" / "libfcdp_simnccl.so")
        fabric = section.out / "fabric"
        fabric.unlink(missing_ok=True)
        ctypes.CDLL(path).simnccl_fabric_make(os.fsencode(fabric), 2, 1)
        section.bench("one_rank_nccl", path, SIMNCCL_FABRIC=str(fabric), RANK="0")
        fabric.unlink(missing_ok=True)
        return
    from fcdp.nccl import beside_torch  # of the wheel; imports torch

    path = os.environ.get("FCDP_NCCL_LIBRARY") or beside_torch()
    # One machine, no peer: the bootstrap and the sockets may go over the loopback, which every machine has.
    section.bench("one_rank_nccl", *([path] if path else []), NCCL_SOCKET_IFNAME="lo", NCCL_DEBUG="WARN")


if __name__ == "__main__":
    main(body)
