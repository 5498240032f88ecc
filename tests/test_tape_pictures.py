"""Rules for networks of pictures (UNets and their kin), on a small one of plain torch. CPU, in Triton's interpreter.

Each rule runs alone and with all others, at sizes that the first recording did not have, odd ones included.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools import embed

embed.bare_pack()

from anyshape.accel.kernels import operations  # noqa: E402 - the package exists from the line above on
from anyshape.accel.tape import diagnose, hand_kernels, kernels, rules  # noqa: E402
from anyshape.accel.tape.program import NotBound, Program  # noqa: E402
from anyshape.accel.tape.record import Recorder, record  # noqa: E402
from anyshape.accel.tape.reuse import Outlines  # noqa: E402
from anyshape.accel.tape.rules import (  # noqa: E402
    attention_kernel,
    channels_last,
    conv_bias,
    edits,
    geglu,
    linear_groups,
    norm_neighbours,
    upsample,
)
from anyshape.accel.tape.values import Tape, Value  # noqa: E402

CPU, LAST = torch.device("cpu"), torch.channels_last
WIDTH, TEXT, HEADS = 32, 24, 2
SIZES = ((2, 8, 6, 5), (1, 4, 8, 5), (3, 2, 6, 7), (1, 5, 7, 3), (2, 2, 2, 1))  # pictures, height, width, words
BOUND = {torch.float32: 1e-5, torch.float16: 4e-3}


class Residual(nn.Module):
    """A residual block with a time step's embedding."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(8, wide), nn.GroupNorm(8, narrow)
        self.into, self.out = nn.Conv2d(wide, narrow, 3, padding=1), nn.Conv2d(narrow, narrow, 3, padding=1)
        self.embedding = nn.Linear(WIDTH, narrow)
        self.skip = nn.Conv2d(wide, narrow, 1) if wide != narrow else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        h = self.into(F.silu(self.first(x)))
        h = h + self.embedding(F.silu(embedding))[:, :, None, None]
        return self.skip(x) + self.out(F.silu(self.second(h)))


class Transformer(nn.Module):
    """Attention to the picture and to a prompt, and a feed-forward with GEGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.GroupNorm(8, width, eps=1e-6), nn.LayerNorm(width)
        self.own = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.text = nn.ModuleList(nn.Linear(TEXT, width, bias=False) for _ in range(2))
        self.query = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(x.shape[0], -1, HEADS, x.shape[-1] // HEADS).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(q.shape[0], -1, q.shape[-1] * HEADS)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        n, c, h, w = x.shape
        tokens = self.norm(x).movedim(1, 3).flatten(1, 2).contiguous()
        normed = self.inner(tokens)
        tokens = tokens + self.attend(*(layer(normed) for layer in self.own))
        keys, values = (layer(text) for layer in self.text)
        tokens = tokens + self.attend(self.query(self.inner(tokens)), keys, values)
        value, gate = self.up(self.inner(tokens)).chunk(2, dim=-1)
        tokens = tokens + self.down(value * F.gelu(gate))
        return tokens.reshape(n, h, w, c).movedim(3, 1).contiguous() + x


class Pictures(nn.Module):
    """Down, through the middle, and up again with a skip connection."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Conv2d(4, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(WIDTH, WIDTH), Residual(WIDTH, 2 * WIDTH), Residual(3 * WIDTH, WIDTH)])
        self.transformers = nn.ModuleList(Transformer(width) for width in (2 * WIDTH, 2 * WIDTH, WIDTH, WIDTH))
        self.smaller = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.larger = nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1)
        self.last, self.out = nn.GroupNorm(8, WIDTH), nn.Conv2d(WIDTH, 4, 3, padding=1)
        self.to(dtype).requires_grad_(False)

    def forward(self, x: Tensor, embedding: Tensor, text: Tensor) -> Tensor:
        h = skip = self.blocks[0](self.into(x), embedding)
        h = self.blocks[1](self.smaller(h), embedding)
        for transformer in self.transformers[:2]:
            h = transformer(h, text)
        h = self.larger(F.interpolate(h, size=skip.shape[2:], mode="nearest"))
        h = self.blocks[2](torch.cat([h, skip], dim=1), embedding)
        for transformer in self.transformers[2:]:
            h = transformer(h, text)
        return self.out(F.silu(self.last(h)))


