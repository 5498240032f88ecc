"""Layers' inputs rounded to int8 or fp8 by the kernel that makes them. CPU, in Triton's interpreter.

comfy-kitchen's CUDA kernels are not here: their steps are written in plain torch. ``test_gpu_kitchen`` asks the
library.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools import embed

embed.bare_pack()

from anyshape.accel.tape import kernels, quantisers, rules  # noqa: E402
from anyshape.accel.tape.program import Program  # noqa: E402
from anyshape.accel.tape.record import Recorder, record  # noqa: E402
from anyshape.accel.tape.rules import int8  # noqa: E402

CHANNELS, WIDE = 96, 160
SCALE = 0.25  # of fp8
SIZES = ((1, 5), (2, 7), (1, 16), (3, 1))  # rows and tokens
kitchen = pytest.importorskip("comfy_kitchen")


def by_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As the CUDA kernel rounds: x [..., K] to int8, and the scale of each row [..., 1]."""
    most = x.float().abs().amax(-1, keepdim=True).clamp(max=torch.finfo(x.dtype).max)
    scales = (most * torch.tensor(1 / 127)).clamp(min=1e-30)
    ratio = (x.float() / scales.to(x.dtype).float()).to(x.dtype)
    return ratio.float().round().clamp(-128, 127).to(torch.int8), scales


class Block(nn.Module):
    """A residual, its modulated norm and a SwiGLU; what layers would read of the last two is rounded by ``how``.

    keeps: the numbers that are rounded are results, too.
    """

    def __init__(self, how: str, dtype: torch.dtype, keeps: bool, channels: int = CHANNELS, wide: int = WIDE) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.keeps = how, keeps
        self.weight = nn.Parameter(torch.randn(channels, dtype=dtype))
        self.before = nn.Linear(channels, channels, dtype=dtype)
        self.up = nn.Linear(channels, 2 * wide, dtype=dtype)
        self.modulation = nn.Linear(channels, channels, dtype=dtype)
        self.requires_grad_(False)

    def numbers(self, x: Tensor, vec: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(the residual [B, T, channels], what is rounded [B, T, channels] and [B, T, wide])."""
        gate = self.modulation(vec).unsqueeze(1)
        left, right = self.up(x).chunk(2, dim=-1)
        x = x + gate * self.before(x)
        return x, F.rms_norm(x, self.weight.shape, self.weight, 1e-6) * (1 + gate), F.silu(left) * right

    def rounded(self, x: Tensor) -> tuple[Tensor, ...]:
        """What a layer is given of ``x``, to fp8 as ComfyUI has it done: in rows, and with a scale."""
        if self.how == "int8":
            return torch.ops.comfy_kitchen.quantize_int8_rowwise(x)
        scale = torch.full((), SCALE, device=x.device)
        return (torch.ops.comfy_kitchen.quantize_fp8(x.reshape(-1, x.shape[-1]), scale, 5),)

    def forward(self, x: Tensor, vec: Tensor) -> tuple[Tensor, ...]:
        x, *numbers = self.numbers(x, vec)
        kept = numbers if self.keeps else []
        return x, *kept, *self.rounded(numbers[0]), *self.rounded(numbers[1])


def inputs(rows: int, tokens: int, dtype: torch.dtype, channels: int = CHANNELS) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(rows * 100 + tokens)
    shapes = (rows, tokens, channels), (rows, channels)
    return tuple(torch.randn(shape, generator=draw).to(dtype) for shape in shapes)


def programmed(model: nn.Module, given: tuple[Tensor, ...]) -> Program:
    recorder = Recorder(list(given), model, given[0].device)
    _, tape = record(lambda: model(*given), recorder)
    assert tape is not None, recorder.refusal
    rules.apply(tape)
    program = Program(tape, fuse=True)
    program.bind(model)
    return program


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch):
    """As if the library had its CUDA kernels here."""
    monkeypatch.setattr(quantisers, "_has_backend", lambda name, device: True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_int8_rows_and_their_scales_come_from_the_kernel_before(dtype: torch.dtype):
    """To the bit, of the numbers that the same kernel stores; no other kernel is started, none for another size."""
    model, compiled = Block("int8", dtype, keeps=True), None
    with torch.inference_mode():
        for size in SIZES:
            given = inputs(*size, dtype)
            program = programmed(model, given)
            assert (program.report.calls, program.report.kernels) == (3, 2)  # the linear layers
            x, *found = program.run(list(given))
            wanted = model.numbers(*given)
            assert all(
                torch.allclose(a.float(), b.float(), rtol=2e-2) for a, b in zip((x, *found), wanted, strict=False)
            )
            for number, q, scales in (found[:1] + found[2:4], found[1:2] + found[4:6]):
                exact, one = by_rows(number)
                assert torch.equal(q, exact) and torch.equal(scales, one) and scales.shape == (*number.shape[:-1], 1)
            assert compiled in (None, len(kernels._COMPILED)), "another size compiled"
            compiled = len(kernels._COMPILED)


def test_numbers_that_only_a_layer_reads_are_not_stored():
    model = Block("int8", torch.bfloat16, keeps=False)
    with torch.inference_mode():
        given = inputs(2, 7, torch.bfloat16)
        program = programmed(model, given)
        assert (program.report.calls, program.report.kernels) == (3, 2)
        found, wanted = program.run(list(given)), programmed(Block("int8", torch.bfloat16, keeps=True), given)
        wanted = wanted.run(list(given))
        assert all(map(torch.equal, found, wanted[:1] + wanted[3:]))


@pytest.mark.parametrize("keeps", [False, True])
def test_fp8_comes_from_the_kernel_before(keeps: bool):
    """Beside the residual, in one kernel, although ComfyUI makes rows of it before."""
    model, compiled = Block("fp8", torch.bfloat16, keeps), None
    with torch.inference_mode():
        for size in SIZES:
            given = inputs(*size, torch.bfloat16)
            program = programmed(model, given)
            assert (program.report.calls, program.report.kernels) == (3, 2)
            *_, normed, gated = program.run(list(given))
            for q, number in zip((normed, gated), model.numbers(*given)[1:], strict=True):
                ratio = (number.float() / SCALE).clamp(-448, 448).view(-1, number.shape[-1])
                exact = ratio.to(torch.float8_e4m3fn)
                assert q.shape == exact.shape and q.dtype == exact.dtype
                # Triton's interpreter rounds halves up, and neither up to a power of two nor what is nearly nothing
                sure = (torch.frexp(exact.float())[1] == torch.frexp(ratio)[1]) & (ratio.abs() > 2**-6)
                steps = (q.view(torch.uint8).int() - exact.view(torch.uint8).int())[sure].abs()
                assert sure.float().mean() > 0.8 and steps.max() <= 1 and steps.float().mean() < 0.1
            assert compiled in (None, len(kernels._COMPILED)), "another size compiled"
            compiled = len(kernels._COMPILED)


def test_a_lone_rounding_stays_the_librarys(monkeypatch: pytest.MonkeyPatch):
    """Attention's result, say, which no kernel of ours makes; and everything where the library has other kernels."""
    layer = nn.Linear(CHANNELS, CHANNELS).requires_grad_(False)
    given = inputs(1, 5, torch.float32)

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, vec: Tensor) -> tuple[Tensor, Tensor]:
            return torch.ops.comfy_kitchen.quantize_int8_rowwise(self.layer(x))

    with torch.inference_mode():
        program = programmed(Alone(), given)
        assert (program.report.calls, program.report.kernels) == (2, 0)
        assert not program.calls  # it may keep memory for a stream, so a first run of it drops graphs
        monkeypatch.undo()
        report = programmed(Block("int8", torch.float32, keeps=False), given).report
        assert report.calls == 5


