"""The gain's figures on a real GPU, beside events of the test's own.

What a CPU can show as well is in ``test_gain_measured``.
"""

import statistics

import pytest
import torch

from tools.driving import compiled, skipping
from tools.on_gpu import forward, small
from tools.oracles import shapes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_stats", "no_graphs_left")]

WIDE_FLUX = {"depth": 2, "depth_single_blocks": 4}  # as wide as the real one: the GPU is the limit
SIZES = [(2048, 2048), (1536, 2048)]
TOKENS = 512  # of a prompt, as in the benchmarks' runs: eager has cuDNN plan attention to other numbers too
CALLS = 12
MANY = 48  # of small models: their time is the host's, which differs from one call to the next
AHEAD = 20_000_000  # cycles that the GPU waits, ten milliseconds, so that the host is ahead as in a long run


def timed(call, ahead=False) -> tuple:
    """(its result, its milliseconds on the GPU); nothing else is under way.

    ahead: without the time until the host hands it over.
    """
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if ahead:
        torch.cuda._sleep(AHEAD)
    start.record()
    out = call()
    end.record()
    torch.cuda.synchronize()
    return out, start.elapsed_time(end)


def milliseconds(call, ahead=False) -> float:
    return timed(call, ahead)[1]


def each(patcher, width, height, rows=2) -> list[float]:
    """Milliseconds of the calls of one run, as a sampler makes them: what a run costs once is in none of them."""
    from bench.step import Case, inside

    case = Case(width, height, no_cfg=rows == 1)
    return inside(patcher, case, lambda step: [milliseconds(step, ahead=True) for _ in range(CALLS)])


def each_of_host(patcher, width, height, rows) -> list[float]:
    """The same where the GPU waits for the host: without what ComfyUI does around the network, which is as long."""
    took = []

    def around(call):
        out, ms = timed(call)
        took.append(ms)
        return out

    forward(patcher, width, height, rows, times=MANY, around=around)
    return took


def median(patcher, *args, calls=each) -> float:
    """Milliseconds of a call, warmed up."""
    calls(patcher, *args)
    return statistics.median(calls(patcher, *args))


def of_size(width: int) -> dict:
    (shape,) = [shape for shape in shapes() if shape["width"] == width]
    return shape


def measured(patcher, *args, calls=each) -> None:
    """Eager's time, as Warm Up and Compare have it measured."""
    calls(compiled(patcher, timed=True), *args)


def settled() -> None:
    """The figures of calls on the GPU are read when it is done with them."""
    torch.cuda.synchronize()


@pytest.fixture
def begun(models):
    """A process's first forward says nothing of eager."""
    forward(compiled(small(models, "flux")), 64, 64, 1)


# Eager's time -----------------------------------------------------------------------------------------------------


def test_the_recorded_forward_tells_eagers_time_of_each_size(models, begun):
    """At once, without one more forward; where the GPU is the limit."""
    patcher = models.flux(torch.bfloat16, **WIDE_FLUX)
    fast = compiled(patcher)
    for width, height in SIZES:
        own = median(patcher, width, height, 1)  # before: memory that is asked for the first time takes its time
        forward(fast, width, height, 1, tokens=TOKENS)
        settled()
        shape = of_size(width)
        print(width, height, shape["eager_ms"], own)
        assert shape["calls"] == 1 and shape["factor"] is None and 0.8 * own < shape["eager_ms"] < 1.3 * own


def test_of_a_unet_with_convolutions_only_its_first_size_may_be_known(models, begun):
    """From the second size on it is recorded with weights that lie as programs have them, which is not eager."""
    patcher = models.unet("sdxl", torch.float16)
    fast, own = compiled(patcher), median(patcher, 1536, 1536)
    for width, height in ((1536, 1536), (1024, 1024)):
        forward(fast, width, height)
    settled()
    first = of_size(1536)["eager_ms"]
    print(first, own)
    assert of_size(1024)["eager_ms"] is None and (first is None or 0.8 * own < first < 1.3 * own)


def test_where_the_host_is_the_limit_only_a_measurement_tells(models, begun):
    from anyshape.accel.comfy.warming import warm_up

    patcher = small(models, "sd15")
    fast = compiled(patcher)
    warm_up(fast, "256x256")
    settled()
    assert of_size(256)["eager_ms"] is None and of_size(256)["factor"] is None
    warm_up(fast, "256x256", measure=True)
    settled()
    assert of_size(256)["eager_ms"] > 0 and of_size(256)["factor"] > 1


# The factor -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "args", "calls", "close"),
    [
        ("sd15", (512, 512, 2), each_of_host, 1.6),
        ("flux", (512, 512, 1), each_of_host, 1.6),
        ("wide flux", (2048, 2048, 1), each, 1.15),
    ],
)
def test_the_factor_is_what_events_around_both_say(models, name, args, calls, close):
    """Small models wait for the host, whose time differs more from one call to the next."""
    patcher = models.flux(torch.bfloat16, **WIDE_FLUX) if name == "wide flux" else small(models, name)
    measured(patcher, *args, calls=calls)
    fast = compiled(patcher)
    ours, own = (median(one, *args, calls=calls) for one in (fast, patcher))
    settled()
    factor = of_size(args[0])["factor"]
    print(name, factor, own / ours)
    assert own / ours / close < factor < own / ours * close and factor > 1


def test_what_is_saved_adds_up(models):
    """Eager's time for each call, less what the calls took, the first one's cost with it."""
    patcher = models.flux(torch.bfloat16, **WIDE_FLUX)
    fast, size = compiled(patcher), (1024, 1024, 1)
    measured(patcher, *size)
    took = each(fast, *size)
    shape = of_size(1024)
    spent = shape["calls"] * shape["eager_ms"] - 1e3 * shape["saved_seconds"]
    assert shape["calls"] == CALLS
    assert spent == pytest.approx(1e3 * shape["first_call_seconds"] + sum(took[1:]), rel=0.1)
    assert shape["factor"] == pytest.approx(shape["eager_ms"] / statistics.median(took[1:]), rel=0.1)


# Skip Blocks ------------------------------------------------------------------------------------------------------


def test_a_run_behind_skip_blocks_gains_what_a_clock_around_it_says(models):
    """Beside ComfyUI's run of as many full steps. Full steps alone gain less, skipped ones more."""
    from anyshape.accel import stats

    patcher = models.unet("sdxl", torch.float16)
    fast, run = skipping(compiled(patcher)), {"width": 1024, "height": 1024, "steps": 20}
    models.sample(compiled(patcher, timed=True), **run | {"steps": 6})
    own, ours = (
        statistics.median(milliseconds(lambda one=one: models.sample(one, **run)) for _ in range(3))
        for one in (patcher, fast)
    )
    stats.STATS.clear()  # eager's time stays
    models.sample(fast, **run)
    settled()
    by_step = {shape["step"]: shape for shape in shapes()}
    total = stats.snapshot()["gain"]
    print(total, own, ours, {step: shape["factor"] for step, shape in by_step.items()})
    assert set(by_step) == {"full", "skipped"} and by_step["full"]["eager_ms"] == by_step["skipped"]["eager_ms"]
    assert 1 < by_step["full"]["factor"] == pytest.approx(total["full_steps"], rel=0.01)
    assert by_step["full"]["factor"] < total["factor"] < by_step["skipped"]["factor"]
    # the sampler's own work is in both runs: a share of ours that grows with what is saved
    assert total["factor"] > own / ours / 1.3
    assert 1e3 * total["saved_seconds"] == pytest.approx(own - ours, rel=0.1)
