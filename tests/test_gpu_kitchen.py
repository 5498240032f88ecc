"""comfy-kitchen's own CUDA kernels beside what `rules/kitchen.py` says they compute, and a program made of that."""

import pytest
import torch
from torch import nn

pytest.importorskip("comfy_kitchen")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("pack")]

# The share of elements that may be rounded the other way: the library's kernels may contract a multiply and an add.
DIFFERENT = {torch.bfloat16: 1e-4, torch.float16: 8e-4}
NAMES = (
    "apply_rope", "apply_rope1", "apply_rope_split_half", "apply_rope_split_half1",
    "rms_rope", "rms_rope1", "rms_rope_split_half", "rms_rope_split_half1",
)  # fmt: skip
STEP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def arguments(name, dtype, heads_first, tokens=1033, channels=128):
    draw = torch.Generator("cuda").manual_seed(0)
    randn = lambda *shape: torch.randn(shape, generator=draw, device="cuda").to(dtype)  # noqa: E731
    qkv = randn(2, tokens, 3, 12, channels)
    q, k, _ = (x.transpose(1, 2) if heads_first else x for x in qkv.unbind(2))
    angles = torch.outer(torch.arange(tokens), 0.9 ** torch.arange(channels // 2)).cuda()
    turns = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).unflatten(-1, (2, 2))
    turns = turns[None, None] if heads_first else turns[None, :, None]
    scales = [1 + 0.1 * randn(channels) for _ in range(2)]
    if name.endswith("1"):
        return [q, turns] + (scales[:1] if "rms" in name else [])
    return [q, k, turns] + (scales if "rms" in name else [])


def listed(out):
    return list(out) if isinstance(out, (tuple, list)) else [out]


def rounded_as(out, eager):
    """But for a few elements, which are off by one step."""
    assert out.dtype == eager.dtype and out.shape == eager.shape
    different = (out != eager).double().mean().item()
    off = (out.double() - eager.double()).abs() - STEP[eager.dtype] * eager.double().abs()
    print(f"{different:.1e} rounded the other way")
    assert different <= DIFFERENT[eager.dtype] and (off <= STEP[eager.dtype]).all()


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("dtype", DIFFERENT, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_what_an_operation_means(name, dtype, heads_first):
    from anyshape.accel.tape.rules.kitchen import TABLE

    args = arguments(name, dtype, heads_first)
    with torch.inference_mode():
        eager = listed(getattr(torch.ops.comfy_kitchen, name)(*args))
        for out, wanted in zip(listed(TABLE[name](*args)), eager, strict=True):
            rounded_as(out, wanted)


class Joined(nn.Module):
    """The operation behind a join, as in Flux, and attention's transposition behind it."""

    def __init__(self, name, scales):
        super().__init__()
        self.name, self.scales = name, nn.ParameterList(nn.Parameter(scale, False) for scale in scales)

    def forward(self, x, angles):
        q, k, _ = x.permute(2, 0, 3, 1, 4)
        q, k = torch.cat([q, q * 2], 2), torch.cat([k, k + 1], 2)
        turns = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).unflatten(-1, (2, 2))
        operation = getattr(torch.ops.comfy_kitchen, self.name)
        given = (q, turns[None, None]) if self.name.endswith("1") else (q, k, turns[None, None])
        return [each.transpose(1, 2).flatten(2) * 0.5 for each in listed(operation(*given, *self.scales))]


@pytest.mark.parametrize("dtype", DIFFERENT, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_program_made_of_it(name, dtype):
    """Also where the library's results lie with tokens first, as it makes them on a GPU."""
    from anyshape.accel.tape.program import Program
    from anyshape.accel.tape.record import Recorder, record
    from anyshape.accel.tape.rules import kitchen

    args = arguments(name, dtype, True)
    model = Joined(name, [x for x in args if x.ndim == 1])
    x = torch.randn(2, 517, 3, 12, 128, device="cuda").to(dtype)
    angles = torch.outer(torch.arange(1034), 0.9 ** torch.arange(64)).cuda()
    recorder = Recorder([x, angles], model, x.device)
    out, tape = record(lambda: model(x, angles), recorder)
    assert tape is not None, recorder.refusal
    with torch.inference_mode():
        kitchen.decompose(tape)
        left = [op for op in tape.operations if not op.opaque and "comfy_kitchen" in op.func._schema.name]
        program = Program(tape, fuse=True)
        program.bind(model)
        for mine, eager in zip(program.run([x, angles]), out, strict=True):
            rounded_as(mine, eager)
    assert left == [] and program.report.kernels > 0
