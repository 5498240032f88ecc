"""Shape Cache Info: what is compiled, what each size cost, and why anything runs in eager."""

import json
from typing import Any

from comfy_api.latest import io, ui

from ..accel import stats
from .chart import draw
from .report import report
from .schema import schema


class ShapeCacheInfo(io.ComfyNode):
    """Reports the counters as text, as JSON and as a picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:  # noqa: D102
        return schema(
            node_id="AnyShapeShapeCacheInfo",
            display_name="Shape Cache Info (AnyShape)",
            category="AnyShape",
            description="Shows every size that has run: how (graph, tape or eager), what its first call cost, how fast "
            "it is now, and the reason wherever something could not run faster.",
            inputs=[
                io.AnyType.Input(
                    "after",
                    optional=True,
                    tooltip="Connect anything here (the IMAGE of VAE Decode, say) to report after it has run.",
                )
            ],
            outputs=[
                io.String.Output(display_name="report", tooltip="A table to read."),
                io.String.Output(display_name="stats", tooltip="The same figures as JSON, for scripts."),
                io.Image.Output(display_name="chart", tooltip="First-call cost and speed by size."),
            ],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **kwargs: Any) -> float:
        """Never equal to itself, so that ComfyUI runs the node every time."""
        return float("nan")

    @classmethod
    def execute(cls, after: Any = None) -> io.NodeOutput:  # noqa: D102
        snapshot = stats.snapshot()
        text = report(snapshot)
        return io.NodeOutput(text, json.dumps(snapshot), draw(snapshot), ui=ui.PreviewText(text))
