"""Rules for networks of pictures (UNets and their kin), on a small one of plain torch. CPU, in Triton's interpreter.

Each rule runs alone and with all others, at sizes that the first recording did not have, odd ones included. Most tests
are about how pictures lie in memory; what a rule takes in of a layer is in ``test_tape_pictures_layers``.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools import embed

embed.bare_pack()

from anyshape.accel.kernels import operations  # noqa: E402 - the package exists from the line above on
from anyshape.accel.tape import diagnose, hand_kernels, kernels, rules  # noqa: E402
from anyshape.accel.tape.binding import NotBound  # noqa: E402
from anyshape.accel.tape.program import Program  # noqa: E402
from anyshape.accel.tape.record import Recorder, record  # noqa: E402
from anyshape.accel.tape.reuse import Outlines  # noqa: E402
from anyshape.accel.tape.rules import (  # noqa: E402
    attention_kernel,
    channels_last,
    conv_bias,
    geglu,
    linear_groups,
    norm_neighbours,
    upsample,
)

from tools.pictures import (  # noqa: E402
    BOUND,
    CPU,
    SIZES,
    WIDTH,
    Pictures,
    Stack,
    calls,
    error,
    inputs,
    programmed,
    taped,
)

LAST = torch.channels_last
EACH = {
    "channels last": [channels_last.lay_out],
    "upsampling": [channels_last.lay_out, upsample.double],
    "bias": [channels_last.lay_out, conv_bias.add_after],
    "norm": [channels_last.lay_out, conv_bias.add_after, norm_neighbours.take_in],
    "geglu": [geglu.join_product],
    "prompt": [attention_kernel.attend],
    "layers": [linear_groups.join],
    "all": [],
}


@pytest.fixture(scope="module", params=[torch.float32, torch.float16], ids=str)
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(scope="module")
def model(dtype) -> Pictures:
    return Pictures(dtype)


# A rule by itself in one dtype: those for products and attention leave float32 alone. How pictures lie is the ground of
# three of the others.
HALVES = ("geglu", "prompt", "layers")
CASES = [(torch.float16 if name in HALVES else torch.float32, name) for name in EACH if name != "channels last"]
CASES.append((torch.float16, "all"))


@pytest.mark.parametrize(("dtype", "name"), CASES, indirect=["dtype"], ids=str)
def test_rule_is_right_at_every_size_with_the_kernels_of_the_first(name, model, dtype):
    known: set[str] = set()
    run = SIZES[3:] if name == "all" and dtype == torch.float16 else SIZES[1:2]
    # with channels first, a picture of one pixel hides how it lies
    for size in SIZES if name in ("bias", "norm", "upsampling", "all") else SIZES[:-1]:
        given = inputs(size, dtype)
        _, program = programmed(model, given, *EACH[name])
        sources = {launch.source.text for launch in program.launches}
        assert not known or sources <= known, size
        known |= sources
        if size in run:
            assert error(model, program, inputs(size, dtype, seed=1)) < BOUND[dtype], size


def test_all_rules_say_what_they_round(model, dtype):
    tape = taped(model, inputs(SIZES[0], dtype))
    halves = {geglu.LESS_EXACT, attention_kernel.LESS_EXACT, linear_groups.LESS_EXACT}
    every = {channels_last.LESS_EXACT, norm_neighbours.LESS_EXACT} | (halves if dtype == torch.float16 else set())
    assert set(rules.apply(tape)) == every


# Channels last ----------------------------------------------------------------------------------------------------


def test_every_picture_lies_channels_last_and_nothing_is_turned(model, dtype):
    given = inputs(SIZES[0], dtype)
    tape, program = programmed(model, given, *EACH["channels last"])
    pictures = [
        value for operation in tape.operations for value in operation.outputs
        if value is not None and len(value.shape) == 4 and value.shape[1] % WIDTH == 0 and value.shape[2:] != (1, 1)
    ]  # fmt: skip
    assert len(pictures) > 30
    assert all(value.stride == channels_last.last(value.shape) for value in pictures)
    copies = [op for op in tape.operations if "clone" in str(op.func) or "contiguous" in str(op.func)]
    own = [op for op in copies if op.outputs[0].base is None]
    assert [op.outputs[0] for op in own] == tape.outputs  # only what is given back is as it was recorded
    assert not calls(tape, torch.ops.aten.conv2d.default) and not calls(tape, torch.ops.aten.group_norm.default)


def test_weights_may_lie_either_way(model, dtype):
    _, program = programmed(model, inputs(SIZES[0], dtype))
    named = {weight.module for weight in program.permuted}
    assert named == {name for name, part in model.named_modules() if isinstance(part, nn.Conv2d)}
    stack, given = Stack(torch.sin), (torch.randn(1, 8, 6, 5),)
    _, program = programmed(stack, given)
    before = program.run(list(given))
    stack.layers[1].weight.data = stack.layers[1].weight.data.contiguous(memory_format=LAST)
    program.bind(stack)
    assert torch.allclose(program.run(list(given)), before, atol=1e-6)
    stack.layers[1].weight.data = torch.randn(8, 8, 3, 3)
    program.bind(stack)
    assert not torch.allclose(program.run(list(given)), before, atol=1e-3)
    stack.layers[1].weight.data = torch.randn(8, 8, 3, 4)
    with pytest.raises(NotBound):
        program.bind(stack)


def test_a_size_recorded_while_weights_lie_channels_last_has_the_same_tape():
    """Then a library plans each convolution once, for ComfyUI's forward and for the program."""
    dtype = torch.float16  # which all rules are for
    model, outlines = Pictures(dtype), Outlines()
    sizes = (SIZES[0], (2, 5, 7, 4))
    plain = [taped(model, inputs(size, dtype)) for size in sizes]
    rules.apply(plain[0])
    outlines.plan(plain[0])
    program = Program(plain[0], fuse=True)
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            part.weight.data = part.weight.data.contiguous(memory_format=LAST)
    given = inputs(sizes[1], dtype)
    recorder = Recorder(list(given), model, CPU, program.permuted)
    out, tape = record(lambda: model(*given), recorder)
    assert [(op.func, [v.stride for v in op.outputs]) for op in tape.operations] == [
        (op.func, [v.stride for v in op.outputs]) for op in plain[1].operations
    ]
    assert torch.allclose(out, model(*given), atol=BOUND[dtype])
    rules.apply(tape)
    again = Program(tape, fuse=True, outlines=outlines)
    again.bind(model)
    fresh = inputs(sizes[1], dtype, seed=1)
    with torch.inference_mode():
        result = again.run(list(fresh))
    assert outlines.reused == 1 and result.is_contiguous()
    assert torch.allclose(result, model(*fresh), atol=BOUND[dtype])


