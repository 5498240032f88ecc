"""Warm Up on a real GPU: a listed size's first prompt is replays only, and a budget that is full is said."""

import re

import pytest
import torch

from tools.driving import compiled, compiled_control, sample_prompts, skipping, steering
from tools.on_gpu import SMALL, SMALL_FLUX
from tools.oracles import expect, shapes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_stats", "no_graphs_left")]

SIZES = [(960, 720, 1), (728, 720, 1), (544, 408, 2), (512, 512, 1)]
LIST = "\n".join(f"{width}x{height} batch {batch}" for width, height, batch in SIZES)


def warm(pack, model, sizes=LIST, **inputs):
    """The node's report."""
    out = pack.nodes.WarmUp.PREPARE_CLASS_CLONE({}).execute(model, sizes, **inputs).args
    assert out[0] is model
    return out[2]


def only_replays(run):
    """``run``, whose calls of the model are all replays; nothing is captured or compiled."""
    from anyshape.accel import graphs

    before, (calls, replays) = {s["key"] for s in shapes()}, counts()
    held = graphs.held(torch.device("cuda", torch.cuda.current_device()))
    with expect(recompiles=0, fallbacks=0, evictions=0):
        out = run()
    after = counts()
    assert after[0] - calls == after[1] - replays > 0
    assert {s["key"] for s in shapes()} == before
    assert graphs.held(torch.device("cuda", torch.cuda.current_device())) == held
    return out


def counts():
    return sum(s["calls"] for s in shapes()), sum(s["replays"] for s in shapes())


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
@pytest.mark.parametrize("cfg", ["on", "off"])
def test_the_first_prompt_replays(pack, models, name, cfg):
    model = compiled(models.unet(name, torch.float16, **SMALL))
    report = warm(pack, model, cfg=cfg)
    assert report.count(" (graph) ") == len(SIZES)
    for width, height, batch in SIZES:
        scale = 5.0 if cfg == "on" else 1.0
        only_replays(lambda w=width, h=height, b=batch, s=scale: models.sample(model, w, h, b, steps=3, cfg=s))


def test_the_first_prompt_of_a_recorded_model_replays(pack, models):
    model = compiled(models.flux(torch.bfloat16, **SMALL_FLUX))
    report = warm(pack, model, positive=models.conditioning(model, tokens=77))
    assert report.count(" (graph) ") == len(SIZES)
    for width, height, batch in SIZES:
        only_replays(lambda w=width, h=height, b=batch: models.sample(model, w, h, b, steps=3, tokens=77))


def test_every_kind_of_step_replays(pack, models):
    model = skipping(compiled(models.unet("sdxl", torch.float16, **SMALL)))
    warm(pack, model)
    for width, height, batch in SIZES:
        for steps in (12, 8):  # in the shorter run nothing is skipped
            only_replays(lambda w=width, h=height, b=batch, s=steps: models.sample(model, w, h, b, steps=s))


def test_a_controlnet_that_begins_in_mid_run_replays(pack, models):
    patcher = models.unet("sd15", torch.float16, **SMALL)
    control = compiled_control(models.controlnet_for(patcher))
    prompts = [models.conditioning(patcher, tokens=154, seed=seed) for seed in (1, 2)]
    positive, negative = steering(control, width=512, height=512, start_percent=0.3)(*prompts)
    model = compiled(patcher)
    warm(pack, model, "512x512", positive=positive, negative=negative)
    only_replays(lambda: sample_prompts(model, positive, negative, torch.zeros(1, 4, 64, 64), steps=6))


def test_random_state_is_left_alone(pack, models):
    model = compiled(models.unet("sd15", torch.float16, **SMALL))
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    warm(pack, model, "512x512")
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.equal(torch.cuda.get_rng_state(), before[1])


def test_a_full_budget_is_said(pack, models):
    """The largest are there, the rest is named, nothing was pushed out, and a size that did not fit still works."""
    from anyshape.accel import graphs

    patcher = models.unet("sdxl", torch.float16)  # graphs of a small model take hardly more than the pool
    device = torch.device("cuda", torch.cuda.current_device())
    sizes = [(side, side) for side in range(1024, 320, -64)]
    held = []
    for count in (len(sizes), 2, len(sizes)):  # MiB; the first time libraries load their own kernels as well
        some = sizes[:count]  # the largest come first, here and below
        warm(pack, compiled(patcher, verify=False), "\n".join(f"{width}x{height}" for width, height in some))
        held.append(sum(graphs.held(device).values()) >> 20)
        graphs.cache(device).clear()
    _, two, all_ = held
    budget = (two + all_) // 2
    model = compiled(patcher, graph_budget_mb=budget, verify=False)
    with expect(evictions=0):
        report = warm(pack, model, "\n".join(f"{width}x{height}" for width, height in reversed(sizes)))
    rows = report.splitlines()[1 : len(sizes) + 1]
    states = [re.search(r"(fast|as ComfyUI) \((\w+)\)|not run", row) for row in rows]
    states = [state[2] or state[0] for state in states]
    fit = states.count("graph")
    assert 1 < fit < len(sizes) - 1, (held, report)
    assert states == ["graph"] * fit + ["tape"] + ["not run"] * (len(sizes) - fit - 1)
    assert sum("Raise graph_budget_mb: it is full" in row for row in rows) == len(sizes) - fit
    assert report.count(f"graph_budget_mb ({budget}) is full") == 1  # the sentence, below
    assert len(graphs.held(device)) == fit
    models.sample(model, *sizes[fit], steps=3)
    late = next(s for s in shapes() if s["width"] == sizes[fit][0])
    assert late["state"] == "graph" and late["replays"] > 0


def test_a_size_too_large_for_the_budget_does_not_stop_the_others(pack, models):
    patcher = models.unet("sdxl", torch.float16, **SMALL)
    report = warm(pack, compiled(patcher, graph_budget_mb=1), "2048x2048\n64x64")
    assert "and graph_budget_mb is 1" in report and report.count("not run") == 0
