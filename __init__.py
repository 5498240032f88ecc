"""AnyShape: compiled diffusion models that stay fast when the resolution and the batch change."""

import logging

from .accel import minimum

WEB_DIRECTORY = "./web"

if problem := minimum.unmet():
    logging.getLogger(__name__).error("%s", problem)
    NODE_CLASS_MAPPINGS = {}  # ComfyUI counts a pack without this as one that failed
else:
    from .nodes.extension import comfy_entrypoint as comfy_entrypoint
