"""Quantised weights on a tape: comfy-kitchen's operations are steps of it, and what is around them fuses as always.

On a CPU comfy-kitchen computes in plain torch. What a card's own kernels do is tested there.
"""

import functools
from typing import Any

import pytest
import torch

from tools import architectures, embed

embed.bare_pack()
pytest.importorskip("comfy_kitchen")

pytest_plugins = ("tools.quantised_fixtures",)
pytestmark = pytest.mark.usefixtures("pack", "one_thread", "quantised")
FORMS = (
    "int8_tensorwise", "int8_convrot", "float8_e4m3fn", "float8_e5m2", "mxfp8", "nvfp4", "convrot_w4a4",
    "asym_w4a8_int8",
)  # fmt: skip
APART = ("convrot_w4a4", "asym_w4a8_int8")  # whose products are no operations of torch's
CASES = [("Flux", form) for form in FORMS] + [("QwenImage", "int8_tensorwise"), ("QwenImage", "convrot_w4a4")]
VARIANTS = (2, 0, 5)
# Several pictures are cut apart before a product that wants its rows without gaps, one picture is not.
LATER = {("QwenImage", "int8_tensorwise"): 1}
CLOSE = 5e-3  # one step of bfloat16 in one place changes what is rounded to 8 bits behind it


def recordings(model: torch.nn.Module, name: str) -> Any:
    """A recording of each variant, in bfloat16."""
    from anyshape.accel.tape.reuse import Outlines

    from tools.architectures import taped

    outlines = Outlines()
    for k in VARIANTS:
        given = architectures.in_bfloat16(*architectures.TABLE[name].inputs(k))
        yield taped.Recording(model, *given, outlines=outlines)


@functools.cache
def plain_kernels(name: str) -> list[int]:
    """How many kernels each variant has with weights that are not quantised."""
    from tools.architectures import patchers

    plain = patchers.make(name, torch.bfloat16).model.diffusion_model
    return [each.program(fuse=True).report.kernels for each in recordings(plain, name)]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_quantised_model(name: str, form: str, quantised: Any):
    """Unfused it is ComfyUI's own to the bit; fused it has the kernels of the plain model, for every size."""
    from anyshape.accel.tape.wrapped import Step

    from tools.architectures import taped

    if not quantised.has(form):
        pytest.skip("this ComfyUI has no such weights")
    known: set = set()
    new, kernels = [], []
    for place, each in enumerate(recordings(quantised.make(name, form), name)):
        assert each.tape is not None, each.refusal
        called = {str(operation.func) for operation in each.tape.operations}
        assert any("comfy_kitchen" in func for func in called)
        assert any(isinstance(operation.func, Step) for operation in each.tape.operations) == (form in APART)
        assert each.error(each.program(fuse=False), each.eager()) == 0.0
        program = each.program(fuse=True)
        new.append(len(taped.kernels_of(program) - known))
        known |= taped.kernels_of(program)
        kernels.append(program.report.kernels)
        if place == 0:
            assert each.error(program) <= CLOSE
    assert sum(new[1:]) <= LATER.get((name, form), 0), new
    assert all(mine >= theirs for mine, theirs in zip(kernels, plain_kernels(name), strict=True)), kernels


def test_another_quantised_weight_needs_no_new_recording(quantised: Any):
    model = quantised.make("Flux", "int8_tensorwise")
    each = next(recordings(model, "Flux"))
    program = each.program(fuse=False)
    layer = model.get_submodule("double_blocks.0.img_attn.proj")
    before = each.eager()
    other = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(1)).bfloat16() * 0.2
    layer.set_weight(other)
    wanted = each.eager()
    program.bind(model)
    assert each.error(program, wanted) == 0.0 and each.error(program, before) > 1e-3


def test_a_scale_that_moves_is_seen(quantised: Any):
    """A graph reads it by its address, which may change while that of the weight does not."""
    from anyshape.accel.weights import WeightWatch

    model = quantised.make("Flux", "int8_tensorwise")
    weight = model.get_submodule("double_blocks.0.img_attn.proj").weight
    watch, scale = WeightWatch(model), weight._params.scale
    before = watch.fingerprint()
    assert WeightWatch(model).fingerprint() == before
    object.__setattr__(weight._params, "scale", scale.clone())
    assert watch.fingerprint() != before and WeightWatch(model).fingerprint() != before


