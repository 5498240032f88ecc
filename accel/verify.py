"""Checks once per shape, before its numbers are trusted, whether a fast way computes what eager computes.

One norm over a whole output hides local faults: a black square of 128x128 pixels in one image of eight is less than
5 % of it. So an output is compared three ways, and each has a bound:

- whole: ||out - reference|| / ||reference||, in float32;
- by tiles: 8x8 latent positions (64x64 pixels, 64 tokens) of one row of the batch, all channels together;
- by channels: one channel of one row, for outputs with as few channels as a latent.

A tile or channel that is nearly zero says little about a relative error, so none counts for less than half the mean.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import WrongResult
from .outputs import Output, tensors_of
from .reasons import say

SIDE = 8  # of a tile, in latent positions
PIXELS = 8  # of a latent position
TOKENS = SIDE * SIDE  # of a tile, where positions have no second dimension
IMAGE_CHANNELS = 3  # up to so many: pixels
LATENT_CHANNELS = 128  # above: features, whose quiet channels are mostly rounding of the loud ones
FLOOR = 0.5  # of the mean tile's norm, or the mean channel's
PIECE = 1 << 25  # elements that are compared at once, in float32 copies


@dataclass(frozen=True)
class Bounds:
    """The largest relative errors that rounding can explain."""

    whole: float
    part: float  # of a tile or a channel


# Rounding of one forward of a full-size model, measured on random weights: 0.003 in fp16 and 0.018 in bf16 for the
# whole output. That may have 3 times as much. The worst part of a UNet's output in bf16 has 1.2 times the error of the
# whole, so a part may have 4 times it. In fp32 convolutions are TF32 on most cards, which differs by less than fp16.
BOUNDS = {
    torch.float32: Bounds(2e-3, 4e-3),
    torch.float16: Bounds(9e-3, 1.2e-2),
    torch.bfloat16: Bounds(5.4e-2, 7.2e-2),
}


# A model that amplifies rounding may have so many times what one step in its latent makes (``sensitivity``), but never
# more than a quarter of the result: beyond it a wrong result would look no different (``is_noise``).
NOISE, MOST = 3.0, 0.25


@dataclass(frozen=True)
class Comparison:
    """What a comparison found; false where there was nothing to compare, because the reference is not finite."""

    compared: bool
    whole: float = 0.0
    part: float = 0.0  # the worst tile or channel

    def __bool__(self) -> bool:
        return self.compared


NOTHING = Comparison(compared=False)


def compare(what: str, out: Output, reference: Output, noise: Comparison = NOTHING) -> Comparison:
    """Returns the errors of ``out``. Raises ``WrongResult`` if rounding cannot explain them. Waits for the GPU once.

    noise: what one step in the model's input makes of its result, if that was measured. A reference that is not finite
    says nothing: then the model itself overflows, in eager too.
    """
    rows = _errors(what, out, reference)
    if not all(row[1] for row in rows):
        return NOTHING
    if not all(row[0] for row in rows):
        raise WrongResult(say("black", what=what))
    for (_, _, whole, part), theirs in zip(rows, tensors_of(reference), strict=True):
        bounds = _bounds(theirs.dtype, noise)
        if whole > bounds.whole:
            raise _wrong(what, f"relative error {whole:.2g}, allowed {bounds.whole:.2g}")
        if part > bounds.part:
            raise _wrong(what, f"relative error {part:.2g} in a part of it, allowed {bounds.part:.2g}")
    return _worst_of(rows)


def difference(out: Output, reference: Output) -> Comparison:
    """The errors of ``out``, whatever they are; false where one of the two is not finite. Waits for the GPU once."""
    rows = _errors("it", out, reference)
    return _worst_of(rows) if all(row[0] and row[1] for row in rows) else NOTHING


def is_noise(out: Output, reference: Output, noise: Comparison) -> bool:
    """Whether ``out`` is no further from ``reference`` than rounding carries the model, however far that is.

    It says little where that is much: what computed ``out`` is then to be checked piece by piece.
    """
    found = difference(out, reference)
    return bool(found and noise) and found.whole <= NOISE * noise.whole and found.part <= NOISE * noise.part


def _errors(what: str, out: Output, reference: Output) -> list[list[float]]:
    """``_measured`` of each tensor."""
    pairs = list(zip(tensors_of(out), tensors_of(reference), strict=True))
    if odd := next((pair for pair in pairs if pair[0].shape != pair[1].shape), None):
        raise _wrong(what, f"its shape is {list(odd[0].shape)}, not {list(odd[1].shape)}")
    return torch.stack([_measured(*pair) for pair in pairs]).tolist()


def _worst_of(rows: list[list[float]]) -> Comparison:
    return Comparison(True, max(row[2] for row in rows), max(row[3] for row in rows))


def _bounds(dtype: torch.dtype, noise: Comparison) -> Bounds:
    """Those of the dtype, or of a model that amplifies rounding."""
    usual = BOUNDS.get(dtype, BOUNDS[torch.bfloat16])
    own = (min(NOISE * error, MOST) for error in (noise.whole, noise.part))
    return Bounds(*map(max, (usual.whole, usual.part), own))


def _wrong(what: str, how: str) -> WrongResult:
    return WrongResult(say("wrong", what=what, how=how))


def _measured(out: Tensor, reference: Tensor) -> Tensor:
    """[4], on the tensors' device: is ``out`` finite, is ``reference``, the whole error, the worst part's error."""
    finite = torch.stack([torch.isfinite(tensor).all() for tensor in (out, reference)]).float()
    if out.numel() == 0:
        return F.pad(finite, (0, 2))
    out, reference = _as_images(out), _as_images(reference)
    count = max(1, PIECE // max(1, out[0].numel()))
    pieces = [_squares(*piece) for piece in zip(out.split(count), reference.split(count), strict=True)]
    tiles, channels = (torch.cat(kind, 1) for kind in zip(*pieces, strict=True))
    whole = tiles.sum(1)
    parts = [_worst(tiles)] + ([_worst(channels)] if channels.numel() else [])
    return torch.cat([finite, torch.stack([_ratio(*whole.sqrt()), torch.stack(parts).max()])])


def _as_images(x: Tensor) -> Tensor:
    """[B, C, ..., H, W], tokens [B, T, C], [B, C] or anything smaller as [rows, C, H, W]."""
    if x.ndim >= 4:
        return x.movedim(1, -3).flatten(0, -4)
    if x.ndim == 3:
        return x.transpose(1, 2)[..., None]
    return x[..., None, None] if x.ndim == 2 else x.reshape(1, 1, -1, 1)


def _squares(out: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms of the error and of the reference [N, C, H, W]: [2, tiles], [2, channels, or 0]."""
    reference = reference.float()
    both = torch.stack([out.float() - reference, reference]).square_()
    channels, height, width = both.shape[2:]
    tiles = F.avg_pool2d(both.sum(2), _tile(channels, height, width), ceil_mode=True, divisor_override=1)
    several = height * width > 1 and 1 < channels <= LATENT_CHANNELS
    return tiles.flatten(1), both.sum((-2, -1)).flatten(1) if several else both.new_empty(2, 0)


def _tile(channels: int, height: int, width: int) -> tuple[int, int]:
    if width == 1:
        return min(TOKENS, height), 1
    side = SIDE * PIXELS if channels <= IMAGE_CHANNELS else SIDE
    return min(side, height), min(side, width)


def _worst(squares: Tensor) -> Tensor:
    """The largest relative error of these parts."""
    errors, norms = squares.sqrt()
    return _ratio(errors, norms.clamp_min(FLOOR * norms.mean())).max()


def _ratio(error: Tensor, norm: Tensor) -> Tensor:
    return error / norm.clamp_min(torch.finfo(torch.float32).tiny)