def inputs(size: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    n, h, w, words = size
    generator = torch.Generator().manual_seed(seed)
    shapes = (n, 4, h, w), (n, WIDTH), (n, words, TEXT)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def taped(model: nn.Module, given: tuple[Tensor, ...]) -> Tape:
    recorder = Recorder(list(given), model, CPU)
    _, tape = record(lambda: model(*given), recorder)
    assert tape is not None, recorder.refusal
    return tape


def programmed(model: nn.Module, given: tuple[Tensor, ...], *chosen: Callable[[Tape], str]) -> tuple[Tape, Program]:
    """The tape after these rules (all, if none is named), and its program."""
    tape = taped(model, given)
    for rule in chosen:
        rule(tape)
    edits.settle(tape)
    if not chosen:
        rules.apply(tape)
    program = Program(tape, fuse=True)
    program.bind(model)
    return tape, program


def error(model: nn.Module, program: Program, given: tuple[Tensor, ...]) -> float:
    with torch.inference_mode():
        out, wanted = program.run(list(given)), model(*given)
    assert out.shape == wanted.shape and out.stride() == wanted.stride()
    return ((out - wanted).float().norm() / wanted.float().norm()).item()


def calls(tape: Tape, func: object) -> list:
    return [operation for operation in tape.operations if operation.func is func]


def lies_as_said(program: Program, given: tuple[Tensor, ...]) -> None:
    """Whether what calls give lies as the tape says, which is where kernels read it."""
    values = {slot: value for value, slot in program._slots.items()}
    seen = 0

    def look(slot: int, tensor: Tensor) -> None:
        nonlocal seen
        value: Value = values[slot]
        seen += 1
        places = zip(tensor.stride(), value.stride, value.shape, strict=True)
        assert all(n == 1 or own == said for own, said, n in places), (value, tensor.stride(), value.stride)

    with torch.inference_mode():
        program._execute(list(given), look)
    assert seen


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


@pytest.mark.parametrize("name", EACH)
def test_rule_is_right_at_every_size_with_the_kernels_of_the_first(name, model, dtype):
    known: set[str] = set()
    run = (SIZES[1], *(SIZES[3:] if name == "all" and dtype == torch.float16 else ()))
    # with channels first, a picture of one pixel hides how it lies
    for size in SIZES if name in ("channels last", "bias", "norm", "upsampling", "all") else SIZES[:-1]:
        given = inputs(size, dtype)
        _, program = programmed(model, given, *EACH[name])
        sources = {launch.source.text for launch in program.launches}
        assert not known or sources <= known, size
        known |= sources
        if size in run:
            assert error(model, program, inputs(size, dtype, seed=1)) < BOUND[dtype], size
            lies_as_said(program, given)


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


def test_a_size_recorded_while_weights_lie_channels_last_has_the_same_tape(dtype):
    """Then a library plans each convolution once, for ComfyUI's forward and for the program."""
    model, outlines = Pictures(dtype), Outlines()
    sizes = (SIZES[0], (2, 12, 10, 7))
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


class Stack(nn.Module):
    """Convolutions with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)).requires_grad_(False)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return x


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
    for size in ((2, 8, 6, 4), (1, 8, 4, 6)):
        model, given = Stack(MINDING[name]), (torch.randn(size),)
        tape, program = programmed(model, given)
        assert error(model, program, (torch.randn(size),)) < 1e-5
        lies_as_said(program, given)
        assert bool(calls(tape, operations.conv2d_last)) == (name != "a part in place")


def test_a_padded_picture_is_not_turned():
    """As in front of a convolution that halves the sides of a VAE's picture."""
    model, given = Stack(lambda x: F.pad(x, (0, 1, 0, 1))), (torch.randn(2, 8, 6, 5),)
    tape, program = programmed(model, given)
    copies = [op for op in tape.operations if "clone" in str(op.func)]
    assert [op.outputs[0] for op in copies] == tape.outputs
    assert error(model, program, (torch.randn(2, 8, 6, 5),)) < 1e-5
    lies_as_said(program, given)


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


class Normed(nn.Module):
    def __init__(self, forward: Callable[["Normed", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4))
        self.norm, self.offset = nn.GroupNorm(4, 16), nn.Parameter(torch.randn(1, 16, 1, 1))
        self.body = forward
        self.requires_grad_(False)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        return self.body(self, self.layers[3](self.layers[2](self.layers[1](self.layers[0](x)))), e[:, :, None, None])


SUMS = {  # (what is normed, has it an embedding within, how many numbers a channel)
    "an embedding": (lambda m, x, e: m.norm(x + e), True, 1),
    "the other way round": (lambda m, x, e: m.norm(e + x), True, 1),
    "two offsets": (lambda m, x, e: m.norm(x + m.offset + e), True, 2),
    "three offsets": (lambda m, x, e: m.norm(x + m.offset + m.offset + e), True, 2),
    "two embeddings": (lambda m, x, e: m.norm(x + e + e), True, 0),
    "another picture": (lambda m, x, e: m.norm(x + x.sin()), False, 0),
    "a sum that others read": (lambda m, x, e: m.norm(y := x + e) + y, False, 0),
    "a product": (lambda m, x, e: m.norm(x * e), False, 0),
    "a scaled sum": (lambda m, x, e: m.norm(torch.add(x, e, alpha=2)), False, 0),
    "SiLU twice": (lambda m, x, e: F.silu(y := m.norm(x + e)) * y, True, 1),
}


@pytest.mark.parametrize("size", [(1, 16, 5, 3), (2, 16, 5, 3), (1, 16, 1, 1)], ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_what_a_norm_takes_in(name, size):
    """The same of a picture of one pixel, which has one number per channel too."""
    body, shifted, offsets = SUMS[name]
    model, given = Normed(body), (torch.randn(size), torch.randn(size[:2]))
    tape, program = programmed(model, given)
    (norm,) = calls(tape, operations.group_norm_last)
    assert (norm.args[5] is not None, len(norm.args[7])) == (shifted, offsets)
    assert error(model, program, (torch.randn(size), torch.randn(size[:2]))) < 1e-5


# GEGLU, attention, layers of one input -----------------------------------------------------------------------------


def test_blocks_have_one_operation_for_geglu_and_one_for_the_prompt():
    model = Pictures(torch.float16)
    tape, _ = programmed(model, inputs(SIZES[0], torch.float16))
    assert len(calls(tape, operations.linear_geglu)) == len(calls(tape, operations.flash_attention)) == 4
    (text,) = calls(tape, operations.grouped_linear)
    assert len(text.args[1]) == 8 and text.args[2] == [None] * 8
    assert not calls(tape, torch.ops.aten.gelu.default)


class Gated(nn.Module):
    def __init__(self, gate: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.gate = nn.Linear(16, 32).half().requires_grad_(False), gate

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(*self.layer(x).chunk(2, dim=-1))


GATES = {
    "geglu": (lambda value, gate: value * F.gelu(gate), True),
    "the first half gates": (lambda gate, value: value * F.gelu(gate), False),
    "tanh": (lambda value, gate: value * F.gelu(gate, approximate="tanh"), False),
    "silu": (lambda value, gate: value * F.silu(gate), False),
    "read again": (lambda value, gate: value * F.gelu(gate) + gate, False),
}


@pytest.mark.parametrize("name", GATES)
def test_which_gates_are_part_of_their_product(name):
    gate, taken = GATES[name]
    model, given = Gated(gate), (torch.randn(2, 5, 16).half(),)
    tape, program = programmed(model, given)
    assert bool(calls(tape, operations.linear_geglu)) == taken
    assert error(model, program, given) < BOUND[torch.float16]


class Asking(nn.Module):
    """Attention of 12 tokens to a prompt, or to whatever."""

    def __init__(self, own: bool = False, width: int = 32, count: int = 2, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(width, width).half().requires_grad_(False) for _ in range(3))
        self.own, self.count, self.options = own, count, options

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.count, -1))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        text = x if self.own else text
        q, k, v = (self.heads(each).transpose(1, 2) for each in (self.q(x), self.k(text), self.v(text)))
        return F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2) * 2


class AskingAsNewer(Asking):
    """As newer ComfyUI cuts tokens into heads."""

    def heads(self, x: Tensor) -> Tensor:
        return x.unsqueeze(3).reshape(len(x), -1, 2, 16)


@pytest.mark.parametrize(
    "model, words, taken",
    [
        (AskingAsNewer(), 7, True), (Asking(), 7, True), (Asking(), 256, True), (Asking(), 257, False),
        (Asking(own=True), 7, False), (Asking(scale=0.5), 7, False),
        (Asking(attn_mask=torch.zeros(12, 7).half()), 7, False),
    ],
)  # fmt: skip
def test_which_attention_is_to_a_prompt(model, words, taken):
    given = torch.randn(2, 12, 32).half(), torch.randn(2, words, 32).half()
    model.mask = model.options.get("attn_mask")  # a tensor of the model's own
    tape, program = programmed(model, given)
    assert bool(calls(tape, operations.flash_attention)) == taken
    assert error(model, program, given) < BOUND[torch.float16]
    # its kernel is compiled all the same, as a shorter prompt will need it
    assert [operation.func for operation in tape.ahead] == ([operations.flash_attention] if words == 257 else [])


@pytest.mark.parametrize("count, taken", [(2, True), (4, False)])
def test_attention_that_would_be_planned_is_not(monkeypatch, count, taken):
    """An image's own tokens, heads of 64 channels: as where cuDNN is, which plans each number of tokens."""
    monkeypatch.setattr(attention_kernel, "PLANNED", "_scaled_dot_product_flash_attention_for_cpu")
    model = Asking(own=True, width=128, count=count)
    for tokens in (12, 300):
        given = torch.randn(2, tokens, 128).half(), torch.randn(2, 7, 128).half()
        tape, program = programmed(model, given)
        assert bool(calls(tape, operations.flash_attention)) == taken and not tape.ahead
        assert error(model, program, given) < BOUND[torch.float16]


class Layers(nn.Module):
    def __init__(self, count: int, bias: bool = True, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, 8 * i + 8, bias=bias) for i in range(count))
        self.half().requires_grad_(False)

    def forward(self, x: Tensor) -> list[Tensor]:
        return torch.cat([layer(x) for layer in self.layers], dim=-1) + 1


