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
MODULATED = ("adaln", "rms_adaln")
STEP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def arguments(name, dtype, heads_first, tokens=1033, channels=128, table=torch.float32):
    """table: the dtype of the turns."""
    draw = torch.Generator("cuda").manual_seed(0)
    randn = lambda *shape: torch.randn(shape, generator=draw, device="cuda").to(dtype)  # noqa: E731
    qkv = randn(2, tokens, 3, 12, channels)
    q, k, _ = (x.transpose(1, 2) if heads_first else x for x in qkv.unbind(2))
    angles = torch.outer(torch.arange(tokens), 0.9 ** torch.arange(channels // 2)).cuda()
    turns = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).unflatten(-1, (2, 2))
    turns = (turns[None, None] if heads_first else turns[None, :, None]).to(table)
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
@pytest.mark.parametrize("short", [False, True], ids=["table in float32", "table in 16 bits"])
def test_what_an_operation_means(name, dtype, heads_first, short):
    from anyshape.accel.tape.rules.kitchen import TABLE

    args = arguments(name, dtype, heads_first, table=dtype if short else torch.float32)
    with torch.inference_mode():
        eager = listed(getattr(torch.ops.comfy_kitchen, name)(*args))
        for out, wanted in zip(listed(TABLE[name](*args)), eager, strict=True):
            rounded_as(out, wanted)


@pytest.mark.parametrize("channels", [4096, 320])
@pytest.mark.parametrize("dtype", DIFFERENT, ids=str)
@pytest.mark.parametrize("name", MODULATED)
def test_what_a_modulated_norm_means(name, dtype, channels):
    from anyshape.accel.tape.rules.kitchen import TABLE

    draw = torch.Generator("cuda").manual_seed(0)
    x, scale, shift = (torch.randn(2, n, channels, generator=draw, device="cuda").to(dtype) for n in (1033, 1, 1))
    with torch.inference_mode():
        args = x, 0.3 * scale, shift, 1e-6
        rounded_as(TABLE[name](*args), getattr(torch.ops.comfy_kitchen, name)(*args))


class Joined(nn.Module):
    """The operation behind a join, as in Flux, and attention's transposition behind it."""

    def __init__(self, name, scales, table):
        super().__init__()
        self.table = table
        self.name, self.scales = name, nn.ParameterList(nn.Parameter(scale, False) for scale in scales)

    def forward(self, x, angles):
        q, k, _ = x.permute(2, 0, 3, 1, 4)
        q, k = torch.cat([q, q * 2], 2), torch.cat([k, k + 1], 2)
        turns = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).unflatten(-1, (2, 2))
        turns = turns.to(self.table)
        operation = getattr(torch.ops.comfy_kitchen, self.name)
        given = (q, turns[None, None]) if self.name.endswith("1") else (q, k, turns[None, None])
        return [each.transpose(1, 2).flatten(2) * 0.5 for each in listed(operation(*given, *self.scales))]


@pytest.mark.parametrize("dtype", DIFFERENT, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("short", [False, True], ids=["table in float32", "table in 16 bits"])
def test_a_program_made_of_it(name, dtype, short):
    """Also where the library's results lie with tokens first, as it makes them on a GPU."""
    from anyshape.accel.tape.program import Program
    from anyshape.accel.tape.record import Recorder, record
    from anyshape.accel.tape.rules import kitchen

    args = arguments(name, dtype, True)
    model = Joined(name, [x for x in args if x.ndim == 1], dtype if short else torch.float32)
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


class Layers(nn.Module):
    """Three int8 layers of one input and one of another, as ComfyUI calls them; the second weight has a scale a row.

    turned: the weights are (convrot), and so must be what they multiply.
    """

    def __init__(self, dtype, turned=False):
        super().__init__()
        self.turned = turned
        draw = torch.Generator("cuda").manual_seed(0)
        for n, rows in enumerate((384, 256, 1024, 256)):
            weight = torch.randint(-127, 128, (rows, 256), generator=draw, device="cuda", dtype=torch.int8)
            self.register_buffer(f"w{n}", weight)
            spread = torch.rand(rows if n == 1 else 1, generator=draw, device="cuda") * 1e-3 + 1e-4
            self.register_buffer(f"s{n}", spread if n == 1 else spread.reshape(()))
        self.register_buffer("bias", torch.randn(1024, generator=draw, device="cuda").to(dtype))
        self.code = {torch.float16: 1, torch.bfloat16: 2}[dtype]

    def layer(self, n, x, bias=None):
        weight, scale = getattr(self, f"w{n}"), getattr(self, f"s{n}")
        return torch.ops.comfy_kitchen.int8_linear(x, weight, scale, bias, self.code, self.turned, 256)

    def forward(self, x):
        q, k, v = self.layer(0, x), self.layer(1, x), self.layer(2, x, self.bias)
        return [q.sigmoid() * 2, k + 1, v * 0.5, self.layer(3, k.contiguous()) - 1]


@pytest.mark.parametrize("dtype", DIFFERENT, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_int8_layers_share_the_rounding_of_their_input(dtype, turned):
    """To the bit what the library's own layers give, for one picture and for several, with odd rows."""
    from anyshape.accel.tape import rules
    from anyshape.accel.tape.program import Program
    from anyshape.accel.tape.record import Recorder, record
    from anyshape.accel.tape.rules.int8 import Product, Turned

    model = Layers(dtype, turned)
    for shape in ((1, 1033, 256), (3, 77, 256)):
        x = torch.randn(shape, device="cuda").to(dtype)
        recorder = Recorder([x], model, x.device)
        out, tape = record(lambda x=x: model(x), recorder)
        assert tape is not None, recorder.refusal
        assert rules.apply(tape) == []
        products = [op for op in tape.operations if isinstance(op.func, Product)]
        found = [op.func for op in tape.operations]
        roundings = [f for f in found if isinstance(f, Turned) or (not turned and "quantize_int8_rowwise" in str(f))]
        assert len(products) == 4 and len(roundings) == 2
        with torch.inference_mode():
            for fuse in (False, True):
                program = Program(tape, fuse)
                program.bind(model)
                for mine, eager in zip(program.run([x]), out, strict=True):
                    assert torch.equal(mine, eager) or (fuse and (mine != eager).double().mean() <= DIFFERENT[dtype])
