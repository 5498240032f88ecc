"""The blocks of a model that another pack changes at each call, if it changes what lies around them.

Such a forward is on no tape, because a recording would hold what it read of the model at one call. A block reads its
arguments, itself, and the functions that its code names. So where nothing of these changes, it may have a program.
"""

import itertools
from typing import Any

from torch import nn

from ..fingerprint import ModuleFingerprint
from ..foreign import brought_into, called_within
from ..tape import blocks

NUMBERS = itertools.count(1)  # no two states of blocks have the same


class SteadyBlocks:
    """Blocks of ``model`` with no code of other packs in them. Holds them: dropped when the run ends.

    place: what changes, as ``fingerprint.shown`` gives it. left: the paths of other blocks, which are left alone.
    """

    def __init__(self, model: nn.Module, place: str) -> None:
        found = {path: model.get_submodule(path) for path in blocks.find(model, stages=True)}
        self.left = frozenset(
            path for path, block in found.items()
            if place.startswith(f"{path}.") or next(brought_into(block), None) is not None
        )  # fmt: skip
        self.blocks = nn.ModuleList(block for path, block in found.items() if path not in self.left)
        self.seen = ModuleFingerprint(self.blocks)

    def look(self) -> bool:
        """Whether anything of these blocks changed: a full look, as whoever changes the model may change them, too."""
        return self.seen.look()

    def release(self) -> None:
        """Lets go of the blocks, at the end of a sampling run."""
        self.seen.release()


def brought_into_blocks(model: nn.Module) -> list[Any]:
    """Other packs' code that a model's blocks may call in their programs, by what they are."""
    return called_within([model.get_submodule(path) for path in blocks.find(model, stages=True)])


class KnownBlocks:
    """The number of a model's steady blocks, which is the same in a later run if they are. Holds no module."""

    def __init__(self) -> None:
        self._number, self._left = 0, frozenset()
        self._seen: ModuleFingerprint | None = None

    def number(self, steady: SteadyBlocks) -> int:
        """Of these blocks, as they are now."""
        if self._seen is None or self._left != steady.left or not self._seen.fits(steady.blocks):
            self._number = next(NUMBERS)
        self._seen, self._left = steady.seen, steady.left
        return self._number
