"""Warm Up: a list of sizes, made fast before the first prompt that uses them."""

import logging

from comfy_api.latest import io

from ..accel.families import entries
from ..accel.families.warm_up import CFG_OPTIONS, warm_up
from . import badge
from .messages import say


class WarmUp(io.ComfyNode):
    """Runs every listed size once through the compiled model and VAE, and passes both on as they are."""

    @classmethod
    def define_schema(cls) -> io.Schema:  # noqa: D102
        return io.Schema(
            node_id="AnyShapeWarmUp",
            display_name="Warm Up",
            category="AnyShape",
            description="Compiles and captures the listed sizes ahead, largest first, so that their first prompt is "
            "as fast as the second. Place it last before the sampler. Other sizes work as without this node.",
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="The MODEL that the sampler gets, from Compile Model (and LoRA or Skip Blocks nodes).",
                ),
                io.String.Input(
                    "shapes",
                    multiline=True,
                    default="1024x1024",
                    tooltip="A size a line, width x height in image pixels: 1024x1152, or 896x768 batch 2 for two "
                    "images a prompt. What follows a # is left out.",
                ),
                io.Vae.Input(
                    "vae",
                    optional=True,
                    tooltip="From Compile VAE: decoding and encoding are warmed up at these sizes too.",
                ),
                io.Conditioning.Input(
                    "positive",
                    optional=True,
                    tooltip="What the sampler gets: sizes are warmed up for its prompt length and its ControlNets. "
                    "Without positive and negative: 77 tokens (256 for Flux) of the model's own width.",
                ),
                io.Conditioning.Input(
                    "negative",
                    optional=True,
                    tooltip="What the sampler gets. If only one of positive and negative is connected, it stands for "
                    "both.",
                ),
                io.Combo.Input(
                    "cfg",
                    options=list(CFG_OPTIONS),
                    default=CFG_OPTIONS[0],
                    optional=True,
                    tooltip="How the sampler's cfg will be. on: above 1.0, positive and negative together. off: 1.0, "
                    "positive alone (LCM, Turbo, Flux). both: either way. auto: off for Flux, on for others.",
                ),
            ],
            outputs=[
                io.Model.Output(tooltip="The same MODEL, unchanged."),
                io.Vae.Output(tooltip="The same VAE, unchanged; nothing if none is connected."),
                io.String.Output(
                    display_name="report", tooltip="A table of the sizes: how each runs now, what it took, and why."
                ),
            ],
            hidden=badge.HIDDEN,
        )

    @classmethod
    def execute(  # noqa: D102
        cls, model: io.Model.Type, shapes: str, vae: io.Vae.Type | None = None,
        positive: io.Conditioning.Type | None = None, negative: io.Conditioning.Type | None = None, cfg: str = "auto",
    ) -> io.NodeOutput:  # fmt: skip
        report, warnings = warm_up(model, shapes, vae, positive, negative, cfg)
        say(report, cls.hidden.unique_id, logging.WARNING if warnings else logging.INFO)
        badge.note(cls, entries.of_warm_up(model, vae), "\n".join(warnings))
        return io.NodeOutput(model, vae, report)
