"""The benchmarks, on the CPU: one forward and whole tables of small models, repeated blocks, and counted kernels."""

import json
import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from bench import blocks, first_call, measure
from tools.oracles import shapes

HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
LIKE_FLUX = {"hidden_size": 64, "num_heads": 4, "depth": 2, "depth_single_blocks": 3, "axes_dim": [4, 6, 6]}
LIKE_COSMOS = {"model_channels": 64, "num_blocks": 2, "num_heads": 2, "adaln_lora_dim": 16}
SMALL = {  # changes to the configs of bench.zoo that leave a forward of milliseconds
    "sd15": {"model_channels": 32, "context_dim": 64, "num_head_channels": 16, "num_heads": -1},
    "sdxl": {"model_channels": 32, "context_dim": 64, "num_head_channels": 16},
    "flux": {**LIKE_FLUX, "context_in_dim": 48, "vec_in_dim": 32},
    "chroma": {**LIKE_FLUX, "context_in_dim": 48, "out_dim": 64, "hidden_dim": 48, "n_layers": 2},
    "zimage": {"dim": 256, "cap_feat_dim": 40, "n_layers": 3, "n_heads": 4, "n_kv_heads": 4, "axes_dims": [16, 24, 24],
               "axes_lens": [600, 64, 64]},
    "qwen": {**HEADS, "num_layers": 2, "joint_attention_dim": 48, "axes_dims_rope": (4, 6, 6)},
    "sd35l": {"depth": 4, "adm_in_channels": 32, "num_patches": 32 * 32, "pos_embed_max_size": 32,
              "context_embedder_config": {"target": "torch.nn.Linear",
                                          "params": {"in_features": 48, "out_features": 256}}},
    "wan": {"dim": 64, "num_heads": 2, "ffn_dim": 96, "num_layers": 2, "text_dim": 48},
    "cosmos": {**LIKE_COSMOS, "crossattn_emb_channels": 48},
    "anima": LIKE_COSMOS,
    "ltxv": {**HEADS, "num_layers": 2, "cross_attention_dim": 32, "caption_channels": 48},
    "klein": {**LIKE_FLUX, "context_in_dim": 48, "num_heads": 2, "axes_dim": [8, 8, 8, 8]},
    "krea": {"features": 128, "heads": 4, "kvheads": 2, "layers": 2, "txtlayers": 2, "txtdim": 80, "txtheads": 4,
             "txtkvheads": 4},
}  # fmt: skip
VIDEO = ("wan", "ltxv")


# One forward --------------------------------------------------------------------------------------------------------


@pytest.fixture
def forward(pack, monkeypatch) -> ModuleType:
    """``bench.forward`` with small models, on which a size takes less than a second."""
    from bench import forward, zoo

    full = zoo.make
    monkeypatch.setattr(zoo, "make", lambda name, *rest: full(name, torch.float32, **SMALL[name]))
    monkeypatch.setattr(forward, "SMALL", forward.Case(128, 96))
    monkeypatch.setattr(forward, "MOST_SECONDS", 0.0)  # as few repeats as there may be
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    return forward


def run_forward(forward: ModuleType, monkeypatch: Any, *arguments: str) -> None:
    """Its main, as with this command line; the environment stays as it is."""
    monkeypatch.setattr(forward.process, "caches", lambda folder: {})
    monkeypatch.setattr(sys, "argv", ["forward", *arguments])
    forward.main()


