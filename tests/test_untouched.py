"""Settings of a pack's part that change while the model runs, and that its forward does not touch. CPU."""

import importlib.util
import sys

import pytest
import torch
from torch import nn

from tools.driving import compiled, sample_tiny
from tools.oracles import error, shapes
from tools.patching import read_back

pytestmark = pytest.mark.usefixtures("clean_stats", "one_thread")

NAME, BLOCKS = "Flux", 4
STEPS = 6
CHANGED = 1e-3  # by how much a change must show, so that a test can tell


def layer():
    """A pack's class of a layer in the place of the one that makes rotary embeddings: another one for each test."""

    class Noting(nn.Module):
        def __init__(self, own):
            super().__init__()
            self.own, self.window, self.numbers, self.uses, self.sets = own, 0, [0], False, False

        def forward(self, ids):
            if self.sets:
                self.window = 7
            return self.own(ids) * (1.0 + (self.window + self.numbers[0]) / 10 if self.uses else 1.0)

    return Noting


@pytest.fixture
def noting(tiny):
    patcher = tiny(NAME, fresh=True)
    model = patcher.model.diffusion_model
    model.pe_embedder = layer()(model.pe_embedder)
    return patcher


def moving(model, number):
    model.pe_embedder.window, model.pe_embedder.numbers = number, [number]


def sample(patcher, change=moving, seed=0, **run):
    """A run in which ``change`` is called after each step with the model and the step's number."""
    model = patcher.model.diffusion_model
    model.pe_embedder.window, model.pe_embedder.numbers = 0, [0]
    step = lambda number, *_: change(model, number + 1)  # noqa: E731
    return sample_tiny(patcher, NAME, seed=seed, **{"steps": STEPS, "cfg": 1.0, "callback": step} | run)


def test_it_does_not_count(noting, recordings):
    """One recording more, at the first change of the first run; none for it at another size."""
    fast = compiled(noting)
    for seed in range(2):
        assert torch.equal(sample(fast, seed=seed), sample(noting, seed=seed))
    assert len(recordings) == 2
    assert torch.equal(sample(fast, width=12), sample(noting, width=12))
    assert len(recordings) == 3
    assert {row["state"] for row in shapes()} == {"tape"}
    kind = type(noting.model.diffusion_model.pe_embedder)
    assert not {"window", "numbers"} & set(dir(kind))


@pytest.mark.parametrize("late", [False, True], ids=["from the first", "later"])
def test_once_the_forward_reads_it_it_counts(noting, recordings, late):
    """Whether it is read at once, or after it had been left out for a while."""
    fast, part = compiled(noting), noting.model.diffusion_model.pe_embedder
    if late:
        without = sample(fast)
    part.uses = True
    wanted = [sample(noting, seed=seed) for seed in range(2)]
    assert not late or error(without, wanted[0]) > CHANGED
    for seed in range(2):
        assert torch.equal(sample(fast, seed=seed), wanted[seed])
    part.uses = False
    assert torch.equal(sample(fast), sample(noting))


@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize("uses", [False, True])
def test_in_blocks(tiny, block_programs, uses):
    """A part of a block, of a model that is recorded in blocks."""
    patcher = tiny(NAME, fresh=True)
    model = patcher.model.diffusion_model
    read_back(model)
    block = model.single_blocks[1]
    part = block.modulation.lin = layer()(block.modulation.lin)

    def change(model, number):
        part.window, part.numbers = number, [number]

    def run(patcher, seed=0):
        change(model, 0)
        return sample_tiny(
            patcher, NAME, seed=seed, steps=STEPS, cfg=1.0, callback=lambda number, *_: change(model, number)
        )

    part.uses = uses
    fast = compiled(patcher)
    for seed in range(2):
        del block_programs[:]
        assert torch.equal(run(fast, seed), run(patcher, seed))
    if not uses:
        assert block_programs.count("single_blocks.1") == STEPS, shapes()


def test_what_the_forward_sets_counts(noting):
    """Else it would not be set after a replay."""
    fast, part = compiled(noting), noting.model.diffusion_model.pe_embedder
    part.sets, seen = True, []

    def look(model, number):
        seen.append(model.pe_embedder.window)
        moving(model, number)

    assert torch.equal(sample(fast, look), sample(noting, look))
    assert seen == [7] * 2 * STEPS


def test_where_it_counts_again_a_change_in_mid_run_is_seen(noting):
    fast, part = compiled(noting), noting.model.diffusion_model.pe_embedder

    def change(model, number):
        moving(model, number)
        model.pe_embedder.uses = number >= STEPS // 2

    def run(patcher):
        part.uses = False
        return sample(patcher, change)

    wanted = run(noting)
    assert error(wanted, sample(noting, moving)) > CHANGED
    for _ in range(2):
        assert torch.equal(run(fast), wanted)


def test_a_part_is_the_same_while_it_is_watched(noting):
    from anyshape.accel.tape.untouched import Untouched

    part, untouched, seen = noting.model.diffusion_model.pe_embedder, Untouched(), []
    assert untouched.suppose([(part, "window"), (part, "own"), (part, "weight")])
    assert untouched.of(type(part)) == {"window"}
    other = type(part)(part.own)
    del other.window
    with untouched.watched(seen.append), untouched.watched(seen.append):
        assert not seen
        other.window = 3
        assert seen == ["Noting.window"] * 2 and untouched.of(type(part)) == set()
        assert (part.window, other.window) == (0, 3)
        del other.window
        with pytest.raises(AttributeError, match="window"):
            other.window  # noqa: B018
        with pytest.raises(AttributeError, match="window"):
            del other.window
        assert not hasattr(type(part), "window")
    assert "window" not in dir(type(part)) and len(seen) == 2
    assert not untouched.suppose([(part, "window")])


READERS = {
    "its dict": "    def forward(self, x):\n        return x * self.__dict__['window']\n",
    "a function beside it": "    own = 2\ndef read(part):\n    return vars(part)['window']\n",
    "a class attribute": "    window = 1\n",
    "its class's own look-up": "    def __getattribute__(self, name):\n        return super().__getattribute__(name)\n",
}


@pytest.mark.parametrize("reader", READERS)
def test_what_cannot_be_watched_counts(tmp_path, monkeypatch, reader):
    from anyshape.accel.tape.untouched import Untouched

    file = tmp_path / "readers.py"
    file.write_text(f"from torch import nn\nclass Part(nn.Module):\n    other = 2\n{READERS[reader]}")
    spec = importlib.util.spec_from_file_location("readers", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "readers", module)
    spec.loader.exec_module(module)
    part = module.Part()
    part.window = 1
    assert not Untouched().suppose([(part, "window")])
