"""Compiled kernels on disk: they survive a restart with empty caches, and may go to another machine.

Triton's own cache does the work, where and as the user set it. AnyShape keeps a copy of what was compiled for it, the
store: before the first kernel of a process it puts back what is missing there, and it copies what is new into the store
in the background. ``python -m accel.artifacts`` carries a store from machine to machine.
"""

from . import places
from .keeper import KEEPER, MEGABYTES

__all__ = ["KEEPER", "MEGABYTES", "places"]
