"""Warm Up on the CPU, in front of real sampling on small models: sizes known, faults, Cancel, the budget."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from tools.driving import SMALL_UNETS, compiled, compiled_control, every_progress, sample_prompts, skipping, steering
from tools.oracles import FUSED, error, expect, fallbacks, last_run, shapes
from tools.warming import FORMS, ran, warm

LISTED = {(136, 120, 1), (64, 96, 2), (128, 128, 1)}


def first_calls():
    return {s["key"] for s in shapes()}


def nothing_new(run):
    """``run``, in which no shape is new and nothing compiles."""

    before = first_calls()
    with expect(recompiles=0, kernels=0, fallbacks=0):
        out = run()
    assert first_calls() == before
    return out


def test_a_preset_is_warmed_up(pack, patcher, clean_stats, monkeypatch) -> None:
    from anyshape.accel import size_list

    monkeypatch.setitem(size_list.PRESETS, "SD1.5", "64x96, 96x64")
    report = warm(pack, compiled(patcher), "64x64", preset="SD1.5")
    assert ran().keys() == {(64, 64, 1), (64, 96, 1), (96, 64, 1)} and len(report.splitlines()) == 4


def test_listed_sizes_are_known_before_their_first_prompt(pack, models, clean_stats) -> None:
    """And of others nothing compiles either. With a pooled embedding."""
    model = compiled(models.unet("sdxl", torch.float32, **SMALL_UNETS["sdxl"]))
    report = warm(pack, model)
    assert ran().keys() == LISTED and {s["state"] for s in shapes()} == {FUSED}
    as_told = ["model", "as", "ComfyUI", f"({FUSED})"]  # on a CPU
    assert [line.split()[:6] for line in report.splitlines()[1:]] == [
        ["128x128", "1", *as_told], ["136x120", "1", *as_told], ["64x96", "2", *as_told],
    ]  # fmt: skip
    nothing_new(lambda: [models.sample(model, *size, steps=2) for size in LISTED])
    with expect(recompiles=0, kernels=0, fallbacks=0):
        models.sample(model, 200, 72, 3, steps=2)
    assert (200, 72, 3) in ran()


@pytest.mark.parametrize(("cfg", "rows"), [("auto", {2, 4}), ("off", {1, 2}), ("both", {1, 2, 4})])
def test_cfg_says_which_prompts_are_joined(pack, patcher, clean_stats, cfg, rows) -> None:
    warm(pack, compiled(patcher), "64x64\n64x64 batch 2", cfg=cfg)
    assert {int(s["key"].split("x[")[1].split("x")[0]) for s in shapes()} == rows


def test_the_prompts_are_the_users(pack, models, patcher, clean_stats) -> None:
    """Their length, and the ControlNet in them; one prompt stands for both."""
    control = compiled_control(models.controlnet_for(patcher))
    prompts = [models.conditioning(patcher, tokens=154, seed=seed) for seed in (1, 2)]
    positive, negative = steering(control, start_percent=0.3)(*prompts)
    model = compiled(patcher)
    warm(pack, model, "128x128", positive=positive, negative=negative)
    nothing_new(lambda: sample_prompts(model, positive, negative, steps=4))
    assert ran("controlnet") and all("154x64" in s["key"] for s in shapes() if "context" in s["key"])
    warm(pack, model, "64x64", negative=negative)
    nothing_new(lambda: sample_prompts(model, positive, negative, torch.zeros(1, 4, 8, 8), steps=4))


@pytest.mark.parametrize("interval", [1, 3, 20])
def test_every_kind_of_step_is_warmed(pack, models, patcher, clean_stats, interval) -> None:
    model = skipping(compiled(patcher), interval=interval)
    warm(pack, model, "72x64\n64x96 batch 2")
    assert last_run()["resets"] == {} and (last_run()["skipped"] > 0) == (interval > 1)
    kinds = {kind for kind in ("full", "skipped") for s in shapes() if f"step={kind}" in s["key"]}
    assert kinds == ({"full", "skipped"} if interval > 1 else set())
    nothing_new(lambda: [models.sample(model, *size, steps=12) for size in ((72, 64), (64, 96, 2))])
    assert interval == 1 or last_run()["skipped"] > 0
    nothing_new(lambda: models.sample(model, 72, 64, steps=8))
    assert last_run()["skipped"] == 0


def test_results_and_random_state_are_those_without_it(pack, models, patcher, clean_stats) -> None:
    """To the bit, weights and attributes of the model included."""
    from tools.oracles import assert_untouched, footprint

    model = compiled(patcher)
    wanted = models.sample(model, 136, 120, steps=2)
    before = footprint(patcher.model.diffusion_model)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    warm(pack, model)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert_untouched(patcher.model.diffusion_model, before)
    assert torch.equal(models.sample(model, 136, 120, steps=2), wanted)


def test_vae(pack, models, patcher, clean_stats) -> None:
    from anyshape.accel.comfy.vae import compile_vae

    vae, message = compile_vae(models.vae(torch.float32, ch=32, num_res_blocks=1))
    assert message == ""
    report = warm(pack, compiled(patcher), "64x96 batch 2\n72x64", vae=vae)
    assert ran("vae").keys() == {(64, 96, 2), (72, 64, 1)}
    assert report.count("VAE decode") == report.count("VAE encode") == report.count("model") == 2
    with torch.inference_mode():
        nothing_new(lambda: (vae.decode(torch.randn(2, 4, 12, 8)), vae.encode(torch.rand(1, 64, 72, 3))))


def test_what_is_not_compiled_passes_through(pack, models, patcher, clean_stats) -> None:
    vae = models.vae(torch.float32, ch=32, num_res_blocks=1)
    report = warm(pack, patcher, "64x64", vae=vae)
    assert "connect Compile Model before Warm Up: there is nothing to warm up" in report
    assert "this VAE does not come from Compile VAE" in report and shapes() == []
    assert "connect Compile Model before Warm Up" in warm(pack, compiled(patcher, mode="off"), "64x64")


def test_bad_lines_with_good_ones(pack, patcher, clean_stats) -> None:
    report = warm(pack, compiled(patcher), "65x71\n64x64\n1024y1152\n70x64 batch 0")
    assert f"line 3: '1024y1152' - {FORMS}" in report and "line 4: '70x64 batch 0' - the batch is 0" in report
    assert "line 1: '65x71' - taken as 64x64" in report and ran().keys() == {(64, 64, 1)}
    assert "no size to warm up" in warm(pack, compiled(patcher), "# none\n")


def test_a_long_list_of_bad_lines_is_told_in_short(pack, patcher, clean_stats) -> None:
    """Every open browser gets what a node says, and the log has it too."""
    from anyshape.accel.comfy.warming import warm_up

    done = warm_up(compiled(patcher), "64x64\n" + "no size\n" * 10_000)
    assert (done.listed, done.ready, done.bad) == (1, 1, 10_000)
    assert done.line.splitlines()[0] == "1 of 1 sizes ready"
    assert done.line.splitlines()[5:] == [done.warnings[4], "and 9,995 more entries are not sizes"]
    assert len(done.warnings) == 6 and len(done.line) < 1000 and len(done.report) < 1200


@pytest.mark.parametrize("mode", ["auto", "exact"])
def test_eager_is_measured_beside_ours(pack, models, fresh, clean_stats, monkeypatch, mode) -> None:
    """On another clone of the same model: nothing is recorded for it, counted as a call, or left in place."""
    from anyshape.accel import gain
    from anyshape.accel.comfy.warming import warm_up

    monkeypatch.setattr(gain, "can_gain", lambda: True)
    fast = compiled(fresh, mode=mode)
    wanted = models.sample(fresh, width=64, height=64, seed=1, steps=2)
    done = warm_up(fast, "64x64\n72x64", measure=True)
    head, *rows = done.report.splitlines()
    x = head.split("state")[1].split().index("x")
    for shape, row in zip(shapes(), rows, strict=True):
        assert shape["calls"] == 3 and shape["eager_ms"] > 0
        assert shape["factor"] == pytest.approx(shape["eager_ms"] / shape["median_ms"], rel=0.01)
        assert shape["saved_seconds"] < 0  # what is made ahead only costs, so far
        ratio = shape["eager_ms"] / shape["median_ms"]  # the row's is made of these, rounded to 3 digits and then to 2
        assert float(row.split(")")[1].split()[x]) == pytest.approx(ratio, abs=0.0056)
    assert fallbacks() == [] and error(models.sample(fast, width=64, height=64, seed=1, steps=2), wanted) < 1e-4
    assert sum(shape["calls"] for shape in shapes()) == 3 + 3 + 2
    monkeypatch.undo()
    assert all(shape["factor"] is None for shape in shapes())  # on a CPU nothing is gained


@pytest.mark.gpu
def test_the_gain_is_measured_on_a_gpu(pack, models, clean_stats) -> None:
    """A model for which the host is the limit: its graph is faster, by what a clock around both says as well."""
    import time

    from anyshape.accel.comfy.warming import warm_up

    from tools.driving import SMALL_UNET

    patcher = models.unet("sd15", torch.float16, **SMALL_UNET)
    fast = compiled(patcher)
    warm_up(fast, "256x256", measure=True)
    (shape,) = shapes()

    def seconds(model) -> float:
        settings = {"width": 256, "height": 256, "seed": 1, "steps": 20}
        models.sample(model, **settings)
        torch.cuda.synchronize()
        started = time.perf_counter()
        models.sample(model, **settings)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    assert shape["factor"] > 1.2 and seconds(patcher) > seconds(fast)


def test_what_is_ready_is_counted(pack, models, patcher, clean_stats) -> None:
    from anyshape.accel.comfy.warming import warm_up

    counted = [
        (done.listed, done.ready, done.bad)
        for done in (
            warm_up(compiled(patcher), "64x64, 72x64\n16384x16384 batch 4096\nx"),
            warm_up(patcher, "64x64"),
            warm_up(compiled(patcher), "x"),
            warm_up(compiled(patcher), ""),
        )
    ]
    assert counted == [(3, 2, 1), (1, 0, 0), (0, 0, 1), (0, 0, 0)]
    assert warm_up(compiled(patcher), "x").line.startswith("no size is ready\nline 1: 'x' - write")


def test_a_size_that_cannot_fit_is_not_tried(pack, patcher, clean_stats) -> None:
    report = warm(pack, compiled(patcher), "64x64\n16384x16384 batch 4096")
    assert "not run" in report.splitlines()[1] and "make it smaller" in report.splitlines()[1]
    assert ran().keys() == {(64, 64, 1)}


@pytest.mark.parametrize("raised", [RuntimeError("boom"), torch.OutOfMemoryError("short")], ids=str)
def test_a_size_that_fails_costs_no_other(pack, models, patcher, clean_stats, raised) -> None:
    """ComfyUI's own forward fails at one size; the report and the counters say which."""
    model = compiled(patcher)

    def fail(executor, x, *args, **kwargs):
        if x.shape[-1] == 16:
            raise raised
        return executor(x, *args, **kwargs)

    from comfy.patcher_extension import WrappersMP

    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", fail)
    report = warm(pack, model)
    (failed,) = [line for line in report.splitlines() if "128x128" in line]
    assert "failed" in failed and ("out of memory" in failed or "boom" in failed)
    assert ran().keys() == LISTED - {(128, 128, 1)}
    assert [f["where"] for f in fallbacks()] == ["Warm Up"]


