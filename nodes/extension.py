"""The pack as ComfyUI loads it, once what it needs is there (``accel.minimum``)."""

import comfy.model_management
from comfy_api.latest import ComfyExtension, io

from ..accel import kernels
from ..accel.artifacts import KEEPER, places
from . import NODES, routes


class AnyShape(ComfyExtension):
    """The pack's nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:  # noqa: D102
        return NODES


async def comfy_entrypoint() -> AnyShape:
    """What ComfyUI calls to load the pack."""
    return AnyShape()


routes.register()
KEEPER.use(places.store())
kernels.prepare(comfy.model_management.get_torch_device())
