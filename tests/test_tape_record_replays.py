"""What a tape repeats: each replay is bit-equal to the forward, with the weights as they lie then.

Plain torch modules on the CPU, no ComfyUI.
"""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tools import embed

embed.bare_pack()

from anyshape.accel.key import shape_key  # noqa: E402 - the package exists from the line above on
from anyshape.accel.take import Taped  # noqa: E402
from anyshape.accel.tape.binding import NotBound  # noqa: E402
from anyshape.accel.tape.program import Program  # noqa: E402
from anyshape.accel.tape.record import Recorder, record  # noqa: E402
from anyshape.accel.tape.rules import edits  # noqa: E402
from anyshape.accel.tape.values import Derived, Value, Weight  # noqa: E402
from anyshape.accel.tapes import Tapes  # noqa: E402

from tools.small_forwards import CPU, inputs, module, replayed_right, taped  # noqa: E402


def slices(self, x):
    out = torch.empty_like(x)
    out[:, :2] = x[:, 2:] * 2
    out[:, 2:] = self.lin(x)[:, :2]
    return out + 1


def early_view(self, x):
    h = x * 2
    first = h[0]
    h.add_(1)
    return h + first


def write_through_a_view(self, x):
    h = x * 2
    before = h + 0
    h[1].mul_(3)
    h.view(-1)[::2].sub_(1)
    return h * before


def added_to_a_constant(self, x):
    total = torch.zeros(3, 4)
    early = total + 5
    total += x
    total += self.lin(x)
    return total * early


def constant_read_and_written(self, x):
    ramp = torch.arange(4.0)
    a = x * ramp
    ramp += 1
    return a + x * ramp


def constant_in_parts(self, x):
    out = torch.ones(3, 4)
    view = out[1:]
    out[0] = 7
    out[1, ::2] = 0.5
    y = x + view[0]
    view += x[1:]
    return out * y


def given_out(self, x):
    out = torch.empty(3, 4)
    torch.mul(x, self.scale, out=out)
    other = torch.zeros(3, 4)
    torch.add(out, x, out=other[:])
    return other - out


def rounded_in_place(self, x):
    h = x.to(torch.bfloat16)
    h += x * 0.3337  # in float32, rounded to bfloat16
    return h * 1.1


def compared_in_place(self, x):
    h = x * 1.0
    h.gt_(0.1)
    return h + 1


def turned_in_place(self, x):
    h = x * 2
    row = h[0]
    row.unsqueeze_(0)
    row.mul_(3)
    back = (x + 1).t_()
    return h + row + back.t()


def filled(self, x):
    h = x * 2
    h.masked_fill_(x > 0, -1)
    h[0] = 3
    h[:, 1:] = -0.25
    h[[1, 2]] = 2.5
    h.clamp_(min=-0.5)
    return h.copy_(h + x)


def swaps(self, x):
    a, b = (x * 1).chunk(2, dim=1)
    a.add_(b)
    b.sub_(a)
    return torch.cat((b, a), 1)


def constants_read_back(self, x):
    steps = torch.arange(x.shape[0]).tolist()
    table = torch.linspace(0, 1, 5)
    if bool((table > 0.5).any()) and torch.ones(3).nonzero().shape[0] == 3:
        return x * sum(steps) * table[3].item() + float(table.numpy()[1])
    return x


def of_sizes(self, x):
    rows, columns = x.shape
    grid = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return x + torch.stack(grid).sum(0).to(x) + self.table[: x.shape[0]] + F.pad(x, (1, 0))[:, :4]


def repeated_by_counts(self, x):
    counts = torch.tensor([1, 3, 2])
    return x.repeat_interleave(counts, 0)[:3] * torch.repeat_interleave(x, counts[:2].sum()).reshape(3, -1)[:, :4]


