"""The benchmarks' own machinery, on the CPU: worker processes, the clock, and a whole table of a small model."""

import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bench import mixed, process

SMALL = {"model_channels": 32, "context_dim": 64, "num_head_channels": 16, "num_heads": -1}


def follow(tmp_path: Path, script: str, limit: float = 60.0) -> process.Ended:
    return process.follow([sys.executable, "-c", script], tmp_path, limit)


def test_a_worker_that_ends(tmp_path):
    script = """
import json, os
print("a warning")
print(json.dumps({"loaded": True}))
print(json.dumps({"triton": os.environ["TRITON_CACHE_DIR"]}))
"""
    assert follow(tmp_path, script) == ([{"loaded": True}, {"triton": str(tmp_path / "triton")}], 0)


def test_a_worker_that_is_stopped_keeps_what_it_did(tmp_path):
    script = "import time; print('{\"loaded\": true}'); print('{\"seconds\": 1}', flush=True); time.sleep(600)"
    assert follow(tmp_path, script, limit=1.0) == ([{"loaded": True}, {"seconds": 1}], None)


def test_a_worker_that_fails(tmp_path):
    assert follow(tmp_path, "raise SystemExit(3)") == ([], 3)


def test_python_keeps_its_bytecode_between_workers(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setitem(process.BYTECODE, "PYTHONPYCACHEPREFIX", str(tmp_path))
    script = "import json, sys, wave; print(json.dumps({'writes': not sys.dont_write_bytecode, 'at': wave.__cached__}))"
    (line,), _ = follow(tmp_path, script)
    assert line["writes"] and Path(line["at"]).is_relative_to(tmp_path) and Path(line["at"]).exists()


def test_what_a_worker_left_running_does_not_hold_us_up(tmp_path):
    script = """
import subprocess, sys
print('{"loaded": true}', flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
"""
    assert follow(tmp_path, script, limit=30.0) == ([{"loaded": True}], 0)


@pytest.mark.parametrize("done, code, finished", [(12, 0, True), (1, None, False), (12, 1, False)])
def test_a_mixed_run(tmp_path, monkeypatch, done, code, finished):
    lines = [{"conditions": {"machine": "x"}}, *({"seconds": 2.0} for _ in range(done))]
    monkeypatch.setattr(mixed.process, "follow", lambda *arguments: process.Ended(lines, code))
    run, conditions = mixed.run("sdxl", "core", tmp_path, 85.0)
    assert conditions == {"machine": "x"}
    assert (run["finished"], run["exit_code"], run["seconds"]) == (finished, code, 2.0 * done)
    assert ("NOT finished" in mixed.told(run)) is not finished


def test_a_mixed_result_is_written_run_by_run(tmp_path, monkeypatch):
    lines = [{"conditions": {"machine": "x", "command": "y"}}, {"seconds": 2.0}]
    written = []

    def follow(command: list[str], *rest: object) -> process.Ended:
        written.append(json.loads(path.read_text())["runs"] if path.exists() else {})
        return process.Ended(lines, None)

    path = tmp_path / "new" / "mixed.json"
    monkeypatch.setattr(mixed.process, "follow", follow)
    monkeypatch.setattr(sys, "argv", ["mixed", "--how", "eager,core", "--limit", "9", "--json", str(path)])
    mixed.main()
    assert [list(runs) for runs in written] == [[], ["eager"], ["eager", "core"]]
    result = json.loads(path.read_text())
    assert result["machine"] == "x" and list(result["runs"]["core"]) == ["cold", "warm"]
    assert result["command"] == "python -m bench.mixed --model sdxl --how eager,core --limit 9"


@pytest.fixture
def forward(pack, monkeypatch) -> ModuleType:
    """``bench.forward`` with a small model, on which a size takes less than a second."""
    from bench import forward, models

    full = models.unet
    monkeypatch.setattr(models, "unet", lambda name: full(name, torch.float32, **SMALL))
    monkeypatch.setitem(forward.SIZES, "sd15", [(128, 128, 1), (192, 128, 2)])
    monkeypatch.setitem(forward.WITHOUT_CFG, "sd15", [(128, 128, 1)])
    return forward


def test_a_forward_table(forward):
    """``mode: off`` is eager against itself: no error, and every row with the batch that the model really saw."""
    starts = {"cold_seconds": 1e3, "warm_seconds": -1.0}
    found = forward.table("sd15", "off", starts)
    shapes = [(row["width"], row["height"], row["images"], row["rows"]) for row in found["rows"]]
    assert shapes == [(128, 128, 1, 2), (128, 128, 1, 1), (192, 128, 2, 4)]
    for row in found["rows"]:
        assert row["latent_error_after_2_steps"] == 0.0 and row["eager_ms"] > 0 and row["compiled_ms"] > 0
        assert row["break_even_images"]["warm"] in (0, None)  # None: no faster, which here is chance


def test_a_start(forward, capsys):
    forward.start_worker("sd15", "off")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert lines[0] == {"loaded": True} and abs(lines[1]["seconds"]) < 5


def test_both_starts(forward, tmp_path, monkeypatch):
    answers = iter([process.Ended([{"loaded": True}, {"seconds": 4.0}], 0), process.Ended([], None)])
    monkeypatch.setattr(forward.process, "follow", lambda *arguments: next(answers))
    starts = forward.both_starts("sd15", "auto", tmp_path)
    assert starts == {"width": 128, "height": 128, "images": 1, "cold_seconds": 4.0, "warm_seconds": None}


def test_a_controlnet_row(pack, monkeypatch):
    """Every way on a small model: the first is what the others are compared with, and they are near it."""
    from bench import controlnet, models
    from tools import driving

    for name in ("unet", "controlnet"):
        small = partial(getattr(models, name), dtype=torch.float32, **driving.UNETS["sdxl"])
        monkeypatch.setattr(models, name, small)
    monkeypatch.setattr(controlnet, "STEADY_STEPS", 3)
    found = controlnet.row(controlnet.ways(), (72, 64))
    assert found["neither_latent_error"] == 0.0 < found["both_latent_error"] < 1e-3
    assert min(found[f"{way}_ms"] for way in ("neither", "model", "control", "both")) > 0


def test_starts_share_what_they_should(tmp_path, monkeypatch):
    """The cold start fills the caches and the store; each of the next two finds one of them."""
    from bench import restart

    seen = []

    def follow(command: list[str], caches: Path, limit: float) -> process.Ended:
        base = Path(command[command.index("--base") + 1])
        seen.append((command[command.index("--worker") + 1], caches.name, base.name))
        return process.Ended([{"conditions": {"machine": "x"}}, {"seconds": 2.0}], 0)

    monkeypatch.setattr(restart.process, "follow", follow)
    path = tmp_path / "restart.json"
    monkeypatch.setattr(sys, "argv", ["restart", "--model", "sdxl", "--repeat", "2", "--json", str(path)])
    restart.main()
    places = [("eager", "full", "base"), ("cold", "full", "base"), ("store", "empty", "base"),
              ("caches", "full", "no store")]  # fmt: skip
    assert seen == [("eager", "caches", "base"), *places * 2]
    result = json.loads(path.read_text())
    assert result["machine"] == "x" and {start: len(runs) for start, runs in result["starts"].items()} == dict.fromkeys(
        restart.STARTS, 2
    )
    assert result["command"] == "python -m bench.restart --model sdxl --mode auto --steps 20 --repeat 2"
