"""The pack as ComfyUI loads it, once what it needs is there (``accel.minimum``)."""

import comfy.model_management
from comfy_api.latest import ComfyExtension, io

from ..accel import preparing
from ..accel.artifacts import KEEPER, places
from ..accel.stats import STATS
from ..accel.tape import triton_start
from . import NODES, badge, prompts, queued, routes


class AnyShape(ComfyExtension):
    """The pack's nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:  # noqa: D102
        return NODES


async def comfy_entrypoint() -> AnyShape:
    """What ComfyUI calls to load the pack."""
    return AnyShape()


STATS.prompts.follow(badge.running, prompts.workflow)
preparing.follow(comfy.model_management.throw_exception_if_processing_interrupted)
routes.register()
queued.register()
KEEPER.use(places.store())
triton_start.prepare(comfy.model_management.get_torch_device())
