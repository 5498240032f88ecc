"""What makes a size another one, whose plan is its own, and what does not. Each result is that of the forward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tools import embed

embed.bare_pack()

from anyshape.accel.tape import rules  # noqa: E402 - the package exists from the line above on
from anyshape.accel.tape.program import Program  # noqa: E402
from anyshape.accel.tape.record import Recorder, record  # noqa: E402
from anyshape.accel.tape.reuse import Outlines  # noqa: E402
from anyshape.accel.tape.values import Tape  # noqa: E402

CPU, CHANNELS = torch.device("cpu"), 64


class Model(nn.Module):
    """``forward`` of a function, with two layers."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(CHANNELS, CHANNELS).requires_grad_(False)
        self.last = nn.Linear(CHANNELS, CHANNELS).requires_grad_(False)
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(self, *tensors)


def tape_of(model: Model, *tensors: Tensor) -> tuple[Tensor, Tape]:
    """(the forward's own result, its tape)."""
    recorder = Recorder(list(tensors), model, CPU)
    out, tape = record(lambda: model(*tensors), recorder)
    assert tape is not None, recorder.refusal
    rules.apply(tape)
    return out, tape


def reuse(function: Any, *calls: tuple[Tensor, ...]) -> Outlines:
    """Plans one call after the other; each result is right."""
    model, outlines = Model(function), Outlines()
    for tensors in calls:
        out, tape = tape_of(model, *tensors)
        program = Program(tape, fuse=True, outlines=outlines)
        assert program.calls  # all of them are torch's, so it may be captured before it runs
        program.bind(model)
        mine = program.run(tensors)
        for ours, own in zip(mine, out, strict=True) if isinstance(out, tuple) else [(mine, out)]:
            assert ours.shape == own.shape and (ours - own).norm() <= 1e-5 * own.norm()
    return outlines


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def modulated(self: Model, x: Tensor, y: Tensor) -> Tensor:
    z = torch.nn.functional.layer_norm(self.first(x), (CHANNELS,)) * (1 + y[:, None])
    return self.last(z + x)


def test_other_lengths_are_no_other_plan():
    calls = [(rand(b, t, CHANNELS), rand(b, CHANNELS)) for b, t in ((2, 9), (2, 7), (3, 35), (5, 2), (2, 64))]
    outlines = reuse(modulated, *calls)
    assert outlines.reused == 4 and not outlines.misfits


def test_one_of_something_is_another_plan():
    calls = [(rand(b, t, CHANNELS), rand(b, CHANNELS)) for b, t in ((1, 9), (2, 9), (1, 8), (3, 1), (4, 6))]
    outlines = reuse(modulated, *calls)
    assert outlines.reused == 2
    assert set(outlines.misfits) == {"lengths that were equal, or 1"}


def padded(self: Model, x: Tensor) -> Tensor:
    """Sides are padded to even ones, as a picture is to whole patches, and cropped."""
    height, width = x.shape[1:3]
    x = torch.nn.functional.pad(x, (0, 0, 0, width % 2, 0, height % 2), mode="constant")
    x = self.last(torch.nn.functional.layer_norm(self.first(x), (CHANNELS,)) * 2)
    return (x.transpose(1, 2) + 1).transpose(1, 2)[:, :height, :width]


PICTURES = ((2, 4, 6), (2, 3, 6), (2, 4, 5), (2, 7, 9), (3, 8, 4))


@pytest.mark.parametrize("behind", [lambda x: x, lambda x: -x, lambda x: (-x[:, :2]) * 0.5], ids=["", "neg", "several"])
def test_padding_is_no_other_plan(behind: Any):
    """The crop at the end is one operation at every size, also where something is computed after it."""
    calls = [(rand(*size, CHANNELS),) for size in PICTURES]
    outlines = reuse(lambda self, x: behind(padded(self, x)), *calls)
    assert outlines.reused == len(PICTURES) - 1 and not outlines.misfits


