"""The demo model as a ComfyUI node pack of its own: only the demo and the tests load it."""


async def comfy_entrypoint():  # noqa: ANN201  (its class is ComfyUI's)
    """What ComfyUI asks a node pack for. The import waits until then: scripts import this package without ComfyUI."""
    from .nodes import DemoExtension

    return DemoExtension()
