"""The worker processes of benchmarks: what they say, how they end, which caches they share, what is written of them."""

import json
import sys
from pathlib import Path

import pytest

from bench import first_call, mixed, process
from tools import redis_server


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


def test_a_short_mixed_run(tmp_path, monkeypatch):
    """Fewer steps, of a model with the usual sizes, without second processes; the command says so."""
    seen = []

    def follow(command: list[str], *rest: object) -> process.Ended:
        seen.append(command[command.index("--steps") + 1])
        return process.Ended([{"seconds": 2.0}] * 12, 0)

    path = tmp_path / "mixed.json"
    monkeypatch.setattr(mixed.process, "follow", follow)
    arguments = ["--model", "qwen", "--how", "anyshape", "--steps", "4", "--cold-only", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["mixed", *arguments])
    mixed.main()
    result = json.loads(path.read_text())
    assert seen == ["4"] and result["steps"] == 4 and list(result["runs"]["anyshape"]) == ["cold"]
    assert result["runs"]["anyshape"]["cold"]["finished"] and "--steps 4 --cold-only" in result["command"]


def test_first_calls(tmp_path, monkeypatch):
    """Cold and warm share a cache that eager has not; the best of each kind is compared."""
    seconds, seen = iter([1.0, 9.0, 4.0, 2.0, 1.5, 3.0, 2.5]), []

    def follow(command: list[str], caches: Path, limit: float) -> process.Ended:
        seen.append((command[command.index("--mode") + 1], caches))
        return process.Ended([{"conditions": {"machine": "x", "command": "y"}}, {"seconds": next(seconds)}], 0)

    monkeypatch.setattr(first_call.process, "follow", follow)
    path = tmp_path / "first.json"
    monkeypatch.setattr(sys, "argv", ["first_call", "--model", "qwen", "--repeat", "2", "--json", str(path)])
    first_call.main()
    result = json.loads(path.read_text())
    assert result["machine"] == "x" and result["models"]["qwen"]["cold_seconds"] == 3.0 - 1.5
    assert result["models"]["qwen"]["warm_seconds"] == 2.0 - 1.5
    assert [mode for mode, _ in seen] == ["auto", *["off", "auto", "auto"] * 2]
    assert seen[2][1] == seen[3][1] != seen[5][1]


def test_first_calls_that_fail():
    runs = [{"eager": {"seconds": 2.0}, "cold": {"seconds": None, "exit_code": None}, "warm": {"seconds": 2.5}}]
    assert first_call.beyond(runs, "cold") is None and first_call.beyond(runs, "warm") == 0.5


@pytest.mark.fleet
@pytest.mark.skipif(redis_server.find() is None, reason=redis_server.MISSING)
def test_the_benchmark_of_a_fleet(tmp_path, monkeypatch):
    """Its runs, their environments and its table; the workers themselves need a GPU."""
    pytest.importorskip("redis", reason="the Python client of Redis (requirements-dev.txt)")
    from bench import figures, fleet, fleet_tables, process

    calls = []

    def follow(command: list[str], folder: Path, limit: float, more: dict[str, str]) -> process.Ended:
        calls.append((folder.name, more.get("TRITON_REDIS_PORT"), more.get("TRITON_CACHE_MANAGER")))
        done = {"first_seconds": 2.0, "second_seconds": 1.0, "compiled": 5, "found": 0, "fleet": {"bytes_read": 3e6}}
        conditions = {"machine": "x, y", "allocator": "native", "date": "2026-01-01", "command": "another"}
        conditions["versions"] = dict.fromkeys(("torch", "triton", "comfyui", "python"), "1")
        return process.Ended([{"conditions": conditions}, done], 0)

    path = tmp_path / "new" / "fleet-sdxl.json"
    monkeypatch.setattr(process, "follow", follow)
    monkeypatch.setattr(sys, "argv", ["fleet", "--repeats", "2", "--json", str(path)])
    fleet.main()
    assert [folder for folder, *_ in calls] == ["alone", "first", "joined", "joined", "down", "frozen"] * 2
    assert calls[0][1:] == (None, None) and all(manager == "anyshape_redis:Manager" for *_, manager in calls[1:6])
    ports = [port for _, port, _ in calls[1:6]]
    assert len(set(ports)) == 2 and ports[3] not in ports[:3] + ports[4:]
    result = json.loads(path.read_text())
    assert result["repeats"] == 2 and result["command"] == "python -m bench.fleet --model sdxl --repeats 2"
    assert set(result["runs"]) == set(fleet_tables.NAMES)
    monkeypatch.setattr(figures, "RESULTS", path.parent)
    assert "| a later worker: empty disk, filled Redis | 2.00 | 1.00 | 5 | 0 | 3.0 |" in fleet_tables.document()
