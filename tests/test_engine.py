"""The engine's parts in plain torch: settings, keys and the decision. No ComfyUI here."""

import pytest
import torch
from torch import nn

from tools import embed
from tools.oracles import expect, reasons

embed.bare_pack()

from anyshape.accel import graphs, stats  # noqa: E402 - the package exists from the line above on
from anyshape.accel.call import Call, Settings  # noqa: E402
from anyshape.accel.engine import Engine  # noqa: E402
from anyshape.accel.errors import Unavailable  # noqa: E402
from anyshape.accel.key import shape_key  # noqa: E402
from anyshape.accel.take import Taped  # noqa: E402
from anyshape.accel.tape.program import Program  # noqa: E402

# Settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"mode": "fast"}, ["mode", "'fast'", "auto", "exact", "off"]),
        ({"mode": None}, ["mode", "None", "auto"]),
        ({"graph_budget_mb": -1}, ["graph_budget_mb", "-1", "0", str(1 << 20), "megabytes"]),
        ({"graph_budget_mb": (1 << 20) + 1}, ["graph_budget_mb", str((1 << 20) + 1), "megabytes"]),
    ],
)
def test_bad_settings_name_the_input_the_value_and_the_fix(bad, words) -> None:
    with pytest.raises(ValueError) as refused:
        Settings(**bad)
    assert [word for word in words if word not in str(refused.value)] == []


def test_good_settings() -> None:
    assert Settings() == Settings("auto", 2048)
    assert Settings("off", 0).graph_budget_bytes == 0
    assert Settings(graph_budget_mb=1 << 20).graph_budget_bytes == 1 << 40


# Keys -------------------------------------------------------------------------------------------------------------


def key(shape=(2, 4, 8, 8), dtype=torch.float32, structure=None, **more):
    return shape_key({"x": torch.zeros(shape, dtype=dtype), "timesteps": torch.zeros(2), **more}, structure)


def test_equal_calls_have_equal_keys() -> None:
    assert key() == key() and hash(key()) == hash(key())
    assert key(structure={"output": 3}) == key(structure={"output": 3})


@pytest.mark.parametrize(
    "other",
    [
        {"shape": (1, 4, 8, 8)},
        {"shape": (2, 4, 8, 9)},
        {"dtype": torch.bfloat16},
        {"y": torch.zeros(2, 8)},
        {"context": torch.zeros(2, 77, 8)},
        {"structure": {"output": 3}},
    ],
    ids=str,
)
def test_what_a_graph_depends_on_is_in_the_key(other) -> None:
    assert key() != key(**other)


def test_structures_differ_by_length_and_name() -> None:
    keys = {key(structure=s) for s in ({"output": 3}, {"output": 4}, {"input": 3}, {"output": 3, "middle": 1}, {})}
    assert len(keys) == 5


def test_a_key_reads_well() -> None:
    residual = {"control.output.0": torch.zeros(2, 8)}
    assert str(key(context=torch.zeros(2, 77, 8))) == "x[2x4x8x8] context[2x77x8] float32"
    text = str(key(context=torch.zeros(2, 77, 8), structure={"output": 1}, **residual))
    assert (
        text.rpartition(" #")[0] == "x[2x4x8x8] context[2x77x8] output*1 float32"
    )  # then what stands for the residual


# The decision -----------------------------------------------------------------------------------------------------


torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(8, 8), nn.GELU())
X = torch.randn(2, 4, 8, 8)


@pytest.fixture(autouse=True)
def _as_comfyui():
    with torch.inference_mode():
        yield


@pytest.fixture
def engine():
    return Engine(stats.STATS.model("Engine", "model"), passthrough=(KeyboardInterrupt, InterruptedError))


def call(eager=lambda: MODEL(X), **changes):
    taped = Taped(MODEL, lambda options: MODEL(X), {}, 0, lambda options, recorder: None)
    given = {"weights": 0, "width": 64, "height": 64, "batch": 2, "taped": taped} | changes
    return Call(shape_key({"x": X}), {"x": X}, eager, **given)


def states(engine):
    return [(shape.state, shape.reason) for shape in engine.stats.shapes.values()]


