"""Skip Blocks where a forward is on no tape: weights that are streamed, and models that read a value back. CPU.

comfy-aimdo's page table is a stand-in (``tools.pages``); what streams, casts and fills weights is ComfyUI's own code.
"""

import pytest
import torch
from torch import nn

from tools import architectures, embed, pages
from tools.driving import compiled, sample_tiny, skipping
from tools.oracles import counted, error, last_run
from tools.skip_driving import BLOCKS, PLANNED, STEPS, left_out

embed.bare_pack()

from anyshape.accel.reasons import say  # noqa: E402 - the package exists from the line above on
from anyshape.accel.skip.schedule import full_steps  # noqa: E402
from anyshape.accel.skip.unrecorded import NotLeftOut, UnrecordedBlocks  # noqa: E402

pytest_plugins = ("tools.page_fixtures",)
pytestmark = pytest.mark.usefixtures("pack", "clean_stats", "one_thread", "no_stream")

# Two streams that take turns in two lists, frames, a forward that calls no wrappers.
STREAMED = ("Flux", "WAN21_T2V", "AuraFlow")
STREAMS = say("weights_streamed", there="", all="").partition(":")[0]


def sample(patcher, name, **run):
    return sample_tiny(patcher, name, **{"steps": STEPS, "width": 10} | run)


@pytest.fixture
def streamed(tiny, monkeypatch):
    """A tiny model whose weights do not fit."""
    if problem := pages.missing():
        pytest.skip(problem)
    pages.use(monkeypatch)

    def make(name):
        patcher = tiny(name, fresh=True)
        load = pages.Loads(patcher.model.diffusion_model, pages.Card())
        load()
        load.pages.card.pages = load.pages.count // 2
        return patcher, load

    return make


@pytest.mark.parametrize("name", STREAMED)
def test_streamed_weights(tiny, streamed, name):
    """Steps are skipped, by the same features as on a tape wherever the same blocks are left out."""
    wanted = sample(tiny(name), name)
    patcher, load = streamed(name)
    out = sample(skipping(patcher, depth="1"), name)
    assert counted() == PLANNED and not load.pages.pinned
    assert last_run()["depth"] == 1 and last_run()["bytes"] > 0
    assert 0 < error(out, wanted) < 0.7  # random weights: no smoothness
    if name in ("WAN21_T2V", "AuraFlow"):  # one list of blocks
        assert error(out, sample(skipping(tiny(name), depth="1"), name)) < 1e-3
    assert torch.equal(sample(skipping(compiled(patcher), depth="1"), name), out)


