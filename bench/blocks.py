"""Finds the blocks that a model repeats, by its structure alone: what packs compile one by one."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

ALIKE = 0.75  # of a list's members that have the same weights by name; a last block may lack some
SHARE = 0.05  # of the model's parameters that the blocks of a class hold at least


def repeated(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists of like modules, of the classes that hold a good part of the model."""
    held: Counter[type] = Counter()
    found = list(_lists(model))
    for block in found:
        held[type(block)] += sum(weight.numel() for weight in block.parameters())
    least = SHARE * sum(weight.numel() for weight in model.parameters())
    large = [block for block in found if held[type(block)] >= least]
    if not large:
        raise ValueError(f"{type(model).__name__} repeats no block")
    return large


def _lists(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList) and _alike(child):
            yield from child
        else:
            yield from _lists(child)


def _alike(members: nn.ModuleList) -> bool:
    """Whether these are blocks of one kind, as a UNet's stages are not."""
    if len({type(member) for member in members}) != 1:
        return False
    names = Counter(tuple(name for name, _ in member.named_parameters()) for member in members)
    return names.most_common(1)[0][1] >= ALIKE * len(members)