def test_an_input_is_rounded_once_for_all_layers_that_read_it(quantised: Any, monkeypatch: Any):
    """The GPU's rule with plain torch in place of the library's kernels: a block's 8 layers have 5 inputs in Krea 2."""
    from anyshape.accel.tape.rules import edits, int8

    def multiply(x_int8, weight_int8, x_scale, weight_scale, bias, out_dtype):
        assert weight_scale.shape == weight_int8.shape[:1] and x_scale.shape[:-1].numel() == len(x_int8)
        out = x_int8.double() @ weight_int8.double().T * x_scale.double().reshape(-1, 1) * weight_scale
        return (out if bias is None else out + bias).to(out_dtype)

    if "Krea2" not in {each.name for each in architectures.present()}:
        pytest.skip("this ComfyUI has no Krea 2")
    from tools.architectures import taped

    given = architectures.in_bfloat16(*architectures.TABLE["Krea2"].inputs(2))
    each = taped.Recording(quantised.make("Krea2", "int8_tensorwise"), *given)
    layers = [op for op in each.tape.operations if "int8_linear" in str(op.func)]
    assert int8.round_once(each.tape) == "" and layers[0].func is not None and not layers[0].opaque  # not on a CPU
    monkeypatch.setattr(int8, "_product", lambda device: multiply)
    int8.round_once(each.tape)
    edits.settle(each.tape)
    roundings = [op for op in each.tape.operations if "quantize_int8_rowwise" in str(op.func)]
    assert all(isinstance(layer.func, int8.Product) for layer in layers)
    assert len(roundings) == len({layer.args[0] for layer in layers}) < len(layers)
    assert each.error(each.program(fuse=False)) <= 0.1  # of a sum in another order, which 8 bits make visible


class OneScale(torch.nn.Module):
    """Two int8 layers of one input and one scale for both, perhaps computed; their weights have 64 and 32 rows."""

    def __init__(self, computed=False):
        super().__init__()
        self.computed = computed
        draw = torch.Generator().manual_seed(0)
        for name, rows in (("wide", 64), ("narrow", 32)):
            weight = torch.randint(-127, 128, (rows, 16), generator=draw, dtype=torch.int8)
            self.register_buffer(name, weight)
        self.register_buffer("scale", torch.tensor(1e-3))

    def forward(self, x):
        scale = x.abs().mean() * 1e-3 if self.computed else self.scale
        return [torch.ops.comfy_kitchen.int8_linear(x, weight, scale, None, 0) for weight in (self.wide, self.narrow)]


@pytest.mark.parametrize("computed", [False, True])
def test_a_scale_of_several_weights(computed: bool, monkeypatch: Any):
    """It is spread over the rows of each as it is then; one that is computed leaves the layer to the library."""
    from anyshape.accel.tape.program import Program
    from anyshape.accel.tape.record import Recorder, record
    from anyshape.accel.tape.rules import edits, int8

    def multiply(x_int8, weight_int8, x_scale, weight_scale, bias, out_dtype):
        assert weight_scale.shape == weight_int8.shape[:1]
        return (x_int8.double() @ weight_int8.double().T * x_scale.double().reshape(-1, 1) * weight_scale).to(out_dtype)

    monkeypatch.setattr(int8, "_product", lambda device: multiply)
    model, x = OneScale(computed), torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted, tape = record(lambda: model(x), Recorder([x], model, x.device))
        int8.round_once(tape)
        edits.settle(tape)
        assert sum(isinstance(op.func, int8.Product) for op in tape.operations) == (0 if computed else 2)
        program = Program(tape, fuse=False)
        program.bind(model)
        for _ in range(2):
            for mine, own in zip(program.run([x]), wanted, strict=True):
                assert torch.allclose(mine, own, atol=1e-5)
            model.scale *= 3  # another number in the same memory: with DynamicVRAM that is a load with other LoRAs
            wanted = model(x)


def test_turned_weights_and_single_rows_stay_with_the_library(quantised: Any, monkeypatch: Any):
    from anyshape.accel.tape.rules import int8

    monkeypatch.setattr(int8, "_product", lambda device: pytest.fail)
    each = next(recordings(quantised.make("Flux", "int8_convrot"), "Flux"))
    before = [op.func for op in each.tape.operations]
    int8.round_once(each.tape)
    assert [op.func for op in each.tape.operations] == before
    each = next(recordings(quantised.make("Flux", "int8_tensorwise"), "Flux"))
    int8.round_once(each.tape)
    left = [op for op in each.tape.operations if "int8_linear" in str(op.func)]
    assert all(op.args[0].numel == op.args[0].shape[-1] for op in left)


class Rounded(torch.nn.Module):
    """Three fp8 layers' roundings of one input, as ComfyUI has them do it: each makes rows of it, and a scale of 1."""

    def __init__(self, scales=(1.0, 1.0, 1.0), writes=False):
        super().__init__()
        self.scales, self.writes = scales, writes

    def forward(self, x):
        out, x = [], x + 1
        for number in self.scales:
            scale = torch.full((), number, device=x.device)
            rounded = torch.ops.comfy_kitchen.quantize_fp8(x.reshape(-1, x.shape[-1]), scale, 5)
            out.append(torch.ops.comfy_kitchen.dequantize_fp8(rounded, scale, 0) * (len(out) + 1))
            if self.writes:
                x.mul_(2)
        return out


