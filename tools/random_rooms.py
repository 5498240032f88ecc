"""Random workflows on models whose weights do not all fit (DynamicVRAM): are the pictures ComfyUI's, to the bit?

    python -m tools.random_rooms [--first 0] [--seconds 60]

As ``random_workflows``, but that weights are mapped in (``pages``), with room for another share of them in each run.
Half of the models read a value back at each call, so that their blocks are recorded one by one. On a CPU, where what a
step has fetched is written over behind it.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from tools import draws, pages
from tools.random_workflows import Far, Workflow, World
from tools.random_workflows import compared as workflows_compared
from tools.skip_driving import BLOCKS

SHARES = (0.1, 0.3, 0.5, 0.8, 0.95, 2.0)


class Room(World):
    """A model with its own page table. reads: it reads its time step back. Raises RuntimeError where pages stay."""

    def __init__(self, kind: str, fast: bool, number: int, reads: bool, loads: dict[int, pages.Loads], **what: Any):
        from tools.patching import read_back

        super().__init__(kind, fast, **what | ({"blocks": BLOCKS} if reads else {}))
        model = self.model.model.diffusion_model
        if reads:
            name = "_forward" if hasattr(type(model), "_forward") else "forward"
            read_back(model, name, lambda x, timesteps, *_, **__: timesteps)
        self._number, self.load = number, pages.Loads(model, pages.Card())
        loads[id(self.model.model)] = self.load

    def picture(self, flow: Workflow, seed: int) -> Tensor:
        """The latent of one run, begun with no page there."""
        table, share = self.load.pages, random.Random(f"room {self._number} {seed}").choice(SHARES)
        table.card.pages = int(table.count * share)
        table.give_away()
        self.load(dirty=True)
        out = super().picture(flow, seed)
        if not pages.is_clean(self.load):
            raise RuntimeError("something of ours still lies on layers, or keeps their pages")
        return out


def compared(number: int) -> Iterator[Far]:
    """What is wrong with one draw."""
    from comfy.model_patcher import ModelPatcher

    loads: dict[int, pages.Loads] = {}
    reads, own = random.Random(f"rooms {number}").random() < 0.5, ModelPatcher.load

    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = own(self, *args, **kwargs)
        if id(self.model) in loads:  # as ``ModelPatcherDynamic`` does it
            loads[id(self.model)](dirty=True)
        return out

    with pytest.MonkeyPatch.context() as patch:
        pages.use(patch)
        pages.write_over(patch)
        patch.setattr(ModelPatcher, "load", load)
        yield from workflows_compared(
            number, lambda kind, fast, **what: Room(kind, fast, number, reads, loads, **what), hooks=False
        )


if __name__ == "__main__":
    draws.run(__doc__, compared)
