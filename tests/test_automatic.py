"""Accelerate every model in every workflow: what becomes of a queued prompt, and whose settings it follows.

The prompts of the first part are rewritten in this process, with ComfyUI's own node classes; then a real server runs
them, and one with several users and the sizes of a last session.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tools.api_format import node, text_to_image
from tools.comfy_nodes import extras
from tools.comfy_server import ComfyServer

AUTOMATIC, EXCEPTIONS, BUDGET, AT_START = (
    "AnyShape.Automatic", "AnyShape.Exceptions", "AnyShape.GraphBudget", "AnyShape.SizesAtStart",
)  # fmt: skip


# What becomes of a prompt -------------------------------------------------------------------------------------------


class Switch:
    """Of another pack: hands on whatever it gets, by a type that equals every other."""

    class Anything(str):
        def __ne__(self, other: object) -> bool:
            return False

    RETURN_TYPES = (Anything("*"),)

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802  ComfyUI's name
        return {"required": {"first": (cls.Anything("*"),)}, "optional": {"second": (cls.Anything("*"),)}}


class ToPipe:
    """Of another pack: several things as one."""

    RETURN_TYPES = ("BASIC_PIPE",)

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802
        return {"required": {"model": ("MODEL",), "vae": ("VAE",)}}


class FromPipe:
    """The same things again."""

    RETURN_TYPES = ("MODEL", "VAE")

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802
        return {"required": {"pipe": ("BASIC_PIPE",)}}


class SamplerThatHandsOn:
    """As packs have them: it samples, and gives the model that it got."""

    RETURN_TYPES = ("MODEL", "LATENT")

    @classmethod
    def INPUT_TYPES(cls) -> dict:  # noqa: N802
        return {"required": {"model": ("MODEL",)}}


OTHERS = {
    "nodes_torch_compile": ("TorchCompileModel",),
    "nodes_custom_sampler": ("BasicScheduler", "BasicGuider"),
    "nodes_model_merging": ("ModelMergeSimple", "ModelSave"),
}


@pytest.fixture(scope="module")
def accelerated(comfy, pack) -> Iterator[Any]:
    """``automatic.accelerate``, in a ComfyUI that has our nodes and a few of other packs."""
    from anyshape.nodes import automatic

    import nodes as comfyui

    ours = {one.define_schema().node_id: one for one in pack.nodes.NODES}
    theirs = {name: getattr(extras(module), name) for module, names in OTHERS.items() for name in names}
    made = {one.__name__: one for one in (Switch, ToPipe, FromPipe, SamplerThatHandsOn)}
    with pytest.MonkeyPatch.context() as patch:
        for name, one in {**ours, **theirs, **made}.items():
            patch.setitem(comfyui.NODE_CLASS_MAPPINGS, name, one)

        def run(prompt: dict[str, Any], *exceptions: str, budget: int = 2048) -> Any:
            before = json.dumps(prompt)
            result = automatic.accelerate(prompt, automatic.Choice(budget, automatic.exceptions(",".join(exceptions))))
            assert json.dumps(prompt) == before, "the user's own prompt was changed"
            return result

        yield run


MODEL, VAE = "anyshape-model-{}-0", "anyshape-vae-{}-{}"


def sdxl(**more: Any) -> dict[str, Any]:
    return {
        "1": node("CheckpointLoaderSimple", ckpt_name="xl\\sd_xl_base_1.0.safetensors"),
        "2": node("LoraLoader", model=["1", 0], clip=["1", 1], lora_name="a.safetensors", strength_model=1.0),
        "3": node("KSampler", model=["2", 0], seed=1, latent_image=["9", 0]),
        "4": node("VAEDecode", samples=["3", 0], vae=["1", 2]),
        "9": node("EmptyLatentImage", width=64, height=64, batch_size=1),
        **more,
    }


def test_a_model_is_compiled_where_it_is_sampled(accelerated) -> None:
    """Behind the LoRA; the VAE between loader and decoder."""
    result = accelerated(sdxl(), budget=512)
    model, vae = MODEL.format(2), VAE.format(1, 2)
    assert result.added == [model, vae] and result.reasons == []
    inputs = {"model": ["2", 0], "mode": "auto", "graph_budget_mb": 512, "verify": True}
    assert result.prompt[model]["class_type"] == "AnyShapeCompileModel" and result.prompt[model]["inputs"] == inputs
    assert result.prompt[vae]["inputs"] == {"vae": ["1", 2], "enabled": True, "verify": True}
    assert result.prompt["3"]["inputs"]["model"] == [model, 0] and result.prompt["4"]["inputs"]["vae"] == [vae, 0]
    changed = {id for id, one in sdxl().items() if result.prompt[id] != one}
    assert changed == {"3", "4"}
    assert result.prompt == accelerated(sdxl()).prompt | {model: result.prompt[model]}, "ids differ from run to run"


def test_our_own_nodes_are_left_as_they_are(accelerated) -> None:
    """Of the user's, wherever they are on the path, off or not; and what was accelerated is not accelerated again."""
    own = {"5": node("AnyShapeCompileModel", model=["1", 0], mode="off"), "6": node("AnyShapeCompileVAE", vae=["1", 2])}
    flow = sdxl(**own)
    flow["2"]["inputs"]["model"] = ["5", 0]
    flow["4"]["inputs"]["vae"] = ["6", 0]
    assert accelerated(flow).prompt == flow
    flow = sdxl(**{"5": node("AnyShapeAccelerate", model=["2", 0], vae=["1", 2])})
    flow["3"]["inputs"]["model"], flow["4"]["inputs"]["vae"] = ["5", 0], ["5", 1]
    assert accelerated(flow).prompt == flow
    once = accelerated(sdxl()).prompt
    assert accelerated(once).prompt == once


