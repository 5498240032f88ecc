"""Idioms that models are made of, for ``random_forwards``: each makes a tensor of two others of its form.

An idiom gets the model, a number that chooses among its layers, both tensors and ``vector`` [batch, 24].
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

CHANNELS, HEADS, GROUPS, VECTOR = 32, 2, 8, 24
HALF = CHANNELS // 2
Idiom = Callable[[Any, int, Tensor, Tensor, Tensor], Tensor]
# [batch, tokens, channels]; [batch, channels, ...]: height, width; frames, height, width; length
IDIOMS: dict[str, list[Idiom]] = {"tokens": [], "pictures": [], "videos": [], "sounds": []}


def over(*kinds: str) -> Callable[[Idiom], Idiom]:
    """Has ``IDIOMS`` know an idiom over tensors of these kinds."""

    def known(idiom: Idiom) -> Idiom:
        for kind in kinds:
            IDIOMS[kind].append(idiom)
        return idiom

    return known


tokens, pictures, videos, sounds, any_kind = *map(over, IDIOMS), over(*IDIOMS)

for name in ("of_any", "of_tokens", "of_streams", "of_pictures", "of_videos", "of_sounds"):  # they use what is above
    import_module(f"{__name__}.{name}")
