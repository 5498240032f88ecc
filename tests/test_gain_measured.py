"""The gain's figures beside a clock of the test's own: of models, of ControlNets, and behind Skip Blocks.

On a CPU nothing is gained, so there it is made known as on a GPU, and what is checked is that the figures are right.
What a GPU alone can show, its times and its losses, has tests of its own: ``test_gpu_gain``.
"""

import json
import shutil
import subprocess
import time

import pytest
import torch

from tools import embed
from tools.driving import SMALL_UNET, compiled, compiled_control, skipping, steering
from tools.on_gpu import small
from tools.oracles import error, fallbacks, last_run, shapes
from tools.paths import ROOT
from tools.warming import warm

embed.bare_pack()

from anyshape.accel import gain, stats  # noqa: E402 - the package exists from the line above on
from anyshape.accel.times import Eager  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIDE = 256 if torch.cuda.is_available() else 64
RUN = {"width": SIDE, "height": SIDE, "steps": 12}

pytestmark = pytest.mark.usefixtures("clean_stats", "no_graphs_left")


@pytest.fixture(params=DEVICES)
def unet(request, models, monkeypatch):
    """A small UNet on the device, where a factor is given."""
    monkeypatch.setattr(gain, "can_gain", lambda: True)
    if request.param == "cpu":
        return models.unet("sd15", torch.float32, **SMALL_UNET)
    return small(models, "sd15")


def of_kind(kind: str) -> list[dict]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the figures of calls on a GPU are read when it is done with them
    return [shape for model in stats.snapshot()["models"] if model["kind"] == kind for shape in model["shapes"]]


def by_step() -> dict[str, dict]:
    """The sizes of a run, by the kind of step."""
    return {shape["step"]: shape for shape in of_kind("model")}


# ControlNets ------------------------------------------------------------------------------------------------------


def test_warm_up_measures_a_controlnet_with_its_model(pack, models, unet) -> None:
    control = models.controlnet_for(unet)
    fast, steer = compiled(unet), steering(compiled_control(control), width=SIDE, height=SIDE)
    positive, negative = steer(models.conditioning(unet, seed=1), models.conditioning(unet, seed=2))
    warm(pack, fast, f"{SIDE}x{SIDE}\n{SIDE + 8}x{SIDE}", positive=positive, negative=negative, measure=True)
    assert len(of_kind("controlnet")) == len(of_kind("model")) == 2
    for shape in of_kind("controlnet") + of_kind("model"):
        assert shape["eager_ms"] > 0 and shape["step"] == ""
        assert shape["factor"] == pytest.approx(shape["eager_ms"] / shape["median_ms"], rel=0.01)
    assert fallbacks() == []


def test_what_times_eager_leaves_a_controlnet_as_comfyui_has_it(pack, models, unet) -> None:
    """The picture is ComfyUI's, and no forward of the timed run is counted among ours."""
    control = models.controlnet_for(unet)
    settings = RUN | {"steps": 2}
    wanted = models.sample(unet, **settings, steer=steering(control))
    (timed,) = pack.nodes.CompileModel.execute(unet, "time auto").args
    out = models.sample(timed, **settings, steer=steering(compiled_control(control)))
    assert shapes() == []
    assert torch.equal(out, wanted) if unet.load_device.type == "cpu" else error(out, wanted) < 5e-3
    models.sample(compiled(unet), **settings, steer=steering(compiled_control(control)))
    (shape,) = of_kind("controlnet")
    assert shape["eager_ms"] > 0 and shape["calls"] == 2


def test_accelerate_times_as_compile_model_does(pack, models, unet) -> None:
    node, control = pack.nodes.Accelerate, models.controlnet_for(unet)
    vae = object()  # it passes through
    timed, same, theirs = node.execute(unet, "time auto", vae=vae, control_net=control).args
    assert same is vae and type(theirs) is not type(control)
    models.sample(timed, **RUN | {"steps": 2}, steer=steering(theirs))
    assert shapes() == []
    fast, _, theirs = node.execute(unet, "auto", control_net=control).args
    models.sample(fast, **RUN | {"steps": 2}, steer=steering(theirs))
    assert [shape["eager_ms"] > 0 for shape in of_kind("model") + of_kind("controlnet")] == [True, True]
    assert node.validate_inputs("time exact") is True and "not in the list" in node.validate_inputs("time off")


# Behind Skip Blocks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile_too", [True, False])
def test_both_kinds_of_step_stand_beside_comfyuis_full_one(models, unet, compile_too) -> None:
    plain = compiled(unet) if compile_too else unet
    models.sample(skipping(plain), **RUN)
    steps = by_step()
    assert last_run()["skipped"] > 0 and set(steps) == {"full", "skipped"}
    full, skipped = (shape for model in stats.STATS.models() for shape in model.shapes.values())
    assert full.eager is skipped.eager
    full.eager.once = 1000.0
    steps = by_step()
    for shape in steps.values():
        assert shape["eager_ms"] == 1000.0
        assert shape["factor"] == pytest.approx(1000 / shape["median_ms"], rel=0.01)
    total = stats.snapshot()["gain"]
    calls, ours = ([steps[step][name] for step in ("full", "skipped")] for name in ("calls", "median_ms"))
    whole = 1000 * sum(calls) / sum(count * ms for count, ms in zip(calls, ours, strict=True))
    assert total["factor"] == pytest.approx(whole, rel=0.01)
    assert total["full_steps"] == pytest.approx(steps["full"]["factor"], rel=0.01)
    assert total["saved_seconds"] == pytest.approx(sum(s["saved_seconds"] for s in steps.values()), abs=0.011)


