"""Accelerating a workflow that has none of our nodes: they are put into the queued prompt, not into the user's graph.

A MODEL is compiled where it is used, behind every node that changes it (LoRA, patches): what is compiled is then what
the sampler gets, and of several samplers behind one output all share one node. What is a MODEL, a VAE or a CONTROL_NET
is known from the types that nodes declare, never from their names. A path is left alone where one of our nodes is on
it, or a node that compiles the model itself, or an exception of the user's.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import nodes as comfyui

from ..accel.engine import BUDGET_MB

Prompt = dict[str, dict[str, Any]]  # ComfyUI's API format
Link = tuple[str, int]  # a node's id, and which of its outputs

PREFIX = "anyshape-"  # of the ids of our nodes in a prompt; no colon, by which the front end finds subgraphs
TITLE = "AnyShape (accelerate every model)"
OURS = {  # type -> our node for it, and the name of its input
    "MODEL": ("AnyShapeCompileModel", "model"),
    "VAE": ("AnyShapeCompileVAE", "vae"),
    "CONTROL_NET": ("AnyShapeCompileControlNet", "control_net"),
}
ALL_IN_ONE, WARM_UP = "AnyShapeAccelerate", "AnyShapeWarmUp"
ANY = {"*", "COMFY_MATCHTYPE_V3"}  # declared by switches and reroutes: the output is what the input is
NOTHING_RUN = {"SIGMAS", "STRING", "INT", "FLOAT", "BOOLEAN"}  # a node that gives only these does not run a model
NO_PIPE = NOTHING_RUN | {"IMAGE", "LATENT", "MASK", "CONDITIONING", "CLIP"}  # types that hold no model of ours
COMPILERS = re.compile(r"torch_?compile", re.IGNORECASE)  # node types; they compile a model as a whole
TAKEN_OVER = (
    "{name} (node {id}) compiles the model itself, so it was left alone: bypass that node to have AnyShape accelerate "
    "this model"
)


@dataclass(frozen=True)
class Choice:
    """What the user wants of it."""

    budget_mb: int = BUDGET_MB
    exceptions: tuple[str, ...] = ()  # names of files or of node types, in lower case; * stands for anything


@dataclass
class Result:
    """The prompt with our nodes in it; the one that was given stays as it is."""

    prompt: Prompt
    added: list[str] = field(default_factory=list)  # ids
    reasons: list[str] = field(default_factory=list)  # why paths were left alone


def accelerate(prompt: Prompt, choice: Choice) -> Result:
    """Puts a node of ours between each MODEL, VAE and CONTROL_NET and the nodes that use it."""
    result, uses = Result(dict(prompt)), list(_uses(prompt))
    users = {(user, kind) for user, _, _, kind in uses}
    for user, name, link, kind in uses:
        path = _upstream(prompt, link, kind)
        if any((id, kind) in users for id in path):  # what it hands on was accelerated before it
            continue
        if _is_ours(prompt, path, kind) or _is_excepted(prompt, [*path, user], choice):
            continue
        taken = next((id for id in path if COMPILERS.search(prompt[id]["class_type"])), None)
        if taken is not None:
            reason = TAKEN_OVER.format(name=_title(prompt[taken]["class_type"]), id=taken)
            result.reasons.extend([reason] if reason not in result.reasons else [])
            continue
        node = result.prompt[user]
        inputs = node["inputs"] | {name: [_added(result, link, kind, choice), 0]}
        result.prompt[user] = node | {"inputs": inputs}
    return result


@dataclass(frozen=True)
class Sampled:
    """A MODEL of ours and what a sampler gets with it."""

    link: Link
    positive: Link | None
    negative: Link | None
    cfg: float | None
    vae: Link | None  # of ours, of the same prompt


def sampled(prompt: Prompt) -> list[Sampled]:
    """Where a compiled MODEL is sampled with prompts. Not where a Warm Up of the user's lies before it."""
    uses = list(_uses(prompt))
    ours = [(user, link, kind) for user, _, link, kind in uses if _is_ours(prompt, _upstream(prompt, link, kind), kind)]
    vae = next((link for _, link, kind in ours if kind == "VAE"), None)
    found = []
    for user, link, kind in ours:
        node = prompt[user]
        path = [user, *_upstream(prompt, link, kind)]
        conds = {name: to for name, to in _links(prompt, node) if _outputs(prompt[to[0]])[to[1]] == "CONDITIONING"}
        if kind == "MODEL" and conds and not any(prompt[id]["class_type"] == WARM_UP for id in path):
            first, cfg = next(iter(conds.values())), node["inputs"].get("cfg")
            one = conds.get("positive", first), conds.get("negative")
            found.append(Sampled(link, *one, cfg if isinstance(cfg, (int, float)) else None, vae))
    return found


def exceptions(text: str) -> tuple[str, ...]:
    """The list as the user writes it: separated by commas, semicolons or lines."""
    parts = re.split(r"[,;\n，；、]", text.lower())
    return tuple(part.strip() for part in parts if part.strip())


