"""Compile ControlNet: a ControlNet that runs fast at every size, switched per workflow."""

from comfy_api.latest import io

from ..accel.comfy import entries
from ..accel.comfy.lazy import compile_controlnet
from . import badge
from .giving import Part, give, switched
from .schema import ORIGINAL, enabled_input, schema, verify_input


class CompileControlNet(io.ComfyNode):
    """Returns a copy of the ControlNet whose forwards go through the engine."""

    @classmethod
    def define_schema(cls) -> io.Schema:  # noqa: D102
        return schema(
            node_id="AnyShapeCompileControlNet",
            display_name="Compile ControlNet (AnyShape)",
            description="Speeds up a ControlNet (SD1.5, SD2, SDXL, Flux and others) at any size and batch, with or "
            "without Compile Model. What cannot run faster runs as without this node; Shape Cache Info says why.",
            inputs=[
                io.ControlNet.Input(
                    "control_net",
                    tooltip="The ControlNet to speed up. Set Union ControlNet Type may come before or after.",
                ),
                enabled_input("ControlNet"),
                verify_input(),
            ],
            outputs=[io.ControlNet.Output(tooltip=f"The same ControlNet, faster. {ORIGINAL}")],
            hidden=badge.HIDDEN,
        )

    @classmethod
    def execute(  # noqa: D102
        cls, control_net: io.ControlNet.Type, enabled: bool, verify: bool = True
    ) -> io.NodeOutput:
        return give(cls, controlnet_part(control_net, enabled, verify), verify=verify)


def controlnet_part(control_net: io.ControlNet.Type, enabled: bool, verify: bool) -> Part:
    """Compiles a CONTROL_NET, as the node does."""
    return switched(control_net, enabled, verify, "Compile ControlNet", compile_controlnet, entries.of_controlnet)
