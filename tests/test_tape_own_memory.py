"""What is written through a view becomes a value, and attention reads values where they lie, if nobody else minds. CPU.

Each forward is rewritten and run on fresh inputs: unfused bit-equal to eager, fused in Triton's interpreter.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools import embed

embed.bare_pack()

from anyshape.accel.tape import rules  # noqa: E402 - the package exists from the line above on
from anyshape.accel.tape.program import Program  # noqa: E402
from anyshape.accel.tape.rules import copies, slices  # noqa: E402
from anyshape.accel.tape.values import Tape  # noqa: E402

from tools.small_forwards import taped  # noqa: E402

WIDTH, HEADS = 48, 3


class Model(nn.Module):
    """A projection to queries, keys and values, and a forward of the test's own."""

    def __init__(self, body, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False).to(dtype)

    def forward(self, x: Tensor) -> list[Tensor]:
        found = self.body(self, x)
        return list(found) if isinstance(found, tuple) else [found]

    def heads(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values [batch, tokens, heads, channels], parts of one tensor."""
        return [part.view(*x.shape[:2], HEADS, -1) for part in self.qkv(x).split(WIDTH, -1)]


def x_of(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def right(model: Model, tape: Tape, fuse: bool, within: float) -> None:
    """The tape's program gives what the model gives on other inputs, and lays it out as the model does."""
    dtype = model.out.weight.dtype
    program = Program(tape, fuse)
    program.bind(model)
    with torch.inference_mode():
        for seed in (1, 2):
            x = x_of(seed, dtype)
            for found, wanted in zip(program.run([x.clone()]), model(x), strict=True):
                assert found.stride() == wanted.stride()
                assert torch.equal(found, wanted) if not within else torch.allclose(found, wanted, within, within)


# What is written through a view ------------------------------------------------------------------------------------


def beside_others(self, x):
    q, k, v = self.heads(x)
    q.mul_(2).add_(1)
    k.sub_(x.view(*x.shape[:2], HEADS, -1))
    return q * 3 + k, v + 1


def attended(self, x):
    q, k, v = self.heads(x)
    q.mul_(2)
    k.tanh_()
    return F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v))).transpose(1, 2).flatten(2)


def one_of_each_batch(self, x):
    y = self.qkv(x)
    first, second = y.unbind(0)
    first.view(-1, HEADS, WIDTH).mul_(3)
    return second * 2


def of_a_part(self, x):
    """Parts of a part: queries, and of these some channels."""
    q, k, _ = self.heads(x)
    turned, rest = q[..., :6], q[..., 6:]
    turned.mul_(2)
    return turned * 3 + 1, rest + k[..., 6:]


@pytest.mark.parametrize("body", [beside_others, attended, one_of_each_batch, of_a_part])
def test_it_is_a_value_where_others_lie_apart(body):
    model = Model(body)
    tape = taped(model, x_of(0))[1]
    assert any(operation.writes is not None for operation in tape.operations)
    assert slices.to_values(tape) == ""
    assert not any(operation.writes is not None for operation in tape.operations)
    right(model, tape, fuse=False, within=0.0)
    rules.apply(tape)
    right(model, tape, fuse=True, within=1e-5)


def overlapping(self, x):
    q = self.heads(x)[0]
    some, others = q[..., :10], q[..., 6:]
    some.mul_(2)
    return some * 3, others + 1


def one_for_several(self, x):
    """Two parts of what lies once for both."""
    y = self.out(x)[:, :1].expand(-1, 4, -1)
    first, second = y[:, :1], y[:, 1:2]
    first.view(-1, 1, HEADS, WIDTH // HEADS).mul_(2)
    return second + 1


def in_a_product(self, x):
    """It reads whole rows, by strides that were those of the product before."""
    q, k, _ = self.heads(x)
    q.mul_(2)
    return self.out(q.flatten(2)), k + 1


def given_back(self, x):
    q, k, _ = self.heads(x)
    q.mul_(2)
    return q, k + 1


@pytest.mark.parametrize("body", [overlapping, one_for_several, in_a_product, given_back])
def test_it_stays_in_place_where_others_would_see(body):
    model = Model(body)
    tape = taped(model, x_of(0))[1]
    assert slices.to_values(tape) == ""
    assert any(operation.writes is not None for operation in tape.operations)
    right(model, tape, fuse=False, within=0.0)
    rules.apply(tape)
    right(model, tape, fuse=True, within=1e-5)


# What attention reads ----------------------------------------------------------------------------------------------


def copied(self, x, part=slice(None), also=None):
    q, k, v = self.heads(x)
    v = v[..., part].clone()
    q, k, v = (each.transpose(1, 2) for each in (q * 2, k, v))
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    return (out.flatten(2), also(v)) if also else out.flatten(2)


def queries_copied(self, x):
    q, k, v = (each.transpose(1, 2) for each in self.heads(x))
    return F.scaled_dot_product_attention(q.clone(), k, v) * 2


def written_later(self, x):
    q, k, v = self.heads(x)
    own = v.clone()
    v.mul_(2)
    q, k, own = (each.transpose(1, 2) for each in (q, k, own))
    return F.scaled_dot_product_attention(q, k, own).transpose(1, 2) + v


def clones(tape: Tape) -> int:
    return sum(not operation.opaque and operation.traits.name == "clone" for operation in tape.operations)


def test_attention_reads_values_where_they_lie():
    model = Model(copied, torch.bfloat16)
    tape = taped(model, x_of(0, torch.bfloat16))[1]
    before = clones(tape)
    assert copies.attend_in_place(tape) == "" and clones(tape) == before - 1
    right(model, tape, fuse=False, within=0.0)
    rules.apply(tape)
    right(model, tape, fuse=True, within=2e-2)


NEEDED = {
    "others read it": lambda self, x: copied(self, x, also=lambda v: v + 1),
    "it is given back": lambda self, x: copied(self, x, also=lambda v: v),
    "rows that are not aligned": lambda self, x: copied(self, x, part=slice(1, None)),
    "queries, as which the result lies": queries_copied,
    "what is written later": written_later,
    "a small part of much": lambda self, x: copied(self, x, part=slice(0, 8)),
}


@pytest.mark.parametrize("why", [*NEEDED, "memory counts for more than time"])
def test_a_copy_stays_that_is_needed(why):
    model = Model(NEEDED.get(why, copied), torch.bfloat16)
    tape = taped(model, x_of(0, torch.bfloat16))[1]
    before, tape.lean = clones(tape), why not in NEEDED
    assert copies.attend_in_place(tape) == "" and clones(tape) == before > 0
    right(model, tape, fuse=False, within=0.0)
