"""Workers that share compiled kernels through a real Redis, and every way in which that Redis can fail them.

Kernels are ours, compiled for a card that need not be here; each is judged by its machine code.
"""

import json
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tools import redis_server
from tools.fleet_driving import FLEET, KERNELS, Listener, Worker, mute, not_redis, relay, trickle
from tools.redis_server import RedisServer

redis = pytest.importorskip("redis", reason="the Python client of Redis (requirements-dev.txt)")
pytestmark = pytest.mark.skipif(redis_server.find() is None, reason=redis_server.MISSING)

LIMIT = 1.0  # seconds that a Redis in trouble may cost in all
COMPILED = {"compiled": KERNELS[:2], "found": []}  # the launcher is no kernel
FOUND = {"compiled": [], "found": KERNELS[:2]}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """One process for many orders, each as if it had just begun."""
    running = Worker()
    yield running
    running.end()


@pytest.fixture(scope="module")
def right(worker, tmp_path_factory) -> dict[str, str]:
    """The machine code that Triton makes without any of this."""
    answer = worker(tmp_path_factory.mktemp("alone"), 1, env={"TRITON_CACHE_MANAGER": None})
    assert answer["compiled"] == KERNELS[:2] and answer["fleet"] == {}
    return answer["code"]


@pytest.fixture(scope="module")
def running() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def store(running) -> "redis.Redis":
    """A client of an empty Redis."""
    client = redis.Redis(port=running.port)
    client.flushall()
    return client


@pytest.fixture
def fresh(tmp_path) -> Callable[[], Path]:
    """Empty local caches."""
    count = iter(range(100))
    return lambda: tmp_path / f"local{next(count)}"


@pytest.fixture
def fleet(monkeypatch) -> Iterator[ModuleType]:
    """The package in this process, as an operator's PYTHONPATH makes it importable."""
    monkeypatch.syspath_prepend(str(FLEET))
    import anyshape_redis

    anyshape_redis.renew()
    yield anyshape_redis
    anyshape_redis.renew()


def values(store: "redis.Redis") -> list[bytes]:
    """The names of all values in Redis."""
    return sorted(name for name in store.keys() if not name.endswith(b":names"))


def events(answer: dict[str, Any]) -> dict[str, list[str]]:
    return {name: answer[name] for name in ("compiled", "found")}


def counted(answer: dict[str, Any]) -> tuple[int, ...]:
    return tuple(answer["fleet"][name] for name in ("hits", "misses", "skipped", "stored"))


# Sharing ----------------------------------------------------------------------------------------------------------


def test_the_second_process_compiles_nothing(right, store, running, fresh):
    first, second = Worker(), Worker()
    cold, warm = first(fresh(), running.port), second(fresh(), running.port)
    first.end(), second.end()
    assert events(cold) == COMPILED and counted(cold) == (0, 3, 0, 3)
    assert events(warm) == FOUND and counted(warm) == (3, 0, 0, 0)
    assert cold["code"] == warm["code"] == right
    assert cold["fallbacks"] == warm["fallbacks"] == []
    assert warm["fleet"]["bytes_read"] > 10_000 and cold["fleet"]["bytes_stored"] > warm["fleet"]["bytes_read"]


def test_what_lies_on_the_own_disk_is_not_asked_for(worker, store, running, fresh, right):
    folder = fresh()
    worker(folder, running.port)
    again = worker(folder, running.port)
    assert events(again) == FOUND and counted(again) == (0, 0, 0, 0) and again["code"] == right


def test_a_disk_filled_by_triton_alone_is_used_and_the_other_way_round(worker, running, store, fresh, right):
    alone, shared = fresh(), fresh()
    worker(alone, running.port, env={"TRITON_CACHE_MANAGER": None})
    worker(shared, running.port)
    for folder, manager in ((alone, "anyshape_redis:Manager"), (shared, None)):
        answer = worker(folder, running.port, env={"TRITON_CACHE_MANAGER": manager})
        assert events(answer) == FOUND and answer["code"] == right