class Wide(Layers):
    """Each of more weights than a small layer has."""

    def __init__(self, count: int) -> None:
        super().__init__(1, width=2056)
        wide = nn.Linear(2056, 2056).half().requires_grad_(False)
        self.layers = nn.ModuleList(wide if i else nn.Linear(2056, 8).half() for i in range(count)).requires_grad_(
            False
        )


@pytest.mark.parametrize(
    "model, rows, taken",
    [
        (Layers(8), 3, True), (Layers(9, bias=False), 3, True), (Layers(7), 3, False), (Layers(8, width=12), 3, False),
        (Layers(8), 2049, False), (Wide(8), 3, False),
    ],
)  # fmt: skip
def test_which_layers_run_together(model, rows, taken):
    given = (torch.randn(rows, model.layers[0].in_features).half(),)
    tape, program = programmed(model, given)
    assert bool(calls(tape, operations.grouped_linear)) == taken
    assert error(model, program, given) < BOUND[torch.float16]
    assert [operation.func for operation in tape.ahead] == ([operations.grouped_linear] if rows == 2049 else [])


class Modulated(nn.Module):
    """Two layers behind each other for each part, as adaLN with a low rank has them."""

    def __init__(self, count: int, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.low = nn.ModuleList(nn.Linear(16, 8, bias=False) for _ in range(count))
        self.high = nn.ModuleList(nn.Linear(8, width, bias=False) for _ in range(count))
        self.half().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for low, high in zip(self.low, self.high, strict=True):
            shift, scale = high(low(F.silu(x[:, :16]))).chunk(2, dim=-1)
            x = torch.tanh(torch.cat([x[:, :12] * scale + shift, x[:, 12:]], dim=-1)) + low(F.silu(x[:, :16])).mean()
        return x


class Early(Modulated):
    """All of them of the same vector."""

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for low, high in zip(self.low, self.high, strict=True):
            shift, scale = high(low(F.silu(x))).chunk(2, dim=-1)
            out = torch.cat([out[:, :12] * scale + shift, out[:, 12:]], dim=-1)
        return torch.tanh(out)


@pytest.mark.parametrize("model, together", [(Early(8), [1, 8]), (Early(7), []), (Modulated(8), [])])
def test_layers_behind_layers_run_together_too(model, together):
    for rows in (1, 3):
        given = (torch.randn(rows, 16).half(),)
        tape, program = programmed(model, given)
        assert [len(operation.args[0]) for operation in calls(tape, operations.grouped_linear)] == together
        assert error(model, program, (torch.randn(rows, 16).half(),)) < BOUND[torch.float16]


def test_layers_that_moved_have_another_table():
    model, given = Layers(8), (torch.randn(3, 16).half(),)
    _, program = programmed(model, given)
    (table,) = program.constants()
    for layer in model.layers:
        layer.weight.data = layer.weight.data.clone() * 2
        layer.bias.data = layer.bias.data.clone() + 1
    program.bind(model)
    (other,) = program.constants()
    assert other is not table and not torch.equal(other, table)
    assert error(model, program, given) < BOUND[torch.float16]
    program.unbind()
    assert not program.constants()


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
