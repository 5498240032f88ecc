"""comfy-kitchen's operations in a tape: what they mean in plain torch, to the bit, and where they give way to it."""

import inspect

import pytest
import torch
from torch import nn

from tools import embed

embed.bare_pack()
pytest.importorskip("comfy_kitchen")

from anyshape.accel.tape import rules  # noqa: E402 - the package exists from the line above on
from anyshape.accel.tape.program import Program  # noqa: E402
from anyshape.accel.tape.record import Recorder, record  # noqa: E402
from anyshape.accel.tape.rules import kitchen  # noqa: E402
from comfy_kitchen.backends.eager import rope  # noqa: E402

CPU = torch.device("cpu")
TURNS = [name for name in kitchen.TABLE if name not in kitchen.MODULATED]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # a program's, whose kernels run in Triton's interpreter
ops = torch.ops.comfy_kitchen
ROUNDS_LESS = "addcmul" in inspect.getsource(rope)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table(tokens, channels, heads_first=True, dtype=torch.float32):
    """Rotations, [1, 1, N, D / 2, 2, 2] or [1, N, 1, D / 2, 2, 2]."""
    angles = torch.outer(torch.arange(tokens), 0.9 ** torch.arange(channels // 2))
    made = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).unflatten(-1, (2, 2))
    return made[None, None].to(dtype) if heads_first else made[None, :, None].to(dtype)


def given(name, dtype, heads_first=True, tokens=7, channels=12):
    """Arguments of an operation: q and k are parts of one projection, as in ComfyUI's models."""
    width = 3 * channels
    qkv = randn(2, tokens, 3 * width, dtype=dtype).unflatten(-1, (3, 3, channels))
    q, k, _ = (x.transpose(1, 2) if heads_first else x for x in qkv.unbind(2))
    scales = [1 + 0.1 * randn(channels, dtype=dtype, seed=seed) for seed in (1, 2)]
    turns = table(tokens, channels, heads_first)
    if name.endswith("1"):
        return [q, turns] + (scales[:1] if "rms" in name else [])
    return [q, k, turns] + (scales if "rms" in name else [])


def operation(name):
    return getattr(ops, name)


def same(name, mine, wanted):
    """To the bit; but for halves where the library's torch code adds a product without rounding it first (0.2.40)."""
    step = 4 * torch.finfo(mine.dtype).eps
    near = ROUNDS_LESS and "half" in name and torch.allclose(mine, wanted, rtol=step, atol=step)
    return near or torch.equal(mine, wanted)


def outputs(out):
    return list(out) if isinstance(out, (tuple, list)) else [out]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TURNS)
def test_what_an_operation_means(name, dtype):
    """To the bit, in both orders of heads and tokens, with a table for more tokens, with and without the last ones."""
    cases = [given(name, dtype, heads_first) for heads_first in (True, False)]
    cases += [given(name, dtype, tokens=1), given(name, dtype, channels=2)]
    if "half" not in name:  # only there the library cuts on a CPU as well
        longer = given(name, dtype)
        longer[[x.ndim for x in longer].index(6)] = table(9, 12)
        cases.append(longer)
    if name.startswith("rms") and not name.endswith("1"):
        cases += [[*given(name, dtype)[:4], None, 1e-3]]
    if name == "rms_rope_split_half":
        cases += [[*given(name, dtype)[:2], table(7, 8), *given(name, dtype)[3:], 1e-6, 8]]
    for args in cases:
        with torch.inference_mode():
            for out, wanted in zip(outputs(kitchen.TABLE[name](*args)), outputs(operation(name)(*args)), strict=True):
                assert out.dtype == wanted.dtype == dtype and same(name, out, wanted)


