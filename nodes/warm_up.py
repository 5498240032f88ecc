"""Warm Up: a list of sizes, made fast before the first prompt that uses them."""

import logging
from dataclasses import replace
from functools import partial

from comfy_api.latest import io

from ..accel import reasons
from ..accel.comfy import entries
from ..accel.comfy.warming import CFG_OPTIONS, warm_up
from ..accel.size_list import LAST, PRESETS, not_one_size, with_preset
from . import badge, sizes
from .ahead import AHEAD
from .messages import node_id, say
from .schema import schema


class WarmUp(io.ComfyNode):
    """Runs every listed size once through the compiled model and VAE, and passes both on as they are."""

    @classmethod
    def define_schema(cls) -> io.Schema:  # noqa: D102
        return schema(
            node_id="AnyShapeWarmUp",
            display_name="Warm Up Sizes (AnyShape)",
            description="Compiles and captures the listed sizes in advance, largest first, so that their first "
            "prompt is as fast as the second. Place it last before the sampler. Other sizes work as without this "
            "node.",
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="The MODEL that the sampler will use. It must come from Compile Model; LoRA and Skip "
                    "Blocks nodes may lie in between.",
                ),
                io.String.Input(
                    "shapes",
                    multiline=True,
                    default="1024x1024",
                    tooltip="One size per line, or several separated by commas: width x height in image pixels. "
                    "Examples: 1024x1152; 896x768 batch 2 for two images per prompt; 832x480x33 for a video of 33 "
                    "frames. Text after a # is ignored.",
                ),
                io.Vae.Input(
                    "vae",
                    optional=True,
                    tooltip="A VAE from Compile VAE. Its decoder and encoder are warmed up at these sizes too.",
                ),
                io.Conditioning.Input(
                    "positive",
                    optional=True,
                    tooltip="The positive prompt that the sampler will use. Sizes are warmed up for its length and "
                    "its ControlNets. If neither positive nor negative is connected, a plain prompt stands in: 77 "
                    "tokens for a UNet, 256 for others. If the model needs more than that, the report says so.",
                ),
                io.Conditioning.Input(
                    "negative",
                    optional=True,
                    tooltip="The negative prompt that the sampler will use. If only one of positive and negative is "
                    "connected, it is used for both.",
                ),
                io.Combo.Input(
                    "cfg",
                    options=list(CFG_OPTIONS),
                    default=CFG_OPTIONS[0],
                    optional=True,
                    tooltip="The sampler's cfg. on: above 1.0, so that positive and negative both run. off: 1.0, "
                    "positive only (LCM, Turbo, Flux). both: prepares for either. auto: off for models that take "
                    "guidance as an input (Flux.1, HunyuanVideo), on for all others.",
                ),
                io.Combo.Input(
                    "preset",
                    options=list(PRESETS),
                    default=next(iter(PRESETS)),
                    optional=True,
                    tooltip="Adds sizes to the list. SDXL: the nine sizes it was trained at. portrait and landscape: "
                    "832x1216 and 1216x832. SD1.5: 512x512, 512x768 and 768x512. sizes of the last session: the "
                    "sizes at which this model ran before ComfyUI was last started. none: only the list.",
                ),
                io.Boolean.Input(
                    "measure",
                    default=False,
                    optional=True,
                    tooltip="Also runs each size a few times on ComfyUI's own forward, so that the panel and the "
                    "nodes can say how much faster the model is. Compiled ControlNets in its prompts are timed too.",
                ),
            ],
            outputs=[
                io.Model.Output(tooltip="The same MODEL, unchanged."),
                io.Vae.Output(tooltip="The same VAE, unchanged. Empty if none is connected."),
                io.String.Output(
                    display_name="report",
                    tooltip="A table of the sizes: how each one runs now, how long it took, and why.",
                ),
            ],
            hidden=badge.HIDDEN,
        )

    @classmethod
    def validate_inputs(cls, shapes: str | None, preset: str | None = None) -> bool | str:
        """Whether there is a size to warm up, as far as the prompt says; None: another node gives it."""
        if preset not in (None, *PRESETS):  # ComfyUI leaves to a node what it asks for here
            return f"preset is {preset!r}; choose one of {', '.join(PRESETS)}"
        chosen = preset not in (None, next(iter(PRESETS)))
        return True if chosen else not_one_size(shapes or "") or True

    @classmethod
    def execute(  # noqa: D102
        cls, model: io.Model.Type, shapes: str, vae: io.Vae.Type | None = None,
        positive: io.Conditioning.Type | None = None, negative: io.Conditioning.Type | None = None, cfg: str = "auto",
        preset: str = "none", measure: bool = False,
    ) -> io.NodeOutput:  # fmt: skip
        id = node_id(cls)
        listed, unknown = with_preset(shapes, preset), ""
        if preset == LAST:
            last = sizes.KEPT.last(badge.file_of(cls.hidden.prompt, id) if id else "")
            listed, unknown = "\n".join([listed, *map(str, last)]), "" if last else reasons.say("no_last_sizes")
        done = warm_up(model, listed, vae, positive, negative, cfg, measure, partial(AHEAD.gives_way, id))
        if unknown:
            done = replace(done, report=f"{unknown}\n{done.report}", warnings=[unknown, *done.warnings])
        AHEAD.ended(id, done)
        say(done.line, id, logging.WARNING if done.warnings else logging.INFO)
        counted = {"listed": done.listed, "ready": done.ready, "bad": done.bad}
        settings = {"shapes": shapes, "cfg": cfg, "preset": preset, "measure": measure}
        badge.note(cls, entries.of_warm_up(model, vae), "\n".join(done.warnings), sizes=counted, **settings)
        return io.NodeOutput(model, vae, done.report)