def test_an_interrupt_ends_it(pack, models, patcher, clean_stats, monkeypatch) -> None:
    """Between two sizes, by ComfyUI's own button; a later prompt is as ever."""
    import comfy.model_management as mm
    import comfy.utils

    model, wanted = compiled(patcher), models.sample(patcher, 136, 120, steps=2)
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda *_, **__: mm.interrupt_current_processing())
    with pytest.raises(mm.InterruptProcessingException):
        warm(pack, model)
    mm.interrupt_current_processing(False)
    assert ran().keys() == {(128, 128, 1)} and fallbacks() == []
    monkeypatch.undo()
    assert error(models.sample(model, 136, 120, steps=2), wanted) < 1e-5


def test_progress(pack, patcher, clean_stats, monkeypatch) -> None:
    import comfy.utils

    seen = []
    every_progress(monkeypatch)
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda value, total, *_, **__: seen.append((value, total)))
    warm(pack, compiled(patcher), "64x64\n72x64", cfg="both")
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_failure_of_ours_costs_nothing(pack, patcher, clean_stats, monkeypatch) -> None:
    from anyshape.accel.comfy import warming

    monkeypatch.setattr(warming, "_in_order", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in warm(pack, compiled(patcher), "64x64")


# The budget -------------------------------------------------------------------------------------------------------


def test_a_graph_that_did_not_fit_ends_the_warm_up(pack) -> None:
    from anyshape.accel.comfy import warming
    from anyshape.accel.graphs import Pins

    assert warming._spent(100 << 20, Pins()) == ""
    assert "graph_budget_mb (100) is full" in warming._spent(100 << 20, Pins(full=True))


def test_a_graph_that_is_gone_is_said(pack, monkeypatch) -> None:
    from anyshape.accel.comfy import warming
    from anyshape.accel.size_list import Row, Shape

    monkeypatch.setattr(warming.graphs, "held", lambda _: {("UNet", "there"): 1})
    rows = [Row(Shape(64, 64), "model", "graph", keys=frozenset({("UNet", key)})) for key in ("gone", "there")]
    assert [row.state for row in warming._settled(rows, torch.device("cpu"))] == ["evicted", "graph"]
    assert "memory ran short" in rows[0].why and not rows[1].why


def test_sizes_that_lost_their_graph_to_a_later_one_are_run_again(pack, monkeypatch) -> None:
    from anyshape.accel.comfy import warming
    from anyshape.accel.size_list import Row, Shape

    there, ran = {("UNet", "b"): 1}, []
    monkeypatch.setattr(warming.graphs, "held", lambda _: there)

    def run(job: Any) -> Row:
        ran.append(job)
        there[job.part, "a"] = 1
        return Row(job.shape, job.part, "graph", 2.0, keys=frozenset({(job.part, "a")}))

    monkeypatch.setattr(warming, "_run", run)
    jobs = [warming._Job(Shape(64, 64), "UNet", 1, 0.0, torch.device("cpu"), tuple, eager=tuple) for _ in "abc"]
    kept = [frozenset({("UNet", key)}) for key in "ab"]
    rows = [Row(Shape(64, 64), "UNet", "graph", 1.0, keys=keys) for keys in (*kept, frozenset())]
    again = warming._captured_again(jobs, rows, torch.device("cpu"))
    assert [job.eager for job in ran] == [None]
    assert (again[0].seconds, again[0].keys) == (3.0, kept[0]) and again[1:] == rows[1:]


def test_pins_end_with_the_warm_up(pack, patcher) -> None:
    from anyshape.accel import graphs

    warm(pack, compiled(patcher), "64x64")
    assert graphs.cache(patcher.load_device)._pins is None