class Model(nn.Module):
    """An operation of the library's, with something that fuses before and behind it, or with nothing.

    turns: the table, if it is not made for each size, as models make it.
    """

    def __init__(self, name, dtype, alone=False):
        super().__init__()
        self.name, self.alone = name, alone
        self.weights = nn.ParameterList(nn.Parameter(x, False) for x in given(name, dtype) if x.ndim == 1)
        self.lin = nn.Linear(36, 108, bias=False, dtype=dtype).requires_grad_(False)

    def forward(self, x, turns=None):
        q, k, v = self.lin(x).unflatten(-1, (3, 3, 12)).permute(2, 0, 3, 1, 4)
        turns = table(x.shape[1] * (1 if self.alone else 2), 12) if turns is None else turns
        if not self.alone:
            q, k = torch.cat([q, q * 2], 2), torch.cat([k, k + 1], 2)
        given = (q, turns) if self.name.endswith("1") else (q, k, turns)
        out = outputs(operation(self.name)(*given, *self.weights))
        if self.alone:
            return out[0].transpose(1, 2) @ v.transpose(1, 2).mT
        return [x.transpose(1, 2).flatten(2) * 0.5 for x in out]


def taped(model, *given):
    recorder = Recorder(list(given), model, CPU)
    out, tape = record(lambda: model(*given), recorder)
    assert tape is not None, recorder.refusal
    return outputs(out), tape


def calls(tape):
    return [op.func._schema.name for op in tape.operations if op.func._schema.name.startswith("comfy_kitchen")]


def ran(model, tape, given, fuse):
    with torch.inference_mode():
        program = Program(tape, fuse)
        program.bind(model)
        return outputs(program.run(list(given))), program


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("name", TURNS)
def test_it_fuses_with_its_neighbours(name, dtype):
    """Recorded as it is; by the rule it becomes part of a kernel with the joins before and the product behind it."""
    torch.manual_seed(0)
    model, args = Model(name, dtype), (randn(2, 5, 36, dtype=dtype),)
    out, tape = taped(model, *args)
    assert calls(tape) == [f"comfy_kitchen::{name}"]
    for fuse in (False, True):
        for mine, eager in zip(ran(model, tape, args, fuse)[0], out, strict=True):
            assert torch.equal(mine, eager) or fuse
    before = ran(model, tape, args, True)[1].report
    assert kitchen.decompose(tape) == "" and calls(tape) == []
    assert all(any(not value.is_constant for value in op.inputs) for op in tape.operations)  # no part of the table
    plain, _ = ran(model, tape, args, False)
    fused, program = ran(model, tape, args, True)
    for mine, other, eager in zip(plain, fused, out, strict=True):
        assert same(name, mine, eager)
        assert (other.float() - eager.float()).norm() <= CLOSE[dtype] * eager.float().norm()
    assert program.report.calls < before.calls and program.report.fused > before.fused
    assert program.report.kernels <= before.kernels


@pytest.mark.parametrize("name", TURNS)
def test_a_table_from_outside(name):
    """An input, as a block is given it. Other tokens and batches need no other kernels."""
    sources = []
    for rows, tokens in ((2, 5), (1, 7), (3, 6)):
        model, args = Model(name, torch.float32), (randn(rows, tokens, 36), table(2 * tokens, 12))
        out, tape = taped(model, *args)
        kitchen.decompose(tape)
        assert calls(tape) == []
        for fuse in (False, True):
            found, program = ran(model, tape, args, fuse)
            for mine, eager in zip(found, out, strict=True):
                assert torch.allclose(mine, eager, atol=1e-5) and (fuse or same(name, mine, eager))
        sources.append({launch.source.text for launch in program.launches})
    if name.startswith("rms"):  # of others, rows of one table and of one per picture are told apart by their number
        assert sources[0] == sources[1] == sources[2] and program.report.kernels == len(out)


