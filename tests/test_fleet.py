"""Workers that share compiled kernels through a real Redis, and every way in which that Redis can fail them.

Kernels are ours, compiled for a card that need not be here; each is judged by its machine code. One worker fills Redis
and its disk; tests begin with a copy of what it stored. What needs no Redis is in ``test_fleet_client``.
"""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tools import redis_server
from tools.fleet_driving import (
    COMPILED,
    DAMAGE,
    FOUND,
    KERNELS,
    KEY,
    LIMIT,
    Worker,
    ask,
    check_fallback,
    counted,
    events,
    fill,
    forged,
    listeners,
    outage,
    package,
    refused,
    relay,
    remote_at,
    values,
)
from tools.redis_server import RedisServer

redis = pytest.importorskip("redis", reason="the Python client of Redis (requirements-dev.txt)")
pytestmark = [pytest.mark.fleet, pytest.mark.skipif(redis_server.find() is None, reason=redis_server.MISSING)]


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[Worker, Worker]]:
    """Two processes, which start side by side."""
    both = Worker(), Worker()
    yield both
    for each in both:
        each.end()


@pytest.fixture(scope="module")
def worker(workers) -> Worker:
    """One process for many orders, each as if it had just begun."""
    return workers[0]


@pytest.fixture(scope="module")
def alone(worker, tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A disk that Triton filled without any of this, and the machine code it made."""
    folder = tmp_path_factory.mktemp("alone")
    answer = worker(folder, 1, env={"TRITON_CACHE_MANAGER": None})
    assert answer["compiled"] == KERNELS[:2] and answer["fleet"] == {}
    return folder, answer["code"]


@pytest.fixture(scope="module")
def right(alone) -> dict[str, str]:
    """The machine code that is right."""
    return alone[1]


@pytest.fixture(scope="module")
def running() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def first(worker, running, tmp_path_factory) -> tuple[Path, dict[str, Any], dict[bytes, bytes]]:
    """The first worker of the fleet: its disk, its answer, and what it left in Redis."""
    folder, client = tmp_path_factory.mktemp("first"), redis.Redis(port=running.port)
    client.flushall()
    answer = worker(folder, running.port)
    return folder, answer, {name: client.dump(name) for name in client.keys()}


@pytest.fixture
def store(running) -> "redis.Redis":
    """A client of an empty Redis."""
    client = redis.Redis(port=running.port)
    client.flushall()
    return client


@pytest.fixture
def full(store, first) -> "redis.Redis":
    """A client of a Redis with what the first worker stored."""
    return fill(store, first[2])


@pytest.fixture
def fresh(tmp_path) -> Callable[[], Path]:
    """Empty local caches."""
    count = iter(range(100))
    return lambda: tmp_path / f"local{next(count)}"


@pytest.fixture
def fleet(monkeypatch) -> Iterator[ModuleType]:
    """The package in this process."""
    with package(monkeypatch) as imported:
        yield imported


# Sharing ----------------------------------------------------------------------------------------------------------


def test_the_second_process_compiles_nothing(workers, right, first, full, running, fresh):
    cold, warm = first[1], workers[1](fresh(), running.port)
    assert events(cold) == COMPILED and counted(cold) == (0, 3, 0, 3)
    assert events(warm) == FOUND and counted(warm) == (3, 0, 0, 0)
    assert cold["code"] == warm["code"] == right
    assert cold["fallbacks"] == warm["fallbacks"] == []
    assert warm["fleet"]["bytes_read"] > 10_000 and cold["fleet"]["bytes_stored"] >= warm["fleet"]["bytes_read"]


def test_what_lies_on_the_own_disk_is_not_asked_for(worker, store, first, running, right):
    again = worker(first[0], running.port)
    assert events(again) == FOUND and counted(again) == (0, 0, 0, 0) and again["code"] == right


def test_a_disk_filled_by_triton_alone_is_used_and_the_other_way_round(worker, running, store, alone, first):
    for folder, manager in ((alone[0], "anyshape_redis:Manager"), (first[0], None)):
        answer = worker(folder, running.port, env={"TRITON_CACHE_MANAGER": manager})
        assert events(answer) == FOUND and answer["code"] == alone[1]


def test_names_hold_what_the_values_depend_on(worker, full, running, fresh, fleet, monkeypatch):
    """Triton's own keys know card and compiler; ours add what its launchers depend on."""
    from anyshape_redis import client

    names = {name.decode() for name in values(full)}
    monkeypatch.setenv("ANYSHAPE_FLEET_KEY", KEY)
    prefix = fleet.remote().prefix
    assert len(names) == 3 and all(name.startswith(f"{prefix}:") for name in names)
    for part in (client.triton.__version__, sys.implementation.cache_tag, platform.machine()):
        assert f":{part}:" in prefix
    worker(fresh(), running.port, capability=80)
    assert len(values(full)) == 5  # the launcher is the same
    monkeypatch.setattr(client.triton, "__version__", "0")
    assert fleet.remote().prefix == prefix != client.Remote().prefix


# Trouble ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def listening() -> Iterator[Callable[..., int]]:
    with listeners() as listen:
        yield listen


def test_nobody_listens(worker, fresh, right):
    port = redis_server.free_port()
    check_fallback(worker(fresh(), port), right, f"127.0.0.1:{port} cannot be used (Error 111")


def test_a_connection_that_breaks_in_the_middle_of_a_value(worker, fresh, right, listening, running, full):
    broken = listening(relay(running.port, {"seconds": 0.0}, limit=5000))
    check_fallback(worker(fresh(), broken), right, "cannot be used")


def test_a_frozen_redis(worker, fresh, right, running, full):
    running.freeze()
    try:
        check_fallback(worker(fresh(), running.port), right, "does not answer")
    finally:
        running.freeze(False)


def test_killed_and_started_again(worker, fresh, right, first):
    """In the middle of a worker's life; it comes back by itself, without a caller who waits for it."""
    with RedisServer() as server:
        fill(redis.Redis(port=server.port), first[2])
        folder, quick = fresh(), {"PAUSE": 0.2}
        before = worker(folder, server.port, KERNELS[:1], settings=quick)
        assert before["found"] == KERNELS[:1]
        server.kill()
        rest = worker(folder, server.port, KERNELS[1:], again=True)
        assert rest["compiled"] == KERNELS[1:2] and len(rest["fallbacks"]) == 1
        assert before["code"] | rest["code"] == right
        server.start()
        end = time.monotonic() + 10
        while (last := worker(fresh(), server.port, again=True))["fleet"]["state"] == "down":
            assert time.monotonic() < end
        last = worker(fresh(), server.port, again=True)
        assert last["code"] == right and last["fleet"]["stored"] > 0


# Values that must not be used -------------------------------------------------------------------------------------


def test_what_is_damaged_is_compiled_here_and_healed(worker, full, running, fresh, right):
    for name, kind in zip(values(full), ("garbage", "truncated", "one bit"), strict=True):
        full.set(name, DAMAGE[kind][0](full.get(name)))
    assert refused(worker(fresh(), running.port), right) == 3
    healed = worker(fresh(), running.port)
    assert events(healed) == FOUND and healed["fallbacks"] == []


def test_a_value_of_another_type(fleet, store, running):
    remote = remote_at(running.port)
    store.sadd(f"{remote.prefix}:names", "name"), store.rpush(f"{remote.prefix}:name", b"garbage")
    assert "WRONGTYPE" in outage(remote)


def test_only_who_knows_the_key_can_write(worker, full, running, fresh, right, fleet):
    """Values of others, written with another key or none, under the names that this worker asks for."""
    stored = {name: full.get(name) for name in values(full)}
    assert remote_at(running.port, ANYSHAPE_FLEET_KEY="a guess").prefix != remote_at(running.port).prefix
    for name, key in zip(stored, ("", "a guess", "another"), strict=True):
        full.set(name, forged(name, stored[name], key))
    answer = worker(fresh(), running.port)
    assert refused(answer, right) == 3 and "not signed with this worker's" in answer["fallbacks"][0]["reason"]
    assert KEY.encode() not in b"".join(stored.values())


def test_without_a_key_nothing_is_asked_for(worker, full, running, fresh, right, fleet):
    answer = worker(fresh(), running.port, env={"ANYSHAPE_FLEET_KEY": None})
    assert events(answer) == COMPILED and answer["code"] == right and answer["fleet"]["stored"] == 0
    assert "not used without ANYSHAPE_FLEET_KEY" in answer["fallbacks"][0]["reason"]
    assert "not used without" in outage(remote_at(running.port, ANYSHAPE_FLEET_KEY="", ANYSHAPE_FLEET_UNSIGNED="yes"))
    unsigned = {"ANYSHAPE_FLEET_KEY": "", "ANYSHAPE_FLEET_UNSIGNED": "1"}
    remote = remote_at(running.port, **unsigned)
    remote.put("name", b"data"), remote.flush()
    assert remote_at(running.port, **unsigned).get("name") == b"data" and not remote.snapshot()["signed"]


def test_wrong_values_that_were_signed_cost_one_compilation(worker, full, running, fresh, right, fleet):
    """A bug of a writer, or somebody who has the key: two kernels and a launcher."""
    from anyshape_redis.signed import seal

    kernels = [name for name in values(full) if name.endswith(b".json")]
    (module,) = set(values(full)) - set(kernels)
    for name, data in ((kernels[0], b'{"a": 3.0}\nabc'), (kernels[1], b'{"..": 3}\nabc'), (module, b"no module")):
        full.set(name, seal(name.decode(), data, KEY.encode()))
    answer = worker(fresh(), running.port)
    assert refused(answer, right) == 3
    assert {words for fallback in answer["fallbacks"] for words in WRONG if words in fallback["reason"]} == WRONG
    assert events(worker(fresh(), running.port)) == FOUND


WRONG = {"a value is not a kernel", "a value is not a launcher"}


# Time -------------------------------------------------------------------------------------------------------------


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

    threads = [threading.Thread(target=compile_something) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        counts = ask(remote_at(running.port), 8, count=10)[1]
    finally:
        done.set()
    assert counts["hits"] == 10 and counts["outages"] == {}, counts


def test_the_list_of_names_may_be_lost(worker, full, running, fresh, right):
    """Evicted, say: all is compiled and listed again."""
    (listed,) = set(full.keys()) - set(values(full))
    full.delete(listed)
    again = worker(fresh(), running.port)
    assert events(again) == COMPILED and again["fallbacks"] == [] and again["code"] == right
    full.delete(values(full)[0])
    one = worker(fresh(), running.port)
    assert counted(one) == (2, 1, 0, 1) and one["code"] == right and one["fallbacks"] == []
    assert events(worker(fresh(), running.port)) == FOUND


# How an operator sets it up ---------------------------------------------------------------------------------------


def test_workers_that_may_only_read(worker, store, first, running, fresh, right):
    store.execute_command(
        "ACL", "SETUSER", "worker", "on", ">pass", "~anyshape:*", "+@connection", "+getrange", "+smembers"
    )
    url = {"ANYSHAPE_REDIS_URL": f"redis://worker:pass@127.0.0.1:{running.port}/0"}
    answer = worker(fresh(), 1, env=url)
    assert answer["code"] == right and answer["fallbacks"] == [] and store.keys() == []
    assert answer["fleet"]["state"] == "read-only" and answer["fleet"]["address"] == f"127.0.0.1:{running.port}"
    fill(store, first[2])
    assert events(worker(fresh(), 1, env=url)) == FOUND


def test_a_wrong_password(worker, fresh, right, fleet):
    with RedisServer("--requirepass", "right") as server:
        assert "refuses this worker" in outage(remote_at(server.port))
        url = {"ANYSHAPE_REDIS_URL": f"redis://:wrong-secret@127.0.0.1:{server.port}"}
        answer = worker(fresh(), 1, env=url)
        check_fallback(answer, right, "Check ANYSHAPE_REDIS_URL and the ACL")
        assert "wrong-secret" not in json.dumps(answer)


def test_a_full_redis_still_gives(worker, fresh, right, first):
    with RedisServer("--maxmemory-policy", "noeviction") as server:
        client = fill(redis.Redis(port=server.port), first[2])
        others = [name for name in values(client) if KERNELS[0].encode() not in name]
        client.delete(*others)
        client.config_set("maxmemory", "1")
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_starts_from_scratch(fleet, running, store, monkeypatch):
    monkeypatch.setenv("ANYSHAPE_FLEET_KEY", KEY)
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
    assert "| one that joins: empty disk, filled Redis | 2.00 | 1.00 | 5 | 0 | 3.0 |" in fleet_tables.document()
