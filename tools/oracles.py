"""What several tests judge by: the distance of two results, the counters, and the keys of the stats' contract."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tools import embed

embed.bare_pack()

from anyshape.accel import stats  # noqa: E402 - the package exists from the line above on

FUSED = "tape"  # the state of a shape that runs on fused operations, without a graph

# The contract of docs/scripts.md: the keys of each part of the stats.
STATS_KEYS = {
    "": {"version", "torch", "device", "models", "graphs", "fallbacks", "skip", "nodes", "artifacts", "fleet", "gain",
         "preparing", "reasons"},
    "model": {"name", "kind", "kernels", "recompiles", "compile_seconds", "inexact", "shapes"},
    "shape": {
        "key", "width", "height", "batch", "frames", "state", "calls", "replays", "first_call_seconds", "median_ms",
        "eager_ms", "bytes", "reason", "note", "prompt", "prompts", "factor", "saved_seconds", "workflows", "step",
    },
    "graphs": {"budget_bytes", "used_bytes", "evictions"},
    "fallback": {"where", "reason", "count"},
    "skip": {"model", "entry", "prompt", "workflow", "depth", "share", "full", "skipped", "resets", "seconds", "bytes"},
    "node": {"id", "workflow", "type", "state", "message", "models"},
    "artifacts": {"dir", "loaded", "saved", "rejected"},
}  # fmt: skip


def only_streamed() -> bool:
    """Whether weights that do not fit are the one thing that kept anything from running as fast as it can."""
    return {each["reason"].partition(":")[0] for each in fallbacks()} == {"weights streamed"}


def error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference|| in float32; fails on another shape or on a value that is not finite."""
    assert out.shape == reference.shape and torch.isfinite(out).all()
    out, reference = out.float(), reference.float()
    return ((out - reference).norm() / reference.norm()).item()


def footprint(module: nn.Module) -> tuple[dict, dict, list[int]]:
    """Everything of a model that we might touch: attributes, weights (address, strides, values), hooks."""
    attributes = {name: sorted(m.__dict__) for name, m in module.named_modules()}
    weights = {n: (p.data_ptr(), p.stride(), p.clone()) for n, p in module.named_parameters()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
    return attributes, weights, hooks


def assert_untouched(module: nn.Module, before: tuple[dict, dict, list[int]]) -> None:
    """The model is what it was at ``footprint``, to the bit."""
    attributes, weights, hooks = footprint(module)
    assert attributes == before[0] and hooks == before[2] and weights.keys() == before[1].keys()
    for name, (address, stride, value) in weights.items():
        assert (address, stride) == before[1][name][:2]
        assert torch.equal(value, before[1][name][2])


def shapes() -> list[dict[str, Any]]:
    """The entries of all shapes of all models, by the contract."""
    return [shape for model in stats.snapshot()["models"] for shape in model["shapes"]]


def assert_fast() -> None:
    """Every call that was counted ran fused."""
    assert {s["state"] for s in shapes()} == {FUSED}


def last_run() -> dict[str, Any]:
    """The latest sampling run with skipped blocks, by the contract."""
    return stats.snapshot()["skip"][-1]


def counted() -> dict[str, Any]:
    """What the latest run with skipped blocks counted."""
    return {name: last_run()[name] for name in ("full", "skipped", "resets")}


@contextmanager
def expect(**wanted: int) -> Iterator[None]:
    """Raises AssertionError unless the body moves each named total by exactly that much.

    Names: ``kernels``, ``recompiles``, ``calls``, ``replays``, ``fallbacks``, ``evictions``.
    """
    before = stats.snapshot()
    yield
    now = stats.snapshot()
    left = {model["name"] for model in now["models"]}  # only so many models are kept: a new one costs the oldest
    before["models"] = [model for model in before["models"] if model["name"] in left]
    was = _totals(before)
    moved = {name: value - was[name] for name, value in _totals(now).items() if name in wanted}
    if moved != wanted:
        told = [fallback for fallback in now["fallbacks"] if fallback not in before["fallbacks"]]
        raise AssertionError(f"expected the counters to move by {wanted}, they moved by {moved}; fallbacks: {told}")


def _totals(now: dict[str, Any]) -> dict[str, int]:
    shapes = [shape for model in now["models"] for shape in model["shapes"]]
    return {
        "kernels": sum(m["kernels"] for m in now["models"]),
        "recompiles": sum(m["recompiles"] for m in now["models"]),
        "calls": sum(s["calls"] for s in shapes),
        "replays": sum(s["replays"] for s in shapes),
        "fallbacks": sum(f["count"] for f in now["fallbacks"]),
        "evictions": now["graphs"]["evictions"],
    }


def fallbacks() -> list[dict[str, Any]]:
    """The counted fallbacks, by the contract."""
    return stats.snapshot()["fallbacks"]


def reasons() -> list[str]:
    """Why these fell back."""
    return [fallback["reason"] for fallback in fallbacks()]
