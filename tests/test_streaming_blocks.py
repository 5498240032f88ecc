"""Weights that do not fit, under programs of single blocks: of models whose whole forward cannot be recorded.

ComfyUI's own forward runs around the blocks. Of models that have one, its prefetch queue brings a block's weights.
"""

from dataclasses import replace

import pytest
import torch

from tools import architectures, pages
from tools.driving import calls_of, compiled, skipping
from tools.oracles import counted, error, fallbacks, only_streamed, shapes
from tools.patching import read_back
from tools.skip_driving import PLANNED, STEPS

pytest_plugins = ("tools.page_fixtures", "tools.quantised_fixtures")
pytestmark = [*pages.IN_STREAM, pytest.mark.usefixtures("fusing")]
BLOCKS = 4
CLOSE = 1e-5  # relative L2 in fp32
NAME = "MiniMaxH3"  # reads its time step back by itself
QUEUE = "prefetch_dynamic_vbars"


@pytest.fixture
def forward(pack):
    from tools.architectures import patchers

    return lambda patcher, k=0, name=NAME: patchers.forward(patcher, name, k)


@pytest.fixture
def asked(streamed, queued):
    """(MiniMax H3, the same compiled, what a load does), whose forwards ask for ComfyUI's queue."""
    patcher, load = streamed(NAME)
    patcher.model_options["transformer_options"][QUEUE] = True
    return patcher, compiled(patcher), load


@pytest.mark.parametrize(
    "name, queue", [(NAME, False), (NAME, True), ("ZImage", False)], ids=["layers", "queue", "another"]
)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_blocks_of_a_forward_that_cannot_be_recorded(
    streamed, forward, queued, fetched, monkeypatch, share, name, queue
):
    """One recording fits every block, at each size, and on each block's weights as they come."""
    from anyshape.accel import block_tier

    patcher, load = streamed(name, share)
    if name != NAME:
        read_back(patcher.model.diffusion_model)
    patcher.model_options["transformer_options"][QUEUE] = queue
    fast, recorded = compiled(patcher), calls_of(monkeypatch, block_tier, "record_block")
    for k in (0, 0, 1, 1):
        before, wanted = len(fetched), forward(patcher, k, name)
        assert bool(queued) == queue and (not queued or queued[-1] == [None])
        load()
        assert error(forward(fast, k, name), wanted) < CLOSE, fallbacks()
        assert pages.is_clean(load) and len(fetched) > before and only_streamed()
    assert len(recorded) == (3 if name == NAME else 2)  # it writes into what it is given: twice at the first size
    for shape in shapes():
        assert shape["state"] == "tape" and "The operations are fused" in shape["reason"]
        assert "blocks recorded one by one, not the whole forward: a value came back" in shape["note"]


def test_quantised_blocks(quantised, card, queued, forward, monkeypatch):
    """Their scales come with them."""
    from tools.architectures import patchers

    if not quantised.has("int8_tensorwise"):
        pytest.skip("this ComfyUI has no such weights")
    entry = architectures.TABLE[NAME]
    deep = replace(entry, config={**entry.config, "num_layers": BLOCKS})
    monkeypatch.setitem(architectures.TABLE, NAME, deep)
    patcher = patchers.make(NAME)
    patcher.model.diffusion_model = quantised.make(NAME, "int8_tensorwise", torch.float32)
    load = pages.Loads(patcher.model.diffusion_model, card)
    card.pages = load.pages.count // 2
    patcher.model_options["transformer_options"][QUEUE] = True
    fast = compiled(patcher)
    for k in (0, 0, 1):
        load()
        wanted = forward(patcher, k)
        load()
        assert error(forward(fast, k), wanted) < CLOSE and pages.is_clean(load) and only_streamed()
    assert {shape["state"] for shape in shapes()} == {"tape"} and queued


def test_weights_that_fit_again(asked, card, forward, fetched, monkeypatch):
    """One program fetches weights and the other does not. Each is found when its turn comes."""
    from anyshape.accel import block_tier

    (patcher, fast, load), short = asked, card.pages
    wanted, recorded = forward(patcher), calls_of(monkeypatch, block_tier, "record_block")
    for turn in range(4):
        card.pages = pages.ENOUGH if turn % 2 else short
        load.pages.give_away()
        load()
        fetched.clear()
        assert error(forward(fast), wanted) < CLOSE and pages.is_clean(load)
        assert bool(fetched) == (turn % 2 == 0)
    assert len(recorded) == 3


def test_a_block_whose_program_fails(asked, forward, monkeypatch):
    """It runs in eager, on the weights that the queue has brought."""
    from anyshape.accel.tape.program import Program

    patcher, fast, load = asked
    wanted, own = forward(patcher), Program.run
    assert error(forward(fast), wanted) < CLOSE

    def fails(*args):
        own(*args)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Program, "run", fails)
    for _ in range(2):
        load()
        assert torch.equal(forward(fast), wanted) and pages.is_clean(load)
    assert shapes()[0]["state"] == "eager"


def test_an_interrupt_while_a_block_is_recorded(asked, forward):
    """Layers are left as ComfyUI's own clean-up expects them."""
    import comfy.model_prefetch

    patcher, fast, load = asked
    wanted, block = forward(patcher), patcher.model.diffusion_model.blocks[-1]

    def fails(*_):
        raise KeyboardInterrupt

    for layer in (load.layers[-1], next(part for part in block.modules() if part in load.layers)):
        handle = layer.register_forward_hook(fails)
        with pytest.raises(KeyboardInterrupt):
            forward(fast)
        handle.remove()
        comfy.model_prefetch.cleanup_prefetch_queues()  # as ComfyUI does behind each prompt
        assert pages.is_clean(load)
    load()
    assert error(forward(fast), wanted) < CLOSE


def test_skip_blocks(models, streamed, card, fetched):
    """Blocks that are not skipped run on their programs, and those that are fetch nothing."""
    patcher, load = streamed(NAME)
    skip, found = skipping(compiled(patcher), depth="1"), []
    for there in (pages.ENOUGH, card.pages):
        card.pages = there
        load.pages.give_away()
        load()
        for _ in range(2):  # the first one finds out that the whole cannot be recorded
            found.append(models.sample(skip, width=64, height=64, frames=9, steps=STEPS).unbind())
            assert counted() == PLANNED and pages.is_clean(load) and bool(fetched) == (there != pages.ENOUGH)
        assert all(map(torch.equal, found[-1], found[-2]))  # the same seed, the same picture
    assert all(error(ours, wanted) < CLOSE for ours, wanted in zip(found[3], found[1], strict=True))


def test_what_is_asked_of_layers(asked, forward, fetched, monkeypatch):
    """Those in their pages cost one question. Which steps fetch which weights is found once for all blocks and runs."""
    from anyshape.accel.comfy.layer_casts import Cast
    from anyshape.accel.tape import program

    _, fast, load = asked
    planned = calls_of(monkeypatch, program, "with_fetches")
    for _ in range(3):
        load()
        forward(fast)
    assert len(planned) == 1
    fast.model_options["transformer_options"][QUEUE] = False
    casts = calls_of(monkeypatch, Cast, "__enter__", lambda cast: cast)
    fetched.clear()
    forward(fast)
    brought = sum(len(cast._own) for cast in casts)
    assert len(casts) == len(fetched) and 0 < brought < 0.8 * sum(len(cast._parts) for cast in casts)
