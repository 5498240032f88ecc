"""A worker of the fleet without a GPU: compiles kernels of ours for a card, as often as it is told to.

    python -m tools.fleet_worker    # reads a JSON object a line from its input, answers each with one

An order has ``env`` (variables to set, null to unset), ``kernels`` (names; "launcher" is a C extension, made as
Triton makes its launchers) and ``settings`` (of ``anyshape_redis.client``, to shorten its pauses). The answer: which
were compiled and which were found (by Triton's own listener), a hash of each one's machine code, the seconds, what the
shared cache counted, and the fallbacks that a user would see.
"""

import hashlib
import importlib
import json
import os
import sys
import time
from typing import Any

import triton
from triton.runtime import build

from tools import compile_kernels, embed

LAUNCHER = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "fleet_launcher", "launches", -1, NULL};
PyMODINIT_FUNC PyInit_fleet_launcher(void) { return PyModule_Create(&module); }
"""


def main() -> None:
    """Answers until the input ends."""
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


def run(env: dict[str, str | None], settings: dict[str, float], again: bool = False, **what: Any) -> dict[str, Any]:
    """One order; ``again``: with the connection and the counters of the last one."""
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if os.environ.get("TRITON_CACHE_MANAGER") and not again:
        importlib.import_module("anyshape_redis").renew()
    for name, value in settings.items():
        setattr(importlib.import_module("anyshape_redis.client"), name, value)
    return compile_all(**what)


def compile_all(kernels: list[str], capability: int = 90) -> dict[str, Any]:
    """Compiles them one after another."""
    from anyshape.accel import stats

    events: dict[str, list[str]] = {"compiled": [], "found": []}
    listener = lambda src, cache_hit, **rest: events["found" if cache_hit else "compiled"].append(src.name)  # noqa: E731
    known = {kernel.__name__: kernel for kernel in compile_kernels.KERNELS}
    triton.knobs.compilation.listener, begun = listener, time.perf_counter()
    codes = {name: launcher() if name == "launcher" else machine_code(known[name], capability) for name in kernels}
    seconds = time.perf_counter() - begun
    if os.environ.get("TRITON_CACHE_MANAGER"):
        sys.modules["anyshape_redis"].remote().flush()
    now = stats.snapshot()
    return {**events, "code": codes, "seconds": seconds, "fleet": now["fleet"], "fallbacks": now["fallbacks"]}


def machine_code(kernel: triton.JITFunction, capability: int) -> str:
    """A hash of what is compiled for that compute capability."""
    return hashlib.sha256(compile_kernels.compile_for(kernel, capability).asm["cubin"]).hexdigest()


def launcher() -> str:
    """What a C extension that Triton builds and imports says."""
    return build.compile_module_from_src(LAUNCHER, "fleet_launcher").__doc__


if __name__ == "__main__":
    embed.bare_pack()
    main()
