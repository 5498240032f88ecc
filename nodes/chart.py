"""The stats as a picture: what the first call of each size cost, and how fast it is now."""

import io
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

COLOURS = {"graph": "#2a9d8f", "tape": "#4c78a8", "eager": "#c44e52"}
MAX_BARS = 40


def draw(snapshot: dict[str, Any]) -> Tensor:
    """[1, H, W, 3] float32 in 0..1, ComfyUI's IMAGE. Needs matplotlib; without it, a picture that says so."""
    shapes = [(model["name"], s) for model in snapshot["models"] for s in model["shapes"]][-MAX_BARS:]
    if not shapes:
        return _notice("Nothing has run through a compile node yet.")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return _notice("The chart needs matplotlib: pip install matplotlib")
    figure = Figure(figsize=(10, 1.6 + 0.32 * len(shapes)), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, shapes, "first_call_seconds", "first call, seconds")
    _bars(right, shapes, "median_ms", "now, milliseconds a forward")
    figure.legend(handles=[_patch(state) for state in COLOURS], loc="outside upper center", ncols=len(COLOURS))
    return _to_image(figure)


def _bars(axes: Any, shapes: list[tuple[str, dict[str, Any]]], field: str, title: str) -> None:
    labels = [_label(name, s) for name, s in shapes]
    places = range(len(shapes))
    axes.barh(places, [s[field] for _, s in shapes], color=[COLOURS[s["state"]] for _, s in shapes])
    axes.set_yticks(places, labels, fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.invert_yaxis()


def _label(name: str, s: dict[str, Any]) -> str:
    frames = f"x{s['frames']}" if s["frames"] > 1 else ""
    return f"{name}  {s['width']}x{s['height']}{frames}  b{s['batch']}"


def _patch(state: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=COLOURS[state], label=state)


def _to_image(figure: Any) -> Tensor:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return _to_tensor(Image.open(buffer))


def _notice(text: str) -> Tensor:
    picture = Image.new("RGB", (520, 60), "white")
    ImageDraw.Draw(picture).text((12, 22), text, fill="black")
    return _to_tensor(picture)


def _to_tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(picture.convert("RGB"), dtype=np.float32) / 255.0)[None]