def test_weights_that_are_left_out_are_not_fetched(streamed):
    """On a skipped step nobody asks for the pages of a block in the middle."""
    patcher, load = streamed("Flux")
    skip, full = skipping(patcher, depth="1"), full_steps(range(STEPS), 3, density=None)
    lists = [part for part in patcher.model.diffusion_model.children() if isinstance(part, nn.ModuleList)]
    layers = [part for part in max(lists, key=len)[BLOCKS // 2].modules() if "_v" in part.__dict__]
    asked: dict[int, int] = {}
    step = 0

    def between(at, *_):
        nonlocal step
        step = at + 1

    own = load.pages.fault

    def fault(address, size):
        inside = any(address <= part._v[1] < address + size for part in layers)
        asked[step] = asked.get(step, 0) + (inside and len(layers) > 0 and size <= max(p._v[2] for p in layers))
        return own(address, size)

    load.pages.fault = fault
    sample(skip, "Flux", callback=between)
    assert counted() == PLANNED
    assert all(bool(asked.get(step)) == (step in full) for step in range(STEPS)), asked


def test_every_step_in_full_is_eager_to_the_bit(streamed):
    patcher, _ = streamed("Flux")
    few = {"steps": 7}
    wanted = sample(patcher, "Flux", **few)
    for settings in ({"interval": 1}, {}):
        assert torch.equal(sample(skipping(patcher, **settings), "Flux", **few), wanted)


def test_runs_after_each_other_are_as_fresh_ones(streamed):
    """Without CFG, of another batch and at another size; others are in ``test_skip_middle``."""
    (patcher, _), (fresh, _) = streamed("Flux"), streamed("Flux")
    skip, run = skipping(patcher), {"cfg": 1.0, "batch": 3, "height": 7}
    sample(skip, "Flux")
    assert torch.equal(sample(skip, "Flux", **run), sample(skipping(fresh), "Flux", **run))
    assert last_run()["skipped"] >= 6 and last_run()["resets"] == {}


def test_weights_that_fit_again(streamed):
    """In mid-run: features of the one way are never taken for those of the other."""
    patcher, load = streamed("Flux")
    skip = skipping(patcher)

    def between(step, *_):
        if step == 4:
            load.pages.card.pages = pages.ENOUGH
            load()

    wanted = sample(patcher, "Flux")
    out = sample(skip, "Flux", callback=between)
    found = counted()
    assert found["full"] + found["skipped"] == STEPS and found["skipped"] >= 5
    assert error(out, wanted) < 0.7


def test_a_patch_that_may_count_its_calls(streamed):
    """It is called on every step, so every step is full."""
    patcher, _ = streamed("Flux")
    calls = []
    patcher.set_model_patch(lambda args: calls.append(1) or args, "double_block")
    wanted = sample(patcher, "Flux")
    assert torch.equal(sample(skipping(patcher), "Flux"), wanted)
    found = counted()
    assert (found["full"], found["skipped"]) == (STEPS, 0)
    assert all(reason.startswith(STREAMS) for reason in found["resets"])


# With one stream or two, in lists or one after the other, in place, with connections past the middle.
ROWS = (
    "MiniMaxH3", "SD3", "Omnigen2", "WAN22_S2V", "Hunyuan3Dv2_1", "LTXAV", "Kandinsky5", "GenmoMochi", "CogVideoX_T2V",
    "Lens", "WAN21_CausalAR_T2V", "QwenImage", "ZImage", "LTXV",
)  # fmt: skip


@pytest.mark.parametrize("name", [entry.name for entry in architectures.present() if entry.name in ROWS])
def test_architectures(tiny, name):
    """Full steps are the model's own to the bit; with its own features a skipped one is the full one."""
    features = left_out(tiny(name, fresh=True), name, lambda model: UnrecordedBlocks(model, 1, ()), 1e-4)
    assert not isinstance(features, str), features


# Blocks in a row, and what keeps them from being one -----------------------------------------------------------------


class Block(nn.Module):
    """Two streams; what it does with them is for subclasses to change."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y, cache=None):
        return [x + self.a(y), y + self.b(x)]


class Writing(Block):
    def forward(self, x, y, cache=None):
        cache.add_(1)
        return super().forward(x, y)


class InPlace(Block):
    def forward(self, x, y, cache=None):
        x += self.a(y)
        y = y + self.b(x)
        return [x, y]


class Row(nn.Module):
    """A model of six blocks. between: what happens to the first stream behind each block."""

    def __init__(self, kind=Block, between=lambda x, kept: x):
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(6))
        self.between = between

    def forward(self, x):
        x, y, kept = x * 1.0, x * 0.5, []
        cache = torch.zeros_like(x)
        for block in self.blocks:
            x, y = block(x, y, cache=cache)
            x = self.between(x, kept)
        return torch.cat([x, y, *kept[1:-1]], 1)


def keep(x, kept):
    kept.append(x)
    return x


def write(x, kept):
    x += 1.0
    return x


def make(kind=Block, between=lambda x, kept: x, depth=1):
    torch.manual_seed(0)
    model = Row(kind, between).requires_grad_(False)
    return model, UnrecordedBlocks(model, depth, ())


@pytest.mark.parametrize("kind", [Block, InPlace])
def test_with_its_own_features_a_skipped_step_is_the_full_one(kind):
    model, blocks = make(kind)
    assert len(blocks.middle) == 4 and blocks.depth == 1 and 0 < blocks.share < 1
    for rows in (2, 3):
        x = torch.randn(rows, 4, 8)
        own = model(x)
        out, features = blocks.full(model, lambda x=x: model(x), rows)
        assert torch.equal(out, own) and len(features) == 2
        assert error(blocks.skipped(model, lambda x=x: model(x), features), own) < 1e-6
        nothing = [torch.zeros_like(feature) for feature in features]
        assert error(blocks.skipped(model, lambda x=x: model(x), nothing), own) > 0.01


@pytest.mark.parametrize(
    ("kind", "between"),
    [(Writing, None), (Block, keep), (Block, write), (Block, lambda x, kept: x * 2), (Block, lambda x, kept: x[:, :])],
    ids=["cache", "kept", "written between", "another tensor", "view"],
)
@pytest.mark.parametrize("depth", [0, 1])
def test_what_is_no_row(kind, between, depth):
    model, blocks = make(kind, between or (lambda x, kept: x), depth)
    x = torch.randn(2, 4, 8)
    out, features = blocks.full(model, lambda: model(x), 2)
    assert torch.equal(out, model(x)) and isinstance(features, str) and "do not follow" in features


def test_features_that_are_not_by_picture():
    model, blocks = make()
    _, features = blocks.full(model, lambda: model(torch.randn(4, 4, 8)), 3)
    assert isinstance(features, str)


def test_a_step_that_goes_otherwise():
    """A block that is not called, is called twice, or is given another stream."""
    model, blocks = make()
    x = torch.randn(2, 4, 8)
    _, features = blocks.full(model, lambda: model(x), 2)
    other = torch.randn(2, 5, 8)
    with pytest.raises(NotLeftOut, match="another stream"):
        blocks.skipped(model, lambda: model(other), features)
    with pytest.raises(NotLeftOut, match="out of turn"):
        blocks.skipped(model, lambda: model(model(x)[:, :4]), features)
    with pytest.raises(NotLeftOut, match="is not called"):
        blocks.skipped(model, lambda: x, features)
    assert all("forward" not in block.__dict__ for block in model.blocks)


def test_a_fault_of_ours_costs_the_features_alone(monkeypatch):
    model, blocks = make()
    x = torch.randn(2, 4, 8)
    wanted = model(x)
    monkeypatch.setattr("anyshape.accel.skip.unrecorded._FullStep._leave", lambda *_: 1 / 0)
    out, features = blocks.full(model, lambda: model(x), 2)
    assert torch.equal(out, wanted) and isinstance(features, str)


def test_small_lists_always_run():
    model, _ = make()
    model.refiner = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(4))
    assert [path.partition(".")[0] for path in UnrecordedBlocks(model, 1, ()).middle] == ["blocks"] * 4
    few = nn.Module()
    few.large, few.blocks = nn.Linear(500, 500), model.blocks
    assert UnrecordedBlocks(few, None, ()).middle == []