def test_several_samplers_share_one_node_and_merges_get_one(accelerated) -> None:
    flow = sdxl(
        **{
            "5": node("KSampler", model=["2", 0], latent_image=["3", 0]),
            "6": node("KSampler", model=["1", 0], latent_image=["5", 0]),
            "7": node("ModelMergeSimple", model1=["1", 0], model2=["2", 0], ratio=0.5),
            "8": node("BasicGuider", model=["7", 0], conditioning=["x", 0]),
        }
    )
    result = accelerated(flow)
    assert set(result.added) == {MODEL.format(id) for id in (1, 2, 7)} | {VAE.format(1, 2)}
    used = [result.prompt[id]["inputs"]["model"][0] for id in ("3", "5", "6", "8")]
    assert used == [MODEL.format(id) for id in (2, 2, 1, 7)]
    assert result.prompt["7"] == flow["7"] and result.prompt["2"] == flow["2"]


def test_what_does_not_run_a_model_gets_the_users_own(accelerated) -> None:
    """Noise levels, and files on disk."""
    flow = {
        "1": node("CheckpointLoaderSimple", ckpt_name="a.safetensors"),
        "2": node("BasicScheduler", model=["1", 0], scheduler="simple", steps=4),
        "3": node("ModelSave", model=["1", 0], filename_prefix="x"),
    }
    assert accelerated(flow).prompt == flow


def test_types_decide_and_switches_and_pipes_are_seen_through(accelerated) -> None:
    flow = sdxl(
        **{
            "5": node("Switch", first=["1", 0]),
            "6": node("Switch", first=["5", 0]),
            "7": node("KSampler", model=["6", 0]),
            "10": node("ToPipe", model=["1", 0], vae=["1", 2]),
            "11": node("FromPipe", pipe=["10", 0]),
            "12": node("KSampler", model=["11", 0]),
            "13": node("SamplerThatHandsOn", model=["1", 0]),
            "14": node("KSampler", model=["13", 0]),
            "15": node("AnyShapeSkipBlocks", model=["1", 0]),
            "16": node("AnyShapeWarmUp", model=["15", 0], shapes="64x64"),
            "17": node("KSampler", model=["16", 0]),
        }
    )
    result = accelerated(flow)
    model = {id: one["inputs"]["model"][0] for id, one in result.prompt.items() if "model" in one["inputs"]}
    assert model["7"] == MODEL.format(6) and model["10"] == MODEL.format(1)
    assert model["12"] == "11", "what comes out of a pipe was accelerated before it"
    assert (model["13"], model["14"]) == (MODEL.format(1), "13")
    assert (model["16"], model["17"]) == (MODEL.format(15), "16"), "Warm Up wants a compiled model"
    assert result.prompt["10"]["inputs"]["vae"] == [VAE.format(1, 2), 0]


