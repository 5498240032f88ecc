"""Import this before any of `comfy` in a script: it finds ComfyUI and sets it up without its server."""

from tools import embed

embed.use_comfyui()
