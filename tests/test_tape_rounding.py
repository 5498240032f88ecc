"""Kernels round where eager rounds: in bfloat16 each of them gives eager's very numbers from eager's own inputs.

In Triton's interpreter, against torch's operations on the CPU; ``test_gpu_tape_kernels.py`` says the same of a card.
"""

import pytest
import torch

from tools import architectures, embed

embed.bare_pack()

pytestmark = pytest.mark.usefixtures("pack", "one_thread")
MODELS = ("Flux", "SD3", "QwenImage", "Lumina2", "WAN21_T2V", "CosmosT2IPredict2", "LTXV", "HunyuanVideo")
# Shares of a kernel's elements: the last bit of exp, tanh and erf differs, and their results are then rounded.
UNEQUAL, FURTHER = 2e-3, 1e-3  # off by more than a step is what lies near zero


@pytest.mark.parametrize("name", [entry.name for entry in architectures.present() if entry.name in MODELS])
def test_each_kernel_gives_the_numbers_of_eager(name: str):
    from tools.architectures import patchers, taped
    from tools.recording import Recorded, Rounding

    entry = architectures.TABLE[name]
    model = patchers.make(name, torch.bfloat16).model.diffusion_model
    given = architectures.in_bfloat16(*entry.inputs(taped.Studied.smallest_of(entry)))
    recording = taped.Recording(model, *given)
    assert recording.tape is not None, recording.refusal
    rounding = Rounding()
    program = recording.program(fuse=True)
    rounding.add(Recorded(recording.out, recording.tape, recording.inputs, program, model))
    for kernel, elements, unequal, further, _ in rounding.by_source():
        assert unequal <= max(1, UNEQUAL * elements) and further <= max(1, FURTHER * elements), kernel
    assert len(rounding.by_source()) >= 4
