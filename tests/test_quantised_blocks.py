"""Blocks with quantised weights: alike if their weights say the same of themselves, and then recorded once for all."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tools import architectures
from tools.driving import calls_of, compiled
from tools.on_gpu import SMALL_FLUX
from tools.oracles import error

pytest_plugins = ("tools.quantised_fixtures",)
pytestmark = pytest.mark.usefixtures("pack", "one_thread", "clean_stats")
FORMS = ("int8_tensorwise", "int8_convrot", "float8_e4m3fn", "mxfp8", "nvfp4", "convrot_w4a4", "asym_w4a8_int8")
KIND = "QuantizedTensor"
CLOSE = 1e-5  # relative L2 in fp32
RUN = {"width": 128, "height": 64, "steps": 2, "tokens": 24}


def make(quantised: Any, patch: pytest.MonkeyPatch, name: str, form: str, dtype: torch.dtype, **deep: int) -> Any:
    """The tiny model of this name with more blocks, and their weights in ``form``."""
    entry = architectures.TABLE[name]
    patch.setitem(architectures.TABLE, name, replace(entry, config={**entry.config, **deep}))
    return quantised.make(name, form, dtype)


@pytest.mark.parametrize("form", FORMS)
def test_the_first_is_recorded_and_the_others_are_copies(form: str, quantised: Any, monkeypatch: pytest.MonkeyPatch):
    """And need not run in a short recording, as those with weights in 16 bits."""
    from tools.architectures import taped

    if not quantised.has(form):
        pytest.skip("this ComfyUI has no such weights")
    model = make(quantised, monkeypatch, "Flux", form, torch.bfloat16, depth=3, depth_single_blocks=4)
    given = architectures.in_bfloat16(*architectures.TABLE["Flux"].inputs(2))
    each = taped.Recording(model, *given)
    assert each.copies == 5
    assert each.error(each.program(fuse=False), each.eager()) == 0.0
    assert taped.Recording(model, *given, short=True).left_out == 5


@pytest.mark.usefixtures("fusing")
def test_where_the_whole_cannot_be_recorded(
    quantised: Any, comfy: Any, block_programs: list[str], monkeypatch: pytest.MonkeyPatch
):
    """MiniMax H3's block is recorded twice for the first size, in place and then on a copy; then one fits all."""
    from anyshape.accel import block_tier

    from tools.architectures import patchers

    if not (comfy / "comfy" / "ldm" / "minimax").is_dir():
        pytest.skip("this ComfyUI has no MiniMax H3")
    model = make(quantised, monkeypatch, "MiniMaxH3", "int8_tensorwise", torch.float32, num_layers=4)
    assert any(type(each).__name__ == KIND for each in model.blocks[0].parameters())
    patcher = patchers.make("MiniMaxH3")
    patcher.model.diffusion_model = model
    fast, recorded = compiled(patcher), calls_of(monkeypatch, block_tier, "record_block")
    for k in (0, 0, 1):
        ours, own = (patchers.forward(each, "MiniMaxH3", k) for each in (fast, patcher))
        assert error(ours, own) < CLOSE
    assert len(recorded) == 3 and len(block_programs) == 3 + 4 + 3


def test_what_a_weight_says_of_itself_is_looked_at(quantised: Any, models: Any):
    """Numbers that lie as before and mean something else: the block is like no other, and the recording is over."""
    from anyshape.accel.tape.blocks import likeness

    from bench import zoo

    patcher = zoo.make("flux-convrot", torch.bfloat16, **SMALL_FLUX)
    blocks = patcher.model.diffusion_model.single_blocks
    assert len({likeness(block) for block in blocks}) == 1
    fast = compiled(patcher)
    before = models.sample(fast, **RUN)
    assert torch.equal(before, models.sample(patcher, **RUN))
    layer = next(part for part in blocks[1].modules() if type(getattr(part, "weight", None)).__name__ == KIND)
    own = layer.weight
    params = replace(own._params.clone(), convrot=not own._params.convrot)
    layer.weight = torch.nn.Parameter(type(own)(own._qdata.clone(), own._layout_cls, params), requires_grad=False)
    assert len({likeness(block) for block in blocks}) == 2
    wanted = models.sample(patcher, **RUN)
    assert not torch.equal(before, wanted)
    assert torch.equal(models.sample(fast, **RUN), wanted)
