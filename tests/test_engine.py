"""The engine's parts in plain torch: settings, keys, counters, reports and regions. No ComfyUI here."""

import threading

import pytest
import torch

from tools import embed

embed.bare_pack()

from anyshape.accel import region_ops, regions, trial  # noqa: E402 - the package exists from the line above on
from anyshape.accel.engine import Call, Engine, Settings  # noqa: E402
from anyshape.accel.errors import Unavailable  # noqa: E402
from anyshape.accel.key import shape_key  # noqa: E402
from anyshape.accel.ops import FusedOps, Norm, Stream, Weights  # noqa: E402
from anyshape.accel.regions import Region  # noqa: E402

# Settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"mode": "fast"}, ["mode", "'fast'", "auto", "kernels", "regions", "off"]),
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
    text = str(key(context=torch.zeros(2, 77, 8), structure={"output": 1}, **residual))
    assert text == "x[2x4x8x8] context[2x77x8] output*1 float32"


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
        part, whole = Weights(weight, bias).rows(2, 5), Weights(weight, None)
        assert torch.equal(part.bias, torch.arange(2.0, 5.0)) and part.weight[0, 0] == 8
        assert torch.equal(whole.matrix(), torch.arange(24.0).view(6, 4)) and whole.rows(1).bias is None


# The decision -----------------------------------------------------------------------------------------------------


PLAIN = Settings(verify=False)  # here eager gives other numbers, to tell which way a call took


def call(forward, eager=lambda: torch.zeros(1), **changes):
    inputs = {"x": torch.ones(2, 4, 8, 8)}
    return Call(shape_key(inputs), inputs, forward, eager, weights=0, width=64, height=64, batch=2, **changes)


@pytest.fixture
def engine(counted):
    return Engine(counted.model("Engine", "unet"), passthrough=(KeyboardInterrupt, InterruptedError))


def states(engine):
    return [(shape.state, shape.reason) for shape in engine.stats.shapes.values()]


def test_the_fast_forward_is_used(engine) -> None:
    out = engine(call(lambda ops, inputs: inputs["x"] * 2), PLAIN)
    assert torch.equal(out, torch.full((2, 4, 8, 8), 2.0))
    assert states(engine) == [("regions", "")]


def test_an_obstacle_means_eager(engine) -> None:
    out = engine(call(lambda ops, inputs: 1 / 0, obstacle="because"), PLAIN)
    assert torch.equal(out, torch.zeros(1))
    assert states(engine) == [("eager", "because")]


@pytest.mark.parametrize("error", [RuntimeError("broken"), Unavailable("not here"), torch._dynamo.exc.Unsupported("x")])
def test_a_failure_retires_the_tier(engine, error) -> None:
    tried = []

    def fail(ops, inputs):
        tried.append(ops.name)
        raise error

    for _ in range(3):
        assert torch.equal(engine(call(fail), PLAIN), torch.zeros(1))
    assert tried == ["regions"]
    assert states(engine)[0][0] == "eager" and str(error) in states(engine)[0][1]


def test_an_interrupt_is_no_failure(engine) -> None:
    def stop(ops, inputs):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        engine(call(stop), PLAIN)
    engine(call(lambda ops, inputs: inputs["x"]), PLAIN)
    assert states(engine) == [("regions", "")]


def test_an_error_that_eager_raises_too_is_not_ours(engine) -> None:
    def wrong(*_):
        raise ValueError("the caller's")

    with pytest.raises(ValueError, match="the caller's"):
        engine(call(wrong, eager=wrong), PLAIN)
    engine(call(lambda ops, inputs: inputs["x"]), PLAIN)
    assert states(engine) == [("regions", "")]


def run_trial(seconds, monkeypatch, calls=8):
    """The ways that a trial takes where ``fused`` and ``eager`` take so many seconds a call."""
    clock, taken = [0.0], []
    monkeypatch.setattr(trial.time, "perf_counter", lambda: clock[0])

    def way(name):
        def run():
            taken.append(name)
            clock[0] += seconds[name]
            return torch.zeros(1)

        return run

    one = trial.Trial()
    for _ in range(calls):
        one.run(way("fused"), way("eager"), torch.device("cpu"))
    return one, taken


def test_a_trial_keeps_the_faster_way(monkeypatch) -> None:
    one, taken = run_trial({"fused": 2.0, "eager": 1.0}, monkeypatch)
    assert taken == ["fused", "fused", "eager", "fused", "eager"] + 3 * ["eager"]
    assert one.eager_wins and "1000.0 ms against 2000.0 ms" in one.verdict()
    one, taken = run_trial({"fused": 1.0, "eager": 2.0}, monkeypatch)
    assert taken[5:] == 3 * ["fused"] and not one.eager_wins


