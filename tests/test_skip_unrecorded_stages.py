"""Skip Blocks on UNets that are on no tape because their weights are streamed. CPU; see ``test_skip_unrecorded``."""

import pytest
import torch
from torch import Tensor, nn

from tools import embed, pages
from tools.driving import compiled, skipping, steering
from tools.oracles import counted, error, last_run
from tools.skip_driving import PLANNED, RUN, STEPS, left_out

embed.bare_pack()

from anyshape.accel.reasons import say  # noqa: E402 - the package exists from the line above on
from anyshape.accel.skip.schedule import full_steps  # noqa: E402
from anyshape.accel.skip.unrecorded_stages import UnrecordedStages  # noqa: E402

pytest_plugins = ("tools.page_fixtures",)
pytestmark = pytest.mark.usefixtures("pack", "clean_stats", "one_thread", "no_stream")

STREAMS = say("weights_streamed", there="", all="").partition(":")[0]


@pytest.fixture
def load(models, monkeypatch):
    """A UNet whose weights do not fit, from the first call on."""
    if problem := pages.missing():
        pytest.skip(problem)
    pages.use(monkeypatch)
    found = pages.loaded_unet(models, pages.Card())
    found()
    return found


def give_away(load) -> None:
    load.pages.card.pages = load.pages.count // 2
    load.pages.give_away()


@pytest.fixture(scope="module")
def wanted(models, patcher):
    """What such a UNet gives without it."""
    return models.sample(patcher, **RUN)


@pytest.mark.parametrize("depth", ["0", "2", "auto"])
def test_streamed_weights(models, wanted, load, depth):
    """The steps are skipped as on a tape, and give what they give there."""
    skip = skipping(load.patcher, depth=depth)
    taped = models.sample(skip, **RUN)
    assert counted() == PLANNED and last_run()["depth"] == int(depth if depth != "auto" else 0)
    give_away(load)
    for way in (skip, skipping(compiled(load.patcher), depth=depth)):
        out = models.sample(way, **RUN)
        assert counted() == PLANNED and not load.pages.pinned and last_run()["bytes"] > 0
        if depth != "auto":  # by weights and pixels there, by all operations on a tape
            assert error(out, taped) < 1e-4 and last_run()["depth"] == int(depth)
        assert error(out, wanted) < 0.7  # random weights: no smoothness


def test_weights_that_are_left_out_are_not_fetched(models, load):
    """On a skipped step nobody asks for the pages of the layers between."""
    give_away(load)
    skip, full, step = skipping(load.patcher, depth="0"), full_steps(range(STEPS), 3), 0
    middle = [part._v[1] for part in load.patcher.model.diffusion_model.middle_block.modules() if "_v" in part.__dict__]
    asked: set[int] = set()

    def between(at, *_):
        nonlocal step
        step = at + 1

    own = load.pages.fault

    def fault(address, size):
        if any(address <= place < address + size for place in middle):
            asked.add(step)
        return own(address, size)

    load.pages.fault = fault
    models.sample(skip, **RUN, callback=between)
    assert counted() == PLANNED and middle and asked == set(full)


def test_every_step_in_full_is_eager_to_the_bit(models, load):
    give_away(load)
    few = RUN | {"steps": 7}
    wanted = models.sample(load.patcher, **few)
    for settings in ({"interval": 1}, {}):
        assert torch.equal(models.sample(skipping(load.patcher, **settings), **few), wanted)


def test_residuals_and_patches(models, load):
    """Where something is added to the deep stages, or counts its calls, every step is full."""
    give_away(load)
    control = models.controlnet("sd15", torch.float32, model_channels=32, context_dim=64, num_heads=4)
    steer = {"steer": steering(control)}
    wanted = models.sample(load.patcher, **RUN, **steer)
    assert torch.equal(models.sample(skipping(load.patcher), **RUN, **steer), wanted)
    load.patcher.set_model_output_block_patch(lambda h, hsp, options: (h, hsp))
    assert torch.equal(models.sample(skipping(load.patcher), **RUN), models.sample(load.patcher, **RUN))
    found = counted()
    assert (found["full"], found["skipped"]) == (STEPS, 0) and all(r.startswith(STREAMS) for r in found["resets"])


# Also without a middle, of frames, of another embedding; and one of which nothing is left out.
NETWORKS = ("SD15", "SDXL", "KOALA_700M", "SVD_img2vid", "SD_X4Upscaler", "Stable_Cascade_C")


@pytest.mark.parametrize("name", NETWORKS)
def test_architectures(tiny, name):
    """Full steps are the model's own to the bit; with its own feature a skipped one is the full one."""
    features = left_out(tiny(name, fresh=True), name, lambda model: UnrecordedStages(model, 0, ()), 1e-5)
    assert isinstance(features, str) == (name == "Stable_Cascade_C"), features


class Stage(nn.ModuleList):
    """A layer for each of its channels."""

    def __init__(self, *channels: int) -> None:
        super().__init__(nn.Conv2d(channels[0], channels[1], 3, padding=1) for _ in range(1))


class Network(nn.Module):
    """Of four stages. beside: what else reaches the outer ones from the deep ones."""

    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.down = nn.ModuleList(Stage(8, 8) for _ in range(4))
        self.up = nn.ModuleList(Stage(16, 8) for _ in range(4))
        self.beside = beside

    def forward(self, x: Tensor) -> Tensor:
        h, kept = self.first(x), []
        for stage in self.down:
            h = stage[0](h)
            kept.append(h)
        deepest = h
        for stage in self.up:
            h = stage[0](torch.cat([h, kept.pop()], 1))
        return h + deepest.mean() if self.beside and deepest.numel() else h


@pytest.mark.parametrize("beside", [False, True])
def test_it_is_tried_before_it_is_done(beside):
    """A network that needs more of its deep stages than their last result skips nothing, and says so."""
    torch.manual_seed(0)
    model, x = Network(beside).requires_grad_(False), torch.randn(2, 4, 6, 5)
    stages = UnrecordedStages(model, 0, ())
    for rows in (2, 2, 1):
        out, features = stages.full(model, lambda rows=rows: model(x[:rows]), rows)
        assert torch.equal(out, model(x[:rows]))
        assert isinstance(features, str) == beside
        if not beside:
            assert error(stages.skipped(model, lambda rows=rows: model(x[:rows]), features), out) < 1e-6
