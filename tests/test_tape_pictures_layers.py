"""What rules make of the layers of a network of pictures: its norms, GEGLU, attention and layers of one input.

On the CPU, in Triton's interpreter: which idioms they take in, which they leave alone, and that both are right.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools import embed

embed.bare_pack()

from anyshape.accel.kernels import operations  # noqa: E402 - the package exists from the line above on
from anyshape.accel.tape.rules import attention_kernel  # noqa: E402

from tools.pictures import BOUND, SIZES, Pictures, calls, error, inputs, programmed  # noqa: E402


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
        (Asking(own=True), 7, False), (Asking(scale=0.5), 7, False), (Asking(scale=0.25), 7, True),
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


@pytest.mark.parametrize("name", ["PLANNED", "ASKED_FOR"])
@pytest.mark.parametrize("plans", [True, False])
@pytest.mark.parametrize("count, scale", [(2, None), (2, 0.125), (4, None)])
def test_attention_that_would_be_planned_is_not(monkeypatch, name, plans, count, scale):
    """An image's own tokens, heads of 64 channels: where cuDNN is, which plans each number of them, or would be.

    scale: the usual one may be recorded as a number.
    """
    monkeypatch.setattr(attention_kernel, name, "_scaled_dot_product_flash_attention_for_cpu")
    monkeypatch.setattr(attention_kernel, "takes_plans", lambda device: plans)
    taken = count == 2 and (plans or name == "PLANNED")
    model = Asking(own=True, width=128, count=count, scale=scale)
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
        out = x[:, :12]
        for low, high in zip(self.low, self.high, strict=True):
            shift, scale = high(low(F.silu(x))).chunk(2, dim=-1)
            out = out * scale + shift
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
