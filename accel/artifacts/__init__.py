"""Compiled artefacts on disk: kernels and regions survive a restart, and may go to another machine.

The compilers' own caches do the work, where and as the user set them. AnyShape keeps a copy of what they compiled for
it, the store: before its first kernel or region of a process it puts back what is missing in them, and it copies what
is new into the store in the background. ``python -m accel.artifacts`` carries a store from machine to machine.
"""

from .keeper import KEEPER, MEGABYTES

__all__ = ["KEEPER", "MEGABYTES"]
