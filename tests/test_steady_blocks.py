"""Models whose settings another pack changes at each step: blocks that it does not touch have programs. CPU."""

import pytest
import torch
from torch import nn

from tools.driving import compiled, sample_tiny, skipping
from tools.oracles import error, shapes

pytestmark = pytest.mark.usefixtures("clean_stats", "fusing", "one_thread")

NAME, BLOCKS = "Flux", 4
STEPS = 9
CHANGED = 1e-3  # by how much a change must show, so that a test can tell
PLACE = "pe_embedder.gain"


class Louder(nn.Module):
    """A pack's layer in the place of the one that makes rotary embeddings."""

    def __init__(self, own):
        super().__init__()
        self.own, self.gain = own, 1.0

    def forward(self, ids):
        return self.own(ids) * self.gain


@pytest.fixture
def louder(tiny):
    patcher = tiny(NAME, fresh=True)
    model = patcher.model.diffusion_model
    model.pe_embedder = Louder(model.pe_embedder)
    return patcher


def moving(model, number):
    model.pe_embedder.gain = 1.0 + number / 10


def sample(patcher, change=moving, seed=0, **run):
    """A run in which ``change`` is called after each step with the model and the step's number."""
    model = patcher.model.diffusion_model
    model.pe_embedder.gain = 1.0
    step = lambda number, *_: change(model, number)  # noqa: E731
    return sample_tiny(patcher, NAME, seed=seed, **{"steps": STEPS, "cfg": 1.0, "callback": step} | run)


def still(model, number):
    """Nothing changes."""


def test_blocks_are_fast(louder, recordings, block_programs):
    """And a later run begins with them: nothing is recorded again."""
    wanted = [sample(louder, seed=seed) for seed in range(3)]
    assert error(wanted[0], sample(louder, still)) > CHANGED
    fast, known = compiled(louder), []
    for seed in range(3):
        del recordings[:], block_programs[:]
        assert torch.equal(sample(fast, seed=seed), wanted[seed])
        known.append((len(recordings), len(block_programs)))
    blocks = STEPS * 2 * BLOCKS  # of both streams
    assert known[0][0] <= 4 and 0 < known[0][1] < blocks
    assert known[1:] == [(0, blocks)] * 2
    assert shapes()[-1]["state"] == "tape" and PLACE in shapes()[-1]["note"]
    larger = sample(louder, width=12)
    assert torch.equal(sample(fast, width=12), larger)


def test_once_it_does_not_change_all_is_recorded_again(louder, recordings, block_programs):
    """One run shows it. Nor does a run remember it once that layer is gone."""
    fast = compiled(louder)
    sample(fast)
    for _ in range(2):
        del recordings[:], block_programs[:]
        assert torch.equal(sample(fast, still), sample(louder, still))
    assert len(recordings) == 1 and not block_programs
    sample(fast)
    model = louder.model.diffusion_model
    model.pe_embedder = model.pe_embedder.own
    del recordings[:], block_programs[:]
    own = {"steps": 3, "cfg": 1.0}
    assert torch.equal(sample_tiny(fast, NAME, **own), sample_tiny(louder, NAME, **own))
    assert len(recordings) == 1 and not block_programs


def test_a_block_with_code_that_may_read_it_is_left_alone(louder, block_programs):
    model = louder.model.diffusion_model
    block = model.single_blocks[1]

    class Reading(type(block)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) * model.pe_embedder.gain

    block.__class__ = Reading
    wanted, fast = sample(louder), compiled(louder)
    for _ in range(2):
        assert torch.equal(sample(fast), wanted)
    assert block_programs and "single_blocks.1" not in block_programs


def test_a_patch_that_may_read_it(louder, block_programs):
    """Nobody knows what a patch of a block reads of the model: all is ComfyUI's own."""
    model = louder.model.diffusion_model

    def scaled(args, extra):
        out = extra["original_block"](args)
        return {**out, "img": out["img"] * model.pe_embedder.gain}

    louder.set_model_patch_replace(scaled, "dit", "double_block", 1)
    wanted, fast = sample(louder), compiled(louder)
    for _ in range(2):
        assert torch.equal(sample(fast), wanted)
    assert not block_programs and PLACE in shapes()[-1]["reason"]


def test_a_block_that_changes_as_well(louder, block_programs):
    """From then on all is ComfyUI's own, in this run; the next one begins with what the blocks are now."""

    def change(model, number):
        moving(model, number)
        if number > STEPS // 2 + 1:
            model.double_blocks[2].img_norm1.eps = float(number)

    def again(patcher):
        patcher.model.diffusion_model.double_blocks[2].img_norm1.eps = 1e-6
        return sample(patcher, change)

    wanted, fast = again(louder), compiled(louder)
    assert error(wanted, sample(louder)) > CHANGED
    for _ in range(2):
        del block_programs[:]
        assert torch.equal(again(fast), wanted)
        assert 0 < len(block_programs) < STEPS * 2 * BLOCKS


def test_skipped_steps(louder, block_programs):
    """The picture is that of Skip Blocks alone."""
    wanted = sample(skipping(louder, depth="1"), steps=STEPS + 3)
    assert error(wanted, sample(louder, steps=STEPS + 3)) > CHANGED
    fast = skipping(compiled(louder), depth="1")
    for _ in range(2):
        assert torch.equal(sample(fast, steps=STEPS + 3), wanted)
    assert block_programs