def _added(result: Result, link: Link, kind: str, choice: Choice) -> str:
    """The id of our node behind ``link``: the same one in every prompt, so that ComfyUI's cache holds."""
    node_type, name = OURS[kind]
    id = f"{PREFIX}{name}-{link[0].replace(':', '.')}-{link[1]}"
    if id not in result.prompt:
        settings = {"mode": "auto", "graph_budget_mb": choice.budget_mb} if kind == "MODEL" else {"enabled": True}
        inputs = {name: list(link), **settings, "verify": True}
        result.prompt[id] = {"class_type": node_type, "inputs": inputs, "_meta": {"title": TITLE}}
        result.added.append(id)
    return id


# What a prompt says -------------------------------------------------------------------------------------------------


def _uses(prompt: Prompt) -> Iterator[tuple[str, str, Link, str]]:
    """(node, input, what is linked there, its type) for each node that runs what it gets."""
    for id, node in prompt.items():
        gives = _outputs(node)
        for name, link in _links(prompt, node):
            kind = _kind(prompt, node, name, link)
            if kind and _runs(node["class_type"], gives, kind):
                yield id, name, link, kind


def _runs(node_type: str, gives: list[str], kind: str) -> bool:
    """Whether a node runs a model, and does not only hand it on, save it or ask it for its noise levels."""
    if kind in gives or ANY & set(gives):
        return "LATENT" in gives or node_type == WARM_UP  # a sampler that hands its model on
    return bool(set(gives) - NOTHING_RUN)


def _upstream(prompt: Prompt, link: Link, kind: str) -> list[str]:
    """The nodes that ``link`` goes back to, by inputs of that kind; where it has none, by all (pipes)."""
    found, ahead = [], [link[0]]
    while ahead:
        id = ahead.pop()
        if id in found:
            continue
        found.append(id)
        links = list(_links(prompt, prompt[id]))
        same = [link for name, link in links if _kind(prompt, prompt[id], name, link) == kind]
        pipes = [link for _, link in links if _outputs(prompt[link[0]])[link[1]] not in NO_PIPE]
        ahead += [source for source, _ in same or pipes]
    return found


def _is_ours(prompt: Prompt, path: list[str], kind: str) -> bool:
    return any(prompt[id]["class_type"] in (OURS[kind][0], ALL_IN_ONE) for id in path)


def _is_excepted(prompt: Prompt, ids: list[str], choice: Choice) -> bool:
    if not choice.exceptions:
        return False
    names = {name.lower() for id in ids for name in _names(prompt[id])}
    return any(fnmatchcase(name, wanted) for wanted in choice.exceptions for name in names)


def _names(node: dict[str, Any]) -> Iterator[str]:
    """What a user may call a node: its type, its title, the files that it names, with and without folder and ending."""
    yield node["class_type"]
    yield _title(node["class_type"])
    for value in node["inputs"].values():
        if isinstance(value, str) and len(value) < 300:
            file = re.split(r"[\\/]", value)[-1]
            yield from (value, file, file.rsplit(".", 1)[0])


def _title(node_type: str) -> str:
    return comfyui.NODE_DISPLAY_NAME_MAPPINGS.get(node_type) or node_type


def _links(prompt: Prompt, node: dict[str, Any]) -> Iterator[tuple[str, Link]]:
    """(input, link), of links that lead to an output of this prompt."""
    for name, value in node["inputs"].items():
        if isinstance(value, list) and len(value) == 2 and isinstance(value[1], int):
            source = prompt.get(value[0]) if isinstance(value[0], str) else None
            if source and 0 <= value[1] < len(_outputs(source)):
                yield name, (value[0], value[1])


def _kind(prompt: Prompt, node: dict[str, Any], name: str, link: Link) -> str:
    """The type of what is linked, if we have a node for it; of a switch's output the input that it goes to says it."""
    given = _outputs(prompt[link[0]])[link[1]]
    if given not in OURS and given not in ANY:
        return ""
    wanted = _wanted(node["class_type"], name)
    if given in ANY:
        given = wanted
    fits = wanted in ANY or not wanted or given in wanted.split(",")
    return given if given in OURS and fits else ""


def _outputs(node: dict[str, Any]) -> list[str]:
    """The types of a node's outputs; none of a node that ComfyUI does not know."""
    known = comfyui.NODE_CLASS_MAPPINGS.get(node["class_type"])
    return [str(type) for type in getattr(known, "RETURN_TYPES", ()) or ()]  # packs declare strings that equal anything


def _wanted(node_type: str, name: str) -> str:
    """The type, or several with commas, that a node declares for an input; "" of one whose inputs are not fixed."""
    known = comfyui.NODE_CLASS_MAPPINGS.get(node_type)
    inputs = known.INPUT_TYPES() if known else {}
    declared = next((inputs[part][name] for part in ("required", "optional") if name in inputs.get(part, {})), ("",))
    return str(declared[0])
