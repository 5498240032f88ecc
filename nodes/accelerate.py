"""Accelerate: Compile Model, Compile VAE and Compile ControlNet in one node."""

from typing import Any

from comfy_api.latest import io

from ..accel.call import BUDGET_MB
from ..accel.comfy.lazy import compile_controlnet
from . import badge
from .compile_controlnet import controlnet_part
from .compile_model import TIMED, is_mode, model_part, timed
from .compile_vae import vae_part
from .giving import give
from .schema import budget_input, mode_input, model_input, model_output, schema, verify_input


class Accelerate(io.ComfyNode):
    """Does what the three compile nodes do, by their own code."""

    @classmethod
    def define_schema(cls) -> io.Schema:  # noqa: D102
        return schema(
            node_id="AnyShapeAccelerate",
            display_name="Accelerate (AnyShape)",
            description="Speeds up a workflow with one node, which does the work of Compile Model, Compile VAE and "
            "Compile ControlNet. Connect the parts that you have, and use its outputs from there on. What cannot run "
            "faster runs as without this node; Shape Cache Info says why.",
            inputs=[
                model_input(),
                mode_input("; VAE and ControlNet pass through"),
                budget_input(),
                verify_input(),
                io.Vae.Input("vae", optional=True, tooltip="The VAE to speed up. Optional."),
                io.ControlNet.Input("control_net", optional=True, tooltip="The ControlNet to speed up. Optional."),
            ],
            outputs=[
                model_output(),
                io.Vae.Output(tooltip="The same VAE, faster. Empty if none is connected."),
                io.ControlNet.Output(tooltip="The same ControlNet, faster. Empty if none is connected."),
            ],
            hidden=badge.HIDDEN,
        )

    @classmethod
    def validate_inputs(cls, mode: str | None = None) -> bool | str:
        """Accepts what Compile Model accepts."""
        return is_mode(mode)

    @classmethod
    def execute(  # noqa: D102
        cls, model: io.Model.Type, mode: str = "auto", graph_budget_mb: int = BUDGET_MB, verify: bool = True,
        vae: Any = None, control_net: Any = None,
    ) -> io.NodeOutput:  # fmt: skip
        settings = {"mode": mode, "graph_budget_mb": graph_budget_mb, "verify": verify}
        if mode in TIMED:  # a compiled ControlNet is timed with its model; a VAE is where it is recorded
            control, _ = (control_net, "") if control_net is None else compile_controlnet(control_net, verify)
            return io.NodeOutput(timed(model, mode), vae, control)
        fused = mode == "auto"  # of the three only a MODEL can run unfused
        return give(
            cls,
            model_part(model, **settings),
            None if vae is None else vae_part(vae, fused, verify),
            None if control_net is None else controlnet_part(control_net, fused, verify),
            **settings,
        )
