"""Small torch modules whose forward is a function of the test's own, and what the recorder makes of them."""

from collections.abc import Callable
from typing import Any

import torch
from anyshape.accel.tape.program import Program
from anyshape.accel.tape.record import Recorder, record
from anyshape.accel.tape.values import Tape
from torch import Tensor, nn

CPU = torch.device("cpu")
Forward = Callable[..., Any]  # (self, x)


def module(forward: Forward, **attributes: Any) -> nn.Module:
    """A module of two weights, a buffer and a plain number whose forward is ``forward(self, x)``."""
    torch.manual_seed(0)
    made = type("Model", (nn.Module,), {"forward": forward, "__module__": forward.__module__})()
    made.lin = nn.Linear(4, 4).requires_grad_(False)
    made.scale = nn.Parameter(torch.randn(4), requires_grad=False)
    made.register_buffer("table", torch.randn(3, 4))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def inputs(seed: int = 0, *shape: int) -> Tensor:
    """Random numbers, 3 x 4 where no shape is given."""
    return torch.randn(shape or (3, 4), generator=torch.Generator().manual_seed(seed))


def taped(model: nn.Module, *tensors: Tensor) -> tuple[Any, Tape | None, str]:
    """(the forward's result, tape or None, why not)."""
    recorder = Recorder(list(tensors), model, tensors[0].device)
    out, tape = record(lambda: model(*tensors), recorder)
    return out, tape, recorder.refusal


def replayed_right(forward: Forward, whose: str = "", **attributes: Any) -> None:
    """Records ``forward`` on one input, and compares replays on others with eager, bit by bit.

    whose: the module of its class; where it is not said, the one that ``forward`` is of.
    """
    model = module(forward, **attributes)
    type(model).__module__ = whose or type(model).__module__
    out, tape, why = taped(model, inputs(0))
    assert tape is not None, why
    program = Program(tape, fuse=False)
    program.bind(model)
    with torch.inference_mode():
        for seed in (0, 1, 2):
            x = inputs(seed)
            wanted, found = model(x.clone()), program.run([x])
            assert found.dtype == wanted.dtype and torch.equal(found, wanted), seed
        assert torch.equal(program.run([inputs(0)]), out)
