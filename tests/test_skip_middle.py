"""Skip Blocks on transformers: the middle of a recorded forward is found, left out, and what it adds is forecast. CPU.

The models are the table's, with five blocks in each list of blocks. The oracle for state is a fresh run, as in
``test_skip_runs``.
"""

import pytest
import torch
from torch import Tensor, nn

from tools import architectures, embed
from tools.driving import compiled, skip_with_message, skipping
from tools.oracles import counted, error, fallbacks, last_run

embed.bare_pack()

from anyshape.accel.tape import cut, middle  # noqa: E402 - the package exists from the line above on

pytestmark = pytest.mark.usefixtures("pack", "clean_stats", "one_thread")

BLOCKS = 5
# What no middle is found in, and why.
WHOLE = {
    "SD15": "it has no repeated blocks",
    "SDXL": "it has no repeated blocks",
    "SVD_img2vid": "it has no repeated blocks",
    "Stable_Cascade_B": "it has no repeated blocks",
    "Stable_Cascade_C": "it has no repeated blocks",
    "CosmosT2V": "not one part a picture",  # its pictures lie behind their frames
    # Tiny as they are here, it is other layers that take the time.
    "WAN21_I2V": "of its work",
    "WAN21_Camera": "of its work",
    "WAN22_Animate": "of its work",
    "WAN22_WanDancer": "of its work",
    "ACEStep": "of its work",
    "ACEStep15": "it has no repeated blocks",
    "PixelDiTT2I": "it has no repeated blocks",
    "PiD": "it has no repeated blocks",
}
# What is not recorded (see test_tape_families), and what cannot be made with other numbers of blocks.
LEFT_OUT = {
    "HunyuanDiT", "HiDream", "HiDreamO1", "SeedVR2", "HunyuanVideo15_SR_Distilled", "Hunyuan3Dv2_1", "MiniMaxH3", "SD3",
    "WAN21_Vace",
}  # fmt: skip
NAMES = [
    entry.name
    for entry in architectures.present()
    if not architectures.is_twin(entry) and entry.name not in LEFT_OUT
]  # fmt: skip


# Cutting: every model of the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_without_its_middle_and_with_what_it_adds_a_forward_is_the_same(name: str):
    """On the input that was recorded and on another one: whole to the bit, without the middle but for rounding."""
    from tools.architectures.taped import Studied, far

    recording = Studied(architectures.TABLE[name], blocks=BLOCKS).record(3, skipping=True)
    assert recording.tape is not None, recording.refusal
    if name in WHOLE:
        with pytest.raises(middle.NotCut, match=WHOLE[name]):
            recording.cut()
        return
    halves = recording.cut()
    assert halves.added >= 1 and 0 < halves.share < 1 and halves.depth >= 1
    whole, rest = (recording.program(fuse=False, tape=tape) for tape in (halves.full, halves.skipped))
    generator = torch.Generator().manual_seed(1)
    for inputs in (recording.inputs, [other(tensor, generator) for tensor in recording.inputs]):
        out = whole.run(inputs)
        own, added = out[: -halves.added], out[-halves.added :]
        nothing = [torch.zeros_like(tensor) for tensor in added]
        assert far(rest.run(recording.with_added(added, inputs)), own) < 1e-5
        assert far(rest.run(recording.with_added(nothing, inputs)), own) > 0.01
        assert inputs is not recording.inputs or far(own, recording.out) == 0.0


def other(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Fresh numbers of the same kind, in the place of latents and prompts; times and masks stay."""
    if not tensor.is_floating_point() or tensor.ndim < 3:
        return tensor
    return torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * tensor.std()
