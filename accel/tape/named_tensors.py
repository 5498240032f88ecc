"""Names a model's tensors, so that a recorder knows them and a program finds them again after they moved."""

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .companions import companions
from .identity import EQUAL, bundled
from .values import Weight

PLAIN = (Tensor, nn.Parameter)
# In place of its parameters, where ComfyUI maps a layer's weights in (DynamicVRAM).
MAPPED = ("_v_weight", "_v_bias")
MARK = "_anyshape"  # of a recording that goes on, at a tensor
DEPTH_OF_NOTES = 10  # containers in one another
PLAIN_NOTES = frozenset((bool, int, float, str, type(None), torch.Size, torch.dtype, set))
MOST_HELD = 4096  # names of patches' tensors, before those that are gone are forgotten
# What most parts of a model have besides, so that a look at the types of all attributes is enough.
NO_TENSORS = frozenset((
    bool, int, float, str, type(None), dict, OrderedDict, list, tuple, set, torch.dtype, torch.device, torch.Size,
))  # fmt: skip


def is_dressed(kind: type) -> bool:
    """Whether a subclass of ``Tensor`` only adds to it: notes and methods, as ComfyUI-GGUF's weights have them."""
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def undressed(tensor: Tensor) -> Tensor:
    """``tensor`` as torch has it, whose sizes and dtype its class may tell otherwise: the same memory."""
    return tensor if type(tensor) in PLAIN or not is_dressed(type(tensor)) else tensor.as_subclass(Tensor)


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a module's own parameters, buffers and tensor attributes."""
    for table in (module._parameters, module._buffers):
        if table:
            yield from [(name, tensor) for name, tensor in table.items() if tensor is not None]
    own = module.__dict__
    if not NO_TENSORS.issuperset(map(type, own.values())):
        yield from [(name, value) for name, value in own.items() if isinstance(value, Tensor)]


def tensor_attributes(parts: Iterable[nn.Module]) -> list[tuple[int, str]]:
    """(number of a part, name) of its tensors that are neither parameters nor buffers."""
    return [
        (number, name)
        for number, part in enumerate(parts)
        if not NO_TENSORS.issuperset(map(type, part.__dict__.values()))
        for name, value in part.__dict__.items()
        if isinstance(value, Tensor)
    ]


def notes_of_tensor(tensor: Tensor) -> dict[str, Any]:
    """What a dressed tensor says of itself: how it is packed, what patches it."""
    return {key: value for key, value in tensor.__dict__.items() if key != MARK}


def noted_by(tensor: Tensor) -> list[Tensor]:
    """The tensors among a dressed one's notes, each once: those of a LoRA that its layer puts on it at each call."""
    found: dict[int, Tensor] = {}
    level = list(notes_of_tensor(tensor).values())
    for _ in range(DEPTH_OF_NOTES):
        below: list[Any] = []
        for item in level:
            if type(item) in PLAIN_NOTES:
                continue
            if isinstance(item, Tensor):
                found.setdefault(id(item), item)
            elif isinstance(item, (list, tuple)):
                below += item
            elif not isinstance(item, EQUAL):
                below += (item if isinstance(item, dict) else bundled(item) or {}).values()
        level = below
    return list(found.values())


def is_note(name: str) -> bool:
    """Whether that is the name of a tensor among a weight's notes."""
    return name.rpartition(":")[2].isdigit()


def inner_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """``tensor`` by its name, or what a subclass (a quantised weight) is made of, as ``name:attribute``.

    What a dressed one notes follows it, as ``name:0`` and so on.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) in PLAIN:
        yield name, tensor
        if type(tensor) not in PLAIN:
            yield from [(f"{name}:{number}", each) for number, each in enumerate(noted_by(tensor))]
        return
    for attribute in flatten()[0]:
        yield from inner_tensors(f"{name}:{attribute}", getattr(tensor, attribute))


def modules_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, part) as ``named_modules`` gives them, without one generator inside another: models have thousands.

    Its companions come last, here and in ``parts_of``.
    """
    seen: set[nn.Module] = set()
    left = [*reversed(companions(module).items()), ("", module)]
    while left:
        path, part = left.pop()
        if part in seen:
            continue
        seen.add(part)
        yield path, part
        if part._modules:
            start = f"{path}." if path else ""
            below = [(start + name, child) for name, child in part._modules.items() if child is not None]
            left += reversed(below)


def parts_of(module: nn.Module) -> list[nn.Module]:
    """What ``module.modules()`` gives, five times as fast, and the parts of its companions."""
    found: dict[nn.Module, None] = {}
    left = [*reversed(companions(module).values()), module]
    while left:
        part = left.pop()
        if part not in found:
            found[part] = None
            if part._modules:
                left += [child for child in reversed(part._modules.values()) if child is not None]
    return list(found)


def classes_of(modules: Iterable[nn.Module]) -> list[type]:
    """The classes of these modules and their bases, each once."""
    bases = itertools.chain.from_iterable(kind.__mro__ for kind in dict.fromkeys(map(type, modules)))
    return [kind for kind in dict.fromkeys(bases) if kind is not object]


