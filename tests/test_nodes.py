"""The nodes through the real server: bad values, stats, one model with and without them; and in scripts, without it."""

import json
import time

import numpy as np
import pytest
import torch

from tools.api_format import node, text_to_image
from tools.comfy_server import ComfyServer, PromptError
from tools.oracles import STATS_KEYS

CLOSE = 4 / 255  # of a pixel's range; what the demo allows
SIZE = (136, 120, 2)  # a latent of 17 x 15


# Workflows --------------------------------------------------------------------------------------------------------


def demo(sampled: list, decoded: list, seed: int = 5, **more: dict) -> dict:
    """Text to image on the demo model, with the MODEL ``sampled`` and the VAE ``decoded``; ``more``: further nodes."""
    ids = "loader yes latent sampler decode save no"
    return text_to_image(ids, SIZE, sampled, decoded, "nodes", seed=seed, cfg=2.0) | more


def without(**more: dict) -> dict:
    return demo(["loader", 0], ["loader", 1], **more)


def with_nodes(mode: str = "auto", enabled: bool = True, budget: int = 2048, seed: int = 5) -> dict:
    model = node("AnyShapeCompileModel", model=["loader", 0], mode=mode, graph_budget_mb=budget)
    vae = node("AnyShapeCompileVAE", vae=["loader", 1], enabled=enabled)
    return demo(["model", 0], ["vae", 0], seed, model=model, vae=vae)


def files(server: ComfyServer, flow: dict, node_id: str = "save") -> list[bytes]:
    """The saved files of a workflow, which must really have sampled."""
    ran = []
    entry = server.run(flow, lambda kind, data: ran.append(data.get("node")) if kind == "executing" else None)
    assert "sampler" in ran
    return [server.get("/view", **image).content for image in entry["outputs"][node_id]["images"]]


def pixels(server: ComfyServer, flow: dict) -> np.ndarray:
    """The pictures of a workflow, [B, H, W, 3] in 0..1."""
    entry = server.run(flow)
    pictures = [server.view(image).convert("RGB") for image in entry["outputs"]["save"]["images"]]
    return np.stack([np.asarray(picture, dtype=np.float32) / 255 for picture in pictures])


def stats(server: ComfyServer) -> dict:
    return server.get("/anyshape/stats").json()


def calls(server: ComfyServer) -> int:
    return sum(shape["calls"] for model in stats(server)["models"] for shape in model["shapes"])


@pytest.fixture(scope="module")
def plain(server) -> tuple[list[bytes], np.ndarray]:
    """What the workflow without our nodes makes: its files, and the same as pixels."""
    saved, before = files(server, without()), calls(server)
    shown = pixels(server, without(again=node("SaveImage", images=["decode", 0], filename_prefix="again")))
    assert calls(server) == before
    return saved, shown


def test_with_without_with(server, plain) -> None:
    """One checkpoint, A with the nodes, B without, A with: B's files are those of a run that never saw us."""
    first = pixels(server, with_nodes())
    count = calls(server)
    assert count > 0
    assert files(server, without()) == plain[0]
    assert calls(server) == count
    again = pixels(server, with_nodes())
    assert calls(server) > count
    assert np.array_equal(first, again)
    assert first.shape == (2, 120, 136, 3) and np.abs(first - plain[1]).max() <= CLOSE


def test_switched_off_is_plain(server, plain) -> None:
    before = calls(server)
    assert np.array_equal(pixels(server, with_nodes(mode="off", enabled=False)), plain[1])
    assert calls(server) == before


def test_exact_is_bit_equal(server, plain) -> None:
    before = calls(server)
    assert np.array_equal(pixels(server, with_nodes(mode="exact", enabled=False)), plain[1])
    assert calls(server) > before  # it went through the node all the same


@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_every_setting_makes_the_image(server, plain, budget) -> None:
    """Kernels on a machine without a GPU and a budget larger than any card included."""
    assert np.abs(pixels(server, with_nodes(budget=budget)) - plain[1]).max() <= CLOSE


