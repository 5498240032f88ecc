"""Shape Cache Info: what is compiled, what each size cost, and why anything runs in eager."""

import json
from typing import Any

from comfy_api.latest import io, ui

from ..accel import stats
from .chart import draw, notice
from .messages import node_id
from .report import report
from .schema import schema

CHART = 2  # its place among the outputs


class ShapeCacheInfo(io.ComfyNode):
    """Reports the counters as text, as JSON and as a picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:  # noqa: D102
        return schema(
            node_id="AnyShapeShapeCacheInfo",
            display_name="Shape Cache Info (AnyShape)",
            description="Lists every size that has run: how it ran (fast, partly fast, or as ComfyUI), what its "
            "first call cost, how fast it is now, and the reason if something could not run faster.",
            inputs=[
                io.AnyType.Input(
                    "after",
                    optional=True,
                    tooltip="Connect any output here, such as the IMAGE of VAE Decode. The report is made after it "
                    "has run.",
                )
            ],
            outputs=[
                io.String.Output(display_name="report", tooltip="The tables as text."),
                io.String.Output(display_name="stats", tooltip="The same figures as JSON, for scripts."),
                io.Image.Output(
                    display_name="chart", tooltip="The cost of the first call and the current speed, by size."
                ),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
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
        # matplotlib takes as long to load as a small picture takes to make
        chart = draw(snapshot) if _is_used(cls, CHART) else notice("Connect this output, and the chart is drawn.")
        return io.NodeOutput(text, json.dumps(snapshot), chart, ui=ui.PreviewText(text))


def _is_used(node: type[io.ComfyNode], output: int) -> bool:
    """Whether anything in the prompt takes this output of ``node``; True where a script calls it, without a prompt."""
    found, prompt = node_id(node), node.hidden.prompt if node.hidden else None
    if found is None or not isinstance(prompt, dict):
        return True
    taken = [value for other in prompt.values() for value in other.get("inputs", {}).values()]
    return [found, output] in taken
