"""Python frames in one piece of memory, by the pages that the system has to map for them.

Each case runs in a thread, whose frames are apart: those of tests lie in one piece already.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tools.driving import SMALL_RUN, compiled, in_threads

resource = pytest.importorskip("resource")  # there is none on Windows

CALLS = 300  # of a function, at one depth of the stack
WHOSE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # the former on Linux alone


def test_no_call_maps_memory(pack):
    """Where CPython begins a piece of memory at a call, each repetition of that call maps it again."""
    from anyshape.accel.frames import together

    assert max(in_thread(lambda: together(faults_by_depth))) < CALLS // 10
    assert max(in_thread(lambda: together(lambda: together(faults_by_depth)))) < CALLS // 10
    if (3, 11) <= sys.version_info < (3, 13):  # later ones keep a piece
        assert max(in_thread(faults_by_depth)) >= CALLS


def test_sampling_runs_so(models, patcher):
    found = []
    note = lambda *_: found.append(max(faults_by_depth()))  # noqa: E731
    in_thread(lambda: models.sample(compiled(patcher), **SMALL_RUN, callback=note))
    assert found and max(found) < CALLS // 10


def test_a_vae_runs_so(models, monkeypatch):
    """A pack that replaced the forward of its model finds itself below as well."""
    from anyshape.accel.comfy.vae import compile_vae

    vae, found = models.vae(torch.float32, ch=32, num_res_blocks=1), []
    model = vae.first_stage_model
    own = model.decode

    def decode(*args, **kwargs):
        found.append(max(faults_by_depth()))
        return own(*args, **kwargs)

    fast, message = compile_vae(vae)
    monkeypatch.setattr(model, "decode", decode)
    in_thread(lambda: fast.decode(torch.randn(1, 4, 8, 8)))
    assert not message and found and max(found) < CALLS // 10


def test_an_error_goes_through_and_harms_no_later_run(pack):
    from anyshape.accel.frames import together

    def fails() -> None:
        raise ZeroDivisionError

    def twice() -> list[int]:
        with pytest.raises(ZeroDivisionError):
            together(fails)
        return together(faults_by_depth)

    assert max(in_thread(twice)) < CALLS // 10


def in_thread(work: Callable[[], Any]) -> Any:
    (found,) = in_threads(lambda _: work(), [None])
    return found


def faults_by_depth() -> list[int]:
    """Faults of ``CALLS`` calls each, below so many frames more."""
    return [below(depth) for depth in range(0, 400)]


def below(depth: int) -> int:
    if depth:
        return below(depth - 1)
    before = resource.getrusage(WHOSE).ru_minflt
    for _ in range(CALLS):
        larger(range(16))
    return resource.getrusage(WHOSE).ru_minflt - before


def larger(values: range) -> int:
    """Its frame takes more memory than one of ``below``, so at some depth it is the one that finds no room."""
    a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q = values
    return a
