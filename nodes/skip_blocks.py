"""Skip Blocks: the blocks in the middle of a model run on some steps only, and are forecast on the others."""

import logging
from functools import partial

from comfy_api.latest import io

from ..accel.comfy import entries
from ..accel.comfy.skipping import skip_blocks
from ..accel.skip.settings import AUTO, FORECASTS, MAX_INTERVAL, PRESETS, SkipSettings, with_preset
from . import badge
from .messages import node_id, say
from .schema import model_output, schema

DEEPEST = 10  # of SD1.5; of a transformer's blocks so many at either end are more than a skipped step should run


def _percent(name: str, default: float, tooltip: str) -> io.Float.Input:
    return io.Float.Input(name, default=default, min=0.0, max=1.0, step=0.01, tooltip=tooltip)


class SkipBlocks(io.ComfyNode):
    """Returns a clone of the model that skips the blocks in its middle on most steps."""

    @classmethod
    def define_schema(cls) -> io.Schema:  # noqa: D102
        return schema(
            node_id="AnyShapeSkipBlocks",
            display_name="Skip Blocks (DeepCache)",
            description="Makes sampling much faster for a slightly different picture: on most steps the blocks in the "
            "middle of the model are not computed, and what they would add is forecast from earlier steps. For SD1.5, "
            "SD2, SDXL and transformers of images, video and sound (Flux, Z-Image, Qwen-Image, Wan and others), any "
            "size; with or without Compile Model. Little can be won at 8 steps or fewer: such runs are left as they "
            "are.",
            inputs=[
                io.Model.Input("model", tooltip="The model to speed up; Compile Model may come before or after."),
                io.Int.Input(
                    "interval",
                    default=3,
                    min=1,
                    max=MAX_INTERVAL,
                    tooltip="Runs every block on one step in N. Higher: faster, and farther from the original "
                    "picture. 1: every step in full, exactly as without this node.",
                ),
                io.Combo.Input(
                    "depth",
                    options=[AUTO, *map(str, range(DEEPEST + 1))],
                    default=AUTO,
                    tooltip="How many blocks at either end of the model run on a skipped step, too (of a UNet one "
                    "more). auto: as many as a tenth of a full step's work allows. Higher: slower, and closer to the "
                    "original picture.",
                ),
                _percent(
                    "start_percent",
                    0.0,
                    "Where in the sampling schedule skipping begins; before it every step is full.",
                ),
                _percent(
                    "end_percent", 1.0, "Where in the sampling schedule skipping ends; after it every step is full."
                ),
                io.Combo.Input(
                    "forecast",
                    options=list(FORECASTS),
                    default=FORECASTS[0],
                    tooltip="order1: continues the change of the last two full steps. off: takes the last full step "
                    "as it is, like DeepCache.",
                ),
                io.Combo.Input(
                    "preset",
                    options=list(PRESETS),
                    default=next(iter(PRESETS)),
                    optional=True,
                    tooltip="safe, balanced, fast: interval 2, 3 or 4 with depth auto, in place of the two inputs "
                    "above. custom: as they are set. Over 30 steps behind Compile Model, balanced was measured: 1.9x "
                    "(SD1.5), 2.4x (SDXL), 2.6x (Flux), 2.7x (Wan 2.1). safe and fast were not; by the work that is "
                    "left of the small demo models, they give 1.7x to 1.9x and 2.6x to 3.2x.",
                ),
            ],
            outputs=[model_output()],
            hidden=badge.HIDDEN,
        )

    @classmethod
    def execute(  # noqa: D102
        cls, model: io.Model.Type, interval: int, depth: str, start_percent: float, end_percent: float, forecast: str,
        preset: str = "custom",
    ) -> io.NodeOutput:  # fmt: skip
        window = {"start_percent": start_percent, "end_percent": end_percent}
        chosen = with_preset(preset, interval, depth) | window | {"forecast": forecast}
        tell = partial(say, node_id=node_id(cls), level=logging.INFO)
        skipping, message = skip_blocks(model, SkipSettings(**chosen), tell)
        say(message, node_id(cls))
        badge.note(cls, entries.of_skipping(skipping), message, patcher=model, **chosen)
        return io.NodeOutput(skipping)
