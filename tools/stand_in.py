"""``StandIn``, the kernels' tier for tests on a CPU, on this process's ``anyshape``; see ``tools.stand_in_pack``."""

from tools import embed
from tools.stand_in_pack import class_of, loader

__all__ = ["StandIn", "loader"]

embed.bare_pack()

from anyshape.accel.ops import FusedOps  # noqa: E402 - the package exists from the line above on

StandIn = class_of(FusedOps)
