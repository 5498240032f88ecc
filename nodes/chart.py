"""Draws the stats as a picture: what the first call of each size cost, and how fast it is now."""

import io
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from ..accel.wording import AS_COMFYUI, FAST, PARTLY, files, size, speed, title

COLOURS = {FAST: "#2a9d8f", PARTLY: "#4c78a8", AS_COMFYUI: "#c44e52"}  # as in web/anyshape/style.css
EAGER = "#444444"  # ComfyUI's own time
MAX_BARS = 40
LONGEST = 32  # characters of a model's name
DECADE = 10  # beyond that the longest bar, a first call that compiles, say, would flatten the others


def draw(snapshot: dict[str, Any]) -> Tensor:
    """[1, H, W, 3] float32 in 0..1, ComfyUI's IMAGE. Needs matplotlib; without it, a picture that says so."""
    known = files(snapshot)
    shapes = [(title(model["name"], known), s) for model in snapshot["models"] for s in model["shapes"]][-MAX_BARS:]
    if not shapes:
        return notice("Nothing has run through a compile node yet.")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return notice("The chart needs matplotlib: pip install matplotlib")
    figure = Figure(figsize=(10, 1.6 + 0.32 * len(shapes)), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    colours = [COLOURS[speed(s, snapshot["device"])] for _, s in shapes]
    _bars(left, shapes, colours, "first_call_seconds", "first call, seconds")
    _bars(right, shapes, colours, "median_ms", "now, ms per forward")
    if any(s["eager_ms"] for _, s in shapes):
        _marks(right, shapes)
    figure.legend(handles=[_patch(name) for name in COLOURS], loc="outside upper center", ncols=len(COLOURS))
    return _to_image(figure)


def _bars(axes: Any, shapes: list[tuple[str, dict[str, Any]]], colours: list[str], field: str, title: str) -> None:
    labels = [_label(name, s) for name, s in shapes]
    places = range(len(shapes))
    axes.barh(places, [s[field] for _, s in shapes], color=colours)
    axes.set_yticks(places, labels, fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.set_ylim(len(shapes) - 0.5, -0.5)  # the first on top, on both, which share this axis
    seen = [value for _, s in shapes for value in (s[field], s["eager_ms"] if field == "median_ms" else 0) if value]
    if seen and max(seen) > DECADE * min(seen):
        axes.set_xscale("log")
        axes.set_xlim(min(seen) / 2, max(seen) * 2)  # the shortest bar has a length too
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("logarithmic", fontsize=8)


def _marks(axes: Any, shapes: list[tuple[str, dict[str, Any]]]) -> None:
    """A line for each size where ComfyUI's own forward was measured, and by how much it is slower."""
    for place, (_, s) in enumerate(shapes):
        if s["eager_ms"]:
            axes.plot([s["eager_ms"]] * 2, [place - 0.4, place + 0.4], color=EAGER, linewidth=2)
        if s["factor"]:
            axes.text(s["median_ms"], place, f" {s['factor']:.2f}x", va="center", fontsize=8)
    axes.set_title("now, ms per forward (line: ComfyUI's own)", fontsize=10)


def _label(name: str, s: dict[str, Any]) -> str:
    step = f"  {s['step']}" if s["step"] else ""
    name = name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."
    return f"{name}  {size(s['width'], s['height'], s['frames'])}  b{s['batch']}{step}"


def _patch(name: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=COLOURS[name], label=name)


def _to_image(figure: Any) -> Tensor:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return _to_tensor(Image.open(buffer))


def notice(text: str) -> Tensor:
    """A picture of one line."""
    picture = Image.new("RGB", (520, 60), "white")
    ImageDraw.Draw(picture).text((12, 22), text, fill="black")
    return _to_tensor(picture)


def _to_tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(picture.convert("RGB"), dtype=np.float32) / 255.0)[None]
