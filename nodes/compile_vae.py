"""Compile VAE: a VAE that decodes and encodes fast at every size, switched per workflow."""

import comfy.sd
from comfy_api.latest import io

from ..accel.comfy import entries
from ..accel.comfy.lazy import compile_vae
from . import badge
from .giving import Part, give, part_of
from .messages import VERIFY
from .schema import schema


class CompileVAE(io.ComfyNode):
    """Returns a copy of the VAE whose decoder and encoder go through the engine."""

    @classmethod
    def define_schema(cls) -> io.Schema:  # noqa: D102
        return schema(
            node_id="AnyShapeCompileVAE",
            display_name="Compile VAE (AnyShape)",
            category="AnyShape",
            description="Speeds up VAE decode and encode at any size and batch. Other workflows that use the same "
            "VAE are not affected.",
            inputs=[
                io.Vae.Input("vae", tooltip="The VAE to speed up."),
                io.Boolean.Input(
                    "enabled", default=True, tooltip="Off: the VAE passes through, exactly as without this node."
                ),
                io.Boolean.Input("verify", default=True, optional=True, tooltip=VERIFY),
            ],
            outputs=[
                io.Vae.Output(
                    tooltip="The same VAE, faster. To get the original back, bypass (Ctrl+B) or delete this node."
                )
            ],
            hidden=badge.HIDDEN,
        )

    @classmethod
    def execute(cls, vae: comfy.sd.VAE, enabled: bool, verify: bool = True) -> io.NodeOutput:  # noqa: D102
        return give(cls, vae_part(vae, enabled, verify), verify=verify)


def vae_part(vae: comfy.sd.VAE, enabled: bool, verify: bool) -> Part:
    """Compiles a VAE, as the node does."""
    if not enabled:
        return Part(vae, None, enabled=False)

    def made() -> Part:
        compiled, message = compile_vae(vae, verify)
        return Part(compiled, entries.of_vae(compiled), message, patcher=getattr(vae, "patcher", None))

    return part_of(vae, "Compile VAE", made)