def test_results_lie_in_memory_as_the_operation_lays_them(monkeypatch):
    """On a GPU they follow their arguments: [B, H, N, D] with tokens first. What reads them relies on that."""

    def impl(xq, xk, freqs_cis):
        return tuple(torch.empty_like(x).copy_(rope.apply_rope1(x, freqs_cis)) for x in (xq, xk))

    class Parts(Model):
        def forward(self, x, turns):
            q, k, v = self.lin(x * 2).unflatten(-1, (3, 3, 12)).permute(2, 0, 3, 1, 4)
            q, k = operation("apply_rope")((q + v).transpose(1, 2).contiguous().transpose(1, 2), k + 0, turns)
            assert not q.is_contiguous()
            return [q.transpose(1, 2).view(2, 5, 36).sigmoid(), (k * 0.5).transpose(1, 2)]

    monkeypatch.setattr(rope.registry, "get_implementation", lambda name, kwargs: impl)
    model, args = Parts("apply_rope", torch.float32), (randn(2, 5, 36), table(5, 12))
    out, tape = taped(model, *args)
    kitchen.decompose(tape)
    assert calls(tape) == []
    for fuse in (False, True):
        for mine, eager in zip(ran(model, tape, args, fuse)[0], out, strict=True):
            assert torch.allclose(mine, eager, atol=1e-5) and (fuse or torch.equal(mine, eager))


def alone(name, made_inside):
    """(a model of one call between products and attention, its arguments); perhaps its forward makes the table."""
    turned = table(5, 12)
    model, args = Model(name, torch.float32, alone=True), (randn(2, 5, 36), turned)
    if made_inside:
        own = model.forward
        model.forward = lambda x, turns: own(x, torch.stack([turns[..., 0] * 0.5, turns[..., 1] * 0.5], -1) * 2)
    return model, args


@pytest.mark.parametrize("made_inside", [False, True])
def test_alone_it_stays_one_call(made_inside):
    """Also where a kernel makes the table: that is one for all blocks."""
    model, args = alone("apply_rope", made_inside)
    out, tape = taped(model, *args)
    kitchen.decompose(tape)
    assert calls(tape) == ["comfy_kitchen::apply_rope"]
    assert torch.equal(ran(model, tape, args, False)[0][0], out[0])


@pytest.mark.parametrize("made_inside", [False, True])
def test_with_a_norm_it_is_ours_alone_too(made_inside):
    """Queries and keys are normed and turned in a kernel each, which reads them as they lie in the projection."""
    model, args = alone("rms_rope", made_inside)
    out, tape = taped(model, *args)
    kitchen.decompose(tape)
    assert calls(tape) == []
    found, program = ran(model, tape, args, True)
    assert torch.allclose(found[0], out[0], atol=1e-5) and program.report.kernels >= 1 + made_inside


def test_a_table_in_16_bits_stays_one_call_on_a_cpu():
    """There the library rounds as its kernels for a GPU do not."""
    x = randn(2, 5, 36, dtype=torch.bfloat16)
    tape = taped(Model("apply_rope", torch.bfloat16), x, table(10, 12).bfloat16())[1]
    kitchen.decompose(tape)
    assert calls(tape) == ["comfy_kitchen::apply_rope"]


class Modulated(nn.Module):
    """A sum, the library's norm with scale and shift of each picture, and a product."""

    def __init__(self, name, dtype):
        super().__init__()
        self.name = name
        self.lin = nn.Linear(48, 48, dtype=dtype).requires_grad_(False)

    def forward(self, x, scale, shift):
        x = x + self.lin(x)
        return self.lin(operation(self.name)(x, scale, shift, 1e-5)) + x


class OfABlock(Modulated):
    """The norm of a block's input comes first, and what it adds to the input last (Qwen-Image 2.1)."""

    def forward(self, x, scale, shift):
        return torch.addcmul(x, self.lin(operation(self.name)(x, scale, shift, 1e-5)), shift)


@pytest.mark.parametrize("name", kitchen.MODULATED)
def test_a_modulated_norm_of_an_input(name):
    """It goes over channels, so these are the model's: it is a kernel, the same one for other tokens."""
    torch.manual_seed(0)
    model, sources = OfABlock(name, torch.float32), []
    for tokens in (7, 12):
        args = (randn(2, tokens, 48), *modulated(torch.float32)[1:])
        out, tape = taped(model, *args)
        kitchen.decompose(tape)
        assert calls(tape) == []
        found, program = ran(model, tape, args, True)
        assert torch.allclose(found[0], out[0], atol=1e-5)
        sources.append({launch.source.text for launch in program.launches})
    assert sources[0] == sources[1]


def modulated(dtype):
    return randn(2, 7, 48, dtype=dtype), randn(2, 1, 48, dtype=dtype, seed=1), randn(2, 1, 48, dtype=dtype, seed=2)