@pytest.mark.parametrize(
    "forward",
    [
        slices, early_view, write_through_a_view, added_to_a_constant, constant_read_and_written, constant_in_parts,
        given_out, rounded_in_place, compared_in_place, turned_in_place, filled, swaps, constants_read_back, of_sizes,
        repeated_by_counts,
    ],
)  # fmt: skip
def test_replays_as_eager(forward) -> None:
    replayed_right(forward)


def test_a_replay_knows_how_long_repeated_rows_are() -> None:
    """Otherwise it would wait for the device, which no graph may."""
    _, tape, _ = taped(module(repeated_by_counts), inputs(0))
    sizes = [each.kwargs["output_size"] for each in tape.operations if each.traits.name == "repeat_interleave"]
    assert sizes == [6, 48]


# Weights --------------------------------------------------------------------------------------------------------------


def test_weights_are_found_again_after_they_moved_and_changed() -> None:
    model = module(lambda self, x: self.lin(x) * self.scale + self.table)
    _, tape, _ = taped(model, inputs(0))
    program = Program(tape, fuse=False)
    with torch.inference_mode():
        for _ in range(2):
            model.lin.weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
            model.scale.data = torch.randn(4)
            model.table.add_(1)
            program.bind(model)
            assert torch.equal(program.run([inputs(1)]), model(inputs(1)))
        model.lin.weight = nn.Parameter(torch.randn(4, 4).half(), requires_grad=False)
        with pytest.raises(NotBound, match="lin.weight"):
            program.bind(model)
        del model.lin.weight
        with pytest.raises(NotBound, match="lin.weight"):
            program.bind(model)


def replaced_weight(model: nn.Module, name: str) -> weakref.ref:
    """Gives the model another weight of this name, as ComfyUI does it for a LoRA; what is left of the old one."""
    owner, _, own = name.rpartition(".")
    part = model.get_submodule(owner)
    old = weakref.ref(getattr(part, own))
    setattr(part, own, nn.Parameter(torch.randn(old().shape), requires_grad=False))
    gc.collect()
    return old


def test_between_two_runs_a_program_holds_weights_no_longer_than_its_model() -> None:
    model = module(lambda self, x: self.lin(x) * self.scale + self.table)
    program = Program(taped(model, inputs(0))[1], fuse=False)
    program.bind(model)
    for _ in range(2):
        program.loosen()
    assert torch.equal(program.run([inputs(1)]), model(inputs(1)))  # it runs all the same
    assert program.tighten() and torch.equal(program.run([inputs(1)]), model(inputs(1)))
    program.loosen()
    assert replaced_weight(model, "lin.weight")() is None and not program.tighten()
    program.loosen()  # which is not bound
    program.bind(model)
    assert torch.equal(program.run([inputs(1)]), model(inputs(1)))
    assert replaced_weight(model, "scale")() is not None  # in a run nothing goes


def test_what_was_made_of_weights_does_not_hold_them() -> None:
    model = module(lambda self, x: x * self.scale)
    tape = taped(model, inputs(0))[1]
    (scale,) = [value for value in tape.leaves() if isinstance(value.leaf, Weight)]
    made = Value.made(scale.shape, scale.stride, scale.dtype, CPU, Derived(torch.clone, (scale,)))
    edits.replace_inputs(tape.operations[-1], {scale: made})
    program = Program(tape, fuse=False)
    program.bind(model)
    assert torch.equal(program.run([inputs(1)]), model(inputs(1)))
    program.loosen()
    assert replaced_weight(model, "scale")() is None and not program.tighten()


