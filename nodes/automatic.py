"""Accelerates a workflow without our nodes: they are added to the queued prompt, not to the user's graph.

A MODEL is compiled where it is used, after every node that changes it (LoRA, patches). What is compiled is then what
the sampler gets, and several samplers on one output share one node. MODELs, VAEs and CONTROL_NETs are recognised by the
types that nodes declare, never by their names. A path is left alone if one of our nodes is on it, or a node that
compiles the model itself, or one of the user's exceptions.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ..accel.call import BUDGET_MB
from ..accel.reasons import say
from .prompt_graph import Link, Prompt, PromptGraph, title

PREFIX = "anyshape-"  # of the ids of our nodes in a prompt; no colon, by which the front end finds subgraphs
TITLE = "AnyShape (accelerate every model)"
OURS = {  # type -> our node for it, and the name of its input
    "MODEL": ("AnyShapeCompileModel", "model"),
    "VAE": ("AnyShapeCompileVAE", "vae"),
    "CONTROL_NET": ("AnyShapeCompileControlNet", "control_net"),
}
ALL_IN_ONE, WARM_UP = "AnyShapeAccelerate", "AnyShapeWarmUp"
NOTHING_RUN = {"SIGMAS", "STRING", "INT", "FLOAT", "BOOLEAN"}  # a node that gives only these does not run a model
COMPILERS = re.compile(r"^(?!AnyShape).*compile", re.IGNORECASE)  # node types: on a model's path they compile it


@dataclass(frozen=True)
class Choice:
    """What the user has chosen."""

    budget_mb: int = BUDGET_MB
    exceptions: tuple[str, ...] = ()  # names of files or of node types, in lower case; * stands for anything


@dataclass
class Result:
    """The prompt with our nodes in it. The given prompt is not changed."""

    prompt: Prompt
    added: list[str] = field(default_factory=list)  # ids
    reasons: list[str] = field(default_factory=list)  # why paths were left alone


@dataclass(frozen=True)
class Use:
    """A node that runs a model, and where it has it from."""

    user: str
    name: str  # of its input
    link: Link
    kind: str  # of OURS
    path: list[str]  # the nodes that the model comes through, the nearest first


def accelerate(prompt: Prompt, choice: Choice) -> Result:
    """Puts a node of ours between each MODEL, VAE and CONTROL_NET and the nodes that use it."""
    graph, result = PromptGraph(prompt, set(OURS)), Result(dict(prompt))
    uses = _uses(graph)
    users = {(use.user, use.kind) for use in uses}
    for use in uses:
        if any((id, use.kind) in users for id in use.path):  # what it hands on was accelerated before it
            continue
        if _is_ours(graph, use) or _is_excepted(prompt, use, choice):
            continue
        taken = next((id for id in use.path if COMPILERS.match(graph.type(id))), None)
        if taken is not None:
            result.reasons.append(say("taken_over", name=title(graph.type(taken)), id=taken))
            continue
        node = result.prompt[use.user]
        inputs = node["inputs"] | {use.name: [_added(result, use, choice), 0]}
        result.prompt[use.user] = node | {"inputs": inputs}
    result.reasons = list(dict.fromkeys(result.reasons))
    return result


def exceptions(text: str) -> tuple[str, ...]:
    """The list as the user writes it: separated by commas, semicolons or lines."""
    parts = re.split(r"[,;\n，；、]", text.lower())
    return tuple(part.strip() for part in parts if part.strip())


def _added(result: Result, use: Use, choice: Choice) -> str:
    """Returns the id of our node after the output: the same in every prompt, so that ComfyUI's cache holds."""
    node_type, name = OURS[use.kind]
    id = f"{PREFIX}{name}-{use.link[0].replace(':', '.')}-{use.link[1]}"
    if id not in result.prompt:
        settings = {"mode": "auto", "graph_budget_mb": choice.budget_mb} if use.kind == "MODEL" else {"enabled": True}
        inputs = {name: list(use.link), **settings, "verify": True}
        result.prompt[id] = {"class_type": node_type, "inputs": inputs, "_meta": {"title": TITLE}}
        result.added.append(id)
    return id


def _uses(graph: PromptGraph) -> list[Use]:
    return [
        Use(id, name, link, kind, graph.upstream(link, kind))
        for id in graph.prompt
        for name, link in graph.links(id)
        if (kind := graph.kind(id, name, link)) and _runs(graph, id, kind)
    ]


def _runs(graph: PromptGraph, id: str, kind: str) -> bool:
    """Whether a node runs a model, instead of only passing it on, saving it or reading its noise levels."""
    gives = graph.outputs(id)
    if graph.hands_on(id, kind):
        return "LATENT" in gives or graph.type(id) == WARM_UP  # a sampler that hands its model on
    return bool(set(gives) - NOTHING_RUN)


def _is_ours(graph: PromptGraph, use: Use) -> bool:
    return any(graph.type(id) in (OURS[use.kind][0], ALL_IN_ONE) for id in use.path)


def _is_excepted(prompt: Prompt, use: Use, choice: Choice) -> bool:
    if not choice.exceptions:
        return False
    names = {name.lower() for id in [*use.path, use.user] for name in _names(prompt, id)}
    return any(fnmatchcase(name, wanted) for wanted in choice.exceptions for name in names)


def _names(prompt: Prompt, id: str) -> Iterator[str]:
    """What a user may call a node: its type, its title, the files that it names, with and without folder and ending."""
    node = prompt[id]
    yield node["class_type"]
    yield title(node["class_type"])
    for value in node["inputs"].values():
        if isinstance(value, str) and len(value) < 300:
            file = re.split(r"[\\/]", value)[-1]
            yield from (value, file, file.rsplit(".", 1)[0])


# What is sampled ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampled:
    """A MODEL of ours and what a sampler gets with it."""

    link: Link
    positive: Link | None
    negative: Link | None
    cfg: float | None


def sampled(prompt: Prompt) -> list[Sampled]:
    """Where a compiled MODEL is sampled with prompts, and no Warm Up of the user's lies before it."""
    graph, found = PromptGraph(prompt, {"MODEL"}), []
    for use in _uses(graph):
        conds = {name: to for name, to in graph.links(use.user) if graph.output(to) == "CONDITIONING"}
        warmed = any(graph.type(id) == WARM_UP for id in [use.user, *use.path])
        if conds and _is_on(graph, use) and not warmed:
            positive = conds.get("positive", next(iter(conds.values())))
            cfg = prompt[use.user]["inputs"].get("cfg")
            cfg = cfg if isinstance(cfg, (int, float)) else None
            found.append(Sampled(use.link, positive, conds.get("negative"), cfg))
    return found


def _is_on(graph: PromptGraph, use: Use) -> bool:
    """Whether one of our nodes compiles the model: of several the nearest decides."""
    ours = (id for id in use.path if graph.type(id) in (OURS["MODEL"][0], ALL_IN_ONE))
    nearest = next(ours, None)
    return nearest is not None and graph.prompt[nearest]["inputs"].get("mode") != "off"