def failing(error):
    """In place of the tape; and the calls of it."""
    tried = []

    def fail(*args):
        tried.append(args)
        raise error

    return fail, tried


def test_the_tape_is_used(engine) -> None:
    eager, tried = failing(AssertionError())
    for _ in range(3):  # recorded, then run
        assert torch.equal(engine(call(eager), Settings()), MODEL(X))
    assert states(engine) == [("tape", "")] and not tried


def test_an_obstacle_means_eager(engine, monkeypatch) -> None:
    fail, tried = failing(AssertionError())
    monkeypatch.setattr(engine._tape, "run", fail)
    assert torch.equal(engine(call(obstacle="because"), Settings()), MODEL(X))
    assert states(engine) == [("eager", "because")]
    assert torch.equal(engine(call(taped=None), Settings()), MODEL(X))
    assert states(engine) == [("eager", "")] and not tried


@pytest.mark.parametrize("error", [RuntimeError("broken"), Unavailable("not here"), NotImplementedError("x")])
def test_a_failure_retires_the_tape_and_its_graphs(engine, monkeypatch, caplog, error) -> None:
    """It is tried once, counted at each call and logged once."""
    fail, tried = failing(error)
    dropped = []
    monkeypatch.setattr(graphs, "drop_owner", dropped.append)
    monkeypatch.setattr(engine._tape, "run", fail)
    with expect(fallbacks=3):
        for _ in range(3):
            assert torch.equal(engine(call(), Settings()), MODEL(X))
    assert len(tried) == 1 and dropped == [id(engine)]
    assert states(engine)[0][0] == "eager" and str(error) in states(engine)[0][1]
    assert len([record for record in caplog.records if "Traceback" in record.message]) == 1


def test_memory_that_was_short_retires_nothing(engine, monkeypatch) -> None:
    fail, tried = failing(torch.OutOfMemoryError("short"))
    with monkeypatch.context() as short:
        short.setattr(engine._tape, "run", fail)
        assert torch.equal(engine(call(), Settings()), MODEL(X))
    assert states(engine)[0][0] == "eager" and "out of memory" in states(engine)[0][1] and len(tried) == 1
    assert torch.equal(engine(call(), Settings()), MODEL(X))
    assert states(engine) == [("tape", "")]


@pytest.mark.parametrize("held", [0, 1 << 20])
def test_eager_is_short_of_memory_beside_our_graphs(engine, monkeypatch, held) -> None:
    """They are given back, and the picture is not lost."""
    cleared, left = [], [1]

    def short():
        if left:
            raise torch.OutOfMemoryError(str(left.pop()))
        return MODEL(X)

    monkeypatch.setattr(graphs.GraphCache, "used_bytes", held)
    monkeypatch.setattr(graphs, "clear", lambda: cleared.append(1))
    own = call(short, obstacle="because")
    if not held:
        with pytest.raises(torch.OutOfMemoryError):
            engine(own, Settings())
    assert torch.equal(engine(own, Settings()), MODEL(X))
    assert cleared == [1] * bool(held) and states(engine) == [("eager", "because")]


def test_an_interrupt_is_no_failure(engine, monkeypatch) -> None:
    with monkeypatch.context() as stopped, pytest.raises(InterruptedError):
        stopped.setattr(engine._tape, "run", failing(InterruptedError())[0])
        engine(call(), Settings())
    engine(call(), Settings())
    assert states(engine) == [("tape", "")]


def test_an_interrupt_after_a_failure(engine, monkeypatch) -> None:
    """Nobody knows yet who is wrong: nothing is told, and the next call tries again."""
    stop, _ = failing(InterruptedError())
    with monkeypatch.context() as wrong, expect(fallbacks=0), pytest.raises(InterruptedError):
        wrong.setattr(engine._tape, "run", failing(ValueError("broken"))[0])
        engine(call(stop), Settings())
    engine(call(), Settings())
    assert states(engine) == [("tape", "")]


