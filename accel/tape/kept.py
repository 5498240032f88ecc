"""Tells whether a forward leaves something in its model for a later one: a replay would not fill such a cache."""

import dis
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from types import CodeType

from torch import Tensor, nn

from ..origin import is_known
from ..parts_seen import is_hooked
from .code_names import names_of
from .named_tensors import modules_of, parts_of
from .untouched import AROUND, code_beside
from .values import tensors_in

HOLDERS = frozenset((Tensor, nn.Parameter, list, tuple, dict, OrderedDict, defaultdict))
TABLES = frozenset(nn.Module().__dict__)  # torch's own attributes of a module


def kept_tensor(module: nn.Module, depends: Callable[[Tensor], bool]) -> str:
    """The attribute that holds what the forward computed, or one of its inputs; "" if none does.

    depends: whether a tensor is such a one.
    """
    seen: set[tuple[str, int]] = set()  # ComfyUI may give all parts of a model the same list, which is long
    for path, part in modules_of(module):
        for name, value in part.__dict__.items():
            if name in TABLES or type(value) not in HOLDERS or (name, id(value)) in seen:
                continue
            seen.add((name, id(value)))
            if any(map(depends, tensors_in(value))) and _is_read(module, part, name):
                return f"{path}.{name}".lstrip(".")
        for name, value in part._buffers.items():
            if value is not None and depends(value):
                return f"{path}.{name}".lstrip(".")
    return ""


def _is_read(module: nn.Module, part: nn.Module, name: str) -> bool:
    """Whether code of the model reads this attribute of a part. Some models only write one, to look at it by hand.

    Beside layers of other packs, all code counts that is in the file of their class.
    """
    parts = parts_of(module)
    kinds = {kind for each in parts for kind in type(each).__mro__}
    if not all(map(is_known, type(part).__mro__)) or any(map(is_hooked, parts)):
        return True  # its own pack's code may read it anywhere, and so may a hook, which is given its part
    foreign = [code for kind in kinds if not is_known(kind) for code in code_beside(kind)]
    if any(names_of(code) & {*AROUND, "dir"} for code in foreign):
        return True
    owners = [vars(kind) for kind in kinds if not _is_of_torch(kind)]
    owners += [each.__dict__ for each in parts]
    functions = (getattr(item, "__func__", item) for owner in owners for item in list(owner.values()))
    codes = [code for function in functions if isinstance(code := getattr(function, "__code__", None), CodeType)]
    codes += foreign
    while codes:
        code = codes.pop()
        if name in code.co_names and any(
            step.argval == name and step.opname in ("LOAD_ATTR", "LOAD_METHOD") for step in dis.get_instructions(code)
        ):
            return True
        if name in code.co_consts:  # getattr(self, "name")
            return True
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    return False


def _is_of_torch(kind: type) -> bool:
    return kind is object or kind.__module__.startswith("torch.")
