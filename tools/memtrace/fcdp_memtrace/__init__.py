"""fcdp-memtrace: what FCDP does with memory, in a live job and afterwards."""

from fcdp_memtrace._trace import Error

__all__ = ["Error"]
