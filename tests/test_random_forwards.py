"""Chains of idioms that no model has: recorded, planned by earlier sizes, and right at each."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools import random_blocks, random_forwards
from tools.idioms import of_any, of_pictures, of_sounds, of_streams, of_tokens, of_videos
from tools.random_forwards import Draw, Link, RandomForward

pytestmark = pytest.mark.usefixtures("pack", "one_thread")


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("kind", random_forwards.IDIOMS)
def test_as_eager_at_every_size(kind, number):
    found = list(random_forwards.compared(kind, random_forwards.drawn(kind, number), number))
    assert len(found) == 3 and not any(far.is_wrong for far in found), found


@pytest.mark.parametrize("kind, number", [("tokens", 0), ("pictures", 1), ("videos", 2), ("sounds", 3)])
def test_repeated_blocks_in_the_engine(clean_stats, kind, number):
    assert list(random_blocks.wrong(number, kind)) == []


ONCE_WRONG = {
    "rows that lie once for several, at an address that is not aligned": (
        "tokens", Draw([Link(of_tokens.rotary, 3)], [(4, 1), (3, 4)], laid=3)
    ),
    "a reshape that drops what is 1 at this size alone": (
        "pictures", Draw([Link(of_any.broadcast_row)], [(2, 4, 6), (2, 1, 2), (1, 1, 1)], laid=4)
    ),
    "masked in place, while pixels lie with channels last": (
        "pictures", Draw([Link(of_pictures.layer_norm_of_pixels, 8), Link(of_any.masked)], [(2, 4, 6)])
    ),
    "masked in place, while videos lie with channels last": (
        "videos", Draw([Link(of_videos.frames_attend, 6), Link(of_any.masked)], [(1, 5, 2, 2)])
    ),
    "a convolution that looks at the stride of a dimension of 1": (
        "sounds", Draw(
            [Link(of_sounds.samples_folded), Link(of_any.stacked), Link(of_sounds.transposed, 1, 0.85, 0.94)],
            [(4, 3), (4, 1)],
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ONCE_WRONG)
def test_what_was_once_wrong(what):
    kind, draw = ONCE_WRONG[what]
    found = list(random_forwards.compared(kind, draw))
    assert len(found) == len(draw.sizes) and not any(far.is_wrong for far in found), found


class PartOfAJoin(nn.Module):
    """A norm over heads of 16 channels, its halves turned, and only the first half read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.layer(x).unflatten(-1, (2, 16)).transpose(1, 2)
        normed = (F.rms_norm(heads, (16,)) * 2).transpose(1, 2).flatten(-2)
        first, second = normed.chunk(2, dim=-1)
        return torch.cos(torch.cat([-second, first], -1)[..., :16]) + self.layer(x)[..., :16]


class LikeAnother(nn.Module):
    """A product that gets the form of what a kernel would compute, and nobody else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        product = x.flatten(0, 1) @ self.layer.weight
        return self.layer(product.view_as(F.pad(x, (0, 0, 1, 1))[:, 1:-1] + x))


class ShiftedPairs(nn.Module):
    """Pairs of channels, joined one channel further on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        even, odd = self.layer(x).unflatten(-1, (16, 2)).unbind(-1)
        pairs = torch.stack([even * 2, odd * 3], -1).flatten(-2)
        return torch.cat([pairs[..., :1], pairs[..., :-1]], -1) * 2


class ScatteredPairs(nn.Module):
    """Channels that are turned so that neighbours in memory are read by columns far from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        called = torch.addcmul(x, x, self.layer.bias, value=-0.5)  # with such a value it is no kernel's
        turned = called.unflatten(-1, (2, 4, 4)).permute(0, 3, 1, 4, 2).contiguous()
        return (turned * 1.5).permute(0, 2, 4, 1, 3).reshape(x.shape)


class ChangedPicture(nn.Module):
    """Tokens made one picture, changed in place: its stride along the batch is no new tensor's, and padding asks it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        picture = self.layer(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)
        padded = F.pad(picture.clone().add_(picture), (1, 1, 1, 1))
        return (padded + 1).contiguous().view(len(x), -1) * 2


