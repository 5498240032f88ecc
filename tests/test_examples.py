"""The example workflows: whole, tidy, accepted by the real server, run on the demo model, with a picture each."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bench import cards, plot
from tools.api_format import NOTES, inputs, is_widget, run_here, to_api
from tools.comfy_server import ComfyServer
from tools.oracles import counted, error, fallbacks
from tools.paths import ROOT

PACKED, DEMO = "example_workflows", "demo/example_workflows"
EMOJI, WARM_UP = "Emoji - three sizes, nothing to download", "Warm Up SDXL - image to image with LCM"
EXAMPLES = sorted(path for folder in (PACKED, DEMO) for path in (ROOT / folder).glob("*.json"))
# Inputs that name what only a user has, and the folder of ComfyUI's models that it lies in.
MODEL_FILES = {
    "ckpt_name": "checkpoints", "lora_name": "loras", "control_net_name": "controlnet", "unet_name": "diffusion_models",
    "clip_name": "text_encoders", "clip_name1": "text_encoders", "clip_name2": "text_encoders", "vae_name": "vae",
}  # fmt: skip
NO_ADDRESS = {"lcm-lora-sdxl.safetensors"}  # ComfyUI's own templates have none for it; the note says what is needed
KINDS = (
    "SDXL", "Flux", "Z-Image", "Qwen-Image", "Wan", "ControlNet", "Skip Blocks SD1.5", "Skip Blocks Wan",
    "Skip Blocks Z-Image", "Comparison", "Warm Up", "Emoji",
)  # fmt: skip
SKIPPING = {  # templates on transformers: a small model of the same kind, its latent, and full and skipped steps
    "Skip Blocks Wan 2.1 - every step beside one in three": ("WAN21_T2V", (1, 16, 3, 8, 10), (10, 20)),
    "Skip Blocks Z-Image - every step beside one in three": ("ZImage", (1, 16, 8, 10), (9, 16)),
}
THUMBNAIL, MOST_BYTES = (640, 360), 60_000
TITLE = 30  # pixels above a node's place
CLOSE = 4 / 255  # of a pixel's range; what the demo allows
each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def example(name: str) -> dict[str, Any]:
    (path,) = [path for path in EXAMPLES if path.stem == name]
    return read(path)


@pytest.fixture(scope="module")
def known(server: ComfyServer) -> dict[str, Any]:
    """/object_info, with the picture that ComfyUI brings for Load Image."""
    Image.new("RGB", (96, 64), "orange").save(server.base / "input" / "example.png")
    return server.object_info()


# The files --------------------------------------------------------------------------------------------------------


@each_example
def test_links_join_what_fits(known, path) -> None:
    """Both ends of each link know it, and have its type."""
    workflow = read(path)
    by_id = {node["id"]: node for node in workflow["nodes"]}
    for number, source, slot, target, place, kind in workflow["links"]:
        output, entry = by_id[source]["outputs"][slot], by_id[target]["inputs"][place]
        assert number in output["links"] and entry["link"] == number
        assert output["type"] == known[by_id[source]["type"]]["output"][slot] == kind
        assert inputs(known[by_id[target]["type"]])[entry["name"]][0] in (kind, "*")
    ends = [entry["link"] for node in workflow["nodes"] for entry in node["inputs"] if entry["link"] is not None]
    assert sorted(ends) == sorted(link[0] for link in workflow["links"])


@each_example
def test_only_optional_inputs_are_left_open(known, path) -> None:
    for node in read(path)["nodes"]:
        if node["type"] in NOTES:
            continue
        required = known[node["type"]]["input"].get("required", {})
        sockets = {name for name, spec in required.items() if not is_widget(spec)}
        assert sockets <= {entry["name"] for entry in node["inputs"] if entry["link"] is not None}, node["type"]


@each_example
def test_the_server_misses_nothing_but_models(server, known, path) -> None:
    """It checks every value; what it refuses are the files that a test machine has not."""
    flow = to_api(read(path), known)
    if path.parent.parent.name == "demo":
        return  # it is run below
    answer = server.http.post(f"{server.url}/prompt", json={"prompt": flow})
    assert answer.status_code == 400
    found = [error for node in answer.json()["node_errors"].values() for error in node["errors"]]
    wrong = [error for error in found if error["extra_info"].get("input_name") not in MODEL_FILES]
    assert found and not wrong


@each_example
def test_comfyui_can_offer_what_is_missing(known, path) -> None:
    """Each loader says where its file comes from and which folder it belongs into, as ComfyUI's own templates do."""
    workflow = read(path)
    nodes = {str(node["id"]): node for node in workflow["nodes"]}
    for name, made in to_api(workflow, known).items():
        wanted = {
            (made["inputs"][key], folder) for key, folder in MODEL_FILES.items()
            if key in made["inputs"] and made["inputs"][key] not in NO_ADDRESS
        }  # fmt: skip
        offered = nodes[name]["properties"].get("models", [])
        assert {(one["name"], one["directory"]) for one in offered} == wanted, made["class_type"]
        for one in offered:
            assert set(one) == {"name", "url", "directory"}
            assert one["url"].startswith("https://huggingface.co/") and one["url"].endswith(f"/{one['name']}")


