"""The engine's parts in plain torch: settings, keys and the decision. No ComfyUI here."""

import pytest
import torch

from tools import embed
from tools.oracles import FUSED

embed.bare_pack()

from anyshape.accel import stats  # noqa: E402 - the package exists from the line above on
from anyshape.accel.engine import Call, Engine, Settings  # noqa: E402
from anyshape.accel.errors import Unavailable  # noqa: E402
from anyshape.accel.key import shape_key  # noqa: E402
from anyshape.accel.ops import Weights  # noqa: E402

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


# Weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
def test_views_of_a_parameter_made_in_inference_mode_and_moved_outside_of_it(inside) -> None:
    """By a LoRA and then Unload Models, say: eager takes no view of it, and a plain one raises."""
    with torch.inference_mode():
        weight, bias = (torch.nn.Parameter(torch.ones(size), requires_grad=False) for size in ((6, 4, 1, 1), (6,)))
    weight.data, bias.data = torch.arange(24.0).view(6, 4, 1, 1), torch.arange(6.0)
    with torch.inference_mode(inside):
        with pytest.raises(RuntimeError, match="version counter"):
            bias[2:]
        assert torch.equal(Weights(weight, None).matrix(), torch.arange(24.0).view(6, 4))


# The decision -----------------------------------------------------------------------------------------------------


PLAIN = Settings(verify=False)  # here eager gives other numbers, to tell which way a call took


def call(forward, eager=lambda: torch.zeros(1), **changes):
    inputs = {"x": torch.ones(2, 4, 8, 8)}
    return Call(shape_key(inputs), inputs, eager, forward=forward, weights=0, width=64, height=64, batch=2, **changes)


@pytest.fixture
def engine(stand_in):
    return Engine(stats.STATS.model("Engine", "model"), passthrough=(KeyboardInterrupt, InterruptedError))


def states(engine):
    return [(shape.state, shape.reason) for shape in engine.stats.shapes.values()]


def test_the_fast_forward_is_used(engine) -> None:
    out = engine(call(lambda ops, inputs: inputs["x"] * 2), PLAIN)
    assert torch.equal(out, torch.full((2, 4, 8, 8), 2.0))
    assert states(engine) == [(FUSED, "")]


def test_an_obstacle_means_eager(engine) -> None:
    out = engine(call(lambda ops, inputs: 1 / 0, obstacle="because"), PLAIN)
    assert torch.equal(out, torch.zeros(1))
    assert states(engine) == [("eager", "because")]


@pytest.mark.parametrize("error", [RuntimeError("broken"), Unavailable("not here"), NotImplementedError("x")])
def test_a_failure_retires_the_tier(engine, error) -> None:
    tried = []

    def fail(ops, inputs):
        tried.append(ops.name)
        raise error

    for _ in range(3):
        assert torch.equal(engine(call(fail), PLAIN), torch.zeros(1))
    assert tried == ["kernels"]
    assert states(engine)[0][0] == "eager" and str(error) in states(engine)[0][1]


def test_an_interrupt_is_no_failure(engine) -> None:
    def stop(ops, inputs):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        engine(call(stop), PLAIN)
    engine(call(lambda ops, inputs: inputs["x"]), PLAIN)
    assert states(engine) == [(FUSED, "")]


def test_an_error_that_eager_raises_too_is_not_ours(engine) -> None:
    def wrong(*_):
        raise ValueError("the caller's")

    with pytest.raises(ValueError, match="the caller's"):
        engine(call(wrong, eager=wrong), PLAIN)
    engine(call(lambda ops, inputs: inputs["x"]), PLAIN)
    assert states(engine) == [(FUSED, "")]


def test_a_shape_without_a_graph_stays_fused(engine, monkeypatch) -> None:
    """At every call: which way a call takes must not depend on the clock, or a seed gives two pictures."""
    monkeypatch.setattr(engine, "_graph_obstacle", lambda *_: "no graph today")
    outs = [engine(call(lambda ops, inputs: inputs["x"]), PLAIN).numel() for _ in range(7)]
    assert outs == 7 * [2 * 4 * 8 * 8]
    assert states(engine) == [(FUSED, "no graph today")]


@pytest.mark.parametrize("mode", ["exact", "off"])
def test_other_modes_are_comfyuis_own_forward(engine, mode) -> None:
    """Nothing is missed there, so nothing is counted as a fallback."""
    with stats.expect(fallbacks=0):
        out = engine(call(lambda ops, inputs: 1 / 0), Settings(mode))
    assert torch.equal(out, torch.zeros(1)) and states(engine) == [("eager", "")]


def test_weights_change_their_layout_for_kernels_alone(engine) -> None:
    assert engine.wants_channels_last(Settings(), torch.device("cpu"))
    assert not engine.wants_channels_last(Settings("exact"), torch.device("cpu"))


def test_calls_are_timed(engine) -> None:
    for _ in range(3):
        engine(call(lambda ops, inputs: inputs["x"]), PLAIN)
    (shape,) = engine.stats.as_dict()["shapes"]
    assert (
        shape["calls"] == 3
        and shape["first_call_seconds"] >= 0
        and len(engine.stats.shapes[shape["key"]].times._done) == 2
    )


def upsampled(ops, dtype):
    """One of the tier's kernels, in ``dtype``."""
    return ops.upsample2x(torch.ones(1, 1, 2, 2, dtype=dtype), (4, 4))


def test_a_recompile_is_counted(engine, stand_in) -> None:
    """A tier may compile in its first call; what it compiles later is what this pack promises not to do."""
    stand_in.variants.clear()
    counts = []
    for dtype in (torch.float32, torch.float32, torch.float64, torch.float64):
        engine(call(lambda ops, inputs, dtype=dtype: upsampled(ops, dtype)), PLAIN)
        counts.append((engine.stats.kernels, engine.stats.recompiles))
    assert counts == [(1, 0), (1, 0), (2, 1), (2, 1)]
    assert engine.stats.compile_seconds > 0


def test_weights_that_are_cast_have_a_first_call_of_their_own(engine, stand_in) -> None:
    """Short memory comes and goes; with it other operations run, which compile when they first do."""
    stand_in.variants.clear()
    for dtype, obstacle in ((torch.float32, ""), (torch.float64, "weights are cast")) * 2:
        engine(call(lambda ops, inputs, dtype=dtype: upsampled(ops, dtype), graph_obstacle=obstacle), PLAIN)
    assert (engine.stats.kernels, engine.stats.recompiles) == (2, 0)