@pytest.mark.parametrize("name", sorted(SMALL))
def test_every_model_of_the_zoo(forward, name):
    """Through ComfyUI's sampler, on a size that fits no patch but Cosmos's, and as a video where it makes any."""
    from bench import models, zoo

    family = zoo.ZOO[name].family if name in ("krea", "anima") else ""
    if family and not hasattr(zoo.comfy.supported_models, family):
        with pytest.raises(zoo.NotThere, match=f"has no {family}; {name} needs a newer one"):
            zoo.make(name)
        return
    patcher, scale = zoo.make(name), {"ltxv": 32, "klein": 16}.get(name, 8)
    case = forward.Case(*((128, 112) if name in ("cosmos", "anima") else (128, 96) if name == "ltxv" else (120, 104)))
    if name in VIDEO:
        case = case._replace(frames=17)
    found = forward.inside(patcher, case, lambda step: (step.own.x.shape, step(), step(step.fresh(1, 0.5))))
    time = {"wan": [5], "ltxv": [3], "qwen": [1], "cosmos": [1], "anima": [1], "krea": [1]}.get(name, [])
    assert list(found[0][2:]) == [*time, case.height // scale, case.width // scale]
    assert found[0][0] == (2 if name in ("sdxl", "sd15", "sd35l") else 1)
    assert all(out.shape == found[0] and out.isfinite().all() for out in found[1:])
    assert 0.1 < found[2].std() < 20  # speed does not depend on the weights, but errors do
    assert models.sample(patcher, 128, 96, 2, steps=1).isfinite().all()


@pytest.mark.parametrize("form", ["int8", "convrot", "fp8"])
def test_a_model_with_quantised_weights(pack, form):
    """Its large layers are in that form, and the others as they were."""
    pytest.importorskip("comfy_kitchen")
    from comfy import quant_ops

    from bench import forward, zoo

    if "int8_tensorwise" not in getattr(quant_ops, "QUANT_ALGOS", {}):
        pytest.skip("this ComfyUI has no such weights")
    patcher = zoo.make(f"zimage-{form}", torch.bfloat16, **SMALL["zimage"])
    kinds = {name: type(part.weight).__name__ for name, part in patcher.model.diffusion_model.named_modules()
             if getattr(part, "weight", None) is not None}  # fmt: skip
    assert "QuantizedTensor" in kinds["layers.0.feed_forward.w1"] and "Quant" not in kinds["layers.0.attention_norm1"]
    assert getattr(patcher.model.diffusion_model.layers[0].feed_forward.w1.weight._params, "convrot", False) == (
        form == "convrot"
    )
    assert forward.inside(patcher, forward.Case(64, 64), lambda step: step()).isfinite().all()
    assert zoo.known(f"zimage-{form}") and not zoo.known("zimage-int5") and not zoo.known("nothing")


def test_what_a_step_is_given(forward):
    """Its inputs depend on seed and noise level alone, and the error is that of what the model itself gave."""
    from bench import zoo

    def body(step: Any) -> tuple:
        one, again, other = step.fresh(1, 0.3), step.fresh(1, 0.3), step.fresh(2, 0.7)
        assert torch.equal(one.x, again.x) and torch.equal(one.sigma, again.sigma)
        assert not torch.equal(one.x, other.x) and one.sigma[0] > other.sigma[0]
        out = step(one)
        assert step.error(one, step(again), out) == 0.0
        assert not torch.equal(step(step.own._replace(sigma=other.sigma)), step())
        own = one.x - out  # a flow: the model's output times sigma
        return step.error(one, one.x - 1.01 * own, out)

    assert forward.inside(zoo.make("zimage"), forward.Case(64, 64), body) == pytest.approx(0.01, rel=1e-3)


def test_a_forward_table(forward, monkeypatch, tmp_path, capsys):
    """``mode: off`` is eager against itself: no error, and every row with the batch that the model really saw."""
    from tools import driving

    monkeypatch.setitem(SMALL, "sd15", driving.SMALL_UNET)
    monkeypatch.setitem(forward.SIZES, "sd15", [forward.Case(64, 64), forward.Case(128, 64, 2)])
    monkeypatch.setitem(forward.WITHOUT_CFG, "sd15", [(64, 64)])
    path = tmp_path / "new" / "sd15-forward.json"
    run_forward(forward, monkeypatch, "--model", "sd15", "--mode", "off", "--json", str(path), "--profile", "3")
    result = json.loads(path.read_text())
    shapes = [(row["width"], row["height"], row["images"], row["rows"]) for row in result["rows"]]
    assert shapes == [(64, 64, 1, 2), (64, 64, 1, 1), (128, 64, 2, 4)]
    assert result["failed"] == [] and result["model"] == "sd15" and result["machine"].startswith(("CPU", "NVIDIA"))
    for row in result["rows"]:
        assert row["error"] == row["first_error"] == 0.0 and row["eager_ms"] > 0 and row["compiled_ms"] > 0
        assert row["ratio"] == pytest.approx(row["eager_ms"] / row["compiled_ms"], rel=0.01)
        assert row["kernels_compiled"] == 0 and row["state"] == "eager" and len(row["profile"]) == 3
        assert row["repeats"] == 3
    from bench import tables

    assert len(tables.forward_row(result["rows"][0])) == 8
    last = capsys.readouterr().out.strip().splitlines()[-3:]
    assert [line.split("|")[2].strip() for line in last] == ["64x64", "64x64", "128x64*2"]


def test_models_one_after_the_other(forward, monkeypatch, tmp_path, capsys):
    """Compile Model's own way. A model that fails takes no other's figures, and a size no other size's."""
    from bench import zoo

    monkeypatch.setitem(SMALL, "chroma", SMALL["chroma"] | {"axes_dim": [1]})
    own = forward.compiled_figures

    def failing(step: Any, *rest: Any) -> dict[str, Any]:
        if step.own.x.shape[-2:] == (8, 8):
            raise torch.OutOfMemoryError("injected")
        return own(step, *rest)

    monkeypatch.setattr(forward, "compiled_figures", failing)
    sizes = ["--sizes", "96x112x1,64x64,64x96x9"]
    run_forward(forward, monkeypatch, "--model", "zimage,chroma,wan", *sizes, "--json", str(tmp_path / "forward.json"))
    found = {name: json.loads((tmp_path / f"{name}-forward.json").read_text()) for name in ("zimage", "chroma", "wan")}
    for name in ("zimage", "wan"):
        sizes = [(96, 112, 1), *([(64, 96, 9)] if name == "wan" else [])]
        assert [(row["width"], row["height"], row["frames"]) for row in found[name]["rows"]] == sizes
        assert all(row["error"] < 1e-4 and row["first_error"] < 1e-4 for row in found[name]["rows"])
        assert found[name]["failed"][0] == {"what": "64x64", "error": "OutOfMemoryError: injected"}
    assert "makes no videos" in found["zimage"]["failed"][1]["error"] and len(found["wan"]["failed"]) == 1
    assert found["chroma"]["rows"] == [] and "positional dim" in found["chroma"]["failed"][0]["error"]
    assert "chroma, the model: ValueError" in capsys.readouterr().out.splitlines()[-2]
    assert set(zoo.NAMES) == {*SMALL, "minimax", "ltx2"}  # see test_nested_latents


def test_sizes_by_name(forward):
    """What the command line takes is what the tables show."""
    case = forward.Case
    named = {"1024x768": case(1024, 768), "832x480x33": case(832, 480, 1, 33), "768x512*4": case(768, 512, 4)}
    for text, expected in named.items():
        assert forward.size(text) == expected and str(expected) == text
        assert forward.sized(expected._asdict()) == text
    with pytest.raises(forward.argparse.ArgumentTypeError, match="write 1024x1024"):
        forward.size("1024")


def test_what_the_stats_say_of_a_call(forward):
    shape = {"key": "a", "calls": 1, "state": "eager", "bytes": 0, "reason": ""}
    before = {"models": [{"name": "Flux", "kernels": 4, "recompiles": 0, "shapes": [shape]}]}
    called = shape | {"key": "b", "state": "graph", "bytes": 9, "reason": "the host is the limit"}
    after = {"models": [{"name": "Flux", "kernels": 6, "recompiles": 2, "shapes": [shape, called]}]}
    assert forward.noted(before, after) == {
        "state": "graph", "graph_bytes": 9, "note": "the host is the limit", "kernels": 2, "recompiles": 2,
    }  # fmt: skip
    assert forward.noted(after, after)["state"] == "eager"


def test_a_first_call(forward, capsys):
    first_call.worker("zimage", [64, 64, 1, 1], "off")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert "machine" in lines[0]["conditions"] and lines[1]["kernels"]["compiled"] == 0
    assert 0 < lines[1]["seconds"] < 60


def test_what_is_measured_is_not_comfyuis_own(forward, monkeypatch, tmp_path, clean_stats):
    """Of a table, and of a first call: a size at which runs make one step would be left to ComfyUI."""
    path = tmp_path / "zimage.json"
    monkeypatch.setitem(forward.SIZES, "zimage", [forward.Case(64, 64)])
    run_forward(forward, monkeypatch, "--model", "zimage", "--mode", "exact", "--json", str(path))
    (row,) = json.loads(path.read_text())["rows"]
    assert row["state"] != "eager" and row["error"] == 0.0, row["note"]
    first_call.worker("zimage", [96, 64, 1, 1], "exact")
    assert [each["reason"] for each in shapes()] == ["", ""]


# Others -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, count, classes",
    [
        ("sdxl", 2 * 2 + 2 * 10 + 10 + 3 * 2 + 3 * 10, {"BasicTransformerBlock"}),
        ("sd15", 6 + 1 + 9, {"BasicTransformerBlock"}),
        ("flux", 2 + 3, {"DoubleStreamBlock", "SingleStreamBlock"}),
        ("zimage", 3 + 2 + 2, {"JointTransformerBlock"}),
        ("sd35l", 4, {"JointBlock"}),  # whose last one lacks weights
        ("qwen", 2, {"QwenImageTransformerBlock"}),
    ],
)
def test_repeated_blocks(forward, name, count, classes):
    from bench import zoo

    found = blocks.repeated(zoo.make(name).model.diffusion_model)
    assert len(found) == count and {type(block).__name__ for block in found} == classes


