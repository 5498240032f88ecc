"""The shared kernel cache on a real GPU: Compile Model in several processes, judged by eager and Triton's listener.

Needs a redis-server (REDIS_SERVER names one) and Redis's client for Python.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import redis_server
from tools.paths import ROOT
from tools.redis_server import RedisServer

redis = pytest.importorskip("redis", reason="the Python client of Redis (requirements-dev.txt)")
no_redis = pytest.mark.skipif(redis_server.find() is None, reason=redis_server.MISSING)
pytestmark = [pytest.mark.gpu, pytest.mark.fleet, no_redis]

TOLERANCE = 5e-3  # of fp16, as in test_gpu.py
FLEET = ROOT / "fleet"
SCRIPT = """
import json, sys
from tools import embed
embed.use_comfyui()
from bench import measure
kernels = measure.Kernels().listen()
embed.load_pack()
import torch
from bench import models
from tools.driving import compiled
from tools.on_gpu import SMALL, forward
from tools.oracles import error, shapes
patcher = models.unet("sdxl", torch.float16, **SMALL)
fast = compiled(patcher)
errors = [error(forward(fast, *size, seed=seed), forward(patcher, *size, seed=seed))
          for seed, size in enumerate([(512, 512), (544, 408), (512, 512), (544, 408)])]
shared = sys.modules.get("anyshape_redis")
if shared:
    shared.remote().flush()
from anyshape.accel import stats
now = stats.snapshot()
print(json.dumps({"errors": errors, "found": kernels.found, "compiled": kernels.compiled, "fleet": now["fleet"],
                  "fallbacks": now["fallbacks"], "states": sorted({shape["state"] for shape in shapes()})}))
"""


def run(folder: Path, port: int, manager: str = "anyshape_redis:Manager") -> dict[str, Any]:
    """A process with the local caches in ``folder``; its forwards are eager's."""
    path = os.pathsep.join([str(FLEET), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder)} | {
        "TRITON_CACHE_MANAGER": manager, "TRITON_REDIS_HOST": "127.0.0.1", "TRITON_REDIS_PORT": str(port),
        "ANYSHAPE_FLEET_KEY": "a long secret",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert max(found["errors"]) < TOLERANCE
    assert found["states"] == ["graph"] or manager != "anyshape_redis:Manager"
    return found


def test_the_second_worker_compiles_nothing(tmp_path):
    with RedisServer() as server:
        first, second = run(tmp_path / "first", server.port), run(tmp_path / "second", server.port)
        client = redis.Redis(port=server.port)
        names = [name for name in client.keys() if not name.endswith(b":names")]
        assert first["compiled"] >= 10 and len(names) >= first["compiled"]  # those that its helpers compiled, too
        assert second["compiled"] == 0 and second["found"] >= first["compiled"]
        assert second["fleet"]["misses"] == second["fleet"]["stored"] == 0
        assert first["fallbacks"] == second["fallbacks"] == []

        for name in names:
            value = bytearray(client.get(name))
            value[len(value) // 2] ^= 1
            client.set(name, bytes(value))
        damaged = run(tmp_path / "damaged", server.port)
        (fallback,) = damaged["fallbacks"]
        assert "damaged" in fallback["reason"] and fallback["count"] >= len(names)
        assert damaged["compiled"] == first["compiled"] and run(tmp_path / "healed", server.port)["compiled"] == 0

        server.freeze()
        frozen = run(tmp_path / "frozen", server.port)
        check_outage(frozen, first, "does not answer")
    check_outage(run(tmp_path / "down", server.port), first, "cannot be used")


def check_outage(answer: dict[str, Any], first: dict[str, Any], words: str) -> None:
    """As without the cache, but for less than a second and a counted reason."""
    (fallback,) = answer["fallbacks"]
    assert words in fallback["reason"] and fallback["count"] == 1
    assert answer["compiled"] == first["compiled"] and answer["fleet"]["waited_seconds"] < 1.0


def test_a_manager_that_does_not_exist(tmp_path):
    """Triton cannot run at all then; the picture is made, and the reason names what the operator wrote."""
    found = run(tmp_path, 1, manager="no_such_module:Manager")
    assert found["compiled"] == found["found"] == 0 and found["fleet"] == {}
    assert any("no_such_module" in fallback["reason"] for fallback in found["fallbacks"])
