"""What the stats say of each node, for its line on the page: entries of its models, their files, states, workflows."""

import inspect
import re
import types
from typing import Any

import pytest
import torch


def as_run(node: type, node_id: str, extra: Any = None, prompt: Any = None) -> type:
    """A node's class as ComfyUI executes it."""
    from comfy_api.latest import io

    hidden = {io.Hidden.unique_id: node_id, io.Hidden.extra_pnginfo: extra, io.Hidden.prompt: prompt}
    newer = "v3_data" in inspect.signature(node.PREPARE_CLASS_CLONE).parameters
    return node.PREPARE_CLASS_CLONE({"hidden_inputs": hidden} if newer else hidden)


def stats_now() -> dict[str, Any]:
    from anyshape.accel import stats

    return stats.snapshot()


def entry(node_id: str) -> dict[str, Any]:
    (found,) = [one for one in stats_now()["nodes"] if one["id"] == node_id]
    return found


def test_a_node_names_its_models_entry_from_the_first_forward_on(pack, models, fresh) -> None:
    from anyshape.nodes import CompileModel

    extra = {"workflow": {"id": "of-the-page", "nodes": []}}
    out = as_run(CompileModel, "5:2", extra).execute(fresh, "auto", 0).args[0]
    assert entry("5:2") == {
        "id": "5:2", "workflow": "of-the-page", "type": "AnyShapeCompileModel", "state": "ready", "message": "",
        "models": [],
    }  # fmt: skip
    models.sample(out, width=64, height=64, steps=1)
    assert [name.split(" #")[0] for name in entry("5:2")["models"]] == [type(fresh.model).__name__]


def test_skip_blocks_names_its_models_entry(pack, models, fresh) -> None:
    """The same as its run's in ``skip``, but for a number."""
    from anyshape.accel import stats
    from anyshape.nodes import SkipBlocks

    out = as_run(SkipBlocks, "skip").execute(fresh, 3, "auto", 0.0, 1.0, "order1").args[0]
    models.sample(out, width=64, height=64, steps=1)
    (name,) = entry("skip")["models"]
    assert re.sub(r" #\d+$", "", name) == stats.snapshot()["skip"][-1]["model"]


def test_warm_up_names_the_entries_of_its_model_and_its_vae(pack, models, fresh) -> None:
    """Of what is compiled of the two, known as soon as the node has run; with neither it says what to connect."""
    from anyshape.nodes import CompileModel, CompileVAE, WarmUp

    vae = models.vae(torch.float32, ch=32, num_res_blocks=1)
    model = as_run(CompileModel, "m").execute(fresh, "auto", 0).args[0]
    fast = as_run(CompileVAE, "v").execute(vae, True).args[0]

    def kinds(*parts: Any) -> set[str]:
        as_run(WarmUp, "warm").execute(parts[0], "64x64", parts[1])
        found = {one["name"]: one["kind"] for one in stats_now()["models"]}
        return {found[name] for name in entry("warm")["models"]}

    assert kinds(model, fast) == {"model", "vae"} and entry("warm")["message"] == ""
    assert kinds(fresh, fast) == {"vae"} and "connect Compile Model" in entry("warm")["message"]
    assert kinds(model, vae) == {"model"} and "does not come from Compile VAE" in entry("warm")["message"]
    assert kinds(model, None) == {"model"} and entry("warm")["state"] == "ready"
    assert kinds(fresh, None) == set() and entry("warm")["state"] == "eager"


def test_a_node_that_is_off_or_has_a_model_that_cannot_be_compiled(pack, fresh) -> None:
    from anyshape.nodes import CompileControlNet, CompileModel, CompileVAE

    as_run(CompileModel, "off").execute(fresh, "off", 0)
    as_run(CompileVAE, "vae").execute(object(), False)
    as_run(CompileControlNet, "control").execute(object(), False)
    assert [entry(name)["state"] for name in ("off", "vae", "control")] == ["off"] * 3
    foreign = types.SimpleNamespace(first_stage_model=types.SimpleNamespace())
    assert as_run(CompileVAE, "foreign").execute(foreign, True).args[0] is foreign
    assert entry("foreign")["state"] == "eager" and "SimpleNamespace" in entry("foreign")["message"]


