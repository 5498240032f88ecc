"""The pack as ComfyUI loads it, once what it needs is there (``accel.minimum``)."""

import comfy.model_management
from comfy_api.latest import ComfyExtension, io
from comfy_execution.utils import get_executing_context

from ..accel import kernels
from ..accel.artifacts import KEEPER, places
from ..accel.stats import STATS
from . import NODES, queued, routes


class AnyShape(ComfyExtension):
    """The pack's nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:  # noqa: D102
        return NODES


async def comfy_entrypoint() -> AnyShape:
    """What ComfyUI calls to load the pack."""
    return AnyShape()


def _running() -> str:
    """The id of the prompt that runs in this thread."""
    context = get_executing_context()
    return context.prompt_id if context else ""


STATS.follow(_running)
routes.register()
queued.register()
KEEPER.use(places.store())
kernels.prepare(comfy.model_management.get_torch_device())
