"""A forward that cannot be recorded, and runs once more on programs of its blocks, ends where that shows."""

import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tools import architectures
from tools.driving import compiled
from tools.oracles import error, fallbacks, shapes
from tools.patching import read_back

pytestmark = pytest.mark.usefixtures("clean_stats", "fusing")

CLOSE = 1e-5  # relative L2 in fp32
BLOCKS = 8
NAME = "MiniMaxH3"  # reads its time step back by itself


@pytest.fixture
def made(pack, monkeypatch):
    from tools.architectures import patchers

    entry = architectures.TABLE[NAME]
    monkeypatch.setitem(architectures.TABLE, NAME, replace(entry, config={**entry.config, "num_layers": BLOCKS}))
    return patchers.make(NAME)


@contextmanager
def blocks_that_run(patcher):
    """The number of each block whose own forward runs in the body. No hook, which would be another pack's."""
    blocks, found = list(patcher.model.diffusion_model.blocks), []
    code = type(blocks[0]).forward.__code__

    def called(frame, event, _):
        if event == "call" and frame.f_code is code:
            found.append(blocks.index(frame.f_locals["self"]))

    sys.setprofile(called)
    try:
        yield found
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("of_others", [False, True])
def test_only_examples_of_blocks_run(made, of_others):
    """All others run on programs in the first call of a size, as in later ones. Code of packs might count its calls."""
    from tools.architectures import patchers

    if of_others:
        read_back(made.model.diffusion_model)
    fast = compiled(made)
    for k in (0, 1, 2):
        wanted, outs = patchers.forward(made, NAME, k), []
        for turn in range(2):
            with blocks_that_run(made) as ran:
                outs.append(patchers.forward(fast, NAME, k))
            if turn:
                assert not ran
            elif of_others and k < 2:  # the forward of a third size is known to be refused
                assert set(ran) == set(range(BLOCKS))
            else:
                assert set(ran) == {0}
        assert torch.equal(*outs) and error(outs[0], wanted) < CLOSE
        assert shapes()[-1]["state"] == "tape" and not fallbacks()
        assert "not the whole forward: a value came back" in shapes()[-1]["note"]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lin(x)


class Row(torch.nn.Module):
    """Blocks that are alike. behind: it reads a value back behind them, not before."""

    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block() for _ in range(BLOCKS)]).requires_grad_(False)
        self.behind = behind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.behind or float(x[0, 0]) < float("inf")
        for block in self.layers:
            x = block(x)
        assert not self.behind or float(x[0, 0]) < float("inf")
        return x


@pytest.mark.parametrize("behind", [False, True])
def test_blocks_that_were_taken_for_alike(pack, behind):
    """They may be why a value came back, so the forward goes on, and the next one is recorded block by block."""
    from anyshape.accel.key import shape_key
    from anyshape.accel.take import Taped
    from anyshape.accel.tapes import Tapes

    model, x = Row(behind), torch.randn(3, 4)
    taped = Taped(model, lambda options: model(x), {}, 0, lambda options, recorder: None)
    out, take, tape = Tapes().record(shape_key({"x": x}, {}), True, taped, {"x": x})
    assert tape is None and "came back" in take.reason and bool(take.copies) == behind and take.short != behind
    assert torch.equal(out, model(x)) if behind else out is None


def test_what_ends_a_forward(pack):
    """Only a value that came back: the first reason counts, and others may be of the call alone."""
    from anyshape.accel.tape.refusals import CAME_BACK, RANDOM, BrokenOff, Refusal

    for first, ends in ((RANDOM, False), (CAME_BACK[1], True)):
        refusal, asked = Refusal(), []
        refusal.breaks_off = lambda asked=asked: asked.append(1) or True
        if ends:
            with pytest.raises(BrokenOff):
                refusal(first)
        else:
            refusal(first)
        refusal(CAME_BACK[0])
        assert refusal.reason.startswith(first) and len(asked) == ends