def test_names_hold_what_the_values_depend_on(worker, store, running, fresh, fleet, monkeypatch):
    """Triton's own keys know card and compiler; ours add what its launchers depend on."""
    from anyshape_redis import client

    worker(fresh(), running.port)
    names = {name.decode() for name in values(store)}
    prefix = fleet.remote().prefix
    assert len(names) == 3 and all(name.startswith(f"{prefix}:") for name in names)
    for part in (client.triton.__version__, sys.implementation.cache_tag, platform.machine()):
        assert f":{part}:" in prefix
    worker(fresh(), running.port, capability=80)
    assert len(values(store)) == 5  # the launcher is the same
    monkeypatch.setattr(client.triton, "__version__", "0")
    assert fleet.remote().prefix == prefix != client.Remote().prefix


# Trouble ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def listening() -> Iterator[Callable[..., int]]:
    """Starts listeners; gives their ports."""
    started: list[Listener] = []

    def listen(handle: Callable[[socket.socket], None]) -> int:
        started.append(Listener(handle))
        return started[-1].port

    yield listen
    for each in started:
        each.close()


def check_fallback(answer: dict[str, Any], right: dict[str, str], words: str) -> None:
    """Right kernels, compiled here, soon, and a reason that says what to do."""
    assert events(answer) == COMPILED and answer["code"] == right
    (fallback,) = answer["fallbacks"]
    assert fallback["where"] == "shared kernel cache" and fallback["count"] == 1
    assert words in fallback["reason"] and "compiled here. Check" in fallback["reason"], fallback
    assert answer["fleet"]["waited_seconds"] < LIMIT and answer["fleet"]["state"] == "down"
    assert counted(answer)[0] == 0 and answer["fleet"]["skipped"] >= 2  # after the first nobody asks


def test_nobody_listens(worker, fresh, right):
    port = redis_server.free_port()
    check_fallback(worker(fresh(), port), right, f"127.0.0.1:{port} cannot be used (Error 111")


@pytest.mark.parametrize("handle", [mute, trickle])
def test_no_answer(worker, fresh, right, listening, handle):
    port = listening(handle)
    check_fallback(worker(fresh(), port), right, f"127.0.0.1:{port} does not answer")


def test_another_kind_of_server(worker, fresh, right, listening):
    check_fallback(worker(fresh(), listening(not_redis)), right, "cannot be used")


def test_a_connection_that_breaks_in_the_middle_of_a_value(worker, fresh, right, listening, running, store):
    worker(fresh(), running.port)
    check_fallback(
        worker(fresh(), listening(relay(running.port, {"seconds": 0.0}, limit=5000))), right, "cannot be used"
    )


def test_a_host_that_does_not_exist(worker, fresh, right):
    answer = worker(fresh(), 6379, env={"TRITON_REDIS_HOST": "no-such-host.invalid"})
    check_fallback(answer, right, "no-such-host.invalid:6379")


def test_a_frozen_redis(worker, fresh, right, running, store):
    worker(fresh(), running.port)
    running.freeze()
    try:
        check_fallback(worker(fresh(), running.port), right, "does not answer")
    finally:
        running.freeze(False)


def test_killed_and_started_again(worker, fresh, right):
    """In the middle of a worker's life; it comes back by itself, without a caller who waits for it."""
    with RedisServer() as server:
        worker(fresh(), server.port)
        folder, quick = fresh(), {"PAUSE": 0.2}
        first = worker(folder, server.port, KERNELS[:1], settings=quick)
        assert first["found"] == KERNELS[:1]
        server.kill()
        rest = worker(folder, server.port, KERNELS[1:], again=True)
        assert rest["compiled"] == KERNELS[1:2] and len(rest["fallbacks"]) == 1
        assert first["code"] | rest["code"] == right
        server.start()
        end = time.monotonic() + 10
        while (last := worker(fresh(), server.port, again=True))["fleet"]["state"] == "down":
            assert time.monotonic() < end
        last = worker(fresh(), server.port, again=True)
        assert last["code"] == right and last["fleet"]["stored"] > 0


# Values that must not be used -------------------------------------------------------------------------------------


def flipped(value: bytes) -> bytes:
    place = random.randrange(80, len(value))
    return value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :]


