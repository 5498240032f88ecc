"""The case of a partly loaded model that is judged on a GPU, on the CPU: its results are right, and it tells all."""

import pytest

from tools import low_vram_cases
from tools.driving import SMALL_FLUX

pytestmark = pytest.mark.usefixtures("clean_stats")


@pytest.mark.parametrize("whole", [True, False])
def test_a_partly_loaded_model(models, whole, monkeypatch):
    from anyshape.accel.block_tier import BlockTier

    monkeypatch.setattr(BlockTier, "_replay", BlockTier._replay)  # the case wraps it
    found = low_vram_cases.partly(0.7, whole, repeat=1, size=(128, 128), dtype="float32", **SMALL_FLUX)
    assert found["message"] == "" and found["errors"] == [0.0, 0.0]
    assert found["states"] == ["tape"] and found["reasons"] == [] and not found["ahead"]
    assert 0.9 < found["loaded"] / found["size"] <= 1  # on a CPU both places are one
    assert found["cast"] > (3 if whole else 20)
    assert found["s"] > 0 and found["eager_s"] > 0