def test_control_nets(accelerated) -> None:
    flow = {
        "1": node("ControlNetLoader", control_net_name="c.safetensors"),
        "2:7": node("SetUnionControlNetType", control_net=["1", 0], type="auto"),
        "3": node("ControlNetApplyAdvanced", control_net=["2:7", 0], strength=1.0),
    }
    extras("nodes_controlnet")
    import nodes as comfyui

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            comfyui.NODE_CLASS_MAPPINGS, "SetUnionControlNetType", extras("nodes_controlnet").SetUnionControlNetType
        )
        result = accelerated(flow)
    (added,) = result.added
    assert result.prompt[added]["class_type"] == "AnyShapeCompileControlNet" and ":" not in added
    assert result.prompt[added]["inputs"]["control_net"] == ["2:7", 0]
    assert result.prompt["3"]["inputs"]["control_net"] == [added, 0]


def test_a_node_that_compiles_the_model_itself_keeps_it(accelerated) -> None:
    flow = sdxl(**{"5": node("TorchCompileModel", model=["2", 0], backend="inductor")})
    flow["3"]["inputs"]["model"] = ["5", 0]
    result = accelerated(flow)
    assert result.added == [VAE.format(1, 2)] and result.prompt["3"] == flow["3"]
    (reason,) = result.reasons
    assert "node 5 (TorchCompileModel)" in reason and "bypass that node" in reason


@pytest.mark.parametrize(
    ("exception", "left"),
    [
        ("sd_xl_base_1.0", "13"), ("SD_XL_BASE_1.0.safetensors", "13"), ("sd_xl*", "13"), ("a.safetensors", "1"),
        ("LoraLoader", "1"), ("load lora*", "1"), ("vaedecode", "3"), ("sd_xl", ""), ("wan*; x，y", ""),
    ],
)  # fmt: skip
def test_exceptions(accelerated, exception, left) -> None:
    """left: 1 the model's path is left alone, 3 the VAE's."""
    added = {"1": MODEL.format(2), "3": VAE.format(1, 2)}
    assert set(accelerated(sdxl(), exception).added) == {id for name, id in added.items() if name not in left}


@pytest.mark.parametrize(
    "wrong",
    [
        {"3": node("KSampler", model=["nobody", 0])}, {"3": node("KSampler", model=["1", 7])},
        {"3": node("KSampler", model=["1", 2])}, {"3": node("KSampler", model=["1"])},
        {"3": node("KSampler", model=[1, 0])}, {"3": node("NobodyKnowsThis", model=["1", 0])},
        {"3": {"inputs": {"model": ["1", 0]}}}, {"3": {"class_type": "KSampler"}}, {"3": None},
    ],
    ids=["no node", "no output", "a VAE", "half a link", "a number", "an unknown node", "no type", "no inputs", "none"],
)  # fmt: skip
def test_what_comfyui_will_refuse_is_not_made_worse(accelerated, wrong) -> None:
    flow = sdxl(**wrong)
    assert accelerated(flow).prompt["3"] == flow["3"]


@pytest.mark.parametrize("given", [None, object()], ids=["nothing", "something else"])
def test_what_only_goes_by_the_name_passes_through(pack, clean_stats, given) -> None:
    """A loader may give nothing, and another pack's MODEL or VAE may be something else than ComfyUI's."""
    from anyshape.accel.stats import snapshot

    nodes = pack.nodes
    assert nodes.CompileModel.execute(given, "auto", 0).args == (given,)
    assert nodes.CompileVAE.execute(given, True).args == (given,)
    assert nodes.CompileControlNet.execute(given, True).args == (given,)
    assert bool(snapshot()["fallbacks"]) == (given is not None)