@torch.library.custom_op("comfy_kitchen_next::int8_linear", mutates_args=())
def _newer(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, output_dtype_code: int,
    convrot: bool = False, input_act_eps: float = 0.0, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As the library's, with two arguments that it has since 0.2.40."""
    out = torch.ops.comfy_kitchen.int8_linear(x, weight, weight_scale, bias, output_dtype_code, convrot)
    return out if residual is None else out + residual


def test_what_a_newer_library_adds_leaves_a_layer_to_it(monkeypatch: pytest.MonkeyPatch):
    """A residual, say. Where it says nothing the layer is one as before."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.ones(32, 16, dtype=torch.int8))
            self.register_buffer("scale", torch.tensor(1e-3))

        def forward(self, x: Tensor, residual: Tensor) -> list[Tensor]:
            layer = functools.partial(_newer, x, self.weight, self.scale, None, 0, False)
            return [layer(0.0, None), layer(0.0, residual), layer(1e-6)]

    monkeypatch.setattr(int8, "_product", lambda device: lambda *args: None)
    model, given = Layers(), [torch.randn(1, 7, 16), torch.randn(1, 7, 32)]
    with torch.inference_mode():
        _, tape = record(lambda: model(*given), Recorder(given, model, given[0].device))
    layers = [operation for operation in tape.operations if "int8_linear" in str(operation.func)]
    int8.round_once(tape)
    assert [isinstance(layer.func, int8.Product) for layer in layers] == [True, False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("how", ["int8", "fp8"])
def test_the_kernel_before_rounds_as_the_library(how: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """To the bit, of the same numbers: rows as long as Z-Image's, odd counts of them."""
    monkeypatch.undo()
    with torch.inference_mode():
        model = Block(how, dtype, keeps=True, channels=3840, wide=10240).cuda()
        for size in ((1, 1033), (3, 77), (1, 1)):
            given = tuple(x.cuda() for x in inputs(*size, dtype, 3840))
            program = programmed(model, given)
            assert (program.report.calls, program.report.kernels) == (3, 2)
            _, *found = program.run(list(given))
            numbers, rounded = found[:2], found[2:]
            wanted = [*model.rounded(numbers[0]), *model.rounded(numbers[1])]
            for mine, own in zip(rounded, wanted, strict=True):
                assert mine.dtype == own.dtype and torch.equal(mine.view(torch.uint8), own.view(torch.uint8))
