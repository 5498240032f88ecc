"""Kernels are compiled by processes beside this one. All real: Triton, its cache on disk, machine code for an H100.

Where kernels are interpreted, all of it runs in another process, in which they are not.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

triton = pytest.importorskip("triton")

from anyshape.accel.kernels import helpers  # noqa: E402
from anyshape.accel.kernels.from_text import module_of  # noqa: E402
from anyshape.accel.kernels.helpers import Helpers  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tools import embed  # noqa: E402

TARGET = GPUTarget("cuda", 90, 32)
TEXT = """import triton
import triton.language as tl


@triton.jit
def double{n}(x, out, BC: tl.constexpr):
    i = tl.arange(0, BC)
    tl.store(out + i, tl.load(x + i) * {n}.5)
"""
TYPES = {"x": "*fp32", "out": "*fp32", "BC": "constexpr"}
compiling = pytest.mark.skipif(knobs.runtime.interpret, reason="runs in a process in which nothing is interpreted")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of Triton's, for helpers too."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path


@pytest.fixture
def heard(monkeypatch):
    """For each kernel of this process: whether it was found in the cache."""
    heard = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda cache_hit, **kernel: heard.append(cache_hit))
    return heard


@pytest.fixture
def started(monkeypatch):
    """The processes that were started. Two helpers may be, and one kernel at a time is compiled here."""
    started, start = [], helpers._started
    monkeypatch.setattr(helpers, "CORES_LEFT", helpers._cores() - 2)
    monkeypatch.setattr(helpers, "HERE", 1)
    monkeypatch.setattr(helpers, "_started", lambda: started.append(start()) or started[-1])
    return started


def sources(numbers, text=TEXT):
    made = [getattr(module_of(text.format(n=n), f"double{n}"), f"double{n}") for n in numbers]
    return [ASTSource(kernel, TYPES, {(2,): 64}) for kernel in made]


def compiled(used, sources):
    """All of them at the same time, as ``compile_all`` does it."""
    together = Barrier(len(sources))
    helpers._hash()  # takes a second at first: each thread would take its own, and come when the one before is done

    def one(source):
        together.wait(60)
        return used.compile(source, TARGET, {"num_warps": 4})

    with used.running(), ThreadPoolExecutor(len(sources)) as pool:
        return list(pool.map(one, sources))


@pytest.mark.skipif(not knobs.runtime.interpret, reason="this process interprets nothing")
def test_in_a_process_that_compiles():
    files = [__file__, str(Path(__file__).with_name("test_loaded.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=embed.ROOT, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True)
    assert done.returncode == 0, done.stdout[-4000:].decode()


@compiling
def test_what_helpers_compile_is_found_here(started, heard):
    used = Helpers()
    kernels = compiled(used, sources(range(6)))
    assert all(kernel.asm["cubin"] and kernel.name == f"double{n}" for n, kernel in enumerate(kernels))
    assert heard.count(True) == used.compiled > 1 and heard.count(False) == 6 - used.compiled > 0
    assert len(started) == 2
    assert [process.wait(20) for process in started] == [0, 0], "they end with the body"


@compiling
def test_kernels_by_hand(started, heard, monkeypatch):
    from tools import compile_kernels

    monkeypatch.setattr(helpers, "HERE", 0)
    used, kernels = Helpers(), compile_kernels.KERNELS  # one takes a function of another module
    assert all(compiled(used, [compile_kernels.source(kernel) for kernel in kernels]))
    assert used.compiled == len(kernels) == len(heard) and all(heard)


@compiling
def test_nothing_starts_for_few_kernels_or_known_ones(started, heard):
    (only,) = compiled(Helpers(), sources(range(1)))
    assert only.asm["cubin"] and not started
    six = sources(range(6))
    for source in six:
        triton.compile(source, TARGET, {"num_warps": 4})
    del heard[:]
    compiled(Helpers(), six)
    assert heard == [True] * 6 and not started


@compiling
def test_nothing_starts_on_few_cores(started, heard, monkeypatch):
    monkeypatch.setattr(helpers, "CORES_LEFT", helpers._cores())
    compiled(Helpers(), sources(range(3)))
    assert heard == [False] * 3 and not started


@compiling
@pytest.mark.parametrize("program", ["raise SystemExit(1)", "import time\ntime.sleep(60)", "print('hello')"])
def test_a_helper_that_fails(program, started, heard, cache, monkeypatch):
    path = cache / "helper.py"
    path.write_text(program)
    monkeypatch.setattr(helpers, "PROGRAM", path)
    monkeypatch.setattr(helpers, "LIMIT", 0.5)
    used, begun = Helpers(), time.monotonic()
    kernels = compiled(used, sources(range(4)))
    assert all(kernel.asm["cubin"] for kernel in kernels) and used.compiled == 0
    assert len(started) == 2 and time.monotonic() - begun < 30


@compiling
def test_a_helper_that_cannot_start(started, heard, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(Path(sys.executable).with_name("no-such-python")))
    compiled(Helpers(), sources(range(3)))
    assert heard == [False] * 3


@compiling
def test_a_kernel_that_does_not_compile_says_why(started):
    (bad,) = sources([7], TEXT.replace("arange(0, BC)", "arange(0, BC + 1)"))
    good = sources(range(3))
    with pytest.raises(triton.CompilationError, match="arange's range must be a power of 2"):
        compiled(Helpers(), [*good, bad])


@compiling
def test_where_its_cache_lies_elsewhere_helpers_are_given_up(started, heard, cache, monkeypatch):
    path, real = cache / "helper.py", helpers.PROGRAM
    path.write_text(
        f"import os, runpy, sys\nos.environ['TRITON_CACHE_DIR'] = {str(cache / 'other')!r}\n"
        f"sys.path.insert(0, {str(real.parent)!r})\nrunpy.run_path({str(real)!r}, run_name='__main__')"
    )
    monkeypatch.setattr(helpers, "PROGRAM", path)
    used = Helpers()
    assert all(kernel.asm["cubin"] for kernel in compiled(used, sources(range(4))))
    assert heard == [False] * 4 and used.compiled == 0
    before = len(started)
    compiled(used, sources(range(4, 7)))
    assert len(started) == before > 0


@compiling
def test_the_seat_of_a_helper_that_has_ended_is_ours(started):
    closed, broken = helpers._Seats(2), helpers._Seats(2)
    closed.close()
    with broken.taken() as ours, broken.taken() as other:
        with broken.taken() as third:
            raise BrokenPipeError(f"of {third}")
    for seats, left in ((closed, 0), (broken, 1)):
        with seats.taken() as one, seats.taken() as two, seats.taken() as three:
            assert [one, two, three].count(None) == 3 - left and not started
    assert ours is None and other is not None
    with pytest.raises(ValueError, match="ours"), closed.taken():
        raise ValueError("ours")
    with closed.taken() as again:
        assert again is None
