"""Finds the repeated blocks of a model, and which of them are alike, so that one tape fits all of those.

Two blocks are alike if everything that their code can see of them is: classes, plain attributes, the form of every
weight. A block that somebody hooked, or that changes its weights at each call, is like no other: it is left alone.
"""

import functools
import inspect
from collections.abc import Hashable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..fingerprint import GLOBAL_HOOKS
from ..parts_seen import FORWARDS, FUNCTIONS, HOOKS, LEFT_OUT, is_restored, original
from .code_names import beside
from .named_tensors import MAPPED, is_dressed, notes_of_tensor, tensors_of, undressed
from .named_tensors import PLAIN as TENSORS
from .options import PLAIN

FEWEST = 3  # blocks that are worth a program
MOST_KINDS = 3  # of classes that alternate in one list
NUMBERS = (*PLAIN, torch.dtype, torch.device)


def find(model: nn.Module, stages: bool = False) -> list[str]:
    """The paths of the blocks in every list of repeated blocks, outermost lists only.

    Short lists of the same classes count together: a UNet has a list of one block or two at each of its depths.
    A block that is in several lists has the path of the first: another node may give a model a list of its blocks.
    stages: parts of a list's stages count as blocks, too, where there are several of a class: a UNet's ResBlocks.
    """
    if any(getattr(torch_module, name, None) for name in GLOBAL_HOOKS):
        return []  # they see every module's call
    short: dict[frozenset[type], list[str]] = {}
    found = list(_find(model, "", short, stages))
    found += [path for paths in short.values() if len(paths) >= FEWEST for path in paths]
    once: dict[int, str] = {}
    for path in found:
        once.setdefault(id(model.get_submodule(path)), path)
    return list(once.values())


def _find(
    module: nn.Module, path: str, short: dict[frozenset[type], list[str]], stages: bool, inside: bool = False
) -> Iterator[str]:
    """inside: ``module`` is a stage."""
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if inside and next(child.children(), None) is not None and not _holds_blocks(child):
            short.setdefault(frozenset((type(child),)), []).append(below)
            continue
        if isinstance(child, nn.ModuleList) and len(child) and _repeats(child):
            paths = [f"{below}.{number}" for number in range(len(child))]
            if len(child) >= FEWEST:
                yield from paths
            else:
                short.setdefault(frozenset(map(type, child)), []).extend(paths)
        else:
            yield from _find(child, below, short, stages, stages and isinstance(child, nn.Sequential))


def _holds_blocks(module: nn.Module) -> bool:
    return any(isinstance(part, nn.ModuleList) for part in module.modules())


def deepest(model: nn.Module) -> int | None:
    """The largest depth of Skip Blocks: how many blocks at either end may run on every step. None: it has no blocks."""
    if count := stages(model):
        return count - 2
    count = len(find(model))
    return (count - 1) // 2 if count else None


def stages(model: nn.Module) -> int:
    """How many stages a network that is shaped like a U has down, and up; 0 of a row of blocks."""
    return max((len(part) for _, part in stage_lists(model)), default=0)


