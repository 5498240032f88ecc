"""Warm Up's list of sizes, as the user writes it, and the table that says what became of each."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import reasons, wording
from .wording import figure

FORMS = "1024x1152, 896x768 batch 2, or 832x480x33 for 33 frames"
MIN_SIDE, MAX_SIDE, MAX_BATCH, MAX_FRAMES = 16, 16384, 4096, 16384  # of ComfyUI's nodes for empty latents
LAST = "sizes of the last session"
PRESETS = {  # sizes that are listed without writing them
    "none": "",
    "SDXL": "1024x1024, 1152x896, 896x1152, 1216x832, 832x1216, 1344x768, 768x1344, 1536x640, 640x1536",
    "portrait and landscape": "832x1216, 1216x832",
    "SD1.5": "512x512, 512x768, 768x512",
    LAST: "",  # another list for each model: what gives the list knows it
}
STEP = 8  # image pixels along each side of one latent element; Empty Latent Image leaves the rest out
MIB = 1 << 20

_NUMBER = "([0-9]{1,9})"
_BY = r"\s*[x×*]\s*"
_LINE = re.compile(
    rf"{_NUMBER}{_BY}{_NUMBER}(?:{_BY}{_NUMBER}|[\s,]+{_NUMBER}\s*frames?)?(?:[\s,]+b(?:atch)?\s*{_NUMBER})?",
    re.IGNORECASE,
)
# Between two entries on one line. A batch or a number of frames belongs to the size before it. A number alone could be
# either, so it spoils its size.
_NEXT = re.compile(r"[,;](?!\s*(?:b(?:atch)?\s*(?:[0-9]|\b)|[0-9]+\s*(?:frames?\b|b|$|[,;])))", re.IGNORECASE)
# What a Chinese or Japanese keyboard types in the place of "0" to "9", "x", "," and so on, and its space and comma.
_WIDE = {wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)} | {0x3000: " ", 0x3001: ","}
_QUOTED = 40  # characters of a bad line
NOT_ONE = "nothing in this list is a size"
MORE_BAD = "more entries are not sizes"
_SHOWN = 5  # bad lines by their number and text; of the others how many there are


@dataclass(frozen=True)
class Shape:
    """Image pixels, images or videos per prompt, and the frames of a video."""

    width: int
    height: int
    batch: int = 1
    frames: int = 1
    note: str = field(default="", compare=False)  # what the user should know of this line
    joined: bool = field(default=False, compare=False)  # the frames stand as a third number behind the size

    def as_images(self) -> "Shape":
        """For what makes single images: there a third number can only be how many."""
        if not self.joined or self.frames > MAX_BATCH or self.batch > 1:
            return self
        taken = f"{self.size} - taken as {self.frames} images: this model makes no video"
        return Shape(self.width, self.height, self.frames, note=self.note or taken)

    @property
    def pixels(self) -> int:
        """Of all images and frames together."""
        return self.width * self.height * self.batch * self.frames

    @property
    def size(self) -> str:
        """In words."""
        return wording.size(self.width, self.height, self.frames)

    def __str__(self) -> str:
        return self.size + (f" batch {self.batch}" if self.batch > 1 else "")


def parse(text: str) -> tuple[list[Shape], list[str]]:
    """(the sizes in the order of ``text``, each once; what is wrong with the entries that are none).

    One to a line, or several with commas; blank lines and what follows a # are left out.
    """
    shapes: dict[Shape, None] = {}
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        for entry in _entries(line):
            problem = _problem(entry)
            if problem:
                problems.append(f"line {number}: {_quoted(entry)} - {problem}")
            else:
                shapes.setdefault(_shape(entry, number))
    return list(shapes), problems


def not_one_size(text: str) -> str:
    """Says what is wrong with a list whose entries are not sizes; "" for any other list."""
    shapes, problems = parse(text)
    return "" if shapes or not problems else "\n".join([NOT_ONE, *in_short(problems, MORE_BAD)])


def with_preset(text: str, preset: str) -> str:
    """Returns the user's list, followed by the sizes of ``preset``. Raises ValueError."""
    if preset not in PRESETS:
        raise ValueError(f"preset is {preset!r}; choose one of {', '.join(PRESETS)}")
    return f"{text}\n{PRESETS[preset]}"


def _entries(line: str) -> list[str]:
    entries = _NEXT.split(line.translate(_WIDE).split("#")[0])
    return [entry for part in entries if (entry := part.strip(" \t,;"))]


