"""AnyShape: compiled diffusion models that stay fast when the resolution and the batch change."""

import comfy.model_management
from comfy_api.latest import ComfyExtension, io

from .accel import kernels
from .nodes import NODES, routes

WEB_DIRECTORY = "./web"


class AnyShape(ComfyExtension):
    """The pack's nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:  # noqa: D102
        return NODES


async def comfy_entrypoint() -> AnyShape:
    """What ComfyUI calls to load the pack."""
    return AnyShape()


routes.register()
kernels.prepare(comfy.model_management.get_torch_device())