@pytest.mark.parametrize(
    ("model", "roundings"),
    [(Rounded(), 1), (Rounded((1.0, 2.0, 1.0)), 2), (Rounded(writes=True), 3)],
    ids=["alike", "another scale", "written"],
)
def test_layers_of_one_input_share_its_rounding_to_fp8(model: torch.nn.Module, roundings: int):
    """To the bit; not with another scale, nor where the input is written into meanwhile."""
    from anyshape.accel.tape.program import Program
    from anyshape.accel.tape.record import Recorder, record
    from anyshape.accel.tape.rules import edits, once

    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        given = x.clone()
        recorder = Recorder([given], model, x.device)
        wanted, tape = record(lambda: model(given), recorder)
        assert tape is not None, recorder.refusal
        once.compute_once(tape)
        edits.settle(tape)
        assert (
            sum("dequantize" not in str(op.func) and "quantize" in str(op.func) for op in tape.operations) == roundings
        )
        program = Program(tape, fuse=False)
        program.bind(model)
        for mine, own in zip(program.run([x.clone()]), wanted, strict=True):
            assert torch.equal(mine, own)


TURNED = torch.eye(16).flip(0)  # a table that a library made for itself, and keeps


class Hidden(torch.Tensor):
    """A quantised weight of a library that computes its product past torch's dispatcher, by a table, or by torch."""

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor, way: str):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32, device=numbers.device)

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor, way: str):
        self.numbers, self.scale, self.way = numbers, scale, way

    def __tensor_flatten__(self):
        return ["numbers", "scale"], self.way

    @staticmethod
    def __tensor_unflatten__(parts, way, size, stride):
        return Hidden(parts["numbers"], parts["scale"], way)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        assert func is torch.ops.aten.linear.default
        x, weight, bias = args
        if weight.way == "drawn":
            x = x + torch.rand_like(x)
        if weight.way == "table":
            numbers = torch.empty(weight.numbers.shape)
            for start in (0, 1):  # into new memory, as packed numbers are taken apart
                numbers[:, start::2] = weight.numbers[:, start::2] * weight.scale
            return torch.nn.functional.linear(x @ TURNED, numbers, bias)
        if weight.way == "torch":
            return torch.nn.functional.linear(x, weight.numbers * weight.scale, bias)
        rows = x.contiguous()
        out = torch.empty(*x.shape[:-1], len(weight.numbers))
        with torch.utils._python_dispatch._disable_current_modes():
            out.copy_(torch.nn.functional.linear(rows, weight.numbers * weight.scale, bias))
        return out[..., :]


class OfHidden(torch.nn.Module):
    def __init__(self, *ways: str):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        for index, way in enumerate(ways):
            numbers = torch.randint(-127, 128, (16, 16), generator=draw).float()
            weight = Hidden(numbers, torch.tensor(1e-2), way)
            self.add_module(f"layer{index}", torch.nn.Linear(16, 16))
            self.get_submodule(f"layer{index}").weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        for layer in self.children():
            x = torch.nn.functional.gelu(layer(x)) + x
        return x


def of_hidden(model, x):
    from anyshape.accel.tape.record import Recorder, record

    recorder = Recorder([x], model, x.device)
    out, tape = record(lambda: model(x), recorder)
    return out, tape, recorder.refusal


@pytest.mark.parametrize("way", ["past", "table"])
def test_a_product_past_torchs_dispatcher_is_one_step(way):
    """What its class did inside is not on the tape; layers that are computed by torch are, as always."""
    from anyshape.accel.tape import cost, static_sizes
    from anyshape.accel.tape.program import Program
    from anyshape.accel.tape.wrapped import Step

    model, x = OfHidden(way, "torch", way), torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted, tape, refusal = of_hidden(model, x)
        assert tape is not None, refusal
        steps = [operation for operation in tape.operations if isinstance(operation.func, Step)]
        assert [type(operation.func).__name__ for operation in steps] == ["Step", "Step"]
        assert len({id(operation.func) for operation in steps}) == 1  # so that a plan finds them alike
        assert not any("contiguous" in str(operation.func) for operation in tape.operations)
        assert cost.multiplications(steps[0]) == 2 * 5 * 16 * 16
        program = Program(tape, fuse=False)
        program.bind(model)
        assert torch.equal(program.run([x]), wanted) and torch.equal(program.run([x]), model(x))
        static_sizes.annotate(tape)
        assert steps[0].outputs[0].sizes[-1].static and not steps[0].outputs[0].sizes[1].static
        model.layer0.weight.numbers.mul_(2)
        assert torch.equal(program.run([x]), model(x)) and not torch.equal(program.run([x]), wanted)


def test_a_product_that_draws_is_no_step():
    x = torch.randn(2, 5, 16)
    with torch.inference_mode():
        assert "random" in of_hidden(OfHidden("drawn"), x)[2]