class Converting(nn.Module):
    """It converts a table in its first forward, or keeps what it computes in each."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.table, self.always = torch.arange(32.0).view(8, 4), always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table.dtype != x.dtype or self.always:
            self.table = (self.table * 1).to(x.dtype)
        return x * self.table[: x.shape[0]] + 1


@pytest.mark.parametrize("always", [False, True])
def test_a_table_that_the_first_forward_converts(always) -> None:
    """The next call records the size again, once."""
    model, tapes, x = Converting(always), Tapes(), torch.randn(3, 4).bfloat16()
    taped, key = Taped(model, lambda noted: model(x), {}, 0, lambda options, recorder: None), shape_key({"x": x}, {})
    _, take, tape = tapes.record(key, True, taped, {"x": x})
    assert tape is None and "keeps" in take.reason and tapes.find(key, True, taped) is None
    _, take, tape = tapes.record(key, True, taped, {"x": x})
    assert (tape is None) == always and tapes.find(key, True, taped) is take


def test_nothing_of_ours_keeps_a_tensor_or_the_model() -> None:
    import gc
    import weakref

    model = module(lambda self, x: self.lin(x + torch.arange(4)) * self.scale)
    x = inputs(0)
    recorder = Recorder([x], model, CPU)
    out, tape = record(lambda model=model, x=x: model(x), recorder)
    program = Program(tape, fuse=False)
    del tape, recorder
    program.bind(model)
    gone = [weakref.ref(each) for each in (model, model.lin.weight, model.scale, x)]
    program.unbind()
    gc.disable()
    try:
        del model, x
        assert [each() for each in gone] == [None] * 4
    finally:
        gc.enable()
    assert not vars(out), "the result carries no mark of ours"


@pytest.mark.parametrize(
    ("forward", "kept"),
    [
        (lambda self, x: torch.mul(torch.add((h := x * 2).sin(), h, alpha=2, out=h), x, out=h) - 1, 0),
        (lambda self, x: torch.add(x, 0.3337, out=torch.empty(3, 4, dtype=torch.bfloat16)) * 3, 1),  # rounds
        (lambda self, x: torch.add(x, 1, out=torch.empty(4, 3).T).T.reshape(2, 6), 1),  # lies otherwise
        (lambda self, x: (row := (h := x * 2)[0]) + torch.add(x, 1, out=h) * row, 1),  # seen by a view
    ],
)
def test_a_result_with_a_place_becomes_a_value(forward, kept) -> None:
    """As one that is computed in place, where nobody can tell: then it may fuse, and a block may be left out."""
    replayed_right(forward)
    _, tape, _ = taped(module(forward), inputs(0))
    assert sum(operation.writes is not None for operation in tape.operations) == kept
    assert kept or not any("out" in operation.kwargs for operation in tape.operations)


# Speed ----------------------------------------------------------------------------------------------------------------

SPEED = """
import sys, time
from tools import embed
embed.bare_pack()
import torch
torch.set_num_threads(1)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from anyshape.accel.tape.record import Recorder, record

model = torch.nn.Linear(8, 8).requires_grad_(False)
def forward(x):
    for _ in range(50):
        x = torch.nn.functional.linear(x, model.weight, model.bias)
        x = x.view(2, 4, 2, 4).transpose(1, 2).reshape(2, 4, 8) * 0.1 + 1
    return x

def plain():
    with torch.inference_mode():
        started = time.thread_time()
        forward(x)
        return time.thread_time() - started

class Heard(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

def heard():
    with torch.inference_mode(), Heard(), Dispatched():
        started = time.thread_time()
        forward(x)
        return time.thread_time() - started

def recorded():
    recorder = Recorder([x], model, x.device)
    started = time.thread_time()
    _, tape = record(lambda: forward(x), recorder)
    assert len(tape.operations) == 300, recorder.refusal
    return time.thread_time() - started

x = torch.randn(2, 4, 8)
ours = min(recorded() for _ in range(8))
assert "torch._dynamo" not in sys.modules  # which the modes here import
bare = modes = float("inf")
for _ in range(24):  # by turns: another process may slow down any of them
    ours, bare, modes = min(ours, recorded()), min(bare, plain()), min(modes, heard())
print((ours - bare) / (modes - bare), (ours - bare) / 300 * 1e6)
"""


def test_one_operation_costs_microseconds_and_no_dynamo() -> None:
    """About 12 on a quiet core, of which torch takes 8 for the two modes: they are the measure, as machines differ."""
    done = subprocess.run([sys.executable, "-c", SPEED], cwd=embed.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[0]) < 3, done.stdout
