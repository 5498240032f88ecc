"""Other packs' code in a model: hooks, functions and classes in place of ComfyUI's own."""

import functools
import sys
from typing import Any

from torch import nn

from .fingerprint import classes_of, global_hooks, objects_of, shown
from .functions_read import FunctionsRead
from .origin import is_known, whose
from .parts_seen import FORWARDS
from .tape.named_tensors import parts_of

BUILT_IN = ("scaled_dot_product_attention", "linear", "gelu", "conv1d", "conv2d", "conv3d")  # not in Python


def foreign_method(kind: type) -> str:
    """A forward of this class, or of a base, that another pack put there, and whose it is; "" if all are its own.

    That is told by the file of its code, so it does not matter who came first.
    """
    return _foreign_method(kind, tuple(vars(base).get(name) for base in kind.__mro__ for name in FORWARDS))


@functools.lru_cache(maxsize=4096)
def _foreign_method(kind: type, methods: tuple[Any, ...]) -> str:
    owners = ((base, name) for base in kind.__mro__ for name in FORWARDS)
    for (base, name), method in zip(owners, methods, strict=True):
        if method is not None and not in_its_file(base, method):
            return f"{base.__name__}.{name} of {whose(method)}"
    return ""


def in_its_file(owner: Any, function: Any) -> bool:
    """Whether a function's code is in the file of its owner's module: of its class, or what its own name says."""
    file = getattr(sys.modules.get(owner.__module__), "__file__", None) or ""
    if not file.endswith(".py"):  # built in, made in a session, or without its source
        return True
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and code.co_filename == file


def foreign_code(module: nn.Module, functions: FunctionsRead) -> list[tuple[str, Any]]:
    """(where it is and whose, the code) of all that other packs brought: into the model, or into what its code calls.

    functions: that the model's code names.
    """
    found = [
        (f"{shown(module, key)} of {whose(value)}", value)
        for key, value in objects_of(module)
        if key[1] not in ("", "class") and not isinstance(key[0], str) and not isinstance(value, type)
        if not is_known(value)
    ]
    found += [(f"every module.hook {n} of {whose(hook)}", hook) for n, hook in enumerate(global_hooks())]
    for kind in classes_of(parts_of(module)):
        if not is_known(kind):
            found.append((f"{kind.__name__} of {whose(kind)}", kind))
            continue
        for name in FORWARDS:
            method = vars(kind).get(name)
            if method is not None and not in_its_file(kind, method):
                found.append((f"{kind.__name__}.{name} of {whose(method)}", method))
    return found + [(f"{name} of {whose(value)}", value) for name, value in functions.brought()]


def replaced_in_torch(functions: FunctionsRead) -> str:
    """A function of torch's, written in Python, that another pack replaced; "" if there is none.

    While a forward is recorded torch calls such a function by its name, from within itself. So the pack's would run
    twice.
    """
    start = "torch.nn.functional."
    names = [name for name, _ in functions.brought() if name.startswith(start)]
    return next((name for name in names if name.removeprefix(start) not in BUILT_IN), "")
