"""AnyShape: makes diffusion models faster, and keeps them fast when the size, the batch or the prompt changes."""

import logging

from .accel import minimum

WEB_DIRECTORY = "./web"

if problem := minimum.unmet():
    logging.getLogger(__name__).error("%s", problem)
    NODE_CLASS_MAPPINGS = {}  # ComfyUI counts a pack without this as one that failed
else:
    from .nodes.extension import comfy_entrypoint as comfy_entrypoint