@pytest.mark.parametrize("name", kitchen.MODULATED)
def test_a_modulated_norm(name):
    """It joins the sum before it: one kernel instead of two calls. To the bit in plain torch."""
    torch.manual_seed(0)
    model, args = Modulated(name, torch.float32), modulated(torch.float32)
    with torch.inference_mode():
        assert torch.equal(kitchen.TABLE[name](*args, 1e-5), operation(name)(*args, 1e-5))
    out, tape = taped(model, *args)
    before = ran(model, tape, args, True)[1].report
    assert kitchen.decompose(tape) == "" and calls(tape) == []
    assert torch.equal(ran(model, tape, args, False)[0][0], out[0])
    found, program = ran(model, tape, args, True)
    assert torch.allclose(found[0], out[0], atol=1e-5)
    assert program.report.calls < before.calls and program.report.kernels == 1


def test_a_modulated_norm_in_16_bits_stays_one_call_on_a_cpu():
    tape = taped(Modulated("adaln", torch.bfloat16), *modulated(torch.bfloat16))[1]
    kitchen.decompose(tape)
    assert calls(tape) == ["comfy_kitchen::adaln"]


def test_another_version_of_the_library(monkeypatch):
    """With arguments that nobody here knows."""
    monkeypatch.setitem(kitchen.TABLE, "apply_rope", lambda xq, xk, freqs_cis, interleaved: None)
    tape = taped(Model("apply_rope", torch.float32), randn(2, 5, 36), table(10, 12))[1]
    kitchen.decompose(tape)
    assert calls(tape) == ["comfy_kitchen::apply_rope"]


class InPlace(Model):
    """Queries and keys turned in place, parts of one projection, as in MiniMax H3. read: how they are read besides."""

    def __init__(self, name, read):
        super().__init__(name.removesuffix("_"), torch.float32)
        self.read = read

    def forward(self, x, turns):
        y = self.lin(x)
        q, k, v = y.unflatten(-1, (3, 3, 12)).unbind(2) if self.read == "unbound" else self.heads(y)
        before, tensors = q[:, :1], (q,) if self.name.endswith("1") else (q, k)
        operation(f"{self.name}_")(*tensors, turns, *self.weights)
        out = [q.transpose(1, 2).flatten(2) * 2 + v.transpose(1, 2).flatten(2), k[:, 1:] * v[:, 1:]]
        besides = {"a view from before": lambda: before + 1, "the whole": lambda: y + 1, "given back": lambda: q}
        return out + [besides[self.read]()] if self.read in besides else out

    def heads(self, y):
        parts = (part.view(*part.shape[:2], 3, 12) for part in y.split(36, -1))
        return [part.transpose(1, 2) for part in parts] if self.read == "heads first" else parts


READ = ("", "unbound", "heads first", "a view from before", "the whole", "given back")
IN_PLACE = [(f"{name}_", read) for name in TURNS for read in READ if read != "heads first" or name.endswith("1")]


@pytest.mark.parametrize(("name", "read"), IN_PLACE)  # the library takes no queries and keys with their heads first
def test_in_place(name, read):
    """It fuses where what it writes is read through it alone, and never at the cost of another reader."""
    torch.manual_seed(0)
    model = InPlace(name, read)
    args = randn(2, 5, 36), table(5, 12, heads_first=read == "heads first")
    tape, lean = (taped(model, *args)[1] for _ in range(2))
    assert calls(tape) == [f"comfy_kitchen::{name}"]
    lean.lean = True  # as a VAE's, where memory counts for more
    rules.apply(lean)
    assert calls(lean) == calls(tape)
    rules.apply(tape)
    assert calls(tape) == ([] if read in ("", "unbound", "heads first") else [f"comfy_kitchen::{name}"])
    given = (randn(2, 5, 36, seed=1), args[1])
    with torch.inference_mode():
        wanted = model(*given)
    for mine, eager in zip(ran(model, tape, given, True)[0], wanted, strict=True):
        assert torch.allclose(mine, eager, atol=1e-5)
