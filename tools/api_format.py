"""A workflow as the front end saves it, in the form that the server runs.

    flow = to_api(json.loads(path.read_text()), server.object_info())
    server.run(flow)

The front end does this itself when a prompt is queued; here it is done without one, for workflows whose nodes are all
switched on and in one graph. ``run_here`` runs such a flow without a server, on models that no loader would read.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
NOTES = {"Note", "MarkdownNote"}  # the front end's own, which the server does not know
Described = dict[str, Any]  # one node of /object_info


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """A node of a prompt; a link is [id, output]."""
    return {"class_type": class_type, "inputs": inputs}


def text_to_image(
    ids: str, size: tuple[int, int, int], model: list | None = None, vae: list | None = None, saved: str = "",
    loader: dict[str, Any] | None = None, **sampling: Any,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Text to image on the demo model. ids: of loader, prompt, latent, sampler, decoder, picture, and an empty prompt.

    size: width, height, batch. model, vae: links, in place of the loader's. saved: the prefix of the picture's file;
    without, it is a preview. loader: more of its inputs. sampling: what the sampler is given otherwise.
    """
    load, prompt, latent, sampler, decoder, picture, *empty = ids.split()
    usual = {"seed": 5, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    width, height, batch = size
    shown = node("SaveImage", filename_prefix=saved) if saved else node("PreviewImage")
    shown["inputs"]["images"] = [decoder, 0]
    return {
        load: node("AnyShapeDemoLoader", dtype="fp32", **loader or {}),
        prompt: node("AnyShapeDemoPrompt", text_encoder=[load, 2], text="rocket"),
        **{each: node("AnyShapeDemoPrompt", text_encoder=[load, 2], text="") for each in empty},
        latent: node("EmptyLatentImage", width=width, height=height, batch_size=batch),
        sampler: node(
            "KSampler", model=model or [load, 0], positive=[prompt, 0], negative=[(empty or [prompt])[0], 0],
            latent_image=[latent, 0], **usual | sampling,
        ),
        decoder: node("VAEDecode", samples=[sampler, 0], vae=vae or [load, 1]),
        picture: shown,
    }  # fmt: skip


def inputs(described: Described) -> dict[str, list]:
    """All inputs of a node by name, in their order: [type or choices, options]."""
    return {**described["input"].get("required", {}), **described["input"].get("optional", {})}


def is_widget(spec: list) -> bool:
    """Whether an input is set on the node itself; it may be linked all the same."""
    return isinstance(spec[0], list) or spec[0] in WIDGETS


def to_api(workflow: dict[str, Any], known: dict[str, Described]) -> dict[str, dict[str, Any]]:
    """{node id: {"class_type", "inputs"}}. ``known``: /object_info. Raises ValueError for what does not fit a node."""
    sources = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    flow = {}
    for node in workflow["nodes"]:
        if node["type"] in NOTES:
            continue
        if node.get("mode", 0):
            raise ValueError(f"node {node['id']} ({node['type']}) is muted or bypassed")
        linked = {one["name"]: sources[one["link"]] for one in node["inputs"] if one["link"] is not None}
        given = _widgets(node, inputs(known[node["type"]])) | linked
        flow[str(node["id"])] = {"class_type": node["type"], "inputs": given}
    return flow


def _widgets(node: dict[str, Any], specs: dict[str, list]) -> dict[str, Any]:
    """The values of a node's widgets by name; a seed has a second one, which is for the front end alone.

    Widgets at the end that came after the workflow was saved have their defaults.
    """
    names = list(_widget_names(specs))
    values = node["widgets_values"]
    values = values + [specs[name][1]["default"] for name in names[len(values) :] if "default" in specs[name][1]]
    if len(names) != len(values):
        raise ValueError(f"node {node['id']} ({node['type']}) has values {values} for the widgets {names}")
    return {name: value for name, value in zip(names, values, strict=True) if name}


def _widget_names(specs: dict[str, list]) -> Iterator[str]:
    for name, (kind, *options) in specs.items():
        if is_widget([kind]):
            yield name
            if options and options[0].get("control_after_generate"):
                yield ""


def run_here(
    flow: dict[str, dict[str, Any]], wanted: str, classes: Mapping[str, type], stand_ins: Mapping[str, Callable]
) -> dict[str, Any]:
    """The first output of each node of the class ``wanted``, by its id, and so of all that leads there.

    classes: ComfyUI's nodes and ours, which run as they are. stand_ins: functions of a node's inputs, in the place
    of a class; they give its first output.
    """

    @cache
    def outputs(name: str) -> tuple:
        kind, given = flow[name]["class_type"], flow[name]["inputs"]
        given = {key: outputs(value[0])[value[1]] if isinstance(value, list) else value for key, value in given.items()}
        if kind in stand_ins:
            return (stand_ins[kind](**given),)
        cls = classes[kind]
        out = cls.execute(**given) if hasattr(cls, "execute") else getattr(cls(), cls.FUNCTION)(**given)
        return out if isinstance(out, tuple) else out.args

    return {name: outputs(name)[0] for name, node in flow.items() if node["class_type"] == wanted}
