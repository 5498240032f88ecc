"""Compile Model: a MODEL that runs fast at every size."""

from comfy_api.latest import io

from ..accel.engine import MODES, Settings
from ..accel.families import entries
from ..accel.families.attach import compile_model
from . import badge
from .messages import VERIFY, say


class CompileModel(io.ComfyNode):
    """Returns a clone of the model whose forwards go through the engine."""

    @classmethod
    def define_schema(cls) -> io.Schema:  # noqa: D102
        return io.Schema(
            node_id="AnyShapeCompileModel",
            display_name="Compile Model",
            category="AnyShape",
            description="Makes sampling faster. Compiles once, in seconds; a new size, batch or prompt length never "
            "compiles again. What cannot run faster runs as without this node; Shape Cache Info says why.",
            inputs=[
                io.Model.Input("model", tooltip="The model to speed up. LoRA nodes may come before or after."),
                io.Combo.Input(
                    "mode",
                    options=list(MODES),
                    default="auto",
                    tooltip="auto: the fastest that works here. kernels: Triton kernels (NVIDIA). regions: "
                    "torch.compile of the repeated blocks. off: exactly as without this node.",
                ),
                io.Int.Input(
                    "graph_budget_mb",
                    default=2048,
                    min=0,
                    max=1 << 20,
                    step=64,
                    tooltip="GPU memory for captured CUDA graphs, in MB. They make small images much faster; about "
                    "1.5 GB serves all SDXL sizes. 0 turns graphs off. The least recently used sizes give way.",
                ),
                io.Boolean.Input("verify", default=True, optional=True, tooltip=VERIFY),
            ],
            outputs=[io.Model.Output(tooltip="The same model, faster. Deleting the node restores the original.")],
            hidden=badge.HIDDEN,
        )

    @classmethod
    def execute(  # noqa: D102
        cls, model: io.Model.Type, mode: str, graph_budget_mb: int, verify: bool = True
    ) -> io.NodeOutput:
        compiled, message = compile_model(model, Settings(mode, graph_budget_mb, verify))
        say(message, cls.hidden.unique_id)
        badge.note(cls, entries.of_model(compiled), message, enabled=mode != "off")
        return io.NodeOutput(compiled)
