"""Two nodes: one loads the demo model, one turns a prompt into its conditioning."""

from comfy_api.latest import ComfyExtension, io

from . import model
from .text import TextEncoder

TextEncoderType = io.Custom("ANYSHAPE_DEMO_TEXT")
CATEGORY = "AnyShape/demo"


class DemoLoader(io.ComfyNode):
    """Loads one of the models that lie beside this file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AnyShapeDemoLoader",
            display_name="Load Demo Model",
            category=CATEGORY,
            description="A small model that paints emoji by their Unicode names: a UNet or a transformer.",
            inputs=[
                io.Combo.Input(
                    "dtype",
                    options=["auto", *model.DTYPES],
                    default="auto",
                    optional=True,
                    tooltip="Number format of the model and the VAE. auto: what ComfyUI picks for this device.",
                ),
                io.Combo.Input(
                    "architecture",
                    options=list(model.ARCHITECTURES),
                    default=model.UNET,
                    optional=True,
                    tooltip="unet: as Stable Diffusion. transformer: as Lumina 2 and Z-Image.",
                ),
            ],
            outputs=[
                io.Model.Output(),
                io.Vae.Output(),
                TextEncoderType.Output("text_encoder", tooltip="For the Demo Prompt node."),
            ],
        )

    @classmethod
    def execute(cls, dtype: str = "auto", architecture: str = model.UNET) -> io.NodeOutput:
        return io.NodeOutput(*model.load(dtype, architecture))


class DemoPrompt(io.ComfyNode):
    """Looks the words of a prompt up in the model's own table."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AnyShapeDemoPrompt",
            display_name="Demo Prompt",
            category=CATEGORY,
            description="Encodes the Unicode name of an emoji for the demo model.",
            inputs=[
                TextEncoderType.Input("text_encoder", tooltip="From the Load Demo Model node."),
                io.String.Input(
                    "text",
                    multiline=True,
                    default="rocket",
                    tooltip="The Unicode name of an emoji, such as: red apple. Empty for the negative prompt. "
                    "Words that the model does not know are left out, with a warning in the log.",
                ),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, text_encoder: TextEncoder, text: str) -> io.NodeOutput:
        return io.NodeOutput(model.encode(text_encoder, text))


class DemoExtension(ComfyExtension):
    """The pack's nodes, as ComfyUI asks for them."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [DemoLoader, DemoPrompt]
