"""A later size of a plan that was right at others: blocks that are alike need not run for its recording.

Blocks of plain torch in the engine, kernels in Triton's interpreter; ComfyUI's models for the tapes themselves.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tools import architectures, embed
from tools.oracles import reasons

embed.bare_pack()

from anyshape.accel import first_call, maker, stats, tape_tier  # noqa: E402 - the package exists from the line above on
from anyshape.accel.call import Call, Settings  # noqa: E402
from anyshape.accel.engine import Engine  # noqa: E402
from anyshape.accel.key import shape_key  # noqa: E402
from anyshape.accel.take import Taped  # noqa: E402
from anyshape.accel.tape import kernel_check, kernels, record  # noqa: E402
from anyshape.accel.tape.program import Program  # noqa: E402
from anyshape.accel.tape.trust import REACH, Trust  # noqa: E402

COUNT, WIDTH = 5, 16
SIZES = (6, 5, 4)  # tokens; the third is the first that may be short
MODELS = (
    "SDXL", "SVD_img2vid", "Flux", "Chroma", "ZImage", "QwenImage edit", "SD3", "WAN21_T2V",
    "HunyuanVideo mask", "CosmosT2IPredict2", "LTXV",
)  # fmt: skip


class Block(nn.Module):
    """``ran`` counts its calls, for a test to read."""

    ran = 0

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        Block.ran += 1
        return x + torch.tanh(self.lin(self.norm(x)))


class InPlace(Block):
    """Gives its argument back, which it has written into."""

    def forward(self, x: Tensor) -> Tensor:
        Block.ran += 1
        return x.add_(torch.tanh(self.lin(self.norm(x))))


class Viewed(Block):
    """Gives a view of its argument, which it has written into."""

    def forward(self, x: Tensor) -> Tensor:
        Block.ran += 1
        x.add_(torch.tanh(self.lin(self.norm(x))))
        return x[:, :]


class Attends(Viewed):
    """Attention whose result a short recording leaves void, in a block that cannot be left out."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(x)[:, None]
        x.add_(torch.nn.functional.scaled_dot_product_attention(q, q, q)[:, 0])
        return super().forward(x)


class Model(nn.Module):
    """COUNT blocks of one kind. astray: what it does where a block has not run."""

    def __init__(self, kind: type[Block] = Block, astray: Callable[[Tensor], object] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind() for _ in range(COUNT)).requires_grad_(False)
        self.astray = astray

    def forward(self, x: Tensor) -> Tensor:
        x, before = x * 1.5, Block.ran
        for number, block in enumerate(self.layers, 1):
            x = block(x)
            if self.astray and Block.ran - before < number:
                self.astray(x)
        return x * 2