def test_a_tie_stays_fused(monkeypatch) -> None:
    one, taken = run_trial({"fused": 1.0, "eager": 0.99}, monkeypatch)
    assert taken[5:] == 3 * ["fused"] and not one.eager_wins


def test_a_shape_without_a_graph_is_tried(engine, monkeypatch) -> None:
    monkeypatch.setattr(engine, "_graph_obstacle", lambda *_: "no graph today")
    monkeypatch.setattr(trial.Trial, "eager_wins", property(lambda self: self.over))
    outs = [engine(call(lambda ops, inputs: inputs["x"]), PLAIN).numel() for _ in range(7)]
    assert outs == [256 * 2, 256 * 2, 1, 256 * 2, 1, 1, 1]
    state, reason = states(engine)[0]
    assert state == "eager" and "eager is faster" in reason and "no graph today" in reason


@pytest.mark.parametrize("mode", ["auto", "kernels", "regions"])
def test_weights_keep_their_layout_where_no_kernel_runs(engine, mode) -> None:
    assert not engine.wants_channels_last(Settings(mode), torch.device("cpu"))


def test_calls_are_timed(engine) -> None:
    for _ in range(3):
        engine(call(lambda ops, inputs: inputs["x"]), PLAIN)
    (shape,) = engine.stats.as_dict()["shapes"]
    assert (
        shape["calls"] == 3
        and shape["first_call_seconds"] >= 0
        and len(engine.stats.shapes[shape["key"]].times._done) == 2
    )


def test_a_recompile_is_counted(engine) -> None:
    """A tier may compile in its first call; what it compiles later is what this pack promises not to do."""
    region = Region(scaled)
    forward = lambda ops, inputs: region(torch.ones(rows, 4), torch.ones(4))  # noqa: E731
    counts = []
    for rows in (2, 3, 1, 1):  # noqa: B007  (the forward reads it)
        engine(call(forward), PLAIN)
        counts.append((engine.stats.kernels, engine.stats.recompiles))
    assert counts == [(1, 0), (1, 0), (2, 1), (2, 1)]
    assert engine.stats.compile_seconds > 0


def test_weights_that_are_cast_have_a_first_call_of_their_own(engine) -> None:
    """Short memory comes and goes; with it other operations run, which compile when they first do."""
    region = Region(scaled)
    for rows, obstacle in ((2, ""), (1, "weights are cast"), (2, ""), (1, "weights are cast")):
        engine(
            call(lambda ops, inputs, rows=rows: region(torch.ones(rows, 4), torch.ones(4)), graph_obstacle=obstacle),
            PLAIN,
        )
    assert (engine.stats.kernels, engine.stats.recompiles) == (2, 0)


# Regions ----------------------------------------------------------------------------------------------------------


def scaled(x, w):
    return torch.nn.functional.silu(x) * w + x


def checked(region, *args):
    """The region's result, compared with the plain function's."""
    out = region(*args)
    assert torch.allclose(out, region._fn(*args), atol=1e-6)
    return out


def test_sizes_are_symbolic() -> None:
    region = Region(scaled)
    for rows, columns in [(4, 8), (5, 8), (4, 9), (1000, 3), (2, 2)]:
        checked(region, torch.randn(rows, columns), torch.randn(columns))
    assert (region.graphs, region.misses) == (1, 0)


def test_a_size_of_one_is_a_variant() -> None:
    region = Region(scaled)
    for rows in (1, 3, 1, 7):
        checked(region, torch.randn(rows, 8), torch.randn(8))
    assert (region.graphs, region.misses) == (2, 0)


def test_the_same_tensor_twice() -> None:
    """x for both arguments, then two tensors: one graph, which must not have learned that they are one."""
    region = Region(scaled)
    x = torch.randn(6, 6)
    for second in (x, torch.randn(6, 6), x):
        checked(region, x, second)
    assert (region.graphs, region.misses) == (1, 0)


def test_a_miss_is_counted_and_right() -> None:
    region = Region(scaled)
    checked(region, torch.randn(4, 8), torch.randn(8))
    checked(region, torch.randn(8, 4).t(), torch.randn(8))  # other strides than the compiled graph's
    assert (region.graphs, region.misses) == (1, 1)