DAMAGE = {
    "garbage": (lambda value: os.urandom(300), "not written by this cache"),
    "empty of sense": (lambda value: b"{}", "not written by this cache"),
    "truncated": (lambda value: value[:-7], "damaged"),
    "cut to nothing": (lambda value: value[:50], "cut off"),
    "one bit": (flipped, "damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_values(worker, store, running, fresh, right, kind):
    worker(fresh(), running.port)
    damage, words = DAMAGE[kind]
    for name in values(store):
        store.set(name, damage(store.get(name)))
    refuses(worker(fresh(), running.port), right, words, 3)
    healed = worker(fresh(), running.port)
    assert events(healed) == FOUND and healed["fallbacks"] == []


def refuses(answer: dict[str, Any], right: dict[str, str], words: str, count: int) -> None:
    assert events(answer) == COMPILED and answer["code"] == right
    (fallback,) = answer["fallbacks"]
    assert fallback["count"] == count and words in fallback["reason"], fallback
    assert answer["fleet"]["rejected"] == {fallback["reason"]: count} and answer["fleet"]["state"] == "up"


def test_a_kernel_under_another_kernels_name(worker, store, running, fresh, right):
    worker(fresh(), running.port)
    one, other = (name for name in values(store) if name.endswith(b".json"))
    store.set(one, store.get(other)), store.delete(other)
    refuses(worker(fresh(), running.port), right, "damaged", 1)


def test_a_value_of_another_type(worker, store, running, fresh, right):
    worker(fresh(), running.port)
    for name in values(store):
        store.delete(name), store.rpush(name, b"garbage")
    check_fallback(worker(fresh(), running.port), right, "WRONGTYPE")


def test_only_who_knows_the_key_can_write(fleet, worker, store, running, fresh, right):
    """Values of others, written with another key or none, under the names that this worker asks for."""
    key = {"ANYSHAPE_FLEET_KEY": "the fleet's"}
    worker(fresh(), running.port, env=key)
    mine = values(store)
    assert events(worker(fresh(), running.port, env=key)) == FOUND
    assert events(worker(fresh(), running.port)) == COMPILED  # workers without the key have names of their own
    for other in ({}, {"ANYSHAPE_FLEET_KEY": "a guess"}):
        for name in mine:
            store.set(name, forged(name, store, other))
        refuses(worker(fresh(), running.port, env=key), right, "not signed with this worker's", 3)
    assert b"the fleet's" not in b"".join(store.get(name) for name in values(store))


def forged(name: bytes, store: "redis.Redis", env: dict[str, str]) -> bytes:
    """The value again, with a right checksum, but signed by somebody else."""
    from anyshape_redis.values import MAGIC, seal

    data = store.get(name)[len(MAGIC) + 64 :]
    return seal(name.decode(), data, env.get("ANYSHAPE_FLEET_KEY", "").encode())


@pytest.mark.parametrize("value", [b"", b"[1]\nx", b'{"a": 5}\nabc', b'{"../a": 3}\nabc', b'{"a": "b"}\n', b"\xff\n"])
def test_what_is_no_kernel(fleet, value):
    from anyshape_redis.values import Rejected, pack, unpack

    with pytest.raises(Rejected):
        unpack(value)
    assert unpack(pack({"a": b"\0\n", "b": b""})) == {"a": b"\0\n", "b": b""}


# Time -------------------------------------------------------------------------------------------------------------


def remote_at(port: int) -> Any:
    from anyshape_redis.client import Remote

    return Remote({"TRITON_REDIS_HOST": "127.0.0.1", "TRITON_REDIS_PORT": str(port)})


def ask(remote: Any, threads: int, count: int = 60) -> tuple[float, dict[str, Any]]:
    """(seconds, counters) of asking for ``count`` names, and of storing what is not there."""
    begun = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda n: remote.get(f"name{n}") or remote.put(f"name{n}", bytes(1000)), range(count)))
    return time.monotonic() - begun, remote.snapshot()


@pytest.mark.parametrize("threads", [1, 16])
@pytest.mark.parametrize("handle", [mute, trickle, None])
def test_trouble_costs_less_than_a_second(fleet, listening, handle, threads):
    port = listening(handle) if handle else redis_server.free_port()
    seconds, counts = ask(remote_at(port), threads)
    assert seconds < LIMIT and counts["waited_seconds"] < LIMIT
    assert counts["state"] == "down" and list(counts["outages"].values()) == [1]
    assert (counts["hits"], counts["misses"], counts["skipped"]) == (0, 0, 60)


