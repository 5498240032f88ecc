"""Makes a node's schema, with the words that people type when they search for such a node, and shared inputs."""

from dataclasses import fields
from typing import Any

from comfy_api.latest import io

from ..accel.call import BUDGET_MB, MAX_BUDGET_MB, MODES

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
ORIGINAL = "To get the original back, bypass (Ctrl+B) or delete this node."


def schema(node_id: str, **given: Any) -> io.Schema:
    """Returns an ``io.Schema``. Older ComfyUIs search titles only."""
    aliases = {"search_aliases": list(ALIASES[node_id])} if "search_aliases" in KNOWN else {}
    return io.Schema(node_id=node_id, category="AnyShape", **given, **aliases)


# Inputs and outputs that several nodes have ---------------------------------------------------------------------------


def model_input() -> io.Model.Input:
    """Of the nodes that compile a MODEL."""
    return io.Model.Input("model", tooltip="The model to speed up. LoRA nodes may come before or after.")


def model_output() -> io.Model.Output:
    """Of the nodes that give a faster MODEL."""
    return io.Model.Output(tooltip=f"The same model, faster. {ORIGINAL}")


def mode_input(others: str = "") -> io.Combo.Input:
    """others: what becomes of what is no MODEL in ``exact``."""
    return io.Combo.Input(
        "mode",
        options=list(MODES),
        default="auto",
        tooltip="auto: the fastest. Small operations are fused into fewer, faster ones. exact: ComfyUI's own "
        f"operations, in a CUDA graph where that pays. The picture is bit-equal to ComfyUI's{others}. off: exactly as "
        "without this node.",
    )


def budget_input() -> io.Int.Input:
    """The memory of graphs."""
    return io.Int.Input(
        "graph_budget_mb",
        default=BUDGET_MB,
        min=0,
        max=MAX_BUDGET_MB,
        step=64,
        tooltip="How much GPU memory CUDA graphs may take, in MB. They make small images much faster. About 1.5 GB "
        "is enough for all SDXL sizes. When the memory is used up, the least recently used sizes lose their graphs. "
        "0: no graphs.",
    )


def enabled_input(what: str) -> io.Boolean.Input:
    """what: passes through where it is off."""
    return io.Boolean.Input(
        "enabled", default=True, tooltip=f"Off: the {what} passes through, exactly as without this node."
    )


def verify_input() -> io.Boolean.Input:
    """Whether first results are checked."""
    return io.Boolean.Input(
        "verify",
        default=True,
        optional=True,
        tooltip="Checks each new size before its result is used: against ComfyUI's own result or, once that was right "
        "at other sizes, kernel by kernel. This finds a faulty driver or card before it spoils pictures.",
    )