class PartsByPath(dict[str, nn.Module]):
    """The parts of a module by their paths, each found when it is asked for. Raises KeyError where there is none.

    others: in the place of tensors that patches of other packs keep, by the ids of those.
    """

    def __init__(self, module: nn.Module, others: "Mapping[int, OfPatch] | None" = None) -> None:
        super().__init__({"": module} | companions(module))
        self.others = others or NO_OTHERS

    def __missing__(self, path: str) -> nn.Module:
        above, _, name = path.rpartition(".")
        part = self[above]._modules[name]
        if part is None:
            raise KeyError(path)
        self[path] = part
        return part


class NamedTensors:
    """The tensors of a module and of those below it. Holds them: keep it no longer than a recording."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors: list[tuple[Tensor, Weight]] = []
        for path, part in modules_of(module):
            for name, tensor in tensors_of(part):
                if type(tensor) in PLAIN:
                    self._tensors.append((tensor, Weight(path, name)))
                else:
                    self._tensors += [(inner, Weight(path, full)) for full, inner in inner_tensors(name, tensor)]
        self._by_id = {id(tensor): weight for tensor, weight in self._tensors}
        self._by_memory: dict[tuple, Weight] | None = None

    def find(self, tensor: Tensor) -> Weight | None:
        """The name of ``tensor``, or of the tensor whose memory it is (``weight.data``)."""
        if found := self._by_id.get(id(tensor)):
            return found
        if self._by_memory is None:
            self._by_memory = {_memory(each): weight for each, weight in self._tensors if _has_memory(each)}
        return self._by_memory.get(_memory(tensor)) if _has_memory(tensor) else None


class Memories:
    """Values by the memory of their tensors, for a recording that meets dressed tensors.

    torch dresses what it makes of one past its own dispatcher, and the new tensor bears no mark. A storage is known by
    its address, which no other one gets while it is referred to, and so little of it that its memory is free.
    """

    def __init__(self) -> None:
        self._values: dict[tuple, Any] = {}
        self._storages: list[StorageWeakRef] = []

    def add(self, tensor: Tensor, value: Any) -> None:
        """``value`` is what lies there now."""
        if is_dressed(type(tensor)) and tensor.device.type != "meta":
            self._storages.append(StorageWeakRef(tensor.untyped_storage()))
            self._values[self._place(tensor)] = value

    def find(self, tensor: Tensor) -> Any:
        """The value of a tensor with this memory; None if none is known."""
        if not self._values or not is_dressed(type(tensor)) or tensor.device.type == "meta":
            return None
        return self._values.get(self._place(tensor))

    @staticmethod
    def _place(tensor: Tensor) -> tuple:
        plain = undressed(tensor)
        return plain.untyped_storage()._cdata, plain.storage_offset(), plain.shape, plain.stride(), plain.dtype


@dataclass(frozen=True)
class OfPatch(Weight):
    """A leaf: a tensor that a patch of another pack keeps, an adapter's weight, say. It has no path, and one name.

    number: the tensor's id.
    """

    ref: "weakref.ref[Tensor]" = field(compare=False)
    number: int = field(compare=False)

    @classmethod
    def of(cls, tensor: Tensor) -> "OfPatch":
        """The same one for a tensor whenever it is asked for, and never one of another tensor at its address."""
        found = _HELD.get(id(tensor))
        if found is None or found.ref() is not tensor:
            if len(_HELD) > MOST_HELD:
                for key in [key for key, held in _HELD.items() if held.ref() is None]:
                    del _HELD[key]
            found = cls("", f"tensor {next(_NUMBERS)} of a patch", weakref.ref(tensor), id(tensor))
            _HELD[id(tensor)] = found
        return found


NO_OTHERS: Mapping[int, OfPatch] = MappingProxyType({})
_HELD: dict[int, OfPatch] = {}
_NUMBERS = itertools.count()


def with_others(before: Mapping[int, OfPatch], tensors: Mapping[int, Tensor]) -> Mapping[int, OfPatch]:
    """``before``, with ``tensors`` in the place of those with these ids; they may have taken others' themselves."""
    first = {each.number: number for number, each in before.items()}
    return {**before} | {first.get(number, number): OfPatch.of(tensor) for number, tensor in tensors.items()}


def resolve(modules: PartsByPath, weight: Weight) -> Tensor:
    """The tensor that ``weight`` names now, among a model's parts by path. Raises AttributeError or LookupError."""
    if isinstance(weight, OfPatch):
        if (kept := modules.others.get(weight.number, weight).ref()) is None:
            raise KeyError(weight.name)
        return kept
    name, *inner = weight.name.split(":")
    return inner_of(getattr(modules[weight.module], name), inner)


def inner_of(tensor: Any, names: Iterable[str]) -> Tensor:
    """What lies in ``tensor`` under these names, one below the other, as ``inner_tensors`` gives them."""
    for attribute in names:
        if attribute.isdigit():
            return noted_by(tensor)[int(attribute)]
        tensor.__tensor_flatten__()  # some classes name their parts only then
        tensor = getattr(tensor, attribute)
    return undressed(tensor)


def _has_memory(tensor: Tensor) -> bool:
    return (type(tensor) in PLAIN or is_dressed(type(tensor))) and tensor.numel() > 0 and tensor.device.type != "meta"


def _memory(tensor: Tensor) -> tuple:
    plain = undressed(tensor)
    return plain.data_ptr(), tuple(plain.shape), plain.stride(), plain.dtype
