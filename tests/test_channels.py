"""Which inputs of a tape have channels that belong to the model."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools import embed

embed.bare_pack()

from anyshape.accel.tape import static_sizes  # noqa: E402 - the package exists from the line above on
from anyshape.accel.tape.program import Program  # noqa: E402
from anyshape.accel.tape.record import Recorder, record  # noqa: E402
from anyshape.accel.tape.values import Tape  # noqa: E402

WIDTH, TOKENS = 16, 16  # alike, so that one may be taken for the other


class Block(nn.Module):
    """A block whose forward is the test's."""

    def __init__(self, body) -> None:
        super().__init__()
        self.lin, self.norm, self.body = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), body
        self.row = nn.Parameter(torch.randn(WIDTH))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def recorded(body, *shape: int) -> Tape:
    model, x = Block(body), torch.randn(*(shape or (2, TOKENS, WIDTH)))
    recorder = Recorder([x], model, x.device)
    _, tape = record(lambda: model(x), recorder)
    assert tape is not None, recorder.refusal
    static_sizes.annotate(tape)
    return tape


OF_THE_MODEL = {
    "a norm": lambda self, x: self.norm(x) * 2,
    "a layer": lambda self, x: F.silu(self.lin(x)),
    "a copy that is written into": lambda self, x: self.norm(x.clone().add_(1)),
    "an activation": lambda self, x: self.lin(F.silu(x)) + 1,
    "some of the tokens": lambda self, x: self.norm(x[:, 3:]) + 1,
    "what a layer gave is added": lambda self, x: x + self.lin(torch.ones_like(x[:1])),
    "a norm without a weight, and a row of the model's": lambda self, x: F.layer_norm(x, (WIDTH,)) + x * self.row.exp(),
}
OF_THE_CALL = {
    "nothing is known": lambda self, x: F.silu(x) * 2,
    "the tokens go through a layer": lambda self, x: self.lin(x.transpose(1, 2)),
    "one channel goes through a layer": lambda self, x: self.lin(x.select(-1, 0)),
    "in another shape": lambda self, x: self.lin(x.reshape(-1, TOKENS, WIDTH)),
}


@pytest.mark.parametrize("name", OF_THE_MODEL)
def test_channels_of_the_model(name: str) -> None:
    (x,) = recorded(OF_THE_MODEL[name]).inputs
    assert [size.static for size in x.sizes] == [False, False, True]


@pytest.mark.parametrize("name", OF_THE_CALL)
def test_sizes_of_the_call(name: str) -> None:
    (x,) = recorded(OF_THE_CALL[name]).inputs
    assert not any(size.static for size in x.sizes)


def test_one_channel_for_all_of_the_models() -> None:
    """A mask, say: it is as wide as it is by chance."""
    (x,) = recorded(lambda self, x: x * self.row, 2, TOKENS, 1).inputs
    assert not any(size.static for size in x.sizes)


def test_the_first_norm_of_a_block_fuses() -> None:
    """What is modulated behind it, too; and another number of tokens needs no other kernel."""

    def body(self, x):
        return x + self.lin(self.norm(x) * (1 + self.row.exp()))

    programs = [Program(recorded(body, 1, tokens, WIDTH), fuse=True) for tokens in (7, 12)]
    for program in programs:
        assert [launch.source.name for launch in program.launches if "rms_norm" in launch.source.name]
    first, second = ({launch.source.text for launch in program.launches} for program in programs)
    assert first == second
