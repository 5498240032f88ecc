"""A partly loaded model on a real GPU, as ComfyUI without DynamicVRAM has it: never wrong, never slower.

Each case is a process of its own (``tools.low_vram_cases``), on the older ComfyUI where that is installed.
"""

import pytest

from tools.low_vram_cases import in_process

pytestmark = pytest.mark.gpu

CLOSE = 2e-2  # relative L2 of one result in bfloat16


@pytest.mark.parametrize("whole", [True, False], ids=["whole blocks", "ComfyUI's choice"])
@pytest.mark.parametrize("streams", [0, 2])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_a_partly_loaded_model(share: float, streams: int, whole: bool):
    """Blocks that are on the card run on programs, unless they are few: of 9, one with 0.3 of the weights."""
    found = in_process(share=share, streams=streams, whole=whole)
    print(found)
    assert found["message"] == "" and found["ahead"] == bool(streams)
    assert 0 < found["loaded"] < found["size"] and abs(found["loaded"] / found["size"] - share) < 0.15
    assert max(found["errors"]) < CLOSE
    assert (found["programs"] > 0) == (whole and share > 0.5) and "graph" not in found["states"]
    assert any("low VRAM" in said for said in found["reasons"] + found["notes"]), found
    assert found["s"] <= 1.02 * found["eager_s"]
