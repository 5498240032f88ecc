"""A worker's first picture: alone, and in a fleet that shares its kernels through a Redis that works or does not.

python -m bench.fleet [--model sdxl|zimage|...] [--repeats N] [--json FILE]

Every run is a process of its own, and seconds are counted from the loaded model (``bench.process``). Takes a
redis-server (REDIS_SERVER names one) and Redis's client for Python; see ``fleet_tables.NAMES`` for the ways.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import fleet_tables, measure, mixed, process
from tools.paths import ROOT
from tools.redis_server import RedisServer, find, free_port

SIZE = (1024, 1024)
STEPS = 20
LIMIT = 300.0  # seconds per run
KEY = "for this machine only"


def worker(model: str) -> None:
    """Two pictures in this process: prints the conditions when the model is loaded, then the figures."""
    from tools import embed

    embed.use_comfyui()
    kernels = measure.Kernels().listen()
    embed.load_pack()
    import torch

    from bench import models, zoo

    patcher = mixed.prepare(zoo.make(model), "anyshape")
    torch.zeros(1, device=patcher.load_device)
    print(json.dumps({"conditions": measure.conditions()}), flush=True)
    took: dict[str, Any] = {}
    for seed, name in enumerate(("first_seconds", "second_seconds")):
        with measure.seconds(took, name):
            models.sample(patcher, *SIZE, steps=STEPS, seed=seed)
    print(json.dumps(took | counted(kernels)), flush=True)


def counted(kernels: measure.Kernels) -> dict[str, Any]:
    """Kernels compiled and found, what the shared cache counted, and the fallbacks that a user would see."""
    from anyshape.accel import stats

    if shared := sys.modules.get("anyshape_redis"):
        shared.remote().flush()
    now = stats.snapshot()
    found = {"compiled": kernels.compiled, "found": kernels.found}
    return found | {"fleet": now["fleet"], "fallbacks": now["fallbacks"]}


def run(model: str, disk: Path, port: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """(one worker's figures, its conditions); local caches in ``disk``, Redis at ``port`` or none."""
    command = [sys.executable, "-m", "bench.fleet", "--model", model, "--worker"]
    ended = process.follow(command, disk, LIMIT, shared_at(port))
    last = next((line for line in ended.lines if "first_seconds" in line), {"fleet": {}})
    conditions = next((line["conditions"] for line in ended.lines if "conditions" in line), {})
    return {"finished": ended.code == 0 and "first_seconds" in last, **last}, conditions


def shared_at(port: int | None) -> dict[str, str]:
    """The environment that an operator sets."""
    if port is None:
        return {}
    path = os.pathsep.join(filter(None, [str(ROOT / "fleet"), os.environ.get("PYTHONPATH", "")]))
    address = {"TRITON_REDIS_HOST": "127.0.0.1", "TRITON_REDIS_PORT": str(port)}
    return {"PYTHONPATH": path, "TRITON_CACHE_MANAGER": "anyshape_redis:Manager", "ANYSHAPE_FLEET_KEY": KEY} | address


def round_of(model: str, folder: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Each way once."""
    with RedisServer() as server:
        ways = {
            "alone": run(model, folder / "alone", None),
            "first": run(model, folder / "first", server.port),
            "joined": run(model, folder / "joined", server.port),
            "again": run(model, folder / "joined", server.port),
            "down": run(model, folder / "down", free_port()),
        }
        server.freeze()
        return ways | {"frozen": run(model, folder / "frozen", server.port)}


def main() -> None:
    """Prints a line a way and repeat, then writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sdxl", help="one of bench.zoo")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        return worker(chosen.model)
    if find() is None:
        parser.error("there is no redis-server; REDIS_SERVER=/path/to/redis-server names one")
    measure_all(chosen)


def measure_all(chosen: argparse.Namespace) -> None:
    """All repeats; what is measured is written after each."""
    result = {"model": chosen.model, "width": SIZE[0], "height": SIZE[1], "steps": STEPS, "repeats": 0, "runs": {}}
    conditions: dict[str, Any] = {}
    command = f"python -m bench.fleet --model {chosen.model} --repeats {chosen.repeats}"
    for _ in range(chosen.repeats):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for how, (figures, found) in round_of(chosen.model, Path(folder)).items():
                conditions = conditions or found
                result["runs"].setdefault(how, []).append(figures)
                print(how, " | ".join(fleet_tables.line("", [figures])[1:]), figures.get("fallbacks", ""), flush=True)
        result["repeats"] += 1
        measure.save(chosen.json, conditions | {"command": command} | result)


if __name__ == "__main__":
    main()
