"""A prompt in ComfyUI's API format as a graph: what leads where, and of which type it is by what the nodes declare."""

from collections.abc import Iterator
from typing import Any

import nodes as comfyui

Prompt = dict[str, dict[str, Any]]
Link = tuple[str, int]  # a node's id, and which of its outputs

ANY = {"*", "COMFY_MATCHTYPE_V3"}  # declared by switches and reroutes: the output is what the input is
PLAIN = {  # types that hold nothing but themselves; others may be pipes
    "STRING", "INT", "FLOAT", "BOOLEAN", "SIGMAS", "IMAGE", "LATENT", "MASK", "CONDITIONING", "CLIP",
}  # fmt: skip


def title(node_type: str) -> str:
    """As the browser shows it."""
    return comfyui.NODE_DISPLAY_NAME_MAPPINGS.get(node_type) or node_type


def _is_node(node: Any) -> bool:
    """Whether ComfyUI will read this as a node; what it refuses is none of our business."""
    parts = (node.get("class_type"), node.get("inputs")) if isinstance(node, dict) else (None, None)
    return isinstance(parts[0], str) and isinstance(parts[1], dict)


class PromptGraph:
    """``kinds``: the types that are looked for. Made for one look: what nodes declare is asked for once."""

    def __init__(self, prompt: Prompt, kinds: set[str]) -> None:
        self.prompt, self._kinds = {id: node for id, node in prompt.items() if _is_node(node)}, kinds
        self._declared: dict[str, dict[str, Any]] = {}

    def type(self, id: str) -> str:
        """The class of a node, as ComfyUI knows it."""
        return self.prompt[id]["class_type"]

    def outputs(self, id: str) -> list[str]:
        """The types of a node's outputs; none of a node that ComfyUI does not know."""
        known = comfyui.NODE_CLASS_MAPPINGS.get(self.type(id))
        types = getattr(known, "RETURN_TYPES", ()) or ()
        return [str(one) for one in types]  # packs declare strings that equal anything

    def output(self, link: Link) -> str:
        """The type at the beginning of a link."""
        return self.outputs(link[0])[link[1]]

    def hands_on(self, id: str, kind: str) -> bool:
        """Whether a node may give a ``kind`` that it got."""
        return bool({kind, *ANY} & set(self.outputs(id)))

    def links(self, id: str) -> Iterator[tuple[str, Link]]:
        """(input, link) of a node, for links that lead to an output of this prompt."""
        for name, value in self.prompt[id]["inputs"].items():
            if isinstance(value, list) and len(value) == 2 and isinstance(value[1], int):
                known = isinstance(value[0], str) and value[0] in self.prompt
                if known and 0 <= value[1] < len(self.outputs(value[0])):
                    yield name, (value[0], value[1])

    def kind(self, id: str, name: str, link: Link) -> str:
        """Which kind this link is, if any; behind a switch the input that it goes to says it."""
        given = self.output(link)
        if given not in self._kinds and given not in ANY:
            return ""
        wanted = self._wanted(self.type(id), name)
        if given in ANY:
            given = wanted
        fits = wanted in ANY or not wanted or given in wanted.split(",")
        return given if given in self._kinds and fits else ""

    def upstream(self, link: Link, kind: str) -> list[str]:
        """The nodes that ``link`` goes back to, by inputs of that kind; where one has none, by all (pipes)."""
        found, ahead = {}, [link[0]]
        while ahead:
            id = ahead.pop()
            if id in found:
                continue
            found[id] = None
            links = list(self.links(id))
            same = [link for name, link in links if self.kind(id, name, link) == kind]
            ahead += [source for source, _ in same or (link for _, link in links if self.output(link) not in PLAIN)]
        return list(found)

    def _wanted(self, node_type: str, name: str) -> str:
        """The type, or several with commas, that a node declares for an input; "" of one that is not fixed."""
        if node_type not in self._declared:  # asking may mean a look into folders
            known = comfyui.NODE_CLASS_MAPPINGS.get(node_type)
            inputs = known.INPUT_TYPES() if known else {}
            self._declared[node_type] = {**inputs.get("required", {}), **inputs.get("optional", {})}
        return str(self._declared[node_type].get(name, ("",))[0])