def test_a_weight_that_others_read_stays_as_it_was():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(5)).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x * self.layers[1].weight.sum(dim=(2, 3)).mean()

    model, given = Shared(), (torch.randn(1, 8, 5, 5),)
    _, program = programmed(model, given)
    assert {weight.module for weight in program.permuted} == {f"layers.{i}" for i in (0, 2, 3, 4)}
    assert error(model, program, given) < 1e-5


MINDING = {
    "a view of rows": lambda x: x.view(x.shape[0], 2, -1).softmax(-1).view(x.shape),
    "a flat view": lambda x: (x.view(-1) + 1).view(x.shape),
    "a sum": lambda x: x + x.mean(dim=(2, 3), keepdim=True),
    "a softmax": lambda x: torch.softmax(x, dim=1),
    "a sorted picture": lambda x: torch.sort(x, dim=2).values,
    "a slice": lambda x: torch.cat([x[:, :3] * 2, x[:, 3:]], dim=1),
    "a turned picture": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3) + x,
    "halves": lambda x: torch.cat(x.chunk(2, dim=1)[::-1], dim=1).contiguous(),
    "another order": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) * 2,
    "pooling": lambda x: F.interpolate(F.avg_pool2d(x, 2), size=x.shape[2:], mode="nearest"),
    "padding": lambda x: F.pad(x, (1, 0, 1, 0))[:, :, 1:, 1:] + x,
    "mirrored padding": lambda x: F.pad(x, (1, 0, 1, 0), mode="reflect")[:, :, 1:, 1:] + x,
    "another dtype": lambda x: x.to(torch.float64).mul(2).to(x.dtype),
    "a norm of rows": lambda x: F.layer_norm(x.movedim(1, 3), (8,)).movedim(3, 1),
    "in place": lambda x: x.mul_(2).add_(1),
    "a part in place": lambda x: _half_in_place(x),
    "torch's norm": lambda x: F.group_norm(x.unsqueeze(2), 2).squeeze(2),
}


def _half_in_place(x: Tensor) -> Tensor:
    x[:, :4] *= 2
    return x


@pytest.mark.parametrize("name", MINDING)
def test_whoever_minds_gets_what_was_recorded(name):
    model, size = Stack(MINDING[name]), (2, 8, 6, 4)
    tape, program = programmed(model, (torch.randn(size),))
    assert error(model, program, (torch.randn(size),)) < 1e-5
    assert bool(calls(tape, operations.conv2d_last)) == (name != "a part in place")


def test_a_padded_picture_is_not_turned():
    """As in front of a convolution that halves the sides of a VAE's picture."""
    model, given = Stack(lambda x: F.pad(x, (0, 1, 0, 1))), (torch.randn(2, 8, 6, 5),)
    tape, program = programmed(model, given)
    copies = [op for op in tape.operations if "clone" in str(op.func)]
    assert [op.outputs[0] for op in copies] == tape.outputs
    assert error(model, program, (torch.randn(2, 8, 6, 5),)) < 1e-5