def test_tensors_without_elements_are_right():
    """Whatever is computed of no rows, and reshaped."""

    def empty(self: Model, x: Tensor, y: Tensor) -> Tensor:
        y = (self.first(y * 2) + 1).reshape(len(y), -1, 4, CHANNELS // 4).transpose(1, 2).reshape(len(y), -1, CHANNELS)
        y = torch.nn.functional.layer_norm(torch.cat((y, -y), 1), (CHANNELS,)) * 2
        return self.last(torch.cat((y, x.cos()), 1)) * 3

    lengths = (3, 0), (4, 0), (3, 2), (5, 0), (2, 3), (4, 1)
    for order in (lengths, lengths[::-1]):
        reuse(empty, *((rand(2, t, CHANNELS), torch.randn(2, u, CHANNELS)) for t, u in order))


@pytest.mark.parametrize(
    "cut",
    [
        lambda x, rows: x[:, 1:][:, :rows],  # from somewhere else
        lambda x, rows: x[:, :rows].sum(1),  # computed with others
        lambda x, rows: (x[:, :rows], -x[:, :rows]),
        lambda x, rows: (half := x[:, :rows], half * 2, half[:, :1]),  # read on the way
        lambda x, rows: (half := (-x[:, :rows])[:, :2], half[..., 1:] * 2 + 1),  # a view of what was computed is read
    ],
)
def test_other_crops_give_the_same(cut: Any):
    def forward(self: Model, x: Tensor, y: Tensor) -> Any:
        return cut(self.last(self.first(x) * 2), y.shape[1])

    reuse(forward, *((rand(2, length, CHANNELS), rand(2, rows)) for length, rows in ((6, 6), (6, 4), (5, 2))))


def test_lengths_that_were_equal_by_chance_may_differ():
    """Two prompts of one length at the first size have lengths of their own: a later size may differ in them."""

    def joined(self: Model, x: Tensor, y: Tensor) -> Tensor:
        return self.last(torch.nn.functional.layer_norm(torch.cat((x, y), 1), (CHANNELS,)) * 2 + self.first(x[:, :1]))

    calls = [(rand(2, t, CHANNELS), rand(2, u, CHANNELS)) for t, u in ((4, 4), (4, 6), (9, 3), (5, 5))]
    assert reuse(joined, *calls).reused == 3


def test_two_streams_that_were_equally_long_by_chance():
    """Text and picture of one length run one kernel with the same numbers; with one row, nothing but these differs."""

    def streams(self: Model, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        normed = [torch.nn.functional.layer_norm(layer(z) * gate, (CHANNELS,)) * (1 + gate)
                  for layer, z in ((self.first, x), (self.last, y))]  # fmt: skip
        return self.first(normed[0]).amax(1, keepdim=True) + self.last(normed[1])

    lengths = ((20, 20), (20, 40), (40, 20), (33, 7), (9, 9), (20, 20))
    calls = [(rand(1, t, CHANNELS), rand(1, u, CHANNELS), rand(1, 1, CHANNELS)) for t, u in lengths]
    outlines = reuse(streams, *calls)
    assert outlines.reused == 4 and "lengths of groups that share a kernel" in outlines.misfits


def test_one_picture_hides_that_a_weight_has_none_per_picture():
    """Of one picture the sum is torch's own kernel, of several it reads the weight for each: ours from the first on."""

    def shifted(self: Model, x: Tensor) -> Tensor:
        return self.last(self.first(x) + self.first.bias[None])

    model, known = Model(shifted), []
    for b in (1, 2, 3):
        program = Program(tape_of(model, rand(b, CHANNELS))[1], fuse=True)
        known.append({launch.source.text for launch in program.launches})
    assert known[0] and known[0] == known[1] == known[2]


def test_a_size_that_does_not_fit_is_planned_as_it_was_recorded():
    """With one row joining tokens copies nothing but in a plan, which is undone where it turns out not to fit."""

    def streams(self: Model, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        normed = [torch.nn.functional.layer_norm(layer(z) * gate, (CHANNELS,)) * (1 + gate)
                  for layer, z in ((self.first, x), (self.last, y))]  # fmt: skip
        tokens = self.first(normed[0]).transpose(0, 1).reshape(-1, CHANNELS)
        return self.first(tokens * 2 + 1).amax(0) + self.last(normed[1])

    lengths = ((20, 20), (20, 40), (40, 20), (33, 7), (9, 9), (11, 12))
    calls = [(rand(1, t, CHANNELS), rand(1, u, CHANNELS), rand(1, 1, CHANNELS)) for t, u in lengths]
    outlines = reuse(streams, *calls)
    assert outlines.reused == 4 and [len(known.singles) for known in outlines._known] == [1, 1]
    assert set(outlines.misfits) == {"lengths of groups that share a kernel"}


@pytest.mark.parametrize("alone", [False, True])
def test_elements_further_apart_than_32_bits_count(alone: bool, tmp_path: Path):
    """Their kernels count in 64 bits, whatever size the source was first made at; no others do."""

    def normed(self: Model, x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x * 3 + 1, (CHANNELS,)) * (1 + y[:, None])

    memory = torch.from_file(str(tmp_path / "hole"), True, 2**31 + 4 * CHANNELS, dtype=torch.bfloat16)
    model, outlines = Model(normed), None if alone else Outlines()
    for apart in (CHANNELS + 8, 2**30, CHANNELS + 16, 2**30 + 8):
        x = memory.as_strided((2, 3, CHANNELS), (CHANNELS, apart, 1) if apart > 2**29 else (3 * apart, apart, 1))
        x.copy_(rand(2, 3, CHANNELS))
        given = x, rand(2, CHANNELS).bfloat16()
        out, tape = tape_of(model, *given)
        program = Program(tape, fuse=True, outlines=outlines)
        reading = [launch for launch in program.launches if tape.inputs[0] in launch.operands]
        assert reading and all(launch.source.large == (apart > 2**29) for launch in reading)
        program.bind(model)
        assert (program.run(given) - out).norm() <= 1e-2 * out.norm()
    assert alone or outlines.reused == 2


def test_more_elements_than_32_bits_count(monkeypatch: pytest.MonkeyPatch):
    """As if 32 bits held less, so that a test holds them."""
    from anyshape.accel.tape import values

    monkeypatch.setattr(values, "LARGE", 2000)
    calls = [(rand(2, t, CHANNELS), rand(2, CHANNELS)) for t in (9, 20, 7, 33, 8)]
    outlines = reuse(modulated, *calls)
    assert outlines.reused == 3 and set(outlines.misfits) == {"how many elements"}


def test_an_input_that_lies_otherwise():
    def wide(t: int) -> Tensor:
        return rand(2, t, 2 * CHANNELS)[..., :CHANNELS]

    def summed(self: Model, x: Tensor, y: Tensor) -> Tensor:
        return self.last(torch.nn.functional.layer_norm(x * 3 + 1, (CHANNELS,)) * (1 + y[:, None]))

    y = rand(2, CHANNELS)
    outlines = reuse(summed, (rand(2, 9, CHANNELS), y), (wide(9), y), (wide(7), y), (rand(2, 6, CHANNELS), y))
    assert outlines.reused == 2 and set(outlines.misfits) == {"how a value lies"}


def test_another_operation_or_one_more():
    def by_size(self: Model, x: Tensor, y: Tensor) -> Tensor:
        z = x.sigmoid() if x.shape[1] % 2 else x.tanh()
        z = z * 2 if x.shape[1] > 20 else z
        return self.last(self.first(z) * (1 + y[:, None]) + x)

    calls = [(rand(2, t, CHANNELS), rand(2, CHANNELS)) for t in (9, 8, 30, 7, 6, 32)]
    outlines = reuse(by_size, *calls)
    assert outlines.reused == 3
    assert set(outlines.misfits) == {"another function", "how many operations"}


def test_a_number_that_follows_from_the_size():
    """A scale of the token count is written into the kernel's arguments, so it must be the same."""

    def scaled(self: Model, x: Tensor, y: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) * x.shape[1] ** 0.5) * (1 + y[:, None]) + x)

    calls = [(rand(b, t, CHANNELS), rand(b, CHANNELS)) for b, t in ((2, 9), (2, 7), (3, 9))]
    outlines = reuse(scaled, *calls)
    assert outlines.reused == 1 and "arguments of a kernel's operation" in outlines.misfits


def test_where_a_cut_begins():
    def cut(self: Model, x: Tensor, y: Tensor) -> Tensor:
        half = x.shape[1] // 2
        return self.last(torch.nn.functional.silu(x[:, half:] * 2) * (1 + y[:, None]) + x[:, 2 : x.shape[1] - half + 2])

    calls = [(rand(2, t, CHANNELS), rand(2, CHANNELS)) for t in (12, 30, 8)]
    assert reuse(cut, *calls).reused == 2


def test_more_than_there_are_from_the_end():
    """Of one frame the last two are that frame, as a video VAE keeps them for its next call."""

    def last_two(self: Model, x: Tensor, y: Tensor) -> Tensor:
        z = torch.nn.functional.silu(self.first(x) * 2 + y[:, None])
        return self.last(z[:, -2:] * 3 + 1)

    calls = [(rand(b, t, CHANNELS), rand(b, CHANNELS)) for b, t in ((2, 1), (2, 2), (2, 5), (3, 1), (2, 9))]
    assert reuse(last_two, *calls).reused == 2


def test_parts_that_are_stored_where_a_join_lies():
    def parts(self: Model, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.first(x), self.last(x)
        return torch.cat((a.sigmoid() * 2, b * a.tanh()), -1)

    calls = [(rand(2, t, CHANNELS), rand(2, CHANNELS)) for t in (9, 7, 33)]
    outlines = reuse(parts, *calls)
    assert outlines.reused == 2
    assert [step[0] for step in outlines._known[0].steps if step[0] in ("join", "part")] == ["join", "part", "part"]


def test_what_torch_runs_lies_as_its_readers_expect():
    """Its argument is a kernel's, which stores in order; recorded it had its channels first, and so had the result."""

    def stepping(self: Model, x: Tensor) -> Tensor:
        y = (x.transpose(1, 2) * 2 + 1)[:, ::2] + 1  # no kernel takes every other token
        return torch.nn.functional.layer_norm(self.first(y) * 3 + y, (CHANNELS,))

    def residual(self: Model, x: Tensor) -> Tensor:
        y = x.transpose(1, 2) * 2 + 1
        y = y + self.first(y)  # torch adds as fast
        return torch.nn.functional.layer_norm(self.last(y) * 3 + y, (CHANNELS,))

    calls = [(rand(b, CHANNELS, t),) for b, t in ((2, 10), (3, 8), (2, 14))]
    assert reuse(stepping, *calls).reused == reuse(residual, *calls).reused == 2


def test_what_is_computed_once_of_a_view_of_what_is_computed_here():
    """The cosine comes before the kernel that stores its argument, so it computes that itself."""

    def turned(self: Model, x: Tensor, y: Tensor) -> Tensor:
        z = x + y
        return z * 2, torch.cos(z[:, None]) + self.first.weight[:3, :1], z[:, None]

    calls = [(rand(b, CHANNELS), rand(b, CHANNELS)) for b in (5, 3)]
    model = Model(turned)
    for given in calls:
        out, tape = tape_of(model, *given)
        program = Program(tape, fuse=True)
        program.bind(model)
        assert all(torch.allclose(mine, wanted) for mine, wanted in zip(program.run(given), out, strict=True))


def test_what_was_a_copy_is_one():
    """What a kernel stores lies in order already, but the original is read after something wrote into the copy."""

    def writing(self: Model, x: Tensor) -> Tensor:
        y = x.transpose(1, 2) * 2 + 1
        z, copy = self.first(y), y.contiguous()
        copy.view(copy.shape[0], -1).mul_(2)
        return torch.nn.functional.layer_norm(copy * 2 + z, (CHANNELS,)) + y

    calls = [(rand(b, CHANNELS, t),) for b, t in ((2, 10), (3, 8))]
    assert reuse(writing, *calls).reused == 1


def test_parts_of_a_join_that_was_no_kernel():
    """Sums over rows of two lengths are two kernels; what was prepared for one of both is forgotten."""

    def joined(self: Model, x: Tensor, y: Tensor) -> Tensor:
        z = torch.nn.functional.layer_norm(self.first(x) * (1 + y[:, None]), (CHANNELS,))
        half = torch.nn.functional.layer_norm(z[..., : CHANNELS // 2], (CHANNELS // 2,))
        return torch.cat((half, z), 2)

    calls = [(rand(b, t, CHANNELS), rand(b, CHANNELS)) for b, t in ((2, 9), (2, 7), (3, 4))]
    assert reuse(joined, *calls).reused == 2


def test_a_few_outlines_are_kept():
    """The one that served last stays in front, what was not needed for long goes."""
    from anyshape.accel.tape.reuse import MAX_OUTLINES

    def repeated(self: Model, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(x.shape[1]):
            x = x * (1 + y[:, None])
        return self.last(x)

    calls = [(rand(2, t, CHANNELS), rand(2, CHANNELS)) for t in range(2, MAX_OUTLINES + 4)]
    outlines = reuse(repeated, *calls, calls[-2], calls[0])
    assert outlines.reused == 1 and len(outlines._known) == MAX_OUTLINES
