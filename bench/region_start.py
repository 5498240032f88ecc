"""What a restart costs on regions: the first forward of a process with the caches of earlier ones, on a CPU.

OMP_NUM_THREADS=1 python -m bench.region_start [--repeats N] --json FILE

A small UNet (``tools.driving``), every start in a process of its own:

- cold: compiler caches are empty; warm: the caches that the cold start filled (what a user has)
- precompile, aot_compile, aoti: torch's ways to load a compiled function without tracing it; vec_isa_ok: torch's
  variable that says the vector instructions work. One process saves (not counted), another one loads.

Of a start's parts ``isa`` is inductor's check of the vector instructions and ``imports`` are inductor's modules; both
come before the forward, so that ``forward`` is without them. ``tracing``, ``guards`` and ``load`` are parts of it.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import process

HOWS = ("vec_isa_ok", "precompile", "aot_compile", "aoti")


def variant(how: str, saves: bool) -> type:
    """In the place of ``regions._Variant``: a function that ``how`` saves, or has saved in another process."""
    import torch
    from anyshape.accel import regions

    class Loaded(regions._Variant):
        def first_call(self, args: tuple) -> Any:
            path = f"{os.environ['TORCHINDUCTOR_CACHE_DIR']}-{how}-{self.fn.__name__}.pt2"
            if saves:
                {"aot_compile": save_aot_compile, "aoti": save_aoti}[how](path, self.fn, args)
            if how == "aoti":
                self.run = torch._inductor.aoti_load_package(path)
            else:
                self.run = torch.compiler.load_compiled_function(Path(path).open("rb"))
            return self.run(*args)

    return Loaded


def save_aot_compile(path: str, fn: Callable, args: tuple) -> None:
    """``fn`` traced with symbolic sizes, its guards and its code, as a pickle."""
    import torch
    from anyshape.accel import regions

    with torch._dynamo.config.patch(enable_aot_compile=True):
        compiled = torch.compile(fn, dynamic=False, fullgraph=True)
        compiled.aot_compile((tuple(map(regions._symbolic_alias, args)), {})).save_compiled_function(path)


def save_aoti(path: str, fn: Callable, args: tuple) -> None:
    """``fn`` exported with symbolic sizes and compiled to a library."""
    import torch

    module = torch.nn.Module()
    module.forward = lambda *args: fn(*args)
    with torch.inference_mode(False), torch.no_grad():
        example = tuple(arg.clone() for arg in args)  # no inference tensors
        shapes = (tuple(dict.fromkeys(range(arg.dim()), torch.export.Dim.AUTO) for arg in example),)
        exported = torch.export.export(module, example, dynamic_shapes=shapes)
        torch._inductor.aoti_compile_and_package(exported, package_path=path)


def prepare(how: str, saves: bool) -> None:
    """Puts ``how`` in the place of the pack's own way; config and patches end with the process."""
    import torch
    from anyshape.accel import regions

    if how == "precompile":
        clone = regions._clone
        regions._clone = lambda fn, tag: clone(fn, "anyshape")  # what was saved is found by the name
        torch._dynamo.config.caching_precompile = True
        if not saves:
            regions._symbolic_alias = lambda value: value  # what was saved does not fit marked tensors
    elif how in ("aot_compile", "aoti"):
        regions._Variant = variant(how, saves)


def worker(how: str, saves: bool) -> None:
    """Prints that the model is loaded, then the parts of the first compiled forward, seconds."""
    if how == "vec_isa_ok":
        os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
    from tools import embed

    embed.use_comfyui()
    embed.load_pack()
    import torch

    from bench import measure, models
    from tools import driving

    patcher = models.unet("sd15", torch.float32, **driving.SMALL_UNET)
    eager = driving.unet_forward(patcher, 200, 264)
    fast = driving.compiled(patcher, verify=False)
    prepare(how, saves)
    print(json.dumps({"loaded": True}), flush=True)
    took: dict[str, Any] = {}
    cpu = sum(os.times()[:4])  # ours and that of the programs we have waited for
    with measure.seconds(took, "imports"):
        import torch._inductor.compile_fx
    with measure.seconds(took, "isa"):
        torch._inductor.cpu_vec_isa.pick_vec_isa()
    with measure.seconds(took, "forward"):
        out = driving.unet_forward(fast, 200, 264)
    took |= {"cpu": round(sum(os.times()[:4]) - cpu, 2), "error": measure.relative_error(out, eager)}
    took |= measure.compile_seconds()
    if how == "precompile" and saves:
        from torch._dynamo.precompile_context import PrecompileContext

        PrecompileContext.save_to_dynamo_cache()
    print(json.dumps(took), flush=True)


def start(caches: str, how: str, *flags: str) -> dict[str, Any]:
    """One process of ``worker``."""
    command = [sys.executable, "-m", "bench.region_start", "--worker", how, *flags]
    ended = process.follow(command, Path(caches), 600)
    if ended.code != 0:
        raise SystemExit(f"{command} failed with {ended.code}")
    took = ended.lines[-1]
    print(how, *flags, took, flush=True)
    return {"seconds": round(took["imports"] + took["isa"] + took["forward"], 3), **took}


def starts() -> dict[str, dict[str, Any]]:
    """Every kind of start once, from empty caches on."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        found = {name: start(caches, "regions") for name in ("cold", "warm")}
        for how in HOWS:
            start(caches, how, "--save")
            found[how] = start(caches, how)
        return found


def main() -> None:
    """The best of some repeats of each start: other programs of the machine only ever add time."""
    from bench import measure
    from tools import embed

    parser = measure.options(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker")
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    if chosen.worker:
        return worker(chosen.worker, chosen.save)
    runs = [starts() for _ in range(chosen.repeats)]
    best = {name: min((run[name] for run in runs), key=lambda took: took["seconds"]) for name in runs[0]}
    embed.use_comfyui()
    measure.write(chosen.json, {"threads": os.environ.get("OMP_NUM_THREADS"), "repeats": len(runs), "starts": best})


if __name__ == "__main__":
    main()