@pytest.mark.parametrize("lies", [torch.contiguous_format, LAST], ids=str)
def test_a_last_picture_of_one_pixel_has_the_kernels_of_any_other(lies):
    """It is given back as it was recorded, and its strides are those of either way to lie."""

    class Smaller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, stride, 1) for stride in (1, 2, 1, 1)).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            first, second, third, fourth = self.layers
            x = second(first(x).sin())
            x = x + third(x).sin()
            return (fourth(x) * x).chunk(2, dim=1)[0]

    model, known = Smaller(), []
    for size in ((1, 8, 6, 4), (1, 8, 2, 2), (2, 8, 2, 2)):
        given = (torch.randn(size).contiguous(memory_format=lies),)
        _, program = programmed(model, given)
        known.append({launch.source.text for launch in program.launches})
        out, wanted = program.run(list(given)), model(*given)
        assert torch.allclose(out, wanted, atol=1e-6)
    assert known[0] and known[1] <= known[0] and known[2] <= known[0]


def test_a_few_convolutions_stay_as_they_are():
    model, given = (
        nn.Sequential(*(nn.Conv2d(8, 8, 3) for _ in range(3))).requires_grad_(False),
        (torch.randn(1, 8, 9, 9),),
    )
    tape, program = programmed(model, given)
    assert not calls(tape, operations.conv2d_last) and not program.permuted
    assert error(model, program, given) < 1e-6


# GroupNorm, and biases ----------------------------------------------------------------------------------------------


def test_norms_take_in_embedding_bias_and_silu(model, dtype):
    tape, _ = programmed(model, inputs(SIZES[0], dtype), *EACH["norm"])
    norms = calls(tape, operations.group_norm_last)
    assert len(norms) == 2 * 3 + 4 + 1
    assert sum(norm.args[5] is not None for norm in norms) == 3  # an embedding for each residual block
    assert sum(norm.args[6] for norm in norms) == 2 * 3 + 1  # transformers have no SiLU
    assert [len(norm.args[7]) for norm in norms if norm.args[5] is not None] == [1, 1, 1]
    assert len(calls(tape, torch.ops.aten.silu.default)) == 3  # of the embedding


# Upsampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, ours", [((8, 6), True), ((7, 6), True), ((7, 5), True), ((9, 6), False), ((4, 3), False)]
)
def test_which_upsampling_is_ours(size, ours):
    class Larger(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return F.interpolate(super().forward(x), size=size, mode="nearest") * 2

    model, given = Larger(lambda x: x), (torch.randn(1, 8, 4, 3),)
    tape, program = programmed(model, given)
    assert bool(calls(tape, operations.upsample_last)) == ours
    assert [operation.func for operation in tape.ahead] == ([] if ours else [operations.upsample_last])
    assert error(model, program, given) < 1e-5


# Compiled ahead -----------------------------------------------------------------------------------------------------


def test_kernels_by_hand_are_compiled_on_one_small_call_of_each_form():
    """Another size has no other form, and neither has a size at which an operation is left to torch."""
    model, forms = Pictures(torch.float16), []
    for size in ((2, 8, 6, 5), (1, 12, 10, 7), (1, 8, 6, 300), (1, 8, 6, 2049)):
        tape, _ = programmed(model, inputs(size, torch.float16))
        found = hand_kernels.distinct([*tape.operations, *tape.ahead])
        for operation in found:
            args = hand_kernels.small(operation, torch.device("meta"))
            (small, *_), (own, *_) = ([x] if not isinstance(x, list) else x for x in (args[0], operation.args[0]))
            shape, given = small.shape, own.shape
            channels = 1 if len(shape) == 4 else -1
            assert shape.numel() == shape[channels] == given[channels]
            out = operation.func(*args)
            assert [each.shape[channels] for each in (out if isinstance(out, list) else [out])]
        forms.append(sorted(str(hand_kernels._form(operation)) for operation in found))
    assert forms[0] == forms[1] == forms[2] == forms[3]
    assert 8 < len(forms[0]) < 20


def test_a_plan_that_serves_again_compiles_no_kernel_by_hand():
    """Its operations know none of the model's own sizes, and their kernels are those of the first plan."""
    model, outlines, called = Pictures(torch.float16), Outlines(), []
    for size in (SIZES[0], (2, 12, 10, 7)):
        tape = taped(model, inputs(size, torch.float16))
        rules.apply(tape)
        called.append(len(hand_kernels.distinct(outlines.plan(tape).called)))
    assert outlines.reused == 1 and called[0] > 8 and called[1] == 0


# The check ----------------------------------------------------------------------------------------------------------


def test_a_wrong_kernel_on_a_rewritten_tape_is_found(monkeypatch):
    """Operations by hand stay on the tape that its kernels are compared with, and that runs unfused without them."""
    model, given = Stack(lambda x: torch.sin(x * 2) + 1), (torch.randn(2, 8, 6, 5),)
    tape, program = programmed(model, given)
    assert not diagnose.wrong_kernels(tape, program, list(given), model)
    unfused = Program(tape, fuse=False)
    unfused.bind(model)
    assert not unfused.launches and error(model, unfused, given) < 1e-5
    (bad, *_) = [launch.source.text for launch in program.launches]
    call = kernels.Launch.__call__

    def wrong(self, operands, outputs):
        call(self, operands, outputs)
        if self.source.text == bad:
            outputs[0].mul_(1.5)

    monkeypatch.setattr(kernels.Launch, "__call__", wrong)
    assert diagnose.wrong_kernels(tape, program, list(given), model) == {bad}