def test_a_second_seed_compiles_nothing(server, plain) -> None:
    server.run(with_nodes())
    before = [(model["name"], model["kernels"], model["recompiles"]) for model in stats(server)["models"]]
    server.run(with_nodes(seed=6))
    after = [(model["name"], model["kernels"], model["recompiles"]) for model in stats(server)["models"]]
    assert before == after and {model["kind"] for model in stats(server)["models"]} >= {"model", "vae"}


def test_warm_up_before_the_first_prompt(server, plain) -> None:
    """At a size of its own: the sampler and the VAE meet nothing new, and the picture is the one without Warm Up."""
    size = {"width": 104, "height": 152, "batch_size": 2}
    flow = with_nodes(seed=8)
    flow["latent"]["inputs"] |= size
    warm = node(
        "AnyShapeWarmUp", model=["model", 0], vae=["vae", 0], positive=["yes", 0], negative=["no", 0],
        shapes="104x152 batch 2\n104y152",
    )  # fmt: skip
    before = known(server)
    listed = server.run({name: flow[name] for name in ("loader", "yes", "no", "model", "vae")} | {
        "warm": warm, "show": node("PreviewAny", source=["warm", 2])})  # fmt: skip
    report, made = listed["outputs"]["show"]["text"][0], known(server)
    assert "line 2: '104y152' - write 1024x1152, 896x768 batch 2, or 832x480x33" in report
    assert len(made - before) == 3 and all(part in report for part in ("model", "VAE decode", "VAE encode"))
    flow["sampler"]["inputs"]["model"], flow["decode"]["inputs"]["vae"] = ["warm", 0], ["warm", 1]
    shown = pixels(server, flow | {"warm": warm})
    assert known(server) == made
    flow["sampler"]["inputs"]["model"], flow["decode"]["inputs"]["vae"] = ["model", 0], ["vae", 0]
    flow["save"]["inputs"]["filename_prefix"] = "cold"
    assert np.array_equal(pixels(server, flow), shown)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"preset": "none"}, "nothing in this list is a size"),
        ({}, "line 2: 'no size' - write"),
        ({"preset": "SD9"}, "preset is 'SD9'; choose one of none, SDXL"),
    ],
)
def test_a_list_without_one_size_is_refused_before_anything_runs(server, given: dict[str, str], said: str) -> None:
    """Nobody reads a report below a green prompt."""
    warm = node("AnyShapeWarmUp", model=["model", 0], shapes="104y152\nno size", **given)
    flow = with_nodes() | {"warm": warm}
    flow["sampler"]["inputs"]["model"] = ["warm", 0]
    with pytest.raises(PromptError) as refused:
        server.queue(flow)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "given", [{"shapes": "# none yet"}, {"shapes": "no size", "preset": "sizes of the last session"}]
)
def test_a_list_without_entries_is_no_mistake_nor_are_bad_ones_beside_a_preset(server, given: dict[str, str]) -> None:
    warm = {"warm": node("AnyShapeWarmUp", model=["model", 0], **given), "show": node("PreviewAny", source=["warm", 2])}
    flow = with_nodes()
    server.run({name: flow[name] for name in ("loader", "model")} | warm)


def known(server: ComfyServer) -> set[tuple[str, str]]:
    """The shapes that have run, by model."""
    return {(model["name"], shape["key"]) for model in stats(server)["models"] for shape in model["shapes"]}


def test_a_full_queue_and_an_impatient_reader(server, plain) -> None:
    """Prompts with and without the nodes wait in one queue while the stats are read again and again."""
    flows = [with_nodes(seed=5), without(), with_nodes(seed=7), with_nodes(mode="off"), with_nodes(seed=5)]
    for number, flow in enumerate(flows):
        flow["save"]["inputs"]["filename_prefix"] = f"queue{number}"  # or equal flows would not be saved again
    queued, deadline = [server.queue(flow) for flow in flows], time.monotonic() + 300
    while server.get("/queue").json()["queue_pending"] or server.get("/queue").json()["queue_running"]:
        check_stats(stats(server))
        assert time.monotonic() < deadline
    saved = [server.history(prompt)["outputs"]["save"]["images"] for prompt in queued]
    shown = [np.stack([np.asarray(server.view(image).convert("RGB"), dtype=np.float32) / 255 for image in images])
             for images in saved]  # fmt: skip
    assert np.array_equal(shown[0], shown[4]) and np.array_equal(shown[1], plain[1])
    assert np.abs(shown[0] - plain[1]).max() <= CLOSE < np.abs(shown[2] - plain[1]).max()


