"""What the demo found: the table, the contact sheet, and the verdict."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .workflows import Case

Pictures = list[Image.Image]


@dataclass(frozen=True)
class Difference:
    """Between compiled and eager pictures, or what is allowed of it, in steps of 8-bit colour (0 to 255)."""

    largest: int = 0  # of a pixel: on a GPU, rounding in half precision may move the edge of a shape
    rms: float = 0.0  # root mean square over the pixels of the worst picture

    def exceeds(self, allowed: "Difference") -> bool:
        """Whether this is more than ``allowed``, in either figure."""
        return self.largest > allowed.largest or self.rms > allowed.rms

    def __str__(self) -> str:
        return f"{self.largest}/255, rms {self.rms:.2f}"


COLUMNS = (
    "model",
    "size",
    "batch",
    "VAE",
    "first s",
    "steady s",
    "ComfyUI s",
    "faster",
    "difference",
    "state",
    "recompiles",
)
# On a CPU the same operations run either way: what times differ by is what else the machine does, and says nothing.
CPU_COLUMNS = ("model", "size", "batch", "VAE", "difference", "state", "recompiles")
AS_COMFYUI = "as ComfyUI"
CELL, CAPTION, ACROSS = 160, 34, 4  # contact sheet: pixels a picture, pixels of text below it, cases per row


@dataclass
class Row:
    """One case as measured. Times are seconds per prompt in the server, from its start to its end, decode included."""

    case: Case
    eager_seconds: float = math.nan
    first_seconds: float = math.nan
    seconds: float = math.nan
    difference: Difference = Difference()
    states: dict[str, str] = field(default_factory=dict)  # "model" and "vae" -> graph, tape or eager
    compiled: int = 0  # kernels that were compiled while the case ran
    recompiles: int = 0
    pictures: dict[str, Pictures] = field(default_factory=dict)  # "eager", "compiled"

    def cells(self, gpu: bool) -> list[str]:
        """The row of the table."""
        times = [f"{value:.2f}" for value in (self.first_seconds, self.seconds, self.eager_seconds)]
        times.append(f"{self.eager_seconds / self.seconds:.2f}x")
        switch = "on" if self.case.vae else "off"
        state = ", ".join(f"{kind} {state}" for kind, state in sorted(self.states.items())) or "unknown"
        size = f"{self.case.width}x{self.case.height}"
        how = [*(times if gpu else []), str(self.difference), state if gpu else AS_COMFYUI, str(self.recompiles)]
        return [self.case.model, size, str(self.case.batch), switch, *how]

    def entry(self) -> dict[str, Any]:
        """The row in report.json; colours, and with them the differences, go from 0 to 1."""
        return {
            "model": self.case.model,
            "width": self.case.width,
            "height": self.case.height,
            "batch": self.case.batch,
            "first_seconds": self.first_seconds,
            "seconds": self.seconds,
            "eager_seconds": self.eager_seconds,
            "max_abs_diff": self.difference.largest / 255,
            "rms_diff": self.difference.rms / 255,
            "text": self.case.text,
            "vae_compiled": self.case.vae,
            "states": self.states,
            "compiled": self.compiled,
            "recompiles": self.recompiles,
        }


def difference(ours: Pictures, eager: Pictures) -> Difference:
    """Of the worst pixel and of the worst picture."""
    apart = [np.asarray(a, np.float64) - np.asarray(b, np.float64) for a, b in zip(ours, eager, strict=True)]
    return Difference(int(max(np.abs(d).max() for d in apart)), float(max(np.sqrt((d * d).mean()) for d in apart)))


def problems(rows: list[Row], allowed: Difference) -> list[str]:
    """What is not as it must be, in plain words; empty when all is well."""
    found = []
    warm = set()  # (model, False): one image a prompt has run; (model, True): several have
    for row in rows:
        name = row.case.name
        if row.difference.exceeds(allowed):
            found.append(f"{name}: a picture differs from eager by {row.difference}; {allowed} is allowed.")
        if row.recompiles:
            found.append(f"{name}: {row.recompiles} recompiles; there must be none.")
        kind = (row.case.model, row.case.batch > 1)
        if row.compiled and kind in warm:
            found.append(f"{name}: compiled {row.compiled} kernels; only a first batch of 1, and of more, may compile.")
        warm.add(kind)
    return found


def fallbacks(stats: dict[str, Any]) -> str:
    """Why something ran slower than it could, a line each."""
    lines = [f"  {found['where']}: {found['reason']} ({found['count']} times)" for found in stats["fallbacks"]]
    return "\n".join(["Not accelerated, because:", *lines])


def table(rows: list[Row], gpu: bool) -> str:
    """The rows as text, columns aligned; with times where there is a GPU."""
    lines = [list(COLUMNS if gpu else CPU_COLUMNS), *(row.cells(gpu) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([text[0], rule, *text[1:]])


def contact_sheet(rows: list[Row], gpu: bool) -> Image.Image:
    """All cases: the first picture of each, ComfyUI's on the left, with its figures below."""
    down = math.ceil(len(rows) / ACROSS)
    sheet = Image.new("RGB", (ACROSS * 2 * CELL, down * (CELL + CAPTION)), "white")
    for index, row in enumerate(rows):
        left, top = index % ACROSS * 2 * CELL, index // ACROSS * (CELL + CAPTION)
        for offset, kind in enumerate(("eager", "compiled")):
            _paste(sheet, row.pictures[kind][0], left + offset * CELL, top)
        ImageDraw.Draw(sheet).text(
            (left + 6, top + CELL), _caption(row, gpu), fill="black", font=ImageFont.load_default(11)
        )
    return sheet


def _paste(sheet: Image.Image, picture: Image.Image, left: int, top: int) -> None:
    small = picture.convert("RGB")
    small.thumbnail((CELL - 8, CELL - 8))
    sheet.paste(small, (left + (CELL - small.width) // 2, top + (CELL - small.height) // 2))


def _caption(row: Row, gpu: bool) -> str:
    times = f"{row.eager_seconds:.2f} s, {row.seconds:.2f} s; " if gpu else ""
    what = f'{row.case.model}, {row.case.name}, "{row.case.text}"'
    return f"{what}: ComfyUI left, AnyShape right\n{times}difference {row.difference}"
