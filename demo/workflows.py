"""The demo's cases, and the workflows (ComfyUI's API format) that it queues for them."""

from dataclasses import dataclass
from typing import Any

Workflow = dict[str, dict[str, Any]]
UNET, TRANSFORMER = "unet", "transformer"  # as in model.py, which needs ComfyUI


@dataclass(frozen=True)
class Case:
    """One row of the table: a size in image pixels, images per prompt, whether the VAE is compiled too, the model."""

    width: int
    height: int
    batch: int
    vae: bool
    text: str
    model: str = UNET

    @property
    def name(self) -> str:
        return f"{self.width}x{self.height} b{self.batch}"


# Square, wide and tall sizes; 200, 232, 264, 296 and 328 make latents with odd sides (25, 29, 33, 37, 41). The first
# case with one image and the first with more are the only two of a model in which anything may compile; both compile
# the VAE too.
CASES = (
    Case(256, 256, 1, True, "rocket"),
    Case(200, 264, 2, True, "sunflower"),
    Case(320, 192, 1, True, "octopus"),
    Case(192, 320, 4, True, "red apple"),
    Case(264, 200, 1, False, "cactus"),
    Case(384, 192, 2, True, "slice of pizza"),
    Case(296, 232, 1, True, "whale"),
    Case(384, 384, 1, True, "soccer ball"),
    Case(256, 256, 4, False, "strawberry"),
    Case(256, 256, 1, True, "rocket", TRANSFORMER),
    Case(200, 264, 2, True, "crab", TRANSFORMER),
    Case(192, 384, 1, False, "tulip", TRANSFORMER),
    Case(328, 248, 1, True, "cat face", TRANSFORMER),
)

# For the tests: both batches that may compile, one more of each, an odd side, the VAE not compiled, both models. What
# is looked at has the demo's size, and the others are smaller.
QUICK = (
    CASES[0],
    Case(104, 136, 2, True, "sunflower"),
    Case(136, 104, 1, False, "cactus"),
    Case(88, 112, 4, True, "red apple"),
    Case(136, 128, 1, True, "rocket", TRANSFORMER),
    Case(104, 136, 2, True, "crab", TRANSFORMER),
)

# The eight steps are enough for a picture; the rest is what the demo model was judged with.
SAMPLER = {"steps": 8, "cfg": 2.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}


def picture(case: Case, seed: int, compiled: bool) -> Workflow:
    """Text to image at the case's size; with our nodes in between, or (compiled=False) with ComfyUI's own alone."""
    model, vae = ("compile_model", 0) if compiled else ("loader", 0), ("compile_vae", 0) if compiled else ("loader", 1)
    flow = {
        "loader": _node("AnyShapeDemoLoader", architecture=case.model),
        "positive": _node("AnyShapeDemoPrompt", text_encoder=["loader", 2], text=case.text),
        "negative": _node("AnyShapeDemoPrompt", text_encoder=["loader", 2], text=""),
        "latent": _node("EmptyLatentImage", width=case.width, height=case.height, batch_size=case.batch),
        "sampler": _node(
            "KSampler",
            model=[*model],
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["latent", 0],
            seed=seed,
            **SAMPLER,
        ),
        "decode": _node("VAEDecode", samples=["sampler", 0], vae=[*vae]),
        "save": _node("SaveImage", images=["decode", 0], filename_prefix="demo"),
    }
    return {**flow, **_our_nodes(case)} if compiled else flow


def _our_nodes(case: Case) -> Workflow:
    return {
        "compile_model": _node("AnyShapeCompileModel", model=["loader", 0], mode="auto", graph_budget_mb=2048),
        "compile_vae": _node("AnyShapeCompileVAE", vae=["loader", 1], enabled=case.vae),
    }


def cache_info() -> Workflow:
    """The info node alone: its stats as text, its chart as a picture."""
    return {
        "info": _node("AnyShapeShapeCacheInfo"),
        "stats": _node("PreviewAny", source=["info", 1]),
        "chart": _node("SaveImage", images=["info", 2], filename_prefix="chart"),
    }


def _node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}
