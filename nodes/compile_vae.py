"""Compile VAE: a VAE that decodes and encodes fast at every size, switched per workflow."""

import comfy.sd
from comfy_api.latest import io

from ..accel.comfy import entries
from ..accel.comfy.lazy import compile_vae
from . import badge
from .giving import Part, give, switched
from .schema import ORIGINAL, enabled_input, schema, verify_input


class CompileVAE(io.ComfyNode):
    """Returns a copy of the VAE whose decoder and encoder go through the engine."""

    @classmethod
    def define_schema(cls) -> io.Schema:  # noqa: D102
        return schema(
            node_id="AnyShapeCompileVAE",
            display_name="Compile VAE (AnyShape)",
            description="Speeds up VAE decode and encode at any size and batch. Other workflows that use the same "
            "VAE are not affected.",
            inputs=[io.Vae.Input("vae", tooltip="The VAE to speed up."), enabled_input("VAE"), verify_input()],
            outputs=[io.Vae.Output(tooltip=f"The same VAE, faster. {ORIGINAL}")],
            hidden=badge.HIDDEN,
        )

    @classmethod
    def execute(cls, vae: comfy.sd.VAE, enabled: bool, verify: bool = True) -> io.NodeOutput:  # noqa: D102
        return give(cls, vae_part(vae, enabled, verify), verify=verify)


def vae_part(vae: comfy.sd.VAE, enabled: bool, verify: bool) -> Part:
    """Compiles a VAE, as the node does."""
    return switched(vae, enabled, verify, "Compile VAE", compile_vae, entries.of_vae)
