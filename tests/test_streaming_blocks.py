"""Weights that do not fit, under programs of single blocks: of models whose whole forward cannot be recorded.

ComfyUI's own forward runs around the blocks. Of models that have one, its prefetch queue brings a block's weights.
"""

from dataclasses import replace

import pytest

from tools import architectures, pages
from tools.driving import calls_of, compiled
from tools.oracles import error, fallbacks, only_streamed, shapes
from tools.patching import read_back

pytest_plugins = ("tools.page_fixtures",)
pytestmark = [*pages.IN_STREAM, pytest.mark.usefixtures("fusing")]
CLOSE = 1e-5  # relative L2 in fp32
DEEPER = {"MiniMaxH3": {"num_layers": 4}, "ZImage": {"n_layers": 4}}


@pytest.fixture
def make(pack, card, monkeypatch):
    """(A model of the table whose forward reads its time step back, what a load of it does)."""
    from tools.architectures import patchers

    def made(name, share=0.5):
        entry = architectures.TABLE[name]
        monkeypatch.setitem(architectures.TABLE, name, replace(entry, config={**entry.config, **DEEPER[name]}))
        patcher = patchers.make(name)
        if name != "MiniMaxH3":  # which does it by itself
            read_back(patcher.model.diffusion_model)
        load = pages.Loads(patcher.model.diffusion_model, card)
        card.pages = int(load.pages.count * share)
        load()
        return patcher, load

    return made


@pytest.mark.parametrize("queue", [False, True], ids=["by layers", "by blocks"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_blocks_of_a_forward_that_cannot_be_recorded(make, queued, fetched, monkeypatch, share, queue):
    """One recording fits every block, at each size, and on each block's weights as they come."""
    from anyshape.accel import block_tier

    from tools.architectures import patchers

    patcher, load = make("MiniMaxH3", share)
    fast = compiled(patcher)
    for each in (patcher, fast):
        each.model_options["transformer_options"]["prefetch_dynamic_vbars"] = queue
    recorded = calls_of(monkeypatch, block_tier, "record_block")
    for k in (0, 0, 1, 1):
        before = len(fetched)
        wanted = patchers.forward(patcher, "MiniMaxH3", k)
        assert bool(queued) == queue and (not queued or queued[-1] == [None])
        load()
        assert error(patchers.forward(fast, "MiniMaxH3", k), wanted) < CLOSE, fallbacks()
        assert pages.is_clean(load) and len(fetched) > before and only_streamed()
    assert len(recorded) == 3  # at the first size twice, because it writes into what it is given
    for shape in shapes():
        assert shape["state"] == "tape" and "The operations are fused" in shape["reason"]
        assert "blocks recorded one by one, not the whole forward: a value came back" in shape["note"]
