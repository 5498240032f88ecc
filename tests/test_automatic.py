"""Accelerate every model in every workflow: what becomes of a queued prompt.

Prompts are rewritten in this process, with ComfyUI's own node classes; ``test_automatic_server`` has them run.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tools.api_format import node
from tools.comfy_nodes import extras


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
    assert "node 5 (TorchCompileModel)" in reason and "Bypass that node" in reason


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