def test_a_model_without_blocks():
    with pytest.raises(ValueError, match="Linear repeats no block"):
        blocks.repeated(torch.nn.Linear(2, 2))


def test_kernels_are_counted():
    """By Triton's listener: those from a cache apart, and only what was compiled takes seconds."""
    kernels, times = measure.Kernels(), type("Times", (), {"total": 500_000})
    for hit in (False, True, False):
        kernels._heard(times=times, cache_hit=hit, src=None, metadata={})
    assert (kernels.compiled, kernels.found, kernels.seconds) == (2, 1, 1.0)


def test_a_controlnet_row(pack, monkeypatch):
    """Every way on a small model: the first is what the others are compared with, and they are equal."""
    from bench import controlnet, models
    from tools import driving

    for name in ("unet", "controlnet"):
        small = partial(getattr(models, name), dtype=torch.float32, **driving.SMALL_UNETS["sdxl"])
        monkeypatch.setattr(models, name, small)
    monkeypatch.setattr(controlnet, "STEADY_STEPS", 3)
    found = controlnet.row(controlnet.ways(), (72, 64))
    assert {found[f"{way}_latent_error"] for way in ("neither", "model", "control", "both")} == {0.0}  # on a CPU
    assert min(found[f"{way}_ms"] for way in ("neither", "model", "control", "both")) > 0


# Attention by backend -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "forms"), [("flux", 2), ("ltxv", 2)])
def test_attention_by_backend(pack, monkeypatch, tmp_path, capsys, name, forms):
    """Each form of a forward's calls once: Flux's double and single blocks lay tokens out differently."""
    from bench import attention, zoo

    full = zoo.make
    monkeypatch.setattr(zoo, "make", lambda name, **few: full(name, torch.float32, **SMALL[name] | few))
    monkeypatch.setattr(attention, "ROUNDS", 2)
    monkeypatch.setattr(sys, "argv", ["x", "--model", name, "--sizes", "128x96", "--json", str(tmp_path / "a.json")])
    attention.main()
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert len(rows) == forms == len(capsys.readouterr().out.splitlines())
    tokens = {"flux": 8 * 6 + 512, "ltxv": 4 * 3}[name]
    assert [row["queries"] for row in rows] == [tokens] * forms and rows[0]["keys"] == tokens
    assert all(row["comfyui_ms"] > 0 and row["comfyui"] == row["chosen"] == "flash" for row in rows)  # torch's on a CPU
    assert {row["heads"] for row in rows} == {SMALL[name].get("num_heads", 2)}
