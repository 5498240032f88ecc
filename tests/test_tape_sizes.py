"""One set of kernels for every size: idioms whose shapes say less where there is one picture, one frame or one pixel.

Plain modules on the CPU; Triton's interpreter runs the kernels. Each idiom is recorded at sizes with and without ones,
smallest first: no later size may need a kernel of its own, and each is right.
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

CPU = torch.device("cpu")
CHANNELS = 64
SIZES = ((1, 1, 4, 4), (2, 3, 5, 7), (1, 4, 6, 2), (3, 1, 3, 5), (4, 4, 4, 4), (2, 2, 1, 6))  # pictures, frames, sides
TOLERANCE = 1e-5


class Idiom(nn.Module):
    """``forward`` of one of the functions below, with two layers."""

    def __init__(self, function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(CHANNELS, CHANNELS).requires_grad_(False)
        self.last = nn.Linear(CHANNELS, CHANNELS).requires_grad_(False)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 1).requires_grad_(False)
        self.function = function

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.function(self, x, y)


def frames_as_pictures(self, x, y):
    """(b t) c h w, and b t c h w again."""
    b, c, t, h, w = x.shape
    z = self.conv(x.permute(0, 2, 1, 3, 4).reshape(b * t, c, h, w))
    z = z.view(b, t, c, h, w).permute(0, 2, 1, 3, 4)
    return self.last(F.layer_norm((x + z).flatten(2).transpose(1, 2), (CHANNELS,)) * (1 + y[:, None]))


def tokens_of_all_frames(self, x, y):
    """b c t h w to b (t h w) c: a view of one frame's pixels as they come from a convolution, else a copy."""
    b, c, t, h, w = x.shape
    z = self.conv(x.permute(0, 2, 1, 3, 4).reshape(b * t, c, h, w)).reshape(b, t, c, h, w)
    z = z.permute(0, 1, 3, 4, 2).reshape(b, t * h * w, c)
    out = self.first(F.layer_norm(z, (CHANNELS,)) * (1 + y[:, None]))
    return self.last(F.layer_norm(z + out, (CHANNELS,)) * y[:, None])


def rows_with_gaps(self, x, y):
    """contiguous copies nothing where there is one row."""
    shift, scale = self.first(torch.cat((y, y), dim=0)).chunk(2, dim=0)
    parts = torch.cat((shift, scale), dim=-1).unsqueeze(1).chunk(2, dim=-1)
    shift, scale = (part.contiguous() for part in parts)
    z = self.first(x.flatten(2).transpose(1, 2))
    z = self.last(F.layer_norm(z, (CHANNELS,)) * (1 + scale) + shift)
    return F.layer_norm(z, (CHANNELS,)) * (1 + scale) + shift


def joined_and_cut(self, x, y):
    """Tokens of two kinds in one sequence, of which one goes on in frames."""
    b, c, t, h, w = x.shape
    z = torch.cat((x.flatten(2).transpose(1, 2) * 0.5, self.first(y)[:, None] + 1), dim=1)
    z = self.first(F.layer_norm(z, (CHANNELS,)) * (1 + y[:, None]))
    z = z[:, : t * h * w].reshape(b, t, h * w, c).reshape(b * t, h * w, c)
    return self.last(F.layer_norm(z, (CHANNELS,)) * 0.5 + z)


def a_time_step_per_frame(self, x, y):
    """(b t) as one, and apart again; each frame has its own scale."""
    b, c, t, h, w = x.shape
    z = self.first((x.mean((3, 4)).transpose(1, 2) * y[:, None]).flatten(0, 1)).reshape(b, t, c)
    z = (z + y[:, None]).reshape(b, t, 1, 1, c)
    return self.last(F.layer_norm(x.permute(0, 2, 3, 4, 1), (CHANNELS,)) * (1 + z) + z)


def pictures_inside(self, x, y):
    """t h w b c, as if pictures were pixels: memory in another order than the dimensions."""
    b, c, t, h, w = x.shape
    z = self.first(x.permute(0, 2, 3, 4, 1)).permute(1, 2, 3, 0, 4)
    z = z + self.last(F.layer_norm(z, (CHANNELS,)) * (1 + y))
    return F.layer_norm(z.permute(3, 0, 1, 2, 4).reshape(b, t * h * w, c), (CHANNELS,)) * (1 + y[:, None])


def filled_up(self, x, y):
    """One token of the model for each place that is left, of which there may be one; heads that are repeated once."""
    b, c, t, h, w = x.shape
    z = x.flatten(2).transpose(1, 2)
    z = torch.cat((self.first.bias[None, None].repeat(b, t, 1), z), dim=1)
    z = self.first(F.layer_norm(z, (CHANNELS,)) * (1 + y[:, None]))
    heads = torch.cat((z, z), dim=-1)[..., CHANNELS:].reshape(b, -1, 4, 16)
    heads = heads.unsqueeze(3).repeat(1, 1, 1, 1, 1).flatten(2, 3)
    return self.last(F.layer_norm(heads.flatten(2) * 2, (CHANNELS,)) + z)


IDIOMS = (
    frames_as_pictures, tokens_of_all_frames, rows_with_gaps, joined_and_cut, a_time_step_per_frame, pictures_inside,
    filled_up,
)  # fmt: skip


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
def test_a_later_size_needs_no_kernel_of_its_own(idiom):
    model, known, found = Idiom(idiom), set(), []
    for k, (b, t, h, w) in enumerate(SIZES):
        numbers = torch.Generator().manual_seed(k)
        tensors = [torch.randn(b, CHANNELS, t, h, w, generator=numbers), torch.randn(b, CHANNELS, generator=numbers)]
        recorder = Recorder(tensors, model, CPU)
        out, tape = record(lambda tensors=tensors: model(*tensors), recorder)
        assert tape is not None, recorder.refusal
        rules.apply(tape)
        program = Program(tape, fuse=True)
        program.bind(model)
        kernels = {launch.source.text for launch in program.launches}
        found.append(len(kernels - known))
        known |= kernels
        mine = program.run(tensors)
        assert mine.shape == out.shape
        assert (mine - out).norm() <= TOLERANCE * out.norm(), (b, t, h, w)
    assert found[0] > 0 and not any(found[1:]), found
