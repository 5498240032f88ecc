"""Pictures to train on: emoji drawn once from the font, then placed on white canvases of any size, on the device.

The font is Noto Color Emoji. Its pictures are bitmaps of 136 x 128 pixels, so nothing is gained by drawing them larger:
the bank holds them at that size and `place` enlarges them where the canvas is.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

from .features import features
from .text import words

GLYPH = 136  # pixels a side of a picture in the bank
BITMAP_SIZE = 109  # the only size at which the font has bitmaps, in points
FILL = 0.9  # the emoji's side over the canvas's short side
RANGES = ((0x2600, 0x27BF), (0x1F300, 0x1FAFF))
# Not pictures of anything, or variants of another emoji: signs in boxes, parts of flags, skin tones, 24 clock faces.
SKIP_WORDS = (
    "regional, tag, fitzpatrick, component, squared, symbol, clock face, ideograph, arrow, ornament, keycap, chart, "
    "button, triangle, square, diamond, circle, heavy, ophiuchus, brightness, loop"
).split(", ")
# What people type first; these are in whatever the even choice leaves out.
WELL_KNOWN = (
    "🚀🌻🐙🍎🍕🍔🔥❤🐶🐮🐸🦊🐵🐬🦈🦀🐌🐞🐦🐉🦔🍉🍋🍍🍒"
    "🍄🍟🍦🍪☕🧁🎈🎁🎄🎃🏆🏀🎧🎺🎮🌞🌙⭐⚡❄☁🌋🏠⛺🚗"
    "🚌🚜⏰📷📚✂🔨⚙🔭💎🎩👻👽😎😂🤔😀👍👀🧠🌴🌸🍁💙🔔"
)
TOO_SIMILAR = 0.8  # cosine of the features above which the later of two emoji is left out


@dataclass
class Bank:
    """Emoji pictures on white, `images` [N, 3, GLYPH, GLYPH] uint8, with one prompt each."""

    prompts: list[str]
    codepoints: list[int]
    images: torch.Tensor


def prompt_of(codepoint: int) -> str:
    """The Unicode name in lower case, as plain words; empty when there is none."""
    return " ".join(words(unicodedata.name(chr(codepoint), "")))


def draw(font: ImageFont.FreeTypeFont, codepoint: int) -> np.ndarray | None:
    """One emoji, cut to its outline, centred in a white square: [GLYPH, GLYPH, 3] uint8; None without a picture."""
    canvas = Image.new("RGBA", (GLYPH * 2, GLYPH * 2), (255, 255, 255, 0))
    ImageDraw.Draw(canvas).text((GLYPH // 2, GLYPH // 2), chr(codepoint), font=font, embedded_color=True)
    box = canvas.getchannel("A").getbbox()
    if box is None:
        return None
    glyph = canvas.crop(box)
    scale = GLYPH / max(glyph.size)
    glyph = glyph.resize([max(1, round(side * scale)) for side in glyph.size], Image.Resampling.LANCZOS)
    square = Image.new("RGBA", (GLYPH, GLYPH), (255, 255, 255, 255))
    square.alpha_composite(glyph, ((GLYPH - glyph.width) // 2, (GLYPH - glyph.height) // 2))
    return np.asarray(square.convert("RGB"))


def candidates() -> list[int]:
    """Code points in the emoji ranges whose name says that they show something of their own."""
    points = [p for low, high in RANGES for p in range(low, high + 1)]
    names = {p: unicodedata.name(chr(p), "").lower() for p in points}
    return [p for p in points if names[p] and not any(word in names[p] for word in SKIP_WORDS)]


def load_bank(font_path: str, limit: int, well_known: bool = True, known: list[int] | None = None) -> Bank:
    """The evenly chosen emoji, at most `limit`, or else the code points in `known`; the well-known ones come on top."""
    font = ImageFont.truetype(font_path, BITMAP_SIZE)
    chosen = choose(font_path, font, limit) if known is None else {p: draw(font, p) for p in known}
    if well_known:
        chosen |= {ord(char): draw(font, ord(char)) for char in WELL_KNOWN}
    points = sorted(chosen)
    images = torch.from_numpy(np.stack([chosen[p] for p in points])).permute(0, 3, 1, 2).contiguous()
    return Bank([prompt_of(p) for p in points], points, images)


def choose(font_path: str, font: ImageFont.FreeTypeFont, limit: int) -> dict[int, np.ndarray]:
    """Draws the candidates, drops those that look like an earlier one, and keeps at most `limit`, evenly spread.

    Which candidates there are depends on the Unicode version of this Python (15.0 with Python 3.12).
    """
    covered = _covered(font_path)
    drawn = [(p, image) for p in candidates() if p in covered and (image := draw(font, p)) is not None]
    images = torch.from_numpy(np.stack([image for _, image in drawn])).permute(0, 3, 1, 2)
    keep = _distinct(features(images.float() / 255))
    return dict(drawn[keep[round(i)]] for i in np.linspace(0, len(keep) - 1, min(limit, len(keep))))


def _covered(font_path: str) -> set[int]:
    """Code points that the font has a glyph for."""
    from fontTools.ttLib import TTFont  # only the drawing needs it

    return set(TTFont(font_path, lazy=True).getBestCmap())


def _distinct(vectors: torch.Tensor) -> list[int]:
    """Indices of the rows [N, D] of unit length that are not too similar to an earlier kept one."""
    similar = vectors @ vectors.T > TOO_SIMILAR
    keep: list[int] = []
    for i in range(len(vectors)):
        if not similar[i, keep].any():
            keep.append(i)
    return keep


def place(images: torch.Tensor, height: int, width: int, fill: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Emoji on white canvases.

    images [B, 3, G, G] uint8; fill [B], the emoji's side over the short side; shift [B, 2], (x, y) in short sides.
    Returns [B, 3, height, width] in 0..1.
    """
    short = min(height, width)
    theta = torch.zeros(len(images), 2, 3, device=images.device)
    theta[:, 0, 0], theta[:, 1, 1] = width / (short * fill), height / (short * fill)
    theta[:, :, 2] = -2 * shift / fill[:, None]
    grid = F.affine_grid(theta, [len(images), 3, height, width], align_corners=False)
    ink = 1 - images.float() / 255  # white is 0, so that what lies outside the picture is white too
    return (1 - F.grid_sample(ink, grid, mode="bicubic", padding_mode="zeros", align_corners=False)).clamp(0, 1)


def place_jittered(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """`place` with a side of 0.86 to 0.94 short sides and a shift of up to 0.02: two seeds differ a little."""
    count, device = len(images), images.device
    fill = FILL + 0.08 * (torch.rand(count, device=device) - 0.5)
    shift = 0.04 * (torch.rand(count, 2, device=device) - 0.5)
    return place(images, height, width, fill, shift)


def buckets(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """`count` sizes (height, width) in pixels: multiples of 8 from 192 to 384, at most 2:1; shown sizes first."""
    fixed = [(256, 256), (192, 320), (264, 200), (320, 192), (384, 192), (192, 384), (320, 320), (384, 384), (200, 264)]
    sides = range(192, 385, 8)
    others = [(h, w) for h in sides for w in sides if max(h, w) <= 2 * min(h, w) and (h, w) not in fixed]
    order = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed)).tolist()
    return (fixed + [others[i] for i in order])[:count]
