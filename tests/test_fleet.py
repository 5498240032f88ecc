"""Workers that share compiled kernels through a real Redis, and every way in which that Redis can fail them.

Kernels are ours, compiled for a card that need not be here; each is judged by its machine code. One worker fills Redis
and its disk; tests begin with a copy of what it stored. What needs no Redis is in ``test_fleet_client``.
"""

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tools import fleet_driving, redis_server
from tools.fleet_driving import COMPILED, FOUND, KERNELS, KEY, ask, counted, events, fill, outage, remote_at, values
from tools.redis_server import RedisServer

redis = pytest.importorskip("redis", reason="the Python client of Redis (requirements-dev.txt)")
pytestmark = [pytest.mark.fleet, pytest.mark.skipif(redis_server.find() is None, reason=redis_server.MISSING)]


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[fleet_driving.Worker, fleet_driving.Worker]]:
    """Two processes, which start side by side."""
    with fleet_driving.started(2) as both:
        yield both


@pytest.fixture(scope="module")
def worker(workers) -> fleet_driving.Worker:
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
    with fleet_driving.package(monkeypatch) as imported:
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
    with fleet_driving.listeners() as listen:
        yield listen


def test_nobody_listens(worker, fresh, right):
    port = redis_server.free_port()
    fleet_driving.check_fallback(worker(fresh(), port), right, f"127.0.0.1:{port} cannot be used (Error 111")


def test_a_connection_that_breaks_in_the_middle_of_a_value(worker, fresh, right, listening, running, full):
    broken = listening(fleet_driving.relay(running.port, {"seconds": 0.0}, limit=5000))
    fleet_driving.check_fallback(worker(fresh(), broken), right, "cannot be used")


def test_a_frozen_redis(worker, fresh, right, running, full):
    running.freeze()
    try:
        fleet_driving.check_fallback(worker(fresh(), running.port), right, "does not answer")
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
        full.set(name, fleet_driving.DAMAGE[kind][0](full.get(name)))
    assert fleet_driving.refused(worker(fresh(), running.port), right) == 3
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
        full.set(name, fleet_driving.forged(name, stored[name], key))
    answer = worker(fresh(), running.port)
    assert fleet_driving.refused(answer, right) == 3
    assert "not signed with this worker's" in answer["fallbacks"][0]["reason"]
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
    assert fleet_driving.refused(answer, right) == 3
    assert {words for fallback in answer["fallbacks"] for words in WRONG if words in fallback["reason"]} == WRONG
    assert events(worker(fresh(), running.port)) == FOUND


WRONG = {"a value is not a kernel", "a value is not a launcher"}


# Time -------------------------------------------------------------------------------------------------------------


def test_a_redis_that_becomes_slow(fleet, listening, running, store):
    """An answer in a quarter of a second is none that pays."""
    first = remote_at(running.port)
    ask(first, 1), first.flush()
    delay = {"seconds": 0.0}
    remote = remote_at(listening(fleet_driving.relay(running.port, delay)))
    assert remote.get("name0") is not None
    delay["seconds"] = 0.25
    seconds, counts = ask(remote, 1)
    assert "too slowly" in next(iter(counts["outages"])) and counts["hits"] <= 10, counts
    assert seconds - counts["hits"] * 0.15 < fleet_driving.LIMIT, counts  # a hit spares at least as much


@pytest.mark.parametrize("threads", [1, 16])
def test_a_quick_redis_is_never_given_up(fleet, running, store, threads):
    first = remote_at(running.port)
    cold = ask(first, threads)[1]
    first.flush()
    warm = ask(remote_at(running.port), threads)[1]
    assert (cold["misses"], warm["hits"]) == (60, 60) and cold["outages"] == warm["outages"] == {}


def test_a_busy_process_does_not_take_redis_for_slow(fleet, running, store):
    """Threads that compile hold Python's lock most of the time."""
    first = remote_at(running.port)
    ask(first, 8), first.flush()
    with fleet_driving.busy(4):
        counts = ask(remote_at(running.port), 8, count=10)[1]
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
        fleet_driving.check_fallback(answer, right, "Check ANYSHAPE_REDIS_URL and the ACL")
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
    certificate, port = redis_server.certificate(tmp_path), redis_server.free_port()
    options = ["--tls-port", str(port), "--tls-auth-clients", "no", "--requirepass", "pass"]
    with RedisServer(*certificate, *options):
        url = f"rediss://:pass@127.0.0.1:{port}/0?ssl_ca_certs={tmp_path / 'cert.pem'}"
        assert counted(worker(fresh(), 1, env={"ANYSHAPE_REDIS_URL": url})) == (0, 3, 0, 3)
        answer = worker(fresh(), 1, env={"ANYSHAPE_REDIS_URL": url})
        assert events(answer) == FOUND and answer["code"] == right
        untrusted = worker(fresh(), 1, env={"ANYSHAPE_REDIS_URL": url.partition("?")[0]})
        fleet_driving.check_fallback(untrusted, right, "CERTIFICATE_VERIFY_FAILED")


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
    assert fleet_driving.exit_status(child) == 0