def test_a_models_file_is_the_one_that_its_loader_names(pack) -> None:
    from anyshape.nodes.badge import file_of, loaded_from

    prompt = {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "xl\\sub/sd_xl_base_1.0.safetensors"}},
        "2": {"class_type": "LoraLoader", "inputs": {"model": ["1", 0], "lora_name": "style.safetensors"}},
        "3:4": {"class_type": "AnyShapeCompileModel", "inputs": {"mode": "auto", "model": ["2", 0]}},
        "5": {"class_type": "AnyShapeCompileVAE", "inputs": {"vae": ["1", 2]}},
        "6": {"class_type": "AnyShapeCompileModel", "inputs": {"model": ["6", 0]}},
        "7": {"class_type": "ModelMerge", "inputs": {"model1": ["1", 0], "ratio": 0.5}},
    }
    named = {node_id: file_of(prompt, node_id) for node_id in ("3:4", "5", "6", "7", "8")}
    assert named == {"3:4": "sd_xl_base_1.0", "5": "sd_xl_base_1.0", "6": "", "7": "", "8": ""}
    # where no loader names it, ComfyUI's patcher may know what it would load again
    known = types.SimpleNamespace(cached_patcher_init=(print, ("/models/some folder/sd_xl.v1.safetensors", None), 0))
    unknown = types.SimpleNamespace(cached_patcher_init=None), types.SimpleNamespace(), None
    assert [loaded_from(one) for one in (known, *unknown)] == ["sd_xl.v1", "", "", ""]
    assert [file_of(other, "1") for other in (None, [], {"1": None}, {"1": {"inputs": {"model": []}}})] == [""] * 4


@pytest.mark.parametrize(
    "extra", [None, 7, {}, {"workflow": None}, {"workflow": []}, {"workflow": {"id": None}}], ids=str
)
def test_scripts_may_send_any_workflow_or_none(pack, fresh, extra) -> None:
    from anyshape.nodes import CompileModel

    as_run(CompileModel, "script", extra).execute(fresh, "off", 0)
    assert entry("script")["workflow"] == ""


def test_entries_hold_no_model_and_end(pack) -> None:
    from anyshape.accel.stats import MAX_NODES, NodeStats, Stats

    own, names = Stats(), ["UNet"]
    own.node(NodeStats("1", "w", "T", "ready", "", lambda: names))
    assert own.snapshot()["nodes"][0]["models"] == ["UNet"]
    names = []  # the model is gone; its entry in the stats is not
    assert own.snapshot()["nodes"][0]["models"] == ["UNet"]
    for index in range(MAX_NODES):
        own.node(NodeStats(str(index), "another", "T", "off", "", list))
    kept = own.snapshot()["nodes"]
    assert len(kept) == MAX_NODES and kept[0]["workflow"] == "another"


@pytest.mark.parametrize(
    ("links", "drawn"), [([["5:2", 2]], True), ([["5:2", 0], ["7", 2], "5:2"], False), ([], False), (None, True)]
)
def test_the_chart_is_drawn_where_it_is_used(pack, clean_stats, monkeypatch, links, drawn) -> None:
    """By what takes this output in the prompt; a script, which has none, gets it always."""
    from anyshape.accel import stats
    from anyshape.nodes import ShapeCacheInfo, shape_cache_info

    drawings: list[Any] = []
    real = shape_cache_info.draw
    monkeypatch.setattr(shape_cache_info, "draw", lambda now: drawings.append(now) or real(now))
    stats.STATS.model("UNet", "model").shape("k", 64, 64, 1)
    node, prompt = ShapeCacheInfo, {"5:2": {"class_type": "AnyShapeShapeCacheInfo", "inputs": {"after": ["7", 0]}}}
    if links is not None:
        prompt |= {str(at): {"class_type": "PreviewImage", "inputs": {"x": one}} for at, one in enumerate(links)}
        node = as_run(node, "5:2", prompt=prompt)
    *_, chart = node.execute().args
    assert bool(drawings) is drawn and chart.ndim == 4 and (chart.shape[2] > 600) is drawn
