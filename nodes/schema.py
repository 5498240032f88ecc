"""Makes a node's schema, with the words that people type when they search for such a node."""

from dataclasses import fields
from typing import Any

from comfy_api.latest import io

ALIASES = {
    "AnyShapeCompileModel": (
        "torch.compile", "torch compile", "speed up", "faster", "accelerate", "optimize", "triton", "cuda graph",
        "加速", "编译",
    ),
    "AnyShapeAccelerate": (
        "speed up", "faster", "accelerate", "optimize", "all in one", "torch.compile", "compile all", "加速",
        "一键加速",
    ),
    "AnyShapeCompileVAE": ("speed up vae", "faster vae", "accelerate vae", "torch.compile vae", "加速 VAE", "编译 VAE"),
    "AnyShapeCompileControlNet": (
        "speed up controlnet", "faster controlnet", "accelerate controlnet", "torch.compile controlnet",
        "加速 ControlNet", "编译 ControlNet",
    ),
    "AnyShapeSkipBlocks": (
        "deepcache", "teacache", "easycache", "block cache", "step cache", "skip steps", "speed up", "faster",
        "accelerate", "跳过", "加速",
    ),
    "AnyShapeWarmUp": ("warmup", "preload", "precompile", "prepare sizes", "resolutions", "first run slow", "预热"),
    "AnyShapeShapeCacheInfo": (
        "speed", "benchmark", "profiler", "why slow", "compile report", "recompiles", "尺寸缓存",
    ),
}  # fmt: skip
KNOWN = {one.name for one in fields(io.Schema)}


def schema(node_id: str, **given: Any) -> io.Schema:
    """Returns an ``io.Schema``. Older ComfyUIs search titles only."""
    aliases = {"search_aliases": list(ALIASES[node_id])} if "search_aliases" in KNOWN else {}
    return io.Schema(node_id=node_id, **given, **aliases)