# Stats ------------------------------------------------------------------------------------------------------------


OPTIONAL = {"file", "sizes", "instead", "prompt", "ended"}  # of a node's entry, where there is something to say


def check_stats(found: dict) -> None:
    assert set(found) == STATS_KEYS[""] and found["version"] == 2
    assert set(found["graphs"]) == STATS_KEYS["graphs"] and set(found["artifacts"]) == STATS_KEYS["artifacts"]
    for model in found["models"]:
        assert set(model) == STATS_KEYS["model"]
        assert all(set(shape) == STATS_KEYS["shape"] for shape in model["shapes"])
    assert all(set(fallback) == STATS_KEYS["fallback"] for fallback in found["fallbacks"])
    assert all(set(run) == STATS_KEYS["skip"] for run in found["skip"])
    assert all(set(entry) - OPTIONAL == STATS_KEYS["node"] for entry in found["nodes"])


def test_the_route_and_the_node_agree(server, plain) -> None:
    """After a run: the size in image pixels and the batch in images per prompt, as the user set them."""
    server.run(with_nodes())
    flow = {"info": node("AnyShapeShapeCacheInfo"), "show": node("PreviewAny", source=["info", 1])}
    outputs = server.run(flow)["outputs"]
    shown, text = json.loads(outputs["show"]["text"][0]), outputs["info"]["text"][0]
    check_stats(shown)
    routed = stats(server)
    check_stats(routed)
    assert [model["shapes"] for model in shown["models"]] == [model["shapes"] for model in routed["models"]]
    for kind in ("model", "vae"):
        ours = [s for model in shown["models"] if model["kind"] == kind for s in model["shapes"]]
        assert any((s["width"], s["height"], s["batch"]) == (136, 120, 2) for s in ours), kind
    assert "136x120" in text and "recompiles" in text


def test_the_info_node_runs_each_time_and_after_its_input(server, plain) -> None:
    """ComfyUI caches outputs; this node's would be old. The chart is a picture."""
    info = node("AnyShapeShapeCacheInfo", after=["decode", 0])
    flow = with_nodes() | {"info": info, "chart": node("SaveImage", images=["info", 2], filename_prefix="chart")}
    order = [[], []]
    for ran in order:
        entry = server.run(flow, lambda kind, d, ran=ran: ran.append(d.get("node")) if kind == "executing" else None)
    assert "info" in order[0] and "info" in order[1]
    assert "sampler" not in order[1]  # the rest comes from ComfyUI's cache
    (chart,) = (server.view(image) for image in entry["outputs"]["chart"]["images"])
    assert chart.width > 500 and len(chart.convert("RGB").getcolors(1 << 20)) > 10


def test_a_size_has_the_number_of_its_latest_prompt(server, plain) -> None:
    """So that a node's line can be about that prompt."""

    def prompts() -> dict[tuple[str, int], int]:
        models = [model for model in stats(server)["models"] if model["shapes"]]
        return {(model["name"], s["width"]): s["prompt"] for model in models for s in model["shapes"]}

    small, first = with_nodes(seed=11), with_nodes(seed=12)
    small["latent"]["inputs"] |= {"width": 72, "height": 72, "batch_size": 1}
    server.run(small)
    before = prompts()
    newest = max(before.values())
    assert {width for (_, width), prompt in before.items() if prompt == newest} == {72}
    server.run(first)
    changed = {key: prompt for key, prompt in prompts().items() if prompt != before.get(key)}
    assert {width for _, width in changed} == {136} and set(changed.values()) == {newest + 1}


