"""Compile ControlNet: a ControlNet that runs fast at every size, switched per workflow."""

from comfy_api.latest import io

from ..accel.comfy import entries
from ..accel.comfy.lazy import compile_controlnet
from . import badge
from .giving import Part, give, part_of
from .messages import VERIFY
from .schema import schema


class CompileControlNet(io.ComfyNode):
    """Returns a copy of the ControlNet whose forwards go through the engine."""

    @classmethod
    def define_schema(cls) -> io.Schema:  # noqa: D102
        return schema(
            node_id="AnyShapeCompileControlNet",
            display_name="Compile ControlNet (AnyShape)",
            category="AnyShape",
            description="Speeds up a ControlNet (SD1.5, SD2, SDXL, Flux and others) at any size and batch, with or "
            "without Compile Model. What cannot run faster runs as without this node; Shape Cache Info says why.",
            inputs=[
                io.ControlNet.Input(
                    "control_net",
                    tooltip="The ControlNet to speed up. Set Union ControlNet Type may come before or after.",
                ),
                io.Boolean.Input(
                    "enabled", default=True, tooltip="Off: the ControlNet passes through, exactly as without this node."
                ),
                io.Boolean.Input("verify", default=True, optional=True, tooltip=VERIFY),
            ],
            outputs=[
                io.ControlNet.Output(
                    tooltip="The same ControlNet, faster. To get the original back, bypass (Ctrl+B) or delete this "
                    "node."
                )
            ],
            hidden=badge.HIDDEN,
        )

    @classmethod
    def execute(  # noqa: D102
        cls, control_net: io.ControlNet.Type, enabled: bool, verify: bool = True
    ) -> io.NodeOutput:
        return give(cls, controlnet_part(control_net, enabled, verify), verify=verify)


def controlnet_part(control_net: io.ControlNet.Type, enabled: bool, verify: bool) -> Part:
    """Compiles a CONTROL_NET, as the node does."""
    if not enabled:
        return Part(control_net, None, enabled=False)

    def made() -> Part:
        compiled, message = compile_controlnet(control_net, verify)
        return Part(compiled, entries.of_controlnet(compiled), message)

    return part_of(control_net, "Compile ControlNet", made)
