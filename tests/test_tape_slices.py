"""Writes in place become values where that is right, and what is done part by part is done of the whole. CPU.

Each forward is rewritten and run unfused on fresh inputs, bit-equal to eager; fused in Triton's interpreter.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tools import embed

embed.bare_pack()

from anyshape.accel.tape import rules  # noqa: E402 - the package exists from the line above on
from anyshape.accel.tape.program import Program  # noqa: E402
from anyshape.accel.tape.record import Recorder, record  # noqa: E402
from anyshape.accel.tape.reuse import Outlines  # noqa: E402
from anyshape.accel.tape.rules import parts, slices  # noqa: E402

from tools.small_forwards import CPU  # noqa: E402

WIDTH = 64
ROWS = (3, 4, 5)  # of the three kinds of tokens


class Model(nn.Module):
    """Layers, a table of modulations and a forward of the test's own."""

    def __init__(self, body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.Parameter(torch.randn(WIDTH))
        self.mod = nn.Parameter(torch.randn(6, WIDTH))
        self.requires_grad_(False)

    def forward(self, x, rows=ROWS):
        return self.body(self, x, rows)


def x_of(seed: int = 0, rows=ROWS) -> torch.Tensor:
    return torch.randn(sum(rows), WIDTH, generator=torch.Generator().manual_seed(seed))


def places(rows):
    return [(sum(rows[:k]), sum(rows[: k + 1]), k) for k in range(len(rows))]


def taped(model, x, rows=ROWS, lean=False):
    recorder = Recorder([x], model, CPU)
    recorder.lean = lean
    out, tape = record(lambda: model(x, rows), recorder)
    assert tape is not None, recorder.refusal
    return out, tape


def writes(tape) -> int:
    return sum(operation.writes is not None for operation in tape.operations)


def names(tape) -> list[str]:
    return [operation.traits.name for operation in tape.operations if not operation.opaque]


def rewritten(body, rows=ROWS, lean=False):
    """The tape after the two rules; its program, without kernels, is bit-equal to eager on fresh inputs."""
    model = Model(body)
    _, tape = taped(model, x_of(rows=rows), rows, lean)
    assert slices.to_values(tape) == parts.put_together(tape) == ""
    program = Program(tape, fuse=False)
    program.bind(model)
    for seed in (0, 1, 2):
        x = x_of(seed, rows)
        with torch.inference_mode():
            wanted, found = model(x.clone(), rows), program.run([x])
        wanted, found = (out if isinstance(out, tuple) else (out,) for out in (wanted, found))
        for own, theirs in zip(found, wanted, strict=True):
            assert torch.equal(own, theirs) and own.dtype == theirs.dtype and own.stride() == theirs.stride()
    return tape


def fused(body, rows=ROWS):
    """The program on kernels, close to eager."""
    model = Model(body)
    _, tape = taped(model, x_of(rows=rows), rows)
    rules.apply(tape)
    with torch.inference_mode():
        program = Program(tape, fuse=True, outlines=Outlines())
        program.bind(model)
        x = x_of(1, rows)
        torch.testing.assert_close(program.run([x]), model(x.clone(), rows), rtol=1e-5, atol=1e-5)
    return program


# What becomes values -----------------------------------------------------------------------------------------------


def modulated(self, x, rows):
    h = F.rms_norm(self.one(x), (WIDTH,), self.norm)
    for a, b, row in places(rows):
        h[a:b].mul_(1.0 + self.mod[row]).add_(self.mod[row + 1])
    return self.two(h)


def gated(self, x, rows):
    h, other = self.one(x), self.two(x)
    for a, b, row in places(rows):
        h[a:b].addcmul_(other[a:b], self.mod[row])
    return F.rms_norm(h, (WIDTH,), self.norm), h


def assembled(self, x, rows):
    out = torch.empty_like(x)
    a, b = rows[0], rows[0] + rows[1]
    out[:a] = self.one(x[:a])
    out[a:b] = x[a:b] * 2
    out[b:] = self.mod[0]
    return out + 1


def normed_by_frames(self, x, rows):
    x = x.view(-1, 8, 4, 2)
    out = torch.empty_like(x)
    for start in range(0, len(x), 5):
        out[start : start + 5] = F.group_norm(x[start : start + 5], 2)
    return out.permute(1, 0, 2, 3) + 1


def laid_otherwise(self, x, rows):
    """Memory whose dimensions lie in another order stays so: a view of it counts on that."""
    x = x.view(8, -1, 8).permute(1, 0, 2) * 1
    out = torch.empty_like(x)
    out[:3], out[3:] = x[:3] * 2, x[3:] * 3
    return out.permute(1, 0, 2).view(8, -1) * 2


def columns(self, x, rows):
    h = self.one(x) * 2
    h[:, 8:24].mul_(3)
    return h + 1, h[:, 10:30] * x[:, :20]


def in_turn(self, x, rows):
    a, b = self.one(x).chunk(2, dim=1)
    a.add_(b)
    b.sub_(a)
    return torch.cat((b, a), 1)


def twice(self, x, rows):
    """Written, read as a whole, and written again; and slices that overlap."""
    h = self.one(x) * 1
    h[:4].mul_(2)
    h[4:].mul_(3)
    before = h * 2
    h[2:7].add_(self.mod[0])
    return h * before


def through_a_view(self, x, rows):
    h = self.one(x).view(-1, 8, 8).transpose(1, 2)
    h.mul_(2).add_(1)
    return h * 3


def rounded(self, x, rows):
    out = torch.zeros(len(x), WIDTH, dtype=torch.bfloat16)
    out[:5] = x[:5]
    out[5:] = x[5:] * 2
    return out * 2


VALUES = (
    modulated, gated, assembled, normed_by_frames, laid_otherwise, columns, in_turn, twice, through_a_view, rounded,
)  # fmt: skip


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("body", VALUES)
def test_writes_become_values(body, lean) -> None:
    assert writes(rewritten(body, lean=lean)) == 0


def test_what_is_done_part_by_part_is_done_of_the_whole() -> None:
    """In as many operations as for one part, with no slice of it left; only what differs is joined."""
    for body, joins in ((modulated, 2), (gated, 1)):
        found = names(rewritten(body))
        assert found.count("cat") == joins and found.count("mul") + found.count("addcmul") == 1
        assert "slice" not in found
    found = names(rewritten(normed_by_frames))
    assert found.count("group_norm") == 1 and not {"cat", "slice", "clone", "empty_like"} & set(found)
    assert names(rewritten(normed_by_frames, rows=(3,))) == found  # a single piece


@pytest.mark.parametrize("kinds", [2, 4, 5, 9])
def test_joins_of_many_parts(kinds) -> None:
    rows = tuple(range(1, kinds + 1))

    def body(self, x, rows):
        h = self.one(x)
        for a, b, row in places(rows):
            h[a:b].mul_(1.0 + self.mod[row % 6])
        return self.two(h)

    tape = rewritten(body, rows)
    assert writes(tape) == 0 and names(tape).count("mul") == 1
    fused(body, rows)


@pytest.mark.parametrize("body", [modulated, gated])
def test_they_fuse_with_their_neighbours_at_every_size(body) -> None:
    program = fused(body)
    assert len(program.launches) == 1 and program.report.calls == 2
    known = {launch.source.text for launch in program.launches}
    for rows in ((1, 2, 3), (30, 7, 16), (5, 5, 5)):
        assert {launch.source.text for launch in fused(body, rows).launches} == known


@pytest.mark.parametrize("body", VALUES)
def test_fused_they_are_right(body) -> None:
    fused(body)


# What stays --------------------------------------------------------------------------------------------------------


def old_view(self, x, rows):
    h = self.one(x)
    first = h[0]
    h[:4].mul_(2)
    return h + first


def crossing(self, x, rows):
    h = self.one(x) * 1
    old = h.view(-1, 8, 8)
    h[:, :8].mul_(2)
    h[:4].mul_(2)
    return h + old.reshape(-1, WIDTH)


def every_other(self, x, rows):
    h = self.one(x)
    h[::2].mul_(2)
    return h + 1


def one_row(self, x, rows):
    h = self.one(x)
    h[1].mul_(2)
    return h + 1


def with_gaps(self, x, rows):
    """The rest of a product would be copied."""
    h = self.one(x)
    h[:4].mul_(2)
    return h + 1


def stored(self, x, rows):
    """The whole is in memory already, because a product reads it: a few more rows are written faster in place."""
    h = self.one(x) * 1
    other = self.two(h)
    h[:1].mul_(2)
    return h + other


def by_calls(self, x, rows):
    """No kernel of ours makes these slices, and a join would copy them."""
    h = self.one(x) * 1
    h[:4].masked_fill_(x[:4] > 0, 1)
    h[4:].masked_fill_(x[4:] > 0, 2)
    return h + 1


def only_in_place(self, x, rows):
    h = self.one(x) * 1
    h[:4].gt_(0.1)
    return h + 1


def rounded_in_place(self, x, rows):
    h = (x * 1).to(torch.bfloat16)
    h[:4] += x[:4] * 0.3337  # in float32, rounded to bfloat16
    return h * 1.1


def many_slices(self, x, rows):
    h = self.one(x) * 1
    for k in range(6):
        other = self.two(x[2 * k : 2 * k + 2])
        h[2 * k : 2 * k + 2] = other if k % 2 else h[2 * k : 2 * k + 2] + other
        h[2 * k : 2 * k + 2].mul_(self.mod[k]) if k % 2 else h[2 * k : 2 * k + 2].add_(self.mod[k])
    return h * 2


@pytest.mark.parametrize(
    "body",
    [
        old_view, crossing, every_other, one_row, with_gaps, stored, by_calls, only_in_place, rounded_in_place,
        many_slices,
    ],
)  # fmt: skip
def test_what_is_in_doubt_stays_in_place(body) -> None:
    model = Model(body)
    before = writes(taped(model, x_of())[1])
    assert writes(rewritten(body)) == before > 0
    fused(body)


def test_one_tensor_in_doubt_leaves_the_others_alone() -> None:
    def body(self, x, rows):
        return old_view(self, x, rows) + modulated(self, x, rows)

    assert writes(rewritten(body)) == 1


def test_parts_that_others_read_or_that_are_made_otherwise_stay() -> None:
    def read(self, x, rows):
        h = self.one(x)
        a, b = h[:4] * self.mod[0], h[4:] * self.mod[1]
        return torch.cat((a, b)) + a.sum()

    def other(self, x, rows):
        h = self.one(x)
        return torch.cat((h[:4] * self.mod[0], h[4:] + self.mod[1]))

    def turned(self, x, rows):
        h = self.one(x)
        return torch.cat((h[4:] * self.mod[0], h[:4] * self.mod[1]))

    def summed(self, x, rows):
        h = self.one(x)
        return torch.cat((F.rms_norm(h[:, :32], (32,)), F.rms_norm(h[:, 32:], (32,))), 1)

    def written(self, x, rows):
        h = self.one(x)
        first = h[0]
        out = torch.cat((h[:4] * self.mod[0], h[4:] * self.mod[1]))
        h[:4].mul_(2)
        return out + h + first

    for body in (read, other, turned, summed, written):
        model = Model(body)
        before = names(taped(model, x_of())[1])
        assert names(rewritten(body)) == before
        fused(body)