# Bad values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"budget": -1}, ["graph_budget_mb", "-1", "min of 0"]),
        ({"budget": (1 << 20) + 1}, ["graph_budget_mb", str((1 << 20) + 1), "max of"]),
        ({"budget": "much"}, ["graph_budget_mb", "much"]),
        ({"mode": "x"}, ["mode", "'x'", "auto, exact, off"]),
        ({"mode": 7}, ["mode", "7", "auto, exact, off"]),
    ],
    ids=str,
)
def test_bad_values_are_refused(server, bad, words) -> None:
    """By ComfyUI, before anything runs, with the node, the input and the value."""
    with pytest.raises(PromptError) as refused:
        server.run(with_nodes(**bad))
    assert refused.value.node_type == "AnyShapeCompileModel"
    assert [word for word in words if word not in str(refused.value)] == []


def test_a_missing_model_is_refused(server) -> None:
    flow = with_nodes()
    del flow["model"]["inputs"]["model"]
    with pytest.raises(PromptError, match="model"):
        server.run(flow)


# Scripts ----------------------------------------------------------------------------------------------------------


def test_every_node_runs_without_a_server(pack, models, patcher) -> None:
    """As a script calls it, with what a user must give; there is no workflow whose node could be shown anything."""
    from server import PromptServer

    assert getattr(PromptServer, "instance", None) is None
    nodes, noted, ran = pack.nodes, lambda: pack.accel.stats.snapshot()["nodes"], set()

    def execute(node: type, *inputs: object, **more: object) -> tuple:
        ran.add(node)
        return node.execute(*inputs, **more).args

    before = noted()
    vae = models.vae(torch.float32, ch=32, num_res_blocks=1)
    control = models.controlnet_for(patcher)
    (model,) = execute(nodes.CompileModel, patcher, "auto", 2048)
    assert model is not patcher
    assert execute(nodes.CompileVAE, vae, True)[0] is not vae
    assert execute(nodes.CompileVAE, vae, False)[0] is vae
    assert execute(nodes.CompileControlNet, control, True)[0] is not control
    faster = execute(nodes.Accelerate, patcher, "auto", 0, vae=vae, control_net=control)
    assert [one is not given for one, given in zip(faster, (patcher, vae, control), strict=True)] == [True] * 3
    assert execute(nodes.Accelerate, patcher)[1:] == (None, None)
    assert execute(nodes.Accelerate, patcher, "off", vae=vae, control_net=control)[1:] == (vae, control)
    (skipping,) = execute(nodes.SkipBlocks, patcher, 3, "99", 0.0, 1.0, "order1")
    models.sample(skipping, width=64, height=64, steps=1)  # the line at the end of a run is told to no node
    assert execute(nodes.SkipBlocks, patcher, 0, "99", 0.0, 1.0, "order1", preset="fast")[0] is not patcher
    out, _, report = execute(nodes.WarmUp, model, "64x64")
    assert out is model and "64x64" in report
    text, figures, chart = execute(nodes.ShapeCacheInfo)
    assert "64x64" in text and json.loads(figures)["version"] == 2 and chart.shape[0] == 1
    assert noted() == before
    assert ran == set(nodes.NODES)


def test_a_mode_that_never_was_is_refused_in_scripts_too(pack, patcher) -> None:
    with pytest.raises(ValueError, match="mode is 'fast'; choose one of auto, exact, off"):
        pack.nodes.CompileModel.execute(patcher, "fast", 0)


def test_what_compare_queues_times_comfyuis_own_forwards(pack, models, fresh, clean_stats) -> None:
    """The picture is ComfyUI's to the bit."""
    from tools.oracles import shapes

    node, settings = pack.nodes.CompileModel, {"width": 64, "height": 64, "steps": 3}
    wanted = models.sample(fresh, **settings)
    (timed,) = node.execute(fresh, "time auto").args
    assert (models.sample(timed, **settings) == wanted).all() and shapes() == []
    models.sample(node.execute(fresh, "auto").args[0], **settings)
    (shape,) = shapes()
    assert shape["eager_ms"] > 0 and shape["calls"] == 3
    assert node.validate_inputs("time exact") is True and "not in the list" in node.validate_inputs("time off")
