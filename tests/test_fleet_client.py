"""The shared kernel cache in this process, without a Redis: values that must not be used, servers in trouble, settings.

What needs a Redis and worker processes is in ``test_fleet``.
"""

import base64
import json
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from tools import redis_server
from tools.fleet_driving import (
    DAMAGE,
    KEY,
    LIMIT,
    ask,
    listeners,
    mute,
    not_redis,
    outage,
    package,
    remote_at,
    trickle,
)
from tools.oracles import expect

pytest.importorskip("redis", reason="the Python client of Redis (requirements-dev.txt)")
pytestmark = pytest.mark.fleet


@pytest.fixture
def fleet(monkeypatch) -> Iterator[ModuleType]:
    """The package in this process."""
    with package(monkeypatch) as imported:
        yield imported


@pytest.fixture
def listening() -> Iterator[Callable[..., int]]:
    with listeners() as listen:
        yield listen


def test_another_kind_of_server(fleet, listening):
    assert "cannot be used" in outage(remote_at(listening(not_redis)))


def test_a_host_that_does_not_exist(fleet):
    assert "no-such-host.invalid:6379" in outage(remote_at(6379, TRITON_REDIS_HOST="no-such-host.invalid"))


# Values that must not be used -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_values(fleet, kind):
    from anyshape_redis.signed import Rejected, seal, unseal

    damage, words = DAMAGE[kind]
    value = seal("name", b"data" * 50, KEY.encode())
    assert unseal("name", value, KEY.encode()) == b"data" * 50
    for name, wrong in (("name", damage(value)), ("another", value)):
        with pytest.raises(Rejected, match=words if name == "name" else "damaged"):
            unseal(name, wrong, KEY.encode())


NO_FILES = [
    b"", b"[1]\nx", b"null\n", b"3\n", b'"abc"\nabc', b"\xff\n", b"[" * 100_000, b'{"a":' * 100_000,
    b'{"a": 5}\nabc', b'{"a": "b"}\n', b'{"a": 3.0}\nabc', b'{"a": true}\nx', b'{"a": null}\n', b'{"a": [3]}\nabc',
    b'{"a": -1, "b": 4}\nabc', b'{"a": 1e400}\nabc', b'{"a": NaN}\nabc', b'{"a": ' + b"9" * 5000 + b"}\nabc",
    b'{"..": 3}\nabc', b'{".": 3}\nabc', b'{"": 3}\nabc', b'{"../a": 3}\nabc', b'{"/a": 3}\nabc', b'{"a\\\\b": 3}\nabc',
    b'{"C:a": 3}\nabc', b'{"a\\u0000": 3}\nabc', b'{"\\ud800": 3}\nabc', b'{".hidden": 3}\nabc', b'{"x/y": 3}\nabc',
    b'{"' + b"a" * 300 + b'": 3}\nabc', json.dumps(dict.fromkeys(map(str, range(1000)), 0)).encode() + b"\n",
]  # fmt: skip


@pytest.mark.parametrize("value", NO_FILES, ids=lambda value: repr(value[:16]))
def test_what_is_no_kernel(fleet, value):
    from anyshape_redis.signed import Rejected, pack, unpack

    with pytest.raises(Rejected):
        unpack(value)
    assert unpack(pack({"a": b"\0\n", "b": b""})) == {"a": b"\0\n", "b": b""}


