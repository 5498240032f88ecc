"""Every kind of model of the table through Compile Model on a real GPU, in bf16: tiny, with random weights."""

import gc

import pytest
import torch

from tools import architectures
from tools.driving import compiled, options_of
from tools.oracles import error, fallbacks, shapes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_stats", "no_graphs_left")]

ENTRIES = [pytest.param(entry, id=entry.name) for entry in architectures.present() if not architectures.is_twin(entry)]
# Those that are not recorded as a whole: see REFUSED in test_tape_families.
IN_PART = {
    "HunyuanDiT", "HiDream", "HiDreamO1", "HunyuanVideo15_SR_Distilled", "Hunyuan3Dv2_1", "MiniMaxH3",
}  # fmt: skip
VARIANTS = (0, 1, 2, 3)
CLOSE = 0.05


@pytest.fixture(scope="module")
def unfrozen(pack):
    """The recorder asks the collector who holds a tensor that a model keeps, and it does not look at what is frozen."""
    gc.unfreeze()


@pytest.mark.usefixtures("unfrozen")
@pytest.mark.parametrize("entry", ENTRIES)
def test_as_eager_and_from_graphs(models, entry):
    check(entry.name)


@pytest.mark.usefixtures("unfrozen")
@pytest.mark.parametrize("name", ["MiniMaxH3", "Lumina2", "Flux", "WAN21_T2V", "SDXL"])
def test_with_the_librarys_own_attention(models, name):
    """Attention in 8 bits, as ComfyUI's node ModelAttentionBackend chooses it. MiniMax H3 hands over its tensors."""
    import comfy.ldm.modules.attention as attention

    from tools.patching import choose_attention

    if not getattr(attention, "COMFY_KITCHEN_INT8_ATTENTION_IS_AVAILABLE", False):
        pytest.skip("this ComfyUI has no such attention, or not on this card")
    check(name, lambda patcher: choose_attention(patcher, attention.attention_comfy_kitchen_int8))


def check(name, patch=lambda patcher: None):
    """A model of this kind gives ComfyUI's results, from graphs where it may be recorded. patch: of the model."""
    import comfy.model_management

    from tools.architectures import patchers

    with torch.inference_mode():
        patcher = patchers.make(name, torch.bfloat16, "cuda")
        patch(patcher)
        wanted = {k: [part.clone() for part in patchers.apply(patcher, k, name, options_of(patcher))] for k in VARIANTS}
        fast = compiled(patcher.clone())
        comfy.model_management.load_models_gpu([fast])
        for k in VARIANTS * 2:
            parts = patchers.apply(fast, k, name, options_of(fast))
            assert [part.shape for part in parts] == [part.shape for part in wanted[k]]
            assert max(map(error, parts, wanted[k])) < CLOSE
    told = {(shape["state"], shape["reason"], shape["note"]) for shape in shapes()}
    if name in IN_PART:
        assert {state for state, *_ in told} <= {"tape", "eager"}
    else:
        assert told == {("graph", "", "")} and not fallbacks()
