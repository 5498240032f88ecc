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
    import comfy.model_management

    from tools.architectures import patchers

    name = entry.name
    with torch.inference_mode():
        patcher = patchers.make(name, torch.bfloat16, "cuda")
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
