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
            description="Makes sampling much faster and changes the picture slightly. On most steps it skips the "
            "blocks in the middle of the model and forecasts their output from earlier steps. Works at any size on "
            "SD1.5, SD2, SDXL and on transformers for images, video and sound (Flux, Z-Image, Qwen-Image, Wan and "
            "others), with or without Compile Model. Runs of 8 steps or fewer have little to gain and are left as "
            "they are.",
            inputs=[
                io.Model.Input("model", tooltip="The model to speed up; Compile Model may come before or after."),
                io.Int.Input(
                    "interval",
                    default=3,
                    min=1,
                    max=MAX_INTERVAL,
                    tooltip="Runs every block on one step in N. A higher number is faster, and the picture differs "
                    "more from the original. 1: every step is full, exactly as without this node.",
                ),
                io.Combo.Input(
                    "depth",
                    options=[AUTO, *map(str, range(DEEPEST + 1))],
                    default=AUTO,
                    tooltip="How many blocks at each end of the model still run on a skipped step (one more in a "
                    "UNet). A higher number is slower and stays closer to the original picture. auto: as many as a "
                    "tenth of a full step's work allows.",
                ),
                _percent(
                    "start_percent",
                    0.0,
                    "Where in the sampling schedule skipping begins. Every step before it is full.",
                ),
                _percent(
                    "end_percent", 1.0, "Where in the sampling schedule skipping ends. Every step after it is full."
                ),
                io.Combo.Input(
                    "forecast",
                    options=list(FORECASTS),
                    default=FORECASTS[0],
                    tooltip="order1: extrapolates the change between the last two full steps. off: reuses the last "
                    "full step as it is, like DeepCache.",
                ),
                io.Combo.Input(
                    "preset",
                    options=list(PRESETS),
                    default=next(iter(PRESETS)),
                    optional=True,
                    tooltip="safe, balanced, fast: interval 2, 3 or 4 with depth auto; they override those two "
                    "inputs. custom: uses interval and depth as set. Measured over 30 steps on top of Compile Model, "
                    "balanced gives 1.9x (SD1.5), 2.4x (SDXL), 2.6x (Flux), 2.7x (Wan 2.1). safe and fast were not "
                    "measured. Judging by the work left on the small demo models, they give 1.7x to 1.9x and 2.6x to "
                    "3.2x.",
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