def in_short(texts: list[str], rest: str) -> list[str]:
    """Returns the first few of ``texts``, and how many more there are; ``rest`` says what those are."""
    left = len(texts) - _SHOWN
    return texts if left <= 0 else [*texts[:_SHOWN], f"and {left:,} {rest}"]


def _problem(entry: str) -> str:
    """Says why ``entry`` is not a size that ComfyUI can make; "" if it is."""
    match = _LINE.fullmatch(entry)
    if match is None:
        return f"write {FORMS}"
    width, height, batch, frames = _numbers(match)
    for name, side in (("width", width), ("height", height)):
        if not MIN_SIDE <= side <= MAX_SIDE:
            return f"the {name} is {side}; give {MIN_SIDE} to {MAX_SIDE} pixels, as in {FORMS}"
    if not 1 <= batch <= MAX_BATCH:
        return f"the batch is {batch}; give 1 to {MAX_BATCH} images, as in {FORMS}"
    if not 1 <= frames <= MAX_FRAMES:
        return f"the frames are {frames}; give 1 to {MAX_FRAMES}, as in {FORMS}"
    return ""


def _numbers(match: re.Match) -> tuple[int, int, int, int]:
    """(width, height, batch, frames)."""
    width, height, joined, counted, batch = match.groups()
    return int(width), int(height), int(batch or 1), int(joined or counted or 1)


def _shape(entry: str, number: int) -> Shape:
    match = _LINE.fullmatch(entry)
    width, height, batch, frames = _numbers(match)
    floored = width // STEP * STEP, height // STEP * STEP
    shown = f"{floored[0]}x{floored[1]}"
    note = f"line {number}: {_quoted(entry)} - taken as {shown}: Empty Latent Image makes multiples of {STEP} pixels"
    return Shape(*floored, batch, frames, note if floored != (width, height) else "", joined=bool(match[3]))


def _quoted(entry: str) -> str:
    return repr(entry if len(entry) <= _QUOTED else entry[:_QUOTED] + "...")


@dataclass
class Row:
    """What became of one size in one part of the workflow."""

    shape: Shape
    part: str  # model, VAE decode, ...
    state: str  # of its slowest program: graph | tape | eager; or why there is none
    seconds: float = 0.0
    bytes: int = 0  # of its graphs
    why: str = ""
    factor: float | None = None  # eager's time by this one's, where both were measured
    keys: frozenset[tuple[str, str]] = frozenset()  # of its graphs: the model's name in the stats, and the shape's key
    speed: str = ""  # in the words of users; "" where it has not run
    told: tuple[tuple[str, str], ...] = ()  # (model, or "" of the only one; why it runs like this), besides ``why``


def table(rows: Sequence[Row]) -> str:
    """Plain text, a line each, with short forms of reasons; the sentences stand below, each once."""
    head = f"{'size':>14} {'batch':>5} {'part':<12} {'state':<19} {'s':>7} {'x':>5} {'MB':>6}  why"
    texts = dict.fromkeys(text for row in rows for _, text in _told(row) if reasons.short(text) != text)
    return "\n".join([head, *map(_line, rows), *(f"  {text}" for text in texts)])


def _told(row: Row) -> list[tuple[str, str]]:
    return [("", row.why)] * bool(row.why) + list(row.told)


def _line(row: Row) -> str:
    state = f"{row.speed} ({row.state})" if row.speed else row.state
    why = dict.fromkeys(f"{name}: {reasons.short(text)}" if name else reasons.short(text) for name, text in _told(row))
    return (
        f"{row.shape.size:>14} {row.shape.batch:>5} {row.part:<12} {state:<19} {figure(row.seconds, 2):>7} "
        f"{figure(row.factor, 2):>5} {figure(row.bytes / MIB, 0):>6}  {'; '.join(why)}"
    ).rstrip()


@dataclass(frozen=True)
class Outcome:
    """What became of a list."""

    report: str
    warnings: list[str]  # what the user should do something about
    listed: int  # sizes
    ready: int  # those of them that every part of the workflow has run
    bad: int  # entries that are no sizes
    left: tuple[Shape, ...] = ()  # what it gave way before

    @property
    def line(self) -> str:
        """The node's line: how many sizes are ready, and what to do about the others."""
        counted = f"{self.ready} of {self.listed} sizes ready" if self.listed else "no size is ready"
        return "\n".join([counted, *self.warnings])
