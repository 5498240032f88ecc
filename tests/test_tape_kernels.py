"""What generated kernels read, compute and store, on small blocks of plain torch. CPU, in Triton's interpreter.

Each block runs fused at sizes that it was not recorded at, odd ones included, and is compared with eager.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools import embed

embed.bare_pack()

from anyshape.accel.tape import rules  # noqa: E402 - the package exists from the line above on
from anyshape.accel.tape.program import Program  # noqa: E402
from anyshape.accel.tape.record import Recorder, record  # noqa: E402

CPU = torch.device("cpu")
HEADS, WIDTH = 4, 32
CHANNELS = HEADS * WIDTH
SIZES = ((1, 5), (2, 7), (1, 16), (3, 1))  # rows and tokens
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


class Block(nn.Module):
    """Norm, rotary embedding, attention and a gate, as transformers of ComfyUI's have them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS, dtype=dtype)
        self.out = nn.Linear(CHANNELS, CHANNELS, dtype=dtype)
        self.mod = nn.Linear(CHANNELS, CHANNELS, dtype=dtype)
        self.scale = nn.Parameter(torch.randn(WIDTH, dtype=dtype))
        self.requires_grad_(False)

    def rotary(self, tokens: int) -> Tensor:
        """[1, 1, tokens, WIDTH / 2, 2, 2] in float32."""
        angles = torch.arange(tokens, dtype=torch.float32)[:, None] * torch.arange(1.0, WIDTH // 2 + 1) / 10
        cos, sin = torch.cos(angles), torch.sin(angles)
        return torch.stack([cos, -sin, sin, cos], -1).view(1, 1, tokens, WIDTH // 2, 2, 2)

    def turned(self, x: Tensor, table: Tensor) -> Tensor:
        """Rotary embedding in interleaved pairs, of normed heads."""
        pairs = F.rms_norm(x, (WIDTH,), self.scale, 1e-6).float().reshape(*x.shape[:-1], -1, 1, 2)
        return (table[..., 0] * pairs[..., 0] + table[..., 1] * pairs[..., 1]).reshape(x.shape).type_as(x)

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        rows, tokens = x.shape[:2]
        q, k, v = self.qkv(x).view(rows, tokens, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        table = self.rotary(tokens)
        out = F.scaled_dot_product_attention(self.turned(q, table), self.turned(k, table), v)
        out = self.out(out.transpose(1, 2).reshape(rows, tokens, CHANNELS))
        return x + torch.tanh(self.mod(vec).unsqueeze(1)) * F.rms_norm(out, (CHANNELS,))


def inputs(rows: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 100 + tokens)
    shapes = (rows, tokens, CHANNELS), (rows, CHANNELS)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def programmed(model: nn.Module, given: tuple[Tensor, ...], rule: Callable = rules.apply) -> Program:
    recorder = Recorder(list(given), model, CPU)
    _, tape = record(lambda: model(*given), recorder)
    assert tape is not None, recorder.refusal
    rule(tape)
    program = Program(tape, fuse=True)
    program.bind(model)
    return program


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def found(request) -> dict[tuple[int, int], Program]:
    """The block's program at each size, compared with eager."""
    model, programs = Block(request.param), {}
    for size in SIZES:
        programs[size] = programmed(model, inputs(*size, request.param))
        again = inputs(size[0], size[1], request.param)
        given = tuple(torch.roll(each, 1, 0) + 0.5 for each in again)  # not what was recorded
        with torch.inference_mode():
            wanted, out = model(*given), programs[size].run(list(given))
        assert (out - wanted).float().norm() / wanted.float().norm() < BOUND[request.param], size
    return programs


def launches(program: Program, word: str) -> list:
    return [launch for launch in program.launches if word in launch.source.name]


def test_every_size_is_right_with_the_kernels_of_the_first(found) -> None:
    texts = [{launch.source.text for launch in program.launches} for program in found.values()]
    assert texts[0] and set.union(*texts) == texts[0]


def test_a_rotary_table_is_read_once_and_as_it_lies(found) -> None:
    """Cosines and sines lie side by side: one read for both, of a pointer that begins where the table does."""
    for program in found.values():
        rotary = launches(program, "rms_norm")
        parts = [value for launch in rotary for value in launch.operands if value.shape[-2:] == (WIDTH // 2, 2)]
        turning = [launch for launch in rotary if any(value.shape[-2:] == (WIDTH // 2, 4) for value in launch.operands)]
        assert turning and not parts
        assert all(launch.source.text.count("mask=ccmask") == 1 for launch in turning)


def test_heads_that_lie_apart_in_a_rotary_table(pack) -> None:
    """LTX-Video: a norm over all heads, whose rows are longer than the table's. Right, and one read again."""
    from tools import architectures
    from tools.architectures.taped import Studied, far

    studied, texts = Studied(architectures.TABLE["LTXV"], blocks=2), set()
    for k in (studied.smallest_of(studied.architecture), 3):
        recording = studied.record(k)
        program = recording.program(fuse=True)
        assert far(program.run(recording.inputs), recording.out) < 1e-5
        texts |= {
            launch.source.text for launch in launches(program, "rms_norm_addcmul") if "tl.split" in launch.source.text
        }
    (text,) = texts
    assert text.count("mask=ccmask") == 1 and "(cc // 64)" in text, text


def test_attention_lies_token_by_token(found) -> None:
    """So that the heads of a token are joined without a copy."""
    for (rows, tokens), program in found.items():
        (step,) = [step for step in program._steps if getattr(step.run, "by_strides", False)]
        queries = torch.randn(rows, tokens, HEADS, WIDTH).transpose(1, 2)
        out = step.run(queries, queries, queries)
        assert out.transpose(1, 2).is_contiguous()
        other = torch.randn(rows, HEADS, tokens, WIDTH)  # as a backend that orders its result otherwise
        out = step.run(other, other, other)
        assert out.transpose(1, 2).is_contiguous()
        assert torch.allclose(out, F.scaled_dot_product_attention(other, other, other), atol=1e-6)
        stored = [value for launch in launches(program, "rms_norm") for value in launch.outputs if len(value.shape) > 3]
        assert stored and all(value.stride[2] == CHANNELS for value in stored)


@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_attention_on_another_backend_lies_token_by_token(backend) -> None:
    """On a CPU the other one refuses, and the recorded one runs."""
    from anyshape.accel.tape.rules import attention

    def another(tape) -> None:
        for operation in tape.operations:
            if "attention" in str(operation.func):
                attention.replace(operation, backend)
        rules.apply(tape)

    model, given = Block(torch.float32), inputs(2, 6, torch.float32)
    program = programmed(model, given, another)
    (step,) = [step for step in program._steps if getattr(step.run, "by_strides", False)]
    assert step.run.backend == backend
    with torch.inference_mode():
        out, wanted = program.run(list(given)), model(*given)
    assert (out - wanted).norm() / wanted.norm() < BOUND[torch.float32] and step.run.backend == ""
    queries = torch.randn(2, HEADS, 6, WIDTH)
    assert step.run(queries, queries, queries).transpose(1, 2).is_contiguous()


def test_attention_whose_queries_others_read_stays_as_it_was() -> None:
    class Shared(Block):
        def forward(self, x: Tensor, vec: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
            q = self.turned(q, self.rotary(x.shape[1]))
            out = F.scaled_dot_product_attention(q, k, v)
            return out.transpose(1, 2).reshape(x.shape) + q.mean()

    model, given = Shared(torch.float32), inputs(2, 6, torch.float32)
    program = programmed(model, given)
    assert not any(getattr(step.run, "by_strides", False) for step in program._steps)
    assert torch.allclose(program.run(list(given)), model(*given), atol=1e-5)


def test_a_gate_is_computed_once_and_not_for_each_token(found) -> None:
    for program in found.values():
        assert launches(program, "rms_norm") and not any("tanh(" in launch.source.text for launch in program.launches)


def test_norms_of_short_rows_are_ours_and_of_long_rows_torchs() -> None:
    class Norms(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.rms_norm(x, x.shape[-1:]) @ x.transpose(-1, -2)

    for width, ours in ((64, 1), (1024, 0)):
        x = torch.randn(3, 5, width)
        program = programmed(Norms(), (x,))
        # the input's sizes are the call's, so the row must be a weight's for a kernel
        assert len(program.launches) == 0
        model = nn.Sequential(nn.Linear(width, width), Norms()).requires_grad_(False)
        program = programmed(model, (x,))
        assert len(program.launches) == ours
        assert torch.allclose(program.run([x]), model(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("norm", [F.rms_norm, F.layer_norm])
def test_heads_that_are_normed_together_read_their_table_once(norm) -> None:
    """They are the rows of one tile, and the sum is over all of it."""
    heads, width = 6, 64  # of 8 rows that the tile has

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(CHANNELS, heads * width).requires_grad_(False)
            self.scale = nn.Parameter(torch.randn(heads * width), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            q = norm(self.linear(x) * 3, (heads * width,), self.scale).view(*x.shape[:2], heads, width)
            angles = torch.arange(x.shape[1])[:, None] * torch.arange(1.0, width // 2 + 1) / 10
            cos, sin = angles.cos(), angles.sin()
            table = torch.stack([cos, -sin, sin, cos], -1).view(1, x.shape[1], 1, width // 2, 2, 2)
            pairs = q.reshape(*q.shape[:-1], -1, 1, 2)
            return (table[..., 0] * pairs[..., 0] + table[..., 1] * pairs[..., 1]).reshape(q.shape)

    model, sources = Turned(), set()
    for rows, tokens in SIZES:
        x = torch.randn(rows, tokens, CHANNELS)
        program = programmed(model, (x,))
        sources |= {launch.source.text for launch in program.launches if "tl.sum(" in launch.source.text}
        assert torch.allclose(program.run([x]), model(x), rtol=1e-4, atol=1e-4)
    (source,) = sources
    assert f"rmask = r < {heads}" in source and "axis=1), axis=0)" in source and source.count("tl.load(p0") == 1


def swapped(x: Tensor, cut: int) -> Tensor:
    """The parts of a row before and from ``cut``, in the other order: a rotary embedding of halves does so."""
    return torch.cat([-x[..., cut:], x[..., :cut]], dim=-1)


def layer(x: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,))


def rms(x: Tensor, scale: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,))


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """A part of a row needs its part of the weight, and nothing beside that is read (``interpreter.watch``)."""
    return F.rms_norm(x, (WIDTH,), scale)


def centred(x: Tensor, scale: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def paired(x: Tensor, scale: Tensor) -> Tensor:
    """Of each two neighbours the first, twice, and a cut between the two."""
    pairs = x.reshape(*x.shape[:-1], -1, 1, 2)
    return (pairs[..., 0] * torch.tensor([1.0, -1.0])).reshape(x.shape)


@pytest.mark.parametrize("sums", [layer, rms, scaled, centred, paired])
@pytest.mark.parametrize("cut", [WIDTH // 2, 5])
def test_a_sum_in_a_join_of_parts_of_its_rows(sums, cut) -> None:
    """It is of whole rows, whichever part of them is asked for."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(CHANNELS, CHANNELS).requires_grad_(False)
            self.scale = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            heads = sums(self.linear(x).view(*x.shape[:2], HEADS, WIDTH), self.scale)
            return heads * 0.5 + swapped(heads, cut)

    model = Joined()
    program = programmed(model, (torch.randn(2, 7, CHANNELS),))
    assert any("cat" in launch.source.text for launch in program.launches)
    for rows, tokens in SIZES:
        x = torch.randn(rows, tokens, CHANNELS)
        again = programmed(model, (x,))
        assert torch.allclose(again.run([x]), model(x), rtol=1e-4, atol=1e-4)


def test_a_wrong_kernel_of_a_rotary_table_is_found(monkeypatch) -> None:
    """Eager reads parts of the table, the kernel all of it."""
    from anyshape.accel.tape import diagnose, kernels

    model, given = Block(torch.float32), inputs(1, 5, torch.float32)
    recorder = Recorder(list(given), model, CPU)
    _, tape = record(lambda: model(*given), recorder)
    rules.apply(tape)
    program = Program(tape, fuse=True)
    program.bind(model)
    assert not diagnose.wrong_kernels(tape, program, list(given), model)
    (bad,) = {launch.source.text for launch in program.launches if "ccmask" in launch.source.text}
    call = kernels.Launch.__call__

    def wrong(self, operands, outputs):
        call(self, operands, outputs)
        if self.source.text == bad:
            outputs[0].add_(1.0)

    monkeypatch.setattr(kernels.Launch, "__call__", wrong)
    assert diagnose.wrong_kernels(tape, program, list(given), model) == {bad}


def test_a_function_that_blocks_repeat_is_computed_once() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mods = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)).requires_grad_(False)

        def forward(self, x: Tensor, vec: Tensor) -> Tensor:
            for mod in self.mods:
                x = x + mod(F.silu(vec)).unsqueeze(1)
            changed = F.silu(vec)
            changed.mul_(2)  # in place: another value from here on
            return x + changed[:, None] + F.silu(vec)[:, None]

    model, given = Blocks(), (torch.randn(2, 3, 8), torch.randn(2, 8))
    recorder = Recorder(list(given), model, CPU)
    _, tape = record(lambda: model(*given), recorder)
    rules.apply(tape)
    program = Program(tape, fuse=False)
    program.bind(model)
    assert sum("silu" in str(operation.func) for operation in tape.operations) <= 2
    again = tuple(each + 1 for each in given)
    with torch.inference_mode():
        assert torch.equal(program.run(list(again)), model(*again))
