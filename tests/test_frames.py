"""Python frames in one piece of memory, by the pages that the system has to map for them."""

import sys

import pytest
import torch

from tools.driving import SMALL_RUN, compiled

resource = pytest.importorskip("resource")  # there is none on Windows

CALLS = 300  # of a function, at one depth of the stack


def test_no_call_maps_memory(pack):
    """Where CPython begins a piece of memory at a call, each repetition of that call maps it again."""
    from anyshape.accel.frames import together

    assert max(together(faults_by_depth)) < CALLS // 10
    if (3, 11) <= sys.version_info < (3, 13):  # later ones keep a piece
        assert max(faults_by_depth()) >= CALLS


def test_sampling_runs_so(models, patcher):
    found = []
    models.sample(compiled(patcher), **SMALL_RUN, callback=lambda *_: found.append(max(faults_by_depth())))
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
    fast.decode(torch.randn(1, 4, 8, 8))
    assert not message and found and max(found) < CALLS // 10


def test_what_it_runs_is_as_without_it(pack):
    from anyshape.accel.frames import together

    assert together(lambda: together(lambda: 3)) == 3
    with pytest.raises(ZeroDivisionError):
        together(lambda: 1 // 0)


def faults_by_depth() -> list[int]:
    """Faults of ``CALLS`` calls each, below so many frames more."""
    return [below(depth) for depth in range(0, 400)]


def below(depth: int) -> int:
    if depth:
        return below(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        small(before)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def small(value: int) -> int:
    return value