class EverySecond(nn.Module):
    """Every second of one row, which is that row, but by its strides for a picture whose channels lie last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        picture = self.layer(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)
        large = F.interpolate(picture[:, :, ::2, ::2], size=x.shape[-2:], mode="nearest") * x
        large[:, :16] *= 1.2
        return large * 2


class PadOfNothing(nn.Module):
    """Some channels, copied by padding that adds nothing, because others view what is copied."""

    def forward(self, x: Tensor) -> Tensor:
        some = torch.cat([x * 2, x], 1).cumsum(1)[:, 16:-16]
        patches = F.pad(some, (0, 0, 0, 0)).view(len(x), -1, 1, 2, 1, 2)
        return patches.permute(0, 1, 3, 5, 2, 4) * 1.1


class AskedBeside(nn.Module):
    """A join of halves of heads, within joins that ask it for channels which it never gives."""

    def __init__(self) -> None:
        super().__init__()
        first = [Link(of_tokens.rotary), Link(of_streams.table_of_modulation)]
        second = [Link(of_any.guided), Link(of_tokens.written_channels), Link(of_streams.turned_by_cat)]
        chains = [first, second, [Link(of_streams.turned_by_cat)], [Link(of_tokens.complex_rotary)]]
        self.parts = nn.ModuleList(RandomForward("tokens", Draw(chain, [], results=2)) for chain in chains)

    def forward(self, x: Tensor) -> Tensor:
        before, *blocks, after = self.parts
        x, y = before(x, x * 0.5, vector := x[:, 0, :24])
        for block in blocks:
            x.add_(block(x, y, vector)[-1].tanh(), alpha=0.1)
        return after(x, y, vector)[-1]


class JoinedAgain(nn.Module):
    """Joins within joins, each read by the next at three places: the lines of one kernel would double with each."""

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for _ in range(18):
            y = torch.cat([torch.cat([y[:, :1] * y[:, :1], y[:, 1:] + 1], 1) * y, x], 1)[:, : x.shape[1]].tanh()
        return y


class LongAndNormed(nn.Module):
    """A norm of whole rows, and a chain that reads it."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.wide, self.norm = nn.Linear(8, columns), nn.RMSNorm(columns)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(x)
        y = self.norm(x)
        for _ in range(40):
            y = y * torch.sigmoid(y) + x
        return y


class ReadTwice(nn.Module):
    """A long chain, each value of which is read twice by the next, to something that no kernel computes."""

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for _ in range(30):
            y = y * torch.sigmoid(y) + y
        return y.cumsum(1)


def programmed(model: nn.Module, x: Tensor, fuse: bool = True):
    """(its program, whether that gives what eager gives)."""
    from anyshape.accel.tape import rules
    from anyshape.accel.tape.program import Program

    from tools.small_forwards import taped

    with torch.inference_mode():
        out, tape, refusal = taped(model, x)
        assert tape is not None, refusal
        if fuse:
            rules.apply(tape)
        program = Program(tape, fuse)
        program.bind(model)
        return program, torch.allclose(program.run([x]), out, atol=1e-5)


def test_what_a_join_never_gives_is_not_read():
    """The row before the first would lie beside the tensor's memory."""
    program, right = programmed(PartOfAJoin(), torch.randn(2, 3, 32))
    assert any("cat" in launch.source.name for launch in program.launches) and right


def test_what_another_tensor_is_like_is_there():
    """Though a view of something else is all that asks for it."""
    _, right = programmed(LikeAnother(), torch.randn(2, 3, 32))
    assert right


@pytest.mark.parametrize("kind", [ShiftedPairs, ScatteredPairs])
def test_pairs_that_do_not_begin_at_even_places(kind):
    """A place before a join's part is negative: its half is not that of what it is counted from."""
    program, right = programmed(kind(), torch.randn(2, 3, 32))
    assert program.launches and right


@pytest.mark.parametrize("fuse", [False, True])
def test_one_picture_that_was_changed_in_place(fuse):
    _, right = programmed(ChangedPicture(), torch.randn(1, 32, 5, 3), fuse)
    assert right


@pytest.mark.parametrize("model, size", [(EverySecond, (2, 32, 1, 2)), (PadOfNothing, (3, 32, 2, 2))])
def test_what_is_copied_by_a_rule_lies_as_the_copy_did(model, size):
    """Or the copy stays."""
    _, right = programmed(model(), torch.randn(size))
    assert right


@pytest.mark.parametrize("shape", [(1, 32, 1, 1), (4, 1, 1), (1, 32, 5, 3), (2, 1, 3)])
@pytest.mark.parametrize("places", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0), (1, 2, 0, 3)])
def test_strides_that_new_memory_might_not_have(pack, shape, places):
    """Those that one of two operations of torch's does not give back."""
    from anyshape.accel.tape.layout import dense, lies_oddly

    given = torch.empty_strided(shape, dense(shape, [d for d in places if d < len(shape)]))
    kept = all((given + other).stride() == given.stride() for other in (1, given))
    assert kept or lies_oddly(shape, given.stride())
    assert not lies_oddly(shape, torch.empty(shape).stride())


def test_what_a_join_never_gives_is_asked_for():
    program, right = programmed(AskedBeside(), torch.randn(1, 9, 32))
    assert program.launches and right


@pytest.mark.parametrize("model", [JoinedAgain, ReadTwice])
def test_a_chain_is_planned_in_a_time_that_does_not_double_with_its_length(model):
    from anyshape.accel.tape.kernel_lines import MOST_LINES

    program, right = programmed(model(), torch.randn(2, 5, 32))
    assert program.launches and right
    assert all(launch.source.text.count("\n") < 2 * MOST_LINES for launch in program.launches)


@pytest.mark.parametrize("model, width", [(JoinedAgain, ()), (LongAndNormed, (512,)), (LongAndNormed, (5120,))])
def test_the_longer_a_kernel_the_fewer_elements_has_each_thread(model, width):
    """ptxas took minutes for 300 lines with 32 elements."""
    program, right = programmed(model(*width), torch.randn(2, 5, 8))
    sources = [launch.source for launch in program.launches]
    assert right and sources
    for source in sources:
        lines, elements = source.text.count("\n"), source.rows * source.columns // (32 * source.warps)
        assert lines <= 100 or elements <= 4, (source.name, lines, elements)