def test_a_failure_of_ours_costs_no_prompt(accelerated, monkeypatch, clean_stats) -> None:
    """Counted and logged; and prompts that are no prompts go through as they came."""
    import types

    from anyshape.accel.stats import STATS, snapshot
    from anyshape.nodes import ahead, automatic, preferences, queued

    monkeypatch.setattr(ahead.AHEAD, "server", None)  # so that it is so again afterwards
    hooks: list = []
    server = types.SimpleNamespace(add_on_prompt_handler=hooks.append)
    hook = queued.Queued(server)
    monkeypatch.setattr(preferences, "of_prompt", lambda _: preferences.Preferences(automatic=True))
    posted = {"prompt": sdxl(), "client_id": "x"}
    assert hooks == [hook] and len(hook(posted)["prompt"]) == len(posted["prompt"]) + 2

    def broken(*_: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(automatic, "accelerate", broken)
    assert hook(posted) is posted
    assert any("on purpose" in one["reason"] for one in snapshot()["fallbacks"])
    monkeypatch.undo()
    monkeypatch.setattr(preferences, "of_prompt", lambda _: preferences.Preferences(automatic=True))
    STATS.clear()
    for odd in ({}, {"prompt": None}, {"prompt": []}, {"prompt": {"1": None}, "extra_data": {"anyshape": 7}}):
        assert hook(odd) == odd
    assert snapshot()["fallbacks"] == []


# The server ---------------------------------------------------------------------------------------------------------


def flow(seed: int = 5, **loader: Any) -> dict[str, Any]:
    """Text to image on the demo model, by ComfyUI's own nodes alone."""
    return text_to_image("1 2 3 4 5 6", (64, 72, 1), saved="automatic", loader=loader, seed=seed, cfg=2.0)


def by_hand(mode: str = "auto") -> dict[str, Any]:
    """The same with a node of ours in it."""
    made = flow()
    made["18"] = node("AnyShapeAccelerate", model=["1", 0], vae=["1", 1], mode=mode, graph_budget_mb=2048)
    made["4"]["inputs"]["model"], made["5"]["inputs"]["vae"] = ["18", 0], ["18", 1]
    return made


def post(server: ComfyServer, prompt: dict[str, Any], user: str = "", **more: Any) -> dict[str, Any]:
    """Queues a prompt as a script does, and gives the history's entry at its end."""
    headers = {"comfy-user": user} if user else {}
    answer = server.http.post(f"{server.url}/prompt", json={"prompt": prompt, **more}, headers=headers)
    assert answer.status_code == 200, answer.text
    path, deadline = f"/history/{answer.json()['prompt_id']}", time.monotonic() + 120
    while not (found := server.get(path).json()):
        assert time.monotonic() < deadline, "the prompt did not end"
        time.sleep(0.05)
    (entry,) = found.values()
    assert entry["status"]["status_str"] == "success", entry["status"]
    return entry


def picture(server: ComfyServer, entry: dict[str, Any]) -> np.ndarray:
    (image,) = entry["outputs"]["6"]["images"]
    return np.asarray(server.view(image).convert("RGB"), dtype=int)


def ours(entry: dict[str, Any]) -> set[str]:
    """The ids of our nodes in the prompt that ran."""
    return {id for id in entry["prompt"][2] if id.startswith("anyshape-")}


def cached(entry: dict[str, Any]) -> set[str]:
    return {id for kind, data in entry["status"]["messages"] if kind == "execution_cached" for id in data["nodes"]}


def model_calls(server: ComfyServer) -> int:
    models = server.get("/anyshape/stats").json()["models"]
    return sum(s["calls"] for model in models for s in model["shapes"])


@pytest.fixture
def settings(server) -> Iterator[Any]:
    """Sets settings of the shared server's user; afterwards they are as they were."""
    before = server.get("/settings").json()

    def change(values: dict[str, Any]) -> None:
        server.http.post(f"{server.url}/settings", json=values).raise_for_status()

    yield change
    change({name: before.get(name) for name in (AUTOMATIC, EXCEPTIONS, BUDGET, AT_START)})


ADDED = {"anyshape-model-1-0", "anyshape-vae-1-1"}


def test_the_picture_is_that_of_the_nodes(server, settings) -> None:
    """With the setting, without it, and with a node on the canvas; the setting holds from the next prompt on."""
    plain, before = post(server, flow()), model_calls(server)
    assert ours(plain) == set() and model_calls(server) == before
    settings({AUTOMATIC: True, BUDGET: 512})
    entry = post(server, flow())
    assert ours(entry) == ADDED and model_calls(server) > before
    assert entry["prompt"][2]["anyshape-model-1-0"]["inputs"]["graph_budget_mb"] == 512
    again = post(server, flow(seed=6))
    assert cached(again) >= ADDED | {"1", "2", "3"}, "ComfyUI's cache does not hold"
    with_node = post(server, by_hand())
    assert ours(with_node) == set()
    assert np.array_equal(picture(server, entry), picture(server, with_node))
    assert np.abs(picture(server, entry) - picture(server, plain)).max() <= 4
    settings({EXCEPTIONS: "AnyShapeDemoLoader"})
    assert ours(post(server, flow())) == set()
    settings({AUTOMATIC: False, EXCEPTIONS: ""})
    assert ours(post(server, flow())) == set()


def test_a_script_may_say_otherwise(server, settings) -> None:
    assert ours(post(server, flow(), extra_data={"anyshape": {"accelerate": True}})) == ADDED
    settings({AUTOMATIC: True})
    assert ours(post(server, flow(), extra_data={"anyshape": {"accelerate": False}})) == set()
    assert ours(post(server, flow(), extra_data={"anyshape": {"accelerate": "no"}})) == ADDED


def test_a_refused_prompt_names_the_users_nodes_alone(server, settings) -> None:
    wrong = flow()
    del wrong["4"]["inputs"]["latent_image"]
    answers = []
    for on in (False, True):
        settings({AUTOMATIC: on})
        answers.append(server.http.post(f"{server.url}/prompt", json={"prompt": wrong}))
    assert [answer.status_code for answer in answers] == [400, 400]
    plain, accelerated = (answer.json()["node_errors"] for answer in answers)
    assert plain == accelerated and set(plain) == {"4"}


@pytest.mark.parametrize("value", ["yes", 1, None, [], {"a": 1}])
def test_what_the_page_never_writes_means_off(server, settings, value) -> None:
    settings({AUTOMATIC: value, BUDGET: value, EXCEPTIONS: value})
    assert ours(post(server, flow())) == set()


@pytest.mark.parametrize("mode", ["auto", "exact", "off"])
def test_accelerate_does_what_the_three_nodes_do(server, mode) -> None:
    three = flow()
    three["18"] = node("AnyShapeCompileModel", model=["1", 0], mode=mode, graph_budget_mb=2048)
    three["19"] = node("AnyShapeCompileVAE", vae=["1", 1], enabled=mode == "auto")
    three["4"]["inputs"]["model"], three["5"]["inputs"]["vae"] = ["18", 0], ["19", 0]
    one = post(server, by_hand(mode=mode))
    (noted,) = [n for n in server.get("/anyshape/stats").json()["nodes"] if n["type"] == "AnyShapeAccelerate"]
    kinds = {model["name"]: model["kind"] for model in server.get("/anyshape/stats").json()["models"]}
    wanted = {"auto": {"model", "vae"}, "exact": {"model"}, "off": set()}
    assert {kinds[name] for name in noted["models"]} == wanted[mode]
    assert noted["state"] == ("off" if mode == "off" else "ready")
    assert np.array_equal(picture(server, one), picture(server, post(server, three)))


# Several users, and the sizes of the last session -------------------------------------------------------------------

FILE, LAST = "rockets", ["64x64", "72x64 batch 2", "no size", 3]
MANY = [f"{8 * n}x64 batch 8" for n in range(9, 17)]
NAMED = {"file": f"folder/{FILE}.safetensors"}  # an input that the demo's loader does not look at


class OfSeveral(ComfyServer):
    """Started once before, as far as the folder of its users says."""

    def _make_base(self) -> Any:
        base = super()._make_base()
        users = {
            "ann": {AUTOMATIC: True, AT_START: True}, "bob": {AUTOMATIC: False}, "eve": {AUTOMATIC: True, BUDGET: 0},
        }  # fmt: skip
        (base / "user" / "users.json").write_text(json.dumps({name: name.title() for name in users}))
        for name, values in users.items():
            (base / "user" / name).mkdir()
            (base / "user" / name / "comfy.settings.json").write_text(json.dumps(values))
        kept = base / "user" / "__anyshape" / "sizes.json"
        kept.parent.mkdir()
        kept.write_text(json.dumps({"version": 1, "models": {FILE: LAST, "many": MANY, "cancelled": MANY}}))
        return base


@pytest.fixture(scope="module")
def of_several() -> Iterator[ComfyServer]:
    with OfSeveral(arguments=("--multi-user",)) as running:
        yield running


def sizes_of_models(server: ComfyServer) -> set[tuple[int, int, int]]:
    models = server.get("/anyshape/stats").json()["models"]
    return {(s["width"], s["height"], s["batch"]) for m in models if m["kind"] == "model" for s in m["shapes"]}


def wait_for(what: Any, wanted: Any) -> None:
    deadline = time.monotonic() + 60
    while (found := what()) != wanted:
        assert time.monotonic() < deadline, (found, wanted)
        time.sleep(0.1)


def kept(server: ComfyServer) -> dict[str, list[str]]:
    return json.loads((server.base / "user/__anyshape/sizes.json").read_text())["models"]


def test_each_user_has_settings_of_their_own(of_several) -> None:
    """Who posts a prompt is in a header; a script that names nobody has none. No size is warmed up for them."""
    assert ours(post(of_several, flow(**NAMED), "bob")) == set()
    assert ours(post(of_several, flow(**NAMED))) == set()
    assert ours(post(of_several, flow(**NAMED), "nobody")) == set()
    entry = post(of_several, flow(**NAMED), "eve")
    assert ours(entry) == ADDED and entry["prompt"][2]["anyshape-model-1-0"]["inputs"]["graph_budget_mb"] == 0
    wait_for(lambda: kept(of_several).get(FILE), ["64x72"])  # of this session
    assert sizes_of_models(of_several) == {(64, 72, 1)}


def test_the_sizes_of_the_last_session(of_several) -> None:
    """After the first picture, in a prompt of its own that leaves nothing behind; once."""
    entry = post(of_several, flow(seed=7, **NAMED), "ann")
    assert ours(entry) == ADDED
    wait_for(lambda: sizes_of_models(of_several), {(64, 72, 1), (64, 64, 1), (72, 64, 2)})
    wait_for(lambda: of_several.get("/queue").json(), {"queue_running": [], "queue_pending": []})
    warmed = of_several.get("/anyshape/stats").json()["nodes"]
    (noted,) = [one for one in warmed if one["type"] == "AnyShapeWarmUp"]
    assert noted["file"] == FILE
    wait_for(lambda: list(of_several.get("/history").json())[-1], entry["prompt"][1])
    again = post(of_several, flow(seed=8, **NAMED), "ann")
    assert cached(again) >= ADDED | {"1", "2", "3"}, "the cache of the user's prompt was lost"
    time.sleep(1.5)  # two looks at the queue
    assert of_several.log().count("at the sizes of the last session: 64x64, 72x64 batch 2") == 1
    assert kept(of_several) == {"many": MANY, "cancelled": MANY, FILE: ["64x72"]}, "what was only warmed up counts"


def test_warm_up_knows_the_sizes_of_the_last_session(of_several) -> None:
    made = flow(seed=9, **NAMED)
    made["18"] = node("AnyShapeCompileModel", model=["1", 0], mode="auto", graph_budget_mb=0)
    made["19"] = node("AnyShapeWarmUp", model=["18", 0], shapes="", preset="sizes of the last session")
    made["4"]["inputs"]["model"] = ["19", 0]
    made["10"] = node("PreviewAny", source=["19", 2])
    (report,) = post(of_several, made)["outputs"]["10"]["text"]
    assert "64x64" in report and "72x64" in report and "no size" not in report
    made["1"]["inputs"]["file"] = "unknown.safetensors"
    (report,) = post(of_several, made)["outputs"]["10"]["text"]
    assert report.startswith("no sizes of an earlier session are known for this model")


def warms_up(server: ComfyServer) -> list[bool]:
    """Of each prompt in the queue, whether it is ours."""
    queue = server.get("/queue").json()
    return ["anyshape-warm-up" in one[2] for one in [*queue["queue_running"], *queue["queue_pending"]]]


def test_others_come_first(of_several) -> None:
    """A prompt that is queued while sizes are warmed up waits for one of them at most; then the others are done."""
    sizes = {(8 * n, 64, 8) for n in range(9, 17)}
    post(of_several, flow(seed=10, file="many.safetensors"), "ann")
    wait_for(lambda: warms_up(of_several), [True])
    before = sizes_of_models(of_several)
    post(of_several, flow(seed=11, file="many.safetensors"), "bob")
    after = sizes_of_models(of_several)
    assert len(sizes - before) > 1 and len((after - before) & sizes) <= 1
    post(of_several, flow(seed=12, file="many.safetensors"), "ann")
    wait_for(lambda: sizes - sizes_of_models(of_several), set())


def test_cancel_ends_it_for_this_session(of_several) -> None:
    """The server knows a model by its loader's inputs: another file, another model."""
    sizes = {(8 * n, 64, 8) for n in range(9, 17)}
    of_several.http.post(f"{of_several.url}/anyshape/clear").raise_for_status()
    for seed in (13, 14):
        post(of_several, flow(seed=seed, file="cancelled.safetensors"), "ann")
        if seed == 13:
            wait_for(lambda: warms_up(of_several), [True])
            of_several.interrupt()
        wait_for(lambda: warms_up(of_several), [])
        time.sleep(1.2)  # two looks at the queue
        assert warms_up(of_several) == []
    assert sizes - sizes_of_models(of_several)