def test_an_error_that_eager_raises_too_is_not_ours(engine, monkeypatch, caplog) -> None:
    fail, _ = failing(ValueError("the caller's"))
    with monkeypatch.context() as wrong, pytest.raises(ValueError, match="the caller's"):
        wrong.setattr(engine._tape, "run", fail)
        engine(call(fail), Settings())
    told = "ComfyUI's own forward fails as well: ValueError: the caller's"  # nobody is to report that to us
    assert states(engine) == [("eager", told)] and told in reasons()
    engine(call(), Settings())
    assert states(engine) == [("tape", "")]
    assert not [record for record in caplog.records if "Traceback" in record.message]


# What rounding explains ---------------------------------------------------------------------------------------------


class Growing(nn.Module):
    """A map under which a small difference of its input grows, by about 2 at each of its steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sigmoid()
        for _ in range(self.steps):
            x = 3.9 * x * (1 - x)
        return x


@pytest.fixture
def rounding(engine, monkeypatch):
    """(a first call of a model whose program rounds otherwise, its forwards)."""
    from anyshape.accel.sensitivity import nudged

    x, ran = torch.randn(2, 4, 32, 32, generator=torch.Generator().manual_seed(1)).bfloat16(), []
    monkeypatch.setattr(Program, "run", lambda self, inputs, bound=None: given[0](nudged(-inputs[0]).neg()))
    given = []

    def first(model, wrong=0.0, **changes):
        own, before = x.clone(), len(ran)
        given[:] = [lambda y: model(y) + wrong]

        def forward(options):
            ran.append(True)
            return model(x)

        taped = Taped(model, forward, {}, 0, lambda options, recorder: None, **changes)
        engine(Call(shape_key({"x": x}), {"x": x}, lambda: model(x), 0, 64, 64, 2, taped=taped), Settings())
        assert torch.equal(x, own)
        return states(engine)[-1], len(ran) - before

    return first


@pytest.mark.parametrize(("steps", "forwards"), [(2, 1), (5, 2)])  # within the bounds nobody asks
def test_a_model_that_amplifies_rounding_is_asked_how_far(engine, rounding, steps, forwards) -> None:
    """Its program is right though it is beyond the bounds of most models; a wrong one is wrong here too. It is told."""
    assert rounding(Growing(steps)) == (("tape", ""), forwards)
    assert [sentence[:27] for sentence in engine.stats.inexact] == ["The model amplifies roundin"] * (forwards - 1)


def test_what_rounding_does_not_explain_is_wrong(rounding) -> None:
    (state, reason), ran = rounding(Growing(5), wrong=0.5)
    assert state == "eager" and "even unfused" in reason and ran == 2


@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_of_which_rounding_makes_another_result(engine, rounding, monkeypatch, wrong) -> None:
    """Then its kernels are asked one by one, on eager's own inputs. One that is wrong there is wrong."""
    from anyshape.accel import tape_tier, verify
    from anyshape.accel.tape import diagnose

    monkeypatch.setattr(tape_tier, "can_fuse", lambda device: True)
    if wrong:
        monkeypatch.setattr(diagnose, "wrong_kernels", lambda *args: frozenset(("a source",)))
    far = []
    own = verify.is_noise
    monkeypatch.setattr(verify, "is_noise", lambda *args: far.append(verify.difference(*args[:2])) or own(*args))
    (state, reason), _ = rounding(Growing(9))
    assert state == ("eager" if wrong else "tape") and ("unfused" in reason) == wrong
    assert wrong or far[0].whole > verify.MOST
    assert any("amplifies" in sentence for sentence in engine.stats.inexact) != wrong


def test_a_forward_that_must_not_run_twice_is_not_asked(rounding) -> None:
    (state, _), ran = rounding(Growing(5), calls_others=True)
    assert state == "eager" and ran == 1


def test_weights_that_have_moved_meanwhile(rounding) -> None:
    """ComfyUI's own forward may let go of them, and what is bound to them must not go on."""
    held = iter(("", "gone"))
    (state, _), ran = rounding(Growing(5), hold=lambda: next(held))
    assert state == "eager" and ran == 2


def test_calls_are_timed(engine) -> None:
    for _ in range(3):
        engine(call(), Settings())
    (shape,) = engine.stats.as_dict()["shapes"]
    assert shape["calls"] == 3 and shape["first_call_seconds"] >= 0
    assert len(engine.stats.shapes[shape["key"]].times._done) == 2