def test_eagers_time_is_one_whoever_measured_it(pack, models, unet) -> None:
    """By Warm Up behind Skip Blocks, in full steps; every run at that size knows it then, with that node or without."""
    fast = compiled(unet)
    report = warm(pack, skipping(fast), f"{SIDE}x{SIDE}", measure=True)
    head, row, *_ = report.splitlines()  # and sentences, where one is said
    steps = by_step()
    assert set(steps) == {"", "full", "skipped"}  # of 8 steps and fewer nothing is skipped
    assert len({shape["eager_ms"] for shape in steps.values()}) == 1 and steps["full"]["eager_ms"] > 0
    alone = gain.total(shape for step, shape in steps.items() if step != "skipped")
    x = head.split("state")[1].split().index("x")
    assert float(row.split(")")[1].split()[x]) == pytest.approx(alone["factor"], abs=0.006)
    runs = stats.snapshot()["skip"]  # what was timed skips nothing, so it is no such run
    assert [run["skipped"] > 0 for run in runs] == [False, True] and runs[1]["resets"] == {} and fallbacks() == []


@pytest.mark.parametrize("device", DEVICES)
def test_skipping_gains_on_every_device(models, device) -> None:
    """Where nothing else does: less work is less work. What skips nothing has no factor there."""
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    patcher = models.unet("sd15", torch.float32, **SMALL_UNET)
    fast = skipping(patcher)
    models.sample(fast, **RUN)
    models.sample(compiled(patcher), **RUN | {"steps": 2})
    for model in stats.STATS.models():
        for own in model.eager.values():
            own.once = 1000.0
    factors = {step: shape["factor"] for step, shape in by_step().items()}
    assert factors["full"] > 0 and factors["skipped"] > 0
    assert (factors[""] is None) == (device == "cpu")


# Seconds ----------------------------------------------------------------------------------------------------------


def test_what_is_saved_adds_up(models, unet) -> None:
    """Eager's time for each call that was asked for, less what the calls took, the first one's cost with it."""
    fast = compiled(unet)
    settings = RUN | {"steps": 6}
    if unet.load_device.type == "cuda":
        models.sample(unet, **settings)  # what a process needs once is not ours to pay
    started = time.perf_counter()
    models.sample(fast, **settings)
    if unet.load_device.type == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - started
    (entry,) = [shape for model in stats.STATS.models() for shape in model.shapes.values()]
    entry.eager.once = 1000.0
    (shape,) = shapes()
    spent = shape["calls"] * 1.0 - shape["saved_seconds"]
    assert shape["calls"] == 6 and shape["first_call_seconds"] < spent <= took
    later = sum(entry.times._done) / 1e3  # each by itself: a mean would depend on how even they are
    assert spent == pytest.approx(shape["first_call_seconds"] + later, rel=0.01)


# Below 1 ----------------------------------------------------------------------------------------------------------

LINE = """
import { readFileSync } from "node:fs";
import { badge } from "./web/anyshape/format.js";
const words = JSON.parse(readFileSync("locales/en/main.json")).anyshape, stats = JSON.parse(readFileSync(0));
const entry = { id: "4", workflow: "", type: "AnyShapeCompileModel", state: "ready", message: "" };
console.log(JSON.stringify(badge({ ...entry, models: stats.models.map((one) => one.name) }, stats, words)));
"""


def line() -> dict:
    """What the page shows on a node whose model has just run, on a GPU."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node.js is not installed")
    told = json.dumps(stats.snapshot() | {"device": "a GPU"})
    command = [node, "--input-type=module", "--eval", LINE]
    return json.loads(subprocess.run(command, input=told, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("slow", [False, True])
def test_what_is_slower_than_comfyui_is_red(models, unet, monkeypatch, slow) -> None:
    """Programs that really take longer than ComfyUI's forwards do, both measured."""
    from anyshape.accel.comfy.warming import warm_up
    from anyshape.accel.tape.program import Program

    device, own = unet.load_device.type, Program.run

    def run(self, inputs, bound):
        if slow and device == "cpu":
            time.sleep(0.3)
        elif slow:
            torch.cuda._sleep(200_000_000)  # clock ticks: about a tenth of a second
        return own(self, inputs, bound)

    monkeypatch.setattr(Program, "run", run)
    fast = compiled(unet, graph_budget_mb=0)
    warm_up(fast, f"{SIDE}x{SIDE}", measure=True)
    models.sample(fast, **RUN | {"steps": 3})
    (shape,) = shapes()
    if not slow and device == "cpu":  # there both times differ by chance
        (entry,) = [each for model in stats.STATS.models() for each in model.shapes.values()]
        entry.eager._times, entry.eager.once = Eager()._times, 10_000.0
        (shape,) = shapes()
    shown = line()
    assert (shape["factor"] < 1) is slow and shown["loss"] is slow
    assert not slow or (shape["saved_seconds"] < 0 and "lost so far" in shown["text"])


def test_our_look_at_a_call_is_in_its_time(models, unet, monkeypatch) -> None:
    """A small model's host takes as long for it as for the call itself."""
    from anyshape.accel.comfy.sampling_state import SamplingState

    look, took = SamplingState.weights, 0.6  # seconds; longer than a call takes on a busy machine

    def slowly(self):
        time.sleep(took)
        return look(self)

    fast = compiled(unet)
    models.sample(fast, **RUN | {"steps": 1})
    monkeypatch.setattr(SamplingState, "weights", slowly)
    models.sample(fast, **RUN | {"steps": 3})
    (shape,) = shapes()
    assert shape["calls"] == 4 and shape["median_ms"] > 1e3 * took * 0.9