def test_variants_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(regions, "MAX_VARIANTS", 1)
    region = Region(scaled)
    checked(region, torch.randn(4, 8), torch.randn(8))
    for _ in range(2):
        checked(region, torch.randn(4, 8).double(), torch.randn(8).double())
    assert (region.graphs, region.misses) == (1, 2)


def test_the_callers_tensors_stay_unmarked() -> None:
    """A mark would make every later torch.compile user's graphs dynamic."""
    region, x, w = Region(scaled), torch.randn(4, 8), torch.nn.Parameter(torch.randn(8))
    attributes = dir(x), dir(w)
    with torch.no_grad():
        region(x, w), region(x, w)
    assert (dir(x), dir(w)) == attributes
    assert not hasattr(x, "_dynamo_dynamic_indices") and x._version == 0


def test_a_worker_thread_compiles() -> None:
    """ComfyUI runs prompts in a thread that is not the main one."""
    region, results = Region(scaled), []

    def work():
        with torch.inference_mode():
            results.append(
                torch.equal(region(torch.ones(4, 8), torch.ones(8)), scaled(torch.ones(4, 8), torch.ones(8)))
            )

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert results == [True, True] and (region.graphs, region.misses) == (1, 0)


def test_two_regions_of_one_function_are_apart() -> None:
    """Neither fills the other's cache, and the function itself stays as it is for others."""
    first, second = Region(scaled), Region(scaled)
    checked(first, torch.randn(4, 8), torch.randn(8))
    assert second.graphs == 0
    checked(second, torch.randn(4, 8), torch.randn(8))
    assert first.graphs == second.graphs == 1
    assert first._fn is scaled and not hasattr(scaled, "_torchdynamo_orig_callable")


def unsupported_by_compile(x):
    raise_if_compiling()
    return x


def raise_if_compiling():
    torch._dynamo.graph_break()


def test_what_does_not_compile_raises_and_is_tried_again() -> None:
    region = Region(unsupported_by_compile)
    for _ in range(2):
        with pytest.raises(torch._dynamo.exc.TorchDynamoException):
            region(torch.randn(4))
    assert region.graphs == 0


def test_a_package_that_torch_lacks_is_named(monkeypatch) -> None:
    """setuptools, in a bare environment of Python 3.12 or newer: no compiler would help."""

    def lacking(self, gm, inputs):
        raise ModuleNotFoundError("No module named 'setuptools'", name="setuptools")

    monkeypatch.setattr(regions._CountingInductor, "__call__", lacking)
    with pytest.raises(Unavailable, match="pip install setuptools") as refused:
        Region(scaled)(torch.randn(4, 4), torch.randn(4))
    assert "C++" not in str(refused.value)


def transformer_weights(channels, inner):
    """Norm and layers of a feed-forward."""
    layers = [(channels, channels), (2 * inner, channels), (channels, inner)]
    norm = Norm(torch.ones(channels), torch.zeros(channels), 1e-5)
    return [Weights(torch.randn(shape) / 4, torch.randn(shape[0])) for shape in layers], norm


def feed_forward(ops, made, x):
    (out, up, down), norm = made
    with torch.inference_mode():
        return ops.feed_forward(x, Stream(x * 2), out, norm, up, down).settled()


def test_weights_made_in_and_out_of_inference_mode_share_a_graph() -> None:
    """A LoRA rewrites some weights inside inference mode, the others were loaded outside."""
    ops, (outside, norm) = region_ops.RegionOps(), transformer_weights(32, 8)
    with torch.inference_mode():
        inside, _ = transformer_weights(32, 8)
    feed_forward(ops, (outside, norm), torch.randn(2, 5, 32))
    graphs, misses = region_ops.graphs(), region_ops.misses()
    for layers in (inside, [inside[0], outside[1], inside[2]], outside):
        x = torch.randn(3, 7, 32)
        wanted = feed_forward(FusedOps(), (layers, norm), x)
        assert torch.allclose(feed_forward(ops, (layers, norm), x), wanted, atol=1e-4)
    assert (region_ops.graphs(), region_ops.misses()) == (graphs, misses)


def test_region_ops_equal_plain_torch() -> None:
    """One row included, which no graph may see: a size of 1 would need one of its own."""
    made, ops = transformer_weights(16, 24), region_ops.RegionOps()
    feed_forward(ops, made, torch.randn(2, 5, 16))
    graphs = region_ops.graphs()
    for rows in ((1, 1), (1, 9), (4, 1), (3, 64)):
        x = torch.randn(*rows, 16)
        assert torch.allclose(feed_forward(ops, made, x), feed_forward(FusedOps(), made, x), atol=1e-4)
    assert region_ops.graphs() == graphs