class Bench:
    """A model in an engine."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.engine = Engine(stats.STATS.model("Short", "model"), passthrough=(KeyboardInterrupt,))

    def ran(self, tokens: int, rows: int = 2, verify: bool = True, **changes) -> int:
        """How many blocks ran for a call of this size, whose result is eager's."""
        x = torch.randn(rows, tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
        with torch.inference_mode():
            wanted = self.model(x)
            given = {"structure": 0} | changes
            taped = Taped(
                self.model, lambda options: self.model(x), {}, prepare=lambda options, recorder: None, **given
            )
            call = Call(
                shape_key({"x": x}), {"x": x}, lambda: self.model(x), weights=0, width=8, height=8, batch=1, taped=taped
            )
            Block.ran = 0
            out = self.engine(call, Settings(verify=verify))
        assert (out - wanted).norm() <= 1e-5 * wanted.norm()
        return Block.ran


@pytest.fixture(autouse=True)
def _fused(clean_stats, monkeypatch) -> None:
    monkeypatch.setattr(tape_tier, "can_fuse", lambda device: True)
    monkeypatch.setattr(maker.KEEPER, "watch", lambda *_: None)


@pytest.fixture
def bench(request) -> Bench:
    """A bench whose next size may be recorded short."""
    found = Bench(Model(*getattr(request, "param", ())))
    assert [found.ran(tokens) for tokens in SIZES[:2]] == [COUNT, COUNT]
    return found


def states() -> list[tuple[str, str]]:
    return [(shape["state"], shape["reason"]) for model in stats.snapshot()["models"] for shape in model["shapes"]]


def test_a_third_size_runs_one_block_of_each_kind(bench) -> None:
    assert bench.ran(SIZES[2]) == 1 and bench.ran(SIZES[2]) == 0
    assert states() == [("tape", "")] * 3 and reasons() == []


def test_a_much_larger_size_is_compared_whole(bench) -> None:
    most = REACH * max(SIZES)
    assert bench.ran(most) == 1
    assert bench.ran(most + 1) == COUNT
    assert bench.ran(most + 2) == 1  # the reach has grown


def test_another_code_of_the_model_begins_again(bench) -> None:
    assert bench.ran(4, structure=1) == COUNT and bench.ran(3, structure=1) == COUNT
    assert bench.ran(2, structure=1) == 1


def test_what_was_not_compared_says_nothing_to_whoever_wants_it_compared() -> None:
    bench = Bench(Model())
    assert [bench.ran(tokens, verify=False) for tokens in SIZES] == [COUNT, COUNT, 1]
    assert bench.ran(3) == COUNT


def test_forwards_that_other_packs_code_takes_part_in_run_whole(bench) -> None:
    assert bench.ran(4, calls_others=True) == COUNT
    assert bench.ran(3, lean=True) == COUNT


def test_another_plan_is_compared_whole(bench) -> None:
    """Of one row and one token nobody can tell how larger ones lie."""
    assert bench.ran(1, rows=1) == 1 + COUNT
    assert states() == [("tape", "")] * 3 and reasons() == []


@pytest.mark.parametrize("bench", [(InPlace,)], indirect=True)
def test_a_block_that_gives_its_argument_back(bench) -> None:
    assert bench.ran(4) == 1


@pytest.mark.parametrize("bench", [(Viewed,)], indirect=True)
def test_a_block_that_gives_a_view_of_its_argument_runs(bench) -> None:
    assert bench.ran(4) == COUNT and bench.ran(3) == COUNT


@pytest.mark.parametrize("bench", [(Attends,)], indirect=True)
def test_a_short_recording_is_void_whatever_it_leaves_out(bench, monkeypatch) -> None:
    """As where cuDNN's attention is not computed: what was recorded is then no result of ComfyUI's."""

    def void(args, kwargs):
        return torch.full_like(args[0], float("nan")), args[0].new_empty(args[0].shape[:3])

    monkeypatch.setattr(record, "ATTENTION", torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
    monkeypatch.setattr(record, "void", void)
    monkeypatch.setattr(record, "heard", lambda *call: None)  # of cuDNN's arguments
    assert bench.ran(4) == COUNT and bench.ran(3) == COUNT
    assert states() == [("tape", "")] * 4 and reasons() == []


# What goes wrong ------------------------------------------------------------------------------------------------------


def is_odd(launch: kernels.Launch) -> bool:
    return launch.outputs[0].shape[1] == SIZES[2]


def test_a_kernel_that_is_wrong_at_this_size_is_found(bench, monkeypatch) -> None:
    own = kernels.Launch.__call__

    def wrong(self, operands, outputs) -> None:
        own(self, operands, outputs)
        if is_odd(self):
            outputs[0].mul_(1.5)

    monkeypatch.setattr(kernels.Launch, "__call__", wrong)
    assert bench.ran(SIZES[2]) == 1 + 2 * COUNT  # compared, and asked how far rounding carries the model
    assert states()[-1] == ("tape", "") and any("relative error" in reason for reason in reasons())


def test_a_result_that_is_not_finite_is_compared_whole(bench, monkeypatch) -> None:
    run, asked = Program.run, []

    def black(self, inputs, bound=None):
        out = run(self, inputs, bound)
        if not asked and self.launches:
            asked.append(out.fill_(float("nan")))
        return out

    monkeypatch.setattr(Program, "run", black)
    assert bench.ran(SIZES[2]) > COUNT and asked


def raise_error(x: Tensor) -> None:
    raise ValueError("void")


@pytest.mark.parametrize("bench", [(Block, raise_error), (Block, lambda x: x.sum().item())], indirect=True)
def test_a_forward_that_void_numbers_lead_astray_is_recorded_whole_from_then_on(bench) -> None:
    assert bench.ran(4) > COUNT and bench.ran(3) == COUNT
    assert states() == [("tape", "")] * 4 and reasons() == []


def test_an_interrupt_leaves_nothing_half_made(bench, monkeypatch) -> None:
    own = Block.forward

    def interrupted(self, x):
        if Block.ran == 0 and torch._C._len_torch_dispatch_stack():
            raise KeyboardInterrupt
        return own(self, x)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Block, "forward", interrupted)
        bench.ran(SIZES[2])
    assert bench.ran(SIZES[2]) == 1 and reasons() == []


def test_a_program_that_fails_costs_no_result(bench, monkeypatch) -> None:
    def fail(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr(first_call, "bound", fail)
    assert bench.ran(SIZES[2]) == 1 + COUNT


def test_weights_that_went_meanwhile(bench) -> None:
    assert bench.ran(SIZES[2], hold=lambda: "gone") == 1 + COUNT
    assert states()[-1] == ("eager", "gone")
    assert bench.ran(SIZES[2]) == 1


# Trust, and the check of kernels --------------------------------------------------------------------------------------


def test_trust_needs_two_sizes_of_one_model() -> None:
    trust = Trust()
    trust.add("a", (8, 4), long=False)
    assert not trust.covers("a", (8, 4))
    trust.add("a", (4, 6), long=True)
    assert trust.covers("a", (16, 12)) and not trust.covers("a", (17, 12)) and not trust.covers("a", (16, 13))
    assert not trust.covers("b", (8, 4)) and not trust.covers("a", (8,)) and not trust.covers("a", (8, 4, 1))
    assert trust.is_brief((10, 5)) and not trust.is_brief((8, 6))
    trust.add("b", (2, 2), long=True)
    assert not trust.covers("a", (2, 2)) and not trust.is_brief((2, 2))


@pytest.mark.usefixtures("pack", "one_thread")
@pytest.mark.parametrize("name", [entry.name for entry in architectures.present() if entry.name in MODELS])
def test_comfyui_models(name: str) -> None:
    """The program of a short recording is that of a whole one, and each of its kernels can be compared by itself."""
    from tools.architectures import taped
    from tools.recording import steps_of

    studied = taped.Studied(architectures.TABLE[name], blocks=3)
    studied.record(0).program(fuse=True)
    short = studied.record(1, short=True)
    assert short.left_out
    program = short.program(fuse=True)
    assert steps_of(program) == steps_of(studied.record(1).program(fuse=True))
    with torch.inference_mode():
        found = list(kernel_check.compared(short.tape, program, short.inputs))
    kinds = {(launch.source.text, launch.numbers) for launch in program.launches}
    assert {(launch.source.text, launch.numbers) for launch, _ in found} == kinds and len(kinds) > 5
    assert all(error.isfinite() and error < 1e-4 for _, error in found)
