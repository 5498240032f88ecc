"""What the tests of Warm Up share: the node as a workflow calls it, and the sizes that have run."""

from types import ModuleType
from typing import Any

FORMS = "write 1024x1152, 896x768 batch 2, or 832x480x33 for 33 frames"  # what a line that is no size is answered
SIZES = "136x120\n64x96 batch 2\n128x128"
Patcher = Any  # comfy.model_patcher.ModelPatcher; ComfyUI is imported when the tests' fixtures say so


def warm(pack: ModuleType, model: Patcher, sizes: str = SIZES, **inputs: Any) -> str:
    """The node's report."""
    node = pack.nodes.WarmUp
    given = {"vae": None} | inputs
    out = node.PREPARE_CLASS_CLONE({}).execute(model, sizes, **given).args
    assert out[0] is model and out[1] is given["vae"]
    return out[2]


def ran(kind: str = "model") -> dict[tuple[int, int, int], int]:
    """(width, height, batch) -> calls, of everything of this kind."""
    from anyshape.accel import stats

    found = [s for model in stats.snapshot()["models"] if model["kind"] == kind for s in model["shapes"]]
    return {(s["width"], s["height"], s["batch"]): s["calls"] for s in found}