HASH = "ab" * 32
TARGET = {"backend": "cuda", "arch": 90, "warp_size": 32}
SAID = {"hash": HASH, "target": TARGET, "name": "k", "num_warps": 4, "num_ctas": 1, "shared": 0}
GOOD = {"k.json": json.dumps(SAID).encode(), "k.cubin": b"\x7fELF\xff", "k.ptx": b"//"}
OTHER_KERNELS = {
    "another kernel": {"k.json": json.dumps(SAID | {"hash": "cd" * 32}).encode()},
    "no target": {"k.json": json.dumps(SAID | {"target": None}).encode()},
    "half a target": {"k.json": json.dumps(SAID | {"target": {"backend": "cuda"}}).encode()},
    "a backend of another type": {"k.json": json.dumps(SAID | {"target": TARGET | {"backend": []}}).encode()},
    "no name": {"k.json": json.dumps({"hash": HASH, "target": TARGET}).encode()},
    "fields of no tuple": {"k.json": json.dumps(SAID | {"class": 1}).encode()},
    "a backend that nobody knows": {"k.json": json.dumps(SAID | {"target": TARGET | {"backend": "x"}}).encode()},
    "metadata that are none": {"k.json": b"[]"},
    "no metadata": {"k.json": None},
    "deep metadata": {"k.json": b"[" * 100_000},
    "two of them": {"l.json": b"{}"},
    "no machine code": {"k.cubin": None},
    "text that is none": {"k.ptx": b"\xff"},
}


@pytest.mark.parametrize("kind", OTHER_KERNELS)
def test_files_that_triton_could_not_read(fleet, kind):
    from anyshape_redis.signed import Rejected, check_kernel

    key = base64.b32encode(bytes.fromhex(HASH)).decode().rstrip("=")
    assert check_kernel(GOOD, "k.json", key) == GOOD
    files = {name: content for name, content in (GOOD | OTHER_KERNELS[kind]).items() if content is not None}
    with pytest.raises(Rejected):
        check_kernel(files, "k.json", key)


# Time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 16])
@pytest.mark.parametrize("handle", [mute, trickle, None])
def test_trouble_costs_less_than_a_second(fleet, listening, handle, threads):
    port = listening(handle) if handle else redis_server.free_port()
    seconds, counts = ask(remote_at(port), threads)
    assert seconds < LIMIT and counts["waited_seconds"] < LIMIT
    assert counts["state"] == "down" and list(counts["outages"].values()) == [1]
    assert (counts["hits"], counts["misses"], counts["skipped"]) == (0, 0, 60)


def test_the_end_of_the_process_is_not_held_up(fleet, listening):
    remote = remote_at(listening(mute))
    remote.put("name", b"data")
    begun = time.monotonic()
    remote.flush()
    assert 0.3 < time.monotonic() - begun < LIMIT


# How an operator sets it up ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", [{"ANYSHAPE_REDIS_URL": "http://secret@x"}, {"TRITON_REDIS_PORT": "many"}])
def test_settings_that_make_no_sense(fleet, env):
    reason = outage(remote_at(6379, **env))
    assert next(iter(env)) in reason and "secret" not in reason


def test_a_socket_is_shown_by_its_name(fleet):
    remote = remote_at(1, ANYSHAPE_REDIS_URL="unix:///run/no such folder/redis.sock")
    assert "redis.sock cannot be used" in outage(remote) and "/run" not in json.dumps(remote.snapshot())


def test_without_the_client(fleet, monkeypatch):
    from anyshape_redis import client

    monkeypatch.setattr(client, "redis", None)
    assert "pip install redis" in outage(remote_at(6379))


# What the user sees -----------------------------------------------------------------------------------------------


def test_stats_and_report(fleet, pack, clean_stats, listening, monkeypatch):
    from anyshape.accel import stats
    from anyshape.nodes.report import report

    assert stats.snapshot()["fleet"] == {} and "Shared" not in report(stats.snapshot())
    port = listening(mute)
    monkeypatch.setenv("ANYSHAPE_FLEET_KEY", KEY)
    monkeypatch.setenv("TRITON_REDIS_HOST", "127.0.0.1")
    monkeypatch.setenv("TRITON_REDIS_PORT", str(port))
    with expect(fallbacks=1):
        fleet.remote().get("name"), fleet.remote().get("name")
    now = stats.snapshot()
    assert json.loads(json.dumps(now)) == now
    text = report(now)
    assert f"Shared kernel cache 127.0.0.1:{port} (down): 0 hits" in text
    assert f"shared kernel cache, once: the shared kernel cache at 127.0.0.1:{port} does not answer" in text
    stats.STATS.clear()
    assert stats.snapshot()["fallbacks"] == [] and stats.snapshot()["fleet"]["skipped"] == 2