def test_a_redis_that_becomes_slow(fleet, listening, running, store):
    """An answer in a quarter of a second is none that pays."""
    first = remote_at(running.port)
    ask(first, 1), first.flush()
    delay = {"seconds": 0.0}
    remote = remote_at(listening(relay(running.port, delay)))
    assert remote.get("name0") is not None
    delay["seconds"] = 0.25
    seconds, counts = ask(remote, 1)
    assert "too slowly" in next(iter(counts["outages"])) and counts["hits"] <= 10, counts
    assert seconds - counts["hits"] * 0.15 < LIMIT, counts  # a hit spares at least as much


@pytest.mark.parametrize("threads", [1, 16])
def test_a_quick_redis_is_never_given_up(fleet, running, store, threads):
    first = remote_at(running.port)
    cold = ask(first, threads)[1]
    first.flush()
    warm = ask(remote_at(running.port), threads)[1]
    assert (cold["misses"], warm["hits"]) == (60, 60) and cold["outages"] == warm["outages"] == {}


def test_a_busy_process_does_not_take_redis_for_slow(fleet, running, store):
    """Threads that compile hold Python's lock most of the time."""
    first, done = remote_at(running.port), threading.Event()
    ask(first, 8), first.flush()

    def compile_something() -> None:
        while not done.is_set():
            sum(range(10_000))

    threads = [threading.Thread(target=compile_something) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        counts = ask(remote_at(running.port), 8, count=20)[1]
    finally:
        done.set()
    assert counts["hits"] == 20 and counts["outages"] == {}, counts


def test_the_list_of_names_may_be_lost(worker, store, running, fresh, right):
    """Evicted, say: all is compiled and listed anew."""
    worker(fresh(), running.port)
    (listed,) = set(store.keys()) - set(values(store))
    store.delete(listed)
    again = worker(fresh(), running.port)
    assert events(again) == COMPILED and again["fallbacks"] == [] and again["code"] == right
    store.delete(values(store)[0])
    one = worker(fresh(), running.port)
    assert counted(one) == (2, 1, 0, 1) and one["code"] == right and one["fallbacks"] == []
    assert events(worker(fresh(), running.port)) == FOUND


def test_the_end_of_the_process_is_not_held_up(fleet, listening):
    remote = remote_at(listening(mute))
    remote.put("name", b"data")
    begun = time.monotonic()
    remote.flush()
    assert 0.3 < time.monotonic() - begun < LIMIT


# How an operator sets it up ---------------------------------------------------------------------------------------


def test_workers_that_may_only_read(worker, store, running, fresh, right):
    store.execute_command(
        "ACL", "SETUSER", "worker", "on", ">pass", "~anyshape:*", "+@connection", "+getrange", "+smembers"
    )
    url = {"ANYSHAPE_REDIS_URL": f"redis://worker:pass@127.0.0.1:{running.port}/0"}
    answer = worker(fresh(), 1, env=url)
    assert answer["code"] == right and answer["fallbacks"] == [] and store.keys() == []
    assert answer["fleet"]["state"] == "read-only" and answer["fleet"]["address"] == f"127.0.0.1:{running.port}"
    worker(fresh(), running.port)
    assert events(worker(fresh(), 1, env=url)) == FOUND


def test_a_wrong_password(worker, fresh, right):
    with RedisServer("--requirepass", "right") as server:
        check_fallback(worker(fresh(), server.port), right, "refuses this worker")
        url = {"ANYSHAPE_REDIS_URL": f"redis://:wrong-secret@127.0.0.1:{server.port}"}
        answer = worker(fresh(), 1, env=url)
        check_fallback(answer, right, "Check ANYSHAPE_REDIS_URL and the ACL")
        assert "wrong-secret" not in json.dumps(answer)


def test_a_full_redis_still_gives(worker, fresh, right):
    with RedisServer("--maxmemory-policy", "noeviction") as server:
        worker(fresh(), server.port, KERNELS[:1])
        redis.Redis(port=server.port).config_set("maxmemory", "1")
        answer = worker(fresh(), server.port)
        assert answer["found"] == KERNELS[:1] and answer["code"] == right
        assert answer["fleet"]["state"] == "read-only" and "allkeys-lru" in answer["fallbacks"][0]["reason"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(worker, fresh, tmp_path, right):
    paths = {"--tls-cert-file": tmp_path / "cert.pem", "--tls-key-file": tmp_path / "key.pem"}
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
            "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]  # fmt: skip
    make += ["-out", str(paths["--tls-cert-file"]), "-keyout", str(paths["--tls-key-file"])]
    subprocess.run(make, check=True, capture_output=True)
    port = redis_server.free_port()
    options = [str(part) for item in paths.items() for part in item]
    options += ["--tls-port", str(port), "--tls-auth-clients", "no", "--requirepass", "pass"]
    with RedisServer(*options):
        url = f"rediss://:pass@127.0.0.1:{port}/0?ssl_ca_certs={paths['--tls-cert-file']}"
        assert counted(worker(fresh(), 1, env={"ANYSHAPE_REDIS_URL": url})) == (0, 3, 0, 3)
        answer = worker(fresh(), 1, env={"ANYSHAPE_REDIS_URL": url})
        assert events(answer) == FOUND and answer["code"] == right
        untrusted = worker(fresh(), 1, env={"ANYSHAPE_REDIS_URL": url.partition("?")[0]})
        check_fallback(untrusted, right, "CERTIFICATE_VERIFY_FAILED")


@pytest.mark.parametrize("env", [{"ANYSHAPE_REDIS_URL": "http://secret@x"}, {"TRITON_REDIS_PORT": "many"}])
def test_settings_that_make_no_sense(fleet, env):
    from anyshape_redis.client import Remote

    remote = Remote(env)
    assert remote.get("name") is None and remote.put("name", b"data") is None
    (reason,) = remote.snapshot()["outages"]
    assert next(iter(env)) in reason and "secret" not in reason


def test_without_the_client(fleet, monkeypatch):
    from anyshape_redis import client

    monkeypatch.setattr(client, "redis", None)
    there = client.Remote({})
    assert there.get("name") is None and there.put("name", b"data") is None
    assert "pip install redis" in next(iter(there.snapshot()["outages"]))


# What the user sees -----------------------------------------------------------------------------------------------


def test_stats_and_report(fleet, pack, clean_stats, listening, monkeypatch):
    from anyshape.accel import stats
    from anyshape.nodes.report import report

    assert stats.snapshot()["fleet"] == {} and "Shared" not in report(stats.snapshot())
    port = listening(mute)
    monkeypatch.setenv("TRITON_REDIS_HOST", "127.0.0.1")
    monkeypatch.setenv("TRITON_REDIS_PORT", str(port))
    with stats.expect(fallbacks=1):
        fleet.remote().get("name"), fleet.remote().get("name")
    now = stats.snapshot()
    assert json.loads(json.dumps(now)) == now
    text = report(now)
    assert f"Shared kernel cache 127.0.0.1:{port} (down): 0 hits" in text
    assert f"shared kernel cache, 1 times: the shared kernel cache at 127.0.0.1:{port} does not answer" in text
    stats.STATS.clear()
    assert stats.snapshot()["fallbacks"] == [] and stats.snapshot()["fleet"]["skipped"] == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_begins_anew(fleet, running, store, monkeypatch):
    monkeypatch.setenv("TRITON_REDIS_HOST", "127.0.0.1")
    monkeypatch.setenv("TRITON_REDIS_PORT", str(running.port))
    fleet.remote().put("name", b"data")
    fleet.remote().flush()
    child = os.fork()
    if child == 0:
        os._exit(0 if fleet.snapshot() == {} and fleet.remote().get("name") == b"data" else 1)
    end = time.monotonic() + 10
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    assert done[1] == 0


# The benchmark ----------------------------------------------------------------------------------------------------


def test_the_benchmark_of_a_fleet(tmp_path, monkeypatch):
    """Its runs, their environments and its table; the workers themselves need a GPU."""
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
    monkeypatch.setattr(figures, "fleet_path", lambda model: path)
    assert "| one that joins: empty disk, filled Redis | 2.00 | 1.00 | 5 | 0 | 3.0 |" in fleet_tables.document()