def stage_lists(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """(name, stages) of the two lists of equal length that a network has which is shaped like a U, down and up."""
    lists = [(name, part) for name, part in model.named_children() if isinstance(part, nn.ModuleList)]
    lists = [each for each in lists if _are_stages(each[1])]
    lengths = [len(part) for _, part in lists]
    longest = max((length for length in lengths if lengths.count(length) > 1), default=0)
    return [each for each in lists if len(each[1]) == longest][:2]


def _are_stages(members: nn.ModuleList) -> bool:
    """Whether the members of a list are layers or blocks in a row."""
    return len(members) > 1 and all(isinstance(member, (nn.Sequential, nn.ModuleList)) for member in members)


def _repeats(members: nn.ModuleList) -> bool:
    """Whether the members of a list are blocks: few kinds of them, and more than layers."""
    kinds = {type(member) for member in members}
    if any(next(member.children(), None) is None for member in members) or len(kinds) > MOST_KINDS:
        return False
    if len(members) < FEWEST:
        return len(kinds) == 1 and not issubclass(*kinds, (nn.Sequential, nn.ModuleList))
    # the stages of a UNet are of one class, too, but hardly two have the same parts
    return len(members) >= 2 * len(kinds) and len(set(map(_form, members))) <= max(MOST_KINDS, len(members) // 2)


@functools.lru_cache(maxsize=256)
def methods(kind: type) -> tuple[str, ...]:
    """What blocks of a class may be called by: ``forward``, and methods of such names, as for each of two streams."""
    names = [name for base in kind.__mro__ if not issubclass(nn.Module, base) for name in vars(base)]
    others = [name for name in dict.fromkeys(names) if name.startswith("forward_") and callable(getattr(kind, name))]
    return ("forward", *others)


def _form(block: nn.Module) -> tuple:
    """The classes of a block's parts, and the shapes of their weights."""
    return tuple(
        [
            (type(part), *[weight.shape for weight in part._parameters.values() if weight is not None])
            for part in block.modules()
        ]
    )


def likeness(block: nn.Module) -> Hashable | None:
    """Equal for blocks that are alike; None for one that is to be left alone. Its own ``forward`` may be ours now."""
    if original(block) is not block:  # each has its own functions
        return None
    parts: list[Hashable] = []
    read = frozenset().union(*(_names_read(kind) for kind in {type(part) for part in block.modules()}))
    first: dict[int, int] = {}  # tensors that are shared within the block
    for path, part in block.named_modules():
        attributes = part.__dict__
        replaced = [name for name in FORWARDS if name in attributes and not is_restored(part, name)]
        if any(part is not block or name != "forward" for name in replaced) or any(attributes[name] for name in HOOKS):
            return None
        if any(attributes.get(name) for name in FUNCTIONS):
            return None
        plain = tuple(
            [
                (name, _seen(value))
                for name, value in attributes.items()
                if name not in LEFT_OUT
                and name not in FORWARDS
                and not isinstance(value, Tensor)
                and (name in read or type(value) is not int)  # the number of the block, say, that nobody reads
            ]
        )
        weights = [(name, _form_of(tensor, first)) for name, tensor in tensors_of(part) if name not in MAPPED]
        # Where they are mapped in, not all of them need be there; each says in what form it would be.
        mapped = [getattr(w, "_model_dtype", None) for w in part._parameters.values()] if "_v" in attributes else ()
        parts.append((path, type(part), plain, tuple(weights), tuple(mapped)))
    return tuple(parts)


def _form_of(tensor: Tensor, first: dict[int, int]) -> Hashable:
    """What code can see of a tensor but for its numbers. first: tensors that were met before, by their order.

    A subclass says by ``__tensor_flatten__`` what it is made of, and what else there is to say (a form of quantised
    weights, its scales and its original shape); one that only adds to a tensor has that in its attributes.
    """
    kind, said, own = type(tensor), (), id(tensor)
    if kind not in TENSORS:
        if is_dressed(kind):
            said = kind, _seen(notes_of_tensor(tensor))
        elif flatten := getattr(tensor, "__tensor_flatten__", None):
            names, context = flatten()
            parts = tuple([(name, _form_of(getattr(tensor, name), first)) for name in names])
            return kind, tuple(tensor.shape), tensor.stride(), repr(context), parts
        else:
            return kind, own
        tensor = undressed(tensor)
    form = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
    return said, form, first.setdefault(own, len(first))


@functools.cache
def _names_read(kind: type) -> frozenset[str]:
    """The names in the code of a class and of all else in the files of it and of its bases, but for constructors."""
    bases = [base for base in kind.__mro__ if not base.__module__.startswith(("torch.", "builtins"))]
    files = {id(there): there for base in bases for there in beside(base)}
    names: set[str] = set()
    for thing in [*bases, *[thing for file in files.values() for thing in list(file.values())]]:
        methods = vars(thing).items() if isinstance(thing, type) else [("", thing)]
        for name, method in methods:
            code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
            if code is not None and name != "__init__":
                names.update(_names_in(code))
    return frozenset(names)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names_in(constant)


def _seen(value: Any) -> Hashable:
    """What code can see of an attribute; an object of another kind stands for itself."""
    if isinstance(value, NUMBERS):
        return type(value), value
    if isinstance(value, (list, tuple)):
        return type(value), tuple([_seen(each) for each in value])
    if isinstance(value, dict):
        return dict, tuple([(str(key), _seen(each)) for key, each in value.items()])
    if type(value) is functools.partial:  # each block has its own, of the same function
        return functools.partial, id(value.func), _seen(value.args), _seen(value.keywords)
    return type(value), id(value)


def is_plain(out: Any) -> bool:
    """Whether arguments or results are made of tensors, numbers and plain containers of them."""
    if type(out) in (list, tuple):
        return all(map(is_plain, out))
    if type(out) is dict:
        return all(map(is_plain, out.values()))
    return isinstance(out, (Tensor, *NUMBERS))