def test_each_kind_has_a_template_whose_name_is_a_sentence() -> None:
    for kind in KINDS:
        assert [path for path in EXAMPLES if path.stem.startswith(kind)], kind
    for path in EXAMPLES:
        assert " - " in path.stem and len(path.stem.split()) > 4, path.stem


@each_example
def test_its_note_is_in_both_languages(path) -> None:
    (note,) = [node for node in read(path)["nodes"] if node["type"] in NOTES]
    english, chinese = note["widgets_values"][0].split("\n\n---\n\n")
    assert "**Look at**" in english and "**看这里**" in chinese
    assert "`" not in english + chinese  # dark blue on brown in ComfyUI's newer kind of nodes


def box(node: dict[str, Any]) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) with the title."""
    (x, y), (width, height) = node["pos"], node["size"]
    return x, y - TITLE, x + width, y + height


@each_example
def test_the_layout_is_tidy(path) -> None:
    """No node lies on another, links go from left to right or down, and a note says what to look at."""
    nodes = read(path)["nodes"]
    for first, second in combinations(nodes, 2):
        a, b = box(first), box(second)
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, (first["type"], second["type"])
    by_id = {node["id"]: node for node in nodes}
    for _, source, _, target, *_ in read(path)["links"]:
        assert by_id[source]["pos"][0] <= by_id[target]["pos"][0]
    (note,) = [node for node in nodes if node["type"] in NOTES]
    assert "**Look at**" in note["widgets_values"][0]
    assert not [node["title"] for node in nodes if node["type"].startswith("AnyShape") and "title" in node]


def test_only_the_demos_own_example_needs_the_demo() -> None:
    """The registry's archive has no demo/, so nothing in example_workflows may ask for its nodes."""
    needs = {path.stem for path in EXAMPLES if "AnyShapeDemo" in path.read_text(encoding="utf-8")}
    assert needs == {path.stem for path in EXAMPLES if path.is_relative_to(ROOT / DEMO)} == {EMOJI}
    assert "/demo/" in (ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines()


def test_every_node_of_the_pack_is_in_an_example(pack) -> None:
    used = {node["type"] for path in EXAMPLES for node in read(path)["nodes"]}
    assert {node.define_schema().node_id for node in pack.nodes.NODES} <= used


# Their pictures in the template browser ---------------------------------------------------------------------------


@each_example
def test_each_has_a_picture(server, path) -> None:
    """Beside it, where the front end looks: the same name, as jpg."""
    picture = path.with_suffix(".jpg")
    with Image.open(picture) as opened:
        assert opened.size == THUMBNAIL and opened.format == "JPEG"
    assert picture.stat().st_size < MOST_BYTES
    pack = "anyshape_demo" if path.is_relative_to(ROOT / DEMO) else "AnyShape"
    assert path.stem in server.get("/workflow_templates").json()[pack]
    for file in (path, picture):
        assert server.get(f"/api/workflow_templates/{pack}/{file.name}").content == file.read_bytes()


@pytest.mark.parametrize("card", cards.cards(), ids=lambda card: card.template)
def test_cards_are_drawn_from_the_results(card) -> None:
    with Image.open(ROOT / PACKED / f"{card.template}.jpg") as opened:
        assert opened.info["comment"].decode() == " ".join(map(plot.digest, card.results)), "run: make figures"


@pytest.mark.parametrize("plan", cards.plans(), ids=lambda plan: plan.template)
def test_plans_are_drawn_from_the_workflows(plan) -> None:
    """They show which steps are full, and no speed: none was measured."""
    assert plan.template in SKIPPING and (len(plan.full), plan.steps - len(plan.full)) == SKIPPING[plan.template][2]
    with Image.open(ROOT / PACKED / f"{plan.template}.jpg") as opened:
        assert opened.info["comment"].decode() == plan.digest, "run: make figures"


# Run --------------------------------------------------------------------------------------------------------------

# What the demo loader has in the place of each of a loader's outputs; its own are MODEL, VAE, text encoder.
LOADERS = {"CheckpointLoaderSimple": (0, 2, 1), "UNETLoader": (0,), "CLIPLoader": (2,), "VAELoader": (1,)}


def on_demo(flow: dict[str, Any], most: int) -> dict[str, Any]:
    """The same workflow on the demo model, with small pictures, ``most`` steps, and without its LoRA."""
    loras = {name: node["inputs"]["model"] for name, node in flow.items() if node["class_type"].startswith("Lora")}
    made = {}
    for name, node in flow.items():
        given = {key: loras.get(value[0], value) if isinstance(value, list) else value
                 for key, value in node["inputs"].items()}  # fmt: skip
        if name not in loras:
            made[name] = _demo_node(node["class_type"], given, most)
    return made


def _demo_node(kind: str, given: dict[str, Any], most: int) -> dict[str, Any]:
    if kind in LOADERS:
        architecture = "unet" if kind == "CheckpointLoaderSimple" else "transformer"
        return {"class_type": "AnyShapeDemoLoader", "inputs": {"dtype": "fp32", "architecture": architecture}}
    if kind == "CLIPTextEncode":
        given, kind = {"text_encoder": given["clip"], "text": "rocket"}, "AnyShapeDemoPrompt"
    small = {key: given[key] // 64 * 8 for key in ("width", "height") if key in given}
    few = {"steps": min(given["steps"], most)} if "steps" in given else {}
    listed = {"shapes": "128x128\n64x96"} if "shapes" in given else {}
    return {"class_type": kind, "inputs": given | small | few | listed}


def with_demo_outputs(flow: dict[str, Any]) -> dict[str, Any]:
    """Links to a loader's MODEL, CLIP and VAE lead to the demo loader's."""
    loaders = {name: LOADERS[node["class_type"]] for name, node in flow.items() if node["class_type"] in LOADERS}
    for node in flow.values():
        for key, value in node["inputs"].items():
            if isinstance(value, list) and value[0] in loaders:
                node["inputs"][key] = [value[0], loaders[value[0]][value[1]]]
    return flow


def run(
    server: ComfyServer, known: dict[str, Any], name: str, steps: int = 3
) -> tuple[dict[str, list[np.ndarray]], dict[str, Any]]:
    """(pictures of each node that shows some, by its title or type; the stats of this run alone)."""
    workflow = example(name)
    flow = on_demo(with_demo_outputs(to_api(workflow, known)), steps)
    server.http.post(f"{server.url}/anyshape/clear").raise_for_status()
    outputs = server.run(flow)["outputs"]
    titles = {str(node["id"]): node.get("title", node["type"]) for node in workflow["nodes"]}
    shown: dict[str, list[np.ndarray]] = {}
    for node, out in outputs.items():
        shown.setdefault(titles[node], []).extend(
            np.asarray(server.view(image).convert("RGB"), dtype=np.float32) / 255 for image in out.get("images", [])
        )
    return shown, server.get("/anyshape/stats").json()


def sizes(stats: dict[str, Any], kind: str = "model") -> set[tuple[int, int, int]]:
    shapes = [shape for model in stats["models"] if model["kind"] == kind for shape in model["shapes"]]
    return {(shape["width"], shape["height"], shape["batch"]) for shape in shapes}


def test_several_sizes(server, known) -> None:
    shown, stats = run(server, known, "SDXL - three sizes, one compilation")
    assert sizes(stats) == sizes(stats, "vae") == {(128, 128, 1), (120, 88, 1), (112, 96, 2)}
    assert len(shown["SaveImage"]) == 4 and not any(model["recompiles"] for model in stats["models"])


def test_the_demo_as_it_is(server, known) -> None:
    """The one that runs at once: not changed for the test."""
    server.http.post(f"{server.url}/anyshape/clear").raise_for_status()
    outputs = server.run(to_api(example(EMOJI), known))["outputs"]
    pictures = [server.view(image) for out in outputs.values() for image in out.get("images", [])]
    assert sorted(picture.size for picture in pictures) == [(200, 264), (200, 264), (256, 256), (320, 192)]
    assert all(len(picture.convert("RGB").getcolors(1 << 20)) > 100 for picture in pictures)
    stats = server.get("/anyshape/stats").json()
    assert sizes(stats) == {(256, 256, 1), (320, 192, 1), (200, 264, 2)}


def test_eager_and_compiled_are_one_picture(server, known) -> None:
    shown, stats = run(server, known, "Comparison SDXL - with and without AnyShape")
    (eager,), (fast,), (chart,) = shown["Eager"], shown["Compiled"], shown["Chart"]
    assert np.abs(eager - fast).max() <= CLOSE and eager.std() > 0.01
    assert sizes(stats) == {(128, 128, 1)} and chart.shape[1] > 500


@pytest.mark.parametrize("model", ["SD1.5", "Z-Image"])
def test_skip_blocks_skips(server, known, model) -> None:
    shown, stats = run(server, known, f"Skip Blocks {model} - every step beside one in three", steps=12)
    (skip,) = stats["skip"]
    assert (skip["full"], skip["skipped"]) == (4, 8) and not skip["resets"]
    (full,), (skipped,) = shown["Every step in full"], shown["With Skip Blocks"]
    assert 0 < np.abs(full - skipped).mean() < 0.1


@pytest.mark.usefixtures("clean_stats", "one_thread")
@pytest.mark.parametrize("name", SKIPPING)
def test_skip_blocks_skips_on_transformers(pack, known, name) -> None:
    """What lies between loader and sampler, with the template's settings, on a small model with random weights."""
    from comfy_extras.nodes_model_advanced import ModelSamplingAuraFlow, ModelSamplingSD3

    import nodes
    from tools.architectures import TABLE, patchers

    kind, shape, (full, skipped) = SKIPPING[name]
    model, context = patchers.make(kind, blocks=5), TABLE[kind].request(0)["conditions"]["context"][:1]

    def latent(**size: int) -> dict[str, torch.Tensor]:
        return {"samples": torch.zeros(shape)}

    stand_ins = {
        "UNETLoader": lambda **file: model, "CLIPLoader": lambda **file: None, "PrimitiveInt": lambda value: value,
        "CLIPTextEncode": lambda clip, text: [[context * len(text) / 40, {}]],
        "EmptyHunyuanLatentVideo": latent, "EmptySD3LatentImage": latent,
    }  # fmt: skip
    ours = {node.define_schema().node_id: node for node in pack.nodes.NODES}
    classes = ours | {each.__name__: each for each in (nodes.KSampler, ModelSamplingAuraFlow, ModelSamplingSD3)}
    flow = to_api(example(name), known)
    with torch.inference_mode():
        whole, fewer = (out["samples"] for out in run_here(flow, "KSampler", classes, stand_ins).values())
    assert counted() == {"full": full, "skipped": skipped, "resets": {}} and fallbacks() == []
    assert 0 < error(fewer, whole) < 0.7  # random weights: no smoothness
    (note,) = [node["widgets_values"][0] for node in example(name)["nodes"] if node["type"] in NOTES]
    assert re.findall(r"\d+(?= are full| are skipped| 步完整| 步跳过)", note) == [str(full), str(skipped)] * 2


def test_warmed_up_sizes_are_known_to_the_sampler(server, known) -> None:
    """The picture is scaled to a size of the list: without that the example would show nothing."""
    _, stats = run(server, known, WARM_UP)
    assert sizes(stats) == {(128, 128, 1), (64, 96, 1)}
    listed = example(WARM_UP)["nodes"]
    (scale,) = [node for node in listed if node["type"] == "ImageScale"]
    (warm,) = [node for node in listed if node["type"] == "AnyShapeWarmUp"]
    assert "{}x{}".format(*scale["widgets_values"][1:3]) in warm["widgets_values"][0].splitlines()
