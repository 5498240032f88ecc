"""What the stats say of eager's time: the recorded forward's, where recording it did not matter."""

import itertools
import time
import types

import pytest
import torch

from tools import embed
from tools.driving import compiled

embed.bare_pack()

from anyshape.accel.clock import Clock  # noqa: E402 - the package exists from the line above on

CPU = torch.device("cpu")


@pytest.mark.parametrize("operations, known", [(10, True), (1000, False)])
def test_on_a_cpu_recording_must_be_a_small_share(operations, known):
    clock = Clock(CPU)
    assert clock.run(lambda: time.sleep(0.05) or 7) == 7
    found = clock.eager_ms(operations)
    assert 50 <= found < 200 if known else found is None


@pytest.mark.parametrize(("seconds", "known"), [(0.01, None), (1.5, 1500.0)])
def test_eager_is_in_the_stats_where_it_is_known(pack, clean_stats, monkeypatch, seconds, known):
    """A tiny model's time is mostly recording; one that takes long says how long."""
    from anyshape.accel import clock, stats

    from tools.architectures import TABLE, patchers

    looks = itertools.count()  # how long this machine takes is not asked
    monkeypatch.setattr(clock, "time", types.SimpleNamespace(perf_counter=lambda: next(looks) * seconds))
    fast, entry = compiled(patchers.make("Flux"), mode="exact"), TABLE["Flux"]
    args, named = entry.inputs(0)
    from comfy.patcher_extension import WrapperExecutor, WrappersMP

    def run():
        with torch.inference_mode():
            for _ in range(2):
                model = fast.model.diffusion_model
                model(*args, **named | {"transformer_options": {"wrappers": fast.wrappers}})

    outer = [each for several in fast.wrappers[WrappersMP.OUTER_SAMPLE].values() for each in several]
    WrapperExecutor.new_executor(run, outer).execute()
    (shape,) = [shape for model in stats.snapshot()["models"] for shape in model["shapes"]]
    assert shape["state"] == "tape" and shape["calls"] == 2
    assert shape["eager_ms"] == known


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 8192])
def test_on_a_gpu_the_host_must_be_done_before(size):
    """Many small products are launched as fast as the host can; large ones take what they take."""
    device = torch.device("cuda")
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)

    def forward():
        for _ in range(20):
            x @ x

    Clock(device).run(forward)  # the first one in a process says nothing
    torch.cuda.synchronize()
    clock, start, end = Clock(device), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(), clock.run(forward), end.record()  # one run: the card's clock rises from one to the next
    assert size == 64 or clock.eager_ms(20) is None  # it waits for nothing
    torch.cuda.synchronize()
    found = clock.eager_ms(20)
    assert found is None if size == 64 else found == pytest.approx(start.elapsed_time(end), rel=0.05)


@pytest.mark.gpu
def test_the_first_forward_of_a_process_says_nothing(monkeypatch):
    monkeypatch.setattr("anyshape.accel.clock._BEGUN", set())
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    clock = Clock(x.device)
    clock.run(lambda: [x @ x for _ in range(20)])
    torch.cuda.synchronize()
    assert clock.eager_ms(20) is None
